"""The observation model: the loss, its gradient, and square roots of its Hessian with respect to the outputs.

Outputs are ``[batch, outputs]``, or ``[batch, positions, outputs]`` with an observation at every position (tokens,
pixels). Observations are independent given the outputs. Losses are sums in nats; a Gaussian's is for unit noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.transfer import numbers

LikelihoodName = Literal["classification", "regression", "binary"]
FisherType = Literal["type-2", "mc"]
LinkApprox = Literal["mc", "probit"]

_NORMALIZED = 1e-3  # error of the sum of a soft label
_ROUNDING = 16.0  # of outputs, in units in the last place
_SMALLEST = 1e-300  # probability


class GaussianPredictive(NamedTuple):
    """Predictive distribution of a regression."""

    mean: Tensor  # f(x), [batch, outputs]
    variance: Tensor  # of a new observation: epistemic plus the noise variance
    epistemic: Tensor  # of the network's outputs


def check_link_approx(link_approx: str) -> None:
    """Refuse unknown ones; the Laplace bridge (arXiv 2003.01227) among them, which changes the predicted class."""
    if link_approx not in ("mc", "probit"):
        raise ValueError(f"link_approx={link_approx!r} is not known; choose 'mc' or 'probit'")


class Directions:
    """The columns of a root ``[columns, *outputs.shape]`` of the output Hessian, one after the other.

    Where samples have several positions, each column belongs to one of them and is zero at the others, unless it is
    ``joint``, which is right where values at the positions are drawn independently. They are made when asked for: all
    together hold ``batch * (positions * outputs)^2`` entries.
    """

    def __init__(self, root: Tensor, *, joint: bool) -> None:
        self.root, self.joint = root, joint or root.ndim == 3
        self._positions = 1 if self.joint else root.shape[2]

    def __len__(self) -> int:
        return len(self.root) * self._positions

    def __iter__(self) -> Iterator[Tensor]:
        if self.joint:
            yield from self.root
            return
        for position in range(self._positions):
            for own in self.root:
                found = torch.zeros_like(own)
                found[:, position] = own[:, position]
                yield found

    def of(self, rows: slice) -> Directions:
        """The columns of some samples."""
        return Directions(self.root[:, rows], joint=self.joint)


class Likelihood(ABC):
    """What the curvature, the evidence, the tangent model and the predictive need to know about the observations.

    Targets come in two forms. :meth:`observed` is what was seen, checked; predictions are compared with it.
    :meth:`targets` is what the loss takes, with label smoothing, class weights and ignored positions worked in.

    Attributes:
        name: the name of the kind of likelihood.
        noisy: whether observations are real values, with a noise variance that the evidence finds and that divides
            losses; else they are labels, and predictions probabilities.
        quadratic: whether the loss is quadratic in the outputs.
        class_axis: the axis of the network's output that holds the classes (or other outputs of one position); None
            for the last of two or three axes, and for axis 1 of four and more, torch's convention of images.
    """

    name: LikelihoodName
    noisy = False
    quadratic = False

    def __init__(self, *, class_axis: int | None = None) -> None:
        self.class_axis = class_axis

    def config(self) -> dict[str, Any]:
        """The arguments to make it anew with, for files."""
        return {} if self.class_axis is None else {"class_axis": self.class_axis}

    @abstractmethod
    def observed(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What was seen, checked against the outputs and in their order of positions.

        Raises:
            ValueError: outputs or targets of the wrong shape or kind, or out of range.
        """

    def present(self, observed: Tensor) -> Tensor:
        """Which observations are not left out, bool, one row for each sample: ``[batch]`` or ``[batch, ...]``."""
        return torch.ones_like(observed, dtype=torch.bool)

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets in the form that the loss takes, one row for each sample."""
        return self.observed(outputs, targets)

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of every sample ``[batch]`` (nats); for unit noise and without constants if noisy."""

    @abstractmethod
    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of the loss with respect to the outputs, in their shape."""

    @abstractmethod
    def hessian_product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Hessian of the loss in the outputs, times ``vectors`` ``[..., *outputs.shape]``."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[columns, *outputs.shape]`` with ``sum_r root_r root_r^T`` equal to every observation's Hessian."""

    @abstractmethod
    def sampled_root(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Monte-Carlo :meth:`hessian_root`: the gradient at targets drawn from the model, by a generator of the CPU."""

    def root(self, outputs: Tensor, targets: Tensor, fisher_type: FisherType, generator: torch.Generator) -> Directions:
        """Columns whose outer products sum to every sample's output Hessian, or to a Monte-Carlo estimate of it."""
        if fisher_type == "type-2":
            return Directions(self.hessian_root(outputs, targets), joint=False)
        return Directions(self.sampled_root(outputs, targets, generator), joint=True)

    @abstractmethod
    def of_function(self, outputs: Tensor) -> Tensor:
        """What the outputs of one function predict: probabilities, or the outputs themselves."""

    def predict(
        self,
        mean: Tensor,
        variance: Tensor,
        deviations: Tensor | None,
        *,
        temperature: float,
        sharpness: float,
        noise: float,
    ) -> Any:
        """The predictive, from Gaussian outputs.

        Args:
            mean: the mean of the outputs.
            variance: the variance of every output, in the same shape.
            deviations: samples ``[samples, *outputs.shape]`` of the outputs less their mean, or None for MacKay's
                closed form ``f / sqrt(1 + pi/8 var)``.
            temperature: factor of the variance; at 0 the prediction is exactly the network's own.
            sharpness: the power of the likelihood: logits times it, the noise's variance over it.
            noise: variance of the noise.
        """
        if temperature == 0:
            return self.of_function(sharpness * mean)
        if deviations is None:
            return self.of_function(sharpness * mean / (1 + math.pi / 8 * sharpness**2 * temperature * variance).sqrt())
        return self.of_function(sharpness * (mean + temperature**0.5 * deviations)).mean(0)

    def disagreement(self, outputs: Tensor) -> Tensor:
        """Mutual information of labels (nats), or variance of means, of ``[samples, batch, ..., outputs]``."""
        if self.noisy:
            return outputs.var(0, correction=0).mean(-1)
        p = self.of_function(outputs).double()
        p = p if self.name == "classification" else torch.stack([p, 1 - p], -1)
        found = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
        return found if self.name == "classification" else found.sum(-1)

    @abstractmethod
    def nll(self, prediction: Any, observed: Tensor) -> Tensor:
        """Negative log-likelihood (nats, float64) of every observation as in :meth:`present`, 0 where left out."""

    def _aligned(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Real targets with the classes last and positions on one axis, where they came in the network's own shape."""
        axes, axis = targets.ndim, self.class_axis
        if min(axes, outputs.ndim) < 3 or (axes == 3 and axis is None):
            return targets
        axis = 1 if axis is None else axis
        if -axes < axis < axes and targets.shape[axis] == outputs.shape[-1]:
            return targets.movedim(axis, -1).flatten(1, -2)
        return targets


class Categorical(Likelihood):
    """Softmax classification: torch's cross entropy, summed.

    Class numbers are ``[batch]``, ``[batch, positions]`` or ``[batch, height, width]``; soft labels have the shape of
    the network's output, and add up to 1 over the classes. With labels ``q`` (one-hot, or soft), ``C`` classes,
    smoothing ``e``, class weights ``w``, and ``p = softmax(f)``::

        loss = -sum_c q'_c log p_c,    q'_c = w_c ((1 - e) q_c + e / C)

    The gradient is ``|q'| p - q'`` and the Hessian ``|q'| (diag p - p p^T)``, where ``|q'|`` is the sum of ``q'``.

    Args:
        label_smoothing: ``e``, between 0 and 1.
        class_weights: ``w``, one for each class, none negative.
        ignore_index: class number of observations that are left out; None to leave none out.
        class_axis: see :class:`Likelihood`.
    """

    name: LikelihoodName = "classification"

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | Tensor | None = None,
        ignore_index: int | None = -100,
        class_axis: int | None = None,
    ) -> None:
        super().__init__(class_axis=class_axis)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing} has to be at least 0 and below 1")
        self.label_smoothing, self.ignore_index = float(label_smoothing), ignore_index
        self.class_weights = None if class_weights is None else _weights(class_weights, "class_weights")

    def config(self) -> dict[str, Any]:
        """The arguments to make it anew with."""
        return super().config() | {
            "label_smoothing": self.label_smoothing,
            "class_weights": None if self.class_weights is None else list(self.class_weights),
            "ignore_index": self.ignore_index,
        }

    def observed(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Soft labels, or one-hot rows of class numbers (zeros of ignored ones), in the outputs' shape and type."""
        classes = outputs.shape[-1]
        if classes < 2:
            raise ValueError("classification needs at least two logits; for a single one choose likelihood='binary'")
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(f"there are {len(self.class_weights)} class weights for {classes} outputs")
        if targets.is_floating_point():
            soft = self._aligned(outputs, targets)
            if soft.shape == outputs.shape:
                return _soft_labels(soft.to(outputs))
        found = targets
        if targets.ndim == outputs.ndim == 2 and targets.shape[-1] == 1:
            found = targets.squeeze(-1)
        elif outputs.ndim == 3 and targets.ndim > 1 and targets.shape != outputs.shape[:-1]:
            found = targets.flatten(1)  # [batch, height, width], or with an axis of length 1
        if found.shape != outputs.shape[:-1] or targets.is_floating_point() or targets.is_complex():
            raise ValueError(
                f"targets have shape {tuple(targets.shape)} and type {targets.dtype}, classification with outputs "
                f"{tuple(outputs.shape)} [batch, positions, outputs] needs {tuple(outputs.shape[:-1])} class numbers, "
                "or soft labels in the shape of the outputs (Categorical(class_axis=1) says where classes are); "
                "likelihood='regression' takes real targets"
            )
        labels = found.long()
        present = torch.ones_like(labels, dtype=torch.bool)
        if self.ignore_index is not None:
            present = labels != self.ignore_index
        low, high = numbers(labels[present].aminmax()) if bool(present.any()) else (0, 0)
        if low < 0 or high >= classes:
            raise ValueError(
                f"targets lie in [{low:.0f}, {high:.0f}], but the network has classes 0 to {classes - 1}; leave labels "
                "out with Categorical(ignore_index=...), or use the network that was trained on these labels"
            )
        return F.one_hot(torch.where(present, labels, 0), classes).to(outputs) * present.unsqueeze(-1)

    def present(self, observed: Tensor) -> Tensor:
        """Rows with a label."""
        return observed.any(-1)

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``q'`` in the shape of the outputs; zeros for a label that is left out."""
        labels = self.observed(outputs, targets)
        if self.label_smoothing:
            share = self.label_smoothing * labels.sum(-1, keepdim=True) / outputs.shape[-1]
            labels = (1 - self.label_smoothing) * labels + share
        if self.class_weights is not None:
            labels = labels * torch.tensor(self.class_weights, dtype=outputs.dtype, device=outputs.device)
        return labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over positions and outputs."""
        return -(targets * outputs.log_softmax(-1)).flatten(1).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``|q'| p - q'``."""
        return targets.sum(-1, keepdim=True) * outputs.softmax(-1) - targets

    def hessian_product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """``|q'| (diag p - p p^T) vectors``."""
        p = outputs.softmax(-1)
        return targets.sum(-1, keepdim=True) * p * (vectors - (p * vectors).sum(-1, keepdim=True))

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Exact root with one column less than classes.

        ``diag p - p p^T = diag(q) (I - q q^T) diag(q)`` with ``q = sqrt(p)`` a unit vector, and a Householder
        reflection gives an orthonormal basis of the complement of ``q``.
        """
        q = outputs.softmax(-1).sqrt()
        reflector = q.clone()
        reflector[..., 0] += 1
        basis = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)[:, 1:] - (
            reflector.unsqueeze(-1) * (q[..., 1:] / (1 + q[..., :1])).unsqueeze(-2)
        )
        q = q * targets.sum(-1, keepdim=True).sqrt()
        return (q.unsqueeze(-1) * basis).movedim(-1, 0)

    def sampled_root(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Prediction less a drawn label, weighted."""
        p = outputs.softmax(-1)
        uniform = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=p.dtype, device="cpu").to(p.device)
        labels = torch.searchsorted(p.cumsum(-1), uniform, right=True).clamp(max=p.shape[-1] - 1)
        root = p - F.one_hot(labels.squeeze(-1), p.shape[-1]).to(p)
        return (root * targets.sum(-1, keepdim=True).sqrt()).unsqueeze(0)

    def of_function(self, outputs: Tensor) -> Tensor:
        """Probabilities."""
        return outputs.softmax(-1)

    def nll(self, prediction: Tensor, observed: Tensor) -> Tensor:
        """The negative log-likelihood of the label, or the cross entropy with soft ones."""
        return -(observed.double() * prediction.double().clamp(min=_SMALLEST).log()).sum(-1)


class Bernoulli(Likelihood):
    """Yes or no, for one output or several independent ones: binary cross entropy with logits, summed.

    Targets are 0, 1 or probabilities between them, in the shape of the outputs; the last axis may be left out for a
    single output. With ``y`` a target, ``w`` the positive weight of its output and ``s`` the sigmoid::

        loss = -(w y log s(f) + (1 - y) log(1 - s(f)))

    Args:
        pos_weight: ``w``, one number or one for each output, none negative.
        class_axis: see :class:`Likelihood`.
    """

    name: LikelihoodName = "binary"

    def __init__(
        self, *, pos_weight: float | Sequence[float] | Tensor | None = None, class_axis: int | None = None
    ) -> None:
        super().__init__(class_axis=class_axis)
        if isinstance(pos_weight, (int, float)):
            pos_weight = [pos_weight]
        self.pos_weight = None if pos_weight is None else _weights(pos_weight, "pos_weight")

    def config(self) -> dict[str, Any]:
        """The arguments to make it anew with."""
        return super().config() | {"pos_weight": None if self.pos_weight is None else list(self.pos_weight)}

    def observed(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets in the shape and type of the outputs."""
        found = self._aligned(outputs, targets)
        if outputs.shape[-1] == 1 and targets.numel() == outputs.numel():
            found = targets.reshape(outputs.shape)
        if found.shape != outputs.shape or found.is_complex():
            raise ValueError(
                f"targets have shape {tuple(targets.shape)} and type {targets.dtype}, likelihood='binary' with outputs "
                f"{tuple(outputs.shape)} needs one number between 0 and 1 for every output; class numbers belong to "
                "likelihood='classification'"
            )
        found = found.to(outputs.dtype)
        if not bool(((found >= 0) & (found <= 1)).all()):
            low, high = numbers(found.aminmax())
            raise ValueError(f"targets lie in [{low:g}, {high:g}]; likelihood='binary' needs them from 0 to 1")
        return found

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Weights of yes and no, ``[*outputs.shape, 2]``."""
        y = self.observed(outputs, targets)
        weight: float | Tensor = 1.0
        if self.pos_weight is not None:
            if len(self.pos_weight) not in (1, outputs.shape[-1]):
                raise ValueError(f"there are {len(self.pos_weight)} positive weights for {outputs.shape[-1]} outputs")
            weight = torch.tensor(self.pos_weight, dtype=y.dtype, device=y.device)
        return torch.stack([weight * y, 1 - y], dim=-1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over positions and outputs."""
        yes, no = targets.unbind(-1)
        return (yes * F.softplus(-outputs) + no * F.softplus(outputs)).flatten(1).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Prediction less target."""
        return targets.sum(-1) * outputs.sigmoid() - targets[..., 0]

    def hessian_product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian is diagonal."""
        return targets.sum(-1) * outputs.sigmoid() * (-outputs).sigmoid() * vectors

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One column for each output."""
        diagonal = self.hessian_product(outputs, targets, torch.ones_like(outputs))
        return torch.diag_embed(diagonal.sqrt()).movedim(-1, 0)

    def sampled_root(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Prediction less a drawn answer, weighted."""
        p = outputs.sigmoid()
        uniform = torch.rand(1, *p.shape, generator=generator, dtype=p.dtype, device="cpu").to(p.device)
        return (p - (uniform < p).to(p)) * targets.sum(-1).sqrt()

    def of_function(self, outputs: Tensor) -> Tensor:
        """Probabilities."""
        return outputs.sigmoid()

    def nll(self, prediction: Tensor, observed: Tensor) -> Tensor:
        """The negative log-likelihood of every observation."""
        p, y = prediction.double(), observed.double()
        return -(y * p.clamp(min=_SMALLEST).log() + (1 - y) * (1 - p).clamp(min=_SMALLEST).log())


class Gaussian(Likelihood):
    """Regression with homoscedastic noise; losses are for unit noise variance."""

    name: LikelihoodName = "regression"
    noisy = True
    quadratic = True

    def observed(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Finite targets in the shape and type of the outputs; of a single output the last axis may be left out."""
        found = self._aligned(outputs, targets)
        if found.ndim == outputs.ndim - 1:
            found = found.unsqueeze(-1)
        if found.shape != outputs.shape:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}, the network's outputs {tuple(outputs.shape)}; regression "
                "needs them equal"
            )
        found = found.to(outputs.dtype)
        if not torch.isfinite(found).all():
            raise ValueError("regression targets hold NaN or infinite values")
        return found

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error; zero where that is rounding (16 units of the targets' root mean square)."""
        error = (outputs - targets).square().flatten(1).sum(1)
        rounding = _ROUNDING * min(torch.finfo(error.dtype).eps, torch.finfo(torch.float32).eps)
        least = rounding**2 * targets.square().sum() / max(1, len(targets))
        return 0.5 * torch.where(error > least, error, 0)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Prediction less target."""
        return outputs - targets

    def hessian_product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian is the identity."""
        return vectors

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One column for each output."""
        return torch.diag_embed(torch.ones_like(outputs)).movedim(-1, 0)

    def sampled_root(self, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Noise of unit variance."""
        return torch.randn(1, *outputs.shape, generator=generator, dtype=outputs.dtype, device="cpu").to(outputs.device)

    def of_function(self, outputs: Tensor) -> Tensor:
        """The outputs."""
        return outputs

    def predict(
        self,
        mean: Tensor,
        variance: Tensor,
        deviations: Tensor | None,
        *,
        temperature: float,
        sharpness: float,
        noise: float,
    ) -> GaussianPredictive:
        """Mean and variances."""
        epistemic = temperature * variance
        return GaussianPredictive(mean, epistemic + noise / sharpness, epistemic)

    def nll(self, prediction: GaussianPredictive, observed: Tensor) -> Tensor:
        """The negative log-likelihood of every output."""
        mean, variance = prediction.mean.double(), prediction.variance.double()
        return 0.5 * ((observed.double() - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def _weights(values: Sequence[float] | Tensor, option: str) -> tuple[float, ...]:
    found = tuple(float(v) for v in values)
    if not all(v >= 0 and math.isfinite(v) for v in found):
        raise ValueError(f"{option}={list(found)} has to be finite and not negative")
    return found


def _soft_labels(found: Tensor) -> Tensor:
    sums = found.sum(-1)
    if not bool((found >= 0).all() and ((sums - 1).abs() <= _NORMALIZED).all()):
        raise ValueError(
            "real targets in the shape of the outputs are soft labels, which have to be positive and add up to 1 over "
            f"the classes; theirs start at {float(found.min()):g}, with sums in [{float(sums.min()):g}, "
            f"{float(sums.max()):g}]. Choose likelihood='regression' for real targets, 'binary' for independent labels"
        )
    return found


KINDS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Categorical, Gaussian, Bernoulli)}
_LOSSES = (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss)


def make_likelihood(kind: str | Likelihood | nn.Module, options: Mapping[str, Any] | None = None) -> Likelihood:
    """A likelihood by its name (with options), by the loss that a network was trained with, or as it is.

    Raises:
        ValueError: another name, or a loss that is no likelihood here.
    """
    if isinstance(kind, Likelihood):
        return kind
    found = likelihood_of(kind) if isinstance(kind, nn.Module) else None
    if found is None and (not isinstance(kind, str) or kind not in KINDS):
        name = type(kind).__name__ if isinstance(kind, nn.Module) else repr(kind)
        raise ValueError(f"likelihood={name} is not known; choose one of {sorted(KINDS)}")
    return found or KINDS[str(kind)](**(options or {}))


def likelihood_of(loss: nn.Module) -> Likelihood | None:
    """The likelihood whose negative logarithm a loss is, summed over observations; None where that is not known."""
    if all(type(loss).forward is not kind.forward for kind in _LOSSES):
        return None  # a focal loss may be derived from the cross entropy
    if isinstance(loss, nn.CrossEntropyLoss):
        return Categorical(
            label_smoothing=loss.label_smoothing, class_weights=loss.weight, ignore_index=loss.ignore_index
        )
    if isinstance(loss, nn.BCEWithLogitsLoss) and loss.weight is None:
        return Bernoulli(pos_weight=None if loss.pos_weight is None else loss.pos_weight.reshape(-1))
    return Gaussian() if isinstance(loss, nn.MSELoss) else None
