"""Networks of one architecture that are read when their turn comes, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from tu_symmetry.modules import is_source
from tu_symmetry.states import State, load_state, open_state, read_state, unstack, without_prefix
from tu_symmetry.symmetry.action import Permuted, permute_entries
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

Network = Mapping[str, Tensor] | str | os.PathLike[str] | nn.Module
Networks = Mapping[str, Tensor] | Sequence[Network] | nn.Module


class StateSource(Sequence[State]):
    """A sequence of states out of memory, files, a store, a stack or a routine; each is read when it is asked for.

    Nothing is kept: who asks for a network twice reads it twice. A ``prefix`` is taken off the names in files; a file
    without any such name is read as it is.
    """

    def __init__(self, source: Networks, *, prefix: str = "") -> None:
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
        self._graph: SymmetryGraph | None = None
        self._permutations: Sequence[Permutation] = ()
        self._chosen: Sequence[int] = range(len(self._source))

    def only(self, indices: Sequence[int]) -> StateSource:
        """Some of the networks, in another order."""
        return self._with(chosen=[self._chosen[k] for k in indices])

    def permuted(self, graph: SymmetryGraph, permutations: Sequence[Permutation]) -> StateSource:
        """All of the networks with permuted units."""
        return self._with(graph=graph, permutations=permutations)

    def _with(self, **changed: Any) -> StateSource:
        made = StateSource(self._source, prefix=self._prefix)
        vars(made).update(vars(self), **{f"_{name}": value for name, value in changed.items()})
        return made

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        k = self._chosen[index]
        state = read_network(self._source[k], f"states[{k}]", self._prefix)
        if self._graph is not None:
            permute_entries(self._graph, self._permutations[k], state)
        return state

    def open(self, index: int) -> Mapping[str, Tensor] | None:
        """A network whose tensors are read and permuted one by one; None where it has to be read as a whole."""
        k = self._chosen[index]
        if not isinstance(self._source, (list, tuple)):
            return None
        network: Any = self._source[k]
        if isinstance(network, (str, os.PathLike)):
            network = open_state(network, prefix=self._prefix)
        elif is_source(network):
            network = read_state(network, f"states[{k}]")
        return Permuted(self._graph, self._permutations[k], network) if self._graph is not None and network else network


def read_network(network: Network, name: str, prefix: str = "") -> State:
    """One network's state, from memory or a file."""
    if isinstance(network, (str, os.PathLike)):
        network = load_state(network)
        network = without_prefix(network, prefix) or network
    return read_state(network, name)
