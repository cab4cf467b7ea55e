"""The main table of arXiv 2310.08287: posterior quality, calibration, OOD detection and diversity of every method."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch_uncertainty.metrics import FPR95, BrierScore, CalibrationError
from torchmetrics.functional.classification import binary_average_precision

from tu_symmetry.evaluation import accuracy, chosen_device
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import digest_file, digest_of, remove_folder
from tu_symmetry.metrics import MarginalHomogeneity
from tu_symmetry.metrics.functional import (
    Removal,
    diversity_summary,
    pairwise_mutual_information,
    predictive_agreement,
    predictive_total_variation,
    removal,
)
from tu_symmetry.metrics.functional.distances import Projections, pooled_distances
from tu_symmetry.metrics.functional.homogeneity import largest_test, largest_units
from tu_symmetry.metrics.functional.two_sample import distances_test, streamed_distances
from tu_symmetry.posterior.published import CHECKPOINTS, collect_checkpoints
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import show_progress
from tu_symmetry.states import evenly, sample_count
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors

ONE, MULTI = "one mode", "several modes"
_NETWORKS = 50  # in memory at a time
_POINTS = 500  # whose probabilities are on the device at a time, of all networks
_BINS = 15  # of calibration errors, as in TorchUncertainty's routine
_LEVELS = torch.linspace(0.005, 0.995, 100, device="cpu")  # of quantiles of the marginals
States = Mapping[str, Tensor]


def collect(out: Path, folder: str, source: str = CHECKPOINTS, *, start: int = 0, count: int | None = None) -> Outcome:
    """Stream a folder of the paper's published checkpoints into the sample store ``samples`` of a run.

    Args:
        folder: folder of the data set, see :func:`~tu_symmetry.posterior.published.list_checkpoints`.
        source: the data set, or a local copy of it.
    """
    with show_progress("checkpoints") as progress:
        options: dict[str, Any] = {"folder": folder, "start": start, "count": count, "progress": progress}
        store = collect_checkpoints(out / "samples", source, **options)
    return Outcome({"networks": len(store), "source": source, "folder": folder}, f"{len(store)} networks of {folder}")


def evaluate(
    out: Path,
    model: nn.Module,
    data: LightningDataModule,
    reference: Path,
    one_mode: dict[str, list[Path]],
    multi_mode: dict[str, list[Path]],
    *,
    ood: dict[str, LightningDataModule],
    predictive: Path | None = None,
    num_samples: int = 100,
    diversity_networks: int = 200,
    resamples: int = 100,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Every column of the table with its interval, for every row.

    All folders are compared with the architecture before anything is computed. No more than 50 networks are in memory
    at a time: canonical forms go to stores in ``out/forms`` (a network's size each, twice for the reference, removed at
    the end), and distances are added up over columns of 1 GiB; of a row ``16 N^2`` bytes are left for each tensor, of
    ``N`` networks of row and reference together. Every row is kept in ``out/parts`` at once, so that a command that was
    cut goes on with the next one.

    Args:
        reference: run folder of the reference networks.
        one_mode: method to the folders of runs; each run by itself is one posterior of one mode, so that the choice of
            the mode is seen. The first is the row of the table.
        multi_mode: method to the folders of the runs that make one posterior together, in equal shares.
        ood: name of each out-of-distribution set to a data module that has it as its own (``ood_dataset``).
        predictive: ``.npz`` file with ``probs`` ``(points, classes)`` of a trusted posterior on the test set in order,
            as that of HMC on CIFAR-10 (arXiv 2104.14421): agreement and total variation are reported then.
        num_samples: networks of each posterior.
        diversity_networks: networks of the reference whose pairs are measured.
        resamples: bootstrap replicates of every interval.
    """
    if not ood:
        raise ValueError("there is no out-of-distribution set: name at least one under ood")
    like = model.state_dict()
    rows = {f"{ONE}/{method}": [[folder] for folder in folders] for method, folders in one_mode.items()}
    rows |= {f"{MULTI}/{method}": [folders] for method, folders in multi_mode.items()}
    if empty := [row for row, posteriors in rows.items() if not posteriors or not all(posteriors)]:
        raise ValueError(f"{empty[0]} is a row without a run: name at least one folder")
    for folders in (posterior for posteriors in rows.values() for posterior in posteriors):
        _networks(folders, num_samples, like)  # what is wrong with one is said before anything is computed
    references = _networks([reference], None, like)
    test = _test_set(data, 0)
    others = {name: _test_set(module, 1)[0] for name, module in ood.items()}
    trusted = None if predictive is None else _trusted(predictive, len(test[0]))
    model = model.eval()
    graph = discover_symmetries(model, test[0][:2])
    graph.require_verified()
    options = [
        num_samples,
        diversity_networks,
        resamples,
        seed,
        repr(model),
        references.key,
        list(others),
        digest_tensors(*test, *others.values()),
        None if predictive is None else digest_file(predictive),
    ]
    kept = Parts(out / "parts", options)
    own = chosen_device(device)
    judge = Judge(model.to(own), graph, own, resamples, seed, out / "forms" / kept.key[:8])
    forms = {
        "mmd": None,
        "ns": removal("paper"),
        "ns_aligned": removal("min_mass", align_to=references[0]),
    }

    def measure(row: str, networks: Networks) -> dict[str, Any]:
        runs = networks.runs if row.startswith(MULTI) else None
        entry = judge.quality(networks, forms, references, runs, zlib.crc32(f"{seed}/{row}".encode()))
        probs = judge.probabilities(networks, test[0])
        outside = {name: judge.probabilities(networks, x) for name, x in others.items()}
        entry |= scores(probs, test[1], outside, resamples=resamples, seed=seed)
        if trusted is not None:
            entry["agreement"] = float(predictive_agreement(probs.double(), trusted))
            entry["total_variation"] = float(predictive_total_variation(probs.double(), trusted))
        entry["homogeneity"] = judge.homogeneity(networks)
        return {"entry": entry, "marginal": judge.marginal(networks)}

    def measure_reference() -> dict[str, Any]:
        first = references.first(diversity_networks)
        diversity, pairs = judge.diversity(first, test[0], others)
        found = {"homogeneity": judge.homogeneity(references), "diversity": diversity, "pairs": pairs}
        return found | {"marginal": judge.marginal(references)}

    found: dict[str, Any] = {row: [] for row in rows}
    marginals: dict[str, Any] = {}
    jobs = [(row, k, folders) for row, posteriors in rows.items() for k, folders in enumerate(posteriors)]
    for row, k, folders in tracked("evaluating", jobs, lambda job: job[0]):
        networks = _networks(folders, num_samples, like)
        part = kept.take(f"{row}-{k}-{digest_of(networks.key)[:8]}", measure, row, networks)
        found[row].append(part["entry"])
        marginals.setdefault(row, part["marginal"])
    of_reference = kept.take("reference", measure_reference)
    shown = {"reference": of_reference.pop("marginal")} | marginals
    if (out / "forms").exists():
        remove_folder(out / "forms")
    result = {
        "rows": found,
        "networks": {"reference": len(references), "row": num_samples},
        **of_reference,
        "marginals": {"levels": _LEVELS.tolist(), "sets": shown},
    }
    least = min(found, key=lambda row: found[row][0]["ns"]["value"])
    return Outcome(result, f"{len(found)} rows; least NS: {least}")


@dataclass(frozen=True)
class Networks:
    """Networks in sample stores, read some at a time.

    Attributes:
        members: the stores, and the place of each network in its own.
        runs: the number of the run of each network, ``[networks]``.
        key: what tells these networks from others.
    """

    members: list[tuple[SampleStore, int]]
    runs: Tensor
    key: list[Any]

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        store, place = self.members[index]
        return _wide(store[place])

    def first(self, count: int) -> Networks:
        """The first ``count`` of them."""
        return Networks(self.members[:count], self.runs[:count], self.key)

    def blocks(self, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Stacked states of 50 networks at most, in float32, in order."""
        for store, members in groupby(self.members, key=lambda member: member[0]):
            places = [place for _, place in members]
            for start in range(0, len(places), _NETWORKS):
                yield _wide(store.stack(places[start : start + _NETWORKS], device=device))


def _wide(state: States) -> dict[str, Tensor]:
    return {n: t.float() if t.is_floating_point() else t for n, t in state.items()}


@dataclass
class Judge:
    """What is measured of the networks of one posterior; no more than 50 of them are in memory at a time.

    ``forms`` is a folder for the canonical forms of one model's networks and one reference.
    """

    model: nn.Module
    graph: SymmetryGraph
    device: torch.device
    resamples: int
    seed: int
    forms: Path

    def generator(self) -> torch.Generator:
        """A new generator, always the same."""
        return torch.Generator().manual_seed(self.seed)

    @property
    def names(self) -> list[str]:
        """Of the tensors that are compared."""
        return [name for name in self.graph.shapes if name not in self.graph.buffers]

    def formed(self, networks: Networks, form: Removal, name: str) -> list[tuple[SampleStore, int]]:
        """Canonical forms in a store, in the precision of the networks' own; a store of this name is gone on with."""
        store = SampleStore.open_if_there(self.forms / name)
        if store is None:
            store = SampleStore.create(self.forms / name, architecture=form.name, method="canonical form")
        kinds = {n: t.dtype for n, t in networks.members[0][0][0].items()}
        begun, done = len(store), 0
        for block in networks.blocks(self.device) if begun < len(networks) else ():
            count = sample_count(block)
            if (done := done + count) > begun:
                made = form.apply(self.graph, block)
                stack = {n: made[n].to("cpu", kinds[n]) for n in self.names}
                store.append(stack, step=range(done - count, done))
        return [(store, place) for place in range(len(store))]

    def probabilities(self, networks: Networks, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Class probabilities ``(S, B, C)`` in main memory."""
        made, done = torch.empty(0, device="cpu"), 0
        for block in networks.blocks(self.device):
            part = member_probabilities(self.model, block, x)
            if not done:
                made = torch.empty((len(networks), *part.shape[1:]), dtype=dtype, device="cpu")
            made[done : (done := done + len(part))] = part
        return made

    def quality(
        self,
        networks: Networks,
        forms: Mapping[str, Removal | None],
        references: Networks,
        runs: Tensor | None,
        seed: int,
    ) -> dict[str, Any]:
        """Discrepancies from the reference, plain and without symmetries, each also at equal sizes."""
        found: dict[str, Any] = {}
        count = len(networks)
        for name, form in forms.items():
            own, there = networks.members, references.members
            if form is not None:
                if (self.forms / "row").exists():  # of another row or form, as a kill leaves it
                    remove_folder(self.forms / "row")
                own, there = self.formed(networks, form, "row"), self.formed(references, form, name)
            removed = "nothing" if form is None else form.name
            options: dict[str, Any] = {"removed": removed, "bootstraps": self.resamples, "groups": (runs, None)}
            projected = Projections(torch.Generator().manual_seed(seed)) if name == "ns_aligned" else None
            each = None if projected is None else projected.add
            streamed = streamed_distances([*own, *there], names=self.names, device=self.device, each=each)
            distances = [(one.cpu(), two.cpu()) for one, two in streamed]
            for suffix, sizes in (("", "given"), ("_equal", "equal")):
                generator = torch.Generator().manual_seed(seed)
                tested = distances_test(distances, count, sizes=sizes, generator=generator, **options)
                found[f"{name}{suffix}"] = asdict(tested)
            if projected is not None:
                pooled = torch.stack([two.square() for _, two in distances]).sum(0).sqrt()
                found["quotient"] = asdict(pooled_distances(pooled, projected, count)) | {"removed": removed}
            if form is not None:
                remove_folder(self.forms / "row")
        return found

    def homogeneity(self, networks: Networks) -> dict[str, Any]:
        """P-value of the corollary, and where each layer's largest weight is."""
        metric = MarginalHomogeneity(self.graph, num_resamples=499, seed=self.seed)
        units: dict[str, list[Tensor]] = {}
        for block in networks.blocks(torch.device("cpu")):
            metric.update(block)
            for name, own in largest_units(self.graph, block).items():
                units.setdefault(name, []).append(own)
        tests = largest_test(self.graph, {n: torch.cat(own) for n, own in units.items()}, generator=self.generator())
        largest = {
            name: {"counts": one.counts.tolist(), "index": one.index.tolist(), "p_value": one.p_value}
            for name, one in tests.items()
        }
        return {"p_value": float(metric.compute()), "largest": largest}

    def diversity(
        self, networks: Networks, test: Tensor, others: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Pairwise mutual information of networks, in and (each set by itself) out of distribution."""
        inside = self.pairwise(networks, test)
        upper = torch.triu_indices(len(inside), len(inside), 1, device="cpu")
        i, j = upper[:, :: max(1, upper.shape[1] // 2000)]  # enough for a figure
        found, pairs = {}, {}
        for name, x in others.items():
            outside = self.pairwise(networks, x)
            found[name] = asdict(
                diversity_summary(inside, outside, bootstraps=self.resamples, generator=self.generator())
            )
            pairs[name] = [inside[i, j].tolist(), outside[i, j].tolist()]
        return found, pairs

    def pairwise(self, networks: Networks, x: Tensor) -> Tensor:
        """Mean mutual information ``(S, S)`` of all pairs; probabilities of over 2 GiB are kept in half precision."""
        classes = member_probabilities(self.model, {n: t[None] for n, t in networks[0].items()}, x[:1]).shape[-1]
        large = 4 * len(networks) * len(x) * classes > 2**31
        probs = self.probabilities(networks, x, torch.float16 if large else torch.float32)
        total = torch.zeros(len(probs), len(probs), dtype=torch.float64, device="cpu")
        for points in probs.split(_POINTS, dim=1):
            part = points.to(self.device).float()
            total += pairwise_mutual_information(part / part.sum(-1, keepdim=True)).cpu() * points.shape[1]
        return total / len(x)

    def marginal(self, networks: Networks) -> dict[str, list[float]]:
        """Quantiles of the marginals of the first layer's weights, before and after removal."""
        layer = next(name for name in self.names if len(self.graph.shapes[name]) > 1)
        sets: dict[str, list[Tensor]] = {"before": [], "after": []}
        for block in networks.blocks(self.device):
            sets["before"].append(block[layer].cpu())
            sets["after"].append(removal("paper").apply(self.graph, block)[layer].cpu())
        joined = {when: torch.cat(parts).flatten() for when, parts in sets.items()}
        return {
            when: torch.quantile(t[:: max(1, t.numel() // 10**6)].float(), _LEVELS).tolist()
            for when, t in joined.items()
        }


@torch.no_grad()
def member_probabilities(model: nn.Module, states: States, x: Tensor, batch_size: int | None = None) -> Tensor:
    """Class probabilities ``(S, B, C)`` of every network of a stack, on its device, where the model has to be.

    25 networks run at once, on batches of 8 M values together unless their size is given.
    """
    model.eval()
    batch_size = batch_size or max(1, min(1000, 2**23 // (25 * max(1, x[:1].numel()))))
    device = next(iter(states.values())).device
    names = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}
    known = {n: t for n, t in states.items() if n in names}

    def one(state: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, state, (inputs,), tie_weights=False).softmax(-1)

    parts = [vmap(one, (0, None), chunk_size=25)(known, inputs.to(device)) for inputs in x.split(batch_size)]
    return torch.cat(parts, dim=1)


def mutual_information(probs: Tensor) -> Tensor:
    """Mutual information ``(B,)`` in nats between prediction and network, of ``(S, B, C)``."""
    entropy = torch.special.entr(probs.mean(0)).sum(-1)
    return (entropy - torch.special.entr(probs).sum(-1).mean(0)).clamp_min(0)


def classwise_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = _BINS) -> float:
    """Adaptive calibration error (ACE) of Nixon et al. 2019 (arXiv 1904.01685, section 3.3), a share in [0, 1].

    For each class the points are split into bins of equal numbers by its probability; the mean over bins and classes of
    the distance between mean probability and frequency.

    Args:
        probs: ``(B, C)``.
        targets: class numbers ``(B,)``.
        num_bins: at most one for each point.
    """
    hits = torch.nn.functional.one_hot(targets, probs.shape[-1])
    found, order = probs.double().sort(0)
    gaps = (found - hits.gather(0, order)).tensor_split(min(num_bins, len(probs)))
    return float(torch.stack([part.mean(0).abs().mean() for part in gaps]).mean())


def scores(
    probs: Tensor, targets: Tensor, ood: States, *, resamples: int = 100, seed: int = 0
) -> dict[str, tuple[float, float, float]]:
    """All columns that are of predictions: value, and both ends of its 95 % interval by a bootstrap over the points.

    OOD scores are one minus the largest class probability, as in TorchUncertainty's routine. Where there are several
    OOD sets, AUPR, FPR95 and OOD MI are means over them. All but mutual information (nats) are shares in [0, 1], the
    Brier score lies in [0, 2].

    Args:
        probs: ``(S, B, C)`` of all networks on test points.
        ood: name of each OOD set to ``(S, B', C)``.
    """
    mean = probs.mean(0)
    means = {name: p.mean(0) for name, p in ood.items()}
    inside = mutual_information(probs)
    outside = {name: mutual_information(p) for name, p in ood.items()}
    options: dict[str, Any] = {"task": "multiclass", "num_classes": mean.shape[-1], "num_bins": _BINS}

    def chosen(draw: Callable[[int], Tensor]) -> dict[str, float]:
        rows, others = draw(len(targets)), {name: draw(len(q)) for name, q in means.items()}
        p, y = mean[rows], targets[rows]
        aupr, fpr, information = [], [], []
        for name, q in means.items():
            score = torch.cat([1 - p.amax(-1), 1 - q[others[name]].amax(-1)])
            is_ood = (torch.arange(len(score), device=score.device) >= len(rows)).long()
            aupr.append(float(binary_average_precision(score, is_ood)))
            fpr.append(_once(FPR95(pos_label=1), score, is_ood))
            information.append(float(outside[name][others[name]].mean()))
        return {
            "accuracy": accuracy(p, y),
            "ece": _once(CalibrationError(**options), p, y),
            "ace": classwise_calibration_error(p, y),
            "top_label_ace": _once(CalibrationError(adaptive=True, **options), p, y),
            "brier": _once(BrierScore(num_classes=p.shape[-1]), p, y),
            "aupr": fmean(aupr),
            "fpr95": fmean(fpr),
            "id_mi": float(inside[rows].mean()),
            "ood_mi": fmean(information),
        }

    generator = torch.Generator().manual_seed(seed)
    whole = chosen(lambda count: torch.arange(count, device="cpu"))
    replicates = [
        chosen(lambda count: torch.randint(count, (count,), generator=generator, device="cpu"))
        for _ in range(resamples)
    ]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")
    made = {}
    for name, value in whole.items():
        column = torch.tensor([r[name] for r in replicates], dtype=torch.float64, device="cpu")
        low, high = torch.quantile(column, ends).tolist() if replicates else (math.nan, math.nan)
        made[name] = (value, low, high)
    return made


def _once(metric: Any, p: Tensor, y: Tensor) -> float:
    metric.update(p, y)
    return float(metric.compute())


def _networks(folders: Sequence[Path], wanted: int | None, like: States) -> Networks:
    """Networks of the runs' stores in equal shares, evenly spaced in each."""
    members: list[tuple[SampleStore, int]] = []
    numbers: list[int] = []
    key: list[Any] = []
    for k, folder in enumerate(folders):
        store = SampleStore.open(folder / "samples", like=like)
        count = len(store) if wanted is None else wanted // len(folders) + (k < wanted % len(folders))
        if count > len(store):
            raise ValueError(
                f"{folder} holds {len(store)} networks, {count} are wanted: train longer, or ask for fewer"
            )
        members += [(store, place) for place in evenly(len(store), count)]
        numbers += [k] * count
        key.append([digest_file(store.folder / "shards.log"), count])
    if len(numbers) < 2:
        raise ValueError(f"{folders[0]} holds {len(numbers)} network; a posterior needs at least two")
    return Networks(members, torch.tensor(numbers, device="cpu"), key)


def _test_set(data: LightningDataModule, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a test loader: the test set is the first one, the out-of-distribution set the second."""
    data.prepare_data()
    data.setup("test")
    loaders: Any = data.test_dataloader()
    loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    if number >= len(loaders):
        raise ValueError("a data module under ood has no out-of-distribution loader: set eval_ood: true")
    batches = [(batch[0], batch[1]) for batch in loaders[number]]
    return torch.cat([x for x, _ in batches]), torch.cat([torch.as_tensor(y, device="cpu") for _, y in batches])


def _trusted(path: Path, points: int) -> Tensor:
    """Probabilities of the first test points."""
    with np.load(path) as content:
        probs = torch.from_numpy(content["probs"]) if "probs" in content else torch.empty(0, device="cpu")
    if probs.ndim != 2 or len(probs) < points:
        raise ValueError(
            f"{path} holds probs of shape {tuple(probs.shape)}; expected (points, classes) of {points} test points or "
            "more"
        )
    return probs[:points].double()
