"""States come back as the type they came in, with what a module's state dict holds besides its tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry import cli
from tu_symmetry.alignment.repair import correct
from tu_symmetry.files import write_safetensors
from tu_symmetry.posterior.compact import prune
from tu_symmetry.states import as_given, open_state, stack_states, unstack
from tu_symmetry.symmetry.action import Permuted


class Versioned(nn.Linear):
    """Cannot be loaded without its version, as torchvision's MNASNet."""

    _version = 3

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != 3:
            raise ValueError(f"version should be 3 instead of {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Versioned(4, 6), nn.BatchNorm1d(6), nn.ReLU(), Versioned(6, 5), nn.ReLU(), nn.Linear(5, 3))


class Plain(dict):  # type: ignore[type-arg]
    """A type of dict that somebody else has."""


def networks() -> list[Net]:
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(Net().double().eval())
    return made


NETWORK = networks()[0]
X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GRAPH = tus.discover_symmetries(NETWORK, X)
DATA = [X, X + 1]


def of_one(call: Callable[[Mapping[str, Tensor]], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda states: [call(states[0])]


def stacked(call: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Of a stack; what comes back is taken apart again."""
    return lambda states: unstack(call(stack_states(states)))


def scales() -> dict[str, Tensor]:
    return tus.random_scale(GRAPH, generator=torch.Generator().manual_seed(0))


def permutation() -> dict[str, Tensor]:
    return tus.random_permutation(GRAPH, generator=torch.Generator().manual_seed(0))


CALLS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "apply_permutation": of_one(lambda s: tus.apply_permutation(GRAPH, permutation(), s)),
    "apply_permutation of a stack": stacked(lambda s: tus.apply_permutation(GRAPH, permutation(), s)),
    "apply_scale": of_one(lambda s: tus.apply_scale(GRAPH, scales(), s)),
    "canonicalize": of_one(lambda s: tus.canonicalize(GRAPH, s).state),
    "remove_symmetries": of_one(lambda s: tus.remove_symmetries(GRAPH, s)),
    "remove_symmetries of a stack": stacked(lambda s: tus.remove_symmetries(GRAPH, s)),
    "align": lambda states: tus.align(GRAPH, states).states,
    "align to the universe": lambda states: tus.align(GRAPH, states, reference="universe").states,
    "align of a stack": stacked(lambda s: tus.align(GRAPH, s).states),
    "average": lambda states: [tus.alignment.average(states)],
    "correct": lambda states: [tus.alignment.correct(NETWORK, states, [0.5, 0.5], states[0], DATA, "batchnorm")],
    "merge": lambda states: [tus.merge(GRAPH, states, NETWORK).state],
    "merge with repair": lambda states: [tus.merge(GRAPH, states, NETWORK, DATA, correction="repair").state],
    "merge of a stack": lambda states: [tus.merge(GRAPH, stack_states(states), NETWORK).state],
    "interpolate": lambda states: [tus.interpolate(states[0], states[1], 0.3)],
    "mean_state": lambda states: [tus.mean_state(states)],
    "reestimate_batchnorm": of_one(lambda s: tus.reestimate_batchnorm(NETWORK, s, DATA)),
    "repair": lambda states: [tus.repair(NETWORK, states, [0.5, 0.25, 0.25], states[0], DATA)],
    "corrected": lambda states: [correct(NETWORK, states, [1, 0, 0], states[0], DATA, "none")],
    "stack and unstack": stacked(lambda s: s),
    "compact mean": lambda states: [tus.CompactPosterior.from_states(states, GRAPH, align=True).mean],
    "compact samples": lambda states: unstack(tus.CompactPosterior.from_states(states, GRAPH, align=True).sample(2)),
    "prune": of_one(lambda s: prune(s, {})),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_modules_state_is_loaded_again_and_others_keep_their_type(name: str) -> None:
    given = [network.state_dict() for network in networks()]
    for state in CALLS[name](given):
        assert type(state) is OrderedDict and dict(state._metadata) == dict(given[0]._metadata)
        Net().load_state_dict(state)
    for kind in (dict, OrderedDict, Plain):
        for state in CALLS[name]([kind(state) for state in given]):
            assert type(state) is kind and not hasattr(state, "_metadata")


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"prune", "corrected"}))
def test_what_was_given_is_left_as_it_is(name: str) -> None:
    given = [network.state_dict() for network in networks()]
    before = [(list(s), [t.clone() for t in s.values()], dict(s._metadata)) for s in given]
    for state in CALLS[name](given):
        state._metadata["another"] = {"version": 9}
    for state, (names, tensors, metadata) in zip(given, before, strict=True):
        assert list(state) == names and dict(state._metadata) == metadata
        assert all(torch.equal(t, old) for t, old in zip(state.values(), tensors, strict=True))


@pytest.mark.parametrize("prefix", ["", "model.", "net.model."])
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".safetensors"])
def test_files_keep_the_versions_of_modules(suffix: str, prefix: str, tmp_path: Path) -> None:
    outer: nn.Module = networks()[0]
    for word in reversed(prefix.split(".")[:-1]):
        outer = nn.ModuleDict({word: outer})
    path = tmp_path / f"a{suffix}"
    if suffix == ".safetensors":
        write_safetensors(path, outer.state_dict())
    else:
        torch.save({"state_dict": outer.state_dict()} if suffix == ".ckpt" else outer.state_dict(), path)
    Net().load_state_dict(tus.load_state(path, prefix=prefix))
    lazily = open_state(path)
    if not prefix:
        Net().load_state_dict(as_given(Permuted(GRAPH, permutation(), lazily), lazily))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_commands_write_what_can_be_loaded(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tu_symmetry.checkpoints.architecture.resolve", lambda name: Net)
    for k, network in enumerate(networks()):
        state = nn.ModuleDict({"model": network.float()}).state_dict()
        (torch.save if suffix == ".pt" else lambda s, p: write_safetensors(p, s))(state, tmp_path / f"{k}{suffix}")
    files = [str(tmp_path / f"{k}{suffix}") for k in range(3)]
    words = ["--model", "tests.Net", "--input", "2,4", "--prefix", "model."]
    for reference in ("first", "universe"):
        out = tmp_path / reference
        assert cli.main(["align", *files, *words, "--reference", reference, "--out", str(out)]) == 0
        for name in ("0", "1", "2", *(["mean"] if reference == "universe" else [])):
            Net().load_state_dict(tus.load_state(out / f"{name}.safetensors"))
    assert cli.main(["merge", *files, *words, "--out", str(tmp_path / "m.safetensors")]) == 0
    Net().load_state_dict(tus.load_state(tmp_path / "m.safetensors"))
