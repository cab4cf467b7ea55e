"""Posterior samples: a folder of safetensors shards with stacked states ``[samples, ...]`` of one architecture.

A shard is written whole or not at all; then its name and digest go to the end of ``shards.log``. One that is not in the
log is no damage (a run was killed between the two writes); one that is gone, copied, foreign or changed is an error.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tu_symmetry.files import (
    FileError,
    check_file,
    new_folder,
    open_safetensors,
    read_header,
    read_json,
    write_json,
    write_safetensors,
)
from tu_symmetry.states import Layout, SampleFileError, State, layout_of, require_same, require_state, stack_states

_FORMAT, _VERSION = "tu_symmetry.samples", "1"
_STORE = "store.json"
_LOG = "shards.log"
_SUFFIX = ".safetensors"
_DISCARDED = "discarded"


class SampleRecord(NamedTuple):
    """One sample: its chain (or run, or ensemble member), its step in it, and its place along the axis of a shard."""

    chain: int
    step: int
    shard: Path
    position: int


class SampleStore(Sequence[State]):
    """A folder of posterior samples of one architecture; read lazily, one state at a time.

    ``store[i]`` and iteration give single states, :meth:`stack` and :meth:`load` stacked ones, in the order in which
    they were appended. Several processes may append to one store; each sees what was there when it opened it, and its
    own.

    Attributes:
        metadata: architecture, method, seed and whatever else :meth:`create` was given.
        records: one :class:`SampleRecord` for each sample, in order.
        layout: name to shape and dtype of one state's tensors; None while the store is empty.
    """

    def __init__(self, folder: Path, metadata: dict[str, Any], store: str) -> None:
        self.folder = folder
        self.metadata = metadata
        self.records: list[SampleRecord] = []
        self.layout: dict[str, Layout] | None = None
        self._store = store  # tells this store from others
        self._next = 0
        self._discarded: set[str] = set()  # names of shards
        self._checked: dict[Path, tuple[int, int]] = {}  # shard to time and size of what was compared with its seal

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
        """Make a new, empty store, in a folder that is empty or not there.

        ``method`` says how the samples are made (``hmc``, ``deep_ensemble``, ``snapshots``, ...), and ``more`` whatever
        else is worth keeping.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} is not empty: open a store to append to it, or take another folder")
        metadata = {"architecture": architecture, "method": method, "seed": seed, **more}
        folder.parent.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        content = {"format": _FORMAT, "version": _VERSION, "metadata": metadata, "store": token}
        with new_folder(folder) as temporary:
            write_json(temporary / _STORE, content, seal=True)
            (temporary / _LOG).touch()
        return cls(folder, metadata, token)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None) -> SampleStore:
        """Open a store; the index is rebuilt from the shards' headers, no weights are read.

        Raises:
            SampleFileError: no store; a shard that is gone, truncated, foreign or a copy, or of another store or
                architecture (than ``like``). Reading its states raises it for a shard whose content was changed.
        """
        folder = Path(folder)
        description = folder / _STORE
        try:
            content, sealed = read_json(description)
        except FileNotFoundError:
            raise SampleFileError(f"{folder} is no sample store: it has no {_STORE}") from None
        except (OSError, FileError) as error:
            raise SampleFileError(f"{description} cannot be read: {error}") from error
        metadata, token = content.get("metadata"), content.get("store")
        known = content.get("format") == _FORMAT and content.get("version") == _VERSION
        if not known or sealed is None or not isinstance(metadata, dict) or not isinstance(token, str):
            raise SampleFileError(
                f"{description} describes no sample store of format {_FORMAT} {_VERSION}, or has no digest; restore it"
            )
        store = cls(folder, metadata, token)
        logged = store._read_log()
        shards = [p for p in sorted(folder.glob(f"*{_SUFFIX}")) if p.name not in store._discarded]
        if gone := sorted(logged.keys() - {shard.name for shard in shards}):
            raise SampleFileError(
                f"{folder / gone[0]} is gone ({len(gone)} of {len(logged)} shards): restore it, or take its line out "
                f"of {folder / _LOG}"
            )
        for shard in shards:
            store._read_header(shard, logged)
        if like is not None and store.layout is not None:
            found = {n: e._replace(dtype=like[n].dtype) if n in like else e for n, e in store.layout.items()}
            require_same(found, layout_of(like), str(folder), "the state that was given", SampleFileError)
        return store

    @classmethod
    def open_if_there(
        cls, folder: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None
    ) -> SampleStore | None:
        """:meth:`open` where the folder holds something, else None."""
        there = Path(folder).is_dir() and any(Path(folder).iterdir())
        return cls.open(folder, like=like) if there else None

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
            chain: chain number, or one for each state.
            step: position in the chain, or one for each state. A pair (chain, step) is stored once only.

        Raises:
            ValueError: states of another architecture than the store's, NaN or infinite values, steps or chains that do
                not fit, or a pair that is there already. Nothing is written then.
        """
        if isinstance(step, int):
            if not isinstance(states, Mapping):
                raise ValueError("several states need a sequence of steps, one for each")
            states, step = [require_state(states, "states")], [step]
        steps = [int(s) for s in step]
        stack = states if isinstance(states, Mapping) else stack_states(states)
        stack = {name: t.detach() for name, t in stack.items()}
        chains = [chain] * len(steps) if isinstance(chain, int) else [int(c) for c in chain]
        self._check(stack, chains, steps)
        path = self.folder / f"{self._next:08d}-{secrets.token_hex(4)}{_SUFFIX}"
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "chain": json.dumps(chains),
            "step": json.dumps(steps),
            "metadata": json.dumps(self.metadata),
            "file": path.name,
            "store": self._store,
        }
        write_safetensors(path, stack, header)
        self._log(f"{path.name} {read_header(path).digest}")
        self._add(path, chains, steps)
        self.layout = layout_of(stack, stacked=True)

    def discard(self, chains: Collection[int], *, after: int = -1) -> int:
        """Take back the samples of chains beyond step ``after``, whole shards of them; returns how many there were."""
        beyond = [r for r in self.records if r.chain in chains and r.step > after]
        shards = {r.shard for r in beyond}
        if len(beyond) < sum(r.shard in shards for r in self.records):
            raise ValueError(
                f"{self.folder} holds samples of chains {sorted(chains)} beyond step {after} in one file with others "
                f"({min(shards).name}), so that they cannot be taken back: take another folder"
            )
        for shard in sorted(shards):
            self._log(f"{shard.name} {_DISCARDED}")
            self._discarded.add(shard.name)
        for name in self._discarded:  # of an earlier call that was killed too
            (self.folder / name).unlink(missing_ok=True)
        self.records = [r for r in self.records if r.shard not in shards]
        if not self.records:
            self.layout = None
        return len(beyond)

    def mark(self, chain: int, run: str, *, done: bool = False) -> None:
        """Write the fingerprint of the run that stores a chain (of several, the first), and whether it has ended."""
        write_json(self.folder / f"run-{chain}.json", {"run": run, "done": done}, seal=True)

    def marked(self, chain: int) -> tuple[str | None, bool]:
        """What :meth:`mark` wrote last; no run where nothing was written of the chain."""
        try:
            said = read_json(self.folder / f"run-{chain}.json")[0]
            return said["run"], said["done"]
        except FileNotFoundError:
            return None, False
        except (FileError, KeyError) as error:
            raise SampleFileError(
                f"{self.folder}/run-{chain}.json is damaged ({error}); remove it, and the chain counts as another run's"
            ) from error

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        """The ``index``-th state."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)}")
        return {name: t[0] for name, t in self.stack([int(index)]).items()}

    def stack(self, indices: Sequence[int], *, device: str | torch.device = "cpu") -> State:
        """Chosen samples as a stack ``[len(indices), ...]``, made in main memory and moved tensor by tensor."""
        if self.layout is None or not len(indices):
            raise ValueError(f"nothing to stack: the store {self.folder} has {len(self)} samples, asked for {indices}")
        result = {n: torch.empty((len(indices), *e.shape), dtype=e.dtype, device="cpu") for n, e in self.layout.items()}
        rows: dict[Path, list[tuple[int, int]]] = defaultdict(list)  # of each shard, the rows of the result and its own
        for place, i in enumerate(indices):
            rows[self.records[i].shard].append((place, self.records[i].position))
        for shard, places in rows.items():
            with self._open(shard) as file:
                for name, target in result.items():
                    held = file.get_slice(name)
                    for place, position in places:
                        target[place] = held[position : position + 1][0]
        return {name: result.pop(name).to(device) for name in self.layout}

    def tensor(self, index: int, name: str) -> Tensor:
        """One tensor of one sample; of the file only its bytes are read (and the whole once, to compare its digest)."""
        record = self.records[index]
        if self.layout is None or name not in self.layout:
            raise KeyError(f"{self.folder} holds no {name!r}; its tensors are {sorted(self.layout or ())[:8]}")
        with self._open(record.shard) as file:
            row: Tensor = file.get_slice(name)[record.position : record.position + 1][0]
            return row.clone()  # aligned

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

    def _read_header(self, shard: Path, logged: Mapping[str, str]) -> None:
        """Take a shard into the index; everything is checked but the bytes of its weights."""
        try:
            header = read_header(shard)
        except FileError as error:
            raise SampleFileError(f"{error}; restore it, or move it away, and its line out of {_LOG}") from error
        said = header.metadata
        try:
            chains, steps = ([int(number) for number in json.loads(said[key])] for key in ("chain", "step"))
            lengths = {shape[0] for shape, _ in header.layout.values()} | {len(chains), len(steps)}
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            chains, steps, lengths = [], [], set()
        there = {(r.chain, r.step) for r in self.records}
        wrong = {  # the first that is so
            "was not written by a sample store": (said.get("format"), said.get("version")) != (_FORMAT, _VERSION),
            f"is a copy of {said.get('file')}, or was renamed": said.get("file") != shard.name,
            "carries no digest, so it was not written into this store": header.digest is None,
            f"belongs to another store than {self.folder}": said.get("store") != self._store,
            f"was replaced or damaged: {_LOG} has another digest for it": (
                logged.get(shard.name, header.digest) != header.digest
            ),
            "is damaged: its header has no chain and step for each of its states": len(lengths) != 1,
            "holds samples that another shard holds too": not there.isdisjoint(zip(chains, steps, strict=False)),
        }
        if what := next((what for what, so in wrong.items() if so), None):
            raise SampleFileError(f"{shard} {what}; restore it, or move it out of the folder")
        layout = {name: Layout(shape[1:], dtype) for name, (shape, dtype) in header.layout.items()}
        if self.layout is not None:
            require_same(layout, self.layout, str(shard), "the shards before it", SampleFileError)
        self.layout = layout
        self._add(shard, chains, steps)

    def _read_log(self) -> dict[str, str]:
        """Shards that were written, with their digests."""
        path = self.folder / _LOG
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            raise SampleFileError(f"{path} is gone; restore it, or make an empty one if all shards are there") from None
        logged: dict[str, str] = {}
        # Each entry is written as "\nNAME DIGEST\n", so an empty line stands before and after it. The last line, and
        # one that another follows at once, are what a killed run has not written out; its shard is there all the same.
        for line, following in pairwise(lines):
            name, _, digest = line.decode("ascii", "replace").partition(" ")
            if not line or following:
                continue
            if not name.endswith(_SUFFIX) or (digest != _DISCARDED and len(digest) != 64):
                raise SampleFileError(f"{path} is damaged at {line[:40]!r}; restore it")
            if digest == _DISCARDED:
                self._discarded.add(name)
                logged.pop(name, None)
            else:
                logged[name] = digest
        return logged

    def _log(self, entry: str) -> None:
        """One write to the end of the file, so that writers at the same time do not mix their lines."""
        with (self.folder / _LOG).open("ab", buffering=0) as file:
            file.write(f"\n{entry}\n".encode())

    def _open(self, shard: Path) -> Any:
        """A shard to read states from; its content is compared with its seal when it is read for the first time."""
        found = shard.stat()
        try:
            if self._checked.get(shard) != (found.st_mtime_ns, found.st_size):
                check_file(shard, finite=True)
                self._checked[shard] = found.st_mtime_ns, found.st_size
            return open_safetensors(shard)
        except FileError as error:
            raise SampleFileError(str(error)) from error

    def _add(self, shard: Path, chains: Sequence[int], steps: Sequence[int]) -> None:
        self.records += [SampleRecord(c, s, shard, i) for i, (c, s) in enumerate(zip(chains, steps, strict=True))]
        self._next = int(shard.name.split("-")[0]) + 1

    def _check(self, stack: Mapping[str, Tensor], chains: list[int], steps: list[int]) -> None:
        if not stack:
            raise ValueError("a state without tensors: pass model.state_dict()")
        if not steps or len(chains) != len(steps):
            raise ValueError(f"{len(chains)} chains for {len(steps)} steps; there must be one of each for every state")
        for name, tensor in stack.items():
            if tensor.shape[:1] != (len(steps),):
                raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, not one entry for each of {steps}")
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"{name!r} holds NaN or infinite values: a run that has diverged gives no samples")
        if self.layout is not None:
            require_same(layout_of(stack, stacked=True), self.layout, "the state", f"the store {self.folder}")
        pairs = list(zip(chains, steps, strict=True))
        there = sorted({(r.chain, r.step) for r in self.records} & set(pairs))
        if there or len(set(pairs)) < len(pairs):
            raise ValueError(f"(chain, step) {there[:3] or pairs[:3]} would be twice in {self.folder}")
