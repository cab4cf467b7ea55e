"""The reports of the paper's two tables and of its figure of bands: ours beside theirs, and what had not converged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice
from tu_symmetry.experiments.linearized_laplace.shift import CALIBRATED
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.library import find_recipe
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import write_report

ITSELF = "network itself"
OPEN = "†"  # stands beside every number from an optimum that had not converged
MOVING = "‡"
OPEN_CAPTION = f"{OPEN}: the evidence of at least one network had not converged, so that the number is no result"
Runs = Sequence[Mapping[str, Any]]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, None for a single value."""
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std()) / len(found) ** 0.5 if len(found) > 1 else None


def cell(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean and standard error as a table shows them."""
    mean, error = mean_and_error(values)
    return f"{mean:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def marks(runs: Runs) -> str:
    """What stands beside a number: whether its optimizations had all converged."""
    open_end = OPEN if any(not run.get("converged", True) for run in runs) else ""
    return open_end + (MOVING if any(not run.get("settled", True) for run in runs) else "")


def title_of(key: str) -> str:
    """What a report calls a row."""
    return ITSELF if key == NETWORK else Choice.parse(key, ("map", "tangent_mode", "full")).title


# ---------------------------------------------------------------------------------------------------------------------
# Table 1
# ---------------------------------------------------------------------------------------------------------------------

CHANGES = {  # title to what is compared with what
    "θ* instead of θ~, single λ": ("tangent_mode/single", "map/single"),
    "θ* instead of θ~, several λ": ("tangent_mode/per_group", "map/per_group"),
    "several λ instead of one, θ*": ("tangent_mode/per_group", "tangent_mode/single"),
    "several λ instead of one, θ~": ("map/per_group", "map/single"),
    "no hyperprior, θ*, several λ": ("tangent_mode/per_group/flat", "tangent_mode/per_group"),
    "Laplace (θ*, single λ) instead of the network": ("tangent_mode/single", NETWORK),
    "Laplace (θ*, several λ) instead of the network": ("tangent_mode/per_group", NETWORK),
}


def report_architectures(out: Path, recipe: str, evidence: dict[str, Path]) -> Outcome:
    """Write ``report.md``: a table like the paper's for every training length, and what became of the groups.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note and the paper's numbers.
        evidence: title, ``after 40 epochs`` for example, to the folder of
            :func:`~tu_symmetry.experiments.linearized_laplace.optimize_evidence`.
    """
    table = load_table(find_recipe(recipe))
    grids = []
    for title, folder in evidence.items():
        found = Outcome.load(folder).results
        grids += [_quality(found, title, table.paper), _differences(found, title), _dimensions(found, title)]
    path = write_report(out, table, [f"## {grid.title}\n\n{grid.markdown()}" for grid in grids])
    return Outcome({}, str(path), grids)


def _quality(found: Mapping[str, Any], title: str, paper: Mapping[str, Mapping[str, float | None]]) -> Grid:
    networks, names = found["networks"], list(found["networks"])
    body = [
        [ITSELF, *(cell([run["nll"] for run in networks[name]]) for name in names)],
        ["the same, training data", *(cell([run["train_nll"] for run in networks[name]]) for name in names)],
    ]
    for key, by_name in found["rows"].items():
        means, errors = paper.get(key, {}), paper.get(f"{key}/error", {})
        cells = []
        for name in names:
            theirs = f"{means[name]:.3f} ± {errors[name]:.3f}" if name in means and name in errors else ""
            cells.append(f"{cell([run['nll'] for run in by_name[name]])}{marks(by_name[name])}\n{theirs}")
        body.append([title_of(key), *cells])
    caption = (
        f"test NLL (nats), mean ± standard error over seeds; second line: the paper's. {OPEN_CAPTION}. Each FixUp cell "
        "of several λ has one for each layer, for it has no normalized groups."
    )
    return Grid(f"Test NLL {title}", ["", *names], body, caption)


def _differences(found: Mapping[str, Any], title: str) -> Grid:
    """What one change of the method does to the same networks, with every other choice held."""
    names = list(found["networks"])
    everything = {NETWORK: found["networks"], **found["rows"]}
    body = []
    for change, (after, before) in CHANGES.items():
        if after in everything and before in everything:
            cells = []
            for name in names:
                pairs = list(zip(everything[after][name], everything[before][name], strict=True))
                mark = marks([run for pair in pairs for run in pair])
                cells.append(cell([a["nll"] - b["nll"] for a, b in pairs], sign="+") + mark)
            body.append([change, *cells])
    caption = (
        "difference of test NLL (nats) on the same networks, mean ± standard error over seeds; negative helps. "
        f"{OPEN_CAPTION}"
    )
    return Grid(f"What each choice changes {title}", ["", *names], body, caption)


def _dimensions(found: Mapping[str, Any], title: str) -> Grid:
    """Effective dimensions, pruned groups, and how many optimizations converged."""
    names = list(found["networks"])
    body = []
    for key, by_name in found["rows"].items():
        cells = []
        for name in names:
            runs = by_name[name]
            gamma = sum(sum(g["gamma"] for g in run["groups"].values()) for run in runs) / len(runs)
            pruned, count = sum(run["pruned"] for run in runs), sum(len(run["groups"]) for run in runs)
            of_groups = f"{pruned}/{count} pruned, " if count > len(runs) else ""
            converged = f"{sum(run['converged'] for run in runs)}/{len(runs)} converged"
            cells.append(f"{gamma:.0f}{marks(runs)}\n{of_groups}{converged}")
        body.append([title_of(key), *cells])
    caption = (
        "effective directions that the data determine, mean over seeds; second line: pruned groups and converged "
        f"evidences of all seeds. {OPEN_CAPTION}"
    )
    return Grid(f"Effective dimension {title}", ["", *names], body, caption)


# ---------------------------------------------------------------------------------------------------------------------
# Table 2
# ---------------------------------------------------------------------------------------------------------------------

COLORS = {"map": plots.ORANGE, "tangent_mode": plots.BLUE, "full": plots.GREEN}
COLUMNS = {"nll": "NLL", "accuracy": "accuracy %", "ece": "ECE %", "auroc": "OOD AUROC %"}


def report_residual(out: Path, recipe: str, evidence: Path) -> Outcome:
    """Write ``report.md`` and ``evidence.png``.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note and the paper's numbers.
        evidence: folder of :func:`~tu_symmetry.experiments.linearized_laplace.optimize_kronecker_evidence`.
    """
    table = load_table(find_recipe(recipe))
    found = Outcome.load(evidence).results
    rows: dict[str, Runs] = {NETWORK: found["networks"], **found["rows"]}
    grids = [_residual_quality(rows, table.paper, table.title), _residual_dimensions(found["rows"])]
    if several := _several(found["rows"]):
        grids.append(_residual_groups(several))
    out.mkdir(parents=True, exist_ok=True)
    draw_evidence(out / "evidence.png", rows)
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items())
    facts = f"{len(rows[NETWORK])} networks of {found['parameters']:,} parameters; images: {sizes}."
    sections = [facts, *(f"## {grid.title}\n\n{grid.markdown()}" for grid in grids)]
    path = write_report(out, table, [*sections, "## Figure\n\n![test likelihood and groups](evidence.png)"])
    return Outcome({}, str(path), grids)


def _residual_quality(rows: Mapping[str, Runs], paper: Mapping[str, Mapping[str, float | None]], title: str) -> Grid:
    columns = [column for column in COLUMNS if all(column in run for runs in rows.values() for run in runs)]
    body = []
    for key, runs in rows.items():
        theirs = paper.get(key, {})
        cells = [cell([run["nll"] for run in runs]) + marks(runs)]
        cells += [cell([100 * run[column] for run in runs], 1) + marks(runs) for column in columns[1:]]
        if theirs.get("nll") is not None and theirs.get("error") is not None:
            cells[0] += f"\n{theirs['nll']:.3f} ± {theirs['error']:.3f}"
        body.append([title_of(key), *cells])
    caption = (
        "mean ± standard error over networks; second line: the paper's NLL, which has an offset (compare orderings and "
        f"gaps). AUROC: of the predictive entropy. {OPEN_CAPTION}. {MOVING}: the last refresh of the curvature still "
        "moved a log precision by more than the tolerance, so that this is no fixed point"
    )
    return Grid(title, ["", *(COLUMNS[column] for column in columns)], body, caption)


def _residual_dimensions(rows: Mapping[str, Runs]) -> Grid:
    body = []
    for key, runs in rows.items():
        precisions = [g["precision"] for run in runs for g in run["groups"].values()]
        moved = f"{max(run['moved'] for run in runs):.2g}" if key.startswith("full") else ""
        body.append(
            [
                title_of(key) + marks(runs),
                f"{mean_and_error([run['gamma'] for run in runs])[0]:.0f}",
                f"{min(precisions):.3g} to {max(precisions):.3g}",
                f"{sum(run['pruned'] for run in runs)}/{len(precisions)}",
                f"{mean_and_error([run['log_evidence'] for run in runs])[0]:.0f}",
                "/".join(str(run["iterations"]) for run in runs),
                f"{sum(run['converged'] for run in runs)}/{len(runs)}",
                f"{max(run['change'] for run in runs):.2g}",
                moved,
            ]
        )
    header = ["", "eff. dimension", "λ", "pruned groups", "log evidence", "iterations", "converged"]
    header += ["largest change", "by a refresh"]
    caption = (
        "means over networks; λ: smallest and largest of all groups; log evidence in nats, over the training data; "
        "largest change: of a log λ in the last iteration, and from before to after the last refresh of the curvature"
    )
    return Grid("Effective dimensions and precisions", header, body, caption)


def _several(rows: Mapping[str, Runs]) -> dict[str, Runs]:
    """The rows with several groups."""
    return {key: runs for key, runs in rows.items() if all(len(run["groups"]) > 1 for run in runs)}


def _residual_groups(rows: Mapping[str, Runs]) -> Grid:
    first = next(iter(rows.values()))[0]["groups"]
    body = []
    for name in first:
        cells = []
        for runs in rows.values():
            found = [run["groups"][name] for run in runs]
            log_mean = torch.tensor([g["precision"] for g in found], dtype=torch.float64).log().mean()
            gamma = sum(g["gamma"] for g in found) / len(found)
            cells.append(f"{log_mean.exp().item():.3g} ({gamma:.0f})")
        body.append([f"{name} ({first[name]['size']:,})", *cells])
    caption = (
        "λ (geometric mean over networks) and in brackets the effective dimension; behind each group its weights. "
        f"{OPEN_CAPTION}"
    )
    return Grid(
        "Precisions by group", ["", *(title_of(key) + marks(runs) for key, runs in rows.items())], body, caption
    )


def draw_evidence(path: Path, rows: Mapping[str, Runs]) -> None:
    """Test NLL of every row, and the precision of every group relative to its center; crosses had not converged."""
    several = _several({key: runs for key, runs in rows.items() if key != NETWORK})
    with plots.figure(path, 2 if several else 1, width=5.4, height=3.6) as axes:
        for place, (key, runs) in enumerate(reversed(list(rows.items()))):
            mean, error = mean_and_error([run["nll"] for run in runs])
            choice = None if key == NETWORK else Choice.parse(key, COLORS)
            color = plots.GRAY if choice is None else COLORS[choice.where]
            face = "white" if choice is not None and choice.flat else color
            shape = "x" if OPEN in marks(runs) else "o"
            axes[0].errorbar(mean, place, xerr=error, fmt=shape, color=color, markerfacecolor=face, capsize=2)
        axes[0].set_yticks(range(len(rows)), [title_of(key) for key in reversed(list(rows))])
        axes[0].set(title="Test NLL", xlabel="nats, mean ± standard error over networks; ×: had not converged")
        if several:
            names = list(next(iter(several.values()))[0]["groups"])
            for key, runs in several.items():
                choice = Choice.parse(key, COLORS)
                relative = [
                    mean_and_error([run["groups"][n]["precision"] / run["groups"][n]["center"] for run in runs])[0]
                    for n in names
                ]
                axes[1].plot(
                    range(len(names)),
                    relative,
                    marker="x" if OPEN in marks(runs) else "o",
                    color=COLORS[choice.where],
                    linestyle=":" if choice.flat else "-",
                    label=choice.title,
                )
            axes[1].set_xticks(range(len(names)), names, rotation=90, fontsize=6)
            axes[1].set(title="Precision of each group", ylabel=r"$\lambda_g$ over its center", yscale="log")
            axes[1].legend(loc="best", fontsize=6)


# ---------------------------------------------------------------------------------------------------------------------
# Rotated images
# ---------------------------------------------------------------------------------------------------------------------

SHIFTED = {"nll": "NLL", "ece": "ECE"}


def report_rotations(out: Path, recipe: str, rotations: Path) -> Outcome:
    """Write ``report.md`` and ``rotations.png``.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        rotations: folder of :func:`~tu_symmetry.experiments.linearized_laplace.measure_rotations`.
    """
    table = load_table(find_recipe(recipe))
    found = Outcome.load(rotations).results
    out.mkdir(parents=True, exist_ok=True)
    draw_rotations(out / "rotations.png", found)
    grids = [_by_angle(found, column) for column in ("nll", "ece", "accuracy")]
    grids.append(_against_network(found))
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items())
    facts = f"{len(found['rows'][NETWORK])} networks of {found['parameters']:,} parameters; images: {sizes}."
    sections = [facts, "![NLL and ECE by angle](rotations.png)"]
    sections += [f"## {grid.title}\n\n{grid.markdown()}" for grid in grids]
    path = write_report(out, table, sections)
    return Outcome({}, str(path), grids)


def shift_title(key: str) -> str:
    """What the report calls a row of rotated images."""
    plain = key.removesuffix(CALIBRATED)
    return title_of(plain) + (", calibrated" if plain != key else "")


def _by_angle(found: Mapping[str, Any], column: str) -> Grid:
    angles = [f"{angle:g}" for angle in found["angles"]]
    scale, digits = (1, 3) if column == "nll" else (100, 1)
    body = []
    for key, runs in found["rows"].items():
        cells = [mean_and_error([scale * run["by_angle"][a][column] for run in runs])[0] for a in angles]
        body.append([shift_title(key), *(f"{value:.{digits}f}{marks(runs)}" for value in cells)])
    name = {"nll": "Test NLL (nats)", "ece": "Expected calibration error (%)", "accuracy": "Accuracy (%)"}[column]
    caption = (
        "means over networks; columns: degrees by which the test images are turned. calibrated: the temperature of the "
        f"posterior chosen on validation images that are not turned. {OPEN_CAPTION}"
    )
    return Grid(f"{name} by angle", ["", *(f"{a}°" for a in angles)], body, caption)


def _against_network(found: Mapping[str, Any]) -> Grid:
    """By how much each row is better or worse than the networks: unturned, and on average over all turned images."""
    rows, angles = found["rows"], [f"{angle:g}" for angle in found["angles"]]
    turned = [a for a in angles if float(a) != 0]
    body = []
    for key, runs in rows.items():
        if key == NETWORK:
            continue
        cells = []
        for column, scale, digits in (("nll", 1, 3), ("ece", 100, 1)):
            for some in ([a for a in angles if a not in turned], turned):
                if not some:
                    cells.append("–")
                    continue
                values = [
                    scale * sum(run["by_angle"][a][column] - own["by_angle"][a][column] for a in some) / len(some)
                    for run, own in zip(runs, rows[NETWORK], strict=True)
                ]
                cells.append(cell(values, digits, sign="+") + marks(runs))
        temperatures = [run["temperature"] for run in runs if "temperature" in run]
        cells.append(" / ".join(f"{t:.2g}" for t in temperatures) or "1")
        body.append([shift_title(key), *cells])
    header = ["", "NLL\nnot turned", "NLL\nturned", "ECE %\nnot turned", "ECE %\nturned", "temperature"]
    caption = (
        "difference to the networks themselves, mean ± standard error over networks; negative helps. turned: mean over "
        f"all angles but 0. {OPEN_CAPTION}"
    )
    return Grid("Laplace instead of the network", header, body, caption)


def draw_rotations(path: Path, found: Mapping[str, Any]) -> None:
    """NLL and ECE against the angle: networks in gray, Laplace by the evidence in color, calibrated dashed."""
    angles = found["angles"]
    with plots.figure(path, len(SHIFTED), width=4.6, height=3.4) as axes:
        for ax, (column, name) in zip(axes, SHIFTED.items(), strict=True):
            for key, runs in found["rows"].items():
                plain = key.removesuffix(CALIBRATED)
                choice = None if key == NETWORK else Choice.parse(plain)
                color = plots.GRAY if choice is None else COLORS[choice.where]
                values = [[run["by_angle"][f"{a:g}"][column] for run in runs] for a in angles]
                ax.plot(
                    angles,
                    [mean_and_error(own)[0] for own in values],
                    color=color,
                    marker="s" if choice is not None and choice.prior == "single" else "o",
                    linestyle=(0, (2, 2)) if plain != key else "-",
                    label=shift_title(key).replace("θ~", r"$\tilde\theta$").replace("θ*", r"$\theta_*$") + marks(runs),
                )
            ax.set(title=name, xlabel="rotation of the test images (degrees)", xticks=angles)
            ax.set_ylim(bottom=0)
        axes[0].set_ylabel("nats, mean over networks")
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=6)


# ---------------------------------------------------------------------------------------------------------------------
# Along a training
# ---------------------------------------------------------------------------------------------------------------------

VANISHED = 0.1  # a distance below this share of the spread of M(θ*) counts as none


def report_training(out: Path, recipe: str, training: Path) -> Outcome:
    """Write ``report.md`` and ``training.png``: how far M(θ~) and M(θ*) are apart at every snapshot.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        training: folder of :func:`~tu_symmetry.experiments.linearized_laplace.measure_training`.
    """
    table = load_table(find_recipe(recipe))
    found = Outcome.load(training).results
    out.mkdir(parents=True, exist_ok=True)
    draw_training(out / "training.png", found)
    grids = [
        make(name, by_epoch(runs), found["priors"])
        for name, runs in found["runs"].items()
        for make in (_apart, _weights_apart, _precisions, _likelihoods)
    ]
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items())
    networks = "; ".join(
        f"{name}: {len({run['chain'] for run in runs})} networks of {found['parameters'][name]:,} parameters"
        for name, runs in found["runs"].items()
    )
    sections = [f"{networks}. Images: {sizes}.", "![distance along the training](training.png)"]
    sections.append("## What held\n\n" + "\n".join(f"- {line}" for line in training_claims(found)))
    path = write_report(out, table, [*sections, *(f"## {grid.title}\n\n{grid.markdown()}" for grid in grids)])
    return Outcome({}, str(path), grids)


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
    body = []
    for epoch, runs in epochs.items():
        cells = []
        for own in (_own(runs, prior) for prior in priors):
            cells += [cell([run["wasserstein"] for run in own], 2), cell([run["relative"] for run in own], 2)]
            cells.append(cell([100 * run["total_variation"] for run in own], 1))
            cells[-3:] = [text + marks(own) for text in cells[-3:]]
        body.append([_epoch_title(epochs, epoch), *cells])
    heads = [f"{what}\n{_prior_title(prior)}" for prior in priors for what in ("distance", "relative", "TV %")]
    caption = (
        "mean ± standard error over networks. distance: 2-Wasserstein, of the Gaussian posteriors of the outputs by "
        "M(θ~) and M(θ*) at a test image, mean over images, in logits; relative: to the spread of M(θ*); TV: total "
        f"variation of the two predictives. {OPEN_CAPTION}"
    )
    return Grid(f"{name}: M(θ~) and M(θ*) apart", ["epoch", *heads], body, caption)


def _weights_apart(name: str, epochs: Mapping[float, Runs], priors: Sequence[str]) -> Grid:
    body = []
    for epoch, runs in epochs.items():
        cells = []
        for own in (_own(runs, prior) for prior in priors):
            columns = [
                cell([run["map"]["spread"] for run in own], 1),
                cell([run["tangent_mode"]["spread"] for run in own], 1),
                cell([run["deviations"] for run in own], 1),
                cell([100 * run["relative_norm"] for run in own], 1),
            ]
            cells += [text + marks(own) for text in columns]
        body.append([_epoch_title(epochs, epoch), *cells])
    what = ("spread\nM(θ~)", "spread\nM(θ*)", "θ* − θ~\nin deviations", "θ* − θ~\nin %")
    heads = [f"{text}, {_prior_title(prior)}" for prior in priors for text in what]
    caption = (
        "mean ± standard error over networks. spread: root of the trace of the outputs' covariance, mean over test "
        "images, in logits; θ* − θ~: in standard deviations of the posterior of M(θ*) (root of the sum over all its "
        f"directions), and its norm relative to that of θ~. {OPEN_CAPTION}"
    )
    return Grid(f"{name}: spreads and weights", ["epoch", *heads], body, caption)


def _precisions(name: str, epochs: Mapping[float, Runs], priors: Sequence[str]) -> Grid:
    body = []
    for epoch, runs in epochs.items():
        cells = []
        for prior in priors:
            for where in ("map", "tangent_mode"):
                own = [run[prior][where] for run in runs]
                logs = torch.tensor(
                    [[g["precision"] for g in run["groups"].values()] for run in own], dtype=torch.float64
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


def verdict(excess: Sequence[float]) -> str:
    """Whether a mean is above 0 by more than its standard error."""
    mean, error = mean_and_error(excess)
    if abs(mean) <= (error or 0.0):
        return "not resolved (within one standard error)"
    return "held" if mean > 0 else "did not hold"


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


# ---------------------------------------------------------------------------------------------------------------------
# The figure of bands
# ---------------------------------------------------------------------------------------------------------------------


def report_bands(out: Path, recipe: str, bands: Path) -> Outcome:
    """Write ``report.md`` with the figure of bands and a table of what was chosen.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        bands: folder of :func:`~tu_symmetry.experiments.linearized_laplace.compute_bands`.
    """
    table = load_table(find_recipe(recipe))
    found = Outcome.load(bands).results
    out.mkdir(parents=True, exist_ok=True)
    draw_bands(out / "bands.png", found)
    grid = bands_table(found["rows"], table.title)
    path = write_report(out, table, [grid.markdown(), "![bands](bands.png)"])
    return Outcome({}, str(path), [grid])


def band_title(name: str) -> str:
    """What the report calls a band: by a precision, or by a choice."""
    return f"λ = {name}" if "/" not in name else Choice.parse(name).title


def bands_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Grid:
    """Precisions, test likelihood and spread of every band."""
    header = ["", "λ (effective directions)", "test NLL", "covered", "spread on data", "spread in gap"]
    body = []
    for name, row in rows.items():
        groups = row["groups"].values()
        chosen = ", ".join(
            f"{g['precision']:.3g} ({g['gamma']:.1f}{', pruned' if g['pruned'] else ''})" for g in groups
        )
        numbers = [f"{row['nll']:.3f}", f"{100 * row['coverage']:.1f} %", f"{row['inside']:.3g}", f"{row['gap']:.3g}"]
        body.append([band_title(name), chosen, *(number + marks([row]) for number in numbers)])
    caption = (
        "Several λ: first layer, second layer, last layer. NLL in nats; covered: targets within the 95 % band (with "
        "noise); spread: epistemic standard deviation, root mean square over the test inputs and in the middle of the "
        "gap. M(θ~): evidence at the trained weights; M(θ*): at the joint stationary point (Recommendation 1). "
        f"{OPEN}: the evidence had not converged, so that the number is no result."
    )
    return Grid(title, header, body, caption)


def draw_bands(path: Path, found: Mapping[str, Any]) -> None:
    """The bands in two rows: precisions set by hand, precisions chosen by the evidence.

    Args:
        path: of the PNG.
        found: results of :func:`~tu_symmetry.experiments.linearized_laplace.compute_bands`.
    """
    rows = found["rows"]
    fixed = [name for name in rows if "/" not in name]
    chosen = [name for name in rows if "/" in name]
    width = max(len(fixed), len(chosen))
    grid = torch.tensor(found["grid"]).numpy()
    with plots.grid(path, 2, width, 2.6, 2.4, sharex=True, sharey=True) as axes:
        for line, names, color in zip(axes, (fixed, chosen), (plots.GRAY, plots.BLUE), strict=True):
            for ax in line[len(names) :]:
                ax.set_visible(False)
            for ax, name in zip(line, names, strict=False):
                mean, spread = (torch.tensor(rows[name][key]).numpy() for key in ("mean", "epistemic"))
                for times, alpha in ((1, 0.3), (2, 0.15)):
                    low, high = mean - times * spread, mean + times * spread
                    ax.fill_between(grid, low, high, color=color, alpha=alpha, linewidth=0)
                ax.plot(grid, mean, color=color)
                ax.plot(found["train_x"], found["train_y"], linestyle="", marker=".", color="black", markersize=2.5)
                ax.set_title(band_title(name).replace("θ~", r"$\tilde\theta$").replace("θ*", r"$\theta_*$"))
                text = f"test NLL {rows[name]['nll']:.2f}{'' if rows[name]['converged'] else ' (not converged)'}"
                ax.text(0.03, 0.03, text, transform=ax.transAxes, fontsize=8)
        axes[0, 0].set(ylim=(-4, 4), xlim=(float(grid[0]), float(grid[-1])))
