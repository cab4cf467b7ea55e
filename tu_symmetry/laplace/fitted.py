"""A fitted Laplace approximation as one frozen object, which evidence, prediction, files and conversions work on.

Another precision, another curvature or another ``theta*`` is another object that shares the rest with the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.blocks import Block, Posterior
from tu_symmetry.laplace.curvature import Options, Summary, form_of
from tu_symmetry.laplace.determinants import FLAT, Determinants, Hyperprior, Noise, determinants
from tu_symmetry.laplace.groups import Prior, PriorGroups, centers
from tu_symmetry.laplace.hooks import find_layers
from tu_symmetry.laplace.layers import Layer
from tu_symmetry.laplace.likelihood import Likelihood
from tu_symmetry.laplace.mode import EvaluateAt, Mode
from tu_symmetry.laplace.report import GroupReport
from tu_symmetry.laplace.tangent import TangentModel


@dataclass(frozen=True, eq=False)
class FittedCurvature:
    """What the passes over the training data have given."""

    blocks: tuple[Block, ...]  # in the order of the flat parameter vector
    summary: Summary
    groups: PriorGroups
    whole: tuple[str, ...] = ()  # parameters without Kronecker factors that have an exact block

    @cached_property
    def determinants(self) -> Determinants:
        """What the evidence needs of the blocks; found once for each curvature."""
        return determinants(self.blocks, self.groups)


@dataclass(frozen=True, eq=False)
class FittedLaplace:
    """A network, the curvature at its weights, prior precisions, and the weights that the evidence is evaluated at."""

    tangent: TangentModel
    likelihood: Likelihood
    options: Options
    curvature: FittedCurvature
    prior: Prior
    evaluate_at: EvaluateAt
    center: Tensor  # the hyperprior's center of each precision, float64 [groups]
    log_precision: Tensor  # float64 [groups]
    solution: Mode
    state: Mapping[str, Tensor]  # a copy of the network's weights and buffers at the fit
    noise_variance: float = 1.0  # of a regression
    noise_fixed: bool = False  # whether the noise variance was given
    hyperprior: Hyperprior = FLAT
    temperature: float = 1.0  # factor of the posterior covariance in predictions; the evidence knows nothing of it
    sharpness: float = 1.0  # power of the likelihood in predictions: logits times it, the noise's variance over it

    @classmethod
    def begin(
        cls,
        tangent: TangentModel,
        likelihood: Likelihood,
        options: Options,
        curvature: FittedCurvature,
        *,
        prior: Prior,
        evaluate_at: EvaluateAt,
        **attributes: Any,
    ) -> FittedLaplace:
        """An approximation of a network with its present weights; refuses layers that have no Kronecker factors."""
        point = tangent.point()
        center, mode = centers(curvature.groups, point), Mode.at(point, curvature.summary.loss, evaluate_at)
        state = {name: tensor.clone() for name, tensor in tangent.state().items()}
        found = cls(tangent, likelihood, options, curvature, prior, evaluate_at, center, center.log(), mode, state)
        _ = found.layers
        return replace(found, **attributes)

    def begun_at(self, evaluate_at: EvaluateAt) -> FittedLaplace:
        """The same curvature, with precisions at their centers, before any evidence."""
        return FittedLaplace.begin(
            self.tangent,
            self.likelihood,
            self.options,
            self.curvature,
            prior=self.prior,
            evaluate_at=evaluate_at,
            noise_variance=self.noise_variance,
            noise_fixed=self.noise_fixed,
        )

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.tangent.model

    @property
    def groups(self) -> PriorGroups:
        """Which weights share a precision."""
        return self.curvature.groups

    @property
    def summary(self) -> Summary:
        """Number of samples and outputs, and the loss at the linearization point."""
        return self.curvature.summary

    @property
    def theta(self) -> Tensor:
        """The weights that the evidence is evaluated at: ``[size]``."""
        return self.solution.theta

    @property
    def log_noise(self) -> float:
        """Log of the noise variance."""
        return math.log(self.noise_variance)

    @property
    def noisy(self) -> bool:
        """Whether observations have a noise variance that the evidence finds."""
        return self.likelihood.noisy

    @property
    def predictive_noise(self) -> float:
        """The noise variance of predictions, around the network's outputs: the given one, or that of its residuals.

        The evidence's belongs to the tangent model's mode, and to as many directions as the curvature makes of them.
        """
        residual = 2 * self.summary.loss / (self.summary.samples * self.summary.outputs)
        return self.noise_variance if self.noise_fixed or not self.noisy or residual == 0 else residual

    @cached_property
    def posterior(self) -> Posterior:
        """The Gaussian over the weights that predictions are made with (its mean is the linearization point)."""
        return Posterior(self.curvature.blocks, self.log_precision, self.predictive_noise)

    @cached_property
    def layers(self) -> tuple[Layer, ...] | None:
        """The layers of Kronecker factors; None for another curvature."""
        if form_of(self.tangent, self.options) != "kfac":
            return None
        return tuple(find_layers(self.model, [n for n in self.tangent.names if n not in self.curvature.whole]))

    def require_weights(self) -> None:
        """Refuse a network whose weights are no longer those of the fit; edits of ``weight.data`` leave no trace."""
        now = self.tangent.state()
        if now.keys() == self.state.keys() and all(_equal(now[name], kept) for name, kept in self.state.items()):
            return
        raise RuntimeError(
            "the network's weights have changed since the Laplace approximation was fitted (further training, or "
            "weights loaded into it); fit again, or put the fitted weights back"
        )

    def on(self, device: torch.device) -> FittedLaplace:
        """The same for the network on a device, to which it has been moved; itself where it lies there already."""
        if self.theta.device == device:
            return self
        return replace(
            self,
            curvature=replace(self.curvature, blocks=tuple(block.on(device) for block in self.curvature.blocks)),
            solution=replace(self.solution, theta=self.theta.to(device)),
            state={name: tensor.to(device) for name, tensor in self.state.items()},
        )

    def with_hyperparameters(self, log_precision: Tensor, noise_variance: float | None = None) -> FittedLaplace:
        """Other log precisions ``[groups]``, and noise variance where it is given.

        At ``tangent_mode`` the weights are those found last, no solution any more; the temperature is 1 again.
        """
        noise = self.noise_variance if noise_variance is None else noise_variance
        found = replace(self, log_precision=log_precision, noise_variance=noise)
        if noise == self.noise_variance and torch.equal(log_precision, self.log_precision):
            return found
        found = found.uncalibrated()  # the temperature was chosen for the others
        return found.with_theta(self.theta) if self.evaluate_at == "tangent_mode" else found

    def uncalibrated(self) -> FittedLaplace:
        """The same at temperature and sharpness 1."""
        return replace(self, temperature=1.0, sharpness=1.0)

    def with_solution(self, solution: Mode) -> FittedLaplace:
        """Other weights that the evidence is evaluated at."""
        return replace(self, solution=solution)

    def with_theta(self, theta: Tensor) -> FittedLaplace:
        """Weights ``[size]`` to go on from, of which it is not known how well they solve their problem."""
        solution = replace(self.solution, theta=theta.to(self.theta), gradient_norm=math.nan, converged=False)
        return self.with_solution(solution)

    def with_curvature(self, blocks: Sequence[Block], summary: Summary) -> FittedLaplace:
        """Another curvature of the same network over the same prior groups; precisions and weights stay."""
        curvature = replace(self.curvature, blocks=tuple(blocks), summary=summary)
        return replace(self.uncalibrated(), curvature=curvature)

    def with_tangent(self, tangent: TangentModel) -> FittedLaplace:
        """Another way to the same network's Jacobian products, stored ones for example."""
        if tangent.model is not self.model or tangent.slots != self.tangent.slots:
            raise ValueError("the other tangent model is of another network, or of other parameters of this one")
        return replace(self, tangent=tangent)

    def restarted(self, *, evaluate_at: EvaluateAt) -> FittedLaplace:
        """The same curvature with the precisions and weights of a fresh fit, for the evidence at either place."""
        return replace(
            self.uncalibrated(),
            evaluate_at=evaluate_at,
            log_precision=self.center.log(),
            noise_variance=self.noise_variance if self.noise_fixed else 1.0,
            hyperprior=FLAT,
            solution=Mode.at(self.tangent.point(), self.summary.loss, evaluate_at),
        )

    def noise(self, mode: Mode) -> Noise | None:
        """A regression's observations and squared residuals; None for another likelihood."""
        if not self.noisy:
            return None
        return Noise(self.summary.samples * self.summary.outputs, 2 * mode.loss)

    def log_evidence(self) -> float:
        """``log Z`` at the weights of :attr:`solution`, all constants included (nats)."""
        noise = self.noise(self.solution)
        data = self.solution.loss if noise is None else noise.energy(self.log_noise)
        norms = self.groups.total(self.theta.double().square())
        ridge = float((self.log_precision.exp() * norms).sum())
        ratio = self.curvature.determinants.log_det_ratio(self.log_precision, self.log_noise)
        return -data - 0.5 * (ridge + ratio)

    def objective(self) -> float:
        """Negative log evidence less the log hyperprior (nats): what precisions and weights are chosen to minimize."""
        return self.hyperprior.energy(self.log_precision, self.center.log()) - self.log_evidence()

    def gamma(self) -> Tensor:
        """Effective number of determined directions of every group, float64 ``[groups]``."""
        return self.curvature.determinants.gamma(self.log_precision, self.log_noise)

    def report(self) -> list[GroupReport]:
        """Precision, determined directions and squared norm of every prior group."""
        gamma = self.gamma()
        norms = self.groups.total(self.theta.double().square())
        bound = math.log(self.hyperprior.cap) * (1 - 1e-9)
        away = self.log_precision - self.center.log()
        pruned = (away >= bound) | (gamma < 0.5)
        columns = (
            self.groups.sizes.long(), self.log_precision.exp(), self.center, gamma, norms, away.abs() >= bound, pruned
        )  # fmt: skip
        return [GroupReport(*row) for row in zip(self.groups.names, *(c.tolist() for c in columns), strict=True)]


def _equal(now: Tensor, kept: Tensor) -> bool:
    """Whether two tensors are the same, NaN in the same places."""
    if now.shape != kept.shape or now.dtype != kept.dtype:
        return False
    kept = kept.to(now.device)
    return torch.equal(now, kept) or torch.allclose(now, kept, rtol=0, atol=0, equal_nan=True)
