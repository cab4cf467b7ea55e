"""The linearized posterior of images that no dense kernel fits: evidence and samples by conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.evaluation import chosen_device
from tu_symmetry.experiments.deep_image_prior.posteriors import (
    ARRAYS,
    EVIDENCE,
    JITTER,
    RANK,
    ROWS,
    TV_CODE,
    TV_SEED,
    one_problem,
    unet_priors,
)
from tu_symmetry.experiments.deep_image_prior.unet import UNet
from tu_symmetry.files import write_safetensors
from tu_symmetry.laplace.dual.hyperpriors import TotalVariation
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, ObservedTangent
from tu_symmetry.laplace.dual.laplace import gaussian_log_density
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.sampled import SampledEvidence
from tu_symmetry.routines.deep_image_prior import Reconstructions, image_quality
from tu_symmetry.tables.outcome import Outcome


def sampled_posterior(
    out: Path,
    reconstructions: Path,
    model: nn.Module,
    num_steps: int = 3000,
    lr: float = 0.01,
    decay_every: int = 1000,
    num_probes: int = 10,
    rank: int = 200,
    refresh_every: int = 100,
    max_iterations: int = 50,
    tolerance: float = 1e-3,
    num_samples: int = 4096,
    batch_size: int = 16,
    patches: Sequence[int] = (1, 2, 10),
    noise_variance: float = 1.0,
    double: bool = True,
    tv_weight: float | dict[int, float] | None = None,
    predcp_scale: float = 1.0,
    hyperprior_probes: int = 20,
    device: str = "auto",
) -> Outcome:
    """Hyperparameters by stochastic gradients of the evidence, and a Gaussian of patches from posterior samples.

    Args:
        out: folder for ``results.json`` and the images.
        reconstructions: file of a :class:`~tu_symmetry.routines.DeepImagePriorRoutine`.
        model: the architecture, a :class:`UNet`.
        num_steps: steps of Adam.
        lr: learning rate of Adam.
        decay_every: steps after which it is halved.
        num_probes: random signs of a gradient.
        rank: rank of the preconditioner.
        refresh_every: steps after which it is made anew.
        max_iterations: most iterations of conjugate gradients.
        tolerance: tolerance of conjugate gradients.
        num_samples: posterior samples of the image.
        batch_size: samples at a time.
        patches: sides of the square patches that are scored; pixels of different patches are independent.
        noise_variance: to start from.
        double: whether to compute in float64.
        tv_weight: weight of the training, one for all or number of angles to weight: the rows of TV-PredCP too, in both
            readings, with the rate ``predcp_scale * measurements * tv_weight``; None for the evidence alone.
        predcp_scale: see ``tv_weight``.
        hyperprior_probes: random signs by which the variances of differences of pixels are estimated, block by block.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        ValueError: too few samples for the covariance of a patch.
    """
    if not isinstance(model, UNet):
        raise TypeError(f"model is a {type(model).__name__}; the prior's blocks are those of a UNet")
    if max(patches) ** 2 >= num_samples:
        raise ValueError(
            f"{num_samples} samples give a singular covariance of patches of {max(patches)} x {max(patches)}"
        )
    found = Reconstructions.load(reconstructions)
    on = chosen_device(device)
    dtype = torch.float64 if double else torch.float32
    entries: list[dict[str, Any]] = []
    arrays: dict[str, Tensor] = {}
    hyperparameters: dict[str, dict[str, dict[str, float]]] = {}
    histories: dict[str, dict[str, list[float]]] = {}
    for index in range(len(found)):
        network, x, operator, y = one_problem(found, index, model)
        assert isinstance(network, UNet)
        network = network.to(on, dtype)
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        priors = [prior.resolve(shapes) for prior in unet_priors(network)]
        taken = {name for prior in priors for name in prior.parameters}
        tangent = FlatTangentModel(network, [name for name in shapes if name in taken])
        observed = ObservedTangent(tangent, [x.to(on, dtype)], LinearObservation(operator.to(on, dtype)))
        evidence = SampledEvidence(
            observed,
            priors,
            y,
            num_samples=num_probes,
            rank=rank,
            tolerance=tolerance,
            max_iterations=max_iterations,
        )
        truth = found.problem.truth[index].double()
        shape = (int(truth.shape[-2]), int(truth.shape[-1]))
        ways: dict[str, TotalVariation | None] = {EVIDENCE: None}
        if tv_weight is not None:
            weight = tv_weight[int(found.problem.num_angles[index])] if isinstance(tv_weight, dict) else tv_weight
            rate = predcp_scale * len(y) * weight
            ways |= {TV_SEED: TotalVariation(shape, rate), TV_CODE: TotalVariation(shape, rate, rate)}
        gram = torch.linalg.eigvalsh(operator @ operator.mT).flip(0)[:RANK]  # squares of the singular values
        gain = float((1 / gram[gram > gram[0] * 1e-12]).sum()) / operator.shape[1]
        mean = observed.base.double().cpu()
        psnr, ssim = image_quality(mean.view(1, *truth.shape), truth.unsqueeze(0))
        names = {p.name: p.hyperparameters for p in priors}
        for row, hyperprior in ways.items():
            result = evidence.adam(
                noise_variance=noise_variance,
                num_steps=num_steps,
                lr=lr,
                decay_every=decay_every,
                refresh_every=refresh_every,
                hyperprior=hyperprior,
                hyperprior_probes=hyperprior_probes,
            )
            phi, noise = result.phi, result.noise_variance
            preconditioner = evidence.preconditioner(phi, noise)
            drawn = []
            for start in range(0, num_samples, batch_size):
                count = min(batch_size, num_samples - start)
                zeta = evidence.samples(phi, noise, count=count, seed=start + 1, preconditioner=preconditioner)[0]
                drawn.append(observed.unobserved(zeta).double().cpu())
            samples = torch.cat(drawn)
            for side in patches:
                error = (truth.reshape(-1) - mean).view(truth.shape)
                entries.append(
                    {
                        "row": row,
                        "problem": index,
                        "patch": side,
                        "log_likelihood": patch_log_density(error, samples, side, noise * gain + JITTER),
                        "psnr": float(psnr[0]),
                        "ssim": float(ssim[0]),
                        "noise_variance": noise,
                    }
                )
            key = f"{index}.{ROWS.index(row)}"
            arrays[f"{key}.deviation"] = samples.square().mean(0).sqrt().view(truth.shape).float()
            arrays[f"{key}.mean"] = mean.view(truth.shape).float()
            hyperparameters.setdefault(row, {})[str(index)] = {
                f"{name}.{what}": math.exp(value)
                for name, own in phi.items()
                for what, value in zip(names[name], own.tolist(), strict=True)
            } | {"noise_variance": noise}
            histories.setdefault(row, {})[str(index)] = [entry["noise_variance"] for entry in result.history]
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / ARRAYS, {name: t.contiguous() for name, t in arrays.items()}, {})
    content = {"rows": entries, "hyperparameters": hyperparameters, "noise_variances": histories}
    return Outcome(content, f"{len(found)} posteriors by {num_samples} samples each")


def patch_log_density(error: Tensor, samples: Tensor, side: int, extra_variance: float) -> float:
    """Log density a pixel (nats) of an image under Gaussians of its patches, with the samples' covariances.

    Args:
        error: truth less mean, ``[1, height, width]``.
        samples: deviations from the mean ``[samples, height * width]``.
        side: side of the patches; those at the right and lower edge are smaller.
        extra_variance: added to every pixel's variance.
    """
    _, height, width = error.shape
    index = torch.arange(height * width, device="cpu").view(height, width)
    total = 0.0
    for top in range(0, height, side):
        for left in range(0, width, side):
            own = index[top : top + side, left : left + side].reshape(-1)
            drawn = samples[:, own]
            covariance = drawn.mT @ drawn / len(drawn)
            total += gaussian_log_density(error.reshape(-1)[own], covariance, extra_variance)
    return total / error.numel()
