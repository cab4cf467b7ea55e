"""The joint optimum of weights and precisions at the defaults: its time in epochs of training, and how near it ends."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._measure import Stopwatch, both, figure, in_own_process
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.laplace.joint.data import TrainingData
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import evaluating
from tu_symmetry.reporting.grid import Grid

EPOCHS, NATS = 100, 0.5  # goals: time of so many epochs, so near to the reference
_BATCH, _TIGHT = 100, 5e-3  # posterior standard deviations at which the reference ends
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network and its training.

    Attributes:
        title: in the table.
        network: ``lenet`` or ``resnet``.
        images: how many.
        epochs: of training.
        width: of the network's first stage.
    """

    title: str
    network: str
    images: int
    epochs: int
    width: int


CASES = {
    "lenet-1000": Case("LeNet with BatchNorm, 1,000 images", "lenet", 1000, 20, 6),
    "resnet-1000": Case("ResNet-18 of width 8, 1,000 images", "resnet", 1000, 20, 8),
    "lenet-10000": Case("LeNet with BatchNorm, 10,000 images", "lenet", 10_000, 5, 6),
    "resnet-full": Case("ResNet-18, 1,000 images", "resnet", 1000, 20, 64),  # an hour and a half
}
_PRODUCTS = Case("ResNet-18, 32 images", "resnet", 32, 1, 64)
_QUICK = {"quick": Case("LeNet of width 2, 60 images", "lenet", 60, 2, 2)}


def run(settings: Settings) -> Section:
    """Every case in a process of its own; a quick run stays in this one."""
    records = []
    for name, case in (_QUICK if settings.quick else CASES).items():
        settings.say(case.title)
        threads = str(torch.get_num_threads())
        found = measure(case) if settings.quick else in_own_process("benchmarks.joint", name, threads)
        settings.say(f"{figure(found['evidence']['cpu'] / found['epoch'])} epochs, {found['iterations']} directions")
        records.append(found)
    case = _QUICK["quick"] if settings.quick else _PRODUCTS
    settings.say(f"products, {case.title}")
    threads = str(torch.get_num_threads())
    each = measure_products(case) if settings.quick else in_own_process("benchmarks.joint", "products", threads)
    return section(records, each)


def section(records: list[Record], products: Record) -> Section:
    """The page of what was measured."""
    text = (
        "`optimize_evidence()` at its defaults, in epochs of the network's own training in the same process (Adam, "
        f"batches of {_BATCH}). The images are MNIST-like: scikit-learn's digits, enlarged to 28 × 28 (for the ResNet "
        "to three channels of 32 × 32), turned, shifted and scaled at random, with noise. LeNet: two convolutions of "
        "5 × 5 with 6 and 16 channels, BatchNorm, two linear layers, 37,128 weights. ResNet: torchvision's ResNet-18 "
        "with a CIFAR stem, 11.2 million weights, and the same narrowed to width 8, 176,402 weights. float32, one "
        "thread. *To the reference*: the objective (negative log evidence less log hyperprior, "
        f"nats) less that of the same search continued to {_TIGHT:g} posterior standard deviations and 1e-3 in the "
        "log precisions. *Certificate*: what the result's `gap` bounds the distance of the weights' part by. *NLL*: "
        "on up to 1,000 other images of the kind, no more than it was trained on.\n\n"
        "*Products*: what one direction of the search costs at full width: a product with the Jacobian and one with "
        "its transpose, with the linearization kept in memory or the network run again, in epochs of training on the "
        "same images; and the preconditioner, which does not depend on their number."
    )
    columns = [
        "case", "epoch\ncpu s", "curvature\nepochs", "evidence\ns", "evidence\nepochs", "directions",
        "to the reference\nnats", "certificate\nnats", "NLL\nnetwork", "NLL\nby the evidence",
    ]  # fmt: skip
    rows = [
        [
            r["title"],
            figure(r["epoch"]),
            figure(r["fit"]["cpu"] / r["epoch"]),
            both(r["evidence"]["seconds"], r["evidence"]["cpu"]),
            figure(r["evidence"]["cpu"] / r["epoch"]),
            f"{r['iterations']}{'' if r['converged'] else ', not converged'}",
            figure(_missing(r), 2),
            figure(r["gap"], 2),
            figure(r["nll"]["network"]),
            figure(r["nll"]["evidence"]),
        ]
        for r in records
    ]
    both_products = [
        [
            f"{products['title']}, {name}",
            figure(products["epoch"]),
            figure(products[name]["push"] / products["epoch"]),
            figure(products[name]["pull"] / products["epoch"]),
            figure(products["preconditioner"]),
        ]
        for name in ("kept", "run again")
    ]
    each = ["case", "epoch\ncpu s", "J v\nepochs", "J^T u\nepochs", "preconditioner\ncpu s"]
    goals = []
    for r in records:
        epochs, missing = r["evidence"]["cpu"] / r["epoch"], _missing(r)
        goals += [
            Goal(
                f"{r['title']}: within {EPOCHS} epochs of training",
                r["converged"] and epochs <= EPOCHS,
                f"{figure(epochs)} epochs{'' if r['converged'] else ', not converged'}",
            ),
            Goal(
                f"{r['title']}: at most {NATS} nats above the reference",
                missing is not None and missing <= NATS,
                "not measured"
                if missing is None
                else f"{figure(missing, 2)} nats, after {r['reference_iterations']} more directions",
            ),
        ]
    grids = [Grid("Joint optimum", columns, rows), Grid("Products", each, both_products)]
    data = {"cases": records, "products": products}
    return Section("The joint optimum of weights and precisions", text, grids, goals, data)


def _missing(record: Record) -> float | None:
    """How far the objective is above the reference (nats); None where a run was ended before that."""
    return None if record["reference"] is None else float(record["objective"] - record["reference"])


def images(count: int, *, size: int, channels: int, seed: int) -> tuple[Tensor, Tensor]:
    """MNIST-like images ``[count, channels, size, size]`` of mean 0 and variance 1, and their labels."""
    from sklearn.datasets import load_digits

    digits, generator = load_digits(), torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(digits.target), (count,), generator=generator)
    x = torch.as_tensor(digits.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
    x = interpolate(x, size=(20, 20), mode="bilinear")
    x = nn.functional.pad(x, [(size - 20) // 2] * 4)
    angle, scale, *shift = (torch.rand(4, count, generator=generator) - 0.5) * torch.tensor(
        [[0.6], [0.3], [0.2], [0.2]]
    )
    cosine, sine = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    turn = torch.stack([cosine, -sine, shift[0], sine, cosine, shift[1]], 1).view(-1, 2, 3)
    x = grid_sample(x, affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    return ((x - x.mean()) / x.std()).expand(-1, channels, -1, -1).contiguous(), torch.as_tensor(digits.target)[chosen]


def network(case: Case) -> nn.Module:
    """An untrained network."""
    torch.manual_seed(0)
    if case.network == "resnet":
        from torchvision.models.resnet import BasicBlock, ResNet

        model = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
        model.conv1 = nn.Conv2d(3, case.width, 3, padding=1, bias=False)
        model.maxpool, model.bn1, model.inplanes = nn.Identity(), nn.BatchNorm2d(case.width), case.width  # type: ignore[assignment]
        for stage in range(4):
            layer = model._make_layer(BasicBlock, case.width << stage, 2, stride=1 if stage == 0 else 2)
            setattr(model, f"layer{stage + 1}", layer)
        model.fc = nn.Linear(8 * case.width, 10)
        return model
    first, second = case.width, 8 * case.width // 3
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2, bias=False), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, bias=False), nn.BatchNorm2d(second), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(25 * second, 14 * first), nn.ReLU(), nn.Linear(14 * first, 10),
    )  # fmt: skip


def measure(case: Case) -> Record:
    """Train, fit, choose the precisions, and continue to the reference."""
    shape = {"size": 32, "channels": 3} if case.network == "resnet" else {"size": 28, "channels": 1}
    (x, y), (far, labels) = (images(n, seed=k, **shape) for k, n in enumerate((case.images, min(case.images, 1000))))
    model, generator = network(case), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Stopwatch() as training:
        for _ in range(case.epochs):
            for some in torch.randperm(len(x), generator=generator).split(_BATCH):
                optimizer.zero_grad()
                cross_entropy(model(x[some]), y[some]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    model.eval()
    la = LinearizedLaplace(model)
    with Stopwatch() as fit:
        la.fit(DataLoader(TensorDataset(x, y), _BATCH))
    path: list[Record] = []
    with Stopwatch() as evidence:
        result = la.optimize_evidence(progress=partial(_note, path, time.process_time()))
    objective = la.fitted.objective()
    quality = la.calibrate(DataLoader(TensorDataset(far, labels), _BATCH), sharpen=False)
    tight = la.optimize_evidence(  # it goes on from where it is
        mode_tolerance=_TIGHT, tolerance=1e-3, progress=partial(_note, [], time.process_time())
    )
    return {
        "title": case.title,
        "epoch": training.cpu / case.epochs,
        "fit": {"seconds": fit.wall, "cpu": fit.cpu},
        "evidence": {"seconds": evidence.wall, "cpu": evidence.cpu},
        "iterations": result.iterations,
        "converged": result.converged,
        "gap": result.gap,
        "objective": objective,
        "reference": la.fitted.objective(),
        "reference_iterations": tight.iterations,
        "nll": {"network": quality.network.nll, "evidence": quality.evidence.nll},
        "path": path,
    }


def _note(path: list[Record], start: float, info: Record) -> None:
    """Add what a direction found to the path, and print it, so that a run of minutes can be followed."""
    if info["stage"] == "evidence":
        found = {k: info[k] for k in ("iteration", "objective", "gradient_norm", "change", "gap")}
        path.append({**found, "change": None if math.isinf(info["change"]) else info["change"]})
        path[-1]["cpu"] = time.process_time() - start
        print(json.dumps(path[-1]), file=sys.stderr, flush=True)


def measure_products(case: Case) -> Record:
    """CPU seconds of an epoch, and of products with the Jacobian at the same images."""
    shape = {"size": 32, "channels": 3} if case.network == "resnet" else {"size": 28, "channels": 1}
    x, y = images(case.images, seed=0, **shape)
    model = network(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    epochs = []
    for _ in range(2):
        with Stopwatch() as epoch:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        epochs.append(epoch.cpu)
    model.eval()
    loader = DataLoader(TensorDataset(x, y), len(x))
    la = LinearizedLaplace(model).fit(loader)
    vector = torch.randn(la.tangent.size, generator=torch.Generator().manual_seed(1))
    found: Record = {"title": case.title, "epoch": min(epochs)}
    with evaluating(model):
        for name, budget in (("kept", 64 << 30), ("run again", 0)):
            data = TrainingData(la.tangent, la.likelihood, loader, budget=budget)
            found[name] = {}
            for _ in range(2):
                with Stopwatch() as push:
                    pushed = data.push(vector)
                with Stopwatch() as pull:
                    data.pull(pushed)
                found[name] = {"push": push.cpu, "pull": pull.cpu}
        with Stopwatch() as preconditioner:
            la.posterior.covariance_product(vector)
    return found | {"preconditioner": preconditioner.cpu}


def main(name: str, threads: str) -> None:
    """One case, or the products, as JSON on the last line."""
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    print(json.dumps(measure_products(_PRODUCTS) if name == "products" else measure(CASES[name])))


if __name__ == "__main__":
    main(*sys.argv[1:])
