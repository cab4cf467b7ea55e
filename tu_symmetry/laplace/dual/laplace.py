"""Linearized Laplace in the space of outputs and observations: exact where outputs are few, however many weights.

The tangent model with prior ``theta ~ N(0, S)`` and observations ``y ~ N(A h, v I)`` is a Gaussian process with kernel
``F = J S J^T = sum_br c_br(phi) M_br``: the matrices ``M`` are all that is needed of the Jacobian. With
``K = A F A^T + v I`` and ``m`` measurements, in float64,

    -log Z = 1/2 [ log|K| + |y - A f|^2 / v + theta~^T S^-1 theta~ + m log 2 pi ]      evaluate_at="map"
    -log Z = 1/2 [ log|K| + y~^T K^-1 y~ + m log 2 pi ],  y~ = y - A (f - J theta~)    evaluate_at="tangent_mode"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.checks import require_module, require_weights
from tu_symmetry.laplace.data import batches
from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.dual.hyperpriors import Energy, TotalVariation
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, jacobian, require_measurements, require_observation
from tu_symmetry.laplace.dual.optimize import DualOptimizer, DualResult, optimize
from tu_symmetry.laplace.dual.priors import Blocks, StructuredPrior
from tu_symmetry.laplace.inputs import arguments
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.tangent import evaluating, require_independent_samples, select_parameters
from tu_symmetry.memory import require_memory
from tu_symmetry.processes import shared
from tu_symmetry.reporting.brief import Brief, shorten
from tu_symmetry.symmetry.randomness import leaves_randomness
from tu_symmetry.transfer import moved

NOISE = "log_noise_variance"
_NEGLIGIBLE = 1e-13  # of a pair's coefficients in a pattern basis that makes most of them zero
_LOG_2PI = math.log(2 * math.pi)


def gaussian_log_density(error: Tensor, covariance: Tensor, extra_variance: float = 0.0) -> float:
    """``log N(error; 0, covariance + extra_variance I)`` (nats)."""
    full = covariance.double() + extra_variance * torch.eye(len(covariance), device="cpu").to(covariance.double())
    root = cholesky(full)
    if root is None:
        raise ValueError(
            "the predictive covariance is singular to rounding: outputs that no weight moves have variance 0. Add the "
            "noise that the outputs have themselves with extra_variance=..."
        )
    white = torch.linalg.solve_triangular(root, error.to(full).unsqueeze(1), upper=False)
    return -0.5 * float(white.square().sum() + len(full) * _LOG_2PI) - float(root.diagonal().log().sum())


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


class DualLaplace(Brief):
    """Linearized Laplace in the space of outputs: exact, for at most some thousands of training outputs ``d``.

    The posterior over all linearized weights is not factorized; memory is ``d^2`` for each block and distance.
    Hyperparameters are one float64 vector ``phi`` of logarithms: those of every block, then the noise variance.

    Args:
        model: the trained network, with outputs of any shape; it has to keep its weights and its device.
        structured: priors of disjoint blocks of weights (:class:`KernelPrior`, :class:`IsotropicPrior`); all other
            weights are fixed.
        observation: ``A`` ``[values, outputs]`` of all training outputs together, flattened; None to measure the
            outputs themselves.
        evaluate_at: where the evidence is evaluated, ``map`` (the trained weights) or ``tangent_mode``; it may be set
            after the fit, too.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)).double()
        >>> x, y = torch.randn(6, 1, 4, 4).double(), torch.randn(6, 1).double()
        >>> blocks = [tus.laplace.KernelPrior(["0.weight"]), tus.laplace.IsotropicPrior(["3"])]
        >>> la = DualLaplace(network, structured=blocks)
        >>> found = la.fit([(x, y)]).optimize_evidence()
        >>> mean, covariance = la.function_covariance()
        >>> covariance.shape
        torch.Size([6, 6])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        structured: Sequence[StructuredPrior],
        observation: Tensor | None = None,
        evaluate_at: EvaluateAt = "tangent_mode",
    ) -> None:
        require_module(model)
        if not structured:
            raise ValueError("structured=[] names no weights: nothing would be uncertain")
        self.model, self.observation, self.evaluate_at = model, observation, evaluate_at
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        resolved = [own.resolve(shapes) for own in structured]
        taken = [name for own in resolved for name in own.parameters]
        self.tangent = FlatTangentModel(model, select_parameters(model, taken))
        self.blocks = Blocks(resolved, self.tangent)
        self.names = (*(f"{own.name}.log_{h}" for own in resolved for h in own.hyperparameters), NOISE)

    def facts(self) -> list[tuple[str, str]]:
        """What was fitted: the network, its blocks, the sizes and the hyperparameters."""
        found = [("of", type(self.model).__name__), ("blocks", ", ".join(self.blocks))]
        found.append(("evaluate at", self.evaluate_at))
        if not hasattr(self, "phi"):
            return [*found, ("fitted", "not yet")]
        sizes = f"{self.tangent.size} weights, to {self._values} measurements of {len(self.outputs)} outputs"
        return [*found, ("fitted", sizes), ("hyperparameters", shorten(self.hyperparameters))]

    @leaves_randomness
    def fit(self, train_loader: Iterable[Any]) -> DualLaplace:
        """Take the Jacobian of all training outputs, and keep what the evidence needs of it.

        Args:
            train_loader: one batch ``[(inputs, measurements)]``.
        """
        select_parameters(self.model, list(self.tangent.names))  # finite weights
        require_weights(self.model, self.tangent.names)
        require_independent_samples(self.model)
        read = list(batches(train_loader, next(self.model.parameters()).device))
        if len(read) != 1:
            raise ValueError(f"outputs are taken all together: give one batch [(inputs, targets)], not {len(read)}")
        ((inputs, targets),) = read
        args, kwargs = arguments(inputs)
        with evaluating(self.model), torch.no_grad():
            found, self._shape = self.tangent.outputs(inputs), self.model(*args, **kwargs).shape
        matrix = require_observation(self.observation, found.reshape(-1).double())
        matrix = matrix.to_dense() if matrix.layout == torch.sparse_csr else matrix
        y = require_measurements(targets, matrix)
        kernels = 8 * found.numel() ** 2 * (sum(len(p.basis) for p in self.blocks.values()) + 8)
        require_memory(
            max(kernels, 16 * found.numel() * self.tangent.size),
            found.device,
            f"the exact kernel of {found.numel()} training outputs and {self.tangent.size} weights",
            "take fewer training outputs. For problems of this size use tu_symmetry.laplace.SampledEvidence, which "
            "multiplies with the Jacobian and never stores it, or LinearizedLaplace",
        )
        self._keep(jacobian(self.tangent, inputs), found, matrix, y)
        self._fingerprint = self.tangent.fingerprint()
        self.phi = self.initial()
        return self

    def _keep(self, rows: Tensor, outputs: Tensor, matrix: Tensor, y: Tensor) -> None:
        """What the evidence needs of the network, whatever the hyperparameters."""
        self.outputs = f = outputs.detach().double().reshape(-1)
        linear = torch.zeros_like(f)  # J theta~
        self.kernels: dict[str, Tensor]  # block to M, [R, d, d]
        self._seconds: dict[str, Tensor] = {}  # block to sum_i t_i t_i^T over the patterns of its trained weights
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("the Jacobian holds NaN or infinite values")
        for name in self.blocks:
            own, t = (self.blocks.patterns(name, values).double() for values in (rows, self.tangent.point()))
            self._seconds[name] = (t.mT @ t).cpu()
            linear += own.flatten(1) @ t.reshape(-1)
        names = list(self.blocks)

        def kernel(k: int) -> Tensor:
            return pattern_kernels(self.blocks.patterns(names[k], rows).double(), self.blocks[names[k]].basis)

        sizes = [float(self.blocks.places[name].numel()) for name in names]
        self.kernels = dict(zip(names, shared(len(names), kernel, costs=sizes), strict=True))
        self._values, self._scale = y.numel(), float(y.square().mean())
        self._residual_squares = float((y - f @ matrix.mT).square().sum())
        self._target, self._rows, self._outside = y - (f - linear) @ matrix.mT, matrix, 0.0
        if len(matrix) > len(f):  # what no output can explain, orthogonal to the range of A = Q R, has variance v
            basis, self._rows = (part.to(f) for part in torch.linalg.qr(matrix.cpu()))
            target, self._target = self._target, basis.mT @ self._target
            self._outside = float((target - basis @ self._target).square().sum())
        r = self._rows
        observed = [torch.stack([r @ own @ r.mT for own in kernels]) for kernels in self.kernels.values()]
        self._observed = torch.cat(observed)
        self._size = self._observed.shape[-1]

    def initial(self, noise_variance: float = 1.0) -> Tensor:
        """Where the blocks start, and a noise variance."""
        own = [prior.initial() for prior in self.blocks.values()]
        return torch.cat([*own, torch.tensor([math.log(noise_variance)], dtype=torch.float64, device="cpu")])

    def bounds(self) -> list[tuple[float, float]]:
        """Limits of each entry; the noise variance between 1e-10 and 1e10 times the measurements' mean square."""
        scale = math.log(max(self._scale, 1e-30))
        return [pair for prior in self.blocks.values() for pair in prior.bounds()] + [(scale - 23.0, scale + 23.0)]

    def split(self, phi: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The blocks' hyperparameters by name, and the log noise variance."""
        if phi.shape != (len(self.names),) or not torch.isfinite(phi.detach()).all():
            raise ValueError(f"phi has to hold {len(self.names)} finite numbers, {self.names}; got {phi.tolist()}")
        pieces = phi.split([*(len(prior.hyperparameters) for prior in self.blocks.values()), 1])
        return dict(zip(self.blocks, pieces, strict=False)), pieces[-1][0]

    @property
    def noise_variance(self) -> float:
        """The variance of the measurements."""
        return math.exp(float(self.phi[-1]))

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every hyperparameter by name, no logarithms: ``{"conv1.variance": ..., "noise_variance": ...}``."""
        return {
            name.replace(".log_", ".").replace(NOISE, "noise_variance"): math.exp(value)
            for name, value in zip(self.names, self.phi.tolist(), strict=True)
        }

    def optimize_evidence(
        self,
        *,
        hyperprior: TotalVariation | None = None,
        optimizer: DualOptimizer = "l-bfgs-b",
        num_steps: int = 1500,
        lr: float = 0.01,
    ) -> DualResult:
        """Choose the hyperparameters by the evidence, with a hyperprior where one is given.

        ``l-bfgs-b`` takes some dozens of evaluations, at most ``num_steps`` iterations; ``adam`` as many steps.

        Warns:
            BoundReachedWarning: hyperparameters that stop at a bound.
        """
        self._require_fit()
        objective = partial(self.value_and_gradient, energy=None if hyperprior is None else self.energy(hyperprior))
        options: Any = {"optimizer": optimizer, "num_steps": num_steps, "lr": lr}
        found = optimize(objective, self.phi, self.bounds(), self.names, **options)
        self.phi = found.phi
        return found

    def log_marginal_likelihood(self) -> float:
        """Log evidence at the present hyperparameters (nats), with all constants and without a hyperprior."""
        self._require_fit()
        return -self.value_and_gradient(self.phi)[0]

    def energy(self, hyperprior: TotalVariation) -> Energy:
        """The hyperprior of this network's outputs."""
        return hyperprior.energy(self.outputs, self.difference_variances, self.blocks)

    def difference_variances(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Variances ``[R, pairs]`` of ``f[second] - f[first]`` for unit coefficients, and the size of what cancels."""
        kernels = self.kernels[name]
        diagonal = kernels.diagonal(dim1=1, dim2=2)
        variances = diagonal[:, first] + diagonal[:, second] - 2 * kernels[:, first, second]
        return variances, diagonal.abs()[:, first] + diagonal.abs()[:, second]

    def value_and_gradient(self, phi: Tensor, energy: Energy | None = None) -> tuple[float, Tensor]:
        """Negative log evidence (nats) plus the energy of a hyperprior where there is one, and the gradient.

        Raises:
            ValueError: covariances of measurements or of a block's prior that are singular to rounding.
        """
        if self.evaluate_at not in ("map", "tangent_mode"):
            raise ValueError(f"evaluate_at={self.evaluate_at!r} is not known; choose 'tangent_mode' or 'map'")
        with torch.enable_grad():
            leaf = phi.detach().double().clone().requires_grad_()
            blocks, log_noise = self.split(leaf)
            joined = torch.cat([self.blocks[name].coefficients(own) for name, own in blocks.items()])
            noise = float(log_noise.detach().exp())
            root = self._factor(joined.detach(), noise)
            inverse = torch.cholesky_inverse(root)
            free = self._values - self._size
            slope, sums = inverse, [root.diagonal().log().sum(), inverse.diagonal().sum()]
            if self.evaluate_at == "tangent_mode":
                weights = inverse @ self._target
                slope = inverse - torch.outer(weights, weights)
                sums += [self._target @ weights, weights.square().sum()]
            # one wait for the device
            here, products = moved([torch.stack(sums), self._observed.flatten(1) @ slope.reshape(-1)], joined.device)
            log_det, trace, *fit = here.tolist()
            value = 2 * log_det + free * math.log(noise) + self._values * _LOG_2PI
            noise_slope = trace + free / noise
            rest = leaf.new_zeros(())
            if self.evaluate_at == "tangent_mode":
                value += fit[0] + self._outside / noise
                noise_slope -= fit[1] + self._outside / noise**2
            else:
                value += self._residual_squares / noise
                noise_slope -= self._residual_squares / noise**2
                for name, own in blocks.items():
                    rest = rest + (torch.cholesky_inverse(self.blocks[name].root(own)) * self._seconds[name]).sum()
                rest = 0.5 * rest
            if energy is not None:
                rest = rest + energy(blocks)
            chained = (joined * (0.5 * products)).sum() + log_noise * (0.5 * noise * noise_slope) + rest
            (gradient,) = torch.autograd.grad(chained, leaf)
        return 0.5 * value + float(rest.detach()), gradient

    def function_covariance(self) -> tuple[Tensor, Tensor]:
        """The training outputs, and the posterior's covariance of all together, without noise: ``[d, d]``, float64."""
        self._require_fit()
        if self.tangent.fingerprint() != self._fingerprint:
            raise RuntimeError(
                "the network's weights have changed since the Laplace approximation was fitted (further training, "
                "or weights loaded into it); fit again, or put the fitted weights back"
            )
        prior = self.prior_covariance(self.phi)
        white = torch.linalg.solve_triangular(self._root(self.phi), self._rows @ prior.mT, upper=False)
        found = prior - white.mT @ white
        return self.outputs.view(self._shape), (found + found.mT) / 2

    def function_samples(self, num_samples: int = 100, *, seed: int = 0, prior: bool = False) -> Tensor:
        """Samples of the training outputs ``[samples, *outputs.shape]`` round the network's own, joint over all.

        ``prior``: of the prior of the tangent model; the others are such samples, corrected.
        """
        self._require_fit()
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        generator, covariance = torch.Generator().manual_seed(seed), self.prior_covariance(self.phi)

        def normal(size: int) -> Tensor:
            drawn = torch.randn(num_samples, size, generator=generator, dtype=torch.float64, device="cpu")
            return drawn.to(covariance)

        values, vectors = torch.linalg.eigh(covariance)  # it may be singular; by the symmetric root, whatever the signs
        drawn = ((normal(len(covariance)) @ vectors) * values.clamp(min=0).sqrt()) @ vectors.mT
        if not prior:
            seen = drawn @ self._rows.mT + math.sqrt(self.noise_variance) * normal(self._size)
            weights = torch.cholesky_solve(seen.unsqueeze(-1), self._root(self.phi)).squeeze(-1)
            drawn = drawn - weights @ (covariance @ self._rows.mT).mT
        return (self.outputs + drawn).view(num_samples, *self._shape)

    def prior_covariance(self, phi: Tensor) -> Tensor:
        """``F = J S J^T`` of the training outputs, ``[d, d]``."""
        found = self.outputs.new_zeros(len(self.outputs), len(self.outputs))
        for name, own in self.split(phi)[0].items():
            found += torch.einsum("r,rij->ij", self.blocks[name].coefficients(own).to(found), self.kernels[name])
        return found

    def _root(self, phi: Tensor) -> Tensor:
        blocks, log_noise = self.split(phi)
        joined = torch.cat([self.blocks[name].coefficients(own) for name, own in blocks.items()])
        return self._factor(joined, math.exp(float(log_noise)))

    def _factor(self, coefficients: Tensor, noise: float) -> Tensor:
        """Cholesky factor of ``R F R^T + v I``, ``[rows, rows]``."""
        kernel = (coefficients.to(self._observed) @ self._observed.flatten(1)).view(self._size, self._size)
        kernel.diagonal().add_(noise)
        root = cholesky(kernel)
        if root is None:
            raise ValueError(
                f"the covariance of the {self._size} observed values is singular to rounding at noise variance "
                f"{noise:.3g}. Raise the noise variance or bound it from below, lower the bounds of the prior "
                "variances, or leave out measurements that repeat others"
            )
        return root

    def _require_fit(self) -> None:
        if not hasattr(self, "phi"):
            raise RuntimeError("this Laplace approximation has not been fitted; call fit([(inputs, targets)]) first")
