"""The recipe of rotated images at a tiny size: what is rotated, that rows are what they say, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.experiments.linearized_laplace import CNN, Settings, Trained, measure_rotations, report_rotations
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.shift import CALIBRATED, rotate
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.posterior.samples import SampleStore

pytestmark = pytest.mark.filterwarnings("ignore")

ANGLES = (0.0, 30.0, 90.0)
CHOICES = ("map/single", "tangent_mode/per_group", "map/single/diag", "tangent_mode/single/last_layer")
SETTINGS = Settings(batch_size=200, tolerance=0.3, mode_tolerance=1.0, max_iterations=3, num_samples=40)
RECIPE = "linearized_laplace/rotation-mnist-small"


def digits(val_size: int = 60) -> DigitsDataModule:
    return DigitsDataModule(train_size=100, val_size=val_size, test_size=50)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CNN, dict[str, Any]]:
    """Two networks, trained for a moment, and what was measured of them."""
    folder, data = tmp_path_factory.mktemp("rotations"), digits()
    store = SampleStore.create(folder / "samples", architecture="CNN", method="adam")
    for seed in range(2):
        torch.manual_seed(seed)
        model = CNN(width=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(40):
            optimizer.zero_grad()
            cross_entropy(model(data.train.x), data.train.y).backward()
            optimizer.step()
        store.append({name: t.detach().clone() for name, t in model.state_dict().items()}, step=seed)
    networks = Trained(CNN(width=2), folder / "samples")
    pairs = {"pair": [folder / "samples"]}
    found = measure_rotations(folder / "out", networks, data, CHOICES, ANGLES, SETTINGS, pairs, device="cpu")
    found.save(folder / "out")
    model.eval()
    return folder, model, found.results


@pytest.mark.parametrize("angle", [0, 90, 180, 270, 360, -90, 450])
def test_a_quarter_turn_moves_pixels(angle: int) -> None:
    x = torch.rand(2, 3, 7, 7)
    assert torch.equal(rotate(x, angle), torch.rot90(x, angle // 90, (2, 3)))
    torch.testing.assert_close(rotate(x, angle + 1e-4), torch.rot90(x, angle // 90, (2, 3)), rtol=0, atol=1e-3)


def test_what_comes_from_outside_is_black_and_a_disk_stays() -> None:
    """Normalized images too: their black is not zero."""
    place = torch.linspace(-1, 1, 41)
    radius = (place.square().unsqueeze(0) + place.square().unsqueeze(1)).sqrt()
    disk = (-0.4 + 2 * torch.exp(-8 * radius.square())).expand(1, 1, 41, 41)
    for angle in (20.0, 45.0, 70.0, 130.0):
        turned = rotate(disk, angle)
        assert turned.min() >= disk.min() - 1e-6
        torch.testing.assert_close(turned, disk.expand_as(turned), rtol=0, atol=0.02)
    with pytest.raises(ValueError, match=r"images have shape \(2, 1, 4, 5\)"):
        rotate(torch.rand(2, 1, 4, 5), 10)


def nll(p: Tensor, y: Tensor) -> float:
    return float(-p.detach().double().gather(1, y.unsqueeze(1)).log().mean())


def test_rows_are_what_they_say(measured: tuple[Path, CNN, dict[str, Any]]) -> None:
    """The network, the evidence's posterior, and the same with the temperature of the images that are not turned."""
    _, model, results = measured
    data, rows = digits(), results["rows"]
    assert list(rows) == ["network", "scaled", *(name for c in (*CHOICES, "pair") for name in (c, c + CALIBRATED))]
    for angle in ANGLES:
        x = rotate(data.test.x, angle)
        found = rows["network"][1]["by_angle"][f"{angle:g}"]["nll"]
        assert found == pytest.approx(nll(model(x).softmax(-1), data.test.y), rel=1e-5)
        scaled = rows["scaled"][1]
        found = scaled["by_angle"][f"{angle:g}"]["nll"]
        assert found == pytest.approx(nll((scaled["sharpness"] * model(x)).softmax(-1), data.test.y), rel=1e-5)
    assert scaled["sharpness"] != 1, "vacuous: nothing was scaled"
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", parameters=matrices(model))
    la.fit([(data.train.x, data.train.y)])
    own = rows["map/single"][1]
    la.set_precision({name: group["precision"] for name, group in own["groups"].items()})
    plain = [nll(la.predictive(rotate(data.test.x, a), num_samples=40), data.test.y) for a in ANGLES]
    assert [own["by_angle"][f"{a:g}"]["nll"] for a in ANGLES] == pytest.approx(plain, rel=1e-3)
    found = la.calibrate([(data.val.x, data.val.y)], num_samples=40)
    cooled = rows["map/single" + CALIBRATED][1]
    assert (cooled["temperature"], cooled["sharpness"]) == pytest.approx((found.temperature, found.sharpness))
    mended = [nll(la.predictive(rotate(data.test.x, a), num_samples=40), data.test.y) for a in ANGLES]
    assert [cooled["by_angle"][f"{a:g}"]["nll"] for a in ANGLES] == pytest.approx(mended, rel=1e-3)
    assert plain != pytest.approx(mended, rel=1e-3), "vacuous: one is the other"


def test_ensembles_and_other_curvatures_are_what_they_say(measured: tuple[Path, CNN, dict[str, Any]]) -> None:
    folder, model, results = measured
    data, rows, nets = digits(), results["rows"], []
    for state in SampleStore.open(folder / "samples"):
        nets.append(CNN(width=2).eval())
        nets[-1].load_state_dict(state)
    (scaled,) = rows["pair" + CALIBRATED]
    for angle in ANGLES:
        p = torch.stack([net(rotate(data.test.x, angle)).double().softmax(-1) for net in nets]).mean(0)
        name = f"{angle:g}"
        assert rows["pair"][0]["by_angle"][name]["nll"] == pytest.approx(nll(p, data.test.y), rel=1e-5)
        power = p ** scaled["sharpness"]
        mended = nll(power / power.sum(-1, keepdim=True), data.test.y)
        assert scaled["by_angle"][name]["nll"] == pytest.approx(mended, rel=1e-5)
    assert scaled["sharpness"] != 1, "vacuous: nothing was scaled"
    for choice, options in (
        ("map/single/diag", {"curvature": "diag", "parameters": matrices(model)}),
        ("tangent_mode/single/last_layer", {"curvature": "last_layer"}),
    ):
        la = LinearizedLaplace(model, prior="single", evaluate_at="map", **options)  # type: ignore[arg-type]
        la.fit([(data.train.x, data.train.y)])
        la.set_precision({name: group["precision"] for name, group in rows[choice][1]["groups"].items()})
        expected = [nll(la.predictive(rotate(data.test.x, a), num_samples=40), data.test.y) for a in ANGLES]
        assert [rows[choice][1]["by_angle"][f"{a:g}"]["nll"] for a in ANGLES] == pytest.approx(expected, rel=1e-3)


def test_the_report_shows_them(measured: tuple[Path, CNN, dict[str, Any]]) -> None:
    folder, _, results = measured
    report_rotations(folder / "report", RECIPE, folder / "out")
    text = (folder / "report" / "report.md").read_text()
    assert (folder / "report" / "rotations.png").stat().st_size > 5000 and "M(θ*), several λ, calibrated" in text
    runs = results["rows"]["tangent_mode/per_group"]
    mark = "" if all(run["converged"] for run in runs) else "†"
    for angle in ANGLES:
        mean = sum(run["by_angle"][f"{angle:g}"]["nll"] for run in runs) / 2
        assert f"{mean:.3f}{mark}" in text
    own = results["rows"]["network"]
    turned = [
        sum(run["by_angle"][a]["nll"] - other["by_angle"][a]["nll"] for a in ("30", "90")) / 2
        for run, other in zip(runs, own, strict=True)
    ]
    gains = torch.tensor(turned, dtype=torch.float64)
    assert f"{gains.mean():+.3f} ± {gains.std() / 2**0.5:.3f}{mark}" in text
    assert "| M(θ*), single λ, last layer, calibrated |" in text and "| pair, calibrated |" in text
    assert text.count("| pair |") == 3, "differences are on the same networks"
    assert "Instead of the network itself" in text and "Instead of the network, temperature scaled" in text


@pytest.mark.parametrize(
    ("val_size", "choices", "angles", "match"),
    [
        (0, CHOICES, ANGLES, "val_size must be at least 1"),
        (60, CHOICES, (), "angles: name at least one"),
        (60, (), ANGLES, "choices: name at least one"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    val_size: int, choices: Any, angles: Any, match: str, measured: Any, tmp_path: Path
) -> None:
    networks = Trained(CNN(width=2), measured[0] / "samples")
    with pytest.raises(ValueError, match=match):
        measure_rotations(tmp_path, networks, digits(val_size), choices, angles, SETTINGS)
