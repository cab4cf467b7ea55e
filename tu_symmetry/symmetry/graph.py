"""What discovery returns: the symmetry graph of an architecture, which verifies, prints and draws itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tu_symmetry.symmetry.drawing import to_html
from tu_symmetry.symmetry.report import describe, summary
from tu_symmetry.symmetry.symmetries import Symmetries
from tu_symmetry.symmetry.verification import verify


@dataclass(eq=False, repr=False)
class SymmetryGraph(Symmetries):
    """The symmetries of one architecture, as :func:`discover_symmetries` finds them. ``print(graph)`` is readable.

    A graph keeps no weights. Its ``probe`` is a copy of the module without values and the example inputs in float64, so
    that a graph verifies itself before it first transforms weights, and certifies every transformation. Pickling leaves
    it out, and ``verify_symmetries(graph, model, example_inputs)`` gives a graph one.
    """

    def require_verified(self) -> None:
        """Verify now if that has not happened yet, as :func:`verify_symmetries`."""
        if not self.verified and self.probe is not None:
            verify(self, self.probe)
        super().require_verified()

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The graph as a self-contained HTML page, also written to ``path`` if one is given."""
        return to_html(self, path)

    def facts(self) -> list[tuple[str, str]]:
        """What the graph holds, in a line for each kind of group."""
        wanted = ("state", "permutations", "scales", "normalizations", "failed")
        return [("of", self.architecture or "a network"), *(fact for fact in summary(self) if fact[0] in wanted)]

    def __str__(self) -> str:
        return describe(self)
