"""The stages that make networks: a deep ensemble, an HMC chain, and mean-field variational inference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tu_symmetry.tables.predict import evenly
from tu_symmetry.tables.stage import Input, Results, StageContext, stage

if TYPE_CHECKING:
    from tu_symmetry.posterior.samplers import HMCChunk
    from tu_symmetry.posterior.samples import SampleStore

SAMPLES = "samples"
CHAIN = "chain.safetensors"


@dataclass(frozen=True)
class EnsembleOptions:
    """Maxima of the posterior from independent initializations, by Adam.

    Attributes:
        members: number of networks.
        epochs: over the training set.
        batch_size: of each step.
        learning_rate: of Adam.
        prior_precision: of the normal prior on every parameter.
    """

    members: int = 5
    epochs: int = 50
    batch_size: int = 100
    learning_rate: float = field(default=1e-3, metadata={"above": 0})
    prior_precision: float = field(default=1.0, metadata={"above": 0})


@dataclass(frozen=True)
class HMCOptions:
    """One full-batch chain.

    Attributes:
        num_samples: samples after the burn-in.
        burn_in: transitions before the first sample.
        step_size: of the leapfrog integrator.
        leapfrog_steps: of each trajectory.
        prior_precision: of the normal prior on every parameter.
        chunk_size: transitions between two writes to disk; what an interruption can cost.
        matmul_precision: ``high`` allows TF32 on a GPU; the accept step corrects the trajectory, not the potential.
    """

    num_samples: int = 1000
    burn_in: int = field(default=100, metadata={"least": 0})
    step_size: float = field(default=1e-3, metadata={"above": 0})
    leapfrog_steps: int = 500
    prior_precision: float = field(default=1.0, metadata={"above": 0})
    chunk_size: int = 10
    matmul_precision: Literal["highest", "high"] = "highest"


@dataclass(frozen=True)
class VIOptions:
    """A Gaussian with independent weights, fitted by the full evidence lower bound.

    Attributes:
        epochs: over the training set.
        batch_size: of each step.
        learning_rate: of Adam.
        initial_std: standard deviation of every weight at the start.
        prior_precision: of the normal prior on every parameter.
    """

    epochs: int = 50
    batch_size: int = 100
    learning_rate: float = field(default=1e-3, metadata={"above": 0})
    initial_std: float = field(default=0.05, metadata={"above": 0})
    prior_precision: float = field(default=1.0, metadata={"above": 0})


def load_samples(source: Input, device: torch.device, wanted: int | None = None, first: int = 0) -> dict[str, Tensor]:
    """The networks that a stage has made, stacked, from ``first`` on; ``wanted`` evenly spaced ones of them, or all.

    Raises:
        ValueError: if ``first`` is negative or no sample is left.
    """
    from tu_symmetry.posterior.samples import SampleStore

    store = SampleStore.open(source.folder / SAMPLES)
    if not 0 <= first < len(store):
        raise ValueError(
            f"first is {first}, but {source.folder} holds {len(store)} samples: choose 0 to {len(store) - 1}"
        )
    return store.stack(first + evenly(len(store) - first, wanted), device=device)


@stage()
def train_ensemble(context: StageContext, options: EnsembleOptions) -> Results:
    """Train all members at once; they are one chain each of the sample store."""
    from tu_symmetry.posterior.samplers import deep_ensemble
    from tu_symmetry.posterior.samples import SampleStore

    folder = context.folder / SAMPLES
    shutil.rmtree(folder, ignore_errors=True)
    with context.track(f"training {options.members} networks", options.epochs) as tracker:
        fitted = deep_ensemble(
            context.model,
            context.data.train_x,
            context.data.train_y,
            **asdict(options),
            seed=context.seed(),
            device=context.device,
            progress=lambda at: tracker.update(at["done"], loss=at["loss"]),
        )
    store = SampleStore.create(folder, **_origin(context, "deep_ensemble"))
    store.append(fitted.states, chain=range(options.members), step=[options.epochs] * options.members)
    final = fitted.loss[-1].mean().item()
    return {"members": options.members, "loss": fitted.loss.mean(1), "headline": f"final loss {final:.4f} nats"}


@stage()
def sample_hmc(context: StageContext, options: HMCOptions) -> Results:
    """Run the chain; each chunk goes to the sample store, and an interrupted chain goes on after the last of them."""
    from tu_symmetry.files import write_safetensors
    from tu_symmetry.posterior.samplers import hmc_samples
    from tu_symmetry.posterior.samples import SampleStore

    folder, chain = context.folder / SAMPLES, context.folder / CHAIN
    if folder.exists():
        store = SampleStore.open(folder, like=context.model.state_dict())
    else:
        store = SampleStore.create(folder, **_origin(context, "hmc"))
    records, resumed = _read_chain(chain, store, context.device)

    def keep(chunk: HMCChunk) -> None:
        new = list(range(chunk.transitions - len(chunk.log_likelihood), chunk.transitions))
        if not set(new) <= set(store.steps):  # they are there if the process was killed before the record below
            store.append(chunk.states, step=new)
        records.append(
            {
                "transitions": chunk.transitions,
                "acceptance_rate": chunk.acceptance_rate,
                "log_likelihood": chunk.log_likelihood.tolist(),
            }
        )
        write_safetensors(chain, chunk.last, {"chunks": json.dumps(records)})

    settings = {k: v for k, v in asdict(options).items() if k != "matmul_precision"}
    with context.track("sampling", options.burn_in + options.num_samples) as tracker, _precision(options):
        found = hmc_samples(
            context.model,
            context.data.train_x,
            context.data.train_y,
            **settings,
            seed=context.seed(),
            device=context.device,
            on_chunk=keep,
            resume=resumed,
            progress=lambda at: tracker.update(at["done"], acceptance=at["acceptance_rate"]),
        )
    ess = found.effective_sample_size
    return {
        "num_samples": len(found.log_likelihood),
        "acceptance_rate": found.acceptance_rate,
        "effective_sample_size": ess,
        "log_likelihood": found.log_likelihood,
        "headline": f"acceptance {found.acceptance_rate:.3f}, effective sample size "
        + ", ".join(f"{value:.0f} ({name})" for name, value in ess.items()),
    }


@stage()
def fit_vi(context: StageContext, options: VIOptions) -> Results:
    """Fit the Gaussian; it is written like a compact posterior."""
    from tu_symmetry.posterior.compact import CompactPosterior
    from tu_symmetry.posterior.samplers import mean_field_vi

    with context.track("variational inference", options.epochs) as tracker:
        fitted = mean_field_vi(
            context.model,
            context.data.train_x,
            context.data.train_y,
            **asdict(options),
            seed=context.seed(),
            device=context.device,
            progress=lambda at: tracker.update(at["done"], elbo=at["elbo"]),
        )
    q = CompactPosterior(fitted.mean, fitted.std, metadata=_origin(context, "mean_field_vi"))
    q.save(context.folder / "q.safetensors")
    return {"elbo": fitted.elbo, "headline": f"evidence lower bound {fitted.elbo[-1].item():.0f} nats"}


def _origin(context: StageContext, method: str) -> dict[str, Any]:
    return {"architecture": type(context.model).__name__, "method": method, "seed": context.seed()}


def _read_chain(path: Path, store: SampleStore, device: torch.device) -> tuple[list[dict[str, Any]], list[HMCChunk]]:
    """What an interrupted chain has left: its records, and its chunks as the sampler resumes from them."""
    from tu_symmetry.files import read_safetensors
    from tu_symmetry.posterior.samplers import HMCChunk

    if not path.exists():
        return [], []
    last, header = read_safetensors(path, device=device)
    records = json.loads(header.metadata["chunks"])
    place = {step: i for i, step in enumerate(store.steps)}
    chunks = []
    for record in records:
        count = len(record["log_likelihood"])
        steps = range(record["transitions"] - count, record["transitions"])
        empty = {name: t.new_empty((0, *t.shape)) for name, t in last.items()}
        chunks.append(
            HMCChunk(
                states=store.stack([place[s] for s in steps], device=device) if count else empty,
                last=last,  # the sampler reads that of the last chunk only
                transitions=record["transitions"],
                acceptance_rate=record["acceptance_rate"],
                log_likelihood=torch.tensor(record["log_likelihood"], dtype=torch.float64),
            )
        )
    return records, chunks


@contextmanager
def _precision(options: HMCOptions) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(options.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
