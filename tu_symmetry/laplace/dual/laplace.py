"""Exact linearized Laplace for few outputs and many weights, with structured priors and linear observations."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.checks import require_module, require_weights
from tu_symmetry.laplace.data import batches
from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.dual.evidence import (
    NOISE,
    DualEvidence,
    DualHyperprior,
    DualOptimizer,
    DualResult,
    draw,
    optimize,
    statistics,
)
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, jacobian
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.priors import IsotropicPrior, StructuredPrior
from tu_symmetry.laplace.groups import prior_groups
from tu_symmetry.laplace.inputs import arguments, batch_size, mapped, ordinary
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.tangent import evaluating, require_independent_samples, select_parameters
from tu_symmetry.memory import require_memory
from tu_symmetry.symmetry.randomness import leaves_randomness

DualPrior = Literal["per_layer", "single"]


@dataclass(frozen=True, eq=False)
class DualPredictive:
    """A Gaussian over all outputs together, without noise."""

    mean: Tensor  # the network's outputs, in their shape
    covariance: Tensor  # of the flattened outputs, [d, d], float64
    noise_variance: float  # of the measurements

    @property
    def variance(self) -> Tensor:
        """Marginal variances in the outputs' shape."""
        return self.covariance.diagonal().clamp(min=0).view(self.mean.shape)


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
    return -0.5 * float(white.square().sum() + len(full) * math.log(2 * math.pi)) - float(root.diagonal().log().sum())


class DualLaplace:
    """Linearized Laplace in the space of outputs: exact, for at most some thousands of training outputs ``d``.

    The posterior over all linearized weights is not factorized; memory is ``d^2`` for each block and distance.

    Args:
        model: the trained network, with outputs of any shape; it has to keep its weights and its device.
        structured: priors of blocks of weights (:class:`KernelPrior`, :class:`IsotropicPrior`).
        prior: that of the other parameters that require a gradient, isotropic: ``per_layer`` or ``single``. None fixes
            them.
        observation: that of all training outputs together, flattened; None to measure the outputs themselves.
        evaluate_at: where the evidence is evaluated, ``map`` (the trained weights) or ``tangent_mode``.

    Attributes:
        priors: the blocks, once fitted.
        statistics: what the evidence is computed from, once fitted.
        phi: the hyperparameters' logarithms, float64.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)).double()
        >>> x, y = torch.randn(6, 1, 4, 4).double(), torch.randn(6, 1).double()
        >>> la = DualLaplace(network, structured=[tus.laplace.KernelPrior(["0.weight"])], prior="per_layer")
        >>> found = la.fit([(x, y)]).optimize_evidence()
        >>> la.predictive(x).variance.shape
        torch.Size([6, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        structured: Sequence[StructuredPrior] = (),
        prior: DualPrior | None = "per_layer",
        observation: LinearObservation | None = None,
        evaluate_at: EvaluateAt = "tangent_mode",
    ) -> None:
        require_module(model)
        if prior not in (None, "per_layer", "single"):
            raise ValueError(f"prior={prior!r} is not known; choose 'per_layer', 'single', or None")
        if evaluate_at not in ("tangent_mode", "map"):
            raise ValueError(f"evaluate_at={evaluate_at!r} is not known; choose one of ('tangent_mode', 'map')")
        if prior is None and not structured:
            raise ValueError("prior=None needs structured=[...]: nothing would be uncertain")
        self.model, self.prior, self.evaluate_at = model, prior, evaluate_at
        self.observation = LinearObservation() if observation is None else observation
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.structured = tuple(own.resolve(shapes) for own in structured)
        taken = [name for own in self.structured for name in own.parameters]
        self.tangent = FlatTangentModel(model, select_parameters(model, taken if prior is None else None))
        self.priors: tuple[StructuredPrior, ...] = ()
        self._evidence: DualEvidence | None = None
        self._inputs: list[Any] = []

    @leaves_randomness
    def fit(self, train_loader: Iterable[Any]) -> DualLaplace:
        """Take the Jacobian of all training outputs, and keep what the evidence needs of it.

        Args:
            train_loader: batches ``(inputs, targets)``. Without an observation targets have the outputs' shape; with
                one they are all measurements, given with the only batch: ``[(x, y)]``.
        """
        select_parameters(self.model, list(self.tangent.names))  # finite weights
        require_weights(self.model, self.tangent.names)
        require_independent_samples(self.model)
        device, direct = next(self.model.parameters()).device, self.observation.matrix is None
        self._inputs = []
        targets: list[Tensor] = []
        rows: list[dict[str, Tensor]] = []
        found: list[Tensor] = []
        for inputs, target in batches(train_loader, device):
            if self._inputs and not direct:
                raise ValueError("an observation maps all outputs together: give one batch, [(inputs, measurements)]")
            with torch.inference_mode(False), evaluating(self.model):
                outputs, shape = self.tangent.outputs(inputs), self._outputs(inputs).shape
            if direct and (target.numel(), len(target)) != (outputs.numel(), len(outputs)):
                raise ValueError(
                    f"targets have shape {tuple(target.shape)}, the network's outputs {tuple(outputs.shape)} when "
                    "flattened; they need to be equal. Give observation=... where other values are measured"
                )
            self.observation.check_sizes(outputs.numel(), target.numel())
            self._inputs.append(inputs)
            found.append(outputs.reshape(-1))
            targets.append(target.detach().reshape(-1))
            self._require_memory(sum(f.numel() for f in found))
            with torch.inference_mode(False):
                rows.append(jacobian(self.tangent, inputs))
        joined = {name: torch.cat([own[name] for own in rows]) for name in self.tangent.names}
        rows.clear()
        self.priors, self._shape = self._blocks(), (-1, *shape[1:])
        self.statistics = statistics(joined, self.tangent.parameters(), torch.cat(found), self.priors)
        self._fingerprint = self.tangent.fingerprint()
        self._evidence = DualEvidence(
            self.statistics, self.priors, torch.cat(targets), self.observation, evaluate_at=self.evaluate_at
        )
        self.phi = self._evidence.initial()
        return self

    def _require_memory(self, outputs: int) -> None:
        kernels = 8 * outputs**2 * (sum(len(p.basis) for p in self.structured) + 8)
        rows = 16 * outputs * self.tangent.size
        require_memory(
            max(kernels, rows),
            self.tangent.point().device,
            f"the exact kernel of {outputs} training outputs and {self.tangent.size} weights",
            "take fewer training outputs. For problems of this size use tu_symmetry.laplace.SampledEvidence, which "
            "multiplies with the Jacobian and never stores it, or LinearizedLaplace",
        )

    def _blocks(self) -> tuple[StructuredPrior, ...]:
        """The structured priors, and isotropic ones for everything else."""
        taken = {name for own in self.structured for name in own.parameters}
        slots = {name: slot for name, slot in self.tangent.slots.items() if name not in taken}
        if not slots or self.prior is None:
            return self.structured
        groups = prior_groups(slots, self.prior)
        members: dict[str, list[str]] = {}
        for name, number in groups.of.items():
            members.setdefault(groups.names[int(number)], []).append(name)
        used = {own.name for own in self.structured}
        return self.structured + tuple(
            IsotropicPrior(names, name=f"{label} (rest)" if label in used else label)
            for label, names in members.items()
        )

    def evaluated_at(self, evaluate_at: EvaluateAt) -> DualLaplace:
        """The same Jacobian and measurements, the evidence evaluated elsewhere, at the hyperparameters of the start."""
        other = copy.copy(self)
        other.evaluate_at = evaluate_at
        other._evidence = self.evidence.like(evaluate_at=evaluate_at)
        other.phi = other._evidence.initial()
        return other

    @property
    def evidence(self) -> DualEvidence:
        """The evidence as a function of the hyperparameters."""
        if self._evidence is None:
            raise RuntimeError("this Laplace approximation has not been fitted; call fit([(inputs, targets)]) first")
        return self._evidence

    @property
    def noise_variance(self) -> float:
        """The variance of the measurements."""
        return math.exp(float(self.phi[-1]))

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every hyperparameter by name, no logarithms: ``{"conv1.variance": ..., "noise_variance": ...}``."""
        return {
            name.replace(".log_", ".").replace(NOISE, "noise_variance"): math.exp(value)
            for name, value in zip(self.evidence.names, self.phi.tolist(), strict=True)
        }

    def optimize_evidence(
        self,
        *,
        hyperprior: DualHyperprior | None = None,
        optimizer: DualOptimizer = "l-bfgs-b",
        num_steps: int = 1500,
        lr: float = 0.01,
    ) -> DualResult:
        """Choose the hyperparameters by the evidence, with a hyperprior where one is given.

        Args:
            hyperprior: ``hyperprior(coefficients, context)``, a negative log density (nats); see
                :class:`tu_symmetry.laplace.TotalVariation`.
            optimizer: ``l-bfgs-b``, some dozens of evaluations, or ``adam``, a fixed number of steps.
            num_steps: steps of Adam; the most iterations of L-BFGS-B.
            lr: learning rate of Adam.

        Warns:
            BoundReachedWarning: hyperparameters that stop at a bound.
        """
        evidence = self.evidence.like(evaluate_at=self.evaluate_at, hyperprior=hyperprior)
        found = optimize(evidence, self.phi, optimizer=optimizer, num_steps=num_steps, lr=lr)
        self.phi = found.phi
        return found

    def log_marginal_likelihood(self) -> float:
        """Log evidence at the present hyperparameters (nats), with all constants and without a hyperprior."""
        return -self.evidence.value(self.phi)

    def predictive(self, inputs: Any = None) -> DualPredictive:
        """The Gaussian over all outputs of a batch together; None for the training inputs, which needs no Jacobian."""
        if inputs is None:
            self._require_weights()
            mean = self.evidence.statistics.outputs.view(self._shape)
            return DualPredictive(mean, self.evidence.posterior_covariance(self.phi), self.noise_variance)
        mean, prior, cross = self._joint(inputs)
        return DualPredictive(mean.double(), self.evidence.corrected(self.phi, prior, cross), self.noise_variance)

    def function_samples(
        self, inputs: Any = None, num_samples: int = 100, *, seed: int = 0, prior: bool = False
    ) -> Tensor:
        """Samples of the outputs ``[samples, *outputs.shape]`` round the network's own, joint over all inputs.

        Args:
            inputs: a batch; None for the training inputs.
            num_samples: how many.
            seed: seed of the samples.
            prior: samples of the prior of the tangent model, instead of the posterior.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        generator, evidence = torch.Generator().manual_seed(seed), self.evidence
        if inputs is None:
            drawn = evidence.deviations(self.phi, num_samples, generator, prior=prior)
            return (evidence.statistics.outputs + drawn).view(num_samples, *self._shape)
        mean, own, cross = self._joint(inputs)
        covariance = (own + own.mT) / 2 if prior else evidence.corrected(self.phi, own, cross)
        drawn = draw(covariance, num_samples, generator)
        return (mean.double().reshape(-1) + drawn).view(num_samples, *mean.shape)

    def _joint(self, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of a batch, their prior covariance, and that with the training outputs ``[own, d]``."""
        self._require_weights()
        device = next(self.model.parameters()).device
        inputs = mapped(lambda own: own.to(device), ordinary(inputs))
        if batch_size(inputs) == 0:
            raise ValueError("the batch holds no samples, so that there is nothing to predict")
        with torch.inference_mode(False):
            rows: Mapping[str, Tensor] = jacobian(self.tangent, inputs)
            phi = self.evidence.split(self.phi)[0]
            flat = {name: own.reshape(len(own), -1) for name, own in rows.items()}
            spread: dict[str, Tensor] = {}
            for prior in self.priors:
                joined = torch.cat([flat[name] for name in prior.parameters], dim=1)
                parts = prior.product(phi[prior.name], joined)
                lengths = [flat[name].shape[1] for name in prior.parameters]
                spread |= dict(zip(prior.parameters, parts.split(lengths, dim=1), strict=True))
            weighted = torch.cat([spread[name] for name in self.tangent.names], dim=1)
            plain = torch.cat([flat[name] for name in self.tangent.names], dim=1)
            with evaluating(self.model):
                mean = self._outputs(inputs)
                seen = [self.tangent.jvps(own, weighted.to(plain)).flatten(1) for own in self._inputs]
        return mean, plain.double() @ weighted.double().mT, torch.cat(seen, dim=1).double()

    @torch.no_grad()
    def _outputs(self, inputs: Any) -> Tensor:
        args, kwargs = arguments(inputs)
        found: Tensor = self.model(*args, **kwargs)
        return found

    def _require_weights(self) -> None:
        if self.tangent.fingerprint() != self._fingerprint:
            raise RuntimeError(
                "the network's weights have changed since the Laplace approximation was fitted (further training, "
                "or weights loaded into it); fit again, or put the fitted weights back"
            )
