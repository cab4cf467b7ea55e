"""The training data of the search for the joint optimum, and products with the network's Jacobian at all of them.

Data are read once. What a product needs of the network is computed once, too, and kept where it fits a memory budget,
for batches that are joined to chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.data import all_reduce, own_batches, together
from tu_symmetry.laplace.inputs import batch_size, joined, mapped, rows_of, structure, tensors_in
from tu_symmetry.laplace.likelihood import Likelihood
from tu_symmetry.laplace.tangent import Linearization, TangentModel
from tu_symmetry.processes import adding

BUDGET = 2 << 30  # bytes, of data and linearizations
_CHUNK = 256 << 20  # bytes that the network keeps for the backward pass of one chunk
_COPIES = 2  # what is kept for J and for J^T is about as much each


class TrainingData:
    """Chunks of the training data, and products with the Jacobian at all of them.

    ``chunks``, ``targets`` and ``outputs`` are those of this process, with ``entries`` numbers in the outputs. Of all
    processes are ``samples``, the mean bytes ``size`` of the data, and how many chunks are ``kept`` linearized.
    """

    def __init__(
        self, tangent: TangentModel, likelihood: Likelihood, loader: Iterable[Any], *, budget: int = BUDGET
    ) -> None:
        self.tangent, self.likelihood = tangent, likelihood
        device = tangent.point().device
        self.chunks: list[Any] = []
        self.targets: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._linear: list[Linearization | None] = []
        with together(device):
            read = list(own_batches(loader, device))
            size = sum(t.numel() * t.element_size() for pair in read for own in pair for t in tensors_in(own))
            first = rows_of(read[0][0], slice(0, 8))
            each = max(1.0, _saved(tangent, first) / batch_size(first))
            affordable = int((budget - size) / (_COPIES * each))
            rows = max(1, int(_CHUNK / each)) if affordable > 0 and tangent.joins else 0
            for inputs, targets in _joined(read, rows):
                # what is not joined is linearized already
                affords = affordable >= batch_size(inputs) or not tangent.joins
                affordable -= batch_size(inputs) if affords else 0
                own = tangent.linearize(inputs) if affords else None
                outputs = tangent.outputs(inputs) if own is None else own.outputs
                self.chunks.append(inputs)
                self._linear.append(own)
                self.outputs.append(outputs)
                self.targets.append(likelihood.targets(outputs, targets))
        self.entries = sum(o.numel() for o in self.outputs)
        own_samples = float(sum(len(o) for o in self.outputs))
        kept = sum(own is not None for own in self._linear)
        counts = torch.tensor([own_samples, kept, size / adding()], dtype=torch.float64, device=device)
        all_reduce(counts)
        self.samples, self.kept, self.size = (round(float(count)) for count in counts)

    def push(self, vector: Tensor) -> list[Tensor]:
        """The Jacobian times a flat vector, chunk by chunk in the outputs' shapes."""
        pairs = zip(self.chunks, self._linear, strict=True)
        return [self.tangent.jvp(inputs, vector)[1] if own is None else own.push(vector) for inputs, own in pairs]

    def pull(self, cotangents: Sequence[Tensor]) -> Tensor:
        """The transposed Jacobian times cotangents in the outputs' shapes, summed over all data: a flat vector."""
        found = torch.zeros_like(self.tangent.point())
        for inputs, own, cotangent in zip(self.chunks, self._linear, cotangents, strict=True):
            found += self.tangent.vjp(inputs, cotangent) if own is None else own.pull(cotangent)
        all_reduce(found)
        return found


def _saved(tangent: TangentModel, inputs: Any) -> int:
    """Bytes that the network keeps for a backward pass, without its weights."""
    inputs = mapped(torch.clone, inputs)  # rows of a batch share the storage of all of it
    seen: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in tangent.state().values()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node holds is never freed

    own = {name: p.detach().requires_grad_() for name, p in tangent.parameters().items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tangent.function(inputs)(own)
    return sum(seen.values())


def _joined(read: Sequence[tuple[Any, Tensor]], rows: int) -> Iterable[tuple[Any, Tensor]]:
    """Batches joined to chunks of up to ``rows`` samples, where they have one shape; larger ones stay as they are."""
    bounds, count = [0], 0
    for number, (inputs, targets) in enumerate(read):
        before = read[number - 1]
        alike = structure(inputs) == structure(before[0]) and targets.shape[1:] == before[1].shape[1:]
        if number and (count + batch_size(inputs) > rows or not alike):
            bounds.append(number)
            count = 0
        count += batch_size(inputs)
    for start, stop in pairwise([*bounds, len(read)]):
        some = read[start:stop]
        yield joined([inputs for inputs, _ in some]), torch.cat([targets for _, targets in some])
