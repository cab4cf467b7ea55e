"""The report: answers to the claims, barriers as bars, two tables and the losses along the paths for each kind."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tu_symmetry.alignment.repair import Correction
from tu_symmetry.configs import ConfigError
from tu_symmetry.experiments.rebasin.barriers import CORRECTIONS
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Answer, Found, Report, answered, table

METHODS = {
    "none": "no permutation",
    "weights": "weights",
    "signed": "weights, signed",
    "rotated": "weights, rotated",
    "activations": "activations",
    "straight_through": "straight-through",
    "straight_through_signed": "straight-through, signed",
    "straight_through_rotated": "straight-through, rotated",
    "universe": "universe",
}
SHORT = {"none": "uncorrected", "batchnorm": "BN", "repair": "REPAIR"}
LEGEND = {"none": "no correction", "batchnorm": "BatchNorm statistics re-estimated", "repair": "REPAIR"}
_IN_ORDER = (
    plots.GRAY,
    plots.BLUE,
    "#56B4E9",
    "#E69F00",
    plots.ORANGE,
    plots.GREEN,
    "#8FD175",
    "#00441B",
    plots.PURPLE,
)
COLORS = dict(zip(METHODS, _IN_ORDER, strict=True))
SHADES = dict(zip(CORRECTIONS, (0.3, 0.6, 1.0), strict=True))  # the share of a method's color


def report(out: Path, recipe: str, networks: dict[str, Path], narrow: str = "", wide: str = "") -> Outcome:
    """Write ``report.md`` with tables and figures, and answer the claims of the recipe from what was measured.

    Args:
        networks: kind of network, as the report names it, to the folder of its `measure`.
        narrow: the kind that the claim about widths starts from, if the recipe has it.
        wide: the kind that is wider.
    """
    page = Report(out, recipe)
    found = {title: Outcome.load(folder).results for title, folder in networks.items()}
    for kind in (narrow, wide):
        if kind and kind not in found:
            raise ConfigError(f"{kind!r} is none of the networks: {', '.join(map(repr, found))}")
    page.figure("barriers", draw_barriers, found)
    claims = answered(page.table.claims, ANSWERS, found, narrow, wide)
    text = "A case is a kind of network and a method of matching (for widths, a method)."
    items = [f"* {page.table.claims[name]} **{one.verdict}.** {one.evidence}." for name, one in claims.items()]
    page.add("\n".join([f"## Claims\n\n{text}\n", *items]))
    page.grids.append(table("Claims", claims, {"in these runs": lambda one: one.verdict}, text))
    if paper := page.table.paper:
        columns = {name: lambda row, name=name: f"{row[name]:.2f}" for name in next(iter(paper.values()))}
        page.add(table(f"Published barriers, {page.table.source}", paper, columns, "of other networks on other data"))
    for title, one in found.items():
        page.add(f"## {title}")
        page.add(barrier_table(title, one), accuracy_table(title, one), heading=False)
        file = f"paths-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"
        page.figure(file, draw_paths, one, alt="losses along the paths")
    return page.done()


def barriers(found: Found, method: str, correction: str = "batchnorm", *, tempered: bool = False) -> list[float]:
    """Barriers in nats of all pairs; infinite where a network on the path has no finite loss."""
    key = "tempered_barrier" if tempered else "barrier"
    return [_finite(path[key]) for path in found["methods"][method]["paths"][correction]]


def corrections(found: Found) -> list[Correction]:
    """The corrections of statistics that were measured: none but "none" without batch normalization."""
    return list(found["methods"]["none"]["paths"])


def _finite(value: float | None) -> float:
    """A number as results hold it, where None is one that is not finite."""
    return math.inf if value is None else value


def _matchings(found: Found) -> list[str]:
    """The methods that were measured, without the control."""
    return [method for method in found["methods"] if method != "none"]


def _answer(held: list[bool], what: str, words: list[str]) -> Answer:
    count, total = sum(held), len(held)
    number = "none" if count == 0 else "all" if count == total else count
    return Answer(f"Held in {number} of {total} cases", f"{what}: {'; '.join(words)}")


def _width(networks: Mapping[str, Found], narrow: str, wide: str) -> Answer:
    before, after = networks[narrow], networks[wide]
    held, words = [], []
    for method in METHODS:
        if method in before["methods"] and method in after["methods"]:
            a, b = (fmean(barriers(one, method)) for one in (before, after))
            words.append(f"{METHODS[method]} {a:.2f} → {b:.2f}")
            held += [b < a] if method != "none" else []
    what = f"{narrow} → {wide}, statistics re-estimated, mean barrier in nats"
    return _answer(held, what, [", ".join(words)])


def _correction(networks: Mapping[str, Found], narrow: str, wide: str) -> Answer:
    held, words = [], []
    for title, found in networks.items():
        reductions = {}
        for method in _matchings(found):
            plain, after = (fmean(barriers(found, method, correction)) for correction in ("none", "repair"))
            reductions[METHODS[method]] = 1 - after / plain if 0 < plain < math.inf else math.nan
        held += [0.6 <= value <= 1 for value in reductions.values()]
        words.append(f"{title}: {', '.join(f'{name} {100 * value:.0f} %' for name, value in reductions.items())}")
    return _answer(held, "reduction of the mean barrier by REPAIR", words)


def _permutation(networks: Mapping[str, Found], narrow: str, wide: str) -> Answer:
    held, words = [], []
    for title, found in networks.items():
        control, *matched = (fmean(barriers(found, m, tempered=True)) for m in ("none", *_matchings(found)))
        held += [value < control for value in matched]
        values = (f"{METHODS[m]} {value:.2f}" for m, value in zip(_matchings(found), matched, strict=True))
        words.append(f"{title}: no permutation {control:.2f}, {', '.join(values)}")
    return _answer(held, "mean barrier in nats, statistics re-estimated and temperature tuned", words)


def _reference(networks: Mapping[str, Found], narrow: str, wide: str) -> Answer:
    held, words = [], []
    for title, found in networks.items():
        values = []
        for method in _matchings(found):
            measured = list(zip(found["pairs"], barriers(found, method), strict=True))
            reference = [value for (i, _), value in measured if i == 0]
            others = [value for (i, _), value in measured if i > 0]
            if others:
                held.append(fmean(others) <= max(reference))
                values.append(f"{METHODS[method]} {min(reference):.2f} to {max(reference):.2f} and {fmean(others):.2f}")
        words.append(f"{title}: {', '.join(values)}")
    what = "barriers in nats with the first network, and mean barrier of the other pairs, statistics re-estimated"
    return _answer(held, what, words)


def _over(first: str, second: str) -> Callable[[Mapping[str, Found], str, str], Answer]:
    """Whether one method of matching has lower barriers than another one, pair by pair."""

    def answer(networks: Mapping[str, Found], narrow: str, wide: str) -> Answer:
        held, words = [], []
        for title, found in networks.items():
            if not {first, second} <= found["methods"].keys():
                continue
            before, after = (barriers(found, method, "none") for method in (first, second))
            gains = [b - a for a, b in zip(before, after, strict=True)]
            held += [gain < 0 for gain in gains]
            spread = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
            words.append(f"{title}: {fmean(before):.3f} → {fmean(after):.3f}, {fmean(gains):+.3f} ± {spread:.3f}")
        return _answer(
            held, "cases are pairs; mean barrier in nats, its change with the standard error over pairs", words
        )

    return answer


def _low(networks: Mapping[str, Found], narrow: str, wide: str) -> Answer:
    """Whether trained rotations leave less than a tenth of the barrier between a network and the first one."""
    held, words = [], []
    for title, found in networks.items():
        if "straight_through_rotated" in found["methods"]:
            control, after = (barriers(found, method, "none") for method in ("none", "straight_through_rotated"))
            matched = [(a, b) for (i, _), a, b in zip(found["pairs"], after, control, strict=True) if i == 0]
            held += [a < 0.1 * b for a, b in matched]
            words.append(f"{title}: {fmean(b for _, b in matched):.3f} → {fmean(a for a, _ in matched):.3f}")
    what = "cases are pairs with the first network, low is below a tenth of what it is unmatched; mean barrier in nats"
    return _answer(held, what, words)


ANSWERS = {
    "width": _width,
    "correction": _correction,
    "permutation": _permutation,
    "reference": _reference,
    "signs": _over("weights", "signed"),
    "rotations": _over("signed", "rotated"),
    "learned": _over("weights", "straight_through"),
    "learned_signs": _over("straight_through", "straight_through_signed"),
    "learned_rotations": _over("straight_through_signed", "straight_through_rotated"),
    "low": _low,
}


def barrier_table(title: str, found: Found) -> Grid:
    """Barriers with temperature 1 and tuned, and what the matching did to the distance."""
    matching = found["matching"]

    def cell(method: str, correction: str, *, tempered: bool, first: bool | None = None) -> str:
        pairs = zip(found["pairs"], barriers(found, method, correction, tempered=tempered), strict=True)
        kept = [value for (i, _), value in pairs if first is None or first == (i == 0)]
        values = torch.tensor(kept, dtype=torch.float64, device="cpu")
        return f"{values.mean():.2f}" + (f"\n±{values.std():.2f}" if len(values) > 1 else "")

    columns: dict[str, Any] = {
        "NoT": lambda m: f"{fmean(matching['methods'][m]['transpositions'][1:]):.0f}",
        "L2": lambda m: f"{fmean(matching['methods'][m]['distances']):.1f}",
    }
    turned = any(sum(own["sign_changes"]) for own in matching["methods"].values())
    if turned:
        columns["signs"] = lambda m: f"{fmean(matching['methods'][m]['sign_changes'][1:]):.0f}"
    told = ""
    if len(corrections(found)) == 1 and len(found["pairs"]) > 1:
        names = {"matched": True, "others": False}
        columns |= {f"T = 1\n{n}": lambda m, w=w: cell(m, "none", tempered=False, first=w) for n, w in names.items()}
        told = "; matched: pairs with the first network, to which the others were matched"
    columns |= {f"T = 1\n{SHORT[c]}": lambda m, c=c: cell(m, c, tempered=False) for c in corrections(found)}
    columns |= {f"tuned T\n{SHORT[c]}": lambda m, c=c: cell(m, c, tempered=True) for c in corrections(found)}
    corrected = (
        "; BN: BatchNorm statistics re-estimated (where all hidden layers are normalized, REPAIR is just that)"
        if len(corrections(found)) > 1
        else ""
    )
    caption = (
        f"barriers of the test loss in nats, mean ± one standard deviation over {len(found['pairs'])} pairs; T: "
        f"softmax temperature, 1 or tuned at each point on held-out images{corrected}; NoT: transpositions relative to "
        f"the first network, mean over the others, {matching['largest_transpositions']} at most; L2: distance of the "
        f"weights, mean over pairs{'; signs: how many units turn' if turned else ''}{told}"
    )
    return table(f"{title}: barriers", {METHODS[m]: m for m in found["methods"]}, columns, caption)


def accuracy_table(title: str, found: Found) -> Grid:
    """Accuracy halfway between two networks, and of the mean of all, with its loss; below them ensemble and members."""
    members = found["members"]
    single, loss = (fmean(member[key] for member in members) for key in ("accuracy", "loss"))

    def halfway(measured: Found, c: str) -> str:
        return (
            f"{100 * fmean(path['middle_accuracy'] for path in measured['paths'][c]):.1f}" if measured["paths"] else ""
        )

    def mean(measured: Found, c: str) -> str:
        one = measured["mean"].get(c)
        return f"{100 * one['accuracy']:.1f}\n{_finite(one['loss']):.3f}" if one else ""

    columns: dict[str, Any] = {f"halfway\n{SHORT[c]}": lambda one, c=c: halfway(one, c) for c in corrections(found)}
    columns |= {f"mean\n{SHORT[c]}": lambda one, c=c: mean(one, c) for c in corrections(found)}
    caption = (
        f"test accuracy in %: halfway between two networks (mean over pairs), and of the mean of all "
        f"{len(members)} with its loss in nats below; single networks: {100 * single:.1f} %, {loss:.3f} nats; the "
        f"ensemble stores and runs all {len(members)}; best: by this loss"
    )
    rows = {METHODS[method]: measured for method, measured in found["methods"].items()}
    rivals = {"the ensemble": found["ensemble"], "the best member": min(members, key=lambda one: _finite(one["loss"]))}
    rows |= {name: {"paths": {}, "mean": {"none": one}} for name, one in rivals.items()}
    return table(f"{title}: merged networks", rows, columns, caption)


def draw_barriers(path: Path, networks: Mapping[str, Found]) -> None:
    """Barriers as bars, in the colors that the paths' lines have, darker for each correction.

    Dots are pairs: full ones with the first network, hollow ones of two others, which most methods match to the first
    network only. Black lines are means with tuned temperatures.
    """
    with plots.grid(path, 1, len(networks), 4.2, 3.4, sharey=True) as axes:
        for ax, (title, found) in zip(axes[0], networks.items(), strict=True):
            for m, correction in enumerate(corrections(found)):
                for k, method in enumerate(found["methods"]):
                    values, x = barriers(found, method, correction), k + 0.26 * (m - (len(corrections(found)) - 1) / 2)
                    ax.bar(x, fmean(values), 0.24, color=COLORS[method], alpha=SHADES[correction])
                    for (i, _), value in zip(found["pairs"], values, strict=True):
                        ax.plot(x, value, "ok", markersize=3.5, markerfacecolor="white" if i else "black")
                    tuned = fmean(barriers(found, method, correction, tempered=True))
                    ax.plot([x - 0.12, x + 0.12], [tuned, tuned], color="black", linewidth=1.5)
            ticks = [METHODS[method].replace(" ", "\n").replace("-", "-\n") for method in found["methods"]]
            ax.set_xticks(range(len(ticks)), ticks, fontsize=8)
            ax.set(title=title, xlabel="method of matching")
            ax.grid(axis="x", visible=False)
        shown = max(map(corrections, networks.values()), key=len)
        line = Line2D([], [], color="black", linewidth=1.5, label="mean, tuned temperature")
        handles = [*(Patch(color="black", alpha=0.75 * SHADES[c], label=LEGEND[c]) for c in shown), line]
        axes[0, 0].set(ylabel="barrier of the test loss (nats)", ylim=(0, axes[0, 0].get_ylim()[1] * 1.3))
        axes[0, -1].legend(handles=handles, loc="upper right")


def draw_paths(path: Path, found: Found) -> None:
    """Test loss along the paths between two networks of one kind, mean over pairs, a panel for each correction."""
    with plots.grid(path, 1, len(corrections(found)), 3.4, 3.1, sharey=True) as axes:
        for ax, correction in zip(axes[0], corrections(found), strict=True):
            for method, measured in found["methods"].items():
                losses = [[_finite(loss) for loss in p["loss"]] for p in measured["paths"][correction]]
                plots.band(ax, found["ratios"], losses, COLORS[method], METHODS[method], marker="o")
            ax.set(title=LEGEND[correction], xlabel=r"share $\lambda$ of the second network", xlim=(0, 1))
        axes[0, 0].set_ylabel("test loss (nats)")
        axes[0, -1].legend(loc="upper left", title="matched by", fontsize=7, title_fontsize=7)
        bottom, top = axes[0, 0].get_ylim()
        axes[0, 0].set_ylim(bottom, top + 0.13 * len(found["methods"]) * (top - bottom))
