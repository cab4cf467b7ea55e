"""The evidence of the tangent linear model, as a function of prior precisions and noise variance.

With eigenvalues ``s`` of the curvature (unit noise), noise variance ``v`` and groups ``g``::

    -log Z = loss / v + (m / 2) log(2 pi v) + 1/2 sum_g [ lambda_g n_g + sum_s log(1 + s / (v lambda_g)) ]

where ``n_g = ||theta_g||^2``, ``m`` is the number of observed values, and the noise terms belong to regression only.
``gamma_g = sum s / (s + v lambda_g)`` is the number of directions that the data determine. In ``rho = log lambda`` and
``tau = log v`` the right side is convex, so that both are found exactly (MacKay's fixed point ``lambda n = gamma`` is
the stationary point). Eigenvalues are sorted into bins, in float64: the evidence never passes over data again.
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
_ENTRIES = 1 << 22  # bins of all groups together
_SMALLEST = 1e-18  # eigenvalues below this share of the largest count as zero
_ROOT_STEPS = 200  # bisections alone would take 60
_ROOT_ROUNDING = 4e-14  # relative, of a log precision
_NEWTON_STEPS = 100
_ROUNDING = 1e-12  # relative error of a log determinant
_SHORT = 1e-6  # of log precisions: the next step of Newton's method would have about its square
_NOISE_RANGE = 50.0  # largest log ratio of the noise variance to the residuals'


@dataclass(frozen=True)
class Hyperprior:
    """Prior on the log precision of every group: ``log lambda_g ~ N(log c_g, std^2)``, bounded to ``c_g cap^(+-1)``.

    The center ``c_g`` is the group's number of weights over their squared norm at the linearization point. It divides
    by ``k^2`` where normalized weights are multiplied by ``k``, so that the hyperprior keeps the predictive's
    invariance (Proposition 3). The data outweigh it wherever a group has more than a few determined directions; where
    the evidence alone would send a precision to infinity, it stops that. A single weight (``prior="diagonal"``) has the
    center of its parameter as a whole, for one number says too little of its own scale.

    Attributes:
        std: standard deviation of the log precision in nats, one decade by default; infinite for a flat prior.
        cap: largest factor between a precision and its center.
    """

    std: float = math.log(10)
    cap: float = 1e6

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
    """Observation noise of a regression.

    Attributes:
        values: number of observed values (samples times outputs).
        squares: sum of squared residuals.
    """

    values: int
    squares: float

    def energy(self, tau: float) -> float:
        """Negative log-likelihood with all constants (nats)."""
        return 0.5 * (self.squares * math.exp(-tau) + self.values * (math.log(2 * math.pi) + tau))

    def lowest(self) -> float:
        """The smallest log noise variance that can have the largest evidence: that of the residuals.

        Raises:
            ValueError: residuals that are all zero to rounding, where the evidence grows without bound.
        """
        if self.squares <= 0:
            raise ValueError(
                "all residuals are zero to rounding, so the evidence has no noise variance; give noise_variance=..."
            )
        return math.log(self.squares / self.values)


class Determinants(ABC):
    """What the evidence needs of the curvature: ``log det(H / v + Lambda) - log det Lambda`` and its derivatives."""

    @abstractmethod
    def log_det_ratio(self, rho: Tensor, tau: float) -> float:
        """The log-determinant ratio (nats)."""

    @abstractmethod
    def gamma(self, rho: Tensor, tau: float) -> Tensor:
        """Effective number of determined directions of every group, float64 ``[groups]``."""

    @abstractmethod
    def response(
        self, x: Tensor, norms: Tensor, rho: Tensor, tau: float, noise: Noise | None, weight: float, free: Tensor
    ) -> Tensor:
        """``X^T F^-1 X``, ``F`` being the Hessian of ``-log Z - log hyperprior`` in ``(rho, tau)`` for fixed weights.

        What a quadratic form loses where the precisions move along. Where ``F`` is zero, nothing counts.

        Args:
            x: float64 ``[groups + 1, k]``.
            norms: squared norm of the weights in each group.
            rho: log precisions.
            tau: log noise variance.
            noise: None for a noise variance that stays.
            weight: inverse variance of the hyperprior.
            free: which entries of ``(rho, tau)`` can move; the others' rows of ``x`` and ``F`` are left out.
        """

    @abstractmethod
    def step(
        self,
        norms: Tensor,
        rho: Tensor,
        tau: float,
        log_center: Tensor,
        hyperprior: Hyperprior,
        noise: Noise | None,
    ) -> tuple[Tensor, float]:
        """The log precisions that minimize ``-log Z - log hyperprior`` for fixed weights.

        With ``noise`` given, the log noise variance is minimized over as well.
        """


class Spectrum(Determinants):
    """Eigenvalues of every group in bins: log of the value and count, padded to ``[groups, bins]``."""

    def __init__(self, logs: Tensor, counts: Tensor) -> None:
        self.logs, self.counts = logs, counts

    @classmethod
    def of(cls, blocks: Sequence[Block], groups: PriorGroups) -> Spectrum:
        """Sort the eigenvalues of all blocks into the bins of their groups."""
        largest = torch.zeros(len(groups), dtype=torch.float64, device="cpu")
        numbers = torch.zeros(len(groups), dtype=torch.int64, device="cpu")
        for block in blocks:
            values = block.eigenvalues()
            own = torch.broadcast_to(block.groups, values.shape).reshape(-1)
            largest.scatter_reduce_(0, own, values.reshape(-1).double().cpu(), "amax")
            numbers += torch.bincount(own, minlength=len(groups))
        if int(numbers.max()) <= _EXACT and int(numbers.max()) * len(groups) <= _ENTRIES:
            return cls._exact(blocks, groups, largest)
        bins = max(128, min(2048, _ENTRIES // len(groups)))
        counts = torch.zeros(len(groups), bins, dtype=torch.float64, device="cpu")
        sums = torch.zeros_like(counts)
        width = -math.log(_SMALLEST) / bins
        for block in blocks:
            own, logs = _positive(block, largest)
            place = ((largest[own].log() - logs) / width).long().clamp(0, bins - 1) + bins * own
            counts.view(-1).index_add_(0, place, torch.ones_like(logs))
            sums.view(-1).index_add_(0, place, logs)
        return cls(sums / counts.clamp(min=1), counts)

    @classmethod
    def _exact(cls, blocks: Sequence[Block], groups: PriorGroups, largest: Tensor) -> Spectrum:
        numbers, found = zip(*(_positive(block, largest) for block in blocks), strict=True)
        number, order = torch.cat(numbers).sort(stable=True)
        sizes = torch.bincount(number, minlength=len(groups))
        place = torch.arange(len(number), device="cpu") - (sizes.cumsum(0) - sizes)[number]
        logs = torch.zeros(len(groups), max(1, int(sizes.max())), dtype=torch.float64, device="cpu")
        counts = torch.zeros_like(logs)
        logs[number, place] = torch.cat(found)[order]
        counts[number, place] = 1
        return cls(logs, counts)

    def log_det_ratio(self, rho: Tensor, tau: float) -> float:
        """``sum log(1 + s / (v lambda))``."""
        return float((self.counts * torch.nn.functional.softplus(self.logs - tau - rho.unsqueeze(-1))).sum())

    def gamma(self, rho: Tensor, tau: float) -> Tensor:
        """``sum s / (s + v lambda)``."""
        return self._slopes(rho, tau)[0]

    def _slopes(self, rho: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """``gamma``, and its derivative in ``-rho``: both are sums over the eigenvalues of every group by itself."""
        shares = torch.sigmoid(self.logs - tau - rho.unsqueeze(-1))
        counted = self.counts * shares
        return counted.sum(-1), (counted * (1 - shares)).sum(-1)

    def response(
        self, x: Tensor, norms: Tensor, rho: Tensor, tau: float, noise: Noise | None, weight: float, free: Tensor
    ) -> Tensor:
        """``F`` is diagonal, bordered by the row of the noise variance that all groups share.

        With ``F = [D, b; b^T, c]`` it is ``X^T D^-1 X + y y^T / (c - b^T D^-1 b)``, ``y = x_tau - X^T D^-1 b``.
        """
        _, slopes = self._slopes(rho, tau)
        diagonal = 0.5 * (slopes + rho.exp() * norms) + weight
        inverse = torch.where(free[:-1] & (diagonal > 1e-15 * diagonal.max()), diagonal, torch.inf).reciprocal()
        rows = x[:-1]
        found = rows.T @ (inverse.unsqueeze(-1) * rows)
        if noise is not None and bool(free[-1]):
            border = 0.5 * slopes
            corner = 0.5 * (noise.squares * math.exp(-tau) + float(slopes.sum()))
            left = corner - float((border.square() * inverse).sum())
            if left > 1e-15 * corner:
                own = x[-1] - rows.T @ (inverse * border)
                found += torch.outer(own, own) / left
        return found

    def step(
        self,
        norms: Tensor,
        rho: Tensor,
        tau: float,
        log_center: Tensor,
        hyperprior: Hyperprior,
        noise: Noise | None,
    ) -> tuple[Tensor, float]:
        """The root of the derivative in every group at once, exact and independent of the start.

        With noise, the same for the objective as a function of the log noise variance alone, minimized over the
        precisions, which is convex as well.
        """
        if noise is None:
            return self._precisions(norms, tau, log_center, hyperprior, rho), tau
        bound = math.log(hyperprior.cap)
        low = noise.lowest()
        high = low + _NOISE_RANGE
        if not low <= tau <= high:
            tau = low
        before = math.inf
        for _ in range(_ROOT_STEPS):
            rho = self._precisions(norms, tau, log_center, hyperprior, rho)
            gamma, slopes = self._slopes(rho, tau)
            residual = noise.squares * math.exp(-tau)
            value = noise.values - residual - float(gamma.sum())
            low, high = (tau, high) if value < 0 else (low, tau)
            moving = (rho - log_center).abs() < bound * (1 - 1e-12)
            along = torch.where(moving, slopes / (rho.exp() * norms + slopes + 2 * hyperprior.weight), 0)
            step = -value / (residual + float((slopes * (1 - along)).sum()))
            if abs(step) <= _ROOT_ROUNDING * (1 + abs(tau)) or value == 0 or low == high:
                return rho, tau
            halved = abs(value) > 0.5 * before or not low < tau + step < high
            before = math.inf if halved else abs(value)
            tau = (low + high) / 2 if halved else tau + step
            if halved and high - low <= _ROOT_ROUNDING * (1 + abs(tau)):
                return self._precisions(norms, tau, log_center, hyperprior, rho), tau
        return rho, tau

    def _precisions(
        self, norms: Tensor, tau: float, log_center: Tensor, hyperprior: Hyperprior, guess: Tensor
    ) -> Tensor:
        """Newton's method within a bracket, on a logarithm where there is one; bisection where that is of no use.

        The derivative ``e^rho n - R``, ``R = gamma - weight (rho - center)``, rises with the log precision, so that
        each group has one root, or none within its bounds and the nearer one for an answer. Where ``R`` is positive the
        root is also that of ``rho + log n - log R``, which is nearly straight over decades, where the derivative itself
        is an exponential. For example ``n = 1e-8``, ``R = 1`` and a start at ``rho = 0``: Newton's step is 18.4, and
        right, where that of the derivative is ``1e8``.
        """
        low, high = log_center - math.log(hyperprior.cap), log_center + math.log(hyperprior.cap)
        weight = 2 * hyperprior.weight

        def parts(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            gamma, slopes = self._slopes(point, tau)
            return point.exp() * norms, gamma - weight * (point - log_center), slopes + weight

        def derivative(point: Tensor) -> Tensor:
            ridge, right, _ = parts(point)
            return ridge - right

        at_low, at_high = derivative(low) >= 0, derivative(high) <= 0
        done = at_low | at_high
        point = torch.where(at_low, low, torch.where(at_high, high, guess.clamp(low, high)))
        before = torch.full_like(point, math.inf)
        for _ in range(_ROOT_STEPS):
            ridge, right, fall = parts(point)
            value = ridge - right
            low, high = torch.where(value < 0, point, low), torch.where(value < 0, high, point)
            straight = point - (ridge / right).log() / (1 + fall / right)  # NaN or infinite where there is no logarithm
            plain = point - value / (ridge + fall)
            slow = value.abs() > 0.5 * before
            trial = torch.where((straight > low) & (straight < high) & (right > 0), straight, plain)
            # a last step can round to an end of the bracket, which is where the search stands
            done |= (value == 0) | ((trial - point).abs() <= _ROOT_ROUNDING * (1 + point.abs()))
            if bool(done.all()):
                break
            halved = slow | ~((trial > low) & (trial < high))
            point = torch.where(done, point, torch.where(halved, (low + high) / 2, trial))
            before = torch.where(halved, math.inf, value.abs())
        return point


def _positive(block: Block, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Group numbers and logs of a block's eigenvalues that are no rounding error of their group's largest."""
    values = block.eigenvalues()
    own = torch.broadcast_to(block.groups, values.shape).reshape(-1)
    flat = values.reshape(-1).double().cpu()
    positive = flat > _SMALLEST * largest[own]
    return own[positive], flat[positive].log()


def _semidefinite(matrix: Tensor) -> Tensor:
    """In float64, without the eigenvalues below zero that rounding to another dtype makes (at unit diagonal)."""
    if matrix.dtype == torch.float64:
        return matrix
    scale = matrix.diagonal().double().clamp(min=torch.finfo(matrix.dtype).tiny).sqrt()
    values, vectors = decompose((matrix.double() / scale / scale.unsqueeze(-1)).to(matrix))
    root = scale.unsqueeze(-1) * vectors.double() * values.double().sqrt()
    return root @ root.mT


class CoupledDeterminants(Determinants):
    """One dense matrix over several prior groups: Newton's method on the convex function of the log precisions."""

    def __init__(self, block: CoupledBlock, count: int) -> None:
        self.matrix = _semidefinite(block.matrix)
        self.groups = block.groups.to(self.matrix.device)
        self.count, self.entries = count, len(self.matrix)
        self.sizes = self._sum(torch.ones_like(self.matrix.diagonal())).cpu()

    def _factor(self, rho: Tensor, tau: float) -> Tensor:
        """The Cholesky factor of ``1 + L^-1/2 H L^-1/2 / v``."""
        root = (-0.5 * (rho + tau)).exp().to(self.matrix)[self.groups]
        return cholesky_of_one_plus(self.matrix * root * root.unsqueeze(-1))

    def _shrinkage(self, rho: Tensor, tau: float) -> Tensor:
        """``(1 + L^-1/2 H L^-1/2 / v)^-1``, which is ``L^1/2 Sigma L^1/2``."""
        return torch.cholesky_inverse(self._factor(rho, tau))

    def _sum(self, entries: Tensor) -> Tensor:
        return entries.new_zeros(self.count, *entries.shape[1:]).index_add_(0, self.groups, entries)

    def log_det_ratio(self, rho: Tensor, tau: float) -> float:
        """``log det(1 + L^-1/2 H L^-1/2 / v)``."""
        return 2 * float(self._factor(rho, tau).diagonal().log().sum())

    def gamma(self, rho: Tensor, tau: float) -> Tensor:
        """``sum_{i in g} (1 - lambda_g Sigma_ii)``."""
        return self._sum(1 - self._shrinkage(rho, tau).diagonal()).cpu()

    def step(
        self,
        norms: Tensor,
        rho: Tensor,
        tau: float,
        log_center: Tensor,
        hyperprior: Hyperprior,
        noise: Noise | None,
    ) -> tuple[Tensor, float]:
        """Newton with backtracking and the exact Hessian in ``(rho, tau)``, inside the bounds of the hyperprior.

        Where the decrease that a step promises is within rounding error of the objective, the step is taken as it is,
        and ends the search unless a direction is so flat that it is still long.
        """
        bound = math.log(hyperprior.cap)
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
        unsure = 0.1 * _ROUNDING * (self.entries + (0 if noise is None else noise.values))  # of a gradient
        for _ in range(_NEWTON_STEPS):
            gradient, hessian = self.derivatives(norms, point[:-1], float(point[-1]), noise)
            gradient[:-1] += hyperprior.weight * (point[:-1] - log_center)
            hessian.diagonal()[:-1].add_(hyperprior.weight)
            held = ((point <= low) & (gradient >= 0)) | ((point >= high) & (gradient <= 0))
            held |= gradient.abs() <= unsure
            gradient[held] = 0
            hessian[held] = 0
            hessian[:, held] = 0
            hessian.diagonal()[held] = 1
            hessian.diagonal().add_(1e-12 * float(hessian.diagonal().max()))
            step = -torch.linalg.solve(hessian, gradient)
            rounding = _ROUNDING * (1 + abs(value))
            longest = float(step.abs().max())
            if float(-gradient @ step) <= rounding:
                point = (point + step * min(1.0, 5.0 / max(longest, 1.0))).clamp(low, high)
                if longest < _SHORT:
                    break
                continue
            step *= min(1.0, 5.0 / longest)
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

    def derivatives(self, norms: Tensor, rho: Tensor, tau: float, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """Gradient ``[groups + 1]`` and Hessian of ``-log Z`` in ``(rho, tau)`` for fixed weights, float64.

        The determinant depends on ``rho + tau`` alone.
        """
        inner = self._shrinkage(rho, tau)
        free = self._sum(inner.diagonal())  # the group's size less gamma
        coupling = self._sum(self._sum(inner.square_()).mT)
        free, curvature = moved([free, coupling.neg_()], torch.device("cpu"))
        curvature.diagonal().add_(free)
        gamma, ridge = self.sizes - free, rho.exp() * norms
        gradient = torch.zeros(self.count + 1, dtype=torch.float64, device="cpu")
        hessian = torch.zeros(self.count + 1, self.count + 1, dtype=torch.float64, device="cpu")
        gradient[:-1] = 0.5 * (ridge - gamma)
        hessian[:-1, :-1] = 0.5 * curvature
        hessian.diagonal()[:-1].add_(0.5 * ridge)
        if noise is not None:
            residual = noise.squares * math.exp(-tau)
            gradient[-1] = 0.5 * (noise.values - residual - float(gamma.sum()))
            hessian[-1, -1] = 0.5 * (residual + float(curvature.sum()))
            hessian[:-1, -1] = hessian[-1, :-1] = 0.5 * curvature.sum(1)
        return gradient, hessian

    def response(
        self, x: Tensor, norms: Tensor, rho: Tensor, tau: float, noise: Noise | None, weight: float, free: Tensor
    ) -> Tensor:
        """By the pseudo-inverse of the whole Hessian."""
        second = self.derivatives(norms, rho, tau, noise)[1]
        second.diagonal()[:-1].add_(weight)
        own = x[free]
        return own.T @ torch.linalg.pinv(second[free][:, free], hermitian=True) @ own


def determinants(blocks: Sequence[Block], groups: PriorGroups) -> Determinants:
    """The determinants of a posterior's blocks."""
    if isinstance(blocks[0], CoupledBlock):
        return CoupledDeterminants(blocks[0], len(groups))
    return Spectrum.of(blocks, groups)
