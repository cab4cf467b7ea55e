"""What moves a network in an alignment: elements of groups of all kinds together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from tu_symmetry.states import State, as_given
from tu_symmetry.symmetry.action import (
    Permuted,
    invert_signed,
    linear_tensors,
    require_range,
    scale_tensors,
    signed_tensors,
)
from tu_symmetry.symmetry.elements import (
    LogScale,
    Maps,
    Permutation,
    SignedPermutation,
    Signs,
    identity_permutation,
)
from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True)
class Move:
    """What moves one network: first scales and balancing maps, then units and their signs, then rotations."""

    log_scale: LogScale = field(default_factory=dict)
    balance: Maps = field(default_factory=dict)
    permutation: Permutation = field(default_factory=dict)
    signs: Signs = field(default_factory=dict)
    maps: Maps = field(default_factory=dict)

    @property
    def rounds(self) -> bool:
        """Whether it does more than to change places and signs."""
        return bool(self.log_scale or self.balance or self.maps)

    def counts(self) -> dict[str, float]:
        """How many units change their signs, the largest factor or inverse of one, how many blocks are mixed."""
        logs = [float(own.abs().max()) for own in self.log_scale.values() if len(own)]
        mixed: dict[str, Tensor] = {}
        for name, maps in (*self.balance.items(), *self.maps.items()):
            same = torch.isclose(maps, torch.eye(maps.shape[-1], dtype=maps.dtype, device="cpu"), rtol=0, atol=1e-6)
            moved = ~same.flatten(-2).all(-1).reshape(-1)
            mixed[name] = mixed[name] | moved if name in mixed else moved
        return {
            "largest_factor": math.exp(max(logs, default=0.0)),
            "mixed_blocks": sum(int(blocks.sum()) for blocks in mixed.values()),
            "sign_changes": sum(int((s < 0).sum()) for s in self.signs.values()),
        }

    def flat(self) -> dict[str, Tensor]:
        """All elements in one dictionary, as they stand in a file: permutations by their groups' names alone."""
        kinds = {"" if kind == "permutation" else f"{kind}:": held for kind, held in vars(self).items()}
        return {f"{kind}{name}": value.contiguous() for kind, held in kinds.items() for name, value in held.items()}

    @classmethod
    def of(cls, flat: Mapping[str, Tensor]) -> Move:
        """The move that :meth:`flat` has written."""
        held: dict[str, dict[str, Tensor]] = {f.name: {} for f in fields(cls)}
        for key, value in flat.items():
            kind = next((kind for kind in held if key.startswith(f"{kind}:")), "permutation")
            held[kind][key.removeprefix(f"{kind}:")] = value
        return cls(**held)


class Moves:
    """What moved the networks of a result, by the kinds of groups; empty dictionaries for what was not asked for."""

    moves: list[Move]

    @property
    def permutations(self) -> list[Permutation]:
        """The permutation of each network."""
        return [move.permutation for move in self.moves]

    @property
    def signs(self) -> list[Signs]:
        """The signs of each, after its permutation."""
        return [move.signs for move in self.moves]

    @property
    def maps(self) -> list[Maps]:
        """The rotations of each, after both."""
        return [move.maps for move in self.moves]

    @property
    def log_scales(self) -> list[LogScale]:
        """The log-factors that bring each to its least mass, before everything else."""
        return [move.log_scale for move in self.moves]

    @property
    def balances(self) -> list[Maps]:
        """The matrices that do so over linear maps, after the log-factors and before the permutation."""
        return [move.balance for move in self.moves]

    @property
    def sign_changes(self) -> list[int]:
        """Number of units that turned in each network."""
        return [int(move.counts()["sign_changes"]) for move in self.moves]


def move_tensors(graph: SymmetryGraph, move: Move, tensors: Mapping[str, Tensor]) -> State:
    """Move any subset of a network's tensors, which are rounded once to their own dtypes."""
    mixes = bool(move.balance or move.maps)
    require_range(graph, move.log_scale, tensors)
    moved = {n: t.double() if mixes and t.is_floating_point() else t for n, t in tensors.items()}
    moved = linear_tensors(graph, move.balance, scale_tensors(graph, move.log_scale, moved))
    moved = signed_tensors(graph, SignedPermutation(move.permutation, move.signs), moved)
    moved = linear_tensors(graph, move.maps, moved)
    return as_given(tensors, {n: t.to(tensors[n].dtype) for n, t in moved.items()})


def undo_tensors(graph: SymmetryGraph, move: Move, tensors: Mapping[str, Tensor]) -> State:
    """What :func:`move_tensors` made these tensors of, in their own dtypes."""
    moved = linear_tensors(graph, _inverse(move.maps), tensors)
    element = SignedPermutation(identity_permutation(graph) | move.permutation, move.signs)
    moved = linear_tensors(graph, _inverse(move.balance), signed_tensors(graph, invert_signed(graph, element), moved))
    back = {name: -logs for name, logs in move.log_scale.items()}
    require_range(graph, back, moved)
    return as_given(tensors, scale_tensors(graph, back, moved))


def _inverse(maps: Maps) -> Maps:
    return {name: torch.linalg.inv(own.double()) for name, own in maps.items()}


class Moved(Permuted):
    """Tensors of a network that was moved, each when it is asked for (and read from a file, say)."""

    def __init__(self, graph: SymmetryGraph, move: Move, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(graph, {}, tensors)
        self._graph, self._move = graph, move
        self._mixed = {g.name: {a for m in g.members for a in graph.aliases[m.parameter]} for g in graph.linears}

    def __getitem__(self, name: str) -> Tensor:
        balance, maps = (
            {group: own for group, own in held.items() if name in self._mixed[group]}
            for held in (self._move.balance, self._move.maps)
        )
        move = replace(self._move, balance=balance, maps=maps)
        return move_tensors(self._graph, move, {name: super().__getitem__(name)})[name]


def moved(graph: SymmetryGraph, move: Move, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A network as a move makes it: tensor by tensor where it only changes places, else all of them now."""
    if not any(vars(move).values()):
        return tensors
    return (
        move_tensors(graph, move, tensors) if move.rounds or move.signs else Permuted(graph, move.permutation, tensors)
    )


def view(graph: SymmetryGraph, move: Move, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A network as a move makes it, tensor by tensor where it is read so."""
    if not hasattr(tensors, "layouts"):
        return moved(graph, move, tensors)
    if move.rounds or move.signs:
        return Moved(graph, move, tensors)
    return Permuted(graph, move.permutation, tensors)
