"""Table, figures and orderings of the probabilistic deep image prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tu_symmetry.experiments.deep_image_prior.posteriors import (
    ARRAYS,
    DIP,
    DIP_FITTED,
    DROPOUT,
    EVIDENCE,
    JOINT,
    ROWS,
    TV_CODE,
    TV_SEED,
)
from tu_symmetry.files import read_tensors
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, measured, verdict
from tu_symmetry.routines.deep_image_prior import Reconstructions
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

Cell = tuple[float, int]
Entries = Sequence[Mapping[str, Any]]
LEVELS = (0.5, 0.8, 0.9, 0.95)
_MARGIN = 0.3  # nats a pixel, linearized above DIP (variance 1) at 5 and 10 angles


def report(out: Path, recipe: str, reconstructions: list[Path], linearized: list[Path], dropout: list[Path]) -> Outcome:
    """Write ``report.md`` and the figures from what the other commands have left in their folders.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        reconstructions: files of the reconstructions, one for each of ``linearized``.
        linearized: folders of :func:`~tu_symmetry.experiments.deep_image_prior.linearized_posterior`.
        dropout: folders of :func:`~tu_symmetry.experiments.deep_image_prior.dropout_posterior`.
    """
    report = Report(out, recipe)
    found = [Outcome.load(folder).results for folder in linearized]
    entries = [entry for own in found for entry in own["rows"]]
    entries += [entry for folder in dropout for entry in Outcome.load(folder).results["rows"]]
    problems = [Reconstructions.load(path) for path in reconstructions]
    background = {
        int(image): (truth == 0).reshape(-1).numpy()
        for one in problems
        for image, truth in zip(one.problem.image, one.problem.truth, strict=True)
    }
    report.add(main_table(entries, report.table.title), noise_table(found), heading=False)
    report.add(calibration_table(entries, background), heading=False)
    answers = orderings(entries)
    report.add("\n".join(["## Orderings, on the images that were run", "", *(f"- {line}" for line in answers)]))
    first, arrays = problems[0], read_tensors(linearized[0] / ARRAYS)
    arrays |= read_tensors(dropout[0] / ARRAYS) if dropout else {}
    histories = found[0]["histories"]
    errors = "truth, filtered back-projection, reconstruction, error and standard deviation of each row"
    covered = "normalized errors with the standard normal, and coverage of central intervals"
    for name, draw, drawn, text in (
        ("images", images_figure, (first, arrays), errors),
        ("samples", samples_figure, (first, arrays), "prior samples, and posterior samples, of each row"),
        ("calibration", calibration_figure, (entries,), covered),
        ("evidence", evidence_figure, (histories,), "objective along its optimization (nats)"),
    ):
        report.figure(name, draw, *drawn, alt=text, after=f"{text[0].upper()}{text[1:]}.")
    return report.done({"orderings": answers})


def cells(entries: Entries) -> list[Cell]:
    """Noise and number of angles of everything that was run."""
    return sorted({(float(e["noise"]), int(e["num_angles"])) for e in entries})


def of(entries: Entries, row: str, cell: Cell, what: str = "log_likelihood") -> dict[int, float]:
    """Image to value."""
    return {
        int(e["image"]): float(e[what])
        for e in entries
        if e["row"] == row and (float(e["noise"]), int(e["num_angles"])) == cell
    }


def main_table(entries: Entries, title: str) -> Grid:
    """Log-likelihood a pixel with its standard error, PSNR and SSIM, for each row and cell."""
    seen = cells(entries)
    header = ["", *(f"{100 * noise:g} % noise\n{angles} angles" for noise, angles in seen)]
    body = []
    for row in ROWS:
        if not any(e["row"] == row for e in entries):
            continue
        cellsof = []
        for cell in seen:
            values = list(of(entries, row, cell).values())
            if not values:
                cellsof.append("–")
                continue
            psnr = np.mean(list(of(entries, row, cell, "psnr").values()))
            ssim = np.mean(list(of(entries, row, cell, "ssim").values()))
            cellsof.append(f"{measured(values, '.3f')}\n{psnr:.2f} dB, {ssim:.3f}")
        body.append([row, *cellsof])
    numbers = sorted({len(of(entries, DIP, cell)) for cell in seen})
    count = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    caption = (
        f"log-likelihood a pixel (nats) with standard error over {count} images; second lines: PSNR and SSIM. The "
        "paper has pictures only: its values are unknown and none are filled in"
    )
    return Grid(title, header, body, caption)


def noise_table(found: Sequence[Mapping[str, Any]]) -> Grid:
    """Fitted noise variances beside the true ones, and log evidences."""
    body = []
    for own in found:
        for entry in own["rows"]:
            if entry["row"] not in (EVIDENCE, TV_SEED, TV_CODE, JOINT):
                continue
            body.append(
                [
                    f"image {entry['image']}, {entry['num_angles']} angles, {100 * entry['noise']:g} %: {entry['row']}",
                    f"{entry['noise_variance']:.3f}",
                    f"{own['true_noise_variance'][entry['problem']]:.3f}",
                    f"{entry['log_evidence']:.2f}",
                    f"{entry['evaluations']}{'' if entry['converged'] else ' (not converged)'}",
                ]
            )
    header = ["", "noise\nvariance", "true", "log\nevidence", "evaluations"]
    missed = sum("not converged" in row[-1] for row in body)
    return Grid(
        "Hyperparameters by the evidence", header, body, f"{len(body) - missed} of {len(body)} optimizations converged"
    )


def calibration_table(entries: Entries, background: Mapping[int, np.ndarray]) -> Grid:
    """Coverage of central intervals, over all pixels of all images, and of the background and the rest by themselves.

    A network that ends in a sigmoid is sure of an empty background, and right: what its pixels show of calibration is
    how small their variance may become, not how well an error is predicted.

    Args:
        entries: the number of entries of every row.
        background: number of an image to where its truth is 0, ``(pixels,)``.
    """
    body = []
    for row in ROWS:
        own = [e for e in entries if e["row"] == row]
        if not own:
            continue
        errors = np.abs(np.concatenate([np.asarray(e["normalized_errors"]) for e in own]))
        empty = np.concatenate([background[int(e["image"])] for e in own])
        cells = []
        for level in LEVELS:
            inside = errors <= _half(level)
            parts = [f"{100 * float(inside[kind].mean()):.1f}" if kind.any() else "–" for kind in (empty, ~empty)]
            cells.append(f"{100 * float(inside.mean()):.1f} %\n{' / '.join(parts)}")
        body.append([row, *cells])
    header = ["", *(f"{100 * level:g} %\ninterval" for level in LEVELS)]
    caption = "second lines: pixels whose true value is 0 / all others"
    return Grid("Coverage of the truth by central intervals of each pixel", header, body, caption)


def orderings(entries: Entries) -> list[str]:
    """What the case study expects, and whether it held on the mean by more than its standard error; one line each."""
    seen = cells(entries)
    lines: list[str] = []

    def compare(text: str, left: str, right: str, margin: float, where: Callable[[Cell], bool]) -> None:
        for cell in filter(where, seen):
            a, b = of(entries, left, cell), of(entries, right, cell)
            shared = sorted(a.keys() & b.keys())
            if not shared:
                continue
            gaps = [a[i] - b[i] for i in shared]
            held = verdict([gap - margin for gap in gaps])
            wins = sum(gap > margin for gap in gaps)
            lines.append(
                f"{text}, {cell[1]} angles at {100 * cell[0]:g} %: **{held}**, {measured(gaps, '+.3f')} nats a pixel, "
                f"{wins} of {len(gaps)} images"
            )

    few = lambda cell: cell[1] <= 10  # noqa: E731
    for row in (EVIDENCE, TV_SEED, TV_CODE):
        compare(f"{row} above {DIP} by more than {_MARGIN}", row, DIP, _MARGIN, few)
    compare(f"{DIP_FITTED} below {DIP}", DIP, DIP_FITTED, 0.0, few)
    for row in (EVIDENCE, TV_SEED, TV_CODE):
        compare(f"{row} above {DROPOUT}", row, DROPOUT, 0.0, lambda cell: True)
    compare(f"{JOINT} above {EVIDENCE}, at theta~", JOINT, EVIDENCE, 0.0, lambda cell: True)
    for row in (EVIDENCE, TV_SEED):
        for what, unit in (("log_likelihood", "nats a pixel"), ("psnr", "dB")):
            for noise in sorted({cell[0] for cell in seen}):
                angles = [cell[1] for cell in seen if cell[0] == noise]
                means = [float(np.mean(list(of(entries, row, (noise, a), what).values()))) for a in angles]
                if len(means) < 2:
                    continue
                held = "held" if means == sorted(means) else "did not hold"
                shown = ", ".join(f"{a}: {m:.3f}" for a, m in zip(angles, means, strict=True))
                lines.append(f"{row}: {what} rises with the angles at {100 * noise:g} %: **{held}** ({shown} {unit})")
    for low, high in [(a, b) for a in seen for b in seen if a[1] == b[1] and a[0] < b[0]]:
        a, b = of(entries, EVIDENCE, low), of(entries, EVIDENCE, high)
        shared = sorted(a.keys() & b.keys())
        if shared:
            gaps = [a[i] - b[i] for i in shared]
            lines.append(
                f"{EVIDENCE}: {100 * low[0]:g} % noise above {100 * high[0]:g} % at {low[1]} angles: "
                f"**{verdict(gaps)}**, {measured(gaps, '+.3f')} nats a pixel"
            )
    for cell in seen:
        a, b = of(entries, TV_SEED, cell), of(entries, EVIDENCE, cell)
        if not a:
            continue
        gaps = [a[i] - b[i] for i in sorted(a)]
        lines.append(
            f"TV-PredCP less evidence, {cell[1]} angles at {100 * cell[0]:g} % (no claim): {measured(gaps, '+.3f')} "
            "nats a pixel"
        )
    return lines


def images_figure(path: Path, found: Reconstructions, arrays: Mapping[str, Tensor]) -> None:
    """One line for each number of angles: what was there, what was seen, what each row says.

    The linearized rows have one mean, the network's image, so that they share a reconstruction and its error.
    """
    problem = found.problem
    chosen = {int(a): i for i, a in reversed(list(enumerate(problem.num_angles.tolist())))}
    panels: list[list[tuple[str, Tensor, str]]] = []
    for angles, index in sorted(chosen.items()):
        truth = problem.truth[index]
        line = [(f"truth, {angles} angles", truth, "gray"), ("back-projection", problem.back_projection[index], "gray")]
        for group in ((DROPOUT,), (EVIDENCE, TV_SEED, TV_CODE)):
            own = [row for row in group if f"{index}.{ROWS.index(row)}.mean" in arrays]
            if own:
                mean = arrays[f"{index}.{ROWS.index(own[0])}.mean"]
                line.append((_short(own[0]) if group == (DROPOUT,) else "DIP, linearized", mean, "gray"))
                line.append(("absolute error", (truth - mean).abs(), "error"))
            for row in own:
                name = _short(row).removeprefix("lin. ").strip("()")
                name = "its std" if row == DROPOUT else f"std, {name}"
                line.append((name, arrays[f"{index}.{ROWS.index(row)}.deviation"], "error"))
        panels.append(line)
    _pictures(path, panels)


def samples_figure(path: Path, found: Reconstructions, arrays: Mapping[str, Tensor]) -> None:
    """Prior and posterior samples of the linearized rows, and of dropout, for the first problem."""
    panels = []
    for row in (EVIDENCE, TV_SEED, TV_CODE, DROPOUT):
        for kind in ("prior", "samples"):
            drawn = arrays.get(f"0.{ROWS.index(row)}.{kind}")
            if drawn is None:
                continue
            name = {"prior": "prior", "samples": "posterior"}[kind]
            panels.append([(f"{_short(row)}: {name}", image, "gray") for image in drawn])
    _pictures(path, panels)


def calibration_figure(path: Path, entries: Entries) -> None:
    """Histogram of normalized errors, and coverage against level."""
    levels = np.linspace(0.02, 0.98, 49)
    colors = (plots.GRAY, plots.PURPLE, plots.GREEN, plots.BLUE, plots.ORANGE, "#000000", "#8C564B")
    with plots.figure(path, 2, 4.4) as (left, right):
        grid = np.linspace(-5, 5, 200)
        left.plot(grid, np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi), color="#000000", linewidth=1, label="normal")
        for row, color in zip(ROWS, colors, strict=True):
            errors = _errors(entries, row)
            if not len(errors):
                continue
            bins = np.linspace(-5, 5, 61).tolist()
            left.hist(np.clip(errors, -5, 5), bins=bins, density=True, histtype="step", color=color, label=_short(row))
            covered = [float(np.mean(np.abs(errors) <= _half(level))) for level in levels]
            right.plot(levels, covered, color=color, label=_short(row))
        right.plot([0, 1], [0, 1], color="#000000", linewidth=0.8, linestyle=(0, (3, 2)))
        left.set(title="normalized errors", xlabel="error / standard deviation", ylabel="density")
        right.set(title="coverage", xlabel="level of the interval", ylabel="share of pixels inside")
        left.legend(fontsize=6)


def evidence_figure(path: Path, histories: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """The objective at every evaluation, one panel for each row."""
    with plots.figure(path, len(histories)) as axes:
        for ax, (row, runs) in zip(axes, histories.items(), strict=True):
            for values in runs.values():
                ax.plot(range(1, len(values) + 1), np.minimum.accumulate(values), color=plots.BLUE, alpha=0.6)
            ax.set(title=_short(row), xlabel="evaluation", ylabel="objective (nats)")


def _pictures(path: Path, panels: Sequence[Sequence[tuple[str, Tensor, str]]]) -> None:
    from matplotlib import pyplot as plt

    width = max(len(row) for row in panels)
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(len(panels), width, figsize=(1.5 * width, 1.62 * len(panels)), squeeze=False)
        try:
            for line, row in zip(axes, panels, strict=True):
                errors = [image for _, image, kind in row if kind == "error"]
                top = max((float(image.max()) for image in errors), default=1.0)
                for ax in line:
                    ax.axis("off")
                for ax, (title, image, kind) in zip(line, row, strict=False):
                    limits: dict[str, Any] = (
                        {"vmin": 0.0, "vmax": top, "cmap": "magma"} if kind == "error" else {"cmap": "gray"}
                    )
                    if kind == "gray":
                        limits |= {"vmin": 0.0, "vmax": 1.0}
                    ax.imshow(np.asarray(image[0]), **limits)
                    ax.set_title(title, fontsize=6)
            figure.savefig(path)
        finally:
            plt.close(figure)


def _short(row: str) -> str:
    return row.replace("linearized (", "lin. (").replace("Jacobian weight", "w")


def _errors(entries: Entries, row: str) -> np.ndarray:
    return np.concatenate([np.asarray(e["normalized_errors"]) for e in entries if e["row"] == row] or [np.zeros(0)])


def _half(level: float) -> float:
    """Half the width of a central interval of the standard normal."""
    from scipy.stats import norm

    return float(norm.ppf(0.5 + level / 2))
