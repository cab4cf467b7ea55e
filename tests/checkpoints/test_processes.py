"""Several processes give what one gives: files bit for bit, scores to twelve digits; an error in one ends all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import side_by_side
from toy_networks import Net, tree

from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.checkpoints.data import Data
from tu_symmetry.checkpoints.merge import merge_files
from tu_symmetry.files import FileError, write_safetensors
from tu_symmetry.processes import ElsewhereError, by_first, count, gathered, rank, shared, together
from tu_symmetry.symmetry.discovery import discover_symmetries

COUNT = 5  # networks, which two processes share unequally


def write(folder: Path, suffix: str = ".pt") -> list[Path]:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    paths = [folder / f"net{k}{suffix}" for k in range(COUNT)]
    for path in paths:
        state = {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items()}
        if suffix == ".pt":
            torch.save(state, path)
        else:
            write_safetensors(path, state)
    return paths


def run(paths: list[Path], out: Path) -> None:
    """Everything that several processes share, with the results in one folder."""
    graph = discover_symmetries(Net(), torch.zeros(1, 4))
    for mode in ("first", "medoid", "mean", "universe"):
        align_files(graph, paths, out / mode, reference=mode)  # type: ignore[arg-type]
    align_files(graph, paths, out / "scaled", over=("permutations", "scales"))
    merge_files(graph, paths, out / "merged.safetensors", Net(), reference="universe")


def in_processes(number: int, root: str, work: Any, *arguments: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{root}/store", rank=number, world_size=2)
    with together():
        work(*arguments)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_two_processes_write_what_one_writes(suffix: str, tmp_path: Path) -> None:
    """Files that are read whole, and those of which a mean is read tensor by tensor."""
    paths = write(tmp_path / "in", suffix)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run(paths, tmp_path / "one")
    side_by_side(in_processes, str(tmp_path), run, paths, tmp_path / "two", count=2)
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) > 50
    assert [name for name in one if one[name] != two[name]] == []


def scored(paths: list[Path], out: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
    batches = [(x[k : k + 10], y[k : k + 10]) for k in range(0, 40, 10)]
    data = Data("planted", batches, [x], "digest")
    graph = discover_symmetries(Net(), torch.zeros(1, 4))
    merge_files(graph, paths, out, Net(), data=data, loss="torch.nn.functional.cross_entropy")


def test_two_processes_score_as_one_does(tmp_path: Path) -> None:
    paths = write(tmp_path / "in")
    scored(paths, tmp_path / "one.safetensors")
    side_by_side(in_processes, str(tmp_path), scored, paths, tmp_path / "two.safetensors", count=2)
    one, two = (json.loads((tmp_path / f"{name}.report.json").read_text()) for name in ("one", "two"))
    assert one["members"] == two["members"] and one["scores"] == two["scores"] and len(one["members"]) == COUNT
    assert two["ensemble"] == pytest.approx(one["ensemble"], rel=1e-12, abs=0)
    assert one["ensemble"]


def failing(kind: str) -> None:
    if kind == "share":
        error = FileError if rank() == 1 else ElsewhereError
        with pytest.raises(error, match="^" if rank() else "process 1 failed: number 3 is bad"):
            shared(4, lambda k: fail(f"number {k} is bad") if k == 3 else k)
    else:
        with pytest.raises(ElsewhereError if rank() == 1 else FileError, match="the first fails"):
            by_first(lambda: fail("the first fails"))
    assert gathered(rank()) == [0, 1] and shared(3, str) == ["0", "1", "2"] and by_first(lambda: "told") == "told"


def fail(message: str) -> Any:
    raise FileError(message)


@pytest.mark.parametrize("kind", ["share", "first"])
def test_an_error_in_one_process_is_raised_in_all(kind: str, tmp_path: Path) -> None:
    side_by_side(in_processes, str(tmp_path), failing, kind, count=2)


def test_one_process_computes_by_itself() -> None:
    seen: list[int] = []
    with together():
        assert (rank(), count()) == (0, 1)
        assert shared(3, lambda k: k * k, progress=seen.append) == [0, 1, 4] and seen == [1, 2, 3]
        assert by_first(lambda: 7) == 7 and gathered("x") == ["x"]
    with pytest.raises(ZeroDivisionError):
        shared(1, lambda k: 1 // k)


@pytest.mark.slow
def test_torchrun_shares_a_command(tmp_path: Path) -> None:
    """The command of the README, the folder that one process writes, and one line where a file is bad."""
    paths = write(tmp_path / "in")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tu_symmetry"),
        *("align", str(tmp_path / "in" / "*.pt"), "--model", "toy_networks.Net", "--input", "1,4"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "--out", str(tmp_path / "two")], **options)
    assert done.returncode == 0 and done.stdout.count("5 aligned files") == 1, done.stderr
    align_files(discover_symmetries(Net(), torch.zeros(1, 4)), paths, tmp_path / "one")
    assert tree(tmp_path / "one").keys() == tree(tmp_path / "two").keys()
    again = subprocess.run([*command, "--out", str(tmp_path / "two")], **options)
    assert "5 aligned files (5 done before)" in again.stdout
    paths[3].write_bytes(b"no network")
    failed = subprocess.run([*command, "--out", str(tmp_path / "three")], **options)
    assert failed.returncode != 0 and failed.stderr.count("tu-symmetry:") == 1 and "net3.pt" in failed.stderr
