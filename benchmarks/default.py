"""What ``FitLaplace()`` without options costs, as a share of the training, and what it gives."""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from benchmarks._measure import in_own_process
from benchmarks._report import Goal, Section, Settings
from benchmarks.comparison import LARGER
from benchmarks.joint import images
from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.callbacks.laplace_choice import METHODS
from tu_symmetry.reporting.grid import Grid

_EPOCHS, _SEEDS, _TRAIN, _TEST, _HELD_OUT = (8, 40, 150), 3, 1000, 4000, 500
_RESNET = "ResNet-20"
_SHARE, _SAME = 0.25, 0.01  # of the training; nats that count as equal, with 500 held-out samples
_OURS, _PEER, _TU = "FitLaplace()", "laplace-torch", "TorchUncertainty's LaplaceApprox"
Record = dict[str, Any]


def run(settings: Settings) -> Section:
    """Every network in a process of its own; a quick run stays in this process."""
    cases = [(name, epochs, seed) for seed in range(_SEEDS) for name in LARGER for epochs in _EPOCHS]
    records: list[Record] = []
    for name, epochs, seed in [(next(iter(LARGER)), 1, 0)] if settings.quick else [*cases, (_RESNET, 10, 0)]:
        settings.say(f"{name.split(',')[0]}, {epochs} epochs, seed {seed}")
        if settings.quick:
            records.append(measure(name, epochs, seed, train=100, test=200, held_out=100))
        else:
            arguments = (name, str(epochs), str(seed), str(torch.get_num_threads()))
            records.append(in_own_process("benchmarks.default", *arguments))
    return section(records)


def section(records: list[Record]) -> Section:
    """The means over networks of one kind and training, and what was promised of each."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(f"{record['network'].split(', 10')[0]}, {record['epochs']} epochs", []).append(record)
    costs, scores, ood = [], [], []
    for kind, own in kinds.items():
        mean = {name: statistics.mean(r[name] for r in own) for name in own[0] if isinstance(own[0][name], float)}
        chosen = sorted({r["chosen"] for r in own})
        costs.append(
            [kind, f"{mean['training']:.2g}", f"{mean['laplace']:.2g}", f"{mean['share']:.0%}", ", ".join(chosen)]
        )
        best = ["-" if r["best"] is None else f"{r['best']:.4f}" for r in own]
        best = [f"{statistics.mean(r['best'] for r in own):.4f}"] if "-" not in best else ["-"]
        row = [f"{mean[name]:.4f}" for name in ("network_nll", "scaled_nll", "nll")]
        scores.append([kind, *row, *best])
        ood.append(
            [kind, *(f"{mean[f'{n}_{k}']:.3f}" for k in ("near", "far") for n in ("network", "calibrated", "mi"))]
        )
    worst = max(r["nll"] - r["network_nll"] for r in records)
    behind = max((r["nll"] - r["best"] for r in records if r["best"] is not None), default=0.0)
    most = max(r["share"] for r in records)
    goals = [
        Goal(f"at most {_SHARE:.0%} of the training's time, on every network", most <= _SHARE, f"at most {most:.0%}"),
        Goal(f"no network gets worse by more than {_SAME:g} nats", worst <= _SAME, f"worst {worst:+.4f}"),
        Goal(f"within {_SAME:g} nats of the best of all methods", behind <= _SAME, f"at most {behind:+.4f} behind"),
    ]
    text = (
        f"{len(records)} networks: MLP and CNN with BatchNorm on {_TRAIN:,} generated digits at 14 × 14 pixels "
        f"({_SEEDS} seeds each), and a {_RESNET} on as many of 28 × 28 and three channels; {_HELD_OUT} held-out "
        f"samples choose method and temperature, {_TEST:,} others judge. Time is wall-clock time, of the training with "
        "Lightning and of `FitLaplace` behind it. *Temperature scaled*: the network's logits times the one number that "
        "is best on the held-out samples, which is what one would do in one line instead. *Best of all*: the lowest "
        "test NLL of all methods with `budget=None` (not run for the ResNet). OOD: AUROC on digits turned by 90° "
        "(near) and on shuffled pixels (far), by the entropy of the network, by that of the calibrated predictive, and "
        "by the mutual information of the posterior at temperature 1."
    )
    grids = [
        Grid("Cost of the default", ["network", "training s", "FitLaplace s", "share", "chosen"], costs),
        Grid(
            "Test NLL (nats)",
            ["network", "network itself", "temperature scaled", "FitLaplace()", "best of all"],
            scores,
        ),
        Grid(
            "OOD detection (AUROC)",
            [
                "network",
                *(f"{k}: {n}" for k in ("near", "far") for n in ("network", "FitLaplace()", "mutual information")),
            ],
            ood,
        ),
    ]
    table, goal = race(records)
    return Section("The default of FitLaplace", text, [*grids, table], [*goals, goal], records)


def race(records: list[Record]) -> tuple[Grid, Goal]:
    """What each default did to the networks, on data that it has not seen."""
    rows = []
    own = [r["race"] for r in records]
    shares: dict[str, float] = {}
    for rival in own[0]:
        change = [r[rival]["nll"] - r["the network itself"]["nll"] for r in own]
        shares[rival] = sum(c > _SAME / 10 for c in change) / len(own)
        mean = {k: statistics.mean(r[rival][k] for r in own) for k in ("nll", "ece", "seconds")}
        calibrated = sum(r[rival]["ece"] > r["the network itself"]["ece"] for r in own) / len(own)
        rows.append(
            [
                rival, f"{shares[rival]:.0%}", f"{max(change):+.4f}", f"{mean['nll']:.4f}", f"{calibrated:.0%}",
                f"{mean['ece']:.4f}", f"{mean['seconds']:.2g}" if mean["seconds"] else "-",
            ]
        )  # fmt: skip
    title = (
        f"The defaults, raced on {len(own)} networks: laplace-torch's `Laplace` with `optimize_prior_precision()`, "
        "TorchUncertainty's `LaplaceApprox` fitted on the held-out samples, as its routines do. *Worse*: share of the "
        f"networks whose test NLL rose by more than {_SAME / 10:g} nats, or whose ECE (15 bins) rose"
    )
    header = ["default", "NLL worse", "worst change", "NLL (nats)", "ECE worse", "ECE", "fit s"]
    goal = Goal(
        "the default makes no network worse than it was by more than 0.001 nats", shares[_OURS] == 0,
        ", ".join(f"{rival}: {shares[rival]:.0%}" for rival in (_OURS, _PEER, _TU)),
    )  # fmt: skip
    return Grid(title, header, rows), goal


class Trained(LightningModule):
    """Cross entropy by Adam."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss of a batch."""
        return cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        """Validation data are there for the callback."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 3e-3)


def measure(
    name: str, epochs: int, seed: int, *, train: int = _TRAIN, test: int = _TEST, held_out: int = _HELD_OUT
) -> Record:
    """One training, the default behind it, and all methods without a limit."""
    resnet = name == _RESNET
    size, channels = (28, 3) if resnet else (28, 1)
    sets = []
    for count, own in ((train, seed), (held_out, 10 + seed), (test, 20)):
        x, y = images(count, size=size, channels=channels, seed=own)
        sets.append((x if resnet else avg_pool2d(x, 2), y))
    (x, y), (val_x, val_y), (test_x, test_y) = sets
    torch.manual_seed(seed)
    model = _resnet() if resnet else LARGER[name]()
    default = FitLaplace()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[default], enable_model_summary=False, **quiet)
    loaders = DataLoader(TensorDataset(x, y), 100, shuffle=True), DataLoader(TensorDataset(val_x, val_y), 100)
    start = time.perf_counter()
    trainer.fit(Trained(model), *loaders)
    training = default.training_seconds
    assert training is not None and default.laplace is not None
    laplace = sum(fit.seconds for fit in default.fits[0])
    found: Record = {
        "network": name, "epochs": epochs, "seed": seed, "training": training, "laplace": laplace,
        "share": laplace / training, "total": time.perf_counter() - start,
        "chosen": next(fit.name for fit in default.fits[0] if fit.laplace is default.laplace), "best": None,
    }  # fmt: skip
    model.eval()
    with torch.no_grad():
        held, logits = model(val_x), model(test_x)
    scale = min((cross_entropy(held * s, val_y).item(), s) for s in (10 ** (k / 50) for k in range(-50, 51)))[1]
    found["network_nll"] = cross_entropy(logits, test_y).item()
    found["scaled_nll"] = cross_entropy(logits * scale, test_y).item()
    found["nll"] = _nll(default, test_x, test_y)
    with torch.no_grad():
        raced = {
            "the network itself": ((logits.softmax(-1)), 0.0),
            "temperature scaled": ((logits * scale).softmax(-1), 0.0),
            _OURS: (_predicted(default.laplace.predictive, test_x), laplace),
            **_peers(model, DataLoader(TensorDataset(x, y), 100), loaders[1], test_x),
        }
    found["race"] = {
        rival: {
            "nll": -p.double().gather(1, test_y[:, None]).log().mean().item(),
            "ece": multiclass_calibration_error(p, test_y, 10, n_bins=15).item(),
            "seconds": seconds,
        }
        for rival, (p, seconds) in raced.items()
    }
    near, far = test_x.rot90(dims=(2, 3)), shuffled(test_x)
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "network": lambda inputs: entropy(model(inputs).softmax(-1)),
        "calibrated": lambda inputs: entropy(default.laplace.predictive(inputs)),  # type: ignore[union-attr]
        "mi": default.laplace.epistemic,
    }
    with torch.no_grad():
        for score, of in scores.items():
            inside = torch.cat([of(part) for part in test_x[:1000].split(100)])
            for kind, inputs in (("near", near), ("far", far)):
                outside = torch.cat([of(part) for part in inputs[:1000].split(100)])
                truth = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
                found[f"{score}_{kind}"] = float(binary_auroc(torch.cat([inside, outside]).float(), truth))
    if not resnet:
        found["each"] = {}
        for method, options in METHODS.items():
            own = FitLaplace(loaders[0].dataset, calibration_data=loaders[1], **options)
            trainer = Trainer(accelerator="cpu", callbacks=[own], enable_model_summary=False, **quiet)
            trainer.validate(Trained(model), loaders[1], verbose=False)
            found["each"][method] = _nll(own, test_x, test_y)
        found["best"] = min(found["each"].values())
    return found


def _nll(callback: FitLaplace, x: Tensor, y: Tensor) -> float:
    assert callback.laplace is not None
    p = _predicted(callback.laplace.predictive, x).double()
    return -p.gather(1, y[:, None]).log().mean().item()


def _predicted(predict: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([predict(part).detach() for part in x.split(250)])


def _peers(
    model: nn.Module, train: DataLoader[Any], held_out: DataLoader[Any], test: Tensor
) -> dict[str, tuple[Tensor, float]]:
    """Predictions of others' defaults, with the seconds that their fits took."""
    from laplace import Laplace
    from torch_uncertainty.post_processing import LaplaceApprox

    found = {}
    with torch.enable_grad():
        start = time.perf_counter()
        peer: Any = Laplace(copy.deepcopy(model), "classification")
        peer.fit(train)
        peer.optimize_prior_precision()
        found[_PEER] = peer, time.perf_counter() - start
        start = time.perf_counter()
        wrapper = LaplaceApprox("classification", copy.deepcopy(model))
        wrapper.fit(held_out)  # what TorchUncertainty's routines fit it on: ``postprocess_set="val"``
        found[_TU] = wrapper, time.perf_counter() - start
    return {name: (_predicted(predict, test), seconds) for name, (predict, seconds) in found.items()}


def entropy(p: Tensor) -> Tensor:
    """Of probabilities, in nats."""
    return -(p * p.clamp_min(1e-12).log()).sum(-1)


def shuffled(x: Tensor) -> Tensor:
    """The pixels of every image in a random order of its own."""
    order = torch.rand(len(x), 1, x[0, 0].numel(), generator=torch.Generator().manual_seed(0)).argsort(-1)
    return x.flatten(2).gather(2, order.expand(-1, x.shape[1], -1)).view_as(x)


def _resnet() -> nn.Module:
    from torch_uncertainty.models.classification.resnet import resnet

    return resnet(3, 10, arch=20, style="cifar")


def main(name: str, epochs: str, seed: str, threads: str) -> None:
    """One network, as JSON on the last line."""
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    print(json.dumps(measure(name, int(epochs), int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
