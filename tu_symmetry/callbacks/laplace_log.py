"""What FitLaplace says of what it has found: scalars and a figure for loggers, lines for the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from tu_symmetry import plot
from tu_symmetry.callbacks.figures import log_figure
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import Calibration, EvidenceResult, GroupReport

_OF_MEANS = ("held_out/", "temperature")  # what is logged of an ensemble's mean member alone
_FEW = ("held_out/network/nll", "held_out/calibrated/nll")  # and of these only so many
_SHOWN = 12  # groups that the printed summary names


def log_scalars(
    trainer: Trainer,
    prefix: str,
    laplaces: Sequence[LinearizedLaplace],
    evidence: Sequence[EvidenceResult],
    calibrations: Sequence[Calibration],
    *,
    groups: bool,
) -> None:
    """Scalars of every network, their mean where there are several, and the figure of the precisions.

    Args:
        trainer: with the loggers.
        prefix: first part of the names.
        laplaces: the approximations.
        evidence: how their precisions were found; empty without.
        calibrations: how their temperatures were found; empty without.
        groups: whether to log three scalars for each group of weights, too.
    """
    rows = [laplace.report() for laplace in laplaces]
    each = [
        _scalars(laplace, own, evidence[k] if evidence else None, calibrations[k] if calibrations else None, groups)
        for k, (laplace, own) in enumerate(zip(laplaces, rows, strict=True))
    ]
    scalars = {name: sum(one[name] for one in each) / len(each) for name in each[0] if all(name in o for o in each)}
    if len(each) > 1:
        scalars |= {
            f"{name}_{k}": value
            for k, one in enumerate(each)
            for name, value in one.items()
            if not name.startswith(_OF_MEANS)
        }
        scalars = {n: v for n, v in scalars.items() if not n.startswith("held_out/") or n in _FEW}
    for logger in trainer.loggers:
        logger.log_metrics({f"{prefix}/{k}": v for k, v in scalars.items()}, step=trainer.global_step)
        logger.save()
    names = [row.name for row in rows[0]]
    single = laplaces[0].prior_groups.weights  # no figure has room for a bar for each weight
    if not single and all([row.name for row in one] == names for one in rows):  # members of one architecture
        many = len(rows) > 1
        values = {f"member {k}" if many else "lambda": [r.precision for r in one] for k, one in enumerate(rows)}
        draw = partial(plot.bars, values, names, ylabel="prior precision", log=True)
        log_figure(trainer, f"{prefix}/precisions", draw)


def _scalars(
    laplace: LinearizedLaplace,
    rows: Sequence[GroupReport],
    evidence: EvidenceResult | None,
    calibration: Calibration | None,
    groups: bool,
) -> dict[str, float]:
    scalars = {"gamma": float(sum(row.gamma for row in rows))}
    if evidence is not None:
        scalars["log_evidence"] = evidence.log_marginal_likelihood
    for row in rows if groups else ():
        scalars |= {
            f"lambda/{row.name}": row.precision,
            f"gamma/{row.name}": row.gamma,
            f"squared_norm/{row.name}": row.squared_norm,
        }
    if laplace.likelihood.name == "regression":
        scalars["noise_variance"] = laplace.noise_variance
    if calibration is not None:
        scalars["temperature"] = calibration.temperature
        for name in ("network", "evidence", "calibrated") if calibration.held_out else ():
            found = vars(getattr(calibration, name))
            scalars |= {f"held_out/{name}/{key}": v for key, v in found.items() if not math.isnan(v)}
    return scalars


def say(laplaces: Sequence[LinearizedLaplace], stopped: Sequence[EvidenceResult | None]) -> None:
    """Print the precisions of every network, and where the evidence of one was stopped before it had converged."""
    for k, (laplace, result) in enumerate(zip(laplaces, stopped, strict=True)):
        which = f" of member {k}" if len(laplaces) > 1 else ""
        rank_zero_info(_summary(laplace, laplace.report(), which))
        if result is not None and not result.converged:
            rank_zero_info(
                f"  The evidence{which} was stopped after {result.iterations} iterations, so that it takes no longer "
                f"than a training does; log precisions changed by {result.change:.2g} in the last one. These "
                "precisions are good to predict with. The log evidence (of use to compare networks) is higher at "
                f"convergence, by at most {result.gap:.3g} nats at these precisions: FitLaplace(max_iterations=None) "
                "goes on to it."
            )


def _summary(laplace: LinearizedLaplace, rows: list[GroupReport], which: str = "") -> str:
    groups = laplace.prior_groups
    if groups.weights:
        lines = [_of_parameter(name, rows[slot.start : slot.stop]) for name, slot in groups.slots.items()]
    else:
        lines = [
            f"  {row.name}: lambda {row.precision:.4g}, gamma {row.gamma:.4g} of {row.size}{', pruned' * row.pruned}"
            for row in rows
        ]
    what = "parameters" if groups.weights else "groups"
    more = [f"  and {len(lines) - _SHOWN} more {what}"] if len(lines) > _SHOWN else []
    head = f"Laplace approximation{which} from {laplace.summary.samples} training samples:"
    return "\n".join([head, *lines[:_SHOWN], *more])


def _of_parameter(name: str, rows: list[GroupReport]) -> str:
    """A line for all weights of a parameter, where each has a precision of its own."""
    found = sorted(row.precision for row in rows)
    pruned = sum(row.pruned for row in rows)
    return (
        f"  {name}: lambda {found[0]:.3g} to {found[-1]:.3g}, half of them below {found[len(found) // 2]:.3g}, gamma "
        f"{sum(row.gamma for row in rows):.4g} of {len(rows)}{f', {pruned} pruned' if pruned else ''}"
    )
