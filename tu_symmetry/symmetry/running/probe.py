"""Running a network with weights that are given to it: the module without its own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tu_symmetry.files import Views, layouts_of
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.copies import copied, sharing, switches, valueless
from tu_symmetry.symmetry.running.precision import ALMOST_ZERO, Exactly, WrittenTo
from tu_symmetry.symmetry.running.weights import as_computed, is_continuous, kept_value, perturb_, random_state

_LARGE = 2**16  # entries of a tensor that is read when an operator asks for it
Example = tuple[tuple[Any, ...], dict[str, Any]]
ExampleInputs = Tensor | tuple[Any, ...] | list[Any]
ExampleKwargs = Mapping[str, Any] | list[Mapping[str, Any]] | None


class Probe:
    """A network without its weights, and inputs to run it on: enough to compare what two states compute.

    The module is a hollow copy on the CPU. Every run is in float64 (or in the best precision that the operators know,
    of which ``epsilon`` is the rounding), with constants for noise. The symmetries have to hold for ``others`` too: the
    same network with other example inputs, or in training mode.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, dict(kwargs)
        self.others: tuple[Probe, ...] = ()
        self.epsilon = torch.finfo(torch.float64).eps
        self._precision = torch.float64
        self._guarded, self._dead, self.gains = True, False, frozenset[str]()
        self._written = frozenset(n for n, _ in module.named_buffers(remove_duplicate=False))

    @classmethod
    def of(cls, model: nn.Module, example_inputs: ExampleInputs, example_kwargs: ExampleKwargs = None) -> Probe:
        """The hollow copy of a model, and its inputs in float64 (noise in place of constant ones)."""
        module, generator = hollow(model), torch.Generator().manual_seed(0)
        first, *more = (cls(module, *_in_double(e, generator)) for e in examples_of(example_inputs, example_kwargs))
        first.others = tuple(more)
        return first

    def trained(self, examples: Sequence[Example]) -> Probe:
        """The probe with others beside it: the network in training mode, on these examples."""
        if examples:
            module, generator = sharing(self.module).train(), torch.Generator().manual_seed(0)
            kept = tuple(p for p in self.others if not p.module.training)
            given = (_told_apart(_in_double(e, generator), generator) for e in examples)
            self.others = (*kept, *(Probe(module, *e) for e in given))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        return self  # nothing in it changes

    def drawn(self, generator: torch.Generator) -> Probe:
        """The same network with other numbers in its floating-point inputs."""
        return self._with(_redrawn((self.args, self.kwargs), generator))

    def blank(self) -> Probe:
        """The same network with zeros for inputs and no positive bias: behind a ReLU all units are dead, and equal."""
        zeros = tree_map_only(
            Tensor, lambda t: torch.zeros_like(t) if t.is_floating_point() else t, (self.args, self.kwargs)
        )
        probe = self._with(zeros)
        probe._dead = True
        return probe

    def folded(self, gains: Collection[str]) -> Probe:
        """The same network with ones in some of its weights: gains that are folded into what reads them."""
        probe = copy.copy(self)
        probe.gains, probe.others = frozenset(gains), tuple(p.folded(gains) for p in self.others)
        return probe

    def _with(self, example: Example) -> Probe:
        probe = copy.copy(self)
        probe.args, probe.kwargs = example
        probe.others = ()
        return probe

    def without_epsilons(self) -> Probe:
        """The same network with (almost) zero for every epsilon of a normalization: attributes, arguments, literals."""
        module = sharing(self.module)
        for part in module.modules():
            for key, value in vars(part).items():
                if "eps" in key and isinstance(value, float):
                    setattr(part, key, ALMOST_ZERO)
        probe = Probe(module, self.args, self.kwargs)
        probe._guarded, probe.gains = False, self.gains
        return probe

    def random_state(self, generator: torch.Generator, constants: Container[str]) -> dict[str, Tensor]:
        """Random weights for the network, see :func:`~.weights.random_state`."""
        state = random_state(self.module, generator, constants)
        for name in self.gains:
            state[name].fill_(1.0)
        if self._dead:
            for name, tensor in state.items():
                if name.rpartition(".")[2] == "bias" and tensor.is_floating_point():
                    tensor.copy_(-tensor.abs())
        return state

    def run(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors among the network's outputs for a state, of any precision, on any device; it is not changed."""
        try:
            return self._attempt(state)
        except SymmetryError:
            raise
        except Exception as error:
            first = error
        for precision in (torch.float32, torch.bfloat16) if self._precision == torch.float64 else ():
            self._precision = precision
            try:
                return self._attempt(state)
            except Exception:
                self._precision = torch.float64
        raise SymmetryError(
            f"the network does not run on the CPU, where symmetries are verified: {first}\nLikely cause: an operator "
            "that knows only another device (a fused kernel); choose the model's plain implementation of it."
        ) from first

    def run_perturbed(
        self, state: Mapping[str, Tensor], noise: float, generator: torch.Generator, rounding: Mapping[str, float]
    ) -> list[Tensor]:
        """The outputs for a copy of a state with relative noise on its weights, see :func:`~.weights.perturb_`."""
        if hasattr(state, "layouts"):
            return self.run(_Noisy(state, noise, generator, rounding))
        copies = {id(t): _wide(t) for t in state.values()}
        noisy = {name: copies[id(t)] for name, t in state.items()}
        perturb_(noisy, noise, generator, rounding)
        return self.run(noisy)

    def _read_later(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The large weights of a view of files, which are read operator by operator, with what stands for them."""
        if not hasattr(state, "layouts"):
            return {}
        own = self.module.state_dict(keep_vars=True)
        return {n: t for n, t in own.items() if n not in self._written and valueless(t) and t.numel() > _LARGE}

    def _attempt(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        precision = self._precision
        given: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}  # tied names stay tied
        kept: dict[int, str] = {}  # where tensors of the state itself lie, which nothing may write to
        later = self._read_later(state)
        kept |= {own.untyped_storage().data_ptr(): name for name, own in later.items()}
        now = {name: state[name] for name in state if name not in later}
        for name, tensor in now.items():
            if id(tensor) not in seen:
                own = tensor.detach().to(device="cpu", dtype=as_computed(tensor.dtype, precision))
                if own.layout == torch.strided and own.data_ptr() == tensor.data_ptr():
                    if name in self._written:
                        own = own.clone()
                    else:
                        kept[own.untyped_storage().data_ptr()] = name
                seen[id(tensor)] = own
            given[name] = seen[id(tensor)]
        for name, tensor in self.module.named_buffers(remove_duplicate=False):  # those that no state holds
            if name not in given and name not in later:
                given[name] = tensor.to(as_computed(tensor.dtype, precision), copy=True)
        args, kwargs = tree_map_only(
            Tensor, lambda t: t.to(as_computed(t.dtype, precision), copy=True), (self.args, self.kwargs)
        )

        def read(name: str) -> Tensor | None:
            own = state[name].detach() if name in later else None
            return None if own is None else own.to(device="cpu", dtype=as_computed(own.dtype, precision))

        exactly = Exactly(precision, kept, guarded=self._guarded, read=read if later else None)
        module = sharing(self.module)  # some keep what they computed from weights, or count their calls
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), exactly:
                torch.default_generator.manual_seed(0)  # that of the CPU, which alone is put back
                output = torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
        except WrittenTo as error:  # a parameter that the forward pass updates: run again on a copy of it
            self._written |= {error.name}
            return self._attempt(state)
        self.epsilon = max(self.epsilon, exactly.epsilon)
        return [t.clone() for t in tensors_of(output)]


class _Noisy(Views):
    """A copy of a view with relative noise on its weights, of which each tensor is made when it is asked for."""

    def __init__(
        self, state: Mapping[str, Tensor], noise: float, generator: torch.Generator, rounding: Mapping[str, float]
    ) -> None:
        self._held, self._noise, self._rounding = state, noise, rounding
        seeds = torch.randint(2**31, (len(state),), generator=generator, device="cpu")
        self._seeds, self.layouts = dict(zip(state, seeds.tolist(), strict=True)), layouts_of(state)

    def __getitem__(self, name: str) -> Tensor:
        noisy, generator = {name: _wide(self._held[name])}, torch.Generator().manual_seed(self._seeds[name])
        perturb_(noisy, self._noise, generator, self._rounding)
        return noisy[name]


def examples_of(example_inputs: ExampleInputs, example_kwargs: ExampleKwargs = None) -> list[Example]:
    """Positional and keyword arguments of each example, as :func:`discover_symmetries` takes them."""
    count = next((len(given) for given in (example_inputs, example_kwargs) if isinstance(given, list)), 1)
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs] * count
    named = example_kwargs if isinstance(example_kwargs, list) else [example_kwargs or {}] * count
    if len(named) != len(several) or not several:
        raise ValueError(f"{len(several)} example_inputs and {len(named)} example_kwargs; pass as many, at least one")
    return [(a if isinstance(a, tuple) else (a,), dict(k)) for a, k in zip(several, named, strict=True)]


def doubled(example: Example) -> Example:
    """The example twice along its first axis: batch norm trains on two samples at least."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.ndim else t, example)


def _in_double(example: Example, generator: torch.Generator) -> Example:
    """An example in float64 on the CPU, with noise in place of constant tensors (zeros, ones)."""

    def wide(tensor: Tensor) -> Tensor:
        if tensor.is_meta and is_continuous(tensor):
            drawn = torch.randn(tensor.shape, generator=generator, device="cpu")
            return drawn.to(as_computed(tensor.dtype, torch.float64))
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        own = kept_value(tensor)
        if own.layout != torch.strided or own.numel() < 2 or not is_continuous(own):
            return own
        constant = bool((own == own.flatten()[0]).all())
        return torch.randn(own.shape, generator=generator, dtype=own.dtype, device="cpu") if constant else own

    return tree_map_only(Tensor, wide, example)


def _redrawn(example: Example, generator: torch.Generator) -> Example:
    """Other numbers of the same mean and deviation in the floating-point tensors; masks stay as they are."""

    def draw(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()) or len(tensor.unique()) < 3:
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
        return tensor.mean() + tensor.std() * noise

    return tree_map_only(Tensor, draw, example)


def _told_apart(example: Example, generator: torch.Generator) -> Example:
    """Other numbers in the second half of a batch that repeats the first: batch norm leaves nothing of twins."""

    def halved(tensor: Tensor) -> Tensor:
        half = len(tensor) // 2 if tensor.ndim and tensor.layout == torch.strided else 0
        if not half or not torch.equal(tensor[:half], tensor[half:]):
            return tensor
        return torch.cat([tensor[:half], *_redrawn(((tensor[half:],), {}), generator)[0]])

    return tree_map_only(Tensor, halved, example)


def hollow(model: nn.Module, precision: torch.dtype | None = torch.float64) -> nn.Module:
    """A copy of a module on the CPU, in evaluation mode, whose weights have shapes but neither memory nor values.

    It is of a precision that is given, or of its own. Buffers that are no weights keep their values.
    """

    def computed(tensor: Tensor) -> torch.dtype:
        return tensor.dtype if precision is None else as_computed(tensor.dtype, precision)

    if switches(model) and not any(t.is_meta for t in model.state_dict().values()):
        model = copied(model)
        held = {n: t for n, t in model.state_dict(keep_vars=True).items() if not valueless(t)}
        before = {n: t.detach().clone() for n, t in held.items()}
        for training in (True, False):
            model.train(training)
            after = model.state_dict(keep_vars=True)
            changed = [n for n in before if n not in after or not torch.equal(before[n], after[n])]
            if changed:
                raise _changing(model, repr(changed[0]), "training" if training else "evaluation")
    made: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if is_continuous(tensor) and tensor.layout == torch.strided:
            empty = torch.zeros((), dtype=computed(tensor), device="cpu").expand(tensor.shape)
            made[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        elif tensor.is_meta and not tensor.is_floating_point() and tensor.numel() == 1:  # a counter
            made[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    for tensor in (*model.state_dict(keep_vars=True).values(), *model.parameters(), *model.buffers()):
        if id(tensor) not in made:
            value = kept_value(tensor, computed(tensor))
            made[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    light = copied(model, made)
    try:
        return light.train().eval()  # which empties what some modules keep of their weights
    except RuntimeError as error:
        raise _changing(model, "its weights", "training or evaluation") from error


def _changing(model: nn.Module, what: str, mode: str) -> SymmetryError:
    return SymmetryError(
        f"{type(model).__name__} changes {what} when it is switched to {mode} mode (an adapter that is merged into the "
        "weights, for example), so its state dict computes different functions in the two modes. Merge it for good, or "
        "switch the merging off, and discover the symmetries again."
    )


def _wide(tensor: Tensor) -> Tensor:
    """A copy in double precision, on the CPU; a dense one is contiguous."""
    layout = torch.contiguous_format if tensor.layout == torch.strided else torch.preserve_format
    return tensor.detach().to("cpu", as_computed(tensor.dtype, torch.float64), copy=True, memory_format=layout)


def tensors_of(nested: Any) -> list[Tensor]:
    """All tensors among the outputs of a network, dense, without their gradients' graph; numbers count as tensors."""
    if isinstance(nested, Tensor):
        return [(nested.to_dense() if nested.layout != torch.strided else nested).detach()]
    if isinstance(nested, (bool, int, float, complex)):
        wide = {float: torch.float64, complex: torch.complex128}.get(type(nested))
        return [torch.as_tensor(nested, dtype=wide, device="cpu")]
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        nested = [getattr(nested, field.name) for field in dataclasses.fields(nested)]
    if isinstance(nested, (list, tuple, set, frozenset)):
        return [t for item in nested for t in tensors_of(item)]
    return []
