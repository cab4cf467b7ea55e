"""Posterior samples: stacked states with a leading sample axis, and the folders of safetensors shards that hold them.

A store is a folder with one small, constant file ``store.json`` (architecture, method, seed) and any number of shards
``00000000-<token>.safetensors``. A shard holds stacked states, and its header the chain and step of each of them; it
is written under a temporary name and renamed. After it, its name and digest go to the end of ``shards.log``.

What cannot happen in silence: a shard that was changed does not have its digest (see :mod:`tu_symmetry.files`; checked
when its first state is read, so opening stays quick), a copy does not have the name it was written under, one of
another store does not name this store, and one that was deleted or replaced stands in the log with its digest. A shard
that is not in the log is no damage: a run was killed between the two writes. ``run-<chain>.json`` says which run has
stored a chain, so that the same run, started again, takes back what its checkpoint does not have.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.files import (
    FileError,
    check_file,
    new_folder,
    open_safetensors,
    read_header,
    read_json,
    versions,
    write_json,
    write_safetensors,
)
from tu_symmetry.states import (
    Layout,
    SampleFileError,
    State,
    layout_of,
    load_state,
    require_same,
    require_state,
    stack_states,
)
from tu_symmetry.states import unstack as unstack_states

__all__ = ["SampleFileError", "SampleRecord", "SampleStore", "load_state", "stack_states", "unstack_states"]

_FORMAT = "tu_symmetry.samples"
_VERSION = "1"
_STORE = "store.json"
_LOG = "shards.log"
_SUFFIX = ".safetensors"
_DISCARDED = "discarded"


@dataclass(frozen=True)
class RunMark:
    """Which run has stored a chain.

    Attributes:
        run: fingerprint of what the run depends on.
        done: whether it came to its end.
        step: optimizer steps at its end.
    """

    run: str
    done: bool = False
    step: int | None = None


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


class SampleStore(Sequence[State]):
    """A folder of posterior samples of one architecture; read lazily, one state at a time.

    ``store[i]`` and iteration give single states, :meth:`stack` and :meth:`load` stacked ones. Samples stay in the
    order in which they were appended. Several processes may append to one store; each sees what was there when it
    opened it, and what it has appended itself.

    Attributes:
        folder: where the files are.
        metadata: architecture, method, seed and whatever else :meth:`create` was given.
        records: one :class:`SampleRecord` for each sample, in order.
        layout: name to shape and dtype of one state's tensors; None while the store is empty.
        written_by: package to version of what made the store; empty for a store of a version that kept none.
    """

    def __init__(
        self, folder: Path, metadata: dict[str, Any], store: str | None, written_by: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.metadata = metadata
        self.records: list[SampleRecord] = []
        self.layout: dict[str, Layout] | None = None
        self.written_by = dict(written_by)
        self._store = store  # what tells this store from others; None in those made before there were seals
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
        """Make a new, empty store.

        Args:
            folder: must not exist, or be empty.
            architecture: name of the architecture.
            method: how the samples are made (``hmc``, ``deep_ensemble``, ``snapshots``, ...).
            seed: seed of the run.
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
        token = secrets.token_hex(8)
        content = {"format": _FORMAT, "version": _VERSION, "metadata": metadata, "store": token}
        with new_folder(folder) as temporary:
            write_json(temporary / _STORE, content, seal=True)
            (temporary / _LOG).touch()
        return cls(folder, metadata, token, versions())

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None) -> SampleStore:
        """Open a store; the index is rebuilt from the shards' headers, no weights are read.

        Args:
            folder: folder of a store.
            like: a state that the samples must agree with in names and shapes.

        Raises:
            SampleFileError: no store; a shard that is truncated or foreign, a copy of another, of another store or
                architecture; one that is gone. Reading its states raises it for a shard whose content was changed.
                Nothing is changed on disk.
        """
        folder = Path(folder)
        description = folder / _STORE
        try:
            content, written_by = read_json(description)
        except FileNotFoundError:
            raise SampleFileError(
                f"{folder} is no sample store: it has no {_STORE}. SampleStore.create makes one"
            ) from None
        except OSError as error:
            raise SampleFileError(f"{description} cannot be read ({error.strerror})") from error
        except FileError as error:
            raise SampleFileError(str(error)) from error
        metadata = content.get("metadata")
        if content.get("format") != _FORMAT or content.get("version") != _VERSION or not isinstance(metadata, dict):
            raise SampleFileError(f"{description} does not describe a sample store of format {_FORMAT} {_VERSION}")
        if "store" not in content or written_by is None:
            raise SampleFileError(f"{description} is damaged: it has no digest of its content; restore it")
        store = cls(folder, metadata, content["store"], written_by)
        logged = store._read_log()
        shards = [p for p in sorted(folder.glob(f"*{_SUFFIX}")) if p.name not in store._discarded]
        gone = sorted(logged.keys() - {shard.name for shard in shards})
        if gone:
            raise SampleFileError(
                f"{folder / gone[0]} is gone ({len(gone)} of {len(logged)} shards): restore it, or, if its samples are "
                f"to be done without, take its line out of {folder / _LOG}"
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
        write_safetensors(path, stack, header | {"file": path.name} | ({"store": self._store} if self._store else {}))
        self._log(f"{path.name} {read_header(path).digest}")
        self._add(path, chains, steps)
        self.layout = layout_of(stack, stacked=True)

    def discard(self, chains: Collection[int], *, after: int = -1) -> int:
        """Take back the samples of some chains beyond a step, whole shards of them; a kill leaves each there or gone.

        Args:
            chains: numbers of the chains.
            after: the last step that stays.

        Returns:
            How many samples there were.

        Raises:
            ValueError: one of their shards holds other samples too; nothing is taken back then.
        """
        beyond = [r for r in self.records if r.chain in chains and r.step > after]
        shards = {r.shard for r in beyond}
        if len(beyond) < sum(r.shard in shards for r in self.records):
            raise ValueError(
                f"{self.folder} holds samples of chains {sorted(chains)} beyond step {after} in one file with others "
                f"({min(shards).name}), so that they cannot be taken back: give the run another folder of samples"
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

    def mark(self, chain: int, mark: RunMark) -> None:
        """Write which run stores a chain (of a run with several chains, the first)."""
        write_json(self._mark_file(chain), asdict(mark), seal=True)

    def marked(self, chain: int) -> RunMark | None:
        """Which run has stored a chain; None where nothing was written of it.

        Raises:
            SampleFileError: the file that says so is damaged.
        """
        try:
            return RunMark(**read_json(self._mark_file(chain))[0])
        except FileNotFoundError:
            return None
        except (FileError, TypeError) as error:
            raise SampleFileError(f"{error}; remove the file, and the chain counts as that of another run") from error

    def _mark_file(self, chain: int) -> Path:
        return self.folder / f"run-{chain}.json"

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
            with self._open(shard) as file:
                for i in indices:
                    position = self.records[i].position
                    yield {n: file.get_slice(n)[position : position + 1][0].clone() for n in file.keys()}  # noqa: SIM118

    def stack(self, indices: Sequence[int] | Tensor, *, device: str | torch.device = "cpu") -> State:
        """Chosen samples as a stack ``[len(indices), ...]``, in the order of the indices.

        It is made in main memory, and goes to another device tensor by tensor.
        """
        wanted = [int(i) for i in indices]
        if self.layout is None or not wanted:
            raise ValueError(f"nothing to stack: the store {self.folder} has {len(self)} samples, asked for {wanted}")
        wanted = [range(len(self))[i] for i in wanted]
        result = {n: torch.empty((len(wanted), *e.shape), dtype=e.dtype, device="cpu") for n, e in self.layout.items()}
        places: dict[int, list[int]] = defaultdict(list)
        for place, i in enumerate(wanted):
            places[i].append(place)
        for shard, indices_ in self._by_shard(sorted(places)):
            with self._open(shard) as file:
                for name, target in result.items():
                    rows = file.get_slice(name)
                    for i in indices_:
                        position = self.records[i].position
                        target[places[i]] = rows[position : position + 1]
        return {name: result.pop(name).to(device) for name in self.layout}

    def tensor(self, index: int, name: str) -> Tensor:
        """One tensor of one sample; of the file only its bytes are read (and the whole once, to compare its digest).

        Raises:
            IndexError: no such sample.
            KeyError: no such tensor.
        """
        record = self.records[index]
        if self.layout is None or name not in self.layout:
            raise KeyError(f"{self.folder} holds no {name!r}; its tensors are {sorted(self.layout or ())[:8]}")
        with self._open(record.shard) as file:
            rows: Tensor = file.get_slice(name)[record.position : record.position + 1]
            return rows[0].clone()  # aligned

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

    def _read_header(self, shard: Path, logged: Mapping[str, str]) -> None:
        """Take a shard into the index; everything is checked but the bytes of its weights."""
        try:
            header = read_header(shard)
        except FileError as error:
            raise SampleFileError(
                f"{error}; restore it, or move it out of the folder and its line out of {_LOG}"
            ) from error
        said = header.metadata
        if said.get("format") != _FORMAT or said.get("version") != _VERSION:
            raise SampleFileError(
                f"{shard} was not written by a sample store (format {said.get('format')!r}); move it elsewhere"
            )
        if said.get("file", shard.name) != shard.name:
            raise SampleFileError(f"{shard} is a copy of {said['file']}, or was renamed; a shard has one name only")
        sealed = self._store is not None or shard.name in logged
        if sealed and header.digest is None:
            raise SampleFileError(
                f"{shard} carries no digest, so it was not written into this store; move it elsewhere"
            )
        if sealed and said.get("store") != self._store:
            raise SampleFileError(f"{shard} belongs to another store than {self.folder}; move it elsewhere")
        if logged.get(shard.name, header.digest) != header.digest:
            raise SampleFileError(f"{shard} was replaced or damaged: {_LOG} has another digest for it; restore it")
        try:
            chains, steps = ([int(number) for number in json.loads(said[key])] for key in ("chain", "step"))
            lengths = {shape[0] for shape, _ in header.layout.values()} | {len(chains), len(steps)}
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise SampleFileError(f"{shard} is damaged: its header has no chains and steps ({error})") from error
        if len(lengths) != 1 or not header.layout:
            raise SampleFileError(f"{shard} is damaged: {len(chains)} chains and {len(steps)} steps for its states")
        there = {(r.chain, r.step): r.shard for r in self.records}
        twice = next((there[pair] for pair in zip(chains, steps, strict=True) if pair in there), None)
        if twice is not None:
            raise SampleFileError(
                f"{shard} holds samples that {twice.name} holds too; one is a copy: move it elsewhere"
            )
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
            if self._store is None:
                return {}
            raise SampleFileError(
                f"{path} is gone, which says which shards there are; restore it, or make an empty file of that name if "
                "all shards are there"
            ) from None
        logged: dict[str, str] = {}
        # Each entry is written as "\nNAME DIGEST\n", so an empty line stands before and after it. The last line, and
        # one that another follows at once, are what a killed run has not written out; its shard is there all the same.
        for line, following in pairwise(lines):
            name, _, digest = line.decode("ascii", "replace").partition(" ")
            if not line or following:
                continue
            if digest == _DISCARDED and name.endswith(_SUFFIX):
                self._discarded.add(name)
                logged.pop(name, None)
                continue
            if len(digest) != 64 or not name.endswith(_SUFFIX):
                raise SampleFileError(f"{path} is damaged at {line[:40]!r}; restore it")
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
            require_same(layout_of(stack, stacked=True), self.layout, "the state", f"the store {self.folder}")
        pairs = list(zip(chains, steps, strict=True))
        there = sorted({(r.chain, r.step) for r in self.records} & set(pairs))
        if there or len(set(pairs)) < len(pairs):
            raise ValueError(f"(chain, step) {there[:3] or pairs[:3]} would be twice in {self.folder}")
