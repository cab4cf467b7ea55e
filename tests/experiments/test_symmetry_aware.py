"""The recipes of arXiv 2310.08287's main table: rows, scores, claims, bad input, and the small one from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from drawn import normal
from recipe_runs import (
    Typed,
    assert_goes_on,
    commands_of,
    plant_cifar100,
    plant_images,
    small_copy,
    typed_commands,
)
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from tu_symmetry.cli import main
from tu_symmetry.datamodules import IDXDataModule
from tu_symmetry.datamodules.planted import plant_tiny_imagenet
from tu_symmetry.experiments.symmetry_aware import SmallLeNet, SWAGSchedule, report, residual_network
from tu_symmetry.experiments.symmetry_aware.evaluation import (
    Judge,
    Networks,
    _networks,
    classwise_calibration_error,
    evaluate,
    member_probabilities,
    mutual_information,
    scores,
)
from tu_symmetry.experiments.symmetry_aware.report import ANSWERS
from tu_symmetry.metrics.functional import largest_weights, pairwise_mutual_information, removal
from tu_symmetry.metrics.functional.discrepancy import weight_vectors
from tu_symmetry.metrics.functional.two_sample import vectors_test
from tu_symmetry.posterior.draws import network_draws
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, stack_states
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.functions import build_parser
from tu_symmetry.tables.report import answered

RECIPES = Path(__file__).parents[2] / "recipes" / "symmetry_aware"
FOLDERS = sorted(p.parent for p in RECIPES.rglob("table.yaml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=[f.name for f in FOLDERS])
def test_the_rows_are_the_papers(folder: Path) -> None:
    table = load_table(folder)
    assert set(table.claims) == set(ANSWERS)
    evaluation = build_parser().parse_args(commands_of(folder)["evaluation"].words).command.init_args
    methods = {"dropout", "swag", "laplace", "vibnn"}
    methods -= {"tinyimagenet": {"vibnn"}, "cifar10-frn": {"dropout"}}.get(folder.name, set())
    chain = {"hmc"} if "mnist" in folder.name else set()
    assert set(evaluation.one_mode) == methods | {"sghmc"} | chain
    assert set(evaluation.multi_mode) == methods | {"ensemble"}
    assert all(len(runs) == 3 - 2 * (method in chain) for method, runs in evaluation.one_mode.items())
    assert all(len(evaluation.multi_mode[m]) == 10 for m in methods)
    names = {c.name for c in table.commands}
    used = [str(p) for runs in (evaluation.one_mode | evaluation.multi_mode).values() for p in runs]
    assert {Path(p).name for p in used} <= names and evaluation.num_samples == 100
    (own,) = [c for c in table.commands if c.name == "evaluation"]
    assert {Path(p).name for p in used} <= set(own.needs)
    assert (folder / "README.md").is_file()


@pytest.mark.filterwarnings("ignore:Metric .FPR95. will save")
def test_scores_by_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(5, 200, 3, generator=generator)).softmax(-1)
    outside = {n: torch.randn(5, 80, 3, generator=generator).softmax(-1) for n in ("a", "b")}
    y = probs.mean(0).argmax(-1)
    y[:60] = (y[:60] + 1) % 3
    found = scores(probs, y, outside, resamples=50)
    assert found["accuracy"][0] == pytest.approx(0.7)
    one_hot = torch.eye(3)[y]
    assert found["brier"][0] == pytest.approx(float((probs.mean(0) - one_hot).square().sum(-1).mean()), abs=1e-5)
    label = [0] * 200 + [1] * 80
    aupr, fpr = [], []
    for q in outside.values():
        score = torch.cat([1 - probs.mean(0).amax(-1), 1 - q.mean(0).amax(-1)])
        aupr.append(average_precision_score(label, score))
        threshold = score[200:].sort().values[int(0.05 * 80)]
        fpr.append(float((score[:200] >= threshold).float().mean()))
    assert found["aupr"][0] == pytest.approx(sum(aupr) / 2, abs=1e-5)
    assert found["fpr95"][0] == pytest.approx(sum(fpr) / 2, abs=0.05)
    assert found["id_mi"][0] == pytest.approx(float(mutual_information(probs).mean()))
    for value, low, high in found.values():
        assert low <= value + 0.05 and value - 0.05 <= high


def test_ace_is_the_mean_gap_of_each_class_in_bins_of_equal_numbers() -> None:
    probs = normal(60, 4).softmax(-1)
    targets = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0)).flatten()
    gaps = []
    for c in range(4):
        ranked = sorted(zip(probs[:, c].tolist(), (targets == c).tolist(), strict=True))
        bins = [ranked[20 * k : 20 * (k + 1)] for k in range(3)]
        gaps += [abs(sum(p - hit for p, hit in part)) / 20 for part in bins]
    assert classwise_calibration_error(probs, targets, 3) == pytest.approx(sum(gaps) / 12, rel=1e-6)
    sure = torch.eye(4)[targets]
    assert classwise_calibration_error(sure, targets) == 0 < classwise_calibration_error(sure, (targets + 1) % 4)


def test_rates_of_swag_are_those_of_its_paper() -> None:
    """``schedule`` in the authors' run script: (t <= 0.5) 1, (t <= 0.9) linear, then the ratio."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    schedule = SWAGSchedule(optimizer, start=20, final=0.2)
    for epoch in range(30):
        t = epoch / 20
        factor = 1.0 if t <= 0.5 else 1.0 - 0.8 * (t - 0.5) / 0.4 if t <= 0.9 else 0.2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * factor)
        optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match="final in"):
        SWAGSchedule(optimizer, start=20, final=0.0)


@pytest.mark.parametrize("name", ["cifar10", "cifar10-frn", "cifar100"])
def test_variational_networks_have_the_full_bound_and_the_prior_of_the_others(name: str) -> None:
    content = commands_of(RECIPES / name)["vibnn_0"].content["routine"]
    made = content["model"]["init_args"]["core_model"]["init_args"]
    layers = [m for m in residual_network(**made).modules() if hasattr(m, "prior_sigma_1")]
    assert content["loss"]["init_args"]["kl_weight"] == pytest.approx(len(layers) / 50_000)  # its mean over layers
    sghmc = commands_of(RECIPES / name)["sghmc_0"].content["trainer"]["callbacks"][1]["init_args"]
    assert {m.prior_sigma_1 for m in layers} == {0.2} and sghmc["prior_precision"] == pytest.approx(1 / 0.2**2)


def test_probabilities_are_those_of_each_network() -> None:
    torch.manual_seed(0)
    networks = [SmallLeNet().eval() for _ in range(3)]
    x = torch.randn(7, 1, 28, 28)
    stack = stack_states([n.state_dict() for n in networks])
    found = member_probabilities(SmallLeNet(), stack, x, batch_size=4)
    with torch.no_grad():
        torch.testing.assert_close(found, torch.stack([n(x).softmax(-1) for n in networks]))


def row(quality: float, performance: float, homogeneity: float = 0.01) -> dict[str, Any]:
    test = {"value": quality, "interval": [quality - 0.01, quality + 0.01]}
    better = ("accuracy", "aupr", "id_mi", "ood_mi")
    found = {n: [performance, performance - 0.01, performance + 0.01] for n in better}
    found |= {
        n: [1 - performance, 0.99 - performance, 1.01 - performance]
        for n in ("ece", "ace", "top_label_ace", "brier", "fpr95")
    }
    return found | {"mmd": test, "ns": dict(test), "homogeneity": {"p_value": homogeneity}}


def planted() -> dict[str, Any]:
    rows = {f"{mode}/{m}": [row((mode == "one mode") - 0.1 * k, 0.5 + 0.1 * (mode != "one mode") + 0.01 * k)]
            for mode in ("one mode", "several modes") for k, m in enumerate(("a", "b", "c"))}  # fmt: skip
    rows["several modes/ensemble"] = [row(-0.5, 0.65, 0.5)]
    d = {"id_mean": 1.0, "id_dispersion": 0.1, "ood_mean": 2.0, "ood_dispersion": 0.5}
    d |= {"correlation": 0.2, "correlation_interval": [0.1, 0.3]}
    return {"rows": rows, "diversity": {"set": d}, "homogeneity": {"p_value": 0.4}}


def test_claims_hold_and_fail_by_the_evidence() -> None:
    found = planted()
    given = answered(dict.fromkeys(ANSWERS, ""), ANSWERS, found)
    for name in ("calibration", "detection", "diversity", "dispersion", "weakly_correlated", "corollary"):
        assert given[name].verdict == "holds", name
    assert given["correlation"].verdict == "fails"  # performance was made a function of quality
    assert given["ranking"].verdict == "fails"  # NS was made equal to MMD
    turned = planted()
    turned["rows"]["several modes/a"][0]["ns"] = {"value": 9.0, "interval": [8.9, 9.1]}
    assert ANSWERS["ranking"](turned).verdict == "holds"  # 3 of 21 pairs
    turned["rows"]["one mode/a"][0]["ns"] = {"value": 9.5, "interval": [9.4, 9.6]}
    turned["rows"]["one mode/b"][0]["ns"] = {"value": 9.4, "interval": [9.3, 9.5]}
    assert ANSWERS["ranking"](turned).verdict == "undecided"  # 1 of them
    turned["rows"]["several modes/b"] = [row(1.0, 0.2)]
    turned["diversity"]["set"] |= {"ood_dispersion": 0.01, "correlation": 0.9, "correlation_interval": [0.8, 0.95]}
    turned["rows"]["one mode/b"][0]["homogeneity"]["p_value"] = 0.5
    for name in ("calibration", "detection", "dispersion", "weakly_correlated", "corollary"):
        assert ANSWERS[name](turned).verdict == "fails", name
    turned["diversity"]["set"]["correlation_interval"] = [None, None]  # of three networks; JSON has no NaN
    assert ANSWERS["weakly_correlated"](turned).verdict == "undecided"


@pytest.mark.parametrize("options", [{}, {"filter_response": True}])
def test_residual_networks_have_one_architecture(options: dict[str, bool]) -> None:
    """Draws of dropout and of Bayesian layers fit the plain network."""
    torch.manual_seed(0)
    plain = residual_network(20, 10, **options)  # type: ignore[arg-type]
    shapes = {n: t.shape for n, t in plain.state_dict().items()}
    x = torch.randn(2, 3, 32, 32)
    dropped, bayesian = residual_network(20, 10, 0.2, **options), residual_network(20, 10, bayesian=True, **options)  # type: ignore[arg-type]
    if options:  # dropout before SiLU, which does not commute with a mask's factor
        with pytest.raises(ValueError, match="compute something else"):
            network_draws(dropped.eval(), 2, inputs=x)
    for made in [bayesian] if options else [dropped, bayesian]:
        drawn = network_draws(made.eval(), 2, inputs=x)
        assert {n: t.shape[1:] for n, t in drawn.states.items()} == shapes
        assert torch.isfinite(member_probabilities(plain, drawn.states, x)).all()


def store(folder: Path, states: list[dict[str, Tensor]]) -> Path:
    made = SampleStore.create(folder / "samples", architecture="SmallLeNet", method="test")
    made.append(states, step=range(len(states)))
    return folder


def test_bad_input_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    data = IDXDataModule(root=tmp_path)  # its files are not there: nothing may be read before the checks
    model: nn.Module = SmallLeNet()
    good = store(tmp_path / "good", [SmallLeNet().state_dict() for _ in range(3)])
    other = store(tmp_path / "other", [SmallLeNet(hidden=5).state_dict() for _ in range(3)])
    single = store(tmp_path / "single", [SmallLeNet().state_dict()])
    for runs, options, error, message in (
        ({"a": [good]}, {"ood": {}}, ValueError, "no out-of-distribution set"),
        ({"a": [other]}, {}, SampleFileError, "another architecture"),
        ({"a": [good]}, {"num_samples": 5}, ValueError, "holds 3 networks, 5 are wanted"),
        ({"a": [single]}, {"num_samples": 1}, ValueError, "at least two"),
        ({"a": []}, {}, ValueError, "without a run"),
        ({"a": [tmp_path / "nowhere"]}, {}, SampleFileError, "no sample store"),
    ):
        given: dict[str, Any] = {"ood": {"x": data}, "num_samples": 3, **options}
        with pytest.raises(error, match=message):
            evaluate(tmp_path / "out", model, data, good, runs, {}, **given)  # type: ignore[arg-type]


def judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Judge, Networks, Networks, dict[str, Any]]:
    """A row of two runs and a reference, three networks at a time, and what is removed."""
    torch.manual_seed(0)
    runs = [store(folder / f"run_{k}", [SmallLeNet().state_dict() for _ in range(4)]) for k in range(2)]
    there = store(folder / "reference", [SmallLeNet().state_dict() for _ in range(7)])
    model = SmallLeNet().eval()
    graph = discover_symmetries(model, torch.randn(2, 1, 28, 28))
    monkeypatch.setattr("tu_symmetry.experiments.symmetry_aware.evaluation._NETWORKS", 3)
    monkeypatch.setattr("tu_symmetry.experiments.symmetry_aware.evaluation._POINTS", 4)
    row, reference = (_networks(f, n, model.state_dict()) for f, n in ((runs, 8), ([there], None)))
    judge = Judge(model, graph, torch.device("cpu"), 5, 0, folder / "forms")
    forms = {"mmd": None, "ns": removal("paper"), "ns_aligned": removal("min_mass", align_to=reference[0])}
    judge.formed(reference, forms["ns_aligned"], "row")  # as a kill leaves it
    return judge, row, reference, forms


def test_networks_that_are_streamed_are_measured_as_if_all_were_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, row, reference, forms = judged(tmp_path, monkeypatch)
    sets = [stack_states([networks[k] for k in range(len(networks))]) for networks in (row, reference)]
    stack, largest = SampleStore.stack, [0]

    def counted(self: SampleStore, indices: Any, **more: Any) -> Any:
        largest[0] = max(largest[0], len(indices))
        return stack(self, indices, **more)

    monkeypatch.setattr(SampleStore, "stack", counted)
    x = torch.rand(10, 1, 28, 28)
    found, homogeneity = judge.quality(row, forms, reference, row.runs, 3), judge.homogeneity(row)
    probs, pairs, marginal = judge.probabilities(row, x), judge.pairwise(row, x), judge.marginal(row)
    assert largest == [3], "more networks were in memory"

    graph = judge.graph
    for name, form in forms.items():
        vectors = [
            weight_vectors({n: s[n] for n in judge.names})
            if form is None
            else weight_vectors(s, graph=graph, removed=form)
            for s in sets
        ]
        for suffix, sizes in (("", "given"), ("_equal", "equal")):
            generator = torch.Generator().manual_seed(3)
            options = {"bootstraps": 5, "groups": (row.runs, None), "generator": generator}
            expected = vectors_test(*vectors, sizes=sizes, **options)
            one = found[f"{name}{suffix}"]
            assert one["value"] == pytest.approx(expected.value, rel=1e-5, abs=1e-7)
            assert one["p_value"] == pytest.approx(expected.p_value)
            assert one["interval"] == pytest.approx(expected.interval, rel=1e-5, abs=1e-7)
    flat = [torch.cat([t.flatten(1) for t in v.values()], 1).double() for v in vectors]
    assert found["quotient"]["aligned_l2"] == pytest.approx(float(torch.cdist(*flat).mean()), rel=1e-5)
    torch.testing.assert_close(probs, member_probabilities(judge.model, sets[0], x))
    torch.testing.assert_close(pairs, pairwise_mutual_information(probs).double(), rtol=1e-4, atol=3e-6)
    assert homogeneity["largest"] == {
        name: {"counts": own.counts.tolist(), "index": own.index.tolist(), "p_value": own.p_value}
        for name, own in largest_weights(graph, sets[0], generator=judge.generator()).items()
    }
    layer = forms["ns"].apply(graph, sets[0])["conv1.weight"].flatten()
    assert marginal["after"][0] == pytest.approx(float(torch.quantile(layer, 0.005)), rel=1e-5)
    assert not (tmp_path / "forms" / "row").exists()


def test_canonical_forms_go_on_where_they_were_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, _, reference, forms = judged(tmp_path, monkeypatch)
    form, appended = forms["ns"], []
    append = SampleStore.append

    def cut(self: SampleStore, *given: Any, **more: Any) -> None:
        if len(appended) == 1:
            raise KeyboardInterrupt
        appended.append(append(self, *given, **more))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SampleStore, "append", cut)
        judge.formed(reference, form, "ns")
    members = judge.formed(reference, form, "ns")
    expected = form.apply(judge.graph, stack_states([reference[k] for k in range(7)]))
    for k, (found, place) in enumerate(members):
        for name in judge.names:
            torch.testing.assert_close(found.tensor(place, name), expected[name][k])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rows_of_random_networks_are_evaluated_and_reported(tmp_path: Path) -> None:
    plant_images(tmp_path / "data")
    np.savez(tmp_path / "trusted.npz", probs=np.full((100, 10), 0.1, dtype=np.float32))
    torch.manual_seed(0)

    def run(name: str) -> Path:
        return store(tmp_path / name, [SmallLeNet().state_dict() for _ in range(6)])

    def images(**options: Any) -> IDXDataModule:
        return IDXDataModule("mnist", tmp_path / "data", normalize=True, test_size=60, **options)

    one = {method: [run(f"{method}_{k}") for k in range(2)] for method in ("dropout", "swag")}
    several = one | {"ensemble": [run("ensemble")]}
    ood: Any = {name: images(eval_ood=True, ood_dataset=name, ood_size=40) for name in ("fashion_mnist", "kmnist")}
    given: dict[str, Any] = {"ood": ood, "predictive": tmp_path / "trusted.npz"}
    sizes = {"num_samples": 6, "resamples": 5, "device": "cpu"}
    folder, model = run("reference"), SmallLeNet()
    made = assert_goes_on(lambda out: evaluate(out, model, images(), folder, one, several, **given, **sizes), tmp_path)
    made.save(tmp_path / "evaluation")
    found = made.results
    assert len(found["rows"]) == 5 and len(found["rows"]["one mode/swag"]) == 2
    entry = found["rows"]["several modes/ensemble"][0]
    assert entry["ns"]["removed"] == "unit_norm, sorted by the largest weight" and entry["ns_equal"]["sizes"] == [6, 6]
    assert entry["mmd"]["interval"][0] is not None and set(found["diversity"]) == set(ood)
    assert 0 <= entry["agreement"] <= 1 and 0 < entry["total_variation"] < 0.9  # at most 1 - 1 / 10 from a uniform one
    report(tmp_path / "report", "symmetry_aware/mnist-small", tmp_path / "evaluation")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Against the trusted predictive" in text and "claims" in text
    for sentence in load_table(RECIPES / "mnist-small").claims.values():
        assert sentence in text
    for name in ("diversity.png", "discrepancy.png", "marginals.png", "largest.png"):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")


TRAINED = {  # each file once, as its first row
    (typed.recipe, typed.files): typed
    for typed in reversed(typed_commands())
    if typed.recipe.startswith("symmetry_aware/") and typed.command == "fit"
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("typed", [pytest.param(t, id=f"{t.recipe}-{t.name}") for t in TRAINED.values()])
def test_the_files_of_each_row_run_by_themselves_with_fit_and_test(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed in an empty folder: the networks are stored, and can be tested."""
    recipe = typed.recipe.partition("/")[2]

    def smaller(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: smaller(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [smaller(v) for v in value]
        return {"cycle_start": 0, "every_n_steps": 1, "every_n_epochs": 1, "arch": 20, "max_steps": 9}.get(key, value)

    if recipe == "cifar100":
        plant_cifar100(tmp_path / "data")
        monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    elif recipe == "tinyimagenet":
        plant_tiny_imagenet(tmp_path / "data", 1, 1)
    else:
        plant_images(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    typed = small_copy(typed, tmp_path / "small")
    (file,) = typed.files
    file.write_text(yaml.safe_dump(smaller(typed.content)))
    quiet = [*typed.words, "--trainer.accelerator=cpu"]
    assert main(["fit", *quiet, "--trainer.enable_progress_bar=false"]) == 0
    assert len(SampleStore.open(typed.folder / "samples")) >= 2
    capsys.readouterr()
    assert main(["test", *quiet, "--ckpt_path", str(typed.folder / "checkpoints" / "last.ckpt")]) == 0
    assert "Acc" in capsys.readouterr().out
