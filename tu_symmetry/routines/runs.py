"""What a run stores while it trains, in step with its checkpoints: cut anywhere and started again, it ends the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from tu_symmetry.files import digest_of, new_folder, remove_folder
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import State


class StoredRun:
    """The chains of one run in a sample store, which other runs may share; ``run`` is its :func:`fingerprint_of`.

    Samples are written before the checkpoint that counts on them, so a run that is cut leaves more than its last
    checkpoint has. :meth:`begin` takes back what the checkpoint does not have; where there is none, all of it.
    """

    def __init__(
        self, folder: Path, chains: Sequence[int], run: str, like: Mapping[str, Tensor], **metadata: Any
    ) -> None:
        self.folder, self.chains, self.run, self.like, self.metadata = folder, chains, run, like, metadata
        self._store: SampleStore | None = None
        self._told = False

    def begin(self, trainer: Trainer, resumed: Mapping[str, Any] | None, *, step: int = -1) -> None:
        """Look at what is there before the first step, and take back what the checkpoint does not have.

        ``resumed`` is what :meth:`state_dict` gave the checkpoint, None for a run that starts; samples later than its
        ``step`` are taken back. Chains that are another run's, done, or not those that the checkpoint counts on raise
        a FileExistsError.
        """
        if not trainer.is_global_zero:
            return
        store = self._store = SampleStore.open_if_there(self.folder, like=self.like)
        if resumed is not None:
            self.run = resumed.get("run", self.run)
        own = [] if store is None else [r for r in store.records if r.chain in self.chains]
        if store is None or not own:
            return
        run, done = store.marked(self.chains[0])
        kept = sum(r.step <= step for r in own)
        wrong = ""
        if run != self.run and (resumed is None or (run is not None and "run" in resumed)):
            wrong = "of another run already: resume that run with --ckpt_path, or give another samples: or chain:"
        elif resumed is not None and kept < resumed.get("samples", 0):
            wrong = (
                f"({kept} of the {resumed['samples']} that the run had stored by this checkpoint): it was resumed from "
                "an earlier one since; resume from that, or give another folder"
            )
        elif resumed is None and done:
            wrong = "of this run, which has come to its end: move it away, or go on with --ckpt_path"
        elif resumed is None and (found := checkpoints(trainer)):
            wrong = f"of this run, which was cut: resume it with --ckpt_path {found[-1]}, or move both away"
        if wrong:
            raise FileExistsError(f"{self.folder} holds samples of chain {', '.join(map(str, self.chains))} {wrong}")
        count = store.discard(self.chains, after=-1 if resumed is None else step)
        if resumed is None:
            rank_zero_info(
                f"{self.folder}: the run was cut before its first checkpoint; its {count} samples are made anew"
            )

    def append(self, states: Any, *, chain: Sequence[int], step: Sequence[int]) -> None:
        """Append to the store, which is made if it is not there, and says first which run this is."""
        if self._store is None:  # another chain may have made it since this run began
            there = SampleStore.open_if_there(self.folder, like=self.like)
            self._store = there or SampleStore.create(self.folder, **self.metadata)
        if not self._told:
            self._store.mark(self.chains[0], self.run)
            self._told = True
        self._store.append(states, chain=chain, step=step)

    def finish(self) -> None:
        """Say that the run has come to its end."""
        if self._store is not None and any(r.chain in self.chains for r in self._store.records):
            self._store.mark(self.chains[0], self.run, done=True)
            self._told = False

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: which run this is, and how many samples it has stored."""
        records = [] if self._store is None else self._store.records
        return {"run": self.run, "samples": sum(r.chain in self.chains for r in records)}


def store_at_end(folder: Path, states: Any, *, after: int, chain: Any, step: Sequence[int], **metadata: Any) -> None:
    """Write networks when a fit has ended after so many steps, in place of those of an earlier end of the same run."""
    store = SampleStore.open_if_there(folder)
    if store is not None:
        if not metadata.items() <= store.metadata.items():
            raise FileExistsError(
                f"{folder} holds other samples than this run's: move it away and resume from the last checkpoint"
            )
        if store.metadata.get("after") == after:
            return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as made:
        SampleStore.create(made, **metadata, after=after).append(states, chain=chain, step=step)
        remove_folder(folder)


def starts(folder: Path, like: Mapping[str, Tensor], **wanted: int) -> State:
    """The states of a store to start from, as a stack; as many as an argument, given by its name, says."""
    store = SampleStore.open(folder, like=like)
    for name, count in wanted.items():
        if len(store) != count:
            raise ValueError(f"initial_states {folder} holds {len(store)} states, but {name} is {count}")
    return store.load()


def require_free(folder: Path, resumed: bool) -> None:
    """Refuse, before a fit starts, a folder that holds something: only a run that is resumed may find its own."""
    if not resumed and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: resume its run with --ckpt_path, or give another folder")


def checkpoints(trainer: Trainer) -> list[Path]:
    """Checkpoints in the folders that the trainer's callbacks write to, the newest last."""
    folders = {Path(f) for c in trainer.checkpoint_callbacks if (f := getattr(c, "dirpath", None)) is not None}
    found = {path for folder in folders if folder.is_dir() for path in folder.rglob("*.ckpt")}
    return sorted(found, key=lambda path: path.stat().st_mtime)


def is_over(trainer: Trainer, epochs: int, steps: int) -> bool:
    """Whether a fit of so many whole epochs or steps has come to its end; resumed there, Lightning ends no training."""
    return 0 <= (trainer.max_epochs or -1) <= epochs or 0 <= trainer.max_steps <= steps


def fingerprint_of(states: Iterable[Mapping[str, Tensor]], **what: Any) -> str:
    """Digest of weights and of what else a run depends on (as texts)."""
    digest = hashlib.blake2b(digest_size=32)
    for state in states:
        for name, t in state.items():
            digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
            digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest_of({"weights": digest.hexdigest(), **{key: str(value) for key, value in what.items()}})
