"""The 2-Wasserstein distance of Gaussians: closed forms, a metric's laws, and a slow oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn import normal
from scipy.linalg import sqrtm
from torch import Tensor

from tu_symmetry.metrics.functional import gaussian_wasserstein


def covariances(count: int, size: int, rank: int, seed: int = 0) -> Tensor:
    root = normal(count, size, rank, seed=seed)
    return root @ root.mT


def rotation(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed))[0]


def oracle(x: Tensor, y: Tensor) -> float:
    """The formula with the trace, by SciPy's matrix roots."""
    a, b = x.numpy(), y.numpy()
    root = np.real(sqrtm(a))
    cross = np.real(sqrtm(root @ b @ root))
    return float(np.sqrt(max(np.trace(a) + np.trace(b) - 2 * np.trace(cross), 0)))


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_it_is_the_formula_with_the_trace(size: int) -> None:
    x, y = covariances(4, size, size, 1), covariances(4, size, size + 2, 2)
    found = gaussian_wasserstein(x, y)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([oracle(a, b) for a, b in zip(x, y, strict=True)], rel=1e-7)
    assert gaussian_wasserstein(x[:, None], y[None]).shape == (4, 4)
    torch.testing.assert_close(gaussian_wasserstein(x[:, None], y[None]).diagonal(), found)


def test_covariances_that_commute_are_as_far_apart_as_their_standard_deviations() -> None:
    basis, s, t = rotation(6), normal(6, seed=1).abs(), normal(6, seed=2).abs()
    s[0] = t[1] = s[2] = t[2] = 0.0  # singular ones too
    x, y = (basis * d.square() @ basis.mT for d in (s, t))
    assert float(gaussian_wasserstein(x, y)) == pytest.approx(float((s - t).norm()), abs=1e-7)
    one = gaussian_wasserstein(torch.tensor([[9.0]]), torch.tensor([[4.0]]), difference=torch.tensor([1.0]))
    assert float(one) == pytest.approx(2**0.5)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_laws_of_a_metric(rank: int) -> None:
    """Singular covariances fine; equal ones are at 0 to rounding error, where the trace would leave its root."""
    x, y, z = (covariances(8, 6, rank, seed) for seed in (1, 2, 3))
    size = x.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    assert (gaussian_wasserstein(x, x) <= 1e-12 * size).all()
    if rank == 6:
        near = gaussian_wasserstein(x, (1 + 1e-11) ** 2 * x)
        torch.testing.assert_close(near, 1e-11 * size, rtol=0.05, atol=0)
    there, back = gaussian_wasserstein(x, y), gaussian_wasserstein(y, x)
    torch.testing.assert_close(there, back)
    assert (there > 0.1).all(), "vacuous: alike"
    assert (gaussian_wasserstein(x, z) <= there + gaussian_wasserstein(y, z) + 1e-12).all()
    torch.testing.assert_close(gaussian_wasserstein(x, torch.zeros_like(x)), size)
    assert (there <= (size.square() + y.diagonal(dim1=-2, dim2=-1).sum(-1)).sqrt() + 1e-12).all()


def test_rotations_and_scales() -> None:
    x, y, turn = covariances(5, 4, 2, 1), covariances(5, 4, 4, 2), rotation(4, 3)
    found = gaussian_wasserstein(x, y)
    torch.testing.assert_close(gaussian_wasserstein(turn @ x @ turn.mT, turn @ y @ turn.mT), found)
    torch.testing.assert_close(gaussian_wasserstein(9 * x, 9 * y), 3 * found)
    torch.testing.assert_close(gaussian_wasserstein(x.float(), y.float()), found, rtol=1e-3, atol=0)
    shift = normal(5, 4, seed=4)
    moved = gaussian_wasserstein(x, y, difference=shift)
    torch.testing.assert_close(moved.square(), found.square() + shift.square().sum(-1))


def test_what_is_no_covariance_is_refused() -> None:
    eye = torch.eye(3)
    with pytest.raises(ValueError, match=r"shapes \(3, 3\) and \(2, 2\)"):
        gaussian_wasserstein(eye, torch.eye(2))
    for wrong in (torch.diag(torch.tensor([1.0, 1.0, -1.0])), eye + torch.ones(3, 3).triu(1)):
        with pytest.raises(ValueError, match="second matrix is no covariance"):
            gaussian_wasserstein(eye, wrong)
    with pytest.raises(ValueError, match="second covariance holds NaN"):
        gaussian_wasserstein(eye, eye * torch.nan)
    for difference in (torch.zeros(2), torch.full((3,), torch.inf)):
        with pytest.raises(ValueError, match="difference has the shape"):
            gaussian_wasserstein(eye, eye, difference=difference)
