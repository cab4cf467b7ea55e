"""The Table 2 recipe on synthetic images: archives, what its rows mean, the curvature at theta*, resuming."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call, jacrev
from torchvision.io import encode_jpeg, encode_png

from tu_symmetry.configs import ConfigError, parse
from tu_symmetry.datamodules.readers import CIFAR_ARCHIVE, TEXTURES_ARCHIVE
from tu_symmetry.evaluation import Batches
from tu_symmetry.laplace.jacobians import StoredJacobian
from tu_symmetry.laplace.model import LinearizedLaplace
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.reporting.progress import Display
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables import laplace_residual
from tu_symmetry.tables.convnets import ResNet
from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.images import CLASSES, IMAGES
from tu_symmetry.tables.laplace_networks import matrices
from tu_symmetry.tables.laplace_residual import CHOICES, Choice, EvidenceOptions, scores
from tu_symmetry.tables.laplace_residual_report import name_of
from tu_symmetry.tables.recipe import load_recipe
from tu_symmetry.tables.stage import stage_kind

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = Path(__file__).parents[2] / "recipes" / "linearized_laplace"
TINY = [
    "images.train_size=40", "images.test_size=20", "images.out_of_distribution_size=6",
    "networks.arguments={width: 2, blocks: [1, 1], stem_stride: 4}", "networks.members=2", "networks.epochs=4",
    "networks.batch_size=10", "evidence.max_iterations=3", "evidence.num_samples=20", "evidence.batch_size=16",
    "evidence.refreshes=1", "evidence.mode_tolerance=5.0",
]  # fmt: skip


def picture(label: int, number: int) -> Tensor:
    """A plain color that depends on the class, with some noise."""
    noise = torch.randint(0, 20, (3, 32, 32), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
    return noise + torch.tensor([20 * label, 200 - 20 * label, 100], dtype=torch.uint8).view(3, 1, 1)


def add(archive: tarfile.TarFile, name: str, content: Tensor) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content.numpy().tobytes()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives like the real ones: 50 training and 30 test images, 12 textures."""
    folder = tmp_path_factory.mktemp("data")
    with tarfile.open(folder / CIFAR_ARCHIVE, "w:xz") as archive:
        for part, count in (("train", 50), ("test", 30)):
            for i in range(count):
                name = f"{part}/{i:05d}_{CLASSES[i * 7 % 10]}.jpg"
                add(archive, name, encode_jpeg(picture(i * 7 % 10, i), quality=95))
    with tarfile.open(folder / TEXTURES_ARCHIVE, "w:xz") as archive:
        for i in range(12):
            add(archive, f"dots/dots_{i:04d}.png", encode_png(torch.full((3, 64, 64), 20 * i, dtype=torch.uint8)))
    return folder


def run(root: Path, out: Path, *overrides: str, name: str = "table2") -> dict[str, Any]:
    display = Display(Console(file=io.StringIO(), width=160))
    return run_table(RECIPES / name, out=out, data_root=root, overrides=[*TINY, *overrides], display=display)


@pytest.fixture(scope="module")
def table(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("table")
    return out, run(root, out)


@pytest.mark.parametrize("name", ["table2", "table2-resnet50"])
def test_recipes_parse_and_know_the_papers_rows(name: str) -> None:
    recipe = load_recipe(RECIPES / name)
    for stage_name, config in recipe.stages.items():
        parsed = parse(stage_kind(config.stage).options, config.options, stage_name)
        if isinstance(parsed, EvidenceOptions):
            assert set(recipe.table.paper) <= set(parsed.choices) == set(CHOICES)
    assert recipe.table.paper["tangent_mode/single"] == {"nll": -0.773, "error": 0.004}
    assert "FixUp" not in recipe.table.title and (RECIPES / name / "README.md").is_file()


@pytest.mark.slow
def test_the_large_recipes_network_is_a_resnet_50_for_small_images() -> None:
    from tu_symmetry.configs import resolve

    options = load_recipe(RECIPES / "table2-resnet50").stages["networks"].options
    model = resolve(options["network"])(num_classes=10, **options["arguments"]).eval()
    assert sum(p.numel() for p in model.parameters()) == 23_520_842  # the paper's 23 million
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 10)
    graph = discover_symmetries(model, x)
    la = LinearizedLaplace(model, graph=graph, parameters=matrices(model))
    groups = la._group([(x, torch.tensor([0, 1]))])
    assert len(groups) == 54  # one for each of 53 normalized convolutions, one for the last layer


def test_images_are_those_of_the_archives(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    assert results["images"]["sizes"] == {"train": 40, "test": 20, "ood": 6}
    found = load_file(out / "images" / IMAGES)
    assert found["train_y"].tolist() == [i * 7 % 10 for i in range(40)]
    for i in (0, 13, 39):
        assert (found["train_x"][i].float() - picture(i * 7 % 10, i).float()).abs().mean() < 12  # JPEG
    assert found["ood_x"].shape == (6, 3, 32, 32)
    assert found["ood_x"].float().mean((1, 2, 3)).tolist() == [20 * i for i in (0, 2, 4, 7, 9, 11)]


def test_what_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cifar10-jpeg.tar.xz is missing: .*--data-root"):
        run(tmp_path / "nowhere", tmp_path / "a")
    with pytest.raises(ConfigError, match="holds 50 train images, 60 are wanted"):
        run(root, tmp_path / "b", "images.train_size=60")
    with pytest.raises(ConfigError, match="is 13, but there are 12 images"):
        run(root, tmp_path / "c", "images.out_of_distribution_size=13")
    (tmp_path / CIFAR_ARCHIVE).write_bytes((root / CIFAR_ARCHIVE).read_bytes()[:900])
    with pytest.raises(ConfigError, match="cannot be read as an archive"):
        run(tmp_path, tmp_path / "d")
    with pytest.raises(ConfigError, match="'full/single' starts from 'tangent_mode/single'"):
        run(root, tmp_path / "e", "evidence.choices=[full/single]")
    with pytest.raises(ConfigError, match="write map, tangent_mode or full"):
        run(root, tmp_path / "e", "evidence.choices=[theta/single]")


class Silent:
    def update(self, done: int, **info: float | str) -> None:
        pass


def networks(out: Path) -> list[ResNet]:
    made = []
    for state in unstack(load_file(out / "networks" / "members.safetensors")):
        model = ResNet(10, width=2, blocks=[1, 1], stem_stride=4).eval()
        model.load_state_dict(state)
        made.append(model)
    return made


@pytest.mark.parametrize(("choice", "prior"), [("map/single", "single"), ("tangent_mode/per_group", "per_group")])
def test_rows_equal_a_hand_computation(table: tuple[Path, dict[str, Any]], choice: str, prior: Any) -> None:
    out, results = table
    images = load_file(out / "images" / IMAGES)
    x, y = images["train_x"].float() / 255, images["train_y"].long()
    row = results["evidence"]["rows"][choice][1]
    la = LinearizedLaplace(model := networks(out)[1], prior=prior, evaluate_at="map", parameters=matrices(model)).fit(
        [(x, y)]
    )
    la.set_precision({name: group["precision"] for name, group in row["groups"].items()})
    p = la.predictive(images["test_x"].float() / 255, num_samples=20)
    nll = -p[torch.arange(20), images["test_y"].long()].log().mean()
    assert row["nll"] == pytest.approx(float(nll), rel=1e-3)
    assert row["gamma"] == pytest.approx(sum(g.gamma for g in la.report()), rel=1e-3)


def test_full_takes_the_curvature_at_the_tangent_models_outputs(table: tuple[Path, dict[str, Any]]) -> None:
    """The factor of the last layer's bias is the sum of diag p - p p^T at the tangent model's outputs at theta*."""
    out, _ = table
    images = load_file(out / "images" / IMAGES)
    x, y = images["train_x"].float() / 255, images["train_y"].long()
    model = networks(out)[0]
    graph = discover_symmetries(model, x[:2])
    folder = out / "evidence" / "network-0"
    work = laplace_residual._Work(model, graph, Batches(x, y, 16), EvidenceOptions(), folder, Silent())
    la = work._start(Choice.parse("full/single"), lambda info: None)
    la = work._resumed(la, Choice.parse("tangent_mode/single"))
    theta, point = la.theta, la.tangent.point()
    assert (theta - point).norm() > 1e-2 * point.norm()
    la = work._retaken(la, lambda info: None)
    assert torch.equal(la.theta, theta)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    move = la.tangent.unflatten(theta - point)
    shifted = {name: w + move.get(name, torch.zeros(())) for name, w in weights.items()}
    outputs, change = torch.func.jvp(
        lambda w: functional_call(model, w, (x,)), (weights,), ({n: shifted[n] - weights[n] for n in weights},)
    )
    p = (outputs + change).detach().softmax(-1)
    expected = torch.diag(p.sum(0)) - p.T @ p
    block = next(b for b in la.posterior.blocks if b.name == "head.bias")
    values, vectors = block.values, block.vectors  # type: ignore[attr-defined]
    torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.mT, expected, rtol=1e-3, atol=1e-4)
    q = outputs.detach().softmax(-1)
    assert (torch.diag(q.sum(0)) - q.T @ q - expected).abs().max() > 1e-2  # not the network's own


def test_a_stored_jacobian_gives_the_same_products() -> None:
    torch.manual_seed(0)
    model = ResNet(3, width=2, blocks=[1], stem_stride=4).double().eval()
    x = torch.randn(7, 3, 12, 12, dtype=torch.float64)
    data = Batches(x, torch.arange(7) % 3, 4)
    plain = TangentModel(model, matrices(model))
    seen: list[int] = []
    stored = StoredJacobian(plain, data, chunk=3, shown=seen.append)
    assert seen == [3, 4, 7]
    weights = plain.parameters()
    full = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, {**full, **w}, (x,)))(weights)
    expected = torch.cat([jacobian[name].flatten(2) for name in plain.names], dim=2)
    vector = torch.randn(plain.size, dtype=torch.float64)
    cotangent = torch.randn(7, 3, dtype=torch.float64)
    outputs = model(x).detach()
    for inputs, rows in ((x[:4], slice(0, 4)), (x[4:], slice(4, 7)), (x[1:6], slice(1, 6))):  # the last is not stored
        found, product = stored.jvp(inputs, vector)
        torch.testing.assert_close(found, outputs[rows])
        torch.testing.assert_close(product, expected[rows] @ vector)
        torch.testing.assert_close(
            stored.vjp(inputs, cotangent[rows]), torch.einsum("bc,bcp->p", cotangent[rows], expected[rows])
        )


@pytest.mark.slow
def test_products_that_keep_no_jacobian_give_the_same_table(
    table: tuple[Path, dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    """The large recipe on the small one's images and networks: only the way to the products differs."""
    small = [
        "images.source=cifar10_jpeg", "images.out_of_distribution=textures",
        "networks.network=tu_symmetry.tables.convnets.ResNet", "networks.augment=false",
        "evidence.choices=[tangent_mode/single, tangent_mode/per_group]",
    ]  # fmt: skip
    rows = run(root, tmp_path, *small, name="table2-resnet50")["evidence"]["rows"]
    for key, found in rows.items():
        for a, b in zip(table[1]["evidence"]["rows"][key], found, strict=True):
            assert a["gamma"] == pytest.approx(b["gamma"], rel=1e-3), key
            assert a["nll"] == pytest.approx(b["nll"], rel=1e-3), key


def test_scores_of_known_probabilities() -> None:
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.9, 0.1]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1])
    other = torch.tensor([[0.5, 0.5], [0.95, 0.05]], dtype=torch.float64)
    found = scores(p, y, other)
    assert found["accuracy"] == 0.75
    logs = torch.tensor([0.9, 0.9, 0.8, 0.1], dtype=torch.float64).log()
    assert found["nll"] == pytest.approx(-float(logs.mean()))
    assert found["ece"] == pytest.approx(3 / 4 * abs(0.9 - 2 / 3) + 1 / 4 * 0.2, abs=1e-6)
    assert found["auroc"] == pytest.approx(0.5)  # (.5, .5) is above all four, (.95, .05) below
    assert "auroc" not in scores(p, y, None)


def test_the_report(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    text = (out / "report" / "report.md").read_text()
    assert (out / "report" / "evidence.png").read_bytes().startswith(b"\x89PNG")
    values = torch.tensor([r["nll"] for r in results["evidence"]["rows"]["tangent_mode/single"]], dtype=torch.float64)
    assert (
        f"| {name_of('tangent_mode/single')} | {values.mean():.3f} ± {values.std() / 2**0.5:.3f} *-0.773 ± 0.004* |"
        in text
    )
    for key in CHOICES:
        assert f"| {name_of(key)} |" in text
    assert len(results["report"]["tables"]) == 3


def test_an_interrupted_table_goes_on(
    table: tuple[Path, dict[str, Any]], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in front of a choice that starts from an earlier one: the same numbers, and nothing is done twice."""
    _, whole = table
    optimize, calls = laplace_residual._Work.optimize, []

    def interrupted(self: Any, choice: Choice, done: int) -> Any:
        calls.append(choice.key)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return optimize(self, choice, done)

    monkeypatch.setattr(laplace_residual._Work, "optimize", interrupted)
    some = "evidence.choices=[tangent_mode/per_group, full/per_group]"
    with pytest.raises(KeyboardInterrupt):
        run(root, tmp_path, some)
    resumed = run(root, tmp_path, some)
    assert calls == ["tangent_mode/per_group", "full/per_group"] * 2 + ["full/per_group"]
    for key, found in resumed["evidence"]["rows"].items():
        for a, b in zip(whole["evidence"]["rows"][key], found, strict=True):
            assert a["nll"] == pytest.approx(b["nll"], rel=1e-4), key
            assert a["gamma"] == pytest.approx(b["gamma"], rel=1e-3), key
    assert json.loads((tmp_path / "results.json").read_text())["stages"]["evidence"]["resumed"]


def test_choices_read_what_they_write() -> None:
    for text in CHOICES:
        assert Choice.parse(text).key == text
    assert replace(EvidenceOptions(), choices=["map/single"]).choices == ["map/single"]
