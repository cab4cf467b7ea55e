"""Exact linearized Laplace for few outputs and many weights, with structured priors and linear observations."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    DualStatistics,
    optimize,
    statistics,
)
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, jacobian
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.priors import IsotropicPrior, StructuredPrior
from tu_symmetry.laplace.groups import prior_groups
from tu_symmetry.laplace.inputs import arguments, batch_size, mapped, ordinary
from tu_symmetry.laplace.links import GaussianPredictive
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.tangent import evaluating, require_independent_samples, select_parameters
from tu_symmetry.memory import require_memory
from tu_symmetry.symmetry.randomness import leaves_randomness

DualPrior = Literal["per_layer", "single"]


@dataclass(frozen=True, eq=False)
class DualPredictive:
    """A Gaussian over all outputs together.

    Attributes:
        mean: the network's outputs, in their shape.
        covariance: covariance of the flattened outputs ``[d, d]``, float64, without noise.
        noise_variance: variance of the measurements; that of the outputs only where they are measured themselves.
    """

    mean: Tensor
    covariance: Tensor
    noise_variance: float

    @property
    def variance(self) -> Tensor:
        """Marginal variances in the outputs' shape."""
        return self.covariance.diagonal().clamp(min=0).view(self.mean.shape)

    def log_density(self, target: Tensor, *, extra_variance: float = 0.0) -> float:
        """``log N(target; mean, covariance + extra_variance I)`` in nats, all outputs together."""
        if target.numel() != self.mean.numel() or not torch.isfinite(target).all():
            raise ValueError(
                f"the target has shape {tuple(target.shape)}, the outputs {tuple(self.mean.shape)}; it has to be as "
                "large, and finite"
            )
        return gaussian_log_density(
            (target.to(self.mean) - self.mean).reshape(-1).double(), self.covariance, extra_variance
        )


def gaussian_log_density(error: Tensor, covariance: Tensor, extra_variance: float = 0.0) -> float:
    """``log N(error; 0, covariance + extra_variance I)`` (nats)."""
    full = covariance.double() + extra_variance * torch.eye(len(covariance), device="cpu").to(covariance.double())
    root = cholesky(full)
    if root is None:
        raise ValueError(
            f"the predictive covariance is singular to rounding (smallest marginal variance "
            f"{float(full.diagonal().min()):.3g}): outputs that no weight moves have variance 0. Add the noise that "
            "the outputs have themselves with extra_variance=..."
        )
    white = torch.linalg.solve_triangular(root, error.to(full).unsqueeze(1), upper=False)
    return -0.5 * float(white.square().sum() + len(full) * math.log(2 * math.pi)) - float(root.diagonal().log().sum())


class DualLaplace:
    """Linearized Laplace in the space of outputs: exact, for at most some thousands of outputs and any weights.

    Small regression sets (500 samples, a million weights) and single images that are reconstructed from linear
    measurements are the cases it is made for. The posterior over all linearized weights is exact, not factorized;
    memory is ``d^2`` for each block and distance of the prior, ``d`` being the number of all training outputs.

    Args:
        model: the trained network; it is never edited and has to keep its weights while this object is used. It runs
            in evaluation mode; outputs may have any shape.
        structured: priors of blocks of weights (:class:`KernelPrior`, :class:`IsotropicPrior`, or your own).
        prior: that of the other parameters, isotropic: ``per_layer`` or ``single``. None where ``structured`` covers
            what there is to be linearized; then all other parameters are fixed.
        observation: that of all training outputs together, flattened; None to measure the outputs themselves.
        parameters: names, or prefixes of names, of the parameters to be uncertain; None for all that require a
            gradient, or those of ``structured`` with ``prior=None``.
        evaluate_at: where the evidence is evaluated, ``map`` (the trained weights) or ``tangent_mode``.
        noise_variance: variance of the measurements; None to find it by the evidence (and 1 until then).

    Attributes:
        priors: the blocks, once fitted.
        statistics: what the evidence is computed from, once fitted.
        phi: the hyperparameters' logarithms, float64.
        names: names of the entries of ``phi``.

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
        parameters: Sequence[str] | None = None,
        evaluate_at: EvaluateAt = "tangent_mode",
        noise_variance: float | None = None,
    ) -> None:
        require_module(model)
        if prior not in (None, "per_layer", "single"):
            raise ValueError(f"prior={prior!r} is not known; choose 'per_layer', 'single', or None")
        if evaluate_at not in ("tangent_mode", "map"):
            raise ValueError(f"evaluate_at={evaluate_at!r} is not known; choose one of ('tangent_mode', 'map')")
        if prior is None and not structured:
            raise ValueError("prior=None needs structured=[...]: nothing would be uncertain")
        if noise_variance is not None and not (noise_variance > 0 and math.isfinite(noise_variance)):
            raise ValueError(f"noise_variance={noise_variance} has to be positive and finite")
        self.model, self.structured, self.prior = model, tuple(structured), prior
        self.observation = LinearObservation() if observation is None else observation
        self.evaluate_at = evaluate_at
        self.noise_fixed, self._noise = noise_variance is not None, 1.0 if noise_variance is None else noise_variance
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.structured = tuple(own.resolve(shapes) for own in self.structured)
        taken = [name for own in self.structured for name in own.parameters]
        if prior is None and parameters is None:
            chosen = select_parameters(model, taken)
        else:
            chosen = select_parameters(model, None if parameters is None else [*parameters])
            outside = [name for name in taken if name not in chosen]
            if outside:
                raise ValueError(f"structured priors name {outside[:6]}, which parameters=[...] leaves out")
            if prior is None and set(chosen) != set(taken):
                lacking = [name for name in chosen if name not in taken]
                raise ValueError(f"prior=None, but no structured prior covers {lacking[:6]}")
        self.tangent = FlatTangentModel(model, chosen)
        self.priors: tuple[StructuredPrior, ...] = ()
        self._evidence: DualEvidence | None = None
        self._data: tuple[list[Any], Tensor] | None = None

    # ------------------------------------------------------------------ fitting

    @leaves_randomness
    def fit(
        self, train_loader: Iterable[Any], *, progress: Callable[[dict[str, Any]], None] | None = None
    ) -> DualLaplace:
        """Take the Jacobian of all training outputs, and keep what the evidence needs of it.

        Args:
            train_loader: batches ``(inputs, targets)``. Without an observation targets have the outputs' shape; with
                one they are all measurements, given with the only batch: ``[(x, y)]``.
            progress: called after each batch with ``{"stage", "batch", "outputs"}``.
        """
        select_parameters(self.model, list(self.tangent.names))  # finite weights
        require_weights(self.model, self.tangent.names)
        require_independent_samples(self.model)
        device = next(self.model.parameters()).device
        seen: list[Any] = []
        targets: list[Tensor] = []
        rows: list[dict[str, Tensor]] = []
        found: list[Tensor] = []
        for number, (inputs, target) in enumerate(batches(train_loader, device)):
            if seen and not self.observation.is_identity:
                raise ValueError(
                    "an observation maps all outputs together: give all inputs in one batch, [(inputs, measurements)]"
                )
            with torch.inference_mode(False), evaluating(self.model):
                outputs = self.tangent.outputs(inputs)
            if self.observation.is_identity:
                if target.numel() != outputs.numel() or len(target) != len(outputs):
                    raise ValueError(
                        f"targets have shape {tuple(target.shape)}, the network's outputs {tuple(outputs.shape)} when "
                        "flattened; they need to be equal. Give observation=... where other values are measured"
                    )
            else:
                self.observation.check_sizes(outputs.numel(), target.numel())
            self._require_memory(sum(f.numel() for f in found) + outputs.numel())
            seen.append(inputs)
            found.append(outputs.reshape(-1))
            targets.append(target.detach().reshape(-1))
            with torch.inference_mode(False):
                rows.append(jacobian(self.tangent, inputs))
            if progress is not None:
                progress({"stage": "jacobian", "batch": number + 1, "outputs": sum(f.numel() for f in found)})
        joined = {name: torch.cat([own[name] for own in rows]) for name in self.tangent.names}
        rows.clear()
        self.priors = self._blocks()
        values = statistics(joined, self.tangent.parameters(), torch.cat(found), self.priors)
        self._take(values, torch.cat(targets), seen, self.tangent.fingerprint())
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
            IsotropicPrior(tuple(names), name=f"{label} (rest)" if label in used else label)
            for label, names in members.items()
        )

    def _take(self, values: DualStatistics, measurements: Tensor, inputs: list[Any], fingerprint: str) -> None:
        self.statistics, self._data, self.fingerprint = values, (inputs, measurements), fingerprint
        self._evidence = DualEvidence(values, self.priors, measurements, self.observation, evaluate_at=self.evaluate_at)
        self.phi = self._evidence.initial(self._noise)

    def evaluated_at(self, evaluate_at: EvaluateAt) -> DualLaplace:
        """The same Jacobian and measurements, the evidence evaluated elsewhere, at the hyperparameters of the start."""
        if self._data is None:
            raise RuntimeError("this Laplace approximation has not been fitted; call fit([(inputs, targets)]) first")
        other = copy.copy(self)
        other.evaluate_at = evaluate_at
        inputs, measurements = self._data
        other._take(self.statistics, measurements, inputs, self.fingerprint)
        return other

    @property
    def evidence(self) -> DualEvidence:
        """The evidence as a function of the hyperparameters, on the device that the network is on."""
        if self._evidence is None or self._data is None:
            raise RuntimeError("this Laplace approximation has not been fitted; call fit([(inputs, targets)]) first")
        device = next(self.model.parameters()).device
        if self.statistics.outputs.device != device:  # the network has been moved since
            phi, (inputs, measurements) = self.phi, self._data
            moved = [_moved(own, device) for own in inputs]
            self._take(self.statistics.on(device), measurements.to(device), moved, self.fingerprint)
            self.phi = phi
        return self._evidence

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the entries of ``phi``."""
        return self.evidence.names

    @property
    def noise_variance(self) -> float:
        """The variance of the measurements."""
        self.evidence  # noqa: B018  (fitted at all)
        return math.exp(float(self.phi[-1]))

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every hyperparameter by name, no logarithms: ``{"conv1.variance": ..., "noise_variance": ...}``."""
        return {
            name.replace(".log_", ".").replace(NOISE, "noise_variance"): math.exp(value)
            for name, value in zip(self.names, self.phi.tolist(), strict=True)
        }

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        """Set some of :attr:`hyperparameters`."""
        known = list(self.hyperparameters)
        phi = self.phi.clone()
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{name!r} is no hyperparameter; there are {known}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} has to be positive and finite")
            phi[known.index(name)] = math.log(value)
        self.phi = phi

    def optimize_evidence(
        self,
        *,
        hyperprior: DualHyperprior | None = None,
        optimizer: DualOptimizer = "l-bfgs-b",
        num_steps: int = 1500,
        lr: float = 0.01,
        fixed: Sequence[str] = (),
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> DualResult:
        """Choose the hyperparameters by the evidence, with a hyperprior where one is given.

        Args:
            hyperprior: ``hyperprior(coefficients, context)``, a negative log density (nats); see
                :class:`tu_symmetry.laplace.dual.hyperpriors.TotalVariation`.
            optimizer: ``l-bfgs-b`` or ``adam``.
            num_steps: steps of Adam; the most iterations of L-BFGS-B.
            lr: learning rate of Adam.
            fixed: names of hyperparameters that stay, as in :attr:`hyperparameters`.
            progress: called after each evaluation.

        Warns:
            BoundReachedWarning: hyperparameters that stop at a bound.
        """
        evidence = DualEvidence(
            self.evidence.statistics,
            self.priors,
            self.evidence.measurements,
            self.observation,
            evaluate_at=self.evaluate_at,
            hyperprior=hyperprior,
        )
        known = dict(zip(self.hyperparameters, self.names, strict=True))
        wrong = [name for name in fixed if name not in known]
        if wrong:
            raise ValueError(f"{wrong} are no hyperparameters; there are {list(known)}")
        still = {known[name] for name in fixed} | ({NOISE} if self.noise_fixed else set())
        found = optimize(
            evidence,
            self.phi,
            optimizer=optimizer,
            fixed=sorted(still),
            num_steps=num_steps,
            lr=lr,
            progress=progress,
        )
        self.phi = found.phi
        return found

    def log_marginal_likelihood(self) -> float:
        """Log evidence at the present hyperparameters (nats), with all constants and without a hyperprior."""
        return -self.evidence.value(self.phi)

    # ------------------------------------------------------------------ prediction

    def predictive(self, inputs: Any = None) -> DualPredictive:
        """The Gaussian over all outputs of ``inputs`` together.

        Args:
            inputs: a batch; None for the training inputs, which needs no Jacobian.
        """
        evidence = self.evidence
        if inputs is None:
            assert self._data is not None
            shape = self._output_shape(self._data[0])
            mean = evidence.statistics.outputs.view(shape)
            return DualPredictive(mean, evidence.posterior_covariance(self.phi), self.noise_variance)
        mean, prior, cross = self._joint(inputs)
        covariance = prior - evidence.explained(self.phi, cross, cross)
        return DualPredictive(mean.double(), (covariance + covariance.mT) / 2, self.noise_variance)

    def marginals(self, inputs: Any) -> GaussianPredictive:
        """Mean, variance with noise and without, of every output by itself, as ``LinearizedLaplace`` has it."""
        found = self.predictive(inputs)
        return GaussianPredictive(found.mean, found.variance + found.noise_variance, found.variance)

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
        generator = torch.Generator().manual_seed(seed)
        evidence = self.evidence
        if inputs is None:
            assert self._data is not None
            shape = self._output_shape(self._data[0])
            drawn = evidence.deviations(self.phi, num_samples, generator, prior=prior)
            return (evidence.statistics.outputs + drawn).view(num_samples, *shape)
        mean, own, cross = self._joint(inputs)
        covariance = own if prior else own - evidence.explained(self.phi, cross, cross)
        drawn = evidence.draw((covariance + covariance.mT) / 2, num_samples, generator)
        return (mean.double().reshape(-1) + drawn).view(num_samples, *mean.shape)

    def _joint(self, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of a batch, their prior covariance, and that with the training outputs ``[own, d]``."""
        self._require_weights()
        assert self._data is not None
        inputs = _moved(ordinary(inputs), next(self.model.parameters()).device)
        if batch_size(inputs) == 0:
            raise ValueError("the batch holds no samples, so that there is nothing to predict")
        with torch.inference_mode(False):
            rows = jacobian(self.tangent, inputs)
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
                seen = [self.tangent.jvps(own, weighted.to(plain)).flatten(1) for own in self._data[0]]
        return mean, plain.double() @ weighted.double().mT, torch.cat(seen, dim=1).double()

    def _outputs(self, inputs: Any) -> Tensor:
        with torch.no_grad():
            args, kwargs = arguments(inputs)
            return self.model(*args, **kwargs)

    def _output_shape(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        self._require_weights()
        with torch.inference_mode(False), evaluating(self.model):
            shapes = [tuple(self._outputs(own).shape) for own in inputs]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _require_weights(self) -> None:
        if self.tangent.fingerprint() != self.fingerprint:
            raise RuntimeError(
                "the network's weights have changed since the Laplace approximation was fitted (further training, "
                "or weights loaded into it); fit again, or put the fitted weights back"
            )


def _moved(inputs: Any, device: torch.device) -> Any:
    return mapped(lambda own: own.to(device), inputs)
