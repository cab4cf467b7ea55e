"""Table 1 of arXiv 2401.00611: every predictive against that of the HMC samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import accuracy, logits, mean_probabilities, nll
from tu_symmetry.experiments.compact_posterior.sources import COLUMNS, PosteriorStudy, Runs
from tu_symmetry.metrics.functional import predictive_agreement, predictive_total_variation
from tu_symmetry.reporting.progress import Display
from tu_symmetry.states import sample_count
from tu_symmetry.tables.outcome import Outcome


def compare(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: Runs,
    num_samples: int = 100,
    repeats: int = 1,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Agreement with HMC, total variation to HMC, and accuracy of samples and of means, for every column of Table 1.

    Args:
        out: folder of the results.
        model: the architecture.
        data: predictives are of its test set.
        runs: the folders of the chain, the ensemble and variational inference.
        num_samples: draws from each q in a predictive.
        repeats: how many such predictives are made from independent draws; their figures are averaged. (Draws from a
            wide q are poor networks; their predictive varies from set to set, and more draws would flatter it.)
        seed: the seed of the draws.
        device: ``cpu``, ``cuda``, or ``auto``.
    """
    study = PosteriorStudy(model, data, device, seed)
    hmc = study.samples(runs.hmc)
    sampled = {"hmc/sample": hmc, "ensemble/sample": study.samples(runs.ensemble)}
    total = sum(sample_count(s) for s in sampled.values()) + repeats * num_samples * len(COLUMNS)
    predictives: dict[str, list[Tensor]] = {}
    mean_accuracy: dict[str, float] = {}
    with Display().track("predicting", total) as tracker:
        done = 0

        def predict(column: str, states: dict[str, Tensor]) -> None:
            nonlocal done
            found = mean_probabilities(study.model, states, study.test, lambda n: tracker.update(done + n, of=column))
            predictives.setdefault(column, []).append(found)
            done += sample_count(states)

        for column, states in sampled.items():
            predict(column, states)
        for column in COLUMNS:
            q = study.posterior(runs.posterior(column))
            generator = study.generator(column)
            for _ in range(repeats):
                predict(column, q.sample(num_samples, generator=generator))
            mean_accuracy[column] = accuracy(logits(study.model, q.mean, study.test), study.test.y)
    (reference,) = predictives["hmc/sample"]
    figures: dict[str, Callable[[Tensor], float]] = {
        "agreement": lambda p: float(predictive_agreement(p, reference)),
        "tv": lambda p: float(predictive_total_variation(p, reference)),
        "accuracy": lambda p: accuracy(p, study.test.y),
        "nll": lambda p: nll(p, study.test.y),
    }
    rows: dict[str, dict[str, float]] = {"mean_accuracy": mean_accuracy}
    spread: dict[str, dict[str, float]] = {}
    for name, figure in figures.items():
        values = {
            c: torch.tensor([figure(p) for p in ps], dtype=torch.float64, device="cpu") for c, ps in predictives.items()
        }
        rows[name] = {column: v.mean().item() for column, v in values.items()}
        spread[name] = {column: v.std().item() for column, v in values.items() if len(v) > 1}
    gain = {name: rows["accuracy"][f"{name}/q_r"] for name in ("hmc", "ensemble")}
    return Outcome(
        {"rows": rows, "spread": spread, "draws": [repeats, num_samples], "reference_samples": sample_count(hmc)},
        f"accuracy of q_d → q_r: HMC {rows['accuracy']['hmc/q_d']:.3f} → {gain['hmc']:.3f}, "
        f"ensemble {rows['accuracy']['ensemble/q_d']:.3f} → {gain['ensemble']:.3f}",
    )
