"""The report of the main table: numbers with intervals, controls, the paper's claims answered, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from tu_symmetry.experiments.symmetry_aware.evaluation import MULTI, ONE
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import CommandTable
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Answer, Found, Report, answered, table

COLUMNS = {
    "mmd": "MMD ↓",
    "ns": "NS ↓",
    "accuracy": "Acc % ↑",
    "ece": "ECE % ↓",
    "ace": "ACE % ↓",
    "top_label_ace": "top-label ACE % ↓",
    "brier": "Brier % ↓",
    "aupr": "AUPR % ↑",
    "fpr95": "FPR95 % ↓",
    "id_mi": "ID MI ↓",
    "ood_mi": "OOD MI ↑",
}
LOWER = {"ece", "ace", "top_label_ace", "brier", "fpr95"}  # what is better when it is less
CALIBRATION = ("ece", "ace", "brier")
DETECTION = ("aupr", "fpr95")
PERCENT = ("accuracy", *CALIBRATION, "top_label_ace", *DETECTION)
CONTROLS = {
    "MMD, equal sizes": "mmd_equal",
    "NS, equal sizes": "ns_equal",
    "NS, aligned": "ns_aligned",
    "NS, aligned, equal sizes": "ns_aligned_equal",
}
_ALPHA = 0.05


def report(out: Path, recipe: str, evaluation: Path) -> Outcome:
    """Write ``report.md`` and its figures from what :func:`evaluate` has left in its folder."""
    page, found = Report(out, recipe), Outcome.load(evaluation).results
    page.add(*tables(page.table, found))
    claims = answered(page.table.claims, ANSWERS, found)
    body = [[one.verdict, page.table.claims[name], one.evidence] for name, one in claims.items()]
    page.add(Grid("The paper's claims", ["", "claim", "evidence"], body))
    pairs = "Each point is a pair of reference networks."
    removal = (
        "Distribution of the first layer's weights before and after the paper's removal, one method a panel; dotted: "
        "the reference."
    )
    where, uniform = "Where a layer's largest weight is", "Uniform for independent networks."
    alt = "pairwise mutual information"
    page.figure("diversity", draw_diversity, found["pairs"], title="Diversity", alt=alt, after=pairs)
    page.figure("discrepancy", draw_discrepancy, _rows(found), title="MMD against NS")
    page.figure("marginals", draw_marginals, found["marginals"], title="Marginals", after=removal)
    page.figure("largest", draw_largest, found, title=where, alt="largest weights", after=uniform)
    return page.done()


def tables(recipe: CommandTable, found: Found) -> list[Grid]:
    """The main table with intervals, above the paper's numbers; its controls; the choice of the mode; distances."""
    rows, networks = _rows(found), found["networks"]
    first = next(iter(rows.values()))

    def main(row: str, column: str) -> str:
        value, low, high = _interval(rows[row], column)
        theirs = recipe.paper.get(column, {}).get(row)
        return f"{value} [{low}, {high}]" + ("" if theirs is None else f"\n{theirs:g}")

    caption = (
        f"{networks['row']} networks in each row, {networks['reference']} in the reference; brackets: 95 % bootstrap "
        f"intervals (networks or whole runs for MMD and NS, points for the others). MMD and NS times 100, squared, "
        f"{first['mmd']['aggregation']}; NS: {first['ns']['removed']}. MI in hundredths of a nat."
        + (" Second lines: the paper's." if recipe.paper else "")
    )
    columns: dict[str, Any] = {name: lambda row, c=c: main(row, c) for c, name in COLUMNS.items()}
    made = [table(recipe.title, {row: row for row in rows}, columns, caption)]
    columns = {
        name: lambda e, c=c: f"{100 * e[c]['value']:.2f} (p {e[c]['p_value']:.3f})" for name, c in CONTROLS.items()
    }
    sizes = " and ".join(map(str, first["mmd_equal"]["sizes"]))
    caption = f"times 100; equal sizes: {sizes} networks; aligned: {first['ns_aligned']['removed']}"
    made.append(table("Controls of MMD and NS", rows, columns, caption))
    columns = {
        COLUMNS[c]: lambda entries, c=c: " / ".join(_interval(e, c)[0] for e in entries)
        for c in ("mmd", "ns", "accuracy", "ece")
    }
    several = {row: entries for row, entries in found["rows"].items() if len(entries) > 1}
    made.append(table("The choice of the mode", several, columns, "by run"))
    columns = {
        "aligned L2": lambda e: f"{e['quotient']['aligned_l2']:.2f}",
        "within the row": lambda e: f"{e['quotient']['within'][0]:.2f}",
        "energy": lambda e: f"{e['quotient']['energy']:.3f}",
        "sliced Wasserstein": lambda e: f"{e['quotient']['sliced_wasserstein']:.4f}",
    }
    within = f"within the reference {first['quotient']['within'][1]:.2f}"
    caption = f"between a row and the reference, {first['quotient']['removed']}; {within}"
    made.append(table("On the quotient space", rows, columns, caption))
    if "agreement" in first:
        columns = {
            "agreement % ↑": lambda e: f"{100 * e['agreement']:.2f}",
            "total variation ↓": lambda e: f"{e['total_variation']:.4f}",
        }
        made.append(table("Against the trusted predictive", rows, columns))
    return made


def _interval(entry: Found, column: str) -> tuple[str, ...]:
    test = entry[column]
    values = (test["value"], *test["interval"]) if column in ("mmd", "ns") else test
    digits = 1 if column in PERCENT else 2
    return tuple("–" if v is None else f"{100 * v:.{digits}f}" for v in values)


def _rows(found: Found) -> dict[str, Any]:
    return {row: entries[0] for row, entries in found["rows"].items()}


def _multi_is_better(found: Found, columns: Sequence[str]) -> Answer:
    """Each method against itself with one mode: better in every column, and apart from chance in most."""
    rows = _rows(found)
    methods = [r.partition("/")[2] for r in rows if r.startswith(ONE) and f"{MULTI}/{r.partition('/')[2]}" in rows]
    better, clear = 0, 0
    worse: dict[str, float] = {}
    for method in methods:
        for column in columns:
            one, many = rows[f"{ONE}/{method}"][column], rows[f"{MULTI}/{method}"][column]
            gain = (many[0] - one[0]) * (-1 if column in LOWER else 1)
            apart = many[1] > one[2] or many[2] < one[1]
            better += gain > 0
            clear += gain > 0 and apart
            if gain < 0 and apart:
                worse[f"{method} {COLUMNS[column].rstrip(' %↑↓')} {one[0]:.3f} → {many[0]:.3f}"] = gain
    total = len(methods) * len(columns)
    evidence = f"better in {better} of {total} comparisons, with disjoint intervals in {clear}"
    evidence += f"; worse with such in {len(worse)}, most in {min(worse, key=lambda w: worse[w])}" if worse else ""
    verdict = "holds" if better == total and clear > 0 else "fails" if worse or better <= total / 2 else "undecided"
    return Answer(verdict, evidence)


def _uncorrelated(found: Found) -> Answer:
    """Spearman's rank correlation over the rows of each quality with each column of performance."""
    rows, strong = _rows(found), []
    for quality in ("mmd", "ns"):
        for column in PERCENT:
            rho, p = spearmanr(*zip(*((r[quality]["value"], r[column][0]) for r in rows.values()), strict=True))
            if p < _ALPHA / (2 * len(PERCENT)):
                strong.append(f"{COLUMNS[quality].rstrip(' ↓')} with {COLUMNS[column].rstrip(' %↑↓')} {rho:+.2f}")
    evidence = f"Spearman over {len(rows)} rows, significant after Bonferroni: {', '.join(strong) or 'none'}"
    return Answer("fails" if strong else "holds", f"{evidence} (of {2 * len(PERCENT)})")


def _ranking(found: Found) -> Answer:
    """Pairs of rows that MMD and NS order differently, intervals disjoint both times; a tenth of all is a change."""
    rows, turned, sure = _rows(found), 0, []
    for a, b in combinations(rows, 2):
        tests = [(rows[a][name], rows[b][name]) for name in ("mmd", "ns")]
        plain, removed = (x["value"] - y["value"] for x, y in tests)
        if plain * removed < 0:
            turned += 1
            ends = [(x["interval"], y["interval"]) for x, y in tests]
            if all(x[1] < y[0] or y[1] < x[0] for x, y in ends):
                sure.append(f"{a} and {b}")
    total = len(rows) * (len(rows) - 1) // 2
    evidence = f"{turned} of {total} pairs change their order, {len(sure)} with disjoint intervals before and after"
    evidence += f" ({'; '.join(sure[:4])})" if sure else ""
    return Answer("holds" if 10 * len(sure) >= total else "undecided" if turned else "fails", evidence)


def _dispersion(found: Found) -> Answer:
    """The standard deviation over pairs, in nats, on OOD data against test data, and both relative to the mean."""
    words, greater, relative = [], [], []
    for name, d in found["diversity"].items():
        inside, outside = d["id_mean"] * d["id_dispersion"], d["ood_mean"] * d["ood_dispersion"]
        ratios = outside / inside, d["ood_dispersion"] / d["id_dispersion"]
        words.append(f"{name} {ratios[0]:.1f}, {ratios[1]:.1f}")
        greater.append(outside > inside)
        relative.append(d["ood_dispersion"] > d["id_dispersion"])
    verdict = "holds" if all(greater) and all(relative) else "undecided" if all(greater) else "fails"
    return Answer(verdict, f"deviation out over in, in nats and relative to the mean: {'; '.join(words)}")


def _weak(found: Found) -> Answer:
    words, largest, least = [], 0.0, 1.0
    for name, d in found["diversity"].items():
        low, high = d["correlation_interval"]
        if None in (d["correlation"], low, high):  # of three networks, say
            return Answer("undecided", f"{name}: too few pairs for a correlation and its interval")
        words.append(f"{name}: {d['correlation']:+.2f} [{low:+.2f}, {high:+.2f}]")
        largest = max(largest, abs(d["correlation"]))
        least = min(least, 0.0 if low < 0 < high else min(abs(low), abs(high)))
    verdict = "holds" if largest < 0.5 else "fails" if least > 0.5 else "undecided"
    return Answer(verdict, f"Pearson's correlation over the pairs, weak below 0.5: {', '.join(words)}")


def _corollary(found: Found) -> Answer:
    """Accepted for independent networks, rejected for what comes from one run."""
    rows = {row: entry["homogeneity"]["p_value"] for row, entry in _rows(found).items()}
    independent = {"reference": found["homogeneity"]["p_value"]} | {r: p for r, p in rows.items() if "ensemble" in r}
    single = {row: p for row, p in rows.items() if row.startswith(ONE)}
    least, largest = min(independent.values()), max(single.values())
    words = f"p of independent networks: {least:.3f} or more; of rows with one mode: {largest:.3f} or less"
    return Answer("holds" if least > _ALPHA >= largest else "fails", words)


ANSWERS = {
    "calibration": lambda found: _multi_is_better(found, CALIBRATION),
    "detection": lambda found: _multi_is_better(found, DETECTION),
    "diversity": lambda found: _multi_is_better(found, ("id_mi", "ood_mi")),
    "correlation": _uncorrelated,
    "ranking": _ranking,
    "dispersion": _dispersion,
    "weakly_correlated": _weak,
    "corollary": _corollary,
}


def draw_diversity(path: Path, pairs: Found) -> None:
    """Mutual information of pairs of networks on OOD data against that on test data, a panel for each OOD set."""
    with plots.figure(path, len(pairs)) as axes:
        for ax, (name, (inside, outside)) in zip(axes, pairs.items(), strict=True):
            ax.scatter(inside, outside, s=4, alpha=0.4, color=plots.BLUE, linewidths=0)
            ax.set(title=name, xlabel="ID mutual information (nats)", ylabel="OOD mutual information (nats)")


def draw_discrepancy(path: Path, rows: Found) -> None:
    """NS against MMD of every row with its intervals; axes are linear up to 1 and logarithmic beyond."""
    marks = dict(zip(sorted({row.partition("/")[2] for row in rows}), "osD^vPX*<>dph8" * 9, strict=False))
    with plots.figure(path, 1, width=5.6, height=3.8) as (ax,):
        for row, entry in rows.items():
            modes, _, method = row.partition("/")
            color = plots.ORANGE if modes.startswith("one") else plots.BLUE
            (x, across), (y, along) = ((100 * entry[k]["value"], _reach(entry[k])) for k in ("mmd", "ns"))
            style: Found = {"fmt": marks[method], "elinewidth": 0.8, "label": f"{modes}: {method}"}
            ax.errorbar(x, y, along, across, color=color, **style)
        ax.plot((0, 200), (0, 200), color=plots.GRAY, linewidth=0.9, linestyle=(0, (3, 2)), label="NS = MMD")
        ax.set_xscale("symlog", linthresh=1)
        ax.set_yscale("symlog", linthresh=1)
        ax.set(title="Distance to the reference", xlim=(-0.5, 110), ylim=(-0.5, 110))
        ax.set(xlabel="MMD as sampled, times 100", ylabel="NS: MMD without symmetries, times 100")
        ax.set(xticks=(0, 1, 10, 100), xticklabels=(0, 1, 10, 100), yticks=(0, 1, 10, 100), yticklabels=(0, 1, 10, 100))
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)


def _reach(test: Found) -> list[list[float]] | None:
    low, high = test["interval"]
    if low is None or high is None:
        return None
    return [[100 * max(0.0, test["value"] - low)], [100 * max(0.0, high - test["value"])]]


def draw_marginals(path: Path, marginals: Found) -> None:
    """Distributions of the first layer's weights before and after the removal of symmetries, six panels a line."""
    reference, *names = marginals["sets"]
    lines = -(-len(names) // 6)
    with plots.grid(path, lines, -(-len(names) // lines), 2.1, 2.1, sharex=True, sharey=True) as axes:
        for ax in axes.flat[len(names) :]:
            ax.set_axis_off()
        for ax, name in zip(axes.flat, names, strict=False):
            for when, color in (("before", plots.GRAY), ("after", plots.BLUE)):
                dotted, line = (_density(marginals["sets"][n][when], marginals["levels"]) for n in (reference, name))
                ax.plot(*dotted, color=color, linestyle=":", linewidth=1.2, label=f"reference, {when}")
                ax.plot(*line, color=color, label=f"method, {when}")
            ax.set_title(name.replace("/", ": "), fontsize=8)
        ax.figure.supxlabel("weight of the first layer")
        ax.figure.supylabel("density")
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4)


def _density(quantiles: Sequence[float], levels: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """A smoothed density from quantiles, good enough to look at."""
    grid = np.linspace(quantiles[0], quantiles[-1], 25)
    cdf = np.interp(grid, np.asarray(quantiles), np.asarray(levels))
    return (grid[1:] + grid[:-1]) / 2, np.diff(cdf) / np.maximum(np.diff(grid), 1e-12)


def draw_largest(path: Path, found: Found) -> None:
    """Which unit has the largest weight of its layer, sample by sample: reference, ensemble, last row of one mode."""
    rows = {row: entry["homogeneity"] for row, entry in _rows(found).items()}
    chosen = [*[row for row in rows if "ensemble" in row][:1], *[row for row in rows if row.startswith(ONE)][-1:]]
    panels = {"reference": found["homogeneity"]} | {row: rows[row] for row in chosen}
    colors = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE) * 9
    with plots.figure(path, len(panels)) as axes:
        for ax, (name, entry) in zip(axes, panels.items(), strict=True):
            for (group, largest), color in zip(entry["largest"].items(), colors, strict=False):
                share = [i / max(1, len(largest["counts"]) - 1) for i in largest["index"]]
                label = f"{group} (p {largest['p_value']:.3f})"
                ax.plot(share, ".", color=color, markersize=2, label=label)
            ax.set(title=name, xlabel="sample", ylabel="unit, as a share of the layer")
            ax.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, markerscale=3)
