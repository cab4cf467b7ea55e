"""What the paper claims of its table, each answered by ours: holds, fails, or not decided by the intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from tu_symmetry.experiments.symmetry_aware.evaluation import MULTI, ONE

LOWER = {"ece", "ace", "brier", "fpr95"}  # what is better when it is less
CALIBRATION = ("ece", "ace", "brier")
DETECTION = ("aupr", "fpr95")
_ALPHA = 0.05


class Answer(NamedTuple):
    """What was found of one claim.

    Attributes:
        verdict: ``holds``, ``fails``, or ``undecided``.
        evidence: the numbers, in a sentence.
    """

    verdict: str
    evidence: str


def answers(found: Mapping[str, Any]) -> dict[str, Answer]:
    """All claims, by the names that the recipe's ``claims`` use."""
    rows = {row: entries[0] for row, entries in found["rows"].items()}
    makers: dict[str, Callable[[], Answer]] = {
        "calibration": lambda: _multi_is_better(rows, CALIBRATION),
        "detection": lambda: _multi_is_better(rows, DETECTION),
        "diversity": lambda: _multi_is_better(rows, ("id_mi", "ood_mi")),
        "correlation": lambda: _uncorrelated(rows),
        "ranking": lambda: _ranking(rows),
        "dispersion": lambda: _dispersion(found["diversity"]),
        "weakly_correlated": lambda: _weak(found["diversity"]),
        "corollary": lambda: _corollary(found),
    }
    return {name: make() for name, make in makers.items()}


def _multi_is_better(rows: Mapping[str, Any], columns: Sequence[str]) -> Answer:
    """Each method against itself with one mode: better in every column, and apart from chance in most."""
    methods = [r.partition("/")[2] for r in rows if r.startswith(ONE) and f"{MULTI}/{r.partition('/')[2]}" in rows]
    better, clear, worse, words = 0, 0, 0, []
    for method in methods:
        for column in columns:
            one, many = rows[f"{ONE}/{method}"][column], rows[f"{MULTI}/{method}"][column]
            sign = -1 if column in LOWER else 1
            gain = sign * (many[0] - one[0])
            apart = many[1] > one[2] or many[2] < one[1]
            better += gain > 0
            clear += gain > 0 and apart
            worse += gain < 0 and apart
            if gain <= 0:
                words.append(f"{method} {column} {one[0]:.3f} → {many[0]:.3f}{' (apart)' if apart else ''}")
    total = len(methods) * len(columns)
    if not total:
        return Answer("undecided", "no method is in both halves of the table")
    evidence = f"better in {better} of {total} comparisons, with disjoint intervals in {clear}"
    evidence += f"; not in {', '.join(words)}" if words else ""
    verdict = "holds" if better == total and clear > 0 else "fails" if worse > 0 or better <= total / 2 else "undecided"
    return Answer(verdict, evidence)


def _uncorrelated(rows: Mapping[str, Any]) -> Answer:
    """Spearman's rank correlation over the rows of each quality with each column of performance."""
    strong, words = [], []
    for quality in ("mmd", "ns"):
        for column in ("accuracy", *CALIBRATION, *DETECTION):
            values = [(r[quality]["value"], r[column][0]) for r in rows.values()]
            rho, p = spearmanr(*zip(*values, strict=True))
            words.append(f"{quality}–{column} {rho:+.2f}")
            if p < _ALPHA / 12:  # twelve pairs
                strong.append(f"{quality}–{column}")
    evidence = f"Spearman over {len(rows)} rows: {', '.join(words)}; "
    evidence += f"significant after Bonferroni: {', '.join(strong) or 'none'}"
    return Answer("fails" if strong else "holds", evidence)


def _ranking(rows: Mapping[str, Any]) -> Answer:
    """Pairs of rows that plain MMD and NS order differently, and those whose intervals are disjoint both times."""
    turned, sure = [], []
    for a, b in combinations(rows, 2):
        plain, removed = ((rows[a][k], rows[b][k]) for k in ("mmd", "ns"))
        if (plain[0]["value"] - plain[1]["value"]) * (removed[0]["value"] - removed[1]["value"]) < 0:
            turned.append(f"{a} and {b}")
            if _apart(*plain) and _apart(*removed):
                sure.append(f"{a} and {b}")
    total = len(rows) * (len(rows) - 1) // 2
    evidence = (
        f"{len(turned)} of {total} pairs change their order, {len(sure)} with disjoint intervals before and after"
    )
    evidence += f" ({'; '.join(sure[:4])})" if sure else ""
    return Answer("holds" if sure else "fails" if not turned else "undecided", evidence)


def _apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a["interval"][1] < b["interval"][0] or b["interval"][1] < a["interval"][0]


def _dispersion(diversity: Mapping[str, Any]) -> Answer:
    """The standard deviation over pairs, in nats, on OOD data against test data, and both relative to the mean."""
    words, greater, relative = [], [], []
    for name, d in diversity.items():
        inside, outside = d["id_mean"] * d["id_dispersion"], d["ood_mean"] * d["ood_dispersion"]
        words.append(
            f"{name}: std {inside:.4f} nats in, {outside:.4f} out (relative {d['id_dispersion']:.2f}, "
            f"{d['ood_dispersion']:.2f})"
        )
        greater.append(outside > inside)
        relative.append(d["ood_dispersion"] > d["id_dispersion"])
    verdict = "holds" if all(greater) and all(relative) else "undecided" if all(greater) else "fails"
    return Answer(verdict, "; ".join(words) + ("" if all(relative) else "; relative to the mean it does not"))


def _weak(diversity: Mapping[str, Any]) -> Answer:
    words = [
        f"{n}: {d['correlation']:+.2f} [{d['correlation_interval'][0]:+.2f}, {d['correlation_interval'][1]:+.2f}]"
        for n, d in diversity.items()
    ]
    largest = max(abs(d["correlation"]) for d in diversity.values())
    least = min(
        0.0 if d["correlation_interval"][0] < 0 < d["correlation_interval"][1]
        else min(map(abs, d["correlation_interval"]))
        for d in diversity.values()
    )  # fmt: skip
    verdict = "holds" if largest < 0.5 else "fails" if least > 0.5 else "undecided"
    return Answer(verdict, f"Pearson's correlation over the pairs, weak below 0.5: {', '.join(words)}")


def _corollary(found: Mapping[str, Any]) -> Answer:
    """Accepted for independent networks, rejected for what comes from one run."""
    rows = {row: entries[0]["homogeneity"]["p_value"] for row, entries in found["rows"].items()}
    single = {row: p for row, p in rows.items() if row.startswith(ONE)}
    single |= {n: h["p_value"] for n, h in found["homogeneity"].items() if n != "reference"}
    independent = {"reference": found["homogeneity"]["reference"]["p_value"]}
    independent |= {row: p for row, p in rows.items() if "ensemble" in row}
    words = ", ".join(f"{n} p = {p:.3f}" for n, p in {**independent, **single}.items())
    accepted = all(p > _ALPHA for p in independent.values())
    rejected = all(p <= _ALPHA for p in single.values())
    return Answer("holds" if accepted and rejected else "fails", words)
