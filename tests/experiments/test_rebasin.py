"""Loss barriers: the files are about the same networks, planted permutations are found, the report says it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, assert_goes_on, commands_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.barrier import classifier_scores, loss_barrier, mean_loss
from tu_symmetry.alignment.repair import reestimate_batchnorm, repair
from tu_symmetry.configs import ConfigError
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.rebasin import (
    GPT,
    VGG,
    ResNet,
    TopicsDataModule,
    VisionTransformer,
    match,
    measure,
    report,
)
from tu_symmetry.experiments.rebasin.barriers import path_scores
from tu_symmetry.experiments.rebasin.matching import Members
from tu_symmetry.experiments.rebasin.report import ANSWERS
from tu_symmetry.files import FileError
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.scaling.folding import fold_norms
from tu_symmetry.states import mean_state, stack_states
from tu_symmetry.symmetry.action import apply_linear, apply_permutation, apply_signed
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import SignedPermutation, random_linear, random_permutation, random_signs
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import answered

SMALL, CIFAR, TRANSFORMERS = (RECIPES / "rebasin" / name for name in ("fashion-small", "cifar10", "transformers"))
KINDS = ("resnet", "vgg")
METHODS = ("weights", "activations", "straight_through", "universe")


def data() -> DigitsDataModule:
    return DigitsDataModule(train_size=400, test_size=160)


def architecture(kind: str) -> nn.Module:
    if kind == "vgg":
        return VGG(10, 1, stages=[[8], [12, 12]], hidden=[16])
    return ResNet(10, 1, width=4, blocks=[1, 1])


def train(kind: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model, train = architecture(kind), data().train
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(8):
        for rows in torch.randperm(400).split(20):
            optimizer.zero_grad()
            cross_entropy(model(train.x[rows]), train.y[rows]).backward()
            optimizer.step()
    return model.state_dict()


def measured(kind: str, states: list[dict[str, Tensor]], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What matching and measuring find of some networks, in subfolders ``matching`` and ``barriers``."""
    store = SampleStore.create(folder / "samples", architecture=kind, method="none")
    store.append(stack_states(states), chain=range(len(states)), step=[0] * len(states))
    given: Any = (architecture(kind), data(), folder / "samples")
    found = match(folder / "matching", *given, list(METHODS), images=100, batch_size=50, epochs=1)
    found.save(folder / "matching")
    made = measure(folder / "barriers", *given, folder / "matching", points=3, statistics=200, held_out=60)
    made.save(folder / "barriers")
    return found.results, made.results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Three independently trained networks of each kind, and what was measured of them."""
    out = tmp_path_factory.mktemp("trained")
    return out, {kind: measured(kind, [train(kind, seed) for seed in range(3)], out / kind)[1] for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """A trained network and two copies of it, permuted at random: matched and measured."""
    kind: str = request.param
    network = train(kind, 0)
    graph = discover_symmetries(architecture(kind), data().train.x[:2])
    generator = torch.Generator().manual_seed(5)
    draws = [random_permutation(graph, generator=generator) for _ in range(2)]
    copies = [network, *(apply_permutation(graph, p, network) for p in draws)]
    return (kind, *measured(kind, copies, tmp_path_factory.mktemp("planted")))


@pytest.mark.parametrize("folder", [SMALL, CIFAR], ids=["small", "cifar10"])
@pytest.mark.parametrize("kind", ["resnet", "wide", "vgg"])
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


@pytest.mark.parametrize("kind", ["tanh", "layer", "rms", "gpt"])
def test_the_files_of_a_kind_of_transformer_are_about_the_same_networks(kind: str) -> None:
    commands = commands_of(TRANSFORMERS)
    fit = commands[kind].content
    routine, pairs, trainer = fit["routine"]["init_args"], fit["data"]["init_args"], fit["trainer"]
    assert routine["num_members"] == pairs["orders"] == 4
    steps = trainer.get("limit_train_batches", math.ceil(1437 / pairs["batch_size"]))
    schedule = routine["lr_scheduler"]["init_args"]
    assert schedule["total_steps"] == trainer["max_epochs"] * steps
    assert schedule["max_lr"] == routine["optimizer"]["init_args"]["lr"]
    for name in ("matching", "barriers"):
        made = commands[f"{kind}_{name}"].content["command"]["init_args"]
        assert made["model"] == routine["model"] and made["samples"] == f"$root/{kind}/samples"
        assert made["data"]["class_path"] == fit["data"]["class_path"]


def test_windows_of_text() -> None:
    """Targets are the next characters, no window of the test half is in the other one, and nothing looks ahead."""
    data = TopicsDataModule(context=16)
    for half in (data.train, data.test):
        assert half.x.dtype == torch.long and torch.equal(half.x[:, 1:], half.y[:, :-1])
        assert torch.equal(half.x[1:, 0], half.y[:-1, -1]) and int(half.x.min()) >= 0 and int(half.x.max()) < 96
    assert len(data.train.x) > 8 * len(data.test.x) > 8 * 1000
    text = "".join("\n" if code == 0 else chr(code + 31) for code in data.train.x[:4].flatten().tolist())
    assert "assert" in text
    torch.manual_seed(0)
    model, x = GPT(context=16, width=8, layers=2, heads=2).eval(), data.test.x[:2]
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 96
    same = (model(x) - model(changed)).abs().amax((0, 1)) < 1e-6
    assert same[:9].all() and not same[9:].any()
    with pytest.raises(ValueError, match="out-of-distribution"):
        TopicsDataModule(eval_ood=True).read("ood")


def test_permuted_copies_have_barriers_and_matching_removes_them(planted: tuple[str, Any, Any]) -> None:
    """Planted: the copies are one function; matched they are one weight vector, so nothing is lost by merging."""
    _, found, measured = planted
    single = measured["members"][0]
    assert single["accuracy"] > 0.5
    for member in measured["members"]:
        assert member == pytest.approx(single, rel=1e-5)
    for key, value in measured["ensemble"].items():  # of copies of one function
        assert value == pytest.approx(single[key], rel=1e-5)
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


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_turned_and_rotated_copies_are_matched(norm: Any, tmp_path: Path) -> None:
    """Permutations alone do not bring them back, with signs and rotations they are one weight vector."""
    torch.manual_seed(0)
    model = VisionTransformer(10, 1, size=8, patch=4, width=16, layers=1, heads=2, norm=norm)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)
    graph, network = discover_symmetries(model, data().train.x[:2]), model.state_dict()
    stream = {"layer": 1, "rms": 16}[norm]  # beside it three norms' gains, queries and values
    assert sum(g.size for g in graph.signs) == stream + 3 * 16 + 2 * 16 and len(graph.linears) == 3
    generator = torch.Generator().manual_seed(5)
    draws = (random_permutation(graph, generator=generator), random_signs(graph, generator=generator))
    moved = fold_norms(graph, apply_signed(graph, SignedPermutation(*draws), network))
    moved = apply_linear(graph, random_linear(graph, generator=generator, std=0.0, folded=True), moved)
    store = SampleStore.create(tmp_path / "samples", architecture="vit", method="none")
    store.append(stack_states([network, moved]), chain=range(2), step=[0, 0])
    given: Any = (model, data(), tmp_path / "samples")
    found = match(
        tmp_path / "matching", *given, ["weights", "signed", "rotated", "straight_through_rotated"], images=100
    )
    found.save(tmp_path / "matching")
    (plain,), (signed,), (rotated,) = (
        found.results["methods"][m]["distances"] for m in ("weights", "signed", "rotated")
    )
    assert rotated < 1e-3 < signed < plain
    paths = measure(tmp_path / "barriers", *given, tmp_path / "matching", points=3, statistics=200, held_out=60).results
    paths = paths["methods"]
    assert list(paths["rotated"]["paths"]) == ["none"]
    for path in (paths[method]["paths"]["none"][0]["loss"] for method in paths):
        assert path[2] == pytest.approx(path[0], rel=1e-4)  # the second network computes the same
    plain, rotated = (paths[method]["paths"]["none"][0]["loss"] for method in ("weights", "rotated"))
    assert rotated[1] == pytest.approx(rotated[0], rel=1e-4) and plain[1] != pytest.approx(plain[0], rel=1e-2)


def test_corrected_midpoints(planted: tuple[str, Any, Any]) -> None:
    """Unmatched midpoints gain from fresh statistics; REPAIR differs where a hidden layer is not normalized."""
    kind, _, measured = planted
    paths = measured["methods"]["none"]["paths"]
    uncorrected, fresh = (sum(p["tempered_barrier"] for p in paths[name]) for name in ("none", "batchnorm"))
    assert fresh < uncorrected
    assert (paths["repair"] == paths["batchnorm"]) == (kind == "resnet")


def test_measurements_agree_with_the_library(trained: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """One cell of each kind against the barriers of the alignment room, which pass over the data on their own."""
    out, results = trained
    found = results["vgg"]["methods"]["activations"]
    members = Members(architecture("vgg"), data(), out / "vgg" / "samples", "cpu")
    model, test = members.model, members.test
    aligned = members.matched(Outcome.load(out / "vgg" / "matching").results["moves"]["activations"])
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
    assert found["paths"]["none"][2]["temperature"][0] == pytest.approx(tuned.temperature, rel=1e-4)
    average = reestimate_batchnorm(model, mean_state(aligned), statistics)
    assert found["mean"]["batchnorm"]["loss"] == pytest.approx(mean_loss(model, average, part, cross_entropy), rel=1e-5)


def test_report_shows_what_was_measured(trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path) -> None:
    out, results = trained
    report(tmp_path, "rebasin/fashion-small", {kind: out / kind / "barriers" for kind in KINDS}, *KINDS)
    markdown = (tmp_path / "report.md").read_text()
    for kind in KINDS:
        methods = results[kind]["methods"]
        for method in methods.values():
            values = [path["barrier"] for path in method["paths"]["batchnorm"]]
            assert f" {sum(values) / 3:.2f} " in markdown
        assert f"{100 * methods['universe']['mean']['repair']['accuracy']:.1f}" in markdown
    figures = list(tmp_path.glob("*.png"))
    assert len(figures) == 3 and all(f"({figure.name})" in markdown for figure in figures)
    for sentence in load_table(SMALL).claims.values():
        assert sentence in markdown
    with pytest.raises(ConfigError, match="none of the networks"):
        report(tmp_path, "rebasin/fashion-small", {"vgg": out / "vgg" / "barriers"}, "vgg", "wide")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 1}, "odd and 3 at least"),
        ({"points": 4}, "odd and 3 at least"),
        ({"held_out": 0}, "held_out is 0"),
        ({"held_out": 160}, "held_out is 160"),
        ({"statistics": 401, "held_out": 60}, "401 training images are asked for, but there are 400"),
        ({"count": 1}, "holds 1: train 2 at least"),
        ({"count": 2}, "a matching of other networks"),
    ],
)
def test_arguments_that_make_no_sense(
    options: dict[str, int], message: str, trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    out, count = trained[0] / "resnet", options.pop("count", 0)
    samples = out / "samples"
    if count:
        samples = tmp_path / "few"
        few = SampleStore.create(samples, architecture="ResNet", method="none")
        whole = SampleStore.open(out / "samples")
        few.append(stack_states([whole[k] for k in range(count)]), chain=range(count), step=[0] * count)
    with pytest.raises((ValueError, FileError), match=message):
        measure(tmp_path / "b", architecture("resnet"), data(), samples, out / "matching", **options)


def test_what_was_cut_goes_on(trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path) -> None:
    """A matching method by method, barriers pair by pair."""
    out = trained[0] / "resnet"
    given: Any = (architecture("resnet"), data(), out / "samples")

    def matching(folder: Path) -> Outcome:
        return match(folder, *given, list(METHODS), images=100, batch_size=50, epochs=1)

    def barriers(folder: Path) -> Outcome:
        return measure(folder, *given, out / "matching", points=3, statistics=200, held_out=60)

    for name, command in (("matching", matching), ("barriers", barriers)):
        assert assert_goes_on(command, tmp_path / name).results == Outcome.load(out / name).results
    with pytest.raises(FileError, match="other options"):
        measure(out / "barriers", *given, out / "matching", points=5, statistics=200, held_out=60)


def planted_results(narrow: float, wide: float, repaired: float, control: float, other: float) -> dict[str, Any]:
    """Barriers of one method and the control: uncorrected 1, with corrected statistics as they are given."""

    def found(barrier: float) -> dict[str, Any]:
        def paths(*values: float) -> list[dict[str, float]]:
            return [{"barrier": v, "tempered_barrier": v} for v in values]

        corrected = paths(barrier, barrier, other * barrier)
        matched = {"none": paths(1.0, 1.0, 1.0), "batchnorm": corrected, "repair": paths(*[repaired] * 3)}
        unmatched = {name: paths(*[control] * 3) for name in matched}
        methods = {"none": {"paths": unmatched}, "weights": {"paths": matched}}
        return {"pairs": [[0, 1], [0, 2], [1, 2]], "methods": methods}

    return {"a": found(narrow), "b": found(wide)}


@pytest.mark.parametrize("holds", [True, False])
def test_claims_are_answered_from_the_numbers(holds: bool) -> None:
    names = ("width", "correction", "permutation", "reference")
    claims = dict.fromkeys(names, "A sentence.")
    networks = planted_results(0.4, 0.2, 0.3, 0.9, 1.0) if holds else planted_results(0.4, 0.5, 0.41, 0.3, 1.5)
    found = answered(claims, ANSWERS, networks, "a", "b")
    word = "all" if holds else "none"
    verdicts = {name: answer.verdict for name, answer in found.items()}
    assert verdicts == {name: f"Held in {word} of {1 if name == 'width' else 2} cases" for name in names}
    assert ("weights 0.40 → 0.20" if holds else "weights 0.47 → 0.58") in found["width"].evidence
    assert ("weights 70 %" if holds else "weights 59 %") in found["correction"].evidence
    assert ("0.20 to 0.20 and 0.20" if holds else "0.50 to 0.50 and 0.75") in found["reference"].evidence
    mixed = planted_results(0.4, 0.2, 0.3, 0.3, 1.0)
    assert answered({"permutation": ""}, ANSWERS, mixed, "a", "b")["permutation"].verdict == "Held in 1 of 2 cases"
    with pytest.raises(ConfigError, match="no answer to 'weather'"):
        answered({"weather": "It rains."}, ANSWERS, networks, "a", "b")


def test_claims_about_learned_matching_are_answered() -> None:
    """Of kinds that have the methods; low is below a tenth of the barrier without any matching."""
    networks = planted_results(0.4, 0.2, 0.3, 2.0, 1.0)
    for name, barrier in (("straight_through_signed", 0.5), ("straight_through_rotated", 0.05)):
        paths = [{"barrier": value, "tempered_barrier": value} for value in (barrier, barrier, 3 * barrier)]
        networks["b"]["methods"][name] = {"paths": {"none": paths}}
    found = answered(dict.fromkeys(("learned", "learned_rotations", "low"), ""), ANSWERS, networks, "", "")
    rotations, low = found["learned_rotations"], found["low"]
    assert rotations.verdict == "Held in all of 3 cases" and "b: 0.833 → 0.083" in rotations.evidence
    assert low.verdict == "Held in all of 2 cases" and "b: 2.000 → 0.050" in low.evidence
    assert found["learned"].evidence.endswith(": ")


def test_losses_that_are_not_finite_count_as_infinite() -> None:
    networks = planted_results(0.4, 0.2, 0.3, 0.9, 1.0)
    networks["b"]["methods"]["weights"]["paths"]["batchnorm"][0]["barrier"] = None
    assert "weights 0.40 → inf" in answered({"width": ""}, ANSWERS, networks, "a", "b")["width"].evidence
    score = {"loss": 1.0, "accuracy": 1.0, "temperature": 1.0, "tempered_loss": 1.0}
    for loss in (math.inf, math.nan):
        path = path_scores([score, score | {"loss": loss}, score])
        assert path["barrier"] == math.inf and path["tempered_barrier"] == 0
        with pytest.raises(ValueError, match="train them again"):
            path_scores([score | {"loss": loss}, score, score])
