"""How far the posteriors of the two evidences are apart while a network trains: M(θ~) and M(θ*) at every snapshot.

The figure of the talk on arXiv 2206.08900 with the question whether θ~ becomes θ* if one only optimizes better. Its
distributions are here the Gaussian posteriors of the tangent model's outputs at single inputs, whose means are equal,
and the divergence is their 2-Wasserstein distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.experiments.linearized_laplace import rows as paper
from tu_symmetry.experiments.linearized_laplace.evidence import Settings, Trained, Work, groups_of
from tu_symmetry.experiments.linearized_laplace.rows import Choice, Groups, Runs, Where
from tu_symmetry.experiments.study import Images, followed
from tu_symmetry.laplace.function_posterior import gaussian_samples
from tu_symmetry.metrics.functional import gaussian_wasserstein, predictive_total_variation
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, verdict
from tu_symmetry.tables.outcome import Outcome, digest_tensors
from tu_symmetry.tables.report import Found, Report, table

WHERE: tuple[Where, ...] = ("map", "tangent_mode")
VANISHED = 0.1  # a distance below this share of the spread of M(θ*) counts as none
Epochs = Mapping[float, Runs]

# columns for each prior: title, where the number stands, scale and digits
DISTANCES = (
    ("distance\n{}", ("wasserstein",), 1, 2),
    ("relative\n{}", ("relative",), 1, 2),
    ("TV %\n{}", ("total_variation",), 100, 1),
)
SPREADS = (
    ("spread\nM(θ~), {}", ("map", "spread"), 1, 1),
    ("spread\nM(θ*), {}", ("tangent_mode", "spread"), 1, 1),
    ("θ* − θ~\nin deviations, {}", ("deviations",), 1, 1),
    ("θ* − θ~\nin %, {}", ("relative_norm",), 100, 1),
)
APART = "mean ± standard error over networks; distances of the outputs' posteriors in logits, mean over test images"
SPREAD = "mean ± standard error over networks; spreads in logits, deviations of M(θ*)'s posterior, % of the norm of θ~"


def measure_training(
    out: Path,
    networks: dict[str, Trained],
    data: ImageDataModule,
    priors: Sequence[Groups],
    settings: Settings,
    device: str = "auto",
) -> Outcome:
    """Distance of the two posteriors at every snapshot of every network, and how good network and predictives are.

    Snapshots are those of :class:`~tu_symmetry.callbacks.PosteriorSnapshots`, whose chains are networks. The data are
    those of the training, ``batch_size`` too, which says how many steps an epoch has, and ``val_size`` images for
    early stopping. Each snapshot is kept in the ``parts`` of ``out`` at once.
    """
    if not priors or set(priors) - paper.PRIORS.keys():
        raise ValueError(f"priors: name single, per_group or both, got {list(priors)}")
    images = Images(data, device)
    held_out = images.held_out("early stopping goes by")
    size = len(images.train.x) if data.batch_size in (None, "full") else int(data.batch_size or 0)
    per_epoch = math.ceil(len(images.train.x) / size)
    records = {name: own.store().records for name, own in networks.items()}
    for name, own in records.items():
        by_chain = {chain: [r.step for r in own if r.chain == chain] for chain in {r.chain for r in own}}
        if len({tuple(steps) for steps in by_chain.values()}) != 1:
            raise ValueError(f"{name}: its networks have snapshots at different steps, or none: {by_chain}")
    made_from = [asdict(settings), images.digest(), digest_tensors(*held_out), per_epoch]
    kept = {name: own.parts(out, *made_from, name) for name, own in networks.items()}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in networks}
    jobs = [(name, k, record) for name, own in records.items() for k, record in enumerate(own)]
    for (name, k, record), progress in followed("training", jobs, lambda job: job[0]):
        work = Work(networks[name], k, images, settings, progress=progress)
        found = kept[name].take(f"{name}-{record.chain}-{record.step}", _snapshot, work, held_out, priors)
        runs[name].append({"chain": record.chain, "step": record.step, "epoch": record.step / per_epoch} | found)
    every = [run[prior] for own in runs.values() for run in own for prior in priors]
    return Outcome(
        {
            "runs": runs,
            "priors": list(priors),
            "parameters": {name: own.size for name, own in networks.items()},
            "sizes": images.sizes,
        },
        f"{len(jobs)} snapshots; {sum(not row['converged'] for row in every)} of {len(every)} distances from an "
        "evidence that had not converged",
    )


def _snapshot(work: Work, held_out: tuple[Tensor, Tensor], priors: Sequence[Groups]) -> dict[str, Any]:
    """Network, posteriors and their distance, of one snapshot."""
    size = work.settings.batch_size
    found: dict[str, Any] = paper.network_scores(work.model, work.images, size)
    with torch.no_grad():
        logits = torch.cat([work.model(x) for x in held_out[0].split(size)])
    found["val_nll"] = float(cross_entropy(logits.double(), held_out[1]))
    return found | {prior: _distance(work, prior) for prior in priors}


def _distance(work: Work, prior: Groups) -> dict[str, Any]:
    """The two posteriors for one kind of prior."""
    facts: dict[str, Any] = {}
    covariances: list[Tensor] = []
    predictives: list[Tensor] = []

    for where in WHERE:
        la, result, _ = work.optimize(Choice(where, prior))
        moments = [la.function_covariance(x) for x, _ in work.test]
        mean, covariance = (torch.cat(own) for own in zip(*moments, strict=True))
        covariances.append(covariance)
        drawn = mean + gaussian_samples(covariance, work.settings.num_samples, 0)  # as predictive makes them
        predictives.append(drawn.softmax(-1).mean(0).double())
        facts[where] = {
            "converged": result.converged,
            "nll": paper.scores(predictives[-1], work.test.y)["nll"],
            "spread": float(_spread(covariance).mean()),
            "groups": groups_of(la),
        }
    distance = gaussian_wasserstein(*covariances)
    start = la.fitted.tangent.point()
    way = la.theta - start
    squared = (way.double() * la.posterior.precision_product(way).double()).sum()
    return facts | {
        "converged": all(facts[where]["converged"] for where in WHERE),
        "wasserstein": float(distance.mean()),
        "relative": float((distance / _spread(covariances[1])).mean()),
        "total_variation": float(predictive_total_variation(*predictives)),
        "deviations": float(squared.clamp(min=0).sqrt()),
        "relative_norm": float(way.double().norm() / start.double().norm()),
    }


def _spread(covariance: Tensor) -> Tensor:
    """Root of the trace of covariances ``[..., outputs, outputs]``, float64: the distance to the network itself."""
    return covariance.double().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()


def report_training(out: Path, recipe: str, training: Path) -> Outcome:
    """Write ``report.md`` and ``training.png``: how far M(θ~) and M(θ*) are apart, from `measure_training`'s folder."""
    page, found = Report(out, recipe), Outcome.load(training).results
    networks = "; ".join(
        f"{name}: {len({run['chain'] for run in runs})} networks of {found['parameters'][name]:,} parameters"
        for name, runs in found["runs"].items()
    )
    page.add(paper.images_line(networks, found))
    page.figure("training", draw_training, found, alt="distance along the training")
    page.list("What held", list(training_claims(found)))
    for name, runs in found["runs"].items():
        page.add(*training_tables(name, by_epoch(runs), found["priors"]))
    return page.done()


def by_epoch(runs: Runs) -> Epochs:
    """Snapshots of all networks by their epoch, ascending."""
    return {epoch: [run for run in runs if run["epoch"] == epoch] for epoch in sorted({run["epoch"] for run in runs})}


def early_stopping(epochs: Epochs) -> float:
    """The epoch with the lowest validation NLL, mean over networks."""
    return min(epochs, key=lambda epoch: fmean(run["val_nll"] for run in epochs[epoch]))


def training_tables(name: str, epochs: Epochs, priors: Sequence[Groups]) -> list[Grid]:
    """Distances, spreads and weights, precisions and likelihoods of one architecture, a row for each epoch."""
    stop = early_stopping(epochs)
    rows = {f"{epoch:g}" + (" (early stopping)" if epoch == stop else ""): runs for epoch, runs in epochs.items()}

    def column(prior: str, path: Sequence[str], scale: float, digits: int) -> Callable[[Runs], str]:
        def show(runs: Runs) -> str:
            own = found = [run[prior] for run in runs]
            for key in path:
                found = [row[key] for row in found]
            return paper.cell([scale * value for value in found], digits) + paper.marks(own)

        return show

    def columns(kinds: Any) -> dict[str, Callable[[Runs], str]]:
        return {title.format(paper.PRIORS[p]): column(p, *kind) for p in priors for title, *kind in kinds}

    def precisions(choice: Choice, runs: Runs) -> str:
        own = [run[choice.prior][choice.where] for run in runs]
        values = [[g["precision"] for g in run["groups"].values()] for run in own]
        logs = torch.tensor(values, dtype=torch.float64, device="cpu").log()
        return " / ".join(f"{value:.3g}" for value in logs.mean(0).exp().tolist()) + paper.marks(own)

    def nll(choice: Choice, runs: Runs) -> str:
        own = [run[choice.prior][choice.where] for run in runs]
        return paper.cell([run["nll"] for run in own]) + paper.marks(own)

    likelihoods: dict[str, Any] = {
        f"network\n{what}": lambda runs, key=key: paper.cell([run[key] for run in runs])
        for what, key in (("training", "train_nll"), ("validation", "val_nll"), ("test", "nll"))
    }
    likelihoods["network, scaled\ntest"] = lambda runs: paper.cell([run["scaled"]["nll"] for run in runs])
    chosen: dict[str, Any] = {}
    for choice in (Choice(where, prior) for prior in priors for where in WHERE):
        chosen[choice.title] = lambda runs, choice=choice: precisions(choice, runs)
        likelihoods[f"{choice.title}\ntest"] = lambda runs, choice=choice: nll(choice, runs)
    groups = ", ".join(next(iter(epochs.values()))[0][priors[-1]]["map"]["groups"])
    return [
        table(f"{name}: {title}", rows, own, f"{caption}. {paper.OPEN_CAPTION}", "epoch")
        for title, own, caption in (
            ("M(θ~) and M(θ*) apart", columns(DISTANCES), APART),
            ("spreads and weights", columns(SPREADS), SPREAD),
            ("precisions", chosen, f"geometric mean over networks; several λ: {groups}"),
            ("likelihoods", likelihoods, "NLL in nats, mean ± standard error over networks; scaled: on validation"),
        )
    ]


def training_claims(found: Found) -> Iterator[str]:
    """What the talk's figure is about, and whether it held by more than a standard error; from converged rows only."""
    for name, runs in found["runs"].items():
        epochs = by_epoch(runs)
        stop = early_stopping(epochs)
        for prior in found["priors"]:
            own = {epoch: [run[prior] for run in some] for epoch, some in epochs.items()}
            sure = [epoch for epoch, some in own.items() if all(run["converged"] for run in some)]
            title = f"{name}, {paper.PRIORS[prior]}"
            if not sure:
                yield f"{title}: no snapshot at which all evidences had converged: **no conclusion**"
                continue
            last = sure[-1]
            relative = [run["relative"] for run in own[last]]
            yield (
                f"{title}: the distance does not vanish as training goes on (epoch {last:g}; more than {VANISHED:g} of "
                f"the spread of M(θ*)): **{verdict([v - VANISHED for v in relative])}**, {paper.cell(relative, 2)}"
            )
            if stop not in sure or last <= stop:
                yield f"{title}: no converged snapshots at and after early stopping: **no further conclusion**"
                continue
            for what, column, digits, unit in (
                ("the distance is greater at the end than at early stopping", "wasserstein", 2, "logits"),
                ("relative to the spread of M(θ*) it is greater, too", "relative", 3, "spreads"),
                ("θ* is farther from θ~", "deviations", 1, "posterior standard deviations"),
            ):
                gaps = [b[column] - a[column] for a, b in zip(own[stop], own[last], strict=True)]
                when, held = f"epoch {last:g} against {stop:g}", verdict(gaps)
                yield f"{title}: {what} ({when}): **{held}**, {paper.cell(gaps, digits, sign='+')} {unit}"
            gaps = [run["map"]["nll"] - run["tangent_mode"]["nll"] for run in own[stop]]
            yield (
                f"{title}: at early stopping M(θ*) predicts better than M(θ~): **{verdict(gaps)}**, test NLL "
                f"{paper.cell(gaps, 3, sign='+')} nats apart"
            )


def draw_training(path: Path, found: Found) -> None:
    """Distance, relative distance and NLLs against the epochs; crosses: the evidence of a network had not converged."""
    styles: dict[str, Any] = {"single": {"marker": "s", "linestyle": (0, (2, 2))}, "per_group": {"marker": "o"}}
    with plots.grid(path, 3, len(found["runs"]), 4.4, 2.7, sharex=True, sharey="row") as axes:
        for column, (name, runs) in zip(axes.T, found["runs"].items(), strict=True):
            epochs = by_epoch(runs)
            for prior in found["priors"]:
                own = {epoch: [run[prior] for run in some] for epoch, some in epochs.items()}
                for ax, key in zip(column, ("wasserstein", "relative"), strict=False):
                    _curve(ax, own, key, plots.PURPLE, paper.PRIORS[prior], **styles[prior])
                for where in WHERE:
                    there = {epoch: [run[where] for run in some] for epoch, some in own.items()}
                    label = paper.in_latex(Choice(where, prior).title)
                    _curve(column[2], there, "nll", paper.COLORS[where], label, **styles[prior])
            for key, label, line in (("nll", "network, test", "-"), ("val_nll", "network, validation", ":")):
                _curve(column[2], epochs, key, plots.GRAY, label, linestyle=line)
            for ax in column:
                ax.axvline(early_stopping(epochs), color="black", linewidth=1)
                ax.set(yscale="log")
            column[0].set(title=name, xscale="log")
            column[2].set(xlabel="epochs")
        axes[0, 0].set_ylabel("2-Wasserstein distance\n(logits)")
        axes[1, 0].set_ylabel("relative to the spread\nof " + r"M($\theta_*$)")
        axes[2, 0].set_ylabel("NLL (nats)")
        axes[0, 0].legend(loc="best", fontsize=6)
        axes[2, -1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=6)


def _curve(ax: Any, epochs: Epochs, key: str, color: str, label: str, **style: Any) -> None:
    """Means over networks against the epochs, with crosses where an evidence had not converged."""
    values = {epoch: [run[key] for run in runs] for epoch, runs in epochs.items()}
    plots.band(ax, list(values), list(zip(*values.values(), strict=True)), color, label, **style)
    for epoch, runs in epochs.items():
        if paper.marks(runs):
            ax.plot(epoch, fmean(values[epoch]), "x", color="black", markersize=8)
