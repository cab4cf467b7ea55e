"""Two files: the same function by which symmetry, or how far apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_networks import Normed
from zoo import named

import tu_symmetry as tus
from tu_symmetry.checkpoints.compare import compare
from tu_symmetry.cli import main

State = dict[str, Tensor]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moved(graph: tus.SymmetryGraph, state: State, *kinds: str) -> State:
    for kind in kinds:
        if kind == "permutations":
            state = tus.apply_permutation(graph, tus.random_permutation(graph, generator=drawn(1)), state)
        elif kind == "signs":
            state = tus.apply_signs(graph, tus.random_signs(graph, generator=drawn(2)), state)
        elif kind == "rotations":
            state = tus.symmetry.apply_linear(graph, tus.symmetry.random_linear(graph, generator=drawn(3)), state)
        else:
            logs = tus.random_scale(graph, generator=drawn(4), std=0.4)
            groups = graph.scales if kind == "scales" else graph.normalizations
            state = tus.apply_scale(graph, {g.name: logs[g.name] for g in groups}, state)
    return state


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mlp_relu", ("permutations",)),
        ("mlp_relu", ("permutations", "scales")),
        ("mlp_mixed", ("permutations", "signs")),
        ("batchnorm_cnn", ("permutations", "signs", "scales", "normalizations")),
        ("grouped_query", ("permutations", "signs", "scales", "rotations")),
    ],
)
def test_the_kinds_that_were_planted_are_named(name: str, kinds: tuple[str, ...]) -> None:
    _, graph, state = named(name)
    found = compare(graph, state, moved(graph, state, *kinds))
    assert found.verdict == "symmetric" and {*found.kinds} == {*kinds}, found
    assert found.fingerprints < found.tolerance and found.after < 1e-6 * found.before
    assert str(found).startswith(f"the same function, by {', '.join(found.kinds)}")


def test_equal_and_different_networks_are_told_apart() -> None:
    _, graph, state = named("mlp_relu")
    assert compare(graph, state, dict(state)).verdict == "equal"
    other = moved(graph, state, "permutations", "scales")
    other["2.weight"] = other["2.weight"].clone()
    other["2.weight"][0, 0] += 1e-3
    found = compare(graph, state, other)
    assert found.verdict == "different" and found.after < 0.01 < found.before and found.fingerprints > found.tolerance
    assert str(found).startswith("different functions")
    assert sum(found.move.counts().values()) > 0


def test_the_command_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Normed()
    graph, state = tus.discover_symmetries(model, torch.randn(2, 4)), model.state_dict()
    torch.save(state, tmp_path / "a.pt")
    torch.save(moved(graph, state, "permutations", "scales"), tmp_path / "b.pt")
    words = ["--model", "toy_networks.Normed", "--input", "2,4"]
    assert main(["inspect", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), *words]) == 0
    assert "the same function, by permutations" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "a.pt"), *words]) == 2
    assert "two files are compared" in capsys.readouterr().err
