"""Predictive bands of linearized Laplace in one dimension: precisions by hand, and by the evidence in several ways.

The figure of arXiv 2206.08900 (a BatchNorm MLP with 2,600 weights): bands for fixed precisions of all weights, and for
the precisions that the evidence chooses with and without each of the paper's two recommendations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.model import LinearizedLaplace, PrunedGroupWarning
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.stage import Results, StageContext, stage

NETWORK, BANDS = "network.safetensors", "bands.safetensors"


@dataclass(frozen=True)
class NetworkOptions:
    """The data, and how the network is trained on them.

    Attributes:
        hidden: widths of the two hidden layers; their weights and the last layer's are the ones that are uncertain.
        train_size: training points, half on each side of a gap.
        test_size: points of the same kind, for the log-likelihood.
        noise: standard deviation of the targets.
        steps: of Adam on all points at once.
        learning_rate: of Adam.
    """

    hidden: list[int] = field(default_factory=lambda: [50, 50])
    train_size: int = 80
    test_size: int = 1000
    noise: float = 0.2
    steps: int = 1000
    learning_rate: float = 1e-2


@dataclass(frozen=True)
class BandsOptions:
    """Which bands are drawn.

    Attributes:
        precisions: prior precisions of all weights, set by hand.
        curvature: ``kfac``, or ``full``: the exact generalized Gauss-Newton matrix.
        points: of the grid of inputs.
        reach: the grid spans ``[-reach, reach]``.
    """

    precisions: list[float] = field(default_factory=lambda: [100.0, 10.0, 5.0, 1.0, 0.1])
    curvature: Literal["full", "kfac"] = "kfac"
    points: int = 241
    reach: float = 2.2


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


@dataclass(frozen=True)
class _Choice:
    """A way to choose precisions by the evidence."""

    title: str
    evaluate_at: EvaluateAt
    prior: Literal["single", "per_group"]
    flat: bool = False


CHOICES = {
    "map/single": _Choice(r"$\mathcal{M}_{\tilde\theta}$, single $\lambda$", "map", "single"),
    "map/per_group": _Choice(r"$\mathcal{M}_{\tilde\theta}$, $\lambda$ per group", "map", "per_group"),
    "tangent_mode/single": _Choice(r"$\mathcal{M}_{\theta_*}$, single $\lambda$", "tangent_mode", "single"),
    "tangent_mode/per_group": _Choice(r"$\mathcal{M}_{\theta_*}$, $\lambda$ per group", "tangent_mode", "per_group"),
    "tangent_mode/per_group/flat": _Choice("the same, no hyperprior", "tangent_mode", "per_group", flat=True),
}


class BatchNormMLP(nn.Sequential):
    """``1 -> a -> b -> 1`` with BatchNorm and ReLU after each hidden layer and no biases before it.

    With widths 50 and 50 its matrices have 50 + 2500 + 50 = 2,600 weights. BatchNorm's shifts break the units apart:
    without them every kink would lie at the mean of the inputs.
    """

    def __init__(self, first: int = 50, second: int = 50) -> None:
        super().__init__(
            nn.Linear(1, first, bias=False), nn.BatchNorm1d(first), nn.ReLU(),
            nn.Linear(first, second, bias=False), nn.BatchNorm1d(second), nn.ReLU(),
            nn.Linear(second, 1),
        )  # fmt: skip

    @property
    def matrices(self) -> list[str]:
        """Names of the weights, without BatchNorm's affine parameters and the last bias."""
        return [name for name, p in self.named_parameters() if p.ndim == 2]


def sample_curve(count: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs on both sides of a gap, and noisy values of a smooth curve, both ``[count, 1]`` in float64."""
    x = 0.9 * torch.rand(count, 1, generator=generator, dtype=torch.float64) + 0.5
    x[: count // 2] *= -1
    clean = torch.sin(3 * x) + 0.5 * x
    return x, clean + noise * torch.randn(count, 1, generator=generator, dtype=torch.float64)


@stage()
def train_network(context: StageContext, options: NetworkOptions) -> Results:
    """Draw the data and train the network on them."""
    data = sample_curve(options.train_size, options.noise, context.generator("training data"))
    test = sample_curve(options.test_size, options.noise, context.generator("test data"))
    x, y = (t.to(context.device) for t in data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed("initialization"))
        model = BatchNormMLP(*options.hidden).double().to(context.device)
    generator = context.generator("start")
    with torch.no_grad():  # kinks all over the inputs' range from the start
        for module in model:
            if isinstance(module, nn.BatchNorm1d):
                module.bias.copy_(torch.randn(module.bias.shape, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    with context.track("training", options.steps) as tracker:
        for step in range(options.steps):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            tracker.update(step + 1, loss=loss.item())
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    tensors |= dict(zip(("train_x", "train_y", "test_x", "test_y"), (*data, *test), strict=True))
    write_safetensors(context.folder / NETWORK, tensors)
    with torch.no_grad():
        error = (model.eval()(x) - y).square().mean().sqrt().item()
    weights = sum(p.numel() for name, p in model.named_parameters() if name in model.matrices)
    return {
        "weights": weights,
        "hidden": options.hidden,
        "noise": options.noise,
        "train_rmse": error,
        "headline": f"{weights} weights, training RMSE {error:.3g}, noise {options.noise}",
    }


@stage(inputs=("network",))
def compute_bands(context: StageContext, options: BandsOptions) -> Results:
    """Mean and epistemic standard deviation on a grid, test NLL, precisions: for each choice of precisions."""
    found = context.inputs["network"]
    stored = read_tensors(found.folder / NETWORK, device=context.device)
    model = BatchNormMLP(*found.results["hidden"]).double().to(context.device).eval()
    model.load_state_dict({k.removeprefix("model."): t for k, t in stored.items() if k.startswith("model.")})
    train = [(stored["train_x"], stored["train_y"])]
    grid = torch.linspace(-options.reach, options.reach, options.points, dtype=torch.float64, device=context.device)
    shared: dict[str, Any] = {
        "likelihood": "regression",
        "graph": discover_symmetries(model, stored["train_x"][:4]),
        "curvature": options.curvature,
        "parameters": model.matrices,
        "noise_variance": found.results["noise"] ** 2,
    }
    rows: dict[str, Any] = {}
    tensors = {"grid": grid}
    jobs: dict[str, float | _Choice] = {f"{value:g}": value for value in options.precisions} | CHOICES
    with context.track("bands", len(jobs)) as tracker:
        for number, (name, job) in enumerate(jobs.items()):
            evaluate_at, prior = (job.evaluate_at, job.prior) if isinstance(job, _Choice) else ("map", "single")
            la = LinearizedLaplace(model, evaluate_at=evaluate_at, prior=prior, **shared).fit(train)
            if isinstance(job, _Choice):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PrunedGroupWarning)  # the table says it
                    hyperprior = None if job.flat else Hyperprior()
                    la.optimize_evidence(hyperprior=hyperprior, tolerance=1e-4, mode_tolerance=1e-3)
            else:
                la.set_precision(job)
            band = la.predictive(grid.unsqueeze(-1))
            tensors |= {f"{name}/mean": band.mean.squeeze(-1), f"{name}/epistemic": band.epistemic.squeeze(-1).sqrt()}
            rows[name] = _row(la, stored)
            tracker.update(number + 1)
    write_safetensors(context.folder / BANDS, tensors)
    best = min(rows, key=lambda name: rows[name]["nll"])
    return {"rows": rows, "headline": f"lowest test NLL: {best} ({rows[best]['nll']:.3f} nats)"}


def _row(la: LinearizedLaplace, stored: Mapping[str, Tensor]) -> dict[str, Any]:
    test = la.predictive(stored["test_x"])
    residual = stored["test_y"] - test.mean
    nll = 0.5 * (residual.square() / test.variance + (2 * math.pi * test.variance).log())
    z = (residual.abs() / test.variance.sqrt()).flatten()
    middle = la.predictive(torch.zeros_like(stored["test_x"][:1]))
    return {
        "nll": float(nll.mean()),
        "coverage": float((z < 1.959964).double().mean()),
        "inside": float(test.epistemic.mean().sqrt()),
        "gap": float(middle.epistemic.sqrt()),
        "log_evidence": la.log_marginal_likelihood() if la.evaluate_at == "tangent_mode" else None,
        "groups": {
            row.name: {"precision": row.precision, "gamma": row.gamma, "size": row.size, "pruned": row.pruned}
            for row in la.report()
        },
    }


@stage(inputs=("network", "bands"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md`` with the figure and a table of what was chosen."""
    rows = context.inputs["bands"].results["rows"]
    data = read_tensors(context.inputs["network"].folder / NETWORK)
    draw(context.folder / "bands.png", read_tensors(context.inputs["bands"].folder / BANDS), data, rows)
    header = ["", "λ (effective directions)", "test NLL", "covered", "spread on data", "spread in gap"]
    body = [
        [
            _name(name),
            ", ".join(_group(key, g, name in CHOICES) for key, g in row["groups"].items()),
            f"{row['nll']:.3f}",
            f"{100 * row['coverage']:.1f} %",
            f"{row['inside']:.3g}",
            f"{row['gap']:.3g}",
        ]
        for name, row in rows.items()
    ]
    caption = (
        "λ per group: first layer, second layer, last layer. NLL in nats; covered: targets within the 95 % band (with "
        "noise); spread: epistemic standard deviation, root mean square over the test inputs and in the middle of the "
        "gap. M(θ~): evidence at the trained weights; M(θ*): at the joint stationary point (Recommendation 1)."
    )
    grid = Grid(context.table.title, header, body, caption)
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {context.table.title}", f"Reproduces: {context.table.source}.", context.table.note, grid.markdown()]
    parts += ["![bands](bands.png)", f"## Hardware and versions\n\n{environment}"]
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [grid.to_dict()], "headline": f"{context.name}/report.md"}


def _name(name: str) -> str:
    if name not in CHOICES:
        return f"λ = {name}"
    evaluate_at, prior, *rest = name.split("/")
    where = "M(θ*)" if evaluate_at == "tangent_mode" else "M(θ~)"
    return f"{where}, {'single λ' if prior == 'single' else 'λ per group'}{', no hyperprior' if rest else ''}"


def _group(name: str, group: Mapping[str, Any], chosen: bool) -> str:
    if not chosen:
        return f"{group['precision']:g} ({group['gamma']:.1f})"
    return f"{group['precision']:.3g} ({group['gamma']:.1f})"


def draw(path: Path, bands: Mapping[str, Tensor], data: Mapping[str, Tensor], rows: Mapping[str, Any]) -> None:
    """The bands in two rows: precisions set by hand, precisions chosen by the evidence.

    Args:
        path: of the PNG.
        bands: ``grid``, and ``NAME/mean`` and ``NAME/epistemic`` on it.
        data: ``train_x`` and ``train_y``.
        rows: name to at least ``nll``, in the order of the panels.
    """
    fixed = [name for name in rows if name not in CHOICES]
    chosen = [name for name in rows if name in CHOICES]
    width = max(len(fixed), len(chosen))
    grid = bands["grid"].numpy()
    with plots.plt.rc_context(plots.STYLE):
        made, axes = plots.plt.subplots(2, width, figsize=(2.6 * width, 4.8), sharex=True, sharey=True, squeeze=False)
        try:
            for line, names, color in zip(axes, (fixed, chosen), (plots.GRAY, plots.BLUE), strict=True):
                for ax in line[len(names) :]:
                    ax.set_visible(False)
                for ax, name in zip(line, names, strict=False):
                    mean, spread = bands[f"{name}/mean"].numpy(), bands[f"{name}/epistemic"].numpy()
                    for times, alpha in ((1, 0.3), (2, 0.15)):
                        low, high = mean - times * spread, mean + times * spread
                        ax.fill_between(grid, low, high, color=color, alpha=alpha, linewidth=0)
                    ax.plot(grid, mean, color=color)
                    points = (data["train_x"].flatten().numpy(), data["train_y"].flatten().numpy())
                    ax.plot(*points, linestyle="", marker=".", color="black", markersize=2.5)
                    title = CHOICES[name].title if name in CHOICES else rf"$\lambda$ = {name}"
                    ax.set_title(title)
                    ax.text(0.03, 0.03, f"test NLL {rows[name]['nll']:.2f}", transform=ax.transAxes, fontsize=8)
            axes[0, 0].set(ylim=(-4, 4), xlim=(float(grid[0]), float(grid[-1])))
            made.savefig(path)
        finally:
            plots.plt.close(made)
