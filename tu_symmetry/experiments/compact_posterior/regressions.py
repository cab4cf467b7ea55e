"""How much of an MCMC posterior one Gaussian keeps: Bayesian deep ensembles on three regressions, and what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from tu_symmetry.datamodules import UCIDataModule
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import digest_folder, read_json
from tu_symmetry.metrics.functional.convergence import convergence
from tu_symmetry.posterior.compact import CompactPosterior, sample_low_rank
from tu_symmetry.posterior.network import derived_seed, gaussian_nll
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.commands import MARKS
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors
from tu_symmetry.tables.report import Found, Report, table

LAPLACE = "linearized Laplace"
_INPUTS = 100  # test rows whose outputs are compared between chains
_GRADIENT = 1.0  # nats; of a converged optimum the norm is less


def compare_regressions(
    out: Path,
    model: nn.Module,
    data: UCIDataModule,
    ensembles: Sequence[Path],
    chains: Sequence[Path],
    num_samples: int = 200,
    rank: int = 20,
    prior_precision: float = 1.0,
    seed: int = 0,
) -> Outcome:
    """NLL, storage and seconds of a Bayesian deep ensemble, of Gaussians fitted to it, and of rivals, on each split.

    ``ensembles`` and ``chains`` are folders of sample stores, of the splits 0, 1, ... in turn: optima, and the chains
    that start there. The linearized Laplace approximation is that of the same posterior at its first optimum, with the
    whole generalized Gauss-Newton matrix. Each split is kept in the ``parts`` of ``out``.
    """
    folders = [digest_folder(folder) for folder in (*ensembles, *chains)]
    options = [data.dataset, data.train_size, num_samples, rank, prior_precision, seed]
    parts = Parts(out / "parts", [*folders, *options, digest_tensors(data.test.x, data.train.x)])
    splits = []
    for k in tracked(data.dataset, range(len(chains))):
        own = UCIDataModule(data.dataset, data.root, split=k, train_size=data.train_size)
        make = (model, own, ensembles[k], chains[k], num_samples, rank, prior_precision, seed)
        splits.append(parts.take(f"split-{k}", _split, *make))
    shown = {name: fmean(s["rows"][name]["nll"] for s in splits) for name in splits[0]["rows"]}
    return Outcome({"splits": splits}, ", ".join(f"{name} {value:.3f}" for name, value in shown.items()))


def _split(
    model: nn.Module,
    data: UCIDataModule,
    ensemble: Path,
    chains: Path,
    num_samples: int,
    rank: int,
    prior_precision: float,
    seed: int,
) -> dict[str, Any]:
    model = model.eval()
    graph = discover_symmetries(model, data.train.x[:2])
    optima, store = SampleStore.open(ensemble).load(), SampleStore.open(chains)
    count, weights = len(set(store.chains)), sum(p.numel() for p in model.parameters())
    draws = {n: t.unflatten(0, (-1, count)).transpose(0, 1) for n, t in store.load().items()}  # [chains, draws, ...]
    every = {n: t.flatten(0, 1) for n, t in draws.items()}
    total, rows = len(store), dict[str, dict[str, float | None]]()

    def judge(name: str, make: Callable[[], Tensor], networks: float, before: float | None = 0.0) -> None:
        began = time.perf_counter()
        outputs = make()
        spent = time.perf_counter() - began
        rows[name] = predictive(outputs, data.test.y) | {"storage": networks * weights}
        rows[name]["seconds"] = None if before is None else before + spent

    def of(states: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return vmap(lambda s: functional_call(model, s, (data.test.x,)))(dict(states))

    def generator(stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(seed, 15, stream))

    trained, sampled = _seconds(ensemble.parent), _seconds(chains.parent)
    whole = None if trained is None or sampled is None else trained + sampled
    judge("one network", lambda: of({n: t[:1] for n, t in optima.items()}), 1, trained and trained / count)
    judge("deep ensemble", lambda: of(optima), count, trained)
    judge("Bayesian deep ensemble", lambda: of(every), total, whole)
    judge("one of its chains", lambda: of({n: t[0] for n, t in draws.items()}), total / count, whole)
    began = time.perf_counter()
    found = convergence(graph, draws, model=model, inputs=data.test.x[:_INPUTS])
    aligned = {n: t.flatten(0, 1) for n, t in found.removed.items()}
    after = None if whole is None else whole + time.perf_counter() - began
    fits = {
        "q of one chain": ({n: t[0] for n, t in draws.items()}, whole),
        "q_d": (every, whole),
        "q_r": (aligned, after),
    }
    sigma = {}
    for k, (name, (states, spent)) in enumerate(fits.items()):
        q = CompactPosterior.from_states(states, graph, align=False)
        sigma[name] = q.rms()
        drawn = q.sample(num_samples, generator=generator(k))
        low = sample_low_rank(states, graph, num_samples, rank=rank, generator=generator(10 + k))
        mean = {n: t[None] for n, t in q.mean.items()}
        for part, stack, networks in (
            (name, drawn, 2),
            (f"mean of {name}", mean, 1),
            (f"{name}, rank {rank}", low, 1 + rank),
        ):
            judge(part, partial(of, stack), networks, spent)
    first = {n: t[0] for n, t in optima.items()}
    optimum: dict[str, float] = {}
    judge(
        LAPLACE,
        lambda: linearized_outputs(model, first, data, prior_precision, num_samples, generator(20), optimum),
        1 + (weights + 1) / 2,
        trained and trained / count,
    )
    return {"rows": rows, "spaces": found.spaces, "sigma": sigma, "optimum": optimum, "weights": weights}


def predictive(outputs: Tensor, y: Tensor) -> dict[str, float | None]:
    """Scores of mixtures of Gaussians whose means and deviations are outputs ``[networks, rows, 2]``.

    ``nll`` is that of the mixture, ``matched`` that of the Gaussian with its mean and variance, ``rmse`` the mean's.
    """
    mean, deviation = outputs[..., 0].double(), F.softplus(outputs[..., 1].double()) + 1e-6
    density = torch.distributions.Normal(mean, deviation).log_prob(y.double())
    center, variance = mean.mean(0), deviation.square().mean(0) + mean.var(0, correction=0)
    return {
        "nll": float(math.log(len(mean)) - density.logsumexp(0).mean()),
        "matched": -float(torch.distributions.Normal(center, variance.sqrt()).log_prob(y.double()).mean()),
        "rmse": float((center - y).square().mean().sqrt()),
    }


def linearized_outputs(
    model: nn.Module,
    state: State,
    data: UCIDataModule,
    prior_precision: float,
    num_samples: int,
    generator: torch.Generator,
    optimum: dict[str, float],
) -> Tensor:
    """Draws of the tangent model's outputs ``[draws, rows, 2]`` under ``N(optimum, (GGN + prior)^-1)``, in float64.

    The optimum is the given state, brought on by L-BFGS; ``optimum`` gets the potential (nats) before and after, and
    the gradient's norm.
    """
    names, shapes = zip(*((n, p.shape) for n, p in model.named_parameters()), strict=True)
    sizes = [shape.numel() for shape in shapes]
    train, test = (tuple(t.double() for t in (part.x, part.y)) for part in (data.train, data.test))

    def outputs(w: Tensor, x: Tensor) -> Tensor:
        parts = zip(names, w.split(sizes), shapes, strict=True)
        found: Tensor = functional_call(model, {n: t.view(shape) for n, t, shape in parts}, (x,))
        return found

    w = torch.cat([state[n].flatten() for n in names]).double().requires_grad_()
    search = torch.optim.LBFGS([w], max_iter=3000, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def loss() -> Tensor:
        search.zero_grad()
        value = gaussian_nll(outputs(w, train[0]), train[1]) + prior_precision / 2 * w.square().sum()
        value.backward()
        return value

    optimum["before"] = search.step(loss).item()
    optimum |= {"after": loss().item(), "gradient": float(w.grad.norm())}  # type: ignore[union-attr]
    w = w.detach()

    def tangent(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = [vmap(jacrev(lambda v, one: outputs(v, one[None])[0]), (None, 0))(w, part) for part in x.split(500)]
        return outputs(w, x), torch.cat(rows)

    out, jacobian = tangent(train[0])
    deviation = F.softplus(out[:, 1]) + 1e-6
    fisher = torch.stack([deviation**-2, 2 * (out[:, 1].sigmoid() / deviation) ** 2], 1)
    scaled = (jacobian * fisher.sqrt()[..., None]).flatten(0, 1)
    precision = scaled.T @ scaled + prior_precision * torch.eye(len(w), dtype=w.dtype, device=w.device)
    root = torch.linalg.cholesky(precision)
    noise = torch.randn(len(w), num_samples, generator=generator, dtype=w.dtype, device="cpu")
    away = torch.linalg.solve_triangular(root.T, noise, upper=True)
    mean, slope = tangent(test[0])
    return mean + torch.einsum("rop,ps->sro", slope, away)


def _seconds(run: Path) -> float | None:
    """How long a command of a table took; None where it was not run by one."""
    mark = run.parent / MARKS / f"{run.name}.json"
    return float(read_json(mark)[0]["seconds"]) if mark.is_file() else None


def report_regressions(out: Path, recipe: str, found: dict[str, Path]) -> Outcome:
    """Write ``report.md`` with a table and the convergence of each data set, from :func:`compare_regressions`."""
    page, sets = Report(out, recipe), {name: Outcome.load(folder).results for name, folder in found.items()}
    page.figure("storage", draw_storage, sets, alt="NLL against numbers stored")
    for name, own in sets.items():
        page.add(score_table(own, name, page.table.paper), space_table(own, f"{name}: convergence"))
    return page.done()


def score_table(found: Found, title: str, paper: Mapping[str, Mapping[str, float | None]]) -> Grid:
    """Mean and standard deviation over splits of each row; second lines are the paper's."""
    splits = found["splits"]
    lost = sum(split["optimum"]["gradient"] > _GRADIENT for split in splits)
    rows = {
        name + (" †" if lost and name == LAPLACE else ""): (name, [split["rows"][name] for split in splits])
        for name in splits[0]["rows"]
    }

    def spread(key: str, digits: int = 3) -> Callable[[Any], str]:
        def show(row: Any) -> str:
            values, theirs = [one[key] for one in row[1]], paper.get(key, {}).get(f"{title}/{row[0]}")
            if any(v is None for v in values):
                return "–"
            ours = f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
            return ours if theirs is None else f"{ours}\n{theirs:.{digits}f}"

        return show

    columns: dict[str, Callable[[Any], str]] = {
        "NLL": spread("nll"),
        "NLL, moments\npublished": spread("matched"),
        "RMSE\npublished": spread("rmse"),
        "numbers stored": lambda row: f"{row[1][0]['storage']:,.0f}",
        "seconds": spread("seconds", 0),
    }
    caption = (
        f"mean ± standard deviation over {len(splits)} splits; targets are standardized, NLL of one in nats, of the "
        "mixture and of the Gaussian with its moments; seconds: of all that is needed, on one core"
    )
    if lost:
        caption += f"; † the optimum it is made at had not converged in {lost} of them, so that it is no result"
    return table(title, rows, columns, caption, "posterior")


def space_table(found: Found, title: str) -> Grid:
    """R-hat and effective sample sizes, means over splits (of the worst, the worst)."""
    splits = found["splits"]
    rows = {space: [split["spaces"][space] for split in splits] for space in splits[0]["spaces"]}
    columns: dict[str, Callable[[Any], str]] = {
        "R-hat, median": lambda own: f"{fmean(o['rhat'] for o in own):.2f}",
        "R-hat, worst": lambda own: f"{max(o['worst rhat'] for o in own):.2f}",
        "at most 1.01": lambda own: f"{fmean(o['converged'] for o in own):.0%}",
        "ESS, median": lambda own: f"{fmean(o['ess'] for o in own):.0f}",
        "ESS, least": lambda own: f"{min(o['least ess'] for o in own):.0f}",
    }
    optima = ", ".join("{before:.0f} → {after:.0f} ({gradient:.1g})".format(**s["optimum"]) for s in splits)
    sigma = ", ".join(f"{n} {fmean(s['sigma'][n] for s in splits):.3f}" for n in splits[0]["sigma"])
    caption = (
        f"rms σ of the Gaussians: {sigma}; potential (nats) of the first network → where it is linearized (norm of the "
        f"gradient there): {optima}"
    )
    return table(title, rows, columns, caption, "space")


def draw_storage(path: Path, sets: Mapping[str, Found]) -> None:
    """NLL against the numbers that are stored, one panel for each data set, of what has converged; bars: deviations."""
    colors = {"q_d": plots.GRAY, "q_r": plots.BLUE, "q of one chain": plots.ORANGE, "": plots.GREEN}
    with plots.figure(path, len(sets), 3.6, 3.4) as axes:
        for ax, (title, found) in zip(axes, sets.items(), strict=True):
            names = [n for n in found["splits"][0]["rows"] if not n.startswith("mean of")]
            if any(split["optimum"]["gradient"] > _GRADIENT for split in found["splits"]):
                names.remove(LAPLACE)
            for k, name in enumerate(names):
                own = [split["rows"][name] for split in found["splits"]]
                values = [one["nll"] for one in own]
                spread = stdev(values) if len(values) > 1 else 0.0
                color = next(c for start, c in colors.items() if name.startswith(start))
                marker = "os^Dv"[k % 5] if color == plots.GREEN else "X" if "rank" in name else "P"
                style = {"marker": marker, "color": color, "label": name, "markersize": 6}
                ax.errorbar(own[0]["storage"], fmean(values), spread, linestyle="none", capsize=2, **style)
            ax.axhline(math.log(2 * math.pi * math.e) / 2, color="black", linewidth=0.8, linestyle=":", label="N(0, 1)")
            ax.set(title=title, xlabel="numbers stored", xscale="log")
        axes[0].set_ylabel("NLL of a test target (nats)")
        axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
