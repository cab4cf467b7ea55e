"""Time and memory of finding the symmetries of full-size diffusion networks, on the meta device (no weights at all).

The configurations are those of Stable Diffusion XL's and 1.5's UNets, written out here; nothing is downloaded.

Measured (two busy cores of 2.8 GHz, torch 2.15, diffusers 0.42): SDXL's UNet, 2567 million parameters, 104 s of
processor time, 568 permutation, 601 scale and 18 normalization groups, no operator without a rule, peak memory 6.1 GiB,
where the weights alone would take 9.6 GiB in single precision.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import tu_symmetry as tus
from benchmarks._measure import in_own_process, peak_memory
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.reporting.grid import Grid

SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def sdxl() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The UNet of stable-diffusion-xl-base-1.0 and example inputs."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(**SDXL)
    inputs = (torch.empty(2, 4, 16, 16), torch.zeros(2, dtype=torch.long), torch.empty(2, 7, 2048))
    conditions = {"text_embeds": torch.empty(2, 1280), "time_ids": torch.empty(2, 6)}
    return model, inputs, {"added_cond_kwargs": conditions}


def sd15() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The UNet of stable-diffusion-v1-5 and example inputs."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    return model, (torch.empty(2, 4, 16, 16), torch.zeros(2, dtype=torch.long), torch.empty(2, 7, 768)), {}


NETWORKS = {"sdxl": sdxl, "sd15": sd15}


def measure(name: str) -> dict[str, Any]:
    """Build a network on the meta device and discover its symmetries, in this process."""
    begin = time.perf_counter()
    with torch.device("meta"):
        model, inputs, kwargs = NETWORKS[name]()
    built, start = time.perf_counter() - begin, time.process_time()
    begin = time.perf_counter()
    graph = tus.discover_symmetries(model.eval(), inputs, example_kwargs=kwargs)
    return {
        "network": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "built": built,
        "seconds": time.perf_counter() - begin,
        "cpu": time.process_time() - start,
        "permutations": len(graph.permutations),
        "scales": len(graph.scales),
        "normalizations": len(graph.normalizations),
        "without_rule": list(graph.unknown_operators),
        "peak": peak_memory(),
    }


def run(settings: Settings) -> Section:
    """Every network in a process of its own; the smaller one alone for a quick run. Needs diffusers."""
    found = [in_own_process("benchmarks.diffusion", name) for name in (["sd15"] if settings.quick else NETWORKS)]
    columns = ["", "weights (million)", "CPU s", "permutation", "scale", "normalization", "no rule for", "peak GiB"]
    rows = [
        [
            r["network"],
            f"{r['parameters'] / 1e6:.0f}",
            f"{r['cpu']:.0f}",
            *(str(r[kind]) for kind in ("permutations", "scales", "normalizations")),
            ", ".join(r["without_rule"]) or "none",
            f"{r['peak'] / 2**30:.1f}",
        ]
        for r in found
    ]
    text = "UNets of diffusion models at full size, discovered on the meta device, one process each, PyTorch included."
    goals = [Goal("every operator has a rule", not any(r["without_rule"] for r in found), "see the table")]
    return Section("Diffusion models without weights", text, [Grid("Discovery", columns, rows)], goals, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[1])))
