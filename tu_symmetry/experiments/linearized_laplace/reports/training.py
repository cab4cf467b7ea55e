"""The report of the distance between two posteriors along training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.experiments.linearized_laplace.choices import Choice
from tu_symmetry.experiments.linearized_laplace.reports.cells import (
    COLORS,
    OPEN_CAPTION,
    Runs,
    cell,
    marks,
)
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, mean_and_error, verdict
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

VANISHED = 0.1  # a distance below this share of the spread of M(θ*) counts as none


def report_training(out: Path, recipe: str, training: Path) -> Outcome:
    """Write ``report.md`` and ``training.png``: how far M(θ~) and M(θ*) are apart at every snapshot.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        training: folder of :func:`~tu_symmetry.experiments.linearized_laplace.measure_training`.
    """
    report, found = Report(out, recipe), Outcome.load(training).results
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items())
    networks = "; ".join(
        f"{name}: {len({run['chain'] for run in runs})} networks of {found['parameters'][name]:,} parameters"
        for name, runs in found["runs"].items()
    )
    report.add(f"{networks}. Images: {sizes}.")
    report.figure("training", draw_training, found, alt="distance along the training")
    report.add("## What held\n\n" + "\n".join(f"- {line}" for line in training_claims(found)))
    for name, runs in found["runs"].items():
        epochs, priors = by_epoch(runs), found["priors"]
        report.add(*(make(name, epochs, priors) for make in (_apart, _weights_apart, _precisions, _likelihoods)))
    return report.done()


def by_epoch(runs: Runs) -> dict[float, Runs]:
    """Snapshots of all networks by their epoch, ascending."""
    return {epoch: [run for run in runs if run["epoch"] == epoch] for epoch in sorted({run["epoch"] for run in runs})}


def early_stopping(epochs: Mapping[float, Runs]) -> float:
    """The epoch with the lowest validation NLL, mean over networks."""
    return min(epochs, key=lambda epoch: mean_and_error([run["val_nll"] for run in epochs[epoch]])[0])


def _own(runs: Runs, prior: str) -> Runs:
    return [run[prior] for run in runs]


def _prior_title(prior: str) -> str:
    return "single λ" if prior == "single" else "several λ"


def _epoch_title(epochs: Mapping[float, Runs], epoch: float) -> str:
    return f"{epoch:g}" + (" (early stopping)" if epoch == early_stopping(epochs) else "")


def _apart(name: str, epochs: Mapping[float, Runs], priors: Sequence[str]) -> Grid:
    def columns(own: Runs) -> list[str]:
        return [
            cell([run["wasserstein"] for run in own], 2),
            cell([run["relative"] for run in own], 2),
            cell([100 * run["total_variation"] for run in own], 1),
        ]

    heads = [f"{what}\n{_prior_title(prior)}" for prior in priors for what in ("distance", "relative", "TV %")]
    caption = (
        "mean ± standard error over networks. distance: 2-Wasserstein, of the Gaussian posteriors of the outputs by "
        "M(θ~) and M(θ*) at a test image, mean over images, in logits; relative: to the spread of M(θ*); TV: total "
        f"variation of the two predictives. {OPEN_CAPTION}"
    )
    return Grid(f"{name}: M(θ~) and M(θ*) apart", ["epoch", *heads], _rows(epochs, priors, columns), caption)


def _weights_apart(name: str, epochs: Mapping[float, Runs], priors: Sequence[str]) -> Grid:
    def columns(own: Runs) -> list[str]:
        return [
            cell([run["map"]["spread"] for run in own], 1),
            cell([run["tangent_mode"]["spread"] for run in own], 1),
            cell([run["deviations"] for run in own], 1),
            cell([100 * run["relative_norm"] for run in own], 1),
        ]

    what = ("spread\nM(θ~)", "spread\nM(θ*)", "θ* − θ~\nin deviations", "θ* − θ~\nin %")
    heads = [f"{text}, {_prior_title(prior)}" for prior in priors for text in what]
    caption = (
        "mean ± standard error over networks. spread: root of the trace of the outputs' covariance, mean over test "
        "images, in logits; θ* − θ~: in standard deviations of the posterior of M(θ*) (root of the sum over all its "
        f"directions), and its norm relative to that of θ~. {OPEN_CAPTION}"
    )
    return Grid(f"{name}: spreads and weights", ["epoch", *heads], _rows(epochs, priors, columns), caption)


def _rows(epochs: Mapping[float, Runs], priors: Sequence[str], columns: Callable[[Runs], list[str]]) -> list[list[str]]:
    """A row for each epoch: the same columns for each prior, with the marks of its runs."""
    return [
        [
            _epoch_title(epochs, epoch),
            *(text + marks(own) for own in (_own(runs, prior) for prior in priors) for text in columns(own)),
        ]
        for epoch, runs in epochs.items()
    ]


def _precisions(name: str, epochs: Mapping[float, Runs], priors: Sequence[str]) -> Grid:
    body = []
    for epoch, runs in epochs.items():
        cells = []
        for prior in priors:
            for where in ("map", "tangent_mode"):
                own = [run[prior][where] for run in runs]
                logs = torch.tensor(
                    [[g["precision"] for g in run["groups"].values()] for run in own], dtype=torch.float64, device="cpu"
                ).log()
                cells.append(" / ".join(f"{value:.3g}" for value in logs.mean(0).exp().tolist()) + marks(own))
        body.append([_epoch_title(epochs, epoch), *cells])
    keys = [Choice(where, prior) for prior in priors for where in ("map", "tangent_mode")]  # type: ignore[arg-type]
    groups = next(
        (list(run[prior]["map"]["groups"]) for runs in epochs.values() for run in runs for prior in priors[-1:]), []
    )
    caption = f"geometric mean over networks; several λ: {', '.join(groups)}. {OPEN_CAPTION}"
    return Grid(f"{name}: precisions", ["epoch", *(key.title for key in keys)], body, caption)


def _likelihoods(name: str, epochs: Mapping[float, Runs], priors: Sequence[str]) -> Grid:
    body = []
    for epoch, runs in epochs.items():
        cells = [cell([run[column] for run in runs]) for column in ("train_nll", "val_nll", "nll")]
        for prior in priors:
            for where in ("map", "tangent_mode"):
                own = [run[prior][where] for run in runs]
                cells.append(cell([run["nll"] for run in own]) + marks(own))
        body.append([_epoch_title(epochs, epoch), *cells])
    keys = [Choice(where, prior) for prior in priors for where in ("map", "tangent_mode")]  # type: ignore[arg-type]
    heads = ["network\ntraining", "network\nvalidation", "network\ntest", *(f"{key.title}\ntest" for key in keys)]
    caption = f"NLL in nats, mean ± standard error over networks. {OPEN_CAPTION}"
    return Grid(f"{name}: likelihoods", ["epoch", *heads], body, caption)


def training_claims(found: Mapping[str, Any]) -> list[str]:
    """What the talk's figure is about, and whether it held by more than a standard error; from converged rows only."""
    lines = []
    for name, runs in found["runs"].items():
        epochs = by_epoch(runs)
        stop = early_stopping(epochs)
        for prior in found["priors"]:
            own = {epoch: _own(some, prior) for epoch, some in epochs.items()}
            sure = [epoch for epoch, some in own.items() if all(run["converged"] for run in some)]
            title = f"{name}, {_prior_title(prior)}"
            if not sure:
                lines.append(f"{title}: no snapshot at which all evidences had converged: **no conclusion**")
                continue
            last = sure[-1]
            relative = [run["relative"] for run in own[last]]
            lines.append(
                f"{title}: the distance does not vanish as training goes on (epoch {last:g}; more than {VANISHED:g} of "
                f"the spread of M(θ*)): **{verdict([v - VANISHED for v in relative])}**, {cell(relative, 2)}"
            )
            if stop not in sure or last <= stop:
                lines.append(f"{title}: no converged snapshots at and after early stopping: **no further conclusion**")
                continue
            for what, column, digits, unit in (
                ("the distance is greater at the end than at early stopping", "wasserstein", 2, "logits"),
                ("relative to the spread of M(θ*) it is greater, too", "relative", 3, "spreads"),
                ("θ* is farther from θ~", "deviations", 1, "posterior standard deviations"),
            ):
                gaps = [b[column] - a[column] for a, b in zip(own[stop], own[last], strict=True)]
                lines.append(
                    f"{title}: {what} (epoch {last:g} against {stop:g}): **{verdict(gaps)}**, "
                    f"{cell(gaps, digits, sign='+')} {unit}"
                )
            gaps = [run["map"]["nll"] - run["tangent_mode"]["nll"] for run in own[stop]]
            lines.append(
                f"{title}: at early stopping M(θ*) predicts better than M(θ~): **{verdict(gaps)}**, test NLL "
                f"{cell(gaps, 3, sign='+')} nats apart"
            )
    return lines


def draw_training(path: Path, found: Mapping[str, Any]) -> None:
    """Distance, relative distance and NLLs against the epochs; the vertical line is the optimal early stopping.

    Crosses: the evidence of a network had not converged.
    """
    styles = {"single": ("s", (0, (2, 2))), "per_group": ("o", "-")}
    with plots.grid(path, 3, len(found["runs"]), 4.4, 2.7, sharex=True, sharey="row") as axes:
        for column, (name, runs) in enumerate(found["runs"].items()):
            epochs = by_epoch(runs)
            x = list(epochs)

            def curve(row: int, values: Mapping[float, Sequence[float]], color: str, label: str, **style: Any) -> None:
                plots.band(axes[row, column], x, list(zip(*values.values(), strict=True)), color, label, **style)  # noqa: B023

            def crosses(row: int, values: Mapping[float, Sequence[float]], rows: Mapping[float, Runs]) -> None:
                for epoch, own in values.items():
                    if marks(rows[epoch]):
                        axes[row, column].plot(epoch, mean_and_error(own)[0], "x", color="black", markersize=8)  # noqa: B023

            for prior in found["priors"]:
                marker, line = styles[prior]
                own = {epoch: _own(some, prior) for epoch, some in epochs.items()}
                for row, key in enumerate(("wasserstein", "relative")):
                    values = {epoch: [run[key] for run in some] for epoch, some in own.items()}
                    curve(row, values, plots.PURPLE, _prior_title(prior), marker=marker, linestyle=line)
                    crosses(row, values, own)
                for where in ("map", "tangent_mode"):
                    there = {epoch: [run[where] for run in some] for epoch, some in own.items()}
                    values = {epoch: [run["nll"] for run in some] for epoch, some in there.items()}
                    label = Choice(where, prior).title.replace("θ~", r"$\tilde\theta$").replace("θ*", r"$\theta_*$")
                    curve(2, values, COLORS[where], label, marker=marker, linestyle=line)
                    crosses(2, values, there)
            for key, label, line in (("nll", "network, test", "-"), ("val_nll", "network, validation", ":")):
                values = {epoch: [run[key] for run in some] for epoch, some in epochs.items()}
                curve(2, values, plots.GRAY, label, linestyle=line)
            for ax in axes[:, column]:
                ax.axvline(early_stopping(epochs), color="black", linewidth=1)
            axes[0, column].set(title=name, xscale="log", yscale="log")
            axes[1, column].set(yscale="log")
            axes[2, column].set(xlabel="epochs", yscale="log")
        axes[0, 0].set_ylabel("2-Wasserstein distance\n(logits)")
        axes[1, 0].set_ylabel("relative to the spread\nof " + r"M($\theta_*$)")
        axes[2, 0].set_ylabel("NLL (nats)")
        axes[0, 0].legend(loc="best", fontsize=6)
        axes[2, -1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=6)
