"""
Laplace in one callback, with out-of-distribution data
======================================================

Linearized Laplace turns a trained network into a Gaussian over its weights. ``FitLaplace`` fits it when training ends:
one line in the list of callbacks. This page shows two things that one can ask of it, probabilities and a score for what
the network has never seen, each where it helps and where it does not.
"""

# %%
# Data
# ----
# Digits 0 to 7 are the task, 8 and 9 are out of distribution. TorchUncertainty's routine reads the test data and the
# out-of-distribution data as two loaders. Only 200 images are for training, so that the network becomes too certain of
# itself; 200 more choose how far to trust the network and the posterior.

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine
from torchmetrics.functional.classification import binary_auroc

from tu_symmetry import FitLaplace
from tu_symmetry.routines import EpistemicCriterion, LaplacePostProcessing


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
# Without options ``FitLaplace`` takes a quarter of the training's time. It says what it fitted, what each approximation
# gains on the validation data, and which it keeps. ``EpistemicCriterion`` has TorchUncertainty's routine score
# out-of-distribution data by what the posterior leaves open.

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
    ood_criterion=EpistemicCriterion(),
)
callback = FitLaplace()
quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logger = CSVLogger("runs")
trainer = Trainer(max_epochs=60, accelerator="cpu", callbacks=[callback], logger=logger, log_every_n_steps=4, **quiet)
trainer.fit(routine, data)
laplace = callback.laplace

# %%
# Probabilities
# -------------
# ``predictive`` gives probabilities. On held-out data they are compared with the network, and with the network whose
# logits are scaled by the one number that is best there (temperature scaling), which costs next to nothing. This
# network is calibrated already, so that nothing is better than the network itself, and ``FitLaplace`` says so: the
# temperature of the posterior is 0. The posterior as the evidence chose it would make the probabilities worse.

print(callback.calibration)

# %%
# What the network has never seen
# -------------------------------
# ``epistemic`` is a score and no probability: the mutual information of label and weights, by the posterior of the
# evidence, whatever the temperature. Against it stands the entropy of the network's own probabilities. New digits look
# like those that the network knows, and the network is unsure of them: its entropy is the better score. Inverted and
# turned images are far from all that it was trained on; the network is sure of them nevertheless, and only the
# posterior says that it should not be.

routine.eval()
known = data.testing.tensors[0]
kinds = {
    "new digits": data.new.tensors[0],
    "inverted digits": 1 - known,
    "digits turned by 90°": known.view(-1, 8, 8).rot90(dims=(1, 2)).reshape(-1, 64),
}


def entropy(inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.special.entr(network(inputs).softmax(-1)).sum(-1)


def area(score, inputs: torch.Tensor) -> float:
    """Share of pairs of a known and an unknown image in which the unknown one has the higher score."""
    scores = torch.cat([score(known), score(inputs)])
    ranks = scores.double().argsort().argsort() / len(scores)
    return float(binary_auroc(ranks, (torch.arange(len(scores)) >= len(known)).long()))


for name, inputs in kinds.items():
    plain, bayes = area(entropy, inputs), area(laplace.epistemic, inputs)
    print(f"{name}: AUROC {plain:.2f} by the network's entropy, {bayes:.2f} by Laplace")

# %%
# The two scores, of known digits and of each kind. A score tells a kind apart where its curve lies right of the black
# one.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
for axis, (title, score) in zip(axes, {"network": entropy, "Laplace": laplace.epistemic}.items(), strict=True):
    for name, inputs in {"known digits": known, **kinds}.items():
        values, color = score(inputs).sort().values, "black" if name == "known digits" else None
        axis.plot(values, torch.linspace(0, 1, len(values)), color=color, label=name)
    axis.set(xlabel=("entropy" if title == "network" else "mutual information") + " (nats)", title=title)
axes[0].set(ylabel="share of images below")
axes[1].legend()
figure.tight_layout()

# %%
# The scores of TorchUncertainty's routine
# ----------------------------------------
# ``test/cls`` is the network, ``test/post`` the calibrated predictive, and ``ood`` is judged by the epistemic score.

results = trainer.test(routine, data, verbose=False)[0]
for key in sorted(results):
    if key.startswith(("test/cls", "test/post", "ood")):
        print(f"{key:28} {results[key]:.4f}")
