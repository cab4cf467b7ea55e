"""Projections, back-projections and simulated measurements."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import scipy.sparse
import torch

from tu_symmetry.datamodules import ScannedTomographyDataModule, TomographyDataModule
from tu_symmetry.datamodules.readers import DataFileError
from tu_symmetry.datamodules.tomography import back_projected, deepinv_projector, measured, strip_projector
from tu_symmetry.laplace.dual.observation import LinearObservation


@pytest.fixture
def kmnist(tmp_path):
    """Three random test images in IDX files."""
    folder = tmp_path / "data" / "KMNIST"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    (folder / "t10k-images-idx3-ubyte").write_bytes(
        np.array([2051, 3, 28, 28], dtype=">i4").tobytes() + pixels.tobytes()
    )
    (folder / "t10k-labels-idx1-ubyte").write_bytes(np.array([2049, 3], dtype=">i4").tobytes() + bytes(3))
    return tmp_path / "data", torch.from_numpy(pixels)


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
    assert torch.allclose(module.problem.truth[0, 0], pixels[2] / 255.0)
    moved = module.transfer_batch_to_device(module.problem, torch.device("cpu"), 0)
    assert module.transfer_batch_to_device(module.problem, torch.device("cpu"), 0) is moved


def test_what_cannot_be_measured_is_refused(kmnist, tmp_path):
    root, _ = kmnist
    with pytest.raises(DataFileError, match="3 test images"):
        TomographyDataModule(root, images=4).setup()
    with pytest.raises(DataFileError, match="kmnist"):
        TomographyDataModule(tmp_path / "nowhere").setup()
    for options in ({"images": []}, {"noise": -0.1}, {"num_angles": 0}, {"steps_per_epoch": 0}, {"projector": "radon"}):
        with pytest.raises(ValueError, match=r"measure|noise|steps|projector"):
            TomographyDataModule(root, **options)
    with pytest.raises(ValueError, match="positive sizes"):
        strip_projector(4, 2, 0, 1.0)


def test_deepinv_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepinv", None)  # as where it is not installed
    with pytest.raises(ImportError, match=r"tu-symmetry\[tomography\]"):
        deepinv_projector(8, 3)


@pytest.mark.parametrize("num_angles", [5, 10])
def test_deepinvs_projections_are_ours_of_what_is_smooth(num_angles):
    """Angle by angle, so that neither the order of the angles nor the direction of the detector can differ."""
    physics = pytest.importorskip("deepinv.physics", reason="the extra tomography is not installed")
    theirs, ours = deepinv_projector(28, num_angles), strip_projector(28, num_angles, 40, 1.0)
    assert theirs.shape == ours.shape and theirs.dtype == torch.float64
    along = torch.arange(28, dtype=torch.float64) - 13.5
    y, x = torch.meshgrid(-along, along, indexing="ij")
    image = (-((x - 2.5) ** 2 + (y + 3.2) ** 2) / 18).exp()
    seen, expected = ((a @ image.reshape(-1)).view(num_angles, -1) for a in (theirs, ours))
    assert bool(((seen - expected).norm(dim=1) < 0.005 * expected.norm(dim=1)).all())
    # the matrix is the operator, and its transpose the adjoint
    made = physics.Tomography(angles=num_angles, img_width=28, circle=False, normalize=False)
    generator = torch.Generator().manual_seed(0)
    drawn, values = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (784, len(theirs)))
    applied = made.A(drawn.float().view(1, 1, 28, 28))[0, 0].T.reshape(-1).double()
    assert float((applied - theirs @ drawn).norm() / applied.norm()) < 1e-5
    observation = LinearObservation(theirs)
    product = float((observation.forward(drawn.unsqueeze(0))[0] * values).sum())
    assert product == pytest.approx(float((drawn * observation.adjoint(values.unsqueeze(0))[0]).sum()), rel=1e-12)


def test_the_data_module_measures_with_deepinv(kmnist):
    pytest.importorskip("deepinv", reason="the extra tomography is not installed")
    root, pixels = kmnist
    module = TomographyDataModule(root, images=2, num_angles=[3, 6], noise=0.05, projector="deepinv")
    module.setup()
    found = module.problem
    assert found.counts.tolist() == [120, 120, 240, 240] and found.operator.shape == (4, 240, 784)
    operator = deepinv_projector(28, 3)
    assert torch.allclose(found.operator[0, :120].double(), operator) and not found.operator[0, 120:].any()
    clean = operator @ (pixels[1].reshape(-1).double() / 255)
    eps = torch.from_numpy(np.random.default_rng(1 + 1).normal(size=120))
    assert torch.allclose(
        found.measurements[1, :120].double(), clean + 0.05 * clean.abs().mean() * eps, rtol=1e-5, atol=1e-5
    )
    strips = {6: strip_projector(28, 6, 40, 1.0)}
    ours = measured(pixels[:1].unsqueeze(1).double() / 255, [0], strips, [0.0], bin_width=1.0).back_projection[0]
    clean_back = back_projected(
        deepinv_projector(28, 6) @ (pixels[0].reshape(-1).double() / 255), deepinv_projector(28, 6), 6, 1.0
    ).view(1, 28, 28)
    assert float((clean_back - ours).norm() / ours.norm()) < 0.15, "of noise, whose edges they project differently"


def test_a_scan_is_read_from_three_files_or_says_which_are_missing(tmp_path):
    folder = tmp_path / "walnut"
    folder.mkdir()
    operator = strip_projector(8, 3, 11, 1.1).numpy()
    truth = np.random.default_rng(0).random((8, 8))
    scipy.sparse.save_npz(folder / "operator.npz", scipy.sparse.csr_matrix(operator))
    np.save(folder / "truth.npy", truth)
    module = ScannedTomographyDataModule(tmp_path, num_angles=3, steps_per_epoch=2)
    with pytest.raises(DataFileError, match=r"measurements\.npy.*line integrals") as error:
        module.setup()
    assert "truth.npy" not in str(error.value) and "2686726" in str(error.value)
    np.save(folder / "measurements.npy", operator @ truth.reshape(-1))
    module.setup()
    found = module.problem
    assert found.operator.shape == (1, 33, 64) and found.counts.tolist() == [33]
    fit = found.operator[0] @ found.back_projection.reshape(-1) - found.measurements[0]
    assert float(fit.norm()) < float(found.measurements.norm())
    np.save(folder / "measurements.npy", np.zeros(32))
    with pytest.raises(DataFileError, match="do not belong together"):
        ScannedTomographyDataModule(tmp_path).setup()
