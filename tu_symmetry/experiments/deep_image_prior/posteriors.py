"""Predictive distributions of reconstructed images, image by image."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.evaluation import chosen_device
from tu_symmetry.experiments.deep_image_prior.rows import (
    ARRAYS,
    DIP,
    DIP_FITTED,
    DROPOUT,
    EVIDENCE,
    JOINT,
    ROWS,
    TV_CODE,
    TV_SEED,
    Kept,
    Rows,
    Scored,
    patch_log_density,
)
from tu_symmetry.experiments.deep_image_prior.unet import UNet
from tu_symmetry.experiments.study import followed, tracked
from tu_symmetry.files import write_safetensors
from tu_symmetry.laplace.dual.hyperpriors import TotalVariation
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, ObservedTangent
from tu_symmetry.laplace.dual.laplace import DualLaplace
from tu_symmetry.laplace.dual.optimize import DualOptimizer
from tu_symmetry.laplace.dual.priors import IsotropicPrior, KernelPrior, StructuredPrior
from tu_symmetry.laplace.dual.sampled import SampledEvidence, SolverWarning, linearized_weights
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.posterior.hamiltonian import HamiltonianChain, sample_sizes
from tu_symmetry.posterior.network import BayesianNetwork, initialized
from tu_symmetry.reporting.grid import Grid, measured
from tu_symmetry.reporting.progress import Progress
from tu_symmetry.routines.deep_image_prior import Reconstructions, total_variation
from tu_symmetry.sparse import gram, sparse_rows
from tu_symmetry.states import evenly
from tu_symmetry.tables.outcome import Outcome

JITTER = 1e-6  # on every predictive covariance, as in the authors' code
RANK = 100  # of the pseudo-inverse that maps noise to the image
SMALLEST_VARIANCE = 1e-3  # of the prior: log variance >= -6.9
_SHOWN = 3  # samples that are kept for the figures
_PRIOR = 100  # samples of the first problem's priors, for their total variation
_FLAT = 1e-9  # precision of pixels, beside their total variation
_MASKED = 256 * 28 * 28  # pixels of all networks with dropout at once


def unet_priors(model: nn.Module) -> tuple[StructuredPrior, ...]:
    """A Gaussian process over the 3 x 3 offsets for each stage of the network, isotropic priors of 1 x 1 convolutions.

    Weights of convolutions only; biases and normalizations are fixed.
    """
    if not isinstance(model, UNet):
        raise TypeError(f"model is a {type(model).__name__}; the prior's blocks are those of a UNet")
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
    """Network (float64), input, operator (in compressed rows where it is sparse) and measurements of one problem."""
    own = copy.deepcopy(model)
    own.load_state_dict({name: t[index] for name, t in found.states.items()})
    problem, count = found.problem, int(found.problem.counts[index])
    operator = problem.operator[index]
    if operator.is_sparse:  # rows beyond the measurements are empty
        entries = operator.coalesce()
        lines, pixels = entries.indices()
        operator = sparse_rows(lines, pixels, entries.values().double(), (count, operator.shape[1]))
    else:
        operator = operator[:count].double()
    x = problem.back_projection[index : index + 1].double()
    return own.double().eval(), x, operator, problem.measurements[index, :count].double()


def noise_gain(operator: Tensor) -> float:
    """Mean variance of the pixels when unit noise is mapped back by the pseudo-inverse of rank 100."""
    if operator.layout == torch.sparse_csr:
        squares = torch.linalg.eigvalsh(gram(operator)).flip(0)[:RANK]
        return float((1 / squares[squares > squares[0] * 1e-12]).sum()) / operator.shape[1]
    values = torch.linalg.svdvals(operator)[:RANK]
    return float((values[values > values[0] * 1e-12] ** -2).sum() / operator.shape[1])


def _hyperpriors(
    found: Reconstructions, index: int, tv_weight: float | dict[int, float] | None, scale: float = 1.0
) -> dict[str, TotalVariation | None]:
    """Row to its hyperprior: none, and TV-PredCP in both readings of its Jacobian's weight."""
    ways: dict[str, TotalVariation | None] = {EVIDENCE: None}
    if tv_weight is None:
        return ways
    weight = tv_weight[int(found.problem.num_angles[index])] if isinstance(tv_weight, dict) else tv_weight
    rate, shape = scale * int(found.problem.counts[index]) * weight, tuple(found.images.shape[-2:])
    return ways | {TV_SEED: TotalVariation(shape, rate), TV_CODE: TotalVariation(shape, rate, rate)}


def linearized_posterior(
    out: Path,
    reconstructions: Path,
    model: nn.Module,
    tv_weight: float | dict[int, float],
    optimizer: DualOptimizer = "l-bfgs-b",
    num_steps: int = 1500,
    lr: float = 0.01,
    joint: bool = False,
    problems: int | None = None,
    device: str = "auto",
) -> Outcome:
    """Linearized Laplace of every reconstruction, and the rows that need its noise variance; all in float64.

    The rate of the hyperprior is ``measurements * tv_weight``, with the weight of the training: one for all, or number
    of angles to weight. With ``joint`` also the evidence at the tangent model's optimum (Recommendation 1 of arXiv
    2206.08900; other rows take it at the trained weights), the column U-Net of that paper's Table 1. ``problems``: how
    many reconstructions, evenly spaced; None for all.
    """
    kept = Kept(out, reconstructions, model, tv_weight=tv_weight, by=(optimizer, num_steps, lr), joint=joint)
    found, on = kept.found, chosen_device(device)

    def make(rows: Rows, progress: Progress) -> dict[str, Any]:
        index = rows.index
        network, x, operator, y = one_problem(found, index, model)
        clean = operator @ found.problem.truth[index].double().reshape(-1)
        gain, network = noise_gain(operator), network.to(on)
        la = DualLaplace(network, structured=unet_priors(network), observation=operator.to(on))
        la.fit([(x.to(on), y.to(on).unsqueeze(0))])
        start, none = la.phi, torch.zeros(operator.shape[1], operator.shape[1], dtype=torch.float64, device="cpu")
        mean = la.outputs
        rows.add(DIP, mean, none, gain + JITTER)
        places: dict[str, EvaluateAt] = {JOINT: "tangent_mode"}
        for row, hyperprior in (_hyperpriors(found, index, tv_weight) | ({JOINT: None} if joint else {})).items():
            progress({"stage": row})
            la.evaluate_at, la.phi = places.get(row, "map"), start
            result = la.optimize_evidence(hyperprior=hyperprior, optimizer=optimizer, num_steps=num_steps, lr=lr)
            extra = la.noise_variance * gain + JITTER
            facts = {"noise_variance": la.noise_variance, "log_evidence": la.log_marginal_likelihood()}
            facts |= {"converged": result.converged, "evaluations": len(result.history)}
            if row == EVIDENCE:
                rows.add(DIP_FITTED, mean, none, extra, noise_variance=la.noise_variance)
            rows.add(row, mean, la.function_covariance()[1], extra, **facts)
            rows.fitted(row, result.history, la.hyperparameters)
            rows.keep(row, samples=la.function_samples(_SHOWN)[:, 0])
            rows.keep(row, prior=la.function_samples(_SHOWN if index else _PRIOR, prior=True)[:, 0])
            if index == 0:
                rows.keep(row, points=result.points)
                lengths = torch.tensor([name.endswith("lengthscale") for name in la.names], device="cpu")
                low = torch.tensor(la.bounds(), device="cpu")[:, 0]  # where neighboring weights are independent
                la.phi = torch.where(lengths, low, la.phi)
                rows.keep(row, factorized=la.function_samples(_PRIOR, prior=True)[:, 0])
        return {"names": la.names, "noise": float((found.problem.noise[index] * clean.abs().mean()) ** 2)}

    names, noise = [], [math.nan] * len(found)
    for index, progress in followed("reconstructions", evenly(len(found), problems)):
        facts = kept.take(str(index), index, make, progress)
        names, noise[index] = facts["names"], facts["noise"]
    further = {"hyperparameters": kept.hyperparameters, "names": names, "true_noise_variance": noise}
    return kept.saved("by the evidence", histories=kept.histories, **further)


def total_variation_prior(
    out: Path,
    size: int = 28,
    step_size: float = 0.01,
    leapfrog_steps: int = 200,
    warmup: int = 100,
    num_samples: int = 2000,
    seed: int = 0,
) -> Outcome:
    """Samples of the prior ``exp(-TV(x))`` of images whose pixels have mean zero, by HMC.

    Total variation has degree 1, so that it is Gamma distributed with mean and variance ``d = size^2 - 1`` (nats), and
    samples of ``exp(-lambda TV(x))`` are these over ``lambda``. Its kinks cost acceptance; the Metropolis test keeps
    the chain exact.
    """
    image = initialized(nn.Linear(1, size**2, bias=False, device="cpu", dtype=torch.float64), seed)  # its weights
    one = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    network = BayesianNetwork(image, one, one, _FLAT, lambda x, _: total_variation(x.view(size, size)), "cpu")
    chain = HamiltonianChain(network, step_size=step_size, leapfrog_steps=leapfrog_steps, seed=seed)
    made, images = [], []
    for _ in range(warmup + num_samples):
        made.append(chain.step())
        images.append(chain.position["weight"].view(size, size))
    drawn = torch.stack(images[warmup:])
    drawn = drawn - drawn.mean((1, 2), keepdim=True)
    found, freedom = total_variation(drawn), size**2 - 1
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / ARRAYS, {"tv": drawn[:: max(1, num_samples // _PRIOR)].float().contiguous()}, {})
    facts = {
        "acceptance": sum(m.acceptance for m in made[warmup:]) / num_samples,
        "ess": (ess := float(sample_sizes(found[:, None]))),
        "ess_pixel": float(sample_sizes(drawn[:, None]).min()),
        "mean": float(found.mean()) / freedom,
        "variance": float(found.var()) / freedom,
    }
    text = (
        f"acceptance {facts['acceptance']:.2f}; effective samples {ess:.0f} of TV and {facts['ess_pixel']:.0f} of the "
        f"slowest pixel; mean and variance of lambda TV, both over {freedom}: {facts['mean']:.3f} ± "
        f"{(freedom * ess) ** -0.5:.3f} and {facts['variance']:.2f} ± {(2 / ess) ** 0.5:.2f}, where the law has 1"
    )
    return Outcome(facts, text)


def dropout_posterior(
    out: Path,
    reconstructions: Path,
    model: nn.Module,
    num_samples: int = 16384,
    problems: int | None = None,
    patches: Sequence[int] | None = None,
    noise_correction: bool = True,
    scored: Scored | None = None,
    device: str = "auto",
) -> Outcome:
    """The Gaussian with mean and covariance of networks with dropout, for every reconstruction.

    ``num_samples``: random masks; more than the image, or the largest of its ``patches``, has pixels, for a covariance
    of full rank. ``problems``: how many reconstructions, evenly spaced; None for all. ``patches``,
    ``noise_correction`` and ``scored``: as for :func:`sampled_posterior`, for images whose covariance does not fit.
    """
    how = (num_samples, patches, noise_correction, scored)
    kept, on = Kept(out, reconstructions, model, how=how), chosen_device(device)
    found = kept.found
    size = max(patches) ** 2 if patches else found.images[0].numel()
    if num_samples <= size:
        raise ValueError(f"num_samples={num_samples} masks give a singular covariance of {size} pixels; take more")

    def make(rows: Rows) -> None:
        network, x, operator, _ = one_problem(found, rows.index, model)
        network, x = network.to(on, torch.float32).train(), x.to(on, torch.float32)
        place: dict[str, Any] = {"device": on, "dtype": torch.float64}
        if patches:
            place = {"device": "cpu", "dtype": torch.float32}
        samples = torch.empty(num_samples, operator.shape[1], **place)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(rows.index)
            for part in samples.split(max(1, _MASKED // operator.shape[1])):
                part.copy_(network(x.expand(len(part), -1, -1, -1)).flatten(1))
        if float(samples.std(0).max()) <= 1e3 * torch.finfo(torch.float32).eps * float(samples.abs().max()):
            raise ValueError("all masks give the same image: the model has no dropout (model.dropout > 0)")
        mean = samples.mean(0)
        if patches:
            centered = samples.sub_(mean)
            extra = JITTER + (noise_gain(operator) if noise_correction else 0.0)
            rows.add_patches(DROPOUT, mean, centered, patches, extra, scored)
            return
        centered = samples - mean
        covariance = centered.mT @ centered / (num_samples - 1)
        rows.add(DROPOUT, mean, covariance, noise_gain(operator) + JITTER)
        rows.keep(DROPOUT, samples=samples[:_SHOWN].view(-1, *found.images.shape[1:]))

    for index in tracked("reconstructions", evenly(len(found), problems)):
        kept.take(str(index), index, make)
    return kept.saved(f"of {num_samples} masks")


def _parts(total: int, most: int) -> Iterator[int]:
    """Sizes of the batches that make a total."""
    return (min(most, total - start) for start in range(0, total, most))


def _observed(network: nn.Module, x: Tensor, operator: Tensor) -> tuple[ObservedTangent, list[StructuredPrior]]:
    """``A J``, in the network's precision and place, and the priors of its weights."""
    shapes, like = {name: tuple(p.shape) for name, p in network.named_parameters()}, next(network.parameters())
    priors = [prior.resolve(shapes) for prior in unet_priors(network)]
    taken = {name for prior in priors for name in prior.parameters}
    tangent = FlatTangentModel(network, [name for name in shapes if name in taken])
    return ObservedTangent(tangent, x.to(like), operator.to(like)), priors


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
    evaluate_at: EvaluateAt = "map",
    linearized_steps: int = 1000,
    noise_correction: bool = True,
    assembled_jitter: float | None = None,
    scored: Scored | None = None,
    device: str = "auto",
) -> Outcome:
    """The posterior of images that no dense kernel fits: evidence by stochastic gradients, a Gaussian of patches.

    Options are those of :class:`~tu_symmetry.laplace.SampledEvidence`, with ``num_probes`` random signs of a gradient.
    Beside it stand the reconstruction with the noise alone, of variance 1 and as fitted.

    Args:
        patches: sides of the square patches that are scored; pixels of different patches are independent.
        tv_weight: as for :func:`linearized_posterior`, times ``predcp_scale``; None for the evidence alone.
        linearized_steps: of the linearized weights, which the prior's term takes at ``map`` as the authors' code does;
            0 for the trained weights.
        noise_correction: add the noise's share of the image to the posterior's variance.
        assembled_jitter: assemble the measurements' covariance once for all samples, with this on its diagonal (0.1
            in the authors' code); None for conjugate gradients.
        scored: which patches are scored, and how; None for all, as they are.
    """
    if max(patches) ** 2 >= num_samples:
        raise ValueError(
            f"{num_samples} samples give a singular covariance of patches of {max(patches)} x {max(patches)}"
        )
    options: dict[str, Any] = {"num_samples": num_probes, "rank": rank, "max_iterations": max_iterations}
    steps: dict[str, Any] = {"num_steps": num_steps, "lr": lr, "decay_every": decay_every}
    steps |= {"refresh_every": refresh_every, "hyperprior_probes": hyperprior_probes}
    at, how = (evaluate_at, linearized_steps), (num_samples, patches, noise_correction, assembled_jitter, scored)
    by = {**options, **steps, "tv": (tv_weight, predcp_scale), "double": double, "at": at, "how": how}
    kept, on = Kept(out, reconstructions, model, **by), chosen_device(device)
    found, dtype = kept.found, torch.float64 if double else torch.float32

    @lru_cache(maxsize=1)
    def begun(index: int) -> tuple[SampledEvidence, ObservedTangent, list[StructuredPrior], float]:
        network, x, operator, y = one_problem(found, index, model)
        observed, priors = _observed(network.to(on, dtype), x, operator)
        own: dict[str, Any] = {"evaluate_at": evaluate_at}
        if evaluate_at == "map" and linearized_steps:
            own["weights"] = linearized_weights(observed, y, num_steps=linearized_steps)
        return SampledEvidence(observed, priors, y, **own, **options), observed, priors, noise_gain(operator)

    def make(rows: Rows, row: str, hyperprior: TotalVariation | None, progress: Progress) -> None:
        evidence, observed, priors, gain = begun(rows.index)
        name = f"{rows.index}-{ROWS.index(row)}-{kept.parts.key[:16]}"  # other options are other steps
        file = kept.parts.folder / f"{name}.steps.pt"
        phi, noise, history = evidence.adam(hyperprior=hyperprior, checkpoint=file, progress=progress, **steps)
        if row == EVIDENCE:
            none = torch.zeros(0, found.images[0].numel(), dtype=torch.float64, device="cpu")
            rows.add_patches(DIP, observed.base, none, patches, gain + JITTER, scored)
            extra = noise * gain + JITTER
            rows.add_patches(DIP_FITTED, observed.base, none, patches, extra, scored, noise_variance=noise)
        solver: dict[str, Any] = {"preconditioner": evidence.preconditioner(phi, noise)}
        if assembled_jitter is not None:
            solver = {"root": evidence.factor(phi, noise, jitter=assembled_jitter)}
        drawn = torch.empty(num_samples, found.images[0].numel(), dtype=dtype, device="cpu")
        parts = drawn.split(16)
        for number, part in enumerate(parts):
            zeta = evidence.samples(phi, noise, count=len(part), seed=16 * number + 1, **solver)[0]
            part.copy_(observed.unobserved(zeta))
            progress({"stage": "samples", "batch": number + 1, "batches": len(parts)})
        extra = JITTER + (noise * gain if noise_correction else 0.0)
        rows.add_patches(row, observed.base, drawn, patches, extra, scored, noise_variance=noise)
        hyperparameters = {
            f"{prior.name}.{what}": math.exp(value)
            for prior in priors
            for what, value in zip(prior.hyperparameters, phi[prior.name].tolist(), strict=True)
        }
        rows.fitted(row, history, hyperparameters | {"noise_variance": noise})

    ways = {index: _hyperpriors(found, index, tv_weight, predcp_scale) for index in range(len(found))}
    jobs = [(index, row) for index, own in ways.items() for row in own]
    for (index, row), progress in followed("rows", jobs, lambda job: job[1]):
        kept.take(f"{index}-{ROWS.index(row)}", index, make, row, ways[index][row], progress)
    further = {"hyperparameters": kept.hyperparameters, "noise_variances": kept.histories}
    return kept.saved(f"by {num_samples} samples each", **further)


def sampled_against_exact(
    out: Path,
    reconstructions: Path,
    model: nn.Module,
    ranks: Sequence[int] = (5, 205),
    num_probes: int = 10,
    num_repeats: int = 4,
    num_samples: int = 2048,
    patches: Sequence[int] = (1, 2, 10, 28),
    assembled_jitter: float = 0.1,
    device: str = "auto",
) -> Outcome:
    """Evidence and density of the first reconstruction as :func:`sampled_posterior` estimates them, and exact.

    The integral of the gradient from the start to the optimum, by Boole's rule, is what the log evidence gains.

    Args:
        ranks: of the preconditioner, a column for each.
        num_repeats: independent gradients at each point, and parts of the samples, for standard errors.
        num_probes, patches, assembled_jitter: as for :func:`sampled_posterior`, in single precision.
    """
    found, on = Reconstructions.load(reconstructions), chosen_device(device)
    network, x, operator, y = one_problem(found, 0, model)
    network, x, operator = network.to(on), x.to(on), operator.to(on)
    la = DualLaplace(network, structured=unet_priors(network), observation=operator, evaluate_at="map")
    start = la.fit([(x, y.to(on).unsqueeze(0))]).phi
    la.optimize_evidence()
    gain = la.log_marginal_likelihood() + la.value_and_gradient(start)[0]
    observed, priors = _observed(copy.deepcopy(network).float(), x, operator)
    evidence = [SampledEvidence(observed, priors, y, num_samples=num_probes, rank=r, evaluate_at="map") for r in ranks]
    line = [torch.lerp(start, la.phi, k / 4) for k in range(5)]
    rule = torch.tensor([7, 32, 12, 32, 7], dtype=torch.float64, device="cpu") / 90

    def gradient(own: SampledEvidence | None, phi: Tensor, seed: int) -> Tensor:
        if own is None:
            return la.value_and_gradient(phi)[1]
        at = (la.split(phi)[0], math.exp(float(phi[-1])))
        slopes, last = own.gradient(*at, seed=seed, preconditioner=own.preconditioner(*at))
        return torch.cat([*slopes.values(), phi.new_tensor([last])])

    def grid(title: str, names: Sequence[str], columns: dict[str, list[str]], caption: str) -> Grid:
        return Grid(title, ["", *columns], [list(row) for row in zip(names, *columns.values(), strict=True)], caption)

    columns: dict[str, list[str]] = {}
    for own in (None, *evidence):
        began, count = time.perf_counter(), 5 * (1 if own is None else num_repeats)
        with warnings.catch_warnings(record=True) as early:
            warnings.simplefilter("always", SolverWarning)
            slopes = torch.stack([gradient(own, line[k % 5], k) for k in range(count)]).view(-1, 5, len(start))
        seconds, gains = time.perf_counter() - began, torch.einsum("p,rph,h->r", rule, slopes, start - la.phi)
        cells = [measured(values, ".3g") for values in [*slopes[:, 0].mT.tolist(), gains.tolist()]]
        name = "exact" if own is None else f"rank {own.rank}"
        stopped = sum(w.category is SolverWarning for w in early)
        columns[name] = [*cells, f"{stopped} of {count}", f"{seconds / count:.2g}"]
    names = [*la.names, "log evidence gained", "solver stopped early", "seconds of a gradient"]
    caption = (
        f"derivatives of -log Z at the start, {num_repeats} times by {num_probes} probes, with standard error; what "
        f"log Z gains is their integral to the optimum: {gain:.2f} nats by the values"
    )
    tables = [grid("Gradients of the evidence, sampled against exact", names, columns, caption)]

    (mean, covariance), at = la.function_covariance(), (la.split(la.phi)[0], la.noise_variance)
    error, extra = found.problem.truth[0].double() - mean[0].cpu(), la.noise_variance * noise_gain(operator) + JITTER
    scored = {f"{s} x {s}{kind}": (s, v) for kind, v in (("", extra), (", no correction", JITTER)) for s in patches}
    values, vectors = torch.linalg.eigh(covariance.cpu())
    kernel = operator @ la.prior_covariance(la.phi) @ operator.mT

    def scores(parts: Sequence[Tensor], root: Tensor, began: float) -> list[str]:
        cells = [[patch_log_density(error, own, *how) for own in parts] for how in scored.values()]
        ends = [f"{2 * float(root.diagonal().log().sum()):.4f}", f"{time.perf_counter() - began:.0f}"]
        return [*(measured(own, ".3f") for own in cells), *ends]

    began, root = time.perf_counter(), torch.linalg.cholesky(kernel + la.noise_variance * torch.eye(len(y), device=on))
    drawn = len(values) ** 0.5 * (vectors * values.clamp(min=0).sqrt()).mT  # as many as pixels, of this covariance
    columns = {"exact": scores([drawn], root, began)}
    for jitter in (0.0, assembled_jitter):
        began, root = time.perf_counter(), evidence[0].factor(*at, jitter=jitter)
        parts = enumerate(_parts(num_samples, 64))
        zetas = (evidence[0].samples(*at, count=count, seed=k, root=root)[0] for k, count in parts)
        drawn = torch.cat([observed.unobserved(zeta).double().cpu() for zeta in zetas])
        for count in (1, num_repeats):
            name = f"{num_samples // count} samples" + (f", K + {jitter:g} I" if jitter else "")
            columns[name] = scores(drawn.chunk(count), root, began)
    names = [*(f"patches {name}" for name in scored), "log determinant of K", "seconds"]
    caption = (
        "log density a pixel (nats) at the optimum, with standard error where samples are split; without correction "
        "for noise as in the authors' code for the walnut"
    )
    tables.append(grid("Log density, sampled against exact", names, columns, caption))
    return Outcome({grid.title: grid.to_dict() for grid in tables}, f"problem 0, {len(y)} measurements", tables)
