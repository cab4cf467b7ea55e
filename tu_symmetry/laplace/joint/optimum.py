"""Precisions by the evidence: at the network's weights, or at the joint stationary point of weights and precisions.

All functions take a :class:`~tu_symmetry.laplace.fitted.FittedLaplace` and give another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.data import all_reduce
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.joint.data import BUDGET, TrainingData
from tu_symmetry.laplace.joint.informative import ENOUGH_ROWS, MOST_ROWS
from tu_symmetry.laplace.joint.search import joint_optimum
from tu_symmetry.laplace.report import EvidenceResult
from tu_symmetry.laplace.tangent import evaluating
from tu_symmetry.memory import free_memory
from tu_symmetry.processes import adding

_DIRECTIONS = 1000


def at_map(fitted: FittedLaplace, hyperprior: Hyperprior) -> tuple[FittedLaplace, EvidenceResult]:
    """Precisions (and noise variance) of the largest evidence at the present weights: no data are read."""
    fitted = replace(fitted.uncalibrated(), hyperprior=hyperprior)
    rho, tau = fitted.curvature.determinants.step(
        fitted.groups.total(fitted.theta.double().square()),
        fitted.log_precision,
        fitted.log_noise,
        fitted.center.log(),
        hyperprior,
        None if fitted.noise_fixed else fitted.noise(fitted.solution),
    )
    found = fitted.with_hyperparameters(rho, math.exp(tau))
    return found, EvidenceResult(found.log_evidence(), 1, 0.0, 0.0, True)


def at_mode(
    fitted: FittedLaplace, loader: Iterable[Any], *, tolerance: float | None = None, **options: Any
) -> FittedLaplace:
    """The same with ``theta*``, the mode of the tangent model under the present precisions, from where it was last.

    ``tolerance`` is the ``mode_tolerance`` of :func:`at_joint_mode`, whose options there are.
    """
    found, _ = _searched(fitted, loader, tolerance=math.inf, mode_tolerance=tolerance, weights_alone=True, **options)
    return fitted.with_solution(found.solution)


def at_joint_mode(
    fitted: FittedLaplace,
    loader: Iterable[Any],
    hyperprior: Hyperprior,
    *,
    tolerance: float | None = None,
    mode_tolerance: float | None = None,
    **options: Any,
) -> tuple[FittedLaplace, EvidenceResult]:
    """The joint stationary point of weights and hyperparameters; other data than those of the fit are refused.

    Defaults are those of :meth:`~tu_symmetry.laplace.linearized.LinearizedLaplace.optimize_evidence`, with its options
    ``max_iterations``, ``memory`` and ``progress``.
    """
    fitted = replace(fitted.uncalibrated(), hyperprior=hyperprior)
    tolerance = tolerance or (1e-6 if fitted.theta.dtype == torch.float64 else 3e-2)
    return _searched(fitted, loader, tolerance=tolerance, mode_tolerance=mode_tolerance, **options)


def _searched(
    fitted: FittedLaplace,
    loader: Iterable[Any],
    *,
    mode_tolerance: float | None,
    max_iterations: int | None = None,
    memory: int | None = None,
    **options: Any,
) -> tuple[FittedLaplace, EvidenceResult]:
    theta = fitted.theta
    memory = _memory(theta) if memory is None else memory
    rows = min(_for_rows(memory), MOST_ROWS * theta.element_size() * theta.numel())
    with evaluating(fitted.model):
        data = TrainingData(fitted.tangent, fitted.likelihood, loader, budget=memory - rows)
        return joint_optimum(
            fitted,
            data,
            mode_tolerance=mode_tolerance or (1e-6 if theta.dtype == torch.float64 else 0.2),
            max_iterations=_DIRECTIONS if max_iterations is None else max_iterations,
            memory=min(rows, memory - data.size),
            **options,
        )


def _memory(theta: Tensor) -> int:
    """2 GiB; where that holds too few gradients of informative observations, up to half of the device's free memory."""
    rows = ENOUGH_ROWS * theta.element_size() * theta.numel()
    if rows <= _for_rows(BUDGET):
        return BUDGET
    free = torch.tensor(float(free_memory(theta.device)), dtype=torch.float64, device=theta.device)
    all_reduce(free)  # of several processes the mean: all have to go the same way
    each = float(free) / adding() if theta.is_cuda else float(free) / adding() ** 2
    return max(BUDGET, min(2 * rows, BUDGET + rows, int(each / 2)))


def _for_rows(memory: int) -> int:
    """Bytes of it for gradients of informative observations: half, or all but :data:`BUDGET`, where that is more."""
    return max(memory // 2, memory - BUDGET)
