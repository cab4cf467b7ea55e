"""Blocks of the curvature, each in the basis in which it is diagonal, and the Gaussian posterior that they make.

With eigenvalues ``s`` (for unit noise variance), noise variance ``v`` and prior precisions ``lambda`` the posterior
precision of a block is ``U (s / v + lambda) U^T``; each eigenvalue belongs to one prior group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

BlockKind = Literal["kronecker", "dense", "diagonal", "coupled"]
_CHUNK = 8  # samples of the weights that are drawn at once
_KEPT = 1 << 30  # bytes of samples that are kept


def rotate(rows: Tensor, basis: Tensor) -> Tensor:
    """``rows [..., matrices, n, m] @ basis [matrices, m, k]``, without a copy of the basis for each leading index."""
    if len(basis) == 1:
        return rows @ basis[0]
    moved = rows.movedim(-3, 0)
    return (moved.flatten(1, -2) @ basis).unflatten(1, moved.shape[1:-1]).movedim(0, -3)


@dataclass(eq=False)
class Block:
    """The curvature of the piece of the flat vector from ``start``, which is parameter ``name``, or a part of it.

    ``groups`` is the number of its prior group (of a coupled block one for each entry), ``shape`` that of coefficients.
    """

    kind: ClassVar[BlockKind]
    name: str
    start: int
    groups: Tensor
    shape: tuple[int, ...] = field(init=False)

    def eigenvalues(self) -> Tensor:
        """Eigenvalues for unit noise variance, in the shape of the coefficients."""
        raise TypeError(f"a {self.kind} block has no eigenvalues apart from the prior's precisions")

    @property
    def stop(self) -> int:
        """End of the piece."""
        return self.start + math.prod(self.shape)

    def to_basis(self, vectors: Tensor) -> Tensor:
        """Coefficients ``[..., *shape]`` of vectors ``[..., stop - start]``."""
        return vectors

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """The inverse of :meth:`to_basis`."""
        return coefficients

    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""
        return {f.name: getattr(self, f.name) for f in fields(self)[4:] if f.init}

    def on(self, device: torch.device) -> Block:
        """The same block with its tensors on a device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def precisions(self, log_precision: Tensor, noise: float) -> Tensor:
        """``s / noise + lambda`` in the shape of the eigenvalues."""
        values = self.eigenvalues()
        return values / noise + log_precision.exp().to(values)[self.groups.to(values.device)]

    def apply(self, vectors: Tensor, power: float, log_precision: Tensor, noise: float) -> Tensor:
        """The symmetric ``power`` of the posterior precision times ``vectors``, whatever the choice of eigenvectors."""
        return self.from_basis(self.to_basis(vectors) * self.precisions(log_precision, noise).pow(power))

    def whiten(self, vectors: Tensor, log_precision: Tensor, noise: float) -> Tensor:
        """Coefficients whose inner products are those of ``vectors`` under the posterior covariance."""
        return (self.to_basis(vectors) * self.precisions(log_precision, noise).rsqrt()).flatten(vectors.ndim - 1)


@dataclass(eq=False)
class KroneckerBlock(Block):
    """``A x G`` of a weight matrix, or several of them (groups of a convolution), in one prior group.

    ``inputs [matrices, features, features]`` are eigenvectors of ``A``, ``outputs`` of ``G``.
    """

    kind: ClassVar[BlockKind] = "kronecker"
    inputs: Tensor
    input_values: Tensor
    outputs: Tensor
    output_values: Tensor

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.inputs.contiguous(), self.outputs.contiguous()
        self.shape = (*self.output_values.shape, self.input_values.shape[1])  # matrices, outputs, features

    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues."""
        return self.output_values.unsqueeze(-1) * self.input_values.unsqueeze(-2)

    def to_basis(self, vectors: Tensor) -> Tensor:
        """``U_G^T W U_A``."""
        return rotate(rotate(vectors.unflatten(-1, self.shape), self.inputs).mT, self.outputs).mT

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """``U_G W U_A^T``."""
        return rotate(rotate(coefficients, self.inputs.mT).mT, self.outputs.mT).mT.flatten(-3)


@dataclass(eq=False)
class DiagonalBlock(Block):
    """A diagonal."""

    kind: ClassVar[BlockKind] = "diagonal"
    values: Tensor

    def __post_init__(self) -> None:
        self.shape = tuple(self.values.shape)

    def eigenvalues(self) -> Tensor:
        """The diagonal; of a dense block its eigenvalues."""
        return self.values


@dataclass(eq=False)
class DenseBlock(DiagonalBlock):
    """A full symmetric matrix in one prior group, ``vectors`` its eigenvectors ``[size, size]``."""

    kind: ClassVar[BlockKind] = "dense"
    vectors: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vectors = self.vectors.contiguous()

    def to_basis(self, vectors: Tensor) -> Tensor:
        """``U^T v``."""
        return vectors @ self.vectors

    def from_basis(self, coefficients: Tensor) -> Tensor:
        """``U c``."""
        return coefficients @ self.vectors.mT


@dataclass(eq=False)
class CoupledBlock(Block):
    """A full matrix over several prior groups, decomposed anew where the precisions change.

    It has no basis in common with the prior. With ``L = diag(lambda)`` the precision is ``L^1/2 (1 + V e V^T) L^1/2``,
    ``V e V^T = L^-1/2 H L^-1/2 / noise``.
    """

    kind: ClassVar[BlockKind] = "coupled"
    matrix: Tensor
    _decomposed: tuple[object, tuple[Tensor, Tensor, Tensor]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.shape = (len(self.matrix),)

    def scaled(self, log_precision: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
        """``(L^-1/2, V, e)``."""
        key = (log_precision.tolist(), noise)
        if self._decomposed is None or self._decomposed[0] != key:
            like = self.matrix
            # in double precision: what lies between the largest and the smallest entry can be more than float32 holds
            root = (-0.5 * log_precision).exp().double().to(like.device)[self.groups.to(like.device)]
            values, vectors = torch.linalg.eigh(like.double() * root * root.unsqueeze(-1) / noise)
            self._decomposed = (key, (root.to(like), vectors.to(like), values.clamp(min=0).to(like)))
        return self._decomposed[1]

    def apply(self, vectors: Tensor, power: float, log_precision: Tensor, noise: float) -> Tensor:
        """The precision (power 1), its inverse (-1), or the root ``L^-1/2 (1 + V e V^T)^-1/2`` of that (-1/2)."""
        root, basis, values = self.scaled(log_precision, noise)
        root = root if power < 0 else root.reciprocal()
        inner = vectors if power == -0.5 else vectors * root
        return ((inner @ basis) * (1 + values).pow(power)) @ basis.mT * root

    def whiten(self, vectors: Tensor, log_precision: Tensor, noise: float) -> Tensor:
        """Coefficients whose inner products are those of ``vectors`` under the posterior covariance."""
        root, basis, values = self.scaled(log_precision, noise)
        return ((vectors * root) @ basis) * (1 + values).rsqrt()


class Posterior:
    """The zero-mean Gaussian over the flat parameter vector that all blocks and log precisions ``[groups]`` make."""

    def __init__(self, blocks: Sequence[Block], log_precision: Tensor, noise: float) -> None:
        self.blocks, self.log_precision, self.noise = tuple(blocks), log_precision, noise
        self.size = self.blocks[-1].stop
        self._drawn: dict[tuple[int, int, int], Tensor] = {}  # by seed, number of samples, and the first one of a few

    def covariance_product(self, vectors: Tensor) -> Tensor:
        """Covariance times ``vectors`` ``[..., size]``."""
        return self._apply(vectors, -1.0)

    def precision_product(self, vectors: Tensor) -> Tensor:
        """Precision times ``vectors`` ``[..., size]``."""
        return self._apply(vectors, 1.0)

    def sample(self, noise: Tensor) -> Tensor:
        """Samples from standard normal ``noise`` ``[..., size]``."""
        return self._apply(noise, -0.5)

    def draws(self, count: int, seed: int) -> Iterator[Tensor]:
        """Samples ``[n, size]``, a few at a time, which are kept as long as no others are asked for.

        Sample ``i`` is a function of the seed and ``i`` alone: the noise of a CPU generator with seed
        ``1_000_003 * seed + i``, turned by the symmetric root of the covariance. Beyond a GiB they are drawn anew.
        """
        if any(key[:2] != (seed, count) for key in self._drawn):
            self._drawn.clear()
        like = next(iter(self.blocks[0].tensors().values()))
        limit = _KEPT // (like.element_size() * max(1, self.size))
        for first in range(0, count, _CHUNK):
            last = min(first + _CHUNK, count)
            own = self._drawn.get((seed, count, first))
            if own is None:
                noise = torch.empty(last - first, self.size, dtype=like.dtype, device="cpu")
                for number, row in enumerate(noise, first):
                    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
                    torch.randn(self.size, generator=generator, device="cpu", out=row)
                own = self.sample(noise.to(like.device))
            if last <= limit:
                self._drawn[seed, count, first] = own
            yield own

    def _apply(self, vectors: Tensor, power: float) -> Tensor:
        pieces = [b.apply(vectors[..., b.start : b.stop], power, self.log_precision, self.noise) for b in self.blocks]
        return torch.cat(pieces, dim=-1)


def decompose(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of positive semidefinite matrices ``[..., size, size]``.

    Eigenvalues within rounding error of zero (8 machine epsilons times the largest) are zero: a Kronecker product
    multiplies them by the millions, and over a small prior precision they would count as determined directions. Where
    single precision does not converge (large matrices of low rank), double precision is taken.
    """
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        if matrices.dtype == torch.float64 or not torch.isfinite(matrices).all():
            raise
        values, vectors = (part.to(matrices) for part in torch.linalg.eigh(matrices.double()))
    limit = 8 * torch.finfo(values.dtype).eps * values[..., -1:]
    return torch.where(values > limit, values, 0), vectors


def decompose_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same for ``rows^T rows`` of few rows ``[..., number, size]``, ``number <= size``, by a QR decomposition."""
    number, size = rows.shape[-2:]
    basis, triangle = torch.linalg.qr(rows.mT, mode="complete")
    triangle = triangle[..., :number, :]
    values, small = decompose(triangle @ triangle.mT)
    basis = torch.cat([basis[..., :number] @ small, basis[..., number:]], dim=-1)
    return torch.cat([values, values.new_zeros(*values.shape[:-1], size - number)], dim=-1), basis
