"""The posterior of the outputs: exact covariances, and samples shared by all inputs.

The outputs of the tangent linear model are Gaussian with mean ``f(x)`` and covariance ``J Sigma J^T``. Neither way
materializes Jacobians of a batch: covariances are added up layer by layer, samples are Jacobian-vector products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Block, KroneckerBlock, Posterior, rotate
from tu_symmetry.laplace.hooks import Watch, watching
from tu_symmetry.laplace.inputs import batch_size, follows, mapped, rows_of
from tu_symmetry.laplace.layers import EmbeddingLayer, Layer, MatrixLayer, Part
from tu_symmetry.laplace.tangent import TangentModel, evaluating, jacobians
from tu_symmetry.memory import require_memory

_ELEMENTS = 1 << 26
_COPIES = 16  # samples with which a backward pass works at its full speed
_DRAWN = 1 << 19  # entries of the weight samples that are drawn at once, where several chunks fit
_PASSES = 64  # multiplications in the time of one pass over an entry in memory


def function_covariance(
    tangent: TangentModel,
    posterior: Posterior,
    layers: Sequence[Layer] | None,
    inputs: Any,
    *,
    whole: Sequence[str] = (),
    joint: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[batch, outputs]`` and their exact covariances ``[batch, outputs, outputs]`` under the posterior.

    Outputs at several positions ``[batch, positions, outputs]`` have joint covariances, positions and outputs of each
    flattened to one axis. Jacobians of all inputs are held at once for a covariance between them (``joint``), and for
    gradients with respect to inputs that require one.

    Raises:
        ValueError: covariances, or the Jacobian of one sample, that would not fit the memory.
    """
    with evaluating(tangent.model):
        outputs = tangent.outputs(inputs)
        shape = outputs.shape[1:]
        width = shape.numel()
        if joint or follows(inputs):
            _require_room(outputs, tangent.size, together=True, joint=joint)
            found = _dense_covariance(tangent, posterior, None, inputs, shape, joint=joint)
            return outputs, found[0] if joint else found
        _require_room(outputs, 0 if layers is not None else tangent.size)
        if layers is None:
            step = max(1, _ELEMENTS // (tangent.size * width))
            pieces = [
                _dense_covariance(tangent, posterior, None, rows_of(inputs, slice(i, i + step)), shape)
                for i in range(0, len(outputs), step)
            ]
        else:
            watch = Watch(lambda layer, rows: None)
            with watching(tangent.model, layers, watch) as forward:
                forward(rows_of(inputs, slice(0, 1)), 1)
            other = tangent.over(whole) if whole else None
            longest = max(watch.outputs, _longest_vector(layers), other.size if other is not None else 0)
            step = max(1, _ELEMENTS // (longest * width))
            pieces = []
            for i in range(0, len(outputs), step):
                some = rows_of(inputs, slice(i, i + step))
                pieces.append(_layered_covariance(tangent, posterior, layers, some, shape))
                if other is not None:
                    own = {block.name: block for block in posterior.blocks if block.name in other.slots}
                    pieces[-1] += _dense_covariance(other, posterior, own, some, shape)
    return outputs, torch.cat(pieces)


def _require_room(outputs: Tensor, size: int, *, together: bool = False, joint: bool = False) -> None:
    """Refuse covariances that do not fit: ``outputs^2`` for each sample, twice while pieces are joined.

    Apart from Kronecker factors a sample's Jacobian is made, stacked from one gradient for each output, and whitened;
    those of all samples, where they are held together.
    """
    count, width, entry = len(outputs), outputs[0].numel(), outputs.element_size()
    positions = f" ({outputs.shape[1]} positions of {outputs.shape[2]})" if outputs.ndim == 3 else ""
    entries, held = count * width**2 * (count if joint else 1), width * size * (count if together else 1)
    require_memory(
        entry * (2 * entries + 4 * held),
        outputs.device,
        f"the exact covariances of {count} samples with {width} outputs each{positions}, {entries} entries "
        + (f"and the {'Jacobians of all' if together else 'Jacobian of one sample'}, {held}," if size else ","),
        "take samples instead (covariance='samples', or function_samples), or smaller batches",
    )


def _longest_vector(layers: Sequence[Layer]) -> int:
    """Entries of the longest parameter whose gradients are kept as vectors for each sample and output."""
    parts = [part for layer in layers for part in (None if _factored(layer) else layer.weight, layer.bias) if part]
    return max((part.size for part in parts), default=0)


def _factored(layer: Layer) -> bool:
    return isinstance(layer, (MatrixLayer, EmbeddingLayer))


def _dense_covariance(
    tangent: TangentModel,
    posterior: Posterior,
    own: dict[str, Block] | None,
    inputs: Any,
    shape: torch.Size,
    *,
    joint: bool = False,
) -> Tensor:
    """Covariances from Jacobians of single samples: of all blocks, or of those that cover one parameter each."""
    jacobian = jacobians(tangent, inputs, shape)
    if joint:
        jacobian = jacobian.flatten(0, 1).unsqueeze(0)
    covariance = jacobian.new_zeros(len(jacobian), jacobian.shape[1], jacobian.shape[1])
    for block in posterior.blocks if own is None else own.values():
        place = slice(block.start, block.stop) if own is None else slice(*tangent.slots[block.name][:2])
        white = posterior.whiten(block, jacobian[..., place])
        covariance += white @ white.mT
    return covariance


def _layered_covariance(
    tangent: TangentModel, posterior: Posterior, layers: Sequence[Layer], inputs: Any, shape: torch.Size
) -> Tensor:
    """Covariances from the gradients of every layer's output, which are kept for all outputs at once."""
    width = shape.numel()
    entered: dict[str, Tensor] = {}
    count = batch_size(inputs)
    turns = math.ceil(width / max(1, _COPIES // count))
    copies = math.ceil(width / turns)
    gradients: dict[str, list[Tensor | None]] = {layer.name: [None] * turns for layer in layers}

    def keep(turn: int, layer: Layer, gradient: Tensor) -> None:
        gradients[layer.name][turn] = gradient

    watch = Watch(lambda layer, rows: entered.update({layer.name: rows[:count]}))
    with watching(tangent.model, layers, watch) as forward:
        outputs = tangent.checked(forward(_repeated(inputs, copies), copies * count), copies * count)
        eye = torch.eye(turns * copies, width, dtype=outputs.dtype, device=outputs.device)
        directions = eye.repeat_interleave(count, 0).view(turns, copies * count, *shape)
        watch.backward(outputs, list(directions), keep)
    covariance = torch.zeros(count, width, width, dtype=outputs.dtype, device=outputs.device)
    starts = {block.start: block for block in posterior.blocks}
    for layer in layers:
        found = gradients.pop(layer.name)
        present = next((g for g in found if g is not None), None)
        if present is None:
            continue
        pieces = [torch.zeros_like(present) if g is None else g for g in found]
        stacked = (pieces[0] if turns == 1 else torch.cat(pieces)).unflatten(0, (-1, count))[:width]
        own = entered.pop(layer.name)
        if layer.bias is not None:
            block = _block(tangent, starts, layer.bias)
            white = posterior.whiten(block, layer.bias_gradients(stacked))
            covariance += white @ white.mT
        if layer.weight is not None:
            block = _block(tangent, starts, layer.weight)
            if isinstance(layer, MatrixLayer):
                assert isinstance(block, KroneckerBlock)
                _add_matrix(covariance, layer, block, posterior, layer.rows(own), stacked)
            elif isinstance(layer, EmbeddingLayer):
                _add_embedding(covariance, layer, block, posterior, layer.rows(own), stacked)
            else:
                white = posterior.whiten(block, layer.weight_gradients(layer.rows(own), stacked))
                covariance += white @ white.mT
    return covariance


def _repeated(inputs: Any, copies: int) -> Any:
    """Copies of a batch, one after the other: one backward pass serves as many outputs as there are copies."""
    return mapped(lambda own: own.repeat(copies, *[1] * (own.ndim - 1)), inputs)


def _block(tangent: TangentModel, starts: dict[int, Block], part: Part) -> Block:
    return starts[tangent.slots[part.parameter].start + part.offset]


def _add_matrix(
    covariance: Tensor, layer: MatrixLayer, block: KroneckerBlock, posterior: Posterior, rows: Tensor, gradients: Tensor
) -> None:
    """Add one weight matrix's part; ``gradients`` are ``[outputs of the net, batch, ...]``."""
    variance = block.precisions(posterior.log_precision, posterior.noise).reciprocal()
    columns = layer.gradient_columns(gradients.flatten(0, 1)).unflatten(0, gradients.shape[:2])
    a = rotate(rows, block.inputs)
    if a.shape[2] == 1:
        weight = rotate(a.square(), variance.mT).sqrt()
        white = (rotate(columns.mT, block.outputs) * weight).flatten(2).transpose(0, 1)
        covariance += white @ white.mT
        return
    width, positions = len(columns), a.shape[2]
    by_pairs = positions * (positions + 1) / 2 * (layer.outputs + _PASSES)
    by_gradients = width * layer.outputs * (positions + width + _PASSES)
    pairs = by_pairs < by_gradients and positions * max(positions * layer.outputs, layer.features) < _ELEMENTS
    for sample in range(len(a)):
        if pairs:
            covariance[sample] += _over_pairs(block.outputs.mT @ columns[:, sample], a[sample], variance)
        else:
            _add_gradients(covariance[sample], columns[:, sample], a[sample], block.outputs, variance.sqrt())


def _add_gradients(covariance: Tensor, g: Tensor, a: Tensor, basis: Tensor, deviation: Tensor) -> None:
    """Add one sample's covariance, from the gradients of the weight themselves.

    Args:
        covariance: ``[outputs of the net, outputs of the net]``.
        g: output gradients ``[outputs of the net, groups, outputs, positions]``.
        a: inputs in the basis ``[groups, positions, features]``.
        basis: the basis of the outputs ``[groups, outputs, outputs]``.
        deviation: posterior standard deviations ``[groups, outputs, features]``.
    """
    width, groups, outputs, positions = g.shape
    features = a.shape[2]
    first = positions > features and width * groups * outputs * features < _ELEMENTS  # before the outputs' rotation
    if not first:
        g = basis.mT @ g
    step = outputs if first else max(1, _ELEMENTS // (width * groups * features))
    for i in range(0, outputs, step):
        some = g[:, :, i : i + step].transpose(0, 1)
        own = (some.flatten(1, 2) @ a).unflatten(1, (width, -1))  # [groups, outputs of the net, step, features]
        if first:
            own = basis.mT.unsqueeze(1) @ own
        white = own.mul_(deviation[:, i : i + step].unsqueeze(1)).transpose(0, 1).flatten(1)
        covariance += white @ white.T


def _over_pairs(g: Tensor, a: Tensor, variance: Tensor) -> Tensor:
    """One sample's covariance, from products of its inputs at pairs of positions: no gradient of the weight appears.

    With ``W[o, t, u] = sum_f variance[o, f] a[t, f] a[u, f]`` it is ``sum_otu g[c, t, o] W[o, t, u] g[d, u, o]``. For
    three positions ``W[o]`` is made of the six products at ``(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)``, of which
    those off the diagonal count twice.

    Args:
        g: output gradients in the basis ``[outputs of the net, groups, outputs, positions]``.
        a: inputs in the basis ``[groups, positions, features]``.
        variance: posterior variances ``[groups, outputs, features]``.
    """
    groups, positions, features = a.shape
    first, second = torch.triu_indices(positions, positions, device=a.device)
    found = a.new_empty(groups, variance.shape[1], len(first))
    step = max(1, _ELEMENTS // (groups * features))
    for i in range(0, len(first), step):
        products = a[:, first[i : i + step]] * a[:, second[i : i + step]]
        found[:, :, i : i + step] = variance @ products.mT
    places = torch.empty(positions, positions, dtype=torch.long, device=a.device)
    places[first, second] = places[second, first] = torch.arange(len(first), device=a.device)
    weights = found[:, :, places]  # [groups, outputs, positions, positions]
    left = g.permute(1, 2, 0, 3) @ weights
    joint = left.permute(2, 0, 1, 3).flatten(1) @ g.flatten(1).T
    return (joint + joint.T) / 2


def _add_embedding(
    covariance: Tensor, layer: EmbeddingLayer, block: Block, posterior: Posterior, rows: Tensor, gradients: Tensor
) -> None:
    deviation = block.precisions(posterior.log_precision, posterior.noise).rsqrt().view(layer.entries, layer.features)
    deviation = deviation.expand(layer.entries, layer.features)
    found = [layer.summed(rows, gradient) for gradient in gradients]
    pairs = found[0][1]
    white = torch.stack([values for values, _ in found], dim=1) * deviation[pairs % layer.entries].unsqueeze(1)
    covariance.index_add_(0, pairs // layer.entries, white @ white.mT)


class WeightSamples:
    """Samples of the weights' posterior, the same ones for every batch.

    Sample ``i`` is a function of the seed and ``i`` alone (the noise of a CPU generator with seed
    ``1_000_003 * seed + i``, turned by the symmetric root of the covariance, which depends on no choice of
    eigenvectors). Every block turns all samples at once as long as these are small; samples beyond the memory limit are
    drawn anew when they are asked for.

    Attributes:
        posterior: what is sampled (zero mean).
        count: number of samples.
        chunk: number of samples that are handed out together.
    """

    def __init__(
        self, posterior: Posterior, count: int, seed: int, like: Tensor, *, memory: int = 1 << 30, chunk: int = 8
    ) -> None:
        self.posterior, self.count, self.seed, self.like, self.chunk = posterior, count, seed, like, chunk
        self._limit = memory // (like.element_size() * max(1, posterior.size))
        self._together = chunk * max(1, _DRAWN // (chunk * max(1, posterior.size)))
        self._kept: dict[int, Tensor] = {}

    def chunks(self) -> Iterator[Tensor]:
        """The samples ``[n, size]``, a few at a time."""
        for first in range(0, self.count, self._together):
            last = min(first + self._together, self.count)
            starts = range(first, last, self.chunk)
            drawn = None if all(i in self._kept for i in starts) else self._draw(first, last)
            for start in starts:
                if drawn is None:
                    yield self._kept[start]
                    continue
                stop = min(start + self.chunk, last)
                own = drawn[start - first : stop - first]
                if stop <= self._limit:
                    self._kept[start] = own
                yield own

    def _draw(self, first: int, last: int) -> Tensor:
        noise = torch.empty(last - first, self.posterior.size, dtype=self.like.dtype, device="cpu")
        for number, row in enumerate(noise, first):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            torch.randn(self.posterior.size, generator=generator, device="cpu", out=row)
        return self.posterior.sample(noise.to(self.like.device))


def function_samples(tangent: TangentModel, samples: WeightSamples, inputs: Any) -> tuple[Tensor, Tensor]:
    """Outputs ``f(x)`` and samples of the tangent model's outputs, less ``f(x)``: ``[samples, *outputs.shape]``.

    Samples are Jacobian-vector products with the same weights for all inputs, so that they are joint in the inputs.

    Raises:
        ValueError: samples that would not fit the memory.
    """
    with evaluating(tangent.model):
        outputs = tangent.outputs(inputs)
        require_memory(
            4 * samples.count * outputs.numel() * outputs.element_size(),
            outputs.device,
            f"a prediction of {samples.count} samples of {tuple(outputs.shape)} outputs",
            "take smaller batches (predict(loader) goes through one after the other), or fewer num_samples",
        )
        changes = [tangent.jvps(inputs, chunk) for chunk in samples.chunks()]
    return outputs, torch.cat(changes)


def within_positions(outputs: Tensor, covariance: Tensor) -> Tensor:
    """Covariances within each position ``[batch, positions, outputs, outputs]``, of joint ones.

    Args:
        outputs: ``[batch, positions, outputs]``; without positions the joint covariances are already what is wanted.
        covariance: ``[batch, positions * outputs, positions * outputs]``.
    """
    if outputs.ndim == 2:
        return covariance
    _, positions, count = outputs.shape
    split = covariance.view(-1, positions, count, positions, count)
    return split.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def gaussian_samples(covariance: Tensor, count: int, seed: int) -> Tensor:
    """Samples ``[count, ..., outputs]`` of zero-mean Gaussians with covariances ``[..., outputs, outputs]``, for means.

    The noise is a scrambled Sobol sequence: each sample is normal, and together they cover the space more evenly than
    independent ones, so that means have a smaller error. It is the same for every input, and the symmetric root is
    unique: results do not depend on how inputs are split into batches.
    """
    root = _Root.apply(covariance)
    points = torch.quasirandom.SobolEngine(covariance.shape[-1], scramble=True, seed=seed).draw(
        count, dtype=torch.float64
    )
    noise = torch.special.ndtri(points.clamp(1e-12, 1 - 1e-12)).to(covariance)
    return torch.einsum("...cd,sd->s...c", root, noise)


class _Root(torch.autograd.Function):
    """The symmetric root of a covariance, with a gradient also where eigenvalues are equal, as those of a sum are."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(covariance)
        deviations = values.clamp(min=0).sqrt()
        ctx.save_for_backward(deviations, vectors)
        return (vectors * deviations.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The derivative of ``R R = C``: ``R dR + dR R = dC``, a division in the eigenbasis; 0 without variance."""
        deviations, vectors = ctx.saved_tensors
        sums = deviations.unsqueeze(-1) + deviations.unsqueeze(-2)
        limit = torch.finfo(sums.dtype).eps ** 0.5 * deviations.amax(-1)[..., None, None]
        inside = vectors.mT @ ((gradient + gradient.mT) / 2) @ vectors
        return vectors @ torch.where(sums > limit, inside / sums, 0) @ vectors.mT
