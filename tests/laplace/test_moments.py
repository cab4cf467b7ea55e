"""Second moments of layer inputs, by every way of adding them up, and factors of matrices that may be singular."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tu_symmetry.laplace.blocks import CoupledBlock, KroneckerBlock, decompose, decompose_rows
from tu_symmetry.laplace.curvature import InputMoments
from tu_symmetry.laplace.definite import cholesky
from tu_symmetry.laplace.determinants import CoupledDeterminants
from tu_symmetry.laplace.layers import MatrixLayer
from tu_symmetry.laplace.patches import ShiftedGrams, gram, patches_of

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def patches(x: Tensor, conv: nn.Module) -> Tensor:
    """Patches by their definition, ``[groups, features, batch * positions]``: convolutions that pick one entry each."""
    assert isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    one_hot = torch.eye(conv.weight[0].numel(), dtype=x.dtype).view(-1, *conv.weight.shape[1:])
    picker = type(conv)(
        conv.in_channels, conv.groups * len(one_hot), conv.kernel_size, conv.stride, conv.padding, conv.dilation,
        conv.groups, bias=False, padding_mode=conv.padding_mode,
    )  # fmt: skip
    picked = torch.func.functional_call(picker, {"weight": torch.cat([one_hot] * conv.groups)}, (x,))
    return picked.unflatten(1, (conv.groups, -1)).permute(1, 2, 0, *range(3, x.ndim + 1)).flatten(2).detach()


def drawn(seed: int) -> tuple[Convolution, tuple[int, ...]]:
    """Any convolution of one to three axes, and a size that it takes; every other one with stride 1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    axes, groups, channels = draw(1, 3), draw(1, 2), draw(1, 3)
    kernel, stride, dilation, padding = (
        tuple(draw(*ends) for _ in range(axes)) for ends in ((1, 4), (1, 1 + 2 * (seed % 2)), (1, 2), (0, 3))
    )
    mode = ("zeros", "circular", "replicate")[draw(0, 2) * (seed % 2)]
    seen = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    least = [max(1, own - 2 * pad, pad * (mode == "circular")) for own, pad in zip(seen, padding, strict=True)]
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](
        groups * channels, groups, kernel, stride, padding, dilation, groups, padding_mode=mode
    )  # type: ignore[arg-type]
    return conv, tuple(draw(n, n + 5) for n in least)


GEOMETRIES = [
    *map(drawn, range(40)), (nn.Conv2d(2, 4, 3), (30, 20)), (nn.Conv2d(2, 2, 4, padding="same"), (5, 6)),
    (nn.Conv1d(2, 4, 3, padding=1), (1,)),
]  # fmt: skip


@pytest.mark.parametrize(("conv", "size"), GEOMETRIES, ids=lambda v: str(v) if isinstance(v, nn.Module) else "")
def test_products_of_shifts_are_the_sum_over_patches(conv: Convolution, size: tuple[int, ...]) -> None:
    """Of batches of several sizes of images."""
    shifted, expected = ShiftedGrams(conv), torch.zeros(())
    for samples, more in ((1, 0), (3, 0), (2, 1)):
        x = numbers(samples, conv.in_channels, *(n + more for n in size))
        own = patches(x, conv)
        torch.testing.assert_close(patches_of(x, conv).permute(1, 3, 0, 2).flatten(2), own)
        expected = expected + own @ own.mT
        if max(conv.stride) == 1 and conv.padding_mode == "zeros":
            shifted.add(x)
            torch.testing.assert_close(shifted.total(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 7, 511), (3, 512), (4, 769), (2, 1, 1024)])
def test_gram_matrices_by_panels(shape: tuple[int, ...]) -> None:
    rows = numbers(*shape)
    torch.testing.assert_close(gram(rows), rows.mT @ rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_of_large_and_small_maps(groups: int, size: int, reduce: bool) -> None:
    """More positions than outputs or fewer, in either layout of memory."""
    conv = nn.Conv2d(groups, 6 * groups, 3, padding=1, groups=groups)
    layer = MatrixLayer("layer", conv, tuple(conv.weight.shape), None, None)
    gradient = numbers(4, 6 * groups, size, size)
    rows = gradient.unflatten(1, (groups, 6)).flatten(3)
    expected = (
        torch.einsum("bgo,bgp->gop", *[rows.sum(-1)] * 2) if reduce else torch.einsum("bgot,bgpt->gop", rows, rows)
    )
    for own in (gradient, gradient.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(layer.gradient_gram(own, reduce=reduce), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("samples", [2, 12])
@pytest.mark.parametrize("conv", [None, nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.Conv2d(32, 3, 3, padding=1)])
def test_the_decomposition_is_that_of_the_mean(conv: nn.Module | None, samples: int, reduce: bool) -> None:
    """Few rows or many, in batches whose sizes differ."""
    if conv is None:
        x, shape = numbers(samples, 3, 40), (2, 40)
        rows = x.permute(2, 0, 1).unsqueeze(0)
    else:
        x, shape = numbers(samples, conv.in_channels, 6, 5), tuple(conv.weight.shape)  # type: ignore
        rows = patches(x, conv).unflatten(2, (samples, -1))
    rows = rows.mean(3) if reduce else rows.flatten(2)
    moments = InputMoments(MatrixLayer("layer", conv, shape, None, None), reduce=reduce)
    for batch in (x[:1], x[1:]):
        moments.add(batch)
    moments.gather(x.device)
    values, basis = moments.decompose()
    eye = torch.eye(rows.shape[1], dtype=torch.float64).expand(len(rows), -1, -1)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        (basis * values.unsqueeze(-2)) @ basis.mT, rows @ rows.mT / rows.shape[-1], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["any", "zeros", "repeated", "one", "square"])
def test_rows_of_any_rank(kind: str) -> None:
    """Dead units and repeated samples, for several groups at once."""
    rows = numbers(2, {"one": 1, "square": 9}.get(kind, 5), 9)
    if kind == "zeros":
        rows[0, 1:], rows[1, :, 2:] = 0, 0
    if kind == "repeated":
        rows[:, 1:3] = rows[:, :1]
    values, basis = decompose_rows(rows)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(9).double().expand(2, -1, -1), rtol=0, atol=1e-13)
    torch.testing.assert_close((basis * values.unsqueeze(-2)) @ basis.mT, rows.mT @ rows, rtol=0, atol=1e-13)
    assert (values > 0).sum(-1).tolist() == torch.linalg.matrix_rank(rows).tolist()


@pytest.mark.parametrize("precision", [1e2, 1.0, 0.1])
def test_small_variances_are_not_lost_beside_those_of_the_prior(precision: float) -> None:
    """In single precision, by ``v^T Sigma v`` for ``v`` in the span of 30 rows of 200 features: eigenvalues of 1e9."""
    rows, gradients = numbers(1, 30, 200), 200 * numbers(1, 100, 6)
    gradients = gradients - gradients.mean(-1, keepdim=True)
    weights = numbers(6, 30)
    vector = ((weights - weights.mean(0)) @ rows[0]).flatten()
    found = []
    for dtype in (torch.float64, torch.float32):
        inputs, outputs = decompose_rows(rows.to(dtype)), decompose((gradients.mT @ gradients).to(dtype))
        block = KroneckerBlock("w", 0, torch.tensor(0), inputs[1], inputs[0], outputs[1], outputs[0])
        log_precision = torch.tensor([math.log(precision)], dtype=torch.float64)
        found.append(float(vector @ block.apply(vector.to(dtype), -1.0, log_precision, 1.0).double()))
    assert found[1] == pytest.approx(found[0], rel=0.02)


EPS = torch.finfo(torch.float64).eps


def dependent(n: int, kind: str, generator: torch.Generator) -> Tensor:
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
        a = dependent(n, kind, generator)[torch.randperm(n, generator=generator)]
        a = a * (3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)).exp()
        assert cholesky(a @ a.mT) is None


@pytest.mark.parametrize("kind", ["repeated", "combined", "large", "rank"])
@pytest.mark.parametrize("n", [4, 7, 30])
def test_what_noise_makes_regular_is_factored(n: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(n)
    for _ in range(25):
        a = dependent(n, kind, generator)
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


def test_what_single_precision_cannot_decompose_is_decomposed_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def stubborn(matrices: Tensor) -> Any:  # as LAPACK on large matrices of low rank, now and then
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return real(matrices)

    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    values, vectors = decompose(rows.mT @ rows)
    assert values.dtype == vectors.dtype == torch.float32 and (values == 0).sum() == 3
    torch.testing.assert_close(vectors * values @ vectors.mT, rows.mT @ rows)
    with pytest.raises(torch.linalg.LinAlgError):
        decompose(torch.full((2, 2), torch.nan))
