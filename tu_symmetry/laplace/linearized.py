"""The linearized Laplace approximation of a trained network (arXiv 2206.08900).

The trained weights are the linearization point of ``h_theta(x) = f(x) + J(x) (theta - theta~)``, precisions are chosen
by the evidence at the joint stationary point of weights and precisions, and the predictive mean is ``f(x)``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.laplace import function_posterior, interop, storage
from tu_symmetry.laplace.blocks import Posterior
from tu_symmetry.laplace.calibration import LOUDER, SHARPNESSES, TEMPERATURES, judge
from tu_symmetry.laplace.checks import examine, require_module, require_weights
from tu_symmetry.laplace.curvature import (
    DENSE_LIMIT,
    BiasCurvature,
    Curvature,
    KfacApprox,
    Options,
    Summary,
    fit_curvature,
)
from tu_symmetry.laplace.data import all_reduce, by_rows, opened, together
from tu_symmetry.laplace.determinants import FLAT, Hyperprior
from tu_symmetry.laplace.fitted import FittedCurvature, FittedLaplace
from tu_symmetry.laplace.function_posterior import Covariance, in_own_shape, tempered_predictives
from tu_symmetry.laplace.groups import Prior, PriorGroups, prior_groups
from tu_symmetry.laplace.inputs import arguments, batch_size, mapped, ordinary, rows_of
from tu_symmetry.laplace.joint.optimum import at_joint_mode, at_map, at_mode
from tu_symmetry.laplace.likelihood import (
    FisherType,
    Likelihood,
    LikelihoodName,
    LinkApprox,
    check_link_approx,
    make_likelihood,
)
from tu_symmetry.laplace.mode import EvaluateAt, Mode
from tu_symmetry.laplace.report import (
    Calibration,
    EvidenceResult,
    GroupReport,
    Quality,
    ReadElsewhereWarning,
    warn_about,
    warn_if_it_hurts,
)
from tu_symmetry.laplace.tangent import (
    LastLayerModel,
    TangentModel,
    evaluating,
    full_precision,
    last_layer,
    select_parameters,
)
from tu_symmetry.modules import uncompiled
from tu_symmetry.processes import require_alike
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import State, SymmetryError, stack_states
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

Progress = Callable[[dict[str, Any]], None]

P = ParamSpec("P")
R = TypeVar("R")


def _apart(method: Callable[Concatenate[LinearizedLaplace, P], R]) -> Callable[Concatenate[LinearizedLaplace, P], R]:
    """Out of the caller's inference mode and autocast, whose tensors would neither be exact nor be of use later."""

    @wraps(method)
    def run(self: LinearizedLaplace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), full_precision(self.model):
            return method(self, *args, **kwargs)

    return run


def _of_fit(name: str, doc: str) -> Any:
    """A property that is an attribute of the fit."""
    return property(lambda laplace: getattr(laplace.fitted, name), doc=doc)


class LinearizedLaplace(Brief):
    """Linearized Laplace with a prior precision for each group of weights, chosen by the evidence.

    Args:
        model: the trained network. It is never edited, runs in evaluation mode, and has to keep its weights. Compiled
            ones run as they were before; TorchUncertainty's ``mc_dropout`` counts as its network without dropout.
        likelihood: a name, the training loss (``nn.CrossEntropyLoss`` and others with their options), or an object of
            :mod:`tu_symmetry.likelihoods`.
        graph: the symmetry graph whose normalization groups ``per_group`` uses; discovered from the first batch
            without it.
        prior: which weights share a precision: ``per_group`` (Recommendation 2: each normalized group, and the rest),
            ``per_layer`` (each module), ``per_tensor`` (each parameter), or ``single``.
        evaluate_at: ``tangent_mode`` (Recommendation 1: at ``theta*``, the mode of the tangent model) or ``map``.
        curvature: ``kfac``, ``full``, ``diag``, or ``last_layer`` (the last linear layer, from its inputs
            alone: exact up to 2,048 weights, Kronecker factors beyond).
        fisher_type: ``type-2`` (exact generalized Gauss-Newton) or ``mc`` (Monte-Carlo estimate of it).
        kfac_approx: ``expand`` or ``reduce``, how Kronecker factors treat positions that share a weight.
        parameters: names, prefixes of names, or patterns (``["*lora_*"]``) of the parameters to be uncertain; None for
            all that require a gradient, ``"last_layer"`` for those of the module that is called last. With
            ``curvature="last_layer"`` the name of one linear layer, None to find it.
        bias: ``exact`` blocks for biases, or ``shared`` with their layers' gradient factors, as laplace-torch has it.
        noise_variance: the variance of a regression's noise; None to find it by the evidence (1 until then), while
            predictions, whose mean is the network's output, have that of the network's residuals on the training data.

    Attributes:
        train_loader: what :meth:`fit` was given; None after loading.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodName | Likelihood | nn.Module = "classification",
        *,
        graph: SymmetryGraph | None = None,
        prior: Prior = "per_group",
        evaluate_at: EvaluateAt = "tangent_mode",
        curvature: Curvature = "kfac",
        fisher_type: FisherType = "type-2",
        kfac_approx: KfacApprox = "expand",
        parameters: Sequence[str] | Literal["last_layer"] | None = None,
        bias: BiasCurvature = "exact",
        noise_variance: float | None = None,
    ) -> None:
        require_module(model)
        model = uncompiled(model)
        for option, value, allowed in (
            ("prior", prior, Prior),
            ("evaluate_at", evaluate_at, EvaluateAt),
            ("curvature", curvature, Curvature),
            ("fisher_type", fisher_type, FisherType),
            ("kfac_approx", kfac_approx, KfacApprox),
            ("bias", bias, BiasCurvature),
        ):
            if value not in get_args(allowed):
                raise ValueError(f"{option}={value!r} is not known; choose one of {get_args(allowed)}")
        self.likelihood = make_likelihood(likelihood)
        if noise_variance is not None and not (self.likelihood.noisy and 0 < noise_variance < math.inf):
            raise ValueError(
                f"noise_variance={noise_variance} has to be positive and finite, and belongs to likelihood='regression'"
            )
        self.model, self.graph = model, graph
        self.prior, self.evaluate_at = prior, evaluate_at
        self.options = Options(curvature, fisher_type, kfac_approx, bias)
        self._given_noise = noise_variance
        self.train_loader: Iterable[Any] | None = None
        class_axis = self.likelihood.class_axis
        self._traced = parameters == "last_layer" or (curvature == "last_layer" and not parameters)
        if curvature == "last_layer":
            named = [last_layer(model, linear=True)] if self._traced else list(parameters or ())
            if len(named) > 1 or named[0] not in dict(model.named_modules()):
                raise ValueError(
                    f"curvature='last_layer' is of one linear layer, and parameters={named}; use curvature='full'"
                )
            self.tangent: TangentModel = LastLayerModel(model, named[0], class_axis=class_axis)
        else:
            wanted = [last_layer(model)] if parameters == "last_layer" else parameters
            self.tangent = TangentModel(model, select_parameters(model, wanted), class_axis=class_axis)
        self._fitted: FittedLaplace | None = None

    @leaves_randomness
    @_apart
    def fit(self, train_loader: Iterable[Any], *, progress: Progress | None = None) -> LinearizedLaplace:
        """Accumulate the curvature over the training data.

        Pass the data the network was trained on, without augmentation. With an initialized process group every process
        passes its own share, and all get the same result; those that work :func:`~tu_symmetry.processes.together` pass
        the same loader, of whose batches each takes its rows.

        Args:
            train_loader: batches ``(inputs, targets)``, where inputs are a tensor, a tuple of positional arguments, or
                a mapping of keyword arguments; or mappings of these with ``labels`` among them. It is read again by
                :meth:`optimize_evidence`.
            progress: called after each batch; :func:`tu_symmetry.show_progress` gives one that prints.

        Raises:
            TypeError: weights or outputs in half precision, outputs that are no tensor of real numbers.
            ValueError: an empty loader, labels out of range, NaN or infinite numbers; outputs that are random, depend
                on the other samples of a batch, or do not lead with the batch.
            UnsupportedLayerError: layers whose gradients cannot be taken apart, by name.

        Warns:
            ReadElsewhereWarning: parameters that get an exact block, since Kronecker factors would miss a part.
        """
        require_alike(self.tangent.fingerprint)
        select_parameters(self.model, list(self.tangent.names))  # finite weights
        require_weights(self.model, self.tangent.names)
        device = self.tangent.point().device
        with together(device):
            inputs, first_pass = opened(train_loader, next(self.model.parameters()).device)
            if self._traced:
                self._find_last_layer(rows_of(inputs, slice(0, 2)))
                require_weights(self.model, self.tangent.names)
            groups = self._grouped(rows_of(inputs, slice(0, 2)))
            kind = self.options.curvature
            found, read_elsewhere = examine(
                self.tangent, inputs, layered=kind == "kfac", functional=kind in ("full", "diag")
            )
        names = self.tangent.names
        marked = torch.tensor([[n in some for n in names] for some in (found, read_elsewhere)], device=device).double()
        all_reduce(marked)  # other processes have other samples
        whole, named = ([n for n, own in zip(names, marks, strict=True) if own] for marks in marked.tolist())
        if named:
            warnings.warn(
                f"{named[:6]} {'and others ' if len(named) > 6 else ''}have no Kronecker factors, since they are "
                "read elsewhere than in one call of their module on the batch (tied, called several times, or on what "
                "all samples share, such as numbers of positions): they get their exact block (its diagonal beyond "
                f"{DENSE_LIMIT} entries)",
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
            progress=progress,
        )
        self._fitted = FittedLaplace.begin(
            self.tangent,
            self.likelihood,
            self.options,
            FittedCurvature(tuple(blocks), summary, groups, tuple(whole)),
            prior=self.prior,
            evaluate_at=self.evaluate_at,
            noise_variance=1.0 if self._given_noise is None else float(self._given_noise),
            noise_fixed=self._given_noise is not None,
        )
        self.train_loader = train_loader
        return self

    @classmethod
    def from_fitted(cls, fitted: FittedLaplace, train_loader: Iterable[Any] | None = None) -> LinearizedLaplace:
        """The approximation around a frozen state, with the training data where they will be read again."""
        layer = fitted.tangent.layer if isinstance(fitted.tangent, LastLayerModel) else None
        la = cls(
            fitted.model,
            fitted.likelihood,
            prior=fitted.prior,
            evaluate_at=fitted.evaluate_at,
            parameters=fitted.tangent.names if layer is None else [layer],
            noise_variance=fitted.noise_variance if fitted.noise_fixed else None,
            **vars(fitted.options),
        )
        la.tangent = fitted.tangent
        la._fitted, la.train_loader = fitted, train_loader
        return la

    @property
    def fitted(self) -> FittedLaplace:
        """All that the fit and the evidence have found, as one frozen object on the device that the network is on."""
        if self._fitted is None:
            raise RuntimeError("this Laplace approximation has not been fitted; call fit(train_loader) first")
        self._fitted = self._fitted.on(next(self.model.parameters()).device)
        return self._fitted

    prior_groups: PriorGroups = _of_fit("groups", "The groups of weights that share a precision.")
    log_precision: Tensor = _of_fit("log_precision", "Log of their precisions, float64 ``[groups]``.")
    noise_variance: float = _of_fit("noise_variance", "Variance of a regression's noise by the evidence, or as given.")
    solution: Mode = _of_fit("solution", "The weights ``theta`` and how well they solve their problem.")
    summary: Summary = _of_fit("summary", "Number of samples and outputs, and the loss at the linearization point.")
    temperature: float = _of_fit("temperature", "Factor of the posterior covariance in predictions: 1, or calibrate's.")
    sharpness: float = _of_fit("sharpness", "Power of the likelihood (logits times it, noise over it), likewise.")
    posterior: Posterior = _of_fit("posterior", "The Gaussian over the weights (its mean is the linearization point).")
    theta: Tensor = _of_fit("theta", "The weights ``[size]`` of the evidence: ``theta*``, or the trained ones.")

    def facts(self) -> list[tuple[str, str]]:
        """What was fitted: the network, the options, the sizes, and what predictions use."""
        options = {"curvature": self.options.curvature, "prior": self.prior, "evaluate at": self.evaluate_at}
        found = [("of", type(self.model).__name__), ("likelihood", self.likelihood.name), *options.items()]
        if self._fitted is None:
            return [*found, ("fitted", "not yet")]
        groups, samples = len(self.log_precision), self.summary.samples
        sizes = f"{self.tangent.size} weights in {groups} groups, to {samples} samples"
        return [*found, ("fitted", sizes), *((n, f"{getattr(self, n):.3g}") for n in ("temperature", "sharpness"))]

    def report(self) -> list[GroupReport]:
        """Precision, determined directions and squared norm of every prior group."""
        return self.fitted.report()

    def _find_last_layer(self, inputs: Any) -> None:
        """The last layer in the order of a forward pass, where the constructor had only that of definition."""
        if isinstance(self.tangent, LastLayerModel):
            layer = last_layer(self.model, inputs, linear=True)
            self.tangent = LastLayerModel(self.model, layer, class_axis=self.tangent.class_axis)
        else:
            self.tangent = self.tangent.over(select_parameters(self.model, [last_layer(self.model, inputs)]))

    def _grouped(self, inputs: Any) -> PriorGroups:
        """The groups of weights that share a precision; the graph is discovered where they need it."""
        if self.graph is None and self.prior == "per_group":
            from tu_symmetry.symmetry.discovery import discover_symmetries

            args, kwargs = arguments(inputs)
            try:
                with evaluating(self.model):
                    self.graph = discover_symmetries(self.model, args, example_kwargs=kwargs)
            except SymmetryError as error:
                raise SymmetryError(f"{error}\nprior='per_layer' and prior='single' need no symmetries") from error
        foreign = [n for n in self.graph.shapes if n not in self.model.state_dict()] if self.graph else []
        if foreign:
            raise ValueError(f"graph= is of another network (no {foreign[:3]} here), or of a wrapper: discover it anew")
        return prior_groups(self.tangent.slots, self.prior, self.graph.normalizations if self.graph else ())

    @_apart
    def set_precision(self, precision: float | Tensor | Mapping[str, float]) -> None:
        """Set the prior precision of all groups, of each (a tensor ``[groups]``), or of some by name."""
        fitted = self.fitted
        self._fitted = fitted.with_hyperparameters(fitted.groups.given(precision, fitted.log_precision))

    @leaves_randomness
    @_apart
    def optimize_evidence(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        hyperprior: Hyperprior | Literal["default"] | None = "default",
        max_iterations: int | None = None,
        tolerance: float | None = None,
        mode_tolerance: float | None = None,
        memory: int | None = None,
        progress: Progress | None = None,
    ) -> EvidenceResult:
        """Choose precisions (and a regression's noise variance) by the evidence.

        At ``map`` no data are read, and the optimum is exact. At ``tangent_mode`` weights and precisions minimize the
        negative log evidence less the log hyperprior together; of several groups there can be several optima.

        Args:
            train_loader: None for the loader of :meth:`fit`.
            hyperprior: on the log precisions; by default one decade wide around each group's center, None for a flat
                one, with which precisions of normalized groups often go to infinity.
            max_iterations: largest number of directions, of two products with the Jacobian each; None for 1,000.
            tolerance: largest change of a log precision; None for 1e-6 in double precision, else 0.03.
            mode_tolerance: gradient norm of the weights in posterior standard deviations; 1e-6, or 0.2.
            memory: bytes for data, linearizations and gradients; None for 2 GiB, and more for networks of over a
                million weights.
            progress: called after every pass over the data.

        Warns:
            PrunedGroupWarning: a group was switched off.
            NotConvergedWarning: the tolerances were not met.
        """
        chosen = Hyperprior() if hyperprior == "default" else (FLAT if hyperprior is None else hyperprior)
        if self.evaluate_at == "map":
            self._fitted, result = at_map(self.fitted, chosen)
        else:
            self._fitted, result = at_joint_mode(
                self.fitted,
                self._training_data(train_loader),
                chosen,
                max_iterations=max_iterations,
                tolerance=tolerance,
                mode_tolerance=mode_tolerance,
                memory=memory,
                progress=progress,
            )
        warn_about(result, self.report(), stacklevel=4)
        return result

    @leaves_randomness
    @_apart
    def log_marginal_likelihood(self, train_loader: Iterable[Any] | None = None) -> float:
        """Laplace evidence ``log Z`` at the present precisions (nats, summed over the data, all constants included).

        At ``tangent_mode`` this mode is found first, where the precisions have changed since it last was.
        """
        if math.isnan(self.fitted.solution.gradient_norm):
            self._fitted = at_mode(self.fitted, self._training_data(train_loader))
        return self.fitted.log_evidence()

    @leaves_randomness
    @_apart
    def calibrate(
        self,
        validation_loader: Iterable[Any],
        *,
        link_approx: LinkApprox = "mc",
        num_samples: int = 100,
        covariance: Covariance = "auto",
        seed: int = 0,
        held_out: bool = True,
        standard_errors: float = 0.0,
        sharpen: bool = True,
    ) -> Calibration:
        """Choose the temperature of the posterior, and the sharpness of the likelihood, by the NLL on held-out data.

        The temperature multiplies the posterior covariance: 0 is the network itself, 1 the posterior of the evidence,
        others are 1e-6 to 100 in quarters of a decade. The sharpness multiplies logits (0.1 to 10), and divides the
        variance of a regression's noise (1e-4 to 10; at 1 it is that of the residuals on the training data, if none was
        given): that of the network alone is chosen first (temperature scaling, Guo et al. 2017), and the
        temperature then at this one and at 1, so that predictions on these data are never worse than those of the
        network, its logits scaled. Precisions and evidence stay as they are. Other precisions put both back to 1.

        Args:
            validation_loader: batches ``(inputs, targets)`` that the network was not trained on. One pass.
            link_approx: with which predictions will be made, ``mc`` or ``probit``.
            num_samples: with which predictions will be made.
            covariance: likewise.
            seed: likewise.
            held_out: False where the network was trained on these data, on which it looks better than it is.
            standard_errors: 0 for what is best on these data; else for what gains most over the network (a temperature:
                over the scaled network) less so many standard errors, which hardly ever makes a network worse on
                other data.
            sharpen: False to leave the likelihood as it is, as on data that the network was trained on.

        Warns:
            LaplaceHurtsWarning: the posterior of the evidence has a larger NLL than the network itself.
        """
        fitted = self.fitted
        fitted.require_weights()
        check_link_approx(link_approx)
        if not 0 <= standard_errors < math.inf:
            raise ValueError(f"standard_errors={standard_errors} has to be finite and not negative")
        options: dict[str, Any] = {"num_samples": num_samples, "covariance": covariance, "seed": seed}
        options["link_approx"] = link_approx
        scales = (*SHARPNESSES, *(LOUDER if fitted.noisy else ())) if sharpen and held_out else (1.0,)
        alone = [(0.0, s) for s in scales]
        plain = judge(fitted, validation_loader, alone, **options)
        if not bool(plain.means[0].isfinite()):
            raise ValueError("the NLL of the network itself is not finite on these data")
        own = alone[plain.choose(standard_errors)]
        temperatures = [t for t in sorted({1.0, *TEMPERATURES}) if t]
        candidates = [own, *((t, s) for s in dict.fromkeys((own[1], 1.0)) for t in temperatures)]
        judged = judge(fitted, validation_loader, candidates, **options)
        qualities = [Quality(mean) for mean in judged.means.tolist()]
        best = judged.choose(standard_errors)
        temperature, sharpness = candidates[best]
        found = Calibration(
            temperature=temperature,
            sharpness=sharpness,
            samples=judged.samples,
            network=Quality(float(plain.means[0])),
            scaled=qualities[0],
            evidence=qualities[candidates.index((1.0, 1.0))],
            calibrated=qualities[best],
            held_out=held_out,
            standard_error=float(judged.errors[best]),
        )
        self._fitted = replace(fitted, temperature=temperature, sharpness=sharpness)
        if held_out:
            warn_if_it_hurts(found, stacklevel=4)
        return found

    @_apart
    def function_covariance(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Outputs ``[batch, outputs]`` and their exact posterior covariances ``[batch, outputs, outputs]``.

        Positions and outputs are flattened to one axis in the covariances.
        """
        fitted = self.fitted
        covariance = partial(function_posterior.function_covariance, fitted)
        outputs, matrix = by_rows(self._on_device(inputs), covariance)
        return outputs, self.temperature * matrix

    @_apart
    def function_samples(self, inputs: Any, num_samples: int = 100, *, seed: int = 0) -> Tensor:
        """Samples of the outputs ``[samples, *outputs.shape]``, joint over all inputs and calls with the same seed."""

        def samples(own: Any) -> Tensor:
            found: Tensor = in_own_shape(self.fitted, own, self._samples(own, num_samples, seed))
            return found

        found: Tensor = by_rows(self._on_device(inputs), samples, axis=1)
        return found

    @_apart
    def predictive(
        self,
        inputs: Any,
        *,
        num_samples: int = 100,
        link_approx: LinkApprox = "mc",
        covariance: Covariance = "auto",
        joint: bool = False,
        seed: int = 0,
    ) -> Any:
        """Posterior predictive of a batch, without gradients.

        Args:
            inputs: a batch.
            num_samples: number of Monte-Carlo samples.
            link_approx: from logits to probabilities: ``mc``, or in closed form ``probit``.
            covariance: ``exact`` covariances of the outputs, ``samples`` of the weights (Jacobian-vector products), or
                ``auto``: exact up to 128 outputs, where the Jacobian of one sample fits in memory or is not needed.
            joint: return samples, joint over all inputs, instead of their mean.
            seed: the seed of the samples; the same seed gives the same functions in every call.

        Returns:
            Probabilities in the shape of the network's output (of classes, or of yes for each output of ``binary``), or
            the :class:`GaussianPredictive` of a regression. With ``joint`` samples along a new first axis:
            probabilities, or a regression's outputs without noise.
        """
        fitted, inputs = self.fitted, self._on_device(inputs)
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        check_link_approx(link_approx)
        if covariance not in get_args(Covariance):
            raise ValueError(f"covariance={covariance!r} is not known; choose 'auto', 'exact' or 'samples'")
        options: dict[str, Any] = {"num_samples": num_samples, "covariance": covariance, "seed": seed}
        chosen = [(fitted.temperature, fitted.sharpness)]

        def found(own: Any) -> Any:
            if joint:
                scale = 1.0 if fitted.likelihood.noisy else fitted.sharpness
                predicted = fitted.likelihood.of_function(scale * self._samples(own, num_samples, seed))
            else:
                _, (predicted,) = tempered_predictives(fitted, own, chosen, link_approx=link_approx, **options)
            return in_own_shape(fitted, own, predicted)

        return by_rows(inputs, found, axis=1 if joint else 0)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """The posterior :meth:`predictive`."""
        return self.predictive(inputs, **options)

    @_apart
    def sample(self, num_samples: int, *, seed: int = 0) -> State:
        """Draw weights around the trained ones: a stack of states ``[num_samples, ...]``; what is certain is repeated.

        They have the temperature of predictions, and are those of :meth:`function_samples` with the same seed.
        """
        fitted = self.fitted
        fitted.require_weights()
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        draws = self.temperature**0.5 * torch.cat(list(fitted.posterior.draws(num_samples, seed)))
        state = {name: t.detach().clone() for name, t in fitted.tangent.state().items()}
        return stack_states([state | fitted.tangent.unflatten(fitted.tangent.point() + draw) for draw in draws])

    @_apart
    def epistemic(self, inputs: Any, *, num_samples: int = 100, seed: int = 0) -> Tensor:
        """How much the posterior leaves open at every input, by the evidence, whatever :meth:`calibrate` has chosen.

        Higher is less known: a score for out-of-distribution detection, also where the temperature is 0.

        Returns:
            Of a classification the mutual information of label and weights (nats; Houlsby et al., arXiv 1112.5745),
            ``[batch]`` (``[batch, positions]`` of several), of a regression the variance of the function, ``[batch]``:
            the mean over outputs.
        """

        def found(own: Any) -> Tensor:
            outputs, changes = function_posterior.function_samples(self.fitted, own, num_samples, seed)
            return self.fitted.likelihood.disagreement(outputs + changes)

        disagreement: Tensor = by_rows(self._on_device(inputs), found)
        return disagreement

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write curvature, precisions and ``theta*`` to a safetensors file; the network's weights are not in it."""
        storage.save(self.fitted, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> LinearizedLaplace:
        """Read what :meth:`save` wrote, for the same network with the same weights; else a LaplaceFileError."""
        return cls.from_fitted(storage.load(path, uncompiled(model)))

    def to_laplace_torch(self) -> Any:
        """A ``KronLaplace`` with the same posterior, see :func:`tu_symmetry.laplace.interop.to_laplace_torch`."""
        return interop.to_laplace_torch(self.fitted)

    @classmethod
    def from_laplace_torch(cls, other: Any, *, evaluate_at: EvaluateAt = "map") -> LinearizedLaplace:
        """A fitted ``KronLaplace``, see :func:`tu_symmetry.laplace.interop.from_laplace_torch`."""
        return cls.from_fitted(interop.from_laplace_torch(other, evaluate_at=evaluate_at))

    def _samples(self, inputs: Any, count: int, seed: int) -> Tensor:
        outputs, changes = function_posterior.function_samples(self.fitted, inputs, count, seed)
        return outputs + self.temperature**0.5 * changes

    def _on_device(self, inputs: Any) -> Any:
        """A batch to predict, on the network's device; refuses a network with other weights than those of the fit."""
        self.fitted.require_weights()
        device = next(self.model.parameters()).device
        found = mapped(lambda own: own.to(device), ordinary(inputs))
        if batch_size(found) == 0:
            raise ValueError("the batch holds no samples, so that there is nothing to predict")
        return found

    def _training_data(self, loader: Iterable[Any] | None) -> Iterable[Any]:
        loader = self.train_loader if loader is None else loader
        if loader is None:
            raise ValueError("at 'tangent_mode' the training data are read again; pass train_loader= after a load")
        self.fitted.require_weights()
        return loader
