"""What averaging breaks and how to correct it: statistics of hidden units after merging.

Units of the averaged networks that are not perfectly correlated partly cancel, so that the average's have too small a
variance. Batch normalization then divides by statistics that are no longer true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tu_symmetry.evaluation import Moments, evaluating, forward, input_batches, on_device, reusable
from tu_symmetry.states import State, as_given, require_state
from tu_symmetry.symmetry.randomness import leaves_randomness
from tu_symmetry.transfer import numbers

Correction = Literal["none", "batchnorm", "repair"]
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def batchnorm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm layers with running statistics, by their paths."""
    return {p: m for p, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


@leaves_randomness
def reestimate_batchnorm(model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any]) -> State:
    """A state with running statistics of all BatchNorm layers from data; all else is shared with the given one.

    One pass over batches (tensors, or tuples that begin with the inputs), each normalized by its own statistics, as in
    training. Means and (unbiased) variances are pooled over all samples, whatever the size of the last batch.

    Raises:
        ValueError: an empty loader, a network without running statistics, or statistics that would be NaN or infinite;
            the message names the batch.
    """
    layers = batchnorm_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no BatchNorm layer with running statistics to re-estimate; networks without "
            "batch normalization are corrected by repair()"
        )
    moments = {path: Moments() for path in layers}
    weights, device = on_device(require_state(state, "state", like=model.state_dict()))
    scratch = {n: t.clone() if n.rpartition(".")[0] in layers else t for n, t in weights.items()}
    with evaluating(model, {path: _watch(found, 1, inputs=True) for path, found in moments.items()}):
        for module in layers.values():
            module.training = True
        _fill(moments, model, scratch, dataloader, device)
    result = as_given(state, state)
    for path, found in moments.items():
        if found.count == 0:
            continue  # a layer that this forward pass does not use
        prefix = f"{path}." if path else ""
        variance = found.sums[0] / max(found.count - 1, 1)
        for name, value in (("running_mean", found.means[0]), ("running_var", variance)):
            result[prefix + name] = _held(value, state[prefix + name], prefix + name)
    return result


@leaves_randomness
def repair(
    model: nn.Module,
    states: Sequence[Mapping[str, Tensor]],
    ratios: Sequence[float],
    merged_state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
) -> State:
    """REPAIR a merged network: every hidden unit gets the interpolated mean and standard deviation of the endpoints'.

    BatchNorm layers are re-estimated. Then each other linear or convolution layer that runs once, owns its weight,
    feeds no BatchNorm layer and is not the output is rescaled and shifted, channel by channel, in the order of
    execution, with all earlier ones corrected: the statistics on ``dataloader`` are met exactly, in one pass for each
    layer and endpoint (Jordan et al. 2023, arXiv 2211.08403). Layers without bias are only rescaled, constant units
    only shifted.

    Args:
        model: the module, left as it is.
        states: the endpoints, aligned.
        ratios: their weights in the merged network, which sum to one.
        merged_state: the interpolated or averaged network.
        dataloader: batches, tensors or tuples that begin with the inputs; the same order is not needed.

    Raises:
        ValueError: ratios that do not fit, an empty loader, or statistics that are NaN or infinite; the message names
            the batch.
    """
    if len(states) != len(ratios) or not states or abs(sum(ratios) - 1) > 1e-6:
        raise ValueError(
            f"repair needs one ratio for each of the {len(states)} networks, with sum 1, got {list(ratios)}"
        )
    own = model.state_dict()
    batches = reusable(dataloader)
    result = as_given(merged_state, require_state(merged_state, "merged_state", like=own))
    if batchnorm_layers(model):
        result = reestimate_batchnorm(model, result, batches)
    todo = _correctable(model, result, batches)
    if not todo:
        return result  # every hidden layer feeds a BatchNorm layer: re-estimation is all there is to do
    ends = []
    for k in range(len(states)):  # by number: a sequence that reads its networks from files keeps none of them
        ends.append(_measure(model, require_state(states[k], f"states[{k}]", like=own), batches, todo))
    for path in todo:
        mean, std = _measure(model, result, batches, [path])[path]
        goal_mean = sum(r * end[path][0] for r, end in zip(ratios, ends, strict=True))
        goal_std = sum(r * end[path][1] for r, end in zip(ratios, ends, strict=True))
        factor = torch.where(std > 0, goal_std / std.clamp_min(1e-300), torch.ones_like(std))
        weight = result[f"{path}.weight"]
        scaled = weight.double() * factor.reshape(-1, *[1] * (weight.ndim - 1))
        result[f"{path}.weight"] = _held(scaled, weight, f"{path}.weight")
        bias = result.get(f"{path}.bias")
        if bias is not None:
            result[f"{path}.bias"] = _held((bias.double() - mean) * factor + goal_mean, bias, f"{path}.bias")
    return result


def correct(
    model: nn.Module,
    states: Sequence[Mapping[str, Tensor]],
    ratios: Sequence[float],
    merged_state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    correction: Correction,
) -> State:
    """A merged network as it is (``none``), re-estimated (``batchnorm``), or after :func:`repair`.

    The arguments are those of :func:`repair`; for ``none`` the loader is not read.
    """
    if correction == "none":
        return as_given(merged_state, merged_state)
    if correction == "batchnorm":
        return reestimate_batchnorm(model, merged_state, dataloader)
    return repair(model, states, ratios, merged_state, dataloader)


def _watch(moments: Moments, axis: int, *, inputs: bool) -> Callable[..., None]:
    """A hook that adds what a layer is given, or makes, with all axes but the channels' pooled."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen = args[0] if inputs else output
        moments.add(seen.detach().movedim(axis, 0).flatten(1).double())

    return hook


def _fill(
    moments: Mapping[str, Moments],
    model: nn.Module,
    weights: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    device: torch.device,
) -> None:
    """Run a network over the data while its hooks fill the moments; refuse the first batch that makes them NaN."""
    for batch, inputs in enumerate(input_batches(dataloader, device)):
        forward(model, weights, inputs)
        filled = {path: torch.isfinite(found.sums[0]).all() for path, found in moments.items() if found.count}
        broken = [path for path, finite in zip(filled, numbers(list(filled.values())), strict=True) if not finite]
        if broken:
            sound = bool(torch.isfinite(inputs).all())
            why = "its inputs are finite: the network diverges" if sound else "it holds such numbers itself"
            raise ValueError(
                f"the activations at {broken[0]!r} are NaN or infinite on batch {batch} of the data (counted from 0), "
                f"and {why}"
            )


def _held(value: Tensor, given: Tensor, name: str) -> Tensor:
    """A corrected tensor in the dtype of the given one, which has to hold it."""
    held = value.to(given)
    if not torch.isfinite(held).all():
        raise ValueError(
            f"the corrected {name!r} would hold values as large as {float(value.abs().max()):.1e}, which {given.dtype} "
            "does not hold; merge the networks in a wider precision, or without this correction"
        )
    return held


def _measure(
    model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any], paths: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and standard deviations of the outputs of some layers, in evaluation mode."""
    axes = {p: -1 if isinstance(m, nn.Linear) else 1 for p, m in model.named_modules() if p in paths}
    moments = {path: Moments() for path in paths}
    weights, device = on_device(state)
    with evaluating(model, {path: _watch(found, axes[path], inputs=False) for path, found in moments.items()}):
        _fill(moments, model, weights, dataloader, device)
    return {path: (found.means[0], (found.sums[0] / found.count).sqrt()) for path, found in moments.items()}


def _correctable(model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any]) -> list[str]:
    """Layers that one forward pass runs once and whose statistics nothing else sets, in order, without the output."""
    calls: list[str] = []
    normalized: list[Tensor] = []
    outputs: dict[str, Tensor] = {}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(module, _BatchNorm):
                normalized.append(args[0])
            else:
                calls.append(path)
                outputs[path] = output

        return hook

    modules = dict(model.named_modules())
    weights, device = on_device(state)
    with evaluating(model, {p: watch(p) for p, m in modules.items() if isinstance(m, (*_LAYERS, _BatchNorm))}):
        forward(model, weights, next(input_batches(dataloader, device)))
    owners = [id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)]
    return [
        path
        for path in calls[:-1]
        if calls.count(path) == 1
        and not any(outputs[path] is read for read in normalized)
        and f"{path}.weight" in state
        and owners.count(id(modules[path].weight)) == 1
    ]
