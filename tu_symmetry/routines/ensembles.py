"""Saved posteriors as ensembles that TorchUncertainty's routines evaluate, from Python or from a YAML file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from tu_symmetry.posterior.compact import CompactEnsemble, CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import evenly


def posterior_ensemble(
    posterior: str | os.PathLike[str], model: nn.Module, *, num_samples: int | None = None, seed: int = 0
) -> CompactEnsemble:
    """Networks drawn from a saved posterior, as one module whose outputs are ``[num_samples * B, C]``.

    TorchUncertainty's routines evaluate it with ``is_ensemble=True``.

    Args:
        posterior: a file that :meth:`CompactPosterior.save` wrote, or the folder of a :class:`SampleStore`.
        model: a module of the posterior's architecture; its own weights do not matter.
        num_samples: how many draws, or how many samples, evenly spaced, of a store (None for all of them).
        seed: seed of the draws.

    Raises:
        ValueError: no number of draws for a Gaussian, or more samples than a store has.
        SampleFileError: a file that is truncated, foreign, or of another architecture.
    """
    path = Path(posterior)
    if path.is_dir():
        store = SampleStore.open(path, like=model.state_dict())
        count = len(store) if num_samples is None else num_samples
        if not 1 <= count <= len(store):
            raise ValueError(f"num_samples={num_samples}, but {path} holds {len(store)} samples")
        return CompactEnsemble(model, store.stack(evenly(len(store), count)))
    if num_samples is None or num_samples < 1:
        raise ValueError(f"{path} is a Gaussian, and num_samples={num_samples} does not say how many networks to draw")
    return CompactPosterior.load(path).as_module(model, num_samples, generator=torch.Generator().manual_seed(seed))
