"""Ordinary mistakes on the command line: one clear line and a status, never a traceback, and nothing is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_networks import net

from tu_symmetry import cli
from tu_symmetry.files import lock_folder
from tu_symmetry.posterior.network import require_numbers

ROOT = Path(__file__).parents[2]


HERE = "toy_networks"
INSPECT = ["inspect", "--model", "torch.nn.Linear", "--init", "in_features=4", "out_features=3", "--input", "1,4"]
ALIGN = ["align", "IN/a.pt", "IN/b.pt", "--model", f"{HERE}.net", "--input", "1,4", "--out", "OUT"]
BARRIERS = [*ALIGN, "--data", f"{HERE}.loader", "--points", "3"]
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
    (INSPECT, "--kwargs", ["x", "=1", "x=1", "x=1,4:foo"]),
    (INSPECT, "--html", ["", "IN", "IN/a.pt/x.html", "/proc/nothing/x.html", "IN/no/x.html", "x" * 300]),
    (INSPECT, "--no-verfy", [""]),
    (ALIGN, "--out", ["", "IN/a.pt", "IN/a.pt/x", "/proc/x", "/dev/null", "x" * 300]),
    (ALIGN, "--reference", ["", "nothing", "IN", "IN/text.pt"]),
    (ALIGN, "--solver", ["", "foo"]),
    (ALIGN, "--candidates", ["0", "1", "x", "1.5"]),
    (ALIGN, "--max-iterations", ["0", "-1"]),
    (ALIGN, "--threads", ["0", "-1", "1e3"]),
    (BARRIERS, "--data", ["", "nothing", f"{HERE}.net", f"{HERE}.raises", "os.getcwd", "torch.nn.Linear"]),
    (BARRIERS, "--num-samples", ["0", "-1"]),
    (BARRIERS, "--points", ["2", "x"]),
    (BARRIERS, "--barriers", ["0", "-1", "x", "", "ALL"]),
    (BARRIERS, "--loss", ["", "nothing", "os.getcwd", "torch.nn.functional.relu"]),
    (BARRIERS, "--correction", ["foo", "batchnorm"]),
    (BARRIERS, "--data-init", ["x", "=1", "x=1", "a: b=1", "x=[", "x=*a"]),
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
MISTAKES += [["table", "IN/old"], ["table", "IN/old", "--out", "OUT"]]
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("in")
    torch.manual_seed(0)
    for name in ("a", "b"):
        torch.save(net().state_dict(), made / f"{name}.pt")
    (made / "text.pt").write_text("no checkpoint")
    write_recipe(made / "toy", "{class_path: toy_functions.walk, init_args: {out: runs/toy/walk}}")
    (made / "old").mkdir()
    (made / "old" / "table.yaml").write_text("title: Toy\nstages: [walk]\n")
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
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    for words in MISTAKES:
        refused(words, folder, tmp_path / "out", capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(CHECKPOINTS))
def test_every_bad_checkpoint_is_named(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    path = tmp_path / f"{kind}.pt"
    torch.save(CHECKPOINTS[kind](net().state_dict()), path)
    assert path.name in refused(["align", "IN/a.pt", str(path), *ALIGN[3:]], folder, tmp_path / "out", capsys)


def test_what_nobody_foresaw_says_where_to_look(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("tu_symmetry.tables.commands._execute", broken)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    words = ["table", str(folder / "toy"), "--out", str(folder / "out")]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "ZeroDivisionError" in error and "TU_SYMMETRY_TRACEBACK=1" in error
    monkeypatch.setenv("TU_SYMMETRY_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(words)


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
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    words = ["table", str(folder / "toy"), "--out", str(folder / "out")] if command == "table" else ["fit"]
    for broken, message in ((refuses, "rank is the text '3'"), (in_use, "is in use by another run")):
        monkeypatch.setattr(place, broken)
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error and "not foreseen" not in error
    monkeypatch.setattr(place, breaks)
    if command == "fit":
        with pytest.raises(TypeError, match="a user's own"):
            cli.main(words)
    else:
        assert cli.main(words) == 1 and "not foreseen" in capsys.readouterr().err


def process(words: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    script = "import sys\nfrom tu_symmetry.cli import main\nprint('go', flush=True)\nsys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize(
    ("number", "after", "code", "message"),
    [
        (signal.SIGINT, 0.05, 130, "interrupted; the same command resumes"),
        (signal.SIGTERM, 0.3, 143, "terminated; the same command resumes"),
        pytest.param(signal.SIGINT, 0.3, 130, "interrupted", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1.0, 130, "interrupted", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1.7, 130, "interrupted", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2.5, 130, "interrupted", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1.5, 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_signals_also_during_imports(
    number: signal.Signals, after: float, code: int, message: str, folder: Path, tmp_path: Path
) -> None:
    """The command sleeps, so that the signal comes before it is done."""
    sleeping = "{class_path: toy_functions.wait, init_args: {out: runs/toy/walk, seconds: 1000}}"
    write_recipe(tmp_path / "toy", sleeping)
    with process(["table", str(tmp_path / "toy"), "--out", str(tmp_path / "out")]) as running:
        assert running.stdout is not None and running.stdout.readline() == "go\n"
        time.sleep(after)
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == code, errors
    assert message in errors and "Traceback" not in errors and errors.count("\n") == 1, errors


def test_a_full_disk_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may be larger than 300 bytes for a while; afterwards the same command resumes."""
    import resource

    monkeypatch.syspath_prepend(str(ROOT / "tests"))
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


def test_configurations_of_lightning_are_bounded_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(9)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(SystemExit) as end:
        cli.main(["fit", "--config", str(tmp_path / "bomb.yaml")])
    assert end.value.code == 2 and "aliases stand for more than 100000 values" in capsys.readouterr().err
    (tmp_path / "latin.yaml").write_bytes("seed_everything: 1 # Größe\n".encode("latin-1"))
    assert cli.main(["fit", "--config", str(tmp_path / "latin.yaml")]) == 2
    assert "is no text in UTF-8 (byte 23)" in capsys.readouterr().err
