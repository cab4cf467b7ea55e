"""Curvature of the loss: generalized Gauss-Newton or empirical Fisher, accumulated over a loader.

All curvatures are sums over samples (not means), for unit noise variance. Kronecker factors follow "Kronecker-Factored
Approximate Curvature for Modern Neural Network Architectures" (arXiv 2311.00636): ``expand`` treats positions that
share a weight as samples, ``reduce`` adds up gradients and averages inputs over them. They are exact for one sample
without weight sharing, and for linear networks with a Gaussian likelihood (``expand`` where every position has outputs
of its own, ``reduce`` where positions are pooled, both without sharing). Parameters of all other modules get their
exact block, or its diagonal where they are longer than a limit.

Outputs at several positions of a sample, ``[batch, positions, outputs]``, are observations of their own: the curvature
is the sum over samples and positions, with one backward pass for each position and column of its root (the Monte-Carlo
Fisher draws all positions at once). Samples remain the first axis, so that positions that share a weight are told
from samples: flattened into the batch they would count the inputs of a layer as often as there are positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Block, CoupledBlock, DenseBlock, DiagonalBlock, KroneckerBlock, decompose
from tu_symmetry.laplace.data import all_reduce, batches, count_of, together
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.hooks import Watch, find_layers, watching
from tu_symmetry.laplace.inputs import batch_size, rows_of
from tu_symmetry.laplace.layers import EmbeddingLayer, Layer, MatrixLayer
from tu_symmetry.laplace.likelihood import Directions, FisherType, Likelihood
from tu_symmetry.laplace.moments import InputMoments
from tu_symmetry.laplace.tangent import TangentModel, evaluating
from tu_symmetry.memory import require_memory

Curvature = Literal["kfac", "full", "diag", "last_layer"]
KfacApprox = Literal["expand", "reduce"]
BiasCurvature = Literal["exact", "shared"]
Progress = Callable[[dict[str, Any]], None]

_ELEMENTS = 1 << 26  # entries of the largest temporary tensors (256 MB in single precision)


@dataclass(frozen=True)
class Options:
    """How the curvature is approximated.

    Attributes:
        curvature: which structure.
        fisher_type: exact output Hessian, Monte-Carlo samples of the model, or the empirical Fisher (whose
            observations are the positions of a sample, where it has outputs at several).
        kfac_approx: the approximation by Kronecker factors.
        bias: ``exact``: the exact block of every bias; ``shared``: the gradient factor of its layer's weight, as
            laplace-torch and curvlinops do (they differ where positions share the bias, with ``expand``).
        mc_samples: targets that the Monte-Carlo Fisher draws for each sample.
        dense_limit: longest vector (bias, affine parameter) that gets a dense block; a longer one gets a diagonal.
    """

    curvature: Curvature = "kfac"
    fisher_type: FisherType = "type-2"
    kfac_approx: KfacApprox = "expand"
    bias: BiasCurvature = "exact"
    mc_samples: int = 1
    dense_limit: int = 4096


@dataclass
class Summary:
    """What one pass over the data gives beside the curvature.

    Attributes:
        samples: number of samples seen, over all processes.
        loss: sum of the losses (nats) at the linearization point, for unit noise and without constants.
        outputs: number of the network's outputs for each sample, over all positions.
        positions: number of positions of each sample that have outputs of their own; the largest, where it varies.
        observations: number of targets that count, over all samples and processes: ignored labels do not. None where
            it is not known (of other packages).
    """

    samples: int
    loss: float
    outputs: int
    positions: int = 1
    observations: int | None = None


class _Pass:
    """One pass over the loader that also adds up samples and losses."""

    def __init__(
        self,
        tangent: TangentModel,
        likelihood: Likelihood,
        options: Options,
        generator: torch.Generator | None,
        progress: Progress | None,
    ) -> None:
        self.tangent, self.likelihood, self.options = tangent, likelihood, options
        self.generator, self.progress = generator, progress
        self.device = tangent.point().device
        self.samples, self.outputs, self.positions, self.observations = 0, 0, 0, 0
        self.loss = torch.zeros((), dtype=torch.float64, device="cpu")

    def run(self, loader: Iterable[Any], count: int | None, step: Callable[[Any, Tensor], Tensor]) -> Summary:
        """Call ``step(inputs, targets) -> outputs`` on every batch, of which there are ``count``."""
        with together(self.device):
            for number, (inputs, targets) in enumerate(batches(loader, self.device), start=1):
                outputs = step(inputs, targets)
                loss = self.likelihood.loss(outputs, self.likelihood.targets(outputs, targets)).sum()
                if not torch.isfinite(loss):
                    raise ValueError(f"the loss of batch {number} is {float(loss)}: outputs or targets are not finite")
                self.loss += loss.double().cpu()
                self.samples += len(outputs)
                self.observations += self.likelihood.count(self.likelihood.observed(outputs, targets))
                self._size(outputs)
                if self.progress is not None:
                    self.progress({"stage": "curvature", "batch": number, "batches": count, "samples": self.samples})
        counts = torch.tensor([self.samples, self.observations], dtype=torch.float64, device="cpu")
        totals = torch.cat([self.loss.unsqueeze(0), counts]).to(self.device)
        all_reduce(totals)
        loss, samples, observations = totals.tolist()
        return Summary(round(samples), loss, self.outputs, self.positions, round(observations))

    def root(self, outputs: Tensor, targets: Tensor) -> Directions:
        """Columns whose outer products are the chosen Fisher's output matrix."""
        outputs, options = outputs.detach(), self.options
        checked = self.likelihood.targets(outputs, targets)
        return self.likelihood.root(
            outputs, checked, options.fisher_type, mc_samples=options.mc_samples, generator=self.generator
        )

    def each_gradient(self, add: Callable[[Tensor], object]) -> Callable[[Any, Tensor], Tensor]:
        """A step that calls ``add`` with gradients of single samples ``[some, size]``, column by column."""

        def step(inputs: Any, targets: Tensor) -> Tensor:
            outputs = self.tangent.outputs(inputs)
            root = self.root(outputs, targets)
            for rows in _chunks(len(outputs), self.tangent.size):
                for column in root.of(rows):
                    add(self.tangent.sample_gradients(rows_of(inputs, rows), column))
            return outputs

        return step

    def _size(self, outputs: Tensor) -> None:
        """Note the number of outputs; the noise of a regression has to know that of all samples."""
        size = outputs[0].numel()
        if self.outputs not in (0, size) and self.likelihood.noisy:
            raise ValueError(
                f"the network has {self.outputs} outputs for the samples of one batch and {size} for those of another; "
                "the variance of a regression needs equally many for every sample"
            )
        self.outputs = max(self.outputs, size)
        self.positions = max(self.positions, outputs.shape[1] if outputs.ndim == 3 else 1)


def fit_curvature(
    tangent: TangentModel,
    likelihood: Likelihood,
    loader: Iterable[Any],
    groups: PriorGroups,
    options: Options,
    *,
    whole: Sequence[str] = (),
    first_pass: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> tuple[list[Block], Summary]:
    """Accumulate the curvature over a loader and decompose it.

    Returns:
        The blocks in the order of the flat parameter vector, and the summary of the pass.

    Raises:
        ValueError: another curvature than the diagonal with a precision for each weight, or one that would not fit the
            memory.
    """
    require_separable(options.curvature, weights=groups.weights)
    require_room(tangent, options, groups=len(groups), whole=whole)
    one_pass = _Pass(tangent, likelihood, options, generator, progress)
    data, count = loader if first_pass is None else first_pass, count_of(loader)
    with evaluating(tangent.model):
        if options.curvature in ("full", "last_layer"):
            matrix = torch.zeros(tangent.size, tangent.size, dtype=tangent.point().dtype, device=one_pass.device)
            summary = one_pass.run(data, count, one_pass.each_gradient(lambda own: matrix.addmm_(own.T, own)))
            all_reduce(matrix)
            if len(groups) == 1:
                return [_dense("all", 0, torch.tensor(0, device="cpu"), matrix)], summary
            number = groups.spread(torch.arange(len(groups), device="cpu"))
            return [CoupledBlock("all", 0, number, matrix)], summary
        if options.curvature == "diag":
            diagonal = torch.zeros_like(tangent.point())
            add = one_pass.each_gradient(lambda own: diagonal.add_(own.square_().sum(0)))
            summary = one_pass.run(data, count, add)
            all_reduce(diagonal)
            pieces = {name: (slot.start, diagonal[slot.start : slot.stop]) for name, slot in tangent.slots.items()}
            return [DiagonalBlock(n, at, groups.of[n], own.clone()) for n, (at, own) in pieces.items()], summary
        layers = find_layers(tangent.model, [name for name in tangent.names if name not in whole])
        factors = {layer.name: _Factors(layer, options) for layer in layers}
        others = _Whole(tangent, whole, options)
        watch = Watch(lambda layer, inputs: factors[layer.name].observe(inputs))
        with watching(tangent.model, layers, watch) as forward:

            def step(inputs: Any, targets: Tensor) -> Tensor:
                outputs = tangent.checked(forward(inputs, batch_size(inputs)), batch_size(inputs))
                root = one_pass.root(outputs, targets)
                watch.backward(outputs, root, lambda _, layer, gradient: factors[layer.name].gradient(gradient))
                others.add(inputs, root)
                return outputs.detach()

            summary = one_pass.run(data, count, step)
        blocks = [b for layer in layers for b in factors[layer.name].blocks(tangent, groups)]
        blocks += others.blocks(tangent, groups)
    return sorted(blocks, key=lambda b: b.start), summary


def require_separable(curvature: Curvature, *, weights: bool) -> None:
    """Refuse a precision for each weight with a curvature that couples weights.

    Raises:
        ValueError: they have no common eigenbasis.
    """
    if weights and curvature != "diag":
        raise ValueError(
            f"prior='diagonal' and curvature={curvature!r} do not go together: with a precision for each weight the "
            "posterior has no eigenvectors made of those of the curvature, so that it could only be inverted as the "
            "whole matrix. Choose curvature='diag' (everything separates), or prior='per_layer'"
        )


def require_room(tangent: TangentModel, options: Options, *, groups: int, whole: Sequence[str] = ()) -> None:
    """Refuse a curvature that would not fit the memory with what its decomposition and the evidence need.

    Counted is what is alive at the peak, in bytes for each entry of single precision (in brackets of double): 17 (34)
    of a matrix in one prior group, which LAPACK decomposes with two matrices of work space; 47 (43) over several
    groups, whose decompositions are made anew for every precision, in double precision; and for Kronecker factors one
    for each matrix, with the decomposition of the largest.

    Raises:
        ValueError: it would not fit; the message says what, how large, and what to do instead.
    """
    point = tangent.point()
    entry, size = point.element_size(), tangent.size
    if options.curvature in ("full", "last_layer"):
        each = 5 * entry if groups == 1 else entry + 44
        wide = options.curvature == "last_layer"
        require_memory(
            each * size**2,
            point.device,
            f"the exact curvature of {size} parameters{' of the last layer' * wide}, a matrix of {size} x {size} "
            f"({entry * size**2 / 2**30:.1f} GiB) with its decomposition,",
            "choose curvature='kfac' or 'diag' with parameters='last_layer'"
            if wide
            else "choose curvature='kfac' or 'diag', or a subset with parameters=[...]",
        )
    elif options.curvature == "kfac":
        found = find_layers(tangent.model, [name for name in tangent.names if name not in whole])
        sides = {
            layer.name: (layer.groups, layer.features, layer.outputs)
            for layer in found
            if isinstance(layer, MatrixLayer) and layer.weight is not None
        }
        if not sides:
            return
        widest = max(sides, key=lambda name: max(sides[name][1:]))
        largest = max(groups * max(a, b) ** 2 for groups, a, b in sides.values())
        total = sum(groups * (a**2 + b**2) for groups, a, b in sides.values())
        require_memory(
            entry * (total + 4 * largest),
            point.device,
            f"a Kronecker-factored curvature of {len(sides)} layers, the widest of which, {widest!r}, has matrices of "
            f"{sides[widest][1]} features and {sides[widest][2]} outputs,",
            f"leave {widest!r} out (parameters=[...]), or choose curvature='diag', which is as large as the network",
        )


def _chunks(batch: int, entries: int) -> list[slice]:
    rows = max(1, _ELEMENTS // max(1, entries))
    return [slice(i, min(i + rows, batch)) for i in range(0, batch, rows)]


def _dense(name: str, start: int, number: Tensor, matrix: Tensor) -> DenseBlock:
    values, vectors = decompose(matrix)
    return DenseBlock(name, start, number, vectors, values)


def _of_vectors(name: str, start: int, number: Tensor, found: Tensor) -> Block:
    """A dense block of a matrix, a diagonal one of a vector."""
    return DiagonalBlock(name, start, number, found) if found.ndim == 1 else _dense(name, start, number, found)


class _Sums:
    """Named sums over the data, with second moments of vectors: their matrix, or its diagonal of long ones."""

    def __init__(self, dense_limit: int) -> None:
        self.dense_limit = dense_limit
        self.found: dict[str, Tensor] = {}

    def add(self, key: str, update: Tensor) -> None:
        """Add to a sum."""
        self.found[key] = self.found[key].add_(update) if key in self.found else update

    def add_moments(self, key: str, vectors: Tensor) -> None:
        """Add ``vectors^T vectors``, or its diagonal."""
        dense = vectors.shape[-1] <= self.dense_limit
        self.add(key, vectors.mT @ vectors if dense else vectors.square().sum(0))

    def reduce(self) -> None:
        """Sum over processes."""
        all_reduce(*(self.found[key] for key in sorted(self.found)))


class _Factors:
    """Sums over the data of one layer's factors."""

    def __init__(self, layer: Layer, options: Options) -> None:
        self.layer, self.reduce = layer, options.kfac_approx == "reduce"
        self.shared = options.bias == "shared" and isinstance(layer, MatrixLayer)
        self.rows: Tensor | None = None
        self.sums = _Sums(options.dense_limit)
        self.inputs: InputMoments | None = None
        if isinstance(layer, MatrixLayer) and layer.weight is not None:
            self.inputs = InputMoments(layer, reduce=self.reduce)

    def observe(self, inputs: Tensor) -> None:
        """The layer's input in a forward pass."""
        if self.inputs is not None:
            self.inputs.add(inputs)
        else:
            self.rows = None if self.layer.weight is None else self.layer.rows(inputs)

    def gradient(self, gradient: Tensor) -> None:
        """A gradient with respect to the layer's output."""
        layer, sums = self.layer, self.sums
        if layer.bias is not None and not self.shared:
            sums.add_moments("bias", layer.bias_gradient(gradient))
        if isinstance(layer, MatrixLayer):
            if layer.weight is not None or self.shared:
                sums.add("outputs", layer.gradient_gram(gradient, reduce=self.reduce))
        elif isinstance(layer, EmbeddingLayer):
            assert self.rows is not None
            values, pairs = layer.summed(self.rows, gradient)
            if "weight" not in sums.found:
                sums.found["weight"] = gradient.new_zeros(layer.entries, layer.features)
            sums.found["weight"].index_add_(0, pairs % layer.entries, values.square_())
        elif layer.weight is not None:
            assert self.rows is not None
            for part in _chunks(len(gradient), layer.weight.size):
                sums.add_moments("weight", layer.weight_gradient(self.rows[part], gradient[part]))

    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        """Sum over processes, decompose."""
        self.sums.reduce()
        found: list[Block] = []
        for part, key in ((self.layer.weight, "weight"), (self.layer.bias, "bias")):
            if part is None:
                continue
            start, number = tangent.slots[part.parameter].start + part.offset, groups.of[part.parameter]
            if key == "weight" and self.inputs is not None:
                values, vectors = self.inputs.decompose()
                output_values, output_vectors = decompose(self.sums.found["outputs"])
                found.append(
                    KroneckerBlock(part.parameter, start, number, vectors, values, output_vectors, output_values)
                )
                continue
            own = torch.block_diag(*self.sums.found["outputs"]) if self.shared else self.sums.found[key]
            own = own.reshape(-1) if isinstance(self.layer, EmbeddingLayer) else own
            found.append(_of_vectors(part.parameter, start, number, own))
        self.sums.found, self.inputs = {}, None
        return found


class _Whole:
    """Sums over the data for parameters whose gradients come from the whole network, sample by sample."""

    def __init__(self, tangent: TangentModel, names: Sequence[str], options: Options) -> None:
        self.tangent = tangent.over(names) if names else None
        self.sums = _Sums(options.dense_limit)

    def add(self, inputs: Any, root: Directions) -> None:
        """Count in a batch."""
        if self.tangent is None:
            return
        for rows in _chunks(batch_size(inputs), self.tangent.size):
            some = rows_of(inputs, rows)
            for column in root.of(rows):
                gradients = self.tangent.sample_gradients(some, column)
                for name, slot in self.tangent.slots.items():
                    self.sums.add_moments(name, gradients[:, slot.start : slot.stop])

    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        """Sum over processes, decompose."""
        self.sums.reduce()
        return [_of_vectors(n, tangent.slots[n].start, groups.of[n], own) for n, own in self.sums.found.items()]
