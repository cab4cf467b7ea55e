"""The curves of arXiv 2401.00611: accuracy against pruning level (Figure 5) and loss along interpolations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tu_symmetry.tables.predict import accuracy, logits, mean_probabilities, unstack
from tu_symmetry.tables.stage import Results, StageContext, stage


@dataclass(frozen=True)
class PruningOptions:
    """What is pruned.

    Attributes:
        keep: shares of the weights that are kept, those of lowest sigma.
        samples: draws from each q.
    """

    keep: list[float] = field(default_factory=lambda: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01])
    samples: int = 200


@dataclass(frozen=True)
class InterpolationOptions:
    """Which segments are walked.

    Attributes:
        points: number of points on each, both ends included.
        pairs: number of pairs of each source; the reference with each of the others in turn.
    """

    points: int = 21
    pairs: int = 4


@stage(inputs=("ensemble", "vi", "hmc_compact", "ensemble_compact"))
def prune(context: StageContext, options: PruningOptions) -> Results:
    """Accuracy of pruned samples (own sigma), and of the ensemble's mean and members pruned by HMC's and VI's sigma.

    A sigma of another method orders the units of *its* networks; so the means are first matched to the ensemble's mean
    by activation matching, and the masks move along. A random order of the weights is the control.
    """
    from tu_symmetry.alignment.activations import activation_matching
    from tu_symmetry.posterior.compact import CompactPosterior
    from tu_symmetry.posterior.compact import prune as masked
    from tu_symmetry.symmetry.action import apply_permutation, permute_tensors
    from tu_symmetry.tables.sampling import load_samples

    data, model, graph = context.data, context.model, context.graph

    def load(role: str, name: str) -> CompactPosterior:
        return CompactPosterior.load(context.inputs[role].folder / name, graph).to(context.device)

    q = {
        "HMC": load("hmc_compact", "q_r.safetensors"),
        "ensemble": load("ensemble_compact", "q_r.safetensors"),
        "VI": load("vi", "q.safetensors"),
    }
    center = q["ensemble"].mean
    moves = {
        name: activation_matching(graph, model, center, other.mean, data.train).permutation
        for name, other in q.items()
        if name != "ensemble"
    }
    members = load_samples(context.inputs["ensemble"], context.device)
    member_moves = [activation_matching(graph, model, center, m, data.train).permutation for m in unstack(members)]
    aligned = [apply_permutation(graph, p, m) for p, m in zip(member_moves, unstack(members), strict=True)]
    generator = context.generator("control")
    order = {n: torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.device) for n, t in center.items()}
    draws = {name: one.sample(options.samples, generator=context.generator(name)) for name, one in q.items()}

    curves: dict[str, list[float]] = {}

    def add(curve: str, value: float) -> None:
        curves.setdefault(curve, []).append(value)

    with context.track("pruning", len(options.keep)) as tracker:
        for i, keep in enumerate(options.keep):
            for name, posterior in q.items():
                mask = posterior.pruning_mask(keep)
                predictive = mean_probabilities(model, masked(draws[name], mask), data.test)
                add(f"{name} samples, own σ", accuracy(predictive, data.test_y))
                add(f"{name} mean, own σ", _accuracy_of(context, masked(posterior.mean, mask)))
            foreign = {name: permute_tensors(graph, p, q[name].pruning_mask(keep)) for name, p in moves.items()}
            foreign["random"] = _lowest(order, keep)
            for name, mask in foreign.items():
                label = "random order" if name == "random" else f"{name}'s σ"
                add(f"ensemble mean, {label}", _accuracy_of(context, masked(center, mask)))
                single = [_accuracy_of(context, masked(m, mask)) for m in aligned]
                add(f"single networks, {label}", sum(single) / len(single))
            tracker.update(i + 1)
    half = min(range(len(options.keep)), key=lambda i: abs(options.keep[i] - 0.5))
    own, foreign_hmc = (curves[f"ensemble mean, {which}"][half] for which in ("own σ", "HMC's σ"))
    return {
        "keep": options.keep,
        "curves": curves,
        "headline": f"keeping {options.keep[half]:.0%}: ensemble mean {own:.3f} (own σ), {foreign_hmc:.3f} (HMC's σ)",
    }


@stage(inputs=("hmc", "ensemble"))
def interpolate(context: StageContext, options: InterpolationOptions) -> Results:
    """Training loss between networks, before and after activation matching."""
    from tu_symmetry.alignment.activations import activation_matching
    from tu_symmetry.alignment.barrier import loss_barrier
    from tu_symmetry.symmetry.action import apply_permutation
    from tu_symmetry.tables.sampling import load_samples

    data, model, graph = context.data, context.model, context.graph
    found: Results = {}
    with context.track("interpolating", 4 * options.pairs) as tracker:
        done = 0
        for source in ("ensemble", "hmc"):
            first, *others = unstack(load_samples(context.inputs[source], context.device, options.pairs + 1))
            for kind in ("before", "after"):
                paths = []
                for other in others:
                    if kind == "after":
                        matching = activation_matching(graph, model, first, other, data.train)
                        other = apply_permutation(graph, matching.permutation, other)
                    paths.append(loss_barrier(model, first, other, data.train, cross_entropy, points=options.points))
                    done += 1
                    tracker.update(done, path=f"{source} {kind}")
                found["ratios"] = paths[0].ratios
                found[f"{source}/{kind}"] = {"loss": [p.losses for p in paths], "barrier": [p.barrier for p in paths]}
    means = {k: sum(v["barrier"]) / len(v["barrier"]) for k, v in found.items() if k != "ratios"}
    found["headline"] = (
        f"mean barrier before → after: ensemble {means['ensemble/before']:.3g} → {means['ensemble/after']:.3g}, "
        f"HMC {means['hmc/before']:.3g} → {means['hmc/after']:.3g} nats"
    )
    return found


def _lowest(order: dict[str, Tensor], keep: float) -> dict[str, Tensor]:
    flat = torch.cat([t.flatten() for t in order.values()])
    threshold = flat.sort().values[max(round(keep * flat.numel()), 1) - 1]
    return {name: t <= threshold for name, t in order.items()}


def _accuracy_of(context: StageContext, state: dict[str, Tensor]) -> float:
    return accuracy(logits(context.model, state, context.data.test), context.data.test_y)
