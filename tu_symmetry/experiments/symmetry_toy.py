"""The toy figure of arXiv 2310.08287: the posterior of a 2-2-1 perceptron, raw, scaled, sorted, and both.

Networks are trained by :class:`~tu_symmetry.routines.MembersRoutine` on :class:`TwoGroupsDataModule`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LogNorm
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from tu_symmetry.datamodules.images import ImageDataModule, Part
from tu_symmetry.datamodules.readers import LabeledImages
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.metrics.functional.two_sample import vectors_test
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import stack_states, unstack
from tu_symmetry.symmetry.action import apply_permutation, apply_scale
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table

FORMS = "forms.safetensors"
ROWS = {
    "raw": "raw",
    "scaled": "scaled",
    "sorted": "sorted",
    "both": "scaled and sorted",
    "least": "least mass",
    "cost": "least mass and sorted",
}
MIXTURES = {
    "raw": "raw",
    "own": "drawn orders, own scales",
    "mixture": "drawn orders, drawn scales",
}


class TwoGroupsDataModule(ImageDataModule):
    """Points around two centers in the plane; targets are 0.0 and 1.0. Validation and test see the training points.

    ``spread`` is the standard deviation of each coordinate around its center; with ``orders`` for networks trained at
    once, batches are ``[orders, batch, ...]``, and the m-th order is that of ``seed + m``. ``file`` has other points, a
    CSV file with a header and a line ``x,y,label`` for each.
    """

    input_shape = (2,)
    scale = None

    def __init__(
        self,
        points: int = 200,
        centers: Sequence[Sequence[float]] = ((1.0, 0.0), (0.0, 1.0)),
        spread: float = 0.2,
        batch_size: int = 10,
        orders: int | None = None,
        seed: int = 0,
        file: str | Path | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=None, orders=orders, seed=seed)
        around = torch.tensor(centers, device="cpu").repeat_interleave(points, 0)
        x = around + spread * torch.randn(around.shape, generator=torch.Generator().manual_seed(seed), device="cpu")
        self.points = LabeledImages(x, torch.arange(2.0, device="cpu").repeat_interleave(points))
        if file is not None:
            found = torch.from_numpy(np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2)).float()
            self.points = LabeledImages(found[:, :2], found[:, 2])

    def read(self, part: Part) -> LabeledImages:
        """All points, of whatever part."""
        return self.points


class NormalLinear(nn.Linear):
    """A linear layer with weights and biases from ``N(0, std^2)``; for None from torch's own initialization."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float | None) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        if self.std is None:
            super().reset_parameters()
            return
        with torch.no_grad():
            for p in self.parameters(recurse=False):
                p.normal_(0.0, self.std)


class Perceptron(nn.Module):
    """Two inputs, two hidden ReLU units, one logit; ``initial_std`` is that of all parameters, None for torch's own."""

    def __init__(self, bias: bool = False, initial_std: float | None = 1.0) -> None:
        super().__init__()
        self.hidden = NormalLinear(2, 2, bias, initial_std)
        self.output = NormalLinear(2, 1, bias, initial_std)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch]`` of inputs ``[batch, 2]``."""
        return self.output(self.hidden(x).relu()).squeeze(-1)


def remove(
    out: Path,
    model: Perceptron,
    data: TwoGroupsDataModule,
    samples: Path,
    largest_loss: float = 0.01,
    norm: float = 3.0,
    radius: float = 0.1,
    neighbors: int = 20,
    least_share: float = 0.01,
    window: float = 4.0,
) -> Outcome:
    """Keep the networks that fit, scale and sort each of them, and measure what is left of the spread.

    The proposition of arXiv 2310.08287 (section 2) goes the other way: the posterior is the scaled and sorted one,
    mixed over orders and scales. Both are drawn anew for each network, orders uniformly, scales from those of all
    networks, and the mixture is compared with raw networks, as it is with scales left as they were.

    Args:
        out: gets ``forms.safetensors``: form and name to ``[kept, ...]``.
        largest_loss: networks whose mean loss over the data (nats) is above it are left out.
        norm: the norm of every hidden unit's incoming weights after scaling.
        radius: the radius of DBSCAN, in units of the root mean square norm of the networks' weights.
        neighbors: networks within the radius that make a network the core of a mode (itself included).
        least_share: the least share of all networks that a cluster must hold to count as a mode.
        window: the largest last layer's weight that counts for the variance of these alone, as the figure shows them.
    """
    trained, x, y = SampleStore.open(samples, like=model.state_dict()).load(), data.points.x, data.points.y

    @torch.no_grad()
    def loss(state: dict[str, Tensor]) -> Tensor:
        return binary_cross_entropy_with_logits(functional_call(model, state, (x,)), y)

    losses = vmap(loss)(trained)
    fits = losses <= largest_loss
    kept = int(fits.sum())
    if kept < 2:
        raise ValueError(
            f"of {len(losses)} networks {kept} end with a mean loss of at most {largest_loss}; the median is "
            f"{float(losses.median()):.3g} nats: train longer, or move the groups apart"
        )
    model, points = model.double(), x.double()
    graph = discover_symmetries(model, points[:2])
    forms: dict[str, list[dict[str, Tensor]]] = {k: [] for k in ("raw", "scaled", "least", "sorted", "both", "cost")}
    error, scales = 0.0, []
    for state in tracked("removing symmetries", list(unstack({name: t[fits].double() for name, t in trained.items()}))):
        made = {"raw": state, "scaled": rescaled(graph, state, norm), "least": rescaled(graph, state, None)}
        for plain, ordered in (("raw", "sorted"), ("scaled", "both"), ("least", "cost")):
            made[ordered] = sorted_by_output(graph, made[plain])
        outputs = torch.stack([functional_call(model, s, (points,)) for s in made.values()])
        error = max(error, float((outputs - outputs[0]).abs().max() / outputs[0].abs().max()))
        for name, form in made.items():
            forms[name].append(form)
        norms = [s["hidden.weight"].norm(dim=1) for s in (state, made["scaled"])]
        scales.append((norms[0] / norms[1]).log()[made["scaled"]["output.weight"][0].argsort()])
    stacked = {name: stack_states(states) for name, states in forms.items()}
    generator = torch.Generator("cpu").manual_seed(0)
    shuffled = torch.randperm(kept, generator=generator, device="cpu").tolist()
    for name, drawn in (("own", range(kept)), ("mixture", shuffled)):
        pairs = zip(forms["both"], (scales[k] for k in drawn), strict=True)
        stacked[name] = stack_states([moved(graph, state, factor, generator) for state, factor in pairs])
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / FORMS, {f"{name}/{k}": t for name, states in stacked.items() for k, t in states.items()})
    tests = mixture_tests(*(stacked.pop(name) for name in ("own", "mixture")), raw=stacked["raw"], generator=generator)
    numbers: dict[str, dict[str, Any]] = {}
    for name, states in stacked.items():
        vectors = torch.cat([t.flatten(1) for t in states.values()], dim=1)
        modes = [s for s in cluster_shares(vectors, radius, neighbors) if s >= least_share]
        variance = float(vectors.var(0).sum())
        relative = variance / float(vectors.square().sum(1).mean())
        numbers[name] = {"variance": variance, "relative_variance": relative}
        numbers[name] |= {"modes": len(modes), "in_modes": sum(modes)}
        numbers[name] |= in_window(states["output.weight"][:, 0], window)
    before, after = (numbers[name]["window_variance"] for name in ("raw", "both"))
    return Outcome(
        {
            "trained": len(losses),
            "kept": kept,
            "forms": numbers,
            "output_error": error,
            "window": window,
            "mixtures": tests,
        },
        f"{kept} of {len(losses)} networks fit, variance of the last layer's weights {before:.3g} → {after:.3g}",
    )


def in_window(weights: Tensor, window: float) -> dict[str, Any]:
    """Of last layers' weights ``[networks, 2]`` that lie in a window: variance, share, and numbers by their signs."""
    inside = weights[(weights.abs() <= window).all(1)]
    signs = {"--": 0, "-+": 0, "+-": 0, "++": 0}
    for one, two in (inside > 0).tolist():
        signs["-+"[one] + "-+"[two]] += 1
    variance = float(inside.var(0).sum()) if len(inside) > 1 else math.nan
    return {"window_variance": variance, "in_window": len(inside) / len(weights), "signs": signs}


def rescaled(graph: SymmetryGraph, state: Mapping[str, Tensor], norm: float | None) -> dict[str, Tensor]:
    """The network with incoming weights of the given norm in every hidden unit, or of least mass for None."""
    if norm is None:
        return canonicalize(graph, state, method="min_mass", certify=False).state
    unit = canonicalize(graph, state, method="unit_norm", certify=False).state
    stretch = {g.name: torch.full((g.size,), math.log(norm), dtype=torch.float64, device="cpu") for g in graph.scales}
    return apply_scale(graph, stretch, unit)


def sorted_by_output(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network with its hidden units in ascending order of the last layer's weights."""
    (group,) = graph.permutations
    return apply_permutation(graph, {group.name: state["output.weight"][0].argsort()}, state)


def moved(
    graph: SymmetryGraph, state: Mapping[str, Tensor], scale: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """The network with its hidden units' incoming weights times ``exp(scale)`` ``[2]``, in an order that is drawn."""
    (group,), (scaled,) = graph.permutations, graph.scales
    order = torch.randperm(group.size, generator=generator, device="cpu")
    return apply_permutation(graph, {group.name: order}, apply_scale(graph, {scaled.name: scale}, state))


def mixture_tests(
    own: dict[str, Tensor], mixture: dict[str, Tensor], *, raw: dict[str, Tensor], generator: torch.Generator
) -> dict[str, dict[str, float]]:
    """Squared MMD to 1,000 raw networks (fewer where there are fewer), and its p-value by relabeling.

    All three sets are made of networks that the first one does not hold (but where there are three or two), so that
    under the proposition, and always for ``raw``, both sets are independent draws of one distribution.
    """
    half = max(2, min(1000, len(raw["output.weight"]) // 2))
    vectors = {
        n: torch.cat([t.flatten(1) for t in s.values()], 1) for n, s in zip(MIXTURES, (raw, own, mixture), strict=True)
    }
    tests = {
        n: vectors_test({"": v[-half:]}, {"": vectors["raw"][:half]}, bootstraps=0, generator=generator)
        for n, v in vectors.items()
    }
    return {n: {"value": float(test.value), "p_value": test.p_value} for n, test in tests.items()}


def cluster_shares(points: Tensor, radius: float, neighbors: int) -> list[float]:
    """Shares of the points in each cluster that DBSCAN finds, largest first; what belongs to none is left out."""
    from sklearn.cluster import DBSCAN

    scale = float(points.square().sum(1).mean().sqrt())
    labels = torch.from_numpy(DBSCAN(eps=radius, min_samples=neighbors).fit((points / scale).numpy()).labels_)
    counts = torch.bincount(labels[labels >= 0])
    return (counts.sort(descending=True).values / len(points)).tolist()


def report(out: Path, recipe: str, removal: Path) -> Outcome:
    """Write ``report.md`` with the four panels and the numbers of the collapse, from the folder of :func:`remove`."""
    page, forms, found = Report(out, recipe), read_tensors(removal / FORMS), Outcome.load(removal).results
    page.add(collapse_table(found, page.table.title), heading=False)
    shown = {ROWS[name]: forms[f"{name}/output.weight"][:, 0] for name in ("raw", "scaled", "sorted", "both")}
    page.figure("posterior", draw, shown, found["window"])
    columns = {"MMD": lambda test: f"{test['value']:.5f}", "p": lambda test: f"{test['p_value']:.3f}"}
    rows = {label: found["mixtures"][name] for name, label in MIXTURES.items()}
    page.add(
        table(
            "Raw networks against mixtures of scaled and sorted ones",
            rows,
            columns,
            "squared MMD of all weights to raw networks that the row was not made of",
        )
    )
    mixed = {label: forms[f"{name}/output.weight"][:, 0] for name, label in MIXTURES.items()}
    page.figure("mixture", draw, mixed, found["window"], title="The posterior as a mixture")
    return page.done()


def collapse_table(found: Found, title: str) -> Grid:
    """Variances and modes of every form."""
    columns = {
        "in the window (%)": lambda form: f"{100 * form['in_window']:.1f}",
        "variance there": lambda form: "–" if form["window_variance"] is None else f"{form['window_variance']:.3g}",
        "signs −−, −+, +−, ++": lambda form: ", ".join(f"{n:,}" for n in form["signs"].values()),
        "variance": lambda form: f"{form['variance']:.3g}",
        "relative": lambda form: f"{form['relative_variance']:.4f}",
        "modes": lambda form: str(form["modes"]),
        "in modes (%)": lambda form: f"{100 * form['in_modes']:.1f}",
    }
    caption = (
        f"{found['kept']} of {found['trained']} networks fit; all forms of a network agree in their outputs to "
        f"{found['output_error']:.0e}. Window: both weights of the last layer at most {found['window']:g} in size, "
        "variance and signs of these two; variance: sum of the marginal variances of all weights; relative: over the "
        "mean squared norm."
    )
    return table(title, {label: found["forms"][name] for name, label in ROWS.items()}, columns, caption)


def draw(path: Path, points: Mapping[str, Tensor], limit: float) -> None:
    """Panels of the last layer's weights ``[samples, 2]`` in a window, counts on one logarithmic color scale."""
    with plots.figure(path, len(points), width=2.9, height=3.1) as axes:
        for ax, (name, values) in zip(axes, points.items(), strict=True):
            x, y = values.numpy().T
            box, norm = [[-limit, limit]] * 2, LogNorm(1, 1000)
            *_, image = ax.hist2d(x, y, bins=90, range=box, norm=norm, cmap="viridis", rasterized=True)
            ax.axhline(0, color=plots.GRAY, linewidth=0.5)
            ax.axvline(0, color=plots.GRAY, linewidth=0.5)
            ax.set(title=name.capitalize(), xlabel="output weight of unit 1", aspect="equal")
        axes[0].set_ylabel("output weight of unit 2")
        axes[-1].figure.colorbar(image, ax=axes[-1], label="networks in a bin", shrink=0.8)
