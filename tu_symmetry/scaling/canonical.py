"""Canonical scales: one member of every orbit of positive rescalings.

``min_mass`` takes the unique weights of least squared L2 norm (the representation cost of arXiv 2310.08287, section 6);
``unit_norm`` gives every hidden filter unit norm, front to back, as that paper's released code does.

Laws (tests/test_scaling.py): the function is unchanged; the form is idempotent and constant on orbits; the mass never
grows under ``min_mass``, and equals the optimum of a general convex solver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.scaling.masses import MassTables
from tu_symmetry.symmetry.action import scale_tensors
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True)
class CanonicalForm:
    """A network in canonical scale.

    Attributes:
        state: the rescaled state dict; computes the same function.
        log_scale: natural-log factors that were applied, group name to float64 ``[size]``.
        mass_before: squared L2 norm of the counted parameters as given.
        mass_after: the same in canonical form.
        gradient_norm: certificate for ``min_mass``: norm of the mass's gradient in the log-factors, relative to the
            mass (zero at the optimum of a convex function).
        iterations: Newton steps (``min_mass``) or sweeps (``unit_norm``).
        degenerate: group name to the factors that were left alone: their mass lies on one side only, so that it could
            be scaled away altogether (dead units).
    """

    state: dict[str, Tensor]
    log_scale: LogScale
    mass_before: float
    mass_after: float
    gradient_norm: float
    iterations: int
    degenerate: dict[str, Tensor]


def canonicalize(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    method: Literal["min_mass", "unit_norm"] = "min_mass",
    *,
    parameters: Iterable[str] | None = None,
    tolerance: float = 1e-12,
    max_iterations: int = 200,
) -> CanonicalForm:
    """Bring the scale of every hidden unit into canonical form.

    Args:
        graph: the architecture's symmetry graph (verified on first use). Its scale groups move; its normalization
            groups stay as they are: what a normalization undoes could shrink without end.
        state: state dict.
        method: ``min_mass``, or ``unit_norm``.
        parameters: names of the tensors whose squared norm counts (what the regularizer counts); all parameters if left
            out. Everything is rescaled consistently either way.
        tolerance: on the relative gradient norm (``min_mass``) or the largest change of a log-factor (``unit_norm``).
        max_iterations: Newton steps or sweeps.

    Returns:
        The canonical form with its certificate.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        RuntimeError: no convergence; the message says how far it came.
    """
    graph.require_verified()
    if graph.check_state(state):
        raise ValueError("canonicalize takes one state; unstack a stack of samples and canonicalize each")
    tables = MassTables(graph, state, parameters)
    movable = torch.zeros(tables.count, dtype=torch.bool)
    movable[: sum(g.size for g in graph.scales)] = True
    grows, shrinks = tables.sides(tables.entries(torch.zeros(tables.count, dtype=torch.float64)))
    active = movable & (grows > 0) & (shrinks > 0)
    if method == "min_mass":
        solution, gradient_norm, iterations = _minimize(tables, active, tolerance, max_iterations)
    elif method == "unit_norm":
        solution, iterations = _unit_norms(graph, state, tables.count, active, tolerance, max_iterations)
        gradient_norm = float("nan")
    else:
        raise ValueError(f"unknown method {method!r}: 'min_mass' or 'unit_norm'")
    log_scale, degenerate, start = {}, {}, 0
    for group in graph.scales:
        log_scale[group.name] = solution[start : start + group.size].clone()
        left = torch.nonzero(~active[start : start + group.size]).flatten()
        if len(left):
            degenerate[group.name] = left
        start += group.size
    before = tables.value(torch.zeros(tables.count, dtype=torch.float64))
    return CanonicalForm(
        scale_tensors(graph, log_scale, state),
        log_scale,
        before,
        tables.value(solution),
        gradient_norm,
        iterations,
        degenerate,
    )


def representation_cost(
    graph: SymmetryGraph, state: Mapping[str, Tensor], *, parameters: Iterable[str] | None = None
) -> float:
    """Least squared L2 norm over positive rescalings: ``min_Lambda ||T_s(w, Lambda)||^2`` (arXiv 2310.08287, sec. 6).

    Directions without a minimum (dead units, weights before a normalization) count as they are.
    """
    return canonicalize(graph, state, parameters=parameters).mass_after


def _minimize(tables: MassTables, active: Tensor, tolerance: float, max_iterations: int) -> tuple[Tensor, float, int]:
    """Damped Newton with conjugate gradients on the compressed tables, after sweeps with the closed-form step."""
    s = torch.zeros(tables.count, dtype=torch.float64)
    if not active.any():
        return s, 0.0, 0
    entries = tables.entries(s)
    value = sum(float(e.sum()) for e in entries)
    for _ in range(3):  # damped Jacobi sweeps: log(shrinking / growing) / 4 is exact for a unit between fixed neighbors
        grows, shrinks = tables.sides(entries)
        step = torch.where(active, 0.125 * (shrinks.clamp_min(1e-300).log() - grows.clamp_min(1e-300).log()), 0.0)
        trial = tables.entries(s + step)
        trial_value = sum(float(e.sum()) for e in trial)
        if not trial_value < value:
            break
        s, entries, value = s + step, trial, trial_value
    relative = float("inf")
    for iteration in range(1, max_iterations + 1):
        gradient = torch.where(active, tables.gradient(entries), 0.0)
        relative = float(gradient.norm()) / max(value, 1e-300)
        if relative <= tolerance:
            return s, relative, iteration - 1
        step = _newton_step(tables, entries, gradient, active, forcing=min(0.1, relative))
        slope = float(gradient @ step)
        size = 1.0
        while True:
            trial = tables.entries(s + size * step)
            trial_value = sum(float(e.sum()) for e in trial)
            if trial_value <= value + 1e-4 * size * slope or abs(size * slope) <= 1e-15 * value:
                break
            size *= 0.5
        if trial_value >= value and relative <= 1e3 * tolerance:
            return s, relative, iteration
        s, entries, value = s + size * step, trial, trial_value
    raise RuntimeError(
        f"the mass did not reach its minimum in {max_iterations} Newton steps (relative gradient {relative:.1e}, "
        f"wanted {tolerance:.0e}); weights of extreme size make the problem nearly degenerate: pass a larger tolerance"
    )


def _newton_step(tables: MassTables, entries: list[Tensor], gradient: Tensor, active: Tensor, forcing: float) -> Tensor:
    """Solve Hessian x = -gradient by preconditioned conjugate gradients to a relative residual."""
    diagonal = torch.where(active, tables.curvature_diagonal(entries).clamp_min(1e-300), 1.0)
    x = torch.zeros_like(gradient)
    residual = -gradient
    z = residual / diagonal
    direction = z.clone()
    rz = float(residual @ z)
    goal = forcing**2 * rz
    for _ in range(500):
        product = torch.where(active, tables.curvature_product(entries, direction), 0.0)
        curvature = float(direction @ product)
        if curvature <= 0.0:
            break
        alpha = rz / curvature
        x = x + alpha * direction
        residual = residual - alpha * product
        z = residual / diagonal
        new = float(residual @ z)
        if new <= goal:
            break
        direction = z + (new / rz) * direction
        rz = new
    return x


def _unit_norms(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    count: int,
    active: Tensor,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, int]:
    """Unit norm for what makes each unit, front to back; repeated while later layers feed earlier units (residuals).

    A unit's makers are the matrices among the tensors that grow with its factor; where there are none (the affine of a
    normalization), the tensor that grows first in the state dict's order, which is the gain.
    """
    s = torch.zeros(count, dtype=torch.float64)
    starts, start = {}, 0
    for group in graph.scales:
        starts[group.name] = start
        start += group.size
    makers = {}
    for group in graph.scales:
        growing = list(dict.fromkeys(m.parameter for m in group.members if m.exponent > 0 and not m.buffer))
        matrices = [
            n
            for n in growing
            if len(graph.shapes[n]) >= 2 and max(graph.shapes[n]) < torch.Size(graph.shapes[n]).numel()
        ]
        makers[group.name] = MassTables(graph, state, matrices or growing[:1])
    for sweep in range(1, max_iterations + 1):
        largest = 0.0
        for group in graph.scales:
            part = slice(starts[group.name], starts[group.name] + group.size)
            grows, _ = makers[group.name].sides(makers[group.name].entries(s))
            norm = grows[part]
            step = torch.where(active[part] & (norm > 0), -0.5 * norm.clamp_min(1e-300).log(), 0.0)
            s[part] += step
            largest = max(largest, float(step.abs().max()) if group.size else 0.0)
        if largest <= tolerance:
            return s, sweep
    raise RuntimeError(f"unit norms did not settle in {max_iterations} sweeps (last change {largest:.1e})")
