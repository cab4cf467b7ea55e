"""Over which symmetries networks are aligned, one word for each kind, and how pairs of them are matched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, get_args

from torch import Tensor

from tu_symmetry.alignment.balance import balanced
from tu_symmetry.alignment.matching import Matching, Solver, weight_matching
from tu_symmetry.alignment.moves import Move
from tu_symmetry.alignment.rotations import rotation_matching
from tu_symmetry.alignment.signed import signed_matching
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.scaling.folding import folding_element
from tu_symmetry.symmetry.action import scale_tensors, sign_tensors
from tu_symmetry.symmetry.elements import SignedPermutation
from tu_symmetry.symmetry.graph import SymmetryGraph

Over = Literal["permutations", "signs", "scales", "rotations"]
Match = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Matching]
Descend = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], SignedPermutation], Matching]


def check_over(over: Sequence[Over]) -> tuple[Over, ...]:
    """Raise a ValueError unless these are symmetries that networks can be aligned over."""
    wrong = "" if isinstance(over, str) else ", ".join(repr(word) for word in over if word not in get_args(Over))
    if isinstance(over, str) or "permutations" not in over or wrong:
        raise ValueError(
            f"over={over!r}: pass 'permutations', and beside it what else may move networks, of 'signs', 'scales' and "
            f"'rotations'{wrong and f' ({wrong} is none of them)'}, as over=('permutations', 'signs')"
        )
    return tuple(over)


def compared(graph: SymmetryGraph, state: Mapping[str, Tensor], over: Sequence[Over]) -> Move:
    """What brings a network to the form in which it is compared by its weights, before it is matched.

    Over rotations the gains of normalizations are folded, so that streams may be rotated. Over scales it has its least
    mass, with rotations over linear maps too. Of all forms that are unique on an orbit of scales this is the one to
    match by weights: permutations, signs and rotations do not change a mass, so that it commutes with them, and no
    layer outweighs others by its scale alone.
    """
    logs, signs = folding_element(graph, state) if "rotations" in over else ({}, {})
    if "scales" not in over:
        return Move(logs, signs=signs)
    if "rotations" in over and graph.linears:
        form = balanced(graph, sign_tensors(graph, signs, scale_tensors(graph, logs, state)), certify=False)
        both = {n: logs[n] + form.log_scale[n] for n in logs.keys() & form.log_scale.keys()}
        return Move({**logs, **form.log_scale, **both}, form.maps, signs=signs)
    return Move(canonicalize(graph, state, certify=False).log_scale)


def matchers(graph: SymmetryGraph, over: Sequence[Over], solver: Solver) -> tuple[Match, Descend]:
    """How two networks are matched by their weights, and how from an element that is known."""
    signs = "signs" in over
    if "rotations" in over:
        whole = partial(rotation_matching, graph, signs=signs, solver=solver)
        return whole, lambda target, state, init: whole(target, state)
    if signs:
        signed = partial(signed_matching, graph)
        return partial(signed, solver=solver), lambda target, state, init: signed(target, state, init=init)
    plain = partial(weight_matching, graph)
    descent = partial(plain, solver="descent", look_again=False)
    return partial(plain, solver=solver), lambda target, state, init: descent(target, state, init=init.permutation)
