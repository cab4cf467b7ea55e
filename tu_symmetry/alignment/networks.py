"""Networks of one architecture that are read when their turn comes, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from tu_symmetry.alignment.moves import Move, view
from tu_symmetry.modules import is_source
from tu_symmetry.states import State, as_given, open_state, read_state, reads_singly, unstack
from tu_symmetry.symmetry.graph import SymmetryGraph

Network = Mapping[str, Tensor] | str | os.PathLike[str] | nn.Module
Networks = Mapping[str, Tensor] | Sequence[Network] | nn.Module


class StateSource(Sequence[State]):
    """A sequence of states out of memory, files, a store, a stack or a routine; each is read when it is asked for.

    Nothing is kept: who asks for a network twice reads it twice. A ``prefix`` is taken off the names in files; a file
    without any such name is read as it is. What is averaged ``lazily`` is a view, if all files allow it.
    """

    def __init__(self, source: Networks, *, prefix: str = "", lazily: bool = False) -> None:
        if isinstance(source, StateSource):
            vars(self).update(vars(source))
            return
        self._source: Sequence[Network]
        if isinstance(source, Mapping) or (isinstance(source, nn.Module) and is_source(source)):
            self._source = unstack(source)
        elif hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (str, bytes)):
            self._source = cast("Sequence[Network]", source)
        else:
            raise TypeError(
                f"states is a {type(source).__name__}, not a list of state dicts or files, a sample store, or a stack"
            )
        self._prefix = prefix
        self.lazily = lazily and all(reads_singly(one) for one in self._source)
        self._graph: SymmetryGraph | None = None
        self._moves: Sequence[Move] = ()
        self._chosen: Sequence[int] = range(len(self._source))

    def only(self, indices: Sequence[int]) -> StateSource:
        """Some of the networks, in another order."""
        made = StateSource(self)
        made._chosen = [self._chosen[k] for k in indices]
        return made

    def moved(self, graph: SymmetryGraph, moves: Sequence[Move]) -> StateSource:
        """All of the networks, each moved."""
        made = StateSource(self)
        made._graph, made._moves = graph, moves
        return made

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        network = self.open(index)
        return as_given(network, dict(network))

    def open(self, index: int) -> Mapping[str, Tensor]:
        """A network whose tensors are read and moved one by one, as far as its file allows it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        k = self._chosen[index]
        network = self._source[k]
        state: Mapping[str, Tensor]
        if isinstance(network, (str, os.PathLike)):
            state = open_state(network, prefix=self._prefix)
        else:
            state = read_state(network, f"states[{k}]")
        return state if self._graph is None else view(self._graph, self._moves[k], state)
