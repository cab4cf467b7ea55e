"""How far the posteriors of the two evidences are apart while a network trains: M(θ~) and M(θ*) at every snapshot.

The figure of the talk on arXiv 2206.08900 with the question whether θ~ becomes θ* if one only optimizes better. Its
divergence is that between "distributions obtained when employing" the two; here these are the Gaussian posteriors of
the tangent model's outputs at single inputs, whose means are equal, and it is their 2-Wasserstein distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.experiments.linearized_laplace.choices import Choice, Groups, Where
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, Trained, Work, approximate, groups_of
from tu_symmetry.experiments.linearized_laplace.sources import network_scores, scores
from tu_symmetry.experiments.study import Images
from tu_symmetry.files import digest_folder
from tu_symmetry.laplace.function_posterior import gaussian_samples
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.metrics.functional import gaussian_wasserstein, predictive_total_variation
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Display
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.parts import Parts, digest_tensors

WHERE: tuple[Where, ...] = ("map", "tangent_mode")
PRIORS: tuple[Groups, ...] = get_args(Groups)
DEFAULTS = Settings()


def measure_training(
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    settings: Settings = DEFAULTS,
    priors: Sequence[Groups] = PRIORS,
    device: str = "auto",
) -> Outcome:
    """Distance of the two posteriors at every snapshot of every network, and how good network and predictives are.

    Each snapshot is a part of its own in ``out/parts``; cut and called again, the others follow.

    Args:
        out: folder of the results.
        networks: title of an architecture to its snapshots, as
            :class:`~tu_symmetry.callbacks.PosteriorSnapshots` writes them: steps are optimizer steps, and every chain
            is a network.
        data: as the networks were trained on them, ``batch_size`` too, which says how many steps an epoch has; with
            ``val_size`` images for early stopping.
        settings: how the evidence is optimized.
        priors: ``single`` or ``per_group``.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        ValueError: no validation images, no priors, networks without snapshots or with snapshots at different steps.
        FileError: ``out`` holds parts that were made from something else.
    """
    if data.val_size < 1:
        raise ValueError("data: val_size must be at least 1, for early stopping goes by validation images")
    if not priors or set(priors) - set(PRIORS):
        raise ValueError(f"priors: name single, per_group or both, got {list(priors)}")
    images = Images(data, device)
    held_out = (data.val.x.to(images.device), data.val.y.to(images.device))
    size = len(images.train.x) if data.batch_size in (None, "full") else int(data.batch_size or 0)
    per_epoch = math.ceil(len(images.train.x) / size)
    stores = {name: SampleStore.open(own.samples, like=own.model.state_dict()) for name, own in networks.items()}
    for name, store in stores.items():
        by_chain = {chain: [r.step for r in store.records if r.chain == chain] for chain in store.chains}
        if len({tuple(steps) for steps in by_chain.values()}) != 1:
            raise ValueError(f"{name}: its networks have snapshots at different steps, or none: {by_chain}")
    kept = {
        name: Parts(
            out / "parts",
            [
                asdict(settings), images.digest(), digest_tensors(*held_out), per_epoch, name, repr(own.model),
                digest_folder(own.samples),
            ],
        )
        for name, own in networks.items()
    }  # fmt: skip
    graphs: dict[str, SymmetryGraph] = {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in networks}
    jobs = [(name, k, record) for name, store in stores.items() for k, record in enumerate(store.records)]
    with Display().track("training", len(jobs)) as tracker:
        for number, (name, k, record) in enumerate(jobs, 1):
            make = partial(_snapshot, networks[name], stores[name], k, images, held_out, settings, name, graphs, priors)
            facts = {"chain": record.chain, "step": record.step, "epoch": record.step / per_epoch}
            runs[name].append(facts | kept[name].take(f"{name}-{record.chain}-{record.step}", make))
            tracker.update(number, network=name, epoch=f"{facts['epoch']:g}")
    every = [run[prior] for own in runs.values() for run in own for prior in priors]
    return Outcome(
        {
            "runs": runs,
            "priors": list(priors),
            "parameters": {name: sum(p.numel() for p in own.model.parameters()) for name, own in networks.items()},
            "sizes": images.sizes | {"validation": len(held_out[0])},
        },
        f"{len(jobs)} snapshots; {sum(not row['converged'] for row in every)} of {len(every)} distances from an "
        "evidence that had not converged",
    )


def _snapshot(
    trained: Trained,
    store: SampleStore,
    number: int,
    images: Images,
    held_out: tuple[Tensor, Tensor],
    settings: Settings,
    name: str,
    graphs: dict[str, SymmetryGraph],
    priors: Sequence[Groups],
) -> dict[str, Any]:
    """Network, posteriors and their distance, of one snapshot."""
    work = Work(trained.model, store[number], images, settings, name, graphs)
    found: dict[str, Any] = network_scores(work.model, images, settings.batch_size)
    with torch.no_grad():
        logits = torch.cat([work.model(x) for x in held_out[0].split(settings.batch_size)])
    found["val_nll"] = float(cross_entropy(logits.double(), held_out[1]))
    for prior in priors:
        found[prior] = _distance(work, prior, held_out)
    return found


def _distance(work: Work, prior: Groups, held_out: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The two posteriors for one kind of prior."""
    pairs = [approximate(work.subject, work.settings, Choice(where, prior)) for where in WHERE]
    facts: dict[str, Any] = {"converged": all(result.converged for _, result in pairs)}
    covariances: list[Tensor] = []
    predictives: list[Tensor] = []
    for where, (la, result) in zip(WHERE, pairs, strict=True):
        moments = [la.function_covariance(x) for x, _ in work.subject.test]
        mean, covariance = (torch.cat(own) for own in zip(*moments, strict=True))
        p = predictive(mean, covariance, work.settings.num_samples)
        val = [la.function_covariance(x) for x in held_out[0].split(work.settings.batch_size)]
        val_p = torch.cat([predictive(*own, work.settings.num_samples) for own in val])
        covariances.append(covariance)
        predictives.append(p)
        facts[where] = {
            "converged": result.converged,
            "iterations": result.iterations,
            "log_evidence": result.log_marginal_likelihood,
            "nll": scores(p, work.subject.test.y)["nll"],
            "val_nll": scores(val_p, held_out[1])["nll"],
            "spread": float(spread(covariance).mean()),
            "groups": groups_of(la),
        }
    distance = gaussian_wasserstein(*covariances)
    at_mode = pairs[WHERE.index("tangent_mode")][0]
    return facts | {
        "wasserstein": float(distance.mean()),
        "relative": float((distance / spread(covariances[WHERE.index("tangent_mode")])).mean()),
        "total_variation": float(predictive_total_variation(*predictives)),
        "deviations": deviations(at_mode),
        "relative_norm": float((at_mode.theta - point(at_mode)).double().norm() / point(at_mode).double().norm()),
    }


def spread(covariance: Tensor) -> Tensor:
    """Root of the trace of covariances ``[..., outputs, outputs]``, float64: the distance to the network itself."""
    return covariance.double().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()


def predictive(mean: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    """Probabilities ``[batch, classes]`` (float64), as :meth:`~tu_symmetry.LinearizedLaplace.predictive` makes them."""
    return (mean + gaussian_samples(covariance, num_samples, 0)).softmax(-1).mean(0).double()


def point(la: LinearizedLaplace) -> Tensor:
    """The linearization point θ~."""
    return la.fitted.tangent.point()


def deviations(la: LinearizedLaplace) -> float:
    """Length of θ* - θ~ in standard deviations of the posterior."""
    way = la.theta - point(la)
    return float((way.double() * la.posterior.precision_product(way).double()).sum().clamp(min=0).sqrt())
