"""The evidence of tangent models that no dense matrix fits: samples, conjugate gradients, a low-rank preconditioner.

``K = A J S J^T A^T + v I`` is only ever multiplied with vectors, one Jacobian product each way. Posterior samples are
prior samples, corrected (arXiv 2210.04994); hyperparameters take stochastic gradients, by random signs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tu_symmetry.files import FileError, read_archive, replacing
from tu_symmetry.laplace.dual.hyperpriors import Energy, TotalVariation
from tu_symmetry.laplace.dual.jacobian import ObservedTangent, require_measurements
from tu_symmetry.laplace.dual.priors import Blocks, StructuredPrior
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.processes import count, shared

Product = Callable[[Tensor], Tensor]
Progress = Callable[[dict[str, Any]], None]


class SolverWarning(UserWarning):
    """Conjugate gradients stopped before their tolerance."""


class ConjugateGradients(NamedTuple):
    """What conjugate gradients found."""

    solution: Tensor  # [count, m]
    iterations: int
    residual: float  # largest |K x - b| / |b|


def conjugate_gradients(
    product: Product,
    right: Tensor,
    *,
    preconditioner: Product | None = None,
    tolerance: float = 1e-3,
    max_iterations: int = 50,
) -> ConjugateGradients:
    """``K^-1 b`` for a positive definite operator, all right sides ``[count, m]`` at once, to a relative residual."""
    apply = preconditioner or (lambda r: r)
    size = right.norm(dim=1, keepdim=True).clamp(min=torch.finfo(right.dtype).tiny)
    x, r = torch.zeros_like(right), right.clone()
    z = apply(r)
    p, rz = z, (r * z).sum(1, keepdim=True)
    iterations = 0
    while iterations < max_iterations and float((r.norm(dim=1, keepdim=True) / size).max()) > tolerance:
        q = product(p)
        curvature = (p * q).sum(1, keepdim=True)
        active = rz.abs() > 0
        if not bool(torch.isfinite(curvature).all()) or bool((active & (curvature <= 0)).any()):
            raise ValueError(
                "the operator is not positive definite: a singular prior, a noise variance that is lost in rounding "
                "(use float64), or NaN in the network's Jacobian"
            )
        step = torch.where(active, rz / curvature.clamp(min=torch.finfo(right.dtype).tiny), 0.0)
        x, r = x + step * p, r - step * q
        z = apply(r)
        new = (r * z).sum(1, keepdim=True)
        p = z + torch.where(active, new / rz.where(active, torch.ones_like(rz)), 0.0) * p
        rz, iterations = new, iterations + 1
    residual = float((r.norm(dim=1, keepdim=True) / size).max())
    return ConjugateGradients(x, iterations, residual)


def nystrom_preconditioner(
    product: Product, values: int, rank: int, noise: float, generator: torch.Generator, like: Tensor
) -> Product:
    """The inverse of ``U diag(e) U^T + v I`` for a randomized low-rank approximation of a positive operator.

    The operator is multiplied (``product``, without noise) once with ``rank`` random vectors. The inverse is scaled to
    be the identity on the complement of ``U``, where the operator counts as its smallest kept eigenvalue.
    """
    drawn = torch.randn(values, min(rank, values), generator=generator, dtype=torch.float64, device="cpu").to(like)
    basis = torch.linalg.qr(drawn)[0]
    image = product(basis.mT.contiguous()).mT
    shift = math.sqrt(values) * torch.finfo(like.dtype).eps * float(image.norm())
    image = image + shift * basis
    core = basis.mT @ image
    inner, turn = torch.linalg.eigh(torch.nan_to_num((core + core.mT) / 2))
    limit = math.sqrt(torch.finfo(like.dtype).eps) * float(inner[-1])
    if not bool(core.isfinite().all()) or limit <= 0 or float(inner[0]) < -limit:
        raise ValueError(
            f"the operator of the preconditioner is not positive (eigenvalues from {float(inner[0]):.3g} to "
            f"{float(inner[-1]):.3g}): check the prior's covariances"
        )
    vectors, scale = torch.linalg.svd(image @ (turn * inner.clamp(min=shift).rsqrt()), full_matrices=False)[:2]
    eigenvalues = (scale.square() - shift).clamp(min=0)
    weights = (float(eigenvalues[-1]) + noise) / (eigenvalues + noise) - 1
    return lambda vector: vector + (vector @ vectors * weights) @ vectors.mT


class SampledResult(NamedTuple):
    """What the sampling-based evidence found."""

    phi: dict[str, Tensor]  # block to hyperparameters (logarithms)
    noise_variance: float
    noise_variances: list[float]  # after each step


class SampledEvidence:
    """Matrix-free evidence of a tangent model with structured priors and a linear observation.

    Args:
        operator: ``A J`` over the linearized weights.
        priors: resolved; every parameter in one block.
        measurements: ``y`` ``[m]``.
        num_samples: random signs of a gradient.
        rank: rank of the preconditioner; 0 for none.
        tolerance: tolerance of conjugate gradients.
        max_iterations: most iterations of conjugate gradients.
        evaluate_at: where the evidence is evaluated, see :class:`~tu_symmetry.laplace.DualLaplace`: at ``map`` its
            residual is the network's own.
        weights: of the prior's term at ``map``, flat ``[size]``; the trained weights by default.
    """

    def __init__(
        self,
        operator: ObservedTangent,
        priors: Sequence[StructuredPrior],
        measurements: Tensor,
        *,
        num_samples: int = 64,
        rank: int = 200,
        tolerance: float = 1e-3,
        max_iterations: int = 50,
        evaluate_at: EvaluateAt = "tangent_mode",
        weights: Tensor | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        self.operator, self.blocks = operator, Blocks(priors, operator.tangent)
        point = operator.tangent.point()
        self.like, self.count = point[:1], num_samples
        self.rank, self.tolerance, self.max_iterations = rank, tolerance, max_iterations
        self.values = len(operator.matrix)
        if evaluate_at not in ("map", "tangent_mode"):
            raise ValueError(f"evaluate_at={evaluate_at!r} is not known; choose 'tangent_mode' or 'map'")
        self.evaluate_at = evaluate_at
        self.residual = require_measurements(measurements, operator.matrix) - operator.matrix @ operator.base
        self.target = self.residual + operator.forward(point.unsqueeze(0))[0]
        patterns = {name: self.blocks.patterns(name, point if weights is None else weights) for name in self.blocks}
        self._seconds = {name: (own.mT @ own).double().cpu() for name, own in patterns.items()}

    def _kernel(self, phi: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """``A J S J^T A^T u`` for ``[count, m]``; processes share the vectors."""
        parts = vectors.split(min(self.operator.at_once, -(-len(vectors) // count())))  # of the weights' size each

        def product(k: int) -> Tensor:
            return self.operator.forward(self.blocks.times("covariance", phi, self.operator.adjoint(parts[k])))

        return torch.cat(shared(len(parts), product))

    def preconditioner(self, phi: Mapping[str, Tensor], noise: float) -> Product | None:
        """A preconditioner of the given rank, at these hyperparameters."""
        if self.rank == 0:
            return None
        generator = torch.Generator().manual_seed(1)
        return nystrom_preconditioner(
            lambda u: self._kernel(phi, u), self.values, self.rank, noise, generator, self.like
        )

    def _solve(
        self, phi: Mapping[str, Tensor], noise: float, right: Tensor, preconditioner: Product | None = None
    ) -> Tensor:
        """``K^-1 b`` for ``[count, m]``; a :class:`SolverWarning` where it stops before the tolerance."""
        found = conjugate_gradients(
            lambda u: self._kernel(phi, u) + noise * u,
            right,
            preconditioner=preconditioner,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
        if not found.residual <= self.tolerance:
            warnings.warn(
                f"conjugate gradients stopped at a residual of {found.residual:.1e} after {found.iterations} "
                f"iterations (asked for {self.tolerance:.1e}); raise max_iterations or rank",
                SolverWarning,
                stacklevel=3,
            )
        return found.solution

    def samples(
        self,
        phi: Mapping[str, Tensor],
        noise: float,
        *,
        count: int,
        seed: int = 0,
        preconditioner: Product | None = None,
        root: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Posterior samples ``[count, size]`` of the deviation from ``theta*``, and ``theta*``.

        ``theta_0 - S J^T A^T K^-1 (A J theta_0 + e)`` is such a sample, of ``theta_0`` from the prior and noise ``e``.
        ``root`` is a factor of ``K``, see :meth:`factor`, in place of conjugate gradients.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn, error = (
            torch.randn(count, n, generator=generator, dtype=self.like.dtype, device="cpu").to(self.like)
            for n in (self.operator.size, self.values)
        )
        prior = self.blocks.times("root", phi, drawn)
        right = self.operator.forward(prior) + math.sqrt(noise) * error
        wanted = torch.cat([right, self.target.unsqueeze(0)])
        if root is None:
            solved = self._solve(phi, noise, wanted, preconditioner)
        else:
            solved = torch.cholesky_solve(wanted.to(root).mT, root).mT.to(wanted)
        back = self.blocks.times("covariance", phi, self.operator.adjoint(solved))
        return prior - back[:-1], back[-1]

    def factor(self, phi: Mapping[str, Tensor], noise: float, *, jitter: float = 0.0, count: int = 64) -> Tensor:
        """Cholesky factor ``[m, m]``, float64, of ``K + jitter I``, assembled from ``count`` columns at a time."""
        unit = torch.eye(self.values, dtype=self.like.dtype, device=self.like.device)
        kernel = torch.cat([self._kernel(phi, part).double() for part in unit.split(count)])
        kernel = (kernel + kernel.mT) / 2
        kernel.diagonal().add_(noise + jitter)
        root, failed = torch.linalg.cholesky_ex(kernel)
        if int(failed):
            raise ValueError("the measurements' covariance is singular to rounding: raise jitter, or use float64")
        return root

    def gradient(
        self, phi: Mapping[str, Tensor], noise: float, *, seed: int = 0, preconditioner: Product | None = None
    ) -> tuple[dict[str, Tensor], float]:
        """Unbiased gradient of ``-log Z``, by block in ``phi``, and in the log noise variance."""
        generator = torch.Generator().manual_seed(seed)
        m, mode = self.values, self.evaluate_at == "tangent_mode"
        probes = (2 * torch.randint(0, 2, (self.count, m), generator=generator, device="cpu") - 1).to(self.like)
        wanted = torch.cat([probes, self.target.unsqueeze(0)]) if mode else probes
        solved = self._solve(phi, noise, wanted, preconditioner)
        pulled = self.operator.adjoint(torch.cat([solved, probes]))
        found = {}
        for name, prior in self.blocks.items():
            own = self.blocks.patterns(name, pulled)
            left, plain = own[: self.count], own[len(solved) :]
            outer = torch.einsum("snk,snl->kl", left, plain) / self.count
            if mode:
                outer = outer - own[self.count].mT @ own[self.count]
            slopes = 0.5 * torch.einsum("kl,rkl->r", outer.double().cpu(), prior.basis)
            with torch.enable_grad():
                leaf = phi[name].detach().clone().requires_grad_()
                value = (prior.coefficients(leaf) * slopes).sum()
                if not mode:
                    value = value + 0.5 * (torch.cholesky_inverse(prior.root(leaf)) * self._seconds[name]).sum()
                (found[name],) = torch.autograd.grad(value, leaf)
        trace = float((solved[: self.count] * probes).sum() / self.count)
        if mode:
            return found, 0.5 * noise * (trace - float(solved[self.count].square().sum()))
        return found, 0.5 * (noise * trace - float(self.residual.square().sum()) / noise)

    def difference_variances(
        self, name: str, first: Tensor, second: Tensor, *, num_probes: int
    ) -> tuple[Tensor, Tensor]:
        """Estimates of :meth:`.laplace.DualLaplace.difference_variances`, float64 on the CPU.

        The prior variance of a difference is ``tr(K_b G)``, ``G = sum_n g_n g_n^T`` of its derivatives ``g_n`` in the
        patterns of a block. ``h = sum_n u_n g_n`` with random signs takes one Jacobian product for each entry of a
        pattern, and ``E h h^T = G``. An estimate is never negative, and off by ``sqrt(2 / num_probes)`` of itself.
        """
        prior = self.blocks[name]
        places = self.blocks.places[name].view(-1, prior.pattern)
        generator = torch.Generator().manual_seed(104729 * (1 + list(self.blocks).index(name)))
        total = torch.zeros(len(prior.basis), len(first), dtype=torch.float64, device="cpu")
        for _ in range(num_probes):
            signs = 2 * torch.randint(0, 2, (len(places),), generator=generator, device="cpu") - 1
            vectors = self.like.new_zeros(prior.pattern, self.operator.size)
            for offset in range(prior.pattern):
                vectors[offset, places[:, offset]] = signs.to(vectors)
            outputs = self.operator.unobserved(vectors)
            h = (outputs[:, second] - outputs[:, first]).double().cpu()
            for r, form in enumerate(prior.basis):  # one form after the other: [k, pairs] is what is in memory
                total[r] += (h * (form @ h)).sum(0)
        return total / num_probes, total.abs() / num_probes

    def adam(
        self,
        *,
        noise_variance: float = 1.0,
        num_steps: int = 3000,
        lr: float = 0.01,
        decay_every: int = 1000,
        refresh_every: int = 100,
        hyperprior: TotalVariation | None = None,
        hyperprior_probes: int = 20,
        checkpoint: Path | None = None,
        progress: Progress | None = None,
    ) -> SampledResult:
        """Stochastic gradients for all hyperparameters; probes are drawn anew for each step.

        After ``decay_every`` steps the learning rate is halved, after ``refresh_every`` the preconditioner made anew.
        The variances of a hyperprior are estimated once, by ``hyperprior_probes`` random signs of each block. With a
        ``checkpoint``, a file that is written with each preconditioner, the same call (perhaps with more steps) goes on
        from there as if it had not been cut; ``progress`` is called after each step.

        Raises:
            FileError: a checkpoint that is damaged, or of another problem or other options.
        """
        energy = None
        if hyperprior is not None:
            variances = partial(self.difference_variances, num_probes=hyperprior_probes)
            energy = hyperprior.energy(self.operator.base, variances, self.blocks)
        leaves = {name: prior.initial() for name, prior in self.blocks.items()}
        bounds = {n: torch.tensor(p.bounds(), dtype=torch.float64, device="cpu") for n, p in self.blocks.items()}
        noise = torch.tensor(math.log(noise_variance), dtype=torch.float64, device="cpu")
        values = [*leaves.values(), noise]
        optimizer = torch.optim.Adam(values, lr=lr)
        history: list[float] = []
        solver = (self.count, self.rank, self.tolerance, self.max_iterations, self.evaluate_at)
        steps = (noise_variance, lr, decay_every, refresh_every, hyperprior, hyperprior_probes)
        call = {"options": f"{solver} {steps} {list(leaves)}", "target": self.target.double().cpu()}
        if checkpoint is not None and checkpoint.exists():
            history = _resumed(checkpoint, call, values, optimizer)
        preconditioner = None
        for step in range(len(history), num_steps):
            optimizer.param_groups[0]["lr"] = lr * 0.5 ** (step // decay_every)
            variance = float(noise.exp())
            if step % refresh_every == 0 or preconditioner is None:
                if checkpoint is not None and history:
                    _keep(checkpoint, call, values, optimizer, history)
                preconditioner = self.preconditioner(leaves, variance)
            slopes, noise_slope = self.gradient(leaves, variance, seed=7919 * (step + 1), preconditioner=preconditioner)
            for name, slope in ({} if energy is None else slopes_of(energy, leaves)).items():
                slopes[name] = slopes[name] + slope
            for name, own in leaves.items():
                own.grad = slopes[name]
            noise.grad = torch.tensor(noise_slope, dtype=torch.float64, device="cpu")
            optimizer.step()
            for name, own in leaves.items():
                own.copy_(own.clamp(bounds[name][:, 0], bounds[name][:, 1]))
            history.append(float(noise.exp()))
            if progress is not None:
                progress({"stage": "evidence", "step": step + 1, "batches": num_steps, "noise_variance": history[-1]})
        if checkpoint is not None:
            _keep(checkpoint, call, values, optimizer, history)
        return SampledResult(leaves, float(noise.exp()), history)


def _keep(
    path: Path, call: dict[str, Any], values: list[Tensor], optimizer: torch.optim.Optimizer, history: list[float]
) -> None:
    """Write where Adam is, and of which call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(call | {"values": values, "optimizer": optimizer.state_dict(), "history": history}, file)


def _resumed(path: Path, call: dict[str, Any], values: list[Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    """Go on from there; returns the noise variances so far. Other processors compute the target to rounding."""
    with path.open("rb") as file:
        held = read_archive(file, path)
    known = isinstance(held, dict) and held.get("options") == call["options"]
    target = call["target"]
    if not known or held["target"].shape != target.shape or (held["target"] - target).norm() > 1e-3 * target.norm():
        raise FileError(f"{path} holds steps of another problem, or of other options: move it away, or name another")
    for own, kept in zip(values, held["values"], strict=True):
        own.copy_(kept)
    optimizer.load_state_dict(held["optimizer"])
    return list(held["history"])


def linearized_weights(
    operator: ObservedTangent,
    measurements: Tensor,
    *,
    num_steps: int = 1000,
    lr: float = 1e-4,
    weight_decay: float = 1e-6,
) -> Tensor:
    """Weights ``[size]`` of the tangent model that fit the measurements, by Adam from the trained ones.

    ``mean((A (f + J (theta - theta~)) - y)^2)`` with weight decay, as in the authors' code of arXiv 2203.00479, which
    adds the total variation of the training.
    """
    start = operator.tangent.point()
    residual = require_measurements(measurements, operator.matrix) - operator.matrix @ operator.base
    theta = start.clone()
    optimizer = torch.optim.Adam([theta], lr=lr, weight_decay=weight_decay)
    for _ in range(num_steps):
        error = operator.forward((theta - start).unsqueeze(0)) - residual
        theta.grad = operator.adjoint(2 * error / error.numel())[0]
        optimizer.step()
    return theta


def slopes_of(energy: Energy, phi: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a hyperprior's energy by block, without blocks that it does not read."""
    with torch.enable_grad():
        leaves = {name: own.detach().clone().requires_grad_() for name, own in phi.items()}
        found = torch.autograd.grad(energy(leaves), list(leaves.values()), allow_unused=True)
    return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}
