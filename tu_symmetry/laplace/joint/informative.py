"""The informative part of the curvature ``B^T B``: its longest rows, and the model that they make.

"The joint optimum from few observations" in ``docs/mathematics.md`` has the model and its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from tu_symmetry.laplace.data import all_reduce, placed
from tu_symmetry.laplace.definite import cholesky_of_one_plus
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.inputs import rows_of
from tu_symmetry.laplace.joint.data import TrainingData
from tu_symmetry.laplace.tangent import normal
from tu_symmetry.processes import adding
from tu_symmetry.transfer import moved

MOST_ROWS = 2048
ENOUGH_ROWS = 256  # are made of every data set that has them
_OF = 100  # of more, one of so many: their Gram matrices are quadratic in them
_FEWEST = 64  # fewer are not worth it, unless they are all
_ENTRIES = 1 << 26  # of the Gram matrices of all groups, and of the largest temporary tensors
_WORK = 1 << 33  # entries of the output Hessians of all observations, which are read every few iterations
_SAMPLES = 64  # that the network takes at once
_TERMS = 8192  # of an inner product that are added up in the weights' type; these sums are, in float64
_MOVE = 2.0  # of a log precision, at most, in one minimization of the model
_STEPS = 60  # of which

Energy = Callable[[Tensor], tuple[float, Tensor]]


def most_rows(data: TrainingData, groups: PriorGroups, memory: int) -> int:
    """How many rows are worth their cost and fit the memory; 0 where too few do, or choosing them takes too long."""
    point = data.tangent.point()
    share = torch.tensor([float(data.entries)], dtype=torch.float64, device=point.device)
    all_reduce(share)
    every, outputs = int(share), data.outputs[0].shape[-1]
    if every * outputs > _WORK or outputs**2 > _ENTRIES:
        return 0
    enough = MOST_ROWS if data.likelihood.quadratic else ENOUGH_ROWS  # once for all, or every few iterations
    wanted = min(every, max(enough, min(MOST_ROWS, every // _OF)))
    fitting = memory // max(1, point.element_size() * point.numel())
    found = min(wanted, fitting, math.isqrt(_ENTRIES // max(1, len(groups))))
    return found if found >= min(wanted, _FEWEST) else 0


class Chosen(NamedTuple):
    """The longest columns of the outputs' roots."""

    masks: list[list[Tensor]]  # chunk by chunk and piece by piece
    share: float  # of the trace of all output Hessians that they hold
    excess: float  # times the mean column's that each of them holds


def _pieces(data: TrainingData, linear: Sequence[Tensor]) -> Iterator[Iterator[tuple[slice, Tensor]]]:
    """Roots of the output Hessians, piece by piece of every chunk: ``[columns, *outputs.shape]``."""
    for outputs, targets in zip(linear, data.targets, strict=True):
        rows = max(1, _ENTRIES // max(1, outputs[:1].numel() * outputs.shape[-1]))
        parts = [slice(i, min(i + rows, len(outputs))) for i in range(0, len(outputs), rows)]
        yield ((part, data.likelihood.hessian_root(outputs[part], targets[part])) for part in parts)


def choose(data: TrainingData, linear: Sequence[Tensor], most: int) -> Chosen:
    """The longest columns of the roots of the output Hessians, of several processes equally many in each."""
    squares = [[root.double().square().sum(-1) for _, root in pieces] for pieces in _pieces(data, linear)]
    flat = torch.cat([own.flatten() for pieces in squares for own in pieces])
    order = flat.argsort(descending=True, stable=True)[: most // adding()]
    order = order[flat[order] > 0]
    counts = flat.new_tensor([len(order), len(flat)])
    sums = torch.stack([flat[order].sum(), flat.sum()])
    all_reduce(sums, counts)
    taken = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    taken[order] = True
    masks = iter(taken.split([own.numel() for pieces in squares for own in pieces]))
    share = float(sums[0] / sums[1]) if float(sums[1]) > 0 else 0.0
    return Chosen(
        [[next(masks).view(own.shape) for own in pieces] for pieces in squares],
        share,
        share * float(counts[1] / counts[0].clamp(min=1)),
    )


class Informative:
    """Rows of the curvature's root ``[rows, weights]`` for unit noise, and their Gram matrices ``K_g``, float64."""

    def __init__(self, data: TrainingData, groups: PriorGroups, linear: Sequence[Tensor], chosen: Chosen) -> None:
        self.groups = groups
        self.rows = _gathered(data, linear, chosen)
        count, device = len(self.rows), self.rows.device
        self.grams = torch.zeros(len(groups), count, count, dtype=torch.float64, device=device)
        for number, own in self._parts(self.rows):
            self.grams.index_add_(0, number, (own @ own.mT).double())

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers of groups, and the rows' entries in them: ``[groups, rows, weights]``, in small pieces."""
        numbers = moved([self.groups.of[name].reshape(-1) for name in self.groups.slots], rows.device)
        for number, slot in zip(numbers, self.groups.slots.values(), strict=True):
            own = rows[:, slot.start : slot.stop].view(len(rows), len(number), -1).transpose(0, 1)
            for part in own.split(max(1, min(_TERMS, _ENTRIES // max(1, len(rows) * len(number)))), dim=2):
                yield number, part

    def _factor(self, rho: Tensor, variance: float) -> Tensor:
        """The Cholesky factor of ``1 + K / v``."""
        whole = torch.tensordot((-rho).exp().to(self.grams) / variance, self.grams, dims=1)
        return cholesky_of_one_plus(whole, 30 * torch.finfo(self.rows.dtype).eps)

    def covariance_product(self, rho: Tensor, variance: float, vector: Tensor) -> Tensor:
        """``(Lambda + B^T B / v)^-1 vector``: the covariance, had the other observations no curvature."""
        prior = self.groups.spread(rho.exp().to(vector))
        scaled = vector / prior
        inner = (self.rows @ scaled).double().unsqueeze(-1)
        inner = torch.cholesky_solve(inner, self._factor(rho, variance)).squeeze(-1) / variance
        return scaled - (inner.to(vector) @ self.rows) / prior

    def optimum(
        self,
        theta: Tensor,
        gradient: Tensor,
        rho: Tensor,
        variance: float,
        energy: Energy,
        bounds: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Weights and log precisions that minimize the model of the joint objective around ``theta``.

        ``gradient`` is that of the loss there over the noise variance, ``energy`` gives the value and gradient of what
        depends on log precisions alone. Precisions move from ``rho`` by a factor of ``e^2`` at most.
        """
        root = variance**-0.5
        along = self.groups.inner(self.rows, gradient).to(self.grams) * root  # B_g g_g
        own = (self.rows @ theta).double() * root
        squares = self.groups.total(gradient.double().square()).to(self.grams)
        start = torch.dot(gradient.double(), theta.double())

        def solved(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            inverse = (-point).exp()
            right = inverse @ along
            t = torch.cholesky_solve((own + right).unsqueeze(-1), self._factor(point, variance)).squeeze(-1)
            return t, inverse, right

        def value(at: np.ndarray) -> tuple[float, np.ndarray]:
            here = torch.tensor(at, device="cpu")
            point = here.to(self.grams)
            t, inverse, right = solved(point)
            products = self.grams @ t / variance
            norms = (inverse.square() * (products @ t - 2 * along @ t + squares)).clamp(min=0)
            change = inverse @ products - right - own  # B (theta - theta_t)
            linear = inverse @ (along @ t - squares) - start
            prior = point.exp() * norms
            model = linear + 0.5 * change.square().sum() + 0.5 * prior.sum()
            prior, model = moved([prior, model], torch.device("cpu"))
            other, slope = energy(here)
            return float(model) + other, (0.5 * prior + slope).numpy()

        low, high = torch.maximum(rho - _MOVE, bounds[0]), torch.minimum(rho + _MOVE, bounds[1])
        box = np.stack([low.numpy(), high.numpy()], 1)
        found = minimize(
            value, rho.clamp(low, high).numpy(), jac=True, method="L-BFGS-B", bounds=box, options={"maxiter": _STEPS}
        )
        point = torch.tensor(found.x, device="cpu")
        t = solved(point.to(self.grams))[0] * root
        return (t.to(theta) @ self.rows - gradient) / self.groups.spread(point.exp().to(theta)), point


def _gathered(data: TrainingData, linear: Sequence[Tensor], chosen: Chosen) -> Tensor:
    """The chosen rows of ``R^T J`` of all processes, ``[rows, weights]``."""
    size = data.tangent.point().numel()
    at, total = placed(sum(int(mask.sum()) for masks in chosen.masks for mask in masks), linear[0].device)
    rows = linear[0].new_zeros(total, size)
    each = max(1, min(_SAMPLES, _ENTRIES // max(1, size)))
    for inputs, masks, pieces in zip(data.chunks, chosen.masks, _pieces(data, linear), strict=True):
        for mask, (part, root) in zip(masks, pieces, strict=True):
            where = mask.nonzero()
            for some in where.split(each) if len(where) else ():
                column, sample, *position = some.unbind(1)
                cotangents = root.new_zeros(len(some), *root.shape[2:])  # nothing at its other positions
                one = (torch.arange(len(some), device=root.device), *position)
                cotangents[one] = root[(column, sample, *position)]
                own = data.tangent.sample_gradients(rows_of(inputs, sample + part.start), normal(cotangents))
                rows[at : at + len(some)] = own
                at += len(some)
    all_reduce(rows)
    return rows
