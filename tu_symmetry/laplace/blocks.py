"""Blocks of the curvature, each in the basis in which it is diagonal, and the Gaussian posterior that they make.

A block covers a contiguous piece of the flat parameter vector. With eigenvalues ``s`` (for unit noise variance), noise
variance ``v`` and prior precisions ``lambda`` the posterior precision is ``U (s / v + lambda) U^T``; each eigenvalue
belongs to one prior group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

BlockKind = Literal["kronecker", "dense", "diagonal", "coupled"]


def rotate(rows: Tensor, basis: Tensor) -> Tensor:
    """``rows [..., matrices, n, m] @ basis [matrices, m, k]``, without a copy of the basis for each leading index."""
    if len(basis) == 1:
        return rows @ basis[0]
    moved = rows.movedim(-3, 0)
    return (moved.flatten(1, -2) @ basis).unflatten(1, moved.shape[1:-1]).movedim(0, -3)


class Block(ABC):
    """One block; ``start`` and ``stop`` bound its piece of the flat vector.

    Attributes:
        name: the parameter that it covers (a part of).
        groups: number of the prior group of every eigenvalue, broadcastable to them.
    """

    kind: BlockKind

    def __init__(self, name: str, start: int, groups: Tensor) -> None:
        self.name, self.start, self.groups = name, start, groups

    @property
    @abstractmethod
    def stop(self) -> int:
        """End of the piece."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Eigenvalues for unit noise variance, in the shape of the coefficients."""

    @abstractmethod
    def to_basis(self, vectors: Tensor) -> Tensor:
        """Coefficients ``[..., *eigenvalues.shape]`` of vectors ``[..., stop - start]``."""

    @abstractmethod
    def from_basis(self, coefficients: Tensor) -> Tensor:
        """The inverse of :meth:`to_basis`."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""

    def on(self, device: torch.device) -> Block:
        """The same block with its tensors on a device."""
        kind: Callable[..., Block] = type(self)
        return kind(self.name, self.start, self.groups, **{name: t.to(device) for name, t in self.tensors().items()})

    def precisions(self, log_precision: Tensor, noise: float) -> Tensor:
        """``s / noise + lambda`` in the shape of the eigenvalues."""
        values = self.eigenvalues()
        return values / noise + log_precision.exp().to(values)[self.groups.to(values.device)]

    def apply(self, vectors: Tensor, power: float, log_precision: Tensor, noise: float) -> Tensor:
        """The symmetric ``power`` of the posterior precision times ``vectors``.

        The symmetric power does not depend on the choice of eigenvectors, so neither do samples.
        """
        return self.from_basis(self.to_basis(vectors) * self.precisions(log_precision, noise).pow(power))

    def whiten(self, vectors: Tensor, log_precision: Tensor, noise: float) -> Tensor:
        """Coefficients whose inner products are those of ``vectors`` under the posterior covariance."""
        return (self.to_basis(vectors) * self.precisions(log_precision, noise).rsqrt()).flatten(vectors.ndim - 1)


class KroneckerBlock(Block):
    """``A x G`` of a weight matrix, or several of them (groups of a convolution), in one prior group.

    Attributes:
        inputs: eigenvectors of ``A``, ``[matrices, features, features]``.
        outputs: eigenvectors of ``G``, ``[matrices, outputs, outputs]``.
        input_values, output_values: their eigenvalues.
    """

    kind: BlockKind = "kronecker"

    def __init__(
        self,
        name: str,
        start: int,
        groups: Tensor,
        inputs: Tensor,
        input_values: Tensor,
        outputs: Tensor,
        output_values: Tensor,
    ) -> None:
        super().__init__(name, start, groups)
        self.inputs, self.input_values = inputs.contiguous(), input_values
        self.outputs, self.output_values = outputs.contiguous(), output_values
        self._seen: tuple[slice, slice] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(matrices, outputs, features)``."""
        return (self.outputs.shape[0], self.outputs.shape[1], self.inputs.shape[1])

    @property
    def stop(self) -> int:
        """End of the piece."""
        matrices, outputs, features = self.shape
        return self.start + matrices * outputs * features

    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues."""
        return self.output_values.unsqueeze(-1) * self.input_values.unsqueeze(-2)

    def determined(self) -> tuple[slice, slice]:
        """The outputs' and the inputs' eigenvectors apart from those of which the data say nothing, at either end."""
        if self._seen is None:
            seen = self.eigenvalues() > 0
            bounds = []
            for axes in ((0, 2), (0, 1)):
                places = seen.any(axes[1]).any(axes[0]).nonzero().squeeze(-1)
                bounds.append(slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0))
            self._seen = (bounds[0], bounds[1])
        return self._seen

    def apply(self, vectors: Tensor, power: float, log_precision: Tensor, noise: float) -> Tensor:
        """The symmetric ``power`` of the posterior precision times ``vectors``.

        Where the data say nothing of a direction, the precision is the prior's. With ``V`` the other eigenvectors it is
        therefore ``V (s / noise + lambda)^power V^T + lambda^power (1 - V V^T)``: a layer of 2,304 features that has
        seen 256 rows takes products with 256 eigenvectors, twice (see :func:`_apart`). Where these are over half of
        all, the whole basis takes less.
        """
        rows, columns = self.determined()
        _, outputs, features = self.shape
        if 2 * (rows.stop - rows.start) * (columns.stop - columns.start) > outputs * features:
            return super().apply(vectors, power, log_precision, noise)
        prior = log_precision.exp().to(vectors)[self.groups.to(vectors.device)].pow(power)
        precisions = self.precisions(log_precision, noise)[:, rows, columns]
        left, right = self.outputs[..., rows], self.inputs[..., columns]
        inside, rest = _apart(
            vectors.unflatten(-1, self.shape),
            lambda own: rotate(rotate(own, right).mT, left).mT,
            lambda own: rotate(rotate(own, right.mT).mT, left.mT).mT,
        )
        inside *= precisions.pow(power)
        return rotate(rotate(inside, right.mT).mT, left.mT).mT.add_(rest.mul_(prior)).flatten(-3)

    def to_basis(self, vectors: Tensor) -> Tensor:
        """``U_G^T W U_A``."""
        return rotate(rotate(vectors.unflatten(-1, self.shape), self.inputs).mT, self.outputs).mT

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """``U_G W U_A^T``."""
        return rotate(rotate(coefficients, self.inputs.mT).mT, self.outputs.mT).mT.flatten(-3)

    def tensors(self) -> dict[str, Tensor]:
        """Both eigendecompositions."""
        return {
            "inputs": self.inputs,
            "input_values": self.input_values,
            "outputs": self.outputs,
            "output_values": self.output_values,
        }


class DenseBlock(Block):
    """A full symmetric matrix in one prior group, ``vectors`` its eigenvectors ``[size, size]``."""

    kind: BlockKind = "dense"

    def __init__(self, name: str, start: int, groups: Tensor, vectors: Tensor, values: Tensor) -> None:
        super().__init__(name, start, groups)
        self.vectors, self.values = vectors.contiguous(), values

    @property
    def stop(self) -> int:
        """End of the piece."""
        return self.start + len(self.values)

    def eigenvalues(self) -> Tensor:
        """The eigenvalues."""
        return self.values

    def to_basis(self, vectors: Tensor) -> Tensor:
        """``U^T v``."""
        return vectors @ self.vectors

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """``U c``."""
        return coefficients @ self.vectors.mT

    def tensors(self) -> dict[str, Tensor]:
        """The eigendecomposition."""
        return {"vectors": self.vectors, "values": self.values}


class DiagonalBlock(Block):
    """A diagonal; each entry may have a prior group of its own."""

    kind: BlockKind = "diagonal"

    def __init__(self, name: str, start: int, groups: Tensor, values: Tensor) -> None:
        super().__init__(name, start, groups)
        self.values = values

    @property
    def stop(self) -> int:
        """End of the piece."""
        return self.start + len(self.values)

    def eigenvalues(self) -> Tensor:
        """The diagonal."""
        return self.values

    def to_basis(self, vectors: Tensor) -> Tensor:
        """The vectors themselves."""
        return vectors

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """The coefficients themselves."""
        return coefficients

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal."""
        return {"values": self.values}


class CoupledBlock(Block):
    """A full matrix over several prior groups, decomposed anew where the precisions change.

    It has no basis in common with the prior. With ``L = diag(lambda)`` the precision is ``L^1/2 (1 + V e V^T) L^1/2``,
    ``V e V^T = L^-1/2 H L^-1/2 / noise``.
    """

    kind: BlockKind = "coupled"

    def __init__(self, name: str, start: int, groups: Tensor, matrix: Tensor) -> None:
        super().__init__(name, start, groups)
        self.matrix = matrix
        self._key: tuple[bytes, float] | None = None
        self._cached: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def stop(self) -> int:
        """End of the piece."""
        return self.start + len(self.matrix)

    def scaled(self, log_precision: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
        """``(L^-1/2, V, e)``."""
        key = (log_precision.cpu().double().numpy().tobytes(), noise)
        if self._key != key or self._cached is None:
            like = self.matrix
            # in double precision: what lies between the largest and the smallest entry can be more than float32 holds
            root = (-0.5 * log_precision).exp().double().to(like.device)[self.groups.to(like.device)]
            values, vectors = torch.linalg.eigh(like.double() * root * root.unsqueeze(-1) / noise)
            self._key, self._cached = key, (root.to(like), vectors.to(like), values.clamp(min=0).to(like))
        return self._cached

    def apply(self, vectors: Tensor, power: float, log_precision: Tensor, noise: float) -> Tensor:
        """The inverse of the precision (power -1), or a root ``R`` of it with ``R R^T`` the inverse (-1/2).

        Of all roots it takes ``L^-1/2 (1 + V e V^T)^-1/2``, which moves with the scale of the weights.
        """
        root, basis, values = self.scaled(log_precision, noise)
        if power not in (-1.0, -0.5):
            raise ValueError(f"power {power} of a coupled block; only -1 and -1/2 are defined")
        inner = vectors * root if power == -1.0 else vectors
        return ((inner @ basis) * (1 + values).pow(power)) @ basis.mT * root

    def whiten(self, vectors: Tensor, log_precision: Tensor, noise: float) -> Tensor:
        """Coefficients whose inner products are those of ``vectors`` under the posterior covariance."""
        root, basis, values = self.scaled(log_precision, noise)
        return ((vectors * root) @ basis) * (1 + values).rsqrt()

    def eigenvalues(self) -> Tensor:
        """There are none apart from the prior."""
        raise self._apart()

    def to_basis(self, vectors: Tensor) -> Tensor:
        """There is no basis apart from the prior."""
        raise self._apart()

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """There is no basis apart from the prior."""
        raise self._apart()

    def _apart(self) -> TypeError:
        return TypeError("a coupled block has no eigenvalues or basis apart from the prior: use scaled(...)")

    def tensors(self) -> dict[str, Tensor]:
        """The matrix."""
        return {"matrix": self.matrix}


def _apart(vectors: Tensor, to: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Coefficients ``V^T v`` and the rest ``v - V V^T v``, which is orthogonal to ``V`` up to the square of rounding.

    One subtraction leaves a rounding error of ``v`` within the span. Where the data say nothing the variance is that of
    the prior, and the error is multiplied by it: with eigenvalues of 1e7 over a prior precision of 1 it would drown the
    variance of 1e-7 that belongs there, and a squared length ``v^T Sigma v`` could come out negative. So it is taken
    out once more (twice is enough, as for Gram and Schmidt).

    Args:
        vectors: ``v``.
        to: ``v -> V^T v``.
        back: ``c -> V c``.
    """
    inside = to(vectors)
    rest = vectors - back(inside)
    more = to(rest)
    return inside.add_(more), rest.sub_(back(more))


class Posterior:
    """The Gaussian over the flat parameter vector that the blocks and the precisions make (zero mean).

    Attributes:
        blocks: in the order of the flat vector, without gaps.
        log_precision: log of the prior precision of every group, float64.
        noise: noise variance (1 for classification).
    """

    def __init__(self, blocks: Sequence[Block], log_precision: Tensor, noise: float) -> None:
        self.blocks, self.log_precision, self.noise = tuple(blocks), log_precision, noise
        self.size = self.blocks[-1].stop

    def covariance_product(self, vectors: Tensor) -> Tensor:
        """Covariance times ``vectors`` ``[..., size]``."""
        return self._apply(vectors, -1.0)

    def precision_product(self, vectors: Tensor) -> Tensor:
        """Precision times ``vectors`` ``[..., size]``.

        Raises:
            ValueError: a coupled block, which has no such product.
        """
        return self._apply(vectors, 1.0)

    def sample(self, noise: Tensor) -> Tensor:
        """Samples from standard normal ``noise`` ``[..., size]``."""
        return self._apply(noise, -0.5)

    def whiten(self, block: Block, vectors: Tensor) -> Tensor:
        """See :meth:`Block.whiten`."""
        return block.whiten(vectors, self.log_precision, self.noise)

    def _apply(self, vectors: Tensor, power: float) -> Tensor:
        pieces = [b.apply(vectors[..., b.start : b.stop], power, self.log_precision, self.noise) for b in self.blocks]
        return torch.cat(pieces, dim=-1)


def decompose(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of positive semidefinite matrices ``[..., size, size]``.

    Eigenvalues within rounding error of zero (8 machine epsilons times the largest) are zero: a Kronecker product
    multiplies them by the millions, and over a small prior precision they would count as determined directions.
    """
    values, vectors = torch.linalg.eigh(matrices)
    limit = 8 * torch.finfo(values.dtype).eps * values[..., -1:]
    return torch.where(values > limit, values, 0), vectors


def decompose_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same for ``rows^T rows`` of few rows ``[..., number, size]``, ``number <= size``, by way of their triangle.

    With ``rows^T = Q [R; 0]`` the eigenvectors of the small ``R R^T``, turned by ``Q``, are those that belong to the
    rows, and the other columns of ``Q`` are directions that no row has. ``Q`` is a product of ``number`` reflections,
    which is written as ``1 - Y T Y^T`` here with ``T^-1 = triu(Y^T Y, 1) + diag(1 / tau)``: three products of matrices
    in place of LAPACK's way from reflection to reflection. For a single row, ``Q`` is ``1 - tau y y^T`` with
    ``y = (1, ...)`` and ``T = tau``.
    """
    number, size = rows.shape[-2:]
    found, tau = torch.geqrf(rows.mT)
    triangle = found[..., :number, :].triu()
    values, small = decompose(triangle @ triangle.mT)
    values, small = values.flip(-1), small.flip(-1)
    y = found.tril(-1)
    y.diagonal(dim1=-2, dim2=-1).fill_(1)
    y *= (tau != 0).unsqueeze(-2)  # a reflection that LAPACK leaves out, as for a row of zeros
    inverse = (y.mT @ y).triu(1)
    inverse.diagonal(dim1=-2, dim2=-1).copy_(torch.where(tau != 0, tau, 1).reciprocal())
    right = torch.linalg.solve_triangular(inverse.neg_(), y.mT, upper=True)  # -T Y^T
    basis = rows.new_empty(*rows.shape[:-2], size, size)
    basis[..., :number] = y @ (right[..., :number] @ small)
    basis[..., :number, :number] += small
    basis[..., number:] = y @ right[..., number:]
    basis[..., number:, number:].diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.cat([values, values.new_zeros(*values.shape[:-1], size - number)], dim=-1), basis
