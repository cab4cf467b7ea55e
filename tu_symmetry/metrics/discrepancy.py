"""Maximum mean discrepancy between posterior samples and a reference, with or without symmetries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from tu_symmetry.metrics.functional.discrepancy import maximum_mean_discrepancy


class MaximumMeanDiscrepancy(Metric):
    """Mean over a network's tensors of the squared MMD between samples of its weights and a reference.

    See :func:`~tu_symmetry.metrics.functional.maximum_mean_discrepancy`. With ``remove_symmetries`` it is the quantity
    that arXiv 2310.08287 calls NS, "MMD computed after the removal of the symmetries". How that paper makes one number
    of its layers' values is not published; the mean over tensors is our choice.

    All samples are kept until :meth:`reset`: leave out what is not compared, and put large networks on the CPU.

    Args:
        remove_symmetries: maps a state to the representative of its orbit; the same for samples and reference.
        reset_reference: whether :meth:`reset` forgets the reference too; keep it to compare several methods with it.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> metric = MaximumMeanDiscrepancy()
        >>> stack = {"weight": torch.arange(12.0).view(4, 3)}
        >>> metric.update(stack, reference=True)
        >>> metric.update({"weight": stack["weight"] + 50}, reference=False)
        >>> bool(metric.compute() > 0.1)
        True
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    reference: list[Tensor]
    samples: list[Tensor]

    def __init__(
        self,
        remove_symmetries: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
        *,
        reset_reference: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.remove_symmetries, self.reset_reference = remove_symmetries, reset_reference
        self.layout: dict[str, torch.Size] = {}
        self.add_state("reference", default=[], dist_reduce_fx="cat")
        self.add_state("samples", default=[], dist_reduce_fx="cat")

    def update(self, states: Mapping[str, Tensor], reference: bool) -> None:
        """Add networks.

        Args:
            states: stacked states ``(S, ...)``; tensors that are not floating-point are left out.
            reference: whether they belong to the reference.

        Raises:
            ValueError: for states of another architecture, or of differing numbers of networks.
        """
        stack = {name: t.detach() for name, t in states.items() if t.is_floating_point()}
        counts = {len(t) if t.ndim else 0 for t in stack.values()}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(f"expected stacked states with one leading sample axis; its lengths are {sorted(counts)}")
        layout = {name: t.shape[1:] for name, t in stack.items()}
        if self.layout and layout != self.layout:
            odd = sorted(n for n in layout.keys() | self.layout.keys() if layout.get(n) != self.layout.get(n))
            raise ValueError(f"the states are of another architecture than the first ones; they differ in {odd}")
        self.layout = layout
        if self.remove_symmetries is not None:
            (count,) = counts
            whole = [self.remove_symmetries({name: t[i] for name, t in states.items()}) for i in range(count)]
            stack = {name: torch.stack([state[name] for state in whole]) for name in stack}
        rows = torch.cat([t.flatten(1) for t in stack.values()], dim=1)
        (self.reference if reference else self.samples).append(rows)

    def compute(self) -> Tensor:
        """Mean over the tensors of the squared MMD; about 0 for equal distributions, and then of either sign."""
        values = self.compute_by_tensor()
        return torch.stack(list(values.values())).mean()

    def compute_by_tensor(self) -> dict[str, Tensor]:
        """The squared MMD of each of a network's tensors, of this process's samples.

        Raises:
            ValueError: if there are no samples, or no reference.
        """
        sets = []
        for name, rows in (("reference", self.reference), ("samples", self.samples)):
            if len(rows) == 0:
                raise ValueError(f"no {name} so far: call update(states, reference={name == 'reference'})")
            sets.append(rows if isinstance(rows, Tensor) else torch.cat(rows))
        widths = [shape.numel() for shape in self.layout.values()]
        pieces = zip(*(s.split(widths, dim=1) for s in sets), strict=True)
        return {
            name: maximum_mean_discrepancy(samples, reference)
            for name, (reference, samples) in zip(self.layout, pieces, strict=True)
        }

    def reset(self) -> None:
        """Forget the samples, and the reference unless ``reset_reference`` is False."""
        kept = list(self.reference)  # torchmetrics clears the list itself
        super().reset()
        if self.reset_reference:
            self.layout = {}
        else:
            self.reference = kept
