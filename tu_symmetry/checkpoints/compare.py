"""Whether two files hold the same function by a symmetry, and by which; else how far they are from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.fingerprint import fingerprint, least_form
from tu_symmetry.alignment.matching import inner_product, weight_distance
from tu_symmetry.alignment.moves import Move
from tu_symmetry.alignment.over import Over
from tu_symmetry.symmetry.elements import transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph

Verdict = Literal["equal", "symmetric", "not aligned", "different"]
_TRIED = ("", "signs", "scales", "signs scales", "signs scales rotations", "signs scales rotations normalizations")


@dataclass(frozen=True)
class Comparison:
    """What is found of two networks.

    Attributes:
        verdict: ``equal`` weights; ``symmetric``, if symmetries of ``kinds`` take one to the other, as measured;
            ``not aligned``, if their fingerprints agree and no such element was found; or ``different``.
        kinds: the fewest kinds of symmetries that do, where they do; else all that were tried.
        fingerprints: the distance of the fingerprints, ``tolerance`` what rounding explains of it, and ``most`` the
            part that differs most.
        before: L2 distance of the weights as they are, and ``after`` what is left of it after ``move`` (over scales
            between the least forms of both).
    """

    verdict: Verdict
    kinds: tuple[str, ...]
    fingerprints: float
    tolerance: float
    most: str
    before: float
    after: float
    move: Move = field(default_factory=Move, repr=False)

    def __str__(self) -> str:
        counts = self.move.counts()
        told = [
            f"{transposition_count(self.move.permutation)} transpositions of units",
            f"{counts['sign_changes']:.0f} signs",
            f"scales of up to {counts['largest_factor']:.3g}",
            f"{counts['mixed_blocks']:.0f} blocks of units mixed",
        ]
        by = ", ".join(self.kinds)
        first = {
            "equal": "the same weights",
            "symmetric": f"the same function, by {by} ({', '.join(told)})",
            "not aligned": f"the same fingerprint, but matching over {by} found nothing that takes one to the other",
            "different": f"different functions; the closest that matching came over {by}: {', '.join(told)}",
        }[self.verdict]
        return (
            f"{first}\n"
            f"fingerprints: {self.fingerprints:.1e} apart ({self.most}), rounding explains {self.tolerance:.0e}\n"
            f"distance of weights: {self.before:.4g} as they are, {self.after:.4g} after matching"
        )


def compare(graph: SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Comparison:
    """Compare two networks by their fingerprints, and look for what takes the second to the first.

    Raises:
        SymmetryError: as :func:`~tu_symmetry.fingerprint`.
    """
    one, other = fingerprint(graph, a), fingerprint(graph, b)
    differences = one.differences(other)
    most = max(differences, key=lambda name: differences[name])
    tolerance, before = max(one.tolerance, other.tolerance), weight_distance(graph, a, b)
    told = differences[most], tolerance, most, before
    same = differences[most] <= tolerance
    if same and before == 0:
        return Comparison("equal", (), *told, 0.0)
    least = least_form(graph, a)[0], least_form(graph, b)[0]
    small = tolerance * inner_product(graph, least[0], least[0]) ** 0.5
    groups = graph.signs, graph.scales, graph.linears, graph.normalizations
    held = {kind for kind, own in zip(_TRIED[-1].split(), groups, strict=True) if own}
    attempts = list(dict.fromkeys(("permutations", *(k for k in kinds.split() if k in held)) for kinds in _TRIED))
    for kinds in attempts if same else attempts[-1:]:
        over: tuple[Over, ...] = tuple(k for k in kinds if k != "normalizations")  # type: ignore[misc]
        pair = list(least) if "normalizations" in kinds or not same else [dict(a), dict(b)]
        found = align(graph, pair, over=over, certify=False)
        after = found.distances_after[1]
        if same and after <= small:
            return Comparison("symmetric", kinds, *told, after, found.moves[1])
    return Comparison("not aligned" if same else "different", kinds, *told, after, found.moves[1])
