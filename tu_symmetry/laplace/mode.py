"""The mode of the tangent linear model: ``theta* = argmin loss(h_theta) / v + 1/2 theta^T Lambda theta``.

The model is ``h_theta(x) = f(x) + J(x) (theta - theta~)``; its offset ``f - J theta~`` is kept, since it vanishes only
for networks whose every parameter is scale-invariant. The problem is convex (Recommendation 1 of arXiv 2206.08900).
Newton's method, with products by the generalized Gauss-Newton matrix that never form it, conjugate gradients
preconditioned by the posterior covariance of the Laplace approximation, and a line search on the true objective. All
stopping rules use the norm ``sqrt(g^T Sigma g)``: the distance to the mode in posterior standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import Posterior
from tu_symmetry.laplace.data import all_reduce, batches
from tu_symmetry.laplace.likelihood import Likelihood
from tu_symmetry.laplace.tangent import TangentModel, normal
from tu_symmetry.transfer import numbers

_KEPT = 1 << 26  # entries of the outputs that are kept between passes
_RETRIES = 4  # of a line search, with shorter steps each
_STEPS = torch.tensor([2.0**-i for i in range(8)], dtype=torch.float64, device="cpu")

EvaluateAt = Literal["tangent_mode", "map"]  # the weights at which the evidence is evaluated
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Mode:
    """Where the solver stopped.

    Attributes:
        theta: the weights, ``[size]``.
        loss: sum of the losses of ``h_theta`` (nats), for unit noise and without constants.
        gradient_norm: ``sqrt(g^T Sigma g)``, the certificate; its square bounds the error of the objective in nats
            where ``Sigma`` is the inverse Hessian.
        iterations: number of Newton steps.
        products: number of passes over the data for products with the curvature.
        converged: whether the gradient norm is below the tolerance.
        gap: how much lower the objective can be at these precisions, at most (nats): a duality gap, which holds
            whatever the curvature is approximated by; NaN where it is not known. See :func:`duality_gap`.
    """

    theta: Tensor
    loss: float
    gradient_norm: float
    iterations: int
    products: int
    converged: bool
    gap: float = math.nan

    @classmethod
    def at(cls, point: Tensor, loss: float, evaluate_at: EvaluateAt) -> Mode:
        """The linearization point: the answer for ``map``, the start of the search for ``tangent_mode``."""
        found = evaluate_at == "map"
        return cls(point, loss, 0.0 if found else math.nan, 0, 0, found, 0.0 if found else math.nan)


def duality_gap(gradient: Tensor, precision: Tensor) -> float:
    """``1/2 g^T Lambda^-1 g``: the objective of the tangent model lies no more than that above its minimum (nats).

    With ``r`` the gradient of the loss with respect to the outputs, ``J^T r + Lambda theta = g``. The Fenchel dual of
    the objective takes at ``r`` the value ``objective - 1/2 g^T Lambda^-1 g``, and no dual value is above the minimum.
    For example ``1/2 (t - 2)^2 + 1/2 t^2`` has its minimum 1 at ``t = 1``; at ``t = 2`` it is 2 and its gradient 2, so
    that the bound is ``1/2 * 2^2 / 1 = 2``, where the distance is 1.

    Args:
        gradient: of the objective.
        precision: prior precision of every weight.
    """
    return 0.5 * float((gradient.double().square() / precision.double()).sum())


def certificate(likelihood: Likelihood, gradient: Tensor, precision: Tensor) -> float:
    """:func:`duality_gap` where the loss is convex, else NaN: nothing bounds the distance to the lowest mode."""
    return duality_gap(gradient, precision) if likelihood.convex else math.nan


class _Batch(NamedTuple):
    """Outputs and targets of a batch, ``h_theta``, and the targets as the likelihood takes them."""

    outputs: Tensor
    given: Tensor
    linear: Tensor
    targets: Tensor


class _Objective:
    """Passes over the data: value and gradient, curvature products, values along a line."""

    def __init__(
        self,
        tangent: TangentModel,
        likelihood: Likelihood,
        loader: Iterable[Any],
        precision: Tensor,
        noise: float,
        samples: int,
    ) -> None:
        self.tangent, self.likelihood, self.loader = tangent, likelihood, loader
        self.precision, self.noise, self.samples = precision, noise, samples
        self.point = tangent.point()
        self.theta = self.point
        self._kept: list[_Batch] | None = []

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """Loss for unit noise, and the gradient of the objective, at ``theta``."""
        self.theta = theta
        kept: list[_Batch] | None = None if self._kept is None else []
        total = torch.zeros(2, dtype=torch.float64, device=theta.device)  # loss, number of samples
        gradient, held = torch.zeros_like(theta), 0
        for inputs, targets in batches(self.loader, theta.device):
            outputs, change = self.tangent.jvp(inputs, theta - self.point)
            linear = outputs + change
            given, targets = targets, self.likelihood.targets(linear, targets)
            total[0] += self.likelihood.loss(linear, targets).double().sum()
            total[1] += len(outputs)
            gradient += self.tangent.vjp(inputs, normal(self.likelihood.residual(linear, targets)))
            if kept is not None:
                kept.append(_Batch(outputs, given, linear, targets))
                held += 2 * linear.numel()
                kept = kept if held <= _KEPT else None
        self._kept = kept
        all_reduce(total, gradient)
        loss, samples = total.tolist()
        if round(samples) != self.samples:
            raise ValueError(
                f"the curvature has seen {self.samples} samples, and the loader now gives {round(samples)}; the mode "
                "needs the same data in every pass (in any order): no dropped last batch, no sampling with replacement"
            )
        return loss, gradient / self.noise + self.precision * theta

    def product(self, vector: Tensor) -> Tensor:
        """``(J^T H J / v + Lambda) vector`` at the last point of :meth:`gradient`."""

        def add(total: Tensor, inputs: Any, linear: Tensor, targets: Tensor, change: Tensor) -> None:
            total += self.tangent.vjp(inputs, self.likelihood.hessian_product(linear, targets, change))

        found = self._summed(torch.zeros_like(vector), vector, add)
        all_reduce(found)
        return found / self.noise + self.precision * vector

    def line(self, direction: Tensor) -> Tensor:
        """Losses (unit noise) at the steps ``1, 1/2, 1/4, ...`` along a direction."""

        def add(total: Tensor, inputs: Any, linear: Tensor, targets: Tensor, change: Tensor) -> None:
            for i, step in enumerate(_STEPS.tolist()):
                total[i] += self.likelihood.loss(linear + step * change, targets).double().sum()

        found = self._summed(torch.zeros(len(_STEPS), dtype=torch.float64, device=direction.device), direction, add)
        all_reduce(found)
        return found.cpu()

    def _summed(self, start: Tensor, vector: Tensor, add: Callable[..., None]) -> Tensor:
        """A pass: ``add(total, inputs, h_theta, targets, J vector)`` for every batch.

        ``h_theta`` and targets are those of the gradient's pass. Where it turns out that the loader has given other
        batches than then, the pass is made again without them, and so are all that follow.
        """
        total, same = start.clone(), []
        for number, (inputs, targets) in enumerate(batches(self.loader, vector.device)):
            outputs, change = self.tangent.jvp(inputs, vector)
            if self._kept is None:
                linear = outputs + self.tangent.jvp(inputs, self.theta - self.point)[1]
                targets = self.likelihood.targets(linear, targets)
            else:
                before = self._kept[number] if number < len(self._kept) else None
                if before is None or (before.outputs.shape, before.given.shape) != (outputs.shape, targets.shape):
                    same.append(torch.zeros((), dtype=torch.bool, device="cpu"))
                    break
                same.append(torch.isclose(before.outputs, outputs, rtol=1e-3, atol=1e-6).all())
                same.append((before.given == targets).all())
                linear, targets = before.linear, before.targets
            add(total, inputs, linear, targets, change)
        if all(numbers(same)):
            return total
        self._kept = None
        return self._summed(start, vector, add)


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.double(), b.double()))


def solve_mode(
    tangent: TangentModel,
    likelihood: Likelihood,
    loader: Iterable[Any],
    precision: Tensor,
    posterior: Posterior,
    start: Tensor,
    *,
    samples: int,
    tolerance: float,
    max_iterations: int = 50,
    max_products: int = 500,
    progress: Progress | None = None,
) -> Mode:
    """Minimize the convex objective of the tangent linear model.

    Args:
        tangent: the network, in evaluation mode (:func:`tu_symmetry.laplace.tangent.evaluating`).
        likelihood: the observation model.
        loader: the training data; read once for each product.
        precision: prior precision of every weight, ``[size]``.
        posterior: the preconditioner, for the same precisions; it also holds the noise variance.
        start: where to start, ``[size]``.
        samples: how many samples the loader has to give, over all processes.
        tolerance: of the gradient norm, in posterior standard deviations.
        max_iterations: largest number of Newton steps.
        max_products: largest number of curvature products in one Newton step.
        progress: called after every pass.

    Returns:
        The mode; ``converged`` says whether the tolerance was reached.

    Raises:
        ValueError: data that change from pass to pass, values that are not finite.
    """
    problem = _Objective(tangent, likelihood, loader, precision, posterior.noise, samples)
    theta, products, steps = start, 0, 0
    loss, gradient = problem.gradient(theta)
    while True:
        preconditioned = posterior.covariance_product(gradient)
        norm = math.sqrt(max(0.0, _dot(gradient, preconditioned)))
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise ValueError("the tangent model's loss or gradient is not finite; are inputs and targets finite?")
        if progress is not None:
            progress(
                {
                    "stage": "mode",
                    "newton": steps,
                    "products": products,
                    "gradient_norm": norm,
                    "wanted": tolerance,
                    "loss": loss,
                }
            )
        if norm <= tolerance or steps >= max_iterations:
            return Mode(
                theta, loss, norm, steps, products, norm <= tolerance, certificate(likelihood, gradient, precision)
            )
        forcing = 0.3 * tolerance if likelihood.quadratic else max(0.3 * tolerance, min(0.1, norm) * norm)
        direction, used = _conjugate_gradients(problem, posterior, gradient, forcing, max_products)
        products += used
        steps += 1
        if not likelihood.quadratic:
            before = loss / posterior.noise + 0.5 * _dot(theta * precision, theta)
            for _ in range(_RETRIES):  # far from the mode, where probabilities saturate, steps are far too long
                values = problem.line(direction) / posterior.noise + _ridge(theta, direction, precision)
                best = int(values.argmin())
                if float(values[best]) < before:
                    break
                direction = direction * float(_STEPS[-1]) / 2
            else:  # at the resolution of the floating-point type
                return Mode(theta, loss, norm, steps, products, False, certificate(likelihood, gradient, precision))
            direction = direction * float(_STEPS[best])
        theta = theta + direction
        loss, gradient = problem.gradient(theta)


def _ridge(theta: Tensor, direction: Tensor, precision: Tensor) -> Tensor:
    """``1/2 theta^T Lambda theta`` at every step of the line search."""
    a, b, c = _dot(theta * precision, theta), _dot(theta * precision, direction), _dot(direction * precision, direction)
    return 0.5 * (a + 2 * _STEPS * b + _STEPS.square() * c)


def _conjugate_gradients(
    problem: _Objective, posterior: Posterior, gradient: Tensor, tolerance: float, limit: int
) -> tuple[Tensor, int]:
    """Solve ``H d = -gradient`` until the preconditioned residual norm is below ``tolerance``."""
    solution, residual = torch.zeros_like(gradient), -gradient
    preconditioned = posterior.covariance_product(residual)
    direction, square = preconditioned, _dot(residual, preconditioned)
    for used in range(1, limit + 1):
        product = problem.product(direction)
        curvature = _dot(direction, product)
        if not curvature > 0:
            return solution, used
        step = square / curvature
        solution = solution + step * direction
        residual = residual - step * product
        preconditioned = posterior.covariance_product(residual)
        before, square = square, _dot(residual, preconditioned)
        if square <= tolerance**2:
            return solution, used
        direction = preconditioned + (square / before) * direction
    return solution, limit
