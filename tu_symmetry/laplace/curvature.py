"""Curvature of the loss: the generalized Gauss-Newton matrix, accumulated over a loader.

All curvatures are sums over samples (and positions with outputs of their own), for unit noise variance. Kronecker
factors follow arXiv 2311.00636; parameters of modules that have none get their exact block, or its diagonal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import (
    Block,
    CoupledBlock,
    DenseBlock,
    DiagonalBlock,
    KroneckerBlock,
    decompose,
    decompose_rows,
)
from tu_symmetry.laplace.data import all_reduce, count_of, own_batches, placed, together
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.hooks import find_layers, watching
from tu_symmetry.laplace.inputs import batch_size, rows_of
from tu_symmetry.laplace.layers import EmbeddingLayer, Layer, MatrixLayer
from tu_symmetry.laplace.likelihood import Directions, FisherType, Likelihood
from tu_symmetry.laplace.patches import ShiftedGrams, gram
from tu_symmetry.laplace.tangent import LastLayerModel, Slot, TangentModel, evaluating
from tu_symmetry.memory import require_memory
from tu_symmetry.processes import shared, sharing

Curvature = Literal["kfac", "full", "diag", "last_layer"]
KfacApprox = Literal["expand", "reduce"]
BiasCurvature = Literal["exact", "shared"]
Progress = Callable[[dict[str, Any]], None]

DENSE_LIMIT = 4096  # entries of a parameter without Kronecker factors up to which its block is dense, and not diagonal
_ELEMENTS = 1 << 26  # entries of the largest temporary tensors (256 MB in single precision)
_LAST_LAYER = 2048  # weights of a last layer up to which its curvature is exact
_ROWS = 1 << 24  # entries of the rows of a layer's inputs that are made at once


@dataclass(frozen=True)
class Options:
    """How the curvature is approximated; :class:`tu_symmetry.LinearizedLaplace` says what each option is."""

    curvature: Curvature = "kfac"
    fisher_type: FisherType = "type-2"
    kfac_approx: KfacApprox = "expand"
    bias: BiasCurvature = "exact"


@dataclass
class Summary:
    """What one pass over the data gives beside the curvature.

    ``samples`` are those of all processes, ``loss`` is their sum for unit noise and without constants (nats),
    ``outputs`` and ``positions`` are those of a sample.
    """

    samples: int
    loss: float
    outputs: int
    positions: int = 1


def fit_curvature(
    tangent: TangentModel,
    likelihood: Likelihood,
    loader: Iterable[Any],
    groups: PriorGroups,
    options: Options,
    *,
    whole: Sequence[str] = (),
    first_pass: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> tuple[list[Block], Summary]:
    """The blocks of the curvature in the order of the flat vector, and the summary of one pass over a loader.

    Parameters in ``whole`` get their exact block in place of Kronecker factors; ``first_pass`` has the batches of a
    pass over ``loader`` that was begun.

    Raises:
        ValueError: a curvature that would not fit the memory; a loss that is not finite.
    """
    require_room(tangent, options, groups=len(groups), whole=whole)
    layers: list[Layer] = []
    if form_of(tangent, options) == "kfac":
        layers = find_layers(tangent.model, [name for name in tangent.names if name not in whole])
    factors = {layer.name: _Factors(layer, options) for layer in layers}
    last = tangent if isinstance(tangent, LastLayerModel) and layers else None
    exact = _Exact(tangent, options, whole)
    generator = torch.Generator().manual_seed(0)
    found, device = Summary(0, 0.0, 0, 0), tangent.point().device
    totals = torch.zeros(2, dtype=torch.float64, device="cpu")
    with (
        evaluating(tangent.model),
        watching(
            tangent.model, [] if last else layers, lambda layer, inputs: factors[layer.name].observe(inputs)
        ) as watch,
        together(device),
    ):
        for number, (inputs, targets) in enumerate(
            own_batches(loader if first_pass is None else first_pass, device), 1
        ):
            count = batch_size(inputs)
            if last is not None:  # no pass backward: gradients of its outputs are those of the network's
                features, outputs = last.features(inputs)
                checked = likelihood.targets(outputs, targets)
                factors[layers[0].name].last_layer(features, outputs, checked, likelihood, options, generator)
            else:
                watched = tangent.checked(watch.forward(inputs, count), count) if layers else tangent.outputs(inputs)
                outputs = watched.detach()
                checked = likelihood.targets(outputs, targets)
                root = likelihood.root(outputs, checked, options.fisher_type, generator)
                watch.backward(watched, root, lambda _, layer, gradient: factors[layer.name].gradient(gradient))
                exact.count(inputs, root)
            loss = float(likelihood.loss(outputs, checked).sum().double())
            if not math.isfinite(loss):
                raise ValueError(f"the loss of batch {number} is {loss}: outputs or targets are not finite")
            totals += torch.tensor([loss, count], dtype=torch.float64, device="cpu")
            size = outputs[0].numel()
            if found.outputs not in (0, size) and likelihood.noisy:
                raise ValueError(
                    f"the network has {found.outputs} outputs for the samples of one batch and {size} for those of "
                    "another; the variance of a regression needs equally many for every sample"
                )
            found.outputs = max(found.outputs, size)
            found.positions = max(found.positions, outputs.shape[1] if outputs.ndim == 3 else 1)
            if progress is not None:
                samples = round(float(totals[1]))
                progress({"stage": "curvature", "batch": number, "batches": count_of(loader), "samples": samples})
    totals, most = totals.to(device), torch.tensor([found.outputs, found.positions], device=device)
    all_reduce(totals)
    all_reduce(most, largest=True)
    found.outputs, found.positions = most.tolist()
    found.loss, found.samples = float(totals[0]), round(float(totals[1]))
    sums: list[_Sums] = [*factors.values(), exact]
    for own in sums:
        own.gather(device)
    with sharing():  # a decomposition is one process's
        made = shared(len(sums), lambda k: sums[k].blocks(tangent, groups), costs=[own.cost() for own in sums])
    return sorted((block.on(device) for some in made for block in some), key=lambda b: b.start), found


def form_of(tangent: TangentModel, options: Options) -> Literal["kfac", "full", "diag"]:
    """Of a last layer the exact matrix, or Kronecker factors where it would have more than 2,048 rows."""
    if options.curvature == "last_layer":
        return "full" if tangent.size <= _LAST_LAYER else "kfac"
    return options.curvature


def require_room(tangent: TangentModel, options: Options, *, groups: int, whole: Sequence[str] = ()) -> None:
    """Refuse, by a ``ValueError``, a curvature that would not fit the memory with its decompositions.

    Over several groups they are made anew for every precision, in double precision.
    """
    point = tangent.point()
    entry, size = point.element_size(), tangent.size
    kind = form_of(tangent, options)
    if kind == "full":
        needed = (5 * entry if groups == 1 else entry + 44) * size**2
        what = f"the exact curvature of {size} parameters, a matrix of {size} x {size}, with its decomposition,"
        instead = "choose curvature='kfac' or 'diag', or a subset with parameters=[...] or parameters='last_layer'"
        require_memory(needed, point.device, what, instead)
    elif kind == "kfac":
        found = find_layers(tangent.model, [name for name in tangent.names if name not in whole])
        matrices = [layer for layer in found if isinstance(layer, MatrixLayer) and layer.weight is not None]
        if not matrices:
            return
        widest = max(matrices, key=lambda layer: max(layer.features, layer.outputs))
        total = sum(layer.groups * (layer.features**2 + layer.outputs**2) for layer in matrices)
        largest = max(layer.groups * max(layer.features, layer.outputs) ** 2 for layer in matrices)
        what = f"a Kronecker-factored curvature, whose widest layer {widest.name!r} has {widest.features} features,"
        instead = f"leave {widest.name!r} out (parameters=[...]), or choose curvature='diag'"
        require_memory(entry * (total + 4 * largest), point.device, what, instead)


def _chunks(batch: int, entries: int) -> list[slice]:
    rows = max(1, _ELEMENTS // max(1, entries))
    return [slice(i, min(i + rows, batch)) for i in range(0, batch, rows)]


def _of_vectors(name: str, start: int, number: Tensor, found: Tensor) -> Block:
    """A dense block of a matrix, a diagonal one of a vector."""
    if found.ndim == 1:
        return DiagonalBlock(name, start, number, found)
    values, vectors = decompose(found)
    return DenseBlock(name, start, number, values, vectors)


class _Sums(ABC):
    """Named sums over the data, with second moments of vectors: their matrix, or its diagonal of long ones."""

    def __init__(self, dense_limit: int) -> None:
        self.dense_limit = dense_limit
        self.found: dict[str, Tensor] = {}

    def add(self, key: str, update: Tensor) -> None:
        self.found[key] = self.found[key].add_(update) if key in self.found else update

    def add_moments(self, key: str, vectors: Tensor) -> None:
        dense = vectors.shape[-1] <= self.dense_limit
        self.add(key, vectors.mT @ vectors if dense else vectors.square().sum(0))

    def gather(self, device: torch.device) -> None:
        """Add up what all processes have seen."""
        all_reduce(*(self.found[key] for key in sorted(self.found)))

    def cost(self) -> float:
        """Of the decompositions, in arbitrary units."""
        return sum(float(own[..., 0].numel() * own.shape[-1] ** 2) for own in self.found.values() if own.ndim > 1)

    @abstractmethod
    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        """The curvature of its parameters, decomposed."""


class _Factors(_Sums):
    """Sums over the data of one layer's factors."""

    def __init__(self, layer: Layer, options: Options) -> None:
        self.layer, self.reduce = layer, options.kfac_approx == "reduce"
        self.shared = options.bias == "shared" and isinstance(layer, MatrixLayer)
        self.rows: Tensor | None = None
        super().__init__(DENSE_LIMIT)
        self.inputs: InputMoments | None = None
        if isinstance(layer, MatrixLayer) and layer.weight is not None:
            self.inputs = InputMoments(layer, reduce=self.reduce)

    def observe(self, inputs: Tensor) -> None:
        if self.inputs is not None:
            self.inputs.add(inputs)
        else:
            self.rows = None if self.layer.weight is None else self.layer.rows(inputs)

    def last_layer(
        self,
        features: Tensor,
        outputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood,
        options: Options,
        generator: torch.Generator,
    ) -> None:
        """Where the layer's outputs are the network's: the sum of their Hessians, or the columns of its root."""
        self.observe(features)
        if options.fisher_type != "type-2" or outputs.ndim > 2:
            for column in likelihood.root(outputs, targets, options.fisher_type, generator):
                self.gradient(column)
            return
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        rows = [likelihood.hessian_product(outputs, targets, row.expand_as(outputs)).sum(0) for row in eye]
        hessian = torch.stack(rows)
        self.add("outputs", hessian.unsqueeze(0).clone())
        if self.layer.bias is not None and not self.shared:
            self.add("bias", hessian if len(hessian) <= self.dense_limit else hessian.diagonal().clone())

    def gradient(self, gradient: Tensor) -> None:
        layer = self.layer
        if layer.bias is not None and not self.shared:
            self.add_moments("bias", layer.bias_gradient(gradient))
        if isinstance(layer, MatrixLayer):
            if layer.weight is not None or self.shared:
                self.add("outputs", layer.gradient_gram(gradient, reduce=self.reduce))
        elif isinstance(layer, EmbeddingLayer):
            assert self.rows is not None
            values, pairs = layer.summed(self.rows, gradient)
            if "weight" not in self.found:
                self.found["weight"] = values.new_zeros(layer.entries, layer.features)
            self.found["weight"].index_add_(0, pairs % layer.entries, values.square_())
        elif layer.weight is not None:
            assert self.rows is not None
            for part in _chunks(len(gradient), layer.weight.size):
                self.add_moments("weight", layer.weight_gradient(self.rows[part], gradient[part]))

    def gather(self, device: torch.device) -> None:
        super().gather(device)
        if self.inputs is not None:
            self.inputs.gather(device)

    def cost(self) -> float:
        return super().cost() + (0.0 if self.inputs is None else self.inputs.cost())

    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        found: list[Block] = []
        for part, key in ((self.layer.weight, "weight"), (self.layer.bias, "bias")):
            if part is None:
                continue
            start, number = part.place(tangent.slots).start, groups.of[part.parameter]
            if key == "weight" and self.inputs is not None:
                values, vectors = self.inputs.decompose()
                output_values, output_vectors = decompose(self.found["outputs"])
                found.append(
                    KroneckerBlock(part.parameter, start, number, vectors, values, output_vectors, output_values)
                )
                continue
            own = torch.block_diag(*self.found["outputs"]) if self.shared else self.found[key]
            own = own.reshape(-1) if isinstance(self.layer, EmbeddingLayer) else own
            found.append(_of_vectors(part.parameter, start, number, own))
        self.found, self.inputs = {}, None
        return found


class _Exact(_Sums):
    """Sums of the whole network's gradients, sample by sample: of all weights together, or of some parameters."""

    def __init__(self, tangent: TangentModel, options: Options, whole: Sequence[str]) -> None:
        kind = form_of(tangent, options)
        self.tangent = tangent.over(whole) if kind == "kfac" else tangent
        super().__init__({"kfac": DENSE_LIMIT, "diag": 0}.get(kind, tangent.size))
        self.together = kind == "full"
        self.slots = {"all": Slot(0, tangent.size, (tangent.size,))} if self.together else dict(self.tangent.slots)

    def count(self, inputs: Any, root: Directions) -> None:
        for rows in _chunks(batch_size(inputs), self.tangent.size) if self.slots else ():
            gradients = self.tangent.gradients(rows_of(inputs, rows))
            for column in root.of(rows):
                found = gradients(column)
                for name, slot in self.slots.items():
                    self.add_moments(name, found[:, slot.start : slot.stop])

    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        if not self.together:
            found = self.found.items()
            return [_of_vectors(name, tangent.slots[name].start, groups.of[name], own) for name, own in found]
        if len(groups) == 1:
            return [_of_vectors("all", 0, torch.tensor(0, device="cpu"), self.found["all"])]
        number = groups.spread(torch.arange(len(groups), device="cpu"))
        return [CoupledBlock("all", 0, number, self.found["all"])]


class InputMoments:
    """The mean of ``a a^T`` over the rows that go into a layer; rows of a sample's mean position with ``reduce``.

    As long as there are at most half as many rows as features, the rows themselves are kept: they take less memory
    than the matrix, and so does its decomposition less time.
    """

    def __init__(self, layer: MatrixLayer, *, reduce: bool) -> None:
        self.layer, self.reduce = layer, reduce
        self.count = 0
        self._rows: list[Tensor] | None = []
        self._matrix: Tensor | None = None
        self._shifted: ShiftedGrams | None = None

    def add(self, inputs: Tensor) -> None:
        """Count in a batch of the layer's inputs."""
        layer, conv = self.layer, self.layer.convolution
        features, positions = layer.features * layer.groups, layer.rows(inputs[:1]).shape[2]
        self.count += len(inputs) * (1 if self.reduce else positions)
        if self._rows is not None and 2 * self.count > layer.features:
            self._release()
        if self._rows is None and conv is not None and not self.reduce and ShiftedGrams.serves(conv):
            self._shifted = self._shifted or ShiftedGrams(conv)
            self._shifted.add(inputs)
            return
        for part in inputs.split(max(1, _ROWS // (positions * features))):
            rows = layer.rows(part)
            rows = rows.mean(2).transpose(0, 1) if self.reduce else rows.transpose(0, 1).flatten(1, 2)
            if self._rows is not None:
                self._rows.append(rows.clone())  # the network may go on to work in place
            else:
                self._add(gram(rows))

    def _add(self, update: Tensor) -> None:
        self._matrix = update if self._matrix is None else self._matrix.add_(update)

    def _release(self) -> None:
        """Turn kept rows into their matrix."""
        kept, self._rows = self._rows, None
        if kept:
            self._add(gram(torch.cat(kept, dim=1)))

    def gather(self, device: torch.device) -> None:
        """Count in what all processes have seen: their rows, as long as these are few."""
        start, total = placed(self.count, device)
        if self._rows is not None and 2 * total <= self.layer.features:
            rows = torch.cat(self._rows, dim=1)
            if total > self.count:
                every = rows.new_zeros(len(rows), total, rows.shape[2])
                every[:, start : start + self.count] = rows
                all_reduce(every)
                rows = every
            self._rows = [rows]
        else:
            self._release()
            if self._shifted is not None:
                self._add(self._shifted.total())
            assert self._matrix is not None
            all_reduce(self._matrix)
        self.count, self._shifted = total, None

    def cost(self) -> float:
        """Of the decomposition, in the units of :meth:`_Sums.cost`."""
        return self.layer.groups * float(self.layer.features) ** 3 / (1 if self._rows is None else 8)

    def decompose(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[groups, features]`` and eigenvectors of the mean over what was gathered."""
        if self._rows is not None:
            return decompose_rows(self._rows[0] / self.count**0.5)
        assert self._matrix is not None
        return decompose(self._matrix / self.count)
