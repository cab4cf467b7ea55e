"""Aligning checkpoint files: every kind of file, interruptions, and files that do not belong."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toy_networks import Net, tree

from tu_symmetry import cli
from tu_symmetry.alignment.align import align
from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.checkpoints.files import check_checkpoints, find_checkpoints, output_names
from tu_symmetry.files import FileError, lock_folder
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import invert, random_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph

ROOT = Path(__file__).parents[2]
MODES = ("first", "medoid", "mean", "universe")


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
    assert report["options"] == {"solver": "frank_wolfe", "prefix": "model."}
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
    assert align_files(graph, files, out, solver="descent").skipped == 0
    assert align_files(graph, files, out, solver="descent", reference=files[1]).skipped == 0
    assert torch.equal(load_file(out / "net0.safetensors")["0.weight"], states[1]["0.weight"])


def test_threads_give_the_same_bytes(graph: SymmetryGraph, tmp_path: Path) -> None:
    files = write(tmp_path, planted(graph, 5)[0])
    align_files(graph, files, tmp_path / "one")
    align_files(graph, files, tmp_path / "three", threads=3)
    assert content(tmp_path / "one") == content(tmp_path / "three")


@pytest.mark.parametrize("mode", MODES)
def test_never_more_networks_in_memory_than_threads(
    mode: Any, graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    from tu_symmetry import states as module

    files = write(tmp_path, planted(graph, 8)[0])
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    load = module.load_state

    def counting(path: Path, **options: str) -> State:
        nonlocal most
        state = load(path, **options)
        alive.append(weakref.ref(state["0.weight"]))
        most = max(most, sum(r() is not None for r in alive))
        return state

    for name in ("checkpoints.files", "alignment.networks"):
        monkeypatch.setattr(f"tu_symmetry.{name}.load_state", counting)
    align_files(graph, files, tmp_path / "out", reference=mode)
    assert len(alive) >= 17 and most <= 2  # each is checked and aligned, to a reference


SCRIPT = """
import os, signal, sys
import tu_symmetry.checkpoints.files as module
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


def noisy(graph: SymmetryGraph, count: int) -> list[State]:
    """Permuted copies of a network with so much noise that matching moves units in several sweeps."""
    generator = torch.Generator().manual_seed(1)
    states = planted(graph, count)[0]
    return [{n: t + torch.randn(t.shape, generator=generator) for n, t in s.items()} for s in states]


def test_the_medoid_of_many_files_is_that_of_a_sample(graph: SymmetryGraph, tmp_path: Path) -> None:
    write(tmp_path, noisy(graph, 6))
    files = find_checkpoints([tmp_path / "in/*"])
    sample = align_files(graph, files, tmp_path / "few", reference="medoid", candidates=3)
    assert len(sample.search["candidates"]) == 3 and sample.reference in sample.search["candidates"]
    assert "medoid of 3 of the 6 files" in (tmp_path / "few" / "report.md").read_text()


def test_the_mean_is_a_file_that_distances_are_measured_to(graph: SymmetryGraph, tmp_path: Path) -> None:
    result = align_files(graph, write(tmp_path, noisy(graph, 4)), tmp_path / "out", reference="mean")
    aligned = [load_file(tmp_path / "out" / file.aligned) for file in result.files]
    mean = load_file(tmp_path / "out" / "mean.safetensors")
    for name in mean:
        torch.testing.assert_close(mean[name], torch.stack([a[name] for a in aligned]).mean(0))
    squares = sum(float((a[n] - mean[n]).square().sum()) for a in aligned for n in mean)
    assert sum(f.distance_after**2 for f in result.files) == pytest.approx(squares, rel=1e-5)


class Residual(nn.Module):
    """Two blocks on one stream: the groups of all layers depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.first = nn.ModuleList(nn.Linear(6, 7) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(7, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(torch.relu(first(x)))
        return self.head(x)


@pytest.mark.parametrize("network", [Net, Residual])
@pytest.mark.parametrize(
    ("reference", "solver"),
    list(itertools.product([*MODES, "given"], ["frank_wolfe", "descent"])),
)
def test_files_and_states_are_aligned_alike(
    reference: Any, solver: Any, network: type[nn.Module], tmp_path: Path
) -> None:
    """Every word has one meaning: the command and the function give the same permutations, bit by bit."""
    generator = torch.Generator().manual_seed(3)
    states = [
        {n: torch.randn(t.shape, generator=generator) for n, t in network().state_dict().items()} for _ in "12345"
    ]
    architecture = discover_symmetries(network(), torch.zeros(1, 4))
    files = write(tmp_path, states)
    candidates = {"candidates": 3} if reference == "medoid" else {}
    found = align(
        architecture,
        states[1:] if reference == "given" else states,
        reference=states[0] if reference == "given" else reference,
        solver=solver,
        **candidates,  # type: ignore[arg-type]
    )
    words = ["align", *map(str, files[1:] if reference == "given" else files), "--out", str(tmp_path / "out")]
    words += ["--reference", str(files[0]) if reference == "given" else reference, "--solver", solver]
    words += [word for name, value in candidates.items() for word in (f"--{name}", str(value))]
    assert cli.main([*words, "--model", f"{__name__}.{network.__name__}", "--input", "1,4"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["files"]) == len(found.permutations)
    for entry, expected, state in zip(report["files"], found.permutations, found.states, strict=True):
        permutation = load_file(tmp_path / "out" / entry["permutation"])
        assert permutation.keys() == expected.keys() and all(torch.equal(permutation[g], expected[g]) for g in expected)
        weights = load_file(tmp_path / "out" / entry["aligned"])
        assert all(torch.equal(weights[n], state[n]) for n in state)
    distances = [entry["distance_after"] for entry in report["files"]]
    assert distances == pytest.approx(found.distances_after, rel=1e-5, abs=1e-5)
    if reference == "medoid":
        assert Path(report["reference"]).name == files[found.reference or 0].name


def test_a_universe_that_was_cut_short_says_so_and_resumes(
    graph: SymmetryGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(2)
    states = [{n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items()} for _ in range(8)]
    files = write(tmp_path, states)
    words = ["align", *map(str, files), "--model", f"{__name__}.Net", "--input", "1,4", "--reference", "universe"]
    words, whole = [*words, "--out", str(tmp_path / "out")], [*words, "--out", str(tmp_path / "whole")]
    assert cli.main([*words, "--max-iterations", "1"]) == 0
    assert "sweeps: 1; the last one still moved" in " ".join(capsys.readouterr().out.split())
    assert cli.main(words) == 0
    assert "moved nothing" in " ".join(capsys.readouterr().out.split())
    assert cli.main(whole) == 0  # the example input, too, is that of the command
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("mode", MODES)
def test_an_interruption_at_any_write_changes_no_byte(
    mode: Any, graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path, noisy(graph, 3))
    replace, left = os.replace, 10**9

    class Killed(BaseException):
        pass

    def counting(source: str, target: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", counting)
    align_files(graph, files, tmp_path / "whole", reference=mode)
    writes, whole = 10**9 - left, tree(tmp_path / "whole")
    assert writes >= 8
    for write_number in range(writes):
        left = write_number
        out = tmp_path / f"killed{write_number}"
        with pytest.raises(Killed):
            align_files(graph, files, out, reference=mode)
        left = 10**9
        align_files(graph, files, out, reference=mode)
        assert tree(out) == whole, write_number


def test_more_files_resume_from_the_running_mean(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tu_symmetry.alignment.align as module

    files = write(tmp_path, noisy(graph, 6))
    align_files(graph, files, tmp_path / "whole", reference="universe")
    calls: list[str] = []
    matching = module.weight_matching  # of the first pass; sweeps are the alignment's own
    monkeypatch.setattr(module, "weight_matching", lambda *a, **k: (calls.append(k["solver"]), matching(*a, **k))[1])
    align_files(graph, files[:4], tmp_path / "grown", reference="mean")
    assert len(calls) == 3
    align_files(graph, files, tmp_path / "grown", reference="mean")
    assert len(calls) == 5
    align_files(graph, files, tmp_path / "grown", reference="universe")
    assert len(calls) == 5 and tree(tmp_path / "grown") == tree(tmp_path / "whole")
    align_files(graph, files[::-1], tmp_path / "grown", reference="mean")
    assert len(calls) == 10


def test_a_killed_run_goes_on_to_identical_bytes(
    graph: SymmetryGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL in the middle of a write, with a half-written file left behind."""
    files = write(tmp_path, noisy(graph, 4))
    words = ["align", *map(str, files), "--model", "toy_networks.Net", "--input", "1,4", "--reference", "universe"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT, "11", *words, "--out", str(tmp_path / "killed")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = tree(tmp_path / "killed")
    assert b"half" in left.values() and "report.json" not in left
    assert cli.main([*words, "--out", str(tmp_path / "killed")]) == 0
    assert "4 aligned files" in capsys.readouterr().out
    assert cli.main([*words, "--out", str(tmp_path / "whole")]) == 0
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


@pytest.mark.parametrize("mode", MODES)
def test_every_bad_file_is_named_before_anything_is_written(mode: Any, graph: SymmetryGraph, tmp_path: Path) -> None:
    states, out = noisy(graph, 6), tmp_path / "out"
    files = write(tmp_path, states)
    align_files(graph, files[:3], out, reference=mode)
    before = tree(out)
    torch.save({"state_dict": states[3]}, files[3].with_suffix(".ckpt"))
    files[3].with_suffix(".ckpt").write_bytes(files[3].with_suffix(".ckpt").read_bytes()[:-200])
    save_file({n: t if n != "2.bias" else t / 0 for n, t in states[4].items()}, files[4].with_suffix(".safetensors"))
    torch.save(Net(hidden=9).state_dict(), files[5])
    bad = [files[3].with_suffix(".ckpt"), files[4].with_suffix(".safetensors"), files[5]]
    with pytest.raises(FileError, match="3 of 6 files cannot be aligned") as raised:
        align_files(graph, [*files[:3], *bad], out, reference=mode)
    lines = str(raised.value).splitlines()[1:]
    for line, name, reason in zip(lines, bad, ("truncated", r"NaN or infinite", "shape"), strict=True):
        assert str(name) in line and reason in line
    assert tree(out) == before
    assert align_files(graph, files[:3], out, reference=mode).skipped == 3 and tree(out) == before


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
    with pytest.raises(FileError, match=f"{name} was not written by this command"):
        align_files(graph, files, out)
    assert content(out) == before


def test_a_checkpoint_is_never_overwritten(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 2)
    for k, state in enumerate(states):
        save_file(state, tmp_path / f"net{k}.safetensors")
    files = find_checkpoints([str(tmp_path / "*.safetensors")])
    with pytest.raises(FileError, match=r"net0\.safetensors is read by this command and would be overwritten"):
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
    with pytest.raises(FileError, match="tell them apart"):
        output_names([Path("r/a/b.pt"), Path("r/a-b.pt"), Path("r/b.pt")])


def test_a_long_table_is_cut_on_the_screen_only(graph: SymmetryGraph, tmp_path: Path) -> None:
    result = align_files(graph, write(tmp_path, noisy(graph, 5)), tmp_path / "out")
    assert [row[0] for row in result.grid(limit=2).rows] == ["net0.pt", "net1.pt", "... 3 more in report.md"]
    assert len(result.grid(limit=5).rows) == 5 and "net4.pt" in (tmp_path / "out" / "report.md").read_text()


def test_globs_and_what_they_do_not_find(tmp_path: Path) -> None:
    for k in (10, 2, 1):
        (tmp_path / f"{k}.pt").touch()
    found = find_checkpoints([str(tmp_path / "2.pt"), str(tmp_path / "*.pt")])
    assert [p.name for p in found] == ["2.pt", "1.pt", "10.pt"]
    with pytest.raises(FileError, match=r"x\*\.pt is no file"):
        find_checkpoints([str(tmp_path / "x*.pt")])
    assert [p.name for p in find_checkpoints([tmp_path])] == ["1.pt", "2.pt", "10.pt"]  # a folder stands for its files


def test_files_with_and_without_a_prefix_are_mixed(graph: SymmetryGraph, tmp_path: Path) -> None:
    """A Lightning checkpoint beside a plain state dict: the prefix is taken off where it is."""
    states, _ = planted(graph, 3)
    save_file(states[0], tmp_path / "a.safetensors")
    torch.save({"state_dict": {f"net.model.{n}": t for n, t in states[1].items()}}, tmp_path / "b.ckpt")
    torch.save({n: t.double() for n, t in states[2].items()}, tmp_path / "c.pt")
    files = [tmp_path / name for name in ("a.safetensors", "b.ckpt", "c.pt")]
    result = align_files(graph, files, tmp_path / "out", prefix="net.model.")
    assert all(f.distance_after < 1e-3 < f.distance_before for f in result.files[1:])
    assert load_file(tmp_path / "out" / "c.safetensors")["0.weight"].dtype == torch.float64
    with pytest.raises(FileError, match=r"b.ckpt .* \(option --prefix net.model.\)"):
        align_files(graph, files, tmp_path / "other")


def test_a_bad_reference_is_named_before_anything_is_written(graph: SymmetryGraph, tmp_path: Path) -> None:
    states, _ = planted(graph, 2)
    torch.save(states[0], tmp_path / "a.pt")
    torch.save({**states[1], "0.bias": states[1]["0.bias"] * torch.nan}, tmp_path / "nan.pt")
    with pytest.raises(FileError, match=r"nan.pt.*NaN"):
        align_files(graph, [tmp_path / "a.pt"], tmp_path / "out", reference=tmp_path / "nan.pt")
    assert not (tmp_path / "out").exists()


def test_a_file_is_aligned_once_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: SymmetryGraph
) -> None:
    """And where all files have one name, the report says which is the reference."""
    for folder, state in zip(("x", "y"), planted(graph, 2)[0], strict=True):
        (tmp_path / folder).mkdir()
        torch.save(state, tmp_path / folder / "last.pt")
    monkeypatch.chdir(tmp_path)
    absolute = str(tmp_path / "x" / "last.pt")
    found = find_checkpoints(["x/last.pt", absolute, "./x/../x/last.pt", "*/last.pt"])
    assert found == [Path("x/last.pt"), Path("y/last.pt")]
    result = align_files(graph, found, tmp_path / "out")
    assert result.grid().title == "2 checkpoints of Net aligned to x/last.pt"
    assert align_files(graph, found[:1], tmp_path / "one").grid().title == "1 checkpoint of Net aligned to last.pt"


def test_a_run_killed_within_a_write_leaves_nothing_behind(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves under temporary names, files and folders, the next run takes away."""
    from tu_symmetry import files

    for name, state in zip(("a.pt", "b.pt"), planted(graph, 2)[0], strict=True):
        torch.save(state, tmp_path / name)
    checkpoints = [tmp_path / "a.pt", tmp_path / "b.pt"]
    align_files(graph, checkpoints, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def half(tensor: Tensor) -> memoryview:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, "_content", half)
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)  # a killed process clears nothing
        with pytest.raises(Killed):
            align_files(graph, checkpoints, tmp_path / "out")
    left = [p.name for p in (tmp_path / "out").iterdir() if files.SCRATCH.fullmatch(p.name)]
    assert len(left) == 1
    (tmp_path / "out" / ".a.safetensors.1a2b3c4d.tmp").mkdir()  # as the version before left them
    (tmp_path / "out" / ".a.safetensors.1a2b3c4d.tmp" / ".tmpooRX3o").write_bytes(b"half")
    align_files(graph, checkpoints, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


# --- nothing damaged is used


@pytest.mark.parametrize("damage", ["flipped", "cut", "nan"])
def test_a_result_that_was_changed_is_refused(damage: str, graph: SymmetryGraph, tmp_path: Path) -> None:
    """Each of the files that a run resumes from, whatever is wrong with it; a deleted one is made again."""
    files, out = write(tmp_path, noisy(graph, 3)), tmp_path / "out"
    align_files(graph, files, out, reference="universe")
    whole = tree(out)
    for name in ("net1.safetensors", "net1.permutation.safetensors", "state/mean-1.safetensors",
                 "state/sweep-1-1.safetensors"):  # fmt: skip
        path = out / name
        if damage == "flipped":
            path.write_bytes(whole[name][:-2] + bytes([whole[name][-2] ^ 1]) + whole[name][-1:])
        elif damage == "cut":
            path.write_bytes(whole[name][:-9])
        else:
            with safe_open(path, framework="pt") as file:
                header = file.metadata()
            tensors = {n: t * torch.nan if t.is_floating_point() else t.flip(0) for n, t in load_file(path).items()}
            save_file(tensors, path, metadata=header)
        before = tree(out)
        with pytest.raises(FileError, match=path.name.replace(".", r"\.")) as raised:
            align_files(graph, files, out, reference="universe")
        assert "\n" not in str(raised.value) and tree(out) == before
        path.write_bytes(whole[name])
        align_files(graph, files, out, reference="universe")
        assert tree(out) == whole
    for name in ("net1.safetensors", "net1.permutation.safetensors", "mean.safetensors", "report.json"):
        (out / name).unlink()
        align_files(graph, files, out, reference="universe")
        assert tree(out) == whole


@pytest.mark.parametrize("pair", [("net0", "net1"), ("net2", "net1")])
def test_results_that_were_swapped_are_made_again(pair: tuple[str, str], graph: SymmetryGraph, tmp_path: Path) -> None:
    files, out = write(tmp_path, noisy(graph, 3)), tmp_path / "out"
    align_files(graph, files, out)
    whole = tree(out)
    first, second = (out / f"{name}.safetensors" for name in pair)
    first.write_bytes(whole[second.name])
    second.write_bytes(whole[first.name])
    assert align_files(graph, files, out).skipped == 1
    assert tree(out) == whole


@pytest.mark.filterwarnings("ignore:.* was written by an older version")
def test_pieces_of_the_search_that_were_swapped_are_found_again(graph: SymmetryGraph, tmp_path: Path) -> None:
    files, out = write(tmp_path, noisy(graph, 3)), tmp_path / "out"
    align_files(graph, files, out, reference="universe")
    whole, state = tree(out), out / "state"
    (state / "mean-1.safetensors").write_bytes((state / "mean-2.safetensors").read_bytes())
    align_files(graph, files, out, reference="universe")
    assert tree(out) == whole
    save_file({"0": torch.arange(3)}, state / "mean-1.safetensors")
    with pytest.raises(FileError, match=r"mean-1\.safetensors was not written by this command"):
        align_files(graph, files, out, reference="universe")


def test_one_run_at_a_time(graph: SymmetryGraph, tmp_path: Path) -> None:
    files, out = write(tmp_path, planted(graph, 2)[0]), tmp_path / "out"
    out.mkdir()
    with lock_folder(out):
        before = tree(out)
        with pytest.raises(FileError, match=r"out is in use by another run; .* with --out"):
            align_files(graph, files, out)
        assert tree(out) == before
    align_files(graph, files, out)


def test_runs_at_once_do_not_mix(graph: SymmetryGraph, tmp_path: Path) -> None:
    """Forked copies of one run in one folder: each ends well or is told that another one is at work."""
    files, out = write(tmp_path, noisy(graph, 4)), tmp_path / "out"
    graph.require_verified()
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            try:
                align_files(graph, files, out, reference="universe")
                os._exit(0)
            except FileError as error:
                os._exit(2 if "in use" in str(error) else 3)
            finally:
                os._exit(4)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 0 in codes and set(codes) <= {0, 2}
    align_files(graph, files, tmp_path / "whole", reference="universe")
    assert tree(out) == tree(tmp_path / "whole")


def test_a_folder_that_another_run_makes_meanwhile_is_that_runs(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, out = write(tmp_path, noisy(graph, 2)), tmp_path / "out"
    with contextlib.ExitStack() as other:

        def checks(*args: Any) -> Any:
            out.mkdir()
            other.enter_context(lock_folder(out))
            return check_checkpoints(*args)

        monkeypatch.setattr("tu_symmetry.checkpoints.align.check_checkpoints", checks)
        with pytest.raises(FileError, match="in use by another run"):
            align_files(graph, files, out)
    assert [path.name for path in out.iterdir()] in ([], [".lock"])


def test_results_of_other_versions_are_kept_and_said(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, out = write(tmp_path, planted(graph, 2)[0]), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("tu_symmetry.__version__", "0.0.1")
        align_files(graph, files, out)
    found = align_files(graph, files, out)
    assert found.skipped == 2 and found.kept_from == {"tu_symmetry 0.0.1": 2}


def test_results_can_be_read_by_whom_new_files_can_be_read(graph: SymmetryGraph, tmp_path: Path) -> None:
    torch.save(planted(graph, 1)[0][0], tmp_path / "a.pt")
    align_files(graph, [tmp_path / "a.pt"], tmp_path / "out")
    (tmp_path / "plain").write_text("")
    assert {p.stat().st_mode for p in (tmp_path / "out").iterdir()} == {(tmp_path / "plain").stat().st_mode}
