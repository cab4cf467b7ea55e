"""
Laplace in one callback, with out-of-distribution data
======================================================

Linearized Laplace turns a trained network into a Gaussian over its weights. ``FitLaplace`` fits it when training ends:
one line in the list of callbacks. TorchUncertainty's routine then tests the predictive with its own metrics, and scores
how well it tells what it has never seen.
"""

# %%
# Data
# ----
# Digits 0 to 7 are the task, 8 and 9 are out of distribution. TorchUncertainty's routine reads the test data and the
# out-of-distribution data as two loaders. Only 200 images are for training, so that the network becomes too certain of
# itself; 200 more choose the temperature of the posterior.

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine

from tu_symmetry import FitLaplace
from tu_symmetry.routines import LaplacePostProcessing


class KnownAndNew(LightningDataModule):
    """Digits below 8 for training and test; 8 and 9 as what is new."""

    def __init__(self) -> None:
        super().__init__()
        digits = load_digits()
        images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        known = (labels < 8).nonzero().squeeze(-1)
        known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
        self.training = TensorDataset(images[known[:200]], labels[known[:200]])
        self.validation = TensorDataset(images[known[200:400]], labels[known[200:400]])
        self.testing = TensorDataset(images[known[400:]], labels[known[400:]])
        self.new = TensorDataset(images[labels >= 8], labels[labels >= 8])
        self.eval_ood = True

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=50, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=200)

    def postprocess_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def test_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.testing, batch_size=200), DataLoader(self.new, batch_size=200)]

    def get_indices(self) -> dict[str, list[int]]:
        return {"test": [0], "test_ood": [1], "near_ood": [], "far_ood": [], "shift": [], "val_ood": []}


# %%
# Train, and fit Laplace
# ----------------------
# The routine takes the approximation as its post-processing, and its scores for out-of-distribution detection from the
# predictive. ``calibrate`` chooses the temperature of the posterior on the validation data: at 0 it is the network
# itself, so that the predictive is never worse there. On a task as easy as this one the posterior of the evidence is
# far too wide by itself: ``LaplaceHurtsWarning`` says so, and which temperature predictions have from then on.

seed_everything(0, verbose=False)
data = KnownAndNew()
network = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
routine = ClassificationRoutine(
    network,
    num_classes=8,
    loss=nn.CrossEntropyLoss(),
    optim_recipe=torch.optim.Adam(network.parameters(), lr=1e-2),
    post_processing=LaplacePostProcessing(),
    eval_ood=True,
    ood_criterion="post_processing",
)
laplace = FitLaplace(prior="per_group", evaluate_at="map", calibrate=True)
quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logger = CSVLogger("runs")
trainer = Trainer(max_epochs=60, accelerator="cpu", callbacks=[laplace], logger=logger, log_every_n_steps=4, **quiet)
trainer.fit(routine, data)

# %%
# What the evidence has chosen
# ----------------------------
# A prior precision for each group of weights that the normalization makes scale-free, and one for the rest.

print(f"log evidence: {float(laplace.laplace.log_marginal_likelihood()):.1f} nats")
for group in laplace.laplace.report():
    print(f"{group.name}: precision {group.precision:.3g}, weights that the data determine {group.gamma:.1f}")

# %%
# The predictive, on known and on new digits
# ------------------------------------------
# Probabilities are less certain where the data say little. ``predictive`` takes inputs; ``trainer.test(routine, data)``
# reports accuracy, calibration and the area under the curve of out-of-distribution detection.

known, new = data.testing.tensors[0], data.new.tensors[0]
routine.eval()
with torch.no_grad():
    for name, images in {"known digits": known, "new digits": new}.items():
        plain = network(images).softmax(-1).amax(-1).mean()
        bayes = laplace.laplace.predictive(images, link_approx="probit").amax(-1).mean()
        print(f"{name}: mean confidence of the network {plain:.3f}, of Laplace {bayes:.3f}")

# %%
# How often the network and its Laplace approximation are how sure of a digit that neither has seen.

with torch.no_grad():
    sure = {
        "network": network(new).softmax(-1).amax(-1),
        "Laplace": laplace.laplace.predictive(new, link_approx="probit").amax(-1),
    }
figure, axes = plt.subplots(figsize=(6, 3.5))
axes.hist([c.numpy() for c in sure.values()], bins=20, range=(0, 1), label=list(sure))
axes.set(xlabel="largest probability on new digits", ylabel="number of images")
axes.legend()
figure.tight_layout()

# %%
# The scores of TorchUncertainty's routine.

results = trainer.test(routine, data, verbose=False)[0]
for key in sorted(results):
    if key.startswith(("test/cls", "test/post", "ood")):
        print(f"{key:28} {results[key]:.4f}")
