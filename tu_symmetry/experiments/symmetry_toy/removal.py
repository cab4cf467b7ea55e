"""What is left of a posterior when every network is scaled and sorted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from tu_symmetry.experiments.symmetry_toy.groups import TwoGroupsDataModule
from tu_symmetry.experiments.symmetry_toy.networks import Perceptron
from tu_symmetry.files import write_safetensors
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Display
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.action import apply_permutation, apply_scale
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome

FORMS = "forms.safetensors"


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
) -> Outcome:
    """Keep the networks that fit, scale and sort each of them, and measure what is left of the spread.

    Args:
        out: folder of the results and of ``forms.safetensors``: form and name to ``[kept, ...]``.
        model: the architecture; its own weights do not matter.
        data: the points that the networks were trained on.
        samples: folder of the networks.
        largest_loss: networks whose mean loss over the data (nats) is above it are left out.
        norm: the norm of every hidden unit's incoming weights after scaling.
        radius: the radius of DBSCAN, in units of the root mean square norm of the networks' weights.
        neighbors: networks within the radius that make a network the core of a mode (itself included).
        least_share: the least share of all networks that a cluster must hold to count as a mode.

    Raises:
        ValueError: fewer than two networks fit.
    """
    trained, x = SampleStore.open(samples, like=model.state_dict()).load(), data.points.x
    losses = mean_losses(model, trained, data)
    fits = losses <= largest_loss
    kept = int(fits.sum())
    if kept < 2:
        raise ValueError(
            f"of {len(losses)} networks {kept} end with a mean loss of at most {largest_loss}; the median is "
            f"{float(losses.median()):.3g} nats: train longer, or move the groups apart"
        )
    model, x = model.double(), x.double()
    graph = discover_symmetries(model, x[:2])
    raw = list(unstack({name: t[fits].double() for name, t in trained.items()}))
    forms: dict[str, list[dict[str, Tensor]]] = {k: [] for k in ("raw", "scaled", "least", "sorted", "both", "cost")}
    error = 0.0
    with Display().track("removing symmetries", len(raw)) as tracker:
        for i, state in enumerate(raw):
            made = {"raw": state, "scaled": rescaled(graph, state, norm), "least": rescaled(graph, state, None)}
            for plain, ordered in (("raw", "sorted"), ("scaled", "both"), ("least", "cost")):
                made[ordered] = sorted_by_output(graph, made[plain])
            outputs = torch.stack([functional_call(model, s, (x,)) for s in made.values()])
            error = max(error, float((outputs - outputs[0]).abs().max() / outputs[0].abs().max()))
            for name, form in made.items():
                forms[name].append(form)
            tracker.update(i + 1)
    stacked = {name: {k: torch.stack([s[k] for s in states]) for k in raw[0]} for name, states in forms.items()}
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / FORMS, {f"{name}/{k}": t for name, states in stacked.items() for k, t in states.items()})
    numbers: dict[str, dict[str, Any]] = {}
    for name, states in stacked.items():
        points = torch.cat([t.flatten(1) for t in states.values()], dim=1)
        modes = [s for s in cluster_shares(points, radius, neighbors) if s >= least_share]
        variance = float(points.var(0).sum())
        relative = variance / float(points.square().sum(1).mean())
        numbers[name] = {
            "variance": variance,
            "relative_variance": relative,
            "modes": len(modes),
            "in_modes": sum(modes),
        }
    collapse = numbers["raw"]["variance"] / numbers["both"]["variance"]
    quantiles = losses.double().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device="cpu"))
    return Outcome(
        {
            "trained": len(losses),
            "kept": kept,
            "loss_deciles": dict(zip(("10 %", "50 %", "90 %"), quantiles.tolist(), strict=True)),
            "forms": numbers,
            "output_error": error,
        },
        f"{kept} of {len(losses)} networks fit, {numbers['raw']['modes']} → {numbers['both']['modes']} modes, sum of "
        f"marginal variances {collapse:.0f} times smaller",
    )


@torch.no_grad()
def mean_losses(model: Perceptron, states: Mapping[str, Tensor], data: TwoGroupsDataModule) -> Tensor:
    """Mean binary cross-entropy in nats ``[networks]`` of stacked states over all points."""
    x, y = data.points.x, data.points.y

    def loss(state: dict[str, Tensor]) -> Tensor:
        return binary_cross_entropy_with_logits(functional_call(model, state, (x,)), y)

    found: Tensor = vmap(loss)(dict(states))
    return found


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


def cluster_shares(points: Tensor, radius: float, neighbors: int) -> list[float]:
    """Shares of the points in each cluster that DBSCAN finds, largest first; what belongs to none is left out."""
    from sklearn.cluster import DBSCAN

    scale = float(points.square().sum(1).mean().sqrt())
    labels = torch.from_numpy(DBSCAN(eps=radius, min_samples=neighbors).fit((points / scale).numpy()).labels_)
    counts = torch.bincount(labels[labels >= 0])
    return (counts.sort(descending=True).values / len(points)).tolist()
