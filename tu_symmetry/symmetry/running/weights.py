"""The weights that a network is run with: random ones, and relative noise on given ones."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError

_POOL = 2**18  # numbers of the noise; drawing one for every weight would take longer than a layer does


def random_state(
    model: nn.Module, generator: torch.Generator, constants: Container[str] | None = None
) -> dict[str, Tensor]:
    """Random float64 weights of moderate size for every tensor of a module, on the CPU; tied names share one tensor.

    Integers and booleans keep their values; with ``constants`` only those that it names, and the others are drawn too
    (masks at random, never all zero; other integers in another order).
    """
    drawn: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in drawn:
            kept = constants is None or name in constants
            drawn[id(tensor)] = _drawn(name, tensor.detach(), generator, kept=kept)
        state[name] = drawn[id(tensor)]
    return state


def _drawn(name: str, tensor: Tensor, generator: torch.Generator, *, kept: bool) -> Tensor:
    if tensor.layout != torch.strided or not is_continuous(tensor):
        own = tensor.cpu().clone()
        if kept or tensor.layout != torch.strided or tensor.numel() < 2:
            return own
        if own.dtype == torch.bool or bool(((own == 0) | (own == 1)).all()):
            drawn = (torch.rand(own.shape, generator=generator, device="cpu") < 0.75).to(own.dtype)
            return drawn if drawn.any() else own  # weights of a mixture, too, are zeros and ones
        return own.flatten()[torch.randperm(own.numel(), generator=generator, device="cpu")].reshape(own.shape)
    # numbers of single precision: drawing is most of what small batches cost
    single = as_computed(tensor.dtype, torch.float32)
    noise = torch.randn(tensor.shape, generator=generator, dtype=single, device="cpu")
    noise = noise.to(as_computed(tensor.dtype, torch.float64))
    last = name.rpartition(".")[2]
    if "var" in last and not tensor.is_complex():
        return 0.5 + noise.abs()
    if tensor.ndim >= 2:
        return noise.mul_((1.5 / max(math.prod(tensor.shape[1:]), 1)) ** 0.5)
    return 0.3 * noise if "mean" in last or "bias" in last else 1.0 + 0.3 * noise


def perturb_(
    state: Mapping[str, Tensor], noise: float, generator: torch.Generator, rounding: Mapping[str, float] | None = None
) -> None:
    """Multiply dense tensors of real numbers, in place, by ``1 + noise u`` with u in (-1, 1); what names share, once.

    ``rounding`` holds larger noise of single tensors. The tensors are contiguous.
    """
    reach = min(_POOL, max((t.numel() for t in state.values()), default=0) + 1)
    pool = torch.rand(2 * reach, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)
    done: set[int] = set()
    for name, tensor in state.items():
        if not is_continuous(tensor) or tensor.layout != torch.strided or id(tensor) in done:
            continue
        done.add(id(tensor))
        size = max((rounding or {}).get(name, 0.0), noise)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        starts = torch.randint(reach, (flat.numel() // reach + 1,), generator=generator, device="cpu").tolist()
        for piece, start in zip(flat.split(reach), starts, strict=False):
            factors = (pool[start : start + len(piece)] * size).add_(1)
            piece.mul_(factors.to(piece.real.dtype if piece.is_complex() else piece.dtype))


def is_continuous(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_computed(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is computed with: integers as they are, all else in the given precision."""
    if dtype.is_complex:
        return torch.complex128 if precision == torch.float64 else torch.complex64
    return precision if dtype.is_floating_point else dtype


def kept_value(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The value of a tensor that is part of the network but no weight, on the CPU, in float64 or another ``dtype``.

    Raises:
        SymmetryError: on the meta device, where it has none.
    """
    if tensor.is_meta:
        raise SymmetryError(
            f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} that is part of the network, but no "
            "weight (an index, a mask, frequencies of positions), is on the meta device and has no values; make it on "
            "the CPU (accelerate.init_empty_weights(include_buffers=False) leaves such tensors there)"
        )
    return tensor.detach().to(device="cpu", dtype=dtype or as_computed(tensor.dtype, torch.float64), copy=True)
