"""What a fitted evidence reports: precisions and determined directions of every group, and warnings about them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass


class PrunedGroupWarning(UserWarning):
    """The evidence has switched a group of weights off."""


class NotConvergedWarning(UserWarning):
    """An optimization stopped before its tolerance was met."""


class ReadElsewhereWarning(UserWarning):
    """A parameter is read elsewhere than in one call of its own module, and has no Kronecker factors therefore."""


class LaplaceHurtsWarning(UserWarning):
    """On held-out data the Laplace predictive is worse than the network itself."""


class NothingHeldOutWarning(UserWarning):
    """There are no data on which to check or calibrate that the network was not trained on or will not be tested on."""


class UnevenEvidenceWarning(UserWarning):
    """The evidence leaves next to no uncertainty in the bulk of the weights, and much in a few."""


@dataclass(frozen=True)
class Quality:
    """Scores of predictions on held-out data.

    Attributes:
        nll: negative log-likelihood of an observation (nats): of a label, or of a real value.
        accuracy: share of right classes; NaN for a regression.
        ece: expected calibration error, 15 equal bins of the confidence, L1; NaN for a regression.
    """

    nll: float
    accuracy: float = math.nan
    ece: float = math.nan


@dataclass(frozen=True)
class Calibration:
    """What :meth:`LinearizedLaplace.calibrate` found; as text, a small table.

    Attributes:
        temperature: that was chosen.
        samples: the samples of the held-out data, over all processes.
        network: quality of the network itself (temperature 0).
        evidence: the scores of the posterior whose precisions the evidence chose (temperature 1).
        calibrated: at the temperature that was chosen.
        held_out: whether the network was not trained on these data.
        link_approx: with which the predictions were made, and will be where none is asked for.
        standard_error: the standard error of the difference between the NLLs of the calibrated posterior and of the
            network (nats), over samples, of which the same are given to both.
    """

    temperature: float
    samples: int
    network: Quality
    evidence: Quality
    calibrated: Quality
    held_out: bool = True
    link_approx: str = "mc"
    standard_error: float = math.nan

    @property
    def hurts(self) -> bool:
        """Whether the posterior of the evidence predicts worse than the network itself, by the NLL."""
        return self.evidence.nll > self.network.nll

    def __str__(self) -> str:
        rows = {
            "network": self.network,
            "Laplace, by the evidence": self.evidence,
            f"Laplace, temperature {self.temperature:.3g}": self.calibrated,
        }
        kind = "held-out" if self.held_out else "training"
        width = max(max(map(len, rows)), len(f"on {self.samples} {kind} samples"))
        lines = [f"{f'on {self.samples} {kind} samples':{width}}   NLL      ECE      accuracy"]
        for name, q in rows.items():
            numbers = "  ".join("-      " if math.isnan(v) else f"{v:<7.4f}" for v in (q.nll, q.ece, q.accuracy))
            lines.append(f"{name:{width}}   {numbers}".rstrip())
        if self.temperature > 0 and not math.isnan(self.standard_error):
            gain = self.network.nll - self.calibrated.nll
            lines.append(f"gain over the network: {gain:.2g} nats, standard error {self.standard_error:.2g}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PrecisionSearch:
    """What :meth:`LinearizedLaplace.search_precision` found; as text, a small table.

    Attributes:
        precision: that was chosen: of all weights, or the factor of the precisions that were there.
        relative: whether it is such a factor.
        samples: the samples of the held-out data, over all processes.
        network: quality of the network itself, the limit of large precisions.
        found: at the precision that was chosen.
        tried: every precision with its quality, in rising order.
    """

    precision: float
    relative: bool
    samples: int
    network: Quality
    found: Quality
    tried: tuple[tuple[float, Quality], ...]

    def __str__(self) -> str:
        lines = [f"on {self.samples} held-out samples   NLL      ECE      accuracy"]
        what = "factor" if self.relative else "precision"
        rows = [("network", self.network), *((f"{what} {p:.3g}", q) for p, q in self.tried)]
        for name, q in rows:
            numbers = "  ".join("-      " if math.isnan(v) else f"{v:<7.4f}" for v in (q.nll, q.ece, q.accuracy))
            mark = "  (chosen)" if name == f"{what} {self.precision:.3g}" else ""
            lines.append(f"{name:{len(lines[0].split('   ')[0])}}   {numbers}{mark}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class GroupReport:
    """What the evidence found for one prior group.

    Attributes:
        name: the name of the group.
        size: number of weights.
        precision: prior precision ``lambda``.
        center: where the hyperprior puts it, the group's size over its squared norm at the linearization point.
        gamma: effective number of directions that the data determine, between 0 and ``size``.
        squared_norm: ``||theta*||^2`` (``||theta~||^2`` at ``map``).
        at_cap: whether the precision is at the hyperprior's bound.
        pruned: whether the data determine less than half a direction (of a single weight, that never counts), or the
            precision is at its upper bound.
    """

    name: str
    size: int
    precision: float
    center: float
    gamma: float
    squared_norm: float
    at_cap: bool
    pruned: bool


@dataclass(frozen=True)
class EvidenceResult:
    """What :meth:`LinearizedLaplace.optimize_evidence` did.

    Attributes:
        log_marginal_likelihood: at the point that was reached (nats), without the hyperprior.
        iterations: number of directions of the weights that were tried.
        change: largest change of a log precision in the last iteration.
        gradient_norm: distance of the weights from their mode in posterior standard deviations, as far as the
            curvature knows; 0 at ``map``.
        converged: whether both tolerances were met.
        gap: certificate: ``log_marginal_likelihood`` at these precisions is at most so much higher (nats), whatever the
            curvature is approximated by; 0 at ``map``. See :func:`tu_symmetry.laplace.mode.duality_gap`.
    """

    log_marginal_likelihood: float
    iterations: int
    change: float
    gradient_norm: float
    converged: bool
    gap: float = 0.0


def warn_about(result: EvidenceResult, rows: Sequence[GroupReport], *, stacklevel: int) -> None:
    """Warn of pruned groups, and of an optimization that stopped early."""
    pruned = [row for row in rows if row.pruned]
    if pruned:
        shown = ", ".join(f"{r.name} (lambda {r.precision:.3g}, gamma {r.gamma:.2g})" for r in pruned[:4])
        warnings.warn(
            f"the evidence has pruned {len(pruned)} of {len(rows)} prior groups: {shown}"
            f"{' and others' if len(pruned) > 4 else ''}; their weights add next to no uncertainty. A narrower "
            "hyperprior (Hyperprior(std=...)), prior='single' or evaluate_at='map' keeps them",
            PrunedGroupWarning,
            stacklevel=stacklevel + 1,
        )
    uneven = _uneven(rows)
    if uneven is not None:
        warnings.warn(uneven, UnevenEvidenceWarning, stacklevel=stacklevel + 1)
    if not result.converged:
        warnings.warn(
            f"the evidence stopped after {result.iterations} iterations with log precisions still changing by "
            f"{result.change:.2g} and a gradient norm of {result.gradient_norm:.2g} (at these precisions the evidence "
            f"is at most {result.gap:.2g} nats higher); call optimize_evidence again to resume from here, or raise "
            "max_iterations or the tolerances",
            NotConvergedWarning,
            stacklevel=stacklevel + 1,
        )


_FEW, _MOST = 0.1, 0.9  # share of the weights that holds that share of the determined directions
_BULK = 1e-3  # determined directions for each weight, below which the bulk has next to none


def _uneven(rows: Sequence[GroupReport]) -> str | None:
    """What to say where nearly all directions that the data determine are in few of the weights.

    Seen on a LeNet with BatchNorm: 78 of 83 directions in the 150 weights of the first convolution, at precision 1, and
    37,000 weights at precisions of thousands, which leave them no uncertainty.
    """
    total, weights = sum(r.gamma for r in rows), sum(r.size for r in rows)
    ranked = sorted(rows, key=lambda r: r.gamma / r.size, reverse=True)
    held, size, count = 0.0, 0, 0
    for row in ranked:
        if held >= _MOST * total or size + row.size > _FEW * weights:
            break
        held, size, count = held + row.gamma, size + row.size, count + 1
    few, bulk = ranked[:count], ranked[count:]
    left = sum(r.gamma for r in bulk)
    if not few or not bulk or total - left < _MOST * total or left > _BULK * sum(r.size for r in bulk):
        return None
    shown = ", ".join(f"{r.name} (lambda {r.precision:.3g}, {r.size} weights)" for r in few[:3])
    return (
        f"the evidence puts {total - left:.3g} of {total:.3g} determined directions into {sum(r.size for r in few)} of "
        f"{weights} weights: {shown}. The other weights have precisions up to {max(r.precision for r in bulk):.3g}, "
        "which leave them next to no uncertainty, so that the predictive is that of these few alone. Check it on "
        "held-out data (calibrate(validation_loader)); prior='single', a narrower hyperprior, or freezing the group "
        "(parameters=[...] without it) spread it"
    )


def warn_if_it_hurts(found: Calibration, *, stacklevel: int) -> None:
    """Warn where the posterior of the evidence predicts worse than the network itself."""
    if found.hurts:
        warnings.warn(
            f"on {found.samples} held-out samples the Laplace predictive has an NLL of {found.evidence.nll:.4g} nats, "
            f"the network itself {found.network.nll:.4g}: on these data the posterior that the evidence chose makes "
            f"predictions worse. From now on they use the temperature {found.temperature:.3g}, with an NLL of "
            f"{found.calibrated.nll:.4g}"
            + (" (0: the network's own predictions)" if found.temperature == 0 else "")
            + ". A network that is calibrated already has little to gain; otherwise try curvature='last_layer', "
            "prior='single', or more training data",
            LaplaceHurtsWarning,
            stacklevel=stacklevel + 1,
        )
