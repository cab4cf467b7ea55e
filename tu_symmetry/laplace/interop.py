"""Conversion to and from ``KronLaplace`` of laplace-torch (0.3), where both can hold the same posterior.

laplace-torch has one pair of factors for each matrix or convolution without groups, one dense factor for each vector;
and one precision for all parameters, or one for each. Its ``fit`` is that of ``bias="shared"`` here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Block, DenseBlock, KroneckerBlock
from tu_symmetry.laplace.curvature import Options, Summary
from tu_symmetry.laplace.fitted import FittedCurvature, FittedLaplace
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.likelihood import make_likelihood
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.tangent import TangentModel, select_parameters

_THEIRS = ("classification", "regression")


def to_laplace_torch(fitted: FittedLaplace) -> Any:
    """A fitted approximation as laplace-torch's ``KronLaplace`` at the same network, precisions and predictive noise.

    Its evidence is that at the linearization point and at this noise: laplace-torch has no ``theta*``.
    """
    from laplace.baselaplace import KronLaplace
    from laplace.utils.matrix import Kron, KronDecomposed

    likelihood = fitted.likelihood
    left_out = [n for n, p in fitted.model.named_parameters() if p.requires_grad and n not in fitted.tangent.names]
    if fitted.options.curvature != "kfac":
        reason = f"it has curvature={fitted.options.curvature!r}, and not 'kfac'"
    elif likelihood.name not in _THEIRS or make_likelihood(likelihood.name).config() != likelihood.config():
        reason = f"laplace-torch has no {type(likelihood).__name__}({likelihood.config()})"
    elif fitted.summary.positions > 1:
        reason = "it has outputs at several positions of a sample"
    elif left_out:
        reason = f"it leaves out {left_out[:6]}: call requires_grad_(False) on them"
    else:
        reason = ""
    if reason:
        raise ValueError(f"KronLaplace cannot hold this posterior: {reason}")
    vectors: list[Any] = []  # lists of one or two factors, where laplace-torch's annotations say tuples
    values: list[Any] = []
    for block in fitted.curvature.blocks:
        own = fitted.tangent.slots[block.name]
        if isinstance(block, KroneckerBlock) and (block.start, block.stop) == own[:2] and len(block.inputs) == 1:
            vectors.append([block.outputs[0], block.inputs[0]])
            values.append([block.output_values[0], block.input_values[0]])
        elif isinstance(block, DenseBlock) and len(own.shape) == 1:
            vectors.append([block.vectors])
            values.append([block.values])
        else:
            raise ValueError(
                f"{block.name} has a {block.kind} block over a part of it, several (a grouped convolution, a fused "
                "projection), or a diagonal one; KronLaplace cannot hold it"
            )
    single = len(fitted.groups) == 1
    precision = fitted.log_precision.exp()
    of = torch.stack([fitted.groups.of[name] for name in fitted.tangent.names])
    other = KronLaplace(
        fitted.model,
        likelihood.name,
        sigma_noise=math.sqrt(fitted.predictive_noise),
        prior_precision=float(precision[0]) if single else precision[of].to(fitted.tangent.point()),
    )
    other.H = KronDecomposed(vectors, values)
    factors: list[Any] = [
        [_dense(q, s) for q, s in zip(*pair, strict=True)] for pair in zip(vectors, values, strict=True)
    ]
    other.H_facs = Kron(factors)
    other.mean = fitted.tangent.point()
    other.n_data, other.n_outputs = fitted.summary.samples, fitted.summary.outputs
    other.loss = torch.tensor(fitted.summary.loss, dtype=other.mean.dtype, device=other.mean.device)
    return other


def from_laplace_torch(other: Any, *, evaluate_at: EvaluateAt = "map") -> FittedLaplace:
    """A fitted ``KronLaplace`` as an approximation of the same network, precisions and noise."""
    eigenvalues = getattr(getattr(other, "H", None), "eigenvalues", None)
    if type(other).__name__ != "KronLaplace" or eigenvalues is None:
        raise ValueError(
            f"{type(other).__name__} is no fitted KronLaplace; Laplace(model, likelihood, subset_of_weights='all', "
            "hessian_structure='kron') followed by fit(train_loader) makes one"
        )
    if other.temperature != 1 or other.damping or bool(torch.as_tensor(other.prior_mean, device="cpu").any()):
        raise ValueError("temperature, damping and prior_mean of the KronLaplace have no counterpart here")
    precision = other.prior_precision.reshape(-1).double().cpu()
    shared = len(precision) == 1
    tangent = TangentModel(other.model, select_parameters(other.model, None))
    groups = PriorGroups(tangent.slots, {name: "all" if shared else name for name in tangent.names})
    blocks: list[Block] = []
    for (name, slot), basis, own in zip(tangent.slots.items(), other.H.eigenvectors, eigenvalues, strict=True):
        number, values = groups.of[name], [v.clamp(min=0) for v in own]
        if len(own) == 1:
            blocks.append(DenseBlock(name, slot.start, number, values[0], basis[0]))
        else:
            factors = (basis[1], values[1], basis[0], values[0])
            blocks.append(KroneckerBlock(name, slot.start, number, *(t.unsqueeze(0) for t in factors)))
    summary = Summary(int(other.n_data), float(other.loss), int(other.n_outputs))
    likelihood = make_likelihood(str(getattr(other.likelihood, "value", other.likelihood)))
    return FittedLaplace.begin(
        tangent,
        likelihood,
        Options(bias="shared"),
        FittedCurvature(tuple(blocks), summary, groups),
        prior="single" if shared else "per_tensor",
        evaluate_at=evaluate_at,
        log_precision=precision.log(),
        noise_variance=float(other.sigma_noise) ** 2,
        noise_fixed=likelihood.noisy,
    )


def _dense(vectors: Tensor, values: Tensor) -> Tensor:
    return (vectors * values) @ vectors.mT
