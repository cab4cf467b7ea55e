"""Loss barriers: every file runs, planted permutations are found, cut commands resume, the report is what was found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import assert_goes_on, commands_of, run_table, shortened
from torch import nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.barrier import classifier_scores, loss_barrier, mean_loss
from tu_symmetry.alignment.repair import reestimate_batchnorm, repair
from tu_symmetry.configs import ConfigError
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.evaluation import Batches, logits
from tu_symmetry.experiments.rebasin import VGG, ResNet, match, measure
from tu_symmetry.experiments.rebasin.barriers import path_scores
from tu_symmetry.experiments.rebasin.matching import Members, read_permutations
from tu_symmetry.experiments.rebasin.report import ANSWERS
from tu_symmetry.files import FileError
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import mean_state, stack_states
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_permutation
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.report import answered

RECIPES = Path(__file__).parents[2] / "recipes" / "rebasin"
SMALL, CIFAR = RECIPES / "fashion-small", RECIPES / "cifar10"
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet": {"width": 4, "blocks": [1, 1]},
    "wide": {"width": 8, "blocks": [1, 1]},
    "vgg": {"stages": [[8], [12, 12]], "hidden": [16]},
}
SIZES = {"train_size": 400, "test_size": 160}
METHODS = ("weights", "activations", "straight_through", "universe")
TRAINING = {
    "data.batch_size": 20,
    "trainer.max_epochs": 4,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "routine.optimizer.lr": 0.05,
    "routine.lr_scheduler.max_lr": 0.05,
    "routine.lr_scheduler.total_steps": 80,
}
MATCHING = {"images": 100, "batch_size": 50, "epochs": 1}
MEASURING = {"points": 3, "statistics": 200, "held_out": 60}


def flags(*kinds: str) -> list[str]:
    """Small networks, few images and short runs for these kinds of networks."""
    found: dict[str, Any] = {}
    for kind in kinds:
        model = {f"model.{key}": value for key, value in NETWORKS[kind].items()}
        data = {f"data.{key}": value for key, value in SIZES.items()}
        routine = {f"routine.{key}": value for key, value in model.items()}
        found |= {f"{kind}.{key}": value for key, value in (data | routine | TRAINING).items()}
        for name, more in (("matching", MATCHING), ("barriers", MEASURING)):
            found |= {f"{kind}_{name}.command.{key}": value for key, value in (model | data | more).items()}
    return [f"{key}={value}" for key, value in found.items()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small recipe for two kinds of networks, on scikit-learn's digits, which need no download."""

    def edit(command: dict[str, Any], content: dict[str, Any]) -> None:
        arguments = content["command"]["init_args"] if "command" in content else content
        if "data" in arguments:
            arguments["data"]["class_path"] = "tu_symmetry.datamodules.DigitsDataModule"
            for key in ("dataset", "root"):
                del arguments["data"]["init_args"][key]
        if command["name"] == "report":
            kept = {n: f for n, f in arguments["networks"].items() if "wide" not in f}
            arguments |= {"networks": kept, "narrow": next(iter(kept)), "wide": list(kept)[1]}

    kept = [f"{kind}{part}" for kind in KINDS for part in ("", "_matching", "_barriers")]
    return shortened(SMALL, tmp_path_factory.mktemp("recipe"), [*kept, "report"], edit)


KINDS = ("resnet", "vgg")
TINY = [
    *flags(*KINDS),
    "resnet.routine.model.stem_stride=1",
    "resnet_matching.command.model.stem_stride=1",
    "resnet_barriers.command.model.stem_stride=1",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> tuple[Path, dict[str, Any], str]:
    """A whole table on independently trained networks."""
    out: Path = tmp_path_factory.mktemp("trained")
    return (out, *run_table(recipe, out, TINY))


@pytest.mark.parametrize("folder", [SMALL, CIFAR], ids=["small", "cifar10"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_three_files_of_a_kind_are_about_the_same_networks(folder: Path, kind: str) -> None:
    commands = commands_of(folder)
    fit = commands[kind].content
    routine, pairs = fit["routine"]["init_args"], fit["data"]["init_args"]
    assert routine["num_members"] == pairs["orders"] == 3
    steps = math.ceil(pairs.get("train_size", 50_000) / pairs["batch_size"])
    schedule = routine["lr_scheduler"]["init_args"]
    assert schedule["total_steps"] == fit["trainer"]["max_epochs"] * steps
    assert schedule["max_lr"] == routine["optimizer"]["init_args"]["lr"]
    for name in ("matching", "barriers"):
        made = commands[f"{kind}_{name}"].content["command"]["init_args"]
        assert made["model"] == routine["model"] and made["samples"] == f"$root/{kind}/samples"
        assert made["data"]["class_path"] == fit["data"]["class_path"]
        for size in ("dataset", "train_size", "test_size"):
            assert made["data"]["init_args"].get(size) == pairs.get(size)


@pytest.fixture(scope="module", params=KINDS)
def planted(
    request: pytest.FixtureRequest,
    trained: tuple[Path, Any, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Any, Any]:
    """A trained network and two copies of it, permuted at random: matched and measured."""
    kind: str = request.param
    folder: Path = tmp_path_factory.mktemp("planted")
    network = SampleStore.open(trained[0] / kind / "samples")[0]
    graph = discover_symmetries(architecture(kind), data().train.x[:2])
    generator = torch.Generator().manual_seed(5)
    draws = [random_permutation(graph, generator=generator) for _ in range(2)]
    copies = [network, *(apply_permutation(graph, p, network) for p in draws)]
    store = SampleStore.create(folder / "samples", architecture=kind, method="permuted_copies")
    store.append(stack_states(copies), chain=range(3), step=[0] * 3)
    found = match(
        folder / "m", architecture(kind), data(), folder / "samples", list(METHODS), 100, batch_size=50, epochs=1
    )
    found.save(folder / "m")
    measured = measure(folder / "b", architecture(kind), data(), folder / "samples", folder / "m", 3, 200, 60)
    return kind, found.results, measured.results


def architecture(kind: str) -> nn.Module:
    if kind == "vgg":
        return VGG(10, 1, **NETWORKS["vgg"])
    return ResNet(10, 1, **NETWORKS[kind])


def data() -> DigitsDataModule:
    return DigitsDataModule(**SIZES)


def test_permuted_copies_have_barriers_and_matching_removes_them(planted: tuple[str, Any, Any]) -> None:
    """Planted: the copies are one function; matched they are one weight vector, so nothing is lost by merging."""
    _, found, measured = planted
    single = measured["members"][0]
    assert single["accuracy"] > 0.5
    for member in measured["members"]:
        assert member == pytest.approx(single, rel=1e-5)
    assert measured["pairs"] == [[0, 1], [0, 2], [1, 2]]
    for path in measured["methods"]["none"]["paths"]["none"]:
        assert path["barrier"] > 0.1 and path["middle_accuracy"] < single["accuracy"]
    assert measured["methods"]["none"]["mean"]["none"]["loss"] > single["loss"] + 0.1
    assert min(found["methods"]["none"]["distances"]) > 1
    assert found["methods"]["none"]["transpositions"] == [0, 0, 0]
    for method in METHODS:
        for path in measured["methods"][method]["paths"]["none"]:
            assert path["barrier"] == pytest.approx(0, abs=1e-5)
            assert path["tempered_barrier"] == pytest.approx(0, abs=1e-5)
            assert path["middle_accuracy"] == single["accuracy"]
        assert measured["methods"][method]["mean"]["none"] == pytest.approx(single, rel=1e-4)
        if method != "activations":  # units that are never active look alike, and compute nothing
            assert found["methods"][method]["distances"] == pytest.approx([0, 0, 0], abs=1e-4)
        assert 0 < max(found["methods"][method]["transpositions"]) <= found["largest_transpositions"]


def test_corrected_midpoints(planted: tuple[str, Any, Any]) -> None:
    """Unmatched midpoints gain from fresh statistics; REPAIR differs where a hidden layer is not normalized."""
    kind, _, measured = planted
    paths = measured["methods"]["none"]["paths"]
    uncorrected, fresh = (sum(p["tempered_barrier"] for p in paths[name]) for name in ("none", "batchnorm"))
    assert fresh < uncorrected
    assert (paths["repair"] == paths["batchnorm"]) == (kind == "resnet")


def test_measurements_agree_with_the_library(trained: tuple[Path, dict[str, Any], str]) -> None:
    """One cell of each kind against the barriers of the alignment room, which pass over the data on their own."""
    out, results, _ = trained
    found = results["vgg_barriers"]["methods"]["activations"]
    members = Members(architecture("vgg"), data(), out / "vgg" / "samples", "cpu")
    model, test = members.model, members.test
    aligned = members.matched(read_permutations(out / "vgg_matching")["activations"])
    part, held_out = Batches(test.x[:100], test.y[:100]), Batches(test.x[100:], test.y[100:])
    statistics = members.first_images(200)
    a, b = aligned[1], aligned[2]  # never matched to each other
    corrections: dict[str, dict[str, Any]] = {
        "none": {},
        "batchnorm": {"merge": lambda state, ratio: reestimate_batchnorm(model, state, statistics)},
        "repair": {"merge": lambda state, ratio: repair(model, [a, b], [1 - ratio, ratio], state, statistics)},
    }
    for correction, options in corrections.items():
        ours = found["paths"][correction][2]
        theirs = loss_barrier(model, a, b, part, cross_entropy, points=3, **options)
        assert ours["loss"] == pytest.approx(theirs.losses, rel=1e-5)
        assert ours["barrier"] == pytest.approx(theirs.barrier, rel=1e-4, abs=1e-6)
        tuned = classifier_scores(model, a, part, calibration=held_out)
        assert ours["temperature"][0] == pytest.approx(tuned.temperature, rel=1e-4)
    average = reestimate_batchnorm(model, mean_state(aligned), statistics)
    mean = mean_loss(model, average, part, cross_entropy)
    assert found["mean"]["batchnorm"]["loss"] == pytest.approx(mean, rel=1e-5)
    accuracy = (logits(model, members.states[0], part).argmax(-1) == part.y).double().mean().item()
    assert results["vgg_barriers"]["members"][0]["accuracy"] == pytest.approx(accuracy)


def test_report_shows_what_was_measured(trained: tuple[Path, dict[str, Any], str], recipe: Path) -> None:
    out, results, text = trained
    markdown = (out / "report" / "report.md").read_text()
    for kind in KINDS:
        methods = results[f"{kind}_barriers"]["methods"]
        for method in methods.values():
            values = [path["barrier"] for path in method["paths"]["batchnorm"]]
            assert f" {sum(values) / 3:.2f} " in markdown
        assert f"{100 * methods['universe']['mean']['repair']['accuracy']:.1f}" in markdown
    for figure in (out / "report").glob("*.png"):
        assert f"({figure.name})" in markdown and figure.read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "report").glob("*.png"))) == 3
    for sentence in load_table(SMALL).claims.values():
        assert sentence in markdown
    again, text = run_table(recipe, out, TINY)
    assert again == results and "▸" not in text


def test_cut_commands_resume_to_the_same_numbers(trained: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    out, whole, _ = trained
    given: Any = (architecture("resnet"), data(), out / "resnet" / "samples")
    found = assert_goes_on(lambda folder: match(folder, *given, list(METHODS), **MATCHING), tmp_path / "matching")
    assert found.results == {k: v for k, v in whole["resnet_matching"].items() if k != "tables"}
    found = assert_goes_on(lambda folder: measure(folder, *given, out / "resnet_matching", **MEASURING), tmp_path / "b")
    assert found.results == {k: v for k, v in whole["resnet_barriers"].items() if k != "tables"}


def test_arguments_that_make_no_sense(trained: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    out, _, _ = trained
    samples, made = out / "resnet" / "samples", out / "resnet_matching"

    def measured(where: Path = samples, matching: Path = made, **options: Any) -> None:
        measure(tmp_path / "b", architecture("resnet"), data(), where, matching, **options)

    for points in (1, 4):
        with pytest.raises(ValueError, match=f"odd and 3 at least .*, not {points}"):
            measured(points=points)
    for held_out in (0, 160):
        with pytest.raises(ValueError, match=f"held_out is {held_out}.*160 test"):
            measured(statistics=100, held_out=held_out)
    with pytest.raises(ValueError, match="401 training images are asked for, but there are 400"):
        measured(statistics=401, held_out=60)
    one = SampleStore.create(tmp_path / "one", architecture="ResNet", method="none")
    one.append(stack_states(SampleStore.open(samples)[:1]), chain=[0], step=[0])
    with pytest.raises(ValueError, match="holds 1: train 2 at least"):
        measured(tmp_path / "one", statistics=100, held_out=60)
    two = SampleStore.create(tmp_path / "two", architecture="ResNet", method="none")
    two.append(stack_states(SampleStore.open(samples)[:2]), chain=[0, 1], step=[0, 0])
    with pytest.raises(FileError, match="a matching of other networks"):
        measured(tmp_path / "two", statistics=100, held_out=60)

    def matchings(**options: Any) -> None:
        match(tmp_path / "m", architecture("resnet"), data(), samples, ["weights"], **({"images": 50} | options))

    matchings()
    with pytest.raises(FileError, match="made with other options"):
        matchings(images=60)


def planted_results(narrow: float, wide: float, repaired: float, control: float, other: float) -> dict[str, Any]:
    """Barriers of one method and the control: uncorrected 1, with corrected statistics as they are given."""

    def found(barrier: float) -> dict[str, Any]:
        def paths(values: list[float]) -> list[dict[str, float]]:
            return [{"barrier": v, "tempered_barrier": v} for v in values]

        corrected = paths([barrier, barrier, other * barrier])
        matched = {"none": paths([1.0, 1.0, 1.0]), "batchnorm": corrected, "repair": paths([repaired] * 3)}
        unmatched = {name: paths([control] * 3) for name in matched}
        return {
            "pairs": [[0, 1], [0, 2], [1, 2]],
            "methods": {"none": {"paths": unmatched}, "weights": {"paths": matched}},
        }

    return {"a": found(narrow), "b": found(wide)}


@pytest.mark.parametrize("holds", [True, False])
def test_claims_are_answered_from_the_numbers(holds: bool) -> None:
    names = ("width", "correction", "permutation", "reference")
    claims = dict.fromkeys(names, "A sentence.")
    networks = planted_results(0.4, 0.2, 0.3, 0.9, 1.0) if holds else planted_results(0.4, 0.5, 0.41, 0.3, 1.5)
    found = answered(claims, ANSWERS, networks, "a", "b")
    verdicts = {name: answer.verdict for name, answer in found.items()}
    word = "all" if holds else "none"
    assert verdicts == {name: f"Held in {word} of {1 if name == 'width' else 2} cases" for name in names}
    assert ("weights 0.40 → 0.20" if holds else "weights 0.47 → 0.58") in found["width"].evidence
    assert ("weights 70 %" if holds else "weights 59 %") in found["correction"].evidence
    assert ("weights 0.20 to 0.20 and 0.20" if holds else "weights 0.50 to 0.50 and 0.75") in found[
        "reference"
    ].evidence
    mixed = planted_results(0.4, 0.2, 0.3, 0.3, 1.0)
    assert answered({"permutation": ""}, ANSWERS, mixed, "a", "b")["permutation"].verdict == "Held in 1 of 2 cases"
    with pytest.raises(ConfigError, match="no answer to 'weather'"):
        answered({"weather": "It rains."}, ANSWERS, networks, "a", "b")


def test_losses_that_are_not_finite_count_as_infinite() -> None:
    networks = planted_results(0.4, 0.2, 0.3, 0.9, 1.0)
    networks["b"]["methods"]["weights"]["paths"]["batchnorm"][0]["barrier"] = None
    assert "weights 0.40 → inf" in answered({"width": ""}, ANSWERS, networks, "a", "b")["width"].evidence
    score = {"loss": 1.0, "accuracy": 1.0, "temperature": 1.0, "tempered_loss": 1.0}
    path = path_scores([score, score | {"loss": None}, score])
    assert path["barrier"] == math.inf and path["tempered_barrier"] == 0
    with pytest.raises(ValueError, match="train them again"):
        path_scores([score | {"loss": None}, score, score])
