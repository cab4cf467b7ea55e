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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.backpack import BackpackGradients
from tu_symmetry.laplace.blocks import (
    Block,
    CoupledBlock,
    DenseBlock,
    DiagonalBlock,
    KroneckerBlock,
    LowRankBlock,
    decompose,
    rotate,
    within_groups,
)
from tu_symmetry.laplace.data import all_reduce, batches, count_of, processes, together
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.hooks import Watch, find_layers, watching
from tu_symmetry.laplace.inputs import batch_size, rows_of
from tu_symmetry.laplace.layers import EmbeddingLayer, Layer, MatrixLayer, Part
from tu_symmetry.laplace.likelihood import Directions, FisherType, Likelihood
from tu_symmetry.laplace.moments import InputMoments
from tu_symmetry.laplace.tangent import TangentModel, evaluating
from tu_symmetry.memory import require_memory

Curvature = Literal["kfac", "ekfac", "full", "diag", "last_layer", "lowrank"]
KfacApprox = Literal["expand", "reduce"]
BiasCurvature = Literal["exact", "shared"]
Backend = Literal["hooks", "backpack"]
Progress = Callable[[dict[str, Any]], None]

_ELEMENTS = 1 << 26  # entries of the largest temporary tensors (256 MB in single precision)


@dataclass(frozen=True)
class Options:
    """How the curvature is approximated.

    Attributes:
        curvature: which structure.
        fisher_type: exact output Hessian, Monte-Carlo samples of the model, or the empirical Fisher (whose
            observations are the positions of a sample, where it has outputs at several).
        kfac_approx: of Kronecker factors.
        bias: ``exact``: the exact block of every bias; ``shared``: the gradient factor of its layer's weight, as
            laplace-torch and curvlinops do (they differ where positions share the bias, with ``expand``).
        mc_samples: targets that the Monte-Carlo Fisher draws for each sample.
        dense_limit: longest vector (bias, affine parameter) that gets a dense block; a longer one gets a diagonal.
        backend: where the gradients of single samples come from that ``diag`` and ``full`` are made of.
        rank: number of directions of a low-rank curvature.
    """

    curvature: Curvature = "kfac"
    fisher_type: FisherType = "type-2"
    kfac_approx: KfacApprox = "expand"
    bias: BiasCurvature = "exact"
    mc_samples: int = 1
    dense_limit: int = 4096
    backend: Backend = "hooks"
    rank: int = 100


@dataclass
class Summary:
    """What one pass over the data gives beside the curvature.

    Attributes:
        samples: number of samples seen, over all processes.
        loss: sum of the losses (nats) at the linearization point, for unit noise and without constants.
        outputs: number of the network's outputs for each sample, over all positions.
        positions: number of positions of each sample that have outputs of their own; the largest, where it varies.
        observations: number of targets that count, over all samples and processes: ignored labels do not. None where
            it is not known (older files, other packages).
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
        loader: Iterable[Any],
        progress: Progress | None,
        stage: str,
    ) -> None:
        self.tangent, self.likelihood, self.loader = tangent, likelihood, loader
        self.progress, self.stage, self.batches = progress, stage, count_of(loader)
        self.device = next(tangent.model.parameters()).device
        self.samples, self.outputs, self.positions, self.observations = 0, 0, 0, 0
        self.loss = torch.zeros((), dtype=torch.float64, device="cpu")

    def run(self, step: Callable[[Any, Tensor], Tensor]) -> Summary:
        """Call ``step(inputs, targets) -> outputs`` on every batch."""
        with together(self.device):
            for number, (inputs, targets) in enumerate(batches(self.loader, self.device), start=1):
                outputs = step(inputs, targets)
                loss = self.likelihood.loss(outputs, self.likelihood.targets(outputs, targets)).sum()
                if not torch.isfinite(loss):
                    raise ValueError(f"the loss of batch {number} is {float(loss)}: outputs or targets are not finite")
                self.loss += loss.double().cpu()
                self.samples += len(outputs)
                self.observations += self.likelihood.count(self.likelihood.observed(outputs, targets))
                self._size(outputs)
                if self.progress is not None:
                    self.progress(
                        {"stage": self.stage, "batch": number, "batches": self.batches, "samples": self.samples}
                    )
        counts = torch.tensor([self.samples, self.observations], dtype=torch.float64, device="cpu")
        totals = torch.cat([self.loss.unsqueeze(0), counts]).to(self.device)
        all_reduce(totals)
        loss, samples, observations = totals.tolist()
        return Summary(round(samples), loss, self.outputs, self.positions, round(observations))

    def _size(self, outputs: Tensor) -> None:
        """Note the number of outputs; the noise of a regression has to know that of all samples."""
        size = outputs[0].numel()
        if self.outputs not in (0, size) and self.likelihood.noisy:
            raise ValueError(
                f"the network has {self.outputs} outputs for the samples of one batch and {size} for those of another; "
                "the noise variance of a regression needs equally many for every sample"
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

    Args:
        tangent: the network.
        likelihood: the observation model.
        loader: the training data.
        groups: which weights share a precision.
        options: how the curvature is approximated.
        whole: parameters whose gradients come from the whole network and not from their layers: they get their exact
            block, or its diagonal where they are longer than the limit.
        first_pass: the data of the first pass, where it has been opened already.
        generator: of the Monte-Carlo Fisher.
        progress: called after each batch.

    Returns:
        The blocks in the order of the flat parameter vector, and the summary of the pass.

    Raises:
        ValueError: Kronecker factors under a prior with a precision for each weight, or a curvature that would not fit
            the memory.
    """
    require_separable(options.curvature, weights=groups.weights)
    one_pass = _Pass(tangent, likelihood, loader if first_pass is None else first_pass, progress, "curvature")
    one_pass.batches = count_of(loader)
    require_room(tangent, options, groups=len(groups), whole=whole)
    with evaluating(tangent.model):
        if options.curvature in ("full", "last_layer"):
            return _full(tangent, likelihood, one_pass, groups, options, generator)
        if options.curvature == "lowrank":
            return _low_rank(tangent, likelihood, one_pass, groups, options, generator)
        if options.curvature == "diag":
            return _diagonal(tangent, likelihood, one_pass, groups, options, generator)
        layers = find_layers(tangent.model, [name for name in tangent.names if name not in whole])
        factors = {layer.name: _Factors(layer, options) for layer in layers}
        others = _Whole(tangent, whole, options)
        summary = _accumulate(tangent, likelihood, one_pass, layers, factors, others, options, generator)
        blocks = [b for layer in layers for b in factors[layer.name].blocks(tangent, groups)]
        blocks += others.blocks(tangent, groups)
        if options.curvature == "ekfac":
            second = _Pass(tangent, likelihood, loader, progress, "eigenvalues")
            _correct(tangent, likelihood, second, layers, blocks, options, generator)
    return sorted(blocks, key=lambda b: b.start), summary


def require_separable(curvature: Curvature, *, weights: bool) -> None:
    """Refuse Kronecker factors where every weight has a precision of its own.

    Raises:
        ValueError: they have no common eigenbasis with the prior.
    """
    if weights and curvature in ("kfac", "ekfac"):
        raise ValueError(
            f"prior='diagonal' and curvature={curvature!r} do not go together: a Kronecker product plus a diagonal, "
            "A x G + Lambda, has no eigenvectors made of those of its factors, so that it could only be inverted as "
            "the whole matrix. Choose curvature='diag' (everything separates), 'full', 'last_layer' or 'lowrank'; or "
            "prior='per_filter' or 'per_layer'"
        )


def require_room(tangent: TangentModel, options: Options, *, groups: int, whole: Sequence[str] = ()) -> None:
    """Refuse a curvature that would not fit the memory with what its decomposition and the evidence need.

    Counted is what is alive at the peak, in bytes for each entry (of single precision, in brackets of double precision;
    measured): 17 (34) of a matrix in one prior group, which LAPACK decomposes with two matrices of work space; 47 (43)
    over several groups, whose decompositions are made anew for every precision, in double precision; 36 (72) of
    ``rank`` rows while they are gathered; and for Kronecker factors one for each matrix, with the decomposition of the
    largest.

    Args:
        tangent: the network.
        options: of the curvature.
        groups: number of prior groups.
        whole: parameters without Kronecker factors.

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
    elif options.curvature == "lowrank":
        rank = min(options.rank, size)
        require_memory(
            max(9 * entry, entry + 24) * rank * size,
            point.device,
            f"a curvature of rank {rank} over {size} parameters ({entry * rank * size / 2**30:.1f} GiB of rows)",
            "choose a smaller rank=..., a subset with parameters=[...], or curvature='kfac'",
        )
    elif options.curvature in ("kfac", "ekfac"):
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


def _columns(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, options: Options, generator: torch.Generator | None
) -> Directions:
    outputs = outputs.detach()
    checked = likelihood.targets(outputs, targets)
    return likelihood.root(outputs, checked, options.fisher_type, mc_samples=options.mc_samples, generator=generator)


def _chunks(batch: int, entries: int) -> list[slice]:
    rows = max(1, _ELEMENTS // max(1, entries))
    return [slice(i, min(i + rows, batch)) for i in range(0, batch, rows)]


class _SampleGradients:
    """Gradients of single samples by ``torch.func``: any layer, one vectorized pass for each column."""

    def __init__(self, tangent: TangentModel) -> None:
        self._tangent = tangent

    def gradients(self, inputs: Any, columns: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each column (a cotangent in the outputs' shape) the gradients of all samples, ``[batch, size]``."""
        return (self._tangent.sample_gradients(inputs, column) for column in columns)

    def squares(self, inputs: Any, columns: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each column the squares of these gradients, summed over the samples, ``[size]``."""
        return (gradients.square_().sum(0) for gradients in self.gradients(inputs, columns))


def _source(tangent: TangentModel, options: Options) -> _SampleGradients | BackpackGradients:
    return BackpackGradients(tangent) if options.backend == "backpack" else _SampleGradients(tangent)


def _full(
    tangent: TangentModel,
    likelihood: Likelihood,
    one_pass: _Pass,
    groups: PriorGroups,
    options: Options,
    generator: torch.Generator | None,
) -> tuple[list[Block], Summary]:
    point = tangent.point()
    matrix = torch.zeros(tangent.size, tangent.size, dtype=point.dtype, device=point.device)
    source = _source(tangent, options)

    def step(inputs: Any, targets: Tensor) -> Tensor:
        outputs = tangent.outputs(inputs)
        root = _columns(likelihood, outputs, targets, options, generator)
        for rows in _chunks(len(outputs), tangent.size):
            for gradients in source.gradients(rows_of(inputs, rows), root.of(rows)):
                matrix.addmm_(gradients.T, gradients)
        return outputs

    summary = one_pass.run(step)
    all_reduce(matrix)
    number = groups.spread(torch.arange(len(groups), device="cpu"))
    if len(groups) > 1:
        return [CoupledBlock("all", 0, number, matrix)], summary
    values, vectors = decompose(matrix)
    return [DenseBlock("all", 0, torch.tensor(0, device="cpu"), vectors, values)], summary


def _low_rank(
    tangent: TangentModel,
    likelihood: Likelihood,
    one_pass: _Pass,
    groups: PriorGroups,
    options: Options,
    generator: torch.Generator | None,
) -> tuple[list[Block], Summary]:
    """The main directions of the curvature, in one pass: gradients join the rows kept so far, and the rest is dropped.

    What is dropped each time is the part below the largest ``rank`` singular values, so that ``R^T R`` never exceeds
    the curvature, and is equal to it where its rank is not larger.
    """
    rank, point = min(options.rank, tangent.size), tangent.point()
    rows: list[Tensor] = []

    def compress() -> None:
        joined = torch.cat(rows)
        if len(joined) > rank:
            _, vectors = decompose(joined @ joined.mT)
            joined = vectors[:, -rank:].mT @ joined
        rows[:] = [joined]

    def step(inputs: Any, targets: Tensor) -> Tensor:
        outputs = tangent.outputs(inputs)
        root = _columns(likelihood, outputs, targets, options, generator)
        for part in _chunks(len(outputs), tangent.size):
            for column in root.of(part):
                rows.append(tangent.sample_gradients(rows_of(inputs, part), column))
                if sum(map(len, rows)) > 4 * rank:
                    compress()
        return outputs

    summary = one_pass.run(step)
    compress()
    if processes() > 1:
        every = point.new_zeros(processes(), rank, tangent.size)
        every[torch.distributed.get_rank(), : len(rows[0])] = rows[0]
        all_reduce(every)
        rows[:] = [every.flatten(0, 1)]
        compress()
    number = groups.spread(torch.arange(len(groups), device="cpu"))
    return [LowRankBlock("all", 0, number if len(groups) > 1 else torch.tensor(0, device="cpu"), rows[0])], summary


def _diagonal(
    tangent: TangentModel,
    likelihood: Likelihood,
    one_pass: _Pass,
    groups: PriorGroups,
    options: Options,
    generator: torch.Generator | None,
) -> tuple[list[Block], Summary]:
    diagonal = torch.zeros_like(tangent.point())
    source = _source(tangent, options)

    def step(inputs: Any, targets: Tensor) -> Tensor:
        outputs = tangent.outputs(inputs)
        root = _columns(likelihood, outputs, targets, options, generator)
        for rows in _chunks(len(outputs), tangent.size):
            for squares in source.squares(rows_of(inputs, rows), root.of(rows)):
                diagonal.add_(squares)
        return outputs

    summary = one_pass.run(step)
    all_reduce(diagonal)
    blocks: list[Block] = []
    for name, slot in tangent.slots.items():
        number = groups.of[name]
        if number.ndim == 1:
            number = number.repeat_interleave((slot.stop - slot.start) // len(number))
        blocks.append(DiagonalBlock(name, slot.start, number, diagonal[slot.start : slot.stop].clone()))
    return blocks, summary


def _rows_of_group(groups: PriorGroups, part: Part) -> Tensor:
    """Group numbers of a part's rows, 0-dim where there is one."""
    number = groups.of[part.parameter]
    if number.ndim == 0:
        return number
    row = part.size // part.shape[0]
    return number[part.offset // row : part.offset // row + part.shape[0]]


class _Factors:
    """Sums over the data of one layer's factors."""

    def __init__(self, layer: Layer, options: Options) -> None:
        self.layer, self.options = layer, options
        self.rows: Tensor | None = None
        self.sums: dict[str, Tensor] = {}
        self.inputs: InputMoments | None = None
        if isinstance(layer, MatrixLayer) and layer.weight is not None:
            self.inputs = InputMoments(layer, reduce=options.kfac_approx == "reduce")

    def _add(self, key: str, vectors: Tensor) -> None:
        """Add ``vectors^T vectors`` (or the sum of squares, for long vectors) to a sum."""
        dense = vectors.shape[-1] <= self.options.dense_limit
        self._sum(key, vectors.mT @ vectors if dense else vectors.square().sum(0))

    def _sum(self, key: str, update: Tensor) -> None:
        self.sums[key] = self.sums[key].add_(update) if key in self.sums else update

    def observe(self, inputs: Tensor) -> None:
        """The layer's input in a forward pass."""
        if self.inputs is not None:
            self.inputs.add(inputs)
        else:
            self.rows = None if self.layer.weight is None else self.layer.rows(inputs)

    def gradient(self, gradient: Tensor) -> None:
        """A gradient with respect to the layer's output."""
        layer, options = self.layer, self.options
        if isinstance(layer, MatrixLayer):
            shared = layer.bias is not None and options.bias == "shared"
            if layer.weight is not None or shared:
                self._sum("outputs", layer.gradient_gram(gradient, reduce=options.kfac_approx == "reduce"))
            if layer.bias is not None and not shared:
                self._add("bias", layer.bias_gradient(gradient))
            return
        if isinstance(layer, EmbeddingLayer):
            assert self.rows is not None
            values, pairs = layer.summed(self.rows, gradient)
            if "weight" not in self.sums:
                self.sums["weight"] = gradient.new_zeros(layer.entries, layer.features)
            self.sums["weight"].index_add_(0, pairs % layer.entries, values.square_())
            return
        if layer.weight is not None:
            assert self.rows is not None
            for part in _chunks(len(gradient), layer.weight.size):
                self._add("weight", layer.weight_gradient(self.rows[part], gradient[part]))
        if layer.bias is not None:
            self._add("bias", layer.bias_gradient(gradient))

    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        """Sum over processes, decompose."""
        all_reduce(*(self.sums[key] for key in sorted(self.sums)))
        layer, found = self.layer, []
        if layer.weight is not None:
            start = tangent.slots[layer.weight.parameter].start + layer.weight.offset
            number = _rows_of_group(groups, layer.weight)
            if isinstance(layer, MatrixLayer):
                found.append(self._kronecker(layer, layer.weight, start, number))
            else:
                own = self.sums["weight"].reshape(-1) if isinstance(layer, EmbeddingLayer) else self.sums["weight"]
                found.append(_vector_block(layer.weight.parameter, start, number, own))
        if layer.bias is not None:
            start = tangent.slots[layer.bias.parameter].start + layer.bias.offset
            matrix = self.sums["bias"] if "bias" in self.sums else torch.block_diag(*self.sums["outputs"])
            found.append(_vector_block(layer.bias.parameter, start, _rows_of_group(groups, layer.bias), matrix))
        self.sums, self.inputs = {}, None
        return found

    def _kronecker(self, layer: MatrixLayer, part: Part, start: int, number: Tensor) -> Block:
        assert self.inputs is not None
        values, vectors = self.inputs.decompose()
        split = number.reshape(layer.groups, -1, 1) if number.ndim else number
        pairs = [
            within_groups(g, split[i].squeeze(-1) if number.ndim else number)
            for i, g in enumerate(self.sums["outputs"])
        ]
        return KroneckerBlock(
            part.parameter,
            start,
            split,
            vectors,
            values,
            torch.stack([basis for _, basis in pairs]),
            torch.stack([own for own, _ in pairs]),
        )


class _Whole:
    """Sums over the data for parameters whose gradients come from the whole network, sample by sample."""

    def __init__(self, tangent: TangentModel, names: Sequence[str], options: Options) -> None:
        self.tangent = tangent.over(names) if names else None
        self.limit = options.dense_limit
        self.sums: dict[str, Tensor] = {}

    def add(self, inputs: Any, root: Directions) -> None:
        """Count in a batch."""
        if self.tangent is None:
            return
        for rows in _chunks(batch_size(inputs), self.tangent.size):
            some = rows_of(inputs, rows)
            for column in root.of(rows):
                gradients = self.tangent.sample_gradients(some, column)
                for name, slot in self.tangent.slots.items():
                    own = gradients[:, slot.start : slot.stop]
                    update = own.mT @ own if own.shape[1] <= self.limit else own.square().sum(0)
                    self.sums[name] = self.sums[name].add_(update) if name in self.sums else update

    def blocks(self, tangent: TangentModel, groups: PriorGroups) -> list[Block]:
        """Sum over processes, decompose."""
        all_reduce(*(self.sums[name] for name in sorted(self.sums)))
        found = []
        for name, matrix in self.sums.items():
            slot = tangent.slots[name]
            number = _rows_of_group(groups, Part(name, slot.shape))
            found.append(_vector_block(name, slot.start, number, matrix))
        return found


def _vector_block(name: str, start: int, number: Tensor, matrix: Tensor) -> Block:
    """A dense block of a matrix, a diagonal one of a vector."""
    if number.ndim:
        number = number.repeat_interleave(len(matrix) // len(number))
    if matrix.ndim == 1:
        return DiagonalBlock(name, start, number, matrix)
    values, vectors = within_groups(matrix, number)
    return DenseBlock(name, start, number, vectors, values)


def _accumulate(
    tangent: TangentModel,
    likelihood: Likelihood,
    one_pass: _Pass,
    layers: Sequence[Layer],
    factors: dict[str, _Factors],
    others: _Whole,
    options: Options,
    generator: torch.Generator | None,
) -> Summary:
    watch = Watch(lambda layer, inputs: factors[layer.name].observe(inputs))
    with watching(tangent.model, layers, watch) as forward:

        def step(inputs: Any, targets: Tensor) -> Tensor:
            outputs = tangent.checked(forward(inputs, batch_size(inputs)), batch_size(inputs))
            root = _columns(likelihood, outputs, targets, options, generator)
            watch.backward(outputs, root, lambda _, layer, gradient: factors[layer.name].gradient(gradient))
            others.add(inputs, root)
            return outputs.detach()

        return one_pass.run(step)


def _correct(
    tangent: TangentModel,
    likelihood: Likelihood,
    one_pass: _Pass,
    layers: Sequence[Layer],
    blocks: Sequence[Block],
    options: Options,
    generator: torch.Generator | None,
) -> None:
    """EKFAC (arXiv 1806.03884): eigenvalues are the second moments of gradients in the Kronecker eigenbasis.

    Directions that a factor has none of are left out, where they hold all that can occur: their computed second
    moments are rounding errors, of the order of the machine epsilon and not of its square.
    """
    own: dict[str, KroneckerBlock] = {}
    for layer in layers:
        for block in blocks:
            if (
                isinstance(block, KroneckerBlock)
                and layer.weight is not None
                and block.start == tangent.slots[layer.weight.parameter].start + layer.weight.offset
            ):
                own[layer.name] = block
    for block in own.values():
        block.corrected = torch.zeros(block.shape, dtype=block.inputs.dtype, device=block.inputs.device)
    rows: dict[str, Tensor] = {}

    def observe(layer: Layer, inputs: Tensor) -> None:
        if layer.name in own:
            rows[layer.name] = rotate(layer.rows(inputs), own[layer.name].inputs)

    def add(_: int, layer: Layer, gradient: Tensor) -> None:
        if layer.name not in own:
            return
        assert isinstance(layer, MatrixLayer)
        block = own[layer.name]
        assert block.corrected is not None
        g = rotate(layer.gradient_rows(gradient), block.outputs)
        a = rows[layer.name]
        if a.shape[2] == 1:
            block.corrected += torch.einsum("nbto,nbti->boi", g.square(), a.square())
            return
        for part in _chunks(len(g), block.stop - block.start):
            block.corrected += (g[part].mT @ a[part]).square_().sum(0)

    watch = Watch(observe)
    with watching(tangent.model, layers, watch) as forward:

        def step(inputs: Any, targets: Tensor) -> Tensor:
            forward(rows_of(inputs, slice(0, 1)), 1)  # how much of the rotated inputs one sample needs
            found = []
            for part in _chunks(batch_size(inputs), sum(r.numel() for r in rows.values())):
                own_inputs = rows_of(inputs, part)
                count = batch_size(own_inputs)
                outputs = tangent.checked(forward(own_inputs, count), count)
                watch.backward(outputs, _columns(likelihood, outputs, targets[part], options, generator), add)
                found.append(outputs.detach())
            return torch.cat(found)

        one_pass.run(step)
    all_reduce(*(b.corrected for b in own.values() if b.corrected is not None))
    if options.kfac_approx == "expand":
        for block in own.values():
            assert block.corrected is not None
            block.corrected *= (block.input_values > 0).unsqueeze(-2)
            if options.fisher_type != "mc":  # whose draws are others than those of the factors
                block.corrected *= (block.output_values > 0).unsqueeze(-1)
