"""A mixture of Laplace approximations: one around each of several networks that were trained apart.

The posterior has many modes, and a Laplace approximation knows one of them. A deep ensemble finds several; with an
approximation around each, the mixture has the spread of both. For two members with weights 1/2, means -1 and 1 and
variances 0.1, a regression predicts mean 0 and variance ``0.1 + 1``: the second part is what the members disagree by.

Members may be aligned first (:class:`tu_symmetry.callbacks.Rebasin`): a permuted network is the same function with
the same approximation, permuted, so that predictions stay as they are. Scales are fixed by no permutation, but
approximations whose groups are normalized ones do not change with these either.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.links import GaussianPredictive, LinkApprox
from tu_symmetry.laplace.outputs import class_axis_of
from tu_symmetry.laplace.predictive import Covariance
from tu_symmetry.laplace.report import EvidenceResult

Average = Literal["probabilities", "log_probabilities"]


def mixed(
    predictions: Sequence[Any], weights: Tensor, *, average: Average = "probabilities", axis: int | None = -1
) -> Any:
    """The predictive of a mixture.

    Args:
        predictions: the predictions of the members: probabilities of classes or of yes, or :class:`GaussianPredictive`.
        weights: ``[members]``, which add up to 1.
        average: ``probabilities``, the mixture itself; ``log_probabilities``: the weighted mean of their logarithms,
            normalized (a product of experts, which is sure where one member is). Of a regression there is only the
            first.
        axis: the axis of the classes; None where every number is the probability of yes.

    Returns:
        Probabilities, or mean and variance of the mixture (which is not Gaussian): the epistemic variance is that of
        the members plus that of their means.

    Raises:
        ValueError: another average, or one that a regression does not have.
    """
    if average not in ("probabilities", "log_probabilities"):
        raise ValueError(f"average={average!r} is not known; choose 'probabilities' or 'log_probabilities'")
    if isinstance(predictions[0], GaussianPredictive):
        if average != "probabilities":
            raise ValueError("average='log_probabilities' is of class probabilities; a regression has moments")
        mean, variance, epistemic = (torch.stack(own) for own in zip(*predictions, strict=True))
        w = weights.to(mean).view(-1, *[1] * (mean.ndim - 1))
        center = (w * mean).sum(0)
        spread = (w * (mean - center).square()).sum(0)
        return GaussianPredictive(center, (w * variance).sum(0) + spread, (w * epistemic).sum(0) + spread)
    stacked = torch.stack(list(predictions))
    w = weights.to(stacked).view(-1, *[1] * (stacked.ndim - 1))
    if average == "probabilities":
        return (w * stacked).sum(0)
    logs = (w * stacked.clamp(min=torch.finfo(stacked.dtype).tiny).log()).sum(0)
    if axis is not None:
        return logs.softmax(axis)
    others = (w * (1 - stacked).clamp(min=torch.finfo(stacked.dtype).tiny).log()).sum(0)
    return (logs - others).sigmoid()


class LaplaceMixture:
    """Several :class:`~tu_symmetry.LinearizedLaplace`, one for each member of an ensemble, as one posterior.

    Args:
        members: fitted approximations of networks for the same data, with one kind of likelihood.
        weights: the weights of the members, positive; they are normalized. None for equal ones, ``evidence`` for the
            shares of their marginal likelihoods (which usually leaves a single one).

    Attributes:
        members: the approximations.

    Raises:
        ValueError: no members, likelihoods of several kinds, or weights that do not fit.

    Example:
        >>> mixture = LaplaceMixture.fit([net_1, net_2, net_3], train_loader)               # doctest: +SKIP
        >>> mixture.optimize_evidence()                                                     # doctest: +SKIP
        >>> probabilities = mixture.predictive(x)                                           # doctest: +SKIP
    """

    def __init__(
        self,
        members: Sequence[LinearizedLaplace],
        *,
        weights: Sequence[float] | Literal["evidence"] | None = None,
    ) -> None:
        self.members = tuple(members)
        if not self.members:
            raise ValueError("a mixture needs at least one fitted LinearizedLaplace")
        kinds = {(la.likelihood.name, str(la.likelihood.config())) for la in self.members}
        if len(kinds) > 1:
            raise ValueError(f"the members have several likelihoods: {sorted(kinds)}; a mixture is of one")
        if isinstance(weights, str) and weights != "evidence":
            raise ValueError(f"weights={weights!r} is not known; choose None, 'evidence' or one number for each member")
        if weights is not None and not isinstance(weights, str):
            given = [float(w) for w in weights]
            if len(given) != len(self.members) or not all(w >= 0 and math.isfinite(w) for w in given) or not sum(given):
                raise ValueError(f"weights={given} have to be {len(self.members)} numbers, not negative, one positive")
            weights = [w / sum(given) for w in given]
        self._weights = weights

    @classmethod
    def fit(cls, models: Iterable[nn.Module], train_loader: Iterable[Any], **options: Any) -> LaplaceMixture:
        """Fit an approximation of every network.

        Args:
            models: the networks: a list, or the ``core_models`` of TorchUncertainty's ``deep_ensembles``.
            train_loader: the training data of all of them, read once for each and more.
            options: the options of :class:`~tu_symmetry.LinearizedLaplace`.
        """
        return cls([LinearizedLaplace(model, **options).fit(train_loader) for model in models])

    @property
    def weights(self) -> Tensor:
        """The weights of the members, float64; they add up to 1."""
        if self._weights is None:
            return torch.full((len(self.members),), 1 / len(self.members), dtype=torch.float64, device="cpu")
        if isinstance(self._weights, str):
            found = [la.log_marginal_likelihood() for la in self.members]
            return torch.tensor(found, dtype=torch.float64, device="cpu").softmax(0)
        return torch.tensor(self._weights, dtype=torch.float64, device="cpu")

    def optimize_evidence(self, train_loader: Iterable[Any] | None = None, **options: Any) -> list[EvidenceResult]:
        """:meth:`LinearizedLaplace.optimize_evidence` of every member."""
        return [la.optimize_evidence(train_loader, **options) for la in self.members]

    def log_marginal_likelihood(self) -> float:
        """Log of the weighted mean of the members' marginal likelihoods (nats).

        Each is the volume under one mode; those of permuted copies of it are not counted.
        """
        found = torch.tensor([la.log_marginal_likelihood() for la in self.members], dtype=torch.float64, device="cpu")
        return float((found + self.weights.log()).logsumexp(0))

    def predictive(
        self,
        inputs: Any,
        *,
        num_samples: int = 100,
        link_approx: LinkApprox = "mc",
        covariance: Covariance = "auto",
        average: Average = "probabilities",
        seed: int = 0,
    ) -> Any:
        """Posterior predictive of the mixture.

        Args:
            inputs: a batch.
            num_samples: Monte-Carlo samples of every member.
            link_approx: as in :meth:`LinearizedLaplace.predictive`.
            covariance: likewise.
            average: what to average, see :func:`mixed`.
            seed: the seed of the samples.
        """
        found = [
            la.predictive(
                inputs,
                num_samples=num_samples,
                link_approx=link_approx,
                covariance=covariance,
                seed=seed + number,
            )
            for number, la in enumerate(self.members)
        ]
        likelihood, axis = self.members[0].likelihood, None
        if likelihood.name == "classification":
            axis = class_axis_of(found[0].ndim, likelihood.class_axis)
        return mixed(found, self.weights, average=average, axis=axis)

    def predict(self, loader: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Stream over a loader, as :meth:`LinearizedLaplace.predict` does."""
        for batch in loader:
            yield self.predictive(batch[0] if isinstance(batch, (tuple, list)) else batch, **options)

    def function_samples(self, inputs: Any, num_samples: int = 100, *, seed: int = 0) -> Tensor:
        """Samples of the outputs ``[samples, *outputs.shape]``: each is of one member, joint over all inputs.

        Members have their weight's share of the samples, rounded so that all together are ``num_samples``.

        Args:
            inputs: a batch.
            num_samples: the number of samples of all members together.
            seed: the seed of the samples.

        Raises:
            ValueError: fewer samples than one.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} has to be at least 1")
        bounds = (self.weights.cumsum(0) * num_samples).round().long().tolist()
        found = []
        for number, (la, stop) in enumerate(zip(self.members, bounds, strict=True)):
            count = stop - (bounds[number - 1] if number else 0)
            if count > 0:
                found.append(la.function_samples(inputs, count, seed=seed + number))
        return torch.cat(found)

    # ------------------------------------------------------------------ storage

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write every member to ``member_0.safetensors`` and so on in a folder, as :meth:`LinearizedLaplace.save`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for number, la in enumerate(self.members):
            la.save(folder / f"member_{number}.safetensors")

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        models: Iterable[nn.Module],
        *,
        weights: Sequence[float] | Literal["evidence"] | None = None,
    ) -> LaplaceMixture:
        """Read what :meth:`save` wrote, for the same networks in the same order.

        Args:
            folder: with the members' files.
            models: the networks, with the weights they had then.
            weights: as in the constructor.

        Raises:
            LaplaceFileError: a file that does not belong to its network.
            FileNotFoundError: no file for a network.
        """
        files = [(Path(folder) / f"member_{number}.safetensors", model) for number, model in enumerate(models)]
        return cls([LinearizedLaplace.load(file, model) for file, model in files], weights=weights)
