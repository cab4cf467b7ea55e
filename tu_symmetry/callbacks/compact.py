"""Compact Gaussian posteriors of stored samples, at the end of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, Dataset

from tu_symmetry.callbacks.held_out import validation_loader, why_not_held_out
from tu_symmetry.callbacks.members import (
    as_input,
    copy_of,
    example_from,
    on_training_device,
    require_whole_weights,
    trained_networks,
)
from tu_symmetry.callbacks.rebasin import Rebasin
from tu_symmetry.callbacks.training_data import plain_training_loader
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import evenly
from tu_symmetry.symmetry.discovery import discover_symmetries


class FitCompactPosterior(Callback):
    """Fits q_d (networks as they are) and q_r (permuted into one basin) when a fit ends, and writes them.

    The networks are those of a sample store, which this very run may have written. Rank 0 does the work. On validation
    data that are neither trained on nor tested on both are measured (:meth:`CompactPosterior.assess`): each file's
    metadata hold the scores, the verdict, and the ``temperature`` that :meth:`CompactPosterior.tempered` takes.

    Logged once: ``compact/NoT`` (mean number of transpositions to the first network), ``compact/sigma_q_d`` and
    ``compact/sigma_q_r`` (root mean square of the standard deviations), and of each posterior that was measured
    ``compact/temperature_q_r`` and ``compact/gain_q_r`` (nats of NLL below one network at that temperature).

    Args:
        samples: folder of the sample store.
        q_r: file for the aligned posterior.
        q_d: file for the posterior of the networks as they are.
        num_samples: number of stored samples that are used, evenly spaced; None for all.
        match_on: match units by ``weights``, or by ``activations`` on the training data.
        train_data: the training data as the networks see them when they predict; None for the trainer's.
    """

    def __init__(
        self,
        samples: str | Path,
        *,
        q_r: str | Path,
        q_d: str | Path,
        num_samples: int | None = None,
        match_on: Literal["weights", "activations"] = "weights",
        train_data: DataLoader[Any] | Dataset[Any] | None = None,
    ) -> None:
        super().__init__()
        if match_on not in ("weights", "activations"):
            raise ValueError(f"match_on must be 'weights' or 'activations', got {match_on!r}")
        require_numbers(num_samples=num_samples)
        self.samples, self.q_r, self.q_d = Path(samples), Path(q_r), Path(q_d)
        self.num_samples, self.match_on, self.train_data = num_samples, match_on, train_data

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what would fail at the end."""
        require_whole_weights(trainer)
        for path in (self.q_r, self.q_d):
            if path.exists() and trainer.ckpt_path is None:
                raise FileExistsError(f"{path} is there already; give another file, or move it away")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit and write."""
        if trainer.is_global_zero:
            with on_training_device(trainer, pl_module):
                self._fit(trainer, pl_module)

    def _fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        copied = copy_of(trained_networks(pl_module, None)[0])
        store = SampleStore.open(self.samples, like=copied.state_dict())
        count = len(store) if self.num_samples is None else self.num_samples
        if not 2 <= count <= len(store):
            raise ValueError(f"{self.samples} holds {len(store)} samples, {count} are wanted; at least two are needed")
        states = [{n: t.to(pl_module.device) for n, t in store[i].items()} for i in evenly(len(store), count)]
        loader = plain_training_loader(trainer, pl_module, self.train_data)
        dtype = next(copied.parameters()).dtype
        example = tuple(as_input(x, dtype) for x in example_from(next(iter(loader))))
        graph = discover_symmetries(copied.cpu(), example)
        q_d = CompactPosterior.from_states(states, graph, align=False)
        data: dict[str, Any] = {}
        if self.match_on == "activations":
            data = {"model": copied.to(pl_module.device), "dataloader": loader}
        q_r = CompactPosterior.from_states(states, graph, match_on=self.match_on, **data)
        moved = q_r.metadata["transpositions"][1:]  # the first is the reference
        found = {"sigma_q_d": q_d.rms(), "sigma_q_r": q_r.rms(), "NoT": sum(moved) / len(moved)}
        held_out = validation_loader(trainer)
        why = why_not_held_out(held_out, loader, trainer)
        q_d.save(self.q_d)
        q_r.save(self.q_r)  # both, before anything is measured
        for name, q, path in (("q_d", q_d, self.q_d), ("q_r", q_r, self.q_r)):
            if held_out is None or why:
                break
            generator = torch.Generator().manual_seed(0)
            try:
                judged = q.assess(copied.to(pl_module.device), states, held_out, generator=generator)
            except ValueError as error:
                why = str(error)
                break
            q.metadata |= {"temperature": judged.temperature, "scores": judged.scores, "verdict": judged.verdict}
            found |= {f"temperature_{name}": judged.temperature, f"gain_{name}": judged.gain}
            rank_zero_info("%s on held-out data: %s", name, judged.verdict)
            q.save(path)
        shown = ", ".join(f"{n} {v:.4g}" for n, v in found.items())
        left = f" (not measured beside one network: {why})" if why else ""
        rank_zero_info("compact posterior of %d networks: %s%s", len(states), shown, left)
        ordered = any(isinstance(c, Rebasin) and c.in_place for c in trainer.callbacks)  # type: ignore[attr-defined]
        if ordered or not any(moved):
            why = "Rebasin(in_place=True) has aligned the networks" if ordered else "the networks were aligned"
            rank_zero_info("q_d %s q_r: %s before they were stored", "is near" if any(moved) else "equals", why)
        for logger in trainer.loggers:
            logger.log_metrics({f"compact/{name}": value for name, value in found.items()}, step=trainer.global_step)
