"""Discovery over the torchvision classification families: time against torch.export, verification, and memory."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import tu_symmetry as tus
from benchmarks._measure import both, figure, in_own_process, interleave
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.reporting.grid import Grid

MODELS = (
    "alexnet", "vgg11", "vgg16_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121",
    "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x1_0", "squeezenet1_1", "googlenet", "inception_v3",
    "efficientnet_b0", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "mnasnet0_5", "convnext_tiny",
    "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t",
)  # fmt: skip
QUICK = ("squeezenet1_1",)
_REPEATS = 3
_MEBIBYTE = 2**20
Record = dict[str, Any]


def run(settings: Settings) -> Section:
    """Measure each model in a process of its own."""
    names = QUICK if settings.quick else MODELS
    rows, data = [], []
    for k, name in enumerate(names, 1):
        found = _in_own_process(name, 1 if settings.quick else _REPEATS)
        data.append(found)
        rows.append(_row(found))
        settings.say(f"{name} ({k} of {len(names)}): {found.get('error') or _summary(found)}")
    header = [
        "model", "parameters\nmillion", "groups\npermutation", "groups\nscale", "groups\nnormalization", "export\ns",
        "discovery\ns", "limit\ncpu s", "verification\ns",
        "memory, discovery\n× model", "memory, verification\n× model", "memory, one pass\n× model",
    ]  # fmt: skip
    text = (
        "Each model in a process of its own, which discovers and verifies a small network first, so that imports and "
        "first-use costs of PyTorch are not counted. *Export* is `torch.export.export` alone; *discovery* is "
        "`discover_symmetries` in all, its own export included; both are medians of three, in turn. The limit is twice "
        "the export plus 0.5 s. *Memory* is the growth of the process's largest resident set (getrusage) over what was "
        "resident with the model loaded, relative to the size of the model's parameters and buffers; verification "
        "holds one set of weights in float64, which is twice the model, and the activations, which are most of it for "
        "small models; *one pass* is the same growth by one forward pass with such weights, in a process that does "
        "nothing else: the least that any verification by runs takes. Inputs are one 224 × 224 image "
        "(299 × 299 for Inception v3); weights are random."
    )
    return Section("Discovery and verification", text, [Grid("torchvision families", header, rows)], _goals(data), data)


def _in_own_process(name: str, repeats: int) -> Record:
    try:
        threads = str(torch.get_num_threads())
        bare: float = in_own_process("benchmarks.discovery", name, "bare", threads)
        found: Record = in_own_process("benchmarks.discovery", name, str(repeats), threads)
    except RuntimeError as error:
        return {"model": name, "error": str(error)[:160]}
    return found | {"pass_memory": bare}


def measure(name: str, repeats: int) -> Record:
    """All figures of one model; meant for a fresh process, as memory is measured by the process's peak."""
    model, inputs, size, resident = _loaded(name)
    graph = tus.discover_symmetries(model, inputs)
    after_discovery = _peak()
    checked = interleave({"verify": lambda: lambda: tus.verify_symmetries(graph, model, inputs)}, 1)["verify"]
    after_verification = _peak()
    timed = interleave(
        {
            "export": lambda: lambda: torch.export.export(model, (inputs,), strict=False),
            "discovery": lambda: lambda: tus.discover_symmetries(model, inputs),
        },
        repeats,
    )
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "permutations": len(graph.permutations),
        "scales": len(graph.scales),
        "normalizations": len(graph.normalizations),
        "unknown_operators": list(graph.unknown_operators),
        "export_seconds": timed["export"].median,
        "export_cpu": timed["export"].median_cpu,
        "discovery_seconds": timed["discovery"].median,
        "discovery_cpu": timed["discovery"].median_cpu,
        "verification_seconds": checked.median,
        "verification_cpu": checked.median_cpu,
        "verification_error": checked.error,
        "discovery_memory": max(0, after_discovery - resident) / size,
        "verification_memory": max(0, after_verification - resident) / size,
        "model_mebibytes": size / _MEBIBYTE,
    }


def pass_memory(name: str) -> float:
    """The memory of one forward pass in float64, in sizes of the model; meant for a fresh process."""
    model, inputs, size, resident = _loaded(name)
    state = {n: t.double() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    with torch.no_grad():
        torch.func.functional_call(model, state, (inputs.double(),))
    return max(0, _peak() - resident) / size


def _loaded(name: str) -> tuple[nn.Module, Tensor, int, int]:
    """A model, its inputs, its size and the resident set in bytes, when a small one has been through everything."""
    import torchvision

    warm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    _verified(warm, torch.randn(1, 3, 8, 8))
    plain = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(**plain).eval()
    side = 299 if name == "inception_v3" else 224
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    return model, torch.randn(1, 3, side, side), size, _resident()


def _verified(model: nn.Module, inputs: Tensor) -> None:
    tus.verify_symmetries(tus.discover_symmetries(model, inputs), model, inputs)


def _peak() -> int:
    """The largest resident set that the process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident() -> int:
    """The resident set of the process now, in bytes (the peak where the system does not say)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return _peak()


def _row(found: Record) -> list[str]:
    if "error" in found:
        return [found["model"], found["error"], *["–"] * 10]
    return [
        found["model"],
        figure(found["parameters"] / 1e6),
        str(found["permutations"]),
        str(found["scales"]),
        str(found["normalizations"]),
        both(found["export_seconds"], found["export_cpu"]),
        both(found["discovery_seconds"], found["discovery_cpu"]),
        figure(_limit(found)),
        found["verification_error"] or both(found["verification_seconds"], found["verification_cpu"]),
        figure(found["discovery_memory"], 2),
        figure(found["verification_memory"], 2),
        figure(found["pass_memory"], 2),
    ]


def _limit(found: Record) -> float:
    return 2 * float(found["export_cpu"]) + 0.5


def _summary(found: Record) -> str:
    return (
        f"CPU: export {figure(found['export_cpu'])} s, discovery {figure(found['discovery_cpu'])} s, "
        f"verification {found['verification_error'] or figure(found['verification_cpu'])} s"
    )


def _goals(data: list[Record]) -> list[Goal]:
    worked = [d for d in data if "error" not in d and d["verification_error"] is None]
    missing = [d["model"] for d in data if d not in worked]
    goals = [Goal("every model discovered and verified", not missing, ", ".join(missing) or f"{len(data)} models")]
    if not worked:
        return goals
    late = [d["model"] for d in worked if d["discovery_cpu"] > _limit(d)]
    ratio = median(d["discovery_cpu"] / d["export_cpu"] for d in worked)
    found = f"median {figure(ratio)} × export; over the limit: {', '.join(late) or 'none'}"
    goals.append(Goal("discovery within twice the export plus 0.5 s", not late, found))
    for what in ("discovery", "verification"):
        over = [f"{d['model']} {figure(d[f'{what}_memory'], 2)}" for d in worked if d[f"{what}_memory"] > 3]
        goals.append(
            Goal(f"memory of {what} within three times the model", not over, f"over: {', '.join(over) or 'none'}")
        )
    bare = [d["model"] for d in worked if d["pass_memory"] > 3]
    goals[-1] = replace(
        goals[-1], found=f"{goals[-1].found}; one pass takes more than that for {', '.join(bare) or 'none'}"
    )
    for d in worked:
        if d["model"] == "resnet50":
            seconds = d["verification_cpu"]
            goals.append(Goal("verification of resnet50 under 20 s", seconds < 20, f"{figure(seconds)} s"))
    return goals


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    once = sys.argv[2] == "bare"
    print(json.dumps(pass_memory(sys.argv[1]) if once else measure(sys.argv[1], int(sys.argv[2]))))
