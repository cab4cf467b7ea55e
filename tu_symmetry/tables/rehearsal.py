"""``tu-symmetry table NAME --rehearse``: a few steps of each command at full size, and what all of it will take.

Networks, batches, precision and files are those of the recipe. Of a training a few steps are run, of everything else
what ``rehearsal`` in ``table.yaml`` names. Data sets that are not in the data folder are planted: noise in the layout
of the real files. What was written is removed at the end, but for ``rehearsal.json`` and ``rehearsal.md``.

The plan of a command has these keys, all of which may be left out:

- ``set``: flags to run it with, over the recipe's;
- ``times``: how often what it then does is in the whole command (of a training: what is neither its start, nor a step,
  nor a batch of validation images);
- ``disk_times``: the same of its files but for checkpoints, where that is another number;
- ``step_times``: how often a step of the rehearsal is in one of the recipe;
- ``batches``, ``checks``: of an epoch and of a validation, where the data sets are smaller than the recipe's;
- ``planted``: how many images, classes and so on a data set that is not there is planted with, by its file or folder;
- ``scan``: size, angles and bins of a planted scan whose untrained reconstruction the command reads;
- ``pieces``: functions (``module:name``) whose seconds count so often in place of ``times``;
- ``cpu``: the same keys, over these, where there is no GPU and a piece of full size takes minutes.
"""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from tu_symmetry.configs import ConfigError, merged, read_mapping, resolve
from tu_symmetry.datamodules import ScannedTomographyDataModule, planted
from tu_symmetry.datamodules.readers import IDX_FOLDERS
from tu_symmetry.files import LOCK, lock_folder, remove_folder, write_json, write_text
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.reporting.progress import Display, duration_text
from tu_symmetry.routines.deep_image_prior import Reconstructions
from tu_symmetry.tables.commands import (
    MARKS,
    CommandConfig,
    _dotted,
    load_table,
    parse_overrides,
    typed,
)
from tu_symmetry.tables.outcome import plain

_STEPS = range(2, 9)  # of a training; as many of these as 20 seconds allow
_SECONDS = 20.0
_MARK = ".rehearsal"  # in a folder that a rehearsal may clear: one is running there, or was killed
_WRITTEN = ("rehearsal.json", "rehearsal.md")
_NETWORKS = 10  # in a planted archive, where the recipe does not say how many
_PLAN = ("set", "times", "disk_times", "step_times", "batches", "checks", "planted", "scan", "pieces")


@dataclass(frozen=True)
class Forecast:
    """What one command takes, by its rehearsal.

    Attributes:
        name: of the command, or of the first of its copies.
        copies: how often the recipe runs it.
        seconds: of one copy, all of it; ``nan`` where the rehearsal failed.
        rehearsed: seconds that the rehearsal took.
        step: seconds of one training step; None for what is no training.
        steps: training steps of one copy.
        device_bytes: peak of what torch held on the accelerator; 0 without one.
        host_bytes: peak resident memory of the process.
        disk_bytes: of one copy's files.
        error: what made the rehearsal fail, or why it was not tried.
    """

    name: str
    copies: int
    seconds: float = math.nan
    rehearsed: float = 0.0
    step: float | None = None
    steps: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    error: str = ""


def rehearse(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    overrides: Sequence[str] = (),
    reduced: bool | None = None,
    display: Display | None = None,
) -> list[Forecast]:
    """Rehearse every command of a recipe folder, and write and print what the whole recipe will take.

    A command that fails is reported in its row, and so is what needs it; the others go on.

    Args:
        folder: the recipe folder.
        out: folder of the rehearsal, new or of an earlier one; by default the recipe's run folder with ``-rehearsal``
            behind its name.
        data_root: folder of data sets; those that are not there are planted in ``out``.
        overrides: ``NAME.FLAG=VALUE``, over what the rehearsal of a command sets.
        reduced: rehearse smaller pieces where the recipe names them; by default where there is no GPU.
        display: where progress is shown; the terminal by default.

    Raises:
        ConfigError: a folder of something else, an unknown command or key.
    """
    folder, display = Path(folder), display or Display()
    table = load_table(folder)
    more = parse_overrides(table, overrides)
    reduced = not torch.cuda.is_available() if reduced is None else reduced
    plans = {name: _plan(folder, name, plan, reduced) for name, plan in table.rehearsal.items()}
    root = Path(out) if out is not None else Path(f"{table.root}-rehearsal")
    root.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in root.iterdir()}
    if MARKS in there or (_MARK not in there and there - {LOCK, *_WRITTEN}):
        raise ConfigError(f"{root} holds something else than a rehearsal, which would be removed: choose another --out")
    first = {name: f"{c['name']}_0" for c in read_mapping(folder / "table.yaml")["commands"] for name in _copies(c)}
    forecasts: dict[str, Forecast] = {}
    display.console.print(f"{table.title}: rehearsal", style="bold")
    with lock_folder(root), planted.unverified():
        (root / _MARK).touch()
        _clear(root)
        model: dict[str, Any] = {}
        for command in table.commands:
            found = _content(folder, command).get("command", {}).get("init_args", {})
            if "model" in found and "reference" in found:
                given = {
                    k.removeprefix("--command.model."): v for k, _, v in (f.partition("=") for f in more[command.name])
                }
                own = {k: yaml.safe_load(v) for k, v in given.items() if not k.startswith("--")}
                model = merged([found["model"], {"init_args": own}])
        data = _Data(root / "data", Path(data_root or "data"), model)
        try:
            for command in table.commands:
                name = first.get(command.name, command.name)
                if name != command.name:
                    if not forecasts[name].error:
                        (root / command.name).symlink_to(name, target_is_directory=True)
                    continue
                copies = max(1, list(first.values()).count(name))
                lacking = [n for n in command.needs if forecasts[first.get(n, n)].error]
                if lacking:
                    found = Forecast(name, copies, error=f"not tried: it needs {lacking[0]}")
                else:
                    display.started(name, "once" if copies == 1 else f"one of {copies}", resumed=False)
                    own = plans.get(name.removesuffix("_0") if copies > 1 else name, {})
                    found = _rehearsed(folder, command, own, copies, root, data, more[name])
                    if not found.error:
                        display.done(name, f"{found.rehearsed:.1f} s", f"whole: {duration_text(found.seconds)}")
                if found.error:
                    display.note(f"{name}: {found.error}")
                forecasts[name] = found
        finally:
            _clear(root)
            (root / _MARK).unlink()
        environment = describe_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        made = list(forecasts.values())
        grid = forecast_table(made, table.title, environment)
        content = {"recipe": folder.name, "environment": environment, "forecasts": [asdict(f) for f in made]}
        write_json(root / _WRITTEN[0], plain(content))
        write_text(root / _WRITTEN[1], f"{grid.markdown()}\n")
        grid.print(display.console)
    return made


def _clear(root: Path) -> None:
    for path in root.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            remove_folder(path)


def forecast_table(forecasts: list[Forecast], title: str, environment: Mapping[str, Any]) -> Grid:
    """What each command takes, and all of them: seconds and disk add up, memory is the largest."""

    def row(f: Forecast) -> list[str]:
        name = f.name if f.copies == 1 else f"{f.name.removesuffix('_0')} × {f.copies}"
        if f.error:
            return [name, "failed", "", "", "", "", f.error[:60]]
        step = "" if f.step is None else f"{f.steps:,} × {f.step:.3g} s"
        sizes = [_gigabytes(size) for size in (f.device_bytes, f.host_bytes, f.copies * f.disk_bytes)]
        return [name, step, duration_text(f.seconds), duration_text(f.copies * f.seconds), *sizes]

    good = [f for f in forecasts if not f.error]
    total = sum(f.copies * f.seconds for f in good)
    most = [max((getattr(f, name) for f in good), default=0) for name in ("device_bytes", "host_bytes")]
    sizes = [*map(_gigabytes, most), _gigabytes(sum(f.copies * f.disk_bytes for f in good))]
    header = ["command", "steps", "one", "all", "device\nGB", "host\nGB", "disk\nGB"]
    where = environment["device"] if environment["device"] != "cpu" else environment["processor"]
    caption = (
        f"Forecast by a rehearsal on {where}, torch {environment.get('torch')}, {environment['threads']} threads. What "
        "it shortens counts as often as the recipe says, its start included, so that times are upper bounds."
    )
    rows = [*map(row, forecasts), ["all", "", "", duration_text(total), *sizes]]
    return Grid(f"{title}: what it takes", header, rows, caption)


class _Pace(Callback):
    """Times a training, and ends it after a few steps, unless the recipe says how long its rehearsal is."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends, self.last, self.started = ends, 0.0, 0.0
        self.batches, self.checks = 0, 0  # of an epoch and of a validation, whatever limits them
        self.taken: list[float] = []  # seconds of each step; what is between epochs is no part of them
        self.checked: list[float] = []  # of each validation batch
        self.before = 0  # validation batches before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have one batch validated (typed, a limit of 1 is all of them), also before the first step."""
        if trainer.limit_val_batches:
            trainer.limit_val_batches = trainer.num_sanity_val_steps = 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what came before."""
        self.batches = len(trainer.train_dataloader)  # type: ignore[arg-type]
        self.started, self.before = _now(), len(self.checked)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self.last = _now()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Take the time, and stop."""
        now = _now()
        self.taken.append(now - self.last)
        self.last = now
        steps, seconds = len(self.taken), sum(self.taken)
        if self.ends and (steps >= _STEPS[-1] or (steps >= _STEPS[0] and seconds > _SECONDS)):
            trainer.should_stop = True

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin to count."""
        found: Any = trainer.val_dataloaders
        self.checks = sum(map(len, found if isinstance(found, list | tuple) else [found]))
        self.last = _now()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Take the time."""
        self.checked.append(_now() - self.last)

    @property
    def step(self) -> float:
        """Seconds of one step; the first ones, in which libraries choose their algorithms, do not count."""
        return median(self.taken[min(2, len(self.taken) - 1) :])

    def seconds(self, begun: float, taken: float, times: float) -> float:
        """What all but steps and validation batches takes, of a rehearsal that began then and took so long."""
        start = self.started - begun - sum(self.checked[: self.before])
        return start + times * (taken - start - sum(self.taken) - sum(self.checked))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _plan(folder: Path, name: str, given: Mapping[str, Any], reduced: bool) -> dict[str, Any]:
    """What a recipe says of the rehearsal of one command, on this machine."""
    smaller = given.get("cpu", {})
    if unknown := {*given, *smaller} - {*_PLAN, "cpu"}:
        raise ConfigError(f"{folder}: rehearsal of {name} has {sorted(unknown)}; it has {', '.join(_PLAN)} and cpu")
    own: dict[str, Any] = {key: value for key, value in given.items() if key != "cpu"}
    return own | smaller | {"set": own.get("set", {}) | smaller.get("set", {})} if reduced else own


def _rehearsed(
    folder: Path,
    command: CommandConfig,
    plan: Mapping[str, Any],
    copies: int,
    root: Path,
    data: _Data,
    more: list[str],
) -> Forecast:
    content = _content(folder, command)
    flags, pace, times = dict(plan.get("set", {})), None, float(plan.get("times", 1))
    data.provide(content, plan.get("planted", {}))
    flags |= data.published(content, flags)
    if "scan" in plan:
        flags |= data.reconstructed(content, plan["scan"])
    if command.command == "fit":
        lengths = ("trainer.max_epochs", "trainer.max_steps", "trainer.limit_train_batches")
        pace = _Pace(ends=not any(name in flags for name in lengths))
        flags = {"trainer.limit_train_batches": _STEPS[-1]} | flags
    words = [*typed(folder, command, root, data.root), *_dotted(flags), *more]
    cuda = torch.cuda.is_available()
    _reset_peaks()
    started = time.perf_counter()
    try:
        with _timed(plan.get("pieces", {})) as spent:
            _execute(words, pace)
        taken = time.perf_counter() - started
        sizes = {path: path.stat().st_size for path in (root / command.name).rglob("*") if path.is_file()}
        once = sum(size for path, size in sizes.items() if path.suffix == ".ckpt")  # one network, as it was trained
        disk = once + int((sum(sizes.values()) - once) * float(plan.get("disk_times", times)))
        seconds, step, steps = times * taken, None, 0
        if pace is not None:
            step, whole = pace.step * float(plan.get("step_times", 1)), merged([content, _nested(command.set)])
            steps, validations = _whole(whole, int(plan.get("batches", pace.batches)))
            checked = pace.checked[pace.before :] or pace.checked
            seconds = pace.seconds(started, taken, times) + steps * step
            seconds += validations * int(plan.get("checks", pace.checks)) * (median(checked) if checked else 0.0)
        seconds += sum((float(often) - times) * spent[name] for name, often in plan.get("pieces", {}).items())
    except SystemExit as error:
        if error.code != 2:  # how Lightning ends a training that was interrupted
            raise
        return Forecast(command.name, copies, error="its configuration was refused, see above")
    except Exception as error:  # whatever it is, it stands in the row, and the next one is tried
        return Forecast(command.name, copies, error=f"{type(error).__name__}: {' '.join(str(error).split())}")
    device = torch.cuda.max_memory_reserved() if cuda else 0
    return Forecast(command.name, copies, seconds, taken, step, steps, device, _host_peak(), disk)


@contextmanager
def _timed(names: Iterable[str]) -> Iterator[dict[str, float]]:
    """Seconds that functions take while this lasts; none of them calls another."""
    spent, kept = dict.fromkeys(names, 0.0), []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = _now()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += _now() - begun

        return call

    for name in spent:
        place, _, last = name.replace(":", ".").rpartition(".")
        owner = resolve_name(place)
        kept.append((owner, last, getattr(owner, last)))
    try:
        for (owner, last, function), name in zip(kept, spent, strict=True):
            setattr(owner, last, timed(name, function))
        yield spent
    finally:
        for owner, last, function in kept:
            setattr(owner, last, function)


def _execute(words: list[str], pace: _Pace | None) -> None:
    from tu_symmetry.tables.functions import run_function
    from tu_symmetry.tables.lightning import run_lightning

    if words[0] == "run":
        run_function(words[1:])
    else:
        run_lightning(words, callbacks=[] if pace is None else [pace])


def _whole(content: Mapping[str, Any], batches: int) -> tuple[int, int]:
    """Steps and validations of a whole training."""
    trainer = content.get("trainer", {})
    limits = [(trainer.get("max_steps", -1), 1), (trainer.get("max_epochs") or 1000, batches)]
    steps = min(number * size for number, size in limits if number > 0)
    return steps, steps // (batches * int(trainer.get("check_val_every_n_epoch", 1)))


class _Data:
    """A folder with the data sets of another one, and planted ones in place of those that are not there."""

    def __init__(self, root: Path, given: Path, model: Mapping[str, Any]) -> None:
        root.mkdir()
        self.root, self.model = root, model
        if given.is_dir():
            for path in given.resolve().iterdir():
                (root / path.name).symlink_to(path, target_is_directory=path.is_dir())

    def provide(self, content: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Plant what the classes of a configuration read and is not there."""
        sets = dict(found for name, options in _classes(content) for found in self._sets(name, options))
        if unread := sizes.keys() - sets.keys():
            raise ConfigError(
                f"a rehearsal plants {sorted(unread)}, which its command does not read; it reads {sorted(sets)}: give "
                "the size beside the command that reads it"
            )
        for there, plant in sets.items():
            if not (self.root / there).exists():
                plant(self.root, **sizes.get(there, {}))

    def published(self, content: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
        """Flags that have published networks read from a planted archive."""
        given = content.get("command", {}).get("init_args", {})
        if "folder" not in given or "source" not in given or Path(given["source"]).is_dir():
            return {}
        archive, model = self.root / "published" / given["folder"], self.model
        count = int(flags.get("command.count") or given.get("count") or _NETWORKS)
        if not archive.exists():
            planted.plant_networks(archive, lambda: resolve(model["class_path"])(**model.get("init_args", {})), count)
        return {"command.source": str(self.root / "published"), "command.count": count}

    def reconstructed(self, content: Mapping[str, Any], scan: Mapping[str, int]) -> dict[str, Any]:
        """The flag that has an untrained network's reconstruction of a small planted scan read."""
        given = content["command"]["init_args"]["model"]
        folder = self.root / "_".join(map(str, scan.values()))
        planted.plant_scan(folder, **scan)
        data = ScannedTomographyDataModule(folder, num_angles=scan["angles"])
        data.setup()
        assert data.problem is not None
        network = resolve(given["class_path"])(**given.get("init_args", {}))
        states = {name: t.detach()[None] for name, t in network.state_dict().items()}
        found = Reconstructions(states, data.problem.truth, torch.zeros(1, device="cpu"), data.problem)
        found.save(folder / "reconstructions.safetensors")
        return {"command.reconstructions": str(folder / "reconstructions.safetensors")}

    def _sets(self, name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Callable[..., None]]]:
        key = "ood_dataset" if "ood_dataset" in options else "ood_ds"
        default = {"IDXDataModule": "mnist", "TomographyDataModule": "kmnist", "CIFARDataModule": "cifar10"}.get(name)
        kinds = [options.get("dataset", default), *([options.get(key)] if options.get("eval_ood") else [])]
        if name in ("IDXDataModule", "TomographyDataModule"):
            for kind in filter(None, kinds):
                yield IDX_FOLDERS[kind], partial(planted.plant_idx, name=kind)
        if name == "CIFARDataModule":
            place = "cifar-100-python" if kinds[0] == "cifar100" else "cifar-10-batches-py"
            yield place, partial(planted.plant_cifar, name=kinds[0])
        if name == "TinyImageNetDataModule":
            yield "tiny-imagenet-200", planted.plant_tiny_imagenet
        if options.get("eval_ood") and name in ("CIFARDataModule", "TinyImageNetDataModule"):
            yield "test_32x32.mat", planted.plant_svhn
        if name == "ScannedTomographyDataModule":
            yield "walnut", planted.plant_scan
        if name == "UCIDataModule":
            yield "sklearn_contrib_bde-0-py3-none-any.whl", planted.plant_uci


def _classes(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and arguments of the classes in a configuration."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield str(value["class_path"]).rpartition(".")[2], value.get("init_args", {})
        for inner in value.values():
            yield from _classes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _classes(inner)


def _content(folder: Path, command: CommandConfig) -> dict[str, Any]:
    made: dict[str, Any] = merged([read_mapping(folder / file) for file in command.config])
    return made


def _copies(command: Mapping[str, Any]) -> list[str]:
    return [f"{command['name']}_{k}" for k in range(command.get("copies", 0))]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in values.items():
        *parts, last = key.split(".")
        inner = made
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return made


def _reset_peaks() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _host_peak() -> int:
    """Largest resident memory since the last reset where the system can say it, else since the process started."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}" if size else "–"
