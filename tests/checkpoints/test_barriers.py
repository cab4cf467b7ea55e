"""Barriers between aligned checkpoint files: figures against the library's own, data of every kind, interruptions."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy_networks import Killed, counted
from toy_networks import Normed as Net

from tu_symmetry import cli
from tu_symmetry.alignment.barrier import loss_barrier, mean_loss
from tu_symmetry.alignment.repair import reestimate_batchnorm
from tu_symmetry.checkpoints import barriers as module
from tu_symmetry.checkpoints.align import FileAlignment, align_files
from tu_symmetry.checkpoints.barriers import WHEN, load_data, measure_barriers, sampled_pairs
from tu_symmetry.files import FileError
from tu_symmetry.states import load_state, mean_state
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

LOSS = "torch.nn.functional.cross_entropy"
WRITTEN = ("barriers.png", "barriers.json", "report.json", "report.md")


def base() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(t.shape, generator=generator) for n, t in Net().state_dict().items() if t.ndim}
    return {**state, "1.running_var": state["1.running_var"].exp(), "1.num_batches_tracked": torch.tensor(3)}


def loader(count: int = 40, seed: int = 0) -> DataLoader[Any]:
    """Inputs with the labels that the network :func:`base` gives them."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    net = Net().eval()
    net.load_state_dict(base())
    return DataLoader(TensorDataset(x, net(x).argmax(1)), batch_size=16)


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


def nan_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum() * torch.nan


def data(name: str = "loader", *arguments: str) -> module.BarrierData:
    return load_data(f"{__name__}.{name}", arguments, 1000, torch.float32)


@pytest.fixture(scope="module")
def graph() -> SymmetryGraph:
    return discover_symmetries(Net(), torch.zeros(2, 4))


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text in place of the figure, which takes a second to draw."""
    monkeypatch.setattr(module, "draw_matrices", lambda report: str(report["single_network_loss"]).encode())


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
    report = measure_barriers(
        net,
        alignment,
        tmp_path / "out",
        data("two_loaders"),
        pairs=None,
        points=5,
        corrections=("none", "batchnorm", "repair"),
    )
    evaluation, statistics = two_loaders()
    for when in WHEN:
        paths = [f.source if when == "before" else tmp_path / "out" / f.aligned for f in alignment.files]
        states = [load_state(p) for p in paths]

        def again(state: Any, ratio: float = 0.5) -> Any:
            return reestimate_batchnorm(net, state, statistics)

        for correction, merge in (("none", None), ("batchnorm", again)):
            for (i, j), found in zip(report["pairs"], report["paths"][when][correction], strict=True):
                path = loss_barrier(net, states[i], states[j], evaluation, F.cross_entropy, points=5, merge=merge)
                assert found["losses"] == pytest.approx(path.losses)
                matrix = report["matrix"][when][correction]
                assert matrix[i][j] == matrix[j][i] == found["barrier"] == pytest.approx(path.barrier)
                assert path.barrier > 0.01 or when == "after" or correction == "batchnorm"
            average = mean_state(states) if merge is None else again(mean_state(states))
            mean = mean_loss(net, average, evaluation, F.cross_entropy)
            assert report["mean_network_loss"][when][correction] == pytest.approx(mean, abs=1e-6)
        assert report["paths"][when]["repair"][0]["losses"][1] != report["paths"][when]["none"][0]["losses"][1]
    ends = [[path["losses"][0] for path in report["paths"][when]["none"]] for when in WHEN]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_copies_of_one_network_have_no_barrier_once_aligned(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment = aligned(graph, tmp_path, noise=0.0)
    report = measure_barriers(Net(), alignment, tmp_path / "out", data("loader", "count=32"), pairs=None, points=5)
    before, after = ([p["barrier"] for p in report["paths"][w]["none"]] for w in WHEN)
    assert max(before) > 0.05 and max(after) < 1e-6
    assert report["mean_network_loss"]["after"]["none"] == pytest.approx(report["single_network_loss"], rel=1e-5)
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
    left, measured = counted(monkeypatch, os, "replace"), counted(monkeypatch, module, "loss_barrier")

    def measure() -> None:
        measure_barriers(Net(), alignment, out, data(), pairs=2, points=3)

    measure()
    writes, whole, paths = left.used, [(out / n).read_bytes() for n in WRITTEN], measured.used
    assert writes == 2 + 3
    for number in range(writes):
        for name in WRITTEN:
            (out / name).unlink()
        left.calls, measured.used = number, 0
        with pytest.raises(Killed):
            measure()
        left.calls = 10**9
        measure()
        assert [(out / n).read_bytes() for n in WRITTEN] == whole, number
        assert measured.used == paths + paths // 2 * (number < 2)  # what was written is not measured again


@pytest.mark.usefixtures("no_figure")
def test_reports_hold_the_barriers_of_their_command_and_measure_none_twice(
    graph: SymmetryGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment, out = aligned(graph, tmp_path), tmp_path / "out"
    files = [Path(f.source) for f in alignment.files]
    measured = counted(monkeypatch, module, "loss_barrier")

    def measure(*arguments: str) -> list[bytes]:
        measure_barriers(Net(), align_files(graph, files, out), out, data("loader", *arguments), pairs=2, points=3)
        return [(out / n).read_bytes() for n in WRITTEN]

    whole, paths = measure(), measured.used
    align_files(graph, files, out)
    assert not (out / "barriers.png").exists() and "barriers" not in json.loads((out / "report.json").read_text())
    assert measure() == whole and measured.used == paths
    assert measure("seed=1") != whole and measured.used == 2 * paths  # other data
    align_files(graph, files, out, reference=files[1])
    with pytest.raises(FileError, match="was changed by another run"):
        measure_barriers(Net(), alignment, out, data())
    assert measure() == whole
    (out / "barriers.json").write_text((out / "barriers.json").read_text().replace("0.", "1.", 1))
    with pytest.raises(FileError, match=r"barriers\.json was .*damaged"):
        measure()


def test_pairs_are_drawn_without_repetition_and_always_the_same() -> None:
    assert sampled_pairs(4, None) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] == sampled_pairs(4, 99)
    some = sampled_pairs(100_000, 50)
    assert some == sampled_pairs(100_000, 50) and len(set(some)) == 50 and all(0 <= i < j < 100_000 for i, j in some)


@pytest.mark.usefixtures("no_figure")
def test_pairs_that_were_not_measured_are_empty(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment = aligned(graph, tmp_path, count=5)
    report = measure_barriers(Net(), alignment, tmp_path / "out", data(), pairs=2, points=3)
    shown = report["networks_in_matrix"]
    assert shown == sorted({k for pair in report["pairs"] for k in pair})
    known = {pair: p["barrier"] for pair, p in zip(report["pairs"], report["paths"]["after"]["none"], strict=True)}
    for a, i in enumerate(shown):
        for b, j in enumerate(shown):
            value = report["matrix"]["after"]["none"][a][b]
            expected = 0.0 if i == j else known.get((min(i, j), max(i, j)), math.nan)
            assert value == pytest.approx(expected, nan_ok=True)
    assert "2 of 10 pairs" in (tmp_path / "out" / "report.md").read_text()
    text = (tmp_path / "out" / "report.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_data_module_gives_test_data_and_training_inputs() -> None:
    found = load_data(f"{__name__}.Module", ["count=40"], 24, torch.float64)
    x, y = next(iter(loader()))
    assert torch.equal(found.evaluation[0][0], x.double()) and torch.equal(found.evaluation[0][1], y)
    assert found.num_samples == 24 and [len(s) for s in found.statistics] == [16, 8]
    known = {tuple(row) for row in loader(40, seed=1).dataset.tensors[0].double().tolist()}  # type: ignore[attr-defined]
    assert all(tuple(row) in known for row in torch.cat(found.statistics).tolist())
    state = torch.random.get_rng_state()
    assert load_data(f"{__name__}.Module", ["count=40"], 24, torch.float64).digest == found.digest
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


def test_a_foreign_figure_and_a_loss_that_is_nan_are_named(graph: SymmetryGraph, tmp_path: Path) -> None:
    alignment, figure = aligned(graph, tmp_path, count=2), tmp_path / "out" / "barriers.png"
    with pytest.raises(FileError, match=r"no barrier between .*net0.pt and .*net1.pt: the losses at the ends"):
        measure_barriers(Net(), alignment, tmp_path / "out", data(), loss=f"{__name__}.nan_loss")
    figure.write_bytes(b"mine")
    with pytest.raises(FileError, match="not written by this command"):
        measure_barriers(Net(), alignment, tmp_path / "out", data())
    assert figure.read_bytes() == b"mine"


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
