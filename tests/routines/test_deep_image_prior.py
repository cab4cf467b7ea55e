"""Images reconstructed at once: equal to one by one, resumed, logged, written."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from tu_symmetry.datamodules.loading import as_it_is
from tu_symmetry.datamodules.tomography import _Repeated, measured, strip_projector
from tu_symmetry.files import FileError
from tu_symmetry.routines import DeepImagePriorRoutine, Reconstructions
from tu_symmetry.routines.deep_image_prior import image_quality, total_variation


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.drop = nn.Dropout2d(dropout)
        self.b = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return torch.sigmoid(self.b(self.drop(torch.tanh(self.a(x)))))


def problem(angles=(3, 5), images=2):
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(images, 1, 8, 8, generator=generator, dtype=torch.float64) > 0.6).double()
    operators = {a: strip_projector(8, a, 11, 1.1) for a in angles}
    return measured(truth, list(range(images)), operators, [0.05], bin_width=1.1)


class Data(LightningDataModule):
    def __init__(self, own, steps=10):
        super().__init__()
        self.own, self.steps = own, steps

    def train_dataloader(self):
        return DataLoader(_Repeated(self.own, self.steps), batch_size=1, collate_fn=as_it_is)

    def test_dataloader(self):
        return DataLoader(_Repeated(self.own, 1), batch_size=1, collate_fn=as_it_is)


def routine(count=4, **options):
    options = {"tv_weight": {3: 1e-3, 5: 2e-3}, "optimizer": lambda p: torch.optim.Adam(p, lr=0.02), **options}
    return DeepImagePriorRoutine(Small(), count, **options)


def fit(module, own, steps, *, callbacks=(), logger=False, ckpt=None, root=None, precision=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", max_steps=steps, max_epochs=-1, logger=logger, callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks), enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=0.5, log_every_n_steps=1, default_root_dir=root, precision=precision,
        )  # fmt: skip
        trainer.fit(module, Data(own), ckpt_path=ckpt)
    return trainer


def by_hand(own, index, seed_module, steps, weight):
    """One image by itself, in a loop."""
    network = Small()
    network.load_state_dict({name: t[index] for name, t in seed_module.members.state_dict().items()})
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    count = int(own.counts[index])
    best, kept = math.inf, None
    for _ in range(steps):
        image = network(own.back_projection[index : index + 1])
        residual = own.operator[index, :count] @ image.reshape(-1) - own.measurements[index, :count]
        rows, columns = image[0, 0].diff(dim=0).abs().sum(), image[0, 0].diff(dim=1).abs().sum()
        loss = residual.square().mean() + weight * (rows + columns)
        if loss.item() < best:
            best, kept = loss.item(), image.detach()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
    return best, kept


def test_images_at_once_come_out_as_one_by_one(tmp_path):
    own = problem()
    module = routine(out=tmp_path / "found.safetensors")
    start = routine()
    fit(module, own, 40)
    found = Reconstructions.load(tmp_path / "found.safetensors")
    for index, weight in enumerate([1e-3, 1e-3, 2e-3, 2e-3]):
        best, image = by_hand(own, index, start, 40, weight)
        assert float(found.loss[index]) == pytest.approx(best, rel=1e-3)
        assert torch.allclose(found.images[index : index + 1], image, atol=2e-3)
    assert torch.equal(found.problem.operator, own.operator) and found.problem.num_angles.tolist() == [3, 3, 5, 5]
    one = Small()
    one.load_state_dict({name: t[1] for name, t in found.states.items()})
    assert torch.allclose(one(own.back_projection[1:2]), found.images[1:2], atol=1e-6)


def test_the_kept_iterate_is_the_best_one_not_the_last():
    own = problem()
    module = routine(optimizer=lambda p: torch.optim.SGD(p, lr=5.0))  # it jumps about
    seen = []
    step = module._keep
    module._keep = lambda losses, running: (seen.append(losses), step(losses, running))
    fit(module, own, 30)
    assert torch.equal(module.best_loss, torch.stack(seen).min(0).values.cpu())
    early = routine(max_iterations={3: 5, 5: 12})
    seen_early: dict[int, list] = {0: [], 1: [], 2: [], 3: []}
    keep = early._keep

    def record(losses, running):
        for index, loss in zip(running.tolist(), losses, strict=True):
            seen_early[index].append(loss)
        keep(losses, running)

    early._keep = record
    fit(early, own, 12)
    assert [len(losses) for losses in seen_early.values()] == [5, 5, 12, 12]  # what is over is not computed
    best = torch.stack([torch.stack(losses).min() for losses in seen_early.values()])
    assert torch.equal(early.best_loss, best.cpu())
    alone = routine()
    fit(alone, own, 5)
    torch.testing.assert_close(early.best_loss[:2], alone.best_loss[:2])
    longer = routine(max_iterations={3: 5, 5: 12})
    fit(longer, own, 30)  # all are over: nothing is kept any more
    assert torch.equal(longer.best_loss, early.best_loss)


def test_a_cut_run_resumes_to_the_same_result(tmp_path):
    own = problem()
    whole = routine()
    fit(whole, own, 40)
    first = routine()
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=20, save_last=True)
    fit(first, own, 20, callbacks=[keep], root=tmp_path)
    second = routine()
    fit(
        second, own, 40, callbacks=[ModelCheckpoint(dirpath=tmp_path / "b")], ckpt=tmp_path / "last.ckpt", root=tmp_path
    )
    assert torch.equal(whole.best_loss, second.best_loss)
    for a, b in zip(whole.best.parameters(), second.best.parameters(), strict=True):
        assert torch.equal(a, b)


def test_quality_is_logged(tmp_path):
    own, module = problem(), routine()
    trainer = fit(module, own, 40, logger=CSVLogger(tmp_path))
    psnr, ssim = image_quality(module.reconstructions(own), own.truth)
    assert float(trainer.callback_metrics["psnr"]) == pytest.approx(float(psnr.mean()), rel=1e-5)
    assert {"loss", "best_loss", "psnr", "ssim"} <= trainer.callback_metrics.keys()
    expected = 10 * math.log10(1 / float((module.reconstructions(own)[0] - own.truth[0]).square().mean()))
    assert float(psnr[0]) == pytest.approx(expected, rel=1e-4)
    tested = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False).test(module, Data(own), verbose=False)
    assert tested[0]["test/psnr"] == pytest.approx(float(psnr.mean()), rel=1e-5)
    assert tested[0]["test/ssim"] == pytest.approx(float(ssim.mean()), rel=1e-5)


def test_dropout_is_on_in_training_and_off_in_the_result():
    own = problem()
    module = DeepImagePriorRoutine(Small(dropout=0.5), 4, optimizer=lambda p: torch.optim.Adam(p, lr=0.02))
    fit(module, own, 5)
    assert torch.equal(module.reconstructions(own), module.reconstructions(own))
    plain = DeepImagePriorRoutine(Small(), 4, optimizer=lambda p: torch.optim.Adam(p, lr=0.02))
    fit(plain, own, 5)
    assert not torch.allclose(plain.best_loss, module.best_loss)


def test_total_variation_counts_both_directions():
    image = torch.tensor([[[0.0, 1.0], [3.0, 1.0]]])
    assert total_variation(image).tolist() == [3 + 0 + 1 + 2]


def test_what_cannot_work_is_refused(tmp_path):
    own = problem()
    with pytest.raises(ValueError, match="4 problems"):
        fit(routine(3), own, 1)
    with pytest.raises(ValueError, match=r"\[5\] angles"):
        fit(routine(tv_weight={3: 1e-3}), own, 1)
    with pytest.raises(ValueError, match="buffers"):
        DeepImagePriorRoutine(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    with pytest.raises(ValueError, match="negative"):
        routine(tv_weight=-1.0)
    with pytest.raises(ValueError, match="LBFGS"):
        fit(routine(optimizer=torch.optim.LBFGS), own, 1)
    own.measurements[1, 3] = math.nan
    with pytest.raises(ValueError, match=r"problems \[1\] is NaN"):
        fit(routine(), own, 2)
    from tu_symmetry.files import write_safetensors

    write_safetensors(tmp_path / "x", {"a": torch.zeros(1)}, {})
    with pytest.raises(FileError, match="no reconstructions"):
        Reconstructions.load(tmp_path / "x")


@pytest.mark.parametrize(("precision", "digits"), [("64-true", 1e-5), ("bf16-mixed", 0.05)])
def test_other_precisions_of_training(precision, digits):
    """Double precision, and a network in half precision whose measurements are not rounded."""
    found = []
    for own in (None, precision):
        module = routine()
        fit(module, problem(), 5, precision=own)
        found.append(module.best_loss)
    torch.testing.assert_close(found[1].float(), found[0], rtol=digits, atol=0)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_in_half_precision_are_refused(precision):
    with pytest.raises(ValueError, match="rounds the weights by more than a step"):
        fit(routine(), problem(), 2, precision=precision)
