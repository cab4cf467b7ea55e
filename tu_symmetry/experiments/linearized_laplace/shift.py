"""Predictions under a shift of the images: networks and their linearized Laplace on test images that are rotated.

The kind of figure that the talk on arXiv 2206.08900 shows of linearized Laplace under distribution shift, for
precisions that the evidence chooses in each of the paper's ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import affine_grid, grid_sample

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.experiments.linearized_laplace import rows as paper
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, Trained, Work, groups_of
from tu_symmetry.experiments.linearized_laplace.rows import CALIBRATED, NETWORK, SCALED, Choice
from tu_symmetry.experiments.study import Images, followed
from tu_symmetry.files import digest_folder
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors
from tu_symmetry.tables.report import Found, Report, table

COLUMNS = {  # titles of a table and of a column; scale and digits
    "nll": ("Test NLL (nats)", "NLL", 1, 3),
    "ece": ("Expected calibration error (%)", "ECE %", 100, 1),
    "accuracy": ("Accuracy (%)", "accuracy %", 100, 1),
    "auroc": ("AUROC of out-of-distribution images (%)", "AUROC %", 100, 1),  # where there are such images
}

SCALED_ON = "the temperature is chosen on"
Turned = Mapping[str, Tensor]  # images by angle


def rotate(x: Tensor, angle: float) -> Tensor:
    """Images ``[n, channels, size, size]`` turned counterclockwise about their middle, bilinear between the pixels.

    What comes from outside is black, the smallest value of the images. Multiples of 90 degrees are exact.
    """
    if x.ndim != 4 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"images have shape {tuple(x.shape)}, and [n, channels, size, size] are rotated")
    quarters, rest = divmod(angle, 90)
    x = torch.rot90(x, int(quarters), (2, 3))
    if rest == 0:
        return x
    black, turn = x.amin(), math.radians(rest)
    matrix = x.new_tensor([[math.cos(turn), -math.sin(turn), 0.0], [math.sin(turn), math.cos(turn), 0.0]])
    where = affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x - black, where, align_corners=False) + black


def measure_rotations(
    out: Path,
    networks: Trained,
    data: ImageDataModule,
    choices: Sequence[str],
    angles: Sequence[float],
    settings: Settings,
    ensembles: dict[str, list[Path]] | None = None,
    device: str = "auto",
) -> Outcome:
    """Test NLL, accuracy and calibration error at every angle (degrees): of networks, of every choice, of ensembles.

    Each twice: as it is, and with the scale of logits (networks, ensembles), or temperature and sharpness (choices),
    that are best on the validation images, which are not rotated. With ``eval_ood`` the AUROC of other images against
    rotated ones, too. ``ensembles`` are folders of sample stores by their title, one folder a run.
    """
    keys = [NETWORK, *(choice.key for choice in paper.parse_all(choices))]
    if not angles:
        raise ValueError("angles: name at least one")
    images = Images(data, device)
    held_out = images.held_out(SCALED_ON)
    turned = {f"{angle:g}": rotate(images.test.x, angle) for angle in angles}
    parts = networks.parts(out, asdict(settings), images.digest(), digest_tensors(*held_out), list(turned))
    results: dict[str, list[Any]] = {}
    count = len(networks.store())
    for k, progress in followed("rotations", range(count)):
        work = Work(networks, k, images, settings, progress=progress)
        for key in keys:
            for name, row in parts.take(f"{k}-{key}", _rows, work, key, turned).items():
                results.setdefault(name, []).append(row)
    for title, folders in (ensembles or {}).items():
        for number, folder in enumerate(folders):
            pool, kept = Trained(networks.model, folder), Parts(parts.folder, [parts.key, digest_folder(folder)])
            names, states = (title, title + CALIBRATED), list(pool.store())
            work = Work(pool, 0, images, settings)
            for name, row in kept.take(f"{title}-{number}", _pooled, work, states, names, turned).items():
                results.setdefault(name, []).append(row)
    every = [row for runs in results.values() for row in runs if "converged" in row]
    return Outcome(
        {
            "angles": list(angles),
            "rows": results,
            "ensembles": list(ensembles or {}),
            "parameters": networks.size,
            "sizes": images.sizes,
        },
        f"{count} networks; {sum(not row['converged'] for row in every)} of {len(every)} rows from an evidence "
        "that had not converged",
    )


def _at_angles(work: Work, turned: Turned, predict: Callable[[Tensor], Sequence[Tensor]]) -> list[dict[str, Any]]:
    """Scores by angle of each of two predictives from one pass, which ``predict`` gives for some images."""

    def probabilities(x: Tensor) -> list[Tensor]:
        batches = [predict(part) for part in x.split(work.settings.batch_size)]
        return [torch.cat(own).double() for own in zip(*batches, strict=True)]

    other = [None, None] if work.images.other is None else probabilities(work.images.other)
    found = {angle: probabilities(x) for angle, x in turned.items()}
    return [
        {"by_angle": {a: paper.scores(p[k], work.images.test.y, other[k]) for a, p in found.items()}} for k in (0, 1)
    ]


@torch.no_grad()
def _pooled(work: Work, states: Sequence[State], names: tuple[str, str], turned: Turned) -> dict[str, Any]:
    """Scores of the mean of the probabilities of some networks, by the first name; and scaled, by the second."""
    own = [{name: t.to(work.images.device) for name, t in state.items()} for state in states]

    def logs(x: Tensor) -> Tensor:
        every = [functional_call(work.model, state, (x,)).double().log_softmax(-1) for state in own]
        return torch.stack(every).logsumexp(0)

    x, y = work.images.held_out(SCALED_ON)
    sharpness = paper.best_sharpness(torch.cat([logs(part) for part in x.split(work.settings.batch_size)]), y)
    powers = torch.tensor([1.0, sharpness], dtype=torch.float64, device=y.device).view(2, 1, 1)
    itself, scaled = _at_angles(work, turned, lambda x: list((powers * logs(x)).softmax(-1)))
    return {names[0]: itself, names[1]: scaled | {"sharpness": sharpness}}


def _rows(work: Work, key: str, turned: Turned) -> dict[str, Any]:
    """Scores of one network, or of one choice by the evidence; as it is and calibrated, from one pass for both."""
    if key == NETWORK:
        return _pooled(work, [work.trained.store()[work.number]], (NETWORK, SCALED), turned)
    la, result, _ = work.optimize(Choice.parse(key))
    facts = {"converged": result.converged, "groups": groups_of(la)}
    calibration = work.calibrated(la)
    plain, cooled = _at_angles(work, turned, partial(work.predictives, la))
    return {key: facts | plain, key + CALIBRATED: facts | calibration | cooled}


def report_rotations(out: Path, recipe: str, rotations: Path) -> Outcome:
    """Write ``report.md`` and ``rotations.png``, from the folder of :func:`measure_rotations`."""
    page, found = Report(out, recipe), Outcome.load(rotations).results
    networks = f"{len(found['rows'][NETWORK])} networks of {found['parameters']:,} parameters"
    page.add(paper.images_line(networks, found))
    page.figure("rotations", draw_rotations, found, alt="NLL and ECE by angle")
    measured = found["rows"][NETWORK][0]["by_angle"][f"{found['angles'][0]:g}"]
    page.add(*(angle_table(found, column) for column in COLUMNS if column in measured))
    page.add(*(difference_table(found, rival) for rival in (NETWORK, SCALED)))
    return page.done()


def angle_table(found: Found, column: str) -> Grid:
    """Means over networks at every angle."""
    name, _, scale, digits = COLUMNS[column]

    def show(runs: Any, angle: str) -> str:
        return f"{fmean(scale * run['by_angle'][angle][column] for run in runs):.{digits}f}{paper.marks(runs)}"

    caption = (
        "means over networks; columns: degrees by which the test images are turned. calibrated, temperature scaled: by "
        f"validation images that are not turned. {paper.OPEN_CAPTION}"
    )
    columns: dict[str, Any] = {f"{a:g}°": lambda runs, a=a: show(runs, f"{a:g}") for a in found["angles"]}
    return table(
        f"{name} by angle", {paper.title_of(key): runs for key, runs in found["rows"].items()}, columns, caption
    )


def difference_table(found: Found, rival: str) -> Grid:
    """By how much each row is better or worse than the rival: unturned, and on average over all turned images."""
    rows, angles = found["rows"], [f"{angle:g}" for angle in found["angles"]]
    groups = {"not turned": [a for a in angles if float(a) == 0], "turned": [a for a in angles if float(a) != 0]}

    def show(runs: Any, column: str, some: Sequence[str]) -> str:
        if not some:
            return "–"
        _, _, scale, digits = COLUMNS[column]
        gaps = [
            scale * fmean(run["by_angle"][a][column] - own["by_angle"][a][column] for a in some)
            for run, own in zip(runs, rows[rival], strict=True)
        ]
        return paper.cell(gaps, digits, sign="+") + paper.marks(runs)

    columns: dict[str, Any] = {
        f"{COLUMNS[column][1]}\n{title}": lambda runs, column=column, some=some: show(runs, column, some)
        for column in ("nll", "ece")
        for title, some in groups.items()
    }
    for name in ("temperature", "sharpness"):
        columns[name] = lambda runs, name=name: " / ".join(f"{run[name]:.2g}" for run in runs if name in run) or "1"
    caption = (
        "difference on the same networks, mean ± standard error over networks; negative helps. turned: mean over all "
        f"angles but 0. {paper.OPEN_CAPTION}"
    )
    others = {rival, *found["ensembles"], *(title + CALIBRATED for title in found["ensembles"])}
    lines = {paper.title_of(key): runs for key, runs in rows.items() if key not in others}
    return table(f"Instead of the {paper.title_of(rival)}", lines, columns, caption)


def draw_rotations(path: Path, found: Found) -> None:
    """NLL and ECE against the angle: networks in gray, Laplace in color, scaled and calibrated ones dashed."""
    angles = found["angles"]
    with plots.figure(path, 2, width=4.6, height=3.4) as axes:
        for ax, (column, name) in zip(axes, {"nll": "NLL", "ece": "ECE"}.items(), strict=True):
            for key, runs in found["rows"].items():
                values = [fmean(run["by_angle"][f"{a:g}"][column] for run in runs) for a in angles]
                dashes: Any = (0, (2, 2)) if key.endswith((CALIBRATED, SCALED)) else "-"
                kind = [k for k, part in enumerate(("/single", "/diag", "/last_layer")) if part in key]
                style = paper.style_of(key) | {"linestyle": dashes, "marker": "osD^"[len(kind) and kind[-1] + 1]}
                if (title := key.removesuffix(CALIBRATED)) in found["ensembles"]:
                    style |= {"color": plots.PURPLE, "marker": "v<>"[found["ensembles"].index(title) % 3]}
                ax.plot(angles, values, label=paper.in_latex(paper.title_of(key)) + paper.marks(runs), **style)
            ax.set(title=name, xlabel="rotation of the test images (degrees)", xticks=angles)
            ax.set_ylim(bottom=0)
        axes[0].set_ylabel("nats, mean over networks")
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=6)
