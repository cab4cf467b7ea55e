"""Canonical scales: one member of every orbit of positive rescalings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tu_symmetry.reporting.brief import Brief
from tu_symmetry.scaling.masses import Array, MassPoint, MassTables, counted_parameters, filter_counts
from tu_symmetry.scaling.minimum import Minimum, minimize_mass, unbounded_factors
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import scale_tensors
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import ScaleGroup

Method = Literal["min_mass", "unit_norm"]
Convention = Literal["leave", "unit_norm"]
_LARGEST = 1e150  # mass whose square float64 still holds


@dataclass(frozen=True, repr=False)
class CanonicalForm(Brief):
    """A network in canonical scale.

    Attributes:
        state: the rescaled state dict; computes the same function.
        log_scale: natural-log factors that were applied, group name to float64 ``[size]``.
        mass_before, mass_after: squared L2 norm of the counted parameters as given, and in canonical form.
        relative_gap: for ``min_mass`` a certified bound of how far the objective is above its minimum, relative to the
            mass; else NaN.
        iterations: Newton steps (0 for ``unit_norm``).
        degenerate: group name to the numbers of the factors for which there is no canonical value: dead units, which
            nothing feeds or nothing reads, so that their mass could be scaled away altogether.
        certificate: the change of the outputs, see :func:`~tu_symmetry.certify`; None where nothing was measured.
        uncertified: why nothing was measured; empty where something was.
    """

    state: dict[str, Tensor]
    log_scale: LogScale
    mass_before: float
    mass_after: float
    relative_gap: float
    iterations: int
    degenerate: dict[str, Tensor]
    certificate: Certificate | None = None
    uncertified: str = ""


def canonicalize(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    *,
    method: Method = "min_mass",
    parameters: Iterable[str] | None = None,
    normalizations: Convention = "leave",
    degenerate: Convention = "leave",
    tolerance: float = 1e-12,
    certify: bool = True,
) -> CanonicalForm:
    """Bring the scale of every hidden unit into canonical form.

    ``min_mass`` takes the unique weights of least squared L2 norm over all positive factors, the representation cost of
    arXiv 2310.08287, section 6. ``unit_norm`` gives the incoming weights of each unit unit L2 norm, front to back, as
    that paper's released code does: a row of a linear layer, a convolution's filter (biases follow); where a
    normalization's affine parameters make the unit, its gain becomes plus or minus one. Of several layers that make a
    unit (those that write to a residual stream) the first counts that can be reached front to back.

    Laws: the function is unchanged (up to the epsilons of normalizations whose factors move); the form is idempotent,
    constant on orbits, and commutes with permutations; the mass never grows under ``min_mass``, but for conventions.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict.
        method: ``min_mass`` or ``unit_norm``.
        parameters: names or patterns (``"*.weight"``) of the tensors whose squared norm counts, as the regularizer
            counts them; all parameters if left out. Only ``min_mass`` and the reported masses depend on it.
        normalizations: what becomes of weights before a normalization, which could shrink without end: held
            (``leave``), or the counted filters of each factor get a norm of one (``unit_norm``), on average over them
            where there are several. Running statistics move along.
        degenerate: what becomes of factors without a minimum (``min_mass``): held at one (``leave``), or the side that
            has mass gets ``unit_norm``. Dead cycles of units that only feed each other are left alone.
        tolerance: on the relative gradient norm (``min_mass``).
        certify: measure on the graph's example inputs that the outputs stay the same.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights, weights whose squares leave the range
            of float64, a form that leaves the range of the state's dtype, or outputs that changed by more than
            rounding explains.
        ValueError: unknown methods, conventions or parameters, or a stack of states.
        RuntimeError: no convergence; the message says how far it came.
    """
    graph.require_verified()
    if graph.check_state(state):
        raise ValueError("canonicalize takes one state; unstack a stack of samples and canonicalize each")
    for option, value, known in (
        ("method", method, get_args(Method)),
        ("normalizations", normalizations, get_args(Convention)),
        ("degenerate", degenerate, get_args(Convention)),
    ):
        if value not in known:
            raise ValueError(f"{option} must be {' or '.join(map(repr, known))}, got {value!r}")
    fixing = normalizations == "unit_norm"
    groups = (*graph.scales, *graph.normalizations) if fixing else graph.scales
    tables = MassTables(graph, state, parameters, normalizations=fixing)
    with np.errstate(over="ignore", invalid="ignore"):
        start = tables.at(np.zeros(tables.count))
    counted = counted_parameters(graph, parameters)
    if not start.value < _LARGEST or (start.value == 0 and any(bool(state[n].any()) for n in counted)):
        raise SymmetryError(
            f"the squared norm of these weights is {start.value:.1e}: such squares leave the range of float64 "
            "(a diverged run, a damaged file)"
        )
    if method == "min_mass":
        first = sum(g.size for g in graph.scales)
        filters = filter_counts(graph, counted, tables.count)
        found, lost = _least(tables, start, filters.numpy(), first, degenerate, tolerance)
    else:
        s, lost = _unit_scales(graph, state, groups)
        found = Minimum(s, tables.at(s.numpy()).value, float("nan"), 0)
    sizes = [g.size for g in groups]
    log_scale = {g.name: part.clone() for g, part in zip(groups, found.log_scale.split(sizes), strict=True)}
    dead = {g.name: torch.nonzero(own).flatten() for g, own in zip(groups, lost.split(sizes), strict=True) if own.any()}
    scaled = scale_tensors(graph, log_scale, state)
    told = measured(graph, state, scaled, f"the {method} form", wanted=certify)
    masses = (start.value, found.mass)
    return CanonicalForm(scaled, log_scale, *masses, found.relative_gap, found.iterations, dead, *told)


def representation_cost(
    graph: SymmetryGraph, state: Mapping[str, Tensor], *, parameters: Iterable[str] | None = None
) -> float:
    """Least squared L2 norm over positive rescalings: ``min_Lambda ||T_s(w, Lambda)||^2`` (arXiv 2310.08287, sec. 6).

    Dead units and weights before a normalization count as they are. ``parameters`` is that of :func:`canonicalize`.
    """
    return canonicalize(graph, state, parameters=parameters, certify=False).mass_after


def _least(
    tables: MassTables, start: MassPoint, filters: Array, first: int, degenerate: Convention, tolerance: float
) -> tuple[Minimum, Tensor]:
    """The minimum, and the factors without one; factors from number ``first`` on are those of normalizations."""
    grows, shrinks = start.grows > 0, start.shrinks > 0
    normalized = np.arange(tables.count) >= first
    targets = np.where(normalized & grows, filters, 0.0)
    if degenerate == "unit_norm":
        targets += np.where(normalized | (grows & shrinks), 0.0, 1.0 * grows - shrinks)
    active = np.where(normalized, grows, (grows & shrinks) | (targets != 0))
    unbounded = unbounded_factors(tables, active, targets)
    found = minimize_mass(tables, start, active & ~unbounded, np.where(unbounded, 0.0, targets), tolerance)
    return found, torch.from_numpy(np.where(normalized, ~grows, ~(grows & shrinks)) | unbounded)


def _unit_scales(
    graph: SymmetryGraph, state: Mapping[str, Tensor], groups: Sequence[ScaleGroup]
) -> tuple[Tensor, Tensor]:
    """Log-factors that give every unit's maker unit norm, and a mask of the units whose maker is zero."""
    # A maker's entries also depend on the factors of the units that feed it. Groups are therefore settled front to
    # back, each by its first maker that is fed by settled groups alone; where there is none, others stay as they are.
    whole = len(groups) > len(graph.scales)
    sizes = torch.tensor([g.size for g in groups], dtype=torch.long, device="cpu")
    owner = torch.repeat_interleave(torch.arange(len(groups), device="cpu"), sizes)
    s = torch.zeros(len(owner), dtype=torch.float64, device="cpu")
    lost = torch.zeros(len(owner), dtype=torch.bool, device="cpu")
    candidates = [
        [(name, _feeding(graph, name, k, owner)) for name in _makers(graph, group)] for k, group in enumerate(groups)
    ]
    waiting = list(range(len(groups)))
    while waiting:
        open_ = set(waiting)
        ready = ((k, name) for k in waiting for name, feeding in candidates[k] if not feeding & open_)
        k, name = next(ready, (waiting[0], candidates[waiting[0]][0][0]))
        waiting.remove(k)
        units = owner == k
        tables = MassTables(graph, {name: state[name]}, [name], normalizations=whole)
        mass = torch.from_numpy(tables.at(s.numpy()).grows)[units]
        if not bool(torch.isfinite(mass).all()):
            raise SymmetryError(f"unit norm needs factors of {name!r} that leave the range of float64")
        size = filter_counts(graph, [name], len(owner))[units] if k >= len(graph.scales) else torch.ones_like(mass)
        lost[units] = mass == 0
        s[units] = torch.where(lost[units], 0.0, 0.5 * (size.log() - mass.log()))
    return s, lost


def _makers(graph: SymmetryGraph, group: ScaleGroup) -> list[str]:
    """The matrices that grow with a group's factors, in the state dict's order; without any, the first that grows."""
    growing = {m.parameter for m in group.members if m.exponent > 0 and not m.buffer}
    ordered = [name for name in graph.shapes if name in growing]
    matrices = [n for n in ordered if max(graph.shapes[n], default=1) < math.prod(graph.shapes[n])]
    return matrices or ordered[:1]


def _feeding(graph: SymmetryGraph, name: str, group: int, owner: Tensor) -> set[int]:
    """The groups whose factors also multiply those entries of a tensor that grow with one group."""
    padded = torch.cat([owner, torch.tensor([-1], device="cpu")])  # the slot of -1 and of factors that are held
    terms = [(t.exponent, torch.where(t.index < len(owner), t.index, -1)) for t in graph.scale_terms[name]]
    found: set[int] = set()
    for own in (padded[index] == group for exponent, index in terms if exponent > 0):
        if not bool(own.any()):
            continue
        for _, index in terms:
            apart = all(a == 1 or b == 1 for a, b in zip(own.shape, index.shape, strict=True))
            numbers = index if apart else torch.where(own, index, -1)
            found.update(padded[numbers.unique()].tolist())
    return found - {-1, group}
