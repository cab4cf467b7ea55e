"""Ordinary mistakes on the command line: one clear line and a status, never a traceback, and nothing is written."""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from toy_networks import net

import tu_symmetry
from tu_symmetry import cli
from tu_symmetry.cli.ends import Signals, ended
from tu_symmetry.files import lock_folder, read_header
from tu_symmetry.posterior.network import require_numbers

ROOT = Path(__file__).parents[2]
HERE = "toy_networks"
INSPECT = ["inspect", "--model", "torch.nn.Linear", "--init", "in_features=4", "out_features=3", "--input", "1,4"]
ALIGN = ["align", "IN/a.pt", "IN/b.pt", "--model", f"{HERE}.net", "--input", "1,4", "--out", "OUT"]
MERGE = ["merge", "IN/a.pt", "IN/b.pt", "--model", f"{HERE}.net", "--input", "1,4", "--out", "OUT.safetensors"]
MEASURED = [*MERGE, "--data", f"{HERE}.loader"]
TABLE = ["table", "IN/toy", "--out", "OUT"]

VALUES: list[tuple[list[str], str, list[str]]] = [
    (
        INSPECT,
        "--model",
        ["", "nowhere", "torch.nn", "os.system", "a..b", ".", "json.dumps", "builtins.len", "torch nn"],
    ),
    (INSPECT, "--input", ["", "a", "1,a", "0,4", "-1,4", "1,99999999999999999999", "99999,99999", "1,4:foo", "1,4:"]),
    (INSPECT, "--input", ["1,4:int8", "1,4:complex64", "1,4:float8_e4m3fn", "1,5", "1.5,4", "inf"]),
    (INSPECT, "--dtype", ["int8", "bool", "complex64", "float8_e4m3fn", "foo", "", "quint8", "strided"]),
    (INSPECT, "--init", ["in_features", "=3", "in_features=-1", "in_features=999999999999999", "1a=3", "x={[]: 1}"]),
    (ALIGN, "--out", ["", "IN/a.pt", "IN/a.pt/x", "/proc/x", "/dev/null", "x" * 300]),
    (ALIGN, "--reference", ["", "nothing", "IN", "IN/text.pt"]),
    (ALIGN, "--refrence", ["first"]),
    (MERGE, "--out", ["", "IN/a.pt", "IN/a.pt/x.safetensors", "IN", "/dev/null", "m.pt"]),
    (MERGE, "--reference", ["", "nothing", "IN", "IN/text.pt"]),
    (MERGE, "--weights", ["", "x", "1", "nan", "-1", "greedy"]),
    (MERGE, "--correction", ["foo", "repair"]),
    (MERGE, "--dtype", ["foo", "int8"]),
    (MEASURED, "--data", ["", "nothing", f"{HERE}.net", f"{HERE}.raises", "os.getcwd", "torch.nn.Linear"]),
    (MEASURED, "--data-init", ["x", "=1", "x=1", "a: b=1", "x=[", "x=*a"]),
    (MEASURED, "--loss", ["", "nothing", "os.getcwd", "torch.nn.functional.relu"]),
    (MEASURED, "--num-samples", ["0", "-1", "x"]),
    (MEASURED, "--correction", ["batchnorm"]),
    (TABLE, "--out", ["", "IN/a.pt", "IN/a.pt/x", "/proc/x", "/dev/null", "x" * 300]),
    (TABLE, "--data-root", [""]),
    (TABLE, "--set", ["", "nothing", "=1", "x=1", "walk", "walk=3", "walk.=3", ".steps=3", "walk.command.steps"]),
    (TABLE, "--max-time", ["", "10", "00:10", "a:b:c:d"]),
    (TABLE, "--device", ["cpu"]),
    (TABLE, "--frsh", ["x"]),
]


def words_of(base: list[str], option: str, value: str) -> list[str]:
    """The command line with an option's values replaced, or with the option at the end."""
    if option not in base:
        return [*base, option, value]
    first = base.index(option) + 1
    last = next((k for k in range(first, len(base)) if base[k].startswith("--")), len(base))
    return [*base[:first], value, *base[last:]]


MISTAKES = [words_of(base, option, value) for base, option, values in VALUES for value in values]
MISTAKES += [[], ["nothing"], ["inspect"], ["table"], ["table", ""], ["table", "nowhere"], ["table", "IN/a.pt"]]
MISTAKES += [["align", f"IN/{name}", *ALIGN[2:]] for name in ("none*.pt", "none", "text.pt")]

CHECKPOINTS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "int8": lambda s: {n: t.to(torch.int8) for n, t in s.items()},
    "bool": lambda s: {n: t > 0 for n, t in s.items()},
    "complex": lambda s: {n: t.to(torch.complex64) for n, t in s.items()},
    "float8": lambda s: {n: t.to(torch.float8_e4m3fn) for n, t in s.items()},
    "sparse": lambda s: {n: t.to_sparse() for n, t in s.items()},
    "meta": lambda s: {n: t.to("meta") for n, t in s.items()},
    "nan": lambda s: {n: t * torch.nan for n, t in s.items()},
    "stack": lambda s: {n: torch.stack([t, t]) for n, t in s.items()},
    "empty": lambda s: {},
    "list": lambda s: [1, 2],
    "number": lambda s: 3,
    "mixed": lambda s: {**s, "x": 3},
    "extra": lambda s: {**s, "x": torch.zeros(2)},
    "missing": lambda s: dict(list(s.items())[1:]),
    "numbers": lambda s: {1: torch.zeros(2)},
    "object": lambda s: {"state_dict": s, "hyper_parameters": Hyper()},
}


class Hyper:
    """What weights-only reading refuses."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("in")
    torch.manual_seed(0)
    for name in ("a", "b"):
        torch.save(net().state_dict(), made / f"{name}.pt")
    (made / "text.pt").write_text("no checkpoint")
    write_recipe(made / "toy", "{class_path: toy_functions.walk, init_args: {out: $root/$name}}")
    return made


def write_recipe(folder: Path, command: str) -> None:
    """A recipe with one function."""
    folder.mkdir(exist_ok=True)
    (folder / "table.yaml").write_text(
        "title: Toy\nroot: runs/toy\ncommands: [{name: walk, command: run, config: walk.yaml}]\n"
    )
    (folder / "walk.yaml").write_text(f"command: {command}\n")


def placed(words: list[str], folder: Path, out: Path) -> list[str]:
    """A command line with the folders of the test in place of IN and OUT."""
    return [w.replace("IN", str(folder)).replace("OUT", str(out)) if w[:2] in ("IN", "OU") else w for w in words]


def refused(words: list[str], folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    words = placed(words, folder, out)
    capsys.readouterr()
    try:
        code: object = cli.main(words)
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line and not line.startswith("✓")]
    assert code == 2, (words, code, shown)
    assert len(lines) == 1 and lines[0].startswith("tu-symmetry") and "Traceback" not in lines[0], (words, shown)
    assert not out.exists(), words
    return lines[0]


@pytest.mark.filterwarnings("ignore")
def test_every_mistake_is_one_line_and_status_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in MISTAKES:
        refused(words, folder, tmp_path / "out", capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(CHECKPOINTS))
def test_every_bad_checkpoint_is_named(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{kind}.pt"
    torch.save(CHECKPOINTS[kind](net().state_dict()), path)
    assert path.name in refused(["align", "IN/a.pt", str(path), *ALIGN[3:]], folder, tmp_path / "out", capsys)


def own_errors() -> list[type[Exception]]:
    """All classes of errors that the package defines."""
    found = set()
    for module in pkgutil.walk_packages(tu_symmetry.__path__, "tu_symmetry."):
        if "__main__" not in module.name and ".experiments." not in module.name:
            held = vars(importlib.import_module(module.name)).values()
            found |= {c for c in held if inspect.isclass(c) and issubclass(c, Exception)}
    own = {c for c in found if c.__module__.startswith("tu_symmetry.") and not issubclass(c, Warning)}
    return sorted(own, key=lambda c: c.__name__)


def test_what_the_library_has_a_class_for_is_foreseen(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of its own is a line and status 2, whatever it derives from, in a thread of a run too."""
    classes = own_errors()
    assert {"FolderInUseError", "SymmetryError", "FileError", "MissingExtraError"} <= {c.__name__ for c in classes}
    for kind in classes:
        if kind.__name__ == "ElsewhereError":  # another process has said it
            continue
        for command in ("align", "fit"):
            error = kind.__new__(kind)
            Exception.__init__(error, "what was seen; what to do")
            assert ended(error, Signals(), [command]) == 2, kind
            assert capsys.readouterr().err == "tu-symmetry: what was seen; what to do\n"


NAMES = [b"caf\xe9.pt", "große Datei [1].pt".encode(), b"-a\xff\xfe.pt"]


def test_names_of_files_need_not_be_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed, on a terminal that knows ASCII alone, and written is text; the results bear the names."""
    given = tmp_path / "in"
    given.mkdir()
    for k, name in enumerate(NAMES):
        try:
            shutil.copy(folder / f"{'ab'[k % 2]}.pt", os.path.join(os.fsencode(given), name))
        except OSError:
            pytest.skip("this file system takes no such names")
    files = sorted(os.listdir(given))
    for command, out in (("align", tmp_path / "out"), ("merge", tmp_path / "m.safetensors")):
        words = [command, str(given / "*.pt"), *ALIGN[3:-1], str(out)]
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            code = cli.main(words)
        said = b"".join(stream.buffer.getvalue() for stream in streams if not stream.flush())
        assert code == 0, said
    stems = {name.removesuffix(".pt") for name in files}
    assert stems <= {name.removesuffix(".safetensors") for name in os.listdir(tmp_path / "out")}
    for out, suffix in itertools.product(("out/report", "m.report"), (".md", ".json")):
        text = (tmp_path / f"{out}{suffix}").read_text(encoding="utf-8")
        assert "caf\\udce9" in text and (suffix == ".md" or json.loads(text))
    assert read_header(tmp_path / "m.safetensors").metadata
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:  # readers in other languages are stricter
        assert file.metadata()


def test_modules_of_the_folder_one_works_in_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks, data and losses, without any help of Python's own path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def net(): return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))\n"
        "def loader(): return [(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))]\n"
        "def loss(outputs, targets): return outputs.square().mean()\n"
    )
    words = ["--model", "mine.net", "--data", "mine.loader", "--loss", "mine.loss", "--input", "1,4"]
    assert cli.main(["merge", str(folder / "a.pt"), str(folder / "b.pt"), *words, "--out", "m.safetensors"]) == 0


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_network_without_hidden_units_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "torch.nn.TransformerEncoderLayer", "--init", "d_model=4", "nhead=2", "dim_feedforward=0"]
    assert cli.main(["inspect", *words, "--input", "2,3,4"]) == 0
    assert "permutations" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["table", "fit"])
def test_what_the_package_refuses_is_one_line_and_what_breaks_in_a_users_code_is_whole(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own kinds of errors, and any that a `raise` of its own has made; a folder in use is nothing unforeseen."""

    def refuses(*_: object, **__: object) -> None:
        require_numbers(rank="3")

    def in_use(*_: object, **__: object) -> None:
        with lock_folder(folder), lock_folder(folder):
            pass

    def breaks(*_: object, **__: object) -> None:
        raise TypeError("a user's own")

    place = "tu_symmetry.tables." + ("commands._execute" if command == "table" else "lightning.run_lightning")
    words = ["table", str(folder / "toy"), "--out", str(folder / "out")] if command == "table" else ["fit"]
    for broken, message in ((refuses, "number, got '3'"), (in_use, "is in use by another run")):
        monkeypatch.setattr(place, broken)
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error and "not foreseen" not in error
    monkeypatch.setattr(place, breaks)
    if command == "fit":
        with pytest.raises(TypeError, match="a user's own"):
            cli.main(words)
        return
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "TypeError" in error and "TU_SYMMETRY_TRACEBACK=1" in error
    monkeypatch.setenv("TU_SYMMETRY_TRACEBACK", "1")
    with pytest.raises(TypeError):
        cli.main(words)


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGINT, 0.05),
        (signal.SIGTERM, 0.3),
        *(pytest.param(signal.SIGINT, seconds, marks=pytest.mark.slow) for seconds in (0.3, 1.0, 1.7, 2.5)),
        pytest.param(signal.SIGTERM, 1.5, marks=pytest.mark.slow),
    ],
)
def test_signals_also_during_imports(number: signal.Signals, after: float, tmp_path: Path) -> None:
    """The command sleeps, so that the signal comes before it is done."""
    write_recipe(tmp_path / "toy", "{class_path: toy_functions.wait, init_args: {out: $root/$name, seconds: 1000}}")
    script = "import sys\nfrom tu_symmetry.cli import main\nprint('go', flush=True)\nsys.exit(main())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with subprocess.Popen(
        [sys.executable, "-c", script, "table", str(tmp_path / "toy"), "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "go\n"
        time.sleep(after)
        running.send_signal(number)
        try:
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    word, code = ("interrupted", 130) if number == signal.SIGINT else ("terminated", 143)
    assert running.returncode == code, errors
    assert errors == f"tu-symmetry: {word}; the same command resumes\n"


def test_a_signal_that_an_import_swallows_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swallowing = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "swallowing_import.py").write_text(swallowing)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Signals() as signals, pytest.raises(KeyboardInterrupt):
        importlib.import_module("swallowing_import")
        time.sleep(10)
    assert signals.caught == signal.SIGINT


def test_a_full_disk_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file may be larger than 300 bytes for a while; afterwards the same command resumes."""
    import resource

    words = placed(ALIGN, folder, tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        code = cli.main(words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("✓")]
    assert code == 2 and len(errors) == 1, errors
    assert "no more room to write" in errors[0] and "the same command resumes" in errors[0]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {".lock"}
    assert cli.main(words) == 0


def test_configurations_of_lightning_have_to_be_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.yaml").write_bytes("seed_everything: 1 # Größe\n".encode("latin-1"))
    assert cli.main(["fit", "--config", str(tmp_path / "latin.yaml")]) == 2
    assert "is no text in UTF-8 (byte 23)" in capsys.readouterr().err
