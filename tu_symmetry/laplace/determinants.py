"""The evidence of the tangent linear model, as a function of prior precisions and noise variance.

With ``n_g = ||theta_g||^2``, eigenvalues ``s`` of the curvature, and noise terms for regression only, it is ``-log Z =
loss / v + (m / 2) log(2 pi v) + 1/2 sum_g [lambda_g n_g + sum log(1 + s / (v lambda_g))]``, convex in ``rho = log
lambda`` and ``tau = log v``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Block, CoupledBlock, decompose
from tu_symmetry.laplace.definite import cholesky_of_one_plus
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.transfer import moved

_EXACT = 4096  # as many eigenvalues of a group are kept as they are
_BINS = 2048  # for those of a group that has more
_SMALLEST = 1e-18  # eigenvalues below this share of the largest count as zero
_STEPS = 200
_LONGEST = 5.0  # step of a log precision
_SHORT = 1e-6  # the next step of Newton's method would have about its square
_ROUNDING = 1e-12  # relative error of a log determinant
_NOISE_RANGE = 50.0  # largest log ratio of the noise variance to the residuals'


@dataclass(frozen=True)
class Hyperprior:
    """Prior on the log precision of every group: ``log lambda_g ~ N(log c_g, std^2)``, bounded to ``c_g cap^(+-1)``.

    The center ``c_g`` is the group's number of weights over their squared norm at the linearization point, so that the
    predictive stays where normalized weights are multiplied by a factor (Proposition 3).
    """

    std: float = math.log(10)  # of the log precision in nats, one decade; infinite for a flat prior
    cap: float = 1e6  # largest factor between a precision and its center

    def __post_init__(self) -> None:
        if not self.std > 0 or not self.cap > 1:
            raise ValueError(f"a hyperprior needs std > 0 and cap > 1, got std={self.std} and cap={self.cap}")

    @property
    def weight(self) -> float:
        """The inverse variance of the log precision; 0 of a flat prior."""
        return 0.0 if math.isinf(self.std) else 1 / self.std**2

    def energy(self, log_precision: Tensor, log_center: Tensor) -> float:
        """Negative log density, up to a constant (nats)."""
        return 0.5 * self.weight * float((log_precision - log_center).square().sum())


FLAT = Hyperprior(std=math.inf, cap=1e12)


@dataclass(frozen=True)
class Noise:
    """Observation noise of a regression: the number of observed values, and the sum of their squared residuals."""

    values: int
    squares: float

    def energy(self, tau: float) -> float:
        """Negative log-likelihood with all constants (nats)."""
        return 0.5 * (self.squares * math.exp(-tau) + self.values * (math.log(2 * math.pi) + tau))

    def lowest(self) -> float:
        """The smallest log noise variance that can have the largest evidence: that of the residuals."""
        if self.squares <= 0:
            raise ValueError(
                "all residuals are zero to rounding, so the evidence has no noise variance; give noise_variance=..."
            )
        return math.log(self.squares / self.values)


@dataclass(frozen=True)
class _Hessian:
    """A symmetric matrix over ``(rho, tau)``; its part ``inner`` of ``rho`` is diagonal where it is a vector."""

    inner: Tensor
    border: Tensor
    corner: float

    def solve(self, right: Tensor, free: Tensor) -> Tensor:
        """``F^-1 right`` for ``right [groups + 1, k]``, over the entries that are ``free``; zero in all others."""
        rows, last = right[:-1] * free[:-1, None], right[-1:] * free[-1]
        border = torch.where(free[:-1], self.border, 0).unsqueeze(-1)
        solved, bent = self._inner(rows, free[:-1]), self._inner(border, free[:-1])
        left = self.corner - float((border * bent).sum())
        if not bool(free[-1]) or left <= 1e-15 * self.corner:
            return torch.cat([solved, torch.zeros_like(last)])
        last = (last - border.mT @ solved) / left
        return torch.cat([solved - bent @ last, last])

    def _inner(self, rows: Tensor, free: Tensor) -> Tensor:
        if self.inner.ndim == 1:
            return rows / torch.where(free & (self.inner > 0), self.inner, torch.inf).unsqueeze(-1)
        scale = torch.where(free, self.inner.diagonal().clamp(min=1e-300).rsqrt(), 0)
        matrix = self.inner * scale * scale.unsqueeze(-1)
        matrix.diagonal().clamp_(min=1 - 1e-15)
        matrix.diagonal().add_(1e-12)
        return scale.unsqueeze(-1) * torch.linalg.solve(matrix, scale.unsqueeze(-1) * rows)


class Determinants(ABC):
    """What the evidence needs of the curvature: ``log det(H / v + Lambda) - log det Lambda`` and its derivatives."""

    entries = 0  # by whose rounding the gradient can have the wrong sign

    @abstractmethod
    def log_det_ratio(self, rho: Tensor, tau: float) -> float:
        """The log-determinant ratio (nats), a convex function of ``rho + tau``."""

    @abstractmethod
    def slopes(self, rho: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """Minus its gradient ``[groups]``, and its Hessian: ``[groups, groups]``, or the diagonal ``[groups]``."""

    def gamma(self, rho: Tensor, tau: float) -> Tensor:
        """Effective number of determined directions of every group, float64 ``[groups]``."""
        return self.slopes(rho, tau)[0]

    def derivatives(
        self, norms: Tensor, rho: Tensor, tau: float, noise: Noise | None, weight: float = 0.0
    ) -> tuple[Tensor, _Hessian]:
        """Gradient ``[groups + 1]`` and Hessian of ``-log Z`` in ``(rho, tau)`` for weights of squared ``norms``.

        The hyperprior's ``weight``, its inverse variance, is part of the Hessian; without ``noise`` ``tau`` stays.
        """
        gamma, curvature = self.slopes(rho, tau)
        ridge = rho.exp() * norms
        residual = 0.0 if noise is None else noise.squares * math.exp(-tau)
        along = 0.0 if noise is None else noise.values - residual - float(gamma.sum())
        gradient = torch.cat([ridge - gamma, torch.tensor([along], dtype=torch.float64, device="cpu")]) / 2
        inner = curvature.clone()
        (inner if inner.ndim == 1 else inner.diagonal()).add_(ridge + 2 * weight)
        border = curvature if curvature.ndim == 1 else curvature.sum(1)
        return gradient, _Hessian(inner / 2, border / 2, (residual + float(curvature.sum())) / 2)

    def response(
        self, x: Tensor, norms: Tensor, rho: Tensor, tau: float, noise: Noise | None, weight: float, free: Tensor
    ) -> Tensor:
        """``X^T F^-1 X`` for ``x [groups + 1, k]``: what a quadratic form loses where the precisions move along.

        ``F`` is the Hessian of :meth:`derivatives`; ``free`` says which entries of ``(rho, tau)`` can move.
        """
        return x.mT @ self.derivatives(norms, rho, tau, noise, weight)[1].solve(x, free)

    def step(
        self, norms: Tensor, rho: Tensor, tau: float, log_center: Tensor, hyperprior: Hyperprior, noise: Noise | None
    ) -> tuple[Tensor, float]:
        """The log precisions that minimize ``-log Z - log hyperprior`` for fixed weights; with ``noise``, ``tau`` too.

        Newton's method with backtracking from ``rho`` and ``tau``, within the bounds of the hyperprior. Where a step
        promises less than rounding error, it is taken as it is, and ends the search if it is short.
        """
        bound, weight = math.log(hyperprior.cap), hyperprior.weight
        ends = (tau, tau) if noise is None else (noise.lowest(), noise.lowest() + _NOISE_RANGE)
        low, high = (
            torch.cat([log_center + sign * bound, torch.tensor([end], dtype=torch.float64, device="cpu")])
            for sign, end in zip((-1, 1), ends, strict=True)
        )

        def energy(point: Tensor) -> float:
            own, log_noise = point[:-1], float(point[-1])
            value = 0.5 * (float((own.exp() * norms).sum()) + self.log_det_ratio(own, log_noise))
            return value + hyperprior.energy(own, log_center) + (0.0 if noise is None else noise.energy(log_noise))

        point = torch.cat([rho, torch.tensor([tau], dtype=torch.float64, device="cpu")]).clamp(low, high)
        value = energy(point)
        unsure = 0.1 * _ROUNDING * (self.entries + (0 if noise is None or not self.entries else noise.values))
        for _ in range(_STEPS):
            gradient, hessian = self.derivatives(norms, point[:-1], float(point[-1]), noise, weight)
            gradient[:-1] += weight * (point[:-1] - log_center)
            held = ((point <= low) & (gradient >= 0)) | ((point >= high) & (gradient <= 0)) | (gradient.abs() <= unsure)
            step = -hessian.solve(gradient.unsqueeze(-1), ~held).squeeze(-1)
            rounding = _ROUNDING * (1 + abs(value))
            longest = float(step.abs().max())
            if longest > _LONGEST:
                short = step.clamp(-_LONGEST, _LONGEST)
                step = short if float(gradient @ short) < 0 else step * (_LONGEST / longest)
            if float(-gradient @ step) <= rounding:
                point = (point + step).clamp(low, high)
                if longest < _SHORT:
                    break
                continue
            for _halving in range(40):
                trial = (point + step).clamp(low, high)
                found = energy(trial)
                if found <= value + rounding:
                    break
                step = step / 2
            else:
                break
            point, value = trial, found
        return point[:-1], float(point[-1])


class Spectrum(Determinants):
    """Logs of the eigenvalues of all groups, with how often each occurs and the number of its group, all ``[n]``."""

    def __init__(self, logs: Tensor, counts: Tensor, groups: Tensor, count: int) -> None:
        self.logs, self.counts, self.groups, self.count = logs, counts, groups, count

    @classmethod
    def of(cls, blocks: Sequence[Block], groups: PriorGroups) -> Spectrum:
        """The eigenvalues of all blocks, each in one group; those of large groups in bins."""
        count = len(groups)
        largest, sizes = [0.0] * count, [0] * count
        for block in blocks:
            number, values = int(block.groups), block.eigenvalues()
            largest[number] = max(largest[number], float(values.max()))
            sizes[number] += values.numel()
        exact = max(sizes) <= _EXACT
        width = -math.log(_SMALLEST) / _BINS
        counts = torch.zeros(count, _BINS, dtype=torch.float64, device="cpu")
        sums, kept = torch.zeros_like(counts), []
        for block in blocks:
            number, values = int(block.groups), block.eigenvalues().reshape(-1).double().cpu()
            logs = values[values > _SMALLEST * largest[number]].log()
            if exact:
                kept.append((logs, torch.full_like(logs, number, dtype=torch.int64)))
                continue
            place = ((logs.new_tensor(largest[number]).log() - logs) / width).long().clamp(0, _BINS - 1)
            counts[number].index_add_(0, place, torch.ones_like(logs))
            sums[number].index_add_(0, place, logs)
        if exact:
            logs, numbers = (torch.cat(parts) for parts in zip(*kept, strict=True))
            return cls(logs, torch.ones_like(logs), numbers, count)
        numbers, places = counts.nonzero(as_tuple=True)
        filled = counts[numbers, places]
        return cls(sums[numbers, places] / filled, filled, numbers, count)

    def log_det_ratio(self, rho: Tensor, tau: float) -> float:
        """``sum log(1 + s / (v lambda))``."""
        return float(self.counts @ torch.nn.functional.softplus(self.logs - tau - rho[self.groups]))

    def slopes(self, rho: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """Sums of ``s / (s + v lambda)`` and ``s v lambda / (s + v lambda)^2`` over the eigenvalues of every group."""
        shares = torch.sigmoid(self.logs - tau - rho[self.groups])
        counted = self.counts * shares
        sums = rho.new_zeros(2, self.count).index_add_(1, self.groups, torch.stack([counted, counted * (1 - shares)]))
        return sums[0], sums[1]


class CoupledDeterminants(Determinants):
    """One dense matrix over several prior groups."""

    def __init__(self, block: CoupledBlock, count: int) -> None:
        self.matrix = _semidefinite(block.matrix)
        self.groups = block.groups.to(self.matrix.device)
        self.count, self.entries = count, len(self.matrix)
        self.sizes = self._sum(torch.ones_like(self.matrix.diagonal())).cpu()

    def _factor(self, rho: Tensor, tau: float) -> Tensor:
        """The Cholesky factor of ``1 + L^-1/2 H L^-1/2 / v``."""
        root = (-0.5 * (rho + tau)).exp().to(self.matrix)[self.groups]
        return cholesky_of_one_plus(self.matrix * root * root.unsqueeze(-1))

    def _sum(self, entries: Tensor) -> Tensor:
        return entries.new_zeros(self.count, *entries.shape[1:]).index_add_(0, self.groups, entries)

    def log_det_ratio(self, rho: Tensor, tau: float) -> float:
        """``log det(1 + L^-1/2 H L^-1/2 / v)``."""
        return 2 * float(self._factor(rho, tau).diagonal().log().sum())

    def slopes(self, rho: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """From the entries of ``(1 + L^-1/2 H L^-1/2 / v)^-1``, which is ``L^1/2 Sigma L^1/2``."""
        inner = torch.cholesky_inverse(self._factor(rho, tau))
        free = self._sum(inner.diagonal())
        coupling = self._sum(self._sum(inner.square()).mT)
        free, curvature = moved([free, coupling.neg_()], torch.device("cpu"))
        curvature.diagonal().add_(free)
        return self.sizes - free, curvature


def _semidefinite(matrix: Tensor) -> Tensor:
    """In float64, without the eigenvalues below zero that rounding to another dtype makes (at unit diagonal)."""
    if matrix.dtype == torch.float64:
        return matrix
    scale = matrix.diagonal().double().clamp(min=torch.finfo(matrix.dtype).tiny).sqrt()
    values, vectors = decompose((matrix.double() / scale / scale.unsqueeze(-1)).to(matrix))
    root = scale.unsqueeze(-1) * vectors.double() * values.double().sqrt()
    return root @ root.mT


def determinants(blocks: Sequence[Block], groups: PriorGroups) -> Determinants:
    """The determinants of a posterior's blocks."""
    if isinstance(blocks[0], CoupledBlock):
        return CoupledDeterminants(blocks[0], len(groups))
    return Spectrum.of(blocks, groups)
