"""Table, figures and orderings of the probabilistic deep image prior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm
from torch import Tensor

from tu_symmetry.experiments.deep_image_prior.rows import (
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
from tu_symmetry.routines.deep_image_prior import Reconstructions, total_variation
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table

Cell = tuple[float, int]  # noise and number of angles
Entries = Sequence[Mapping[str, Any]]
Picture = tuple[str, Tensor, str]  # title, image, and ``gray`` or ``error``
LEVELS = (0.5, 0.8, 0.9, 0.95)
_MARGIN = 0.3  # nats a pixel, linearized above DIP (variance 1) at 5 and 10 angles


def report(
    out: Path,
    recipe: str,
    reconstructions: list[Path],
    linearized: list[Path],
    dropout: list[Path],
    tv: Path | None = None,
    agreement: Path | None = None,
) -> Outcome:
    """Write ``report.md`` and the figures from what the other commands have left in their files and folders."""
    page = Report(out, recipe)
    found = [Outcome.load(folder).results for folder in linearized]
    entries = [entry for own in found for entry in own["rows"]]
    entries += [entry for folder in dropout for entry in Outcome.load(folder).results["rows"]]
    problems = [Reconstructions.load(path) for path in reconstructions]
    background = {
        int(image): (truth == 0).reshape(-1).numpy()
        for one in problems
        for image, truth in zip(one.problem.image, one.problem.truth, strict=True)
    }
    page.add(main_table(entries, page.table.title), noise_table(found), heading=False)
    page.add(calibration_table(entries, background), heading=False)
    answers = orderings(entries)
    page.list("Orderings, on the images that were run", answers)
    first, arrays = problems[0], read_tensors(linearized[0] / ARRAYS)
    arrays |= read_tensors(dropout[0] / ARRAYS) if dropout else {}
    image, caption = first.images[0], "samples of the first problem's priors, and its reconstruction"
    if tv is not None:  # at the rate where the expected total variation is the reconstruction's
        rate = (image.numel() - 1) / float(total_variation(image))
        arrays["tv"] = (image.mean() + read_tensors(tv / ARRAYS)["tv"] / rate).unsqueeze(1)
        caption += f". HMC: {Outcome.load(tv).headline}; lambda = {rate:.3g}"
    page.add(prior_table({"reconstruction": image[None], **_priors(arrays)}, caption), heading=False)
    errors = "truth, filtered back-projection, reconstruction, error and standard deviation of each row"
    paths = "hyperparameters at every evaluation of the evidence, for the first image and geometry"
    covered = "normalized errors with the standard normal, and coverage of central intervals"
    if agreement is not None:
        page.add(*Outcome.load(agreement).tables)
    for name, draw, drawn, text in (
        ("images", images_figure, (first, arrays), errors),
        ("samples", samples_figure, (arrays,), "prior samples, and posterior samples, of each row"),
        ("calibration", calibration_figure, (entries,), covered),
        ("evidence", evidence_figure, (found[0]["histories"],), "objective along its optimization (nats)"),
        ("hyperparameters", hyperparameters_figure, (arrays, found[0]["names"]), paths),
    ):
        page.figure(name, draw, *drawn, alt=text, after=f"{text[0].upper()}{text[1:]}.")
    return page.done({"orderings": answers})


def report_scan(out: Path, recipe: str, reconstructions: Path, runs: list[Path]) -> Outcome:
    """Write ``report.md`` of one large image, from the folders of ``sampled_posterior`` and ``dropout_posterior``."""
    page, found = Report(out, recipe), [Outcome.load(folder).results["rows"] for folder in runs]
    by_row = _by_row([entry for own in found for entry in own])
    sides = sorted({entry["patch"] for own in by_row.values() for entry in own})

    def density(own: Entries, side: int) -> str:
        return f"{next(e['log_likelihood'] for e in own if e['patch'] == side):.3f}"

    columns: dict[str, Any] = {f"patches {s} x {s}": lambda own, s=s: density(own, s) for s in sides}
    columns |= {
        "noise variance": lambda own: f"{own[0]['noise_variance']:.3g}" if "noise_variance" in own[0] else "–",
        "PSNR (dB)": lambda own: f"{own[0]['psnr']:.2f}",
        "SSIM": lambda own: f"{own[0]['ssim']:.3f}",
    }
    caption = "log-likelihood a pixel (nats), pixels of different patches independent; published tables are pictures"
    page.add(table(page.table.title, by_row, columns, caption), heading=False)
    arrays: dict[str, Tensor] = {}
    for folder in runs:
        arrays |= read_tensors(folder / ARRAYS)
    text = "truth, back-projection, and of each row reconstruction, absolute error and standard deviation"
    page.figure("images", images_figure, Reconstructions.load(reconstructions), arrays, alt=text, after=f"{text}.")
    return page.done()


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


def _by_row(entries: Entries) -> dict[str, list[Found]]:
    """The entries of each row that was run, in the order of the rows."""
    found = {row: [e for e in entries if e["row"] == row] for row in ROWS}
    return {row: own for row, own in found.items() if own}


def _errors(own: Entries) -> np.ndarray:
    return np.concatenate([np.asarray(e["normalized_errors"]) for e in own])


def _half(level: float) -> float:
    """Half the width of a central interval of the standard normal."""
    return float(norm.ppf(0.5 + level / 2))


def main_table(entries: Entries, title: str) -> Grid:
    """Log-likelihood a pixel with its standard error, PSNR and SSIM, for each row and cell."""
    seen = cells(entries)

    def shown(own: Entries, cell: Cell) -> str:
        row = own[0]["row"]
        values, psnr, ssim = (list(of(own, row, cell, what).values()) for what in ("log_likelihood", "psnr", "ssim"))
        return f"{measured(values, '.3f')}\n{np.mean(psnr):.2f} dB, {np.mean(ssim):.3f}" if values else "–"

    numbers = sorted({len(of(entries, DIP, cell)) for cell in seen})
    count = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    caption = (
        f"log-likelihood a pixel (nats) with standard error over {count} images; second lines: PSNR and SSIM. The "
        "authors' tables are published as pictures: their values are not at hand and none are filled in"
    )
    columns: dict[str, Any] = {
        f"{100 * noise:g} % noise\n{angles} angles": lambda own, cell=(noise, angles): shown(own, cell)
        for noise, angles in seen
    }
    return table(title, _by_row(entries), columns, caption)


def noise_table(found: Sequence[Found]) -> Grid:
    """Fitted noise variances beside the true ones, and log evidences."""
    rows = {
        f"image {e['image']}, {e['num_angles']} angles, {100 * e['noise']:g} %: {e['row']}": {
            **e, "true": own["true_noise_variance"][e["problem"]]
        }
        for own in found
        for e in own["rows"]
        if e["row"] in (EVIDENCE, TV_SEED, TV_CODE, JOINT)
    }  # fmt: skip
    columns = {
        "noise\nvariance": lambda e: f"{e['noise_variance']:.3f}",
        "true": lambda e: f"{e['true']:.3f}",
        "log\nevidence": lambda e: f"{e['log_evidence']:.2f}",
        "evaluations": lambda e: f"{e['evaluations']}{'' if e['converged'] else ' (not converged)'}",
    }
    caption = f"{sum(e['converged'] for e in rows.values())} of {len(rows)} optimizations converged"
    return table("Hyperparameters by the evidence", rows, columns, caption)


def calibration_table(entries: Entries, background: Mapping[int, np.ndarray]) -> Grid:
    """Coverage of central intervals, over all pixels of all images, and of the background and the rest by themselves.

    A network that ends in a sigmoid is sure of an empty background, and right: what its pixels show of calibration is
    how small their variance may become. ``background``: number of an image to where its truth is 0, ``(pixels,)``.
    """

    def covered(own: Entries, level: float) -> str:
        inside = np.abs(_errors(own)) <= _half(level)
        empty = np.concatenate([background[int(e["image"])] for e in own])
        parts = [f"{100 * float(inside[kind].mean()):.1f}" if kind.any() else "–" for kind in (empty, ~empty)]
        return f"{100 * float(inside.mean()):.1f} %\n{' / '.join(parts)}"

    columns: dict[str, Any] = {
        f"{100 * level:g} %\ninterval": lambda own, level=level: covered(own, level) for level in LEVELS
    }
    caption = "second lines: pixels whose true value is 0 / all others"
    return table("Coverage of the truth by central intervals of each pixel", _by_row(entries), columns, caption)


def orderings(entries: Entries) -> list[str]:
    """What the case study expects, and whether it held on the mean by more than its standard error; one line each."""
    seen = cells(entries)
    lines: list[str] = []

    def gaps(left: tuple[str, Cell], right: tuple[str, Cell]) -> list[float]:
        a, b = of(entries, *left), of(entries, *right)
        return [a[i] - b[i] for i in sorted(a.keys() & b.keys())]

    def compare(text: str, left: str, right: str, margin: float = 0.0, angles: float = math.inf) -> None:
        for cell in seen:
            if cell[1] <= angles and (own := gaps((left, cell), (right, cell))):
                held = verdict([gap - margin for gap in own])
                wins = f"{sum(gap > margin for gap in own)} of {len(own)} images"
                lines.append(f"{text}, {_place(cell)}: **{held}**, {measured(own, '+.3f')} nats a pixel, {wins}")

    linearized = (EVIDENCE, TV_SEED, TV_CODE)
    for row in linearized:
        compare(f"{row} above {DIP} by more than {_MARGIN}", row, DIP, _MARGIN, angles=10)
    compare(f"{DIP_FITTED} below {DIP}", DIP, DIP_FITTED, angles=10)
    for row in linearized:
        compare(f"{row} above {DROPOUT}", row, DROPOUT)
    compare(f"{JOINT} above {EVIDENCE}, at theta~", JOINT, EVIDENCE)
    for row in (EVIDENCE, TV_SEED):
        for what, unit in (("log_likelihood", "nats a pixel"), ("psnr", "dB")):
            for noise in sorted({cell[0] for cell in seen}):
                means = {a: float(np.mean([*of(entries, row, (n, a), what).values()])) for n, a in seen if n == noise}
                if len(means) > 1:
                    held = "held" if [*means.values()] == sorted(means.values()) else "did not hold"
                    shown = ", ".join(f"{a}: {mean:.3f}" for a, mean in means.items())
                    rises = f"rises with the angles at {100 * noise:g} %"
                    lines.append(f"{row}: {what} {rises}: **{held}** ({shown} {unit})")
    for low, high in [(a, b) for a in seen for b in seen if a[1] == b[1] and a[0] < b[0]]:
        if own := gaps((EVIDENCE, low), (EVIDENCE, high)):
            what = f"{100 * low[0]:g} % noise above {100 * high[0]:g} % at {low[1]} angles"
            lines.append(f"{EVIDENCE}: {what}: **{verdict(own)}**, {measured(own, '+.3f')} nats a pixel")
    for cell in seen:
        if own := gaps((TV_SEED, cell), (EVIDENCE, cell)):
            less = f"TV-PredCP less evidence, {_place(cell)} (no claim)"
            lines.append(f"{less}: {measured(own, '+.3f')} nats a pixel")
    return lines


def _priors(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples ``[samples, 1, height, width]`` of the first problem's priors by name, those that are there."""
    keys = {"total variation": "tv"} | {
        _short(row): f"0.{ROWS.index(row)}.prior" for row in (EVIDENCE, TV_SEED, TV_CODE)
    }
    keys["factorized"] = f"0.{ROWS.index(TV_SEED)}.factorized"
    return {name: arrays[key] for name, key in keys.items() if key in arrays}


def prior_table(priors: Mapping[str, Tensor], caption: str) -> Grid:
    """How rough samples ``[samples, 1, height, width]`` are, also relative to the size of what they show."""
    rough = {name: float(total_variation(images).mean()) / images[0].numel() for name, images in priors.items()}
    size = {name: float(images.var((-2, -1), correction=0).mean().sqrt()) for name, images in priors.items()}
    rows = [[name, f"{rough[name]:.3f}", f"{size[name]:.3f}", f"{rough[name] / size[name]:.2f}"] for name in priors]
    return Grid("Roughness of the priors", ["", "TV a pixel", "std of pixels", "ratio"], rows, caption)


def _place(cell: Cell) -> str:
    return f"{cell[1]} angles at {100 * cell[0]:g} %"


def images_figure(path: Path, found: Reconstructions, arrays: Mapping[str, Tensor]) -> None:
    """One line for each number of angles: what was there, what was seen, what each row says.

    Linearized rows share the network's image.
    """
    problem = found.problem
    chosen = {int(a): i for i, a in reversed(list(enumerate(problem.num_angles.tolist())))}
    panels: list[list[Picture]] = []
    for angles, index in sorted(chosen.items()):
        truth = problem.truth[index]
        line = [(f"truth, {angles} angles", truth, "gray"), ("back-projection", problem.back_projection[index], "gray")]
        for title, group in ((DROPOUT, (DROPOUT,)), ("DIP, linearized", (EVIDENCE, TV_SEED, TV_CODE))):
            own = [row for row in group if f"{index}.{ROWS.index(row)}.mean" in arrays]
            if own:
                mean = arrays[f"{index}.{ROWS.index(own[0])}.mean"]
                line += [(title, mean, "gray"), ("absolute error", (truth - mean).abs(), "error")]
            for row in own:
                name = "its std" if row == DROPOUT else f"std, {_short(row).removeprefix('lin. ').strip('()')}"
                line.append((name, arrays[f"{index}.{ROWS.index(row)}.deviation"], "error"))
        panels.append(line)
    _pictures(path, panels)


def samples_figure(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Prior samples of each kind, and posterior samples of linearized rows and of dropout, for the first problem."""
    drawn = {f"{name}\nprior": images for name, images in _priors(arrays).items()}
    for row in (EVIDENCE, TV_SEED, TV_CODE, DROPOUT):
        if (key := f"0.{ROWS.index(row)}.samples") in arrays:
            drawn[f"{_short(row)}\nposterior"] = arrays[key]
    lines = [[(f"sample {k}", image, "gray") for k, image in enumerate(images[:3], 1)] for images in drawn.values()]
    _pictures(path, lines, [name.replace(", ", ",\n") for name in drawn])


def calibration_figure(path: Path, entries: Entries) -> None:
    """Distribution of the sizes of normalized errors, and coverage against level."""
    levels, grid = np.linspace(0.02, 0.98, 49), np.linspace(0, 5, 101)
    colors = (plots.GRAY, plots.PURPLE, plots.GREEN, plots.BLUE, plots.ORANGE, "#000000", "#8C564B")
    with plots.figure(path, 2, 4.4, 3.4) as (left, right):
        for row, own in _by_row(entries).items():
            errors, k = np.abs(_errors(own)), ROWS.index(row)
            style: Any = {"color": colors[k], "label": _short(row), "linestyle": ("-", "--", "-.", ":")[k % 4]}
            left.plot(grid, [100 * float(np.mean(errors > size)) for size in grid], **style)
            right.plot(100 * levels, [100 * float(np.mean(errors <= _half(level))) for level in levels], **style)
        ideal: Any = {"color": plots.GRAY, "linewidth": 0.9, "linestyle": ":", "label": "calibrated"}
        left.plot(grid, [100 * math.erfc(size / math.sqrt(2)) for size in grid], **ideal)
        right.plot([0, 100], [0, 100], **ideal)
        left.set(title="How large errors are", xlabel="|error| in standard deviations", yscale="log", ylim=(0.1, 100))
        left.set_ylabel("pixels with larger errors (%)")
        right.set(title="Coverage", xlabel="level of the interval (%)", ylabel="pixels inside the interval (%)")
        left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def hyperparameters_figure(path: Path, arrays: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Every hyperparameter at every evaluation of the evidence for the first problem, one line for each row."""
    rows = {row: arrays[key].exp() for row in ROWS if (key := f"0.{ROWS.index(row)}.points") in arrays}
    kinds = list(dict.fromkeys(name.rpartition("log_")[2] for name in names))
    with plots.grid(path, len(rows), len(kinds), 3.4, 2.4) as axes:
        for line, (row, points) in zip(axes, rows.items(), strict=True):
            for ax, kind in zip(line, kinds, strict=True):
                for name, values in zip(names, points.T, strict=True):
                    if name.rpartition("log_")[2] == kind:
                        ax.plot(range(1, len(values) + 1), values, label=name.rpartition(".log_")[0] or None)
                ax.set(title=kind.replace("_", " "), xlabel="evaluation", yscale="log")
            line[0].set_ylabel(_short(row))
        axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8)


def evidence_figure(path: Path, histories: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """The objective at every evaluation, one panel for each row."""
    with plots.figure(path, len(histories)) as axes:
        for ax, (row, runs) in zip(axes, histories.items(), strict=True):
            for values in runs.values():
                ax.plot(range(1, len(values) + 1), np.minimum.accumulate(values), color=plots.BLUE, alpha=0.6)
            ax.set(title=_short(row), xlabel="evaluation", ylabel="objective (nats)")


def _pictures(path: Path, panels: Sequence[Sequence[Picture]], names: Sequence[str] = ()) -> None:
    """Lines of pictures, with their names at the left and a bar for each scale; errors of a line share one."""
    width = 1.2 if names else 1.6
    with plots.grid(path, len(panels), max(map(len, panels)), width, width) as axes:
        for k, (line, row) in enumerate(zip(axes, panels, strict=True)):
            top = max((float(image.max()) for _, image, kind in row if kind == "error"), default=1.0)
            for ax in line:
                ax.set(xticks=[], yticks=[], frame_on=False)
            drawn = {}
            for ax, (title, image, kind) in zip(line, row, strict=False):
                limit, colors = (top, "magma") if kind == "error" else (1.0, "gray")
                drawn[kind] = ax.imshow(np.asarray(image[0]), vmin=0.0, vmax=limit, cmap=colors)
                if k == 0 or not names:
                    ax.set_title(title, fontsize=6)
            if "error" in drawn:
                line[0].figure.colorbar(drawn["error"], ax=line, pad=0.01, label="error, std", format="%.2f")
            line[0].set_ylabel(names[k] if names else "", fontsize=6)
        style = {"location": "bottom", "aspect": 30, "shrink": 2 / axes.shape[1], "pad": 0.01}
        line[0].figure.colorbar(drawn["gray"], ax=axes, label="pixel value, clipped", **style)


def _short(row: str) -> str:
    return row.replace("linearized (", "lin. (").replace("Jacobian weight", "w")
