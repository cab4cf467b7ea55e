"""Linearized Laplace in the space of outputs and observations: exact where outputs are few, however many weights.

The tangent model ``h = f + J (theta - theta~)`` with prior ``theta ~ N(0, S)`` and observations ``y ~ N(A h, v I)`` is
a Gaussian process with ``d x d`` kernel ``F = J S J^T``. With priors of :mod:`tu_symmetry.laplace.dual.priors`

    F = sum_b sum_r c_br(phi) M_br,        M_br = J_b (I (x) E_r) J_b^T

so that the matrices ``M`` are all that the evidence, its gradient, the predictive covariance and its samples need: the
Jacobian is not. With ``K = A F A^T + v I`` and ``m`` measurements,

    -log Z = 1/2 [ log|K| + |y - A f|^2 / v + theta~^T S^-1 theta~ + m log 2 pi ]      evaluate_at="map"
    -log Z = 1/2 [ log|K| + y~^T K^-1 y~ + m log 2 pi ],  y~ = y - A (f - J theta~)    evaluate_at="tangent_mode"

The second is what the first becomes at the mode ``theta*`` of the tangent model, since then ``|y - A h*|^2 / v +
theta*^T S^-1 theta*`` is ``y~^T K^-1 y~``. Everything is float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

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


class SingularCovarianceError(ValueError):
    """The covariance of the measurements has no Cholesky factor."""


class BoundReachedWarning(UserWarning):
    """A hyperparameter stopped at its bound; the message names it."""


@dataclass(frozen=True, eq=False)
class DualStatistics:
    """What a network, its inputs and the forms of the priors contribute, whatever the hyperparameters.

    Attributes:
        outputs: ``f``, all outputs in one vector ``[d]``.
        linear: ``J theta~`` over the linearized weights, ``[d]``.
        kernels: block to ``M`` ``[R, d, d]``.
        seconds: block to ``sum_i t_i t_i^T`` ``[k, k]`` over the patterns ``t_i`` of its trained weights.
        sizes: block to its number of weights.
    """

    outputs: Tensor
    linear: Tensor
    kernels: dict[str, Tensor]
    seconds: dict[str, Tensor]
    sizes: dict[str, int]

    def on(self, device: torch.device) -> DualStatistics:
        """The same on a device."""
        moved = {kind: {n: t.to(device) for n, t in getattr(self, kind).items()} for kind in ("kernels", "seconds")}
        return replace(self, outputs=self.outputs.to(device), linear=self.linear.to(device), **moved)

    def difference_variances(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Prior variances ``[R, pairs]`` of ``f[second] - f[first]`` by a block, for unit coefficients.

        Beside them the size of what cancels, of the same shape.
        """
        kernels = self.kernels[name]
        first, second = first.to(kernels.device), second.to(kernels.device)
        diagonal = kernels.diagonal(dim1=1, dim2=2)
        variances = diagonal[:, first] + diagonal[:, second] - 2 * kernels[:, first, second]
        return variances, diagonal.abs()[:, first] + diagonal.abs()[:, second]


def pattern_kernels(patterns: Tensor, basis: Tensor) -> Tensor:
    """``M_r = sum_ij E_r[i, j] P_i P_j^T`` for rows ``P_i = patterns[:, :, i]``, without a product for each ``r``.

    The ``E_r`` share symmetries (those of the grid), so that in the eigenvectors of a random combination of them most
    entries of all of them vanish: of the 45 pairs of a 3 x 3 kernel some 18 are left, each one matrix product.
    ``patterns`` ``[d, n, k]`` and the symmetric ``basis`` ``[R, k, k]`` are float64, the result is ``[R, d, d]``.
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
    jacobian: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    outputs: Tensor,
    priors: Sequence[StructuredPrior],
) -> DualStatistics:
    """The sufficient statistics of a Jacobian."""
    require_disjoint(priors, jacobian)
    d = outputs.numel()
    linear = torch.zeros(d, dtype=torch.float64, device=outputs.device)
    kernels, seconds, sizes = {}, {}, {}
    for prior in priors:
        parts = [jacobian[name].detach().double().reshape(d, -1, prior.pattern) for name in prior.parameters]
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            raise ValueError(f"the Jacobian of block {prior.name!r} holds NaN or infinite values")
        own = torch.cat(parts, dim=1)
        theta = torch.cat([weights[name].detach().double().reshape(-1, prior.pattern) for name in prior.parameters])
        kernels[prior.name] = pattern_kernels(own, prior.basis)
        seconds[prior.name] = theta.mT @ theta
        sizes[prior.name] = theta.numel()
        linear += own.flatten(1) @ theta.reshape(-1)
    return DualStatistics(outputs.detach().double().reshape(-1), linear, kernels, seconds, sizes)


def require_disjoint(priors: Sequence[StructuredPrior], names: Mapping[str, Any] | Sequence[str]) -> None:
    """Every parameter in exactly one block, and no two blocks with one name."""
    taken: dict[str, str] = {}
    if len({prior.name for prior in priors}) != len(priors):
        raise ValueError(f"two blocks have the same name: {[prior.name for prior in priors]}; give name=...")
    for prior in priors:
        for name in prior.parameters:
            if name in taken:
                raise ValueError(f"{name} lies in two blocks of the prior, {taken[name]!r} and {prior.name!r}")
            taken[name] = prior.name
    lacking = [name for name in names if name not in taken]
    if lacking:
        raise ValueError(
            f"the prior says nothing about {lacking[:6]}; add blocks, or leave them out of parameters=[...]"
        )


class OutputStatistics(Protocol):
    """What a hyperprior reads of a network: exact (:class:`DualStatistics`), or estimated where no kernel fits."""

    @property
    def outputs(self) -> Tensor:
        """``f``, all outputs in one vector ``[d]``."""

    def difference_variances(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`DualStatistics.difference_variances`."""


@dataclass(frozen=True, eq=False)
class HyperpriorContext:
    """What a hyperprior reads: it is called as ``hyperprior(coefficients, context)``."""

    statistics: OutputStatistics
    priors: dict[str, StructuredPrior]
    phi: dict[str, Tensor]  # block to its hyperparameters (logarithms), with gradient
    kept: dict[Any, Any] = field(default_factory=dict)  # what it computes of the statistics alone, from call to call


DualHyperprior = Callable[[dict[str, Tensor], HyperpriorContext], Tensor]
"""Negative log density of the hyperparameters (nats, up to a constant), differentiable in the coefficients
(block to ``[R]``) and in ``context.phi``."""


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

    Attributes:
        names: names of the entries of ``phi``.
        values: number of measurements ``m``.
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
        if evaluate_at not in ("map", "tangent_mode"):
            raise ValueError(f"evaluate_at={evaluate_at!r} is not known; choose one of ('tangent_mode', 'map')")
        self.statistics, self.priors = statistics, {prior.name: prior for prior in priors}
        self.observation = LinearObservation() if observation is None else observation
        self.evaluate_at, self.hyperprior = evaluate_at, hyperprior
        self._kept: dict[Any, Any] = {}
        f = statistics.outputs
        y = require_measurements(measurements).detach().double().reshape(-1).to(f)
        self.observation.check_sizes(f.numel(), y.numel())
        self.measurements, self.values = y, y.numel()
        self.names = (*(f"{p.name}.log_{h}" for p in priors for h in p.hyperparameters), NOISE)
        basis, self._rows = (None if t is None else t.to(f) for t in self.observation.reduced(f.numel()))
        residual = y - self._observe(f, basis)
        linear = y - self._observe(f - statistics.linear, basis)
        self.residual_squares = float(residual.square().sum())
        kept = linear if basis is None else basis.mT @ linear
        self._target = kept
        # what no output can explain, orthogonal to the range of A
        self._outside = 0.0 if basis is None else float((linear - basis @ kept).square().sum())
        self._order = tuple(prior.name for prior in priors)
        seconds = moved([statistics.seconds[name] for name in self._order], torch.device("cpu"))
        self._seconds = dict(zip(self._order, seconds, strict=True))
        own = [statistics.kernels[name] for name in self._order]
        if self._rows is not None:
            rows = self._rows
            own = [torch.stack([rows @ matrix @ rows.mT for matrix in kernels]) for kernels in own]
        self._kernels = torch.cat(own)
        self._size = self._kernels.shape[-1]

    def _observe(self, outputs: Tensor, basis: Tensor | None) -> Tensor:
        if self._rows is None:
            return outputs
        seen = self._rows @ outputs
        return seen if basis is None else basis @ seen

    # ------------------------------------------------------------------ hyperparameters

    def initial(self, noise_variance: float = 1.0) -> Tensor:
        """Where the blocks start, and a noise variance."""
        own = [self.priors[name].initial() for name in self._order]
        return torch.cat([*own, torch.tensor([math.log(noise_variance)], dtype=torch.float64, device="cpu")])

    def bounds(self) -> list[tuple[float, float]]:
        """Limits of each entry; the noise variance between 1e-10 and 1e10 times the measurements' mean square."""
        scale = math.log(max(float(self.measurements.square().mean()), 1e-30))
        return [pair for name in self._order for pair in self.priors[name].bounds()] + [(scale - 23.0, scale + 23.0)]

    def split(self, phi: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The blocks' hyperparameters by name, and the log noise variance."""
        if phi.shape != (len(self.names),) or not torch.isfinite(phi.detach()).all():
            raise ValueError(f"phi has to hold {len(self.names)} finite numbers, {self.names}; got {phi.tolist()}")
        lengths = [len(self.priors[name].hyperparameters) for name in self._order]
        pieces = phi.split([*lengths, 1])
        return dict(zip(self._order, pieces, strict=False)), pieces[-1][0]

    def coefficients(self, phi: Tensor) -> dict[str, Tensor]:
        """Block to ``c`` ``[R]``."""
        return {name: self.priors[name].coefficients(own) for name, own in self.split(phi)[0].items()}

    # ------------------------------------------------------------------ evidence

    def _factor(self, coefficients: Tensor, noise: float) -> Tensor:
        """Cholesky factor of ``R F R^T + v I``, ``[rows, rows]``."""
        kernel = (coefficients.to(self._kernels) @ self._kernels.flatten(1)).view(self._size, self._size)
        kernel.diagonal().add_(noise)
        root = cholesky(kernel)
        if root is None:
            diagonal = kernel.diagonal()
            raise SingularCovarianceError(
                f"the covariance of the {self._size} observed values is singular to rounding: noise variance "
                f"{noise:.3g}, prior variances of them from {float(diagonal.min()) - noise:.3g} to "
                f"{float(diagonal.max()) - noise:.3g}. Raise the noise variance or bound it from below, lower the "
                "bounds of the prior variances, or leave out measurements that repeat others"
            )
        return root

    def value_and_gradient(self, phi: Tensor) -> tuple[float, Tensor]:
        """Negative log evidence (nats), less the hyperprior's log density where there is one, and its gradient.

        Raises:
            SingularCovarianceError: covariances that are singular to rounding.
            SingularPriorError: the same of a block's prior.
        """
        with torch.enable_grad():
            leaf = phi.detach().double().clone().requires_grad_()
            blocks, log_noise = self.split(leaf)
            by_name = {name: self.priors[name].coefficients(own) for name, own in blocks.items()}
            joined = torch.cat([by_name[name] for name in self._order])
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
            if self.evaluate_at == "tangent_mode":
                value += fit[0] + self._outside / noise
                noise_slope -= fit[1] + self._outside / noise**2
            else:
                value += self.residual_squares / noise
                noise_slope -= self.residual_squares / noise**2
            by_coefficient = 0.5 * products
            rest = leaf.new_zeros(())
            if self.evaluate_at == "map":
                rest = 0.5 * sum(
                    (
                        (torch.cholesky_inverse(self.priors[name].root(own)) * self._seconds[name]).sum()
                        for name, own in blocks.items()
                    ),
                    rest,
                )
            if self.hyperprior is not None:
                context = HyperpriorContext(self.statistics, self.priors, blocks, self._kept)
                rest = rest + self.hyperprior(by_name, context).to(rest)
            chained = (joined * by_coefficient).sum() + log_noise * (0.5 * noise * noise_slope) + rest
            (gradient,) = torch.autograd.grad(chained, leaf)
        return 0.5 * value + float(rest.detach()), gradient

    def value(self, phi: Tensor) -> float:
        """Negative log evidence, less the hyperprior's log density (nats)."""
        return self.value_and_gradient(phi)[0]

    # ------------------------------------------------------------------ posterior

    def prior_covariance(self, phi: Tensor) -> Tensor:
        """``F = J S J^T`` of the outputs, ``[d, d]``."""
        found = torch.zeros_like(self.statistics.kernels[self._order[0]][0])
        for name, own in self.coefficients(phi).items():
            found += torch.einsum("r,rij->ij", own.to(found), self.statistics.kernels[name])
        return found

    def posterior_covariance(self, phi: Tensor) -> Tensor:
        """``F - F A^T K^-1 A F`` of the outputs, ``[d, d]``: that of the tangent model, without noise."""
        prior = self.prior_covariance(phi)
        found = prior - self.explained(phi, prior, prior)
        return (found + found.mT) / 2

    def explained(self, phi: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """``L A^T K^-1 A R^T``: what the measurements take away from a covariance of two sets of outputs."""
        root = self._root(phi)
        white = [torch.linalg.solve_triangular(root, self._seen(x).mT, upper=False) for x in (left, right)]
        return white[0].mT @ white[1]

    def update(self, phi: Tensor, cross: Tensor, values: Tensor) -> Tensor:
        """``C A^T K^-1 u`` for values ``u`` ``[..., rows]`` of the reduced observation: ``[..., a]``."""
        weights = torch.cholesky_solve(values.unsqueeze(-1), self._root(phi)).squeeze(-1)
        return weights @ self._seen(cross).mT

    def mode_outputs(self, phi: Tensor) -> Tensor:
        """The tangent model's outputs ``h`` at its mode ``theta*``, ``[d]``."""
        change = self.update(phi, self.prior_covariance(phi), self._target)
        return self.statistics.outputs - self.statistics.linear + change

    def deviations(self, phi: Tensor, count: int, generator: torch.Generator, *, prior: bool = False) -> Tensor:
        """Samples ``[count, d]`` of the deviations of outputs from their mean: prior samples, then corrected."""
        covariance = self.prior_covariance(phi)
        drawn = self.draw(covariance, count, generator)
        if prior:
            return drawn
        noise = torch.randn(count, self._size, generator=generator, dtype=torch.float64, device="cpu").to(drawn)
        seen = self._seen(drawn) + math.exp(0.5 * float(phi[-1])) * noise
        return drawn - self.update(phi, covariance, seen)

    @staticmethod
    def draw(covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Samples of ``N(0, covariance)``; covariances may be singular."""
        values, vectors = torch.linalg.eigh(covariance)
        noise = torch.randn(count, len(covariance), generator=generator, dtype=torch.float64, device="cpu").to(
            covariance
        )
        return (noise * values.clamp(min=0).sqrt()) @ vectors.mT

    def _root(self, phi: Tensor) -> Tensor:
        own = self.coefficients(phi)
        return self._factor(torch.cat([own[name] for name in self._order]).detach(), math.exp(float(phi[-1])))

    def _seen(self, outputs: Tensor) -> Tensor:
        return outputs if self._rows is None else outputs @ self._rows.mT


_GAIN = 1e-6  # nats, below which an optimum counts as found
_ABNORMAL = 2  # SciPy's status of L-BFGS-B whose line search has failed


@dataclass(frozen=True, eq=False)
class DualResult:
    """What an optimizer of the evidence found.

    Attributes:
        phi: the best hyperparameters seen.
        objective: negative log evidence there, less the hyperprior's log density (nats).
        history: the objective at every evaluation.
        converged: whether the optimizer stopped by itself (Adam: the last 10 % of its steps gained under 1e-3 nats;
            L-BFGS-B, where rounding ends its line search: a start from there gains under 1e-6 nats).
        at_bounds: names of the hyperparameters that stand at a bound.
    """

    phi: Tensor
    objective: float
    history: list[float] = field(repr=False)
    converged: bool
    at_bounds: tuple[str, ...]


def optimize(
    evidence: DualEvidence,
    phi: Tensor,
    *,
    optimizer: DualOptimizer = "l-bfgs-b",
    fixed: Sequence[str] = (),
    num_steps: int = 1500,
    lr: float = 0.01,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> DualResult:
    """Minimize the negative log evidence over the hyperparameters, within their bounds.

    Args:
        evidence: what to optimize.
        phi: where it starts.
        optimizer: SciPy's ``l-bfgs-b``, some dozens of evaluations, or ``adam`` with a fixed number of steps, as
            papers have it.
        fixed: names of hyperparameters (of :attr:`DualEvidence.names`) that stay as they are.
        num_steps: steps of Adam; the most iterations of L-BFGS-B.
        lr: learning rate of Adam.
        progress: called with ``{"stage", "step", "objective"}`` after each evaluation.

    Warns:
        BoundReachedWarning: hyperparameters at a bound, where the evidence wants more.
    """
    unknown = [name for name in fixed if name not in evidence.names]
    if unknown:
        raise ValueError(f"{unknown} are no hyperparameters; there are {evidence.names}")
    if optimizer not in ("l-bfgs-b", "adam"):
        raise ValueError(f"optimizer={optimizer!r} is not known; choose 'l-bfgs-b' or 'adam'")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} has to be at least 1")
    free = torch.tensor([name not in fixed for name in evidence.names], device="cpu")
    limits = torch.tensor(evidence.bounds(), dtype=torch.float64, device="cpu")
    start = phi.detach().double().clone()
    start[free] = start[free].clamp(limits[free, 0], limits[free, 1])
    history: list[float] = []
    best: tuple[float, Tensor] = (math.inf, start)

    def evaluate(point: Tensor) -> tuple[float, Tensor]:
        nonlocal best
        value, gradient = evidence.value_and_gradient(point)
        history.append(value)
        if value < best[0]:
            best = (value, point.detach().clone())
        if progress is not None:
            progress({"stage": "evidence", "step": len(history), "objective": value})
        return value, gradient

    first = evaluate(start)
    if not bool(free.any()):
        return DualResult(start, first[0], history, True, ())
    if optimizer == "adam":
        leaf = start.clone()
        step = torch.optim.Adam([leaf], lr=lr)
        for _ in range(num_steps):
            leaf.grad = torch.where(free, evaluate(leaf)[1], 0.0)
            step.step()
            leaf[free] = leaf[free].clamp(limits[free, 0], limits[free, 1])
        evaluate(leaf)
        last = max(2, len(history) // 10)
        converged = min(history[:-last]) - min(history[-last:]) < 1e-3 if len(history) > last else False
    else:

        def function(values: np.ndarray) -> tuple[float, np.ndarray]:
            point = start.clone()
            point[free] = torch.from_numpy(values)
            try:
                value, gradient = evaluate(point)
            except ValueError:  # singular there: the line search goes back
                return best[0] + 1e6 * (1 + abs(best[0])), np.zeros(int(free.sum()))
            return value, gradient[free].numpy()

        left = num_steps
        while True:
            before = best[0]
            outcome = minimize(
                function,
                best[1][free].numpy(),
                jac=True,
                method="L-BFGS-B",
                bounds=limits[free].tolist(),
                options={"maxiter": left, "maxfun": 20 * left, "ftol": 1e-13, "gtol": 1e-6, "maxcor": 20},
            )
            left -= outcome.nit
            # Close to the optimum a line search can fail by rounding alone. The optimizer then starts again from
            # there without what it remembers of the curvature, until that gains nothing.
            gained = before - best[0]
            if outcome.status != _ABNORMAL or left < 1 or not gained > _GAIN:
                break
        converged = bool(outcome.success) or (outcome.status == _ABNORMAL and not gained > _GAIN)
    gradient = evidence.value_and_gradient(best[1])[1]
    near = 1e-6 * (limits[:, 1] - limits[:, 0])
    pushed = ((best[1] - limits[:, 0] < near) & (gradient > 1e-3)) | (
        (limits[:, 1] - best[1] < near) & (gradient < -1e-3)
    )
    stuck = tuple(n for n, p, f in zip(evidence.names, pushed.tolist(), free.tolist(), strict=True) if p and f)
    if stuck:
        warnings.warn(
            f"{list(stuck)} stand at a bound, and the evidence wants more: widen the bounds if they are not meant, or "
            "look whether the block has any effect on the outputs",
            BoundReachedWarning,
            stacklevel=2,
        )
    return DualResult(best[1], best[0], history, converged, stuck)
