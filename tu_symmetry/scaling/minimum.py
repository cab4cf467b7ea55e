"""The least mass over positive scales: a convex problem, its solution with certificates, and where it has none.

A *target* ``t_j`` adds the linear term ``-2 t_j s_j``; the mass that grows with the factor ``j`` then exceeds the mass
that shrinks by ``t_j``: so a factor that has mass on one side only is given unit norm within the convex problem.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from tu_symmetry.scaling.masses import Array, MassPoint, MassTables, Table, Terms

Mask = npt.NDArray[np.bool_]
_SWEEPS = 40
_STEPS = 200  # of Newton's method
_PAYS = 0.03  # least relative gain of a sweep
_TINY = 1e-300


class Minimum(NamedTuple):
    """Where the mass is least, and how sure that is: see :class:`~.canonical.CanonicalForm`."""

    log_scale: Tensor  # minimizing log-factors [count]
    mass: float
    relative_gap: float
    iterations: int


@np.errstate(all="ignore")  # trials that are too long overflow, and are refused for it
def minimize_mass(tables: MassTables, start: MassPoint, active: Mask, targets: Array, tolerance: float) -> Minimum:
    """Minimize ``F(s) - 2 targets . s`` over the active factors, bool ``[count]``; the others stay at one.

    Sweeps with the closed-form step of single factors come first, then Newton steps by preconditioned conjugate
    gradients, until the gradient's norm relative to the mass is below ``tolerance``; a RuntimeError if that is never
    reached. The gap: with the Newton step ``u``, the masses ``m (1 + 2 c . u)`` are feasible for the dual problem if
    they are positive, and then its value is below the objective by ``u . H u`` at most.
    """
    if not active.any():
        return Minimum(torch.zeros(tables.count, dtype=torch.float64, device="cpu"), start.value, 0.0, 0)
    s, point, value = _sweep(tables, start, active, targets)
    relative = float("inf")
    for iteration in range(_STEPS + 1):
        gradient = np.where(active, point.gradient() - 2 * targets, 0.0)
        relative = math.sqrt(float(gradient @ gradient)) / max(point.value, _TINY)
        # a relative residual for quadratic convergence, no smaller than the tolerance asks for; at last for the gap
        forcing = min(0.1, max(relative, 0.1 * tolerance / relative, 1e-8)) if relative > tolerance else 0.1
        step = _newton_step(point, gradient, active, forcing)
        decrement = -float(gradient @ step)
        if relative <= tolerance:
            return Minimum(torch.from_numpy(s), point.value, decrement / max(point.value, _TINY), iteration)
        if not math.isfinite(decrement):
            break
        size = 1.0
        while True:
            moved = s + size * step
            trial = tables.at(moved)
            trial_value = _objective(trial, targets, moved)
            if trial_value <= value - 1e-4 * size * decrement:
                break
            if size * decrement <= 1e-14 * abs(value) + 1e-15 * point.value:
                break  # no digits are left to see a decrease in: trust the step
            size *= 0.5
        s, point, value = moved, trial, trial_value
    raise RuntimeError(
        f"the mass did not reach its minimum in {iteration} Newton steps (relative gradient {relative:.1e}, "
        f"wanted {tolerance:.0e}); weights of extreme size make the problem nearly degenerate: pass a larger tolerance"
    )


def _objective(point: MassPoint, targets: Array, s: Array) -> float:
    return point.value - 2 * float(targets @ s)


def _sweep(tables: MassTables, start: MassPoint, active: Mask, targets: Array) -> tuple[Array, MassPoint, float]:
    """Exact steps of every factor between fixed neighbors, or half of them (which always descend), while they pay."""
    s, point = np.zeros(tables.count), start
    value = _objective(point, targets, s)
    for _ in range(_SWEEPS):
        grows, shrinks = point.grows, point.shrinks
        root = np.sqrt(np.square(targets) + 4 * grows * shrinks)
        up = np.where(targets >= 0, (root + targets) / (2 * grows), 2 * shrinks / (root - targets))
        step = np.where(active, 0.5 * np.log(up), 0.0)
        trials = []
        for moved in (s + step, s + 0.5 * step):
            trial = tables.at(moved)
            trials.append((_objective(trial, targets, moved), moved, trial))
        best = min(trials, key=lambda t: t[0])
        if not best[0] < value:
            break
        gain = value - best[0]
        value, s, point = best
        if gain < _PAYS * point.value:
            break
    return s, point, value


def _newton_step(point: MassPoint, gradient: Array, active: Mask, forcing: float) -> Array:
    """Solve Hessian x = -gradient, scaled to a diagonal of one, by conjugate gradients to a relative residual."""
    root = np.sqrt(np.where(active, 1 / np.maximum(point.curvature_diagonal(), _TINY), 1.0))

    def product(direction: Array) -> Array:
        return root * np.where(active, point.curvature_product(root * direction), 0.0)

    hessian = LinearOperator((len(root), len(root)), matvec=product, dtype=np.float64)
    solution, _ = cg(hessian, -root * gradient, rtol=forcing, atol=0.0, maxiter=500)
    return root * solution


def unbounded_factors(tables: MassTables, active: Mask, targets: Array) -> Mask:
    """Which active factors take part in a recession direction of ``F(s) - 2 targets . s``; the rest have a minimum.

    In such a direction ``d`` no entry grows: ``sum_t c_t d_t <= 0`` wherever there is mass. What this says of the sign
    of single factors is carried from table to table, as signals are from the inputs to the outputs and back: a unit
    that hears an input and is heard by an output has ``d = 0``. What that leaves open is decided by linear programming.
    """
    sinks = np.append(~active | (targets < 0), True)  # d <= 0 is proven
    rises = np.append(~active | (targets > 0), True)  # d >= 0 is proven
    known, order = -1, list(tables.tables)
    while known < (known := int(sinks.sum() + rises.sum())) and known < 2 * len(sinks):
        for table in order:
            _carry(table, sinks, rises)
        order.reverse()
    unbounded = np.zeros(tables.count, dtype=np.bool_)
    open_ = active & ~(sinks & rises)[:-1]
    while open_.any() and (found := _recession(tables, open_, targets)).any():
        unbounded |= found
        open_ &= ~found
    return unbounded


def _carry(table: Table, sinks: Mask, rises: Mask) -> None:
    """Prove signs from one table: where all other terms of an entry cannot fall, its last one cannot rise."""

    def product(terms: Terms, start: Mask) -> Mask:
        for exponent, index in terms:
            start = start & (rises if exponent > 0 else sinks)[index.numpy()]
        return start

    def prove(exponent: float, index: Tensor, heard: Mask) -> None:
        (sinks if exponent > 0 else rises)[index.numpy()[heard]] = True

    mass = table.mass.numpy()
    if table.sides is None:
        for k, (exponent, index) in enumerate(table.terms):
            support = product(table.terms[:k] + table.terms[k + 1 :], mass > 0)
            axes = tuple(a for a, n in enumerate(index.shape) if n == 1)
            prove(exponent, index, np.asarray(support.any(axes, keepdims=True)))
        return
    rows, columns = table.sides
    for matrix, own, other in ((mass, rows, columns), (mass.T, columns, rows)):
        if all((sinks if exponent > 0 else rises)[index.numpy()].all() for exponent, index in own):
            continue
        across = product(other, np.ones(matrix.shape[1], dtype=np.bool_))
        heard = matrix @ across.astype(np.float64) > 0
        for k, (exponent, index) in enumerate(own):
            prove(exponent, index, product(own[:k] + own[k + 1 :], heard))


def _recession(tables: MassTables, open_: Mask, targets: Array) -> Mask:
    """One recession direction that lets as much as possible fall, by linear programming over the open factors."""
    exponents, columns = tables.exponents, np.flatnonzero(open_)
    moving = np.abs(exponents) @ open_.astype(np.float64) > 0  # places
    rows = [exponents[np.flatnonzero((tables.single > 0) & moving[: len(tables.single)])]]
    for mass, own, other in tables.matrices:
        i, j = np.nonzero((mass > 0) & (moving[own][:, None] | moving[other]))
        rows.append(exponents[own.start + i] + exponents[other.start + j])
    demanded = np.flatnonzero(open_ & (targets != 0))
    rows.append(csr_array((-np.sign(targets[demanded]), (range(len(demanded)), demanded)), (len(demanded), len(open_))))
    matrix = vstack(rows, format="csr")[:, columns]
    matrix = csr_array(np.unique(matrix.toarray(), axis=0)) if np.prod(matrix.shape) <= 2**22 else matrix
    solved = linprog(np.asarray(matrix.sum(0)).ravel(), A_ub=matrix, b_ub=np.zeros(matrix.shape[0]), bounds=(-1, 1))
    found = np.zeros(tables.count, dtype=np.bool_)
    if solved.success and solved.fun < -1e-9:
        found[columns] = np.abs(solved.x) > 1e-9
    return found
