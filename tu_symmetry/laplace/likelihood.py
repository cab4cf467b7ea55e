"""The observation model: loss, its gradient and square roots of its Hessian with respect to the network's output.

All losses are sums over the batch, in nats, of outputs ``[batch, outputs]``. The Gaussian is written for unit noise;
the noise variance enters where losses and eigenvalues are read (see :mod:`tu_symmetry.laplace.evidence`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

LikelihoodName = Literal["classification", "regression"]
Fisher = Literal["type2", "mc", "empirical"]


class Likelihood(ABC):
    """What the curvature, the evidence and the tangent model need to know about the observations."""

    name: LikelihoodName

    @abstractmethod
    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets in the form that the other methods take.

        Raises:
            ValueError: outputs or targets of the wrong shape or kind, or out of range.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of every sample ``[batch]`` (nats), for unit noise and without constants."""

    @abstractmethod
    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Gradient of the loss with respect to the outputs, ``[batch, outputs]``."""

    @abstractmethod
    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """Hessian of the loss with respect to the outputs, times ``vectors``, both ``[batch, outputs]``."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor) -> Tensor:
        """``[columns, batch, outputs]`` with ``sum_r root_r root_r^T`` equal to the Hessian of every sample."""

    @abstractmethod
    def sampled_root(self, outputs: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Monte-Carlo version of :meth:`hessian_root`: gradients at targets drawn from the model.

        The generator is one of the CPU, so that every device draws the same.
        """

    def root(
        self,
        outputs: Tensor,
        targets: Tensor,
        fisher: Fisher,
        *,
        draws: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Columns ``[columns, batch, outputs]`` whose outer products sum to the chosen Fisher's output matrix.

        Raises:
            ValueError: the Monte-Carlo Fisher without a generator.
        """
        if fisher == "type2":
            return self.hessian_root(outputs)
        if fisher == "mc":
            if generator is None:
                raise ValueError("fisher='mc' draws targets from the model: pass generator=torch.Generator()")
            return self.sampled_root(outputs, draws, generator)
        return self.residual(outputs, targets).unsqueeze(0)


def check_outputs(outputs: Tensor) -> Tensor:
    """The network's outputs as ``[batch, outputs]``; NaN and infinite values are refused.

    Raises:
        ValueError: more than two axes, or values that are not finite.
    """
    if outputs.ndim == 1:
        outputs = outputs.unsqueeze(-1)
    if outputs.ndim != 2:
        raise ValueError(
            f"the network's output has shape {tuple(outputs.shape)}; linearized Laplace needs [batch, outputs] "
            "(for dense prediction, flatten positions into the batch or the outputs)"
        )
    if not torch.isfinite(outputs.detach()).all():
        raise ValueError(
            "the network's output holds NaN or infinite values: its weights come from a diverged run, or the inputs "
            "are not finite; no curvature of it would mean anything"
        )
    return outputs


class Categorical(Likelihood):
    """Softmax classification; targets are class numbers ``[batch]``."""

    name: LikelihoodName = "classification"

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Class numbers as int64, checked against the number of outputs."""
        classes = outputs.shape[-1]
        if classes < 2:
            raise ValueError(
                "classification needs at least two outputs (logits); a single logit is a two-class problem whose "
                "first logit is 0: let the network return both"
            )
        if targets.ndim == 2 and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        if targets.shape != outputs.shape[:1] or targets.is_floating_point():
            raise ValueError(
                f"targets have shape {tuple(targets.shape)} and type {targets.dtype}, classification needs "
                f"{tuple(outputs.shape[:1])} class numbers; likelihood='regression' takes real targets"
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"targets lie in [{low}, {high}], but the network has {classes} outputs, classes 0 to {classes - 1}; "
                "drop ignored labels from the loader, or use the network that was trained on these labels"
            )
        return targets.long()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``softmax(outputs) - onehot(targets)``."""
        return outputs.softmax(-1) - torch.nn.functional.one_hot(targets, outputs.shape[-1]).to(outputs)

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """``(diag p - p p^T) vectors``."""
        p = outputs.softmax(-1)
        return p * (vectors - (p * vectors).sum(-1, keepdim=True))

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """Exact root with one column less than classes.

        ``diag p - p p^T = diag(q) (I - q q^T) diag(q)`` with ``q = sqrt(p)`` a unit vector, and a Householder
        reflection gives an orthonormal basis of the complement of ``q``.
        """
        q = outputs.softmax(-1).sqrt()
        classes = q.shape[-1]
        reflector = q.clone()
        reflector[:, 0] += 1
        basis = torch.eye(classes, dtype=q.dtype, device=q.device)[:, 1:] - (
            reflector.unsqueeze(-1) * (q[:, 1:] / (1 + q[:, :1])).unsqueeze(-2)
        )
        return (q.unsqueeze(-1) * basis).permute(2, 0, 1)

    def sampled_root(self, outputs: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Residuals at classes drawn from the softmax, over the square root of their number."""
        p = outputs.softmax(-1)
        uniform = torch.rand(len(p), draws, generator=generator, dtype=p.dtype).to(p.device)
        labels = torch.searchsorted(p.cumsum(-1), uniform, right=True).clamp(max=p.shape[-1] - 1)
        onehot = torch.nn.functional.one_hot(labels, p.shape[-1]).to(p)
        return (p.unsqueeze(1) - onehot).transpose(0, 1) / draws**0.5


class Gaussian(Likelihood):
    """Regression with homoscedastic noise; written for unit noise variance."""

    name: LikelihoodName = "regression"

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Real targets ``[batch, outputs]``; ``[batch]`` is taken for a single output."""
        if targets.ndim == 1:
            targets = targets.unsqueeze(-1)
        if targets.shape != outputs.shape:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}, the network's outputs {tuple(outputs.shape)}; regression "
                "needs them equal"
            )
        targets = targets.to(outputs.dtype)
        if not torch.isfinite(targets).all():
            raise ValueError("regression targets hold NaN or infinite values")
        return targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error."""
        return 0.5 * (outputs - targets).square().sum(-1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``outputs - targets``."""
        return outputs - targets

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """The vectors themselves."""
        return vectors

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """The identity."""
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return eye.unsqueeze(1).expand(-1, outputs.shape[0], -1)

    def sampled_root(self, outputs: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise, over the square root of the number of draws."""
        noise = torch.randn(draws, *outputs.shape, generator=generator, dtype=outputs.dtype)
        return noise.to(outputs.device) / draws**0.5


def make_likelihood(name: str) -> Likelihood:
    """The likelihood of that name.

    Raises:
        ValueError: a name other than ``classification`` and ``regression``.
    """
    kinds: dict[str, type[Likelihood]] = {"classification": Categorical, "regression": Gaussian}
    if name not in kinds:
        raise ValueError(f"likelihood={name!r} is not known; choose one of {sorted(kinds)}")
    return kinds[name]()
