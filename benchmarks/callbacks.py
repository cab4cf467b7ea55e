"""What callbacks leave at the end of a training, beside the network of the last epoch and averaged weights (SWA)."""

from __future__ import annotations

import statistics
import tempfile
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch_uncertainty.methods import deep_ensembles
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget

from benchmarks._report import Goal, Section, Settings
from tu_symmetry.callbacks import FitCompactPosterior, PosteriorSnapshots, Rebasin, ScaleCanonicalization
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.evaluation import Batches, mean_probabilities
from tu_symmetry.posterior.assessment import predictive_scores
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import mean_state, stack_states, unstack
from tu_symmetry.tables.models import MLP

_MEMBERS, _DRAWS, _SEEDS = 5, 30, 5
_CASES = {"96 units, 30 epochs": (96, 30), "96 units, 200 epochs": (96, 200), "512 units, 30 epochs": (512, 30)}
LAST, SWA, ENSEMBLE = "the last epoch's first member", "its averaged weights (SWA)", "the ensemble"
Scores = dict[str, dict[str, float]]


def run(settings: Settings) -> Section:
    """Members trained at once with all callbacks, for every case and seed."""
    records: list[dict[str, Any]] = []
    for case, (width, epochs) in {"quick": (8, 4)}.items() if settings.quick else _CASES.items():
        for seed in range(1 if settings.quick else _SEEDS):
            settings.say(f"{case}, seed {seed}")
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
                warnings.simplefilter("ignore")
                records.append({"case": case, "seed": seed, "scores": measure(width, epochs, seed, Path(folder))})
    return section(records)


def section(records: list[dict[str, Any]]) -> Section:
    """Means over the seeds, and which callback's result beats its one-line rival."""
    cases = list(dict.fromkeys(r["case"] for r in records))

    def values(case: str, row: str, key: str) -> list[float]:
        return [r["scores"][row][key] for r in records if r["case"] == case]

    def cell(case: str, row: str) -> str:
        accuracy, nll = (statistics.mean(values(case, row, key)) for key in ("accuracy", "nll"))
        return f"{100 * accuracy:.1f} / {nll:.3f}"

    rows = [[row, *(cell(case, row) for case in cases)] for row in records[0]["scores"]]
    goals = []
    for row in (r for r in records[0]["scores"] if r not in (LAST, SWA, ENSEMBLE)):
        pairs = [zip(values(case, row, "nll"), values(case, SWA, "nll"), strict=True) for case in cases]
        better = [sum(own < rival for own, rival in case) for case in pairs]
        total = len(records) // len(cases)
        found = ", ".join(f"{case} {count}" for case, count in zip(cases, better, strict=True))
        goals.append(Goal(f"{row}: a lower NLL than SWA in most of {total} seeds", 2 * min(better) > total, found))
    text = (
        "Five MLPs with two hidden layers are trained as TorchUncertainty's deep ensemble on scikit-learn's "
        "digits (Adam, rate 1e-3, batches of "
        f"100) with every callback. Cells are means over {len(records) // len(cases)} seeds: test accuracy in % / NLL "
        "in nats. *SWA*: the mean of the first member's weights after each epoch of the second half. *Draws*: "
        f"{_DRAWS} networks. `ScaleCanonicalization` moves weights along a symmetry, so that its network is the last "
        "epoch's. For `FitLaplace` see the sections of `default` and `calibration`."
    )
    grid = Grid("Accuracy / NLL on digits", ["", *cases], rows)
    return Section("Callbacks and their one-line rivals", text, [grid], goals, records, ("scikit-learn", "lightning"))


def measure(width: int, epochs: int, seed: int, folder: Path) -> Scores:
    """Scores on the test images of what each callback leaves."""
    seed_everything(seed, verbose=False)
    data, samples = DigitsDataModule(batch_size=100, seed=seed), folder / "samples"
    model = MLP(64, 10, (width, width))
    networks = [MLP(64, 10, (width, width)) for _ in range(_MEMBERS)]
    routine = ClassificationRoutine(
        deep_ensembles(networks, task="classification"),
        num_classes=10,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        format_batch_fn=RepeatTarget(_MEMBERS),
        optim_recipe=torch.optim.Adam(chain(*(n.parameters() for n in networks))),
    )
    callbacks = [
        PosteriorSnapshots(folder / "snapshots", every_n_epochs=1, burn_in=epochs // 2),
        PosteriorSnapshots(samples, at_end=True),
        FitCompactPosterior(samples, q_d=folder / "q_d.safetensors", q_r=folder / "q_r.safetensors"),
        ScaleCanonicalization(at_end=True, in_place=True),
        Rebasin(at_end=True, in_place=True),
    ]
    trainer = Trainer(
        max_epochs=epochs, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, accelerator="cpu", default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(routine, datamodule=data)
    moved = [{name: t.detach() for name, t in network.state_dict().items()} for network in networks]
    store = SampleStore.open(folder / "snapshots")
    first = [store[k] for k, chain in enumerate(store.chains) if chain == 0]
    members = list(SampleStore.open(samples))
    q = CompactPosterior.load(folder / "q_r.safetensors")
    found: dict[str, list[dict[str, Tensor]]] = {
        LAST: members[:1],
        SWA: [mean_state(first)],
        ENSEMBLE: members,
        "Rebasin: mean of the aligned members": [mean_state(moved)],
        "FitCompactPosterior: draws of q_r": unstack(q.sample(_DRAWS, generator=torch.Generator().manual_seed(seed))),
        "FitCompactPosterior: mean of q_r": [q.mean],
        "PosteriorSnapshots: the first member's": first,
        "ScaleCanonicalization: the first member": moved[:1],
    }
    test = Batches(data.test.x, data.test.y)
    reference = mean_probabilities(model, stack_states(members), test)
    return {
        name: predictive_scores(mean_probabilities(model, stack_states(states), test), reference, test.y)
        for name, states in found.items()
    }
