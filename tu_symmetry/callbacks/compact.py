"""Compact Gaussian posteriors at the end of a fit: from the networks that it has trained, or from stored samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from tu_symmetry.callbacks.members import (
    ModuleSource,
    as_input,
    check_same_architecture,
    copy_of,
    detached_state,
    example_from,
    on_training_device,
    require_whole_weights,
    trained_networks,
)
from tu_symmetry.callbacks.training_data import in_precision, plain_training_loader
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import evenly
from tu_symmetry.symmetry.discovery import discover_symmetries


class FitCompactPosterior(Callback):
    """Fits q_d (networks as they are) and q_r (permuted into one basin) when a fit ends, and writes them.

    The networks are those of a sample store (``samples``; it may have been written by this very run, as
    :class:`~tu_symmetry.routines.HMCRoutine` does), or else the members that the run has trained. Rank 0 does the work.

    Logged once: ``compact/NoT`` (mean number of transpositions to the first network), ``compact/sigma_q_d`` and
    ``compact/sigma_q_r`` (root mean square of the standard deviations).

    Args:
        q_r: file for the aligned posterior; None for none.
        q_d: file for the posterior of the networks as they are; None for none.
        samples: folder of a sample store; None for the networks of this run.
        num_samples: number of stored samples that are used, evenly spaced; None for all.
        members: where this run's networks are, as for :class:`~tu_symmetry.callbacks.Rebasin`.
        match_on: match units by ``weights``, or by ``activations`` on the training data.
    """

    def __init__(
        self,
        q_r: str | Path | None = None,
        q_d: str | Path | None = None,
        *,
        samples: str | Path | None = None,
        num_samples: int | None = None,
        members: ModuleSource | None = None,
        match_on: Literal["weights", "activations"] = "weights",
    ) -> None:
        super().__init__()
        if q_r is None and q_d is None:
            raise ValueError("FitCompactPosterior has nothing to write: give q_r, q_d or both")
        if match_on not in ("weights", "activations"):
            raise ValueError(f"match_on must be 'weights' or 'activations', got {match_on!r}")
        require_numbers(num_samples=num_samples)
        self.q_r = None if q_r is None else Path(q_r)
        self.q_d = None if q_d is None else Path(q_d)
        self.samples = None if samples is None else Path(samples)
        self.num_samples, self.members, self.match_on = num_samples, members, match_on

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what would fail at the end."""
        require_whole_weights(trainer)
        networks = trained_networks(pl_module, self.members)
        check_same_architecture(networks)
        if self.samples is None and len(networks) < 2:
            raise ValueError(
                f"{type(pl_module).__name__} trains a single network, of which there is no posterior to fit: give "
                "samples: with the folder of a sample store, or members: with where the networks are"
            )
        for path in (self.q_r, self.q_d):
            if path is not None and path.exists() and trainer.ckpt_path is None:
                raise FileExistsError(f"{path} is there already; give another file, or move it away")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit and write."""
        if trainer.is_global_zero:
            with on_training_device(trainer, pl_module):
                self._fit(trainer, pl_module)

    def _fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        networks = trained_networks(pl_module, self.members)
        states = self._states(networks, pl_module.device)
        loader = in_precision(plain_training_loader(trainer, pl_module), trainer)
        copied = copy_of(networks[0])
        dtype = next(copied.parameters()).dtype
        example = tuple(as_input(x, dtype) for x in example_from(next(iter(loader))))
        graph = discover_symmetries(copied.cpu(), example)
        found: dict[str, float] = {}
        if self.q_d is not None:
            q_d = CompactPosterior.from_states(states, graph, align=False)
            q_d.save(self.q_d)
            found["sigma_q_d"] = _root_mean_square(q_d)
        if self.q_r is not None:
            data: dict[str, Any] = {}
            if self.match_on == "activations":
                data = {"model": copied.to(pl_module.device), "dataloader": loader}
            q_r = CompactPosterior.from_states(states, graph, match_on=self.match_on, **data)
            q_r.save(self.q_r)
            moved = q_r.metadata["transpositions"][1:]  # the first is the reference
            found |= {"sigma_q_r": _root_mean_square(q_r), "NoT": sum(moved) / len(moved)}
        rank_zero_info(
            "compact posterior of %d networks: %s", len(states), ", ".join(f"{n} {v:.4g}" for n, v in found.items())
        )
        for logger in trainer.loggers:
            logger.log_metrics({f"compact/{name}": value for name, value in found.items()}, step=trainer.global_step)

    def _states(self, networks: Sequence[nn.Module], device: torch.device) -> list[dict[str, Tensor]]:
        if self.samples is None:
            return [detached_state(network) for network in networks]
        store = SampleStore.open(self.samples, like=networks[0].state_dict())
        count = len(store) if self.num_samples is None else self.num_samples
        if not 2 <= count <= len(store):
            raise ValueError(f"{self.samples} holds {len(store)} samples, {count} are wanted; at least two are needed")
        return [{name: t.to(device) for name, t in store[i].items()} for i in evenly(len(store), count)]


def _root_mean_square(posterior: CompactPosterior) -> float:
    return float(posterior.sigma().double().square().mean().sqrt())
