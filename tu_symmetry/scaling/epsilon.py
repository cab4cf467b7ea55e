"""Batch normalization's epsilon, folded exactly into the running variance that a rescaling moves.

``y = gamma (x - mean) / sqrt(var + eps) + beta``: if ``x`` and ``mean`` are scaled by ``k``, the output stays the same
if ``var + eps`` becomes ``k^2 (var + eps)``. The epsilon is no part of a state dict, so the new variance has to be
``k^2 (var + eps) - eps``. That may lie between ``-eps`` and 0 where the variance is far below epsilon already; PyTorch
evaluates it all the same. Nothing of the kind helps in training mode, where the batch's own variance is used, nor with
normalizations that keep no statistics (layer, group, instance, RMS, filter response normalization): there rescalings
stay exact up to epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import scale_tensors
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph

_LOST = 0.1  # share of a variance and epsilon that rounding may take


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
