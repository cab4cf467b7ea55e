"""Figure 3 of arXiv 2401.00611: every file parses, the recipe runs end to end, and starts are permuted as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipe_runs import RECIPES, run_table
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.barrier import measure
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.compact_posterior.transpositions import SCORES, make_pairs, permutation_with_count
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.symmetry.elements import transposition_count
from tu_symmetry.tables.models import MLP

PAPER = RECIPES / "compact_posterior"
DIGITS = PAPER / "transpositions"
TINY = [
    "pairs.command.counts=3",
    "pairs.command.runs=2",
    "pairs.command.model.hidden=[8]",
    "matching.command.model.hidden=[8]",
    "matching.command.data.train_size=128",
    "matching.command.points=5",
    "networks.routine.model.hidden=[8]",
    "networks.routine.num_members=12",
    "networks.data.orders=12",
    "networks.data.train_size=128",
    "networks.trainer.max_epochs=3",
]


def test_transpositions_run_end_to_end(tmp_path: Path) -> None:
    results, text = run_table(DIGITS, tmp_path, TINY)
    assert results["pairs"]["initial"] == [1, 4, 7]
    panels = results["matching"]["panels"]
    assert all(len(panels[key]) == 2 and len(panels[key][0]) == 3 for key in panels)
    start, end = (SampleStore.open(tmp_path / name) for name in ("pairs/initial", "networks/samples"))
    a, b = start.load()["layers.0.weight"], end.load()["layers.0.weight"]
    moved = (b - a).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1)
    assert ((moved > 1e-3) & (moved < 0.5)).all(), "trained from the given states, and not far from them"
    for r in range(2):  # three epochs of few steps: what the copies were permuted by is found again
        assert panels["transpositions"][r] == [1, 4, 7]
        assert panels["training loss"][r] != panels["test loss"][r] != panels["training error"][r]
        assert all(m < u for m, u in zip(panels["distance"][r], panels["distance_unmatched"][r], strict=True))
        assert results["matching"]["walk"]["transpositions"][r][0] == 0
        assert results["matching"]["walk"]["transpositions"][r][-1] == 7
    assert "after activation matching" in text
    assert (tmp_path / "report" / "transpositions.png").read_bytes().startswith(b"\x89PNG")


def test_barriers_are_those_of_the_midpoint() -> None:
    model = MLP(64, 10, (8,))
    states = [MLP(64, 10, (8,)).state_dict() for _ in range(3)]
    part = DigitsDataModule(test_size=50).test
    for state in states:
        loss, error = measure(model, state, Batches(part.x, part.y, batch_size=20), SCORES).values()
        model.load_state_dict(state)
        z = model(part.x)
        assert loss == pytest.approx(cross_entropy(z, part.y).item(), rel=1e-5)
        assert error == pytest.approx((z.argmax(-1) != part.y).double().mean().item())


def test_copies_compute_the_same_function_and_take_the_wanted_transpositions(tmp_path: Path) -> None:
    model = MLP(64, 10, (8,))
    made = make_pairs(tmp_path, model, DigitsDataModule(train_size=20), counts=3, runs=2, seed=4).results
    store = SampleStore.open(tmp_path / "initial")
    assert store.chains == [0] * 6 + [1] * 6 and store.steps == [*range(6)] * 2
    x = DigitsDataModule(train_size=20).train.x
    for k, count in enumerate(2 * made["initial"]):
        first, copied = store[2 * k], store[2 * k + 1]
        model.load_state_dict(first)
        expected = model(x)
        model.load_state_dict(copied)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        moved = [first["layers.0.bias"].tolist().index(v) for v in copied["layers.0.bias"].tolist()]
        assert transposition_count({"hidden": torch.tensor(moved)}) == count
    starts = [tuple(store[2 * k]["layers.0.bias"].tolist()) for k in range(6)]
    assert len(set(starts)) == 6, "a new initialization for each count and run"
    again = make_pairs(tmp_path, model, DigitsDataModule(train_size=20), counts=3, runs=2, seed=4)  # as after a kill
    assert again.results == made and len(SampleStore.open(tmp_path / "initial")) == 12
    again.save(tmp_path)
    with pytest.raises(FileExistsError, match="not empty"):
        make_pairs(tmp_path, model, DigitsDataModule(train_size=20))
    with pytest.raises(ValueError, match="one hidden layer, the model has 2"):
        make_pairs(tmp_path / "two", MLP(64, 10, (8, 8)), DigitsDataModule(train_size=20))


@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_permutations_take_exactly_the_wanted_number_of_transpositions(count: int) -> None:
    p = permutation_with_count(12, count, torch.Generator().manual_seed(count))
    assert p.sort().values.tolist() == list(range(12)) and transposition_count({"hidden": p}) == count
    with pytest.raises(ValueError, match="0 to 11"):
        permutation_with_count(12, 12, torch.Generator())
