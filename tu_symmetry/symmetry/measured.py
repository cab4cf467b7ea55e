"""Certificates as a by-product: what returns transformed weights measures what it did to the outputs.

Law (tests/symmetry/test_certified_results.py): a wrong symmetry that passes for verified is refused by everything that
transforms weights with it, before anything is returned, written or changed in place.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.certificate import MOST_OF_EPSILON, Certificate, certify, require_certificate
from tu_symmetry.symmetry.graph import SymmetryGraph

_ONE_AT_A_TIME = threading.Lock()  # a run puts its weights into the graph's one module, also in threads of an alignment
_ASKED = "certify=False was passed"
_NO_NETWORK = (
    "the symmetry graph holds no network to run (it was unpickled or built by hand); "
    "certify(graph, before, after, model=model, example_inputs=x) measures the change of outputs"
)
_MODERATE = 0.05  # of the outputs' norm: more than that is another function, whatever the reason
_OBVIOUS = 1e-12  # a relative change of every output entry that needs no explanation


class UncertifiedWarning(UserWarning):
    """Weights were transformed, and nothing measured whether the network's outputs stayed the same."""


class EpsilonWarning(UserWarning):
    """The outputs changed by what the epsilon of a normalization makes of a rescaling, and not by much."""


def measured(
    graph: SymmetryGraph,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    name: str,
    *,
    wanted: bool = True,
    rounded: bool = True,
) -> tuple[Certificate | None, str]:
    """Certify transformed weights where the graph holds a network to run.

    Args:
        graph: the symmetry graph.
        before: state dict.
        after: the transformed one.
        name: what to call the weights in an error.
        wanted: whether to measure at all.
        rounded: whether the weights were rounded. If they only changed places, outputs of ordinary networks agree to
            twelve digits, which two forward passes show; what they do not show is certified in full.

    Returns:
        The certificate, which holds, and an empty text; or None, and why there is none.

    Raises:
        SymmetryError: the outputs changed by more than rounding, and for groups that hold up to the epsilon of a
            normalization by more than that epsilon, explains.
    """
    if not wanted:
        return None, _ASKED
    if graph.probe is None:
        return None, _NO_NETWORK
    try:
        with _ONE_AT_A_TIME:
            found = (None if rounded else _obvious(graph, before, after)) or certify(graph, before, after)
            by_epsilon = None if found.holds else _epsilon_alone(graph, before, after, found)
    except SymmetryError as error:
        return None, f"the network could not be run with these weights: {error}"
    if by_epsilon is None or by_epsilon.change > _MODERATE:
        return require_certificate(found, name), ""
    if not by_epsilon.holds:
        warnings.warn(
            f"{name}: the outputs change by {by_epsilon.change:.1e} of their norm. The epsilons of normalizations make "
            "this change: without them the outputs stay the same. Fold those of batch normalizations "
            "(epsilons=normalization_epsilons(model)), or leave such scales alone",
            EpsilonWarning,
            stacklevel=4,
        )
    return by_epsilon, ""


def _epsilon_alone(
    graph: SymmetryGraph, before: Mapping[str, Tensor], after: Mapping[str, Tensor], found: Certificate
) -> Certificate | None:
    """The change of the outputs' norm, if it is gone where normalizations have no epsilon; None if it is not.

    Groups that a normalization undoes are symmetries up to its epsilon, as the graph says of them (``exact`` is False).
    An entry that is small by cancellation may change by much of its own size then, so the norm counts.
    """
    if all(g.exact for g in (*graph.scales, *graph.normalizations)):
        return None
    assert graph.probe is not None
    if not certify(replace(graph, probe=graph.probe.without_epsilons()), before, after).holds:
        return None
    worst = 0.0
    for a, b in zip(*(graph.probe.run(state) for state in (before, after)), strict=True):
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return None
            continue
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return None
        size, change = (float(t[finite].norm()) for t in (a, a - b))
        worst = max(worst, change / max(size, 1e-300))
    return Certificate(worst, MOST_OF_EPSILON, found.dtype, found.outputs)


def _obvious(graph: SymmetryGraph, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Certificate | None:
    """The certificate of a change that is within rounding of each output entry by itself; None if it is not."""
    assert graph.probe is not None
    pairs = list(zip(*(graph.probe.run(state) for state in (before, after)), strict=True))
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return None
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return None
            continue
        if a.dtype not in (torch.float64, torch.complex128) or not torch.isfinite(a).all():
            return None
        change = torch.where(a == b, 0.0, (a - b).abs() / a.abs())
        worst = max(worst, float(change.max()) if change.numel() else 0.0)
        if not worst <= _OBVIOUS:
            return None
    return Certificate(worst, _OBVIOUS, torch.float64, sum(a.numel() for a, _ in pairs))
