"""What all metrics of the package promise beyond torchmetrics: no mixing, nothing lost, and processes without data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from tu_symmetry.processes import count

_DTYPES = (torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class BaseMetric(Metric):
    """A metric whose states are sums of tensors, and lists of rows ``[N, D]``.

    A ``MetricCollection`` never lets it share states with another metric. Sums stay in double precision, whatever the
    precision of inputs or of the network that holds the metric. A call that fails leaves it as it was. Processes may
    hold no rows at all; those that work :func:`~tu_symmetry.processes.together` are taken to hold the same.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"distributed_available_fn": _differ, **kwargs})
        # torchmetrics shares states that are equal after a first batch, and NaN equals nothing
        self.add_state("apart", default=torch.tensor(torch.nan), dist_reduce_fx="max")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch, and return the value of this batch alone."""
        before = {name: list(v) if isinstance(v, list) else v for name, v in self.__dict__.items()}
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            self.__dict__.update(before)  # torchmetrics would leave the batch's states, and would not synchronize again
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        """Move the states in the precision that they have, also with a network that changes its own."""

        def moved(state: Tensor) -> Tensor:
            found = fn(state)
            return found if found.dtype == state.dtype else state.to(found.device)

        return super()._apply(moved, exclude_state)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for name, default in self._defaults.items():
            if isinstance(default, list):  # torchmetrics would go on appending to the list of the state dict
                setattr(self, name, list(getattr(self, name)))

    def _sync_dist(
        self, dist_sync_fn: Callable[..., list[Tensor]] = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        """Gather the states; where this process has no rows, it takes part with none of the others' width and dtype."""
        for name, default in self._defaults.items():
            rows = getattr(self, name)
            if not isinstance(default, list):
                continue
            own = stacked(rows) if len(rows) else None
            kind = [-1, 0] if own is None else [_DTYPES.index(own.dtype), own.shape[1]]
            found = dist_sync_fn(torch.tensor(kind, device=self.device), group=process_group or self.process_group)
            kinds = {tuple(k.tolist()) for k in found} - {(-1, 0)}
            if len({width for _, width in kinds}) > 1:
                raise ValueError(f"{type(self).__name__}: the processes hold networks of different architectures")
            if kinds:
                dtype = functools.reduce(torch.promote_types, (_DTYPES[code] for code, _ in kinds))
                empty = torch.empty(0, next(iter(kinds))[1], device=self.device)
                setattr(self, name, [(empty if own is None else own).to(dtype)])
        super()._sync_dist(dist_sync_fn, process_group)


def _differ() -> bool:
    """Whether other processes have seen other rows: those that work together have all seen all."""
    return count() == 1 and bool(jit_distributed_available())


class AverageMetric(BaseMetric):
    """The mean of all values that were seen: ``total``, their sum, over ``count``, their number."""

    total: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        zeros = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self.add_state("total", default=zeros, dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def add(self, total: Tensor, count: int) -> None:
        """Take the sum of ``count`` more values."""
        self.total = self.total + total.to(self.total)
        self.count = self.count + count

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take what :meth:`add` takes."""
        self.add(*args, **kwargs)

    def compute(self) -> Any:
        """The mean."""
        return self.total / self.count


def stacked(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """The rows of a list state, which is one tensor once processes have been synchronized."""
    return rows if isinstance(rows, Tensor) else torch.cat(list(rows))


def written(layout: Mapping[str, Any]) -> Tensor:
    """What the columns of rows mean, as a row of bytes: a state that travels with them."""
    return torch.tensor([list(json.dumps(layout).encode())], dtype=torch.uint8, device="cpu")


def read(layouts: Tensor | Sequence[Tensor]) -> dict[str, Any]:
    """What :func:`written` wrote; nothing, if nothing was.

    Raises:
        ValueError: if several were written and they differ.
    """
    if len(layouts) == 0:
        return {}
    pieces = [layouts] if isinstance(layouts, Tensor) else layouts
    found = {bytes(row) for piece in pieces for row in piece.tolist()}
    if len(found) > 1:
        raise ValueError("what was merged are networks of different architectures, or metrics with other options")
    layout: dict[str, Any] = json.loads(found.pop())
    return layout
