"""Images reconstructed at once: equal to one by one, resumed, logged, written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from trainings import trainer

from tu_symmetry.datamodules.tomography import measured, repeated, strip_projector
from tu_symmetry.files import FileError, write_safetensors
from tu_symmetry.routines import DeepImagePriorRoutine, Reconstructions
from tu_symmetry.routines.deep_image_prior import image_quality, total_variation

pytestmark = pytest.mark.filterwarnings("ignore")


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.drop = nn.Dropout2d(dropout)
        self.b = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return torch.sigmoid(self.b(self.drop(torch.tanh(self.a(x)))))


def problem():
    """Two images, three and five angles."""
    truth = (torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) > 0.6).double()
    return measured(truth, [0, 1], {a: strip_projector(8, a, 11, 1.1) for a in (3, 5)}, [0.05], bin_width=1.1)


class Data(LightningDataModule):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def train_dataloader(self):
        return repeated(self.own, 10)

    def test_dataloader(self):
        return repeated(self.own, 1)


def routine(count=4, dropout=0.0, **options):
    options = {"tv_weight": {3: 1e-3, 5: 2e-3}, "optimizer": lambda p: torch.optim.Adam(p, lr=0.02), **options}
    return DeepImagePriorRoutine(Small(dropout), count, **options)


def fit(module, own, steps, *callbacks, ckpt=None, **options):
    made = trainer(*callbacks, max_steps=steps, max_epochs=-1, gradient_clip_val=0.5, log_every_n_steps=1, **options)
    made.fit(module, Data(own), ckpt_path=ckpt)
    return made


def by_hand(own, index, start, steps, weight):
    """The losses of one image by itself, in a loop, and the image of the lowest."""
    network = Small()
    network.load_state_dict({name: t[index] for name, t in start.members.state_dict().items()})
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    count = int(own.counts[index])
    losses, kept = [], None
    for _ in range(steps):
        image = network(own.back_projection[index : index + 1])
        residual = own.operator[index, :count] @ image.reshape(-1) - own.measurements[index, :count]
        rows, columns = image[0, 0].diff(dim=0).abs().sum(), image[0, 0].diff(dim=1).abs().sum()
        loss = residual.square().mean() + weight * (rows + columns)
        losses.append(loss.item())
        kept = image.detach() if loss.item() == min(losses) else kept
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
    return losses, kept


def test_images_at_once_come_out_as_one_by_one(tmp_path):
    """The iterates of the lowest loss, among the first ones where the iterations of some end earlier."""
    own, start = problem(), routine()
    module = routine(out=tmp_path / "found.safetensors")
    fit(module, own, 40)
    found = Reconstructions.load(tmp_path / "found.safetensors")
    early = routine(max_iterations={3: 5, 5: 30})
    fit(early, own, 40)
    for index, weight in enumerate([1e-3, 1e-3, 2e-3, 2e-3]):
        losses, image = by_hand(own, index, start, 40, weight)
        assert float(found.loss[index]) == pytest.approx(min(losses), rel=1e-3)
        assert torch.allclose(found.images[index : index + 1], image, atol=2e-3)
        assert float(early.best_loss[index]) == pytest.approx(min(losses[: 5 if index < 2 else 30]), rel=1e-3)
    assert torch.equal(found.problem.operator, own.operator) and found.problem.num_angles.tolist() == [3, 3, 5, 5]
    one = Small()
    one.load_state_dict({name: t[1] for name, t in found.states.items()})
    assert torch.allclose(one(own.back_projection[1:2]), found.images[1:2], atol=1e-6)


@pytest.mark.cpu  # sparse tensors in coordinates are not on the fake device
def test_a_sparse_operator_is_the_dense_one_and_is_kept_sparse(tmp_path):
    own = problem()
    sparse = replace(own, operator=own.operator.to_sparse())
    module, other = routine(), routine(max_iterations={3: 5, 5: 30}, out=tmp_path / "found.safetensors")
    fit(module, own, 10)
    fit(other, sparse, 10)
    later = own.num_angles == 5
    assert torch.allclose(other.best_loss[later], module.best_loss[later], rtol=1e-4)
    found = Reconstructions.load(tmp_path / "found.safetensors").problem
    assert found.operator.is_sparse and torch.equal(found.operator.to_dense(), own.operator)
    assert torch.equal(found.measurements, own.measurements)


def test_the_kept_iterate_is_the_best_one_not_the_last():
    own, jumping = problem(), {"optimizer": lambda p: torch.optim.SGD(p, lr=5.0)}
    early, late = routine(**jumping), routine(**jumping)
    fit(early, own, 5)
    fit(late, own, 30)
    assert (late.best_loss <= early.best_loss).all()
    x = late.reconstructions(own)
    residuals = (own.operator @ x.flatten(1).unsqueeze(-1)).squeeze(-1) - own.measurements
    weights = torch.tensor([1e-3, 1e-3, 2e-3, 2e-3])
    losses = residuals.square().sum(1) / own.counts + weights * total_variation(x).squeeze(1)
    torch.testing.assert_close(losses, late.best_loss, rtol=1e-4, atol=1e-5)


def test_a_cut_run_resumes_to_the_same_result_and_writes_at_its_end(tmp_path):
    own, whole = problem(), routine()
    fit(whole, own, 40)
    fit(routine(), own, 20, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=20, save_last=True), folder=tmp_path)
    second = routine()
    keep = ModelCheckpoint(dirpath=tmp_path / "b", save_last=True)
    fit(second, own, 40, keep, ckpt=tmp_path / "last.ckpt", folder=tmp_path)
    close = (
        {"rtol": 1e-3, "atol": 1e-4} if torch.cuda.is_available() else {"rtol": 0, "atol": 0}
    )  # cuDNN adds in any order
    torch.testing.assert_close(whole.best_loss, second.best_loss, **close)
    for a, b in zip(whole.best.parameters(), second.best.parameters(), strict=True):
        torch.testing.assert_close(a, b, **close)
    fit(routine(out=tmp_path / "found"), own, 40, ckpt=tmp_path / "b" / "last.ckpt", folder=tmp_path)  # no step is left
    torch.testing.assert_close(Reconstructions.load(tmp_path / "found").images, whole.reconstructions(own), **close)


def test_quality_is_logged(tmp_path):
    own, module = problem(), routine()
    made = fit(module, own, 40, logger=CSVLogger(tmp_path))
    psnr, ssim = image_quality(module.reconstructions(own), own.truth)
    assert float(made.callback_metrics["psnr"]) == pytest.approx(float(psnr.mean()), rel=1e-5)
    assert {"loss", "best_loss", "psnr", "ssim"} <= made.callback_metrics.keys()
    expected = 10 * math.log10(1 / float((module.reconstructions(own)[0] - own.truth[0]).square().mean()))
    assert float(psnr[0]) == pytest.approx(expected, rel=1e-4)
    (tested,) = trainer().test(module, Data(own), verbose=False)
    assert tested["test/psnr"] == pytest.approx(float(psnr.mean()), rel=1e-5)
    assert tested["test/ssim"] == pytest.approx(float(ssim.mean()), rel=1e-5)


def test_dropout_is_on_in_training_and_off_in_the_result():
    own, module, plain = problem(), routine(dropout=0.5), routine()
    fit(module, own, 5)
    fit(plain, own, 5)
    assert torch.equal(module.reconstructions(own), module.reconstructions(own))
    assert not torch.allclose(plain.best_loss, module.best_loss)


def test_total_variation_counts_both_directions():
    image = torch.tensor([[[0.0, 1.0], [3.0, 1.0]]])
    assert total_variation(image).tolist() == [3 + 0 + 1 + 2]


def dead(steps=2):
    own = problem()
    own.measurements[1, 3] = math.nan
    fit(routine(), own, steps)


def foreign(folder):
    write_safetensors(folder / "x", {"a": torch.zeros(1)}, {})
    Reconstructions.load(folder / "x")


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("4 problems", lambda _: fit(routine(3), problem(), 1)),
        (r"\[5\] angles", lambda _: fit(routine(tv_weight={3: 1e-3}), problem(), 1)),
        ("buffers", lambda _: DeepImagePriorRoutine(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))),
        ("negative", lambda _: routine(tv_weight=-1.0)),
        ("LBFGS", lambda _: fit(routine(optimizer=torch.optim.LBFGS), problem(), 1)),
        (r"problems \[1\] is NaN", lambda _: dead()),
        ("no reconstructions", foreign),
        ("rounds the weights by more than a step", lambda _: fit(routine(), problem(), 2, precision="bf16-true")),
        ("rounds the weights by more than a step", lambda _: fit(routine(), problem(), 2, precision="16-true")),
    ],
)
def test_what_cannot_work_is_refused(match, call, tmp_path):
    with pytest.raises((ValueError, FileError), match=match):
        call(tmp_path)


@pytest.mark.parametrize(("precision", "digits"), [("64-true", 1e-5), ("bf16-mixed", 0.05)])
def test_other_precisions_of_training(precision, digits):
    """Double precision, and a network in half precision whose measurements are not rounded."""
    found = []
    for own in (None, precision):
        module = routine()
        fit(module, problem(), 5, precision=own)
        found.append(module.best_loss)
    torch.testing.assert_close(found[1].float(), found[0], rtol=digits, atol=0)
