"""Predictive bands of linearized Laplace in one dimension: precisions by hand, and by the evidence in several ways.

The figure of arXiv 2206.08900 (a BatchNorm MLP with 2,600 weights): bands for fixed precisions of all weights, and for
the precisions that the evidence chooses with and without each of the paper's two recommendations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.ticker import LogLocator
from torch import Tensor, nn
from torch.func import functional_call, jvp

from tu_symmetry.datamodules.images import ImageDataModule, Part
from tu_symmetry.datamodules.readers import LabeledImages
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, chosen
from tu_symmetry.experiments.linearized_laplace.rows import OPEN, Choice, in_latex, marks, parse_all
from tu_symmetry.experiments.study import tracked
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.posterior.network import derived_seed
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.action import apply_scale
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.logs import last_weights
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors
from tu_symmetry.tables.report import Found, Report, table

REACH = 2.2  # the grid spans [-2.2, 2.2]
POINTS = 241
SCALED = ("map/single", "map/per_group", "tangent_mode/single", "tangent_mode/per_group")  # for rescaled networks too
ALONE, RESIDUAL = "network itself, known noise", "network itself, residual variance"


class ShiftedBatchNorm1d(nn.BatchNorm1d):
    """BatchNorm whose shifts start from N(0, 1): the kinks of its ReLUs lie all over the inputs' range."""

    def reset_parameters(self) -> None:
        """Draw the shifts anew; everything else starts as usual."""
        super().reset_parameters()
        nn.init.normal_(self.bias)


class BatchNormMLP(nn.Sequential):
    """``1 -> a -> b -> ... -> 1`` with BatchNorm and ReLU after each hidden layer and no biases before it.

    With widths 50 and 50 its matrices have 50 + 2500 + 50 = 2,600 weights. BatchNorm's shifts break the units apart:
    without them every kink would lie at the mean of the inputs.
    """

    def __init__(self, hidden: Sequence[int] = (50, 50)) -> None:
        pairs = pairwise([1, *hidden])
        layers = [[nn.Linear(a, b, bias=False), ShiftedBatchNorm1d(b), nn.ReLU()] for a, b in pairs]
        super().__init__(*chain(*layers), nn.Linear(hidden[-1], 1))

    @property
    def matrices(self) -> list[str]:
        """Names of the weights, without BatchNorm's affine parameters and the last bias."""
        return [name for name, p in self.named_parameters() if p.ndim == 2]


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Summed squared error of outputs ``[count, 1]`` and values ``[count]``."""
    return (outputs[:, 0] - y).square().sum()


def sample_curve(count: int, noise: float, frequency: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs ``[count, 1]`` on both sides of a gap, and noisy values ``[count]`` of a smooth curve, in float64."""
    x = 0.9 * torch.rand(count, 1, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    x[: count // 2] *= -1
    clean = torch.sin(frequency * x[:, 0]) + 0.5 * x[:, 0]
    return x, clean + noise * torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")


class CurveDataModule(ImageDataModule):
    """A noisy curve, seen on both sides of a gap; training batches hold all points, in float64.

    ``sin(frequency x) + x / 2``, with noise of standard deviation ``noise``.
    """

    training_task = "regression"
    input_shape = (1,)
    scale = None

    def __init__(
        self, train_size: int = 80, test_size: int = 1000, noise: float = 0.2, seed: int = 0, frequency: float = 3.0
    ) -> None:
        if min(train_size, test_size) < 2 or not noise > 0:
            raise ValueError(f"sizes must be at least 2, and noise positive; got {train_size}, {test_size} and {noise}")
        super().__init__(batch_size="full", eval_batch_size=None, seed=seed)
        self.noise, self.frequency, self.counts = noise, frequency, {"train": train_size, "test": test_size}

    def read(self, part: Part) -> LabeledImages:
        """Draw a whole part."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, list(self.counts).index(part), 0))
        return LabeledImages(*sample_curve(self.counts[part], self.noise, self.frequency, generator))


def compute_bands(
    out: Path,
    model: BatchNormMLP,
    network: Path,
    data: CurveDataModule,
    precisions: Sequence[float],
    choices: Sequence[str],
    curvature: Literal["full", "kfac"] = "kfac",
    factors: Sequence[float] = (),
) -> Outcome:
    """Mean and epistemic standard deviation on a grid, test NLL, precisions: for each choice of precisions.

    Those are single ones set by hand, and the evidence's ``choices``. Every band is kept in the ``parts`` of ``out`` at
    once. The network is that of the last checkpoint in a folder; the likelihood knows the noise of the data.

    The ``choices`` in :data:`SCALED` are made once more for networks whose normalized weights are multiplied by each of
    the ``factors`` (Proposition 3), with normalizations that add no epsilon, and the losses of the network and of its
    tangent model are followed along such a factor.
    """
    jobs: dict[str, float | Choice] = {f"{value:g}": value for value in precisions}
    jobs |= {choice.key: choice for choice in parse_all(choices)}
    state = {name: t.double() if t.is_floating_point() else t for name, t in last_weights(network).items()}
    model = model.double().eval()
    model.load_state_dict(state)
    graph = discover_symmetries(model, data.train.x[:4])
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64, device="cpu")
    own = [state[name] for name in sorted(state)]
    digest = digest_tensors(*own, data.train.x, data.train.y, data.test.x, data.test.y)
    parts = Parts(out / "parts", [digest, data.noise, curvature, POINTS, REACH])

    def band(job: float | Choice, network: BatchNormMLP = model) -> dict[str, Any]:
        choice = job if isinstance(job, Choice) else Choice("map", "single")
        la = LinearizedLaplace(
            network,
            "regression",
            graph=graph,
            evaluate_at="map" if choice.where == "map" else "tangent_mode",
            prior=choice.prior,
            curvature=curvature,
            parameters=model.matrices,
            noise_variance=data.noise**2,
        )
        la.fit([(data.train.x, data.train.y.unsqueeze(-1))])
        if isinstance(job, Choice):
            converged = chosen(la, job, Settings(tolerance=1e-4, mode_tolerance=1e-3)).converged
            return _measured(la, data, grid) | {"converged": converged}
        la.set_precision(job)
        return _measured(la, data, grid) | {"converged": True}

    rows = {name: parts.take(name, band, jobs[name]) for name in tracked("bands", list(jobs), str)}

    def scaled(name: str, factor: float) -> dict[str, Any]:
        found = band(jobs[name], _multiplied(model, graph, factor))
        return {key: found[key] for key in ("gap", "inside", "nll", "converged")}

    again = [(name, factor) for name in SCALED if name in jobs for factor in factors]
    spreads: dict[str, list[Found]] = {name: [] for name, _ in again}
    for name, factor in tracked("factors", again, lambda job: f"{job[0]} times {job[1]:g}"):
        spreads[name].append(parts.take(f"{name} times {factor:g}", scaled, name, factor))
    along = _losses_along(model, graph, data) if factors else {}
    with torch.no_grad():
        error = (model(data.train.x)[:, 0] - data.train.y).square().mean().sqrt().item()
        residual = data.test.y - model(data.test.x)[:, 0]
    rivals = {title: judged(residual, sd**2) for title, sd in ((ALONE, data.noise), (RESIDUAL, error))}
    weights = sum(p.numel() for name, p in model.named_parameters() if name in model.matrices)
    best = min(rows, key=lambda name: rows[name]["nll"])
    return Outcome(
        {"weights": weights, "train_rmse": error, "noise": data.noise, "grid": grid, "rows": rows, "rivals": rivals}
        | {"train_x": data.train.x[:, 0], "train_y": data.train.y}
        | {"factors": list(factors), "spreads": spreads, "along": along, "offsets": offsets(model, graph, data.test.x)},
        f"{weights} weights, training RMSE {error:.3g}; lowest test NLL: {best} ({rows[best]['nll']:.3f} nats)",
    )


def _multiplied(model: BatchNormMLP, graph: SymmetryGraph, factor: float) -> BatchNormMLP:
    """A copy whose normalized weights are multiplied, running statistics moved along, with no epsilons."""
    log = {
        g.name: torch.full((g.size,), math.log(factor), dtype=torch.float64, device="cpu") for g in graph.normalizations
    }
    copied = deepcopy(model)
    copied.load_state_dict(apply_scale(graph, log, model.state_dict()))
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eps = 0.0
    return copied


@torch.no_grad()
def _losses_along(model: BatchNormMLP, graph: SymmetryGraph, data: CurveDataModule) -> dict[str, list[float]]:
    """Loss at ``theta' + k theta''`` of the network and of its tangent model at ``k = 1``.

    In nats, but for constants, with a prior precision of 1.
    """
    x, y, ratios = data.train.x, data.train.y, np.geomspace(0.02, 2.0, 41).tolist()
    plain = _multiplied(model, graph, 1.0)
    normalized = {m.parameter for g in graph.normalizations for m in g.members if not m.buffer}
    weights = {name: p for name, p in plain.state_dict().items() if name in model.matrices}
    direction = {name: w if name in normalized else torch.zeros_like(w) for name, w in weights.items()}
    outputs, slope, *_ = jvp(lambda own: functional_call(plain, own, (x,)), (weights,), (direction,))
    found: dict[str, list[float]] = {"ratios": ratios, "network": [], "tangent": []}
    for k in ratios:
        squares = sum(float(((k if n in normalized else 1.0) * w).square().sum()) for n, w in weights.items())
        predictions = {"network": _multiplied(model, graph, k)(x), "tangent": outputs + (k - 1) * slope}
        for name, predicted in predictions.items():
            misfit = float((predicted[:, 0] - y).square().sum()) / (2 * data.noise**2)
            found[name].append(misfit + squares / 2)
    return found


@torch.no_grad()
def offsets(model: BatchNormMLP, graph: SymmetryGraph, x: Tensor) -> dict[str, float]:
    """Norm of ``f - J theta~`` over that of ``f``, at inputs ``x``, of networks with the model's weights.

    ``theta`` are the matrices and the last bias, unless the title says else; normalizations add no epsilon.
    """
    running, batch = (_multiplied(model, graph, 1.0) for _ in range(2))
    for module in batch.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean = module.running_var = None  # those of the inputs, so that they move with the weights
            module.eps = 1e-100  # torch takes no 0 here
    bare = nn.Sequential(*(nn.Identity() if isinstance(m, nn.BatchNorm1d) else m for m in running))
    every, dense = [name for name, _ in model.named_parameters()], [*model.matrices, f"{len(model) - 1}.bias"]

    def relative(network: nn.Module, names: Sequence[str]) -> float:
        theta = {name: p for name, p in network.named_parameters() if name in names}
        outputs, linear, *_ = jvp(lambda own: functional_call(network, own, (x,)), (theta,), (theta,))
        return float((outputs - linear).norm() / outputs.norm())

    return {
        "normalized by the batch's statistics": relative(batch, dense),
        "the same, θ without the last bias": relative(batch, model.matrices),
        "the same, θ with BatchNorm's parameters": relative(batch, every),
        "normalized by running statistics, as in predictions": relative(running, dense),
        "without normalization": relative(bare, dense),
    }


def judged(residual: Tensor, variance: Tensor | float) -> dict[str, Any]:
    """NLL (nats) and coverage of normal distributions, with no spread of their own."""
    variance = torch.as_tensor(variance, dtype=residual.dtype, device=residual.device)
    nll = 0.5 * (residual.square() / variance + (2 * math.pi * variance).log())
    inside = (residual.abs() / variance.sqrt() < 1.959964).double()
    return {"nll": float(nll.mean()), "coverage": float(inside.mean()), "inside": 0.0, "gap": 0.0, "groups": {}}


def _measured(la: LinearizedLaplace, data: CurveDataModule, grid: Tensor) -> dict[str, Any]:
    """What one panel shows and the table says of it."""
    band = la.predictive(grid.unsqueeze(-1))
    test = la.predictive(data.test.x)
    middle = la.predictive(torch.zeros_like(data.test.x[:1]))
    return judged(data.test.y.unsqueeze(-1) - test.mean, test.variance) | {
        "inside": float(test.epistemic.mean().sqrt()),
        "gap": float(middle.epistemic.sqrt()),
        "log_evidence": la.log_marginal_likelihood() if la.evaluate_at == "tangent_mode" else None,
        "groups": {g.name: {"precision": g.precision, "gamma": g.gamma, "pruned": g.pruned} for g in la.report()},
        "mean": band.mean[:, 0],
        "epistemic": band.epistemic[:, 0].sqrt(),
    }


def report_bands(out: Path, recipe: str, bands: Path) -> Outcome:
    """Write ``report.md`` with the figure of bands and a table of what was chosen, from `compute_bands`' folder."""
    page, found = Report(out, recipe), Outcome.load(bands).results
    page.add(bands_table(found["rivals"] | found["rows"], page.table.title), heading=False)
    page.figure("bands", draw_bands, found)
    caption = "norms over the test inputs; θ: the matrices and the last bias, where nothing else is said"
    sizes = {"‖f − Jθ~‖ / ‖f‖": lambda value: f"{value:.2g}"}
    page.add(table("When the tangent model is h = Jθ", found["offsets"], sizes, caption))
    if found["factors"]:
        columns = {
            f"k = {k:g}": lambda row, n=n: f"{row[n]['gap']:.4g}{marks([row[n]])}"
            for n, k in enumerate(found["factors"])
        }
        rows = {band_title(name): row for name, row in found["spreads"].items()}
        caption = "spread in the gap of networks whose normalized weights are multiplied by k, which compute the same"
        page.add(table("The scale of the linearization point", rows, columns, caption))
        page.figure("scale", draw_scale, found, title="Loss and spread along the scale of normalized weights")
    return page.done()


def band_title(name: str) -> str:
    """What the report calls a band: by a precision, or by a choice."""
    plain = name if name in (ALONE, RESIDUAL) else f"λ = {name}"
    return plain if "/" not in name else Choice.parse(name).title


def bands_table(rows: Found, title: str) -> Grid:
    """Precisions, test likelihood and spread of every band."""

    def precisions(row: Found) -> str:
        groups = row["groups"].values()
        texts = (f"{g['precision']:.3g} ({g['gamma']:.1f}{', pruned' if g['pruned'] else ''})" for g in groups)
        return ", ".join(texts)

    numbers = {
        "test NLL": ("nll", "{:.3f}"),
        "covered": ("coverage", "{:.1%}"),
        "spread on data": ("inside", "{:.3g}"),
        "spread in gap": ("gap", "{:.3g}"),
    }
    columns: dict[str, Any] = {"λ (effective directions)": precisions} | {
        name: lambda row, key=key, form=form: form.format(row[key]).replace("%", " %") + marks([row])
        for name, (key, form) in numbers.items()
    }
    caption = (
        "Several λ: first layer, second layer, last layer. NLL in nats; covered: targets within the 95 % band (with "
        "noise); spread: epistemic standard deviation, root mean square over the test inputs and in the middle of the "
        "gap. M(θ~): evidence at the trained weights; M(θ*): at the joint stationary point (Recommendation 1). "
        f"{OPEN}: the evidence had not converged, so that the number is no result."
    )
    return table(title, {band_title(name): row for name, row in rows.items()}, columns, caption)


def draw_scale(path: Path, found: Found) -> None:
    """Losses along the factor of normalized weights, and the spread in the gap of networks multiplied by it."""
    with plots.figure(path, 2, width=4.2) as (losses, spreads):
        for name, color in (("network", plots.GRAY), ("tangent", plots.BLUE)):
            label = {"network": r"network, $L_f$", "tangent": r"tangent model, $L_h$"}[name]
            losses.plot(found["along"]["ratios"], found["along"][name], color=color, label=label)
        losses.set(xlabel="factor $k$ of normalized weights", ylabel="loss (nats)", yscale="log", xscale="log")
        for (name, rows), color in zip(found["spreads"].items(), plots.COLORS, strict=False):
            gaps = [row["gap"] for row in rows]
            spreads.plot(found["factors"], gaps, color=color, marker="o", label=in_latex(band_title(name)))
        spreads.set(
            xlabel="factor $k$ of the linearization point", ylabel="spread in the gap", xscale="log", yscale="log"
        )
        spreads.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        spreads.yaxis.set_major_formatter("{x:g}")
        spreads.yaxis.set_minor_formatter("")
        for ax in (losses, spreads):
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def draw_band(ax: Any, found: Found, mean: Sequence[float], epistemic: Sequence[float], color: str) -> None:
    """A mean on the grid with one and two standard deviations, and the training points."""
    middle, spread = np.asarray(mean), np.asarray(epistemic)
    for times, alpha in ((1, 0.3), (2, 0.15)):
        low, high = middle - times * spread, middle + times * spread
        ax.fill_between(found["grid"], low, high, color=color, alpha=alpha, linewidth=0)
    ax.plot(found["grid"], middle, color=color)
    ax.plot(found["train_x"], found["train_y"], linestyle="", marker=".", color="black", markersize=2.5)


def draw_bands(path: Path, found: Found) -> None:
    """The bands in two rows: precisions set by hand, precisions chosen by the evidence."""
    rows = found["rows"]
    lines = [[name for name in rows if "/" not in name], [name for name in rows if "/" in name]]
    with plots.grid(path, 2, max(map(len, lines)), 2.6, 2.4, sharex=True, sharey=True) as axes:
        for line, names, color in zip(axes, lines, (plots.GRAY, plots.BLUE), strict=True):
            for ax in line[len(names) :]:
                ax.set_visible(False)
            for ax, name in zip(line, names, strict=False):
                draw_band(ax, found, rows[name]["mean"], rows[name]["epistemic"], color)
                ax.set_title(in_latex(band_title(name)))
                text = f"test NLL {rows[name]['nll']:.2f}{'' if rows[name]['converged'] else ' (not converged)'}"
                ax.text(0.03, 0.03, text, transform=ax.transAxes, fontsize=8)
        axes[0, 0].set(ylim=(-4, 4), xlim=(-REACH, REACH))
