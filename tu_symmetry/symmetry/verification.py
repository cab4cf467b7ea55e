"""Numerical verification: every claimed group acts on real weights, and the outputs have to stay the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tu_symmetry.symmetry.action import permute_tensors, permute_tensors_, scale_tensors, scale_tensors_
from tu_symmetry.symmetry.elements import Permutation, random_permutation
from tu_symmetry.symmetry.graph import SymmetryError, SymmetryGraph


def verify_symmetries(
    graph: SymmetryGraph,
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Check in float64 that a random element of every group leaves the outputs unchanged.

    The weights are randomized first (running statistics, affine parameters and zero-initialized heads included: on a
    fresh network many of them are constant, and the check would be vacuous). Groups that hold up to a normalization's
    epsilon are checked with the epsilons set to (almost) zero. All groups are tried at once; if the outputs
    differ, one after the other, so that the culprit can be named.

    Args:
        graph: what :func:`discover_symmetries` returned; ``graph.verified`` is set on success.
        model: the module, left untouched (a float64 copy is used).
        example_inputs: as for discovery.
        example_kwargs: as for discovery.
        tolerance: largest accepted difference of outputs, relative to their largest magnitude.
        seed: of the random weights and elements.

    Raises:
        SymmetryError: naming the group that does not hold, or if the outputs do not depend on the weights at all.
    """
    graph.check_state(model.state_dict(), finite=False, name="the model's state dict")
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    generator = torch.Generator().manual_seed(seed)

    state = random_state(model, generator)
    # a copy without weights of its own (they come with each run); the change to training mode and back empties what
    # some modules keep of their weights for evaluation
    zero = torch.zeros((), dtype=torch.float64)
    held = {id(t): t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()}
    hollow = {
        k: nn.Parameter(zero.expand(t.shape)) if isinstance(t, nn.Parameter) else zero.expand(t.shape)
        for k, t in held.items()
    }
    twin = copy.deepcopy(model, hollow).to(device="cpu", dtype=torch.float64).train().eval()
    args, kwargs = _double((args, dict(example_kwargs or {})), generator)
    check = _Check(twin, args, kwargs, tolerance)

    permutation = _cycles(graph, generator)
    exact: dict[str, Tensor] = {}
    inexact: dict[str, Tensor] = {}
    for group in (*graph.scales, *graph.normalizations):
        draw = 0.3 * torch.randn(group.size, generator=generator, dtype=torch.float64)
        (exact if group.exact else inexact)[group.name] = draw

    # one set of weights, which the elements move one after the other: what it was before need not be kept
    check.baseline(state)
    permute_tensors_(graph, permutation, state)
    held_so_far = not check.differs(state)
    if held_so_far:
        scale_tensors_(graph, exact, state)
        held_so_far = not check.differs(state)
    if not held_so_far:
        state = random_state(model, torch.Generator().manual_seed(seed))  # the same once more
        check.baseline(state)
        for name, p in permutation.items():
            check.demand(name, "permutation", permute_tensors(graph, {name: p}, state))
        for name, s in exact.items():
            check.demand(name, "scale", scale_tensors(graph, {name: s}, state))
        raise SymmetryError(_TOGETHER)
    if inexact:
        _drop_epsilons(twin)
        check.baseline(state)
        scale_tensors_(graph, inexact, state)
        if check.differs(state):
            state = random_state(model, torch.Generator().manual_seed(seed))
            check.baseline(state)
            for name, s in inexact.items():
                check.demand(name, "normalization", scale_tensors(graph, {name: s}, state))
            raise SymmetryError(_TOGETHER)
    graph.verified = True
    graph._verifier = None


_TOGETHER = (
    "each group on its own leaves the outputs of this network unchanged, but all of them together change them: a rule "
    "is wrong, or the network does not compute the same twice; please report the architecture"
)


class _Check:
    """Runs the network with other weights and compares with the outputs of the first."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float) -> None:
        self.model, self.args, self.kwargs, self.tolerance = model, args, kwargs, tolerance
        self.reference: list[Tensor] = []

    def _run(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        # some modules keep what they computed from weights: each run has a model of its own, which shares the tensors
        shared = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        model = copy.deepcopy(self.model, shared)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _Exactly():
            torch.manual_seed(0)
            try:
                output = torch.func.functional_call(model, dict(state), self.args, self.kwargs, tie_weights=False)
            except Exception as error:
                raise SymmetryError(
                    f"the network does not run in float64 on the CPU, where symmetries are verified: {error}\nLikely "
                    "cause: an operator that knows only lower precisions or another device (a fused kernel). Choose "
                    "the model's plain implementation of that operator."
                ) from error
        return [t.clone() for t in _tensors(output)]

    def baseline(self, state: Mapping[str, Tensor]) -> None:
        self.reference = self._run(state)
        if not all(torch.isfinite(t).all() for t in self.reference):
            raise SymmetryError(
                "the network's outputs are NaN or infinite for random weights of moderate size, so that nothing can be "
                "verified; pass example inputs of ordinary magnitude"
            )

    def error(self, state: Mapping[str, Tensor]) -> float:
        worst = 0.0
        for a, b in zip(self.reference, self._run(state), strict=True):
            scale = float(a.abs().max()) if a.numel() else 0.0
            worst = max(worst, float((a - b).abs().max()) / max(scale, 1e-300) if a.numel() else 0.0)
        return worst

    def differs(self, state: Mapping[str, Tensor]) -> bool:
        return not self.error(state) <= self.tolerance

    def demand(self, name: str, kind: str, state: Mapping[str, Tensor]) -> None:
        error = self.error(state)
        if not error <= self.tolerance:
            raise SymmetryError(
                f"the {kind} group {name!r} is no symmetry of this network: the outputs change by {error:.1e} "
                f"(relative; {self.tolerance:.0e} is allowed). Either the model or its inputs are not those that the "
                "graph was discovered on, or a rule is wrong; please report the architecture."
            )


class _Exactly(TorchDispatchMode):
    """Computes in double precision throughout, with constants for noise.

    A symmetry of a stochastic layer holds in law: its noise has to move with the units, and constants do so by
    themselves. Lower precisions inside the network (casts, new tensors, constants that are no buffers) would round what
    is to be compared, or not fit the weights.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        held = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        mixed = any(a.dtype == torch.float64 for a in held)
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        schema = getattr(func, "_schema", None)
        if mixed and schema is not None and not schema.is_mutable and any(a.dtype in _LOWER for a in held):
            args, kwargs = tree_map_only(Tensor, _raised, (args, kwargs))
        result = func(*args, **kwargs)
        name = str(func).removeprefix("aten.").partition(".")[0].rstrip("_")
        if isinstance(result, Tensor) and (not held or name in ("lift_fresh", "lift", "zeros_like", "ones_like")):
            result = _raised(result)
        if name == "bernoulli":
            result.fill_(1)
        elif name in ("rand", "randn", "rand_like", "randn_like", "normal_functional", "uniform", "exponential"):
            result.fill_(0.7)
        elif name == "normal":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            result.copy_(given.get("mean", 0.0) + 0.7 * given.get("std", 1.0))
        return result


_LOWER = frozenset((torch.float32, torch.float16, torch.bfloat16))


def _raised(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _LOWER else tensor


def random_state(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Random float64 weights of moderate size for every floating-point tensor of a module, on the CPU.

    Matrices are scaled by their fan-in; vectors (biases, affine parameters) vary about one or zero; running variances
    are positive. Integer tensors stay as they are. Tied names share one tensor.
    """
    drawn: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in drawn:
            drawn[id(tensor)] = _draw(name, tensor.detach(), generator)
        state[name] = drawn[id(tensor)]
    return state


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.cpu().clone()
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    last = name.rpartition(".")[2]
    if "var" in last:
        return 0.5 + noise.abs()
    if tensor.ndim >= 2:
        fan_in = tensor[0].numel()
        return noise.mul_((1.5 / max(fan_in, 1)) ** 0.5)
    if "mean" in last or "bias" in last:
        return 0.3 * noise
    return 1.0 + 0.3 * noise


def _drop_epsilons(model: nn.Module) -> None:
    """Set every attribute that looks like a normalization's epsilon to (almost) zero."""
    for module in model.modules():
        for key, value in vars(module).items():
            if "eps" in key and isinstance(value, float):
                setattr(module, key, 1e-100)  # some operators refuse zero


def _cycles(graph: SymmetryGraph, generator: torch.Generator) -> Permutation:
    """A random element that moves every unit: one cycle through all units of each block."""
    element = {}
    for name, order in random_permutation(graph, generator=generator).items():
        element[name] = torch.empty_like(order).scatter_(-1, order, order.roll(1, dims=-1))
    return element


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested] if nested.is_floating_point() or nested.is_complex() else []
    if isinstance(nested, (list, tuple)):
        return [t for item in nested for t in _tensors(item)]
    if isinstance(nested, Mapping):
        return [t for item in nested.values() for t in _tensors(item)]
    return []


def _double(nested: Any, generator: torch.Generator) -> Any:
    """Inputs in float64 on the CPU; constant inputs (zeros, ones) are replaced by noise."""
    if isinstance(nested, Tensor):
        if not nested.is_floating_point():
            return nested.cpu()
        tensor = nested.detach().to(device="cpu", dtype=torch.float64)
        constant = tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64) if constant else tensor
    if isinstance(nested, (list, tuple)):
        return type(nested)(_double(item, generator) for item in nested)
    if isinstance(nested, dict):
        return {k: _double(v, generator) for k, v in nested.items()}
    return nested
