"""What a fitted evidence reports: precisions and determined directions of every group, and warnings about them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass


class PrunedGroupWarning(UserWarning):
    """The evidence has switched a group of weights off."""


class NotConvergedWarning(UserWarning):
    """An optimization stopped before its tolerance was met."""


class ReadElsewhereWarning(UserWarning):
    """A parameter is read outside of its own module, and has no Kronecker factors therefore."""


@dataclass(frozen=True)
class GroupReport:
    """What the evidence found for one prior group.

    Attributes:
        name: of the group.
        size: number of weights.
        precision: prior precision ``lambda``.
        center: where the hyperprior puts it, the group's size over its squared norm at the linearization point.
        gamma: effective number of directions that the data determine, between 0 and ``size``.
        squared_norm: ``||theta*||^2`` (``||theta~||^2`` at ``map``).
        at_cap: whether the precision is at the hyperprior's bound.
        pruned: whether the data determine less than half a direction, or the precision is at its upper bound.
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
        log_marginal_likelihood: at the best point that was seen (nats), without the hyperprior.
        iterations: number of iterations: directions of the ``subspace`` solver, or alternations.
        change: largest change of a log precision in the last iteration, or in the alternation from that point.
        gradient_norm: distance of the weights from their mode in posterior standard deviations, as far as the
            curvature knows; 0 at ``map``.
        converged: whether both tolerances were met there, and no earlier point had a better objective.
        best_iteration: number of the iteration whose point this is; ``iterations`` where it converged.
        gap: certificate: ``log_marginal_likelihood`` at these precisions is at most so much higher (nats), whatever the
            curvature is approximated by; 0 at ``map``. See :func:`tu_symmetry.laplace.mode.duality_gap`.
    """

    log_marginal_likelihood: float
    iterations: int
    change: float
    gradient_norm: float
    converged: bool
    best_iteration: int
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
    if not result.converged:
        warnings.warn(
            f"the evidence stopped after {result.iterations} iterations with log precisions still changing by "
            f"{result.change:.2g} and a gradient norm of {result.gradient_norm:.2g} at the best point, that of "
            f"iteration {result.best_iteration} (at these precisions the evidence is at most {result.gap:.2g} nats "
            "higher); call optimize_evidence again "
            "to resume from here, or raise max_iterations or the tolerances",
            NotConvergedWarning,
            stacklevel=stacklevel + 1,
        )
