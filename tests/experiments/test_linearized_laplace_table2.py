"""The Table 2 recipes on synthetic images: what their rows mean, the curvature at theta*, marks, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import assert_goes_on, commands_of, plant_images, run_table
from torch.func import functional_call

from tu_symmetry.datamodules import CIFARDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace import CNN, Settings, Trained, optimize_kronecker_evidence
from tu_symmetry.experiments.linearized_laplace.evidence import StoredJacobian, Work, read_choices
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.experiments.linearized_laplace.rows import Choice, title_of
from tu_symmetry.experiments.rebasin import ResNet
from tu_symmetry.experiments.study import Images
from tu_symmetry.files import FileError
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.outcome import Outcome

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = Path(__file__).parents[2] / "recipes" / "linearized_laplace"
MODEL = {"num_classes": 10, "width": 2, "blocks": [1, 1], "stem_stride": 4}
SIZES: dict[str, Any] = {"train_size": 40, "val_size": 20, "test_size": 20}
TINY = [
    *(f"networks.data.{k}={v}" for k, v in (SIZES | {"batch_size": 10, "orders": 2}).items()),
    "networks.routine.num_members=2", "networks.routine.lr_scheduler.total_steps=16",
    "networks.trainer.max_epochs=4", "networks.trainer.enable_progress_bar=false", "networks.trainer.accelerator=cpu",
    *(f"{name}.{k}={v}" for k, v in MODEL.items() for name in ("networks.routine.model", "evidence.command.model")),
    *(f"evidence.command.data.{k}={v}" for k, v in (SIZES | {"ood_size": 6}).items()),
    *(f"evidence.command.settings.{k}={v}" for k, v in
      {"max_iterations": 3, "refreshes": 1, "num_samples": 20, "batch_size": 16, "mode_tolerance": 5.0}.items()),
]  # fmt: skip
SETTINGS = Settings(
    16, tolerance=0.1, mode_tolerance=5.0, max_iterations=3, refreshes=1, num_samples=20, stored_jacobian=True
)
FULL, SIMPLE = "full/single", "tangent_mode/single"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives like the real ones."""
    folder: Path = tmp_path_factory.mktemp("data") / "data"
    plant_images(folder)
    return folder


@pytest.fixture(scope="module")
def table(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("table")
    return out, run_table(RECIPES / "table2", out, TINY, data_root=root)[0]


def data(root: Path) -> CIFARDataModule:
    return CIFARDataModule(root=root, source="archive", eval_ood=True, ood_dataset="textures", ood_size=6, **SIZES)


def network(out: Path, number: int) -> ResNet:
    model = ResNet(**MODEL).eval()
    model.load_state_dict(SampleStore.open(out / "networks" / "samples")[number])
    return model


@pytest.mark.parametrize("name", ["table2", "table2-fixup", "table2-resnet50"])
def test_recipes_know_the_papers_rows_and_train_what_they_evaluate(name: str) -> None:
    table = load_table(RECIPES / name)
    commands = commands_of(RECIPES / name)
    fit, taken = commands["networks"].content, commands["evidence"].content
    given, routine = taken["command"]["init_args"], fit["routine"]["init_args"]
    assert set(table.paper) <= {c.key for c in read_choices(given["choices"], given["settings"]["refreshes"])}
    fixup = "FixUp" in table.title
    assert fixup == (name == "table2-fixup") and (RECIPES / name / "README.md").is_file()
    assert table.paper["tangent_mode/single"] == {"nll": -0.744 if fixup else -0.773, "error": 0.0 if fixup else 0.004}
    assert given["model"] == routine["model"] and given["networks"] == "$root/networks/samples"
    trained, evaluated = fit["data"]["init_args"], given["data"]["init_args"]
    assert "augment" not in evaluated and trained["orders"] == routine["num_members"] == 3
    for key in ("dataset", "root", "source", "train_size", "test_size"):
        assert trained.get(key) == evaluated.get(key)
    held_out, taken_in = evaluated["val_size"], trained.get("train_size", 50_000 - trained.get("val_size", 0))
    assert taken_in + held_out <= 50_000, "the network is scaled on images that it was trained on"
    batches = -(-taken_in // trained["batch_size"])  # the schedule ends with the training
    assert routine["lr_scheduler"]["init_args"]["total_steps"] == fit["trainer"]["max_epochs"] * batches


@pytest.mark.parametrize(
    ("choices", "refreshes", "match"),
    [
        ([FULL], 1, "starts from 'tangent_mode/single'"),
        ([FULL, SIMPLE], 1, "starts from 'tangent_mode/single'"),
        ([SIMPLE, FULL], 0, "refreshes is 0"),
        (["theta/single"], 1, "write map or tangent_mode or full"),
    ],
)
def test_a_full_choice_needs_a_start_and_a_curvature(choices: list[str], refreshes: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_choices(choices, refreshes)
    assert [c.key for c in read_choices([SIMPLE, FULL], 1)] == [SIMPLE, FULL]


@pytest.mark.parametrize(("choice", "prior"), [("map/single", "single"), ("tangent_mode/per_group", "per_group")])
def test_rows_equal_a_hand_computation(root: Path, table: tuple[Path, dict[str, Any]], choice: str, prior: Any) -> None:
    out, results = table
    images = Images(data(root), "cpu")
    row = results["evidence"]["rows"][choice][1]
    la = LinearizedLaplace(model := network(out, 1), prior=prior, evaluate_at="map", parameters=matrices(model)).fit(
        [(images.train.x, images.train.y)]
    )
    la.set_precision({name: group["precision"] for name, group in row["groups"].items()})
    p = la.predictive(images.test.x, num_samples=20)
    nll = -p[torch.arange(20), images.test.y].log().mean()
    assert row["nll"] == pytest.approx(float(nll), rel=1e-3)
    assert row["gamma"] == pytest.approx(sum(g.gamma for g in la.report()), rel=1e-3)
    la.calibrate([(images.data.val.x, images.data.val.y)], num_samples=20)
    p = la.predictive(images.test.x, num_samples=20)
    nll = -p[torch.arange(20), images.test.y].log().mean()
    assert row["calibrated"]["nll"] == pytest.approx(float(nll), rel=1e-3)
    plain = torch.nn.functional.cross_entropy(model(images.test.x), images.test.y)
    assert results["evidence"]["networks"][1]["nll"] == pytest.approx(float(plain.detach()), rel=1e-5)


def test_full_takes_the_curvature_at_the_tangent_models_outputs(root: Path, table: tuple[Path, dict[str, Any]]) -> None:
    """The factor of the last layer's bias is the sum of diag p - p p^T at the tangent model's outputs at theta*."""
    out, _ = table
    images = Images(data(root), "cpu")
    x = images.train.x
    model, (file,) = network(out, 0), (out / "evidence" / "parts").glob("network-0-*-tangent_mode-single.safetensors")
    place = file.with_name(file.name.removesuffix("-tangent_mode-single.safetensors"))
    work = Work(Trained(ResNet(**MODEL), out / "networks" / "samples"), 0, images, SETTINGS, place)
    la = work.resumed(work.start(Choice("full", "single")), Choice("tangent_mode", "single"))
    theta, point = la.theta, la.tangent.point()
    assert (theta - point).norm() > 1e-2 * point.norm()
    la = work.retaken(la)
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


def test_the_report(table: tuple[Path, dict[str, Any]]) -> None:
    out, results = table
    text = (out / "report" / "report.md").read_text()
    for key, runs in results["evidence"]["rows"].items():
        values = torch.tensor([r["nll"] for r in runs], dtype=torch.float64)
        mark = "" if all(r["converged"] for r in runs) else "†"
        mark += "" if all(r["settled"] for r in runs) else "‡"
        shown = f"| {title_of(key)} | {values.mean():.3f} ± {values.std() / 2**0.5:.3f}{mark} "
        paper = {"tangent_mode/single": "*-0.773 ± 0.004* ", "map/per_group/flat": "*-0.271 ± 0.004* "}
        assert f"{shown}{paper.get(key, '')}" in text
        assert all(r["settled"] == (r["moved"] <= 0.1) for r in runs)
        assert key.startswith("full") or all(r["settled"] for r in runs)
    scaled = [run["scaled"]["nll"] for run in results["evidence"]["networks"]]
    runs = [run["calibrated"]["nll"] for run in results["evidence"]["rows"]["map/single"]]
    gains = torch.tensor([a - b for a, b in zip(runs, scaled, strict=True)], dtype=torch.float64)
    (line,) = [own for own in text.splitlines() if own.startswith("| M(θ~), single λ, calibrated |")]
    assert f"{gains.mean():+.3f} ± {gains.std() / 2**0.5:.3f}" in line and "| network, temperature scaled |" in text
    assert len(results["report"]["tables"]) == 3


def test_an_evidence_that_was_cut_goes_on(table: tuple[Path, dict[str, Any]], root: Path, tmp_path: Path) -> None:
    """In front of a choice that starts from an earlier one, whose weights are kept beside its row."""
    out, whole = table
    some = ["tangent_mode/per_group", "full/per_group"]

    def measure(folder: Path, settings: Settings = SETTINGS) -> Outcome:
        samples = out / "networks" / "samples"
        return optimize_kronecker_evidence(folder, ResNet(**MODEL), samples, data(root), some, settings, device="cpu")

    found = assert_goes_on(measure, tmp_path, 1).results["rows"]
    for key, runs in found.items():
        for a, b in zip(whole["evidence"]["rows"][key], runs, strict=True):
            assert a["nll"] == pytest.approx(b["nll"], rel=1e-4), key
            assert a["gamma"] == pytest.approx(b["gamma"], rel=1e-3), key
    with pytest.raises(FileError, match="other options, or from other networks or data"):
        measure(tmp_path, Settings())


def test_a_stored_jacobian_gives_the_same_products() -> None:
    torch.manual_seed(0)
    model = CNN(3, width=2).double().eval()
    x = torch.randn(7, 1, 12, 12, dtype=torch.float64)
    plain = TangentModel(model, matrices(model))
    stored = StoredJacobian(plain, Batches(x, torch.arange(7) % 3, 4))
    vector, cotangent = torch.randn(plain.size, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    for rows in (slice(0, 4), slice(4, 7)):
        own = stored.linearize(x[rows])
        for found, expected in zip((own.outputs, own.push(vector)), plain.jvp(x[rows], vector), strict=True):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(own.pull(cotangent[rows]), plain.vjp(x[rows], cotangent[rows]))
