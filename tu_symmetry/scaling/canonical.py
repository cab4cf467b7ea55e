"""Canonical scales: one member of every orbit of positive rescalings.

``min_mass`` takes the unique weights of least squared L2 norm (the representation cost of arXiv 2310.08287, section 6);
``unit_norm`` gives every hidden filter unit norm, front to back, as that paper's released code does; ``unit_variance``
gives its weights a mean square of one.

Laws (tests/scaling/test_canonical.py): the function is unchanged; the form is idempotent and constant on orbits; it
commutes with permutations; the mass never grows under ``min_mass``, and equals the optimum of a general convex solver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from tu_symmetry.reporting.brief import Brief, change
from tu_symmetry.scaling.masses import MassPoint, MassTables, Parameters, counted_parameters, filter_counts
from tu_symmetry.scaling.minimum import Minimum, minimize_mass, unbounded_factors
from tu_symmetry.scaling.unit_norm import unit_scales
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import scale_tensors
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph

Method = Literal["min_mass", "unit_norm", "unit_variance"]
Convention = Literal["leave", "unit_norm"]
_LOST = 0.1  # share of a variance and epsilon that rounding may take
_LARGEST = 1e150  # mass whose square float64 still holds


@dataclass(frozen=True, repr=False)
class CanonicalForm(Brief):
    """A network in canonical scale.

    Attributes:
        state: the rescaled state dict; computes the same function.
        log_scale: natural-log factors that were applied, group name to float64 ``[size]``.
        mass_before: squared L2 norm of the counted parameters as given.
        mass_after: the same in canonical form.
        gradient_norm: certificate for ``min_mass``: norm of the objective's gradient in the log-factors, relative to
            the mass (zero at the optimum of a convex function); NaN for the other methods.
        relative_gap: certificate for ``min_mass``: upper bound of how far the objective is above its minimum, relative
            to the mass, from a feasible point of the dual problem; NaN for the other methods.
        iterations: Newton steps (``min_mass``; 0 for the other methods).
        degenerate: group name to the numbers of the factors for which there is no canonical value: their mass lies on
            one side only, so that it could be scaled away altogether (dead units, which nothing feeds or nothing
            reads), or they have no mass at all. See ``canonicalize(degenerate=...)`` for what becomes of them.
        unfixed: names of the normalization groups that were left as they are: the mass could shrink without end there.
        certificate: by how much the outputs on the graph's example inputs changed, beside what rounding explains
            (:func:`~tu_symmetry.certify`); None where nothing was measured.
        uncertified: why nothing was measured; empty where something was.
    """

    state: dict[str, Tensor]
    log_scale: LogScale
    mass_before: float
    mass_after: float
    gradient_norm: float
    relative_gap: float
    iterations: int
    degenerate: dict[str, Tensor]
    unfixed: tuple[str, ...]
    certificate: Certificate | None = None
    uncertified: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """The masses, and what has no canonical value."""
        dead = sum(len(numbers) for numbers in self.degenerate.values())
        facts = [
            ("mass", change(self.mass_before, self.mass_after)),
            ("groups", str(len(self.log_scale))),
        ]
        if not math.isnan(self.relative_gap):
            facts.append(("above the minimum by", f"{self.relative_gap:.1e} of the mass at most"))
        if dead:
            facts.append(("factors without canonical value", str(dead)))
        if self.unfixed:
            facts.append(("left as they are", ", ".join(self.unfixed[:4]) + (", ..." if len(self.unfixed) > 4 else "")))
        measured = f"not measured: {self.uncertified}"
        facts.append(("outputs changed by", f"{self.certificate.change:.1e}" if self.certificate else measured))
        return facts


def canonicalize(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    *,
    method: Method = "min_mass",
    parameters: Parameters | None = None,
    normalizations: Convention = "leave",
    degenerate: Convention = "leave",
    epsilons: Mapping[str, float] | None = None,
    tolerance: float = 1e-12,
    max_iterations: int = 200,
    certify: bool = True,
) -> CanonicalForm:
    """Bring the scale of every hidden unit into canonical form.

    *The three methods.* ``min_mass`` minimizes the counted mass over all positive factors at once. ``unit_norm`` gives
    the incoming weights of each unit unit L2 norm, front to back: a row of a linear layer, a convolution's filter
    (biases follow); where a normalization's affine parameters make the unit, its gain becomes plus or minus one. Of
    several layers that make a unit (those that write to a residual stream) the first counts that can be reached front
    to back: no scale gives all of them unit norm at once. ``unit_variance`` does the same with a mean square of one:
    the variance of weights whose mean is zero by assumption, as under the usual initializations and priors. (The
    variance about a filter's own mean would be zero for filters of one weight.) A negative gain keeps its sign:
    factors are positive.

    *Normalizations.* Weights before a normalization could shrink without end. ``normalizations="leave"`` holds them.
    ``"unit_norm"`` gives the counted weights of each factor unit norm (a channel's filter before batch normalization)
    or, where it multiplies several filters (a whole layer before layer normalization), a norm of one on average over
    them, by their mean square (``unit_variance``: a mean square of one of the weights). Running statistics move along.
    Under ``min_mass`` this is one convex problem: minimize the mass minus twice the sum of the normalizations'
    log-factors, each times its number of filters. The form is then constant on the normalization groups' orbits too,
    though the mass may grow by it.

    *Degenerate factors* (``min_mass``) are held at one (``"leave"``), or the side that has mass is given unit norm
    (``"unit_norm"``), which makes the form constant on their orbits too, though the mass may grow by it. Factors
    without any mass, and dead cycles of units that only feed each other, are left alone.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict.
        method: ``min_mass``, ``unit_norm`` or ``unit_variance``.
        parameters: the tensors whose squared norm counts, as the regularizer counts them: names, patterns
            (``"*.weight"``) or a predicate of the name; all parameters if left out. Everything is rescaled
            consistently either way. Only ``min_mass`` and the reported masses depend on it.
        normalizations: what becomes of normalization groups.
        degenerate: what becomes of factors without a minimum.
        epsilons: name of a running variance to its normalization's epsilon (``normalization_epsilons(model)``), to fold
            epsilon exactly into the running variances. Without it, factors that a batch normalization undoes are exact
            up to epsilon; in training mode, and for normalizations without statistics, they always are.
        tolerance: on the relative gradient norm (``min_mass``).
        max_iterations: Newton steps (``min_mass``).
        certify: measure on the example inputs that the graph was discovered with that the outputs stay the same: some
            six forward passes in float64 on the CPU. Where the graph holds no network to run (it was unpickled), the
            result says so.

    Returns:
        The canonical form with its certificates.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights, double-precision weights whose squares
            leave the range of float64, or a canonical form that leaves the range of the state's dtype; outputs that
            changed by more than rounding explains.
        ValueError: unknown methods, conventions or parameters, or a stack of states.
        RuntimeError: no convergence; the message says how far it came.
    """
    graph.require_verified()
    if graph.check_state(state, finite=False):
        raise ValueError("canonicalize takes one state; unstack a stack of samples and canonicalize each")
    # a sum is faster than a look at each entry; what has no values at all is for the check to name
    if any(t.is_meta for t in state.values()) or not all(bool(torch.isfinite(t.sum())) for t in state.values()):
        graph.check_state(state)
    for option, value in (("normalizations", normalizations), ("degenerate", degenerate)):
        if value not in ("leave", "unit_norm"):
            raise ValueError(f"{option} must be 'leave' or 'unit_norm', got {value!r}")
    fixing = normalizations == "unit_norm"
    tables = MassTables(graph, state, parameters, normalizations=fixing)
    with np.errstate(over="ignore", invalid="ignore"):
        start = tables.at(np.zeros(tables.count))
    if not start.value < _LARGEST:
        raise SymmetryError(
            f"the squared norm of these weights is {start.value:.1e}; products of such masses leave the range of "
            "float64. Weights of this size come from a diverged run or a damaged file"
        )
    if method == "min_mass":
        first = sum(g.size for g in graph.scales)
        filters = torch.zeros(tables.count, dtype=torch.float64, device="cpu")
        if first < tables.count:
            filters = filter_counts(graph, counted_parameters(graph, parameters), tables.count)
        found, lost = _least(tables, start, filters, first, degenerate, tolerance, max_iterations)
    elif method in ("unit_norm", "unit_variance"):
        groups = (*graph.scales, *graph.normalizations) if fixing else graph.scales
        s, lost = unit_scales(graph, state, groups, mean_square=method == "unit_variance")
        found = Minimum(s, tables.value_at(s.numpy()), float("nan"), float("nan"), 0)
    else:
        raise ValueError(f"unknown method {method!r}: 'min_mass', 'unit_norm' or 'unit_variance'")
    log_scale, named, position = {}, {}, 0
    for group in (*graph.scales, *graph.normalizations)[: None if fixing else len(graph.scales)]:
        part = slice(position, position + group.size)
        log_scale[group.name] = found.log_scale[part].clone()
        if lost[part].any():
            named[group.name] = torch.nonzero(lost[part]).flatten()
        position += group.size
    scaled = scale_with_epsilon(graph, log_scale, state, epsilons or {})
    name = f"the {method} form"
    if fixing and not epsilons and not all(g.exact for g in graph.normalizations):
        name += " (epsilons of normalizations were not folded: pass epsilons=normalization_epsilons(model))"
    certificate, uncertified = measured(graph, state, scaled, name, wanted=certify)
    return CanonicalForm(
        scaled,
        log_scale,
        start.value,
        found.mass,
        found.gradient_norm,
        found.relative_gap,
        found.iterations,
        named,
        () if fixing else tuple(g.name for g in graph.normalizations),
        certificate,
        uncertified,
    )


def representation_cost(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    *,
    parameters: Parameters | None = None,
    normalizations: Convention = "leave",
    degenerate: Convention = "leave",
) -> float:
    """Least squared L2 norm over positive rescalings: ``min_Lambda ||T_s(w, Lambda)||^2`` (arXiv 2310.08287, sec. 6).

    Directions without a minimum (dead units, weights before a normalization) count as :func:`canonicalize` leaves or
    fixes them.
    """
    return canonicalize(
        graph, state, parameters=parameters, normalizations=normalizations, degenerate=degenerate, certify=False
    ).mass_after


def normalization_epsilons(model: nn.Module) -> dict[str, float]:
    """The epsilon that belongs to each running variance: name in the state dict to epsilon."""
    return {
        f"{name}.running_var" if name else "running_var": float(module.eps)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_var", None), Tensor) and isinstance(getattr(module, "eps", None), float)
    }


def scale_with_epsilon(
    graph: SymmetryGraph, log_scale: LogScale, state: Mapping[str, Tensor], epsilons: Mapping[str, float]
) -> dict[str, Tensor]:
    """As :func:`~tu_symmetry.apply_scale`, with running variances that fold epsilon exactly (in evaluation mode).

    ``y = gamma (x - mean) / sqrt(var + eps) + beta`` stays the same where ``x`` and ``mean`` are scaled by ``k`` if
    ``var + eps`` becomes ``k^2 (var + eps)``. The new variance ``k^2 (var + eps) - eps`` may lie between ``-eps`` and
    0, which PyTorch evaluates all the same. In training mode the batch's own variance is used, and layer, group,
    instance, RMS and filter response normalization keep no statistics: there rescalings stay exact up to epsilon.

    Args:
        graph: the symmetry graph (verified on first use).
        log_scale: group name to natural-log factors.
        state: state dict, or a stack of states.
        epsilons: name of a running variance to its epsilon, see :func:`normalization_epsilons`. Names that no factor
            moves are left as they are.

    Raises:
        SymmetryError: a state of another architecture, names that are not in the network, or epsilons that are not
            positive.
    """
    graph.require_verified()
    graph.check_state(state, finite=False)
    wrong = {name: e for name, e in epsilons.items() if name not in state or not e > 0}
    if wrong:
        raise SymmetryError(f"epsilons must be positive and named after running variances of this network, got {wrong}")
    scaled = scale_tensors(graph, log_scale, state)
    for name, epsilon in epsilons.items():
        if scaled[name] is not state[name]:
            wanted = scale_tensors(graph, log_scale, {name: state[name].double() + epsilon})[name]
            scaled[name] = (wanted - epsilon).to(state[name].dtype)
            lost = (scaled[name].double() + epsilon - wanted).abs() > _LOST * wanted
            if lost.any():
                raise SymmetryError(
                    f"{name!r} cannot hold k^2 (var + eps) - eps in {state[name].dtype} for {int(lost.sum())} channels "
                    f"(k^2 (var + eps) falls to {float(wanted[lost].min()):.1e} beside eps = {epsilon:.0e}): the "
                    "function would change. Weights of extreme size are the cause; convert the state to float64, or "
                    "leave normalizations as they are"
                )
    return scaled


def _least(
    tables: MassTables,
    start: MassPoint,
    filters: Tensor,
    first: int,
    degenerate: Convention,
    tolerance: float,
    max_iterations: int,
) -> tuple[Minimum, Tensor]:
    """The minimum, and the factors without one; factors from number ``first`` on are those of normalizations."""
    grows, shrinks = torch.from_numpy(start.grows), torch.from_numpy(start.shrinks)
    normalized = torch.arange(tables.count, device="cpu") >= first
    two_sided = (grows > 0) & (shrinks > 0)
    targets = torch.where(normalized & (grows > 0), filters, 0.0)
    if degenerate == "unit_norm":
        targets = targets + torch.where(~normalized & ~two_sided, (grows > 0).double() - (shrinks > 0).double(), 0.0)
    active = torch.where(normalized, grows > 0, two_sided | (targets != 0))
    unbounded = unbounded_factors(tables, active, targets)
    targets = torch.where(unbounded, 0.0, targets)
    found = minimize_mass(tables, start, (active & ~unbounded).numpy(), targets.numpy(), tolerance, max_iterations)
    return found, torch.where(normalized, grows == 0, ~two_sided) | unbounded
