"""Linearized Laplace in the space of outputs and observations: exact where outputs are few, however many weights.

The tangent model with prior ``theta ~ N(0, S)`` and observations ``y ~ N(A h, v I)`` is a Gaussian process with kernel
``F = J S J^T = sum_br c_br(phi) M_br``: the matrices ``M`` are all that is needed of the Jacobian. With
``K = A F A^T + v I`` and ``m`` measurements, in float64,

    -log Z = 1/2 [ log|K| + |y - A f|^2 / v + theta~^T S^-1 theta~ + m log 2 pi ]      evaluate_at="map"
    -log Z = 1/2 [ log|K| + y~^T K^-1 y~ + m log 2 pi ],  y~ = y - A (f - J theta~)    evaluate_at="tangent_mode"
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.dual.observation import LinearObservation, require_measurements
from tu_symmetry.laplace.dual.priors import StructuredPrior
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.transfer import moved

DualOptimizer = Literal["l-bfgs-b", "adam"]
NOISE = "log_noise_variance"
_NEGLIGIBLE = 1e-13  # of a pair's coefficients in a pattern basis that makes most of them zero
_LOG_2PI = math.log(2 * math.pi)
_GAIN = 1e-6  # nats, below which an optimum counts as found
_ABNORMAL = 2  # SciPy's status of L-BFGS-B whose line search has failed


class BoundReachedWarning(UserWarning):
    """A hyperparameter stopped at its bound; the message names it."""


@dataclass(frozen=True, eq=False)
class DualStatistics:
    """What a network, its inputs and the forms of the priors contribute, whatever the hyperparameters."""

    outputs: Tensor  # f, all outputs in one vector [d]
    linear: Tensor  # J theta~ over the linearized weights, [d]
    kernels: dict[str, Tensor]  # block to M, [R, d, d]
    seconds: dict[str, Tensor]  # block to sum_i t_i t_i^T [k, k] over the patterns t_i of its trained weights

    def difference_variances(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Variances ``[R, pairs]`` of ``f[second] - f[first]`` for unit coefficients, and the size of what cancels."""
        kernels = self.kernels[name]
        diagonal = kernels.diagonal(dim1=1, dim2=2)
        variances = diagonal[:, first] + diagonal[:, second] - 2 * kernels[:, first, second]
        return variances, diagonal.abs()[:, first] + diagonal.abs()[:, second]


def pattern_kernels(patterns: Tensor, basis: Tensor) -> Tensor:
    """``M_r = sum_ij E_r[i, j] P_i P_j^T`` ``[R, d, d]`` for rows ``P_i = patterns[:, :, i]``.

    The ``E_r`` share symmetries (those of the grid), so that in the eigenvectors of a random combination of them most
    entries of all of them vanish: of the 45 pairs of a 3 x 3 kernel some 18 are left, each one matrix product.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(basis), generator=generator, dtype=torch.float64, device="cpu") + 0.5
    vectors = torch.linalg.eigh(torch.einsum("r,rij->ij", weights, basis))[1]
    rotated = vectors.mT @ basis @ vectors
    turned = (patterns @ vectors.to(patterns)).permute(2, 0, 1).contiguous()
    found = patterns.new_zeros(len(basis), len(patterns), len(patterns))
    limit = _NEGLIGIBLE * float(basis.abs().max()) * basis.shape[-1]
    for i in range(basis.shape[-1]):
        for j in range(i, basis.shape[-1]):
            factors = rotated[:, i, j]
            used = (factors.abs() > limit).nonzero().reshape(-1).tolist()
            if not used:
                continue
            product = turned[i] @ turned[j].mT
            if i != j:
                product = product + product.mT
            for r in used:
                found[r].add_(product, alpha=float(factors[r]))
    return (found + found.mT) / 2


def statistics(
    jacobian: Mapping[str, Tensor], weights: Mapping[str, Tensor], outputs: Tensor, priors: Sequence[StructuredPrior]
) -> DualStatistics:
    """The sufficient statistics of a Jacobian (parameter to ``[d, *shape]``)."""
    require_disjoint(priors, jacobian)
    d = outputs.numel()
    linear = torch.zeros(d, dtype=torch.float64, device=outputs.device)
    kernels, seconds = {}, {}
    for prior in priors:
        own = torch.cat(
            [jacobian[name].detach().double().reshape(d, -1, prior.pattern) for name in prior.parameters], dim=1
        )
        if not bool(torch.isfinite(own).all()):
            raise ValueError(f"the Jacobian of block {prior.name!r} holds NaN or infinite values")
        theta = torch.cat([weights[name].detach().double().reshape(-1, prior.pattern) for name in prior.parameters])
        kernels[prior.name] = pattern_kernels(own, prior.basis)
        seconds[prior.name] = theta.mT @ theta
        linear += own.flatten(1) @ theta.reshape(-1)
    return DualStatistics(outputs.detach().double().reshape(-1), linear, kernels, seconds)


def require_disjoint(priors: Sequence[StructuredPrior], names: Iterable[str]) -> None:
    """Every parameter in exactly one block, and no two blocks with one name."""
    if len({prior.name for prior in priors}) != len(priors):
        raise ValueError(f"two blocks have the same name: {[prior.name for prior in priors]}; give name=...")
    taken = [name for prior in priors for name in prior.parameters]
    twice = sorted({name for name in taken if taken.count(name) > 1})
    lacking = [name for name in names if name not in taken]
    if twice:
        raise ValueError(f"{twice[:6]} lie in two blocks of the prior")
    if lacking:
        raise ValueError(f"the prior says nothing about {lacking[:6]}; add blocks")


@dataclass(frozen=True, eq=False)
class HyperpriorContext:
    """What a hyperprior reads: it is called as ``hyperprior(coefficients, context)``."""

    statistics: Any  # exact DualStatistics, or SampledStatistics where no kernel fits
    priors: dict[str, StructuredPrior]
    phi: dict[str, Tensor]  # block to its hyperparameters (logarithms), with gradient
    kept: dict[Any, Any] = field(default_factory=dict)  # what it computes of the statistics alone, from call to call


# negative log density (nats), differentiable in the coefficients (block to [R]) and in context.phi
DualHyperprior = Callable[[dict[str, Tensor], HyperpriorContext], Tensor]


class DualEvidence:
    """The evidence as a function of the hyperparameters, its gradient, and the posterior that belongs to them.

    Hyperparameters are one float64 vector ``phi``: those of every block in order, then the log noise variance.

    Args:
        statistics: statistics of the network on its inputs.
        priors: resolved, in any order.
        measurements: ``y`` ``[m]``.
        observation: ``A``; None for the identity.
        evaluate_at: see the module.
        hyperprior: added to the negative log evidence.
    """

    def __init__(
        self,
        statistics: DualStatistics,
        priors: Sequence[StructuredPrior],
        measurements: Tensor,
        observation: LinearObservation | None = None,
        *,
        evaluate_at: EvaluateAt = "map",
        hyperprior: DualHyperprior | None = None,
    ) -> None:
        observation = LinearObservation() if observation is None else observation
        self.statistics, self.priors = statistics, {prior.name: prior for prior in priors}
        self.evaluate_at, self.hyperprior = evaluate_at, hyperprior
        self._kept: dict[Any, Any] = {}
        f = statistics.outputs
        y = require_measurements(measurements).detach().double().reshape(-1).to(f)
        observation.check_sizes(f.numel(), y.numel())
        self.measurements, self.values = y, y.numel()
        self.names = (*(f"{p.name}.log_{h}" for p in priors for h in p.hyperparameters), NOISE)
        basis, self._rows = (None if t is None else t.to(f) for t in observation.reduced())
        residual = y - observation.forward(f)
        linear = y - observation.forward(f - statistics.linear)
        self._residual_squares = float(residual.square().sum())
        self._target = linear if basis is None else basis.mT @ linear
        # what no output can explain, orthogonal to the range of A
        self._outside = 0.0 if basis is None else float((linear - basis @ self._target).square().sum())
        seconds = moved([statistics.seconds[name] for name in self.priors], torch.device("cpu"))
        self._seconds = dict(zip(self.priors, seconds, strict=True))
        own = [statistics.kernels[name] for name in self.priors]
        if self._rows is not None:
            rows = self._rows
            own = [torch.stack([rows @ matrix @ rows.mT for matrix in kernels]) for kernels in own]
        self._kernels = torch.cat(own)
        self._size = self._kernels.shape[-1]

    def like(self, *, evaluate_at: EvaluateAt, hyperprior: DualHyperprior | None = None) -> DualEvidence:
        """The same of another place and hyperprior."""
        if evaluate_at not in ("map", "tangent_mode"):
            raise ValueError(f"evaluate_at={evaluate_at!r} is not known; choose one of ('tangent_mode', 'map')")
        other = copy.copy(self)
        other.evaluate_at, other.hyperprior, other._kept = evaluate_at, hyperprior, {}
        return other

    def initial(self, noise_variance: float = 1.0) -> Tensor:
        """Where the blocks start, and a noise variance."""
        own = [prior.initial() for prior in self.priors.values()]
        return torch.cat([*own, torch.tensor([math.log(noise_variance)], dtype=torch.float64, device="cpu")])

    def bounds(self) -> list[tuple[float, float]]:
        """Limits of each entry; the noise variance between 1e-10 and 1e10 times the measurements' mean square."""
        scale = math.log(max(float(self.measurements.square().mean()), 1e-30))
        return [pair for prior in self.priors.values() for pair in prior.bounds()] + [(scale - 23.0, scale + 23.0)]

    def split(self, phi: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The blocks' hyperparameters by name, and the log noise variance."""
        if phi.shape != (len(self.names),) or not torch.isfinite(phi.detach()).all():
            raise ValueError(f"phi has to hold {len(self.names)} finite numbers, {self.names}; got {phi.tolist()}")
        pieces = phi.split([*(len(prior.hyperparameters) for prior in self.priors.values()), 1])
        return dict(zip(self.priors, pieces, strict=False)), pieces[-1][0]

    def coefficients(self, phi: Tensor) -> dict[str, Tensor]:
        """Block to ``c`` ``[R]``."""
        return {name: self.priors[name].coefficients(own) for name, own in self.split(phi)[0].items()}

    def _factor(self, coefficients: Tensor, noise: float) -> Tensor:
        """Cholesky factor of ``R F R^T + v I``, ``[rows, rows]``."""
        kernel = (coefficients.to(self._kernels) @ self._kernels.flatten(1)).view(self._size, self._size)
        kernel.diagonal().add_(noise)
        root = cholesky(kernel)
        if root is None:
            raise ValueError(
                f"the covariance of the {self._size} observed values is singular to rounding at noise variance "
                f"{noise:.3g}. Raise the noise variance or bound it from below, lower the bounds of the prior "
                "variances, or leave out measurements that repeat others"
            )
        return root

    def value_and_gradient(self, phi: Tensor) -> tuple[float, Tensor]:
        """Negative log evidence (nats), less the hyperprior's log density where there is one, and its gradient.

        Raises:
            ValueError: covariances of measurements or of a block's prior that are singular to rounding.
        """
        with torch.enable_grad():
            leaf = phi.detach().double().clone().requires_grad_()
            blocks, log_noise = self.split(leaf)
            by_name = {name: self.priors[name].coefficients(own) for name, own in blocks.items()}
            joined = torch.cat([*by_name.values()])
            noise = float(log_noise.detach().exp())
            root = self._factor(joined.detach(), noise)
            inverse = torch.cholesky_inverse(root)
            free = self.values - self._size
            slope, sums = inverse, [root.diagonal().log().sum(), inverse.diagonal().sum()]
            if self.evaluate_at == "tangent_mode":
                weights = inverse @ self._target
                slope = inverse - torch.outer(weights, weights)
                sums += [self._target @ weights, weights.square().sum()]
            # one wait for the device
            here, products = moved([torch.stack(sums), self._kernels.flatten(1) @ slope.reshape(-1)], joined.device)
            log_det, trace, *fit = here.tolist()
            value = 2 * log_det + free * math.log(noise) + self.values * _LOG_2PI
            noise_slope = trace + free / noise
            rest = leaf.new_zeros(())
            if self.evaluate_at == "tangent_mode":
                value += fit[0] + self._outside / noise
                noise_slope -= fit[1] + self._outside / noise**2
            else:
                value += self._residual_squares / noise
                noise_slope -= self._residual_squares / noise**2
                for name, own in blocks.items():
                    rest = rest + (torch.cholesky_inverse(self.priors[name].root(own)) * self._seconds[name]).sum()
                rest = 0.5 * rest
            if self.hyperprior is not None:
                context = HyperpriorContext(self.statistics, self.priors, blocks, self._kept)
                rest = rest + self.hyperprior(by_name, context).to(rest)
            chained = (joined * (0.5 * products)).sum() + log_noise * (0.5 * noise * noise_slope) + rest
            (gradient,) = torch.autograd.grad(chained, leaf)
        return 0.5 * value + float(rest.detach()), gradient

    def value(self, phi: Tensor) -> float:
        """Negative log evidence, less the hyperprior's log density (nats)."""
        return self.value_and_gradient(phi)[0]

    def prior_covariance(self, phi: Tensor) -> Tensor:
        """``F = J S J^T`` of the outputs, ``[d, d]``."""
        d = self.statistics.outputs.numel()
        found = self.statistics.outputs.new_zeros(d, d)
        for name, own in self.coefficients(phi).items():
            found += torch.einsum("r,rij->ij", own.to(found), self.statistics.kernels[name])
        return found

    def posterior_covariance(self, phi: Tensor) -> Tensor:
        """``F - F A^T K^-1 A F`` of the outputs, ``[d, d]``: that of the tangent model, without noise."""
        prior = self.prior_covariance(phi)
        return self.corrected(phi, prior, prior)

    def corrected(self, phi: Tensor, prior: Tensor, cross: Tensor) -> Tensor:
        """``P - C A^T K^-1 A C^T`` of outputs with the prior covariance ``P``, and ``C`` with the training outputs."""
        white = torch.linalg.solve_triangular(self._root(phi), self._seen(cross).mT, upper=False)
        found = prior - white.mT @ white
        return (found + found.mT) / 2

    def deviations(self, phi: Tensor, count: int, generator: torch.Generator, *, prior: bool = False) -> Tensor:
        """Samples ``[count, d]`` of the deviations of outputs from their mean: prior samples, then corrected."""
        covariance = self.prior_covariance(phi)
        drawn = draw(covariance, count, generator)
        if prior:
            return drawn
        noise = torch.randn(count, self._size, generator=generator, dtype=torch.float64, device="cpu").to(drawn)
        seen = self._seen(drawn) + math.exp(0.5 * float(phi[-1])) * noise
        weights = torch.cholesky_solve(seen.unsqueeze(-1), self._root(phi)).squeeze(-1)
        return drawn - weights @ self._seen(covariance).mT

    def _root(self, phi: Tensor) -> Tensor:
        return self._factor(torch.cat([*self.coefficients(phi).values()]).detach(), math.exp(float(phi[-1])))

    def _seen(self, outputs: Tensor) -> Tensor:
        return outputs if self._rows is None else outputs @ self._rows.mT


def draw(covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Samples of ``N(0, covariance)``, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    noise = torch.randn(count, len(covariance), generator=generator, dtype=torch.float64, device="cpu")
    return (noise.to(covariance) * values.clamp(min=0).sqrt()) @ vectors.mT


@dataclass(frozen=True, eq=False)
class DualResult:
    """What an optimizer of the evidence found."""

    phi: Tensor  # the best hyperparameters seen
    objective: float  # negative log evidence there, less the hyperprior's log density (nats)
    history: list[float] = field(repr=False)  # the objective at every evaluation
    converged: bool  # L-BFGS-B stopped by itself, or the last 10 % of Adam's steps gained under 1e-3 nats


def optimize(
    evidence: DualEvidence,
    phi: Tensor,
    *,
    optimizer: DualOptimizer = "l-bfgs-b",
    num_steps: int = 1500,
    lr: float = 0.01,
) -> DualResult:
    """Minimize the negative log evidence within the bounds, as :meth:`DualLaplace.optimize_evidence` does."""
    if optimizer not in ("l-bfgs-b", "adam"):
        raise ValueError(f"optimizer={optimizer!r} is not known; choose 'l-bfgs-b' or 'adam'")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} has to be at least 1")
    limits = torch.tensor(evidence.bounds(), dtype=torch.float64, device="cpu")
    start = phi.detach().double().clamp(limits[:, 0], limits[:, 1])
    history: list[float] = []
    best: tuple[float, Tensor] = (math.inf, start)

    def evaluate(point: Tensor) -> tuple[float, Tensor]:
        nonlocal best
        value, gradient = evidence.value_and_gradient(point)
        history.append(value)
        if value < best[0]:
            best = (value, point.detach().clone())
        return value, gradient

    def function(values: np.ndarray) -> tuple[float, np.ndarray]:
        try:
            value, gradient = evaluate(torch.from_numpy(values.copy()))
        except ValueError:  # singular there: the line search goes back
            return best[0] + 1e6 * (1 + abs(best[0])), np.zeros(len(values))
        return value, gradient.numpy()

    evaluate(start)
    if optimizer == "adam":
        leaf = start.clone()
        step = torch.optim.Adam([leaf], lr=lr)
        for _ in range(num_steps):
            leaf.grad = evaluate(leaf)[1]
            step.step()
            leaf.copy_(leaf.clamp(limits[:, 0], limits[:, 1]))
        evaluate(leaf)
        last = max(2, len(history) // 10)
        converged = len(history) > last and min(history[:-last]) - min(history[-last:]) < 1e-3
    else:
        left, again = num_steps, True
        while again:
            before = best[0]
            outcome = minimize(
                function,
                best[1].numpy(),
                jac=True,
                method="L-BFGS-B",
                bounds=limits.tolist(),
                options={"maxiter": left, "maxfun": 20 * left, "ftol": 1e-13, "gtol": 1e-6, "maxcor": 20},
            )
            left -= outcome.nit
            # Close to the optimum a line search can fail by rounding alone. The optimizer then starts again from
            # there without what it remembers of the curvature, until that gains nothing.
            gains = before - best[0] > _GAIN
            again = outcome.status == _ABNORMAL and left > 0 and gains
        converged = bool(outcome.success) or (outcome.status == _ABNORMAL and not gains)
    _warn_of_bounds(evidence, best[1], limits)
    return DualResult(best[1], best[0], history, converged)


def _warn_of_bounds(evidence: DualEvidence, phi: Tensor, limits: Tensor) -> None:
    gradient = evidence.value_and_gradient(phi)[1]
    near = 1e-6 * (limits[:, 1] - limits[:, 0])
    low = (phi - limits[:, 0] < near) & (gradient > 1e-3)
    high = (limits[:, 1] - phi < near) & (gradient < -1e-3)
    stuck = [name for name, pushed in zip(evidence.names, (low | high).tolist(), strict=True) if pushed]
    if stuck:
        warnings.warn(
            f"{stuck} stand at a bound, and the evidence wants more: widen the bounds if they are not meant, or look "
            "whether the block has any effect on the outputs",
            BoundReachedWarning,
            stacklevel=3,
        )
