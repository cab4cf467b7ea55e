"""The evidence of tangent models that no dense matrix fits: samples, conjugate gradients, a low-rank preconditioner.

``K = A J S J^T A^T + v I`` is only ever multiplied with vectors, one Jacobian product each way. Posterior samples are
prior samples, corrected (arXiv 2210.04994); hyperparameters take stochastic gradients, by random signs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tu_symmetry.laplace.dual.evidence import DualHyperprior, HyperpriorContext, require_disjoint
from tu_symmetry.laplace.dual.jacobian import ObservedTangent
from tu_symmetry.laplace.dual.observation import require_measurements
from tu_symmetry.laplace.dual.priors import StructuredPrior

Product = Callable[[Tensor], Tensor]


class SolverWarning(UserWarning):
    """Conjugate gradients stopped before their tolerance."""


class ConjugateGradients(NamedTuple):
    """Solutions of ``K x = b`` for several right sides."""

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
    """Conjugate gradients for a positive definite operator, all right sides ``[count, m]`` at once.

    ``tolerance`` is one on the residual over the right side.
    """
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


class NystromPreconditioner:
    """The inverse of ``U diag(e) U^T + v I`` for a randomized low-rank approximation of a positive operator.

    The operator is multiplied (``product``, without noise) once with ``rank`` random vectors. On the complement of
    ``U`` it acts as its smallest kept eigenvalue does, so that the preconditioned spectrum is flat.
    """

    def __init__(
        self, product: Product, values: int, rank: int, noise: float, generator: torch.Generator, like: Tensor
    ) -> None:
        rank = min(rank, values)
        drawn = torch.randn(values, rank, generator=generator, dtype=torch.float64, device="cpu").to(like)
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
        factor = image @ (turn * inner.clamp(min=shift).rsqrt())
        self.vectors, scale = torch.linalg.svd(factor, full_matrices=False)[:2]
        self.eigenvalues = (scale.square() - shift).clamp(min=0)
        self.noise = noise

    def __call__(self, vector: Tensor) -> Tensor:
        """``P^-1 v`` for ``[count, m]``, scaled so that it is the identity on the complement."""
        along = vector @ self.vectors
        last = float(self.eigenvalues[-1]) + self.noise
        return vector + (along * (last / (self.eigenvalues + self.noise) - 1)) @ self.vectors.mT


@dataclass(frozen=True, eq=False)
class SampledResult:
    """What the sampling-based evidence found."""

    phi: dict[str, Tensor]  # block to hyperparameters (logarithms)
    noise_variance: float
    history: list[dict[str, Any]] = field(repr=False)  # hyperparameters and noise variance of each step


@dataclass(frozen=True, eq=False)
class SampledStatistics:
    """What a hyperprior reads of a network whose kernels fit nowhere: its outputs, and variances by random signs.

    The prior variance of a difference of outputs is ``tr(K_b G)`` with ``G = sum_n g_n g_n^T`` over the patterns of a
    block, ``g_n`` being its derivative in the weights of one. ``G`` is estimated once, whatever the hyperparameters:
    with random signs ``u_n``, ``h = sum_n u_n g_n`` takes one Jacobian product for each entry of a pattern, and
    ``E h h^T = G``. An estimate is never negative, and off by ``sqrt(2 / num_probes)`` of itself at worst.
    """

    evidence: SampledEvidence
    num_probes: int

    def __post_init__(self) -> None:
        if self.num_probes < 1:
            raise ValueError(f"num_probes={self.num_probes} has to be at least 1")

    @property
    def outputs(self) -> Tensor:
        """``f``, all outputs in one vector ``[d]``."""
        return self.evidence.operator.base

    def difference_variances(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates of :meth:`.evidence.DualStatistics.difference_variances`, float64 on the CPU."""
        own, operator = self.evidence, self.evidence.operator
        prior = own.priors[name]
        generator = torch.Generator().manual_seed(own.seed + 104729 * (1 + list(own.priors).index(name)))
        basis, places = prior.basis.double(), own.index[name].view(-1, prior.pattern)
        total = torch.zeros(len(basis), len(first), dtype=torch.float64, device="cpu")
        for _ in range(self.num_probes):
            signs = 2 * torch.randint(0, 2, (len(places),), generator=generator, device="cpu") - 1
            vectors = operator.base.new_zeros(prior.pattern, operator.size)
            for offset in range(prior.pattern):
                vectors[offset, places[:, offset]] = signs.to(vectors)
            moved = operator.unobserved(vectors)
            h = (moved[:, second.to(moved.device)] - moved[:, first.to(moved.device)]).double().cpu()
            for r, form in enumerate(basis):  # one form after the other: [k, pairs] is what is in memory
                total[r] += (h * (form @ h)).sum(0)
        return total / self.num_probes, total.abs() / self.num_probes


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
        seed: seed of the preconditioner, and of what :meth:`adam` draws.
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
        seed: int = 0,
    ) -> None:
        tangent = operator.tangent
        require_disjoint(priors, tangent.names)
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        self.operator, self.priors = operator, {prior.name: prior for prior in priors}
        point = tangent.point()
        self.like, self.seed, self.count = point[:1], seed, num_samples
        self.rank, self.tolerance, self.max_iterations = rank, tolerance, max_iterations
        y = require_measurements(measurements).reshape(-1).to(point)
        operator.observation.check_sizes(operator.outputs, y.numel())
        observe = operator.observation.forward
        self.residual = y - observe(operator.base.unsqueeze(0))[0]
        self.target = self.residual + operator.forward(point.unsqueeze(0))[0]
        self.index = {
            prior.name: torch.cat(
                [torch.arange(*tangent.slots[name][:2], device="cpu") for name in prior.parameters]
            ).to(point.device)
            for prior in priors
        }

    def _by_block(self, phi: Mapping[str, Tensor], vectors: Tensor, method: str) -> Tensor:
        found = torch.zeros_like(vectors)
        for name, prior in self.priors.items():
            own = self.index[name]
            found[:, own] = getattr(prior, method)(phi[name], vectors[:, own])
        return found

    def kernel(self, phi: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """``A J S J^T A^T u`` for ``[count, m]``."""
        return self.operator.forward(self._by_block(phi, self.operator.adjoint(vectors), "product"))

    def preconditioner(self, phi: Mapping[str, Tensor], noise: float) -> NystromPreconditioner | None:
        """A preconditioner of the given rank, at these hyperparameters."""
        if self.rank == 0:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        return NystromPreconditioner(
            lambda u: self.kernel(phi, u), self.operator.values, self.rank, noise, generator, self.like
        )

    def solve(
        self, phi: Mapping[str, Tensor], noise: float, right: Tensor, *, preconditioner: Product | None = None
    ) -> Tensor:
        """``K^-1 b`` for ``[count, m]``; a :class:`SolverWarning` where it stops before the tolerance."""
        found = conjugate_gradients(
            lambda u: self.kernel(phi, u) + noise * u,
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
    ) -> tuple[Tensor, Tensor]:
        """Posterior samples ``[count, size]`` of the deviation from ``theta*``, and ``theta*``.

        ``theta_0 - S J^T A^T K^-1 (A J theta_0 + e)`` is such a sample, of ``theta_0`` from the prior and noise ``e``.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn, error = (
            torch.randn(count, n, generator=generator, dtype=self.like.dtype, device="cpu").to(self.like)
            for n in (self.operator.size, self.operator.values)
        )
        prior = self._by_block(phi, drawn, "root_product")
        right = self.operator.forward(prior) + math.sqrt(noise) * error
        right = torch.cat([right, self.target.unsqueeze(0)])
        solved = self.solve(phi, noise, right, preconditioner=preconditioner)
        back = self._by_block(phi, self.operator.adjoint(solved), "product")
        return prior - back[:-1], back[-1]

    def gradient(
        self,
        phi: Mapping[str, Tensor],
        noise: float,
        *,
        seed: int = 0,
        preconditioner: Product | None = None,
    ) -> tuple[dict[str, Tensor], float]:
        """Unbiased gradient of ``-log Z`` (at the tangent mode), by block in ``phi``, and in the log noise variance."""
        generator = torch.Generator().manual_seed(seed)
        m = self.operator.values
        probes = (2 * torch.randint(0, 2, (self.count, m), generator=generator, device="cpu") - 1).to(self.like)
        right = torch.cat([probes, self.target.unsqueeze(0)])
        solved = self.solve(phi, noise, right, preconditioner=preconditioner)
        pulled = self.operator.adjoint(torch.cat([solved, probes]))
        left, alpha, plain = pulled[: self.count], pulled[self.count], pulled[self.count + 1 :]
        found = {}
        for name, prior in self.priors.items():
            own = self.index[name]
            by_pattern = [x[..., own].unflatten(-1, (-1, prior.pattern)) for x in (left, plain, alpha)]
            outer = torch.einsum("snk,snl->kl", by_pattern[0], by_pattern[1]) / self.count
            outer = outer - torch.einsum("nk,nl->kl", by_pattern[2], by_pattern[2])
            slopes = 0.5 * torch.einsum("kl,rkl->r", outer.double().cpu(), prior.basis)
            with torch.enable_grad():
                leaf = phi[name].detach().clone().requires_grad_()
                (found[name],) = torch.autograd.grad((prior.coefficients(leaf) * slopes).sum(), leaf)
        trace = float((solved[: self.count] * probes).sum() / self.count)
        return found, 0.5 * noise * (trace - float(solved[self.count].square().sum()))

    def adam(
        self,
        *,
        noise_variance: float = 1.0,
        num_steps: int = 3000,
        lr: float = 0.01,
        decay_every: int = 1000,
        refresh_every: int = 100,
        hyperprior: DualHyperprior | None = None,
        hyperprior_probes: int = 20,
    ) -> SampledResult:
        """Stochastic gradients for all hyperparameters, length scales too; probes are drawn anew for each step.

        Args:
            noise_variance: to start from.
            num_steps: how many.
            lr: learning rate of Adam.
            decay_every: steps after which the learning rate is halved.
            refresh_every: steps after which the preconditioner is made anew.
            hyperprior: added to the negative log evidence, as for :class:`~.evidence.DualEvidence`; of
                :class:`~tu_symmetry.laplace.TotalVariation` the variances are estimated, once for all steps.
            hyperprior_probes: random signs of each block for these estimates.
        """
        leaves = {name: prior.initial() for name, prior in self.priors.items()}
        noise = torch.tensor(math.log(noise_variance), dtype=torch.float64, device="cpu")
        optimizer = torch.optim.Adam([*leaves.values(), noise], lr=lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, decay_every, 0.5)
        history: list[dict[str, Any]] = []
        preconditioner = None
        kept: dict[Any, Any] = {}
        statistics = SampledStatistics(self, hyperprior_probes)
        for step in range(num_steps):
            variance = float(noise.exp())
            if step % refresh_every == 0:
                preconditioner = self.preconditioner(leaves, variance)
            seed = self.seed + 7919 * (step + 1)
            slopes, noise_slope = self.gradient(leaves, variance, seed=seed, preconditioner=preconditioner)
            if hyperprior is not None:
                for name, slope in self._hyperprior_slopes(hyperprior, statistics, leaves, kept).items():
                    slopes[name] = slopes[name] + slope
            for name, own in leaves.items():
                own.grad = slopes[name]
            noise.grad = torch.tensor(noise_slope, dtype=torch.float64, device="cpu")
            optimizer.step()
            schedule.step()
            for name, own in leaves.items():
                limits = torch.tensor(self.priors[name].bounds(), dtype=torch.float64, device="cpu")
                own.copy_(own.clamp(limits[:, 0], limits[:, 1]))
            history.append(
                {"phi": {name: own.tolist() for name, own in leaves.items()}, "noise_variance": float(noise.exp())}
            )
        return SampledResult(leaves, float(noise.exp()), history)

    def _hyperprior_slopes(
        self,
        hyperprior: DualHyperprior,
        statistics: SampledStatistics,
        phi: Mapping[str, Tensor],
        kept: dict[Any, Any],
    ) -> dict[str, Tensor]:
        """Gradients of a negative log density of the hyperparameters; blocks that it does not read are left out."""
        with torch.enable_grad():
            leaves = {name: own.detach().clone().requires_grad_() for name, own in phi.items()}
            context = HyperpriorContext(statistics, self.priors, leaves, kept)
            value = hyperprior({n: self.priors[n].coefficients(own) for n, own in leaves.items()}, context)
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}
