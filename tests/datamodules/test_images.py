"""Data modules: files of every form and damage, splits, orders, places in an epoch, and TorchUncertainty's loaders."""

from __future__ import annotations

import gzip
import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import plant_images
from torch import Tensor, nn

from tu_symmetry.datamodules import CIFARDataModule, DataFileError, DigitsDataModule, IDXDataModule
from tu_symmetry.datamodules.loading import SeededOrder, TensorPairs, flip_and_shift
from tu_symmetry.datamodules.readers import CIFAR_ARCHIVE, read_idx

pytestmark = pytest.mark.filterwarnings("ignore")


def idx(values: Tensor) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + bytes(values.flatten().tolist())


def test_idx_files_gzipped_or_not_and_damaged(tmp_path: Path) -> None:
    content = idx(torch.arange(6, dtype=torch.uint8).reshape(2, 3))
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
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_found_where_they_may_lie(tmp_path: Path, place: str, suffix: str) -> None:
    plant_images(tmp_path / "made", 12, 5)
    (tmp_path / place).mkdir(parents=True)
    for file in (tmp_path / "made/MNIST/raw").glob(f"*ubyte{suffix}"):
        file.rename(tmp_path / place / file.name)
    module = IDXDataModule("mnist", tmp_path, train_size=5, test_size=3)
    module.prepare_data()
    module.setup("fit")
    assert module.train.y.tolist() == [0, 1, 2, 3, 4] and len(module.test) == 3
    assert (module.train.x[0, 0, :6, 4:24] > 119 / 255).all()  # what the planted images say


def test_what_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    plant_images(tmp_path / "data", 12, 5)
    root = tmp_path / "data"
    for wrong, match in (
        ({"train_size": 13}, "train_size is 13, but there are 12"),
        ({"val_size": 12}, "val_size is 12, but there are 12 training images"),
        ({"val_size": 4, "train_size": 9}, "train_size is 9, but there are 8"),
        ({"root": tmp_path}, r"there are no IDX files.*MNIST/raw"),
    ):
        with pytest.raises(DataFileError, match=match):
            IDXDataModule(**({"root": root} | wrong)).setup("fit")  # type: ignore[arg-type]
    for file in (root / "notMNIST/raw").iterdir():
        file.unlink()
    with pytest.raises(DataFileError, match="torchvision cannot download it"):
        IDXDataModule("mnist", root, eval_ood=True, ood_dataset="notmnist").prepare_data()
    (root / "MNIST/raw/train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(DataFileError, match=r"\(12, 28, 28\).*\(4,\)"):
        IDXDataModule(root=root).setup("fit")
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


def test_processes_share_an_epoch() -> None:
    pairs = TensorPairs(torch.arange(20.0), torch.arange(20))
    parts = [SeededOrder(pairs, num_replicas=3, rank=rank, seed=7) for rank in range(3)]
    shares = [list(part) for part in parts]
    assert [len(share) for share in shares] == [7, 7, 7]
    assert {i for share in shares for i in share} == set(range(20))
    whole = list(SeededOrder(pairs, num_replicas=1, rank=0, seed=7))
    assert [i for group in zip(*shares, strict=True) for i in group][:20] == whole


def test_full_batches_are_the_set_itself() -> None:
    module = DigitsDataModule(batch_size="full")
    (batch,) = list(module.train_dataloader())
    assert batch[0] is module.train.x and batch[1] is module.train.y


@pytest.mark.parametrize("options", [{}, {"augment": True}, {"augment": True, "orders": 2}])
def test_a_loader_resumes_with_the_batches_that_were_left(options: dict[str, Any]) -> None:
    """Those of the epoch that was cut; every other epoch starts at its beginning."""

    def loader() -> Any:
        made = DigitsDataModule(batch_size=50, train_size=190, seed=3, **options).train_dataloader()
        made.set_epoch(2)  # type: ignore[attr-defined]
        return made

    whole, cut, rest = list(loader()), loader(), loader()
    joined = list(itertools.islice(cut, 2))
    rest.load_state_dict(cut.state_dict())
    joined += list(rest)
    assert len(joined) == len(whole) == 4
    assert all(
        torch.equal(a, b) for ours, own in zip(joined, whole, strict=True) for a, b in zip(ours, own, strict=True)
    )
    rest.set_epoch(3)
    assert len(list(rest)) == 4


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
    assert held.val.y.tolist() == [7, 8, 9] and held.test.y.tolist() == 12 * list(range(10))
    with pytest.raises(DataFileError, match="holds 120 train images, 130 are wanted"):
        CIFARDataModule(root=root, source="archive", train_size=130).setup("fit")
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


def test_real_files() -> None:
    """Where the files of MNIST and notMNIST lie beside the project."""
    root = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (root / "MNIST" / "raw").is_dir() or not (root / "notMNIST").is_dir():
        pytest.skip(f"{root} holds no MNIST/raw and notMNIST")
    module = IDXDataModule("mnist", root, eval_ood=True, ood_dataset="notmnist")
    module.setup()
    assert (len(module.train), len(module.test), len(module.ood)) == (60_000, 10_000, 10_000)
    assert module.train.y[:5].tolist() == [5, 0, 4, 1, 9] and module.train.x.max() == 1
