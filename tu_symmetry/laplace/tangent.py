"""The network as a function of a flat parameter vector, and the products with its Jacobian.

Nothing here edits the module: weights are passed by ``torch.func.functional_call``, the module runs in evaluation mode
and is put back into the mode it was in. Jacobians are never materialized over a batch.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import ParametrizationList

from tu_symmetry._extras import load_forward_mode
from tu_symmetry.laplace.inputs import arguments, batch_size, mapped, rows_of, structure
from tu_symmetry.laplace.outputs import as_outputs, check_outputs, tensor_in
from tu_symmetry.modules import as_one_network

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Slot(NamedTuple):
    """Where a parameter lies in the flat vector."""

    start: int
    stop: int
    shape: tuple[int, ...]


def select_parameters(model: nn.Module, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the parameters that the posterior covers, in the order of the model.

    ``wanted`` is None for all that require a gradient; else names (any of a tied weight), prefixes of names (``"head"``
    takes everything below that module), or patterns with ``*``, ``?`` or ``[...]``.

    Raises:
        ValueError: a name that nothing matches, no parameters at all, NaN or infinite weights.
    """
    every = list(model.named_parameters(remove_duplicate=False))
    for name, p in every:
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device, where tensors have no values: load the weights first")
        if not torch.isfinite(p.detach()).all():
            raise ValueError(f"{name} holds NaN or infinite values; it comes from a diverged run or a damaged file")
    chosen = {id(p) for _, p in every if p.requires_grad and wanted is None}
    for key in wanted or ():
        found = {id(p) for name, p in every if fnmatchcase(name, key) or name.startswith(key + ".")}
        if not found:
            raise ValueError(f"parameters={key!r} matches no parameter; there are {[n for n, _ in every][:12]} ...")
        chosen |= found
    if not chosen:
        raise ValueError("no parameter of the model requires a gradient, or parameters is empty: nothing would be left")
    return tuple(name for name, p in model.named_parameters() if id(p) in chosen)


def require_independent_samples(model: nn.Module) -> None:
    """Refuse batch normalization without running statistics, by name: a ``ValueError``."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.running_mean is None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has no running statistics: it normalizes by the "
                "batch at hand, so that single samples have no Jacobian. Use track_running_stats=True, or another "
                "normalization"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, full precision, ordinary (non-inference) tensors, attention with a forward-mode derivative."""
    training = {m: m.training for m in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode(False), full_precision(model), sdpa_kernel(SDPBackend.MATH):
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with as_one_network(model):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, own in training.items():
                module.training = own


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """No autocast around the network, no TF32: curvatures have more digits than these hold, on GPUs and CPUs.

    Both of torch's interfaces are set: its older one raises an error where the newer one says something else.
    """
    backends: Any = torch.backends
    operators: list[Any] = [backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]
    operators += [backends.mkldnn.conv, backends.mkldnn.rnn, backends.mkldnn.matmul]
    with ExitStack() as stack:
        for own in operators:
            stack.callback(setattr, own, "fp32_precision", own.fp32_precision)
        with suppress(RuntimeError):  # where the caller has set the newer one alone
            convolutions, products = backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
            stack.callback(setattr, backends.cudnn, "allow_tf32", convolutions)
            stack.callback(torch.set_float32_matmul_precision, products)
            backends.cudnn.allow_tf32 = False
            torch.set_float32_matmul_precision("highest")
        for own in operators:
            own.fp32_precision = "ieee"
        for kind in sorted({"cpu"} | {p.device.type for p in model.parameters()}):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def digest_of(state: Mapping[str, Tensor]) -> str:
    """A digest of tensors and their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Linearization(NamedTuple):
    """The outputs on one batch, ``push``: vector -> ``J`` times it, and ``pull``: cotangent -> ``J^T`` times it."""

    outputs: Tensor
    push: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]


def normal(cotangent: Tensor) -> Tensor:
    """Zero in place of entries that would become subnormal on the way back, with which processors are very slow."""
    size = cotangent.abs()
    return torch.where(size < torch.finfo(cotangent.dtype).tiny ** 0.5 * size.amax(), 0, cotangent)


class TangentModel:
    """``f(x; theta)`` and its Jacobian products at the network's weights, for the parameters ``names``.

    ``slots`` are their places in the flat vector of length ``size``, ``class_axis`` is that of :mod:`.outputs`, and
    ``joins`` whether batches may be joined to larger ones.
    """

    joins = True

    def __init__(self, model: nn.Module, names: Sequence[str], *, class_axis: int | None = None) -> None:
        self.model, self.names, self.class_axis = model, tuple(names), class_axis
        self.slots: dict[str, Slot] = {}
        self.size = 0
        own = dict(model.named_parameters())
        for name in self.names:
            self.slots[name] = Slot(self.size, self.size + own[name].numel(), tuple(own[name].shape))
            self.size = self.slots[name].stop
        self._forward_mode = self._vectorized = self._linearizes = True
        self._tried: set[Any] = set()  # structures of inputs that linearize was found right for

    def over(self, names: Sequence[str]) -> TangentModel:
        """The same for other parameters."""
        return TangentModel(self.model, names, class_axis=self.class_axis)

    def read(self, found: Any, batch: int) -> Tensor:
        """What the network returned, as outputs ``[batch, outputs]`` or ``[batch, positions, outputs]``."""
        return as_outputs(found, batch, self.class_axis)

    def checked(self, found: Any, batch: int) -> Tensor:
        """The same, all finite."""
        return check_outputs(found, batch, self.class_axis)

    def own_shape(self, inputs: Any) -> torch.Size:
        """The shape that the network itself gives the outputs of one sample, with the batch's axis."""
        with evaluating(self.model), torch.no_grad():
            args, kwargs = arguments(rows_of(inputs, slice(0, 1)))
            return tensor_in(self.model(*args, **kwargs)).shape

    def point(self) -> Tensor:
        """The linearization point, ``[size]``."""
        return self.flatten(self.parameters())

    def parameters(self) -> dict[str, Tensor]:
        """The chosen parameters by name, without gradient history; shared with the module."""
        own = dict(self.model.named_parameters())
        return {name: own[name].detach() for name in self.names}

    def fingerprint(self) -> str:
        """A digest of all parameters and buffers: two networks with the same one compute the same function."""
        return digest_of(self.state())

    def state(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers, shared with the module."""
        return {n: t.detach() for n, t in self.model.state_dict().items() if isinstance(t, Tensor)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the parameters' tensors to one vector."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector in the parameters' shapes."""
        return {name: vector[s.start : s.stop].view(s.shape) for name, s in self.slots.items()}

    def function(self, inputs: Any) -> Callable[[dict[str, Tensor]], Tensor]:
        """The outputs on ``inputs`` as a function of the chosen parameters."""
        weights, (args, kwargs) = {n: p.detach() for n, p in self.model.named_parameters()}, arguments(inputs)

        def outputs(parameters: dict[str, Tensor]) -> Tensor:
            found = functional_call(self.model, {**weights, **parameters}, args, kwargs)
            return self.read(found, batch_size(inputs))

        return outputs

    def outputs(self, inputs: Any) -> Tensor:
        """``f(x)`` at the linearization point, ``[batch, outputs]`` or ``[batch, positions, outputs]``."""
        with torch.no_grad():
            return check_outputs(self.function(inputs)(self.parameters()), batch_size(inputs))

    def jvp(self, inputs: Any, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the Jacobian times a flat vector, in the same shape."""
        function, point, direction = self.function(inputs), self.parameters(), self.unflatten(vector)
        if self._forward_mode:
            load_forward_mode()
            try:
                with torch.no_grad():
                    outputs, product = jvp(function, (point,), (direction,))[:2]
                return check_outputs(outputs, batch_size(inputs)), product
            except NotImplementedError:  # an operator without forward-mode derivative (nn.LSTM, fused attention)
                self._forward_mode = False
        with torch.enable_grad():
            outputs, pullback = vjp(function, point)[:2]
            push = vjp(lambda cotangent: pullback(cotangent)[0], torch.zeros_like(outputs))[1]
            (product,) = push(direction)
        return check_outputs(outputs.detach(), batch_size(inputs)), product.detach()

    def jvps(self, inputs: Any, vectors: Tensor) -> Tensor:
        """The Jacobian times several flat vectors ``[count, size]``: ``[count, *outputs.shape]``.

        All at once, which shares the forward pass, or one after the other where an operator cannot be vectorized.
        """
        if self._forward_mode and self._vectorized and len(vectors) > 1:
            load_forward_mode()
            function, point = self.function(inputs), self.parameters()
            try:
                with torch.no_grad():
                    return vmap(lambda vector: jvp(function, (point,), (self.unflatten(vector),))[1])(vectors)
            except (RuntimeError, NotImplementedError):  # what jvp itself cannot do, it says below
                self._vectorized = False
        return torch.stack([self.jvp(inputs, vector)[1] for vector in vectors])

    def vjp(self, inputs: Any, cotangent: Tensor) -> Tensor:
        """The transposed Jacobian times a cotangent in the outputs' shape, summed over the batch: a flat vector."""
        with torch.enable_grad():
            (gradient,) = vjp(self.function(inputs), self.parameters())[1](cotangent)
        return self.flatten(gradient).detach()

    def linearize(self, inputs: Any) -> Linearization:
        """The network on a batch, run once for all products that follow.

        Where an operator cannot be linearized ahead, products run the network again, as :meth:`jvp` does. torch's
        ``linearize`` gives wrong products for some (``nn.LSTM``): the first batch of a structure is tried on a few.
        """
        load_forward_mode()
        function, point, kind = self.function(inputs), self.parameters(), structure(inputs)
        with torch.enable_grad():
            outputs, pullback = vjp(function, point)[:2]
        outputs = check_outputs(outputs.detach(), batch_size(inputs))

        def pull(cotangent: Tensor) -> Tensor:
            return self.flatten(pullback(cotangent)[0]).detach()

        def again(vector: Tensor) -> Tensor:
            return self.jvp(inputs, vector)[1]

        def push(vector: Tensor) -> Tensor:
            with torch.no_grad():
                found: Tensor = pushforward(self.unflatten(vector))
            return found

        try:
            if self._forward_mode and self._linearizes:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of torch's own about how it folds constants
                    pushforward = linearize(function, point)[1]
                self._linearizes = kind in self._tried or self._agree(push, again)
        except (NotImplementedError, RuntimeError):
            self._linearizes = False
        if not (self._forward_mode and self._linearizes):
            return Linearization(outputs, again, pull)
        self._tried.add(kind)
        return Linearization(outputs, push, pull)

    def _agree(self, push: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]) -> bool:
        """Whether products are those of :meth:`jvp`, also in later calls."""
        trial = self.point()
        trial = torch.randn(trial.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(trial)
        expected, limit = again(trial), 1e-9 if trial.dtype == torch.float64 else 1e-3
        return all(
            float((push(factor * trial) - factor * expected).norm()) <= limit * float(expected.norm())
            for factor in (1.0, -3.0, 0.0, 1.0)
        )

    def sample_gradients(self, inputs: Any, cotangent: Tensor) -> Tensor:
        """The transposed Jacobian of each sample times its own cotangent, ``[batch, size]``; for small batches."""
        return self.gradients(inputs)(cotangent)

    def gradients(self, inputs: Any) -> Callable[[Tensor], Tensor]:
        """:meth:`sample_gradients` of one batch, for one cotangent after the other."""
        point = self.parameters()

        def one(row: Any, direction: Tensor) -> Tensor:
            pullback = vjp(self.function(mapped(lambda own: own.unsqueeze(0), row)), point)[1]
            return self.flatten(pullback(direction.unsqueeze(0))[0])

        def each(cotangent: Tensor) -> Tensor:
            if self._vectorized:
                try:
                    with torch.enable_grad():
                        return vmap(one)(inputs, cotangent).detach()
                except RuntimeError:  # an operator that cannot be vectorized; others fail again below
                    self._vectorized = False
            rows = [slice(i, i + 1) for i in range(len(cotangent))]
            return torch.stack([self.vjp(rows_of(inputs, row), cotangent[row]) for row in rows])

        return each


def jacobians(tangent: TangentModel, inputs: Any, shape: torch.Size) -> Tensor:
    """Jacobians of a network in evaluation mode, all samples of a batch at once: ``[batch, outputs, size]``."""
    width, point = shape.numel(), tangent.point()
    eye = torch.eye(width, dtype=point.dtype, device=point.device).view(width, *shape)
    count, gradients = batch_size(inputs), tangent.gradients(inputs)
    return torch.stack([gradients(unit.expand(count, *shape)) for unit in eye], dim=1)


class LastLayerModel(TangentModel):
    """The same for the last linear layer alone, whose input is the Jacobian: gradients of samples need no autograd."""

    def __init__(self, model: nn.Module, layer: str, *, class_axis: int | None = None) -> None:
        module = model.get_submodule(layer)
        if not isinstance(module, nn.Linear):
            raise ValueError(f"the last layer {layer!r} is a {type(module).__name__}; only nn.Linear has a closed form")
        self.layer = layer
        self._weight, self._bias = (f"{layer}.{leaf}" if layer else leaf for leaf in ("weight", "bias"))
        names = [self._weight] if module.bias is None else [self._weight, self._bias]
        lacking = set(names) - {name for name, _ in model.named_parameters()}
        if lacking:
            raise ValueError(
                f"the last layer {layer!r} does not own its {' and '.join(sorted(lacking))}: tied to another layer, or "
                "parametrized (weight_norm); choose curvature='full' or 'diag' with parameters=[...]"
            )
        super().__init__(model, names, class_axis=class_axis)

    def features(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The layer's input ``[batch, ..., features]``, and the outputs, which have to be those of the layer."""
        seen: list[tuple[Tensor, Tensor]] = []
        handle = self.model.get_submodule(self.layer).register_forward_hook(
            lambda _module, args, output: seen.append((args[0], output))
        )
        try:
            outputs = self.outputs(inputs)
        finally:
            handle.remove()
        if len(seen) != 1 or not _equal(seen[0][1], outputs):
            raise ValueError(
                f"the output of {self.layer!r} is not the network's output (something follows it, or it is used "
                "several times): choose curvature='full' or 'kfac' with parameters=[...] instead of 'last_layer'"
            )
        return seen[0][0], outputs

    def gradients(self, inputs: Any) -> Callable[[Tensor], Tensor]:
        """Outer products of each sample's cotangent and features, from one pass of the network."""
        features = self.features(inputs)[0]
        rows = features.reshape(len(features), -1, features.shape[-1])

        def outer(cotangent: Tensor) -> Tensor:
            columns = cotangent.reshape(len(rows), -1, cotangent.shape[-1])
            parts = {self._weight: (columns.mT @ rows).flatten(1), self._bias: columns.sum(1)}
            return torch.cat([parts[name] for name in self.names], dim=1)

        return outer


def last_layer(model: nn.Module, inputs: Any = None, *, linear: bool = False) -> str:
    """Name of the innermost module with parameters that finishes last in a forward pass, or else is defined last.

    With ``linear`` it is the linear layer whose output is the network's output. A ``ValueError`` where there is none.
    """
    owners = [name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)]
    owners = [name.partition(".parametrizations.")[0] for name in owners]
    if linear:
        owners = [name for name in owners if isinstance(model.get_submodule(name), nn.Linear)]
    if not owners:
        raise ValueError(
            f"the model has no {'nn.Linear layer' if linear else 'parameters'}, so that there is no last layer"
        )
    called = [] if inputs is None else _called(model, inputs)
    for name, output in reversed(called):
        if name not in owners:
            continue
        inside = {other for other, _ in called if other != name and other.startswith(f"{name}." if name else "")}
        if _equal(output, tensor_in(called[-1][1])) if linear else not inside & set(owners):
            return name
    return owners[-1]


def _equal(output: Tensor, other: Tensor) -> bool:
    return output.shape == other.shape and torch.equal(output, other)


def _called(model: nn.Module, inputs: Any) -> list[tuple[str, Any]]:
    """Modules with their outputs in the order in which they finish; the network itself, named ``""``, is last."""
    names = {module: name for name, module in model.named_modules() if not isinstance(module, ParametrizationList)}
    seen: list[tuple[str, Any]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if module in names:
            seen.append((names[module], output))

    with ExitStack() as stack:
        stack.callback(register_module_forward_hook(note).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        args, kwargs = arguments(inputs)
        model(*args, **kwargs)
    return seen
