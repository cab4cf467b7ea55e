"""Zero-mean Gaussian priors of weights with covariances inside a pattern, such as the 3 x 3 offsets of a convolution.

The weights of a block are ``n`` patterns of ``k`` entries, all with the same ``k x k`` covariance::

    S_b = I_n (x) K,        K = sum_r c_r E_r

with fixed symmetric matrices ``E_r`` and coefficients ``c_r`` that are functions of the hyperparameters. For the nine
offsets of a 3 x 3 kernel and a covariance of their distance there are six distances, 0, 1, sqrt 2, 2, sqrt 5 and
sqrt 8, and ``E_r`` has a 1 wherever two offsets have the r-th. Everything that the evidence needs of the Jacobian is
then one matrix ``J_b (I (x) E_r) J_b^T`` for each r, whatever the hyperparameters
(:mod:`tu_symmetry.laplace.dual.evidence`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from tu_symmetry.laplace.definite import cholesky

Kernel = Callable[[Tensor], Tensor]

KERNELS: dict[str, Kernel] = {
    "exponential": lambda d: (-d).exp(),
    "matern32": lambda d: (1 + math.sqrt(3) * d) * (-math.sqrt(3) * d).exp(),
    "matern52": lambda d: (1 + math.sqrt(5) * d + 5 / 3 * d.square()) * (-math.sqrt(5) * d).exp(),
    "squared_exponential": lambda d: (-0.5 * d.square()).exp(),
}
"""Correlation as a function of the distance over the length scale."""


class SingularPriorError(ValueError):
    """A prior covariance that is not positive definite; the message names the block."""


class StructuredPrior(ABC):
    """The prior of one block of weights; see the module for its form.

    Hyperparameters are one float64 vector ``phi``, the logarithms of what :attr:`hyperparameters` names.

    Attributes:
        name: name of the block.
        parameters: names of the block's parameters, whole.
        hyperparameters: names of the entries of ``exp(phi)``.
    """

    name: str
    parameters: tuple[str, ...]
    hyperparameters: tuple[str, ...]

    @abstractmethod
    def resolve(self, shapes: Mapping[str, Sequence[int]]) -> StructuredPrior:
        """The prior with everything filled in that the parameters' shapes say."""

    @property
    @abstractmethod
    def basis(self) -> Tensor:
        """``E``, float64 ``[R, k, k]``, each symmetric."""

    @abstractmethod
    def coefficients(self, phi: Tensor) -> Tensor:
        """``c``, ``[R]``: differentiable in ``phi``."""

    @abstractmethod
    def initial(self) -> Tensor:
        """The hyperparameters to start from, float64 ``[H]``."""

    @abstractmethod
    def bounds(self) -> list[tuple[float, float]]:
        """Lowest and highest value of each entry of ``phi``."""

    @property
    def pattern(self) -> int:
        """Number of entries ``k`` of a pattern."""
        return self.basis.shape[-1]

    def covariance(self, phi: Tensor) -> Tensor:
        """``K``, float64 ``[k, k]``."""
        return torch.einsum("r,rij->ij", self.coefficients(phi), self.basis)

    def root(self, phi: Tensor) -> Tensor:
        """The lower Cholesky factor of ``K``; a :class:`SingularPriorError` where it has none."""
        covariance = self.covariance(phi)
        root = cholesky(covariance)
        if root is None:
            values = ", ".join(f"{n}={v:.3g}" for n, v in zip(self.hyperparameters, phi.exp().tolist(), strict=True))
            raise SingularPriorError(
                f"the prior covariance of block {self.name!r} is not positive definite at {values}: offsets that "
                "coincide, a kernel that is no covariance on them, or a length scale so long that all entries are one; "
                "raise jitter, or bound the hyperparameters"
            )
        return root

    def product(self, phi: Tensor, vector: Tensor) -> Tensor:
        """``S_b v`` for ``v`` of shape ``[..., n * k]``."""
        return self._by_pattern(vector, lambda v: v @ self.covariance(phi).to(v))

    def root_product(self, phi: Tensor, vector: Tensor) -> Tensor:
        """``S_b^(1/2) v`` with the root ``I (x) chol(K)``: of standard normal noise it is a sample of the prior."""
        return self._by_pattern(vector, lambda v: v @ self.root(phi).to(v).mT)

    def _by_pattern(self, vector: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(vector.unflatten(-1, (-1, self.pattern))).flatten(-2)


def _range(bounds: tuple[float, float], name: str, start: float) -> tuple[float, float]:
    low, high = bounds
    if not 0 < low <= start <= high < math.inf:
        raise ValueError(f"{name}={start} has to lie within its bounds {bounds}, which are positive and finite")
    return math.log(low), math.log(high)


@dataclass(frozen=True)
class IsotropicPrior(StructuredPrior):
    """Independent weights with one variance, ``S_b = variance * I``.

    Args:
        parameters: names, or prefixes of names, of the block's parameters.
        name: name of the block; None for the first parameter's.
        variance: to start from.
        variance_bounds: lowest and highest variance.
    """

    parameters: tuple[str, ...]
    name: str = ""
    variance: float = 1.0
    variance_bounds: tuple[float, float] = (1e-12, 1e12)
    hyperparameters: tuple[str, ...] = field(default=("variance",), init=False)

    def __post_init__(self) -> None:
        _settle(self)
        _range(self.variance_bounds, "variance", self.variance)

    def resolve(self, shapes: Mapping[str, Sequence[int]]) -> IsotropicPrior:
        """The prior with the parameters' full names."""
        return replace(self, parameters=_matching(self, shapes))

    @property
    def basis(self) -> Tensor:
        """``[[1]]``: a pattern is a single weight."""
        return torch.ones(1, 1, 1, dtype=torch.float64, device="cpu")

    def coefficients(self, phi: Tensor) -> Tensor:
        """The variance."""
        return phi.exp()

    def initial(self) -> Tensor:
        """The log variance."""
        return torch.tensor([math.log(self.variance)], dtype=torch.float64, device="cpu")

    def bounds(self) -> list[tuple[float, float]]:
        """Limits of the log variance."""
        return [_range(self.variance_bounds, "variance", self.variance)]


@dataclass(frozen=True)
class KernelPrior(StructuredPrior):
    """A Gaussian process over the offsets of a convolution's kernel, the same for every pair of channels.

    ``K = variance * (kernel(|o - o'| / lengthscale) + jitter * I)``: neighboring entries of a filter are alike, so that
    samples of the network's output are smooth. It takes any number of space dimensions.

    Args:
        parameters: names, or prefixes of names, of the block's weights, all with the same kernel shape.
        name: name of the block; None for the first parameter's.
        kernel: ``exponential``, ``matern32``, ``matern52`` or ``squared_exponential``, or a function of the distances
            over the length scale.
        offsets: coordinates of the entries of a pattern ``[k, dimensions]``, in the order in which the weight stores
            them; None to take the grid of the kernel from the weights' shapes.
        variance: to start from.
        lengthscale: to start from, in pixels.
        jitter: on the diagonal, relative to the variance.
        variance_bounds: lowest and highest variance.
        lengthscale_bounds: lowest and highest length scale.
    """

    parameters: tuple[str, ...]
    name: str = ""
    kernel: str | Kernel = "exponential"
    offsets: tuple[tuple[float, ...], ...] | None = None
    variance: float = 1.0
    lengthscale: float = 0.1
    jitter: float = 1e-6
    variance_bounds: tuple[float, float] = (1e-12, 1e12)
    lengthscale_bounds: tuple[float, float] = (0.01, 1000.0)
    hyperparameters: tuple[str, ...] = field(default=("variance", "lengthscale"), init=False)

    def __post_init__(self) -> None:
        _settle(self)
        if isinstance(self.kernel, str) and self.kernel not in KERNELS:
            raise ValueError(f"kernel={self.kernel!r} is not known; choose one of {sorted(KERNELS)}, or a function")
        if not self.jitter >= 0:
            raise ValueError(f"jitter={self.jitter} has to be at least 0")
        _range(self.variance_bounds, "variance", self.variance)
        _range(self.lengthscale_bounds, "lengthscale", self.lengthscale)
        if self.offsets is not None:
            rows = tuple(tuple(float(x) for x in row) for row in self.offsets)
            if not rows or any(len(row) != len(rows[0]) or not row for row in rows):
                raise ValueError("offsets have to be the coordinates of every entry of a pattern, [k, dimensions]")
            object.__setattr__(self, "offsets", rows)

    def resolve(self, shapes: Mapping[str, Sequence[int]]) -> KernelPrior:
        """The prior with full names, and with the offsets of the weights' kernels."""
        names = _matching(self, shapes)
        if self.offsets is not None:
            size = len(self.offsets)
            for name in names:
                if math.prod(shapes[name]) % size:
                    raise ValueError(
                        f"{name} of shape {tuple(shapes[name])} does not split into patterns of the {size} offsets of "
                        f"block {self.name!r}"
                    )
            return replace(self, parameters=names)
        kernels = {tuple(shapes[name][2:]) for name in names}
        if len(kernels) != 1 or kernels == {()}:
            seen = {name: tuple(shapes[name]) for name in names}
            raise ValueError(
                f"block {self.name!r} needs weights of convolutions with one kernel shape (all axes after the second), "
                f"or offsets=...; its parameters have shapes {seen}. Use IsotropicPrior for biases and linear layers"
            )
        (kernel,) = kernels
        grid = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in kernel)).reshape(-1, len(kernel))
        return replace(self, parameters=names, offsets=tuple(tuple(map(float, row)) for row in grid.tolist()))

    def _distances(self) -> tuple[Tensor, Tensor]:
        """The different distances of two offsets, ascending from 0, and which of them each pair has ``[k, k]``."""
        if self.offsets is None:
            raise ValueError(f"block {self.name!r} does not know its offsets yet; call resolve(shapes)")
        return _distances(self.offsets)

    @property
    def basis(self) -> Tensor:
        """A 0/1 matrix for each distance."""
        distances, which = self._distances()
        return (which.unsqueeze(0) == torch.arange(len(distances), device="cpu").view(-1, 1, 1)).double()

    def coefficients(self, phi: Tensor) -> Tensor:
        """``variance * kernel(distance / lengthscale)``, with the jitter at distance 0."""
        distances = self._distances()[0].to(phi)
        kernel = KERNELS[self.kernel] if isinstance(self.kernel, str) else self.kernel
        nugget = torch.zeros_like(distances)
        nugget[0] = self.jitter
        return phi[0].exp() * (kernel(distances / phi[1].exp()) + nugget)

    def initial(self) -> Tensor:
        """Log variance and log length scale."""
        return torch.tensor([math.log(self.variance), math.log(self.lengthscale)], dtype=torch.float64, device="cpu")

    def bounds(self) -> list[tuple[float, float]]:
        """Limits of log variance and log length scale."""
        return [
            _range(self.variance_bounds, "variance", self.variance),
            _range(self.lengthscale_bounds, "lengthscale", self.lengthscale),
        ]


@lru_cache(maxsize=64)
def _distances(offsets: tuple[tuple[float, ...], ...]) -> tuple[Tensor, Tensor]:
    points = torch.tensor(offsets, dtype=torch.float64, device="cpu")
    squares = (points.unsqueeze(0) - points.unsqueeze(1)).square().sum(-1)
    values, which = torch.unique((squares * 1e9).round(), return_inverse=True)
    return (values / 1e9).sqrt(), which


def _settle(prior: IsotropicPrior | KernelPrior) -> None:
    """Names as tuples, and the block's own name."""
    if isinstance(prior.parameters, str):
        raise ValueError(f"parameters={prior.parameters!r} is a string; give a list of names")
    names = tuple(prior.parameters)
    if not names:
        raise ValueError("a prior needs the names of its parameters")
    object.__setattr__(prior, "parameters", names)
    object.__setattr__(prior, "name", prior.name or names[0])
    for bounds in ("variance_bounds", "lengthscale_bounds"):
        if hasattr(prior, bounds):
            object.__setattr__(prior, bounds, tuple(getattr(prior, bounds)))


def _matching(prior: StructuredPrior, shapes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    found: list[str] = []
    for wanted in prior.parameters:
        own = [name for name in shapes if name == wanted or name.startswith(wanted + ".")]
        if not own:
            raise ValueError(
                f"block {prior.name!r} names {wanted!r}, which matches no parameter; there are {list(shapes)[:12]} ..."
            )
        found += own
    return tuple(dict.fromkeys(found))
