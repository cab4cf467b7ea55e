"""The stages of arXiv 2401.00611, Table 1, after sampling: fit q_d and q_r, and compare all of them with HMC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.tables.predict import accuracy, logits, mean_probabilities, nll, sample_count
from tu_symmetry.tables.stage import Results, StageContext, stage


@dataclass(frozen=True)
class CompactOptions:
    """How q_d and q_r are fitted.

    Attributes:
        samples: how many of the states are used, evenly spaced; None for all.
        first: number of the first state that is used (counted from 0).
        method: ``activation`` matching over the training set, as the paper does it, or ``weight`` matching.
        reference: what the states are aligned to, see :func:`tu_symmetry.align`.
    """

    samples: int | None = None
    first: int = 0
    method: Literal["activation", "weight"] = "activation"
    reference: Literal["first", "medoid", "mean", "universe"] = "first"


@dataclass(frozen=True)
class EvaluateOptions:
    """How predictives are compared.

    Attributes:
        samples: draws from each q in a predictive.
        repeats: how many such predictives are made from independent draws; their figures are averaged. (Draws from a
            wide q are poor networks; their predictive varies from set to set, and more draws would flatter it.)
        reference_samples: how many HMC samples make up the reference predictive, evenly spaced; None for all.
        reference_first: number of the first of them (counted from 0).
    """

    samples: int = 100
    repeats: int = 1
    reference_samples: int | None = None
    reference_first: int = 0


@stage(inputs=("samples",))
def fit_compact(context: StageContext, options: CompactOptions) -> Results:
    """Align samples to a reference and fit the diagonal Gaussians q_d (as they are) and q_r (aligned)."""
    from tu_symmetry.alignment.align import align
    from tu_symmetry.posterior.compact import CompactPosterior
    from tu_symmetry.tables.sampling import load_samples

    states = load_samples(context.inputs["samples"], context.device, options.samples, options.first)
    graph = context.graph
    with context.track("aligning", sample_count(states)) as tracker:
        alignment = align(
            graph,
            states,
            reference=options.reference,
            method=options.method,
            model=context.model,
            dataloader=context.data.train,
            progress=lambda at: tracker.update(at["done"]),
        )
    q_d = CompactPosterior.from_states(states, graph, align=False)
    q_r = CompactPosterior.from_states(alignment.states, graph, align=False)
    q_r.metadata |= {"aligned": True, "method": options.method, "reference": options.reference}
    q_d.save(context.folder / "q_d.safetensors")
    q_r.save(context.folder / "q_r.safetensors")
    counts = alignment.transpositions
    moved = [count for i, count in enumerate(counts) if i != alignment.reference]
    largest = sum(g.size - 1 for g in graph.permutations)
    mean = sum(moved) / len(moved)
    sigma = {name: _root_mean_square(q.std) for name, q in (("q_d", q_d), ("q_r", q_r))}
    return {
        "aligned": len(counts),
        "transpositions": counts,
        "distances_before": alignment.distances_before,
        "distances_after": alignment.distances_after,
        "transpositions_mean": mean,
        "transpositions_min": min(moved),
        "transpositions_max": max(moved),
        "transpositions_random": sum(g.size - _harmonic(g.size) for g in graph.permutations),
        "sigma_rms": sigma,
        "headline": f"NoT {mean:.1f} ({min(moved)} to {max(moved)} of {largest}), "
        f"rms σ {sigma['q_d']:.3g} → {sigma['q_r']:.3g}",
    }


@stage(inputs=("hmc", "ensemble", "vi", "hmc_compact", "ensemble_compact"), version=2)
def evaluate(context: StageContext, options: EvaluateOptions) -> Results:
    """Agreement with HMC, total variation to HMC, and accuracy of samples and of means, for every column."""
    from tu_symmetry.metrics.functional import predictive_agreement, predictive_total_variation
    from tu_symmetry.posterior.compact import CompactPosterior
    from tu_symmetry.tables.sampling import load_samples

    model, data = context.model, context.data
    hmc = load_samples(context.inputs["hmc"], context.device, options.reference_samples, options.reference_first)
    compacts = {
        "hmc/q_d": context.inputs["hmc_compact"].folder / "q_d.safetensors",
        "hmc/q_r": context.inputs["hmc_compact"].folder / "q_r.safetensors",
        "ensemble/q_d": context.inputs["ensemble_compact"].folder / "q_d.safetensors",
        "ensemble/q_r": context.inputs["ensemble_compact"].folder / "q_r.safetensors",
        "vi/q": context.inputs["vi"].folder / "q.safetensors",
    }
    sampled = {"hmc/sample": hmc, "ensemble/sample": load_samples(context.inputs["ensemble"], context.device)}
    total = sum(sample_count(s) for s in sampled.values()) + options.repeats * options.samples * len(compacts)
    predictives: dict[str, list[Tensor]] = {}
    mean_accuracy: dict[str, float] = {}
    with context.track("predicting", total) as tracker:
        done = 0

        def predict(column: str, states: dict[str, Tensor]) -> None:
            nonlocal done
            probabilities = mean_probabilities(
                model, states, data.test, lambda n: tracker.update(done + n, column=column)
            )
            predictives.setdefault(column, []).append(probabilities)
            done += sample_count(states)

        for column, states in sampled.items():
            predict(column, states)
        for column, path in compacts.items():
            q = CompactPosterior.load(path, context.graph).to(context.device)
            generator = context.generator(column)
            for _ in range(options.repeats):
                predict(column, q.sample(options.samples, generator=generator))
            mean_accuracy[column] = accuracy(logits(model, q.mean, data.test), data.test_y)
    (reference,) = predictives["hmc/sample"]
    figures: dict[str, Callable[[Tensor], float]] = {
        "agreement": lambda p: float(predictive_agreement(p, reference)),
        "tv": lambda p: float(predictive_total_variation(p, reference)),
        "accuracy": lambda p: accuracy(p, data.test_y),
        "nll": lambda p: nll(p, data.test_y),
    }
    rows: dict[str, dict[str, float]] = {"mean_accuracy": mean_accuracy}
    spread: dict[str, dict[str, float]] = {}
    for name, figure in figures.items():
        values = {c: torch.tensor([figure(p) for p in ps], dtype=torch.float64) for c, ps in predictives.items()}
        rows[name] = {column: v.mean().item() for column, v in values.items()}
        spread[name] = {column: v.std().item() for column, v in values.items() if len(v) > 1}
    gain = {name: rows["accuracy"][f"{name}/q_r"] for name in ("hmc", "ensemble")}
    return {
        "rows": rows,
        "spread": spread,
        "draws": [options.repeats, options.samples],
        "reference_samples": sample_count(hmc),
        "headline": f"accuracy of q_d → q_r: HMC {rows['accuracy']['hmc/q_d']:.3f} → {gain['hmc']:.3f}, "
        f"ensemble {rows['accuracy']['ensemble/q_d']:.3f} → {gain['ensemble']:.3f}",
    }


def _harmonic(n: int) -> float:
    """Expected number of cycles of a random permutation of ``n``."""
    return sum(1 / k for k in range(1, n + 1))


def _root_mean_square(tensors: dict[str, Tensor]) -> float:
    flat = torch.cat([t.flatten().double() for t in tensors.values()])
    return flat.square().mean().sqrt().item()
