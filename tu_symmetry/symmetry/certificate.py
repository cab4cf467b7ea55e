"""Certificates: how much the outputs of a user's own network change between two states that should compute the same.

Verification shows that a symmetry holds for random weights. A certificate is measured on the very weights that were
transformed: the change of the outputs, beside the change that the rounding of the weights explains.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.running.comparison import Certificate as Certificate
from tu_symmetry.symmetry.running.comparison import Reference
from tu_symmetry.symmetry.running.probe import Probe
from tu_symmetry.symmetry.running.weights import is_continuous

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

FACTOR = 4.0  # how often the largest of a few draws of rounding noise the change may be
COMPUTATION = 128  # rounding errors of the computation itself, in units of the last place of every weight
MOST_OF_EPSILON = 1e-3
_MODERATE = 0.05  # of the outputs' norm: more than that is another function, whatever the reason
_OBVIOUS = 1e-12  # a relative change of every output entry that needs no explanation
_ONE_AT_A_TIME = threading.Lock()  # a run seeds torch's one generator, also in threads of an alignment
_NO_NETWORK = (
    "the symmetry graph holds no network to run (it was unpickled or built by hand): "
    "verify_symmetries(graph, model, example_inputs) gives it one"
)


class UncertifiedWarning(UserWarning):
    """Weights were transformed, and nothing measured whether the network's outputs stayed the same."""


class EpsilonWarning(UserWarning):
    """The outputs changed by what the epsilon of a normalization makes of a rescaling, and not by much."""


def certify(graph: SymmetryGraph, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Certificate:
    """Measure how much the outputs of a network change between two states that should compute the same function.

    The network and the inputs are those of the graph's ``probe`` (with noise in place of constant inputs, on which a
    network shows little). It runs in float64, in evaluation mode, with constants for noise. What rounding explains is
    measured too: a tensor whose entries only changed places was not rounded, every other one is perturbed by the
    rounding of its own dtype, a few times.

    Raises:
        SymmetryError: if the graph has lost its probe (by pickling), or a state is not of this architecture.
    """
    if graph.probe is None:
        raise SymmetryError(_NO_NETWORK)
    for state, name in ((before, "the state before"), (after, "the state after")):
        if graph.check_state(state, finite=False, name=name):
            raise SymmetryError(f"{name} is a stack of states; certify them one by one")
    rounding: dict[str, float] = {}
    dtype = torch.float64
    for name, old in before.items():
        new = after[name]
        if not is_continuous(old) or _same_entries(old, new):
            continue
        for kind in (old.dtype, new.dtype):
            rounding[name] = max(rounding.get(name, 0.0), torch.finfo(kind).eps)
            real = torch.zeros((), dtype=kind, device="cpu").real.dtype if kind.is_complex else kind
            dtype = max(dtype, real, key=lambda d: torch.finfo(d).eps)
    probe = graph.probe
    outputs, moved = probe.run(before), probe.run(after)
    explained: list[Tensor] | None = None
    if rounding and not _holds_exactly(graph):
        exact = probe.without_epsilons()
        explained = _epsilon_effect((outputs, exact.run(before)), (moved, exact.run(after)))
    reference = Reference(outputs)
    generator = torch.Generator().manual_seed(0)
    computation = COMPUTATION * probe.epsilon
    noise = max(computation, *rounding.values(), 0.0)
    for draws in (1, 1, 2, 12):  # more for an entry that the first draws of the noise hardly moved by chance
        for _ in range(draws):
            noisy = probe.run_perturbed(before, computation, generator, rounding)
            reference.perturbed(outputs, noisy, noise)
        found = reference.difference(moved, FACTOR * noise, epsilon=probe.epsilon, explained=explained)
        if found.holds or found.change == math.inf:
            break
    return replace(found, dtype=dtype)


def _holds_exactly(graph: SymmetryGraph) -> bool:
    """Whether no group holds up to the epsilon of a normalization only."""
    return all(g.exact for g in (*graph.scales, *graph.normalizations))


def _epsilon_effect(*pairs: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
    """For each output entry the change that the epsilons make in the two states, together; at most 1e-3 of it."""
    effects = [torch.zeros((), device="cpu") for _ in pairs[0][0]]
    for k, size in enumerate(pairs[0][0]):
        if is_continuous(size):
            effect = sum(((a[k] - b[k]).abs().to(torch.float64) for a, b in pairs), effects[k])
            most = MOST_OF_EPSILON * size.abs().to(torch.float64).nan_to_num(0.0)
            effects[k] = torch.minimum(torch.where(torch.isfinite(effect), effect, 0.0), most)
    return effects


def _same_entries(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same entries, in whatever order: by a sum of hashes of their bits."""
    alike = a.dtype == b.dtype and a.layout == b.layout == torch.strided
    return alike and _content(a) == _content(b)


def _content(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1) + 0.0  # -0 is 0
    bits = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()])
    total = 0
    for piece in bits.split(2**16):  # which the processor's cache holds
        x = piece.to(torch.int64).mul_(-4658895280553007687)  # every bit reaches the upper half, and that the lower one
        x ^= x >> 32
        total += int(x.mul_(x).sum())
    return total % 2**64


def require_certificate(certificate: Certificate, name: str) -> Certificate:
    """Refuse weights, which errors call ``name``, whose outputs changed by more than rounding explains."""
    if not certificate.holds:
        raise SymmetryError(
            f"{name}: the outputs of the transformed network are not those of the one before. They change by "
            f"{certificate.change:.1e} relative to their own scale; {certificate._explains}. Either the weights do not "
            "belong to the network that the graph was discovered on (another configuration, inputs that take another "
            "branch), or a symmetry is claimed wrongly: run verify_symmetries(graph, model, example_inputs) with "
            "inputs like your data, and report the architecture if that passes."
        )
    return certificate


def measured(
    graph: SymmetryGraph,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    name: str,
    *,
    wanted: bool = True,
    rounded: bool = True,
) -> tuple[Certificate | None, str]:
    """Certify transformed weights, which errors call ``name``, where that is ``wanted`` and can be run.

    Weights that only changed places (not ``rounded``) give the same outputs to twelve digits in ordinary networks,
    which two forward passes show; what they do not show is certified in full.

    Returns:
        The certificate, which holds, and an empty text; or None, and why there is none.

    Raises:
        SymmetryError: the outputs changed by more than rounding or the epsilon of a normalization explains.
    """
    if not wanted:
        return None, "certify=False was passed"
    if graph.probe is None:
        return None, _NO_NETWORK
    by_epsilon = None
    try:
        with _ONE_AT_A_TIME:
            found = None if rounded else _by_outputs(graph.probe, before, after, of_norm=False)
            found = found or certify(graph, before, after)
            if not found.holds and not _holds_exactly(graph):
                exact = replace(graph, probe=graph.probe.without_epsilons())
                if certify(exact, before, after).holds:  # the change is gone where normalizations have no epsilon
                    by_epsilon = _by_outputs(graph.probe, before, after, of_norm=True)
    except SymmetryError as error:
        return None, f"the network could not be run with these weights: {error}"
    if by_epsilon is None or by_epsilon.change > _MODERATE:
        return require_certificate(found, name), ""
    if not by_epsilon.holds:
        warnings.warn(
            f"{name}: the outputs change by {by_epsilon.change:.1e} of their norm. The epsilons of normalizations make "
            "this change: without them the outputs stay the same. Leave such scales alone, or make the "
            "epsilons smaller",
            EpsilonWarning,
            stacklevel=4,
        )
    return replace(by_epsilon, dtype=found.dtype), ""


def _by_outputs(
    probe: Probe, before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, of_norm: bool
) -> Certificate | None:
    """The change of the outputs, relative to their norm or to each entry by itself; None where that tells nothing."""
    worst, count = 0.0, 0
    for a, b in zip(probe.run(before), probe.run(after), strict=True):
        count += a.numel()
        if a.shape != b.shape or a.dtype != b.dtype:
            return None
        if not is_continuous(a):
            if not torch.equal(a, b):
                return None
            continue
        finite = torch.isfinite(a)
        if of_norm:
            if not torch.equal(finite, torch.isfinite(b)):
                return None
            size, change = (float(t[finite].norm()) for t in (a, a - b))
            worst = max(worst, change / max(size, 1e-300))
        else:
            if a.dtype not in (torch.float64, torch.complex128) or not finite.all():
                return None
            relative = torch.where(a == b, 0.0, (a - b).abs() / a.abs())
            worst = max(worst, float(relative.max()) if relative.numel() else 0.0)
            if not worst <= _OBVIOUS:
                return None
    return Certificate(worst, MOST_OF_EPSILON if of_norm else _OBVIOUS, torch.float64, count)
