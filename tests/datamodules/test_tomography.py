"""Projections, back-projections and simulated measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from recipe_runs import plant_images, plant_scan

from tu_symmetry.datamodules import IDXDataModule, ScannedTomographyDataModule, TomographyDataModule
from tu_symmetry.datamodules.readers import DataFileError
from tu_symmetry.datamodules.tomography import back_projected, measured, strip_projector


@pytest.fixture
def kmnist(tmp_path):
    """Three test images in IDX files, and their pixels."""
    plant_images(tmp_path / "data", test=3)
    return tmp_path / "data", IDXDataModule("kmnist", tmp_path / "data").test.x


def test_every_pixel_keeps_its_mass_under_every_angle():
    a = strip_projector(9, 7, 15, 0.9).view(7, 15, 81)
    assert torch.allclose(0.9 * a.sum(1), torch.ones(7, 81, dtype=torch.float64), atol=1e-9)
    assert bool((a >= 0).all())


def test_right_angles_are_sums_of_columns_and_rows():
    image = torch.rand(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = (strip_projector(6, 2, 6, 1.0) @ image.reshape(-1)).view(2, 6)
    assert torch.allclose(seen[0], image.sum(0), atol=2e-3)
    assert torch.allclose(seen[1], image.sum(1).flip(0), atol=2e-3)  # y points up


def test_gaussian_phantom_within_one_percent():
    size, bins, width = 28, 41, 0.9658
    along = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    center, sigma = (2.5, -3.2), 3.0
    y, x = torch.meshgrid(-along, along, indexing="ij")
    image = (-((x - center[0]) ** 2 + (y - center[1]) ** 2) / (2 * sigma**2)).exp()
    edges = (torch.arange(bins + 1, dtype=torch.float64) - bins / 2) * width
    expected = []
    for k in range(10):
        angle = math.pi * k / 10
        shift = center[0] * math.cos(angle) + center[1] * math.sin(angle)
        mass = torch.erf((edges - shift) / (sigma * math.sqrt(2))) * sigma**2 * math.pi
        expected.append((mass[1:] - mass[:-1]) / width)
    exact = torch.cat(expected)
    found = strip_projector(size, 10, bins, width) @ image.reshape(-1)
    assert float((found - exact).norm() / exact.norm()) < 0.01
    many = strip_projector(size, 90, bins, width)
    back = back_projected(many @ image.reshape(-1), many, 90, width).view(size, size)
    assert float((back - image).norm() / image.norm()) < 0.1


def test_noise_is_that_of_the_seed_and_measurements_are_padded():
    image = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operators = {3: strip_projector(8, 3, 11, 1.0), 5: strip_projector(8, 5, 11, 1.0)}
    found = measured(image, [4, 7], operators, [0.05, 0.1])
    assert len(found) == 8 and found.counts.tolist() == [33, 33, 55, 55] * 2
    assert found.image.tolist() == [4, 7] * 4 and found.num_angles.tolist() == [3, 3, 5, 5] * 2
    clean = operators[3] @ image[1].reshape(-1)
    eps = torch.from_numpy(np.random.default_rng(1 + 7).normal(size=33))
    expected = clean + 0.05 * clean.abs().mean() * eps
    assert torch.allclose(found.measurements[1, :33].double(), expected, atol=1e-5)
    assert not found.measurements[1, 33:].any() and not found.operator[1, 33:].any()


def test_data_module_reads_the_test_half(kmnist):
    root, pixels = kmnist
    module = TomographyDataModule(root, images=[2, 0], num_angles=[5, 10], noise=0.1, steps_per_epoch=3)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert len(batches) == 3 and all(batch is module.problem for batch in batches)
    assert module.problem.operator.shape == (4, 410, 784) and module.problem.counts.tolist() == [205, 205, 410, 410]
    assert torch.allclose(module.problem.truth[0], pixels[2])


def test_what_cannot_be_measured_is_refused(kmnist, tmp_path):
    root, _ = kmnist
    with pytest.raises(DataFileError, match="3 test images"):
        TomographyDataModule(root, images=4).setup()
    with pytest.raises(DataFileError, match="kmnist"):
        TomographyDataModule(tmp_path / "nowhere").setup()
    for options in ({"images": []}, {"noise": -0.1}, {"num_angles": 0}, {"steps_per_epoch": 0}):
        with pytest.raises(ValueError, match=r"measure|noise|steps"):
            TomographyDataModule(root, **options)
    with pytest.raises(ValueError, match="positive sizes"):
        strip_projector(4, 2, 0, 1.0)


def test_a_scan_is_read_from_three_files_or_says_which_are_missing(tmp_path):
    plant_scan(tmp_path, size=8, angles=3)
    folder = tmp_path / "walnut"
    kept = (folder / "measurements.npy").rename(tmp_path / "kept.npy")
    module = ScannedTomographyDataModule(tmp_path, num_angles=3, steps_per_epoch=2)
    with pytest.raises(DataFileError, match=r"measurements\.npy.*line integrals") as error:
        module.setup()
    assert "truth.npy" not in str(error.value) and "2686726" in str(error.value)
    kept.rename(folder / "measurements.npy")
    module.setup()
    found = module.problem
    assert found.operator.is_sparse and found.operator.shape == (1, 120, 64) and found.counts.tolist() == [120]
    fit = found.operator[0] @ found.back_projection.reshape(-1) - found.measurements[0]
    assert float(fit.norm()) < float(found.measurements.norm())
    np.save(folder / "measurements.npy", np.zeros(32))
    with pytest.raises(DataFileError, match="do not belong together"):
        ScannedTomographyDataModule(tmp_path).setup()
