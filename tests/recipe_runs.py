"""Recipes in tests: their configurations, run by the table or one by one, as they are or small."""

from __future__ import annotations

import functools
import gzip
import io
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import yaml
from rich.console import Console
from torchvision.io import encode_jpeg

from tu_symmetry.cli import main
from tu_symmetry.configs import merged, read_mapping
from tu_symmetry.datamodules import planted
from tu_symmetry.datamodules.readers import CIFAR10_CLASSES, CIFAR_ARCHIVE, TEXTURES_ARCHIVE, IDXName
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.commands import _dotted, load_table, run_commands
from tu_symmetry.tables.outcome import Outcome

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"


def run_table(folder: Path, out: Path, overrides: Sequence[str] = (), **more: Any) -> tuple[dict[str, Any], str]:
    """Results of every command, and what was shown."""
    console = Console(record=True, width=80, file=io.StringIO())
    display = Display(console)
    results = run_commands(folder, out=out, overrides=overrides, display=display, **more)
    display.tables(results)
    return results, console.export_text()


@dataclass(frozen=True)
class Typed:
    """What a reader types: ``tu-symmetry COMMAND --config FILE ... FLAGS``."""

    recipe: str
    command: str
    name: str
    files: tuple[Path, ...]
    flags: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """After ``tu-symmetry COMMAND``."""
        return [*(f"--config={file}" for file in self.files), *self.flags]

    @property
    def content(self) -> dict[str, Any]:
        """What the files say together."""
        found: dict[str, Any] = merged([read_mapping(file) for file in self.files])
        return found

    @property
    def folder(self) -> Path:
        """Where the run stands."""
        given = dict(flag.removeprefix("--").split("=", 1) for flag in self.flags)
        return Path(given["root"]) / given["name"]


def commands_of(recipe: Path) -> dict[str, Typed]:
    """The commands of a recipe folder by their names."""
    table = load_table(recipe)
    name = recipe.relative_to(RECIPES).as_posix() if recipe.is_relative_to(RECIPES) else recipe.name
    found = {}
    for row in table.commands:
        files = tuple((recipe / file).resolve() for file in row.config)
        flags = (f"--root={table.root}", f"--name={row.name}", *_dotted(row.set))
        found[row.name] = Typed(name, row.command, row.name, files, flags)
    return found


@functools.cache
def typed_commands() -> list[Typed]:
    """Of every recipe its commands, in order; and every other YAML file."""
    found = [row for table in sorted(RECIPES.rglob("table.yaml")) for row in commands_of(table.parent).values()]
    listed = {file for typed in found for file in typed.files}
    for path in sorted(RECIPES.rglob("*.yaml")):
        if path.name == "table.yaml" or path.resolve() in listed:
            continue
        content = read_mapping(path)
        command = "run" if "command" in content else "test" if "optimizer" not in content else "fit"
        root = load_table(path.parent).root if (path.parent / "table.yaml").is_file() else "runs"
        flags = (f"--root={root}", f"--name={path.stem}")
        found.append(Typed(path.parent.relative_to(RECIPES).as_posix(), command, path.stem, (path.resolve(),), flags))
    return found


Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def shortened(recipe: Path, folder: Path, keep: Collection[str], edit: Edit) -> Path:
    """A copy of a recipe with some of its commands, each with one file, after ``edit(line of the table, content)``."""
    table = read_mapping(recipe / "table.yaml")
    folder.mkdir(exist_ok=True)
    kept = [command for command in table["commands"] if command["name"] in keep]
    for command in kept:
        name = command["name"]
        content = commands_of(recipe)[f"{name}_0" if "copies" in command else name].content
        command |= {"config": f"{name}.yaml", "needs": [n for n in command.get("needs", ()) if n in keep]}
        if name == "report":
            command.setdefault("set", {})["command.recipe"] = str(folder)
        edit(command, content)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    table |= {"commands": kept, "bases": {}}
    (folder / "table.yaml").write_text(yaml.safe_dump(table, sort_keys=False, allow_unicode=True))
    return folder


LEAST = {  # what is at most so large in a small run
    1: "burn_in repeats counts runs pairs epochs tuning_epochs depth neighbors cycle_start",
    2: "check_val_every_n_epoch every_n_epochs leapfrog_steps num_members orders num_estimators num_repeats heads "
    "num_samples steps_per_epoch num_steps num_probes refresh_every hyperprior_probes max_iterations",
    3: "points",
    4: "max_epochs",
    8: "width",
    16: "held_out",
    18: "arch",
    20: "max_steps",
    32: "batch_size val_size",
    48: "images statistics",
}
SMALL: dict[str, Callable[[Any], Any]] = {
    name: lambda value, number=number: min(value, number) if isinstance(value, int) and value > 0 else value
    for number, names in LEAST.items()
    for name in names.split()
}
SMALL |= {
    "stored": lambda _: [0, 2, 2],
    "keep": lambda _: [1.0, 0.5],
    "widths": lambda _: [6],
    "hidden": lambda value: [6] * len(value) if isinstance(value, list) else 6,
    "channels": lambda value: [4] * len(value),
    "train_size": lambda _: 64,
    "test_size": lambda _: 48,
    "ood_size": lambda _: 24,
    "blocks": lambda value: [1] * len(value),
    "largest_loss": lambda _: 1e9,
    "mode_tolerance": lambda _: 10.0,
    "stages": lambda _: [[4], [6]],
    "inner": lambda _: [8, 40],
}
"""What a key becomes in a small run, wherever it stands."""
CLASSES: dict[str, dict[str, Any]] = {
    "TomographyDataModule": {"images": 2},
    "dropout_posterior": {"num_samples": 800},  # more than an image has pixels
    "sampled_posterior": {"num_samples": 120},  # more than a patch has
}
"""Arguments that a class or function gets in a small run."""


def small(value: Any, key: str = "") -> Any:
    """The same configuration with small networks, short chains and few images."""
    if key in SMALL and not isinstance(value, Mapping):
        return SMALL[key](value)
    if isinstance(value, list):
        return [small(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    made = {k: small(v, str(k)) for k, v in value.items()}
    path = str(made.get("class_path", ""))
    name = path.rpartition(".")[2]
    if path == "torch_uncertainty.models.classification.resnet":
        small_one = {"num_classes": 10, "width": 2, "blocks": [1, 1]}
        return {"class_path": "tu_symmetry.experiments.rebasin.ResNet", "init_args": small_one}
    if name.endswith(("DigitsDataModule", "IDXDataModule", "CIFARDataModule")):
        made["init_args"] = {"train_size": 64, "test_size": 48} | made.get("init_args", {})
    if name == "CIFARDataModule" and made["init_args"].get("dataset") != "cifar100":
        made["init_args"] |= {"source": "archive", "ood_dataset": "textures"}
    if path.startswith("torch_uncertainty.datamodules.") or name == "TinyImageNetDataModule":
        made["init_args"] |= {"num_workers": 0, "persistent_workers": False}
    if name in CLASSES:
        made["init_args"] |= CLASSES[name]
    routine, data = (made.get(part, {}).get("init_args", {}) for part in ("routine", "data"))
    if "num_problems" in routine and "images" in data:
        routine["num_problems"] = data["images"] * len(data["num_angles"])
    return made


def small_copy(typed: Typed, folder: Path) -> Typed:
    """The same command with a small configuration, in one file."""
    path = folder / typed.recipe / f"{typed.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(small(typed.content), sort_keys=False))
    return replace(typed, files=(path,))


def run_files(commands: Sequence[Typed], folder: Path, accelerator: str) -> Iterator[Typed]:
    """Type small commands one after the other in an empty folder, the present one; yields each that is done."""
    plant_images(folder / "data")
    plant_scan(folder / "data")
    for typed in commands:
        words = [typed.command, *small_copy(typed, folder / "small").words]
        quiet = ["--trainer.enable_progress_bar=false", f"--trainer.accelerator={accelerator}", "--trainer.devices=1"]
        assert main([*words, *(quiet if typed.command != "run" else ())]) == 0
        yield typed


def assert_goes_on(command: Callable[[Path], Outcome], out: Path, lost: int = 2) -> Outcome:
    """A command without its last parts, as a kill leaves it, makes these, reads the others, and finds the same."""
    whole = command(out)
    parts = sorted(out.rglob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    stamps = {path: path.stat().st_mtime_ns for path in parts}
    for path in parts[-lost:]:
        path.unlink()
    assert len(parts) > lost and command(out).results == whole.results
    assert {path for path in parts if path.stat().st_mtime_ns != stamps[path]} == set(parts[-lost:])
    return whole


def plant_images(root: Path, train: int = 240, test: int = 80) -> None:
    """MNIST and its relatives, CIFAR-10 and textures in miniature; images say their class."""
    generator = np.random.default_rng(0)
    root.mkdir(parents=True)
    pictures = [f"{half}/{i:05d}_{CIFAR10_CLASSES[i % 10]}.jpg" for half in ("train", "test") for i in range(120)]
    for archive, names in ((CIFAR_ARCHIVE, pictures), (TEXTURES_ARCHIVE, [f"{i:03d}.jpg" for i in range(32)])):
        with tarfile.open(root / archive, "w:xz") as file:
            for number, name in enumerate(names):
                noise = torch.from_numpy(generator.integers(0, 40, (3, 32, 32), dtype=np.uint8))
                color = torch.tensor([20 * (number % 10), 200 - 20 * (number % 10), 100], dtype=torch.uint8)
                content = encode_jpeg(noise + color.view(3, 1, 1), quality=95).numpy().tobytes()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    for name in get_args(IDXName):
        planted.plant_idx(root, name, train, test)
    for file in root.rglob("*-ubyte"):  # the published archives too
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))


def plant_scan(root: Path, size: int = 64, angles: int = 8) -> None:
    """A scan in miniature, under the names of the walnut's."""
    planted.plant_scan(root, size, angles, 40)


def plant_cifar100(root: Path, count: int = 100) -> None:
    """CIFAR-100 in miniature, as torchvision stores it; its own check of the files' digests has to be taken away."""
    planted.plant_cifar(root, "cifar100", count, count)


def class_paths(value: Any) -> Iterator[str]:
    """Every class that a configuration names."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield str(value["class_path"])
        for v in value.values():
            yield from class_paths(v)
    elif isinstance(value, list):
        for v in value:
            yield from class_paths(v)
