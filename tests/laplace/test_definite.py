"""Singular matrices are refused whatever their rounding, their order and their scales; others are not."""

import pytest
import torch
from torch import Tensor

from tu_symmetry.laplace.definite import cholesky

EPS = torch.finfo(torch.float64).eps


def rows(n: int, kind: str, generator: torch.Generator) -> Tensor:
    """``[n, 2n]`` of which some depend on others."""
    a = torch.randn(n, 2 * n, generator=generator, dtype=torch.float64)
    first, rest = a[:1], a[1:]
    weights = torch.randn(1, n - 1, generator=generator, dtype=torch.float64)
    if kind == "repeated":
        first = rest[:1]
    elif kind == "combined":
        first = weights @ rest
    elif kind == "large":  # its own share of what vanishes is small, which is what eliminating it last goes by
        first = 100 * weights @ rest
    elif kind == "rank":
        return a[:, : n - 2]
    return torch.cat([first, rest])


@pytest.mark.parametrize("kind", ["repeated", "combined", "large", "rank"])
@pytest.mark.parametrize("n", [4, 7, 30, 90])
def test_singular_matrices_are_refused_in_every_order_and_on_every_scale(n: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(n)
    for _ in range(25):
        a = rows(n, kind, generator)[torch.randperm(n, generator=generator)]
        a = a * (3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)).exp()
        assert cholesky(a @ a.mT) is None


@pytest.mark.parametrize("kind", ["repeated", "combined", "large", "rank"])
@pytest.mark.parametrize("n", [4, 7, 30])
def test_what_noise_makes_regular_is_factored(n: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(n)
    for _ in range(25):
        a = rows(n, kind, generator)
        matrix = a @ a.mT
        matrix.diagonal().mul_(1 + 1000 * n * EPS)
        root = cholesky(matrix)
        assert root is not None and torch.allclose(root @ root.mT, matrix, rtol=1e-14, atol=1e-14 * float(matrix.max()))
        assert cholesky(matrix.float()) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_has_no_factor(bad: float) -> None:
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[1, 1] = bad
    assert cholesky(matrix) is None


def test_a_factor_is_differentiable_and_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    matrix = (2 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    root = cholesky(matrix)
    assert root is not None
    root.diagonal().log().sum().backward()
    torch.testing.assert_close(matrix.grad, torch.eye(3, dtype=torch.float64) / 4)
    assert torch.equal(torch.get_rng_state(), before)
