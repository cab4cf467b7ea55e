"""Predictive distributions of reconstructed images: the rows of the table, image by image."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.evaluation import chosen_device
from tu_symmetry.experiments.deep_image_prior.unet import UNet
from tu_symmetry.files import write_safetensors
from tu_symmetry.laplace.dual.evidence import DualOptimizer
from tu_symmetry.laplace.dual.hyperpriors import TotalVariation
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, ObservedTangent
from tu_symmetry.laplace.dual.laplace import DualLaplace, gaussian_log_density
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.priors import IsotropicPrior, KernelPrior, StructuredPrior
from tu_symmetry.laplace.dual.sampled import SampledEvidence
from tu_symmetry.routines.deep_image_prior import Reconstructions, image_quality
from tu_symmetry.tables.outcome import Outcome

JITTER = 1e-6  # on every predictive covariance, as in the authors' code
RANK = 100  # of the pseudo-inverse that maps noise to the image
SMALLEST_VARIANCE = 1e-3  # of the prior: log variance >= -6.9
ARRAYS = "arrays.safetensors"

DIP = "DIP (variance 1)"
DIP_FITTED = "DIP (fitted variance)"
DROPOUT = "MC-dropout DIP"
EVIDENCE = "linearized (evidence)"
TV_SEED = "linearized (TV-PredCP, Jacobian weight 1)"
TV_CODE = "linearized (TV-PredCP, Jacobian weight lambda)"
JOINT = "linearized (evidence at theta*)"
ROWS = (DIP, DIP_FITTED, DROPOUT, EVIDENCE, TV_SEED, TV_CODE, JOINT)


def unet_priors(model: UNet) -> tuple[StructuredPrior, ...]:
    """A Gaussian process over the 3 x 3 offsets for each stage of the network, isotropic priors of 1 x 1 convolutions.

    Weights of convolutions only; biases and normalizations are fixed.
    """
    stages: dict[str, Any] = {"inc": model.inc}
    stages |= {f"down_{i}": stage for i, stage in enumerate(model.down)}
    stages |= {f"up_{i}": stage.conv for i, stage in enumerate(model.up)}
    thin: dict[str, Any] = {f"skip_{i}": stage.skip for i, stage in enumerate(model.up) if stage.used}
    thin["outc"] = model.outc
    names = {id(p): name for name, p in model.named_parameters()}

    def weights(stage: nn.Module) -> tuple[str, ...]:
        return tuple(names[id(m.weight)] for m in stage.modules() if isinstance(m, nn.Conv2d))

    bounds = (SMALLEST_VARIANCE, 1e6)
    kernels = [KernelPrior(weights(stage), name=name, variance_bounds=bounds) for name, stage in stages.items()]
    plain = [IsotropicPrior(weights(stage), name=name, variance_bounds=bounds) for name, stage in thin.items()]
    return (*kernels, *plain)


def one_problem(found: Reconstructions, index: int, model: nn.Module) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Network (float64), input, operator and measurements of one reconstruction."""
    own = copy.deepcopy(model)
    own.load_state_dict({name: t[index] for name, t in found.states.items()})
    problem, count = found.problem, int(found.problem.counts[index])
    operator = problem.operator[index, :count].double()
    x = problem.back_projection[index : index + 1].double()
    return own.double().eval(), x, operator, problem.measurements[index, :count].double()


def _require_unet(model: nn.Module) -> None:
    if not isinstance(model, UNet):
        raise TypeError(f"model is a {type(model).__name__}; the prior's blocks are those of a UNet")


def _hyperpriors(
    found: Reconstructions, index: int, count: int, tv_weight: float | dict[int, float] | None, scale: float
) -> dict[str, TotalVariation | None]:
    """Row to its hyperprior: none, and TV-PredCP in both readings of its Jacobian's weight."""
    ways: dict[str, TotalVariation | None] = {EVIDENCE: None}
    if tv_weight is None:
        return ways
    weight = tv_weight[int(found.problem.num_angles[index])] if isinstance(tv_weight, dict) else tv_weight
    rate, (height, width) = scale * count * weight, found.images.shape[-2:]
    shape = (int(height), int(width))
    return ways | {TV_SEED: TotalVariation(shape, rate), TV_CODE: TotalVariation(shape, rate, rate)}


class _Rows:
    """What is kept for the table and the figures."""

    def __init__(self, found: Reconstructions) -> None:
        self.found = found
        self.entries: list[dict[str, Any]] = []
        self.arrays: dict[str, Tensor] = {}
        self.histories: dict[str, dict[str, list[float]]] = {}
        self.hyperparameters: dict[str, dict[str, dict[str, float]]] = {}

    def add(self, row: str, index: int, mean: Tensor, covariance: Tensor, extra: float, **further: Any) -> None:
        """Score one image: log-likelihood a pixel, PSNR, SSIM, and the normalized errors for the calibration."""
        problem = self.found.problem
        truth = problem.truth[index : index + 1].double()
        mean, covariance = mean.cpu(), covariance.cpu()
        error = (truth - mean.view(truth.shape)).reshape(-1)
        density = gaussian_log_density(error, covariance, extra) / error.numel()
        psnr, ssim = image_quality(mean.view(truth.shape), truth)
        deviation = (covariance.diagonal().clamp(min=0) + extra).sqrt()
        self.keep(row, index, mean=mean.view(truth.shape[1:]), deviation=deviation.view(truth.shape[1:]))
        self.entries.append(
            {
                "row": row,
                "problem": index,
                "image": int(problem.image[index]),
                "num_angles": int(problem.num_angles[index]),
                "noise": float(problem.noise[index]),
                "log_likelihood": density,
                "psnr": float(psnr[0]),
                "ssim": float(ssim[0]),
                "normalized_errors": (error / deviation).tolist(),
                **further,
            }
        )

    def keep(self, row: str, index: int, **images: Tensor) -> None:
        for what, image in images.items():
            self.arrays[f"{index}.{ROWS.index(row)}.{what}"] = image.float().cpu().contiguous()

    def fitted(self, row: str, index: int, history: list[float], hyperparameters: dict[str, float]) -> None:
        self.histories.setdefault(row, {})[str(index)] = history
        self.hyperparameters.setdefault(row, {})[str(index)] = hyperparameters

    def save(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_safetensors(out / ARRAYS, self.arrays, {})


def linearized_posterior(
    out: Path,
    reconstructions: Path,
    model: nn.Module,
    tv_weight: float | dict[int, float],
    predcp_scale: float = 1.0,
    optimizer: DualOptimizer = "l-bfgs-b",
    num_steps: int = 1500,
    lr: float = 0.01,
    num_samples: int = 3,
    joint: bool = False,
    device: str = "auto",
) -> Outcome:
    """Linearized Laplace of every reconstruction, and the rows that need its noise variance; all in float64.

    Args:
        reconstructions: file of a :class:`~tu_symmetry.routines.DeepImagePriorRoutine`.
        tv_weight: weight of the training, one for all or number of angles to weight: the rate of the hyperprior is
            ``predcp_scale * measurements * tv_weight``.
        num_steps: steps of Adam; the most of L-BFGS-B.
        num_samples: posterior and prior samples that are kept for the figures.
        joint: also with the evidence at the tangent model's optimum (Recommendation 1 of arXiv 2206.08900; the other
            rows take it at the trained weights), the column U-Net of that paper's Table 1.
    """
    _require_unet(model)
    found, on = Reconstructions.load(reconstructions), chosen_device(device)
    rows = _Rows(found)
    timings: list[dict[str, float]] = []
    for index in range(len(found)):
        network, x, operator, y = one_problem(found, index, model)
        size = operator.shape[1]
        noise_gain = LinearObservation(operator).pseudo_inverse_variance(size, RANK)
        network, x, y = network.to(on), x.to(on), y.to(on)
        started = time.perf_counter()
        priors, observation = unet_priors(network), LinearObservation(operator.to(on))  # type: ignore[arg-type]
        la = DualLaplace(network, structured=priors, prior=None, observation=observation, evaluate_at="map")
        la.fit([(x, y.unsqueeze(0))])
        fitted = time.perf_counter()
        start, none = la.phi, torch.zeros(size, size, dtype=torch.float64, device="cpu")
        mean = la.statistics.outputs
        hyperpriors = _hyperpriors(found, index, len(y), tv_weight, predcp_scale)
        ways = {row: (la, hyperprior) for row, hyperprior in hyperpriors.items()}
        if joint:
            ways[JOINT] = la.evaluated_at("tangent_mode"), None
        rows.add(DIP, index, mean, none, noise_gain + JITTER)
        for row, (la, hyperprior) in ways.items():
            la.phi = start
            result = la.optimize_evidence(hyperprior=hyperprior, optimizer=optimizer, num_steps=num_steps, lr=lr)
            noise = la.noise_variance
            extra = noise * noise_gain + JITTER
            if row == EVIDENCE:
                rows.add(DIP_FITTED, index, mean, none, extra, noise_variance=noise)
            facts = {"noise_variance": noise, "log_evidence": la.log_marginal_likelihood()}
            facts |= {"converged": result.converged, "evaluations": len(result.history)}
            rows.add(row, index, mean, la.predictive().covariance, extra, **facts)
            rows.fitted(row, index, result.history, la.hyperparameters)
            rows.keep(row, index, samples=la.function_samples(None, num_samples)[:, 0])
            rows.keep(row, index, prior=la.function_samples(None, num_samples, prior=True)[:, 0])
        timings.append({"jacobian": fitted - started, "evidence": time.perf_counter() - fitted})
    rows.save(out)
    spent = sum(t["jacobian"] + t["evidence"] for t in timings)
    content = {
        "rows": rows.entries,
        "histories": rows.histories,
        "hyperparameters": rows.hyperparameters,
        "seconds": timings,
        "true_noise_variance": [_true_noise(found, index) for index in range(len(found))],
    }
    return Outcome(content, f"{len(found)} posteriors in {spent:.0f} s")


def _true_noise(found: Reconstructions, index: int) -> float:
    """The variance that the measurements of one problem were simulated with."""
    problem, count = found.problem, int(found.problem.counts[index])
    clean = problem.operator[index, :count].double() @ problem.truth[index].double().reshape(-1)
    return float((problem.noise[index] * clean.abs().mean()) ** 2)


def dropout_posterior(
    out: Path,
    reconstructions: Path,
    model: nn.Module,
    num_samples: int = 16384,
    batch_size: int = 256,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """The Gaussian with mean and covariance of networks with dropout, for every reconstruction.

    Args:
        reconstructions: file of a :class:`~tu_symmetry.routines.DeepImagePriorRoutine` of a network with dropout.
        num_samples: random masks; more than the image has pixels, for a covariance of full rank.
    """
    found, on = Reconstructions.load(reconstructions), chosen_device(device)
    size = found.images[0].numel()
    if num_samples <= size:
        raise ValueError(f"num_samples={num_samples} masks give a singular covariance of {size} pixels; take more")
    rows = _Rows(found)
    for index in range(len(found)):
        network, x, operator, _ = one_problem(found, index, model)
        network, x = network.to(on, torch.float32).train(), x.to(on, torch.float32)
        drawn = []
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed + index)
            for start in range(0, num_samples, batch_size):
                count = min(batch_size, num_samples - start)
                drawn.append(network(x.expand(count, -1, -1, -1)).flatten(1).double())
        samples = torch.cat(drawn)
        if float(samples.std(0).max()) <= 1e3 * torch.finfo(torch.float32).eps * float(samples.abs().max()):
            raise ValueError("all masks give the same image: the model has no dropout (model.dropout > 0)")
        mean = samples.mean(0)
        centered = samples - mean
        covariance = centered.mT @ centered / (num_samples - 1)
        gain = LinearObservation(operator).pseudo_inverse_variance(size, RANK)
        rows.add(DROPOUT, index, mean, covariance, gain + JITTER, mean_deviation=math.sqrt(gain))
        rows.keep(DROPOUT, index, samples=samples[:3].view(-1, *found.images.shape[1:]))
    rows.save(out)
    return Outcome({"rows": rows.entries}, f"{len(found)} posteriors of {num_samples} masks")


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
    num_samples: int = 4096,
    patches: Sequence[int] = (1, 2, 10),
    double: bool = True,
    tv_weight: float | dict[int, float] | None = None,
    predcp_scale: float = 1.0,
    hyperprior_probes: int = 20,
    device: str = "auto",
) -> Outcome:
    """The posterior of images that no dense kernel fits: evidence by stochastic gradients, a Gaussian of patches.

    Args:
        decay_every: steps after which the learning rate of Adam is halved.
        num_probes: random signs of a gradient.
        rank: rank of the preconditioner.
        refresh_every: steps after which it is made anew.
        patches: sides of the square patches that are scored; pixels of different patches are independent.
        tv_weight: as for :func:`linearized_posterior`; None for the evidence alone.
        hyperprior_probes: random signs by which the variances of differences of pixels are estimated, block by block.
    """
    _require_unet(model)
    if max(patches) ** 2 >= num_samples:
        raise ValueError(
            f"{num_samples} samples give a singular covariance of patches of {max(patches)} x {max(patches)}"
        )
    found, on = Reconstructions.load(reconstructions), chosen_device(device)
    dtype = torch.float64 if double else torch.float32
    rows = _Rows(found)
    for index in range(len(found)):
        network, x, operator, y = one_problem(found, index, model)
        network = network.to(on, dtype)
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        priors = [prior.resolve(shapes) for prior in unet_priors(network)]  # type: ignore[arg-type]
        taken = {name for prior in priors for name in prior.parameters}
        tangent = FlatTangentModel(network, [name for name in shapes if name in taken])
        observed = ObservedTangent(tangent, [x.to(on, dtype)], LinearObservation(operator.to(on, dtype)))
        options: dict[str, Any] = {"rank": rank, "tolerance": 1e-3, "max_iterations": max_iterations}
        evidence = SampledEvidence(observed, priors, y, num_samples=num_probes, **options)
        truth = found.problem.truth[index].double()
        gram = torch.linalg.eigvalsh(operator @ operator.mT).flip(0)[:RANK]  # squares of the singular values
        gain = float((1 / gram[gram > gram[0] * 1e-12]).sum()) / operator.shape[1]
        mean = observed.base.double().cpu()
        psnr, ssim = image_quality(mean.view(1, *truth.shape), truth.unsqueeze(0))
        names = {p.name: p.hyperparameters for p in priors}
        for row, hyperprior in _hyperpriors(found, index, len(y), tv_weight, predcp_scale).items():
            result = evidence.adam(
                noise_variance=1.0,
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
            for start in range(0, num_samples, 16):
                count = min(16, num_samples - start)
                zeta = evidence.samples(phi, noise, count=count, seed=start + 1, preconditioner=preconditioner)[0]
                drawn.append(observed.unobserved(zeta).double().cpu())
            samples = torch.cat(drawn)
            error = (truth.reshape(-1) - mean).view(truth.shape)
            for side in patches:
                density = patch_log_density(error, samples, side, noise * gain + JITTER)
                facts = {"row": row, "problem": index, "patch": side, "log_likelihood": density}
                quality = {"psnr": float(psnr[0]), "ssim": float(ssim[0]), "noise_variance": noise}
                rows.entries.append(facts | quality)
            deviation = samples.square().mean(0).sqrt().view(truth.shape)
            rows.keep(row, index, deviation=deviation, mean=mean.view(truth.shape))
            hyperparameters = {
                f"{name}.{what}": math.exp(value)
                for name, own in phi.items()
                for what, value in zip(names[name], own.tolist(), strict=True)
            } | {"noise_variance": noise}
            rows.fitted(row, index, [entry["noise_variance"] for entry in result.history], hyperparameters)
    rows.save(out)
    content = {"rows": rows.entries, "hyperparameters": rows.hyperparameters, "noise_variances": rows.histories}
    return Outcome(content, f"{len(found)} posteriors by {num_samples} samples each")


def patch_log_density(error: Tensor, samples: Tensor, side: int, extra_variance: float) -> float:
    """Log density a pixel (nats) of an image under Gaussians of its patches, with the samples' covariances.

    ``error`` is the truth less the mean, ``[1, height, width]``; samples are deviations from the mean, ``[samples,
    height * width]``. Patches at the right and lower edge are smaller.
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
