"""How a posterior's temperature is best chosen: the best on held-out data, or one that is surely better."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_auroc

from benchmarks._measure import in_own_process
from benchmarks._report import Goal, Section, Settings
from benchmarks.comparison import LARGER, METHODS, best_sharpness, trained
from benchmarks.default import entropy, shuffled
from benchmarks.joint import images
from tu_symmetry.laplace.calibration import TEMPERATURES, Judged
from tu_symmetry.laplace.function_posterior import tempered_predictives
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.reporting.grid import Grid

_EPOCHS, _SEEDS, _SPLITS = (8, 40, 150), 3, 50
_POOL, _HELD_OUT = 8000, (140, 500, 2000)
_METHODS = ("last layer, exact, single", "all layers, KFAC, θ~, single", "all layers, KFAC, θ*, per group (default)")
RULES = (0.0, 1.0, 2.0)  # standard errors
_WORSE = 1e-3  # nats
Record = dict[str, Any]


def run(settings: Settings) -> Section:
    """Every network in a process of its own; a quick run stays in this process."""
    cases = [(name, epochs, seed) for seed in range(_SEEDS) for name in LARGER for epochs in _EPOCHS]
    records: list[Record] = []
    for name, epochs, seed in [(next(iter(LARGER)), 1, 0)] if settings.quick else cases:
        settings.say(f"{name.split(',')[0]}, {epochs} epochs, seed {seed}")
        if settings.quick:
            records += measure(name, epochs, seed, train=100, pool=300, sizes=(50, 100))
        else:
            arguments = (name, str(epochs), str(seed), str(torch.get_num_threads()))
            records += in_own_process("benchmarks.calibration", *arguments)
    ood = [r for r in records if "ood" in r]
    return section([r for r in records if "ood" not in r], ood)


def section(records: list[Record], ood: list[Record]) -> Section:
    """What each rule gained and lost, over all networks, posteriors and splits; and what detects other inputs."""
    sizes = list(dict.fromkeys(r["size"] for r in records))
    rows, goals = [], []
    for size in sizes:
        possible = torch.tensor([v for r in records if r["size"] == size for v in r["possible"]])
        for rule in RULES:
            found = torch.tensor([v for r in records if (r["size"], r["rule"]) == (size, rule) for v in r["change"]])
            share = float((found > _WORSE).double().mean())
            rows.append(
                [
                    str(size),
                    "best" if not rule else f"less {rule:g} standard error{'s' * (rule != 1)}",
                    f"{found.mean():+.4f}",
                    f"{100 * float(found.mean() / possible.mean()):.0f} %",
                    f"{100 * share:.1f} %",
                    f"{found.max():+.4f}",
                ]
            )
            if rule == RULES[-1]:
                goals.append(
                    Goal(
                        f"FitLaplace's rule with {size} held-out samples: at most 1 in 1,000 gets worse than its "
                        f"network by more than {_WORSE:g} nats",
                        share <= 0.001,
                        f"{100 * share:.2f} %, worst {found.max():+.4f} nats",
                    )
                )
    settled = list({(r["network"], r["epochs"], r["seed"], r["method"]): r["converged"] for r in records}.values())
    count = len({(r["network"], r["epochs"], r["seed"]) for r in records})
    text = (
        f"{count} networks (MLP and CNN with BatchNorm, trained for {', '.join(map(str, _EPOCHS))} epochs on 1,000 "
        f"generated digits at 14 × 14 pixels), each with {len(_METHODS)} posteriors (last layer; all layers at the "
        f"network's weights with one precision; `LinearizedLaplace`'s default); {sum(settled)} of {len(settled)} "
        "evidences converged. "
        f"{_POOL:,} other images are split at random {_SPLITS} times: on some the temperature is chosen, on the rest "
        "it is judged. *Change*: of the NLL against the network itself (nats, negative is better), mean over networks, "
        "posteriors and splits; *of possible*: as a share of what the best temperature for the rest would give; "
        f"*worse*: share in which the change is above {_WORSE:g}. Rules: the temperature of the highest gain over the "
        "network on the held-out data, or of the highest gain less so many of its standard errors (`standard_errors=`, "
        "0 by default in `calibrate`, 2 in `FitLaplace`). OOD: posteriors are calibrated (FitLaplace's rule), "
        "and networks scaled, on 500 held-out images; 1,000 others are shifted."
    )
    header = ["held-out samples", "rule", "change", "of possible", "worse", "worst"]
    grids = [Grid("Test NLL with the temperature that was chosen", header, rows), detection(ood)]
    return Section("The temperature on held-out data", text, grids, goals, [*(_brief(r) for r in records), *ood])


def detection(records: list[Record]) -> Grid:
    """Mean AUROC over near and far shifts, for each kind of network and length of training."""
    rows = []
    for name, epochs in dict.fromkeys((r["network"], r["epochs"]) for r in records):
        own = [r["ood"] for r in records if (r["network"], r["epochs"]) == (name, epochs)]
        found = [f"{sum(one[score] for one in own) / len(own):.3f}" for score in own[0]]
        rows.append([f"{name.split(', 10')[0]}, {epochs} epochs ({len(own)})", *found])
    scores = list(records[0]["ood"])
    title = (
        f"OOD detection: mean AUROC over near shifts (turned by 90°, inverted) and far ones (shuffled pixels, noise), "
        f"{len(records)} networks (in brackets how many of a kind)"
    )
    return Grid(title, ["network", *scores], rows)


def detect(model: nn.Module, train: DataLoader[Any], held_out: DataLoader[Any], test: Tensor) -> dict[str, float]:
    """Mean AUROC of the entropies of the network, as it is and scaled, and of each posterior's two scores."""
    noise = torch.rand(test.shape, generator=torch.Generator().manual_seed(0))
    low, high = test.min(), test.max()
    shifts = [test.rot90(dims=(2, 3)), low + high - test, shuffled(test), low + noise * (high - low)]

    def auroc(score: Callable[[Tensor], Tensor]) -> float:
        inside, *outside = (torch.cat([score(part) for part in x.split(250)]) for x in (test, *shifts))
        truth = torch.cat([torch.zeros(len(inside)), torch.ones(len(inside))]).long()
        found = [float(binary_auroc(torch.cat([inside, other]).float(), truth)) for other in outside]
        return sum(found) / len(found)

    found, by_method = {}, {}
    for method in _METHODS:
        la = LinearizedLaplace(model, **METHODS[method]).fit(train)
        la.optimize_evidence()
        la.calibrate(held_out, standard_errors=2.0)
        by_method[f"{method}: calibrated, entropy"] = auroc(lambda x, la=la: entropy(la.predictive(x)))  # type: ignore[misc]
        by_method[f"{method}: by the evidence, mutual information"] = auroc(la.epistemic)
    with torch.no_grad():
        logits, labels = (torch.cat(own) for own in zip(*((model(x), y) for x, y in held_out), strict=True))
        titles = {"network, entropy": 1.0, "temperature scaled, entropy": best_sharpness(logits, labels)}
        for title, sharpness in titles.items():
            found[title] = auroc(lambda x, s=sharpness: entropy((s * model(x)).softmax(-1)))  # type: ignore[misc]
    return found | by_method


def _brief(record: Record) -> Record:
    """A record with what its splits come to, in place of one number for each."""
    lists = {name: torch.tensor(values) for name, values in record.items() if isinstance(values, list)}
    kept = {name: value for name, value in record.items() if name not in lists}
    kept |= {f"mean {name}": round(float(values.mean()), 8) for name, values in lists.items()}
    return kept | {"worse": int((lists["change"] > _WORSE).sum()), "worst": round(float(lists["change"].max()), 8)}


def measure(name: str, epochs: int, seed: int, *, train: int = 1000, pool: int = _POOL, sizes: Any = _HELD_OUT) -> Any:
    """What each rule does for one trained network."""
    (x, y), (held_x, held_y) = (
        (avg_pool2d(a, 2), b)
        for a, b in (
            images(train, size=28, channels=1, seed=seed),
            images(pool, size=28, channels=1, seed=_SEEDS),
        )
    )
    model, generator = trained(name, x, y, epochs, seed=seed)
    candidates = sorted({1.0, *TEMPERATURES})
    records = []
    for method in _METHODS:
        start = time.process_time()
        la = LinearizedLaplace(model, **METHODS[method]).fit(DataLoader(TensorDataset(x, y), 100))
        converged = la.optimize_evidence().converged
        nll = _nll(la, held_x, held_y, candidates)
        spent = time.process_time() - start
        for size in sizes:
            splits = [torch.randperm(pool, generator=generator) for _ in range(_SPLITS)]
            changes = [(nll[:, s[size:]] - nll[0, s[size:]]).mean(1) for s in splits]
            possible = [float(change.min()) for change in changes]
            for rule in RULES:
                chosen = [_choose(nll[:, s[:size]], rule) for s in splits]
                records.append(
                    {
                        "network": name, "epochs": epochs, "seed": seed, "method": method, "size": size, "rule": rule,
                        "change": [float(c[k]) for c, k in zip(changes, chosen, strict=True)],
                        "temperatures": [candidates[k] for k in chosen], "possible": possible, "converged": converged,
                        "seconds": spent,
                    }
                )  # fmt: skip
    loaders = [DataLoader(TensorDataset(*own), 250) for own in ((x, y), (held_x[:500], held_y[:500]))]
    ood = detect(model, *loaders, held_x[-1000:])
    return [*records, {"network": name, "epochs": epochs, "seed": seed, "ood": ood}]


def _nll(la: LinearizedLaplace, x: Tensor, y: Tensor, temperatures: list[float]) -> Tensor:
    """Of every sample at every temperature, ``[temperatures, samples]``."""
    parts = []
    for inputs, labels in zip(x.split(500), y.split(500), strict=True):
        _, found = tempered_predictives(
            la.fitted, inputs, [(temperature, 1.0) for temperature in temperatures],
            num_samples=100, link_approx="mc", covariance="auto", seed=0,
        )  # fmt: skip
        parts.append(torch.stack([la.likelihood.nll(p, la.likelihood.observed(p, labels)) for p in found]))
    return torch.cat(parts, 1)


def _choose(nll: Tensor, standard_errors: float) -> int:
    return Judged(nll, torch.ones_like(nll[0])).choose(standard_errors)


def main(name: str, epochs: str, seed: str, threads: str) -> None:
    """One trained network, as JSON on the last line."""
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    print(json.dumps(measure(name, int(epochs), int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
