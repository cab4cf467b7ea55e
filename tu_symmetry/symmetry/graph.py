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

    **What a graph keeps.** Names, shapes and indices, the values of ``constants``, and in ``probe`` what it takes to
    run the network: a copy of the module without values for its weights (no parameter and no trained buffer of the
    model stays alive), and the example inputs in float64. The probe is there so that a graph verifies itself before it
    first transforms weights, and so that every transformation can be certified. ``graph.without_probe()`` leaves it out
    (where example inputs are large, say), and so do pickling and ``torch.save``, since a module may be of any class;
    copies and deep copies share it. Without a probe, ``verify_symmetries(graph, model, example_inputs)`` and
    ``certify(..., model=model, example_inputs=...)`` take the module from the caller.

    Its attributes and the methods that change its groups are those of :class:`~.symmetries.Symmetries`.
    """

    def require_verified(self) -> None:
        """Verify now if that has not happened yet; called by everything that transforms weights.

        Groups that fail are taken out of the graph, with a :class:`SymmetryWarning`; see :func:`verify_symmetries`.

        Raises:
            SymmetryError: if verification fails, or the graph has lost its probe and was never verified.
        """
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
