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
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tu_symmetry as tus
from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.states import stack_states
from tu_symmetry.symmetry.certificate import EpsilonWarning, UncertifiedWarning

State = dict[str, Tensor]


def network() -> nn.Sequential:
    hidden = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    return nn.Sequential(*hidden).eval()


@functools.cache
def right() -> tus.SymmetryGraph:
    graph = tus.discover_symmetries(network(), torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    graph.require_verified()
    assert len(graph.permutations) == 2 and graph.scales
    return graph


@functools.cache
def wrong() -> tus.SymmetryGraph:
    """A graph that passes for verified, and leaves a bias and an input axis behind."""
    graph = right()

    def without(groups: Any, name: str) -> Any:
        return tuple(replace(g, members=tuple(m for m in g.members if m.parameter != name)) for g in groups)

    groups, scales = without(graph.permutations, "2.weight"), without(graph.scales, "0.bias")
    terms = {name: t for name, t in graph.scale_terms.items() if name != "0.bias"}
    planted = replace(graph, permutations=groups, scales=scales, scale_terms=terms)
    assert planted.verified and planted.probe is graph.probe
    return planted


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        n: torch.randn(t.shape, generator=generator).to(dtype) if t.ndim else t.clone()
        for n, t in network().state_dict().items()
    }
    return {n: (t + 2).abs() if "var" in n else t for n, t in drawn.items()}


class Routine(LightningModule):
    def __init__(self, members: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(network().train() for _ in range(members))
        for k, member in enumerate(self.networks):
            member.load_state_dict(state(k))
        self.loss = F.cross_entropy

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return torch.stack([self.loss(member(batch[0]), batch[1]) for member in self.networks]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def trained(callback: Any, members: int = 2) -> Routine:
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator))
    module = Routine(members)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, callbacks=[callback], enable_model_summary=False, **options)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module


MEMBERS = "networks"
CALLS: dict[str, Callable[[tus.SymmetryGraph, bool], Any]] = {
    "align": lambda g, c: tus.align(g, [state(0), state(1)], certify=c),
    "align a stack": lambda g, c: tus.align(g, stack_states([state(0), state(1)]), certify=c),
    "align mean": lambda g, c: tus.align(g, [state(0), state(1)], reference="mean", certify=c),
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
    with pytest.raises(tus.SymmetryError, match=r"the outputs of the transformed network are not those .*change by"):
        CALLS[name](wrong(), True)


@pytest.mark.parametrize(
    "callback",
    [
        lambda g: tus.Rebasin(MEMBERS, graph=g, in_place=True),
        lambda g: tus.Rebasin(MEMBERS, graph=g, in_place=False),
        lambda g: tus.ScaleCanonicalization(MEMBERS, graph=g, in_place=True),
    ],
)
def test_callbacks_refuse_before_any_weight_is_changed(callback: Callable[[tus.SymmetryGraph], Any]) -> None:
    good = callback(right())
    trained(good)
    changes = good.history[-1]["output_change"]
    assert changes and all(0 <= change < 1e-3 for change in changes)

    class Watch(type(callback(wrong()))):  # type: ignore[misc]
        def act(self, trainer: Any, pl_module: Any, *, hook: str) -> None:
            optimizers = trainer.optimizers[0].state_dict()
            before = copy.deepcopy((pl_module.state_dict(), optimizers["state"]))
            try:
                super().act(trainer, pl_module, hook=hook)
            finally:
                after = (pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"])
                self.same = all(torch.equal(t, after[0][n]) for n, t in before[0].items()) and all(
                    torch.equal(t, after[1][k][n]) for k, own in before[1].items() for n, t in own.items()
                )

    planted = callback(wrong())
    planted.__class__ = Watch
    with pytest.raises(tus.SymmetryError, match="outputs of the transformed network are not those"):
        trained(planted)
    assert planted.same


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
    lost = pickle.loads(pickle.dumps(right()))
    assert align_files(lost, files, tmp_path / "lost").files[1].output_change is None
    assert "not measured" in (tmp_path / "lost" / "report.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_change_that_is_reported_is_what_the_dtype_explains(dtype: torch.dtype) -> None:
    states = [state(k, dtype) for k in range(3)]
    alignment = tus.align(right(), states)
    assert len(alignment.certificates) == 3 and not alignment.uncertified
    assert alignment.certificates[0].change == 0.0
    for certificate in alignment.certificates:
        assert certificate.holds and certificate.change <= certificate.allowed <= 1e-9  # nothing is rounded
        assert certificate.dtype == torch.float64
    form = tus.canonicalize(right(), states[0])
    assert form.certificate is not None and form.certificate.holds and form.certificate.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert 0 < form.certificate.change <= form.certificate.allowed < max(2000 * eps, 2e-3)
    moved = tus.CompactPosterior.from_states(states, right()).metadata["certificate"]
    assert moved["change"] <= moved["allowed"]


def test_a_graph_without_a_network_says_so_and_works() -> None:
    lost = pickle.loads(pickle.dumps(right()))
    assert lost.verified and lost.probe is None
    alignment = tus.align(lost, [state(0), state(1)])
    assert alignment.certificates == [] and "holds no network to run" in alignment.uncertified
    form = tus.canonicalize(lost, state(0))
    assert form.certificate is None and "verify_symmetries" in form.uncertified
    posterior = tus.CompactPosterior.from_states([state(0), state(1)], lost)
    assert "holds no network" in posterior.metadata["uncertified"]
    with pytest.warns(UncertifiedWarning, match="remove_symmetries is not certified"):
        tus.remove_symmetries(lost, state(0))
    with pytest.warns(UncertifiedWarning, match="Rebasin is not certified") as caught:
        trained(tus.Rebasin(MEMBERS, graph=lost, every_n_steps=1))
    assert len([w for w in caught if w.category is UncertifiedWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedWarning)
        tus.remove_symmetries(lost, state(0), certify=False)
    assert tus.align(lost, [state(0), state(1)], certify=False).uncertified == "certify=False was passed"


def test_what_an_epsilon_makes_of_a_rescaling_is_a_warning_and_more_than_that_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(2)
    fresh = {n: torch.randn(t.shape, generator=generator).double() for n, t in model.state_dict().items()}

    def canonical(size: float) -> tus.symmetry.Certificate | None:
        small = {**fresh, "0.weight": fresh["0.weight"] * size}  # unit norm makes it large again
        return tus.canonicalize(graph, small, normalizations="unit_norm").certificate

    whole = canonical(1.0)
    assert whole is not None and whole.holds
    with pytest.warns(EpsilonWarning, match=r"of their norm.*without them the outputs stay the same"):
        warned = canonical(0.05)
    assert warned is not None and not warned.holds
    with pytest.raises(tus.SymmetryError, match="outputs"):
        canonical(0.003)
