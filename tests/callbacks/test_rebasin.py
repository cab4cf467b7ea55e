"""Rebasin: what it logs, and that aligning in place changes neither the function nor the training trajectory."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator, normal
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import Ensemble, Routine, adam, cnn, fit, loader, mlp, mlp_graph, routine, sgd, trainer

from tu_symmetry.alignment.barrier import loss_barrier
from tu_symmetry.callbacks import Rebasin
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import apply_permutation, apply_scale
from tu_symmetry.symmetry.elements import invert, random_permutation, random_scale, transposition_count

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def mlp_rebasin(*args: Any, **kwargs: Any) -> Rebasin:
    return Rebasin(*args, graph=mlp_graph(), **kwargs)


def ensemble(make: Any = mlp, members: int = 3, optimizer: Any = adam, dropout: float = 0.0) -> Routine:
    return routine(make, members, optimizer, dropout)


def member_state(module: Routine, i: int) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.model.core_models[i].state_dict().items()}  # type: ignore


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(sum(((a[k].cpu() - b[k].cpu()).double() ** 2).sum() for k in a if a[k].is_floating_point()) ** 0.5)


class PlantPermutations(Callback):
    """Permutes members when training starts, before a later callback aligns them."""

    def __init__(self) -> None:
        self.planted: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        members = pl_module.model.core_models  # type: ignore
        graph = mlp_graph()
        for i, member in enumerate(members):
            member.load_state_dict(members[0].state_dict())
            if i:
                self.planted[i] = random_permutation(graph, generator=generator(i))
                member.load_state_dict(apply_permutation(graph, self.planted[i], members[0].state_dict()))


def test_planted_permutations_are_found_and_logged() -> None:
    module = ensemble(optimizer=lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True))
    plant, rebasin = PlantPermutations(), Rebasin(barrier_loader="val")
    fit(module, plant, rebasin, max_epochs=1)
    (record,) = rebasin.history
    assert record["NoT"] == [transposition_count(plant.planted[i]) for i in (1, 2)]
    for i in (1, 2):
        inverse = invert(plant.planted[i])
        assert all(torch.equal(rebasin.permutations[i][n], inverse[n]) for n in inverse)
    assert max(record["distance_after"]) < 1e-6 < 1.0 < min(record["distance_before"])
    assert max(record["barrier_after"]) < 1e-6 < 1e-3 < max(record["barrier_before"])
    first, *others = (member_state(module, i) for i in range(3))
    barriers = [
        loss_barrier(mlp().double(), first, other, loader(n=16, shuffle=False), module.loss) for other in others
    ]
    assert record["barrier_before"] == pytest.approx([found.barrier for found in barriers])
    before = [distance(first, other) for other in others]
    assert record["distance_before"] == pytest.approx(before)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("interval", [{"every_n_steps": 2}, {"every_n_epochs": 1}])
def test_trajectory_is_unchanged_in_place(optimizer: Any, interval: dict[str, int]) -> None:
    plain = ensemble(optimizer=optimizer, dropout=0.2)
    fit(plain)
    aligned, rebasin = (
        ensemble(optimizer=optimizer, dropout=0.2),
        mlp_rebasin(in_place=True, barrier_loader="val", **interval),
    )
    fit(aligned, rebasin)
    assert sum(sum(r["NoT"]) for r in rebasin.history) > 5, "vacuous: nothing was permuted"
    assert aligned.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(aligned.model.eval()(x), plain.model.eval()(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_the_trajectory_is_unchanged_over_signs(optimizer: Any) -> None:
    """Units of tanh turn where they are, with momenta and second moments; what turns is counted and logged."""

    def tanh() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))

    plain, aligned = ensemble(tanh, optimizer=optimizer), ensemble(tanh, optimizer=optimizer)
    fit(plain)
    rebasin = Rebasin(over=("permutations", "signs"), in_place=True, every_n_steps=2)
    fit(aligned, rebasin)
    assert sum(sum(r["sign_changes"]) for r in rebasin.history) > 5
    assert aligned.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(aligned.model.eval()(x), plain.model.eval()(x), rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="do not follow a rotation"):
        Rebasin(over=("permutations", "rotations"), in_place=True)


class PlantScales(PlantPermutations):
    """Rescales the permuted members as well."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for i, member in enumerate(pl_module.model.core_models):  # type: ignore
            scale = random_scale(mlp_graph(), generator=generator(i))
            member.load_state_dict(apply_scale(mlp_graph(), scale, member.state_dict()))
        self.given = [member_state(pl_module, i) for i in range(3)]  # type: ignore[arg-type]


@pytest.mark.parametrize("in_place", [False, True])
def test_members_are_compared_at_their_least_mass(in_place: bool) -> None:
    """In place all members go there, the first one too; distances and barriers are those of there."""
    module = ensemble(optimizer=lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9))
    plant = PlantScales()
    rebasin = mlp_rebasin(over=("permutations", "scales"), in_place=in_place, barrier_loader="val")
    fit(module, plant, rebasin, max_epochs=1)
    (record,) = rebasin.history
    least = [canonicalize(mlp_graph(), state) for state in plant.given]
    assert record["NoT"] == [transposition_count(plant.planted[i]) for i in (1, 2)]
    assert record["distance_before"] == pytest.approx([distance(least[0].state, form.state) for form in least[1:]])
    assert max(record["distance_after"]) < 1e-6 and max(record["barrier_after"]) < 1e-6
    batches = loader(n=16, shuffle=False)
    curves = [loss_barrier(mlp().double(), least[0].state, one.state, batches, module.loss) for one in least[1:]]
    assert record["barrier_before"] == pytest.approx([curve.barrier for curve in curves], abs=1e-9)
    assert min(record["largest_factor"]) > 1.1 and max(record["output_change"]) < 1e-9
    assert sorted(rebasin.log_scales) == [0, 1, 2]
    expected = [least[0].state] * 3 if in_place else plant.given
    assert max(distance(member_state(module, i), expected[i]) for i in range(3)) < 1e-6


def test_rotations_are_looked_on() -> None:
    def linear() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    plain, logged = ensemble(linear), ensemble(linear)
    fit(plain)
    rebasin = Rebasin(over=("permutations", "signs", "scales", "rotations"), barrier_loader="val")
    fit(logged, rebasin)
    record = rebasin.history[-1]
    assert record["mixed_blocks"] == [1, 1] and max(record["output_change"]) < 1e-9
    assert all(a < b for a, b in zip(record["distance_after"], record["distance_before"], strict=True))
    for i in range(3):
        assert all(torch.equal(t, member_state(logged, i)[n]) for n, t in member_state(plain, i).items())


def test_batch_norm_and_flatten_in_place() -> None:
    plain, aligned = ensemble(cnn), ensemble(cnn)
    fit(plain, image=True)
    rebasin = Rebasin(in_place=True, every_n_steps=4)
    fit(aligned, rebasin, image=True)
    assert sum(sum(r["NoT"]) for r in rebasin.history) > 0
    assert sorted(rebasin.permutations) == [1, 2]
    assert aligned.losses == pytest.approx(plain.losses, rel=1e-8, abs=0)
    x = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(aligned.model.eval()(x), plain.model.eval()(x), rtol=1e-7, atol=1e-8)


def test_in_place_ends_aligned_and_only_logging_changes_nothing() -> None:
    plain, logged, moved = ensemble(), ensemble(), ensemble()
    fit(plain)
    watch, rebasin = mlp_rebasin(), mlp_rebasin(in_place=True)
    fit(logged, watch)
    fit(moved, rebasin)
    for i in range(3):
        for name, tensor in member_state(plain, i).items():
            assert torch.equal(tensor, member_state(logged, i)[name])
    after = [distance(member_state(moved, 0), member_state(moved, i)) for i in (1, 2)]
    assert rebasin.history[-1]["distance_after"] == pytest.approx(after)
    assert watch.history == rebasin.history


@pytest.mark.parametrize("in_place", [False, True])
def test_a_member_whose_barrier_would_rise_stays(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted permutations, and planted barriers: the first member's would rise, the second one's fall."""
    told = {"barrier_before": [0.1, 0.2], "barrier_after": [0.3, 0.0]}
    monkeypatch.setattr(Rebasin, "_barriers", lambda *_: {key: [*values] for key, values in told.items()})
    module = ensemble(optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    plant, rebasin = PlantPermutations(), mlp_rebasin(in_place=in_place, barrier_loader="val")
    fit(module, plant, rebasin, max_epochs=1)
    first, *others = (member_state(module, i) for i in range(3))
    planted = [distance(first, apply_permutation(mlp_graph(), plant.planted[i], first)) for i in (1, 2)]
    (record,) = rebasin.history
    after = [planted[0], 0.0] if in_place else planted
    assert [distance(first, other) for other in others] == pytest.approx(after, abs=1e-12)
    assert record["distance_before"] == pytest.approx(planted)
    assert record["distance_after"] == pytest.approx(after if in_place else [0.0, 0.0], abs=1e-12)
    assert record["barrier_after"] == ([0.1, 0.0] if in_place else [0.3, 0.0])
    counts = [transposition_count(plant.planted[i]) for i in (1, 2)]
    assert record["NoT"] == [0 if in_place else counts[0], counts[1]] and 0 not in counts


class Stop(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 8


@pytest.mark.parametrize(
    ("schedule", "options", "steps"),
    [
        ({"every_n_steps": 2, "at_end": False}, {"accumulate_grad_batches": 2}, [2, 4, 6, 8]),  # of 9 optimizer steps
        ({"every_n_steps": 4}, {"limit_train_batches": 3}, [4, 8, 9]),
        ({}, {}, [8]),  # at an end that nobody foresaw
    ],
)
def test_it_acts_at_optimizer_steps_and_at_the_end(
    schedule: dict[str, Any], options: dict[str, Any], steps: list[int]
) -> None:
    plain, module, rebasin = ensemble(), ensemble(), mlp_rebasin(in_place=True, **schedule)
    stop = [] if options else [Stop()]
    fit(plain, *stop, **options)
    fit(module, *stop, rebasin, **options)
    assert [r["step"] for r in rebasin.history] == steps
    assert module.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)


def test_every_logger_gets_plain_scalars(tmp_path: Path) -> None:
    logs = [CSVLogger(tmp_path, name=f"log{i}") for i in range(2)]
    rebasin = mlp_rebasin(every_n_steps=4, barrier_loader="val")
    t = fit(ensemble(), rebasin, logger=logs, max_epochs=2)
    expected = sum(rebasin.history[-1]["NoT"]) / 2
    assert float(t.callback_metrics["rebasin/NoT"]) == expected
    for log in logs:
        with open(Path(log.log_dir) / "metrics.csv") as f:
            rows = [r for r in csv.DictReader(f) if r["rebasin/NoT"]]
        assert [int(r["step"]) for r in rows] == [r["step"] for r in rebasin.history] == [4, 8, 12]
        for row, record in zip(rows, rebasin.history, strict=True):
            for key in ("NoT", "distance_before", "distance_after", "barrier_before", "barrier_after"):
                for i in (1, 2):
                    assert float(row[f"rebasin/{key}_{i}"]) == pytest.approx(record[key][i - 1])


@pytest.mark.parametrize(
    ("schedule", "keep", "name", "steps"),
    [
        ({"every_n_epochs": 2}, {"filename": "{epoch}"}, "epoch=1", [12, 18]),
        ({"every_n_steps": 4}, {"filename": "{step}", "every_n_train_steps": 3}, "step=9", [4, 8, 12, 16, 18]),
    ],
)
def test_a_resumed_run_goes_on_with_the_same_schedule(
    schedule: dict[str, int], keep: dict[str, Any], name: str, steps: list[int], tmp_path: Path
) -> None:
    rebasin, second = (mlp_rebasin(in_place=True, **schedule) for _ in range(2))
    fit(ensemble(), rebasin, ModelCheckpoint(tmp_path, save_top_k=-1, **keep))
    fit(ensemble(), second, ckpt=tmp_path / f"{name}.ckpt")
    assert [r["step"] for r in second.history] == [r["step"] for r in rebasin.history] == steps
    assert second.history[0] == rebasin.history[0]


def test_loaders_with_a_shared_generator_keep_their_order() -> None:
    data = TensorDataset(normal(48, 5), torch.arange(48) % 3)
    losses = []
    for callbacks in ([], [mlp_rebasin(every_n_epochs=1, barrier_loader="val")]):
        source, module = generator(9), ensemble()
        train = DataLoader(data, batch_size=8, shuffle=True, generator=source)
        trainer(*callbacks, max_epochs=3).fit(module, train, DataLoader(data, batch_size=8, generator=source))
        losses.append(module.losses)
    assert losses[0] == losses[1]


def test_lightning_weight_averages_follow() -> None:
    plain, module, rebasin = ensemble(), ensemble(), mlp_rebasin(in_place=True, every_n_epochs=1)
    fit(plain, EMAWeightAveraging(decay=0.9))
    fit(module, EMAWeightAveraging(decay=0.9), rebasin)  # the averages are the weights at the end of training
    assert sum(sum(r["NoT"]) for r in rebasin.history) > 5
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(module.model.eval()(x), plain.model.eval()(x), rtol=1e-9, atol=1e-10)


def test_low_precision_weights() -> None:
    module = ensemble().to(torch.bfloat16)
    rebasin = mlp_rebasin(in_place=True, every_n_epochs=1)
    fit(module, rebasin, precision="bf16-true")
    assert len(rebasin.history) == 3
    assert member_state(module, 1)["0.weight"].dtype == torch.bfloat16


def test_what_cannot_be_aligned_is_said_before_the_first_step() -> None:
    wide = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    tanh = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    silent = ensemble()
    silent.loss = None  # type: ignore[assignment]
    for message, module, options in (
        ("'val'", ensemble(), {"barrier_loader": "train"}),
        ("leads nowhere in Routine", ensemble(), {"members": "model.nets"}),
        ("1 network was found", ensemble(members=1), {}),
        (r"'0\.weight' is a tensor of shape \(7, 5\) in member 0", Routine(Ensemble([mlp(), wide])), {}),
        ("is ReLU in member 0 and Tanh in member 1", Routine(Ensemble([mlp(), tanh])), {}),
        ("nothing to align", ensemble(lambda: nn.Linear(5, 3)), {}),
        ("no attribute 'loss'", silent, {"barrier_loader": "val"}),
    ):
        with pytest.raises((ValueError, SymmetryError), match=message):
            fit(module, Rebasin(**options))
    with pytest.raises(ValueError, match="needs a validation loader"):
        trainer(Rebasin(barrier_loader="val")).fit(ensemble(), loader())
    with pytest.raises(TypeError, match="cannot tell the input"):
        Rebasin().on_train_batch_start(None, ensemble(), {"x": torch.ones(2, 5)}, 0)  # type: ignore[arg-type]
