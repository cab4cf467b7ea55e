"""Linear observations of a network's output, ``y ~ N(A f, v I)``.

A tomograph does not see an image but its line integrals, a camera sees a blurred one: fewer values, or other ones, than
the network puts out. ``LinearObservation()`` (the identity) is ordinary regression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DOT_ERROR = {torch.float64: 1e-8, torch.float32: 1e-3}


class LinearObservation:
    """A linear map ``A`` from the outputs of a network to what is measured, as a matrix or as two functions.

    Args:
        matrix: ``[values, outputs]``; None with ``forward`` and ``adjoint``, or, without them, for the identity.
        forward: ``[..., outputs] -> [..., values]``; linear.
        adjoint: ``[..., values] -> [..., outputs]``, the transposed map.
        outputs: number of outputs that the functions take.
        values: number of values that they give.
        device: where the functions compute, if they hold tensors on a GPU.

    Attributes:
        outputs: number of outputs; None for the identity, which takes any.
        values: number of measured values; None for the identity.

    Raises:
        ValueError: functions that are not linear or no adjoints of each other (checked with random vectors), and sizes
            that do not fit.

    Example:
        >>> A = LinearObservation(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
        >>> A.forward(torch.tensor([1.0, 2.0, 3.0])), A.adjoint(torch.tensor([1.0, 0.0]))
        (tensor([3., 5.]), tensor([1., 1., 0.]))
    """

    def __init__(
        self,
        matrix: Tensor | None = None,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        adjoint: Callable[[Tensor], Tensor] | None = None,
        outputs: int | None = None,
        values: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if matrix is not None and (forward is not None or adjoint is not None):
            raise ValueError("an observation is a matrix or a pair forward, adjoint, not both")
        if (forward is None) != (adjoint is None):
            raise ValueError("forward and adjoint belong together: the evidence needs A and its transpose")
        self._forward, self._adjoint, self._matrix = forward, adjoint, None
        self.outputs, self.values, self._device = outputs, values, torch.device(device)
        if matrix is not None:
            if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
                raise TypeError("the observation's matrix has to be a tensor of real numbers [values, outputs]")
            if matrix.ndim != 2 or 0 in matrix.shape:
                raise ValueError(
                    f"the observation's matrix has shape {tuple(matrix.shape)}; it has to be [values, outputs]"
                )
            if not torch.isfinite(matrix).all():
                raise ValueError("the observation's matrix holds NaN or infinite entries")
            self._matrix = matrix.detach()
            self.values, self.outputs = matrix.shape
        elif forward is not None:
            if outputs is None or values is None:
                raise ValueError("forward and adjoint need outputs=... and values=..., the sizes that they map between")
            self._check_functions()
        elif outputs is not None:
            self.values = outputs

    @property
    def is_identity(self) -> bool:
        """Whether the outputs are observed themselves."""
        return self._matrix is None and self._forward is None

    def _check_functions(self) -> None:
        """The dot test ``<A x, y> = <x, A^T y>``, and a superposition, with random vectors."""
        assert self._forward is not None and self._adjoint is not None
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float64
        x = torch.randn(2, self.outputs or 0, generator=generator, dtype=dtype, device="cpu").to(self._device)
        y = torch.randn(2, self.values or 0, generator=generator, dtype=dtype, device="cpu").to(self._device)
        try:
            forward = self._forward(x)
        except RuntimeError:  # functions of single precision
            dtype = torch.float32
            x, y = x.float(), y.float()
            try:
                forward = self._forward(x)
            except RuntimeError as error:
                raise RuntimeError(
                    f"forward fails on random values on {self._device}: {error}\nWhere it holds tensors on another "
                    "device, say device=..."
                ) from error
        back = self._adjoint(y)
        for found, expected, name in ((forward, y, "forward"), (back, x, "adjoint")):
            if found.shape != expected.shape:
                raise ValueError(
                    f"{name} gives shape {tuple(found.shape)} where {tuple(expected.shape)} was expected; it has to "
                    "map the last axis and keep those before it, and outputs= and values= have to be its sizes"
                )
        joint = self._forward(x.sum(0, keepdim=True))[0]
        if not bool((joint - forward.sum(0)).abs().max() <= _DOT_ERROR[dtype] * forward.abs().max().clamp(min=1e-30)):
            raise ValueError("forward is not linear: A (x + y) is not A x + A y (an offset, or a clamp in it?)")
        left, right = (forward * y).sum(-1), (x * back).sum(-1)
        scale = forward.norm(dim=-1) * y.norm(dim=-1) + x.norm(dim=-1) * back.norm(dim=-1)
        if not bool(((left - right).abs() <= _DOT_ERROR[dtype] * scale).all()):
            raise ValueError(
                f"adjoint is not the transpose of forward: <A x, y> = {left.tolist()} and <x, A^T y> = "
                f"{right.tolist()} for random x and y. An inverse or a filtered back-projection is no adjoint"
            )

    def check_sizes(self, outputs: int, values: int) -> None:
        """Refuse outputs or measurements of another length."""
        expected = outputs if self.outputs is None else self.outputs
        if outputs != expected:
            raise ValueError(
                f"the observation takes {expected} outputs, the network gives {outputs}; the operator belongs to "
                "another image size, or its matrix has to be transposed to [values, outputs]"
            )
        expected = outputs if self.values is None else self.values
        if values != expected:
            raise ValueError(f"the observation gives {expected} values, but there are {values} measurements")

    def forward(self, outputs: Tensor) -> Tensor:
        """``A f``: ``[..., outputs] -> [..., values]``."""
        if self._matrix is not None:
            return outputs @ self._matrix.to(outputs).mT
        return outputs if self._forward is None else self._forward(outputs)

    def adjoint(self, values: Tensor) -> Tensor:
        """``A^T u``: ``[..., values] -> [..., outputs]``."""
        if self._matrix is not None:
            return values @ self._matrix.to(values)
        return values if self._adjoint is None else self._adjoint(values)

    def matrix(self, outputs: int) -> Tensor:
        """``A`` as a matrix ``[values, outputs]``, float64 on the CPU."""
        if self._matrix is not None:
            return self._matrix.double().cpu()
        if self._forward is None:
            return torch.eye(outputs, dtype=torch.float64, device="cpu")
        eye = torch.eye(outputs, dtype=torch.float64, device=self._device)
        try:
            return self._forward(eye).mT.double().cpu().contiguous()
        except RuntimeError:  # functions of single precision
            return self._forward(eye.float()).mT.double().cpu().contiguous()

    def reduced(self, outputs: int) -> tuple[Tensor | None, Tensor | None]:
        """``A = Q R`` with ``R`` of at most ``outputs`` rows, so that what is solved has ``min(values, outputs)`` rows.

        With more measurements than outputs, ``A F A^T + v I`` acts as ``v`` on what is orthogonal to the range of
        ``A``, which the evidence accounts for in closed form. ``Q`` has orthonormal columns; None stands for identity.
        """
        if self.is_identity:
            return None, None
        matrix = self.matrix(outputs)
        if len(matrix) <= outputs:
            return None, matrix
        return torch.linalg.qr(matrix)

    def pseudo_inverse_variance(self, outputs: int, rank: int) -> float:
        """Mean variance of the outputs when unit noise is mapped back by the pseudo-inverse of a rank."""
        values = torch.linalg.svdvals(self.matrix(outputs))[:rank]
        return float((values[values > values[0] * 1e-12] ** -2).sum() / outputs)


def require_measurements(values: Any) -> Tensor:
    """Measurements that are finite real numbers."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError("measurements have to be a tensor of real numbers")
    wrong = ~torch.isfinite(values)
    if wrong.any():
        places = wrong.reshape(-1).nonzero().reshape(-1)
        raise ValueError(
            f"{len(places)} of {values.numel()} measurements are NaN or infinite, the first at {places[:5].tolist()}; "
            "leave dead detector bins out of the measurements and their rows out of the observation"
        )
    return values
