"""Whether chains have come to the same place: in weight space, there without the symmetries, and in function space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tu_symmetry._extras import from_extra
from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.over import Over
from tu_symmetry.evaluation import evaluating, forward
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State, as_given, stack_states, unstack
from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True, repr=False)
class Convergence(Brief):
    """R-hat and effective sample sizes of chains in several spaces.

    Attributes:
        spaces: of ``weights``, ``weights without symmetries`` and, where inputs were given, ``outputs``: how many
            ``quantities`` move; of their rank-normalized split R-hat the median ``rhat``, the maximum ``worst rhat``,
            and the share ``converged`` that is at most 1.01; of their bulk effective sample sizes over all chains the
            median ``ess`` and the minimum ``least ess``.
        removed: the draws without symmetries, ``[chains, draws, ...]``.
    """

    spaces: dict[str, dict[str, float]]
    removed: State

    def table(self) -> Grid:
        """A row for each space."""
        names = ["quantities", "rhat", "worst rhat", "converged", "ess", "least ess"]
        shown = {"quantities": ",.0f", "converged": ".0%", "ess": ",.0f", "least ess": ",.0f"}
        rows = [[name, *(f"{own[key]:{shown.get(key, '.3f')}}" for key in names)] for name, own in self.spaces.items()]
        count, draws = next(iter(self.removed.values())).shape[:2]
        caption = f"{count} chains of {draws} draws; R-hat: rank-normalized, split; converged: at most 1.01; ESS: bulk"
        return Grid("Convergence", ["space", *names], rows, caption)


def convergence(
    graph: SymmetryGraph,
    chains: Mapping[str, Tensor],
    *,
    model: nn.Module | None = None,
    inputs: Tensor | None = None,
    over: Sequence[Over] = ("permutations", "signs", "scales"),
) -> Convergence:
    """Compare chains of networks with each other, by ArviZ's formulas (arXiv 1903.08008).

    Chains that differ by symmetries alone never agree in weight space: without them, each draw has its least mass and
    is matched to the first one, by weights. What still differs then are other functions, or a matching that has not
    found the element. Outputs on ``inputs`` have no symmetries.

    Args:
        graph: the architecture's symmetry graph.
        chains: a stack ``[chains, draws, ...]`` of states, at least two chains with four draws each.
        model: the module, where ``inputs`` are given.
        inputs: a batch; None to compare weights alone.
        over: which symmetries are removed, as :func:`tu_symmetry.align` takes them.

    Raises:
        SymmetryError: states of another architecture, NaN or infinite weights.
        ValueError: fewer chains or draws, or another number of sample axes.
    """
    lead = graph.check_state(chains)
    count, draws = next(iter(chains.values())).shape[:2] if lead == 2 else (0, 0)
    if count < 2 or draws < 4:
        raise ValueError(
            f"chains have to be a stack [chains, draws, ...], at least two chains with four draws each: the states "
            f"have {lead} sample axes" + (f" of {count} and {draws}" if lead == 2 else "")
        )
    if (model is None) != (inputs is None):
        raise ValueError("outputs are compared on a batch: pass both model= and inputs=, or neither")
    every = unstack(as_given(chains, {name: t.flatten(0, 1) for name, t in chains.items()}))
    weights = [name for name in graph.shapes if name not in graph.buffers]

    def flat(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
        return torch.stack([torch.cat([s[name].flatten() for name in weights]) for s in states])

    moved = align(graph, every, over=over, certify=False).states
    spaces = {"weights": flat(every), "weights without symmetries": flat(moved)}
    if model is not None and inputs is not None:
        with evaluating(model):
            spaces["outputs"] = torch.stack([forward(model, state, inputs).flatten() for state in every])
    found = {name: _judged(t.unflatten(0, (count, draws))) for name, t in spaces.items()}
    removed = {name: t.unflatten(0, (count, draws)) for name, t in stack_states(moved).items()}
    return Convergence(found, as_given(chains, removed))


def _judged(values: Tensor) -> dict[str, float]:
    """Of quantities ``[chains, draws, quantities]``, those that move."""
    with from_extra("sampling", purpose="R-hat and effective sample sizes of chains"):
        from arviz_stats.base import array_stats

    own = values.detach().double().cpu()
    own = own[..., (own != own[:1, :1]).any(0).any(0)]
    if not own.shape[-1]:
        raise ValueError("nothing moves: all draws of all chains are the same network")
    axes = {"chain_axis": 0, "draw_axis": 1}
    rhat, size = (torch.as_tensor(f(own.numpy(), **axes), device="cpu") for f in (array_stats.rhat, array_stats.ess))
    return {
        "quantities": float(own.shape[-1]),
        "rhat": float(rhat.median()),
        "worst rhat": float(rhat.max()),
        "converged": float((rhat <= 1.01).double().mean()),
        "ess": float(size.median()),
        "least ess": float(size.min()),
    }
