"""Posterior samples: stacked states with a leading sample axis, and the folders of safetensors shards that hold them.

Every method writes the same files: members of an ensemble, HMC samples, snapshots of a run, draws from a Gaussian.
A store is a folder with one small, constant file ``store.json`` (architecture, method, seed) and any number of shards
``00000000-<token>.safetensors``. A shard holds stacked states, and its header the chain and step of each of them; it
is written under a temporary name and renamed, and no index is kept beside the shards, so nothing can go stale when a
run is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tu_symmetry.files import write_safetensors
from tu_symmetry.symmetry.states import require_state
from tu_symmetry.symmetry.states import unstack as unstack_states

__all__ = ["SampleFileError", "SampleRecord", "SampleStore", "load_state", "stack_states", "unstack_states"]

State = dict[str, Tensor]

_FORMAT = "tu_symmetry.samples"
_VERSION = "1"
_STORE = "store.json"
_SUFFIX = ".safetensors"


class SampleFileError(ValueError):
    """A file or folder that is truncated, foreign, or of another architecture; the message names it."""


class Layout(NamedTuple):
    """Shape and dtype of one tensor of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SampleRecord:
    """One sample of a store.

    Attributes:
        chain: number of the chain, run or ensemble member that the sample comes from.
        step: position in that chain (optimizer steps, or samples drawn).
        shard: the file.
        position: index along the shard's sample axis.
    """

    chain: int
    step: int
    shard: Path
    position: int


def stack_states(states: Sequence[Mapping[str, Tensor]]) -> State:
    """Stack states of one architecture along a new leading sample axis; ``unstack_states`` undoes it.

    Raises:
        ValueError: no states, or states whose names or shapes differ.
    """
    if not states:
        raise ValueError("no states to stack: the list is empty")
    first = layout_of(states[0])
    for i, state in enumerate(states[1:], start=1):
        _require_same(layout_of(state), first, f"states[{i}]", "states[0]")
    return {name: torch.stack([s[name] for s in states]) for name in first}


def layout_of(state: Mapping[str, Tensor], *, stacked: bool = False) -> dict[str, Layout]:
    """Shape and dtype of every tensor of a state; of a stack's single states with ``stacked``."""
    held = require_state(state, "state")
    return {name: Layout(tuple(t.shape[1:] if stacked else t.shape), t.dtype) for name, t in held.items()}


def load_state(
    path: str | os.PathLike[str], *, prefix: str = "", allow: Sequence[Any] = (), device: str | torch.device = "cpu"
) -> State:
    """Read one network's state dict from a checkpoint of any usual kind, without running code from it.

    Args:
        path: a ``.safetensors`` file, or anything that ``torch.save`` wrote: a state dict, or a dict (a Lightning
            checkpoint) that holds one under ``state_dict``.
        prefix: keep the names that start with it, and strip it (``"model."`` for the routines of TorchUncertainty).
        allow: classes that the checkpoint's hyperparameters may hold, see ``torch.serialization.safe_globals``.
        device: where to put the tensors.

    Raises:
        SampleFileError: no state dict in the file, a truncated or foreign file, or no name with that prefix.
    """
    path = Path(path)
    content: Any
    if path.suffix == _SUFFIX:
        try:
            content = load_file(path, device=str(device))
        except SafetensorError as error:
            raise SampleFileError(f"{path} is no safetensors file, or it is truncated ({error})") from error
    else:
        try:
            with torch.serialization.safe_globals(list(allow)):
                content = torch.load(path, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            raise SampleFileError(
                f"{path} cannot be read as weights only. If it is a checkpoint that you trust and the message below "
                f"names a class, pass allow=[that class]; else the file is foreign or damaged. torch said: {error}"
            ) from error
        except OSError:
            raise  # no such file, no right to read it
        except Exception as error:  # what a foreign file makes of the unpickler can be anything
            raise SampleFileError(
                f"{path} is no torch checkpoint, or it is truncated ({type(error).__name__}: {error})"
            ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        held = f"a dict with keys {sorted(map(str, content))[:6]}" if isinstance(content, Mapping) else type(content)
        raise SampleFileError(
            f"{path} holds {held}, not a state dict (names to tensors) nor a dict with one under 'state_dict'"
        )
    state = {str(name)[len(prefix) :]: t for name, t in content.items() if str(name).startswith(prefix)}
    if not state:
        raise SampleFileError(f"no name in {path} starts with {prefix!r}; it holds {sorted(map(str, content))[:6]} ...")
    return state


class SampleStore(Sequence[State]):
    """A folder of posterior samples of one architecture; read lazily, one state at a time.

    ``store[i]`` and iteration give single states, :meth:`stack` and :meth:`load` stacked ones. Samples stay in the
    order in which they were appended. Several processes may append to one store; each sees what was there when it
    opened it, and what it has appended itself.

    Example:
        >>> store = SampleStore.create(tmp / "hmc", architecture="MLP", method="hmc", seed=0)   # doctest: +SKIP
        >>> store.append(model.state_dict(), chain=0, step=100)                                 # doctest: +SKIP
        >>> stack = SampleStore.open(tmp / "hmc").load()                                        # doctest: +SKIP

    Attributes:
        folder: where the files are.
        metadata: architecture, method, seed and whatever else :meth:`create` was given.
        records: one :class:`SampleRecord` for each sample, in order.
        layout: name to shape and dtype of one state's tensors; None while the store is empty.
    """

    def __init__(self, folder: Path, metadata: dict[str, Any]) -> None:
        self.folder = folder
        self.metadata = metadata
        self.records: list[SampleRecord] = []
        self.layout: dict[str, Layout] | None = None
        self._next = 0

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        architecture: str,
        method: str,
        seed: int | None = None,
        **more: str | int | float | bool | None,
    ) -> SampleStore:
        """Make a new, empty store.

        Args:
            folder: must not exist, or be empty.
            architecture: name of the architecture.
            method: how the samples are made (``hmc``, ``deep_ensemble``, ``snapshots``, ...).
            seed: of the run.
            more: anything else worth keeping.

        Raises:
            FileExistsError: the folder holds something already.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} is there already and not empty; SampleStore.open({str(folder)!r}) appends to a store, "
                "another run belongs in another folder"
            )
        metadata = {"architecture": architecture, "method": method, "seed": seed, **more}
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir()
        content = {"format": _FORMAT, "version": _VERSION, "metadata": metadata}
        (temporary / _STORE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder)
        return cls(folder, metadata)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None) -> SampleStore:
        """Open a store; the index is rebuilt from the shards' headers, no weights are read.

        Args:
            folder: of a store.
            like: a state that the samples must agree with in names and shapes.

        Raises:
            SampleFileError: no store, a shard that is truncated or foreign, or of another architecture. Nothing is
                changed on disk.
        """
        folder = Path(folder)
        description = folder / _STORE
        try:
            content = json.loads(description.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SampleFileError(
                f"{folder} is no sample store: it has no {_STORE}. SampleStore.create makes one"
            ) from None
        except (ValueError, OSError) as error:
            raise SampleFileError(f"{description} cannot be read ({error})") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
            raise SampleFileError(f"{description} does not describe a sample store of format {_FORMAT} {_VERSION}")
        store = cls(folder, content["metadata"])
        for shard in sorted(folder.glob(f"*{_SUFFIX}")):
            store._read_header(shard)
        if like is not None and store.layout is not None:
            found = {n: e._replace(dtype=like[n].dtype) if n in like else e for n, e in store.layout.items()}
            _require_same(found, layout_of(like), str(folder), "the state that was given", SampleFileError)
        return store

    def append(
        self,
        states: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        *,
        chain: int | Sequence[int] = 0,
        step: int | Sequence[int],
    ) -> None:
        """Write samples as one new shard (whole or not at all).

        Args:
            states: one state where ``step`` is a number; a stack or a list of states where ``step`` is a sequence.
                Parameters and buffers of every dtype are kept as they are.
            chain: chain number, or one for each state.
            step: position in the chain, or one for each state. A pair (chain, step) is stored once only.

        Raises:
            ValueError: states of another architecture than the store's, NaN or infinite values, numbers of steps or
                chains that do not fit, or a pair that is there already. Nothing is written then.
        """
        if isinstance(step, int):
            if not isinstance(states, Mapping):
                raise ValueError("several states need a sequence of steps, one for each")
            stack = {name: t.detach().unsqueeze(0) for name, t in require_state(states, "states").items()}
            steps = [step]
        else:
            steps = [int(s) for s in step]
            stack = {
                n: t.detach() for n, t in (states if isinstance(states, Mapping) else stack_states(states)).items()
            }
        chains = [chain] * len(steps) if isinstance(chain, int) else [int(c) for c in chain]
        self._check(stack, chains, steps)
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "chain": json.dumps(chains),
            "step": json.dumps(steps),
            "metadata": json.dumps(self.metadata),
        }
        path = self.folder / f"{self._next:08d}-{secrets.token_hex(4)}{_SUFFIX}"
        write_safetensors(path, stack, header)
        self._add(path, chains, steps)
        self.layout = layout_of(stack, stacked=True)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        """The ``index``-th state; a list of states for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)}")
        return {name: t[0] for name, t in self.stack([int(index)]).items()}

    def __iter__(self) -> Iterator[State]:
        for shard, indices in self._by_shard(range(len(self))):
            with _open(shard) as file:
                for i in indices:
                    position = self.records[i].position
                    yield {n: file.get_slice(n)[position : position + 1][0].clone() for n in file.keys()}  # noqa: SIM118

    def stack(self, indices: Sequence[int] | Tensor, *, device: str | torch.device = "cpu") -> State:
        """Chosen samples as a stack ``[len(indices), ...]``, in the order of the indices."""
        wanted = [int(i) for i in indices]
        if self.layout is None or not wanted:
            raise ValueError(f"nothing to stack: the store {self.folder} has {len(self)} samples, asked for {wanted}")
        wanted = [range(len(self))[i] for i in wanted]
        result = {n: torch.empty((len(wanted), *e.shape), dtype=e.dtype, device=device) for n, e in self.layout.items()}
        places: dict[int, list[int]] = defaultdict(list)
        for place, i in enumerate(wanted):
            places[i].append(place)
        for shard, indices_ in self._by_shard(sorted(places)):
            with _open(shard) as file:
                for name, target in result.items():
                    rows = file.get_slice(name)
                    for i in indices_:
                        position = self.records[i].position
                        target[places[i]] = rows[position : position + 1].to(device)
        return result

    def load(self, *, device: str | torch.device = "cpu") -> State:
        """All samples as a stack."""
        return self.stack(range(len(self)), device=device)

    @property
    def chains(self) -> list[int]:
        """Chain of every sample."""
        return [r.chain for r in self.records]

    @property
    def steps(self) -> list[int]:
        """Step of every sample."""
        return [r.step for r in self.records]

    def __repr__(self) -> str:
        return f"SampleStore({str(self.folder)!r}, {len(self)} samples, {self.metadata})"

    def _by_shard(self, indices: Sequence[int]) -> Iterator[tuple[Path, list[int]]]:
        """Consecutive indices grouped by the file that holds them."""
        group: list[int] = []
        for i in indices:
            if group and self.records[i].shard != self.records[group[0]].shard:
                yield self.records[group[0]].shard, group
                group = []
            group.append(i)
        if group:
            yield self.records[group[0]].shard, group

    def _read_header(self, shard: Path) -> None:
        with _open(shard) as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT or header.get("version") != _VERSION:
                raise SampleFileError(
                    f"{shard} was not written by a sample store (format {header.get('format')!r}); move it elsewhere"
                )
            chains, steps = json.loads(header["chain"]), json.loads(header["step"])
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            layout = {n: Layout(tuple(s.get_shape()[1:]), s[:0].dtype) for n, s in slices.items()}
        if self.layout is not None:
            _require_same(layout, self.layout, str(shard), "the shards before it", SampleFileError)
        self.layout = layout
        self._add(shard, chains, steps)

    def _add(self, shard: Path, chains: Sequence[int], steps: Sequence[int]) -> None:
        self.records += [SampleRecord(c, s, shard, i) for i, (c, s) in enumerate(zip(chains, steps, strict=True))]
        self._next = int(shard.name.split("-")[0]) + 1

    def _check(self, stack: Mapping[str, Tensor], chains: list[int], steps: list[int]) -> None:
        if not stack:
            raise ValueError("a state without tensors: pass model.state_dict()")
        if not steps or len(chains) != len(steps):
            raise ValueError(f"{len(chains)} chains for {len(steps)} steps; there must be one of each for every state")
        for name, tensor in stack.items():
            if tensor.ndim == 0 or len(tensor) != len(steps):
                raise ValueError(
                    f"{len(steps)} steps, but {name!r} has shape {tuple(tensor.shape)}: a stack's leading axis must "
                    "have one entry for each step"
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{name!r} holds NaN or infinite values: the run has diverged, and that is no posterior sample"
                )
        if self.layout is not None:
            _require_same(layout_of(stack, stacked=True), self.layout, "the state", f"the store {self.folder}")
        pairs = list(zip(chains, steps, strict=True))
        there = sorted({(r.chain, r.step) for r in self.records} & set(pairs))
        if there or len(set(pairs)) < len(pairs):
            raise ValueError(f"(chain, step) {there[:3] or pairs[:3]} would be twice in {self.folder}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise SampleFileError(
            f"{path} is truncated or no safetensors file ({error}); restore it, or move it out of the folder"
        ) from error


def _require_same(
    found: Mapping[str, Layout],
    expected: Mapping[str, Layout],
    what: str,
    other: str,
    error: type[ValueError] = ValueError,
) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise error(f"{what} is of another architecture than {other}: missing {missing[:6]}, unexpected {extra[:6]}")
    for name, entry in expected.items():
        if found[name] != entry:
            raise error(
                f"{what} is of another architecture than {other}: {name!r} is {found[name].dtype} of shape "
                f"{found[name].shape}, expected {entry.dtype} of {entry.shape}"
            )
