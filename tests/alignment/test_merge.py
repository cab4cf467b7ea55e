"""Merging: laws of the average, its weights, and what is read when; scores that say what each step is worth."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import discovered, planted, some_cases

import tu_symmetry as tus
from tu_symmetry.alignment import average, correct, measure
from tu_symmetry.alignment.barrier import mean_loss
from tu_symmetry.alignment.merging import StaleStatisticsWarning
from tu_symmetry.evaluation import forward
from tu_symmetry.states import SampleFileError, State, open_state
from tu_symmetry.symmetry.running.weights import random_state

pytestmark = pytest.mark.filterwarnings("ignore::tu_symmetry.alignment.merging.StaleStatisticsWarning")


def close(found: State, expected: State, **tolerances: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **tolerances)


def net(norm: bool = False) -> nn.Sequential:
    middle = [nn.BatchNorm1d(12)] if norm else []
    return nn.Sequential(nn.Linear(4, 12), *middle, nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def data(n: int = 300, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Three classes that a small network learns in no time."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return list(zip(x.split(50), (x @ torch.eye(4, 3, dtype=torch.float64)).argmax(1).split(50), strict=True))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).double().mean()


def trained(count: int, norm: bool = False) -> tuple[nn.Sequential, tus.SymmetryGraph, list[State]]:
    states = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = net(norm)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(8):
            for x, y in data():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        states.append({n: t.detach().clone() for n, t in model.state_dict().items()})
    model.eval()
    return model, tus.discover_symmetries(model, data()[0][0][:2]), states


@some_cases
def test_permuted_copies_merge_into_the_same_function(case: Case) -> None:
    """Whatever the weights: all aligned members are one network."""
    model, graph = discovered(case)
    (state,) = [random_state(model, torch.Generator().manual_seed(5))]
    moves = [tus.random_permutation(graph, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    copies = [tus.apply_permutation(graph, p, state) for p in moves]
    found = tus.merge(graph, copies, model, weights=[0.2, 0.5, 0.3])
    tus.symmetry.require_certificate(tus.certify(graph, state, found.state), "the merged network")
    close(found.state, copies[0], rtol=1e-9, atol=1e-12)
    assert found.transpositions[0] == 0


@some_cases
def test_a_weight_of_one_gives_the_aligned_member_itself(case: Case) -> None:
    graph, first, second = planted(case, 3, noise=0.3)
    model, _ = discovered(case)
    alignment = tus.align(graph, [first, second])
    for k in range(2):
        weights = [0.0, 0.0]
        weights[k] = 7.0
        found = tus.merge(graph, [first, second], model, weights=weights)
        assert found.weights[k] == 1
        assert all(torch.equal(t, alignment.states[k][n]) for n, t in found.state.items())


def test_scores_say_what_each_step_is_worth() -> None:
    model, graph, states = trained(3, norm=True)
    loader, held = data(), data(seed=1)
    measured: dict[str, Any] = {"loss": F.cross_entropy, "metrics": {"accuracy": accuracy}, "validation": held}
    found = tus.merge(graph, states, model, loader, correction="repair", **measured)
    aligned = tus.align(graph, states).states
    expected = {"naive": tus.mean_state(states)}
    expected["naive_corrected"] = tus.repair(model, states, [1 / 3] * 3, expected["naive"], loader)
    expected["aligned"] = tus.mean_state(aligned)
    expected["corrected"] = tus.repair(model, aligned, [1 / 3] * 3, expected["aligned"], loader)
    close(found.state, expected["corrected"])
    assert list(found.scores) == list(expected)
    own = [mean_loss(model, s, held, F.cross_entropy) for s in states]
    assert [m["loss"] for m in found.members] == pytest.approx(own)
    for step, state in expected.items():
        assert found.scores[step]["loss"] == pytest.approx(mean_loss(model, state, held, F.cross_entropy))
        assert found.scores[step]["accuracy"] == pytest.approx(mean_loss(model, state, held, accuracy))
        assert found.barriers[step] == pytest.approx(found.scores[step]["loss"] - sum(own) / 3)
    assert found.barriers["corrected"] < found.barriers["aligned"] < found.barriers["naive"]
    halves = tus.merge(graph, states[:2], model, loss=F.cross_entropy, validation=held)
    path = tus.loss_barrier(model, aligned[0], aligned[1], held, F.cross_entropy, points=3)
    assert max(halves.barriers["aligned"], 0) == pytest.approx(path.barrier)  # the middle of the path


def test_the_ensemble_and_the_verdict_stand_beside_a_merge() -> None:
    """Class probabilities are averaged by the weights; a shuffled loader has none; the verdict names the least loss."""
    model, graph, states = trained(3)
    held, options = data(seed=1), {"loss": F.cross_entropy, "metrics": {"accuracy": accuracy}}
    found = tus.merge(graph, states, model, weights=[1, 2, 1], validation=held, **options)
    x, y = (torch.cat(part) for part in zip(*held, strict=True))
    p = sum(w * forward(model, s, x).softmax(-1) for w, s in zip([0.25, 0.5, 0.25], states, strict=True))
    assert isinstance(p, Tensor)
    assert found.ensemble["loss"] == pytest.approx(float(F.nll_loss(p.log(), y)))
    assert found.ensemble["accuracy"] == pytest.approx(float(accuracy(p, y)))
    copies = tus.merge(graph, states[:1] * 2, model, validation=held, **options)
    assert copies.ensemble["loss"] == pytest.approx(copies.members[0]["loss"])
    losses = {"merged": found.scores["aligned"]["loss"]} | {str(k): m["loss"] for k, m in enumerate(found.members)}
    least = min(losses, key=lambda name: losses[name])
    assert ("is the best" if least == "merged" else f"take network {least} alone") in found.verdict
    planted = replace(found, scores={"naive": {"loss": 0.01}, "aligned": {"loss": 0.02}})
    assert planted.verdict.endswith("take the naive mean")

    class Shuffled:
        def __iter__(self) -> Any:
            held.append(held.pop(0))
            return iter(held)

    turned = tus.merge(graph, states, model, validation=Shuffled(), **options)
    assert turned.ensemble == {} and "ensemble" not in turned.verdict
    mean = tus.merge(graph, states, model, validation=[(x, torch.zeros(len(x), 3))], loss=F.mse_loss).ensemble
    outputs = sum(forward(model, s, x) for s in states) / 3
    assert mean["loss"] == pytest.approx(float((outputs**2).mean()))


@pytest.mark.parametrize("reference", ["first", "universe", "given"])
@pytest.mark.parametrize("correction", ["none", "batchnorm", "repair"])
def test_a_merge_is_its_steps(correction: Any, reference: str) -> None:
    """Align, average, correct, measure: the same by hand, bit for bit; the average is the weighted mean."""
    model, graph, states = trained(3, norm=True)
    target: Any = trained(4, norm=True)[2][3] if reference == "given" else reference
    options: Any = {"correction": correction, "reference": target}
    found = tus.merge(graph, states, model, data(), weights=[5, 2, 3], loss=F.cross_entropy, **options)
    aligned = tus.align(graph, states, reference=target).states
    mean = average(aligned, [5, 2, 3])
    weighted = {n: sum(w * s[n] for w, s in zip([0.5, 0.2, 0.3], aligned, strict=True)) for n in states[0]}
    close({n: t.double() for n, t in mean.items()}, {n: t.double() for n, t in weighted.items()})
    by_hand = correct(model, aligned, found.weights, mean, data(), correction)
    assert all(torch.equal(t, by_hand[n]) for n, t in found.state.items())
    alone = tus.merge(graph, states, model, data(), weights=[0, 1, 0], **options)
    assert all(torch.equal(t, aligned[1][n]) for n, t in alone.state.items())
    last = found.scores["aligned" if correction == "none" else "corrected"]
    assert last == measure(model, by_hand, data(), {"loss": F.cross_entropy})


@pytest.mark.parametrize("correction", ["none", "batchnorm", "repair"])
@pytest.mark.parametrize("source", ["files", "safetensors", "index", "store", "stack"])
def test_files_stores_and_stacks_merge_as_lists_do(correction: Any, source: str, tmp_path: Path) -> None:
    model, graph, states = trained(3, norm=True)
    if source == "files":
        given: Any = [tmp_path / f"{k}.pt" for k in range(3)]
        for path, state in zip(given, states, strict=True):
            torch.save(state, path)
    elif source == "safetensors":  # read tensor by tensor
        given = [tmp_path / f"{k}.safetensors" for k in range(3)]
        for path, state in zip(given, states, strict=True):
            save_file(state, path)
    elif source == "index":  # the same, of networks in two files each
        given = [tmp_path / f"{k}.safetensors.index.json" for k in range(3)]
        for k, state in enumerate(states):
            files = {n: f"{k}-{at % 2}.safetensors" for at, n in enumerate(state)}
            for file in set(files.values()):
                save_file({n: t for n, t in state.items() if files[n] == file}, tmp_path / file)
            given[k].write_text(json.dumps({"weight_map": files}))
    elif source == "store":
        given = tus.SampleStore.create(tmp_path / "store", architecture="net", method="test")
        given.append(states, chain=range(3), step=[0] * 3)
    else:
        given = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    options: dict[str, Any] = {"correction": correction, "loss": F.cross_entropy}
    expected = tus.merge(graph, states, model, data(), **options)
    found = tus.merge(graph, given, model, data(), **options)
    close(found.state, expected.state, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.scores, expected.scores)
    torch.testing.assert_close(found.members, expected.members)


def test_a_file_that_is_written_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3).half(), "c": torch.tensor(True)}, path)
    opened = open_state(path)
    close(dict(opened), {"a": torch.arange(4.0), "b": torch.ones(2, 3).half(), "c": torch.tensor(True)})
    save_file({"a": torch.arange(5.0)}, path)
    with pytest.raises(SampleFileError, match="was changed while it was read"):
        _ = opened["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SampleFileError, match="truncated"):
        open_state(path)


class Counting:
    """A sequence that makes its networks when they are asked for, and knows how many are alive."""

    def __init__(self, make: Callable[[int], State], count: int) -> None:
        self.make, self.count, self.alive, self.most, self.reads = make, count, weakref.WeakSet[Any](), 0, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> State:
        state = self.make(index)
        self.alive.add(state["0.weight"])
        self.most, self.reads = max(self.most, len(self.alive)), self.reads + 1
        return state


@pytest.mark.parametrize("correction", ["none", "batchnorm", "repair"])
def test_two_networks_are_in_memory_at_a_time(correction: Any) -> None:
    model, graph, states = trained(2, norm=True)

    def make(index: int) -> State:
        return {n: t + 0.01 * index for n, t in states[index % 2].items()}

    networks: Any = Counting(make, 12)
    found = tus.merge(graph, networks, model, data(), correction=correction, loss=F.cross_entropy)
    assert networks.most <= 2, f"{networks.most} networks alive"
    assert networks.reads >= 24
    close(found.state, tus.merge(graph, [make(k) for k in range(12)], model, data(), correction=correction).state)


def test_half_precision_is_averaged_in_single() -> None:
    model, graph, states = trained(2)
    half = [{n: t.to(torch.bfloat16) for n, t in s.items()} for s in states]
    many = [half[k % 2] for k in range(9)]
    found = tus.merge(graph, many, model)
    wide = [{n: t.double() for n, t in s.items()} for s in many]
    exact = tus.mean_state([tus.apply_permutation(graph, p, s) for p, s in zip(found.permutations, wide, strict=True)])
    for name, tensor in found.state.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.double(), exact[name], rtol=2**-8, atol=1e-6)


def test_what_cannot_be_merged_is_refused_before_anything_is_matched() -> None:
    model, graph, states = trained(2)
    for arguments, message in (
        ({"weights": [1.0]}, "2 finite numbers"),
        ({"weights": [1.0, -0.5]}, "none below 0"),
        ({"weights": [0, 0]}, "not all 0"),
        ({"weights": "best"}, "'equal' or numbers"),
        ({"loss": F.cross_entropy}, "need a loss, and validation="),
        ({"metrics": {"accuracy": accuracy}, "validation": data()}, "need a loss"),
        ({"correction": "repair"}, "pass a dataloader"),
        ({"correction": "temper"}, "must be one of none, batchnorm, repair"),
    ):
        with pytest.raises(ValueError, match=message):
            tus.merge(graph, states, model, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two networks"):
        tus.merge(graph, states[:1], model)
    with pytest.raises(TypeError, match="not a list of state dicts"):
        tus.merge(graph, iter(states), model)  # type: ignore[arg-type]
    with pytest.raises(tus.SymmetryError, match=r"states\[1\] is not a state dict"):
        tus.merge(graph, [states[0], {"0.weight": torch.zeros(1)}], model)


@pytest.mark.filterwarnings("error")
def test_statistics_that_nothing_corrects_are_said_to_be_stale() -> None:
    model, graph, states = trained(2, norm=True)
    with pytest.warns(StaleStatisticsWarning, match=r"Sequential has BatchNorm.*--correction batchnorm") as caught:
        tus.merge(graph, states, model)
    assert len(caught) == 1 and caught[0].filename == __file__
    tus.merge(graph, states, model, data(), correction="batchnorm")
    tus.merge(graph, states, model, weights=[1, 0])
    model, graph, states = trained(2)
    tus.merge(graph, states, model)
