"""Precisions by the evidence: at the linearization point, or at the joint stationary point of weights and precisions.

All functions take a :class:`~tu_symmetry.laplace.fitted.FittedLaplace` and give another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.alternation import Step, alternate
from tu_symmetry.laplace.blocks import CoupledBlock, LowRankBlock
from tu_symmetry.laplace.data import all_reduce, processes
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.informative import ENOUGH_ROWS, MOST_ROWS
from tu_symmetry.laplace.kept import BUDGET, KeptData, TooLargeError
from tu_symmetry.laplace.mode import Mode, solve_mode
from tu_symmetry.laplace.report import EvidenceResult
from tu_symmetry.laplace.subspace import joint_optimum
from tu_symmetry.laplace.tangent import evaluating
from tu_symmetry.memory import free_memory

Progress = Callable[[dict[str, Any]], None]
Solver = Literal["auto", "subspace", "alternation"]


def default_tolerance(fitted: FittedLaplace) -> float:
    """Largest change of a log precision at convergence."""
    return 1e-6 if fitted.theta.dtype == torch.float64 else 3e-2


def default_mode_tolerance(fitted: FittedLaplace) -> float:
    """Gradient norm of the weights at convergence, in posterior standard deviations of the approximation.

    Half its square would be the nats that are missing, were the curvature exact; five times that were measured.
    """
    return 1e-6 if fitted.theta.dtype == torch.float64 else 0.2


def default_memory(theta: Tensor) -> int:
    """Bytes for the training data and what the search for the joint optimum keeps of them.

    2 GiB, and for large networks more, up to half of what is free on the device: so much that what is left of it for
    gradients of informative observations (:func:`_for_rows`) holds enough of them.

    Args:
        theta: the weights.
    """
    rows = ENOUGH_ROWS * theta.element_size() * theta.numel()
    if rows <= _for_rows(BUDGET):
        return BUDGET
    wanted = min(2 * rows, BUDGET + rows)
    free = torch.tensor(float(free_memory(theta.device)), dtype=torch.float64, device=theta.device)
    all_reduce(free)  # of several processes the mean: all have to go the same way
    each = float(free) / processes() if theta.is_cuda else float(free) / processes() ** 2
    return max(BUDGET, min(wanted, int(each / 2)))


def _for_rows(memory: int) -> int:
    """Bytes of it for gradients of informative observations: half, or all but :data:`BUDGET`, where that is more.

    Networks that want so much gain more from rows than from kept linearizations: on a ResNet-18 (11 million weights)
    the products of a direction take 1.6 epochs of training with them and 2.0 without, and the search needs 26
    directions with 200 rows, where with 130 it is at 221 nats after 33, and not at 144.
    """
    return max(memory // 2, memory - BUDGET)


def at_mode(
    fitted: FittedLaplace,
    loader: Iterable[Any],
    *,
    tolerance: float | None = None,
    max_iterations: int = 50,
    progress: Progress | None = None,
) -> FittedLaplace:
    """The same with ``theta*``, the mode of the tangent model under the present precisions, from where it was last.

    Args:
        fitted: the approximation.
        loader: the training data.
        tolerance: gradient norm in posterior standard deviations; None for the default of the floating-point type.
        max_iterations: largest number of Newton steps.
        progress: called after every pass over the data.
    """
    with evaluating(fitted.model):
        solution = solve_mode(
            fitted.tangent,
            fitted.likelihood,
            loader,
            fitted.groups.spread(fitted.log_precision.exp().to(fitted.theta)),
            fitted.posterior,
            fitted.theta,
            samples=fitted.summary.samples,
            tolerance=tolerance or default_mode_tolerance(fitted),
            max_iterations=max_iterations,
            progress=progress,
        )
    return fitted.with_solution(solution)


def at_map(fitted: FittedLaplace, hyperprior: Hyperprior) -> tuple[FittedLaplace, EvidenceResult]:
    """Precisions (and noise variance) of the largest evidence at the present weights: no data are read."""
    fitted = replace(fitted.uncalibrated(), hyperprior=hyperprior)
    rho, tau = _hyperparameter_step(fitted)
    found = fitted.with_hyperparameters(rho, math.exp(tau))
    return found, EvidenceResult(found.log_evidence(), 1, 0.0, 0.0, True, 1)


def at_joint_mode(
    fitted: FittedLaplace,
    loader: Iterable[Any],
    hyperprior: Hyperprior,
    *,
    solver: Solver = "auto",
    max_iterations: int | None = None,
    tolerance: float | None = None,
    mode_tolerance: float | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> tuple[FittedLaplace, EvidenceResult]:
    """The joint stationary point of weights and hyperparameters ``(log precisions, log noise variance)``.

    Args:
        fitted: where to start.
        loader: the training data.
        hyperprior: on the log precisions.
        solver: see :meth:`tu_symmetry.LinearizedLaplace.optimize_evidence`.
        max_iterations: largest number of directions (None for 1,000), or of alternations (100).
        tolerance: largest change of a log precision at convergence; None for that of the floating-point type.
        mode_tolerance: gradient norm of the weights, likewise.
        memory: bytes for the data, their linearizations, and gradients of the informative observations; None for
            :func:`default_memory`.
        progress: called after every pass over the data.

    Returns:
        The best point that was seen, and what was reached.

    Raises:
        ValueError: data that do not fit with ``solver="subspace"``, or a low-rank curvature with a precision for each
            weight; other data than those of the fit.
    """
    if solver not in ("auto", "subspace", "alternation"):
        raise ValueError(f"solver={solver!r} is not known; choose 'auto', 'subspace' or 'alternation'")
    tolerance = tolerance or default_tolerance(fitted)
    accuracy = mode_tolerance or default_mode_tolerance(fitted)
    fitted = replace(fitted.uncalibrated(), hyperprior=hyperprior)
    coupled = any(isinstance(block, CoupledBlock) for block in fitted.curvature.blocks)
    if fitted.groups.weights and any(isinstance(block, LowRankBlock) for block in fitted.curvature.blocks):
        if solver == "subspace":
            raise ValueError(
                "solver='subspace' needs the second derivatives of the evidence in all precisions, which under "
                "curvature='lowrank' and prior='diagonal' would be a matrix of all pairs of weights; use "
                "solver='alternation' (or 'auto'), or curvature='diag'"
            )
        coupled = True
    if solver == "subspace" or (solver == "auto" and not coupled):
        memory = default_memory(fitted.theta) if memory is None else memory
        rows = min(_for_rows(memory), MOST_ROWS * fitted.theta.element_size() * fitted.theta.numel())
        with evaluating(fitted.model):
            try:
                data = KeptData(fitted.tangent, fitted.likelihood, loader, budget=memory - rows, most=memory // 2)
            except TooLargeError:
                data = None
            if data is not None:
                found = joint_optimum(
                    fitted,
                    data,
                    tolerance=tolerance,
                    mode_tolerance=accuracy,
                    max_iterations=1000 if max_iterations is None else max_iterations,
                    memory=min(rows, memory - data.size),
                    progress=progress,
                )
                return found.fitted, EvidenceResult(
                    found.fitted.log_evidence(),
                    found.iterations,
                    found.change,
                    found.fitted.solution.gradient_norm,
                    found.converged,
                    found.iterations,
                    found.fitted.solution.gap,
                )
        if solver == "subspace":
            raise ValueError(
                f"the training data do not fit memory={memory} bytes, which solver='subspace' needs; raise it, or use "
                "solver='alternation', which reads the loader in every pass"
            )
    return _alternated(fitted, loader, 100 if max_iterations is None else max_iterations, tolerance, accuracy, progress)


def _alternated(
    fitted: FittedLaplace,
    loader: Iterable[Any],
    max_iterations: int,
    tolerance: float,
    accuracy: float,
    progress: Progress | None,
) -> tuple[FittedLaplace, EvidenceResult]:
    hyperprior = fitted.hyperprior
    tau = torch.tensor([fitted.log_noise], dtype=torch.float64, device="cpu")
    bound = math.log(hyperprior.cap)
    free = torch.tensor([0.0 if fitted.noise_fixed else math.inf], dtype=torch.float64, device="cpu")

    def placed(point: Tensor, weights: Mode) -> FittedLaplace:
        noise = None if fitted.noise_fixed else math.exp(float(point[-1]))
        return fitted.with_solution(weights).with_hyperparameters(point[:-1], noise)

    last = fitted.solution

    def step(point: Tensor, asked: float) -> Step:
        nonlocal last
        found = at_mode(placed(point, last), loader, tolerance=asked, progress=progress)
        last = found.solution
        rho, log_noise = _hyperparameter_step(found)
        image = torch.cat([rho, torch.tensor([log_noise], dtype=torch.float64, device="cpu")])
        undetermined = torch.cat([_undetermined(found, rho), torch.tensor([False], device="cpu")])
        return Step(found.objective(), image, undetermined, found.solution)

    def report(iteration: int, change: float, objective: float) -> None:
        if progress is not None:
            progress({"stage": "evidence", "iteration": iteration, "change": change, "objective": objective})

    best = alternate(
        step,
        torch.cat([fitted.log_precision, tau]),
        torch.cat([fitted.center.log() - bound, tau - free]),
        torch.cat([fitted.center.log() + bound, tau + free]),
        tolerance=tolerance,
        accuracy=accuracy,
        max_iterations=max_iterations,
        progress=report,
    )
    # where it converged, precisions are those that belong to these weights, whose certificate they hardly change
    found = placed(best.point, best.weights).with_solution(best.weights)
    if not best.converged and best.weights.gradient_norm > accuracy:  # found roughly, on the way
        found = at_mode(found, loader, tolerance=accuracy, progress=progress)
    result = EvidenceResult(
        found.log_evidence(),
        best.iterations,
        best.change,
        found.solution.gradient_norm,
        best.converged and found.solution.converged,
        best.best,
        found.solution.gap,
    )
    return found, result


def _hyperparameter_step(fitted: FittedLaplace) -> tuple[Tensor, float]:
    return fitted.curvature.determinants.step(
        fitted.groups.total(fitted.theta.double().square()),
        fitted.log_precision,
        fitted.log_noise,
        fitted.center.log(),
        fitted.hyperprior,
        None if fitted.noise_fixed else fitted.noise(fitted.solution),
    )


def _undetermined(fitted: FittedLaplace, rho: Tensor) -> Tensor:
    """Groups on their way to an infinite precision under a flat hyperprior, which they approach ever more slowly.

    The data determine less than a hundredth of a direction there, so that the rest of the way changes the evidence
    by less than that (in nats); where they determine nothing, the evidence is flat and its slope is rounding error.
    """
    if not math.isinf(fitted.hyperprior.std):
        return torch.zeros(len(rho), dtype=torch.bool, device="cpu")
    gamma = fitted.curvature.determinants.gamma(rho, fitted.log_noise)
    return ((gamma < 1e-2) & (rho > fitted.log_precision)) | (gamma < 1e-8)
