"""How precisions are chosen, as recipes and reports write it: where the evidence is evaluated, and for which groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

Where: TypeAlias = Literal["map", "tangent_mode", "full"]
Groups: TypeAlias = Literal["single", "per_group"]

NETWORK = "network"  # the row of the network itself
TITLES: dict[Where, str] = {"map": "M(θ~)", "tangent_mode": "M(θ*)", "full": "M(θ*), full"}


class Choice(NamedTuple):
    """A row of a table.

    Attributes:
        where: ``map``: at the trained weights, M(θ~); ``tangent_mode``: at the joint stationary point, M(θ*), with the
            curvature at the network's own outputs; ``full``: the same with the curvature at the outputs of the tangent
            model at θ*.
        prior: one precision (``single``) or one for each normalized group and the rest (``per_group``).
        flat: without hyperprior.
    """

    where: Where
    prior: Groups
    flat: bool = False

    @classmethod
    def parse(cls, text: str, known: Collection[str] = ("map", "tangent_mode")) -> Choice:
        """Read ``WHERE/PRIOR`` or ``WHERE/PRIOR/flat``, WHERE being one of the known ones.

        Raises:
            ValueError: anything else.
        """
        where, _, rest = text.partition("/")
        prior, _, last = rest.partition("/")
        if where not in known or prior not in get_args(Groups) or last not in ("", "flat"):
            raise ValueError(
                f"choice {text!r}: write {' or '.join(known)}, /, single or per_group, and /flat if wanted"
            )
        return cls(cast(Where, where), cast(Groups, prior), bool(last))

    @property
    def key(self) -> str:
        """As it is written in a recipe."""
        return f"{self.where}/{self.prior}" + ("/flat" if self.flat else "")

    @property
    def title(self) -> str:
        """As reports call it."""
        prior = "single λ" if self.prior == "single" else "several λ"
        return f"{TITLES[self.where]}, {prior}{', no hyperprior' if self.flat else ''}"


def parse_all(texts: Sequence[str], known: Collection[str] = ("map", "tangent_mode")) -> list[Choice]:
    """Read the rows of a table, each of them once.

    Raises:
        ValueError: what is no choice, or stands twice.
    """
    choices = [Choice.parse(text, known) for text in texts]
    twice = sorted({c.key for c in choices if choices.count(c) > 1})
    if twice or not choices:
        raise ValueError(f"choices: {'name at least one' if not choices else f'{twice[0]!r} stands twice'}")
    return choices
