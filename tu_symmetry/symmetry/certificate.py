"""Certificates: how much the outputs of a user's own network change between two states that should compute the same.

Verification shows that a symmetry holds for random weights. A certificate is measured on the very weights that were
transformed: the change of the outputs, beside the change that the rounding of the weights explains.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.running.comparison import Difference, Reference
from tu_symmetry.symmetry.running.probe import Probe
from tu_symmetry.symmetry.running.weights import is_continuous
from tu_symmetry.symmetry.symmetries import Symmetries

FACTOR = 4.0  # how often the largest of a few draws of rounding noise the change may be
COMPUTATION = 128  # rounding errors of the computation itself, in units of the last place of every weight
MOST_OF_EPSILON = 1e-3
_MODERATE = 0.05  # of the outputs' norm: more than that is another function, whatever the reason
_OBVIOUS = 1e-12  # a relative change of every output entry that needs no explanation
_ONE_AT_A_TIME = threading.Lock()  # a run puts its weights into the graph's one module, also in threads of an alignment
_NO_NETWORK = "the symmetry graph holds no network to run (it was unpickled or built by hand)"
_PASS_ONE = "certify(graph, before, after, model=model, example_inputs=x) measures the change of outputs"


@dataclass(frozen=True)
class Certificate:
    """The change of a network's outputs from one state to another, and what rounding explains of it.

    Both numbers are of the output entry, over all samples, that fares worst, relative to that entry's own scale: its
    magnitude, or what it changes by when the weights change by their own size.

    Attributes:
        change: relative change; inf where integer outputs, or the places of NaN and infinite outputs, differ.
        allowed: relative change that is explained by the rounding of the weights and of the computation, or by the
            epsilon of a normalization (at most 1e-3).
        dtype: the lowest precision among the weights that were rounded; float64 where weights only changed places.
        outputs: number of output entries that were compared, over all samples.
        samples: number of pairs of states that were compared: one, or those of a stack.
    """

    change: float
    allowed: float
    dtype: torch.dtype
    outputs: int
    samples: int = 1

    @property
    def holds(self) -> bool:
        """Whether the change of the outputs is explained."""
        return self.change <= self.allowed

    @property
    def _explains(self) -> str:
        return f"rounding ({str(self.dtype).removeprefix('torch.')}) explains {self.allowed:.1e}"

    def __str__(self) -> str:
        of = f" in {'each' if self.holds else 'the worst'} of {self.samples} samples" if self.samples > 1 else ""
        entries = f"{self.outputs} output entr{'y' if self.outputs == 1 else 'ies'}"
        if self.change == 0:
            return f"outputs are the same{of} ({entries})"
        verb = "outputs are the same" if self.holds else "OUTPUTS CHANGED"
        return f"{verb}{of}: relative change {self.change:.1e}, {self._explains} ({entries})"


def certify(
    graph: Symmetries,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
) -> Certificate:
    """Measure how much the outputs of a network change between two states that should compute the same function.

    The network runs in float64, in evaluation mode, with constants for noise. What rounding explains is measured too: a
    tensor whose entries only changed places was not rounded, every other one is perturbed by the rounding of its own
    dtype, a few times.

    Args:
        graph: the architecture's symmetry graph; its ``probe`` is the network.
        before: state dict, or a stack of states with leading sample axes.
        after: the transformed one, of the same shape.
        example_inputs: an input tensor, or the tuple of positional arguments of ``forward``; those of discovery where
            left out (with noise in place of constant inputs, on which a network shows little).
        example_kwargs: keyword arguments of ``forward``; looked at only with ``example_inputs``.
        model: the module, where the graph has lost its probe (by pickling); only its structure is used.

    Returns:
        The certificate of the sample that fares worst.
    """
    probe = graph.probe
    if model is not None:
        if example_inputs is None:
            raise SymmetryError("certify was given a model without example inputs: pass example_inputs=... too")
        probe = Probe.of(model, example_inputs, example_kwargs)
    elif probe is None:
        raise SymmetryError(f"{_NO_NETWORK}: pass the module and inputs; {_PASS_ONE}")
    elif example_inputs is not None:
        probe = probe.given(example_inputs, example_kwargs)
    leading = graph.check_state(before, finite=False, name="the state before")
    if graph.check_state(after, finite=False, name="the state after") != leading:
        raise SymmetryError("the states before and after have different numbers of sample axes")
    first = next(iter(before.values()), torch.zeros((), device="cpu"))
    shape = first.shape[:leading]
    if any(t.shape[:leading] != shape for state in (before, after) for t in state.values()):
        raise SymmetryError("the tensors of the two states have different numbers of samples")
    if 0 in shape:
        raise SymmetryError("the states hold no samples, so there is nothing to certify")
    inexact = any(not g.exact for g in (*graph.scales, *graph.normalizations))
    found = [
        _one(probe, _at(place, before), _at(place, after), inexact) for place in itertools.product(*map(range, shape))
    ]
    worst = max(found, key=lambda f: (not f[0].holds, f[0].change / max(f[0].allowed, 1e-300)))[0]
    dtype = max((dtype for _, dtype in found), key=lambda d: torch.finfo(d).eps)
    return Certificate(worst.change, worst.allowed, dtype, sum(f.outputs for f, _ in found), len(found))


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


def _at(place: tuple[int, ...], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t[place] if place else t for n, t in state.items()}  # a sparse tensor has no index of no numbers


def _one(
    probe: Probe, before: dict[str, Tensor], after: dict[str, Tensor], inexact: bool
) -> tuple[Difference, torch.dtype]:
    """Compare two states; the dtype is the lowest precision to which a tensor was rounded between them."""
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
    outputs, moved = probe.run(before), probe.run(after)
    explained: list[Tensor] | None = None
    if inexact and rounding:
        exact = probe.without_epsilons()
        explained = _epsilon_effect((outputs, exact.run(before)), (moved, exact.run(after)))
    reference = Reference(outputs)
    generator = torch.Generator().manual_seed(0)
    computation = COMPUTATION * probe.epsilon
    noise = max(computation, *rounding.values(), 0.0)
    found = Difference(float("inf"), 0.0, 0)
    for draws in (1, 1, 2, 12):  # more for an entry that the first draws of the noise hardly moved by chance
        for _ in range(draws):
            after_noise = probe.perturbed(before, lambda n: max(rounding.get(n, 0.0), computation), generator)
            reference.change(outputs, after_noise, noise)
        found = reference.difference(moved, FACTOR * noise, epsilon=probe.epsilon, explained=explained)
        if found.holds or found.change == float("inf"):
            break
    return found, dtype


def _epsilon_effect(*pairs: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
    """For each output entry the change that the epsilons make in the two states, together; at most 1e-3 of it."""
    total: list[Tensor] = []
    for k, size in enumerate(pairs[0][0]):
        effect = torch.zeros((), device="cpu")
        if is_continuous(size):
            effect = sum(((a[k] - b[k]).abs().to(torch.float64) for a, b in pairs), effect)
            effect = torch.where(torch.isfinite(effect), effect, 0.0)
            effect = torch.minimum(effect, MOST_OF_EPSILON * size.abs().to(torch.float64).nan_to_num(0.0))
        total.append(effect)
    return total


def _same_entries(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same entries, in whatever order: by a sum of hashes of their bits."""
    if a.dtype != b.dtype or a.layout != torch.strided or b.layout != torch.strided:
        return False
    return _content(a) == _content(b)


def _content(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat + 0.0  # -0 is 0
    bits = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()])
    total = 0
    for piece in bits.split(2**16):  # which the processor's cache holds
        x = piece.to(torch.int64).mul_(-4658895280553007687)  # every bit reaches the upper half, and that the lower one
        x ^= x >> 32
        total += int(x.mul_(x).sum())
    return total % 2**64


# -- certificates as a by-product of transformations -------------------------------------------------------------------


class UncertifiedWarning(UserWarning):
    """Weights were transformed, and nothing measured whether the network's outputs stayed the same."""


class EpsilonWarning(UserWarning):
    """The outputs changed by what the epsilon of a normalization makes of a rescaling, and not by much."""


def measured(
    graph: Symmetries,
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
        return None, f"{_NO_NETWORK}; {_PASS_ONE}"
    try:
        with _ONE_AT_A_TIME:
            found = None if rounded else _by_outputs(graph.probe, before, after, of_norm=False)
            found = found or certify(graph, before, after)
            by_epsilon = None if found.holds else _epsilon_alone(graph, before, after, found.dtype)
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
    return by_epsilon, ""


def _epsilon_alone(
    graph: Symmetries, before: Mapping[str, Tensor], after: Mapping[str, Tensor], dtype: torch.dtype
) -> Certificate | None:
    """The change of the outputs' norm, if it is gone where normalizations have no epsilon; None if it is not."""
    probe = graph.probe
    if probe is None or all(g.exact for g in (*graph.scales, *graph.normalizations)):
        return None
    if not certify(replace(graph, probe=probe.without_epsilons()), before, after).holds:
        return None
    found = _by_outputs(probe, before, after, of_norm=True)
    return None if found is None else replace(found, dtype=dtype)


def _by_outputs(
    probe: Probe, before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, of_norm: bool
) -> Certificate | None:
    """The change of the outputs, relative to their norm or to each entry by itself."""
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
