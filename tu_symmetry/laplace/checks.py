"""What a network has to be for a Laplace approximation, found out on a few samples before any curvature is taken.

Hooks see a module's inputs and output gradients, from which Kronecker-factored curvature recovers the gradients of its
weights. They do not see a weight that is read in another way as well::

    def forward(self, tokens):
        h = self.table(tokens)                      # seen: rows of the table
        return F.linear(h, self.table.weight)       # not seen: the same table, as a matrix

The gradients recovered from the hooks then lack the second use, and so would the curvature. Comparing them with those
of automatic differentiation, for a random direction of the outputs, finds every such parameter, however it is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.hooks import Watch, find_layers, watching
from tu_symmetry.laplace.inputs import batch_size, mapped, rows_of
from tu_symmetry.laplace.layers import Layer, Part, UnsupportedLayerError
from tu_symmetry.laplace.tangent import (
    LastLayerModel,
    TangentModel,
    evaluating,
    require_independent_samples,
)
from tu_symmetry.modules import uncopyable

_SAMPLES = 4
_COPIED = 1 << 28  # parameters of the largest network that is copied to double precision (2 GiB)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def require_module(model: Any) -> None:
    """Refuse what is no network that can be called with other weights.

    Raises:
        TypeError: no module, a wrapper around one, or one whose copies would read the original's weights.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; linearized Laplace needs a torch.nn.Module")
    if isinstance(model, _WRAPPERS):
        raise TypeError(
            f"the model is wrapped in {type(model).__name__}, which copies it in every call; pass model.module "
            "(several processes share the work by torch.distributed: each passes its part of the data)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("the model is a TorchScript module, whose weights cannot vary; pass the original module")
    if hasattr(model, "_orig_mod"):
        raise TypeError("the model was compiled by torch.compile; pass the original module, model._orig_mod")
    if reason := uncopyable(model):
        raise TypeError(f"linearized Laplace calls the network with other weights, and {reason}")


def made_in_inference_mode(tensor: Tensor) -> bool:
    """Whether autograd refuses a tensor as made under inference mode; one whose data moved since then denies it."""
    try:
        return tensor._version < 0
    except RuntimeError:
        return True


def require_weights(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse weights of which no curvature can be taken.

    Raises:
        TypeError: half precision, several precisions, or other numbers.
        ValueError: tensors that were made in inference mode, or normalization by the batch.
    """
    own = dict(model.named_parameters())
    kinds = {own[name].dtype: name for name in reversed(names)}
    for dtype, name in kinds.items():
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name} has type {dtype}; curvatures need single or double precision: call model.float(), or leave it "
                "out with parameters=[...]"
            )
    if len(kinds) > 1:
        raise TypeError(
            f"{' and '.join(f'{n} ({d})' for d, n in kinds.items())} differ in precision; call model.float()"
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
    model, names = tangent.model, tangent.names
    inputs = rows_of(inputs, slice(0, _SAMPLES))
    if layered:
        find_layers(model, names)  # what it refuses by name may not run at all
    with evaluating(model):
        _require_a_function(tangent.over(names), inputs)
        exact, values, outputs = _in_double(tangent, inputs)
        with evaluating(exact.model):
            generator = torch.Generator().manual_seed(0)
            cotangent = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device="cpu").to(
                outputs.device
            )
            expected = _gradient(exact, values, cotangent)
            _require_gradients(exact, values, outputs, expected)
            if functional:
                with _differentiating():
                    exact.vjp(values, cotangent)
            if isinstance(tangent, LastLayerModel):
                _require_closed_form(tangent, exact, values, cotangent, expected)
            if not layered:
                return (), ()
            layers = find_layers(exact.model, names)
            recovered = _recovered(exact, layers, values, outputs, cotangent)
    whole = _differing(exact, expected, recovered)
    claimed = {part.parameter for layer in layers for part in (layer.weight, layer.bias) if part is not None}
    every = [p for _, p in model.named_parameters(remove_duplicate=False)]
    tied = {name for name, p in model.named_parameters() if sum(own is p for own in every) > 1}
    return whole, tuple(name for name in whole if name in claimed | tied)


def _precision(model: nn.Module) -> float:
    """Relative error that two ways to compute one output may differ by, on any device."""
    kinds = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    if kinds & {torch.float16, torch.bfloat16}:
        return 0.1
    return 1e-3 if torch.float32 in kinds else 1e-8


def _require_a_function(tangent: TangentModel, inputs: Any) -> None:
    """Outputs are the same in every call, and do not depend on the other samples."""
    outputs, again = tangent.outputs(inputs), tangent.outputs(inputs)
    limit = _precision(tangent.model) * float(outputs.abs().max())
    if outputs.shape != again.shape or float((outputs - again).abs().max()) > limit:
        raise ValueError(
            "the network's outputs change from call to call, although it is in evaluation mode: something in it draws "
            "at random (F.dropout without training=self.training, noise that is always added), or it keeps a state. A "
            "Laplace approximation is of one function: switch that off"
        )
    some = batch_size(inputs) // 2
    if some == 0:
        return
    for rows in (slice(0, some), slice(some, None)):  # a network that runs along the batch shows in one of them only
        part, together = tangent.outputs(rows_of(inputs, rows)), outputs[rows]
        if part.shape == together.shape and float((part - together).abs().max()) > limit:
            raise ValueError(
                "the network's output of a sample depends on the other samples of its batch: it normalizes by the "
                "batch, mixes samples, or takes another axis for the batch. Outputs of single samples have no Jacobian "
                "then; make the network treat samples one by one, with the batch as the first axis"
            )


def _in_double(tangent: TangentModel, inputs: Any) -> tuple[TangentModel, Any, Tensor]:
    """The network in double precision where it can be copied and run there, else itself; inputs and outputs."""

    def double(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    model, names = tangent.model, tangent.names
    own = tangent.over(names)
    if sum(p.numel() for p in model.parameters()) > _COPIED:
        return own, inputs, own.outputs(inputs)
    try:
        exact, values = tangent.over(names, copy.deepcopy(model, _shared(model)).double()), mapped(double, inputs)
        with evaluating(exact.model):
            outputs = exact.outputs(values)
        if outputs.dtype == torch.float64:
            return exact, values, outputs
    except Exception:  # whatever stands in the way: constants in single precision, modules that cannot be copied
        pass
    return own, inputs, own.outputs(inputs)


def _shared(model: nn.Module) -> dict[int, Any]:
    """What a copy of the network shares with it: objects that hold neither weights nor modules, as a trainer."""
    copied = (Tensor, nn.Module, list, dict, tuple, set, MethodType, partial)
    attributes = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value for value in attributes if not isinstance(value, copied)}


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
    with torch.enable_grad():
        outputs = tangent.function(inputs)(own)
        if not outputs.requires_grad:
            return torch.zeros_like(tangent.point())
        with _differentiating():
            found = torch.autograd.grad(outputs, list(own.values()), cotangent, allow_unused=True)
    pieces = zip(found, own.values(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pieces])


def _require_gradients(tangent: TangentModel, inputs: Any, outputs: Tensor, gradient: Tensor) -> None:
    """A parameter without any gradient does not move the outputs."""
    limit = _precision(tangent.model) * float(outputs.abs().max())
    point, generator = tangent.point(), torch.Generator().manual_seed(1)
    for name, slot in tangent.slots.items():
        own = slice(slot.start, slot.stop)
        if bool(gradient[own].any()):
            continue
        step = torch.randn(slot.stop - slot.start, generator=generator, dtype=point.dtype, device="cpu").to(
            point.device
        )
        moved = point.clone()
        moved[own] += 1e-2 * step * (point[own].square().mean().sqrt() + 1e-2)
        with torch.no_grad():
            change = tangent.function(inputs)(tangent.unflatten(moved)) - outputs
        if float(change.abs().max()) > limit:
            raise ValueError(
                f"the network's outputs depend on {name}, but it gets no gradient: its path is cut off by "
                "torch.no_grad(), detach() or a step function. Let gradients through, or freeze it "
                "(requires_grad_(False), or parameters=[...] without it)"
            )


def _require_closed_form(
    tangent: LastLayerModel, exact: TangentModel, inputs: Any, cotangent: Tensor, expected: Tensor
) -> None:
    """The last layer is linear in its weights, and nothing else reads them."""
    found = tangent.over(tangent.names, exact.model).vjp(inputs, cotangent)
    relative = 1e-6 if found.dtype == torch.float64 else 3e-2
    if not float((found - expected).norm()) <= relative * max(float(found.norm()), float(expected.norm())):
        raise ValueError(
            f"the weights of the last layer {tangent.layer!r} are read elsewhere in the network too, or its forward is "
            "not that of nn.Linear: its Jacobian is not its input. Choose curvature='full' or 'diag' with "
            "parameters=[...]"
        )


def _recovered(
    tangent: TangentModel, layers: Sequence[Layer], inputs: Any, outputs: Tensor, cotangent: Tensor
) -> dict[Part, Tensor]:
    """Gradients of the layers' weights and biases, as the curvature gets them: from inputs and output gradients.

    Raises:
        UnsupportedLayerError: the network computes something else while it is watched.
    """
    entered: dict[str, Tensor] = {}
    found: dict[Part, Tensor] = {}

    def enter(layer: Layer, rows: Tensor) -> None:
        entered[layer.name] = rows.clone()  # the network may go on to work in place

    def add(_: int, layer: Layer, gradient: Tensor) -> None:
        for i in range(len(gradient)):
            row, own = entered[layer.name][i : i + 1], gradient[i : i + 1]
            if layer.weight is not None:
                update = layer.weight_gradient(layer.rows(row), own)[0]
                found[layer.weight] = found[layer.weight] + update if layer.weight in found else update
            if layer.bias is not None:
                update = layer.bias_gradient(own)[0]
                found[layer.bias] = found[layer.bias] + update if layer.bias in found else update

    watch = Watch(enter, once=False)
    with watching(tangent.model, layers, watch) as forward:
        count = batch_size(inputs)
        if count > 1:  # another axis that happens to be as long as the batch is not as long as this one
            some = min(2, count - 1)
            forward(rows_of(inputs, slice(0, some)), some)
        watched = tangent.checked(forward(inputs, count), count)
        limit = _precision(tangent.model) * float(outputs.abs().max())
        if watched.shape != outputs.shape or float((watched.detach() - outputs).abs().max()) > limit:
            raise UnsupportedLayerError(
                "the network computes something else while its layers are watched: a module that looks at its hooks, "
                "or at its class. Leave it out with parameters=[...], or use curvature='diag' or 'full'"
            )
        with _differentiating():
            watch.backward(watched, [cotangent], add)
    for layer in layers:
        for part in (layer.weight, layer.bias):
            if part is not None and layer.name in watch.repeated:
                found.pop(part, None)
            elif part is not None:
                found.setdefault(part, cotangent.new_zeros(part.size))
    return found


def _differing(tangent: TangentModel, expected: Tensor, recovered: Mapping[Part, Tensor]) -> tuple[str, ...]:
    """Parameters of which a part is not recovered, or differs."""
    double = expected.dtype == torch.float64
    relative, floor = (1e-6, 1e-10) if double else (3e-2, 1e-4)
    floor = floor * float(expected.norm())
    covered = dict.fromkeys(tangent.names, 0)
    wrong: set[str] = set()
    for part, own in recovered.items():
        covered[part.parameter] += part.size
        start = tangent.slots[part.parameter].start + part.offset
        other = expected[start : start + part.size]
        error = float((own - other).norm())
        if not error <= max(floor, relative * max(float(own.norm()), float(other.norm()))):
            wrong.add(part.parameter)
    sizes = {name: slot.stop - slot.start for name, slot in tangent.slots.items()}
    return tuple(name for name in tangent.names if name in wrong or covered[name] != sizes[name])
