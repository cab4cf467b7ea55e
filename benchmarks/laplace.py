"""Linearized Laplace against laplace-torch: curvature, evidence, and the predictive at few and many classes."""

from __future__ import annotations

import ctypes
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._measure import both, figure, in_own_process, interleave, times
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.laplace.blocks import KroneckerBlock
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import evaluating
from tu_symmetry.reporting.grid import Grid

FITS = ((64, 32), (64, 64), (512, 64))  # images, width of the first stage
PREDICTIVES = ((10, 64, 2), (100, 16, 1), (100, 32, 1))  # classes, width, test images
OURS, PEER, BARE = "this library", "laplace-torch 0.3", "bare passes"
PROBIT, MONTE_CARLO = f"{PEER}, probit", f"{PEER}, 100 samples"
EXACT, EXACT_PROBIT = "exact covariances, 100 samples (default)", "exact covariances, probit"
_BATCH, _MANY, _DRAWS, _REFERENCE = 32, 8, 16, 200_000
Record = dict[str, Any]


def run(settings: Settings) -> Section:
    """Every part in a process of its own; a quick run stays in this one."""
    threads = str(torch.get_num_threads())

    def measure(part: str, numbers: tuple[int, ...]) -> Any:
        if settings.quick:
            return (measure_fit if part == "fit" else measure_predictive)(*numbers)
        return in_own_process("benchmarks.laplace", part, "x".join(map(str, numbers)), threads)

    fits, predictives = [], []
    for images, width in ((16, 4),) if settings.quick else FITS:
        settings.say(f"curvature and evidence, {images} images, width {width}")
        record = measure("fit", (images, width))
        settings.say(f"CPU seconds: {OURS} {figure(record[OURS]['cpu'])}, {PEER} {figure(record[PEER]['cpu'])}")
        fits.append(record)
    for classes, width, count in ((3, 4, 2),) if settings.quick else PREDICTIVES:
        settings.say(f"predictive, {classes} classes, width {width}")
        rows = measure("predictive", (classes, width, count))
        for row in rows:
            settings.say(f"{row['method']}: {row['error'] or 'CPU ' + figure(row['cpu']) + ' s for each image'}")
        predictives.extend(rows)
    return section(fits, predictives)


def section(fits: list[Record], predictives: list[Record]) -> Section:
    """The page of what was measured."""
    text = (
        "ResNet-18 with a CIFAR stem (3 × 3, no pooling) and BatchNorm, whose affine parameters are frozen, since "
        "laplace-torch raises on them; random weights, running statistics of one batch, random images of 32 × 32 in "
        f"batches of {_BATCH}; float32. *Width*: channels of the first stage; 64 is ResNet-18 itself.\n\n"
        "*Curvature*: KFAC of the generalized Gauss-Newton matrix (exact, expand, 10 classes; for laplace-torch its "
        "default backend, curvlinops). *Bare passes*: one forward pass and one backward pass for each column of the "
        "output Hessian's root (9 for 10 classes), to the inputs of all layers and without gradients of weights. "
        "*Decompositions*: CPU time inside `eigh`, `qr` and `geqrf`, which does not depend on the number of images, "
        "but for one thing: a factor of fewer rows than half its features is decomposed by way of the rows here, which "
        "concerns the last stage of width 64 up to 144 images, of width 32 up to 72. "
        "*Factors differ*: largest relative difference (Frobenius) of a "
        "block `A ⊗ G`. *Evidence*: one prior precision, flat hyperprior, to the exact maximum; laplace-torch takes "
        "its default of 100 steps of Adam.\n\n"
        "*Predictive*: of one or two images; one and the same posterior (100 classes in narrower networks: at full "
        "width laplace-torch's Jacobian of one image takes 4.5 GB, and more than once). *Error*: mean total variation "
        f"distance to the exact GLM predictive, {_REFERENCE:,} samples of Gaussian logits with laplace-torch's mean "
        "and covariance. *Memory*: growth of the resident set during the call. *Weight samples* are drawn once, before "
        "the calls, and kept, so that their time is given apart; results of other batches of images "
        "cost the time of the call alone. The two links of laplace-torch share one call. Rows for "
        f"{_MANY} images show what a batch saves. *Bare passes*: a forward pass and the gradient of every output with "
        "respect to the inputs, on copies of the images, and nothing made of it: no method that goes through the "
        "network backward is faster than they are."
    )
    columns = [
        "images, width", "bare passes\ns", f"{OURS}\ns", f"{PEER}\ns", "faster", "to bare\npasses",
        "decompositions\nours, cpu s", "decompositions\ntheirs, cpu s", "factors differ",
    ]  # fmt: skip
    rows = [
        [
            _title(r),
            *(both(r[name]["seconds"], r[name]["cpu"]) for name in (BARE, OURS, PEER)),
            times(r[PEER]["cpu"], r[OURS]["cpu"]),
            times(r[OURS]["cpu"], r[BARE]["cpu"]),
            figure(r[OURS]["decompositions"]),
            figure(r[PEER]["decompositions"]),
            figure(r["difference"], 2),
        ]
        for r in fits
    ]
    evidence = [
        [
            _title(r),
            name,
            both(e["seconds"], e["cpu"]),
            f"{100 * e['cpu'] / r[name]['cpu']:.2g} %",
            f"{e['precision']:.5g}",
            f"{e['log_evidence']:.3f}",
        ]
        for r in fits
        for name, e in r["evidence"].items()
    ]
    predictive = [
        [
            f"{r['classes']} classes, width {r['width']}, {r['method']}",
            str(r["images"]),
            r["error"] or both(r["seconds"], r["cpu"]),
            times(r["peer_cpu"], r["cpu"]),
            figure(r["drawing"]),
            figure(r["distance"], 2),
            figure(r["memory"], 3),
        ]
        for r in predictives
    ]
    grids = [
        Grid("Curvature", columns, rows),
        Grid("Evidence", ["images, width", "method", "s", "of its fit", "precision", "log evidence (nats)"], evidence),
        Grid(
            "Predictive",
            ["classes, width, method", "images", "s for each image", "faster", "drawing, cpu s", "error", "memory\nGB"],
            predictive,
        ),
    ]
    data = {"fit": fits, "predictive": predictives}
    return Section(
        "Linearized Laplace", text, grids, _goals(fits, predictives), data, ("laplace-torch", "curvlinops-for-pytorch")
    )


def network(classes: int, width: int) -> nn.Module:
    """ResNet-18 for small images with frozen BatchNorm affines; under a width of 8 a small network of the same kind."""
    torch.manual_seed(0)
    if width < 8:
        model: nn.Module = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=4, padding=1, bias=False),
            nn.Flatten(),
            nn.Linear(64 * width, classes),
        )
    else:
        from torchvision.models.resnet import BasicBlock, ResNet

        model = resnet = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=classes)
        resnet.conv1, resnet.maxpool = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.Identity()
        resnet.bn1, resnet.inplanes = nn.BatchNorm2d(width), width
        for stage in range(4):
            layer = resnet._make_layer(BasicBlock, width << stage, 2, stride=1 if stage == 0 else 2)
            setattr(resnet, f"layer{stage + 1}", layer)
        resnet.fc = nn.Linear(8 * width, classes)
    model(torch.randn(_BATCH, 3, 32, 32))  # running statistics
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model.eval()


def _loader(images: int, classes: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(images, 3, 32, 32, generator=generator)
    y = torch.randint(0, classes, (images,), generator=generator)
    return DataLoader(TensorDataset(x, y), _BATCH)


def _peer(model: nn.Module) -> Any:
    import laplace

    return laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron")


def _ours(model: nn.Module, **options: Any) -> LinearizedLaplace:
    return LinearizedLaplace(model, "classification", prior="single", evaluate_at="map", bias="shared", **options)


@contextmanager
def _decomposition_clock() -> Iterator[list[float]]:
    """Collects the CPU seconds of every eigenvalue or QR decomposition inside the block, whoever makes it."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.process_time()
        result = function(*args, **options)
        seconds.append(time.process_time() - start)
        return result

    with (
        patch.object(torch.linalg, "eigh", partial(timed, torch.linalg.eigh)),
        patch.object(torch.linalg, "qr", partial(timed, torch.linalg.qr)),
        patch.object(torch, "geqrf", partial(timed, torch.geqrf)),
    ):
        yield seconds


def _title(record: Record) -> str:
    return f"{record['images']} images, width {record['width']}"


def measure_fit(images: int, width: int = 64) -> Record:
    """Curvature by both libraries and the passes that no method can do without; evidence."""
    for build in (_ours, _peer):  # imports and whatever else a first call has to do
        build(network(10, 4)).fit(_loader(4, 10))
    model, loader = network(10, width), _loader(images, 10)

    def fit(build: Callable[[nn.Module], Any]) -> tuple[Any, float]:
        with _decomposition_clock() as clock:
            la = build(model)
            la.fit(loader)
        return la, sum(clock)

    candidates: dict[str, Callable[[], Callable[[], Any]]] = {
        BARE: lambda: partial(_bare_passes, model, loader),
        OURS: lambda: partial(fit, _ours),
        PEER: lambda: partial(fit, _peer),
    }
    outcomes = interleave(candidates, 1)
    record: Record = {"images": images, "width": width}
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            raise RuntimeError(f"{name}: {outcome.error}")
        record[name] = {"seconds": outcome.median, "cpu": outcome.median_cpu}
    (ours, inside), (peer, inside_peer) = outcomes[OURS].value, outcomes[PEER].value
    record[OURS]["decompositions"], record[PEER]["decompositions"] = inside, inside_peer
    record["difference"] = _factor_difference(ours, peer)
    steps: dict[str, Callable[[], Callable[[], Any]]] = {
        OURS: lambda: partial(ours.optimize_evidence, hyperprior=None),
        PEER: lambda: partial(
            peer.optimize_prior_precision, pred_type="glm", method="marglik", prior_structure="scalar"
        ),
    }
    found = interleave(steps, 1)
    precision = {OURS: float(ours.log_precision.exp()), PEER: float(peer.prior_precision)}
    record["evidence"] = {
        name: {"seconds": o.median, "cpu": o.median_cpu, "precision": precision[name]} for name, o in found.items()
    }
    for name in precision:
        ours.set_precision(precision[name])
        record["evidence"][name]["log_evidence"] = ours.log_marginal_likelihood()
    return record


def _bare_passes(model: nn.Module, loader: DataLoader[Any]) -> None:
    la = _ours(model)
    varying = [p for p in model.parameters() if p.requires_grad]
    for p in varying:
        p.requires_grad_(False)
    try:
        for inputs, targets in loader:
            inputs.requires_grad_()
            outputs = model(inputs)
            root = la.likelihood.hessian_root(outputs.detach(), targets)
            for i, column in enumerate(root):
                torch.autograd.grad(outputs, inputs, column, retain_graph=i + 1 < len(root))
    finally:
        for p in varying:
            p.requires_grad_(True)


def _factor_difference(ours: LinearizedLaplace, peer: Any) -> float:
    """Largest relative difference of a Kronecker product, from inner products of its factors in float64."""
    worst = 0.0
    for block, factors in zip(ours.posterior.blocks, peer.H_facs.kfacs, strict=True):
        if not isinstance(block, KroneckerBlock):
            continue
        own = ((block.outputs[0], block.output_values[0]), (block.inputs[0], block.input_values[0]))
        both_equal, mixed, theirs = 1.0, 1.0, 1.0
        for (basis, values), other in zip(own, factors, strict=True):
            mine, other = ((basis * values) @ basis.T).double(), other.double()
            both_equal *= float(mine.square().sum())
            mixed *= float((mine * other).sum())
            theirs *= float(other.square().sum())
        worst = max(worst, max(0.0, (both_equal - 2 * mixed + theirs) / theirs) ** 0.5)
    return worst


def measure_predictive(classes: int, width: int = 32, images: int = 1) -> list[Record]:
    """Predictives under one and the same posterior: a record for each method."""
    model = network(classes, width)
    la = _ours(model, fisher_type="mc").fit(_loader(_DRAWS, classes))
    la.optimize_evidence(hyperprior=None)
    peer = la.to_laplace_torch()
    x = torch.randn(_MANY, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    few = x[:images]
    seen: list[tuple[Tensor, Tensor]] = []
    inner = peer._glm_predictive_distribution

    def distribution(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(inner(*args, **options))
        return seen[-1]

    peer._glm_predictive_distribution = distribution
    weights = f"{_DRAWS} weight samples"
    calls: dict[tuple[str, int], Callable[[], Tensor]] = {
        (PROBIT, images): lambda: peer(few, pred_type="glm", link_approx="probit"),
        (EXACT, images): lambda: la.predictive(few, covariance="exact"),
        (EXACT_PROBIT, images): lambda: la.predictive(few, covariance="exact", link_approx="probit"),
        (weights, images): lambda: la.predictive(few, covariance="samples", num_samples=_DRAWS),
        (BARE, images): lambda: _bare_gradients(model, few, classes),
        (EXACT, _MANY): lambda: la.predictive(x, covariance="exact"),
        (weights, _MANY): lambda: la.predictive(x, covariance="samples", num_samples=_DRAWS),
    }
    start = time.process_time()
    with evaluating(model):
        list(la.posterior.draws(_DRAWS, 0))
    drawing = time.process_time() - start
    outcomes = interleave({f"{name}, {n} images": partial(_with_memory, c) for (name, n), c in calls.items()}, 1)
    first = next(iter(outcomes.values()))
    records: list[Record] = []
    for (name, count), outcome in zip(calls, outcomes.values(), strict=True):
        records.append(
            {
                "classes": classes,
                "width": width,
                "method": name,
                "images": count,
                "error": outcome.error,
                "seconds": None if outcome.median is None else outcome.median / count,
                "cpu": None if outcome.median_cpu is None else outcome.median_cpu / count,
                "peer_cpu": None if first.median_cpu is None else first.median_cpu / images,
                "drawing": drawing if name == weights else None,
                "distance": None,
                "memory": None if outcome.error else outcome.value[1],
            }
        )
    if seen:
        mean, covariance = (t.double() for t in seen[0])
        exact = _softmax_mean(mean, covariance, _REFERENCE, seed=3)
        for record, outcome in zip(records, outcomes.values(), strict=True):
            if outcome.error is None and record["method"] != BARE:
                record["distance"] = float(0.5 * (outcome.value[0][:images] - exact).abs().sum(-1).mean())
        sampled = 0.5 * (_softmax_mean(mean, covariance, 100, seed=4) - exact).abs().sum(-1).mean()
        same = {"method": MONTE_CARLO, "distance": float(sampled)}
        records.insert(1, records[0] | same)
    return records


def _bare_gradients(model: nn.Module, inputs: Tensor, outputs: int) -> Tensor:
    """Gradients of all outputs with respect to the inputs, 16 at a time, on copies of the batch."""
    copies = max(1, 16 // len(inputs))
    turns = -(-outputs // copies)
    columns = torch.eye(turns * copies, outputs).repeat_interleave(len(inputs), 0).view(turns, -1, outputs)
    varying = [p for p in model.parameters() if p.requires_grad]
    for p in varying:
        p.requires_grad_(False)
    try:
        repeated = inputs.repeat(copies, 1, 1, 1).requires_grad_()
        found = model(repeated)
        return torch.cat([torch.autograd.grad(found, repeated, c, retain_graph=True)[0] for c in columns])
    finally:
        for p in varying:
            p.requires_grad_(True)


def _softmax_mean(mean: Tensor, covariance: Tensor, count: int, seed: int) -> Tensor:
    """Mean softmax of Gaussian logits, with the exact covariance and fresh noise for every input."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    generator, total = torch.Generator().manual_seed(seed), torch.zeros_like(mean)
    for piece in torch.arange(count).split(10_000):
        noise = torch.randn(len(piece), *mean.shape, generator=generator, dtype=mean.dtype)
        total += (mean + torch.einsum("bcd,sbd->sbc", root, noise)).softmax(-1).sum(0)
    return total / count


def _with_memory(call: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, float | None]]:
    """The call, with the growth of the resident set during it (GB); None where the system does not tell."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")

    def resident(key: str) -> float:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return float(line.split()[1]) / 1e6

    def measured() -> tuple[Tensor, float | None]:
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed does not count as there already
            clear.write_text("5")  # the peak starts anew
        except (OSError, AttributeError):
            return call(), None
        before = resident("VmRSS")
        return call(), resident("VmHWM") - before

    return measured


def _goals(fits: list[Record], predictives: list[Record]) -> list[Goal]:
    speed = {_title(r): r[PEER]["cpu"] / r[OURS]["cpu"] for r in fits}
    worst = max(r["difference"] for r in fits)
    shares = {_title(r): 100 * r["evidence"][OURS]["cpu"] / r[OURS]["cpu"] for r in fits}
    goals = [
        Goal(
            "curvature at least 2 times as fast, equal factors",
            min(speed.values()) >= 2 and worst < 1e-4,
            f"{'; '.join(f'{n}: {figure(s)}×' for n, s in speed.items())}; factors differ by {worst:.1e}",
        ),
        Goal(
            "evidence in less than 5 % of the fit's time",
            max(shares.values()) < 5,
            "; ".join(f"{n}: {s:.2g} %" for n, s in shares.items()),
        ),
    ]
    for classes, width in dict.fromkeys((r["classes"], r["width"]) for r in predictives):
        rows = {r["method"]: r for r in reversed(predictives) if (r["classes"], r["width"]) == (classes, width)}
        for own, other in ((EXACT, MONTE_CARLO), (EXACT_PROBIT, PROBIT)):
            mine, peer = rows[own], rows.get(other)
            promise = f"{classes} classes, width {width}, {own}: at least 20 times as fast as {other}, error no larger"
            if peer is None or peer["cpu"] is None or mine["cpu"] is None:
                goals.append(Goal(promise, False, "did not run"))
                continue
            ratio = peer["cpu"] / mine["cpu"]
            found = f"{figure(ratio)}×, error {mine['distance']:.2g} against {peer['distance']:.2g}"
            goals.append(Goal(promise, ratio >= 20 and mine["distance"] <= peer["distance"] * 1.01 + 1e-6, found))
    return goals


def main(part: str, numbers: str, threads: str) -> None:
    """One part, as JSON on the last line; its numbers are joined by ``x``."""
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    print(json.dumps((measure_fit if part == "fit" else measure_predictive)(*map(int, numbers.split("x")))))


if __name__ == "__main__":
    main(*sys.argv[1:])
