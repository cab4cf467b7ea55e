"""Second moments of what goes into a layer: summed up in whichever form is cheapest, and decomposed."""

from __future__ import annotations

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import decompose, decompose_rows
from tu_symmetry.laplace.data import all_reduce, processes
from tu_symmetry.laplace.layers import MatrixLayer
from tu_symmetry.laplace.patches import ShiftedGrams, gram, positions_of

_ELEMENTS = 1 << 24  # entries of the rows that are made at once


class InputMoments:
    """The mean of ``a a^T`` over the rows that go into a layer.

    As long as there are at most half as many rows as features, the rows themselves are kept: they take less memory
    than the matrix, and so does its decomposition less time.

    Attributes:
        layer: the layer.
        reduce: average rows over the positions of a sample first.
        count: number of rows.
    """

    def __init__(self, layer: MatrixLayer, *, reduce: bool) -> None:
        self.layer, self.reduce = layer, reduce
        self.count = 0
        self._rows: list[Tensor] | None = []
        self._matrix: Tensor | None = None
        self._shifted = None if layer.convolution is None or reduce else ShiftedGrams(layer.convolution)

    def add(self, inputs: Tensor) -> None:
        """Count in a batch of the layer's inputs."""
        layer = self.layer
        features = layer.features * layer.groups
        conv = layer.convolution
        positions = inputs[0].numel() // features if conv is None else positions_of(inputs, conv)
        rows = len(inputs) * (1 if self.reduce else positions)
        self.count += rows
        keep = self._rows is not None and 2 * self.count <= layer.features
        if not keep:
            self._release()
        if not keep and self._shifted is not None and self._shifted.is_cheaper(inputs):
            self._shifted.add(inputs)
            return
        for part in inputs.split(max(1, _ELEMENTS // (positions * features))):
            if keep:
                assert self._rows is not None
                self._rows.append(self._rows_of(part).clone())  # the network may go on to work in place
            else:
                self._add(self._rows_of(part))

    def _rows_of(self, inputs: Tensor) -> Tensor:
        """``[groups, rows, features]``."""
        rows = self.layer.rows(inputs)
        return rows.mean(2).transpose(0, 1) if self.reduce else rows.transpose(0, 1).flatten(1, 2)

    def _add(self, rows: Tensor) -> None:
        update = gram(rows)
        self._matrix = update if self._matrix is None else self._matrix.add_(update)

    def _release(self) -> None:
        """Turn kept rows into their matrix."""
        kept, self._rows = self._rows, None
        if kept:
            self._add(torch.cat(kept, dim=1))

    def decompose(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[groups, features]`` and eigenvectors of the mean, over all processes."""
        if processes() > 1:
            self._release()
        if self._rows is not None:
            return decompose_rows(torch.cat(self._rows, dim=1) / self.count**0.5)
        parts = [self._matrix, None if self._shifted is None else self._shifted.total()]
        first, *rest = [part for part in parts if part is not None]
        total = first.add_(rest[0]) if rest else first
        count = torch.tensor(float(self.count), dtype=torch.float64, device=total.device)
        all_reduce(count, total)
        return decompose(total.div_(count.item()))
