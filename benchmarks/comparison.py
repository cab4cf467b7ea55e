"""What linearized Laplace does for a trained network: by evidence, prior, curvature, and with calibration."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, one_hot
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._measure import figure, in_own_process
from benchmarks._report import Goal, Section, Settings, describe_error
from benchmarks.joint import images
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.laplace.calibration import SHARPNESSES
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.reporting.grid import Grid

PAGE = Path(__file__).parent.parent / "docs" / "laplace_comparison.md"
_MARK = "<!-- the table of `python -m benchmarks comparison` -->"
_TRAIN, _MANY, _BATCH, _BINS, _EXACT = 1000, 10_000, 50, 15, 2600
BRIEF, LONG = 8, 100  # epochs
SCALED = "the network, temperature scaled"
Record = dict[str, Any]


class Residual(nn.Module):
    """A stem and two residual blocks with BatchNorm."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = (x + block(x)).relu()
        found: Tensor = self.head(nn.functional.avg_pool2d(x, 4).flatten(1))
        return found


class Transformer(nn.Module):
    """A vision transformer: patches of 2 x 2, two blocks of attention and MLP, LayerNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "mix": nn.MultiheadAttention(width, 2, batch_first=True),
                    "between": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
                }
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).mT + self.position
        for block in self.blocks:
            rows = block["before"](x)  # type: ignore[index]
            x = x + block["mix"](rows, rows, rows, need_weights=False)[0]  # type: ignore[index]
            x = x + block["mlp"](block["between"](x))  # type: ignore[index]
        found: Tensor = self.head(self.norm(x).mean(1))
        return found


def _cnn(norm: bool, pixels: int = 4) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((1, 8), (8, 12)):
        layers.append(nn.Conv2d(inside, outside, 3, padding=1, bias=not norm))
        layers += [*([nn.BatchNorm2d(outside)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * pixels, 10))


def _mlp(pixels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: _mlp(64),
    "CNN": lambda: _cnn(False),
    "CNN, BatchNorm": lambda: _cnn(True),
    "ResNet": Residual,
    "ViT": Transformer,
}
LARGER: dict[str, Callable[[], nn.Module]] = {
    "MLP, 10,000 images": lambda: _mlp(196),
    "CNN, BatchNorm, 10,000 images": lambda: _cnn(True, 9),
}
METHODS: dict[str, dict[str, Any]] = {
    "last layer, exact, single": {"curvature": "last_layer", "prior": "single", "evaluate_at": "map"},
    "all layers, KFAC, θ~, single": {"prior": "single", "evaluate_at": "map"},
    "all layers, KFAC, θ~, per group": {"prior": "per_group", "evaluate_at": "map"},
    "all layers, KFAC, θ*, single": {"prior": "single"},
    "all layers, KFAC, θ*, per group (default)": {"prior": "per_group"},
    "all layers, exact, θ~, single": {"prior": "single", "evaluate_at": "map", "curvature": "full"},
}
PEERS = {"laplace-torch, defaults": {}, "laplace-torch, all layers, KFAC": {"subset_of_weights": "all"}}


def run(settings: Settings) -> Section:
    """Every network in a process of its own, and the page in docs/; a quick run stays in this process."""
    cases = [(name, epochs) for name in NETWORKS for epochs in (BRIEF, LONG)] + [(name, BRIEF) for name in LARGER]
    records: list[Record] = []
    for name, epochs in [("MLP", 1)] if settings.quick else cases:
        settings.say(f"{name}, {epochs} epochs")
        if settings.quick:
            records += measure(name, epochs)
        else:
            records += in_own_process("benchmarks.comparison", name, str(epochs), str(torch.get_num_threads()))
    found = section(records)
    if not settings.quick:
        write(found)
    return found


def write(found: Section, page: Path = PAGE) -> None:
    """Put the tables into the page, after its mark; those of networks that were not measured now stay as they are."""
    text = page.read_text(encoding="utf-8")
    before, _, after = text.partition(_MARK)
    if not after:
        raise ValueError(f"{page} has no line {_MARK!r} after which the tables go")
    tables = {}
    for part in after.split("\n**")[1:]:
        title, _, table = part.partition("**\n")
        tables[title] = table.strip()
    tables |= {grid.title: grid.markdown().strip() for grid in found.grids}
    order = [_title(name, epochs) for name in (*NETWORKS, *LARGER) for epochs in (BRIEF, LONG)]
    titles = sorted(tables, key=lambda title: (title not in order, order.index(title) if title in order else 0))
    grids = "\n\n".join(f"**{title}**\n\n{tables[title]}" for title in titles)
    page.write_text(f"{before}{_MARK}\n\n{found.text}\n\n{grids}\n", encoding="utf-8")


def _title(name: str, epochs: int) -> str:
    return f"{name}, trained {_training(epochs)}"


def _training(epochs: int) -> str:
    return "briefly" if epochs <= BRIEF else "long"


def section(records: list[Record]) -> Section:
    """The page of what was measured."""
    text = (
        f"Scikit-learn's digits (8 × 8): {_TRAIN:,} training images, 140 to calibrate on, 360 to test on; "
        "out-of-distribution are the test images with their pixels in a random order (AUROC of the largest "
        f"probability). *Briefly* is {BRIEF} epochs of Adam, *long* {LONG}. MLP: 2,410 weights; CNN: two convolutions "
        "with 8 and 12 channels; ResNet: two blocks of 6 channels; ViT: two blocks of width 16. Each row twice: the "
        "posterior of the evidence, and → with the temperature that `calibrate` chose on the 140 images; on these the "
        "scale of the network's logits is chosen, too. "
        "laplace-torch has no such temperature. *s*: CPU time of curvature, evidence and calibration on one thread. "
        "†: the evidence had not converged. Tables of 10,000 images: these digits enlarged, turned, shifted and scaled "
        "at random, with noise, at 14 × 14 pixels; 1,000 others to calibrate on, 1,000 to test on."
    )
    grids = []
    for name, training in dict.fromkeys((r["network"], r["training"]) for r in records):
        own = [r for r in records if (r["network"], r["training"]) == (name, training)]
        rows = []
        for r in own:
            if r.get("error"):
                rows.append([r["method"], r["error"], *["–"] * 5])
                continue
            plain, mended = r["evidence"], r.get("calibrated")
            both = [f"{plain[k]:.3f}" + ("" if mended is None else f" → {mended[k]:.3f}") for k in _FIGURES]
            rows.append(
                [
                    r["method"] + " †" * (not r.get("converged", True)),
                    *both,
                    "–" if mended is None else f"{r['temperature']:.2g}",
                    figure(r["seconds"]),
                ]
            )
        columns = ["method", "NLL", "ECE", "Brier", "OOD AUROC", "temperature", "s"]
        grids.append(Grid(f"{name}, trained {training}", columns, rows))
    return Section("Linearized Laplace on small networks", text, grids, _goals(records), records, ("laplace-torch",))


_FIGURES = ("nll", "ece", "brier", "auroc")


def _goals(records: list[Record]) -> list[Goal]:
    goals = []
    networks = {
        (r["network"], r["training"]): r["evidence"]["nll"] for r in records if r["method"] == "the network itself"
    }
    for method in METHODS:
        own = [r for r in records if r["method"] == method and "calibrated" in r]
        if not own:
            continue
        change = {
            k: [r[k]["nll"] - networks[r["network"], r["training"]] for r in own] for k in ("evidence", "calibrated")
        }
        worst = max(change["calibrated"])
        mean = {k: sum(v) / len(v) for k, v in change.items()}
        goals.append(
            Goal(
                f"{method}, calibrated: test NLL at most 0.01 nats worse than the network's, on every network",
                worst <= 0.01,
                f"worst {worst:+.3f}; on average {mean['calibrated']:+.3f}, and {mean['evidence']:+.3f} uncalibrated",
            )
        )
    return goals


def measure(name: str, epochs: int) -> list[Record]:
    """All methods on one trained network."""
    data = _data(name)
    (x, y), validation, (test_x, test_y), (ood_x, _) = (data[part] for part in ("train", "val", "test", "ood"))
    model, _ = trained(name, x, y, epochs, seed=0)
    training, held_out = (DataLoader(TensorDataset(*p), 100) for p in (data["train"], validation))
    record = {"network": name, "training": _training(epochs), "seconds": 0.0}

    def judged(predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
        inside, outside = (torch.cat([predict(some) for some in p.split(120)]) for p in (test_x, ood_x))
        return quality(inside, test_y, outside)

    with torch.no_grad():
        records: list[Record] = [
            record | {"method": method, "evidence": judged(lambda t, s=s: (s * model(t)).softmax(-1))}  # type: ignore[misc]
            for method, s in (
                ("the network itself", 1.0),
                (SCALED, best_sharpness(model(validation[0]), validation[1])),
            )
        ]
    for method, options in METHODS.items():
        if options.get("curvature") == "full" and sum(p.numel() for p in model.parameters()) > _EXACT:
            continue
        start = time.process_time()
        la = LinearizedLaplace(model, **options).fit(training)
        converged = la.optimize_evidence().converged
        plain = judged(la.predictive)
        found = la.calibrate(held_out, sharpen=False)
        spent = time.process_time() - start
        own = {"method": method, "evidence": plain, "seconds": spent, "temperature": found.temperature}
        records.append(record | own | {"calibrated": judged(la.predictive), "converged": converged})
    for method, options in PEERS.items():
        records.append(record | {"method": method} | _peer(model, training, judged, options))
    return records


def best_sharpness(logits: Tensor, labels: Tensor) -> float:
    """The factor of logits with the lowest NLL, which is temperature scaling."""
    return min(SHARPNESSES, key=lambda s: float(cross_entropy(s * logits, labels)))


def trained(name: str, x: Tensor, y: Tensor, epochs: int, *, seed: int) -> tuple[nn.Module, torch.Generator]:
    """A network of :data:`NETWORKS` or :data:`LARGER`, by Adam, and the generator that shuffled its batches."""
    torch.manual_seed(seed)
    model, generator = (NETWORKS | LARGER)[name](), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[some]), y[some]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval(), generator


def _data(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and labels to train, calibrate and test on, and test images with their pixels in a random order."""
    if name not in LARGER:
        digits = DigitsDataModule(train_size=_TRAIN, val_size=140, normalize=True, eval_ood=True)
        return {part: (p.x, p.y) for part in ("train", "val", "test", "ood") for p in [getattr(digits, part)]}
    found = {}
    for seed, (part, count) in enumerate({"train": _MANY, "val": 1000, "test": 1000}.items()):
        x, y = images(count, size=28, channels=1, seed=seed)
        found[part] = (avg_pool2d(x, 2), y)
    x, y = found["test"]
    order = torch.rand(len(x), 196, generator=torch.Generator().manual_seed(0)).argsort(1)
    return found | {"ood": (x.flatten(1).gather(1, order).view_as(x), y)}


def _peer(model: nn.Module, training: Any, judged: Any, options: dict[str, Any]) -> Record:
    from laplace import Laplace

    start = time.process_time()
    try:
        la = Laplace(model, "classification", **options)
        la.fit(training)
        la.optimize_prior_precision()
        found = judged(lambda t: la(t).detach())
    except Exception as error:  # whatever it raises is its result
        return {"error": describe_error(error)[:60]}
    return {"evidence": found, "seconds": time.process_time() - start}


def quality(p: Tensor, y: Tensor, outside: Tensor) -> dict[str, float]:
    """NLL (nats), expected calibration error, Brier score, and AUROC of the largest probability against OOD inputs."""
    p = p.double()
    confidence, predicted = p.max(-1)
    right = (predicted == y).double()
    bins = torch.zeros(_BINS, dtype=torch.float64)
    bins.index_add_(0, (confidence * _BINS).long().clamp(max=_BINS - 1), right - confidence)
    far = outside.double().amax(-1)
    above = (confidence.unsqueeze(1) > far).double() + 0.5 * (confidence.unsqueeze(1) == far).double()
    return {
        "nll": float(-p.gather(1, y.unsqueeze(1)).clamp(min=1e-300).log().mean()),
        "ece": float(bins.abs().sum() / len(y)),
        "brier": float((p - one_hot(y, p.shape[-1])).square().sum(-1).mean()),
        "auroc": float(above.mean()),
    }


def main(name: str, epochs: str, threads: str) -> None:
    """One trained network, as JSON on the last line."""
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    print(json.dumps(measure(name, int(epochs))))


if __name__ == "__main__":
    main(*sys.argv[1:])
