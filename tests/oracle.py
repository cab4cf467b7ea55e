"""An independent oracle: do the claimed symmetries keep the function of a network?

It uses nothing of the library but the action (``apply_permutation`` and its like) and the list of groups: random
weights, float64, noise, epsilons and the comparison of outputs are its own, so that a mistake which discovery and
verification share does not stay hidden. Every output entry is compared on its own scale (its largest magnitude over the
weights that were drawn), with what weights that differ by 1e-13 make of it allowed; groups are moved alone, in random
subsets, and all together; those that hold up to an epsilon on a copy whose epsilons are (almost) zero. A state with
other integers in its buffers may be refused; if it is moved, the function has to stay.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tu_symmetry as tus

State = dict[str, Tensor]

_RELATIVE = 1e-8
_LOW = (torch.float16, torch.bfloat16, torch.float32)
_TINY = 1e-30
_NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "normal", "bernoulli", "uniform", "exponential"})


@dataclass
class Verdict:
    """What the oracle found: one line for each claim that does not hold."""

    wrong: list[str] = field(default_factory=list)


def judge(
    graph: tus.SymmetryGraph, model: nn.Module, inputs: tuple[Any, ...], *, seed: int = 0, training: bool = False
) -> Verdict:
    """Try the groups of a verified graph on random weights of the model, in float64."""
    verdict = Verdict()
    generator = torch.Generator().manual_seed(seed)
    copied = DoubleCopy(model, inputs, training=training)
    states = [random_weights(model, generator) for _ in range(2)]
    if any(_discrete(t) for t in states[0].values()):
        states.append({k: _other(t, generator) for k, t in states[0].items()})

    def attempt(elements: Iterable[tuple[str, State]], action: Any, reference: _Reference) -> None:
        for label, element in elements:
            try:
                moved = action(graph, element, reference.state)
            except tus.SymmetryError:
                if number < 2:
                    raise
                return
            if complaint := reference.differs(moved):
                verdict.wrong.append(f"{label}: {complaint}{' (with other masks)' if number == 2 else ''}")

    for number, state in enumerate(states):
        try:
            reference = _Reference(copied, state, generator)
        except Exception:
            if number < 2:
                raise
            continue  # other integers may be no valid indices
        permutations = list(_permutations(graph, generator))
        attempt(permutations[(0, -4, -8)[number] :], tus.apply_permutation, reference)
        if number == 1:
            continue
        attempt(_signs(list(graph.signs), generator), tus.apply_signs, reference)
        free, folded = ([g for g in graph.linears if bool(g.constant) is c] for c in (False, True))
        attempt(_maps(free, generator), tus.symmetry.apply_linear, reference)
        if folded:
            gains = {n: torch.full_like(state[n], 0.7) for g in folded for k in g.constant for n in graph.aliases[k]}
            constant = _Reference(copied, state | gains, generator)
            attempt(_maps(folded, generator), tus.symmetry.apply_linear, constant)
        exact = [g for g in (*graph.scales, *graph.normalizations) if g.exact]
        loose = [g for g in (*graph.scales, *graph.normalizations) if not g.exact]
        attempt(_scales(exact, generator), tus.apply_scale, reference)
        if loose:
            without = _Reference(DoubleCopy(model, inputs, epsilons=False, training=training), state, generator)
            attempt(_scales([*exact, *loose], generator), tus.apply_scale, without)
    return verdict


# -- elements ---------------------------------------------------------------------------------------------------------


def _some(groups: list[Any], most: int, generator: torch.Generator) -> list[Any]:
    if len(groups) <= most:
        return groups
    return [groups[k] for k in torch.randperm(len(groups), generator=generator)[:most].tolist()]


def _permutations(graph: tus.SymmetryGraph, generator: torch.Generator) -> Iterator[tuple[str, dict[str, Tensor]]]:
    def drawn(group: tus.symmetry.PermutationGroup) -> Tensor:
        rows = max(1, torch.Size(group.blocks).numel())
        element = torch.stack([torch.randperm(group.size, generator=generator) for _ in range(rows)])
        return element.reshape(group.shape)

    groups = list(graph.permutations)
    for group in _some(groups, 24, generator):
        i, j = torch.randperm(group.size, generator=generator)[:2].tolist() if group.size > 1 else (0, 0)
        element = torch.arange(group.size).expand(group.shape).clone().reshape(-1, group.size)
        block = int(torch.randint(len(element), (), generator=generator))
        element[block, i], element[block, j] = j, i
        yield f"transposition in {group.name!r}", {group.name: element.reshape(group.shape)}
        yield f"permutation of {group.name!r}", {group.name: drawn(group)}
    for _ in range(3 if len(groups) > 1 else 0):
        subset = [g for g in groups if torch.rand((), generator=generator) < 0.5]
        yield f"permutations of {[g.name for g in subset]}", {g.name: drawn(g) for g in subset}
    if groups:
        yield "permutations of all groups", {g.name: drawn(g) for g in groups}


def _scales(groups: list[Any], generator: torch.Generator) -> Iterator[tuple[str, dict[str, Tensor]]]:
    def drawn(group: Any) -> Tensor:
        return 0.5 * torch.randn(group.size, generator=generator, dtype=torch.float64)

    for group in _some(groups, 16, generator):
        one = torch.zeros(group.size, dtype=torch.float64)
        one[int(torch.randint(group.size, (), generator=generator))] = 0.7
        yield f"factor in {group.name!r}", {group.name: one}
        yield f"factors of {group.name!r}", {group.name: drawn(group)}
    if len(groups) > 1:
        for _ in range(2):
            subset = [g for g in groups if torch.rand((), generator=generator) < 0.5]
            yield f"factors of {[g.name for g in subset]}", {g.name: drawn(g) for g in subset}
        yield "factors of all groups", {g.name: drawn(g) for g in groups}


def _signs(groups: list[Any], generator: torch.Generator) -> Iterator[tuple[str, dict[str, Tensor]]]:
    def drawn(group: Any) -> Tensor:
        return 1 - 2 * torch.randint(2, (group.size,), generator=generator)

    for group in _some(groups, 16, generator):
        one = torch.ones(group.size, dtype=torch.int64)
        one[int(torch.randint(group.size, (), generator=generator))] = -1
        yield f"sign in {group.name!r}", {group.name: one}
        yield f"signs of {group.name!r}", {group.name: drawn(group)}
    if groups:
        yield "signs of all groups", {g.name: drawn(g) for g in groups}


def _maps(groups: list[Any], generator: torch.Generator) -> Iterator[tuple[str, dict[str, Tensor]]]:
    def drawn(group: Any) -> Tensor:
        noise = torch.randn(group.shape, generator=generator, dtype=torch.float64)
        eye = torch.eye(group.size, dtype=torch.float64)
        if group.subgroup == "complex":
            return noise[..., :1, :1] * eye + noise[..., :1, 1:] * torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        if group.subgroup == "centered":  # reflections along vectors whose entries add up to zero
            apart = noise - noise.mean(-1, keepdim=True)
            first, second = (
                eye - 2 * v.unsqueeze(-1) * v.unsqueeze(-2) / v.square().sum(-1)[..., None, None]
                for v in (apart[..., 0, :], apart[..., 1, :])
            )
            return first @ second
        rotation = torch.linalg.qr(noise).Q
        return rotation if group.orthogonal else rotation + 0.2 * noise / group.size**0.5

    for group in _some(groups, 16, generator):
        yield f"map of {group.name!r}", {group.name: drawn(group)}
    if groups:
        yield "maps of all groups", {g.name: drawn(g) for g in groups}


# -- weights ----------------------------------------------------------------------------------------------------------


def random_weights(model: nn.Module, generator: torch.Generator) -> State:
    """Weights in double precision: no entry is zero or one by accident; tied names share one tensor."""
    drawn: dict[int, Tensor] = {}
    state: State = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in drawn:
            drawn[id(tensor)] = _drawn(name, tensor.detach().cpu(), generator)
        state[name] = drawn[id(tensor)]
    return state


def _drawn(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if _discrete(tensor):
        return tensor.clone()
    if tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.complex128)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    if "var" in name.rpartition(".")[2]:
        return 0.3 + noise.square()
    if tensor.ndim >= 2:
        return noise * (2.0 / max(1, tensor[0].numel())) ** 0.5
    return 0.7 * noise + 0.2 * noise.sign()


def _discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _other(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other values for a mask or for indices; other tensors as they are."""
    if not _discrete(tensor) or tensor.numel() < 2:
        return tensor
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)


# -- running a network ------------------------------------------------------------------------------------------------


class DoubleCopy:
    """A float64 copy of a module that can be run with any weights, and forgets what earlier runs left in it."""

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], *, epsilons: bool = True, training: bool = False
    ) -> None:
        memo = _leaves(model)
        memo |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()}
        self.model = copy.deepcopy(model, memo).cpu().train().eval().train(training)
        self.inputs = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        self.epsilons = epsilons
        for module in self.model.modules():
            for key, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.dtype in _LOW:
                    setattr(module, key, value.double())
                elif not epsilons and "eps" in key and isinstance(value, float):
                    setattr(module, key, _TINY)
            if not epsilons:
                _without_epsilons(module)
            for key, buffer in module._buffers.items():  # buffers outside the state dict keep their values
                if buffer is not None and buffer.dtype in _LOW:
                    module._buffers[key] = buffer.double()

        self.plain: bool | None = None  # whether runs need no help: known after the first one
        self.draws = False  # whether a guarded run has drawn noise
        self.spare: nn.Module | None = None  # a copy that the last run has left as it was

    def run(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        if self.plain is None:
            guarded = self._run(state, guarded=True)
            try:
                free = self._run(state, guarded=False)
            except (RuntimeError, ValueError):  # mixed precision, which recurrent layers refuse by themselves
                free = []
            # outputs that are whole numbers may be equal by chance where noise is drawn
            self.plain = (
                not self.draws
                and len(free) == len(guarded)
                and all(
                    a.dtype == b.dtype and a.shape == b.shape and bool(_difference(a, b).eq(0).all())
                    for a, b in zip(guarded, free, strict=True)
                )
            )
        return self._run(state, guarded=not self.plain)

    def _run(self, state: Mapping[str, Tensor], *, guarded: bool) -> list[Tensor]:
        model, self.spare = self.spare or copy.deepcopy(self.model, _leaves(self.model)), None
        print_before = _fingerprint(model)
        own = {id(t): t.clone() for t in state.values()}  # for modules that write into their buffers
        tensors = {k: own[id(t)] for k, t in state.items()}
        inputs = tree_map_only(Tensor, torch.clone, self.inputs)
        old = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                mode = _Double(self.epsilons)
                with mode if guarded else contextlib.nullcontext():
                    outputs = torch.func.functional_call(model, tensors, inputs, tie_weights=False)
        finally:
            torch.set_default_dtype(old)
        self.draws |= mode.draws
        if _fingerprint(model) == print_before:
            self.spare = model
        return [leaf.clone() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _leaves(model: nn.Module) -> dict[int, Any]:
    """For deepcopy: copies of the tensors that forward may have left in a module, which it refuses."""
    held = (value for part in model.modules() for value in vars(part).values())
    return {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}


def _fingerprint(model: nn.Module) -> list[Any]:
    """Changes where a run leaves something behind in a module: a cached weight, a buffer outside the state dict."""
    held = [h for module in model.modules() for h in (vars(module), module._buffers, module._parameters)]
    values = [pair for h in held for pair in h.items()]
    sizes = (v._version if isinstance(v, Tensor) else len(v) if hasattr(v, "__len__") else 0 for _, v in values)
    return [(key, id(value), size) for (key, value), size in zip(values, sizes, strict=True)]


class _Double(TorchDispatchMode):
    """No lower precision inside the network, constant noise, and no epsilons where they are not wanted."""

    supports_higher_order_operators = True

    def __init__(self, epsilons: bool) -> None:
        super().__init__()
        self.epsilons = epsilons
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float64
        schema = getattr(func, "_schema", None)
        if schema is not None:
            args = list(args)
            for position, argument in enumerate(schema.arguments):
                if not self.epsilons and argument.name == "eps":
                    if position < len(args):
                        args[position] = _TINY
                    else:
                        kwargs["eps"] = _TINY
            held = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
            if any(a.dtype == torch.float64 for a in held) and not schema.is_mutable:
                args, kwargs = tree_map_only(Tensor, lambda t: t.double() if t.dtype in _LOW else t, (args, kwargs))
        result = func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0].strip("_") if hasattr(func, "name") else ""
        if name in _NOISE and isinstance(result, Tensor):
            self.draws = True
            result.fill_(1 if name == "bernoulli" else 0.6)
        return result


def _without_epsilons(module: nn.Module) -> None:
    """Replace literals such as 1e-5 in a module's own ``forward`` by (almost) zero."""
    forward = type(module).forward
    if type(module).__module__.startswith("torch.") or not isinstance(forward, types.FunctionType):
        return

    def without(constant: Any) -> Any:
        if isinstance(constant, float) and 0 < constant <= 1e-4:
            return _TINY
        if isinstance(constant, tuple):
            return tuple(map(without, constant))
        return constant

    code = forward.__code__.replace(co_consts=tuple(map(without, forward.__code__.co_consts)))
    copied = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(copied, module)  # type: ignore[method-assign]


# -- comparing --------------------------------------------------------------------------------------------------------


class _Reference:
    """The outputs for some weights, with the scale and the tolerance of every entry."""

    def __init__(self, copied: DoubleCopy, state: State, generator: torch.Generator) -> None:
        self.copied, self.state = copied, state
        self.outputs = copied.run(state)
        self.tolerance: list[Tensor] = [torch.zeros(())] * len(self.outputs)
        scale = [_magnitude(t) for t in self.outputs]
        noise = [torch.zeros_like(s) for s in scale]
        # an index among rounding errors (of sums that are zero) flips in most draws, but not in all
        for _ in range(12 if any(map(_discrete, self.outputs)) else 2):
            for k, (a, b) in enumerate(zip(self.outputs, copied.run(_nudged(state, 1e-13, generator)), strict=True)):
                noise[k] = torch.maximum(noise[k], _difference(a, b))
        other = random_weights(copied.model, generator)
        with_masks = {k: state[k] if _discrete(t) else t for k, t in other.items()}
        for k, t in enumerate(copied.run(with_masks)):
            scale[k] = torch.maximum(scale[k], _magnitude(t)) if t.shape == scale[k].shape else scale[k]
        for k, t in enumerate(self.outputs):
            if _discrete(t):
                self.tolerance[k] = torch.where(noise[k] > 0, float("inf"), 0.0)
            else:
                self.tolerance[k] = _RELATIVE * scale[k] + 300 * noise[k] + 1e-14

    def differs(self, state: Mapping[str, Tensor]) -> str:
        """What is different with other weights, in words; empty if nothing is."""
        for k, (a, b) in enumerate(zip(self.outputs, self.copied.run(state), strict=True)):
            if a.shape != b.shape:
                return f"output {k} has shape {tuple(b.shape)} instead of {tuple(a.shape)}"
            difference = _difference(a, b)
            excess = ~(difference <= self.tolerance[k])
            if excess.any() and _discrete(a):
                self._look_again(k)
                excess = ~(difference <= self.tolerance[k])
            if excess.any():
                worst = int(torch.where(excess, difference, torch.full_like(difference, -1.0)).argmax())
                was, now = a.flatten()[worst].item(), b.flatten()[worst].item()
                return f"output {k} changes from {was!r} to {now!r} in {int(excess.sum())} of {a.numel()} entries"
        return ""

    def _look_again(self, k: int) -> None:
        """Leave out entries of whole numbers that hang on rounding in few draws: the least of rows that are equal."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(300):
            flipped = self.copied.run(_nudged(self.state, 1e-13, generator))[k] != self.outputs[k]
            self.tolerance[k] = torch.where(flipped, float("inf"), self.tolerance[k])


def _magnitude(tensor: Tensor) -> Tensor:
    if _discrete(tensor):
        return torch.zeros(tensor.shape, dtype=torch.float64)
    size = tensor.abs().double()
    return torch.where(size.isfinite(), size, 0.0)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise distance in float64; infinite where just one is finite, or where infinities or NaN differ."""
    if a.shape != b.shape:
        return torch.full(a.shape, float("inf"), dtype=torch.float64)
    if _discrete(a):
        return (a != b).double()
    parts = [torch.view_as_real(t.to(torch.complex128).resolve_conj()) for t in (a, b)]
    finite = parts[0].isfinite() & parts[1].isfinite()
    same = (parts[0] == parts[1]) | (parts[0].isnan() & parts[1].isnan())
    gap = torch.where(finite, (parts[0] - parts[1]).abs(), torch.where(same, 0.0, float("inf")))
    return gap.amax(-1)


def _nudged(state: State, size: float, generator: torch.Generator) -> State:
    nudged: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in nudged:
            noise = 1 + size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            nudged[id(tensor)] = tensor if _discrete(tensor) else tensor * noise
    return {k: nudged[id(t)] for k, t in state.items()}
