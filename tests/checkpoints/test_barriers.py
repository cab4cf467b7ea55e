"""Barriers between aligned checkpoint files: figures against the library's own, data of every kind, interruptions."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy_networks import Normed as Net

from tu_symmetry import cli
from tu_symmetry.alignment.barrier import loss_barrier, mean_loss
from tu_symmetry.alignment.repair import reestimate_batchnorm
from tu_symmetry.checkpoints.align import FileAlignment, align_files
from tu_symmetry.checkpoints.barriers import (
    WHEN,
    BarrierOptions,
    load_data,
    measure_barriers,
    sampled_pairs,
)
from tu_symmetry.files import FileError
from tu_symmetry.states import load_state, mean_state
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

LOSS = "torch.nn.functional.cross_entropy"


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    state = {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items() if t.ndim}
    return {**state, "1.running_var": state["1.running_var"].exp(), "1.num_batches_tracked": torch.tensor(3)}


def base() -> dict[str, Tensor]:
    return random_state(torch.Generator().manual_seed(0))


def loader(count: int = 40, batch_size: int = 16, seed: int = 0) -> DataLoader[Any]:
    """Inputs with the labels that the network :func:`base` gives them."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    net = Net().eval()
    net.load_state_dict(base())
    return DataLoader(TensorDataset(x, net(x).argmax(1)), batch_size=batch_size)


def two_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return loader(), loader(30, seed=1)


class Module:
    """What a LightningDataModule offers, several test loaders and a training loader that shuffles."""

    def __init__(self, count: int) -> None:
        self.count, self.stages = count, [""]

    def prepare_data(self) -> None:
        self.stages.append("prepare")

    def setup(self, stage: str) -> None:
        assert self.stages[1] == "prepare"
        self.stages.append(stage)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        assert "test" in self.stages
        return [loader(self.count), loader(self.count, seed=5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader(self.count, seed=1).dataset, batch_size=16, shuffle=True)


def only_inputs() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 4)))


def nothing() -> list[Tensor]:
    return []


def triples() -> list[tuple[Tensor, ...]]:
    return [(torch.zeros(2, 4), torch.zeros(2), torch.zeros(2))]


def wrong_labels() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(2, 4), torch.zeros(2, 7, dtype=torch.long))]


@pytest.fixture(scope="module")
def graph() -> SymmetryGraph:
    return discover_symmetries(Net(), torch.zeros(2, 4))


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of the figure, which takes a second to draw."""
    import tu_symmetry.checkpoints.barriers as module

    monkeypatch.setattr(module, "draw_matrices", lambda path, report: path.write_text(str(report.single_loss)))


def aligned(graph: SymmetryGraph, tmp_path: Path, *, noise: float = 0.1, count: int = 3) -> FileAlignment:
    """Permuted copies of one network with noise, in files and aligned."""
    generator = torch.Generator().manual_seed(1)
    files = [tmp_path / f"net{k}.pt" for k in range(count)]
    for file in files:
        state = apply_permutation(graph, random_permutation(graph, generator=generator), base())
        rough = {n: noise * torch.randn(t.shape, generator=generator) if t.ndim else 0 for n, t in state.items()}
        rough["1.running_var"] = 0
        torch.save({n: t + rough[n] for n, t in state.items()}, file)
    return align_files(graph, files, tmp_path / "out")


@pytest.mark.usefixtures("no_figure")
def test_figures_are_the_librarys(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment, net = aligned(graph, tmp_path), Net()
    data = load_data(f"{__name__}.two_loaders", [], 1000, torch.float32)
    options = BarrierOptions(pairs=None, points=5, corrections=("none", "batchnorm", "repair"))
    report = measure_barriers(net, alignment, tmp_path / "out", data, options)
    evaluation, statistics = two_loaders()
    for when in WHEN:
        paths = [f.source if when == "before" else tmp_path / "out" / f.aligned for f in alignment.files]
        states = [load_state(p) for p in paths]
        for correction, again in (("none", None), ("batchnorm", statistics)):
            shown, matrix = report.matrix(when, correction)
            merge = None if again is None else lambda state, ratio: reestimate_batchnorm(net, state, statistics)
            expected = [
                [loss_barrier(net, a, b, evaluation, F.cross_entropy, points=5, merge=merge).barrier for b in states]
                for a in states
            ]
            assert shown == [0, 1, 2] and (max(map(max, expected)) > 0.01 or when == "after")
            torch.testing.assert_close(torch.tensor(matrix), torch.tensor(expected), rtol=1e-4, atol=1e-6)
            average = mean_state(states)
            average = average if again is None else reestimate_batchnorm(net, average, again)
            mean = mean_loss(net, average, evaluation, F.cross_entropy)
            assert report.mean_losses[when][correction] == pytest.approx(mean, abs=1e-6)
        assert report.barriers[when]["repair"][0]["losses"][1] != report.barriers[when]["none"][0]["losses"][1]
    assert [p["losses"][0] for p in report.barriers["before"]["none"]] == pytest.approx(
        [p["losses"][0] for p in report.barriers["after"]["none"]], rel=1e-5
    )


def test_copies_of_one_network_have_no_barrier_once_aligned(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment = aligned(graph, tmp_path, noise=0.0)
    data = load_data(f"{__name__}.loader", ["count=32"], 1000, torch.float32)
    report = measure_barriers(Net(), alignment, tmp_path / "out", data, BarrierOptions(pairs=None, points=5))
    before, after = ([p["barrier"] for p in report.barriers[w]["none"]] for w in WHEN)
    assert max(before) > 0.05 and max(after) < 1e-6
    assert report.mean_losses["after"]["none"] == pytest.approx(report.single_loss, rel=1e-5)
    content = json.loads((tmp_path / "out" / "report.json").read_text())["barriers"]
    assert content["matrix"]["before"]["none"][0][1] == before[0] and content["num_samples"] == 32
    assert set(content["matrix"]["after"]) == {"none", "batchnorm"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "![barrier matrices](barriers.png)" in text and "all 3 pairs" in text and "BatchNorm re-estimated" in text
    assert (tmp_path / "out" / "barriers.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("no_figure")
def test_an_interruption_at_any_write_changes_no_byte(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment, out = aligned(graph, tmp_path), tmp_path / "out"
    data = load_data(f"{__name__}.loader", [], 1000, torch.float32)
    options = BarrierOptions(pairs=2, points=3)
    names = ("barriers.png", "report.json", "report.md")
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
    measure_barriers(Net(), alignment, out, data, options)
    writes, whole = 10**9 - left, [(out / n).read_bytes() for n in names]
    assert writes == 2 + 2 + 3
    for number in range(writes):
        for name in names:
            (out / name).unlink()
        shutil.rmtree(out / "state")
        left = number
        with pytest.raises(Killed):
            measure_barriers(Net(), alignment, out, data, options)
        left = 10**9
        measure_barriers(Net(), alignment, out, data, options)
        assert [(out / n).read_bytes() for n in names] == whole, number
        assert left == 10**9 - (writes - min(number, 4))  # what was measured is not measured again


@pytest.mark.usefixtures("no_figure")
def test_barriers_stay_in_the_reports_as_long_as_they_hold(graph: SymmetryGraph, tmp_path: Path) -> None:
    """Aligning again, also without the folder `state`, keeps them; another alignment drops them and says so."""
    alignment, out = aligned(graph, tmp_path), tmp_path / "out"
    data = load_data(f"{__name__}.loader", [], 1000, torch.float32)
    options = BarrierOptions(pairs=2, points=3)
    measure_barriers(Net(), alignment, out, data, options)
    names = ("barriers.png", "report.json", "report.md")
    whole = [(out / n).read_bytes() for n in names]
    files = [Path(f.source) for f in alignment.files]
    assert align_files(graph, files, out).notes == ()
    assert [(out / n).read_bytes() for n in names] == whole
    shutil.rmtree(out / "state")
    assert align_files(graph, files, out).notes == ()
    assert [(out / n).read_bytes() for n in names] == whole
    measure_barriers(Net(), align_files(graph, files, out), out, data, options)  # the figure is known as its own
    assert [(out / n).read_bytes() for n in names] == whole
    (note,) = align_files(graph, files, out, reference=files[1]).notes
    assert "those of another alignment" in note and not (out / "barriers.png").exists()
    assert "barriers" not in json.loads((out / "report.json").read_text())
    assert "barrier" not in (out / "report.md").read_text()


@pytest.mark.usefixtures("no_figure")
def test_barriers_are_of_the_files_that_were_aligned(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment, out = aligned(graph, tmp_path), tmp_path / "out"
    data = load_data(f"{__name__}.loader", [], 1000, torch.float32)
    align_files(graph, [Path(f.source) for f in alignment.files], out, reference=Path(alignment.files[1].source))
    with pytest.raises(FileError, match="was changed by another run"):
        measure_barriers(Net(), alignment, out, data, BarrierOptions(pairs=2, points=3))


@pytest.mark.usefixtures("no_figure")
def test_damaged_measurements_are_refused(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment, out = aligned(graph, tmp_path), tmp_path / "out"
    data = load_data(f"{__name__}.loader", [], 1000, torch.float32)
    options = BarrierOptions(pairs=2, points=3)
    measure_barriers(Net(), alignment, out, data, options)
    kept = next((out / "state" / "barriers").glob("pair-*.json"))
    kept.write_text(kept.read_text().replace("0.", "1.", 1))
    with pytest.raises(FileError, match=r"pair-.*\.json was changed or damaged.*deleting it"):
        measure_barriers(Net(), alignment, out, data, options)


@pytest.mark.usefixtures("no_figure")
def test_what_was_measured_on_other_data_is_measured_again(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment, out = aligned(graph, tmp_path), tmp_path / "out"
    options, found = BarrierOptions(pairs=None, points=3), []
    for seed in (0, 1, 0):
        data = load_data(f"{__name__}.loader", [f"seed={seed}"], 1000, torch.float32)
        found.append(measure_barriers(Net(), alignment, out, data, options))
    assert found[0] == found[2] and found[0].single_loss != found[1].single_loss


def test_pairs_are_drawn_without_repetition_and_always_the_same() -> None:
    assert sampled_pairs(4, None) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] == sampled_pairs(4, 99)
    some = sampled_pairs(100_000, 50)
    assert some == sampled_pairs(100_000, 50) and len(set(some)) == 50 and all(0 <= i < j < 100_000 for i, j in some)


@pytest.mark.usefixtures("no_figure")
def test_pairs_that_were_not_measured_are_empty(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment = aligned(graph, tmp_path, count=5)
    data = load_data(f"{__name__}.loader", [], 1000, torch.float32)
    report = measure_barriers(Net(), alignment, tmp_path / "out", data, BarrierOptions(pairs=2, points=3))
    shown, matrix = report.matrix("after", "none")
    assert shown == sorted({k for pair in report.pairs for k in pair}) and "2 of 10 pairs" in report.grid().caption
    known = {pair: p["barrier"] for pair, p in zip(report.pairs, report.barriers["after"]["none"], strict=True)}
    for a, i in enumerate(shown):
        for b, j in enumerate(shown):
            value = matrix[a][b]
            expected = 0.0 if i == j else known.get((min(i, j), max(i, j)))
            assert value == expected if expected is not None else value != value
    text = (tmp_path / "out" / "report.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_data_module_gives_test_data_and_training_inputs() -> None:
    data = load_data(f"{__name__}.Module", ["count=40"], 24, torch.float64)
    x, y = next(iter(loader()))
    assert torch.equal(data.evaluation[0][0], x.double()) and torch.equal(data.evaluation[0][1], y)
    assert data.num_samples == 24 and [len(s) for s in data.statistics] == [16, 8]
    known = {tuple(row) for row in loader(40, seed=1).dataset.tensors[0].double().tolist()}  # type: ignore[attr-defined]
    assert all(tuple(row) in known for row in torch.cat(data.statistics).tolist())
    state = torch.random.get_rng_state()
    assert load_data(f"{__name__}.Module", ["count=40"], 24, torch.float64).digest == data.digest
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nowhere.at_all", [], "cannot import"),
        (f"{__name__}.Module", [], "TypeError.*--data-init"),
        (f"{__name__}.loader", ["count"], "not KEY=VALUE"),
        (f"{__name__}.only_inputs", [], "two tensors"),
        (f"{__name__}.triples", [], "two tensors"),
        (f"{__name__}.nothing", [], "gave no batch"),
        (f"{__name__}.LOSS", [], "not callable"),
    ],
)
def test_data_that_do_not_fit_are_named(name: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_data(name, arguments, 10, torch.float32)


def test_a_foreign_figure_is_not_overwritten(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment = aligned(graph, tmp_path, count=2)
    (tmp_path / "out" / "barriers.png").write_bytes(b"mine")
    data = load_data(f"{__name__}.loader", [], 10, torch.float32)
    with pytest.raises(FileError, match="not written by this command"):
        measure_barriers(Net(), alignment, tmp_path / "out", data, BarrierOptions())
    assert (tmp_path / "out" / "barriers.png").read_bytes() == b"mine"


def nan_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum() * torch.nan


def test_a_loss_that_is_nan_names_the_files(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment = aligned(graph, tmp_path, count=2)
    data = load_data(f"{__name__}.loader", [], 10, torch.float32)
    with pytest.raises(FileError, match=r"no barrier between .*net0.pt and .*net1.pt: the losses at the ends"):
        measure_barriers(Net(), alignment, tmp_path / "out", data, BarrierOptions(loss=f"{__name__}.nan_loss"))


def test_the_command_reports_barriers(graph: SymmetryGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aligned(graph, tmp_path, noise=0.0)
    words = ["align", str(tmp_path / "*.pt"), "--model", f"{__name__}.Net", "--input", "2,4", "--points", "3"]
    words += ["--out", str(tmp_path / "new"), "--reference", "universe", "--barriers", "all", "--data"]
    assert cli.main([*words, f"{__name__}.wrong_labels"]) == 2
    error = capsys.readouterr().err
    assert "cross_entropy of the network's outputs cannot be computed" in error and not (tmp_path / "new").exists()
    assert cli.main([*words, f"{__name__}.loader", "--data-init", "count=20", "seed=3"]) == 0
    shown = capsys.readouterr().out
    assert "Loss barriers and the mean network" in shown and "on 20 samples" in shown and "BatchNorm re-" in shown
    assert json.loads((tmp_path / "new" / "report.json").read_text())["barriers"]["pairs"] == [[0, 1], [0, 2], [1, 2]]
