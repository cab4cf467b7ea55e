"""The joint optimum of weights and precisions, by Newton's method in the span of all directions that were tried.

The tangent model ``h = f + J (theta - theta~)`` is linear, so that ``J d`` gives the objective all along ``d``. Every
iteration adds a direction, and minimizes over all of them, where each point has the precisions that are best for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Posterior
from tu_symmetry.laplace.data import all_reduce
from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.determinants import Noise
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.joint.data import TrainingData
from tu_symmetry.laplace.joint.informative import Informative, choose, most_rows
from tu_symmetry.laplace.mode import Mode, duality_gap
from tu_symmetry.laplace.report import EvidenceResult
from tu_symmetry.laplace.tangent import normal

_DIRECTIONS = 128  # kept at most
_BYTES = 1 << 30  # of the directions and their products
_PART = 1 << 20  # weights of all directions that are multiplied at once
_INNER = 10  # Newton steps in the span, for each direction
_HALVINGS = 25
_PATIENCE = 6  # iterations without progress
_SHRINK = (1, 6)  # iterations that try the weights of each group as a direction, and again whenever they have doubled
_STRETCHED = 4  # directions that these make at most: one for each group, or for those that gain most and for all others
_MOVING = 0.1  # while a log precision moves by more than that in one of them
_SHARE = 0.5  # of the trace of all output Hessians, from which on the informative observations stand for all
_EXCESS = 3.0  # times the mean observation's that each of them holds, from which on they are worth a direction
_AGE = 2  # iterations for which they are chosen
_NEAR = 2.0  # times the norm that is wanted, from which on they stay
_ENOUGH = 0.01  # share of the first decrement at which the problem in the span counts as solved

Progress = Callable[[dict[str, Any]], None]


class _Span:
    """Directions ``d`` and their products ``J d``."""

    def __init__(self, data: TrainingData, groups: PriorGroups, theta: Tensor) -> None:
        self.data, self.groups = data, groups
        entry = theta.element_size() * (theta.numel() + data.entries)
        self.limit = max(4, min(_DIRECTIONS, _BYTES // max(1, entry)))
        self.directions = theta.new_empty(self.limit, theta.numel())
        self.products = [o.new_empty(self.limit, *o.shape) for o in data.outputs]
        self.count = 0

    def add(self, direction: Tensor) -> None:
        """Keep another direction; the older half goes where there is no room."""
        if self.count == self.limit:
            first = self.limit // 2
            self.count -= first
            for kept in (self.directions, *self.products):
                kept[: self.count] = kept[first:].clone()
        for kept, own in zip((self.directions, *self.products), (direction, *self.data.push(direction)), strict=True):
            kept[self.count] = own
        self.count += 1

    def with_all(self, vector: Tensor) -> Tensor:
        """Inner products of a flat vector with every direction, group by group: float64 ``[groups, directions]``."""
        return self.groups.inner(self.directions[: self.count], vector)

    def weighted(self, precision: Tensor) -> Tensor:
        """``d_i^T Lambda d_j`` for the precisions of all groups: float64 ``[directions, directions]``."""
        rows, prior = self.directions[: self.count], self.groups.spread(precision.to(self.directions))
        parts = zip(rows.split(_PART, dim=1), prior.split(_PART), strict=True)
        return torch.stack([((own * weight) @ own.mT).double() for own, weight in parts]).sum(0).cpu()

    def combined(self, c: Tensor) -> Tensor:
        return c.to(self.directions) @ self.directions[: self.count]

    def pushed(self, c: Tensor) -> list[Tensor]:
        """``sum c_i J d_i``, chunk by chunk."""
        return [
            (c.to(own) @ own[: self.count].flatten(1)).view(own.shape[1:]) if own.numel() else own[0]
            for own in self.products
        ]


@dataclass
class _Point:
    """Where the search is: weights, ``h_theta`` on all data, and the precisions that belong to them."""

    theta: Tensor
    linear: list[Tensor]
    loss: float
    norms: Tensor
    rho: Tensor
    tau: float
    value: float


class _Search:
    def __init__(self, fitted: FittedLaplace, data: TrainingData, memory: int, weights_alone: bool) -> None:
        self.fitted, self.data, self.likelihood = fitted, data, fitted.likelihood
        self.determinants = fitted.curvature.determinants
        self.center, self.hyperprior = fitted.center.log(), fitted.hyperprior
        self.weights_alone = weights_alone
        bound = math.log(self.hyperprior.cap)
        self.low, self.high = self.center - bound, self.center + bound
        if weights_alone:
            self.low = self.high = fitted.log_precision
        self.held = torch.zeros(len(self.center), dtype=torch.bool, device="cpu")
        self.span = _Span(data, fitted.groups, fitted.theta)
        self.rounding = 1e-12 if fitted.theta.dtype == torch.float64 else 1e-7
        self.rows = most_rows(data, fitted.groups, memory)
        self.informative: Informative | None = None
        self.age, self.share, self.norm = _AGE, 0.0, math.inf

    def start(self) -> _Point:
        fitted, theta = self.fitted, self.fitted.theta
        move = theta - fitted.tangent.point()
        linear = self.moved(self.data.outputs, move) if bool(move.any()) else self.data.outputs
        return self.at(theta, linear, fitted.log_precision, fitted.log_noise)

    def moved(self, linear: list[Tensor], move: Tensor) -> list[Tensor]:
        return [own + change for own, change in zip(linear, self.data.push(move), strict=True)]

    def at(self, theta: Tensor, linear: list[Tensor], rho: Tensor, tau: float) -> _Point:
        """Weights, and the precisions that belong to them; ``rho`` and ``tau`` are where their search starts."""
        norms = self.fitted.groups.total(theta.double().square())
        loss = self.loss(linear)
        return _Point(theta, linear, loss, norms, *self.profile(norms, loss, rho, tau))

    def loss(self, linear: list[Tensor]) -> float:
        """Sum of the losses for unit noise, over all processes."""
        total = torch.zeros((), dtype=torch.float64, device=linear[0].device)
        for own, targets in zip(linear, self.data.targets, strict=True):
            total += self.likelihood.loss(own, targets).double().sum()
        all_reduce(total)
        return float(total)

    def noise(self, loss: float) -> Noise | None:
        """A regression's noise, where it is to be found."""
        if self.fitted.noise_fixed or self.weights_alone:
            return None
        return self.residuals(loss)

    def residuals(self, loss: float) -> Noise | None:
        summary = self.fitted.summary
        return Noise(summary.samples * summary.outputs, 2 * loss) if self.fitted.noisy else None

    def profile(self, norms: Tensor, loss: float, rho: Tensor, tau: float) -> tuple[Tensor, float, float]:
        """The best precisions and noise variance for weights of these norms and this loss, and the objective there."""
        norms = norms.clamp(min=0)
        if not self.weights_alone:
            rho, tau = self.determinants.step(norms, rho, tau, self.center, self.hyperprior, self.noise(loss))
            rho = torch.where(self.held, self.high, rho)
        residuals = self.residuals(loss)
        data = loss if residuals is None else residuals.energy(tau)
        prior = 0.5 * (float((rho.exp() * norms).sum()) + self.determinants.log_det_ratio(rho, tau))
        return rho, tau, data + prior + self.hyperprior.energy(rho, self.center)

    def gradient(self, point: _Point) -> Tensor:
        """The profile's gradient, which equals the objective's where the precisions are those of the weights."""
        pairs = zip(point.linear, self.data.targets, strict=True)
        gradient = self.data.pull([normal(self.likelihood.residual(own, targets)) for own, targets in pairs])
        return gradient * math.exp(-point.tau) + self.precision(point) * point.theta

    def precision(self, point: _Point) -> Tensor:
        return self.fitted.groups.spread(point.rho.exp().to(point.theta))

    def posterior(self, point: _Point) -> Posterior:
        return Posterior(self.fitted.curvature.blocks, point.rho, math.exp(point.tau))

    def propose(self, point: _Point, gradient: Tensor, wanted: float) -> tuple[list[Tensor], float]:
        """Directions, to be subtracted, and the norm of the gradient in standard deviations of the posterior.

        The informative observations are chosen anew every few iterations until the norm is near the ``wanted`` one;
        those of a quadratic loss once. Where they hold most of the curvature, their direction is the only one.
        """
        due = self.age >= _AGE and self.norm > _NEAR * wanted
        if self.rows and due and not (self.likelihood.quadratic and self.norm < math.inf):
            self.renew(point)
        self.age += 1
        directions, norms = [], []
        if self.informative is not None:
            direction, norm = self.modeled(self.informative, point, gradient)
            directions.append(direction)
            norms.append(norm)
        if self.share < _SHARE:
            directions.append(self.posterior(point).covariance_product(gradient))
            norms.append(_norm(gradient, directions[-1]))
        self.norm = min(norms)
        return directions, self.norm

    def renew(self, point: _Point) -> None:
        """Choose the informative observations, and make their model; none where they are as good as any others."""
        self.informative, self.age = None, 0  # before the next one is made: it is large
        chosen = choose(self.data, point.linear, self.rows)
        worth = chosen.share >= _SHARE or chosen.excess >= _EXCESS
        self.share = chosen.share if worth else 0.0
        if worth:
            self.informative = Informative(self.data, self.fitted.groups, point.linear, chosen)

    def modeled(self, informative: Informative, point: _Point, gradient: Tensor) -> tuple[Tensor, float]:
        """The way to the optimum of the model that the informative observations make, and the gradient's norm in it."""
        variance = math.exp(point.tau)
        descent = informative.covariance_product(point.rho, variance, gradient)
        low = torch.where(self.held, self.high, self.low)
        alone = gradient - self.precision(point) * point.theta
        target, _ = informative.optimum(
            point.theta, alone, point.rho, variance, lambda rho: self.energy(rho, point.tau), (low, self.high)
        )
        direction, norm = point.theta - target, _norm(gradient, descent)
        slope = float(torch.dot(gradient.double(), direction.double()))
        return direction if slope >= norm**2 else descent, norm  # flatter than the descent it leads nowhere

    def energy(self, rho: Tensor, tau: float) -> tuple[float, Tensor]:
        """What the objective has of precisions alone: determinants and hyperprior (nats), and the gradient."""
        value = 0.5 * self.determinants.log_det_ratio(rho, tau) + self.hyperprior.energy(rho, self.center)
        return value, self.hyperprior.weight * (rho - self.center) - 0.5 * self.determinants.gamma(rho, tau)

    def add_groups(self, point: _Point, gradient: Tensor) -> None:
        """The weights of each group as directions; of many groups of those that gain most, the others together."""
        groups, theta = self.fitted.groups, point.theta
        slope = groups.total(gradient * theta)
        curvature = groups.total(theta * self.posterior(point).precision_product(theta)).clamp(min=1e-300)
        count = len(groups)
        size = 1 if count > self.span.limit // 2 else min(_STRETCHED, self.span.limit // 2)
        order = (slope.square() / curvature).argsort(descending=True, stable=True)
        chosen = order[: count if count <= size else size - 1].sort()[0]
        rest = -slope / curvature
        rest[chosen] = 0
        each = torch.eye(count, dtype=rest.dtype, device="cpu")[chosen] if len(chosen) else rest.new_zeros(0, count)
        for factors in (*each, rest):
            direction = groups.spread(factors.to(theta)) * theta
            if bool(direction.any()):
                self.span.add(direction)

    def improve(self, point: _Point) -> _Point:
        """The minimum of the profile over the weights plus all combinations of the kept directions, nearly."""
        span = self.span
        mixed = span.with_all(point.theta)
        c = torch.zeros(span.count, dtype=torch.float64, device="cpu")
        rho, tau, value, norms = point.rho, point.tau, point.value, point.norms
        linear, loss, first = point.linear, point.loss, 0.0
        for _ in range(_INNER):
            slope, curvature = self._derivatives(linear)
            variance, precision = math.exp(tau), rho.exp()
            cross = precision.unsqueeze(-1) * (mixed + span.with_all(span.combined(c)))
            gradient = slope / variance + cross.sum(0)
            hessian = curvature / variance + span.weighted(precision)
            step = self._newton(gradient, hessian, self._saved(norms, rho, tau, loss, cross, slope / variance))
            decrement = -float(gradient @ step)
            first = first or decrement
            if decrement <= _ENOUGH * first and bool(c.any()):
                break
            along, length = span.pushed(step), 1.0
            unsure = decrement <= self.rounding * (1 + abs(value))  # values no longer tell whether a step is good
            for _halving in range(_HALVINGS):
                trial = c + length * step
                moved = [own + length * change for own, change in zip(linear, along, strict=True)]
                new_norms = point.norms + 2 * mixed @ trial + span.with_all(span.combined(trial)) @ trial
                new_loss = self.loss(moved)
                found = self.profile(new_norms, new_loss, rho, tau)
                if unsure or found[2] <= value - 1e-4 * length * decrement + self.rounding * (1 + abs(value)):
                    break
                length /= 2
            else:
                break
            c, linear, norms, loss, (rho, tau, value) = trial, moved, new_norms, new_loss, found
            if unsure:
                break
        if not bool(c.any()):
            return point
        return self.at(point.theta + span.combined(c), linear, rho, tau)

    def _derivatives(self, linear: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of the loss in the span, float64 ``[k]`` and ``[k, k]``, over all processes."""
        k = self.span.count
        slope = torch.zeros(k, dtype=torch.float64, device=linear[0].device)
        curvature = torch.zeros(k, k, dtype=torch.float64, device=linear[0].device)
        for own, targets, products in zip(linear, self.data.targets, self.span.products, strict=True):
            rows = products[:k]
            flat = rows.flatten(1)
            slope += (flat @ self.likelihood.residual(own, targets).flatten()).double()
            curvature += (self.likelihood.hessian_product(own, targets, rows).reshape(k, -1) @ flat.T).double()
        all_reduce(slope, curvature)
        return slope.cpu(), (curvature + curvature.T).cpu() / 2

    def _saved(self, norms: Tensor, rho: Tensor, tau: float, loss: float, cross: Tensor, slope: Tensor) -> Tensor:
        """``X F^-1 X^T``: how much less the profile is curved than the objective with the precisions held."""
        noise = self.noise(loss)
        edge = 1e-9 * (self.high - self.low)
        inside = (rho > self.low + edge) & (rho < self.high - edge) & ~self.held
        free = torch.cat([inside, torch.tensor([noise is not None], device="cpu")])
        if not bool(free.any()):
            return torch.zeros(len(slope), len(slope), dtype=torch.float64, device="cpu")
        x = torch.cat([cross, -slope.unsqueeze(0)])
        return self.determinants.response(x, norms.clamp(min=0), rho, tau, noise, self.hyperprior.weight, free)

    def _newton(self, gradient: Tensor, hessian: Tensor, saved: Tensor) -> Tensor:
        """Newton's step on the profile; where that is not convex, on the objective with the precisions held."""
        scale = hessian.diagonal().clamp(min=1e-300).rsqrt()
        ridge = 10 * self.rounding * torch.eye(len(gradient), dtype=torch.float64, device="cpu")
        for matrix in (hessian - saved, hessian):
            factor = cholesky(matrix * scale * scale.unsqueeze(-1) + ridge)
            if factor is not None:
                return -scale * torch.cholesky_solve((gradient * scale).unsqueeze(-1), factor).squeeze(-1)
        return -gradient * scale.square()

    def prune(self, point: _Point, before: Tensor) -> _Point:
        """Under a flat hyperprior: groups that the evidence sends to infinity go there at once, with zero weights."""
        if not math.isinf(self.hyperprior.std) or self.weights_alone:
            return point
        gamma = self.determinants.gamma(point.rho, point.tau)
        lost = (((gamma < 1e-2) & (point.rho > before)) | (gamma < 1e-8)) & ~self.held
        if not bool(lost.any()):
            return point
        self.held |= lost
        self.span.count = 0
        move = torch.where(self.fitted.groups.spread(lost.to(point.theta.device)), -point.theta, 0)
        return self.at(point.theta + move, self.moved(point.linear, move), point.rho, point.tau)


def _norm(gradient: Tensor, direction: Tensor) -> float:
    """A gradient's norm in standard deviations of the covariance that made a direction of it; NaN stays."""
    square = float(torch.dot(gradient.double(), direction.double()))
    return math.sqrt(square) if square > 0 else 0.0 * square


def joint_optimum(
    fitted: FittedLaplace,
    data: TrainingData,
    *,
    tolerance: float,
    mode_tolerance: float,
    max_iterations: int,
    memory: int = 0,
    weights_alone: bool = False,
    progress: Progress | None = None,
) -> tuple[FittedLaplace, EvidenceResult]:
    """Minimize the profile objective from where an approximation is; other data or NaN are a ``ValueError``."""
    if max_iterations < 1:
        raise ValueError(f"max_iterations={max_iterations} has to be at least 1")
    if data.samples != fitted.summary.samples:
        raise ValueError(
            f"the curvature has seen {fitted.summary.samples} samples, and the loader now gives {data.samples}; the "
            "evidence needs the same data (in any order): no dropped last batch, no sampling with replacement"
        )
    search, flat = _Search(fitted, data, memory, weights_alone), math.isinf(fitted.hyperprior.std)
    point = search.start()
    change, best_norm, iteration, stuck, converged, again = math.inf, math.inf, 0, 0, False, 2 * _SHRINK[-1]
    while True:
        gradient = search.gradient(point)
        finite = math.isfinite(point.value) and bool(gradient.isfinite().all())
        directions, norm = search.propose(point, gradient, mode_tolerance) if finite else ([], math.nan)
        if not math.isfinite(norm):
            raise ValueError("the tangent model's loss or gradient is not finite; are inputs and targets finite?")
        gap = duality_gap(gradient, search.precision(point))
        if progress is not None:
            found = {"objective": point.value, "gradient_norm": norm, "wanted": mode_tolerance, "gap": gap}
            at = {"theta": point.theta, "log_precision": point.rho}  # to go on from
            progress({"stage": "evidence", "iteration": iteration, "change": change, **found, **at})
        converged = norm <= mode_tolerance and (change <= tolerance or norm == 0)
        if converged or iteration == max_iterations:
            break
        iteration += 1
        alone = search.informative is None
        if alone and not flat and (iteration in _SHRINK or (iteration >= again and change > _MOVING)):
            search.add_groups(point, gradient)
            again = max(2 * iteration, 2 * _SHRINK[-1])
        for direction in directions if norm > 0 else ():
            search.span.add(direction / norm)
        moved = search.improve(point) if search.span.count else point
        moved = search.prune(moved, point.rho)
        change = float((moved.rho - point.rho).abs().max())
        lower = moved.value < point.value - search.rounding * (1 + abs(point.value))
        best_norm, stuck = (norm, 0) if lower or norm < 0.9 * best_norm else (best_norm, stuck + 1)
        point = moved
        if stuck == _PATIENCE:  # at the resolution of the floating-point type, with or without the older directions
            converged = norm <= mode_tolerance and change <= tolerance
            break
        if stuck == _PATIENCE // 2:
            search.span.count = 0
            search.age, search.norm = _AGE, math.inf
    mode = Mode(point.theta, point.loss, norm, iteration, norm <= mode_tolerance, gap)
    noise = None if fitted.noise_fixed else math.exp(point.tau)
    reached = fitted.with_hyperparameters(point.rho, noise).with_solution(mode)
    change = 0.0 if math.isinf(change) else change
    return reached, EvidenceResult(reached.log_evidence(), iteration, change, norm, converged, gap)
