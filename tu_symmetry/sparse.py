"""Sparse matrices in compressed rows, and their products."""

from __future__ import annotations

import warnings

import numpy as np
import scipy.sparse
import torch
from torch import Tensor


def sparse_rows(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix in compressed rows, with the 32-bit indices that the CPU's library takes without a copy."""
    order = (rows * shape[1] + columns).argsort()
    starts = torch.zeros(shape[0] + 1, dtype=torch.int32, device=rows.device)
    starts[1:] = rows.bincount(minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # in beta, says torch
        return torch.sparse_csr_tensor(starts, columns[order].int(), values[order], shape)


def transposed_rows(matrix: Tensor) -> Tensor:
    """The transpose of a matrix, in compressed rows where the matrix is; a view of a dense one."""
    if matrix.layout != torch.sparse_csr:
        return matrix.mT
    rows = torch.arange(len(matrix), device=matrix.device).repeat_interleave(matrix.crow_indices().diff())
    return sparse_rows(matrix.col_indices().long(), rows, matrix.values(), (matrix.shape[1], matrix.shape[0]))


def gram(matrix: Tensor) -> Tensor:
    """``A A^T``, dense and on the CPU, of a matrix in compressed rows."""
    parts = (t.cpu().numpy() for t in (matrix.values(), matrix.col_indices(), matrix.crow_indices()))
    own = scipy.sparse.csr_matrix(tuple(parts), shape=tuple(matrix.shape))
    return torch.from_numpy(np.asarray((own @ own.T).todense()))
