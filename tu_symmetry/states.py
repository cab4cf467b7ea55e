"""State dicts: checked as users hand them in, stacked, averaged, and read from files.

A state may hold integers, numpy arrays or lists. Every public function that takes states checks them here first, since
torch's own error is raised deep inside a computation, or not at all.
"""

from __future__ import annotations

import copy
import math
import numbers
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tu_symmetry.files import FileError, TensorFile, Views, layouts_of, read_archive
from tu_symmetry.modules import is_source, state_of, states_of
from tu_symmetry.remote import is_remote, local_copies
from tu_symmetry.shards import INDEX, TensorFolder, shards_of

State = dict[str, Tensor]
States = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]  # a stack, or a list
_SUFFIX = ".safetensors"
_EXPANDED, _FREE = 16, 1 << 24  # how much larger than their file tensors may be, and bytes that any file may have
_HELD = 5 << 28  # bytes of a network that is read at once
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SymmetryError(RuntimeError):
    """A symmetry that does not hold, or weights that do not belong to the graph; the message names the culprit."""


class SymmetryWarning(UserWarning):
    """Symmetries were claimed that do not hold, and were left out; the message names them."""


class SampleFileError(FileError):
    """A file or folder that is truncated, changed, foreign, or of another architecture; the message names it."""


@contextmanager
def _named() -> Iterator[None]:
    """Errors of files as errors of samples."""
    try:
        yield
    except FileError as error:
        raise SampleFileError(str(error)) from error


class Layout(NamedTuple):
    """Shape and dtype of one tensor of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def as_given(given: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> State:
    """Tensors as a state of the type of another one, with its ``_metadata``: the versions of the network's modules.

    A view of a state says by an attribute ``as_given`` of what.
    """
    given = getattr(given, "as_given", given)
    metadata = getattr(given, "_metadata", None)
    if isinstance(given, dict):
        made: State = copy.copy(given)
        made.clear()
    else:
        made = {} if metadata is None else OrderedDict()
    made.update(tensors)
    if isinstance(made, OrderedDict) and metadata is not None:
        made._metadata = copy.copy(metadata)  # type: ignore[attr-defined]
    return made


def kind_of(dtype: torch.dtype) -> str:
    """The kind of number of a dtype: ``"real"``, ``"complex"``, ``"integer"``, ``"boolean"``, or its own name."""
    if dtype in _REAL:
        return "real"
    if dtype.is_complex:
        return "complex"
    if dtype == torch.bool:
        return "boolean"
    coarse = dtype.is_floating_point or str(dtype).startswith(("torch.q", "torch.float"))
    return str(dtype) if coarse else "integer"


def check_tensor(value: Any, what: str, kind: str | None = None, *, values: bool = True) -> Tensor:
    """A tensor that can be computed with, or an error that calls it ``what`` and says what it is instead.

    ``kind`` is that of the network's own tensor, see :func:`kind_of`, None for any; in the place of a counter or a mask
    any kind will do but complex. A tensor on the meta device has no ``values``.
    """
    if not isinstance(value, Tensor):
        own = type(value)
        full = own.__name__ if own.__module__ == "builtins" else f"{own.__module__}.{own.__name__}"
        kept = f" of {value.dtype}" if hasattr(value, "dtype") else ""
        raise SymmetryError(f"{what} is a {full}{kept}, not a tensor; convert it with torch.as_tensor(...)")
    if value.layout != torch.strided or value.is_quantized:
        how = "dequantize" if value.is_quantized else "to_dense"
        raise SymmetryError(
            f"{what} is a {value.dtype} tensor of layout {value.layout}, and only dense tensors can be used; "
            f"convert it with .{how}()"
        )
    if values and value.is_meta:
        raise SymmetryError(f"{what} is on the meta device, where tensors have no values; load the weights first")
    found = kind_of(value.dtype)
    counter = ("integer", "boolean", "real")
    usable = {None: (*counter, "complex"), "integer": counter, "boolean": counter}
    if found == kind or found in usable.get(kind, ()):
        return value
    remedies = {"complex": "pass its real part (.real)", "real": "convert it with .to(torch.complex64)"}
    remedy = remedies.get(found, "pass the weights themselves: dequantize them, or convert them with .float()")
    raise SymmetryError(
        f"{what} is of {value.dtype}, but the network's own tensor holds {kind or 'real'} numbers; {remedy}"
    )


def check_number(value: Any, name: str) -> None:
    """Refuse what is no number (a text, a truth value) with a TypeError."""
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        remedy = ": write it without quotes" if isinstance(value, str) else ""
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}){remedy}")


def require_state(state: Any, name: str, like: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
    """A state dict of tensors, or an error that says what it is instead.

    Tensors have to be of the same kinds as those of ``like``, a state of the same network, if it is given.

    Raises:
        TypeError: not a mapping of names to tensors.
        SymmetryError: values that are no tensors, or of another kind than the network's.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} is a {type(state).__name__}, not a state dict; for a module pass module.state_dict()")
    for key, value in state.items():
        own = None if like is None else like.get(key)
        check_tensor(value, f"{name}[{key!r}]", kind_of(own.dtype) if isinstance(own, Tensor) else None)
    return state


def unstack(states: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor] | nn.Module] | nn.Module) -> list[State]:
    """A stack with a leading sample axis, a sequence of states, or a routine's networks, as a list of states (views).

    A LightningModule stands for the network that it has trained, one with a deep ensemble of TorchUncertainty (or the
    ensemble itself) for all members; in a sequence each has to have a single one.

    Raises:
        TypeError: members that are not state dicts.
        ValueError: tensors without a common leading axis; a routine of which it is not clear which network is meant.
    """
    if is_source(states):
        assert isinstance(states, nn.Module)
        return states_of(states, "states")
    if isinstance(states, Mapping):
        require_state(states, "states")
        counts = {name: t.shape[0] if t.ndim else None for name, t in states.items()}
        if not counts or None in counts.values() or len(set(counts.values())) != 1:
            raise ValueError(
                f"a stack of states needs the same leading sample axis on every tensor, got leading sizes {counts}; "
                "pass a list of state dicts, or stack them with torch.stack for each name"
            )
        return [as_given(states, {name: t[k] for name, t in states.items()}) for k in range(sample_count(states))]
    if not isinstance(states, Iterable):
        raise TypeError(f"states is a {type(states).__name__}, not a list of state dicts or a stack of states")
    return [read_state(s, f"states[{k}]") for k, s in enumerate(states)]


def read_state(network: Any, name: str) -> State:
    """One network's state dict, from a state dict or from the routine that has trained it, see :func:`unstack`."""
    state = require_state(state_of(network, name) if is_source(network) else network, name)
    return as_given(state, state)


def stack_states(states: Sequence[Mapping[str, Tensor]]) -> State:
    """Stack states of one architecture along a new leading sample axis."""
    if not states:
        raise ValueError("no states to stack: the list is empty")
    first = layout_of(states[0])
    for i, state in enumerate(states[1:], start=1):
        require_same(layout_of(state), first, f"states[{i}]", "states[0]")
    return as_given(states[0], {name: torch.stack([s[name] for s in states]) for name in first})


def as_stack(states: Any) -> Any:
    """A list of states as a stack; anything else, a stack among it, as it is."""
    return stack_states(states) if isinstance(states, (list, tuple)) else states


def layout_of(state: Mapping[str, Tensor], *, stacked: bool = False) -> dict[str, Layout]:
    """Shape and dtype of every tensor of a state; of a stack's single states with ``stacked``."""
    held = require_state(state, "state")
    return {name: Layout(tuple(t.shape[1:] if stacked else t.shape), t.dtype) for name, t in held.items()}


def mean_state(states: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean network of a sequence or a stack: mean of floating-point tensors, other tensors from the first."""
    members = unstack(states)
    if not members:
        raise ValueError("there is no network to take a mean of: the list of states is empty")
    for k, member in enumerate(members[1:], 1):
        require_alike(member, members[0], f"states[{k}]", "states[0]")
    mean = {
        name: _mean([s[name] for s in members]) if t.is_floating_point() or t.is_complex() else t.clone()
        for name, t in members[0].items()
    }
    return as_given(members[0], mean)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, also where the sum leaves the range of the dtype."""
    stacked = torch.stack(list(tensors))
    mean = stacked.mean(0)
    return mean if torch.isfinite(mean).all() else (stacked / len(tensors)).sum(0)


def require_alike(state: Mapping[str, Tensor], like: Mapping[str, Tensor], name: str, like_name: str) -> None:
    """Refuse states of two architectures, or with numbers of two kinds under one name; precisions may differ."""
    require_state(state, name, like=like)
    require_state(like, like_name, like=state)
    first = layout_of(like)
    layout = {n: e._replace(dtype=first[n].dtype) if n in first else e for n, e in layout_of(state).items()}
    require_same(layout, first, name, like_name)


def sample_count(states: Mapping[str, Tensor]) -> int:
    """Number of networks in a stack."""
    return len(next(iter(states.values())))


def evenly(count: int, wanted: int | None = None) -> list[int]:
    """Indices of ``wanted`` evenly spaced ones out of ``count`` (all where there are no more), both ends included."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64, device="cpu").round().long().tolist()


def require_same(
    found: Mapping[str, Layout],
    expected: Mapping[str, Layout],
    what: str,
    other: str,
    error: type[ValueError] = ValueError,
) -> None:
    """Refuse states whose names, shapes or dtypes differ, by raising ``error`` with the first that does."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise error(f"{what} is of another architecture than {other}: missing {missing[:6]}, unexpected {extra[:6]}")
    for name, entry in expected.items():
        if found[name] != entry:
            raise error(
                f"{what} is of another architecture than {other}: {name!r} is {found[name].dtype} of shape "
                f"{found[name].shape}, expected {entry.dtype} of {entry.shape}"
            )


def load_state(path: str | os.PathLike[str] | nn.Module, *, prefix: str = "") -> State:
    """Read one network's state dict from a checkpoint of any usual kind, without running code from it.

    Args:
        path: a ``.safetensors`` file, or anything that ``torch.save`` wrote: a state dict, or a dict (a Lightning
            checkpoint) that holds one under ``state_dict``; or the index (``.safetensors.index.json``) of a network
            that is cut into several files; or a folder of ``torch.distributed.checkpoint``, whose sharded tensors come
            out whole and whose optimizers are left out; or the URL of one of these (``s3://``). Or the LightningModule
            that has trained it (a routine of TorchUncertainty): a copy of its network's weights.
        prefix: keep the names that start with it, and strip it (``"model."`` for the routines of TorchUncertainty).

    Raises:
        SampleFileError: no state dict in the file, a truncated or foreign file, tensors without ordinary data (sparse,
            meta, quantized), or no name with that prefix.
        ValueError: a LightningModule with several networks.
    """
    if isinstance(path, nn.Module):
        held = read_state(path, "the routine")
        opened: Mapping[str, Tensor] = as_given(held, {name: t.clone() for name, t in held.items()})
        where = f"the {type(path).__name__}'s network, whose names have no prefix,"
    else:
        where = str(path)
        with _named():
            opened = _open(path)
    found = _renamed(opened, prefix)
    if not found:
        raise SampleFileError(f"no name in {where} starts with {prefix!r}; it holds {sorted(map(str, opened))[:6]} ...")
    return as_given(found, dict(found))


def open_state(path: str | os.PathLike[str], *, prefix: str = "") -> Mapping[str, Tensor]:
    """As :func:`load_state`, but each tensor of safetensors files and of folders is read when it is asked for.

    A prefix is taken off where there is any name with it.
    """
    with _named():
        opened = _open(path)
    return _renamed(opened, prefix) or _renamed(opened, "")


def reads_singly(network: Any) -> bool:
    """Whether :func:`open_state` reads a network's tensors when they are asked for, and not all of them at once."""
    path = Path(network) if isinstance(network, (str, os.PathLike)) else None
    return path is not None and (path.suffix == _SUFFIX or path.name.endswith(INDEX) or path.is_dir())


def read_once(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state, read at once if it is small: what asks for its tensors many times does not read them each time."""
    layouts = getattr(state, "layouts", None)
    if layouts is None or sum(math.prod(shape) * dtype.itemsize for shape, dtype in layouts.values()) > _HELD:
        return state
    return as_given(state, dict(state))


class _View(Views):
    """Tensors of other mappings under names of its own, each read when it is asked for."""

    def __init__(self, held: Mapping[str, tuple[Mapping[str, Tensor], str]], given: State) -> None:
        self._held, self.as_given = held, given
        every = {id(source): layouts_of(source) for source, _ in held.values()}
        self.layouts = {name: every[id(source)][own] for name, (source, own) in held.items()}

    def __getitem__(self, name: str) -> Tensor:
        source, own = self._held[name]
        with _named():
            return source[own]


def _renamed(state: Mapping[str, Tensor], prefix: str) -> _View:
    """The tensors whose names start with a prefix, under the rest of their names; the versions of modules alike."""
    given = as_given(state, {})
    metadata = getattr(given, "_metadata", None)
    if prefix and isinstance(metadata, Mapping):  # the module `model` itself, below `model.`, gets the name ""
        below = {f"{name}."[len(prefix) : -1]: v for name, v in metadata.items() if f"{name}.".startswith(prefix)}
        given._metadata = OrderedDict(below)  # type: ignore[attr-defined]
    return _View({str(n)[len(prefix) :]: (state, n) for n in state if str(n).startswith(prefix)}, given)


def _open(source: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The tensors of a file, a folder or an index; those of ``torch.save`` are read now, others when asked for."""
    found = local_copies(str(source)) if is_remote(source) else [Path(source)]
    if len(found) != 1:
        raise FileError(f"{source} stands for {len(found)} networks; name one")
    path = found[0]
    if path.suffix == _SUFFIX:
        return TensorFile(path)
    if path.is_dir():
        return TensorFolder(path)
    if not path.name.endswith(INDEX):
        return _torch_state(path)
    files = shards_of(path)
    parts = {file: _open(file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in parts[file]:
            raise SampleFileError(f"{path} says that {file.name} holds {name!r}, and it does not")
    given = as_given(next(iter(parts.values())), {})
    return _View({name: (parts[file], name) for name, file in files.items()}, given)


def _torch_state(path: Path) -> State:
    """The state dict in a file of ``torch.save``, or under ``state_dict`` in it."""
    with path.open("rb") as file:
        content = read_archive(file, path)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        what = f"a dict with keys {sorted(map(str, content))[:6]}" if isinstance(content, Mapping) else type(content)
        raise SampleFileError(
            f"{path} holds {what}, not a state dict (names to tensors) nor a dict with one under 'state_dict'"
        )
    for name, t in content.items():
        if t.layout != torch.strided or t.is_meta or t.is_quantized or t.is_nested:
            kind = "no data (a meta tensor)" if t.is_meta else f"a {str(t.layout).removeprefix('torch.')} tensor"
            kind = "a quantized tensor" if t.is_quantized else kind
            raise SampleFileError(f"{path} holds {kind} under {str(name)!r}; save the network with dense weights")
    _require_size(path, content)
    return as_given(content, content)


def _require_size(path: Path, state: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are a few numbers of the file, repeated: a copy of one could fill the memory."""
    size = sum({(t.data_ptr(), t.shape, t.stride()): t.numel() * t.element_size() for t in state.values()}.values())
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}.values())
    file = os.stat(path).st_size
    if held > file or size > max(_FREE, _EXPANDED * file):
        raise SampleFileError(
            f"{path} has {file} bytes, and its tensors would take {max(held, size)}: they repeat a few numbers, or are "
            "damaged; if you trust it, load it with torch.load and save contiguous copies"
        )
