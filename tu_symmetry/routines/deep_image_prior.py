"""The deep image prior: images reconstructed from linear measurements by the weights of an untrained network."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from tu_symmetry.datamodules.tomography import TomographyProblem
from tu_symmetry.files import FileError, read_safetensors, write_safetensors
from tu_symmetry.posterior.network import States, derived_seed, initialized, require_positive
from tu_symmetry.routines.members import StackedNetworks, stacked_module
from tu_symmetry.routines.predictive import HALF_PRECISION
from tu_symmetry.sparse import sparse_rows
from tu_symmetry.states import unstack
from tu_symmetry.transfer import numbers

_FORMAT = "tu_symmetry.deep_image_prior"
_INDICES = "problem.operator.indices"  # beside the entries of a sparse one
_WEIGHT_LIMIT = 1000.0


def total_variation(images: Tensor) -> Tensor:
    """Anisotropic total variation of images ``[..., height, width]``: ``[...]``."""
    rows = (images[..., 1:, :] - images[..., :-1, :]).abs().sum((-2, -1))
    return rows + (images[..., 1:] - images[..., :-1]).abs().sum((-2, -1))


def image_quality(images: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR in dB and SSIM (7 x 7 uniform windows) of each image ``[n, 1, height, width]``, over the truth's range."""
    psnr, ssim = [], []
    for image, own in zip(images, truth, strict=True):
        span = float(own.max() - own.min()) or 1.0
        psnr.append(peak_signal_noise_ratio(image, own, data_range=span))
        value = structural_similarity_index_measure(
            image.unsqueeze(0), own.unsqueeze(0), gaussian_kernel=False, kernel_size=7, data_range=span
        )
        assert isinstance(value, Tensor)
        ssim.append(value)
    return torch.stack(psnr), torch.stack(ssim)


@dataclass(frozen=True, eq=False)
class Reconstructions:
    """What a fit has found: states and images of the lowest loss, stacked, and the problems that they belong to."""

    states: States
    images: Tensor
    loss: Tensor
    problem: TomographyProblem

    def save(self, path: str | Path) -> None:
        """Write a sealed safetensors file, whole or not at all."""
        tensors = {f"states.{name}": t for name, t in self.states.items()} | {"images": self.images, "loss": self.loss}
        tensors |= {f"problem.{f.name}": getattr(self.problem, f.name) for f in fields(self.problem)}
        if self.problem.operator.is_sparse:
            operator = tensors.pop("problem.operator").coalesce()
            tensors |= {_INDICES: operator.indices().int(), "problem.operator": operator.values()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        write_safetensors(Path(path), plain, {"deep_image_prior": json.dumps({"format": _FORMAT, "version": 1})})

    @classmethod
    def load(cls, path: str | Path) -> Reconstructions:
        """Read what :meth:`save` wrote."""
        tensors, header = read_safetensors(Path(path))
        content = json.loads(header.metadata.get("deep_image_prior", "{}"))
        if content.get("format") != _FORMAT or content.get("version") != 1:
            raise FileError(f"{path} holds no reconstructions of a DeepImagePriorRoutine")
        states = {n.removeprefix("states."): t for n, t in tensors.items() if n.startswith("states.")}
        parts = {f.name: tensors[f"problem.{f.name}"] for f in fields(TomographyProblem)}
        if _INDICES in tensors:
            shape = (*parts["measurements"].shape, parts["truth"][0].numel())
            parts["operator"] = torch.sparse_coo_tensor(
                tensors[_INDICES].long(), parts["operator"], shape, is_coalesced=True, check_invariants=True
            )
        return cls(states, tensors["images"], tensors["loss"], TomographyProblem(**parts))

    def __len__(self) -> int:
        return len(self.images)


class DeepImagePriorRoutine(StackedNetworks):
    """Reconstruct several images at once: one network for each, all as one module with stacked weights.

    The loss of a problem is ``mean((A f - y)^2) + tv_weight * TV(f)`` over its real measurements, ``f`` the network's
    output for the filtered back-projection. The iterate of the lowest loss is kept. Gradients are clipped network by
    network, so that every image comes out as if it were alone.

    Logged: ``loss`` (mean over the problems); ``best_loss``, ``psnr`` and ``ssim`` of the kept iterates after every
    epoch; ``test/psnr`` and ``test/ssim``.

    Args:
        model: the architecture, without buffers; its own weights do not matter.
        num_problems: number of networks, as many as the data module has problems.
        tv_weight: one for all, or number of angles to weight.
        max_iterations: how many first iterates one is kept of: one for all, or number of angles to number.
        seed: seed of the initialization, from which all start.
        out: safetensors file of :class:`Reconstructions`, written when the fit ends.
        optimizer: of the stack, Adam with learning rate 1e-4 by default. ``optimizer`` of LightningCLI goes first.
    """

    best_loss: Tensor
    default_lr = 1e-4
    lr_scheduler = None

    def __init__(
        self,
        model: nn.Module,
        num_problems: int = 1,
        *,
        tv_weight: float | dict[int, float] = 0.0,
        max_iterations: int | dict[int, int] | None = None,
        seed: int = 10,
        out: str | Path | None = None,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__()
        require_positive(num_problems=num_problems)
        for weight in tv_weight.values() if isinstance(tv_weight, dict) else [tv_weight]:
            if not weight >= 0:
                raise ValueError(f"tv_weight must not be negative, got {tv_weight}")
        if any(True for _ in model.buffers()):
            raise ValueError(
                f"{type(model).__name__} has buffers ({[n for n, _ in model.named_buffers()][:3]} ...): statistics of "
                "a single image are no statistics. Use GroupNorm, or no normalization"
            )
        self.num_problems, self.tv_weight, self.max_iterations = num_problems, tv_weight, max_iterations
        self.out = None if out is None else Path(out)
        self.optimizer = optimizer
        self.members = stacked_module([initialized(model, derived_seed(seed, 1, 0))] * num_problems)
        self.best = copy.deepcopy(self.members).requires_grad_(False)
        self.register_buffer("best_loss", torch.full((num_problems,), torch.inf))
        self._given: TomographyProblem | None = None  # by the data module
        self._problem: TomographyProblem | None = None  # the same on the device
        self._running: tuple[list[int], Tensor, _Projection] | None = None

    def network_states(self) -> list[States]:
        """The iterates of the lowest loss, which the reconstructions are of, as a list of state dicts (views)."""
        return unstack({name: t.detach() for name, t in self.best.state_dict().items()})

    def on_fit_start(self) -> None:
        """Refuse weights in half precision before the first step."""
        if self.trainer.precision in HALF_PRECISION:
            raise ValueError(
                f"precision={self.trainer.precision!r} rounds the weights by more than a step of the optimizer changes "
                "them, and the measurements: take 32-true, 64-true, or a mixed precision, which keeps both"
            )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The problem goes to the device once; every step has the same one."""
        if self._problem is None or self._given is not batch or self._problem.truth.device != device:
            self._require(super().transfer_batch_to_device(batch, device, dataloader_idx))
            self._given = batch
        return self._problem

    def training_step(self, batch: TomographyProblem, batch_idx: int) -> Tensor:
        """The sum of the problems' losses, which gives every network its own gradient."""
        self._require(batch)
        running, projection = self._left(batch)
        parameters = {name: _rows(p, running) for name, p in self.members.named_parameters()}
        images = self._images(self.members, parameters, _rows(batch.back_projection, running))
        images = images.to(batch.truth)  # from half precision under autocast
        residuals = projection(images) - _rows(batch.measurements, running)
        losses = residuals.square().sum(1) / _rows(batch.counts, running)
        losses = losses + _rows(self._weights.to(losses), running) * total_variation(images).sum(1)
        self._keep(losses.detach(), running)
        trainer: Any = self.trainer  # which sets log_every_n_steps without declaring it
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self.log("loss", losses.detach().mean(), prog_bar=True, batch_size=len(batch))
        return losses.sum()

    def _images(self, networks: nn.Module, parameters: States, x: Tensor) -> Tensor:
        def one(own: States, image: Tensor) -> Tensor:
            return functional_call(networks, own, (image.unsqueeze(0),))[0]

        return vmap(one, randomness="different")(parameters, x)

    def _left(self, batch: TomographyProblem) -> tuple[Tensor, _Projection]:
        """Numbers of the problems whose iterations are not over, or of all where none is left, and their operators."""
        left = [k for k, limit in enumerate(self._limits) if self.trainer.global_step < limit]
        left = left or list(range(self.num_problems))
        if self._running is None or self._running[0] != left:  # a copy to the device waits for it
            running = torch.tensor(left, device=batch.truth.device)
            self._running = left, running, _Projection(_rows(batch.operator, running))
        return self._running[1:]

    @torch.no_grad()
    def _keep(self, losses: Tensor, running: Tensor) -> None:
        """Take over the weights of those ``running`` problems whose loss is the lowest so far."""
        better = (losses < self.best_loss[running]) & (self.trainer.global_step < self._ends[running])
        finite, some = numbers([torch.isfinite(losses).all(), better.any()])
        if not finite:
            wrong = running[~torch.isfinite(losses)].tolist()
            raise ValueError(
                f"the loss of problems {wrong} is NaN or infinite at step {self.trainer.global_step}: measurements "
                "that are not finite, or a learning rate that is too large"
            )
        if not some:
            return
        self.best_loss[running] = torch.where(better, losses.to(self.best_loss), self.best_loss[running])
        for kept, now in zip(self.best.parameters(), self.members.parameters(), strict=True):
            chosen = better.view(-1, *[1] * (now.ndim - 1))
            kept[running] = torch.where(chosen, _rows(now, running), _rows(kept, running))

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Clamp the weights."""
        for p in self.members.parameters():
            p.clamp_(-_WEIGHT_LIMIT, _WEIGHT_LIMIT)

    def _require(self, batch: Any) -> None:
        """Take a problem, with the weights and the ends that belong to its numbers of angles."""
        if self._problem is batch:
            return
        if not isinstance(batch, TomographyProblem) or len(batch) != self.num_problems:
            found = len(batch) if isinstance(batch, TomographyProblem) else type(batch).__name__
            raise ValueError(
                f"the data module gives {found} problems (images times angles times noises), but num_problems is "
                f"{self.num_problems}"
            )
        self._problem, self._given, self._running = batch, batch, None
        angles, device = batch.num_angles.tolist(), batch.truth.device
        self._limits = _by_angles(math.inf if self.max_iterations is None else self.max_iterations, angles)
        weights = _by_angles(self.tv_weight, angles)
        self._weights, self._ends = torch.tensor([weights, self._limits], dtype=torch.float64, device=device)

    @torch.no_grad()
    def reconstructions(self, batch: TomographyProblem) -> Tensor:
        """Images of the kept iterates ``[problems, 1, height, width]``; dropout is off."""
        self._require(batch)
        training = self.best.training
        self.best.eval()
        found = self._images(self.best, dict(self.best.named_parameters()), batch.back_projection)
        self.best.train(training)
        return found.to(batch.truth.dtype)

    def on_train_epoch_end(self) -> None:
        """Log how good the kept iterates are."""
        if self._problem is not None:
            psnr, ssim = image_quality(self.reconstructions(self._problem), self._problem.truth)
            values = {"best_loss": self.best_loss.mean(), "psnr": psnr.mean(), "ssim": ssim.mean()}
            self.log_dict(values, prog_bar=True, batch_size=self.num_problems)

    def test_step(self, batch: TomographyProblem, batch_idx: int) -> None:
        """Log how good the kept iterates are."""
        psnr, ssim = image_quality(self.reconstructions(batch), batch.truth)
        self.log_dict({"test/psnr": psnr.mean(), "test/ssim": ssim.mean()}, batch_size=len(batch))

    def on_fit_end(self) -> None:
        """Write the reconstructions; also of a fit that was resumed at its end, which makes no step."""
        problem, loader = self._problem, self.trainer.train_dataloader
        if problem is None and loader is not None:
            problem = next(iter(loader))
        whole = bool(self.best_loss.isfinite().all())
        if self.out is None or problem is None or not whole or not self.trainer.is_global_zero:
            return
        device = self.trainer.strategy.root_device
        self.to(device)
        problem = problem.to(device)
        states = {name: t.detach() for name, t in self.best.state_dict().items()}
        Reconstructions(states, self.reconstructions(problem), self.best_loss.detach(), problem).save(self.out)
        self.cpu()


def _by_angles(values: float | Mapping[int, float], angles: list[int]) -> list[float]:
    """One value for all, or the values of these numbers of angles."""
    if not isinstance(values, Mapping):
        return [float(values)] * len(angles)
    lacking = sorted(set(angles) - values.keys())
    if lacking:
        raise ValueError(f"nothing is given for {lacking} angles, only for {sorted(values)}")
    return [float(values[a]) for a in angles]


class _Projection:
    """Operators ``[problems, m, d]`` as the blocks of one sparse matrix, since a line crosses few of the pixels."""

    def __init__(self, operator: Tensor) -> None:
        if operator.is_sparse:
            found = operator.coalesce()
            (block, row, column), values = found.indices(), found.values()
        else:
            block, row, column = operator.nonzero(as_tuple=True)
            values = operator[block, row, column]
        problems, rows, columns = operator.shape
        i, j = block * rows + row, block * columns + column
        self.matrix = sparse_rows(i, j, values, (problems * rows, problems * columns))
        self.transpose = sparse_rows(j, i, values, (problems * columns, problems * rows))

    def __call__(self, images: Tensor) -> Tensor:
        """Measurements ``[problems, m]`` of images ``[problems, 1, height, width]``."""
        found: Tensor = _Apply.apply(images.reshape(-1, 1), self.matrix, self.transpose)
        return found.view(len(images), -1)


class _Apply(torch.autograd.Function):
    """A sparse matrix times a vector; for the gradient torch would make the transpose anew every time."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.transpose = transpose
        with torch.autocast(vector.device.type, enabled=False):  # sparse products know no half precision
            return matrix @ vector

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose @ gradients[0], None, None


def _rows(stack: Tensor, chosen: Tensor) -> Tensor:
    """``stack[chosen]``, without a copy where that is all of it."""
    return stack if len(chosen) == len(stack) else stack.index_select(0, chosen)
