"""What transforms weights measures what it did to the outputs, reports it, and refuses what nothing explains."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator
from torch import Tensor, nn
from trainings import fit, mlp, routine
from trainings import mlp_graph as right

import tu_symmetry as tus
from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.states import stack_states
from tu_symmetry.symmetry.certificate import EpsilonWarning, UncertifiedWarning

State = dict[str, Tensor]
NOT_THOSE = r"the outputs of the transformed network are not those .*change by"


@functools.cache
def wrong() -> tus.SymmetryGraph:
    """A graph that passes for verified, and leaves a bias and an input axis behind."""
    graph = right()

    def without(groups: Any, name: str) -> Any:
        return tuple(replace(g, members=tuple(m for m in g.members if m.parameter != name)) for g in groups)

    groups, scales = without(graph.permutations, "2.weight"), without(graph.scales, "0.bias")
    terms = {name: t for name, t in graph.scale_terms.items() if name != "0.bias"}
    return replace(graph, permutations=groups, scales=scales, scale_terms=terms)


def lost() -> tus.SymmetryGraph:
    return pickle.loads(pickle.dumps(right()))


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    source = generator(seed)
    return {n: torch.randn(t.shape, generator=source).to(dtype) for n, t in mlp().state_dict().items()}


CALLS: dict[str, Callable[[tus.SymmetryGraph, bool], Any]] = {
    "align": lambda g, c: tus.align(g, [state(0), state(1)], certify=c),
    "align a stack": lambda g, c: tus.align(g, stack_states([state(0), state(1)]), certify=c),
    "align universe": lambda g, c: tus.align(g, [state(0), state(1)], reference="universe", certify=c),
    "canonicalize": lambda g, c: tus.canonicalize(g, state(0), certify=c),
    "canonicalize unit_norm": lambda g, c: tus.canonicalize(g, state(0), method="unit_norm", certify=c),
    "remove_symmetries": lambda g, c: tus.remove_symmetries(g, state(0), certify=c),
    "remove_symmetries order": lambda g, c: tus.remove_symmetries(g, state(0), scale=None, certify=c),
    "remove_symmetries stack": lambda g, c: tus.remove_symmetries(g, stack_states([state(0), state(1)]), certify=c),
    "CompactPosterior": lambda g, c: tus.CompactPosterior.from_states([state(0), state(1)], g, certify=c),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_graph_that_passes_for_verified_is_refused(name: str) -> None:
    CALLS[name](right(), True)
    CALLS[name](wrong(), False)  # only the certificate notices
    with pytest.raises(tus.SymmetryError, match=NOT_THOSE):
        CALLS[name](wrong(), True)


@pytest.mark.parametrize(
    "callback",
    [
        lambda g: tus.Rebasin(graph=g, in_place=True),
        lambda g: tus.Rebasin(graph=g, in_place=False),
        lambda g: tus.ScaleCanonicalization(graph=g, in_place=True),
    ],
)
def test_callbacks_refuse_before_any_weight_is_changed(callback: Callable[[tus.SymmetryGraph], Any]) -> None:
    good, planted = callback(right()), callback(wrong())
    fit(routine(members=2), good, max_epochs=1)
    changes = good.history[-1]["output_change"]
    assert changes and all(0 <= change < 1e-3 for change in changes)
    held: list[State] = []

    class Watch(type(planted)):  # type: ignore[misc]
        def act(self, trainer: Any, pl_module: Any, *, hook: str) -> None:
            def snapshot() -> State:
                moments = enumerate(trainer.optimizers[0].state.values())
                kept = {f"{k} {key}": t for k, own in moments for key, t in own.items()}
                return copy.deepcopy(pl_module.state_dict() | kept)

            held.append(snapshot())
            try:
                super().act(trainer, pl_module, hook=hook)
            finally:
                held.append(snapshot())

    planted.__class__ = Watch
    with pytest.raises(tus.SymmetryError, match=NOT_THOSE):
        fit(routine(members=2), planted, max_epochs=1)
    assert all(torch.equal(t, held[1][name]) for name, t in held[0].items())


def test_files_are_not_written_under_a_wrong_graph(tmp_path: Path) -> None:
    for k in range(3):
        torch.save(state(k), tmp_path / f"{k}.pt")
    files = sorted(tmp_path.glob("*.pt"))
    done = align_files(right(), files, tmp_path / "right")
    assert done.files[0].output_change == 0.0
    assert all(f.output_change is not None and f.output_change <= f.output_change_allowed for f in done.files)  # type: ignore[operator]
    assert "Certified on the example input" in (tmp_path / "right" / "report.md").read_text()
    with pytest.raises(tus.SymmetryError, match=r"1.pt, aligned: the outputs"):
        align_files(wrong(), files, tmp_path / "wrong")
    assert not (tmp_path / "wrong" / "1.safetensors").exists()
    assert align_files(lost(), files, tmp_path / "lost").files[1].output_change is None
    assert "not measured" in (tmp_path / "lost" / "report.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_change_that_is_reported_is_what_the_dtype_explains(dtype: torch.dtype) -> None:
    states = [state(k, dtype) for k in range(3)]
    alignment = tus.align(right(), states)
    assert len(alignment.certificates) == 3 and not alignment.uncertified
    assert alignment.certificates[0].change == 0.0
    for certificate in alignment.certificates:
        assert certificate.change <= certificate.allowed <= 1e-9 and certificate.dtype == torch.float64  # not rounded
    certificate = tus.canonicalize(right(), states[0]).certificate
    assert certificate is not None and certificate.dtype == dtype
    assert 0 < certificate.change <= certificate.allowed < max(2000 * torch.finfo(dtype).eps, 2e-3)
    moved = tus.CompactPosterior.from_states(states, right()).metadata["certificate"]
    assert moved["change"] <= moved["allowed"]


def test_a_graph_without_a_network_says_so_and_works() -> None:
    graph = lost()
    assert graph.verified and graph.probe is None
    alignment = tus.align(graph, [state(0), state(1)])
    assert alignment.certificates == [] and "holds no network to run" in alignment.uncertified
    form = tus.canonicalize(graph, state(0))
    assert form.certificate is None and "verify_symmetries" in form.uncertified
    posterior = tus.CompactPosterior.from_states([state(0), state(1)], graph)
    assert "holds no network" in posterior.metadata["uncertified"]
    with pytest.warns(UncertifiedWarning, match="remove_symmetries is not certified"):
        tus.remove_symmetries(graph, state(0))
    with pytest.warns(UncertifiedWarning, match="Rebasin is not certified") as caught:
        fit(routine(members=2), tus.Rebasin(graph=graph, every_n_steps=1), max_epochs=1)
    assert len([w for w in caught if w.category is UncertifiedWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedWarning)
        tus.remove_symmetries(graph, state(0), certify=False)
    assert tus.align(graph, [state(0), state(1)], certify=False).uncertified == "certify=False was passed"


def test_what_an_epsilon_makes_of_a_rescaling_is_a_warning_and_more_than_that_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(5, 4, generator=generator(1)))
    source = generator(2)
    fresh = {n: torch.randn(t.shape, generator=source).double() for n, t in model.state_dict().items()}

    def canonical(size: float) -> bool:
        small = {**fresh, "0.weight": fresh["0.weight"] * size}  # unit norm makes it large again
        certificate = tus.canonicalize(graph, small, normalizations="unit_norm").certificate
        return certificate is not None and certificate.holds

    assert canonical(1.0)
    with pytest.warns(EpsilonWarning, match=r"of their norm.*without them the outputs stay the same"):
        assert not canonical(0.05)
    with pytest.raises(tus.SymmetryError, match="outputs"):
        canonical(0.003)
