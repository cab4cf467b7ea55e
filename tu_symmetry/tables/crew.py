"""The processes that ``torchrun`` started for one table: each takes the next command that is ready, and runs it alone.

They tell each other what is taken and what is done by torchrun's store. There is a process group only while all of them
run a command together: what runs in one of them alone would take it for its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from tu_symmetry.processes import ElsewhereError

_PATIENCE = timedelta(days=7)  # with others, who train
_POLL = 0.2  # seconds


class LostError(RuntimeError):
    """A process ended without a word."""


class Crew:
    """This process among those of a table; ``number`` is 0 of 1 where ``torchrun`` has started none."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.number = int(os.environ["RANK"]) if self.count > 1 else 0
        self._met = 0
        if self.count > 1:
            from torch.distributed.rendezvous import rendezvous

            store = next(iter(rendezvous("env://", timeout=_PATIENCE)))[0]
            self._store = torch.distributed.PrefixStore("table", store)
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())

    def say(self, key: str, text: str = "yes") -> None:
        """Tell the others."""
        if self.count > 1:
            self._store.set(key, text)

    def said(self, key: str) -> str:
        """What one of them has told, or nothing."""
        return self._store.get(key).decode() if self.count > 1 and self._store.check([key]) else ""

    def first(self, key: str, text: str) -> str:
        """What the first of them tells under a key that asks all."""
        return self._store.compare_set(key, "", text).decode() if self.count > 1 else text

    def pause(self) -> None:
        """Wait for others a moment; an ElsewhereError if one has failed."""
        if self.said("failed"):
            raise ElsewhereError("another process failed")
        time.sleep(_POLL)

    def all_here(self, key: str) -> None:
        """Wait until all processes have come to this point."""
        if self.count > 1:
            if self._store.add(f"{key}, here", 1) == self.count:
                self.say(key)
            while not self.said(key):
                self.pause()

    def meeting(self, name: str = "") -> str:
        """The command that all are to run together next: ``name``, unless another was named before; or none."""
        key = f"meeting {self._met}"
        return self.first(key, name) if name else self.said(key)

    @contextmanager
    def met(self) -> Iterator[None]:
        """Until all have done what they met for."""
        yield
        self._met += 1

    @contextmanager
    def in_group(self, command: str) -> Iterator[None]:
        """A process group of all, for a command."""
        store = torch.distributed.PrefixStore(f"group {self._met}", self._store)
        torch.distributed.init_process_group(
            "gloo", store=store, timeout=_PATIENCE, rank=self.number, world_size=self.count
        )
        try:
            with self.at_work(command):  # it is said what failed before others miss it
                try:
                    yield
                except RuntimeError as error:
                    if "gloo" not in str(error):
                        raise
                    raise LostError("another process was lost; the same command resumes") from error
                self.all_here(f"group {self._met} ends")
        finally:
            torch.distributed.destroy_process_group()

    @contextmanager
    def alone(self, command: str) -> Iterator[None]:
        """No other process, for Lightning and what else asks the environment while a command runs."""
        if self.count == 1:
            yield
            return
        from lightning.pytorch.utilities import rank_zero

        only: Any = rank_zero.rank_zero_only
        names = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if name.startswith(names)}
        for name in kept:
            del os.environ[name]
        only.rank = 0
        try:
            with self.at_work(command):
                yield
        finally:
            os.environ.update(kept)

    @contextmanager
    def at_work(self, command: str = "") -> Iterator[None]:
        """A block that ends in all processes when it fails in one; ``torchrun`` ends those that are busy.

        Raises:
            ElsewhereError: another process failed first, and says why.
        """
        try:
            yield
        except BaseException as error:
            own = str(self.number)
            stopped = isinstance(error, KeyboardInterrupt)  # from outside, or by torchrun after another has failed
            failed = self.said("failed") or own if stopped else self.first("failed", own)
            if failed == own:
                if self.count > 1 and not stopped:
                    vars(error).setdefault("__notes__", [f"{command or 'table'}, in process {own}"])
                raise
            raise ElsewhereError("another process failed") from error
