"""The posterior of the outputs: exact covariances, samples shared by all inputs, and predictives.

The outputs of the tangent linear model are Gaussian with mean ``f(x)`` and covariance ``J Sigma J^T``. Covariances are
added up layer by layer where the layers have Kronecker factors; samples are Jacobian-vector products. Of the
temperature only :func:`tempered_predictives` knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Block, KroneckerBlock, Posterior, rotate
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.hooks import watching
from tu_symmetry.laplace.inputs import batch_size, mapped, rows_of
from tu_symmetry.laplace.layers import EmbeddingLayer, Layer, MatrixLayer, Part
from tu_symmetry.laplace.likelihood import LinkApprox
from tu_symmetry.laplace.outputs import class_axis_of
from tu_symmetry.laplace.tangent import LastLayerModel, TangentModel, evaluating, jacobians
from tu_symmetry.memory import require_memory

Covariance = Literal["auto", "exact", "samples"]

_EXACT_OUTPUTS = 128  # up to as many outputs, covariances are cheaper than 100 samples
_EXACT_ENTRIES = 1 << 26  # of the Jacobian of one sample
_ELEMENTS = 1 << 26
_COPIES = 16  # samples with which a backward pass works at its full speed
_PASSES = 64  # multiplications in the time of one pass over an entry in memory


def function_covariance(fitted: FittedLaplace, inputs: Any) -> tuple[Tensor, Tensor]:
    """Outputs ``[batch, outputs]`` and their exact covariances ``[batch, outputs, outputs]`` under the posterior.

    Positions and outputs of a sample are flattened to one axis in the covariances. Where there are no Kronecker
    factors, Jacobians of single samples are made.

    Raises:
        ValueError: covariances, or the Jacobian of one sample, that would not fit the memory.
    """
    tangent, layers = fitted.tangent, fitted.layers
    with evaluating(tangent.model):
        if isinstance(tangent, LastLayerModel) and in_closed_form(fitted):
            features, outputs = tangent.features(inputs)
            _require_room(outputs, 0)
            return outputs, _last_layer_covariance(fitted.posterior, features, outputs)
        outputs = tangent.outputs(inputs)
        shape = outputs.shape[1:]
        width = shape.numel()
        _require_room(outputs, 0 if layers is not None else tangent.size)
        longest, other = tangent.size, tangent.over(fitted.curvature.whole)
        if layers is not None:
            with watching(tangent.model, layers, lambda layer, rows: None) as watch:
                watch.forward(rows_of(inputs, slice(0, 1)), 1)
            longest = max(watch.outputs, _longest_vector(layers), other.size)
        step = max(1, _ELEMENTS // (longest * width))
        pieces = []
        for i in range(0, len(outputs), step):
            some = rows_of(inputs, slice(i, i + step))
            if layers is None:
                pieces.append(_dense_covariance(tangent, fitted.posterior, some, shape))
                continue
            pieces.append(_layered_covariance(tangent, fitted.posterior, layers, some, shape))
            if other.names:
                pieces[-1] += _dense_covariance(other, fitted.posterior, some, shape)
    return outputs, torch.cat(pieces)


def in_closed_form(fitted: FittedLaplace) -> bool:
    """Whether this is a last layer with Kronecker factors, whose inputs give everything."""
    return isinstance(fitted.tangent, LastLayerModel) and fitted.layers is not None


def function_variance(fitted: FittedLaplace, inputs: Any) -> tuple[Tensor, Tensor]:
    """Outputs and the diagonals of their covariances, in the outputs' shape; as :func:`function_covariance`."""
    tangent, posterior = fitted.tangent, fitted.posterior
    if not isinstance(tangent, LastLayerModel) or not in_closed_form(fitted):
        outputs, matrix = function_covariance(fitted, inputs)
        return outputs, matrix.diagonal(dim1=-2, dim2=-1).reshape(outputs.shape)
    with evaluating(tangent.model):
        features, outputs = tangent.features(inputs)
    variance = torch.zeros_like(outputs)
    for block in posterior.blocks:
        if isinstance(block, KroneckerBlock):
            own = block.precisions(posterior.log_precision, posterior.noise)[0].reciprocal()
            variance = variance + (features @ block.inputs[0]).square() @ own.mT @ block.outputs[0].square().mT
        else:
            eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
            variance = variance + block.whiten(eye, posterior.log_precision, posterior.noise).square().sum(-1)
    return outputs, variance


def _last_layer_covariance(posterior: Posterior, features: Tensor, outputs: Tensor) -> Tensor:
    """By the Kronecker factors of a linear layer, and its bias's block; positions share the weights, in pairs."""
    count, width = len(outputs), outputs.shape[-1]
    rows = features.reshape(count, -1, features.shape[-1])
    covariance = outputs.new_zeros(count, rows.shape[1], width, rows.shape[1], width)
    for block in posterior.blocks:
        if isinstance(block, KroneckerBlock):
            own, basis = rows @ block.inputs[0], block.outputs[0]
            variance = block.precisions(posterior.log_precision, posterior.noise)[0].reciprocal()
            pairs = torch.einsum("ntf,nuf,of->ntuo", own, own, variance)
            covariance += ((pairs.unsqueeze(-2) * basis) @ basis.mT).transpose(2, 3)
        else:
            eye = torch.eye(width, dtype=outputs.dtype, device=outputs.device)
            white = block.whiten(eye, posterior.log_precision, posterior.noise)
            covariance += (white @ white.mT).unsqueeze(1)
    return covariance.flatten(3, 4).flatten(1, 2)


def function_samples(fitted: FittedLaplace, inputs: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Outputs ``f(x)`` and samples of the tangent model's outputs, less ``f(x)``: ``[samples, *outputs.shape]``.

    Samples are Jacobian-vector products with the same weights for all inputs, so that they are joint in the inputs.
    """
    tangent = fitted.tangent
    with evaluating(tangent.model):
        outputs = tangent.outputs(inputs)
        require_memory(
            4 * count * outputs.numel() * outputs.element_size(),
            outputs.device,
            f"a prediction of {count} samples of {tuple(outputs.shape)} outputs",
            "take smaller batches, or fewer num_samples",
        )
        changes = [tangent.jvps(inputs, weights) for weights in fitted.posterior.draws(count, seed)]
    return outputs, torch.cat(changes)


def _require_room(outputs: Tensor, size: int) -> None:
    """Refuse covariances that do not fit, twice while pieces are joined, with the Jacobian of one sample."""
    count, width, entry = len(outputs), outputs[0].numel(), outputs.element_size()
    what = f"the exact covariances of {count} samples with {width} outputs each (of all positions), with Jacobians,"
    instead = "take samples instead (covariance='samples', or function_samples), or smaller batches"
    require_memory(entry * (2 * count * width**2 + 4 * width * size), outputs.device, what, instead)


def _longest_vector(layers: Sequence[Layer]) -> int:
    """Entries of the longest parameter whose gradients are kept as vectors for each sample and output."""
    weights = [layer.weight for layer in layers if not isinstance(layer, (MatrixLayer, EmbeddingLayer))]
    return max((part.size for part in (*weights, *(layer.bias for layer in layers)) if part is not None), default=0)


def _dense_covariance(tangent: TangentModel, posterior: Posterior, inputs: Any, shape: torch.Size) -> Tensor:
    """Covariances from Jacobians of single samples: of all blocks, or of the parameters that ``tangent`` has."""
    jacobian = jacobians(tangent, inputs, shape)
    covariance = jacobian.new_zeros(len(jacobian), jacobian.shape[1], jacobian.shape[1])
    for block in posterior.blocks:
        place = slice(block.start, block.stop)
        if tangent.size < posterior.size:
            if block.name not in tangent.slots:
                continue
            place = slice(*tangent.slots[block.name][:2])
        white = block.whiten(jacobian[..., place], posterior.log_precision, posterior.noise)
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

    def enter(layer: Layer, rows: Tensor) -> None:
        entered[layer.name] = rows[:count]

    def keep(turn: int, layer: Layer, gradient: Tensor) -> None:
        gradients[layer.name][turn] = gradient

    repeated = mapped(lambda own: own.repeat(copies, *[1] * (own.ndim - 1)), inputs)  # one pass serves many outputs
    with watching(tangent.model, layers, enter) as watch:
        outputs = tangent.checked(watch.forward(repeated, copies * count), copies * count)
        eye = torch.eye(turns * copies, width, dtype=outputs.dtype, device=outputs.device)
        directions = eye.repeat_interleave(count, 0).view(turns, copies * count, *shape)
        watch.backward(outputs, list(directions), keep)
    covariance = torch.zeros(count, width, width, dtype=outputs.dtype, device=outputs.device)
    starts = {block.start: block for block in posterior.blocks}

    def block_of(part: Part) -> Block:
        return starts[part.place(tangent.slots).start]

    def add(part: Part, vectors: Tensor) -> None:
        vectors = vectors.unflatten(0, (-1, count)).transpose(0, 1)
        white = block_of(part).whiten(vectors, posterior.log_precision, posterior.noise)
        covariance.baddbmm_(white, white.mT)

    for layer in layers:
        found = gradients.pop(layer.name)
        present = next((g for g in found if g is not None), None)
        if present is None:
            continue
        pieces = [torch.zeros_like(present) if g is None else g for g in found]
        stacked = torch.cat(pieces)[: width * count]  # [outputs of the net * batch, ...]
        if layer.bias is not None:
            add(layer.bias, layer.bias_gradient(stacked))
        if layer.weight is None:
            continue
        own, block = layer.rows(entered.pop(layer.name)), block_of(layer.weight)
        if isinstance(layer, MatrixLayer):
            assert isinstance(block, KroneckerBlock)
            variance = block.precisions(posterior.log_precision, posterior.noise).reciprocal()
            _add_matrix(covariance, block, variance, own, layer.columns(stacked).unflatten(0, (width, count)))
        elif isinstance(layer, EmbeddingLayer):
            deviation = block.precisions(posterior.log_precision, posterior.noise).rsqrt()
            _add_embedding(covariance, layer, deviation, own, stacked.unflatten(0, (width, count)))
        else:
            add(layer.weight, layer.weight_gradient(own.repeat(width, *[1] * (own.ndim - 1)), stacked))
    return covariance


def _add_matrix(covariance: Tensor, block: KroneckerBlock, variance: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Add one weight matrix's part, from pairs of positions or from the gradients of the weight: which takes less."""
    a = rotate(rows, block.inputs)
    g = rotate(columns.mT, block.outputs).mT.transpose(0, 1)  # [batch, outputs of the net, groups, outputs, positions]
    samples, width, groups, outputs, positions = g.shape
    features = a.shape[-1]
    by_pairs = positions * (positions + 1) / 2 * (outputs + _PASSES)
    by_gradients = width * outputs * (positions + width + _PASSES)
    entries = positions**2 * max(outputs, features)
    pairs = by_pairs < by_gradients and entries < _ELEMENTS
    step = max(1, _ELEMENTS // (groups * (entries if pairs else width * outputs * features)))
    for i in range(0, samples, step):
        own = (covariance[i : i + step], g[i : i + step], a[i : i + step], variance)
        (_add_pairs if pairs else _add_gradients)(*own)


def _add_gradients(covariance: Tensor, g: Tensor, a: Tensor, variance: Tensor) -> None:
    """From the gradients of the weight themselves, whitened; a few of its rows at a time."""
    width, deviation = g.shape[1], variance.sqrt().unsqueeze(1)
    step = max(1, _ELEMENTS // (width * deviation[:, 0, 0].numel()))
    for i in range(0, g.shape[3], step):
        rows = g[:, :, :, i : i + step].transpose(1, 2).flatten(2, 3)
        gradients = (rows @ a).unflatten(2, (width, -1))  # [batch, groups, outputs of the net, rows, features]
        white = gradients.mul_(deviation[:, :, i : i + step]).transpose(1, 2).flatten(2)
        covariance.baddbmm_(white, white.mT)


def _add_pairs(covariance: Tensor, g: Tensor, a: Tensor, variance: Tensor) -> None:
    """``sum_otu g[c, t, o] W[o, t, u] g[d, u, o]`` with ``W[o, t, u] = sum_f variance[o, f] a[t, f] a[u, f]``."""
    positions = a.shape[2]
    first, second = torch.triu_indices(positions, positions, device=a.device)
    found = rotate(a[:, :, first] * a[:, :, second], variance.mT).mT  # [batch, groups, outputs, pairs]
    places = torch.empty(positions, positions, dtype=torch.long, device=a.device)
    places[first, second] = places[second, first] = torch.arange(len(first), device=a.device)
    weighted = g.permute(0, 2, 3, 1, 4) @ found[..., places]  # [batch, groups, outputs, outputs of the net, positions]
    joint = weighted.permute(0, 3, 1, 2, 4).flatten(2) @ g.flatten(2).mT
    covariance += (joint + joint.mT) / 2


def _add_embedding(
    covariance: Tensor, layer: EmbeddingLayer, deviation: Tensor, rows: Tensor, gradients: Tensor
) -> None:
    deviation = deviation.view(layer.entries, layer.features)
    found = [layer.summed(rows, gradient) for gradient in gradients]
    pairs = found[0][1]
    white = torch.stack([values for values, _ in found], dim=1) * deviation[pairs % layer.entries].unsqueeze(1)
    covariance.index_add_(0, pairs // layer.entries, white @ white.mT)


def within_positions(outputs: Tensor, covariance: Tensor) -> Tensor:
    """Covariances within each position ``[batch, positions, outputs, outputs]``, of joint ones of a sample."""
    if outputs.ndim == 2:
        return covariance
    _, positions, count = outputs.shape
    split = covariance.view(-1, positions, count, positions, count)
    return split.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def gaussian_samples(covariance: Tensor, count: int, seed: int) -> Tensor:
    """Samples ``[count, ..., outputs]`` of zero-mean Gaussians with covariances ``[..., outputs, outputs]``, for means.

    The noise is a scrambled Sobol sequence, whose means have a smaller error than those of independent samples. It is
    the same for every input, and the symmetric root is unique: results do not depend on how inputs are batched.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    engine = torch.quasirandom.SobolEngine(covariance.shape[-1], scramble=True, seed=seed)
    points = engine.draw(count, dtype=torch.float64)
    noise = torch.special.ndtri(points.clamp(1e-12, 1 - 1e-12)).to(covariance)
    return torch.einsum("...cd,sd->s...c", root, noise)


def _exact_is_cheap(fitted: FittedLaplace, sampled: bool) -> bool:
    """Few outputs; apart from Kronecker factors, not too large a Jacobian of one sample."""
    outputs = fitted.summary.outputs
    if not sampled and in_closed_form(fitted):
        return True
    return outputs <= _EXACT_OUTPUTS and (fitted.layers is not None or outputs * fitted.tangent.size <= _EXACT_ENTRIES)


def in_own_shape(fitted: FittedLaplace, inputs: Any, found: Any) -> Any:
    """Predictions ``[..., batch, positions, outputs]`` of several positions in the shape of the network's outputs."""
    if isinstance(found, tuple):
        return type(found)(*(in_own_shape(fitted, inputs, own) for own in found))
    if fitted.summary.positions == 1:
        return found
    shape = fitted.tangent.own_shape(inputs)
    axis = class_axis_of(len(shape), fitted.tangent.class_axis)
    places = [n for i, n in enumerate(shape) if i not in (0, axis)]
    return found.unflatten(-2, places).movedim(-1, axis - len(shape))


def tempered_predictives(
    fitted: FittedLaplace, inputs: Any, candidates: Sequence[tuple[float, float]], **options: Any
) -> list[Any]:
    """The predictive of one batch at several temperatures and sharpnesses, from the same covariances or samples."""
    return outputs_and_predictives(fitted, inputs, candidates, **options)[1]


def outputs_and_predictives(
    fitted: FittedLaplace,
    inputs: Any,
    candidates: Sequence[tuple[float, float]],
    *,
    num_samples: int,
    link_approx: LinkApprox,
    covariance: Covariance,
    seed: int,
) -> tuple[Tensor, list[Any]]:
    """The network's outputs beside :func:`tempered_predictives`."""
    likelihood = fitted.likelihood
    deviations: Tensor | None = None
    sampled = not likelihood.noisy and link_approx == "mc"
    if not any(temperature for temperature, _ in candidates):
        with evaluating(fitted.model):
            mean = fitted.tangent.outputs(inputs)
        variance = torch.zeros_like(mean)
    elif covariance == "exact" or (covariance == "auto" and _exact_is_cheap(fitted, sampled)):
        if sampled:
            mean, joint = function_covariance(fitted, inputs)
            matrix = within_positions(mean, joint)
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            deviations = gaussian_samples(matrix, num_samples, seed)
        else:
            mean, variance = function_variance(fitted, inputs)
    else:
        mean, changes = function_samples(fitted, inputs, num_samples, seed)
        variance = changes.square().mean(0)
        deviations = changes if sampled else None
    noise = fitted.predictive_noise
    return mean, [
        likelihood.predict(mean, variance, deviations, temperature=t, sharpness=s, noise=noise) for t, s in candidates
    ]
