"""Zero-mean Gaussian priors of weights with covariances inside a pattern, such as the 3 x 3 offsets of a convolution.

The weights of a block are ``n`` patterns of ``k`` entries, all with the same covariance ``K = sum_r c_r E_r``
``[k, k]``, of fixed symmetric matrices ``E_r`` and coefficients that are functions of the hyperparameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.tangent import TangentModel

JITTER = 1e-6  # on the diagonal of a kernel, relative to the variance

Prior = TypeVar("Prior", bound="StructuredPrior")


@dataclass(frozen=True)
class StructuredPrior(ABC):
    """The prior of one block of weights; its ``phi`` are the logarithms of what ``hyperparameters`` names, float64.

    ``parameters`` are names, or prefixes of names; ``name`` is that of the block. ``variance`` is where it starts.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("variance",)

    parameters: Sequence[str]
    name: str = ""
    variance: float = 1.0
    variance_bounds: tuple[float, float] = (1e-12, 1e12)

    def __post_init__(self) -> None:
        if isinstance(self.parameters, str) or not self.parameters:
            raise ValueError(f"parameters={self.parameters!r} has to be a list of names, at least one")
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "name", self.name or self.parameters[0])
        for kind in self.hyperparameters:
            start, (low, high) = getattr(self, kind), getattr(self, f"{kind}_bounds")
            if not 0 < low <= start <= high < math.inf:
                raise ValueError(f"{kind}={start} has to lie within its bounds {(low, high)}, positive and finite")

    def resolve(self: Prior, shapes: Mapping[str, Sequence[int]]) -> Prior:
        """The prior with full names of parameters, and all that their shapes say."""
        found: list[str] = []
        for wanted in self.parameters:
            own = [name for name in shapes if name == wanted or name.startswith(wanted + ".")]
            if not own:
                raise ValueError(
                    f"block {self.name!r} names {wanted!r}, which matches no parameter; there are {[*shapes][:12]} ..."
                )
            found += own
        return replace(self, parameters=tuple(dict.fromkeys(found)))

    @property
    @abstractmethod
    def basis(self) -> Tensor:
        """``E``, float64 ``[R, k, k]``."""

    @abstractmethod
    def coefficients(self, phi: Tensor) -> Tensor:
        """``c``, ``[R]``: differentiable in ``phi``."""

    def initial(self) -> Tensor:
        """The hyperparameters to start from, float64 ``[H]``."""
        values = [math.log(getattr(self, kind)) for kind in self.hyperparameters]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def bounds(self) -> list[tuple[float, float]]:
        """Lowest and highest value of each entry of ``phi``."""
        limits = [getattr(self, f"{kind}_bounds") for kind in self.hyperparameters]
        return [(math.log(low), math.log(high)) for low, high in limits]

    @property
    def pattern(self) -> int:
        """Number of entries ``k`` of a pattern."""
        return self.basis.shape[-1]

    def covariance(self, phi: Tensor) -> Tensor:
        """``K``, float64 ``[k, k]``."""
        return torch.einsum("r,rij->ij", self.coefficients(phi), self.basis)

    def root(self, phi: Tensor) -> Tensor:
        """The lower Cholesky factor of ``K``."""
        root = cholesky(self.covariance(phi))
        if root is None:
            raise ValueError(
                f"the prior covariance of block {self.name!r} is not positive definite at "
                f"{dict(zip(self.hyperparameters, phi.exp().tolist(), strict=True))}: bound the hyperparameters"
            )
        return root


@dataclass(frozen=True)
class IsotropicPrior(StructuredPrior):
    """Independent weights with one variance; its arguments are those of :class:`StructuredPrior`."""

    @property
    def basis(self) -> Tensor:
        """``[[1]]``: a pattern is a single weight."""
        return torch.ones(1, 1, 1, dtype=torch.float64, device="cpu")

    def coefficients(self, phi: Tensor) -> Tensor:
        """The variance."""
        return phi.exp()


@dataclass(frozen=True)
class KernelPrior(StructuredPrior):
    """A Gaussian process over the offsets of a convolution's kernel, the same for every pair of channels.

    ``K = variance * (exp(-|o - o'| / lengthscale) + 1e-6 I)``, lengths in pixels: neighboring entries of a filter are
    alike. :meth:`resolve` reads the ``shape`` off the weights; other arguments are those of :class:`StructuredPrior`.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("variance", "lengthscale")

    lengthscale: float = 0.1
    lengthscale_bounds: tuple[float, float] = (0.01, 1000.0)
    shape: tuple[int, ...] = ()

    def resolve(self, shapes: Mapping[str, Sequence[int]]) -> KernelPrior:
        """The prior with full names, and with the shape of the weights' kernels."""
        found = super().resolve(shapes)
        kernels = {tuple(shapes[name][2:]) for name in found.parameters}
        if len(kernels) != 1 or kernels == {()}:
            raise ValueError(
                f"block {self.name!r} needs weights of convolutions with one kernel shape (all axes after the second); "
                f"its parameters have shapes { {name: tuple(shapes[name]) for name in found.parameters} }. Use "
                "IsotropicPrior for biases and linear layers"
            )
        return replace(found, shape=kernels.pop())

    @property
    def basis(self) -> Tensor:
        """A 0/1 matrix for each distance."""
        distances, which = _distances(self.shape)
        return (which.unsqueeze(0) == torch.arange(len(distances), device="cpu").view(-1, 1, 1)).double()

    def coefficients(self, phi: Tensor) -> Tensor:
        """``variance * exp(-distance / lengthscale)``, with the jitter at distance 0."""
        distances = _distances(self.shape)[0].to(phi)
        nugget = torch.zeros_like(distances)
        nugget[0] = JITTER
        return phi[0].exp() * ((-(distances / phi[1].exp())).exp() + nugget)


@lru_cache(maxsize=64)
def _distances(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The different distances of two offsets, ascending from 0, and which of them each pair has ``[k, k]``."""
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64, device="cpu") for n in shape))
    points = grid.reshape(-1, len(shape))
    squares = (points.unsqueeze(0) - points.unsqueeze(1)).square().sum(-1)
    values, which = torch.unique(squares, return_inverse=True)
    return values.sqrt(), which


class Blocks(dict[str, StructuredPrior]):
    """Resolved priors by name, which have every parameter of a tangent model in exactly one block.

    ``places``: block to the places of its weights in the flat vector, pattern after pattern.
    """

    def __init__(self, priors: Sequence[StructuredPrior], tangent: TangentModel) -> None:
        super().__init__({prior.name: prior for prior in priors})
        if len(self) != len(priors):
            raise ValueError(f"two blocks have the same name: {[prior.name for prior in priors]}; give name=...")
        taken = [name for prior in priors for name in prior.parameters]
        twice = sorted({name for name in taken if taken.count(name) > 1})
        lacking = [name for name in tangent.names if name not in taken]
        if twice:
            raise ValueError(f"{twice[:6]} lie in two blocks of the prior")
        if lacking:
            raise ValueError(f"the prior says nothing about {lacking[:6]}; add blocks")
        self.places: dict[str, Tensor] = {}
        for prior in priors:
            ranges = [torch.arange(*tangent.slots[name][:2], device="cpu") for name in prior.parameters]
            self.places[prior.name] = torch.cat(ranges).to(tangent.point().device)

    def patterns(self, name: str, vectors: Tensor) -> Tensor:
        """Flat vectors ``[..., size]`` as the patterns of one block, ``[..., n, k]``."""
        return vectors[..., self.places[name]].unflatten(-1, (-1, self[name].pattern))

    def times(self, kind: Literal["covariance", "root"], phi: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """``S v`` of ``[count, size]``, or ``L v`` with ``L L^T = S``: of normal noise a sample of the prior."""
        found = torch.zeros_like(vectors)
        for name, places in self.places.items():
            matrix: Tensor = getattr(self[name], kind)(phi[name])
            found[:, places] = (self.patterns(name, vectors) @ matrix.to(vectors).mT).flatten(-2)
        return found
