"""The arithmetic that networks are compared in: one precision throughout, constants for noise, epsilons or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tu_symmetry.memory import free_memory
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.rules import GUARD, SMALL

_ORDER = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CONSTANT = frozenset({"rand", "randn", "rand_like", "randn_like", "normal_functional", "uniform", "exponential"})
_MADE = frozenset({"lift_fresh", "lift", "zeros_like", "ones_like"})
ALMOST_ZERO = 1e-100  # for an epsilon: some operators refuse zero


class WrittenTo(BaseException):
    """The forward pass is about to write to a tensor of the state; no handler of the module's own may swallow it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Exactly(TorchDispatchMode):
    """Computes in one precision throughout, with constants for noise, which move with the units by themselves.

    An operator that does not exist in double precision is computed in the best that it knows, which ``epsilon`` tells.
    No operator may write to what is ``kept``: the weights' names, by the places of their memory. Where it is not
    ``guarded``, epsilons of normalizations are left out. Of what is ``read`` by name, the tensors with these names, all
    zeros, are given to an operator as they are read then, and nobody holds them longer.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        precision: torch.dtype,
        kept: Mapping[int, str],
        *,
        guarded: bool = True,
        read: Callable[[str], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.read = read
        self.precision, self.kept, self.guarded = precision, kept, guarded
        self.epsilon = torch.finfo(precision).eps
        self.most = free_memory(torch.device("cpu")) // 4  # bytes of one tensor
        self.lower = frozenset(_ORDER[_ORDER.index(precision) + 1 :])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._guard(schema, args, kwargs)
        if self.read is not None:
            args, kwargs = tree_map_only(Tensor, self._filled, (args, kwargs))
        held = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        mixed = any(a.dtype == self.precision for a in held)
        if kwargs.get("dtype") in self.lower:
            kwargs["dtype"] = self.precision
        pure = schema is not None and not schema.is_mutable
        if not self.guarded and schema is not None:
            args, kwargs = _unguarded(schema, args, kwargs)
        if mixed and pure and any(a.dtype in self.lower for a in held):
            args, kwargs = tree_map_only(Tensor, self._raised, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if not mixed or not pure:
                raise
            result = self._rounded(func, args, kwargs, error)
        name = str(func).removeprefix("aten.").partition(".")[0].rstrip("_")
        if isinstance(result, Tensor):
            self._require_room(func, result)
            result = self._raised(result) if not held or name in _MADE else result
        if name == "bernoulli":
            result.fill_(1)
        elif name in _CONSTANT:
            result.fill_(0.7)
        elif name == "normal":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            result.copy_(given.get("mean", 0.0) + 0.7 * given.get("std", 1.0))
        return result

    def _guard(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse to write to a weight, or to a view of one."""
        for k, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(args[k] if k < len(args) else kwargs.get(argument.name)):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel():
                    name = self.kept.get(tensor.untyped_storage().data_ptr())
                    if name is not None:
                        raise WrittenTo(name)

    def _filled(self, tensor: Tensor) -> Tensor:
        """A tensor, or what is read in its place."""
        name = self.kept.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
        found = None if name is None or self.read is None else self.read(name)
        if found is not None and found.shape != tensor.shape:
            raise SymmetryError(f"{name!r} is used as if it had the shape {tuple(tensor.shape)}, by a view of its data")
        return tensor if found is None else found

    def _require_room(self, func: Any, result: Tensor) -> None:
        if result.layout == torch.strided and result.nbytes > self.most and not getattr(func, "is_view", False):
            raise SymmetryError(
                f"with random weights {func} makes a tensor of shape {tuple(result.shape)}, and "
                f"{4 * self.most / 2**30:.1f} GiB were free (do sizes follow from the weights?); pass smaller example "
                "inputs, or verify parts of the network"
            )

    def _raised(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision) if tensor.dtype in self.lower else tensor

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
            return tree_map_only(Tensor, self._raised, result)
        raise error


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
                given[k] = ALMOST_ZERO
            else:
                named[argument.name] = ALMOST_ZERO
    return tuple(given), named
