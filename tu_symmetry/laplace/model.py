"""The linearized Laplace approximation of a trained network.

Summary of the method (arXiv 2206.08900): keep the trained weights as the linearization point of the tangent model
``h_theta(x) = f(x) + J(x) (theta - theta~)``, choose the prior precisions of its weights by the model evidence at the
joint stationary point of weights and precisions, one precision for each normalized group, and predict with mean
``f(x)``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from tu_symmetry.laplace import predictive as outputs_posterior
from tu_symmetry.laplace.alternation import Step, alternate
from tu_symmetry.laplace.blocks import Block, Posterior
from tu_symmetry.laplace.checks import examine, require_module, require_weights
from tu_symmetry.laplace.curvature import BiasCurvature, Curvature, KfacApprox, Options, Summary, fit_curvature
from tu_symmetry.laplace.data import all_reduce, batches, opened, together
from tu_symmetry.laplace.evidence import FLAT, Determinants, Hyperprior, Noise, determinants
from tu_symmetry.laplace.groups import Prior, PriorGroups, centers, prior_groups
from tu_symmetry.laplace.hooks import find_layers
from tu_symmetry.laplace.layers import Layer
from tu_symmetry.laplace.likelihood import FisherType, LikelihoodName, make_likelihood
from tu_symmetry.laplace.mode import EvaluateAt, Mode, solve_mode
from tu_symmetry.laplace.predictive import GaussianPredictive, LinkApprox, WeightSamples
from tu_symmetry.laplace.report import (
    EvidenceResult,
    GroupReport,
    NotConvergedWarning,
    PrunedGroupWarning,
    ReadElsewhereWarning,
    warn_about,
)
from tu_symmetry.laplace.tangent import (
    LastLayerModel,
    TangentModel,
    batch_size,
    evaluating,
    full_precision,
    last_linear,
    ordinary,
    rows_of,
    select_parameters,
)
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

__all__ = [
    "EvidenceResult",
    "GaussianPredictive",
    "GroupReport",
    "Hyperprior",
    "LinearizedLaplace",
    "NotConvergedWarning",
    "PrunedGroupWarning",
    "ReadElsewhereWarning",
]

Progress = Callable[[dict[str, Any]], None]

_EXACT_OUTPUTS = 128  # up to as many outputs, covariances are cheaper than 100 samples
_EXACT_ENTRIES = 1 << 26  # of the Jacobian of one sample

P = ParamSpec("P")
R = TypeVar("R")


def _apart(method: Callable[Concatenate[LinearizedLaplace, P], R]) -> Callable[Concatenate[LinearizedLaplace, P], R]:
    """Out of the caller's inference mode and autocast, whose tensors would neither be exact nor be of use later."""

    @wraps(method)
    def run(self: LinearizedLaplace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), full_precision(self.model):
            return method(self, *args, **kwargs)

    return run


class LinearizedLaplace:
    """Linearized Laplace with a prior precision for each group of weights, chosen by the evidence.

    Args:
        model: the trained network; it is never edited and has to keep its weights while this object is used. It runs
            in evaluation mode.
        likelihood: ``classification`` (softmax over the outputs) or ``regression`` (homoscedastic Gaussian noise).
        graph: the symmetry graph, whose normalization groups ``per_group`` and ``per_filter`` use; without it (and
            without ``groups``) the graph is discovered at :meth:`fit` from the first batch.
        prior: which weights share a precision: ``per_group`` (Recommendation 2: each normalized group, and the rest),
            ``per_filter`` (each filter of a normalized group; curvature between filters is dropped), ``per_layer``
            (each module), ``single``.
        evaluate_at: where the evidence is evaluated: ``tangent_mode`` (Recommendation 1: at the weights ``theta*``, the
            mode of the tangent model) or ``map`` (at the linearization point, the trained weights).
        curvature: ``kfac``, ``ekfac`` (exact second moments in the Kronecker basis), ``full``, ``diag``, or
            ``last_layer`` (exact, for the last linear layer alone).
        fisher_type: ``type-2`` (exact generalized Gauss-Newton), ``mc`` (Monte-Carlo estimate of it), or ``empirical``:
            curvlinops' words.
        kfac_approx: ``expand`` or ``reduce``, how Kronecker factors treat positions that share a weight.
        parameters: names, or prefixes of names, of the parameters to be uncertain; None for all that require a
            gradient. All others are fixed.
        groups: group name to parameter names, instead of the graph's normalization groups.
        bias: ``exact`` blocks for biases, or ``shared`` with their layers' gradient factors, as laplace-torch has it.
        mc_samples: targets that the Monte-Carlo Fisher draws for each sample.
        dense_limit: longest parameter apart from weight matrices (biases, affine parameters, whatever else a module
            owns) that gets its exact dense block; a longer one gets the exact diagonal.
        noise_variance: of a regression's noise; None to find it by the evidence (and 1 until then).
        prior_precision: initial precision, one for all groups or by group name; None starts each group at its center
            (see :class:`tu_symmetry.laplace.evidence.Hyperprior`), which respects scale invariance.
        generator: of the CPU, for the Monte-Carlo Fisher; None for one with seed 0.

    Attributes:
        prior_groups: the groups of weights that share a precision.
        log_precision: log of their precisions, float64.
        noise_variance: of a regression's noise (1 for a classification).
        center: the hyperprior's center of each precision.
        whole: parameters without Kronecker factors that have an exact block, since other modules read them too.
        solution: the weights ``theta`` and how well they solve their problem.
        summary: number of samples and outputs, and the loss at the linearization point.
        train_loader: what :meth:`fit` was given; None after loading.

    Raises:
        TypeError: a model that is no module, or a wrapper (``DataParallel``, ``torch.compile``).
        ValueError: options that are not known or do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodName = "classification",
        *,
        graph: SymmetryGraph | None = None,
        prior: Prior = "per_group",
        evaluate_at: EvaluateAt = "tangent_mode",
        curvature: Curvature = "kfac",
        fisher_type: FisherType = "type-2",
        kfac_approx: KfacApprox = "expand",
        parameters: Sequence[str] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        bias: BiasCurvature = "exact",
        mc_samples: int = 1,
        dense_limit: int = 4096,
        noise_variance: float | None = None,
        prior_precision: float | Mapping[str, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        require_module(model)
        for option, value, allowed in (
            ("prior", prior, ("per_group", "per_filter", "per_layer", "single")),
            ("evaluate_at", evaluate_at, ("tangent_mode", "map")),
            ("curvature", curvature, ("kfac", "ekfac", "full", "diag", "last_layer")),
            ("fisher_type", fisher_type, ("type-2", "mc", "empirical")),
            ("kfac_approx", kfac_approx, ("expand", "reduce")),
            ("bias", bias, ("exact", "shared")),
        ):
            if value not in allowed:
                raise ValueError(f"{option}={value!r} is not known; choose one of {allowed}")
        if fisher_type == "empirical" and likelihood == "regression":
            raise ValueError(
                "the empirical Fisher of a regression depends on the noise in a way that no evidence accounts for; "
                "choose fisher_type='type-2', which costs one backward pass for each output"
            )
        if noise_variance is not None and likelihood != "regression":
            raise ValueError("noise_variance belongs to likelihood='regression'")
        if noise_variance is not None and not (noise_variance > 0 and math.isfinite(noise_variance)):
            raise ValueError(f"noise_variance={noise_variance} has to be positive and finite")
        for precision in prior_precision.values() if isinstance(prior_precision, Mapping) else [prior_precision]:
            if precision is not None and not (precision > 0 and math.isfinite(precision)):
                raise ValueError(f"prior_precision={prior_precision} has to be positive and finite")
        if mc_samples < 1:
            raise ValueError(f"mc_samples={mc_samples}: the Monte-Carlo Fisher needs at least one sample")
        self.model, self.likelihood, self.graph = model, make_likelihood(likelihood), graph
        self.prior, self.evaluate_at, self.groups = prior, evaluate_at, groups
        self.options = Options(curvature, fisher_type, kfac_approx, bias, mc_samples, dense_limit)
        self.generator = generator
        self.noise_fixed = noise_variance is not None
        self._initial_noise = 1.0 if noise_variance is None else float(noise_variance)
        self._initial = prior_precision
        self.train_loader: Iterable[Any] | None = None
        if curvature == "last_layer":
            if parameters is not None:
                raise ValueError("curvature='last_layer' chooses its parameters itself; for a subset use 'full'")
            self.tangent: TangentModel = LastLayerModel(model, last_linear(model))
        else:
            self.tangent = TangentModel(model, select_parameters(model, parameters))
        self._blocks: list[Block] | None = None
        self._layers: list[Layer] | None = None
        self.whole: tuple[str, ...] = ()
        self._samples: WeightSamples | None = None

    # ------------------------------------------------------------------ fitting

    @leaves_randomness
    @_apart
    def fit(self, train_loader: Iterable[Any], *, progress: Progress | None = None) -> LinearizedLaplace:
        """Accumulate the curvature over the training data.

        Pass the data the network was trained on, without augmentation. Data count as they are seen: a loader that
        drops samples or repeats them fits what it shows. With an initialized process group every process passes its
        own share, and all get the same result.

        Args:
            train_loader: batches ``(inputs, targets)``; :meth:`optimize_evidence` reads it again.
            progress: called after each batch with ``{"stage", "batch", "samples"}``.

        Raises:
            TypeError: weights or outputs in half precision, outputs that are no tensor of real numbers.
            ValueError: an empty loader, labels out of range, NaN or infinite weights, outputs or losses; a network
                whose outputs are random, depend on the other samples of a batch, or do not lead with the batch.
            UnsupportedLayerError: layers without Kronecker factors, by name.

        Warns:
            ReadElsewhereWarning: Kronecker-factored curvature of a parameter that is read outside of its module.
        """
        select_parameters(self.model, list(self.tangent.names))  # finite weights
        require_weights(self.model, self.tangent.names)
        device = self.tangent.point().device
        with together(device):
            groups = self._group(train_loader)
            inputs, first_pass = opened(train_loader, next(self.model.parameters()).device)
            kind = self.options.curvature
            found = examine(
                self.tangent,
                inputs,
                layered=kind in ("kfac", "ekfac"),
                functional=kind in ("full", "diag"),
            )
        marked = torch.tensor([float(name in found) for name in self.tangent.names], device=device)
        all_reduce(marked)  # other processes have other samples
        whole = [name for name, mark in zip(self.tangent.names, marked.tolist(), strict=True) if mark > 0]
        if whole:
            warnings.warn(
                f"{whole[:6]} {'and others ' if len(whole) > 6 else ''}are read elsewhere than in the call of their "
                "module, so that Kronecker factors would miss a part: they get their exact block (its diagonal beyond "
                f"{self.options.dense_limit} entries)",
                ReadElsewhereWarning,
                stacklevel=4,
            )
        blocks, summary = fit_curvature(
            self.tangent,
            self.likelihood,
            train_loader,
            groups,
            self.options,
            whole=whole,
            first_pass=first_pass,
            generator=self.generator or torch.Generator().manual_seed(0),
            progress=progress,
        )
        self.restore(
            blocks,
            summary,
            groups,
            log_precision=centers(groups, self.tangent.point()).log(),
            noise_variance=self._initial_noise,
            solution=Mode.at(self.tangent.point(), summary.loss, self.evaluate_at),
            whole=whole,
        )
        if self._initial is not None:
            self.set_precision(self._initial)
        self.train_loader = train_loader
        return self

    @_apart
    def restore(
        self,
        blocks: Sequence[Block],
        summary: Summary,
        groups: PriorGroups,
        *,
        log_precision: Tensor,
        noise_variance: float,
        solution: Mode,
        hyperprior: Hyperprior = FLAT,
        whole: Sequence[str] = (),
        tangent: TangentModel | None = None,
        train_loader: Iterable[Any] | None = None,
    ) -> None:
        """Take over a curvature of this network (fitted, loaded, or converted), precisions and weights.

        Args:
            blocks: of the curvature, in the order of the flat parameter vector.
            summary: of the pass that gave them.
            groups: which weights share a precision.
            log_precision: of the groups.
            noise_variance: of a regression's noise.
            solution: the weights that the evidence is evaluated at.
            hyperprior: on the precisions.
            whole: parameters without Kronecker factors that have an exact block.
            tangent: another way to the same network's Jacobian products (stored ones); None keeps the present one.
            train_loader: the training data, where they will be read again; None keeps what is known.
        """
        self.tangent = self.tangent if tangent is None else tangent
        self.train_loader = self.train_loader if train_loader is None else train_loader
        layered = self.options.curvature in ("kfac", "ekfac")
        self.whole = tuple(whole)
        names = [name for name in self.tangent.names if name not in self.whole]
        self._layers = find_layers(self.model, names) if layered else None
        self._blocks, self.summary, self.prior_groups = list(blocks), summary, groups
        self._determinants: Determinants = determinants(blocks, groups)
        self.center = centers(groups, self.tangent.point())
        self.log_precision, self.noise_variance, self.hyperprior = log_precision, noise_variance, hyperprior
        self.solution = solution
        self.fingerprint = self.tangent.fingerprint()
        self._state = {name: tensor.clone() for name, tensor in self.tangent.state().items()}
        self._samples = None

    def _group(self, loader: Iterable[Any]) -> PriorGroups:
        normalizations = self.graph.normalizations if self.graph is not None else ()
        if self.graph is None and self.groups is None and self.prior in ("per_group", "per_filter"):
            from tu_symmetry.symmetry.discovery import discover_symmetries

            inputs, _ = next(batches(loader, next(self.model.parameters()).device))
            training = [m for m in self.model.modules() if m.training]
            self.model.eval()
            try:
                self.graph = discover_symmetries(self.model, rows_of(inputs, slice(0, 2)))
            finally:
                for module in training:
                    module.training = True
            normalizations = self.graph.normalizations
        return prior_groups(self.tangent.slots, self.prior, normalizations=normalizations, groups=self.groups)

    @_apart
    def set_precision(self, precision: float | Mapping[str, float]) -> None:
        """Set the prior precision of all groups, or of groups by name (the others keep theirs)."""
        self._require_fit()
        given = dict.fromkeys(self.prior_groups.names, precision) if isinstance(precision, (int, float)) else precision
        log_precision = self.log_precision.clone()
        for name, value in given.items():
            if name not in self.prior_groups.names:
                raise ValueError(f"no prior group {name!r}; the groups are {list(self.prior_groups.names)[:12]}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"the precision of {name!r} is {value}; it has to be positive and finite")
            log_precision[self.prior_groups.names.index(name)] = math.log(value)
        self._set(log_precision, self.noise_variance)

    def _set(self, log_precision: Tensor, noise: float) -> None:
        moved = noise != self.noise_variance or not torch.equal(log_precision, self.log_precision)
        if self.evaluate_at == "tangent_mode" and moved:
            self.solution = replace(self.solution, gradient_norm=math.nan, converged=False)
        self.log_precision, self.noise_variance, self._samples = log_precision, noise, None

    # ------------------------------------------------------------------ evidence

    @leaves_randomness
    @_apart
    def optimize_evidence(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        hyperprior: Hyperprior | Literal["default"] | None = "default",
        max_iterations: int = 100,
        tolerance: float | None = None,
        mode_tolerance: float | None = None,
        progress: Progress | None = None,
    ) -> EvidenceResult:
        """Choose precisions (and a regression's noise variance) by the evidence.

        At ``map`` this needs no data: the problem is convex and solved exactly from binned eigenvalues. At
        ``tangent_mode`` it alternates between the mode of the tangent model, given the precisions, and the precisions,
        given the mode, until neither moves: their joint stationary point. Both lower one objective, the negative log
        evidence less the log hyperprior; steps are extrapolated as long as it falls. The best point
        that was seen is kept.

        Args:
            train_loader: the training data; None for the loader of :meth:`fit`.
            hyperprior: on the log precisions; the default is one decade wide around each group's center, None is flat.
                Without one the evidence often sends the precisions of normalized groups to infinity (a fitted
                network's ``J theta`` of these is 0, so that ``theta* = 0`` costs nothing), which takes the uncertainty
                out of the prediction.
            max_iterations: largest number of alternations.
            tolerance: largest change of a log precision at convergence; 1e-6 in double precision, else 1e-3.
            mode_tolerance: gradient norm of the weights in posterior standard deviations; 1e-6 in double, else 1e-2.
            progress: called after every pass over the data.

        Returns:
            What was reached; see also :meth:`report`.

        Warns:
            PrunedGroupWarning: a group was switched off.
            NotConvergedWarning: the tolerances were not met.
        """
        self._require_fit()
        self.hyperprior = Hyperprior() if hyperprior == "default" else (FLAT if hyperprior is None else hyperprior)
        double = self.tangent.point().dtype == torch.float64
        tolerance = tolerance or (1e-6 if double else 1e-3)
        if self.evaluate_at == "map":
            rho, tau = self._hyperparameter_step(self.solution)
            self._set(rho, math.exp(tau))
            result = EvidenceResult(self._log_evidence(self.solution), 1, 0.0, 0.0, True, 1)
        else:
            loader = self._training_data(train_loader)
            accuracy = mode_tolerance or self._default_mode_tolerance()
            result = self._joint(loader, max_iterations, tolerance, accuracy, progress)
        warn_about(result, self.report(), stacklevel=4)
        return result

    def _hyperparameter_step(self, mode: Mode) -> tuple[Tensor, float]:
        return self._determinants.step(
            self.prior_groups.total(mode.theta.double().square()),
            self.log_precision,
            math.log(self.noise_variance),
            self.center.log(),
            self.hyperprior,
            self._noise(mode) if self.likelihood.name == "regression" and not self.noise_fixed else None,
        )

    def _joint(
        self,
        loader: Iterable[Any],
        max_iterations: int,
        tolerance: float,
        mode_tolerance: float,
        progress: Progress | None,
    ) -> EvidenceResult:
        """Alternate between weights and hyperparameters ``(log precisions, log noise variance)``."""
        tau = torch.tensor([math.log(self.noise_variance)], dtype=torch.float64)
        bound = math.log(self.hyperprior.cap)
        free = torch.tensor([0.0 if self.noise_fixed else math.inf], dtype=torch.float64)

        def place(point: Tensor) -> None:
            self._set(point[:-1], self.noise_variance if self.noise_fixed else math.exp(float(point[-1])))

        def step(point: Tensor, accuracy: float) -> Step:
            place(point)
            self.solve_mode(loader, tolerance=accuracy, progress=progress)
            rho, log_noise = self._hyperparameter_step(self.solution)
            image = torch.cat([rho, torch.tensor([log_noise], dtype=torch.float64)])
            undetermined = torch.cat([self._undetermined(rho), torch.tensor([False])])
            return Step(self._objective(), image, undetermined, self.solution)

        def report(iteration: int, change: float, objective: float) -> None:
            if progress is not None:
                progress({"stage": "evidence", "iteration": iteration, "change": change, "objective": objective})

        found = alternate(
            step,
            torch.cat([self.log_precision, tau]),
            torch.cat([self.center.log() - bound, tau - free]),
            torch.cat([self.center.log() + bound, tau + free]),
            tolerance=tolerance,
            accuracy=mode_tolerance,
            max_iterations=max_iterations,
            progress=report,
        )
        place(found.point)
        self.solution = found.weights
        if not found.converged and found.weights.gradient_norm > mode_tolerance:  # found roughly, on the way
            self.solve_mode(loader, tolerance=mode_tolerance, progress=progress)
        # where it converged, precisions are those that belong to these weights, whose certificate they hardly change
        return EvidenceResult(
            self._log_evidence(self.solution),
            found.iterations,
            found.change,
            self.solution.gradient_norm,
            found.converged and self.solution.converged,
            found.best,
        )

    def _undetermined(self, rho: Tensor) -> Tensor:
        """Groups on their way to an infinite precision under a flat hyperprior, which they approach ever more slowly.

        The data determine less than a hundredth of a direction there, so that the rest of the way changes the evidence
        by less than that (in nats); where they determine nothing, the evidence is flat and its slope is rounding error.
        """
        if not math.isinf(self.hyperprior.std):
            return torch.zeros(len(rho), dtype=torch.bool)
        gamma = self._determinants.gamma(rho, math.log(self.noise_variance))
        return ((gamma < 1e-2) & (rho > self.log_precision)) | (gamma < 1e-8)

    @leaves_randomness
    @_apart
    def solve_mode(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        tolerance: float | None = None,
        max_iterations: int = 50,
        progress: Progress | None = None,
    ) -> Mode:
        """Find ``theta*``, the mode of the tangent model under the present precisions, from where it was last.

        Args:
            train_loader: the training data; None for the loader of :meth:`fit`.
            tolerance: gradient norm in posterior standard deviations; 1e-6 in double precision, else 1e-2.
            max_iterations: largest number of Newton steps.
            progress: called after every pass over the data.
        """
        self._require_fit()
        precision = self.prior_groups.spread(self.log_precision.exp()).to(self.solution.theta)
        with evaluating(self.model):
            self.solution = solve_mode(
                self.tangent,
                self.likelihood,
                self._training_data(train_loader),
                precision,
                self.posterior,
                self.solution.theta,
                samples=self.summary.samples,
                tolerance=tolerance or self._default_mode_tolerance(),
                max_iterations=max_iterations,
                progress=progress,
            )
        return self.solution

    def _default_mode_tolerance(self) -> float:
        return 1e-6 if self.solution.theta.dtype == torch.float64 else 1e-2

    @leaves_randomness
    @_apart
    def log_marginal_likelihood(self, train_loader: Iterable[Any] | None = None) -> float:
        """Laplace evidence ``log Z`` at the present precisions (nats, summed over the data, all constants included).

        At ``tangent_mode`` this mode is found first, where the precisions have changed since it last was.
        """
        self._require_fit()
        if math.isnan(self.solution.gradient_norm):
            self.solve_mode(train_loader)
        return self._log_evidence(self.solution)

    def _noise(self, mode: Mode) -> Noise:
        return Noise(self.summary.samples * self.summary.outputs, 2 * mode.loss)

    def _log_evidence(self, mode: Mode) -> float:
        tau = math.log(self.noise_variance)
        data = self._noise(mode).energy(tau) if self.likelihood.name == "regression" else mode.loss
        norms = self.prior_groups.total(mode.theta.double().square())
        prior = float((self.log_precision.exp() * norms).sum())
        return -data - 0.5 * (prior + self._determinants.log_det_ratio(self.log_precision, tau))

    def _objective(self) -> float:
        return self.hyperprior.energy(self.log_precision, self.center.log()) - self._log_evidence(self.solution)

    def report(self) -> list[GroupReport]:
        """Precision, determined directions and squared norm of every prior group."""
        self._require_fit()
        gamma = self._determinants.gamma(self.log_precision, math.log(self.noise_variance))
        norms = self.prior_groups.total(self.solution.theta.double().square())
        bound = math.log(self.hyperprior.cap) * (1 - 1e-9)
        rows = []
        for i, name in enumerate(self.prior_groups.names):
            away = float(self.log_precision[i] - self.center[i].log())
            rows.append(
                GroupReport(
                    name=name,
                    size=int(self.prior_groups.sizes[i]),
                    precision=float(self.log_precision[i].exp()),
                    center=float(self.center[i]),
                    gamma=float(gamma[i]),
                    squared_norm=float(norms[i]),
                    at_cap=abs(away) >= bound,
                    pruned=away >= bound or float(gamma[i]) < 0.5,
                )
            )
        return rows

    # ------------------------------------------------------------------ prediction

    @property
    def posterior(self) -> Posterior:
        """The Gaussian over the weights (its mean is the linearization point)."""
        return Posterior(self._require_fit(), self.log_precision, self.noise_variance)

    @property
    def theta(self) -> Tensor:
        """The weights that the evidence is evaluated at, ``theta*`` or the linearization point: ``[size]``."""
        self._require_fit()
        return self.solution.theta

    @_apart
    def function_covariance(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Outputs ``[batch, outputs]`` and their exact posterior covariances ``[batch, outputs, outputs]``.

        Outputs ``[batch, positions, outputs]`` have joint covariances over both, which are flattened to one axis.
        """
        self._require_weights()
        return self._covariance(self._inputs(inputs))

    def _covariance(self, inputs: Any) -> tuple[Tensor, Tensor]:
        return outputs_posterior.function_covariance(
            self.tangent, self.posterior, self._layers, inputs, whole=self.whole
        )

    @_apart
    def function_samples(self, inputs: Any, num_samples: int = 100, *, seed: int = 0) -> Tensor:
        """Samples of the outputs ``[samples, *outputs.shape]``, joint over all inputs and calls with the same seed."""
        self._require_weights()
        outputs, changes = outputs_posterior.function_samples(
            self.tangent, self._weight_samples(num_samples, seed), self._inputs(inputs)
        )
        return outputs + changes

    @_apart
    def predictive(
        self,
        inputs: Any,
        *,
        num_samples: int = 100,
        link_approx: LinkApprox = "mc",
        covariance: Literal["auto", "exact", "samples"] = "auto",
        joint: bool = False,
        seed: int = 0,
    ) -> Any:
        """Posterior predictive of a batch.

        Args:
            inputs: a batch.
            num_samples: number of Monte-Carlo samples.
            link_approx: from logits to probabilities: ``mc``, or in closed form ``probit`` (both as in laplace-torch),
                or ``mean``: the network's own prediction.
            covariance: ``exact`` covariances of the outputs, ``samples`` of the weights (Jacobian-vector products), or
                ``auto``: exact up to 128 outputs, where the Jacobian of one sample fits in memory or is not needed.
            joint: return samples, joint over all inputs, instead of their mean.
            seed: of the samples; the same seed gives the same functions in every call.

        Returns:
            Classification: probabilities ``[batch, classes]``, or ``[batch, positions, classes]``. Regression:
            :class:`GaussianPredictive`. With ``joint`` the samples: probabilities with an axis of the samples in front,
            or outputs without noise for a regression.
        """
        self._require_weights()
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        outputs_posterior.check_link_approx(link_approx)
        if covariance not in ("auto", "exact", "samples"):
            raise ValueError(f"covariance={covariance!r} is not known; choose 'auto', 'exact' or 'samples'")
        classify = self.likelihood.name == "classification"
        if joint:
            samples = self.function_samples(inputs, num_samples, seed=seed)
            return samples.softmax(-1) if classify else samples
        inputs = self._inputs(inputs)
        if classify and link_approx == "mean":
            with evaluating(self.model):
                return self.tangent.outputs(inputs).softmax(-1)
        if covariance == "exact" or (covariance == "auto" and self._exact_is_cheap()):
            mean, matrix = self._covariance(inputs)
            matrix = outputs_posterior.within_positions(mean, matrix)
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            if classify and link_approx == "mc":
                return (mean + outputs_posterior.gaussian_samples(matrix, num_samples, seed)).softmax(-1).mean(0)
        else:
            mean, changes = outputs_posterior.function_samples(
                self.tangent, self._weight_samples(num_samples, seed), inputs
            )
            if classify and link_approx == "mc":
                return (mean + changes).softmax(-1).mean(0)
            variance = changes.square().mean(0)
        if classify:
            return outputs_posterior.probit_probabilities(mean, variance)
        return GaussianPredictive(mean, variance + self.noise_variance, variance)

    def _exact_is_cheap(self) -> bool:
        """Few outputs; apart from Kronecker factors, a Jacobian of one sample that is not too large."""
        outputs = self.summary.outputs
        return outputs <= _EXACT_OUTPUTS and (self._layers is not None or outputs * self.tangent.size <= _EXACT_ENTRIES)

    def predict(self, loader: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Stream over a loader: :meth:`predictive` of one batch after the other.

        Args:
            loader: batches of inputs, or ``(inputs, ...)`` whose first element is taken (targets are not read).
            options: of :meth:`predictive`. Monte-Carlo samples are those of its seed in every batch, so that results
                do not depend on the batch size, and joint ones are joint over the whole loader.
        """
        for batch in loader:
            yield self.predictive(batch[0] if isinstance(batch, (tuple, list)) else batch, **options)

    def _weight_samples(self, count: int, seed: int) -> WeightSamples:
        kept = self._samples
        if kept is None or kept.count != count or kept.seed != seed:
            kept = WeightSamples(self.posterior, count, seed, self.tangent.point()[:1])
            self._samples = kept
        return kept

    def _inputs(self, inputs: Any) -> Any:
        device = next(self.model.parameters()).device

        def move(value: Any) -> Any:
            return tuple(move(v) for v in value) if isinstance(value, tuple) else value.to(device)

        with torch.inference_mode(False):
            found = move(ordinary(inputs))
        if batch_size(found) == 0:
            raise ValueError("the batch holds no samples, so that there is nothing to predict")
        return found

    # ------------------------------------------------------------------ storage and checks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write curvature, precisions and ``theta*`` to a safetensors file; the network's weights are not in it."""
        from tu_symmetry.laplace.storage import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> LinearizedLaplace:
        """Read what :meth:`save` wrote, for the same network with the same weights.

        Raises:
            LaplaceFileError: a truncated or foreign file, or another network.
        """
        from tu_symmetry.laplace.storage import load

        return load(path, model)

    def to_laplace_torch(self) -> Any:
        """A ``KronLaplace`` with the same posterior, see :func:`tu_symmetry.laplace.interop.to_laplace_torch`."""
        from tu_symmetry.laplace.interop import to_laplace_torch

        return to_laplace_torch(self)

    @classmethod
    def from_laplace_torch(cls, other: Any, *, evaluate_at: EvaluateAt = "map") -> LinearizedLaplace:
        """A fitted ``KronLaplace``, see :func:`tu_symmetry.laplace.interop.from_laplace_torch`."""
        from tu_symmetry.laplace.interop import from_laplace_torch

        return from_laplace_torch(other, evaluate_at=evaluate_at)

    def _training_data(self, loader: Iterable[Any] | None) -> Iterable[Any]:
        loader = self.train_loader if loader is None else loader
        if loader is None:
            raise ValueError(
                "evaluate_at='tangent_mode' reads the training data again; pass train_loader=... after loading a file"
            )
        self._require_weights()
        return loader

    def _require_fit(self) -> list[Block]:
        if self._blocks is None:
            raise RuntimeError("this Laplace approximation has not been fitted; call fit(train_loader) first")
        return self._blocks

    def _require_weights(self) -> None:
        """Refuse to go on with a network whose weights are not those of :meth:`fit`.

        They are compared by value with a copy, since edits of ``weight.data`` leave no other trace. It takes one pass
        over the weights in memory.
        """
        self._require_fit()
        now = self.tangent.state()
        if now.keys() == self._state.keys() and all(
            t.shape == kept.shape and t.dtype == kept.dtype and t.device == kept.device and torch.equal(t, kept)
            for t, kept in zip(now.values(), (self._state[name] for name in now), strict=True)
        ):
            return
        if self.tangent.fingerprint() != self.fingerprint:  # also where NaN in a buffer, or another device, looks so
            raise RuntimeError(
                "the network's weights have changed since the Laplace approximation was fitted (further training, "
                "or weights loaded into it); fit again, or put the fitted weights back"
            )
