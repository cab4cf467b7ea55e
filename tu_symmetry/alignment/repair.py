"""What averaging breaks and how to correct it: statistics of hidden units after merging.

The units of an interpolated network have too small a variance: units of the endpoints that are not perfectly correlated
partly cancel. Batch normalization then divides by statistics that are no longer true. Re-estimating them corrects
networks with batch normalization; REPAIR (Jordan et al. 2023, arXiv 2211.08403) corrects the others by rescaling each
hidden unit so that its mean and standard deviation are the interpolation of the endpoints'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tu_symmetry.evaluation import evaluating, forward, input_batches, on_device, reusable
from tu_symmetry.states import State, as_given, require_state
from tu_symmetry.symmetry.randomness import leaves_randomness

Correction = Literal["none", "batchnorm", "repair"]
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Moments:
    """Pooled mean and variance of each channel over everything that was added, float64."""

    def __init__(self, axis: int) -> None:
        self.axis, self.count = axis, 0
        self.mean = self.scatter = torch.zeros((), device="cpu")

    def add(self, activation: Tensor) -> None:
        """Add activations; all axes but the channels' are pooled (Chan's update, exact for any split in batches)."""
        rows = activation.detach().movedim(self.axis, 0).flatten(1).double()
        count, mean = rows.shape[1], rows.mean(1)
        scatter = (rows - mean[:, None]).square().sum(1)
        total = self.count + count
        if self.count == 0:
            self.mean, self.scatter = mean, scatter
        else:
            delta = mean - self.mean
            self.mean = self.mean + delta * (count / total)
            self.scatter = self.scatter + scatter + delta.square() * (self.count * count / total)
        self.count = total

    def finite(self) -> Tensor:
        """Whether all are numbers; NaN and infinity stay once they are there."""
        return torch.isfinite(self.mean).all() & torch.isfinite(self.scatter).all()

    @property
    def std(self) -> Tensor:
        return (self.scatter / self.count).sqrt()


def batchnorm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm layers with running statistics, by their paths."""
    return {p: m for p, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


@leaves_randomness
def reestimate_batchnorm(model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any]) -> State:
    """Running statistics of all BatchNorm layers, from data.

    One pass in which each batch is normalized by its own statistics, as in training, so that later layers see what
    they will see. Means and (unbiased) variances are pooled over all samples, not averaged over batches: the result
    does not hang on the size of the last batch.

    Args:
        model: the module, left as it is.
        state: its weights.
        dataloader: batches, tensors or tuples that begin with the inputs.

    Returns:
        A new state: ``running_mean`` and ``running_var`` are replaced, all else is shared with the input.

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
    moments = {path: _Moments(1) for path in layers}

    def watch(path: str) -> Callable[..., None]:
        return lambda module, args: moments[path].add(args[0])

    weights, device = on_device(require_state(state, "state", like=model.state_dict()))
    scratch = {n: t.clone() if n.rpartition(".")[0] in layers else t for n, t in weights.items()}
    handles = [m.register_forward_pre_hook(watch(path)) for path, m in layers.items()]
    try:
        with evaluating(model):
            for module in layers.values():
                module.training = True
            _watch(model, scratch, dataloader, device, moments)
    finally:
        for handle in handles:
            handle.remove()
    result = as_given(state, state)
    for path, found in moments.items():
        if found.count == 0:
            continue  # a layer that this forward pass does not use
        prefix = f"{path}." if path else ""
        for name, value in (("running_mean", found.mean), ("running_var", found.scatter / max(found.count - 1, 1))):
            result[prefix + name] = _held(value, state[prefix + name], prefix + name)
    return result


@leaves_randomness
def repair(
    model: nn.Module,
    states: Sequence[Mapping[str, Tensor]],
    ratios: Sequence[float],
    merged_state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> State:
    """REPAIR a merged network: every hidden unit gets the interpolated mean and standard deviation of the endpoints'.

    Batch normalization layers are re-estimated (their outputs then have the interpolated statistics, since beta and
    gamma are interpolated). Then each other linear or convolution layer is rescaled and shifted, channel by channel, in
    the order of execution: a layer is measured with all earlier ones corrected, so the statistics on ``dataloader`` are
    met exactly. That takes one pass over the loader for each layer, and one for each endpoint.

    Args:
        model: the module, left as it is.
        states: the endpoints, aligned.
        ratios: their weights in the merged network, which sum to one.
        merged_state: the interpolated or averaged network.
        dataloader: batches, tensors or tuples that begin with the inputs; the same order is not needed.
        layers: names of the modules to correct. If left out: linear and convolution layers that run once, own their
            weight, do not feed a BatchNorm layer directly, and are not the last one to run (the output).
        progress: called after each pass with ``{"done", "total"}``.

    Returns:
        A new state. Layers without bias are rescaled only. Units that are constant are shifted only.

    Raises:
        ValueError: ratios that do not fit, an empty loader, layers that cannot be corrected, or statistics that are NaN
            or infinite; the message names the batch.
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
    todo = _correctable(model, result, batches) if layers is None else list(layers)
    modules = dict(model.named_modules())
    for path in todo:
        if not isinstance(modules.get(path), _LAYERS) or f"{path}.weight" not in result:
            raise ValueError(
                f"layer {path!r} cannot be corrected: it is {type(modules.get(path)).__name__}, and repair rescales "
                "the weight of nn.Linear and nn.Conv1d to nn.Conv3d (without parametrizations)"
            )
    if not todo:
        return result  # every hidden layer feeds a BatchNorm layer: re-estimation is all there is to do
    total = len(states) + len(todo)
    ends = []
    for k in range(len(states)):  # by number: a sequence that reads its networks from files keeps none of them
        ends.append(_measure(model, require_state(states[k], f"states[{k}]", like=own), batches, todo))
        if progress is not None:
            progress({"done": k + 1, "total": total})
    for k, path in enumerate(todo):
        now = _measure(model, result, batches, [path])[path]
        goal_mean = sum(r * end[path].mean for r, end in zip(ratios, ends, strict=True))
        goal_std = sum(r * end[path].std for r, end in zip(ratios, ends, strict=True))
        factor = torch.where(now.std > 0, goal_std / now.std.clamp_min(1e-300), torch.ones_like(now.std))
        weight = result[f"{path}.weight"]
        scaled = weight.double() * factor.reshape(-1, *[1] * (weight.ndim - 1))
        result[f"{path}.weight"] = _held(scaled, weight, f"{path}.weight")
        bias = result.get(f"{path}.bias")
        if bias is not None:
            result[f"{path}.bias"] = _held((bias.double() - now.mean) * factor + goal_mean, bias, f"{path}.bias")
        if progress is not None:
            progress({"done": len(states) + k + 1, "total": total})
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


def _watch(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    device: torch.device,
    moments: Mapping[str, _Moments],
) -> None:
    """Run a network over the data while its hooks fill the moments.

    Raises:
        ValueError: an empty loader; moments that are NaN or infinite, with the first batch that makes them so.
    """
    sound: list[Tensor] = []  # for each batch, whether its inputs are finite, and all moments so far
    for inputs in input_batches(dataloader, device):
        forward(model, weights, inputs)
        finite = torch.isfinite(inputs).all()
        so_far = [found.finite().to(device) for found in moments.values() if found.count]
        sound.append(torch.stack([finite, torch.stack(so_far).all() if so_far else torch.ones_like(finite)]))
    table = torch.stack(sound).tolist()
    if table[-1][1]:
        return
    batch = next(k for k, (_, whole) in enumerate(table) if not whole)
    path = next(path for path, found in moments.items() if found.count and not found.finite())
    why = "its inputs are finite: the network diverges" if table[batch][0] else "it holds such numbers itself"
    raise ValueError(
        f"the activations at {path!r} are NaN or infinite on batch {batch} of the data (counted from 0), and {why}"
    )


def _held(value: Tensor, given: Tensor, name: str) -> Tensor:
    """A corrected tensor in the dtype of the given one.

    Raises:
        ValueError: NaN or infinite values, in that dtype.
    """
    held = value.to(given)
    if not torch.isfinite(held).all():
        raise ValueError(
            f"the corrected {name!r} would hold values as large as {float(value.abs().max()):.1e}, which {given.dtype} "
            "does not hold; merge the networks in a wider precision, or without this correction"
        )
    return held


def _measure(
    model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any], paths: Sequence[str]
) -> dict[str, _Moments]:
    """Moments of the outputs of some layers, in evaluation mode."""
    modules = dict(model.named_modules())
    moments = {path: _Moments(_channel_axis(modules[path])) for path in paths}

    def watch(path: str) -> Callable[..., None]:
        return lambda module, args, output: moments[path].add(output)

    weights, device = on_device(state)
    handles = [modules[path].register_forward_hook(watch(path)) for path in paths]
    try:
        with evaluating(model):
            _watch(model, weights, dataloader, device, moments)
    finally:
        for handle in handles:
            handle.remove()
    idle = [path for path, found in moments.items() if found.count == 0]
    if idle:
        raise ValueError(f"the layers {idle} do not run in the forward pass, so they have no statistics to correct")
    return moments


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

    weights, device = on_device(state)
    handles = [
        m.register_forward_hook(watch(path))
        for path, m in model.named_modules()
        if isinstance(m, (*_LAYERS, _BatchNorm))
    ]
    try:
        with evaluating(model):
            forward(model, weights, next(input_batches(dataloader, device)))
    finally:
        for handle in handles:
            handle.remove()
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    modules = dict(model.named_modules())
    return [
        path
        for path in calls[:-1]
        if calls.count(path) == 1
        and not any(outputs[path] is read for read in normalized)
        and f"{path}.weight" in state
        and owners[id(modules[path].weight)] == 1
    ]


def _channel_axis(module: nn.Module) -> int:
    return -1 if isinstance(module, nn.Linear) else 1
