"""Mass and least mass of networks: how far weights are from their representation cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.scaling.canonical import Convention, canonicalize
from tu_symmetry.scaling.masses import Parameters
from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True)
class RepresentationCosts:
    """The masses of some networks, float64.

    Attributes:
        mass: squared L2 norm of each network's counted parameters ``[S]``.
        minimal_mass: the least that positive rescalings reach ``[S]``: the representation cost.
    """

    mass: Tensor
    minimal_mass: Tensor

    @property
    def ratio(self) -> Tensor:
        """Mass over minimal mass ``[S]``: at least 1 unless dead units or normalizations are given unit norm.

        1 for a network of zeros, which has no mass to lose.
        """
        return torch.where(self.mass == self.minimal_mass, 1.0, self.mass / self.minimal_mass)


def representation_costs(
    graph: SymmetryGraph,
    states: Mapping[str, Tensor],
    *,
    parameters: Parameters | None = None,
    normalizations: Convention = "leave",
    degenerate: Convention = "leave",
) -> RepresentationCosts:
    """Mass and representation cost (arXiv 2310.08287, section 6) of each network of a stack.

    Laws: the minimal mass is the same all along the orbits of the scale groups, and under permutations.

    Args:
        graph: the symmetry graph.
        states: a state dict, or stacked states ``(S, ...)``.
        parameters: the tensors that count, as the regularizer counts them; see :func:`~tu_symmetry.canonicalize`.
        normalizations: see :func:`~tu_symmetry.canonicalize`.
        degenerate: see :func:`~tu_symmetry.canonicalize`.

    Raises:
        SymmetryError: states of another architecture, NaN or infinite weights.
        ValueError: more than one sample axis, or no samples.
    """
    lead = graph.check_state(states)
    count = len(next(iter(states.values()))) if lead else 1
    if lead > 1 or count == 0:
        raise ValueError(f"expected a state or a stack of states; this one has {lead} sample axes and {count} samples")
    singles = [{n: t[i] for n, t in states.items()} for i in range(count)] if lead else [dict(states)]
    forms = [
        canonicalize(
            graph, s, parameters=parameters, normalizations=normalizations, degenerate=degenerate, certify=False
        )
        for s in singles
    ]
    before, after = ([getattr(f, key) for f in forms] for key in ("mass_before", "mass_after"))
    return RepresentationCosts(
        torch.tensor(before, dtype=torch.float64, device="cpu"), torch.tensor(after, dtype=torch.float64, device="cpu")
    )
