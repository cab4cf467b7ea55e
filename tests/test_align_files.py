"""Aligning checkpoint files: every kind of file, interruptions, and files that do not belong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tu_symmetry import cli
from tu_symmetry.posterior.samples import SampleFileError
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import invert, random_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.align_files import AlignFilesError, align_files, find_checkpoints, output_names

ROOT = Path(__file__).parents[1]


class Net(nn.Sequential):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3))


State = dict[str, Tensor]


@pytest.fixture(scope="module")
def graph() -> SymmetryGraph:
    return discover_symmetries(Net(), torch.zeros(1, 4))


def planted(graph: SymmetryGraph, count: int) -> tuple[list[State], list[dict[str, Tensor]]]:
    """A network and permuted copies of it; the planted elements."""
    generator = torch.Generator().manual_seed(0)
    first = {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items()}
    elements = [random_permutation(graph, generator=generator) for _ in range(count - 1)]
    return [first, *(apply_permutation(graph, p, first) for p in elements)], elements


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_every_kind_of_file_is_aligned(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, elements = planted(graph, 4)
    prefixed = [{f"model.{n}": t for n, t in s.items()} for s in states]
    files = [tmp_path / name for name in ("a.pt", "b.ckpt", "c.safetensors", "d.pt")]
    torch.save(prefixed[0], files[0])
    torch.save(
        {"state_dict": {**prefixed[1], "loss.weight": torch.ones(2)}, "epoch": 3, "pytorch-lightning_version": "2.6"},
        files[1],
    )
    save_file({n: t.contiguous() for n, t in prefixed[2].items()}, files[2])
    torch.save({"state_dict": prefixed[3]}, files[3])
    out = tmp_path / "out"
    result = align_files(graph, files, out, prefix="model.", threads=2)
    assert [f.source for f in result.files] == [str(p) for p in files]
    assert result.files[0].transpositions == 0 and result.files[0].distance_before == 0
    for file, element in zip(result.files, [None, *elements], strict=True):
        aligned, found = load_file(out / file.aligned), load_file(out / file.permutation)
        for name, tensor in states[0].items():
            assert torch.equal(aligned[name], tensor)
        assert file.distance_after == 0
        if element is not None:
            expected = invert(element)
            assert file.distance_before > 1 and file.transpositions == transposition_count(element)
            assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    report = json.loads((out / "report.json").read_text())
    assert [f["transpositions"] for f in report["files"]] == [f.transpositions for f in result.files]
    assert report["options"] == {"method": "frank_wolfe", "prefix": "model."}
    markdown = (out / "report.md").read_text()
    assert all(f"| {p.name} |" in markdown for p in files)


def write(tmp_path: Path, states: list[State]) -> list[Path]:
    folder = tmp_path / "in"
    folder.mkdir()
    files = [folder / f"net{k}.pt" for k in range(len(states))]
    for file, state in zip(files, states, strict=True):
        torch.save(state, file)
    return files


def test_what_is_done_is_skipped_and_anything_else_redone(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 4)
    files, out = write(tmp_path, states), tmp_path / "out"
    assert align_files(graph, files, out).skipped == 0
    before, times = content(out), {p.name: p.stat().st_mtime_ns for p in out.glob("net*")}
    assert align_files(graph, files, out).skipped == 4
    assert content(out) == before and {p.name: p.stat().st_mtime_ns for p in out.glob("net*")} == times
    (out / "net1.permutation.safetensors").unlink()
    torch.save({n: 2 * t for n, t in states[2].items()}, files[2])
    assert align_files(graph, files, out).skipped == 2
    assert torch.equal(load_file(out / "net2.safetensors")["0.weight"], 2 * states[0]["0.weight"])
    assert content(out)["net1.permutation.safetensors"] == before["net1.permutation.safetensors"]
    assert align_files(graph, files, out, method="descent").skipped == 0
    assert align_files(graph, files, out, method="descent", reference=files[1]).skipped == 0
    assert torch.equal(load_file(out / "net0.safetensors")["0.weight"], states[1]["0.weight"])


def test_threads_give_the_same_bytes(graph: SymmetryGraph, tmp_path: Path) -> None:
    files = write(tmp_path, planted(graph, 5)[0])
    align_files(graph, files, tmp_path / "one")
    align_files(graph, files, tmp_path / "three", threads=3)
    assert content(tmp_path / "one") == content(tmp_path / "three")


def test_never_more_networks_in_memory_than_threads(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import weakref

    import tu_symmetry.tables.align_files as module

    files = write(tmp_path, planted(graph, 8)[0])
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    load = module.load_state

    def counting(path: Path, **options: str) -> State:
        nonlocal most
        state = load(path, **options)
        alive.append(weakref.ref(state["0.weight"]))
        gc.collect()
        most = max(most, sum(r() is not None for r in alive))
        return state

    monkeypatch.setattr(module, "load_state", counting)
    align_files(graph, files, tmp_path / "out")
    assert len(alive) == 8 and most <= 2


SCRIPT = """
import os, signal, sys
import tu_symmetry.tables.align_files as module
from tu_symmetry import cli
write, count = module.write_safetensors, 0
def dying(path, tensors, metadata):
    global count
    count += 1
    if count == int(sys.argv[1]):
        (path.parent / f".{path.name}.abcd1234.tmp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, tensors, metadata)
module.write_safetensors = dying
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("writes", [4])
def test_a_killed_run_goes_on_to_identical_bytes(
    writes: int, graph: SymmetryGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the permutation and the weights of the second file, with a half-written file left behind."""
    files = write(tmp_path, planted(graph, 4)[0])
    words = ["align", *map(str, files), "--model", "test_align_files.Net", "--input", "1,4", "--out"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(writes), *words, str(tmp_path / "killed")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = content(tmp_path / "killed")
    assert "net0.safetensors" in left and "net1.safetensors" not in left and "report.json" not in left
    assert b"half" in left.values()
    assert cli.main([*words, str(tmp_path / "killed")]) == 0
    out = capsys.readouterr().out
    assert "4 aligned files (1 done before)" in out and "NoT" in out
    assert cli.main([*words, str(tmp_path / "whole")]) == 0
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_another_architecture_is_named(graph: SymmetryGraph, tmp_path: Path) -> None:
    files = write(tmp_path, planted(graph, 3)[0])
    torch.save(Net(hidden=9).state_dict(), files[1])
    with pytest.raises(AlignFilesError, match=r"net1\.pt.*shape"):
        align_files(graph, files, tmp_path / "out")
    torch.save({f"model.{n}": t for n, t in Net().state_dict().items()}, files[1])
    with pytest.raises(AlignFilesError, match=r"net1\.pt.*--prefix model\."):
        align_files(graph, files, tmp_path / "out")
    torch.save({n: t * torch.nan for n, t in Net().state_dict().items()}, files[1])
    with pytest.raises(AlignFilesError, match=r"net1\.pt.*NaN"):
        align_files(graph, files, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_truncated_file_is_named_and_what_was_done_stays(suffix: str, graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 3)
    files = write(tmp_path, states)
    broken = files[2].with_suffix(suffix)
    if suffix == ".safetensors":
        save_file(states[2], broken)
    broken.write_bytes(broken.read_bytes()[:-300])
    with pytest.raises(SampleFileError, match=r"net2\..*truncated"):
        align_files(graph, [*files[:2], broken], tmp_path / "out")
    assert {"net0.safetensors", "net1.safetensors"} <= content(tmp_path / "out").keys()


@pytest.mark.parametrize("name", ["net1.safetensors", "net1.permutation.safetensors", "report.json", "report.md"])
def test_foreign_files_are_never_overwritten(name: str, graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 2)
    files, out = write(tmp_path, states), tmp_path / "out"
    out.mkdir()
    if name.endswith(".safetensors"):
        save_file(states[1], out / name, metadata={"format": "pt"})
    else:
        (out / name).write_text("{}\n")
    before = content(out)
    with pytest.raises(AlignFilesError, match=f"{name} was not written by this command"):
        align_files(graph, files, out)
    assert content(out) == before


def test_a_checkpoint_is_never_overwritten(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 2)
    for k, state in enumerate(states):
        save_file(state, tmp_path / f"net{k}.safetensors")
    files = find_checkpoints([str(tmp_path / "*.safetensors")])
    with pytest.raises(AlignFilesError, match=r"net0\.safetensors is a checkpoint and would be overwritten"):
        align_files(graph, files, tmp_path)


def test_headers_say_where_files_come_from(graph: SymmetryGraph, tmp_path: Path) -> None:
    import hashlib

    files = write(tmp_path, planted(graph, 2)[0])
    align_files(graph, files, tmp_path / "out")
    for name in ("net1.safetensors", "net1.permutation.safetensors"):
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            header = json.loads(file.metadata()["tu_symmetry.aligned"])
        assert header["source_sha256"] == hashlib.sha256(files[1].read_bytes()).hexdigest()
        assert header["reference_sha256"] == hashlib.sha256(files[0].read_bytes()).hexdigest()
        assert header["distance_after"] == 0 and header["transpositions"] > 0


def test_names_tell_checkpoints_apart() -> None:
    assert output_names([Path("runs/a.pt"), Path("runs/b.pt")]) == ["a", "b"]
    assert output_names([Path("runs/0/last.ckpt"), Path("runs/1/last.ckpt")]) == ["0-last", "1-last"]
    assert output_names([Path("runs/a.pt"), Path("runs/a.ckpt")]) == ["a-pt", "a-ckpt"]
    with pytest.raises(AlignFilesError, match="tell them apart"):
        output_names([Path("r/a/b.pt"), Path("r/a-b.pt"), Path("r/b.pt")])


def test_globs_and_what_they_do_not_find(tmp_path: Path) -> None:
    for k in (10, 2, 1):
        (tmp_path / f"{k}.pt").touch()
    found = find_checkpoints([str(tmp_path / "2.pt"), str(tmp_path / "*.pt")])
    assert [p.name for p in found] == ["2.pt", "1.pt", "10.pt"]
    with pytest.raises(AlignFilesError, match=r"x\*\.pt is no file"):
        find_checkpoints([str(tmp_path / "x*.pt")])
    with pytest.raises(AlignFilesError, match="a folder"):
        find_checkpoints([tmp_path])


def test_errors_of_the_command_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.pt").write_bytes(b"nothing")
    words = ["--model", f"{__name__}.Net", "--input", "1,4", "--out", str(tmp_path / "out")]
    assert cli.main(["align", str(tmp_path / "net.pt"), *words]) == 2
    assert "net.pt" in capsys.readouterr().err
    started = time.perf_counter()
    assert cli.main(["align", str(tmp_path / "none*.pt"), *words]) == 2
    assert "none*.pt is no file" in capsys.readouterr().err and time.perf_counter() - started < 5
