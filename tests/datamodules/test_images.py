"""Data modules: files of every form and damage, splits, orders, places in an epoch, and TorchUncertainty's loaders."""

from __future__ import annotations

import gzip
import inspect
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from recipe_runs import plant_images
from torch import Tensor, nn

from tu_symmetry import datamodules
from tu_symmetry.datamodules import CIFARDataModule, DataFileError, DigitsDataModule, IDXDataModule
from tu_symmetry.datamodules.loading import SeededOrder, TensorPairs, flip_and_shift
from tu_symmetry.datamodules.readers import CIFAR_ARCHIVE, read_idx, read_idx_images

pytestmark = pytest.mark.filterwarnings("ignore")


def idx(values: Tensor) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + bytes(values.flatten().tolist())


def write_idx(folder: Path, count: int = 12, offset: int = 0, pack: bool = False) -> Tensor:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(offset)
    images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
    labels = (torch.arange(count) % 10).to(torch.uint8)
    for half in ("train", "t10k"):
        for stem, tensor in ((f"{half}-images-idx3-ubyte", images), (f"{half}-labels-idx1-ubyte", labels)):
            content = idx(tensor)
            path = folder / (f"{stem}.gz" if pack else stem)
            path.write_bytes(gzip.compress(content) if pack else content)
    return images


def test_idx_files_gzipped_or_not_and_damaged(tmp_path: Path) -> None:
    content = struct.pack(">HBBII", 0, 8, 2, 2, 3) + bytes(range(6))
    flipped = bytearray(gzip.compress(content))
    flipped[12] ^= 255  # inside the compressed data
    for name, good in (("plain", content), ("packed.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(good)
        assert torch.equal(read_idx(tmp_path / name), torch.arange(6, dtype=torch.uint8).reshape(2, 3))
    damaged = {"short": content[:-1], "cut.gz": gzip.compress(content)[:-6], "flip.gz": bytes(flipped)}
    damaged |= {"empty": b"", "foreign": b"\x89PNG\r\n\x1a\n" + bytes(30), "plain2.gz": content}
    for name, bad in damaged.items():
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(DataFileError, match=rf"{name}.*delete it to have it downloaded"):
            read_idx(tmp_path / name)


@pytest.mark.parametrize("place", ["MNIST/raw", "MNIST"])
@pytest.mark.parametrize("pack", [False, True])
def test_idx_files_are_found_where_they_may_lie(tmp_path: Path, place: str, pack: bool) -> None:
    images = write_idx(tmp_path / place, pack=pack)
    module = IDXDataModule("mnist", tmp_path, download=False, train_size=5, test_size=3)
    module.setup("fit")
    assert torch.equal((module.train.x * 255).round().to(torch.uint8)[:, 0], images[:5])
    assert len(module.test) == 3


def test_what_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"kmnist: there are no IDX files.*KMNIST/raw"):
        IDXDataModule("kmnist", tmp_path, download=False).setup("fit")
    write_idx(tmp_path / "MNIST")
    with pytest.raises(DataFileError, match="torchvision cannot download it"):
        IDXDataModule("mnist", tmp_path, eval_ood=True, ood_dataset="notmnist").prepare_data()
    for wrong, match in (
        ({"train_size": 13}, "train_size is 13, but there are 12"),
        ({"val_size": 12}, "val_size is 12, but there are 12 training images"),
        ({"val_size": 4, "train_size": 9}, "train_size is 9, but there are 8"),
    ):
        with pytest.raises(DataFileError, match=match):
            IDXDataModule("mnist", tmp_path, download=False, **wrong).setup("fit")
    (tmp_path / "MNIST" / "train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(DataFileError, match=r"\(12, 28, 28\).*\(4,\)"):
        read_idx_images(tmp_path, "mnist", "train")
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        IDXDataModule("mnist", tmp_path, batch_size=0)
    with pytest.raises(ValueError, match="is the data set itself"):
        IDXDataModule("mnist", tmp_path, eval_ood=True, ood_dataset="mnist")


def test_digits_are_stratified_and_always_the_same() -> None:
    module, again = DigitsDataModule(), DigitsDataModule()
    module.setup()
    assert module.train.x.shape == (1437, 1, 8, 8) and module.test.x.shape == (360, 1, 8, 8)
    assert module.train.x.min() == 0 and module.train.x.max() == 1
    assert module.test.y.bincount().min() >= 35
    assert torch.equal(module.train.x, again.train.x) and torch.equal(module.test.y, again.test.y)
    with pytest.raises(DataFileError, match="train_size is 2000, but there are 1437 images"):
        DigitsDataModule(train_size=2000).setup()
    assert module.val is module.test  # as TorchUncertainty's data modules do
    split = DigitsDataModule(train_size=1000, val_size=437)
    assert torch.equal(torch.cat([split.train.x, split.val.x]), module.train.x)
    normalized = DigitsDataModule(normalize=True)
    normalized.setup("fit")
    assert abs(float(normalized.train.x.mean())) < 1e-3 and abs(float(normalized.train.x.std()) - 1) < 1e-3


def test_ood_digits_keep_the_histogram_of_every_image() -> None:
    module = DigitsDataModule(eval_ood=True, ood_size=50)
    module.setup("test")
    test, ood = module.test_dataloader()
    x, shuffled = next(iter(test))[0], next(iter(ood))[0]
    chosen = torch.linspace(0, 359, 50, dtype=torch.float64).round().long()
    assert torch.equal(x[chosen].flatten(1).sort(1).values, shuffled.flatten(1).sort(1).values)
    assert (x[chosen] != shuffled).flatten(1).any(1).all()


def orders_of(module: DigitsDataModule, epochs: int = 3) -> list[Tensor]:
    loader = module.train_dataloader()
    found = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        found.append(torch.cat([x for x, _ in loader], dim=1 if module.orders else 0))
    return found


def test_orders_are_functions_of_seed_and_epoch() -> None:
    make = {seed: DigitsDataModule(batch_size=64, train_size=200, seed=seed) for seed in range(4)}
    found = {seed: orders_of(module) for seed, module in make.items()}
    again = orders_of(DigitsDataModule(batch_size=64, train_size=200, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(found[1], again, strict=True))
    every = [order for orders in found.values() for order in orders]
    assert all(not torch.equal(a, b) for i, a in enumerate(every) for b in every[:i])  # seed + 1 is no epoch + 1
    for order in every:
        assert torch.equal(order.flatten(1).sort(0).values, make[0].train.x.flatten(1).sort(0).values)


@pytest.mark.parametrize("augment", [False, True])
def test_rows_of_many_orders_are_single_orders(augment: bool) -> None:
    many = orders_of(DigitsDataModule(augment=augment, batch_size=64, train_size=200, seed=5, orders=3))
    for m in range(3):
        single = orders_of(DigitsDataModule(augment=augment, batch_size=64, train_size=200, seed=5 + m))
        assert all(torch.equal(rows[m], order) for rows, order in zip(many, single, strict=True))


def test_augmented_images_are_flipped_and_shifted(generator: torch.Generator) -> None:
    """Every result is a crop of the padded image or of its mirror image; all shifts and both sides occur."""
    x = torch.rand(400, 2, 5, 6, generator=generator)
    y = flip_and_shift(x, generator, shift=1)
    seen = set()
    for before, after in zip(x, y, strict=True):
        padded = [nn.functional.pad(image, [1] * 4) for image in (before, before.flip(-1))]
        places = [
            (side, top, left)
            for side, image in enumerate(padded)
            for top in range(3)
            for left in range(3)
            if torch.equal(image[:, top : top + 5, left : left + 6], after)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 18


def test_augmentation_touches_training_batches_only() -> None:
    """It is drawn anew for every batch and epoch; the data set, and all other loaders, stay as they are."""
    module, same = (DigitsDataModule(augment=True, batch_size="full", train_size=100, seed=2) for _ in range(2))
    first, second, third = orders_of(module)
    assert torch.equal(first, orders_of(same)[0])
    assert not torch.equal(first, second) and not torch.equal(second, third)
    plain = DigitsDataModule(train_size=100)
    assert torch.equal(module.train.x, plain.train.x)
    assert torch.equal(torch.cat([x for x, _ in module.postprocess_dataloader()]), plain.train.x)
    assert torch.equal(torch.cat([x for x, _ in module.test_dataloader()[0]]), plain.test.x)
    twice = DigitsDataModule(batch_size=50, train_size=100)
    twice.train.x[50:], twice.augment = twice.train.x[:50].clone(), True
    a, b = (batch[0] for batch in twice.train_dataloader())
    assert not torch.equal(a.flatten(1).sum(1).sort().values, b.flatten(1).sum(1).sort().values)
    assert CIFARDataModule(augment=True).augment and not CIFARDataModule().augment


def test_processes_share_an_epoch() -> None:
    pairs = TensorPairs(torch.arange(20.0), torch.arange(20))
    parts = [SeededOrder(pairs, num_replicas=3, rank=rank, seed=7) for rank in range(3)]
    shares = [list(part) for part in parts]
    assert [len(share) for share in shares] == [7, 7, 7]
    assert {i for share in shares for i in share} == set(range(20))
    whole = list(SeededOrder(pairs, num_replicas=1, rank=0, seed=7))
    assert [i for group in zip(*shares, strict=True) for i in group][:20] == whole


@pytest.mark.parametrize("size", ["full", None])
def test_full_batches_are_the_set_itself(size: Any) -> None:
    module = DigitsDataModule(batch_size=size)
    (batch,) = list(module.train_dataloader())
    assert batch[0] is module.train.x and batch[1] is module.train.y


class Seen(LightningModule):
    """Remembers its batches, and learns from them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(64, 10)
        self.batches: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0])
        return nn.functional.cross_entropy(self.model(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **more: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, accelerator="cpu", devices=1, **(quiet | more))


@pytest.mark.parametrize(("steps", "augment"), [(3, False), (4, False), (6, False), (6, True)])
def test_a_resumed_run_sees_the_batches_that_were_left(tmp_path: Path, steps: int, augment: bool) -> None:
    """Cut in an epoch, at its end, in the next one."""
    torch.manual_seed(0)
    start = Seen().state_dict()

    def data() -> DigitsDataModule:
        return DigitsDataModule(augment=augment, batch_size=50, train_size=190, seed=3, resident=True)

    whole, cut, rest = Seen(), Seen(), Seen()
    for module in (whole, cut):
        module.load_state_dict(start)
    trainer(tmp_path, max_epochs=3, enable_checkpointing=False).fit(whole, datamodule=data())
    saving = ModelCheckpoint(tmp_path, filename="cut", every_n_train_steps=1)
    trainer(tmp_path, max_steps=steps, callbacks=[saving]).fit(cut, datamodule=data())
    trainer(tmp_path, max_epochs=3, enable_checkpointing=False).fit(
        rest, datamodule=data(), ckpt_path=saving.best_model_path
    )
    joined = cut.batches + rest.batches
    assert len(joined) == len(whole.batches) == 12
    assert all(torch.equal(a, b) for a, b in zip(joined, whole.batches, strict=True))
    assert all(torch.equal(t, rest.state_dict()[name]) for name, t in whole.state_dict().items())


def test_cifar_from_an_archive(tmp_path: Path) -> None:
    plant_images(tmp_path / "data")
    root = tmp_path / "data"
    module = CIFARDataModule(
        root=root, source="archive", train_size=6, test_size=4, eval_ood=True, ood_dataset="textures"
    )
    module.setup()
    assert module.train.y.tolist() == list(range(6)) and module.test.y.tolist() == list(range(4))
    assert module.ood.x.shape == (32, 3, 32, 32)
    held = CIFARDataModule(root=root, source="archive", val_size=3)
    held.setup()
    assert held.val.y.tolist() == [7, 8, 9] and held.test.y.tolist() == 8 * list(range(10))
    with pytest.raises(DataFileError, match="holds 80 train images, 90 are wanted"):
        CIFARDataModule(root=root, source="archive", train_size=90).setup("fit")
    content = (root / CIFAR_ARCHIVE).read_bytes()
    for damaged in (content[:200], content[:100] + bytes(50) + content[150:], b""):
        (root / CIFAR_ARCHIVE).write_bytes(damaged)
        with pytest.raises(DataFileError, match="cannot be read as an archive"):
            CIFARDataModule(root=root, source="archive").setup("test")
    (root / CIFAR_ARCHIVE).unlink()
    with pytest.raises(DataFileError, match=r"cifar10-jpeg\.tar\.xz is missing"):
        CIFARDataModule(root=root, source="archive").setup("test")
    with pytest.raises(ValueError, match="holds CIFAR-10"):
        CIFARDataModule("cifar100", source="archive")


def test_real_files(data_root: Path) -> None:
    module = IDXDataModule("mnist", data_root, eval_ood=True, ood_dataset="notmnist", download=False)
    module.setup()
    assert (len(module.train), len(module.test), len(module.ood)) == (60_000, 10_000, 10_000)
    assert module.train.y[:5].tolist() == [5, 0, 4, 1, 9] and module.train.x.max() == 1


@pytest.mark.parametrize("name", ["DigitsDataModule", "IDXDataModule", "CIFARDataModule"])
def test_help_and_yaml_know_every_argument(name: str) -> None:
    """The arguments that the data modules share are written down once, and shown with each of them."""
    from jsonargparse import ArgumentParser

    kind = getattr(datamodules, name)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "data")
    shown = parser.format_help()
    shared = list(inspect.signature(datamodules.ImageDataModule).parameters)
    assert {"batch_size", "orders", "augment", "resident"} <= set(shared)
    for argument in shared:
        assert f"--data.{argument} " in shown
    assert "independent order" in shown and "left to right" in shown  # what they mean, too
    config = parser.parse_args(["--data.orders=3", "--data.batch_size=full", "--data.augment=true"])
    made = parser.instantiate(config).data
    assert (made.orders, made.batch_size, made.augment) == (3, "full", True)
    assert kind().batch_size == (128 if name == "CIFARDataModule" else 100)
    with pytest.raises(TypeError, match="order"):
        kind(order=3)
