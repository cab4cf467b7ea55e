"""Networks are taken from the routines that have trained them: alone, as an ensemble, stacked; others are refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch_uncertainty.methods import EMA, deep_ensembles, mc_dropout
from torch_uncertainty.routines import ClassificationRoutine

import tu_symmetry as tus
from tu_symmetry.routines import HMCRoutine, MembersRoutine, VariationalRoutine


def network(seed: int, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3)
    ).double()


def routine(model: nn.Module, **options: Any) -> ClassificationRoutine:
    return ClassificationRoutine(model, num_classes=3, loss=nn.CrossEntropyLoss(), **options)


NETWORKS = [network(seed) for seed in range(3)]
STATES = [m.state_dict() for m in NETWORKS]


@pytest.fixture(scope="module")
def graph() -> tus.SymmetryGraph:
    return tus.discover_symmetries(network(0), torch.randn(2, 4).double())


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(t, expected[n]) for n, t in found.items())


class Own(LightningModule):
    """A LightningModule whose network is called otherwise."""

    def __init__(self, **networks: nn.Module) -> None:
        super().__init__()
        for name, module in networks.items():
            setattr(self, name, module)


class Compiled(nn.Module):
    """What ``torch.compile`` makes of a network, as far as its names go (to compile takes ten seconds)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._orig_mod = network


SINGLE = {
    "a routine": lambda m: routine(m),
    "a method of TorchUncertainty": lambda m: routine(mc_dropout(m, num_estimators=2), is_ensemble=True),
    "another name": lambda m: Own(classifier=m),
    "compiled": lambda m: routine(Compiled(m)),
    "beside a loss": lambda m: Own(classifier=m, loss=nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_a_routine_stands_for_the_network_that_it_has_trained(kind: str, graph: tus.SymmetryGraph) -> None:
    given = [SINGLE[kind](copy.deepcopy(m)) for m in NETWORKS]
    before = [copy.deepcopy(g.state_dict()) for g in given]
    for k, one in enumerate(given):
        assert same(tus.load_state(one), STATES[k])
    expected = tus.align(graph, STATES)
    for found in (tus.align(graph, given), tus.align(graph, [STATES[0], *given[1:]])):
        assert found.transpositions == expected.transpositions
        assert all(same(a, b) for a, b in zip(found.states, expected.states, strict=True))
    merged = tus.merge(graph, given, network(0), reference=given[1])
    assert same(merged.state, tus.merge(graph, STATES, network(0), reference=STATES[1]).state)
    to_one = tus.align(graph, [given[2]], reference=given[0])
    assert to_one.transpositions == [expected.transpositions[2]]
    assert all(same(g.state_dict(), b) for g, b in zip(given, before, strict=True))  # the routines are left alone


def test_what_was_read_of_a_routine_is_a_copy() -> None:
    model = copy.deepcopy(NETWORKS[0])
    read = tus.load_state(routine(model))
    with torch.no_grad():
        model[0].weight.zero_()
    assert same(read, STATES[0])
    assert tus.load_state(routine(model), prefix="0.").keys() == {"weight", "bias"}
    with pytest.raises(ValueError, match="whose names have no prefix"):
        tus.load_state(routine(model), prefix="model.")


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_deep_ensemble_stands_for_its_members(wrapped: bool, graph: tus.SymmetryGraph) -> None:
    ensemble = deep_ensembles(copy.deepcopy(NETWORKS), task="classification")
    given = routine(ensemble, is_ensemble=True) if wrapped else ensemble
    expected = tus.align(graph, STATES)
    found = tus.align(graph, given)
    assert isinstance(found.states, list) and found.transpositions == expected.transpositions
    assert same(tus.merge(graph, given, network(0)).state, tus.merge(graph, STATES, network(0)).state)
    q = tus.CompactPosterior.from_states(given, graph)
    assert same(q.mean, tus.CompactPosterior.from_states(STATES, graph).mean)
    for call in (
        lambda: tus.align(graph, [given, STATES[0]]),
        lambda: tus.merge(graph, [STATES[0], given], network(0)),
        lambda: tus.load_state(given),
    ):
        with pytest.raises(ValueError, match=r"with 3 networks where one is read; pass it by itself as states"):
            call()


def test_members_that_were_trained_at_once_stand_for_themselves(graph: tus.SymmetryGraph) -> None:
    trained = MembersRoutine(network(0), num_members=3)
    states = [trained.member(k).state_dict() for k in range(3)]
    found, expected = tus.align(graph, trained), tus.align(graph, states)
    assert found.transpositions == expected.transpositions
    assert all(same(a, b) for a, b in zip(found.states, expected.states, strict=True))


REFUSED = {
    "several networks": (lambda: Own(teacher=network(0), student=network(1)), r"'teacher' .*'student' .*pass "),
    "no network": (lambda: Own(loss=nn.CrossEntropyLoss()), "no weights yet"),
    "an average beside it": (lambda: routine(EMA(network(0), momentum=0.9)), r"core_model, .*and ema_model; pass"),
    "a chain": (lambda: HMCRoutine(network(0)), r"networks are its draws, .*samples=FOLDER writes them"),
    "a chain on disk": (lambda: HMCRoutine(network(0), samples="there"), r"SampleStore.open\('there'\) reads them"),
    "a distribution": (lambda: VariationalRoutine(nn.Linear(4, 3)), r"posterior\(\).sample\(10\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_routines_that_stand_for_no_single_network_are_refused(kind: str, graph: tus.SymmetryGraph) -> None:
    build, message = REFUSED[kind]
    for call in (
        lambda: tus.align(graph, [STATES[0], build()]),
        lambda: tus.merge(graph, [STATES[0], build()], network(0)),
        lambda: tus.load_state(build()),
    ):
        with pytest.raises(ValueError, match=message):
            call()
