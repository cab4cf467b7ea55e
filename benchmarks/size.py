"""Networks larger than memory, by the command line: a decoder of a billion weights, SDXL's UNet of 2.6 billion.

Weights are random, made and moved by a planted element tensor by tensor. ``tu-symmetry align`` and ``merge`` run in
processes of their own, of which the resident memory that is no page of a file is looked at several times a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._measure import both
from benchmarks._report import Goal, Section, Settings
from benchmarks.diffusion import SDXL
from tu_symmetry.alignment.moves import Move
from tu_symmetry.checkpoints.architecture import Architecture
from tu_symmetry.checkpoints.files import silent, verified_groups
from tu_symmetry.files import write_safetensors
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import open_state
from tu_symmetry.symmetry.action import Permuted
from tu_symmetry.symmetry.elements import random_permutation

_SHARDS = 4  # files of a network
_DEVIATION = 0.02  # of weights
_PAUSE = 0.1  # seconds between two looks at a process


def decoder(**sizes: int) -> nn.Module:
    """A decoder like Llama, of a billion weights if nothing else is said."""
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = {
        "vocab_size": 64000, "hidden_size": 2048, "intermediate_size": 2816, "num_hidden_layers": 28,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**usual | sizes, use_cache=False))


def unet(**sizes: Any) -> nn.Module:
    """The UNet of SDXL if nothing else is said, whose conditions are inputs like the others."""
    from diffusers import UNet2DConditionModel

    class Positional(UNet2DConditionModel):  # type: ignore[misc]
        def forward(self, sample: Tensor, timestep: Tensor, text: Tensor, text_embeds: Tensor, time_ids: Tensor) -> Any:
            conditions = {"text_embeds": text_embeds, "time_ids": time_ids}
            return super().forward(sample, timestep, text, added_cond_kwargs=conditions)

    return Positional(**SDXL | sizes)


@dataclass(frozen=True)
class Case:
    """A network by its words on the command line, and those of one of the same tensors that is narrow."""

    name: str
    model: str
    inputs: tuple[str, ...]
    narrow: tuple[str, ...]
    dtype: str
    commands: tuple[str, ...] = ("align", "merge")
    init: tuple[str, ...] = ()
    noise: float = 0.0  # of the second network's weights, in deviations of the first one's

    def architecture(self) -> Architecture:
        """As the commands build it."""
        return Architecture(self.model, self.inputs, self.init, getattr(torch, self.dtype), self.narrow)

    def words(self) -> list[str]:
        """The options of the commands."""
        inputs = [word for text in self.inputs for word in ("--input", text)]
        init = ["--init", *self.init] if self.init else []
        return ["--model", self.model, *inputs, *init, "--dtype", self.dtype, "--narrow", *self.narrow]


DECODER = Case(
    "decoder",
    "benchmarks.size.decoder",
    ("2,7:long",),
    ("hidden_size=128", "intermediate_size=176"),
    "bfloat16",
    ("merge",),
)
UNET = Case(
    "UNet of SDXL",
    "benchmarks.size.unet",
    ("2,4,16,16", "2:long", "2,7,2048", "2,1280", "2,6"),
    ("block_out_channels=[64,128,256]", "attention_head_dim=[2,4,8]"),
    "bfloat16",
    ("merge",),
    noise=0.01,
)
SMALL = Case(
    "small decoder",
    DECODER.model,
    DECODER.inputs,
    ("hidden_size=64", "intermediate_size=96"),
    "bfloat16",
    init=("hidden_size=128", "intermediate_size=352", "num_hidden_layers=2"),
)


class Drawn(Mapping[str, Tensor]):
    """Random weights of a network, each made when it is asked for, the same each time; noise may be added to them."""

    def __init__(self, like: Mapping[str, Tensor], noise: float = 0.0) -> None:
        self.like, self.seeds, self.noise = like, {name: k for k, name in enumerate(like)}, noise

    def __getitem__(self, name: str) -> Tensor:
        like, generator = self.like[name], torch.Generator().manual_seed(self.seeds[name])
        drawn = torch.randn(like.shape, generator=generator)
        if self.noise:
            drawn.add_(torch.randn(like.shape, generator=generator), alpha=self.noise)
        return drawn.mul_(_DEVIATION).to(like.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def write_shards(folder: Path, state: Mapping[str, Tensor], names: list[str]) -> Path:
    """A network in several safetensors files and their index."""
    folder.mkdir()
    step, held = -(-len(names) // _SHARDS), {}
    for at in range(0, len(names), step):
        file = f"model-{at // step + 1:05}.safetensors"
        write_safetensors(folder / file, {name: state[name] for name in names[at : at + step]})
        held |= dict.fromkeys(names[at : at + step], file)
    index = folder / f"{folder.name}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": held}))
    return index


def plant(case: Case, folder: Path) -> dict[str, Any]:
    """Write a network and a copy that a random element has moved, and the element."""
    from rich.console import Console

    architecture = case.architecture()
    graph = architecture.discover(Console(stderr=True))
    graph = verified_groups(graph, ("permutations",), silent)
    like = {n: t.detach() for n, t in architecture.build().state_dict().items()}
    names = [names[0] for names in graph.aliases.values()]
    element = random_permutation(graph, generator=torch.Generator().manual_seed(1))
    write_shards(folder / "one", Drawn(like), names)
    write_shards(folder / "two", Permuted(graph, element, Drawn(like, case.noise)), names)
    write_safetensors(folder / "element.safetensors", Move(permutation=element).flat())
    weights = sum(like[n].numel() for n in names)
    return {
        "weights": weights,
        "bytes": sum(like[n].numel() * like[n].element_size() for n in names),
        "groups": len(graph.permutations),
        "units": sum(t.numel() for t in element.values()),
        "layer": 4 * sorted(like[n].numel() for n in names)[-1],
        "gram": 4 * max(torch.Size(g.shape).numel() for g in graph.permutations) ** 2,
    }


def run_command(words: list[str]) -> dict[str, Any]:
    """Run a command in a process of its own; what it took."""
    begin, most, cpu, taken = time.perf_counter(), 0, 0.0, {}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tu_symmetry", *words], stdout=subprocess.DEVNULL, stderr=said, text=True
        )
        place = Path(f"/proc/{process.pid}")
        while process.poll() is None:
            try:
                most = max(most, 1024 * int((place / "status").read_text().split("RssAnon:")[1].split()[0]))
                cpu = sum(map(int, (place / "stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")
                taken = dict(line.split(": ") for line in (place / "io").read_text().splitlines())
            except (OSError, IndexError, ValueError):  # it has just ended
                pass
            time.sleep(_PAUSE)
        said.seek(0)
        lines = said.read().strip().splitlines()
    if process.returncode:
        raise RuntimeError(lines[-1] if lines else f"exit status {process.returncode}")
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "cpu": cpu, "memory": most, "read": int(taken["rchar"]), "written": int(taken["wchar"])}


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Plant, run the commands, and compare what they found with what was planted."""
    facts = json.loads(
        subprocess.run(
            [sys.executable, "-m", "benchmarks.size", case.name, str(folder)], check=True, stdout=subprocess.PIPE
        ).stdout.splitlines()[-1]
    )
    files = [str(folder / name / f"{name}.safetensors.index.json") for name in ("one", "two")]
    found: dict[str, Any] = {"case": case.name, "dtype": case.dtype, **facts}
    if "align" in case.commands:
        found["align"] = run_command(["align", *files, *case.words(), "--out", str(folder / "aligned")])
        aligned = sorted((folder / "aligned").glob("*.index.safetensors"))
        found["align"]["entries that differ"] = differing(folder / "one", aligned[-1], case.noise)
        files = list(map(str, aligned))
    found["merge"] = run_command(["merge", *files, *case.words(), "--out", str(folder / "merged.safetensors")])
    found["merge"]["entries that differ"] = differing(folder / "one", folder / "merged.safetensors", case.noise)
    return found


def differing(one: Path, other: Path, noise: float) -> int:
    """How many entries of two networks differ, by more than eight deviations of noise in a mean if there is some."""
    a, b = (open_state(path) for path in (next(one.glob("*.index.json")), other))
    most = 4 * _DEVIATION * noise
    return sum(
        int(((p - q).abs() > most + noise * p.abs()).sum()) for p, q in ((a[n].float(), b[n].float()) for n in a)
    )


def run(settings: Settings) -> Section:
    """The large networks, of which nothing is left on disk; a small one for a quick run."""
    found = []
    for case in [SMALL] if settings.quick else [DECODER, UNET]:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(case, Path(folder)))
        settings.say(f"{case.name}: {found[-1]}")
    return section(found)


def section(found: list[dict[str, Any]]) -> Section:
    """The table of what was measured."""
    rows = [
        [
            f"{one['case']}: {command}",
            f"{one['weights'] / 1e6:.0f}",
            f"{one['bytes'] / 1e9:.2f}",
            both(one[command]["seconds"], one[command]["cpu"]),
            *(f"{one[command][kind] / 1e9:.2f}" for kind in ("memory", "read", "written")),
            str(one[command]["entries that differ"]),
        ]
        for one in found
        for command in ("align", "merge")
        if command in one
    ]
    columns = [
        "",
        "weights (million)",
        "a file, GB",
        "s",
        "memory, GB",
        "read, GB",
        "written, GB",
        "entries that differ",
    ]
    text = (
        "Two networks in shards on disk, of which the second is the first one, moved by a random permutation of all "
        "units: `tu-symmetry merge` of both (in a quick run of what `align` wrote). Memory is the "
        "largest resident memory of the process that is no page of a file, PyTorch included. Entries that differ are "
        "those of the second network (of the merged one) that are not the first one's after the command."
    )
    exact = all(one[c]["entries that differ"] == 0 for one in found for c in ("align", "merge") if c in one)
    goals = [Goal("the planted element is found, every unit of it", exact, "see the table")]
    return Section("Networks larger than memory", text, [Grid("By the command line", columns, rows)], goals, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = next(case for case in (DECODER, UNET, SMALL) if case.name == sys.argv[1])
    print(json.dumps(plant(chosen, Path(sys.argv[2]))))
