"""The networks, the rows and the report of the probabilistic deep image prior, on images of 8 x 8 pixels."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from recipe_runs import assert_goes_on
from torch.distributions import MultivariateNormal
from trainings import trainer

import tu_symmetry as tus
from tu_symmetry.datamodules.tomography import measured, repeated, strip_projector
from tu_symmetry.experiments.deep_image_prior import (
    UNet,
    dropout_posterior,
    linearized_posterior,
    report,
    sampled_against_exact,
    sampled_posterior,
    total_variation_prior,
)
from tu_symmetry.experiments.deep_image_prior.posteriors import one_problem, unet_priors
from tu_symmetry.experiments.deep_image_prior.report import (
    LEVELS,
    _pictures,
    calibration_table,
    orderings,
    prior_table,
)
from tu_symmetry.experiments.deep_image_prior.rows import (
    DIP,
    DIP_FITTED,
    DROPOUT,
    EVIDENCE,
    JOINT,
    ROWS,
    TV_CODE,
    TV_SEED,
    Scored,
    patch_log_density,
)
from tu_symmetry.files import FileError, read_tensors
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.routines import DeepImagePriorRoutine, Reconstructions
from tu_symmetry.tables.outcome import Outcome

RECIPES = Path(__file__).parents[2] / "recipes" / "deep_image_prior"


pytestmark = pytest.mark.filterwarnings("ignore")


def small(dropout=0.0):
    return UNet((4, 4), (2,), dropout=dropout)


def test_parameters_are_the_papers_and_the_prior_covers_all_of_convolutions_in_eight_blocks():
    model = UNet()
    sizes = [[p.numel() for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False)]
    assert [sum(own) for own in sizes] == [76_608, 297]
    walnut = UNet((128,) * 6, (4, 4, 0, 0, 0), normalize=True, sigmoid=False)
    assert sum(p.numel() for p in walnut.parameters()) == 2_973_880
    priors = unet_priors(model)
    assert [p.name for p in priors] == ["inc", "down_0", "down_1", "up_0", "up_1", "skip_0", "skip_1", "outc"]
    covered = [name for prior in priors for name in prior.parameters]
    assert sorted(covered) == sorted(name for name, p in model.named_parameters() if p.ndim > 1)
    assert sum(len(p.hyperparameters) for p in priors) + 1 == 14


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two images, two geometries, all rows."""
    root = tmp_path_factory.mktemp("dip")
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(2, 1, 8, 8, generator=generator, dtype=torch.float64) > 0.6).double()
    own = measured(truth, [3, 5], {a: strip_projector(8, a, 11, 1.1) for a in (2, 4)}, [0.1], bin_width=1.1)
    for name, dropout in (("dip", 0.0), ("dropout", 0.2)):
        module = DeepImagePriorRoutine(
            small(dropout), 4, tv_weight=1e-3, out=root / name, optimizer=lambda p: torch.optim.Adam(p, lr=0.02)
        )
        trainer(max_epochs=1).fit(module, repeated(own, 60))
    found = linearized_posterior(root / "linearized", root / "dip", small(), 1e-3, joint=True)
    found.save(root / "linearized")
    masks = dropout_posterior(root / "masks", root / "dropout", small(0.2), num_samples=200)
    masks.save(root / "masks")
    return root, found.results, masks.results


def test_scores_are_those_of_the_formula(run):
    root, found, masks = run
    every = found["rows"] + masks["rows"]
    assert sorted((r["row"], r["problem"]) for r in every) == sorted((row, i) for row in ROWS for i in range(4))
    assert all(math.isfinite(r["log_likelihood"]) for r in every)
    assert {(r["image"], r["num_angles"]) for r in every} == {(3, 2), (5, 2), (3, 4), (5, 4)}
    saved = Reconstructions.load(root / "dip")
    a = saved.problem.operator[1, : int(saved.problem.counts[1])].double()
    # singular values that are rounding count in no row
    values = torch.linalg.svdvals(a)[:100]
    gain = float((values[values > values[0] * 1e-12] ** -2).sum() / 64)
    error = saved.problem.truth[1].double().reshape(-1) - saved.images[1].double().reshape(-1)
    rows = {r["row"]: r for r in found["rows"] if r["problem"] == 1}
    for row, noise in ((DIP, 1.0), (DIP_FITTED, rows[DIP_FITTED]["noise_variance"])):
        variance = (gain * noise + 1e-6) * torch.eye(64, dtype=torch.float64)
        expected = MultivariateNormal(torch.zeros(64, dtype=torch.float64), variance).log_prob(error) / 64
        assert rows[row]["log_likelihood"] == pytest.approx(float(expected), abs=2e-3)
    assert rows[DIP_FITTED]["noise_variance"] == rows[EVIDENCE]["noise_variance"]
    assert rows[EVIDENCE]["log_evidence"] >= max(rows[TV_SEED]["log_evidence"], rows[TV_CODE]["log_evidence"]) - 1e-3
    assert rows[JOINT]["psnr"] == rows[EVIDENCE]["psnr"] and rows[JOINT]["converged"]  # the mean is the network's
    assert rows[JOINT]["log_likelihood"] != rows[EVIDENCE]["log_likelihood"]
    arrays = read_tensors(root / "linearized" / "arrays.safetensors")
    deviation = arrays[f"1.{ROWS.index(EVIDENCE)}.deviation"].reshape(-1).double()
    errors = torch.tensor(rows[EVIDENCE]["normalized_errors"], dtype=torch.float64)
    assert torch.allclose(errors * deviation, error, atol=1e-5)


def test_total_variation_of_its_prior_is_gamma_distributed(tmp_path):
    """It has degree 1: with the mean fixed, of as many degrees of freedom as pixels less one."""
    found = total_variation_prior(tmp_path, size=4, step_size=0.2, leapfrog_steps=6, num_samples=900).results
    assert found["ess"] > 100 and 0.4 < found["acceptance"] < 1
    assert abs(found["mean"] - 1) < 4 * (15 * found["ess"]) ** -0.5
    assert abs(found["variance"] - 1) < 4 * math.sqrt((2 + 6 / 15) / found["ess"])
    drawn = read_tensors(tmp_path / "arrays.safetensors")["tv"]
    assert drawn.shape == (100, 4, 4) and float(drawn.mean((1, 2)).abs().max()) < 1e-6 < float(drawn.std(0).min())


def test_the_factorized_prior_has_the_variances_of_tv_predcp_without_its_correlations(run):
    root, found, _ = run
    network, x, a, y = one_problem(Reconstructions.load(root / "dip"), 0, small())
    variances = {n.removesuffix(".variance"): v for n, v in found["hyperparameters"][TV_SEED]["0"].items()}
    isotropic = [tus.laplace.IsotropicPrior(p.parameters, name=p.name) for p in unet_priors(network)]
    la = tus.laplace.DualLaplace(network, structured=isotropic, observation=a)
    la.fit([(x, y.unsqueeze(0))])
    la.phi = torch.tensor([*(variances[p.name] for p in isotropic), 1.0], dtype=torch.float64).log()
    drawn = read_tensors(root / "linearized" / "arrays.safetensors")[f"0.{ROWS.index(TV_SEED)}.factorized"]
    assert torch.allclose(drawn.double(), la.function_samples(100, prior=True)[:, 0], atol=1e-3, rtol=1e-3)


def test_roughness_is_counted_by_hand():
    board = (-1.0) ** torch.arange(8).view(8, 1).add(torch.arange(8)).expand(3, 1, 8, 8)
    assert prior_table({"board": 5 * board + 1}, "").rows == [["board", "17.500", "5.000", "3.50"]]


def test_labels_of_color_bars_lie_inside_the_figure(tmp_path):
    """Scales whose ticks take one or two digits."""
    scales = (0.83, 0.39, 0.38, 0.245)
    line = {top: torch.full((1, 28, 28), top) for top in scales}
    _pictures(tmp_path / "a.png", [[("a", own, "gray"), ("b", own, "error")] for own in line.values()])
    assert imread(tmp_path / "a.png")[:, -1, :3].min() == 1


def test_report_has_table_figures_and_orderings(run, tmp_path):
    root, _, masks = run
    total_variation_prior(root / "tv", size=8, num_samples=8, leapfrog_steps=2).save(root / "tv")
    folders = [[root / name] for name in ("dip", "linearized", "masks")]
    Outcome({}, "", [Grid("Planted", ["", "a"], [["b", "1"]])]).save(root / "agreement")
    out = report(tmp_path, str(RECIPES / "demo"), *folders, root / "tv", root / "agreement")
    assert "Planted" in [grid.title for grid in out.tables]
    (rough,) = [grid for grid in out.tables if grid.title.startswith("Roughness")]
    assert [line[0] for line in rough.rows][::5] == ["reconstruction", "factorized"] and "acceptance" in rough.caption
    text = (tmp_path / "report.md").read_text()
    assert all(row in text for row in ROWS) and "not at hand" in text
    assert {p.stem for p in tmp_path.glob("*.png")} == {
        "images",
        "samples",
        "calibration",
        "evidence",
        "hyperparameters",
    }
    assert len(out.results["orderings"]) >= 10 and all(line in text for line in out.results["orderings"])
    # the background is where the truth of the same image is 0, whatever order the problems have
    saved = Reconstructions.load(root / "dip")
    (grid,) = [g for g in out.tables if g.title.startswith("Coverage")]
    (line,) = [line for line in grid.rows if line[0] == DROPOUT]
    inside = {True: [0, 0], False: [0, 0]}
    for entry in masks["rows"]:
        truth = saved.problem.truth[saved.problem.image.tolist().index(entry["image"])].reshape(-1).tolist()
        for value, error in zip(truth, entry["normalized_errors"], strict=True):
            inside[value == 0][0] += abs(error) <= 1.6448536
            inside[value == 0][1] += 1
    empty, other = (f"{100 * a / n:.1f}" for a, n in (inside[True], inside[False]))
    assert line[1 + LEVELS.index(0.9)].split("\n")[1] == f"{empty} / {other}"


def test_orderings_say_what_held():
    def entry(row, image, value):
        return {"row": row, "image": image, "num_angles": 5, "noise": 0.1, "log_likelihood": value, "psnr": 1.0}

    values = {DIP: 0.0, DIP_FITTED: 0.5, EVIDENCE: 0.4, TV_SEED: 0.2, TV_CODE: 0.5}
    entries = [entry(row, image, value) for row, value in values.items() for image in (0, 1)]
    text = "\n".join(orderings(entries))
    assert f"{EVIDENCE} above {DIP} by more than 0.3, 5 angles at 10 %: **held**, +0.400" in text
    assert f"{TV_SEED} above {DIP} by more than 0.3, 5 angles at 10 %: **did not hold**, +0.200" in text
    assert f"{DIP_FITTED} below {DIP}, 5 angles at 10 %: **did not hold**, -0.500" in text
    spread = [entry(EVIDENCE, 0, -0.1), entry(EVIDENCE, 1, 0.8), entry(DIP, 0, 0.0), entry(DIP, 1, 0.0)]
    (line,) = [line for line in orderings(spread) if DIP in line]
    assert "5 angles at 10 %: **not resolved (within one standard error)**, +0.350 ± 0.450" in line


def test_coverage_is_that_of_the_planted_errors():
    """Errors of a known size: twice what is stated in the background, half elsewhere; as stated in another row."""
    generator, normal = torch.Generator().manual_seed(0), torch.distributions.Normal(0.0, 1.0)
    side, images = 120, (3, 7)
    background = {k: (torch.rand(side**2, generator=generator) < 0.3 + 0.2 * (k == 7)).numpy() for k in images}
    spreads = {EVIDENCE: (2.0, 0.5), DIP: (1.0, 1.0)}
    entries = []
    for row, (empty, other) in spreads.items():
        for k in images:
            spread = torch.where(torch.from_numpy(background[k]), empty, other)
            errors = (spread * torch.randn(side**2, generator=generator)).tolist()
            entries.append({"row": row, "image": k, "normalized_errors": errors})
    grid = calibration_table(entries, background)
    assert [line[0] for line in grid.rows] == [DIP, EVIDENCE], "in the order of the rows, those that were run"
    shares = [float(background[k].mean()) for k in images]
    share = sum(shares) / len(shares)
    for line in grid.rows:
        for level, cell in zip(LEVELS, line[1:], strict=True):
            half = float(normal.icdf(torch.tensor(0.5 + level / 2)))
            inside = [float(2 * normal.cdf(torch.tensor(half / s)) - 1) for s in spreads[line[0]]]
            every = share * inside[0] + (1 - share) * inside[1]
            found = [float(text.strip(" %")) / 100 for text in cell.replace("\n", "/").split("/")]
            for value, wanted, count in zip(found, (every, *inside), (1.0, share, 1 - share), strict=True):
                error = math.sqrt(wanted * (1 - wanted) / (count * len(images) * side**2))
                assert abs(value - wanted) < 4.5 * error + 6e-4, (line[0], level, cell)
    assert f"{100 * LEVELS[0]:g} %" in grid.header[1] and "true value is 0 / all others" in grid.caption
    none = {k: torch.zeros(side**2, dtype=torch.bool).numpy() for k in images}
    assert "– / " in calibration_table(entries, none).rows[0][1], "an image without background"


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("take more", lambda out, root: dropout_posterior(out, root / "dropout", small(0.2), num_samples=64)),
        ("no dropout", lambda out, root: dropout_posterior(out, root / "dropout", small(), num_samples=70)),
        ("UNet", lambda out, root: unet_priors(torch.nn.Conv2d(1, 1, 1))),
        ("singular", lambda out, root: sampled_posterior(out, root / "dip", small(), num_samples=100, patches=[10])),
    ],
)
def test_what_cannot_work_is_refused(match, call, run, tmp_path):
    with pytest.raises((TypeError, ValueError), match=match):
        call(tmp_path, run[0])


@pytest.mark.slow
def test_sampled_posterior_agrees_with_the_exact_one(run, tmp_path):
    root, _, _ = run
    found = sampled_posterior(
        tmp_path, root / "dip", small(), num_steps=2, num_probes=4, num_samples=400, rank=10, max_iterations=200,
        patches=[1, 2], tv_weight={2: 1e-3, 4: 1e-2}, hyperprior_probes=8, noise_correction=False,
    ).results  # fmt: skip
    assert {entry["patch"] for entry in found["rows"]} == {1, 2} and len(found["rows"]) == 40
    assert {entry["row"] for entry in found["rows"]} == {DIP, DIP_FITTED, EVIDENCE, TV_SEED, TV_CODE}
    assert len({found["hyperparameters"][row]["1"]["inc.lengthscale"] for row in (EVIDENCE, TV_SEED, TV_CODE)}) == 3
    saved = Reconstructions.load(root / "dip")
    network, x, a, y = one_problem(saved, 1, small())
    la = tus.laplace.DualLaplace(network, structured=unet_priors(network), observation=a)
    la.fit([(x, y.unsqueeze(0))])
    for row in (EVIDENCE, TV_SEED):
        chosen = found["hyperparameters"][row]["1"]
        la.phi = torch.tensor([chosen[name] for name in la.hyperparameters], dtype=torch.float64).log()
        exact = la.function_covariance()[1].diagonal().sqrt().view(1, 8, 8).float()
        drawn = read_tensors(tmp_path / "arrays.safetensors")[f"1.{ROWS.index(row)}.deviation"]
        assert float((drawn / exact - 1).abs().max()) < 4.5 / math.sqrt(2 * 400)


def test_rows_that_were_cut_go_on(run, tmp_path):
    """Image by image, and the sampled evidence row by row, whose steps are kept under a name of their options."""
    root, found, _ = run

    def linearized(out):
        return linearized_posterior(out, root / "dip", small(), 1e-3, joint=True)

    def masks(out):
        return dropout_posterior(out, root / "dropout", small(0.2), num_samples=200)

    def sampled(out, tv_weight=None):
        options = {"num_steps": 3, "num_probes": 2, "num_samples": 20, "rank": 2, "patches": [1], "refresh_every": 1}
        return sampled_posterior(out, root / "dip", small(), tv_weight=tv_weight, linearized_steps=5, **options)

    assert assert_goes_on(linearized, tmp_path / "a").results == found
    assert_goes_on(masks, tmp_path / "b")
    assert len(assert_goes_on(sampled, tmp_path / "c").results["rows"]) == 12
    assert len(list((tmp_path / "c").rglob("*.steps.pt"))) == 4
    with pytest.raises(FileError, match="other options"):
        sampled(tmp_path / "c", 1e-3)


def test_samples_at_full_rank_agree_with_what_is_exact(run, tmp_path):
    """The gradients, their integral, the determinant, and the density of patches."""
    options = {"ranks": [22], "num_probes": 40, "num_repeats": 8, "num_samples": 1024, "patches": [1, 2]}
    gradients, densities = sampled_against_exact(tmp_path, run[0] / "dip", small(), **options).tables
    assert [line[0] for line in gradients.rows][8:10] == ["log_noise_variance", "log evidence gained"]
    for name, exact, sampled in gradients.rows[:-2]:
        mean, error = map(float, sampled.split(" ± "))
        assert abs(mean - float(exact)) < 5 * error + 0.01 * abs(mean), name
    gain = float(gradients.caption.split()[-5])
    assert float(gradients.rows[-3][1]) == pytest.approx(gain, rel=0.05) and gain > 1
    *scores, determinants, _ = densities.rows
    for (_, exact, *sampled), tolerance in zip(scores, (1e-3, 1e-3, 0.06, 0.01), strict=True):
        for cell in sampled[::2]:  # whole
            assert float(cell.split(" ")[0]) == pytest.approx(float(exact), rel=tolerance)
    plain, whole, parts, jittered, _ = map(float, determinants[1:])
    assert whole == parts == pytest.approx(plain, rel=1e-4) and jittered > plain


def test_density_of_patches_without_samples_is_that_of_independent_pixels():
    error = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    none = torch.zeros(0, 35, dtype=torch.float64)
    expected = float((-0.5 * (math.log(2 * math.pi * 0.3) + error.square() / 0.3)).mean())
    for side in (1, 2, 10):
        assert patch_log_density(error, none, side, 0.3) == pytest.approx(expected)


def test_the_inner_part_is_scored_in_whole_patches_with_halved_covariances():
    generator = torch.Generator().manual_seed(0)
    error, drawn = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((1, 9, 9), (200, 81)))
    found = patch_log_density(error, drawn, 2, 0.1, scored=Scored((3, 6), reweighted=True))
    total, index = 0.0, torch.arange(81).view(9, 9)
    for top in (2, 4):  # from 3 // 2 patches on, up to row 6
        for left in (2, 4):
            own = index[top : top + 2, left : left + 2].reshape(-1)
            covariance = drawn[:, own].mT @ drawn[:, own] / 200
            covariance = 0.5 * (covariance + torch.diag(covariance.diagonal())) + 0.1 * torch.eye(4).double()
            total += float(MultivariateNormal(torch.zeros(4).double(), covariance).log_prob(error.reshape(-1)[own]))
    assert found == pytest.approx(total / 16, rel=1e-6)


def test_masks_are_scored_in_patches_as_in_whole_images(run, tmp_path):
    """A patch as large as the image is the image."""
    root, _, _ = run
    model = small(dropout=0.2)
    whole = dropout_posterior(tmp_path / "a", root / "dropout", model, 300, problems=2).results["rows"]
    parts = dropout_posterior(tmp_path / "b", root / "dropout", model, 300, problems=2, patches=[8]).results["rows"]
    for one, other in zip(whole, parts, strict=True):
        assert one["log_likelihood"] == pytest.approx(other["log_likelihood"], rel=0.02)  # divided by n - 1 and n
        assert (one["psnr"], one["ssim"]) == pytest.approx((other["psnr"], other["ssim"]), rel=1e-5)
