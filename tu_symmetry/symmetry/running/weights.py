"""The weights that a network is run with: random ones, and relative noise on given ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError

_POOL = 2**18  # numbers of the noise; drawing one for every weight would take longer than a layer does


def random_state(
    model: nn.Module,
    generator: torch.Generator,
    constants: Container[str] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Random weights of moderate size for every tensor of a module, on the CPU; tied names share one tensor.

    Args:
        model: the module.
        generator: for the numbers.
        constants: integers and booleans that keep their values; where left out, all of them do, else the others are
            drawn too (masks at random, other integers in another order).
        dtype: of the real numbers.
    """
    drawn: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in drawn:
            own = _drawn(name, tensor.detach(), generator)
            if tensor.layout == torch.strided:
                if constants is not None and not is_continuous(tensor) and name not in constants and tensor.numel() > 1:
                    own = _drawn_integers(own, generator)
                own = own.to(dtype) if tensor.is_floating_point() else own
            drawn[id(tensor)] = own
        state[name] = drawn[id(tensor)]
    return state


def _drawn_integers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A mask with three quarters of its entries set, or the same integers in another order."""
    if tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
        return (torch.rand(tensor.shape, generator=generator, device="cpu") < 0.75).to(tensor.dtype)
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator, device="cpu")].reshape(tensor.shape)


def _drawn(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.layout != torch.strided or not is_continuous(tensor):
        return tensor.cpu().clone()
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


class Noise:
    """What weights are multiplied by, in place: ``1 + amount(name) * u``, with u in (-1, 1) from a pool of numbers."""

    def __init__(self, amount: Callable[[str], float], generator: torch.Generator, most: int = _POOL) -> None:
        self.amount, self.generator = amount, generator
        self.reach = min(_POOL, most + 1)
        self.pool = torch.rand(2 * self.reach, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)

    def add_(self, name: str, tensor: Tensor) -> None:
        """Change a tensor whose entries fill one piece of memory."""
        size = self.amount(name)
        if not size:
            return
        flat = tensor.as_strided((tensor.numel(),), (1,))
        count = flat.numel() // self.reach + 1
        starts = torch.randint(self.reach, (count,), generator=self.generator, device="cpu").tolist()
        for piece, start in zip(flat.split(self.reach), starts, strict=False):
            factors = (self.pool[start : start + len(piece)] * size).add_(1)
            piece.mul_(factors.to(piece.real.dtype if piece.is_complex() else piece.dtype))


def perturb_(state: Mapping[str, Tensor], amount: Callable[[str], float], generator: torch.Generator) -> None:
    """Multiply the dense floating-point tensors, which are contiguous, by :class:`Noise`; what names share, once."""
    noise = Noise(amount, generator, max((t.numel() for t in state.values()), default=0))
    done: set[int] = set()
    for name, tensor in state.items():
        if is_continuous(tensor) and tensor.layout == torch.strided and id(tensor) not in done:
            noise.add_(name, tensor)
            done.add(id(tensor))


def is_continuous(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_computed(dtype: torch.dtype, precision: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is computed with: integers as they are, all else in the given precision."""
    if dtype.is_complex:
        return torch.complex128 if precision == torch.float64 else torch.complex64
    return precision if dtype.is_floating_point else dtype


def kept_value(tensor: Tensor) -> Tensor:
    """The value of a tensor that is part of the network but no weight, on the CPU; none on the meta device has one."""
    if tensor.is_meta:
        raise SymmetryError(
            f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} that is part of the network, but no "
            "weight (an index, a mask, a buffer that the state dict leaves out), is on the meta device and has no "
            "values; make it on the CPU (weights and counters can stay on the meta device)"
        )
    return tensor.detach().to(device="cpu", dtype=as_computed(tensor.dtype, torch.float64), copy=True)
