"""Members trained at once: each as if trained alone, in float64; orders, clipping, resuming, files, YAML."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import side_by_side
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.callbacks import LastCheckpoint, PosteriorSnapshots
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.posterior.network import derived_seed, initialized
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import MembersRoutine, MembersStrategy
from tu_symmetry.routines.shares import share_sizes
from tu_symmetry.states import SampleFileError
from tu_symmetry.tables.outcome import plain

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """A convolution, BatchNorm with running statistics, and weights used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.tied = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.again(self.tied(h).tanh()))


class Plain(nn.Module):
    """No buffers at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 7), nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.flatten(1)).relu())


def data(orders: int | None = None, seed: int = 5, **more: Any) -> DigitsDataModule:
    return DigitsDataModule(batch_size=40, train_size=150, test_size=60, seed=seed, orders=orders, **more)


epochs = functools.partial(trainings.epochs, precision="64-true")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def alone(
    network: nn.Module,
    m: int,
    make: Callable[[Any], Any],
    clip: float | None,
    shared: bool,
    schedule: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Member ``m`` by a plain loop; the schedule goes on after every batch."""
    model = initialized(network, derived_seed(0, 1, m)).double().train()
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    loader = data(seed=5 if shared else 5 + m).train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        for x, y in loader:
            loss = F.cross_entropy(model(x.double()), y)
            loss = loss + 2.0 / (2 * 150) * sum(p.square().sum() for p in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12, anneal_strategy="linear")


@pytest.mark.parametrize(
    "network, make, clip, more",
    [
        (Net, sgd, None, {}),
        (Net, adam, None, {"chunk_size": 2}),
        (Net, adam, 0.05, {}),
        (Plain, adam, None, {"data_order": "shared"}),
        (Net, sgd, None, {"lr_scheduler": one_cycle}),
    ],
)
def test_members_are_what_they_are_alone(
    tmp_path: Path, network: Any, make: Any, clip: float | None, more: dict[str, Any]
) -> None:
    shared = more.get("data_order") == "shared"
    torch.manual_seed(3)
    routine = MembersRoutine(network(), 3, prior_precision=2.0, optimizer=make, **more)
    epochs(tmp_path, gradient_clip_val=clip).fit(routine, datamodule=data(None if shared else 3))
    states = routine.states()
    for m in range(3):
        expected = alone(network(), m, make, clip, shared, more.get("lr_scheduler")).state_dict()
        assert states.keys() == expected.keys()
        for name, t in expected.items():
            assert torch.allclose(states[name][m].to(t.dtype), t, rtol=1e-10, atol=1e-10), (m, name)
    assert not torch.equal(states["head.bias" if network is Net else "b.bias"][0], states[next(iter(states))][1, :1])


def test_metrics_are_those_of_the_members_and_their_mean(tmp_path: Path) -> None:
    routine = MembersRoutine(Net(), 3)
    epochs(tmp_path).fit(routine, datamodule=data(3))
    (found,) = epochs(tmp_path).test(routine, datamodule=data(), verbose=False)
    module = data()
    module.setup("test")
    x, y = module.test.x.double(), module.test.y
    probs = []
    for m in range(3):
        model = Net().double().eval()
        model.load_state_dict({n: t[m] for n, t in routine.states().items()})
        outputs = model(x)
        probs.append(outputs.softmax(-1))
        assert routine.member_scores["NLL"][m].item() == pytest.approx(F.cross_entropy(outputs, y).item(), rel=1e-10)
        assert routine.member_scores["Acc"][m].item() == pytest.approx((outputs.argmax(-1) == y).double().mean().item())
    mean = torch.stack(probs).mean(0)
    assert found["test/cls/NLL"] == pytest.approx(F.nll_loss(mean.log(), y).item(), rel=1e-6)
    assert found["test/cls/Acc"] == pytest.approx((mean.argmax(-1) == y).double().mean().item(), abs=1e-6)
    with pytest.raises(ValueError, match="tests one set"):
        epochs(tmp_path).test(routine, datamodule=data(eval_ood=True), verbose=False)


def test_a_cut_run_resumes_and_members_do_not_depend_on_their_number(tmp_path: Path) -> None:
    # Lightning restores weights before it makes them double, so the networks are double from the start.
    def made(count: int, **options: Any) -> MembersRoutine:
        return MembersRoutine(Net().double(), count, optimizer=adam, **options)

    whole, rest, few = made(3, samples=tmp_path / "whole"), made(3, samples=tmp_path / "rest"), made(2)
    epochs(tmp_path, 3).fit(whole, datamodule=data(3))
    saving = ModelCheckpoint(tmp_path, filename="cut", every_n_train_steps=1)
    epochs(tmp_path, -1, saving, max_steps=6).fit(made(3), datamodule=data(3))
    epochs(tmp_path, 3).fit(rest, datamodule=data(3), ckpt_path=saving.best_model_path)
    a, b = SampleStore.open(tmp_path / "whole"), SampleStore.open(tmp_path / "rest", like=Net().double().state_dict())
    assert a.chains == b.chains == [0, 1, 2] and a.steps == b.steps == [12] * 3
    assert all(torch.equal(t, b.load()[name]) for name, t in a.load().items())
    epochs(tmp_path, 3).fit(few, datamodule=data(2))
    for name, t in few.states().items():
        torch.testing.assert_close(whole.states()[name][:2], t, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}], ids=str)
def test_optimizers_of_another_layout_in_memory_resume(how: dict[str, bool], tmp_path: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, **how)
    whole, rest = (MembersRoutine(Plain().double(), 3, optimizer=sgd) for _ in range(2))
    epochs(tmp_path, 3).fit(whole, datamodule=data(3))
    saving = ModelCheckpoint(tmp_path, filename="cut", every_n_train_steps=1)
    epochs(tmp_path, -1, saving, max_steps=6).fit(
        MembersRoutine(Plain().double(), 3, optimizer=sgd), datamodule=data(3)
    )
    cut = torch.load(saving.best_model_path, weights_only=True)
    kept = cut["optimizer_states"][0]["state"].values()
    assert any(not own["momentum_buffer"].is_contiguous() for own in kept)
    for own in kept:
        own["momentum_buffer"] = own["momentum_buffer"].contiguous()  # as earlier versions wrote it
    torch.save(cut, tmp_path / "other.ckpt")
    epochs(tmp_path, 3).fit(rest, datamodule=data(3), ckpt_path=tmp_path / "other.ckpt")
    for name, t in rest.states().items():
        torch.testing.assert_close(whole.states()[name], t, rtol=1e-12, atol=1e-12)


def test_members_start_from_given_states(tmp_path: Path) -> None:
    """No step: the states come out as they went in. Steps: as if fresh initializations had been those states."""
    torch.manual_seed(3)
    fresh = MembersRoutine(Net().double(), 3, seed=7)
    given = SampleStore.create(tmp_path / "given", architecture="Net", method="planted", seed=0)
    given.append(fresh.states(), chain=range(3), step=[0] * 3)
    routine = MembersRoutine(Net().double(), 3, initial_states=tmp_path / "given")
    assert not torch.equal(routine.states()["conv.weight"], fresh.states()["conv.weight"])
    routine.setup("test")
    assert not torch.equal(routine.states()["conv.weight"], fresh.states()["conv.weight"])
    routine.setup("fit")
    for name, t in fresh.states().items():
        assert torch.equal(routine.states()[name], t)
    for made in (fresh, routine):
        epochs(tmp_path).fit(made, datamodule=data(3))
    for name, t in fresh.states().items():
        assert torch.equal(routine.states()[name], t), name
    epochs(tmp_path, 0).fit(routine, datamodule=data(3))
    assert torch.equal(routine.states()["conv.weight"], fresh.states()["conv.weight"]), "a second fit goes on"


def test_says_what_is_wrong(tmp_path: Path) -> None:
    given = SampleStore.create(tmp_path / "given", architecture="Net", method="planted", seed=0)
    given.append(MembersRoutine(Plain(), 2).states(), chain=range(2), step=[0] * 2)
    with pytest.raises(ValueError, match="holds 2 states, but num_members is 3"):
        MembersRoutine(Plain(), 3, initial_states=tmp_path / "given").setup("fit")
    with pytest.raises(SampleFileError, match="another architecture"):
        MembersRoutine(Net(), 2, initial_states=tmp_path / "given").setup("fit")
    with pytest.raises(ValueError, match=r"orders: 3.*data_order: shared"):
        epochs(tmp_path).fit(MembersRoutine(Plain(), 3), datamodule=data())
    with pytest.raises(ValueError, match="LBFGS mixes"):
        epochs(tmp_path).fit(MembersRoutine(Plain(), 3, optimizer=torch.optim.LBFGS), datamodule=data(3))
    with pytest.raises(ValueError, match="num_members must be positive"):
        MembersRoutine(Plain(), 0)


def five(folder: Path) -> MembersRoutine:
    return MembersRoutine(Net().double(), 5, optimizer=adam, samples=folder / "samples", chunk_size=2)


def cut(folder: Path, **options: Any) -> None:
    """A run that ends within an epoch."""
    options |= {"max_steps": 6, "gradient_clip_val": 0.05}
    epochs(folder, -1, LastCheckpoint(folder, every_seconds=0), **options).fit(five(folder), datamodule=data(5))


def resumed(folder: Path, **options: Any) -> None:
    """It goes on to its end, and is tested."""
    routine = five(folder)
    made = epochs(folder, 3, LastCheckpoint(folder), gradient_clip_val=0.05, **options)
    made.fit(routine, datamodule=data(5), ckpt_path=folder / "last.ckpt")
    (found,) = made.test(routine, datamodule=data(), verbose=False)
    (folder / f"scores{made.global_rank}").write_text(repr((found, plain(routine.member_scores))))
    torch.save(routine.states(), folder / f"states{made.global_rank}.pt")


def halves(rank: int, root: Path) -> None:
    """The same by one of two processes, on both sides of the cut and on one of them; what they refuse."""

    def two() -> dict[str, Any]:
        return {"strategy": MembersStrategy(), "devices": 2, "accelerator": "cpu"}

    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    torch.distributed.init_process_group("gloo", f"file://{root}/store", rank=rank, world_size=2)
    cut(root / "both", **two())
    resumed(root / "both", **two())
    cut(root / "before", **two())
    resumed(root / "after", **two())
    with pytest.raises(ValueError, match="random numbers"):
        epochs(root, **two()).fit(MembersRoutine(Dropping(), 4), datamodule=data(4))
    with pytest.raises(ValueError, match="1 members in chunks of 1 are fewer than 2 processes"):
        epochs(root, **two()).fit(MembersRoutine(Plain(), 1), datamodule=data(1))
    snapshots = PosteriorSnapshots(root / "snapshots", every_n_steps=1)
    with pytest.raises(ValueError, match="each process has its own members"):
        epochs(root, 1, snapshots, **two()).fit(MembersRoutine(Plain(), 2), datamodule=data(2))
    torch.distributed.destroy_process_group()


class Dropping(Plain):
    """Draws random numbers in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


def test_processes_share_the_members(tmp_path: Path) -> None:
    """Checkpoints are those of one process: any number of them goes on with what any other has begun."""
    one = tmp_path / "one"
    cut(one)
    shutil.copytree(one, tmp_path / "after")
    resumed(one)
    side_by_side(halves, tmp_path, count=2)
    resumed(tmp_path / "before")
    expected, scores = torch.load(one / "states0.pt"), (one / "scores0").read_text()
    for name, rank in (("both", 0), ("both", 1), ("after", 0), ("after", 1), ("before", 0)):
        found = torch.load(tmp_path / name / f"states{rank}.pt")
        assert found.keys() == expected.keys() and all(torch.equal(t, found[n]) for n, t in expected.items()), name
        assert (tmp_path / name / f"scores{rank}").read_text() == scores
        stored = SampleStore.open(tmp_path / name / "samples", like=Net().double().state_dict()).load()
        assert all(torch.equal(t, stored[n]) for n, t in expected.items())
    assert share_sizes(5, 2, 2) == [2, 3] and share_sizes(7, 1, 3) == [2, 2, 3] and share_sizes(10, 3, 2) == [6, 4]
