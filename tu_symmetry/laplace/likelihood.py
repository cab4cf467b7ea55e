"""The observation model: loss, its gradient and square roots of its Hessian with respect to the network's output.

Outputs are ``[batch, outputs]``, or ``[batch, positions, outputs]`` where a sample has observations at several
positions (the tokens of a sequence). Given the outputs observations are independent, of samples and of positions: the
loss of a sample is the sum over its positions, and the Hessian has no entries between them. Losses are in nats. The
Gaussian is written for unit noise; the noise variance enters where losses and eigenvalues are read (see
:mod:`tu_symmetry.laplace.evidence`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

LikelihoodName = Literal["classification", "regression"]
FisherType = Literal["type-2", "mc", "empirical"]


class Directions(Sequence[Tensor]):
    """The columns of a root of the output matrix, one after the other: ``[batch, outputs]``, as the outputs are shaped.

    Where samples have several positions, each column belongs to one of them and is zero at the others, unless it is
    ``joint``. With two positions, three classes and an exact root there are ``2 * (3 - 1) = 4``: the two of the first
    position, then the two of the second. They are made when they are asked for, since all together hold
    ``batch * (positions * outputs)^2`` entries.

    Attributes:
        root: ``[columns, *outputs.shape]``, every position with its own.
        joint: whether one column serves all positions: where their signs or values are drawn independently, products
            between positions average out.
    """

    def __init__(self, root: Tensor, *, joint: bool) -> None:
        self.root, self.joint = root, joint or root.ndim == 3
        self._positions = 1 if self.joint else root.shape[2]

    def __len__(self) -> int:
        return len(self.root) * self._positions

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        if self.joint:
            return self.root[index]
        position, column = divmod(index % len(self), len(self.root))
        found = torch.zeros_like(self.root[column])
        found[:, position] = self.root[column, :, position]
        return found

    def of(self, rows: slice) -> Directions:
        """The columns of some samples."""
        return Directions(self.root[:, rows], joint=self.joint)


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
        """Gradient of the loss with respect to the outputs, in their shape."""

    @abstractmethod
    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """Hessian of the loss with respect to the outputs, times ``vectors`` in their shape."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor) -> Tensor:
        """``[columns, *outputs.shape]`` with ``sum_r root_r root_r^T`` equal to every observation's Hessian."""

    @abstractmethod
    def sampled_root(self, outputs: Tensor, mc_samples: int, generator: torch.Generator) -> Tensor:
        """Monte-Carlo version of :meth:`hessian_root`: gradients at targets drawn from the model.

        The generator is one of the CPU, so that every device draws the same.
        """

    def root(
        self,
        outputs: Tensor,
        targets: Tensor,
        fisher_type: FisherType,
        *,
        mc_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Directions:
        """Columns whose outer products sum to the chosen Fisher's output matrix, for every sample.

        Raises:
            ValueError: the Monte-Carlo Fisher without a generator.
        """
        if fisher_type == "type-2":
            return Directions(self.hessian_root(outputs), joint=False)
        if fisher_type == "mc":
            if generator is None:
                raise ValueError("fisher_type='mc' draws targets from the model: pass generator=torch.Generator()")
            return Directions(self.sampled_root(outputs, mc_samples, generator), joint=True)
        return Directions(self.residual(outputs, targets).unsqueeze(0), joint=False)


def as_outputs(found: Any, batch: int) -> Tensor:
    """What a network returns, as outputs ``[batch, outputs]`` or ``[batch, positions, outputs]``.

    Args:
        found: what it returned.
        batch: number of samples that it was given.

    Raises:
        TypeError: something else than a tensor of real numbers, in half precision for example.
        ValueError: another first axis than the batch, or too many axes.
    """
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the network returns a {type(found).__name__}; it has to return one tensor of outputs. Wrap it in a "
            "module whose forward gives that tensor alone (the logits)"
        )
    if found.dtype not in (torch.float32, torch.float64):
        cause = "only real numbers have a derivative (return logits, not the classes chosen by argmax)"
        if found.is_floating_point():
            cause = (
                "half precision has too few digits for a curvature: call model.float(), and leave out torch.autocast "
                "inside the network"
            )
        raise TypeError(f"the network's outputs are of type {found.dtype}; {cause}")
    if found.ndim == 0 or len(found) != batch:
        raise ValueError(
            f"the network's output has shape {tuple(found.shape)} for a batch of {batch} samples; its first axis has "
            "to be the batch. Positions of a sample that were flattened into it (tokens, pixels) are no independent "
            "samples: return them as [batch, positions, outputs]. Networks that take the batch as the second axis "
            "need a wrapper that transposes inputs and outputs"
        )
    if found.ndim == 1:
        found = found.unsqueeze(-1)
    if found.ndim > 3:
        raise ValueError(
            f"the network's output has shape {tuple(found.shape)}; linearized Laplace takes [batch, outputs], or "
            "[batch, positions, outputs] for dense prediction: move the outputs (classes) to the last axis and flatten "
            "the others between it and the batch, in the targets too"
        )
    if found.numel() == 0 and batch > 0:
        raise ValueError(f"the network's output has shape {tuple(found.shape)}: it holds no values")
    return found


def check_outputs(found: Any, batch: int) -> Tensor:
    """The same, where NaN and infinite values are refused too.

    Raises:
        TypeError: something else than a tensor of real numbers.
        ValueError: outputs of another shape, or values that are not finite.
    """
    outputs = as_outputs(found, batch)
    if not torch.isfinite(outputs.detach()).all():
        raise ValueError(
            "the network's output holds NaN or infinite values: its weights come from a diverged run, or the inputs "
            "are not finite; no curvature of it would mean anything"
        )
    return outputs


class Categorical(Likelihood):
    """Softmax classification; targets are class numbers ``[batch]``, or ``[batch, positions]``."""

    name: LikelihoodName = "classification"

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Class numbers as int64, checked against the number of outputs."""
        classes = outputs.shape[-1]
        if classes < 2:
            raise ValueError(
                "classification needs at least two outputs (logits); a single logit is a two-class problem whose "
                "first logit is 0: let the network return both"
            )
        if targets.ndim == outputs.ndim and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        if targets.shape != outputs.shape[:-1] or targets.is_floating_point() or targets.is_complex():
            raise ValueError(
                f"targets have shape {tuple(targets.shape)} and type {targets.dtype}, classification with outputs "
                f"{tuple(outputs.shape)} needs {tuple(outputs.shape[:-1])} class numbers (classes are the outputs' "
                "last axis); likelihood='regression' takes real targets"
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
        found = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        return found.view(len(targets), -1).sum(1)

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
        reflector[..., 0] += 1
        basis = torch.eye(classes, dtype=q.dtype, device=q.device)[:, 1:] - (
            reflector.unsqueeze(-1) * (q[..., 1:] / (1 + q[..., :1])).unsqueeze(-2)
        )
        return (q.unsqueeze(-1) * basis).movedim(-1, 0)

    def sampled_root(self, outputs: Tensor, mc_samples: int, generator: torch.Generator) -> Tensor:
        """Residuals at classes drawn from the softmax, over the square root of their number."""
        p = outputs.softmax(-1)
        uniform = torch.rand(*p.shape[:-1], mc_samples, generator=generator, dtype=p.dtype).to(p.device)
        labels = torch.searchsorted(p.cumsum(-1), uniform, right=True).clamp(max=p.shape[-1] - 1)
        onehot = torch.nn.functional.one_hot(labels, p.shape[-1]).to(p)
        return (p.unsqueeze(-2) - onehot).movedim(-2, 0) / mc_samples**0.5


class Gaussian(Likelihood):
    """Regression with homoscedastic noise; written for unit noise variance."""

    name: LikelihoodName = "regression"

    def targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Real targets in the shape of the outputs; the last axis may be left out for a single output."""
        if targets.ndim == outputs.ndim - 1:
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
        return 0.5 * (outputs - targets).square().flatten(1).sum(1)

    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``outputs - targets``."""
        return outputs - targets

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """The vectors themselves."""
        return vectors

    def hessian_root(self, outputs: Tensor) -> Tensor:
        """The identity."""
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return eye.view(len(eye), *[1] * (outputs.ndim - 1), -1).expand(-1, *outputs.shape[:-1], -1)

    def sampled_root(self, outputs: Tensor, mc_samples: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise, over the square root of the number of samples."""
        noise = torch.randn(mc_samples, *outputs.shape, generator=generator, dtype=outputs.dtype)
        return noise.to(outputs.device) / mc_samples**0.5


def make_likelihood(name: str) -> Likelihood:
    """The likelihood of that name.

    Raises:
        ValueError: a name other than ``classification`` and ``regression``.
    """
    kinds: dict[str, type[Likelihood]] = {"classification": Categorical, "regression": Gaussian}
    if name not in kinds:
        raise ValueError(f"likelihood={name!r} is not known; choose one of {sorted(kinds)}")
    return kinds[name]()
