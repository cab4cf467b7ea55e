"""Data and losses from the command line: dotted names of what makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.barrier import Loss, mean_loss
from tu_symmetry.alignment.repair import Correction, batchnorm_layers
from tu_symmetry.configs import ConfigError, parse_assignments, resolve
from tu_symmetry.files import FileError

CROSS_ENTROPY = "torch.nn.functional.cross_entropy"


@dataclass(frozen=True)
class Data:
    """Batches in memory: ``(inputs, targets)`` to measure losses on, inputs for statistics, and the digest of all."""

    name: str
    evaluation: list[tuple[Tensor, Tensor]]
    statistics: list[Tensor]
    digest: str

    @property
    def num_samples(self) -> int:
        """Number of samples that losses are measured on."""
        return sum(len(x) for x, _ in self.evaluation)


def load_data(name: str, arguments: Sequence[str], num_samples: int, dtype: torch.dtype) -> Data:
    """Take the first samples of a loader by its dotted name; floating-point inputs are converted to ``dtype``.

    It names a LightningDataModule (losses on its test loader, the first if there are several; statistics on its
    training loader), or a function that returns a loader of batches ``(inputs, targets)`` (for both), or a pair of
    loaders: evaluation and statistics. ``arguments`` are ``KEY=VALUE`` texts for it.
    """
    values = parse_assignments(arguments, "--data-init")
    try:
        build = resolve(name)
        with torch.random.fork_rng(devices=[]):  # loaders may shuffle
            torch.default_generator.manual_seed(0)  # that of the CPU, which alone is put back
            evaluation, statistics = _loaders(build(**values))
            labeled = _first(evaluation, num_samples, dtype)
            others = labeled if statistics is evaluation else _first(statistics, num_samples, dtype)
    except (FileError, ConfigError) as error:
        raise FileError(f"--data {name}: {error}") from error
    except Exception as error:
        raise FileError(
            f"--data {name} fails: {type(error).__name__}: {error}. It is called with {values} (option --data-init) "
            "and has to be a LightningDataModule, or return a loader of batches (inputs, targets), or two loaders"
        ) from error
    unlabeled = [x for x, _ in others]
    digest = hashlib.sha256()
    for tensor in (*(t for pair in labeled for t in pair), *unlabeled):
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return Data(name, labeled, unlabeled, digest.hexdigest())


def _loaders(source: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    """Loaders for evaluation and for statistics."""
    if not (hasattr(source, "train_dataloader") and hasattr(source, "test_dataloader")):
        return source if isinstance(source, tuple) and len(source) == 2 else (source, source)
    source.prepare_data()
    source.setup("fit")
    source.setup("test")
    test, train = source.test_dataloader(), source.train_dataloader()
    return test[0] if isinstance(test, (list, tuple)) else test, train[0] if isinstance(train, (list, tuple)) else train


def _first(loader: Iterable[Any], num_samples: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    taken: list[tuple[Tensor, Tensor]] = []
    left = num_samples
    for batch in loader:
        if not isinstance(batch, (list, tuple)) or [isinstance(t, Tensor) for t in batch] != [True, True]:
            kinds = [type(t).__name__ for t in batch] if isinstance(batch, (list, tuple)) else type(batch).__name__
            raise FileError(f"a batch has to be (inputs, targets), two tensors, but it is {kinds}")
        x, y = (tensor[:left] for tensor in batch)
        taken.append((x.to(dtype) if x.is_floating_point() else x, y))
        left -= len(x)
        if left <= 0:
            break
    if not taken:
        raise FileError("the data are empty: the loader gave no batch")
    return taken


def check_loss(model: nn.Module, data: Data, loss: str, correction: Correction) -> Loss:
    """The loss of a dotted name, tried on the first batch, so that a wrong one is known before anything is aligned."""
    if correction == "batchnorm" and not batchnorm_layers(model):
        raise FileError(f"{type(model).__name__} has no BatchNorm statistics to re-estimate; leave out batchnorm")
    try:
        function: Loss = resolve(loss)
        mean_loss(model, model.state_dict(), data.evaluation[:1], function)
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in data.evaluation[0])
        raise FileError(
            f"{loss} of the network's outputs cannot be computed on a batch of --data {data.name} ({shapes}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return function
