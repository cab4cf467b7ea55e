"""The barrier recipes parse; their stages run, resume, and find what was planted."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.barrier import loss_barrier, mean_model_loss, tempered_loss_barrier
from tu_symmetry.alignment.repair import repair
from tu_symmetry.configs import ConfigError, parse, resolve
from tu_symmetry.evaluation import Batches, logits
from tu_symmetry.reporting.progress import Display
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_permutation
from tu_symmetry.tables import barriers
from tu_symmetry.tables.barriers import MEMBERS, MembersOptions, _augmented, read_permutations
from tu_symmetry.tables.convnets import VGG, ResNet
from tu_symmetry.tables.data import load_data
from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.models import build_model
from tu_symmetry.tables.recipe import DataConfig, ModelConfig, load_recipe
from tu_symmetry.tables.stage import Results, StageContext, stage, stage_kind

RECIPES = Path(__file__).parents[2] / "recipes" / "rebasin"
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet": {
        "network": "tu_symmetry.tables.convnets.ResNet",
        "arguments": {"in_channels": 1, "width": 4, "blocks": [1, 1]},
    },
    "vgg": {
        "network": "tu_symmetry.tables.convnets.VGG",
        "arguments": {"in_channels": 1, "stages": [[8], [12, 12]], "hidden": [16]},
    },
}
TRAINING = {"members": 3, "epochs": 4, "batch_size": 20, "learning_rate": 0.05}


@stage()
def permuted_copies(context: StageContext, options: MembersOptions) -> Results:
    """Members that are one trained network, permuted at random."""
    network = barriers._train(context, options, 0, lambda epoch, loss: None)
    config = ModelConfig(options.network, options.arguments)
    graph = discover_symmetries(build_model(config, context.data), context.data.train_x[:2])
    generator = context.generator("permutations")
    copies = [network] + [
        apply_permutation(graph, random_permutation(graph, generator=generator), network)
        for _ in range(options.members - 1)
    ]
    save_file({name: torch.stack([c[name] for c in copies]) for name in network}, context.folder / MEMBERS)
    model = {"class_path": options.network, "init_args": options.arguments}
    return {"title": options.title, "model": model, "members": options.members}


def write_recipe(folder: Path, members: str, networks: Sequence[str] = tuple(NETWORKS), *, report: bool = True) -> Path:
    """A recipe of toy networks on digits with the stages of the real ones."""
    stages: dict[str, Any] = {}
    for name in networks:
        network = NETWORKS[name]
        stages[name] = {"stage": members, "options": {"title": name, **network, **TRAINING}}
        stages[f"{name}_matching"] = {
            "stage": "rebasin_matching",
            "inputs": {"members": name},
            "options": {"images": 100, "batch_size": 50, "epochs": 1},
        }
        stages[f"{name}_barriers"] = {
            "stage": "rebasin_barriers",
            "inputs": {"members": name, "matching": f"{name}_matching"},
            "options": {"points": 3, "statistics": 200, "held_out": 60},
        }
    if report:
        inputs = {role: f"{name}_barriers" for role, name in zip(("first", "second"), networks, strict=True)}
        stages["report"] = {"stage": "rebasin_report", "inputs": inputs}
    table = {"title": "toy", "stages": list(stages), "data": {"name": "digits", "train_size": 400, "test_size": 160}}
    folder.mkdir()
    for name, content in {"table": table, **stages}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


def run(folder: Path, out: Path, overrides: list[str] | None = None) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=160, file=io.StringIO())
    display = Display(console)
    results = run_table(folder, out=out, overrides=overrides or [], display=display)
    display.tables(results)
    return results, console.export_text()


@pytest.mark.parametrize("name", ["fashion-small", "cifar10"])
def test_recipes_parse_and_their_networks_can_be_built(name: str) -> None:
    recipe = load_recipe(RECIPES / name)
    kinds = set()
    for stage_name, config in recipe.stages.items():
        kind = stage_kind(config.stage)
        options = parse(kind.options, config.options, stage_name)
        kinds.add(config.stage)
        if isinstance(options, MembersOptions):
            images = 32 if name == "cifar10" else 28
            network = resolve(options.network)(num_classes=10, **options.arguments)
            channels = options.arguments.get("in_channels", 3)
            assert network(torch.zeros(2, channels, images, images)).shape == (2, 10)
    assert kinds == {"rebasin_members", "rebasin_matching", "rebasin_barriers", "rebasin_report"}
    assert (RECIPES / name / "README.md").is_file()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run on members that are permuted copies of one network."""
    folder = tmp_path_factory.mktemp("planted")
    return run(write_recipe(folder / "toy", f"{__name__}:permuted_copies", report=False), folder / "run")[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_permuted_copies_have_barriers_and_matching_removes_them(planted: dict[str, Any], name: str) -> None:
    """Planted: the copies are one function; matched they are one weight vector, so nothing is lost by merging."""
    found = planted[f"{name}_barriers"]
    single = found["members"][0]
    assert single["accuracy"] > 0.5
    for member in found["members"]:
        assert member == pytest.approx(single, rel=1e-5)
    assert found["pairs"] == [[0, 1], [0, 2], [1, 2]]
    for path in found["methods"]["none"]["paths"]["none"]:
        assert path["barrier"] > 0.1 and path["middle_accuracy"] < single["accuracy"]
    assert found["methods"]["none"]["mean"]["none"]["loss"] > single["loss"] + 0.1
    for method in ("weights", "activations", "straight_through", "universe"):
        measured = found["methods"][method]
        for path in measured["paths"]["none"]:
            assert path["barrier"] == pytest.approx(0, abs=1e-5)
            assert path["tuned_barrier"] == pytest.approx(0, abs=1e-5)
            assert path["middle_accuracy"] == single["accuracy"]
        assert measured["mean"]["none"] == pytest.approx(single, rel=1e-4)
        matching = planted[f"{name}_matching"]["methods"]
        if method != "activations":  # units that are never active look alike, and compute nothing
            assert matching[method]["distances"] == pytest.approx([0, 0, 0], abs=1e-4)
        assert min(matching["none"]["distances"]) > 1


def test_corrected_midpoints(planted: dict[str, Any]) -> None:
    """Unmatched midpoints gain from fresh statistics; REPAIR differs where a hidden layer is not normalized."""
    paths = {name: planted[f"{name}_barriers"]["methods"]["none"]["paths"] for name in NETWORKS}
    for found in paths.values():
        plain, fresh = (sum(p["tuned_barrier"] for p in found[correction]) for correction in ("none", "batchnorm"))
        assert fresh < plain
    assert paths["resnet"]["repair"] == paths["resnet"]["batchnorm"]
    assert paths["vgg"]["repair"] != paths["vgg"]["batchnorm"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A whole run on independently trained members."""
    folder = tmp_path_factory.mktemp("trained")
    results, text = run(write_recipe(folder / "toy", "rebasin_members"), folder / "run")
    return folder / "run", results, text


def test_measurements_agree_with_the_library(trained: tuple[Path, dict[str, Any], str]) -> None:
    """One cell of each kind against the functions of the alignment room, which pass over the data on their own."""
    out, results, _ = trained
    found = results["vgg_barriers"]
    data = load_data(DataConfig("digits", 400, 160), Path("nowhere"))
    model = VGG(10, **NETWORKS["vgg"]["arguments"]).eval()
    graph = discover_symmetries(model, data.train_x[:2])
    states = list(unstack(load_file(out / "vgg" / MEMBERS)))
    permutations = read_permutations(out / "vgg_matching" / "activations.safetensors")
    aligned = [apply_permutation(graph, p, s) for p, s in zip(permutations, states, strict=True)]
    measure, held_out = Batches(data.test_x[:100], data.test_y[:100]), Batches(data.test_x[100:], data.test_y[100:])
    statistics = Batches(data.train_x[:200], data.train_y[:200])
    a, b = aligned[1], aligned[2]  # never matched to each other
    corrections: dict[str, dict[str, Any]] = {
        "none": {},
        "batchnorm": {"recalibrate": statistics},
        "repair": {"merge": lambda state, ratio: repair(model, [a, b], [1 - ratio, ratio], state, statistics)},
    }
    for correction, options in corrections.items():
        ours = found["methods"]["activations"]["paths"][correction][2]
        theirs = loss_barrier(model, a, b, measure, cross_entropy, points=3, **options)
        tuned = tempered_loss_barrier(model, a, b, measure, calibration=held_out, points=3, **options)
        assert ours["loss"] == pytest.approx(theirs.losses, rel=1e-5)
        assert ours["barrier"] == pytest.approx(theirs.barrier, rel=1e-4, abs=1e-6)
        assert ours["tuned_barrier"] == pytest.approx(tuned.barrier, rel=1e-4, abs=1e-6)
        assert ours["temperature"] == pytest.approx(tuned.temperatures, rel=1e-4)
    mean = mean_model_loss(model, aligned, measure, cross_entropy, recalibrate=statistics)
    assert found["methods"]["activations"]["mean"]["batchnorm"]["loss"] == pytest.approx(mean, rel=1e-5)
    accuracy = (logits(model, states[0], measure).argmax(-1) == measure.y).double().mean().item()
    assert found["members"][0]["accuracy"] == pytest.approx(accuracy)


def test_members_learn_and_differ(trained: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = trained
    for name in NETWORKS:
        assert all(member["accuracy"] > 0.5 for member in results[f"{name}_barriers"]["members"])
        states = list(unstack(load_file(out / name / MEMBERS)))
        assert len(states) == 3
        assert not any(torch.equal(states[0][n], states[1][n]) for n in states[0] if n.endswith("weight"))
        assert not (out / name / "member-0.pt").exists()


def test_report_shows_what_was_measured(trained: tuple[Path, dict[str, Any], str]) -> None:
    out, results, text = trained
    markdown = (out / "report" / "report.md").read_text()
    for name in NETWORKS:
        methods = results[f"{name}_barriers"]["methods"]
        for method in methods.values():
            values = [path["barrier"] for path in method["paths"]["batchnorm"]]
            assert f" {sum(values) / 3:.2f} " in markdown and f" {sum(values) / 3:.2f} " in text
        assert f"{100 * methods['universe']['mean']['repair']['accuracy']:.1f}" in markdown
    for file in ("barriers.png", "paths-resnet_barriers.png", "paths-vgg_barriers.png"):
        assert f"({file})" in markdown
        assert (out / "report" / file).read_bytes().startswith(b"\x89PNG")


def test_interrupted_stages_go_on_to_the_same_numbers(
    trained: tuple[Path, dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in training, in matching and in measuring; what was done before is not done again."""
    _, whole, _ = trained
    recipe = write_recipe(tmp_path / "toy", "rebasin_members", ["resnet"], report=False)
    calls: dict[str, int] = {}

    def cut_after(name: str, count: int) -> None:
        function = getattr(barriers, name)

        def counted(*arguments: Any, **options: Any) -> None:
            function(*arguments, **options)
            calls[name] = calls.get(name, 0) + 1
            if calls[name] == count:
                raise KeyboardInterrupt

        monkeypatch.setattr(barriers, name, counted)

    cuts = {"_save": 6, "_write_permutations": 2, "write_json": 5}
    for name, count in cuts.items():
        cut_after(name, count)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "run")
    resumed, text = run(recipe, tmp_path / "run")
    assert "resuming" in text
    assert calls == {"_save": 12, "_write_permutations": 4, "write_json": 23}  # 3 networks, 5 methods of 4 cells
    assert resumed["resnet_barriers"] == whole["resnet_barriers"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("resnet.members=1", "2 at least"),
        ("resnet.batch_size=500", "exceeds the 400"),
        ("resnet_matching.methods=[weight]", "weights, activations"),
        ("resnet_barriers.points=4", "odd"),
        ("resnet_barriers.held_out=160", "160 test"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, override: str, message: str) -> None:
    recipe = write_recipe(tmp_path / "toy", "rebasin_members", ["resnet"], report=False)
    with pytest.raises(ConfigError, match=message):
        run(recipe, tmp_path / "run", ["resnet.epochs=1", "resnet_matching.methods=[]", override])


def test_augmented_images_are_flipped_and_shifted(generator: torch.Generator) -> None:
    """Every result is a crop of the padded image or of its mirror image; all shifts and both sides occur."""
    x = torch.rand(400, 2, 5, 6, generator=generator)
    y = _augmented(x, generator, shift=1)
    seen = set()
    for before, after in zip(x, y, strict=True):
        places = [
            (side, top, left)
            for side, image in enumerate((before, before.flip(-1)))
            for top in range(3)
            for left in range(3)
            if torch.equal(torch.nn.functional.pad(image, [1] * 4)[:, top : top + 5, left : left + 6], after)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 18


def test_resnet_and_vgg_have_the_groups_of_their_widths() -> None:
    resnet = discover_symmetries(ResNet(10, width=4, blocks=(2, 1, 1)), (torch.randn(2, 3, 16, 16),))
    assert sorted(group.size for group in resnet.permutations) == [4, 4, 4, 8, 8, 16, 16]  # a stream a stage
    vgg = discover_symmetries(VGG(10, stages=((4,), (6, 8)), hidden=(12,)), (torch.randn(2, 3, 16, 16),))
    assert sorted(group.size for group in vgg.permutations) == [4, 6, 8, 12]


def test_cifar10_is_read_as_torchvision_stores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 3 * 32 * 32), dtype=np.uint8)
    for k, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        content = {"data": pixels[2 * k : 2 * k + 2], "labels": [k, 9 - k]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = load_data(DataConfig("cifar10", train_size=4), tmp_path)
    assert torch.equal((data.train_x * 255).round().long(), torch.from_numpy(pixels[:4]).view(4, 3, 32, 32).long())
    assert data.train_y.tolist() == [0, 9, 1, 8] and data.test_y.tolist() == [5, 4]
    assert data.num_classes == 10


def test_run_folder_holds_the_measurements(trained: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = trained
    content = json.loads((out / "results.json").read_text())
    assert content["stages"]["resnet_barriers"]["results"] == results["resnet_barriers"]
