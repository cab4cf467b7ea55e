"""Which of two axes is nested in the other: guesses that turned out badly, and the other ones to try.

Where a tensor has units of its own at each pair of positions of two axes, one axis is taken for the blocks and the
other for the units within them. In an attention with its heads last::

    q = query(x).view(batch, tokens, 3, 4)      # 3 units, 4 heads
    scores = q.permute(0, 3, 1, 2) @ k ...      # sums over the 3 units: what is left depends on the heads alone

a guess of 3 blocks with 4 units each says that the sum over blocks leaves 4 units, which all blocks share: heads may
move, and within the heads units only all at once. In truth there are 4 blocks with 3 units each. The ledger notes such
sums (its regrets). It also notes parameters that should have been nested when it was too late for it (its wishes)::

    up = torch.bmm(tokens, weight.transpose(1, 2)) + bias[:, None]      # weight [experts, units, inputs]

The network is then walked through once more with the other nesting, and what finds more symmetries stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tu_symmetry.symmetry.algebra import among
from tu_symmetry.symmetry.extraction.classes import joined
from tu_symmetry.symmetry.ledger import Ledger, Nesting


@dataclass(frozen=True)
class Nestings:
    """How one walk through a network nests axes, where that is open.

    Attributes:
        turned: steps of the walk at which the first axis is the innermost, not the last.
        nested: parameters with axes that are nested before anything reads them.
    """

    turned: frozenset[int] = frozenset()
    nested: Mapping[str, Nesting] = field(default_factory=dict)

    def reconsidered(self, ledger: Ledger) -> Nestings:
        """The nestings to try after a walk with these: the same ones where nothing was regretted or wished for."""
        return Nestings(self.turned | _turned(ledger), {**self.nested, **ledger.wishes})


def _turned(ledger: Ledger) -> frozenset[int]:
    """The steps that nested axes in a way that was regretted, and those that nested the same units with them."""
    if not ledger.regrets or not ledger.choices:
        return frozenset()
    _, of = joined(ledger.units, ledger.ties)
    regretted = np.concatenate([of[units.reshape(-1)] for units in ledger.regrets])
    steps = [(step, of[blocks.reshape(-1)]) for step, blocks in ledger.choices]
    if not any(among(blocks, regretted).any() for _, blocks in steps):
        return frozenset()
    met = np.concatenate([regretted, *(of[units[units >= 0]] for units in ledger.shared)])
    return frozenset(step for step, blocks in steps if among(blocks, met).any())
