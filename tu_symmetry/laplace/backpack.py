"""Gradients of single samples by BackPACK, for curvatures that are sums of their squares and products.

The generalized Gauss-Newton matrix of a batch is ``sum_n J_n^T S_n S_n^T J_n`` with the root ``S_n`` of each output
Hessian. Column by column, ``J_n^T s`` is the gradient of ``<f(x_n), s>`` with respect to the weights, and BackPACK
finds it for all samples in one backward pass (``BatchGrad``), or only the sum of its squares (``SumGradSquared``). For
a linear layer without shared positions that sum needs no gradient of a sample at all::

    sum_n (g_n a_n^T)^2 = (g^2)^T a^2        elementwise squares, [outputs, n] x [n, features]

where ``torch.func`` makes ``[n, outputs, features]`` first. What lies between the layers (activations, residual sums,
pooling) is torch's own autograd, so any network will do whose uncertain weights sit in layers of the kinds below, each
called once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.inputs import batch_size, rows_of
from tu_symmetry.laplace.layers import UnsupportedLayerError
from tu_symmetry.laplace.tangent import TangentModel, evaluating

EXTENDED: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)
"""Layers for which BackPACK has both extensions; a subclass may compute something else.

Left out: recurrent layers (one layer, batch first, and full output only) and embeddings (single precision only).
"""

_FIRING = "Full backward hook is firing when gradients are computed with respect to module outputs"
_OTHERWISE = (
    "Use backend='hooks' (the default), which is exact for any layer with curvature='diag' or 'full', or leave these "
    "parameters out with parameters=[...]"
)


class BackpackGradients:
    """Gradients of samples, on a copy of the network that BackPACK watches.

    Args:
        tangent: the network, and which parameters are to be uncertain.

    Raises:
        UnsupportedLayerError: parameters of layers without an extension, or tied to others, by name.
    """

    def __init__(self, tangent: TangentModel) -> None:
        from backpack import extend

        self._owners = _owners(tangent)
        self._original, self._tangent = tangent, copy.copy(tangent)
        self._tangent.model = copy.deepcopy(tangent.model)
        own = self._tangent.model
        self._places: dict[str, nn.Parameter] = {}
        for name, path in self._owners.items():
            module = own.get_submodule(path)
            self._places[name] = getattr(module, name.rpartition(".")[2])
            self._places[name].requires_grad_(True)  # what is frozen and chosen by name counts, too
            extend(module)
        for module in own.modules():
            if isinstance(getattr(module, "inplace", None), bool):
                # nothing may be written over what a backward hook has seen
                module.inplace = False  # type: ignore[assignment]
        self._checked = False

    def gradients(self, inputs: Any, columns: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each column (a cotangent in the outputs' shape) the gradients of all samples, ``[batch, size]``."""
        from backpack.extensions import BatchGrad

        for found in self._passes(inputs, columns, BatchGrad()):
            yield torch.cat([value.flatten(1) for value in found], dim=1)

    def squares(self, inputs: Any, columns: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each column the squares of these gradients, summed over the samples, ``[size]``."""
        from backpack.extensions import SumGradSquared

        for found in self._passes(inputs, columns, SumGradSquared()):
            yield torch.cat([value.flatten() for value in found])

    def _passes(self, inputs: Any, columns: Sequence[Tensor], extension: Any) -> Iterator[list[Tensor]]:
        """One forward pass, and a backward pass for each column."""
        from backpack import backpack

        if not self._checked:
            self._checked = True
            self._check(rows_of(inputs, slice(0, 2)))
        with evaluating(self._tangent.model), torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_FIRING)
            weights = {name: p.requires_grad_() for name, p in self._tangent.parameters().items()}
            outputs = self._tangent.function(inputs)(weights)
            for column in columns:
                with backpack(extension, retain_graph=True):
                    torch.autograd.grad((outputs * column).sum(), list(weights.values()), retain_graph=True)
                found = []
                for name, place in self._places.items():
                    value = getattr(place, extension.savefield, None)
                    if value is None:
                        raise self._refused([name], "is not reached through the call of its layer")
                    delattr(place, extension.savefield)
                    found.append(value.detach())
                yield found

    def _check(self, inputs: Any) -> None:
        """Compare with automatic differentiation on two samples: padding modes, layers that are called twice, ...

        Raises:
            UnsupportedLayerError: the layers whose gradients differ, by name.
        """
        tangent = self._original
        outputs = tangent.outputs(inputs)
        generator = torch.Generator().manual_seed(0)
        column = torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs)
        expected = tangent.sample_gradients(inputs, column)
        (found,) = self.gradients(inputs, [column])
        (squares,) = self.squares(inputs, [column])
        relative = 1e-9 if outputs.dtype == torch.float64 else 1e-3
        wrong = []
        for name, slot in tangent.slots.items():
            own = expected[:, slot.start : slot.stop]
            differs = (found[:, slot.start : slot.stop] - own).norm() > relative * own.norm()
            own = own.square().sum(0)
            if differs or (squares[slot.start : slot.stop] - own).norm() > 2 * relative * own.norm():
                wrong.append(name)
        if wrong:
            raise self._refused(wrong, f"differs from automatic differentiation on {batch_size(inputs)} samples")

    def _refused(self, names: Sequence[str], what: str) -> UnsupportedLayerError:
        modules = dict(self._tangent.model.named_modules())
        layers = dict.fromkeys(self._owners[name] for name in names)
        listed = ", ".join(f"{path or 'the model itself'} ({type(modules[path]).__name__})" for path in layers)
        return UnsupportedLayerError(
            f"backend='backpack': the gradient of {listed} {what}. BackPACK covers layers that are called once in a "
            f"forward pass, and padding with zeros. {_OTHERWISE}"
        )


def _owners(tangent: TangentModel) -> dict[str, str]:
    """The module of each uncertain parameter.

    Raises:
        UnsupportedLayerError: one without an extension, or a parameter that several modules have.
    """
    aliases: dict[int, list[str]] = {}
    for name, p in tangent.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    for shared in aliases.values():
        if len(shared) > 1 and set(shared) & set(tangent.names):
            raise UnsupportedLayerError(
                f"backend='backpack': the parameters {shared} are one tied tensor, whose gradient BackPACK would find "
                f"for one of its layers alone. {_OTHERWISE}"
            )
    modules = dict(tangent.model.named_modules())
    owners = {name: name.rpartition(".")[0] for name in tangent.names}
    lacking = {path: type(modules[path]).__name__ for path in owners.values() if type(modules[path]) not in EXTENDED}
    if lacking:
        listed = ", ".join(f"{path or 'the model itself'} ({kind})" for path, kind in list(lacking.items())[:6])
        more = f" and {len(lacking) - 6} more" if len(lacking) > 6 else ""
        raise UnsupportedLayerError(
            f"backend='backpack': BackPACK has no extension to be used for {listed}{more}; it has them for "
            f"{', '.join(kind.__name__ for kind in EXTENDED)}. {_OTHERWISE}"
        )
    return owners
