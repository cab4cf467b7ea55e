"""Linearized Laplace in TorchUncertainty's routines: a post-processing, an ensemble of functions, a regression routine.

:class:`~tu_symmetry.callbacks.FitLaplace` fits the approximation to the trained network, on training data, and attaches
it to what is here. TorchUncertainty hands post-processings validation or test data; those are never used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

from tu_symmetry._extras import scripting_unsaid
from tu_symmetry.laplace.likelihood import LikelihoodName, LinkApprox, check_link_approx
from tu_symmetry.laplace.linearized import LinearizedLaplace

with scripting_unsaid():
    from torch_uncertainty.metrics import DistributionNLL, QuantileCalibrationError
    from torch_uncertainty.post_processing import PostProcessing
    from torch_uncertainty.routines import RegressionRoutine

_MISSING = (
    "no Laplace approximation is attached: add tu_symmetry.callbacks.FitLaplace to the trainer's callbacks, or call "
    "attach_laplace with a LinearizedLaplace that was fitted to this network's training data"
)


class LaplacePostProcessing(PostProcessing):
    """Predictive distribution of a linearized Laplace approximation, as a post-processing of TorchUncertainty.

    The routine's metrics ``test/post/...`` are those of the predictive. It returns *log-probabilities*, to which the
    routine applies a softmax. For OOD scores of the predictive pass ``ood_criterion="post_processing"`` to the routine;
    for what the posterior leaves open :class:`~tu_symmetry.routines.EpistemicCriterion`. Checkpoints hold the network's
    weights once.

    Args:
        laplace: the approximation; None for :class:`~tu_symmetry.callbacks.FitLaplace` to attach one.
        num_samples, link_approx: see :meth:`LinearizedLaplace.predictive`.
    """

    def __init__(
        self, laplace: LinearizedLaplace | None = None, *, num_samples: int = 100, link_approx: LinkApprox = "mc"
    ) -> None:
        super().__init__()
        check_link_approx(link_approx)
        self.predictive_options: dict[str, Any] = {
            "num_samples": num_samples,
            "link_approx": link_approx,
        }  # for the temperature too
        self.last_inputs: Tensor | None = None
        self.attach_laplace(laplace)

    def set_model(self, model: nn.Module) -> None:
        """Refer to the routine's network without registering it."""
        self.__dict__["model"] = model
        _checked(self.laplace, model)

    def attach_laplace(self, laplace: LinearizedLaplace | None) -> None:
        """Predict with this approximation; it has to be of the routine's network, no copy, and of a classification."""
        self.laplace, self.trained = _checked(laplace, self.model, "classification"), laplace is not None

    def fit(self, dataloader: DataLoader[Any]) -> None:
        """Do nothing with the validation or test data that the routine passes here."""
        if self.laplace is None:
            raise RuntimeError(f"{_MISSING}. The data that were passed here are held out, and no evidence for it")

    def forward(self, inputs: Tensor) -> Tensor:
        """Log-probabilities ``[batch, classes]`` of the predictive distribution."""
        if self.laplace is None:
            raise RuntimeError(_MISSING)
        self.last_inputs = inputs
        with torch.autocast(inputs.device.type, enabled=False):
            probabilities: Tensor = self.laplace.predictive(inputs, **self.predictive_options)
        return probabilities.log()


class LaplaceEnsemble(nn.Module):
    """Functions drawn from a linearized Laplace approximation, as the members of an ensemble.

    While it trains, and while :class:`~tu_symmetry.callbacks.FitLaplace` has not fitted yet, it is the ``core_model``.
    Afterwards ``forward`` maps a batch ``[B, ...]`` to ``[num_samples * B, C]``, all inputs of the first function
    first: ``f(x) + J(x) (theta_m - theta~)`` with the same weights ``theta_m`` for every input and batch. Routines take
    it with ``is_ensemble=True``.
    """

    def __init__(
        self, core_model: nn.Module, num_samples: int = 20, *, seed: int = 0, laplace: LinearizedLaplace | None = None
    ) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        self.core_model = core_model
        self.num_samples, self.seed = num_samples, seed
        self.predictive_options: dict[str, Any] = {"num_samples": num_samples, "covariance": "samples", "seed": seed}
        self.laplace, self._awaits_fit = _checked(laplace, core_model), False

    def attach_laplace(self, laplace: LinearizedLaplace | None) -> None:
        """Draw from this approximation, which has to be of ``core_model``; None: be the network until the next one."""
        self.laplace, self._awaits_fit = _checked(laplace, self.core_model), laplace is None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[num_samples * B, C]``; ``[B, C]`` of the network itself before the fit."""
        if self.training or (self.laplace is None and self._awaits_fit):
            return self.core_model(x)
        if self.laplace is None:
            raise RuntimeError(_MISSING)
        with torch.autocast(x.device.type, enabled=False):
            samples = self.laplace.function_samples(x, self.num_samples, seed=self.seed).flatten(0, 1)
        return samples if self.laplace.likelihood.noisy else self.laplace.sharpness * samples


class LaplaceRegressionRoutine(RegressionRoutine):
    """TorchUncertainty's regression routine with a linearized Laplace approximation's predictive at test.

    Training and validation are those of the routine without ``dist_family``. At test every output has a normal
    distribution with the posterior's variance plus the noise's, independent given the input, so that ``test/reg/NLL``
    (nats, for each output) and ``test/cal/QCE`` are logged beside MAE and RMSE.

    Args:
        model: the network, with outputs ``[batch, output_dim]``.
        loss: loss of training, for example ``nn.MSELoss()``.
        laplace: the approximation; None for :class:`~tu_symmetry.callbacks.FitLaplace` to attach one.
        options: further arguments of the routine (``optim_recipe``, ``log_plots``, ``save_to_csv``, ...).
    """

    def __init__(
        self,
        model: nn.Module,
        output_dim: int,
        loss: nn.Module | None = None,
        *,
        laplace: LinearizedLaplace | None = None,
        **options: Any,
    ) -> None:
        if options.get("dist_family") is not None or options.get("is_ensemble"):
            raise ValueError(
                "the Laplace approximation gives the predictive distribution of one network with real outputs: leave "
                "out dist_family and is_ensemble (for samples of functions, RegressionRoutine takes a LaplaceEnsemble)"
            )
        super().__init__(model, output_dim, loss, **options)
        self.attach_laplace(laplace)

    def attach_laplace(self, laplace: LinearizedLaplace | None) -> None:
        """Predict with this approximation; it has to be of the routine's network, no copy, and of a regression."""
        self.laplace = _checked(laplace, self.model, "regression")

    def _init_metrics(self) -> None:
        super()._init_metrics()
        error = QuantileCalibrationError(num_bins=self.num_bins_calibration_error)
        metrics = {"reg/NLL": DistributionNLL(reduction="mean"), "cal/QCE": error}
        self.test_prob_metrics = MetricCollection(metrics, prefix="test/")

    def on_test_start(self) -> None:
        """Require an approximation."""
        if self.laplace is None:
            raise RuntimeError(_MISSING)
        super().on_test_start()

    def evaluation_forward(self, inputs: Tensor) -> tuple[Tensor, Distribution | None]:
        """Prediction and, at test, the predictive distribution."""
        if self.laplace is None or not self.trainer.testing:
            return super().evaluation_forward(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            found = self.laplace.predictive(inputs)
        return found.mean, Independent(Normal(found.mean, found.variance.sqrt()), 1)

    def on_test_epoch_end(self) -> None:
        """Log the metrics, those of the distribution among them."""
        self.probabilistic = True  # only here: in training and in forward the network has no distribution
        try:
            super().on_test_epoch_end()
        finally:
            self.probabilistic = False


def _checked(
    laplace: LinearizedLaplace | None, model: nn.Module | None, kind: LikelihoodName | None = None
) -> LinearizedLaplace | None:
    """An approximation, which has to be of a part of the model and of this kind of likelihood."""
    if laplace is not None and kind is not None and laplace.likelihood.name != kind:
        raise ValueError(
            f"the Laplace approximation is of a {laplace.likelihood.name}, not of a {kind}: "
            f"FitLaplace(likelihood={kind!r})"
        )
    if laplace is not None and model is not None and all(module is not laplace.model for module in model.modules()):
        raise ValueError(
            f"the Laplace approximation is of a {type(laplace.model).__name__} that is no part of this "
            f"{type(model).__name__}, perhaps of a copy; fit it to the network itself"
        )
    return laplace
