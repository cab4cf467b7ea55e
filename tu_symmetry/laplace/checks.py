"""What a network has to be for a Laplace approximation, found out on a few samples before any curvature is taken.

Gradients that are recovered from the inputs and output gradients of layers lack the uses of a weight that hooks do not
see (``F.linear(h, self.table.weight)``). Comparing them with automatic differentiation finds every such parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.hooks import find_layers, watching
from tu_symmetry.laplace.inputs import batch_size, mapped, rows_of
from tu_symmetry.laplace.layers import Layer, UnsupportedLayerError
from tu_symmetry.laplace.tangent import LastLayerModel, TangentModel, evaluating, require_independent_samples
from tu_symmetry.modules import uncopyable

_SAMPLES = 4


def require_module(model: Any) -> None:
    """Refuse what is no network that can be called with other weights: a ``TypeError``."""
    if not isinstance(model, nn.Module):
        reason = f"the model is a {type(model).__name__}, and no torch.nn.Module"
    elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        reason = f"{type(model).__name__} copies the network in every call: pass model.module"
    elif isinstance(model, torch.jit.ScriptModule):
        reason = "the weights of a TorchScript module cannot vary: pass the original module"
    else:
        reason = uncopyable(model, compiled=True)
    if reason:
        raise TypeError(f"linearized Laplace calls the network with other weights; {reason}")


def made_in_inference_mode(tensor: Tensor) -> bool:
    """Whether autograd refuses a tensor as made under inference mode; one whose data moved since then denies it."""
    try:
        return tensor._version < 0
    except RuntimeError:
        return True


def require_weights(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse weights in half or several precisions (a ``TypeError``), or made in inference mode (``ValueError``)."""
    own = dict(model.named_parameters())
    kinds = {own[name].dtype: name for name in reversed(names)}
    if len(kinds) > 1 or not kinds.keys() <= {torch.float32, torch.float64}:
        raise TypeError(
            f"curvatures need weights that are all in single or all in double precision, and "
            f"{' and '.join(f'{n} ({d})' for d, n in kinds.items())} are here: call model.float(), or leave others out "
            "with parameters=[...]"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if made_in_inference_mode(tensor):
            raise ValueError(
                f"{name} was made within torch.inference_mode(), and has no gradients ever; build and load the network "
                "outside of it (under torch.no_grad() if need be)"
            )
    require_independent_samples(model)


def examine(
    tangent: TangentModel, inputs: Any, *, layered: bool, functional: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Try a network on the first few samples of a batch.

    Returns:
        Parameters that layers do not give the gradients of, and those among them that a layer has, or that are tied.

    Raises:
        ValueError: outputs that change from call to call, that depend on the other samples of the batch, or that
            cannot be differentiated.
        UnsupportedLayerError: layers without Kronecker factors, by name.
    """
    model = tangent.model
    inputs = rows_of(inputs, slice(0, _SAMPLES))
    layers = find_layers(model, tangent.names) if layered else []  # what it refuses by name may not run at all
    with evaluating(model):
        outputs = tangent.outputs(inputs)
        _require_a_function(tangent, inputs, outputs)
        cotangent = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(outputs)
        expected = _gradient(tangent, inputs, cotangent)
        _require_gradients(tangent, inputs, outputs, expected)
        if functional:
            with _differentiating():
                tangent.vjp(inputs, cotangent)
        last = tangent.layer if isinstance(tangent, LastLayerModel) else None
        if last is not None and _differing(tangent, expected, tangent.sample_gradients(inputs, cotangent).sum(0)):
            raise ValueError(
                f"the weights of the last layer {last!r} are read elsewhere in the network too, or its forward is not "
                "that of nn.Linear: choose curvature='full' or 'diag' with parameters=[...]"
            )
        if not layered:
            return (), ()
        whole = _differing(tangent, expected, _recovered(tangent, layers, inputs, outputs, cotangent))
    claimed = {part.parameter for layer in layers for part in layer.parts}
    every = [p for _, p in model.named_parameters(remove_duplicate=False)]
    tied = {name for name, p in model.named_parameters() if sum(own is p for own in every) > 1}
    return whole, tuple(name for name in whole if name in claimed | tied)


def _far(model: nn.Module, found: Tensor, expected: Tensor) -> bool:
    """Whether two ways to compute one output differ by more than rounding, on any device."""
    kinds = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    relative = 0.1 if kinds & {torch.float16, torch.bfloat16} else 1e-3 if torch.float32 in kinds else 1e-8
    limit = relative * float(expected.abs().max())
    return found.shape != expected.shape or float((found.detach() - expected).abs().max()) > limit


def _require_a_function(tangent: TangentModel, inputs: Any, outputs: Tensor) -> None:
    """Outputs are the same in every call, and do not depend on the other samples."""
    if _far(tangent.model, tangent.outputs(inputs), outputs):
        raise ValueError(
            "the network's outputs change from call to call, although it is in evaluation mode: something in it draws "
            "at random (F.dropout without training=self.training), or keeps a state. Switch that off"
        )
    some = batch_size(inputs) // 2
    for rows in (slice(0, some), slice(some, None)) if some else ():  # one that runs along the batch shows in one only
        part = tangent.outputs(rows_of(inputs, rows))
        if part.shape == outputs[rows].shape and _far(tangent.model, part, outputs[rows]):
            raise ValueError(
                "the network's output of a sample depends on the other samples of its batch: it normalizes by the "
                "batch, mixes samples, or takes another axis for the batch. Make it treat samples one by one"
            )


@contextmanager
def _differentiating() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"automatic differentiation of the network fails ({str(error).splitlines()[0]}); switch off activation "
            "checkpointing, and write operations so that torch.func knows their derivative"
        ) from error


def _gradient(tangent: TangentModel, inputs: Any, cotangent: Tensor) -> Tensor:
    """The gradient of ``outputs * cotangent`` with respect to the flat vector, by the most ordinary of all ways."""
    own = {name: p.detach().requires_grad_() for name, p in tangent.parameters().items()}
    with torch.enable_grad(), _differentiating():
        outputs = tangent.function(inputs)(own)
        if not outputs.requires_grad:
            return torch.zeros_like(tangent.point())
        found = torch.autograd.grad(outputs, list(own.values()), cotangent, allow_unused=True, materialize_grads=True)
    return tangent.flatten(dict(zip(own, found, strict=True)))


def _require_gradients(tangent: TangentModel, inputs: Any, outputs: Tensor, gradient: Tensor) -> None:
    """A parameter without any gradient does not move the outputs."""
    point, generator = tangent.point(), torch.Generator().manual_seed(1)
    for name, slot in tangent.slots.items():
        own = slice(slot.start, slot.stop)
        if bool(gradient[own].any()):
            continue
        step = torch.randn(slot.stop - slot.start, generator=generator, dtype=point.dtype, device="cpu").to(point)
        moved = point.clone()
        moved[own] += 1e-2 * step * (point[own].square().mean().sqrt() + 1e-2)
        with torch.no_grad():
            found = tangent.function(inputs)(tangent.unflatten(moved))
        if _far(tangent.model, found, outputs):
            raise ValueError(
                f"the network's outputs depend on {name}, but it gets no gradient: torch.no_grad(), detach(), a step "
                "function or reentrant activation checkpointing cut it off. Let gradients through, or freeze it"
            )


def _recovered(
    tangent: TangentModel, layers: Sequence[Layer], inputs: Any, outputs: Tensor, cotangent: Tensor
) -> Tensor:
    """Gradients as the curvature gets them, from inputs and output gradients; NaN of parts that it does not get."""
    entered: dict[str, Tensor] = {}
    found = torch.full_like(tangent.point(), torch.nan)
    places = {part: part.place(tangent.slots) for layer in layers for part in layer.parts}
    for place in places.values():
        found[place] = 0

    def enter(layer: Layer, rows: Tensor) -> None:
        entered[layer.name] = rows.clone()  # the network may go on to work in place

    def add(_: int, layer: Layer, gradient: Tensor) -> None:
        for row, own in zip(entered[layer.name].split(1), gradient.split(1), strict=True):
            if layer.weight is not None:
                found[places[layer.weight]] += layer.weight_gradient(layer.rows(row), own)[0]
            if layer.bias is not None:
                found[places[layer.bias]] += layer.bias_gradient(own)[0]

    with watching(tangent.model, layers, enter, once=False) as watch:
        count = batch_size(inputs)
        some = min(2, count - 1) or 2  # another axis that happens to be as long as the batch is not as long as this one
        watch.forward(mapped(lambda own: torch.cat([own, own])[:some], inputs), some)
        watched = tangent.checked(watch.forward(inputs, count), count)
        if _far(tangent.model, watched, outputs):
            raise UnsupportedLayerError(
                "the network computes something else while its layers are watched: a module that looks at its hooks, "
                "or at its class. Leave it out with parameters=[...], or use curvature='diag' or 'full'"
            )
        with _differentiating():
            watch.backward(watched, [cotangent], add)
    for layer in layers:
        for part in layer.parts if layer.name in watch.repeated else ():
            found[places[part]] = torch.nan
    return found


def _differing(tangent: TangentModel, expected: Tensor, found: Tensor) -> tuple[str, ...]:
    """Parameters of which a part is NaN, or differs."""
    relative, floor = (1e-6, 1e-10) if expected.dtype == torch.float64 else (3e-4, 1e-5)
    floor = floor * float(expected.norm())
    wrong = []
    for name, slot in tangent.slots.items():
        own, other = found[slot.start : slot.stop], expected[slot.start : slot.stop]
        if not float((own - other).norm()) <= max(floor, relative * max(float(own.norm()), float(other.norm()))):
            wrong.append(name)
    return tuple(wrong)
