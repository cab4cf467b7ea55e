"""Callbacks under data parallelism: two gloo processes on the CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from trainings import adam, loader, normalized, routine, trainer

from tu_symmetry.callbacks import PosteriorSnapshots, Rebasin, ScaleCanonicalization
from tu_symmetry.posterior.samples import SampleStore


class _Report(Callback):
    """Writes what this rank ended with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        acting = [c for c in trainer.callbacks if isinstance(c, (Rebasin, ScaleCanonicalization))]  # type: ignore[attr-defined]
        moments = [v for s in trainer.optimizers[0].state.values() for n, v in s.items() if n.startswith("exp_avg")]
        report = {
            "moments": moments,
            "losses": pl_module.losses,
            "parameters": {k: v.detach() for k, v in pl_module.named_parameters()},
            "history": acting[0].history if acting else [],
        }
        torch.save(report, self.folder / f"rank{trainer.global_rank}.pt")


def _fit(folder: Path, *callbacks: Callback) -> None:
    folder.mkdir()
    data = loader(n=32).dataset
    made = trainer(*callbacks, _Report(folder), devices=2, strategy="ddp_fork", max_epochs=2, num_sanity_val_steps=0)
    made.fit(routine(normalized, 3, adam), DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))


class _Failing(Rebasin):
    """Fails on rank 0 only; every rank writes what ended it, and rank 0 waits for the other before it exits."""

    folder: Path

    def _align(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("this rank cannot align")

    def act(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        try:
            super().act(trainer, *args, **kwargs)
        except ValueError as error:
            (self.folder / f"error{trainer.global_rank}").write_text(str(error))
            deadline = time.monotonic() + 10
            while trainer.is_global_zero and not (self.folder / "error1").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            raise


def _main(folder: Path) -> None:
    _fit(folder / "plain")
    snapshots = PosteriorSnapshots(folder / "store", every_n_steps=4)
    _fit(folder / "aligned", Rebasin(in_place=True, every_n_steps=2, barrier_loader="val"), snapshots)
    _fit(folder / "scaled", ScaleCanonicalization(in_place=True, every_n_steps=2))
    failing = _Failing(every_n_steps=2)
    failing.folder = folder / "failing"
    with contextlib.suppress(Exception):
        _fit(failing.folder, failing)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs in a fresh process, since a process that has used autograd's threads cannot be forked."""
    folder = tmp_path_factory.mktemp("distributed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def _ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in (0, 1)]


def test_all_ranks_apply_the_same_permutations(runs: Path) -> None:
    plain, ranks = _ranks(runs / "plain"), _ranks(runs / "aligned")
    assert sum(sum(r["NoT"]) for r in ranks[0]["history"]) > 0
    assert ranks[0]["history"] == ranks[1]["history"]
    for name, tensor in ranks[0]["parameters"].items():
        assert torch.equal(tensor, ranks[1]["parameters"][name]), name
    for mine, reference in zip(ranks, plain, strict=True):
        assert mine["losses"] == pytest.approx(reference["losses"], rel=1e-9, abs=0)


def test_all_ranks_apply_the_same_factors(runs: Path) -> None:
    ranks = _ranks(runs / "scaled")
    assert [r["step"] for r in ranks[0]["history"]] == [2, 4, 6, 8]
    assert min(min(r["ratio"]) for r in ranks[0]["history"]) > 1 + 1e-9
    assert ranks[0]["history"] == ranks[1]["history"]
    for name, tensor in ranks[0]["parameters"].items():
        assert torch.equal(tensor, ranks[1]["parameters"][name]), name
    for mine, theirs in zip(*(r["moments"] for r in ranks), strict=True):
        assert torch.equal(mine, theirs)
    mass = sum(float(t.square().sum()) for t in ranks[0]["parameters"].values())
    assert mass == pytest.approx(sum(ranks[0]["history"][-1]["minimal_mass"]))


def test_rank_zero_writes_the_snapshots(runs: Path) -> None:
    store = SampleStore.open(runs / "store")
    assert [(r.chain, r.step) for r in store.records] == [(chain, step) for step in (4, 8) for chain in (0, 1, 2)]
    final = _ranks(runs / "aligned")[0]["parameters"]  # eight steps in all, the last alignment came before
    for chain in range(3):
        member = {n: t for n, t in store[3 + chain].items() if f"model.core_models.{chain}.{n}" in final}
        assert len(member) == 6
        assert all(torch.equal(t, final[f"model.core_models.{chain}.{n}"]) for n, t in member.items())


def test_an_error_on_rank_zero_ends_all_ranks(runs: Path) -> None:
    assert (runs / "failing" / "error1").read_text() == "this rank cannot align"


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
