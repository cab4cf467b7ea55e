"""What evidence and calibration report, and warnings about it."""

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
    """A parameter is read elsewhere than in one call of its module on the batch: it has no Kronecker factors."""


class LaplaceHurtsWarning(UserWarning):
    """On held-out data the Laplace predictive is worse than the network itself."""


class NothingHeldOutWarning(UserWarning):
    """There are no data to calibrate on that the network was not trained on or will not be tested on."""


@dataclass(frozen=True)
class Quality:
    """Of predictions on held-out data: the negative log-likelihood of an observation (nats)."""

    nll: float


@dataclass(frozen=True)
class Calibration:
    """What :meth:`LinearizedLaplace.calibrate` found; as text, a small table."""

    temperature: float
    sharpness: float
    samples: int  # of the held-out data, over all processes
    network: Quality  # the network itself
    scaled: Quality  # the network with the sharpness that is best without a posterior (temperature scaling)
    evidence: Quality  # the posterior whose precisions the evidence chose, without calibration
    calibrated: Quality
    held_out: bool = True  # whether the network was not trained on these data
    standard_error: float = math.nan  # of the calibrated posterior's gain over the scaled network (nats)

    @property
    def hurts(self) -> bool:
        """Whether the posterior of the evidence has a larger NLL than the network itself, in the digits shown."""
        return round(self.evidence.nll, 4) > round(self.network.nll, 4)

    def __str__(self) -> str:
        head = f"on {self.samples} {'held-out' if self.held_out else 'training'} samples"
        rows = {
            "network": self.network,
            "network, scaled": self.scaled,
            "Laplace, by the evidence": self.evidence,
            f"Laplace, temperature {self.temperature:.3g}, sharpness {self.sharpness:.3g}": self.calibrated,
        }
        width = max(map(len, (head, *rows)))
        lines = [f"{head:{width}}   NLL", *(f"{name:{width}}   {found.nll:.4f}" for name, found in rows.items())]
        if self.temperature > 0 and not math.isnan(self.standard_error):
            gain = self.scaled.nll - self.calibrated.nll
            lines.append(f"gain over the scaled network: {gain:.2g} nats, standard error {self.standard_error:.2g}")
        return "\n".join(lines)


@dataclass(frozen=True)
class GroupReport:
    """What the evidence found for one prior group."""

    name: str
    size: int  # number of weights
    precision: float
    center: float  # where the hyperprior puts the precision
    gamma: float  # effective number of directions that the data determine, between 0 and size
    squared_norm: float  # ||theta*||^2 (||theta~||^2 at `map`)
    at_cap: bool  # whether the precision is at the hyperprior's bound
    pruned: bool  # whether the data determine less than half a direction, or the precision is at its upper bound


@dataclass(frozen=True)
class EvidenceResult:
    """What :meth:`LinearizedLaplace.optimize_evidence` did."""

    log_marginal_likelihood: float  # at the point that was reached (nats), without the hyperprior
    iterations: int  # number of directions of the weights that were tried
    change: float  # largest change of a log precision in the last iteration
    gradient_norm: float  # distance of the weights from their mode in posterior standard deviations; 0 at `map`
    converged: bool  # whether both tolerances were met
    gap: float = 0.0  # certificate: the evidence at these precisions is at most so much higher (nats)


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
    if not result.converged:
        warnings.warn(
            f"the evidence stopped after {result.iterations} iterations with log precisions still changing by "
            f"{result.change:.2g} and a gradient norm of {result.gradient_norm:.2g} (at these precisions the evidence "
            f"is at most {result.gap:.2g} nats higher); call optimize_evidence again to resume from here, or raise "
            "max_iterations or the tolerances",
            NotConvergedWarning,
            stacklevel=stacklevel + 1,
        )


def warn_if_it_hurts(found: Calibration, *, stacklevel: int) -> None:
    """Warn where the posterior of the evidence predicts worse than the network itself."""
    if found.hurts:
        warnings.warn(
            f"on {found.samples} held-out samples the posterior that the evidence chose has an NLL of "
            f"{found.evidence.nll:.4f} nats, the network itself {found.network.nll:.4f}. From now on predictions use "
            f"the temperature {found.temperature:.3g} (0 is the network's own), with an NLL of "
            f"{found.calibrated.nll:.4f}; curvature='last_layer', prior='single' or more training data may help",
            LaplaceHurtsWarning,
            stacklevel=stacklevel + 1,
        )
