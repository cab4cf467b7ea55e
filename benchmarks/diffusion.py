"""Time and memory of finding the symmetries of full-size diffusion networks, on the meta device (no weights at all).

    python benchmarks/diffusion.py [sdxl] [sd15]

The configurations are those of Stable Diffusion XL's and 1.5's UNets, written out here; nothing is downloaded. What is
printed: parameters, seconds to build, seconds to discover, groups, and the process's peak memory.

Measured (two busy cores of 2.8 GHz, torch 2.15, diffusers 0.42): SDXL's UNet, 2567 million parameters, 104 s of
processor time, 568 permutation, 601 scale and 18 normalization groups, no operator without a rule, peak memory 6.1 GiB,
where the weights alone would take 9.6 GiB in single precision.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch

import tu_symmetry as tus


def sdxl() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The UNet of stable-diffusion-xl-base-1.0 and example inputs."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    inputs = (torch.empty(2, 4, 16, 16), torch.zeros(2, dtype=torch.long), torch.empty(2, 7, 2048))
    conditions = {"text_embeds": torch.empty(2, 1280), "time_ids": torch.empty(2, 6)}
    return model, inputs, {"added_cond_kwargs": conditions}


def sd15() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The UNet of stable-diffusion-v1-5 and example inputs."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    return model, (torch.empty(2, 4, 16, 16), torch.zeros(2, dtype=torch.long), torch.empty(2, 7, 768)), {}


NETWORKS = {"sdxl": sdxl, "sd15": sd15}


def main(names: list[str]) -> None:
    """Print a line for each network."""
    for name in names or ["sdxl"]:
        begin = time.perf_counter()
        with torch.device("meta"):
            model, inputs, kwargs = NETWORKS[name]()
        built, start = time.perf_counter() - begin, time.process_time()
        begin = time.perf_counter()
        graph = tus.discover_symmetries(model.eval(), inputs, example_kwargs=kwargs)
        taken, cpu = time.perf_counter() - begin, time.process_time() - start
        count = sum(p.numel() for p in model.parameters())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name}: {count / 1e6:.0f} million parameters, built in {built:.1f} s, discovered in {taken:.1f} s "
            f"({cpu:.1f} s of processor time), {len(graph.permutations)} permutation, {len(graph.scales)} scale and "
            f"{len(graph.normalizations)} normalization groups, no rule for {list(graph.unknown_operators) or 'none'}, "
            f"peak memory of the process {peak:.2f} GiB"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
