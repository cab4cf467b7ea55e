"""Running a network with weights that are given to it: the module without its own, and how outputs are compared."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tu_symmetry.memory import free_memory
from tu_symmetry.modules import uncompiled
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.rules import GUARD, SMALL


class Probe:
    """A network without its weights, and inputs to run it on: enough to compare what two states compute.

    The module is a copy on the CPU, in evaluation mode, whose parameters and floating-point or complex buffers take no
    memory and have no values; nothing of the model that it was made from is kept alive. Every run is in float64 (or in
    the best precision that the network's operators know, see :attr:`epsilon`), with constants for noise, and on a copy
    of the module, so that nothing is carried from one run to the next.

    Attributes:
        module: the hollow copy.
        args, kwargs: the inputs, float64 on the CPU.
        epsilon: relative rounding of the lowest precision that any run had to use: that of float64, unless an operator
            exists in lower precision only.
        others: the same network with other example inputs, or in training mode, where the symmetries have to hold too.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.module = module
        self.others: tuple[Probe, ...] = ()
        self.args = args
        self.kwargs = dict(kwargs)
        self.epsilon = torch.finfo(torch.float64).eps
        self._precision = torch.float64
        self._plain: bool | None = None
        self._narrowly = True
        self._guarded = True
        self._dead = False
        self._written = frozenset(n for n, _ in module.named_buffers(remove_duplicate=False))

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: ExampleInputs,
        example_kwargs: ExampleKwargs = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Probe:
        """Make the hollow copy of a model; the model is left as it is.

        Args:
            model: any module.
            example_inputs: an input tensor, or the tuple of positional arguments of ``forward``; a list of several.
            example_kwargs: keyword arguments of ``forward``; a list of as many.
            generator: if given, constant floating-point inputs (zeros, ones) are replaced by noise: on an input of
                zeros the first layer's weights would play no role.

        Raises:
            SymmetryError: if the model changes its own weights when it is switched to evaluation mode.
        """
        module = hollow(model)
        first, *more = (cls(module, *_double(e, generator)) for e in examples_of(example_inputs, example_kwargs))
        first.others = tuple(more)
        return first

    def trained(self, examples: Sequence[Example], *, generator: torch.Generator | None = None) -> Probe:
        """The probe with others beside it: the network in training mode, on these examples."""
        if examples:
            module = _sharing(self.module).train()
            kept = tuple(p for p in self.others if not p.module.training)
            self.others = (*kept, *(Probe(module, *_double(e, generator)) for e in examples))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        return self  # nothing in it changes

    def given(self, example_inputs: Tensor | tuple[Any, ...], example_kwargs: Mapping[str, Any] | None = None) -> Probe:
        """The same network with other inputs, as they are."""
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        return Probe(self.module, *_double((args, dict(example_kwargs or {})), None))

    def drawn(self, generator: torch.Generator) -> Probe:
        """The same network with other numbers in its floating-point inputs, of the same mean and deviation.

        Integers, booleans, and tensors of one or two different numbers (masks) stay as they are.
        """

        def draw(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()) or len(tensor.unique()) < 3:
                return tensor
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
            return tensor.mean() + tensor.std() * noise

        return self._with(draw)

    def blank(self) -> Probe:
        """The same network with zeros for its floating-point inputs, and random states with no positive bias.

        Behind a ReLU all units are dead then, and their numbers equal.
        """

        def zeros(tensor: Tensor) -> Tensor:
            return torch.zeros_like(tensor) if tensor.is_floating_point() else tensor

        probe = self._with(zeros)
        probe._dead = True
        return probe

    def _with(self, change: Callable[[Tensor], Tensor]) -> Probe:
        probe = copy.copy(self)
        probe.args, probe.kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        probe.others = ()
        return probe

    def without_epsilons(self) -> Probe:
        """The same network with (almost) zero for every epsilon of a normalization.

        That is every attribute that looks like one, every argument of an operator that is called so, and every literal
        that the rules take for one: a small number that is added to a statistic (``h.std() + 1e-5``), or below which a
        norm is clamped.
        """
        module = _sharing(self.module)
        for part in module.modules():
            for key, value in vars(part).items():
                if "eps" in key and isinstance(value, float):
                    setattr(part, key, 1e-100)  # some operators refuse zero
        probe = Probe(module, self.args, self.kwargs)
        probe._guarded = False
        return probe

    def random_state(
        self, generator: torch.Generator, constants: Container[str] | None = None, *, exchanged: bool = False
    ) -> dict[str, Tensor]:
        """Random weights for the network: see :func:`random_state`.

        Args:
            generator: for the numbers.
            constants: as for :func:`random_state`.
            exchanged: whether their entries will only change places. Those of a large network are then drawn among the
                numbers of half precision, a quarter of the memory, which loses nothing.
        """
        half = exchanged and self.large(self.module.state_dict())
        state = random_state(self.module, generator, constants, dtype=torch.float16 if half else torch.float64)
        if self._dead:
            for name, tensor in state.items():
                if name.rpartition(".")[2] == "bias" and tensor.is_floating_point():
                    tensor.copy_(-tensor.abs())
        return state

    def large(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a copy of the weights in double precision would be much: they are widened as they are used then."""
        return self._narrowly and 8 * sum(t.numel() for t in {id(t): t for t in state.values()}.values()) > LARGE

    def run(
        self,
        state: Mapping[str, Tensor],
        *,
        noise: Callable[[str], float] | None = None,
        generator: torch.Generator | None = None,
    ) -> list[Tensor]:
        """The tensors among the network's outputs for a state, which is not changed.

        The weights of a large network (see :attr:`LARGE`) in lower precision stay as they are, and each is widened
        where an operator takes it, which needs no second copy of them and gives the same outputs.

        Args:
            state: name to tensor; floating-point tensors of any precision, on any device.
            noise: relative size of the noise on each tensor, by its name, which weights get wherever an operator takes
                them; for a large state in lower precision (others are changed by :func:`perturb_`).
            generator: for the noise.

        Raises:
            SymmetryError: if the network does not run, in double precision or in any other.
        """
        if self.large(state) and self._precision == torch.float64:
            try:
                return self._attempt(state, _Noise(noise, generator))
            except Exception:
                if noise is not None:
                    raise
                self._narrowly = False  # an operator that wants all its tensors in one precision
        try:
            return self._attempt(state)
        except SymmetryError:
            raise
        except Exception as error:
            first = error
        if self._precision == torch.float64:
            for precision in (torch.float32, torch.bfloat16):
                self._precision = precision
                try:
                    return self._attempt(state)
                except Exception:
                    self._precision = torch.float64
        raise SymmetryError(
            f"the network does not run on the CPU, where symmetries are verified: {first}\nLikely cause: an operator "
            "that knows only another device (a fused kernel), or weights that must not be replaced by random ones. "
            "Choose the model's plain implementation of that operator."
        ) from first

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[nn.Module]:
        """The module as it was made: some keep what they computed from weights, or count their calls.

        Where all that a module holds beside its tensors are plain values, it is put back to them after the run (the
        usual case, and a deep copy of a large network takes as long as its layers do); else a copy is run.
        """
        if self._plain is None:
            self._plain = all(
                k == "_buffers" or _plain(v) for part in self.module.modules() for k, v in vars(part).items()
            )
        if not self._plain:
            yield _sharing(self.module)
            return
        held = [(part, {k: _shallow(v) for k, v in vars(part).items()}) for part in self.module.modules()]
        try:
            yield self.module
        finally:
            for part, attributes in held:
                vars(part).clear()
                vars(part).update(attributes)

    def _attempt(self, state: Mapping[str, Tensor], narrow: _Noise | None = None) -> list[Tensor]:
        """Run once; with ``narrow``, weights of lower precision as they are."""
        precision = self._precision
        given: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}  # tied names stay tied
        kept: dict[int, str] = {}  # where tensors of the state itself lie, which nothing may write to
        for name, tensor in state.items():
            if id(tensor) not in seen:
                kind = tensor.dtype if narrow is not None and name not in self._written else None
                own = tensor.detach().to(device="cpu", dtype=kind or _like(tensor.dtype, precision))
                if own.layout == torch.strided and own.data_ptr() == tensor.data_ptr():
                    if name in self._written:
                        own = own.clone()
                    else:
                        kept[own.untyped_storage().data_ptr()] = name
                elif narrow is not None and kind is not None and own.layout == torch.strided:
                    kept[own.untyped_storage().data_ptr()] = name  # a copy from another device
                seen[id(tensor)] = own
            given[name] = seen[id(tensor)]
        for name, tensor in self.module.named_buffers(remove_duplicate=False):  # those that no state holds
            if name not in given:
                given[name] = tensor.to(_like(tensor.dtype, precision), copy=True)
        args, kwargs = tree_map_only(
            Tensor, lambda t: t.to(_like(t.dtype, precision), copy=True), (self.args, self.kwargs)
        )
        exactly = _Exactly(precision, kept, guarded=self._guarded, narrow=narrow)
        try:
            widened = contextlib.nullcontext() if narrow is None else _Widened(exactly)
            with self._fresh() as module, torch.no_grad(), torch.random.fork_rng(devices=[]), exactly, widened:
                torch.default_generator.manual_seed(0)  # that of the CPU, which alone is put back
                output = torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
        except _WrittenTo as error:  # a parameter that the forward pass updates: run again on a copy of it
            self._written |= {error.name}
            return self._attempt(state, narrow)
        self.epsilon = max(self.epsilon, exactly.epsilon)
        return [t.clone() for t in tensors_of(output)]


Example = tuple[tuple[Any, ...], dict[str, Any]]
ExampleInputs = Tensor | tuple[Any, ...] | list[Any]
ExampleKwargs = Mapping[str, Any] | list[Mapping[str, Any]] | None


def examples_of(example_inputs: ExampleInputs, example_kwargs: ExampleKwargs = None) -> list[Example]:
    """Positional and keyword arguments of each example.

    Args:
        example_inputs: an input tensor, a tuple of positional arguments, or a list of several of these.
        example_kwargs: keyword arguments of every example, or a list with those of each.

    Raises:
        ValueError: for an empty list, or lists of different lengths.
    """
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if isinstance(example_inputs, list) and not example_inputs:
        raise ValueError("example_inputs is an empty list; pass at least one example")
    if isinstance(example_kwargs, list):
        if not isinstance(example_inputs, list):
            several = several * len(example_kwargs)
        if len(example_kwargs) != len(several) or not several:
            raise ValueError(f"{len(several)} example_inputs and {len(example_kwargs)} example_kwargs; pass as many")
        named: list[Mapping[str, Any]] = example_kwargs
    else:
        named = [example_kwargs or {}] * len(several)
    return [(a if isinstance(a, tuple) else (a,), dict(k)) for a, k in zip(several, named, strict=True)]


def doubled(example: Example) -> Example:
    """The example twice along its first axis: batch norm trains on two samples at least."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.ndim else t, example)


def hollow(model: nn.Module) -> nn.Module:
    """A copy of a module on the CPU, in evaluation mode, whose weights have shapes but neither memory nor values.

    Modules that do something of their own when they are switched to evaluation mode (empty what they kept of their
    weights, merge an adapter) do it on real copies of the weights first.

    Raises:
        SymmetryError: if that changes the weights, so that a state dict means another function than the one traced.
    """
    if switches(model):
        model = copied(model)
        before = {n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items()}
        for training in (True, False):
            model.train(training)
            after = model.state_dict(keep_vars=True)
            changed = [n for n in before if n not in after or not torch.equal(before[n], after[n])]
            if changed:
                raise SymmetryError(
                    f"{type(model).__name__} changes {changed[0]!r} when it is switched to "
                    f"{'training' if training else 'evaluation'} mode (an adapter that is merged into the weights, for "
                    "example), so its state dict computes different functions in the two modes. Merge it for good, or "
                    "switch the merging off, and discover the symmetries again."
                )
    held: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        floating = tensor.is_floating_point() or tensor.is_complex()
        if floating and tensor.layout == torch.strided:
            empty = torch.zeros((), dtype=_like(tensor.dtype, torch.float64), device="cpu").expand(tensor.shape)
            held[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        else:
            counter = tensor.is_meta and not tensor.is_floating_point() and tensor.numel() == 1
            value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if counter else _kept_value(tensor)
            held[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in held:  # buffers that the state dict leaves out
            value = _kept_value(tensor)
            held[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    return _copied(model, held).train().eval()  # which empties what some modules keep of their weights


def switches(model: nn.Module) -> bool:
    """Whether some part of a module has its own way of being switched between training and evaluation."""
    return any(
        type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    )


def copied(model: nn.Module) -> nn.Module:
    """A copy with weights of its own, of any module: also of one that keeps tensors with a gradient's history."""
    return _copied(model, {})


def own_copy(model: nn.Module) -> nn.Module:
    """A copy to trace: it shares the parameters, unless switching it to evaluation mode may write to them."""
    return copied(model) if switches(model) else _copied(model, {id(p): p for p in model.parameters()})


def _sharing(model: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers."""
    return _copied(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


class _Plain(nn.Module):
    """What ``torch.compile`` wraps, under the names that it gives to the weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for part in reversed(list(model.modules())):
        if uncompiled(part) is not part and not isinstance(part, _Plain):
            memo[id(part)] = _Plain(_copied(uncompiled(part), memo)).train(part.training)
    for part in model.modules():
        for value in vars(part).values():
            for leaf in _leaves(value):
                if id(leaf) not in memo and (leaf.layout != torch.strided or not leaf.is_leaf):
                    value = leaf.detach().clone()  # what deepcopy refuses: sparse tensors, and gradients' histories
                    memo[id(leaf)] = (
                        nn.Parameter(value, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else value
                    )
    return copy.deepcopy(model, memo)


_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def _plain(value: Any) -> bool:
    """Whether an attribute cannot change but by being set anew, or is a flat container (see :func:`_shallow`)."""
    if isinstance(value, (dict, list, set)):
        items = value.values() if isinstance(value, dict) else value
        return all(isinstance(v, (nn.Module, nn.Parameter)) or _atom(v) for v in items)
    return _atom(value)


def _atom(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_atom, value))
    return isinstance(value, (*_ATOMS, types.FunctionType, types.BuiltinFunctionType, type))


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else value


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _like(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is computed with: integers as they are, all else in the given precision."""
    if dtype.is_complex:
        return torch.complex128 if precision == torch.float64 else torch.complex64
    return precision if dtype.is_floating_point else dtype


def _kept_value(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise SymmetryError(
            f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} that is part of the network, but no "
            "weight (an index, a mask, a buffer that the state dict leaves out), is on the meta device and has no "
            "values; make it on the CPU (weights and counters can stay on the meta device)"
        )
    return tensor.detach().to(device="cpu", dtype=_like(tensor.dtype, torch.float64), copy=True)


class _WrittenTo(BaseException):
    """The forward pass is about to write to a tensor of the state; no handler of the module's own may swallow it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Noise:
    """What weights that are widened where they are used are multiplied by: ``1 + amount(name) * u``, u in (-1, 1)."""

    def __init__(self, amount: Callable[[str], float] | None, generator: torch.Generator | None) -> None:
        self.amount, self.generator = amount, generator
        if amount is not None:
            self.pool = torch.rand(2 * _POOL, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)

    def add_(self, name: str, tensor: Tensor) -> None:
        """Change a tensor, which is dense, in place; see :func:`perturb_`."""
        size = 0.0 if self.amount is None else self.amount(name)
        if size:
            flat = tensor.as_strided((tensor.numel(),), (1,))
            starts = torch.randint(_POOL, (flat.numel() // _POOL + 1,), generator=self.generator, device="cpu").tolist()
            for piece, start in zip(flat.split(_POOL), starts, strict=False):
                piece.mul_((self.pool[start : start + len(piece)] * size).add_(1))


class _Exactly(TorchDispatchMode):
    """Computes in one precision throughout, with constants for noise.

    A symmetry of a stochastic layer holds in law: its noise has to move with the units, and constants do so by
    themselves. Lower precisions inside the network (casts, new tensors, constants that are no buffers) would round what
    is to be compared, or not fit the weights. An operator that does not exist in double precision is computed in the
    best precision that it knows, which ``epsilon`` then tells. As an example::

        h = self.a(x).to(torch.float16)             # stays float64
        kept = h * (torch.rand_like(h) < 0.9)       # 0.7 everywhere: all are kept, whatever places units have changed
        return torch.ops.lib.norm(kept) + 1e-5      # a kernel that knows float32 at best; epsilon is that of float32

    and where it is not ``guarded`` (the epsilons of normalizations are left out), ``1e-5`` becomes 1e-100. Where it is
    ``narrow``, weights come in lower precision: every operator but a view gets them widened.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        precision: torch.dtype,
        kept: Mapping[int, str],
        *,
        guarded: bool = True,
        narrow: _Noise | None = None,
    ) -> None:
        super().__init__()
        self.guarded, self.narrow = guarded, narrow
        self.precision = precision
        self.kept = kept
        self.epsilon = torch.finfo(precision).eps
        self.most = free_memory(torch.device("cpu")) // 4  # bytes of one tensor
        order = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        self.lower = frozenset(order[order.index(precision) + 1 :])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        held = list(_leaves((args, kwargs)))
        mixed = any(a.dtype == self.precision for a in held)
        if kwargs.get("dtype") in self.lower:
            kwargs["dtype"] = self.precision
        schema = getattr(func, "_schema", None)
        if not self.guarded and schema is not None:
            args, kwargs = _unguarded(schema, args, kwargs)
        if not mixed and self.narrow is not None and not getattr(func, "is_view", False):
            mixed = any(a.dtype in self.lower and self.weight(a) is not None for a in held)
        if mixed and schema is not None and not schema.is_mutable and any(a.dtype in self.lower for a in held):
            args, kwargs = tree_map_only(Tensor, self.raised, (args, kwargs))
        if schema is not None and schema.is_mutable:
            self._guard(schema, args, kwargs)
        try:
            dense = func is torch.ops.aten.convolution.default and not kwargs
            result = _convolution(*args) if dense else func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if not mixed or schema is None or schema.is_mutable:
                raise
            result = self._rounded(func, args, kwargs, error)
        name = str(func).removeprefix("aten.").partition(".")[0].rstrip("_")
        if isinstance(result, Tensor) and result.numel() * result.element_size() > self.most:
            self._require_room(func, result)
        if isinstance(result, Tensor) and (not held or name in ("lift_fresh", "lift", "zeros_like", "ones_like")):
            result = self.raised(result)
        if name == "bernoulli":
            result.fill_(1)
        elif name in ("rand", "randn", "rand_like", "randn_like", "normal_functional", "uniform", "exponential"):
            result.fill_(0.7)
        elif name == "normal":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            result.copy_(given.get("mean", 0.0) + 0.7 * given.get("std", 1.0))
        return result

    def _guard(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for k, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[k] if k < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(written):
                    if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel():
                        name = self.kept.get(tensor.untyped_storage().data_ptr())
                        if name is not None:
                            raise _WrittenTo(name)

    def _require_room(self, func: Any, result: Tensor) -> None:
        if result.layout != torch.strided or getattr(func, "is_view", False):
            return
        raise SymmetryError(
            f"with random weights, in double precision, {func} makes a tensor of shape {tuple(result.shape)}, "
            f"{result.nbytes / 2**30:.1f} GiB, and {4 * self.most / 2**30:.1f} GiB were free: the run stops before the "
            "memory is gone. Likely cause: sizes that follow from the weights (predicted durations, for example), or "
            "example inputs that are larger than needed. Pass smaller example inputs, or verify the symmetries of the "
            "parts before and behind"
        )

    def raised(self, tensor: Tensor) -> Tensor:
        """A tensor in the precision that is computed in; weights with their noise."""
        if tensor.dtype not in self.lower:
            return tensor
        wide = tensor.to(self.precision)
        name = None if self.narrow is None else self.weight(tensor)
        if name is not None:
            assert self.narrow is not None
            self.narrow.add_(name, wide)
        return wide

    def weight(self, tensor: Tensor) -> str | None:
        """The name of the weight that a tensor is, or is a view of."""
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        return self.kept.get(tensor.untyped_storage().data_ptr())

    def _rounded(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """An operator without this precision, in the next one that it has."""
        for dtype in (torch.float32, torch.bfloat16):
            if dtype not in self.lower:
                continue

            def round_to(tensor: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                return tensor.to(dtype) if tensor.dtype == self.precision else tensor

            try:
                result = func(*tree_map_only(Tensor, round_to, args), **tree_map_only(Tensor, round_to, kwargs))
            except (RuntimeError, TypeError, ValueError):
                continue
            self.epsilon = max(self.epsilon, torch.finfo(dtype).eps)
            return tree_map_only(Tensor, self.raised, result)
        raise error


class _Widened(TorchFunctionMode):
    """Widens weights before functions that compare precisions themselves, as convolutions do; see :class:`_Exactly`."""

    def __init__(self, exactly: _Exactly) -> None:
        super().__init__()
        self.exactly = exactly

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own, name = self.exactly, getattr(func, "__name__", "")
        held = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        written = (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__")
        mixed = not written and "out" not in kwargs and any(a.dtype == own.precision for a in held)
        if mixed and any(a.dtype in own.lower and own.weight(a) is not None for a in held):
            args, kwargs = tree_map_only(
                Tensor, lambda t: t if own.weight(t) is None else own.raised(t), (args, kwargs)
            )
        return func(*args, **kwargs)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """``aten.convolution``; in float64 one matrix product for many samples, where PyTorch makes one for each.

    Wide layers at low resolution, whose weights are then read once, take half of the time or less.
    """
    space = weight.ndim - 2
    if x.dtype != torch.float64 or transposed or groups > 1 or x.ndim != weight.ndim or not x.numel():
        return torch.ops.aten.convolution.default(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    stride, padding, dilation = (list(v) * (space // len(v)) for v in (stride, padding, dilation))
    padded = nn.functional.pad(x, [p for p in reversed(padding) for _ in range(2)])
    kernel = weight.shape[2:]
    out = [
        (n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(padded.shape[2:], kernel, stride, dilation, strict=True)
    ]
    samples, channels, *steps = padded.stride()
    within = [n * d for n, d in zip(steps, dilation, strict=True)]
    between = [n * s for n, s in zip(steps, stride, strict=True)]
    each = max(1, _COLUMNS // (weight[0].numel() * math.prod(out)))
    rows = weight.reshape(len(weight), -1)
    parts = []
    for piece in padded.split(each):
        shapes, strides = [(x.shape[1], *kernel), (len(piece), *out)], [(channels, *within), (samples, *between)]
        few = math.prod(shapes[1]) < len(weight)  # places: the weights are what is read, and row by row is faster
        if few:
            shapes, strides = shapes[::-1], strides[::-1]
        columns = piece.as_strided(sum(shapes, ()), sum(strides, ()), piece.storage_offset())
        columns = columns.reshape(math.prod(shapes[0]), -1)
        if few:
            part = nn.functional.linear(columns, rows).reshape(len(piece), *out, len(weight)).movedim(-1, 1)
        else:
            part = (rows @ columns).reshape(len(weight), len(piece), *out).movedim(0, 1)
        parts.append(part.contiguous())
    result = torch.cat(parts)  # in the layout that PyTorch's own gives
    return result if bias is None else result.add_(bias.reshape(-1, *[1] * space))


def _unguarded(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator with (almost) zero for an epsilon."""
    name = schema.name.partition("::")[2].rstrip("_")
    given, named = list(args), dict(kwargs)
    for k, argument in enumerate(schema.arguments):
        value = given[k] if k < len(given) else named.get(argument.name)
        if not isinstance(value, float) or value <= 0:
            continue
        added = name == "add" and argument.name == "other" and value <= SMALL
        clamped = name in ("clamp", "clamp_min") and argument.name == "min" and value <= GUARD
        if added or clamped or argument.name in ("eps", "epsilon"):
            if k < len(given):
                given[k] = 1e-100  # some operators refuse zero
            else:
                named[argument.name] = 1e-100
    return tuple(given), named


# -- random weights ---------------------------------------------------------------------------------------------


def random_state(
    model: nn.Module,
    generator: torch.Generator,
    constants: Container[str] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Random float64 weights of moderate size for every floating-point or complex tensor of a module, on the CPU.

    Matrices are scaled by their fan-in; vectors (biases, affine parameters) vary about one or zero; running variances
    are positive. Sparse tensors stay as they are, and so do integers and booleans, unless ``constants`` says which of
    these the network reads by value: the others are drawn too (masks at random, other integers in another order).
    Tied names share one tensor. With another ``dtype`` real numbers are rounded to it.
    """
    drawn: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in drawn:
            drawn[id(tensor)] = _draw(name, tensor.detach(), generator)
            whole = tensor.layout == torch.strided and not (tensor.is_floating_point() or tensor.is_complex())
            if whole and constants is not None and name not in constants and tensor.numel() > 1:
                drawn[id(tensor)] = _draw_integers(drawn[id(tensor)], generator)
            if tensor.is_floating_point() and tensor.layout == torch.strided:
                drawn[id(tensor)] = drawn[id(tensor)].to(dtype)
        state[name] = drawn[id(tensor)]
    return state


def _draw_integers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A mask with three quarters of its entries set, or the same integers in another order."""
    if tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
        return (torch.rand(tensor.shape, generator=generator, device="cpu") < 0.75).to(tensor.dtype)
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator, device="cpu")].reshape(tensor.shape)


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.cpu().clone()
    dtype = _like(tensor.dtype, torch.float64)
    # numbers of single precision: drawing is most of what small batches cost
    single = _like(tensor.dtype, torch.float32)
    noise = torch.randn(tensor.shape, generator=generator, dtype=single, device="cpu").to(dtype)
    last = name.rpartition(".")[2]
    if "var" in last and not tensor.is_complex():
        return 0.5 + noise.abs()
    if tensor.ndim >= 2:
        fan_in = math.prod(tensor.shape[1:])
        return noise.mul_((1.5 / max(fan_in, 1)) ** 0.5)
    if "mean" in last or "bias" in last:
        return 0.3 * noise
    return 1.0 + 0.3 * noise


def perturb_(state: Mapping[str, Tensor], amount: Callable[[str], float], generator: torch.Generator) -> None:
    """Multiply every entry of the floating-point tensors by ``1 + amount(name) * u``, u uniform in (-1, 1), in place.

    Names that hold the same tensor object are perturbed once. The tensors are contiguous. Of the numbers ``u`` there is
    a pool of at most 2 ** 19; a tensor is cut into pieces of half the pool, each of which takes a stretch of it that
    begins somewhere: a tensor of 600,000 entries is three pieces with, say, the stretches from 1,204, 99,871 and 17.
    """
    done: set[int] = set()
    reach = min(_POOL, max((t.numel() for t in state.values()), default=0) + 1)  # small networks need few numbers
    pool = torch.rand(2 * reach, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)
    for name, tensor in state.items():
        size = amount(name)
        floating = tensor.is_floating_point() or tensor.is_complex()
        if id(tensor) in done or not floating or tensor.layout != torch.strided or size == 0:
            continue
        done.add(id(tensor))
        flat = tensor.view(-1)
        starts = torch.randint(reach, (flat.numel() // reach + 1,), generator=generator, device="cpu").tolist()
        for piece, start in zip(flat.split(reach), starts, strict=False):
            piece.mul_((pool[start : start + len(piece)] * size).add_(1).to(_real(piece.dtype)))


LARGE = 2**29  # bytes of the weights in double precision, from which on they are widened as they are used
_COLUMNS = 2**23  # numbers of a convolution's input at a time
_POOL = 2**18  # drawing a number for every weight would take longer than a layer does


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex128: torch.float64, torch.complex64: torch.float32}.get(dtype, dtype)


def tensors_of(nested: Any) -> list[Tensor]:
    """All tensors among the outputs of a network, dense, without their gradients' graph; numbers count as tensors."""
    if isinstance(nested, Tensor):
        return [(nested.to_dense() if nested.layout != torch.strided else nested).detach()]
    if isinstance(nested, (bool, int, float, complex)):
        wide = {float: torch.float64, complex: torch.complex128}.get(type(nested))
        return [torch.as_tensor(nested, dtype=wide, device="cpu")]
    if isinstance(nested, Mapping):
        return [t for item in nested.values() for t in tensors_of(item)]
    if isinstance(nested, (list, tuple, set, frozenset)):
        return [t for item in nested for t in tensors_of(item)]
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        return [t for field in dataclasses.fields(nested) for t in tensors_of(getattr(nested, field.name))]
    return []


def _double(nested: Any, generator: torch.Generator | None) -> Any:
    """Inputs in float64 on the CPU; with a generator constant inputs (zeros, ones) are replaced by noise.

    Inputs on the meta device have no values: noise takes their place, and zeros that of integers.
    """
    if isinstance(nested, Tensor) and nested.is_meta:
        if nested.is_floating_point() or nested.is_complex():
            drawn = torch.randn(nested.shape, generator=generator or torch.Generator().manual_seed(0), device="cpu")
            return drawn.to(_like(nested.dtype, torch.float64))
        return torch.zeros(nested.shape, dtype=nested.dtype, device="cpu")
    if isinstance(nested, Tensor):
        if not (nested.is_floating_point() or nested.is_complex()):
            return nested.detach().to("cpu", copy=True)
        tensor = _kept_value(nested)
        if generator is None or tensor.layout != torch.strided or tensor.numel() < 2:
            return tensor
        constant = bool((tensor == tensor.flatten()[0]).all())
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu") if constant else tensor
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*(_double(item, generator) for item in nested))
    if isinstance(nested, (list, tuple)):
        return type(nested)(_double(item, generator) for item in nested)
    if isinstance(nested, dict):
        return {k: _double(v, generator) for k, v in nested.items()}
    return nested
