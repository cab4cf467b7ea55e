"""The toy figure of arXiv 2310.08287: the weights of a 2-2-1 perceptron before and after removing symmetries.

Thousands of initializations are trained at once, those that fit are kept as samples of the posterior, and four panels
show the last layer's weights: raw, scaled, sorted, both. How far the posterior collapses is told by two numbers, the
sum of the marginal variances of all weights and the number of modes that a clustering finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.symmetry.action import apply_permutation, apply_scale
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.grid import Grid
from tu_symmetry.tables.predict import unstack
from tu_symmetry.tables.stage import Results, StageContext, stage

NETWORKS = "networks.safetensors"
FORMS = "forms.safetensors"
PANELS = {"raw": "Raw", "scaled": "Scaled", "sorted": "Sorted", "both": "Scaled and sorted"}


class Perceptron(nn.Module):
    """Two inputs, two hidden ReLU units, one logit.

    Args:
        bias: whether the layers have biases.
    """

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 2, bias=bias)
        self.output = nn.Linear(2, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch]`` of inputs ``[batch, 2]``."""
        return self.output(self.hidden(x).relu()).squeeze(-1)


@dataclass(frozen=True)
class NetworksOptions:
    """Data and training.

    Attributes:
        networks: initializations.
        points: in each of the two groups.
        centers: of the groups.
        spread: standard deviation of each coordinate around its center.
        bias: whether the layers have biases.
        initial_std: of every weight, normal.
        learning_rate: of SGD on the binary cross-entropy.
        batch_size: every network draws its own batches.
        epochs: over the data.
        largest_loss: networks whose mean loss over the data (nats) ends above it are left out.
    """

    networks: int = 10_000
    points: int = 200
    centers: list[list[float]] = field(default_factory=lambda: [[1.0, 0.0], [0.0, 1.0]])
    spread: float = 0.2
    bias: bool = False
    initial_std: float = 1.0
    learning_rate: float = 2.0
    batch_size: int = 10
    epochs: int = 10
    largest_loss: float = 0.01


@dataclass(frozen=True)
class RemovalOptions:
    """Canonical scale, and what counts as a mode.

    Attributes:
        norm: of every hidden unit's incoming weights after scaling.
        radius: of DBSCAN, in units of the root mean square norm of the networks' weights.
        neighbors: networks within the radius that make a network the core of a mode (itself included).
        least_share: of all networks that a cluster must hold to count as a mode.
    """

    norm: float = 3.0
    radius: float = 0.1
    neighbors: int = 20
    least_share: float = 0.01


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


@stage()
def train_networks(context: StageContext, options: NetworksOptions) -> Results:
    """Train all initializations at once and keep those that fit: states ``[kept, ...]``."""
    generator = context.generator()
    centers = torch.tensor(options.centers).repeat_interleave(options.points, 0)
    x = (centers + options.spread * torch.randn(centers.shape, generator=generator)).to(context.device)
    y = torch.arange(2.0).repeat_interleave(options.points).to(context.device)
    model = Perceptron(options.bias).to(context.device)
    weights = {
        name: (options.initial_std * torch.randn(options.networks, *p.shape, generator=generator)).to(context.device)
        for name, p in model.named_parameters()
    }

    def loss(state: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(functional_call(model, state, (inputs,)), targets)

    step: Callable[..., tuple[dict[str, Tensor], Tensor]] = vmap(grad_and_value(loss))
    with context.track(f"training {options.networks} networks", options.epochs) as tracker:
        for epoch in range(options.epochs):
            order = torch.rand(options.networks, len(x), generator=generator).argsort(1).to(context.device)
            for batch in order.split(options.batch_size, dim=1):
                gradients, _ = step(weights, x[batch], y[batch])
                weights = {name: w - options.learning_rate * gradients[name] for name, w in weights.items()}
            tracker.update(epoch + 1)
        losses = vmap(loss, in_dims=(0, None, None))(weights, x, y)
    fits = losses <= options.largest_loss
    kept = int(fits.sum())
    if kept < 2:
        raise ValueError(
            f"of {options.networks} networks {kept} end with a mean loss of at most {options.largest_loss}; the "
            f"median is {float(losses.median()):.3g} nats: train longer, or move the groups apart"
        )
    tensors = {name: w[fits].cpu().contiguous() for name, w in weights.items()}
    write_safetensors(context.folder / NETWORKS, tensors | {"x": x, "y": y})
    quantiles = losses.double().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=losses.device))
    return {
        "trained": options.networks,
        "kept": kept,
        "loss_deciles": {"10 %": float(quantiles[0]), "50 %": float(quantiles[1]), "90 %": float(quantiles[2])},
        "bias": options.bias,
        "headline": f"{kept} of {options.networks} networks have a mean loss of at most {options.largest_loss}",
    }


def rescaled(graph: SymmetryGraph, state: Mapping[str, Tensor], norm: float | None) -> dict[str, Tensor]:
    """The network with incoming weights of the given norm in every hidden unit, or of least mass for None."""
    from tu_symmetry.scaling.canonical import canonicalize

    if norm is None:
        return canonicalize(graph, state, "min_mass", certify=False).state
    unit = canonicalize(graph, state, "unit_norm", certify=False).state
    stretch = {g.name: torch.full((g.size,), math.log(norm), dtype=torch.float64) for g in graph.scales}
    return apply_scale(graph, stretch, unit)


def sorted_by_output(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network with its hidden units in ascending order of the last layer's weights."""
    (group,) = graph.permutations
    return apply_permutation(graph, {group.name: state["output.weight"][0].argsort()}, state)


def flat(states: Mapping[str, Tensor]) -> Tensor:
    """Weight vectors ``[samples, weights]`` of a stack of states."""
    return torch.cat([t.flatten(1) for t in states.values()], dim=1)


def cluster_shares(points: Tensor, radius: float, neighbors: int) -> list[float]:
    """Shares of the points in each cluster that DBSCAN finds, largest first; what belongs to none is left out."""
    from sklearn.cluster import DBSCAN

    scale = float(points.square().sum(1).mean().sqrt())
    labels = torch.from_numpy(DBSCAN(eps=radius, min_samples=neighbors).fit((points / scale).numpy()).labels_)
    counts = torch.bincount(labels[labels >= 0])
    return (counts.sort(descending=True).values / len(points)).tolist()


@stage(inputs=("networks",))
def remove(context: StageContext, options: RemovalOptions) -> Results:
    """Scale and sort every network, and measure what is left of the spread."""
    tensors = {k: t.double() for k, t in read_tensors(context.inputs["networks"].folder / NETWORKS).items()}
    x, _ = tensors.pop("x"), tensors.pop("y")
    model = Perceptron(bool(context.inputs["networks"].results["bias"])).double()
    graph = discover_symmetries(model, x[:2])
    raw = list(unstack(tensors))
    forms: dict[str, list[dict[str, Tensor]]] = {k: [] for k in ("raw", "scaled", "least", "sorted", "both", "cost")}
    error = 0.0
    with context.track("removing symmetries", len(raw)) as tracker:
        for i, state in enumerate(raw):
            made = {
                "raw": state,
                "scaled": rescaled(graph, state, options.norm),
                "least": rescaled(graph, state, None),
            }
            for plain, ordered in (("raw", "sorted"), ("scaled", "both"), ("least", "cost")):
                made[ordered] = sorted_by_output(graph, made[plain])
            outputs = torch.stack([functional_call(model, s, (x,)) for s in made.values()])
            error = max(error, float((outputs - outputs[0]).abs().max() / outputs[0].abs().max()))
            for name, form in made.items():
                forms[name].append(form)
            tracker.update(i + 1)
    stacked = {name: {k: torch.stack([s[k] for s in states]) for k in raw[0]} for name, states in forms.items()}
    write_safetensors(
        context.folder / FORMS, {f"{name}/{k}": t for name, states in stacked.items() for k, t in states.items()}
    )
    numbers = {}
    for name, states in stacked.items():
        points = flat(states)
        shares = cluster_shares(points, options.radius, options.neighbors)
        variance = float(points.var(0).sum())
        numbers[name] = {
            "variance": variance,
            "relative_variance": variance / float(points.square().sum(1).mean()),
            "modes": sum(s >= options.least_share for s in shares),
            "in_modes": sum(s for s in shares if s >= options.least_share),
        }
    collapse = numbers["raw"]["variance"] / numbers["both"]["variance"]
    modes = f"{numbers['raw']['modes']} → {numbers['both']['modes']} modes"
    return {
        "forms": numbers,
        "output_error": error,
        "headline": f"{modes}, sum of marginal variances {collapse:.0f} times smaller",
    }


def draw(path: Path, points: Mapping[str, Tensor], titles: Mapping[str, str]) -> None:
    """Four panels of the last layer's weights, on a common logarithmic color scale of counts.

    Args:
        path: of the PNG.
        points: panel to ``[samples, 2]``.
        titles: panel to title.
    """
    from matplotlib.colors import LogNorm

    from tu_symmetry.tables import plots

    limit = 1.05 * max(float(p.abs().quantile(0.998)) for p in points.values())
    with plots.figure(path, len(points), width=2.9, height=3.1) as axes:
        for ax, (name, values) in zip(axes, points.items(), strict=True):
            _, _, _, image = ax.hist2d(
                values[:, 0].numpy(),
                values[:, 1].numpy(),
                bins=90,
                range=[[-limit, limit]] * 2,
                norm=LogNorm(1, 1000),
                cmap="viridis",
                rasterized=True,
            )
            ax.axhline(0, color=plots.GRAY, linewidth=0.5)
            ax.axvline(0, color=plots.GRAY, linewidth=0.5)
            ax.set(title=titles[name], xlabel="output weight of unit 1", aspect="equal")
        axes[0].set_ylabel("output weight of unit 2")
        axes[-1].figure.colorbar(image, ax=axes[-1], label="networks in a bin", shrink=0.8)


@stage(inputs=("networks", "removal"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md`` with the four panels and the numbers of the collapse."""
    networks, removal = (context.inputs[role].results for role in ("networks", "removal"))
    forms = read_tensors(context.inputs["removal"].folder / FORMS)
    draw(context.folder / "posterior.png", {k: forms[f"{k}/output.weight"][:, 0] for k in PANELS}, PANELS)
    names = {
        "raw": "raw",
        "scaled": "scaled",
        "sorted": "sorted",
        "both": "scaled and sorted",
        "least": "least mass",
        "cost": "least mass and sorted",
    }
    rows = []
    for name, label in names.items():
        found = removal["forms"][name]
        cells = [f"{found['variance']:.3g}", f"{found['relative_variance']:.4f}"]
        rows.append([label, *cells, str(found["modes"]), f"{100 * found['in_modes']:.1f}"])
    header = ["", "variance", "relative", "modes", "in modes (%)"]
    caption = (
        f"{networks['kept']} of {networks['trained']} networks fit; all forms of a network agree in their outputs to "
        f"{removal['output_error']:.0e}. Variance: sum of the marginal variances of all weights; relative: over the "
        "mean squared norm."
    )
    grid = Grid(context.table.title, header, rows, caption)
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {context.table.title}", f"Reproduces: {context.table.source}.", context.table.note, grid.markdown()]
    parts += ["![posterior](posterior.png)", f"## Hardware and versions\n\n{environment}"]
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [grid.to_dict()], "headline": f"{context.name}/report.md"}
