"""How much of an MCMC posterior one Gaussian keeps: Bayesian deep ensembles on three regressions, and what is left."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from tu_symmetry.datamodules import UCIDataModule
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import digest_folder, read_json
from tu_symmetry.laplace.tangent import TangentModel, jacobians
from tu_symmetry.metrics.functional.convergence import convergence
from tu_symmetry.posterior.compact import CompactPosterior, sample_low_rank
from tu_symmetry.posterior.network import BayesianNetwork, derived_seed, gaussian_nll
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, measured
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

    ``ensembles`` and ``chains`` are stores of commands of this table, of the splits 0, 1, ... in turn: optima, and the
    chains that start there. The linearized Laplace approximation is that of the same posterior at its first optimum,
    with the whole generalized Gauss-Newton matrix. Each split is kept in the ``parts`` of ``out``.
    """
    folders = [digest_folder(folder) for folder in (*ensembles, *chains)]
    options = [data.dataset, data.train_size, num_samples, rank, prior_precision, seed]
    parts = Parts(out / "parts", [*folders, *options, digest_tensors(data.test.x, data.train.x)])
    graph, weights = discover_symmetries(model.eval(), data.train.x[:2]), sum(p.numel() for p in model.parameters())

    def generator(stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(seed, 15, stream))

    def split(k: int) -> dict[str, Any]:
        own = UCIDataModule(data.dataset, data.root, split=k, train_size=data.train_size)
        optima, store = SampleStore.open(ensembles[k]).load(), SampleStore.open(chains[k])
        count = len(set(store.chains))
        held = store.load()  # at each step, all chains; draws are [chains, draws, ...]
        draws = {n: t.unflatten(0, (-1, count)).transpose(0, 1) for n, t in held.items()}
        rows: dict[str, dict[str, float]] = {}

        def judge(name: str, make: Callable[[], Tensor], networks: float, before: float) -> None:
            began = time.perf_counter()
            outputs = make()
            seconds = before + time.perf_counter() - began
            rows[name] = predictive(outputs, own.test.y) | {"storage": networks * weights, "seconds": seconds}

        def of(states: State) -> Tensor:
            with torch.no_grad():
                return vmap(lambda s: functional_call(model, s, (own.test.x,)))(states)

        trained = _seconds(ensembles[k])
        whole, alone = trained + _seconds(chains[k]), trained / count
        chain, every = ({n: t[0] for n, t in draws.items()}, {n: t.flatten(0, 1) for n, t in draws.items()})
        judge("one network", lambda: of({n: t[:1] for n, t in optima.items()}), 1, alone)
        judge("deep ensemble", lambda: of(optima), count, trained)
        judge("Bayesian deep ensemble", lambda: of(every), len(store), whole)
        judge("one of its chains", lambda: of(chain), len(store) / count, whole)
        began = time.perf_counter()
        found = convergence(graph, draws, model=model, inputs=own.test.x[:_INPUTS])
        aligned = {n: t.flatten(0, 1) for n, t in found.removed.items()}
        after, sigma = whole + time.perf_counter() - began, {}
        fits = {"q of one chain": (chain, whole), "q_d": (every, whole), "q_r": (aligned, after)}
        for stream, (name, (states, spent)) in enumerate(fits.items()):
            q = CompactPosterior.from_states(states, graph, align=False)
            sigma[name] = q.rms()
            drawn = q.sample(num_samples, generator=generator(stream))
            low = sample_low_rank(states, graph, num_samples, rank=rank, generator=generator(10 + stream))
            judge(name, partial(of, drawn), 2, spent)
            judge(f"mean of {name}", partial(of, {n: t[None] for n, t in q.mean.items()}), 1, spent)
            judge(f"{name}, rank {rank}", partial(of, low), 1 + rank, spent)
        first, optimum = {n: t[0] for n, t in optima.items()}, dict[str, float]()
        laplace = partial(linearized_outputs, model, first, own, prior_precision, num_samples, generator(20), optimum)
        judge(LAPLACE, laplace, 1 + (weights + 1) / 2, alone)
        return {"rows": rows, "spaces": found.spaces, "sigma": sigma, "optimum": optimum, "weights": weights}

    splits = [parts.take(f"split-{k}", split, k) for k in tracked(data.dataset, range(len(chains)))]
    shown = {name: fmean(s["rows"][name]["nll"] for s in splits) for name in splits[0]["rows"]}
    return Outcome({"splits": splits}, ", ".join(f"{name} {value:.3f}" for name, value in shown.items()))


def predictive(outputs: Tensor, y: Tensor) -> dict[str, float]:
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
    given = copy.deepcopy(model).double()
    given.load_state_dict(state)
    x, y, points = (t.double() for t in (data.train.x, data.train.y, data.test.x))
    network = BayesianNetwork(given, x, y, prior_precision, gaussian_nll, "cpu")
    parameters: State = dict(network.module.named_parameters())
    search = torch.optim.LBFGS(
        parameters.values(), max_iter=3000, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def loss() -> Tensor:
        search.zero_grad()
        value = network.potential(parameters)
        value.backward()
        return value

    optimum["before"] = search.step(loss).item()
    optimum["after"] = loss().item()
    optimum["gradient"] = float(torch.cat([p.grad.flatten() for p in parameters.values()]).norm())  # type: ignore[union-attr]
    tangent = TangentModel(network.module, list(parameters))
    out = tangent.outputs(x)
    deviation = F.softplus(out[:, 1]) + 1e-6
    fisher = torch.stack([deviation**-2, 2 * (out[:, 1].sigmoid() / deviation) ** 2], 1)
    jacobian = torch.cat([jacobians(tangent, part, out.shape[1:]) for part in x.split(500)])
    scaled = (jacobian * fisher.sqrt()[..., None]).flatten(0, 1)
    precision = scaled.T @ scaled + prior_precision * torch.eye(tangent.size, dtype=x.dtype, device="cpu")
    noise = torch.randn(tangent.size, num_samples, generator=generator, dtype=x.dtype, device="cpu")
    away = torch.linalg.solve_triangular(torch.linalg.cholesky(precision).T, noise, upper=True)
    return tangent.outputs(points) + tangent.jvps(points, away.T)


def _seconds(samples: Path) -> float:
    """How long the command of a table took that wrote a store."""
    run = samples.parent
    return float(read_json(run.parent / MARKS / f"{run.name}.json")[0]["seconds"])


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
    rows = {name + (" †" if lost and name == LAPLACE else ""): name for name in splits[0]["rows"]}

    def spread(key: str, form: str = ".3f") -> Callable[[str], str]:
        def show(row: str) -> str:
            values, theirs = [split["rows"][row][key] for split in splits], paper.get(key, {}).get(f"{title}/{row}")
            ours = "–" if None in values else measured(values, form, error=False)
            return ours if theirs is None else f"{ours}\n{theirs:{form}}"

        return show

    columns: dict[str, Callable[[str], str]] = {
        "NLL": spread("nll"),
        "NLL, moments\npublished": spread("matched"),
        "RMSE\npublished": spread("rmse"),
        "numbers stored": lambda row: f"{splits[0]['rows'][row]['storage']:,.0f}",
        "seconds": spread("seconds", ".0f"),
    }
    caption = f"mean ± standard deviation over {len(splits)} splits"
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
                values = [split["rows"][name]["nll"] for split in found["splits"]]
                spread = stdev(values) if len(values) > 1 else 0.0
                stored = found["splits"][0]["rows"][name]["storage"]
                color = next(c for start, c in colors.items() if name.startswith(start))
                marker = "os^Dv"[k % 5] if color == plots.GREEN else "X" if "rank" in name else "P"
                style = {"marker": marker, "color": color, "label": name, "markersize": 6}
                ax.errorbar(stored, fmean(values), spread, linestyle="none", capsize=2, **style)
            ax.axhline(math.log(2 * math.pi * math.e) / 2, color="black", linewidth=0.8, linestyle=":", label="N(0, 1)")
            ax.set(title=title, xlabel="numbers stored", xscale="log")
        axes[0].set_ylabel("NLL of a test target (nats)")
        axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
