"""Singular matrices are refused whatever their rounding, their order and their scales; others are not."""

import pytest
import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import CoupledBlock
from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.determinants import CoupledDeterminants

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_curvatures_that_are_singular_and_far_larger_than_the_prior_have_an_evidence(dtype: torch.dtype) -> None:
    """That of the rows that do not depend on others; where the prior is lost in rounding, one that it drowns in."""
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        own = torch.randn(5, 40, generator=generator, dtype=torch.float64)
        mixed = own.to(dtype)
        found = CoupledDeterminants(CoupledBlock("all", 0, torch.arange(40) % 3, mixed.T @ mixed), 3)
        low = 3 if dtype == torch.float32 else 9
        for power in (0, low, 12, 18, 27):
            rho = torch.linspace(0, 2, found.count, dtype=torch.float64) - power * 2.3
            value, gamma = found.log_det_ratio(rho, 0.0), found.gamma(rho, 0.0)
            scaled = own * (-0.5 * rho).exp()[torch.arange(40) % found.count]
            exact = float((scaled @ scaled.mT + torch.eye(5)).logdet())
            assert exact * (1 - 1e-3) <= value and bool((gamma > 0).all())
            if power <= low:
                assert value == pytest.approx(exact, rel=1e-4) and float(gamma.sum()) == pytest.approx(5, abs=0.5)
