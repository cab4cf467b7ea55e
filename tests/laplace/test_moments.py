"""Second moments of layer inputs: every way of adding them up gives the sum over the rows, written out here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from tu_symmetry.laplace.moments import InputMoments

from tu_symmetry.laplace.blocks import decompose_rows
from tu_symmetry.laplace.layers import MatrixLayer
from tu_symmetry.laplace.patches import ShiftedGrams, gram, patches_of, positions_of

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

GEOMETRIES = [
    (nn.Conv2d(4, 3, 3, padding=1), (5, 6)),
    (nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2), (7, 6)),
    (nn.Conv2d(2, 4, 3), (30, 20)),
    (nn.Conv1d(2, 4, 5, padding=4), (9,)),
    (nn.Conv1d(2, 4, 3, padding=1), (1,)),
    (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (9, 8)),
    (nn.Conv3d(2, 2, (3, 1, 2), padding=(1, 0, 1)), (4, 5, 3)),
    (nn.Conv2d(2, 2, 4, padding="same"), (5, 6)),
    (nn.Conv2d(2, 2, 2, padding=3), (2, 2)),
    (nn.Conv2d(2, 2, 5, padding=2), (2, 3)),
    (nn.Conv2d(2, 2, 3, stride=2), (9, 9)),
    (nn.Conv2d(4, 2, (3, 5), stride=(3, 2), padding=2, dilation=(1, 2), groups=2), (8, 11)),
    (nn.Conv2d(2, 2, 2, stride=3), (10, 9)),
    (nn.Conv2d(2, 2, 1), (9, 9)),
    (nn.Conv2d(2, 2, 1, stride=2, padding=1), (3, 4)),
]


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
    """Any convolution of one to three axes, and a size that it takes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    axes, groups, channels = draw(1, 3), draw(1, 2), draw(1, 3)
    kernel, stride, dilation, padding = (
        tuple(draw(*ends) for _ in range(axes)) for ends in ((1, 4), (1, 3), (1, 2), (0, 3))
    )
    mode = ("zeros", "zeros", "circular", "replicate")[draw(0, 3)]
    seen = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    least = [max(1, own - 2 * pad, pad * (mode == "circular")) for own, pad in zip(seen, padding, strict=True)]
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](
        groups * channels, groups, kernel, stride, padding, dilation, groups, padding_mode=mode
    )  # type: ignore[arg-type]
    return conv, tuple(draw(n, n + 5) for n in least)


@pytest.mark.parametrize("rows", [1, 1 << 20], ids=["in place", "side by side"])
@pytest.mark.parametrize(
    ("conv", "size"), [*GEOMETRIES, *map(drawn, range(30))], ids=lambda v: str(v) if isinstance(v, nn.Module) else ""
)
def test_products_of_shifts_are_the_sum_over_patches(
    conv: Convolution, size: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of batches of several sizes of images, whichever way the products are made."""
    monkeypatch.setattr("tu_symmetry.laplace.patches._ROWS", rows)
    shifted, expected = ShiftedGrams(conv), torch.zeros(())
    assert shifted.total() is None
    for samples, more in ((1, 0), (3, 0), (2, 1)):
        x = numbers(samples, conv.in_channels, *(n + more for n in size))
        own = patches(x, conv)
        assert positions_of(x, conv) * len(x) == own.shape[-1]
        torch.testing.assert_close(patches_of(x, conv).permute(1, 3, 0, 2).flatten(2), own)
        expected = expected + own @ own.mT
        shifted.add(x)
    total = shifted.total()
    assert total is not None
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 511), (3, 512), (4, 769), (2, 1, 1024)])
def test_gram_matrices_by_panels(shape: tuple[int, ...]) -> None:
    rows = numbers(*shape)
    found = gram(rows)
    torch.testing.assert_close(found, rows.mT @ rows, rtol=1e-12, atol=1e-12)
    if shape[-1] >= 512:
        beyond = (found - found.mT).abs()
        for start in range(0, shape[-1], 256):  # one is the other's copy, apart from the blocks on the diagonal
            beyond[..., start : start + 256, start : start + 256] = 0
        assert not bool(beyond.any())


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
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
@pytest.mark.parametrize("conv", [None, *(conv for conv, _ in GEOMETRIES[:2])])
def test_the_decomposition_is_that_of_the_mean(conv: nn.Module | None, samples: int, reduce: bool) -> None:
    """Few rows or many, in batches whose sizes differ."""
    if conv is None:
        x, shape = numbers(samples, 3, 40), (2, 40)
        rows = x.permute(2, 0, 1).unsqueeze(0)
    else:
        x, shape = numbers(samples, 4, 6, 5), tuple(conv.weight.shape)  # type: ignore[arg-type]
        rows = patches(x, conv).unflatten(2, (samples, -1))
    rows = rows.mean(3) if reduce else rows.flatten(2)
    moments = InputMoments(MatrixLayer("layer", conv, shape, None, None), reduce=reduce)
    for batch in (x[:1], x[1:]):
        moments.add(batch)
    few = 2 * rows.shape[-1] <= rows.shape[1]
    values, basis = moments.decompose()
    eye = torch.eye(rows.shape[1], dtype=torch.float64).expand(len(rows), -1, -1)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        (basis * values.unsqueeze(-2)) @ basis.mT, rows @ rows.mT / rows.shape[-1], rtol=1e-12, atol=1e-12
    )
    if conv is None:
        assert few == (samples == 2 or reduce)
    if few:
        assert int((values > 0).sum()) == len(rows) * rows.shape[-1]


@pytest.mark.parametrize("kind", ["any", "zeros", "repeated", "one", "square"])
def test_rows_of_any_rank(kind: str) -> None:
    """Dead units and repeated samples, for several groups at once."""
    rows = numbers(2, {"one": 1, "square": 9}.get(kind, 5), 9)
    if kind == "zeros":
        rows[0, 1:], rows[1, :, 2:] = 0, 0
    if kind == "repeated":
        rows[:, 1:3] = rows[:, :1]
    values, basis = decompose_rows(rows)
    assert basis.is_contiguous() and bool((values.diff() <= 0).all())
    torch.testing.assert_close(basis.mT @ basis, torch.eye(9).double().expand(2, -1, -1), rtol=0, atol=1e-13)
    expected = rows.mT @ rows
    torch.testing.assert_close((basis * values.unsqueeze(-2)) @ basis.mT, expected, rtol=0, atol=1e-13)
    assert (values > 0).sum(-1).tolist() == torch.linalg.matrix_rank(rows).tolist()
