"""What brings a compact posterior above one of its members: matching, width, training, statistics, calibration."""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tu_symmetry as tus
from benchmarks._measure import in_own_process
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.alignment.repair import repair
from tu_symmetry.alignment.straight_through import straight_through_matching
from tu_symmetry.evaluation import Batches, mean_probabilities
from tu_symmetry.posterior.assessment import TEMPERATURES, assessed, predictive_scores
from tu_symmetry.posterior.compact import CompactPosterior, sample_low_rank
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State, stack_states, unstack

_MEMBERS, _DRAWS, _SEEDS = 8, 30, 2
_TRAIN, _HELD_OUT = 1000, 400  # the other 397 judge
_CASES = ((96, 10), (96, 100), (384, 10), (384, 100))  # width, epochs
RIVALS = ("ensemble", "one member", "one member with noise")
Record = dict[str, Any]


def run(settings: Settings) -> Section:
    """Every width, length of training and seed in a process of its own; a quick run stays in this process."""
    records: list[Record] = []
    for seed in range(1 if settings.quick else _SEEDS):
        for width, epochs in ((8, 1),) if settings.quick else _CASES:
            settings.say(f"width {width}, {epochs} epochs, seed {seed}")
            if settings.quick:
                records.append(measure(width, epochs, seed, members=2, draws=2))
            else:
                arguments = (str(width), str(epochs), str(seed), str(torch.get_num_threads()))
                records.append(in_own_process("benchmarks.compact", *arguments))
    return section(records)


def section(records: list[Record]) -> Section:
    """Means over the seeds, and whether anything beats one member."""
    kinds = list(dict.fromkeys((r["width"], r["epochs"]) for r in records))
    rows, behind = [], {}
    for name in records[0]["scores"]:
        cells = []
        for kind in kinds:
            own = [r["scores"] for r in records if (r["width"], r["epochs"]) == kind]
            mean = {key: statistics.mean(s[name][key] for s in own) for key in own[0][name]}
            cells.append(
                f"{mean['accuracy']:.3f} / {mean['nll']:.3f}" + (f" ({mean['hot']:.3f})" if "hot" in mean else "")
            )
            if name not in RIVALS:
                behind[name, kind] = mean["nll"] - statistics.mean(s["one member"]["nll"] for s in own)
        rows.append([name, *cells])
    text = (
        f"{_MEMBERS} networks 64-w-w-w-10 without normalization on {_TRAIN:,} digits (Adam, rate 1e-3, batches "
        f"of 100). Cells are means over the seeds: accuracy / NLL (nats) of the mean "
        f"predictive on 397 test images, of {_DRAWS} draws for q_r, q_d and the noise; there with the variances times "
        f"the temperature that is best on {_HELD_OUT} held-out images, and in parentheses the NLL at temperature 1. "
        "*One member*: the first. *Noise*: that member with isotropic noise of q_r's rms. *Straight-through*: matching "
        "that is learned by the loss of midpoints. *REPAIR*: each draw gets the statistics of the aligned networks' "
        "hidden units, on 300 training images. *Low rank*: draws with the covariance of the aligned networks (rank "
        f"{_MEMBERS - 1}, storage of all {_MEMBERS}) in place of its diagonal."
    )
    counts = [len([r for r in records if (r["width"], r["epochs"]) == kind]) for kind in kinds]
    header = ["", *(f"w {w}, {e} epochs, seeds {n}" for (w, e), n in zip(kinds, counts, strict=True))]
    goals = []
    for what, wanted in (("diagonal", False), ("low-rank", True)):
        own = {key: value for key, value in behind.items() if ("low rank" in key[0]) == wanted and key[0] != "q_d"}
        (name, (width, epochs)), least = min(own.items(), key=lambda item: item[1])
        found = f"{least:+.3f} nats against the member at best ({name}, w {width}, {epochs} epochs)"
        goals.append(Goal(f"some {what} q_r has a lower NLL than one member", least < 0, found))
    return Section(
        "The compact posterior and one member",
        text,
        [Grid("Accuracy / NLL on digits", header, rows)],
        goals,
        records,
        ("scikit-learn",),
    )


def measure(width: int, epochs: int, seed: int, *, members: int = _MEMBERS, draws: int = _DRAWS) -> Record:
    """Networks that are trained apart, and their posteriors by each way of making one."""
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = (x[order] / 16).float(), y[order]
    ends = (slice(_TRAIN), slice(_TRAIN, _TRAIN + _HELD_OUT), slice(_TRAIN + _HELD_OUT, None))
    train, held_out, test = (Batches(x[rows], y[rows], 1000) for rows in ends)
    model = network(width)
    states = [trained(width, epochs, 100 * seed + k, train) for k in range(members)]
    graph = tus.discover_symmetries(model, x[:2])
    straight = [states[0]]
    for state in states[1:]:
        batches = Batches(train.x, train.y, 100)
        p = straight_through_matching(graph, model, states[0], state, batches, cross_entropy).permutation
        straight.append(tus.apply_permutation(graph, p, state))
    sets = {
        "q_d": states,
        "q_r, weights": tus.align(graph, states).states,
        "q_r, activations": tus.align(graph, states, match_on="activations", model=model, dataloader=train).states,
        "q_r, straight-through": straight,
    }
    fits = {name: CompactPosterior.from_states(own, graph, align=False) for name, own in sets.items()}
    generator = torch.Generator().manual_seed(seed)
    noisy = fits["q_r, activations"].isotropic(states[0]).sample(draws, generator=generator)
    rivals = dict(zip(RIVALS, (stack_states(states), stack_states(states[:1]), noisy), strict=True))
    scores = {name: judged(model, own, states, test) for name, own in rivals.items()}
    beside = {name: mean_probabilities(model, own, held_out) for name, own in rivals.items()}

    def add(name: str, draw: Callable[[float], list[State]]) -> None:
        heated = {t: mean_probabilities(model, stack_states(draw(t)), held_out) for t in TEMPERATURES}
        best = assessed(beside, heated, held_out.y, members).temperature
        plain, scores[name] = (judged(model, stack_states(draw(t)), states, test) for t in (1.0, best))
        scores[name] |= {"hot": plain["nll"], "temperature": best}

    few, shares = [train.x[:300]], [1 / members] * members
    same = generator.clone_state()
    low_rank = {
        name: unstack(sample_low_rank(sets[name], graph, draws, generator=g))
        for name, g in (("q_r, weights", same), ("q_r, activations", generator))
    }
    for name, q in fits.items():
        aligned, forms = sets[name], {name: unstack(q.sample(draws, generator=generator))}
        if name in low_rank:
            forms[f"{name}, low rank"] = low_rank[name]
        for form, own in forms.items():

            def heated(t: float, own: list[State] = own, mean: State = q.mean) -> list[State]:
                return [{n: torch.lerp(mean[n], part, t**0.5) for n, part in draw.items()} for draw in own]

            def repaired(t: float, heated: Any = heated, aligned: list[State] = aligned) -> list[State]:
                return [repair(model, aligned, shares, draw, few) for draw in heated(t)]

            add(form, heated)
            if name in low_rank:
                add(f"{form}, REPAIR", repaired)
    return {"width": width, "epochs": epochs, "seed": seed, "scores": scores}


def judged(model: nn.Module, stack: State, states: list[State], test: Batches) -> dict[str, float]:
    """Scores of a mean predictive on the test images."""
    reference = mean_probabilities(model, stack_states(states), test)
    return predictive_scores(mean_probabilities(model, stack, test), reference, test.y)


def network(width: int) -> nn.Sequential:
    """Three hidden layers."""
    hidden = [[nn.Linear(inputs, width), nn.ReLU()] for inputs in (64, width, width)]
    return nn.Sequential(*(layer for pair in hidden for layer in pair), nn.Linear(width, 10))


def trained(width: int, epochs: int, seed: int, data: Batches) -> dict[str, Tensor]:
    """The weights of one network."""
    torch.manual_seed(seed)
    model = network(width)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.x)).split(100):
            optimizer.zero_grad()
            cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def main(width: str, epochs: str, seed: str, threads: str) -> None:
    """One case, as JSON on the last line."""
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    print(json.dumps(measure(int(width), int(epochs), int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
