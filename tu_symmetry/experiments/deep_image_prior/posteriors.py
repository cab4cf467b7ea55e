"""Predictive distributions of reconstructed images: the rows of the table, image by image."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.evaluation import chosen_device
from tu_symmetry.experiments.deep_image_prior.unet import UNet
from tu_symmetry.files import write_safetensors
from tu_symmetry.laplace.dual.evidence import DualOptimizer
from tu_symmetry.laplace.dual.hyperpriors import TotalVariation
from tu_symmetry.laplace.dual.laplace import DualLaplace, gaussian_log_density
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.priors import IsotropicPrior, KernelPrior, StructuredPrior
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
    thin: dict[str, Any] = {f"skip_{i}": stage.skip for i, stage in enumerate(model.up) if stage.used} | {
        "outc": model.outc
    }
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


@dataclass
class _Rows:
    """What is kept for the table and the figures."""

    entries: list[dict[str, Any]]
    arrays: dict[str, Tensor]

    def add(
        self,
        row: str,
        found: Reconstructions,
        index: int,
        mean: Tensor,
        covariance: Tensor,
        extra: float,
        **further: Any,
    ) -> None:
        """Score one image: log-likelihood a pixel, PSNR, SSIM, and the normalized errors for the calibration."""
        problem = found.problem
        truth = problem.truth[index : index + 1].double()
        mean, covariance = mean.cpu(), covariance.cpu()
        error = (truth - mean.view(truth.shape)).reshape(-1)
        density = gaussian_log_density(error, covariance, extra) / error.numel()
        psnr, ssim = image_quality(mean.view(truth.shape), truth)
        deviation = (covariance.diagonal().clamp(min=0) + extra).sqrt()
        key = f"{index}.{ROWS.index(row)}"
        self.arrays[f"{key}.mean"] = mean.view(truth.shape[1:]).float()
        self.arrays[f"{key}.deviation"] = deviation.view(truth.shape[1:]).float()
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

    def save(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        write_safetensors(out / ARRAYS, {name: t.contiguous() for name, t in self.arrays.items()}, {})


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
    """Linearized Laplace of every reconstruction, and the rows that need its noise variance.

    Args:
        out: folder for ``results.json`` and the images.
        reconstructions: file of a :class:`~tu_symmetry.routines.DeepImagePriorRoutine`.
        model: the architecture, a :class:`UNet`.
        tv_weight: weight of the training, one for all or number of angles to weight: the rate of the hyperprior is
            ``predcp_scale * measurements * tv_weight``.
        predcp_scale: see ``tv_weight``.
        optimizer: optimizer of the evidence.
        num_steps: steps of Adam; the most of L-BFGS-B.
        lr: learning rate of Adam.
        num_samples: posterior and prior samples that are kept for the figures.
        joint: also with the evidence at the tangent model's optimum (Recommendation 1 of arXiv 2206.08900; the other
            rows take it at the trained weights), the column U-Net of that paper's Table 1.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one; all is computed in float64.
    """
    if not isinstance(model, UNet):
        raise TypeError(f"model is a {type(model).__name__}; the prior's blocks are those of a UNet")
    found, on = Reconstructions.load(reconstructions), chosen_device(device)
    rows = _Rows([], {})
    histories: dict[str, dict[str, list[float]]] = {}
    hyperparameters: dict[str, dict[str, dict[str, float]]] = {}
    timings: list[dict[str, float]] = []
    for index in range(len(found)):
        network, x, operator, y = one_problem(found, index, model)
        assert isinstance(network, UNet)
        size = operator.shape[1]
        noise_gain = LinearObservation(operator).pseudo_inverse_variance(size, RANK)
        network, x, y = network.to(on), x.to(on), y.to(on)
        observation = LinearObservation(operator.to(on))
        started = time.perf_counter()
        la = DualLaplace(
            network, structured=unet_priors(network), prior=None, observation=observation, evaluate_at="map"
        )
        la.fit([(x, y.unsqueeze(0))])
        fitted = time.perf_counter()
        start, none = la.phi, torch.zeros(size, size, dtype=torch.float64, device="cpu")
        mean = la.statistics.outputs
        weight = tv_weight[int(found.problem.num_angles[index])] if isinstance(tv_weight, dict) else tv_weight
        rate = predcp_scale * len(y) * weight
        shape = tuple(found.images.shape[-2:])
        hyperpriors = {EVIDENCE: None, TV_SEED: TotalVariation(shape, rate), TV_CODE: TotalVariation(shape, rate, rate)}
        ways = {row: (la, hyperprior) for row, hyperprior in hyperpriors.items()}
        if joint:
            ways[JOINT] = la.evaluated_at("tangent_mode"), None
        rows.add(DIP, found, index, mean, none, noise_gain + JITTER)
        for row, (la, hyperprior) in ways.items():
            la.phi = start
            result = la.optimize_evidence(hyperprior=hyperprior, optimizer=optimizer, num_steps=num_steps, lr=lr)
            extra = la.noise_variance * noise_gain + JITTER
            if row == EVIDENCE:
                rows.add(DIP_FITTED, found, index, mean, none, extra, noise_variance=la.noise_variance)
            rows.add(
                row,
                found,
                index,
                mean,
                la.predictive().covariance,
                extra,
                noise_variance=la.noise_variance,
                log_evidence=la.log_marginal_likelihood(),
                converged=result.converged,
                evaluations=len(result.history),
            )
            histories.setdefault(row, {})[str(index)] = result.history
            hyperparameters.setdefault(row, {})[str(index)] = la.hyperparameters
            key = f"{index}.{ROWS.index(row)}"
            rows.arrays[f"{key}.samples"] = la.function_samples(None, num_samples)[:, 0].float().cpu()
            rows.arrays[f"{key}.prior"] = la.function_samples(None, num_samples, prior=True)[:, 0].float().cpu()
        timings.append({"jacobian": fitted - started, "evidence": time.perf_counter() - fitted})
    rows.save(out)
    spent = sum(t["jacobian"] + t["evidence"] for t in timings)
    content = {
        "rows": rows.entries,
        "histories": histories,
        "hyperparameters": hyperparameters,
        "seconds": timings,
        "true_noise_variance": _true_noise(found),
    }
    return Outcome(content, f"{len(found)} posteriors in {spent:.0f} s")


def _true_noise(found: Reconstructions) -> list[float]:
    """The variance that the measurements were simulated with."""
    problem, values = found.problem, []
    for index in range(len(found)):
        count = int(problem.counts[index])
        clean = problem.operator[index, :count].double() @ problem.truth[index].double().reshape(-1)
        values.append(float((problem.noise[index] * clean.abs().mean()) ** 2))
    return values


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
        out: folder for ``results.json`` and the images.
        reconstructions: file of a :class:`~tu_symmetry.routines.DeepImagePriorRoutine` of a network with dropout.
        model: that architecture.
        num_samples: random masks; more than the image has pixels, for a covariance of full rank.
        batch_size: masks at a time.
        seed: seed of the masks, which are others on another kind of device.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises:
        ValueError: fewer masks than pixels, a network without dropout.
    """
    found, on = Reconstructions.load(reconstructions), chosen_device(device)
    size = found.images[0].numel()
    if num_samples <= size:
        raise ValueError(f"num_samples={num_samples} masks give a singular covariance of {size} pixels; take more")
    rows = _Rows([], {})
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
        rows.add(DROPOUT, found, index, mean, covariance, gain + JITTER, mean_deviation=math.sqrt(gain))
        shown = samples[:3].view(-1, *found.images.shape[1:])
        rows.arrays[f"{index}.{ROWS.index(DROPOUT)}.samples"] = shown.float().cpu()
    rows.save(out)
    return Outcome({"rows": rows.entries}, f"{len(found)} posteriors of {num_samples} masks")
