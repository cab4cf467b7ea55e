"""Curvature, mode, evidence and predictive on two processes equal those on one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from laplace_oracles import convolutional, data
from processes import side_by_side

from tu_symmetry.laplace.linearized import LinearizedLaplace

WHOLE = slice(None)
SHARES = (slice(0, 3), slice(3, None))  # of different sizes, and numbers of batches
CASES: list[tuple[str, dict[str, Any]]] = [
    ("classification", {"curvature": "kfac", "kfac_approx": "reduce", "evaluate_at": "map"}),
    ("classification", {"curvature": "last_layer"}),
    ("classification", {"curvature": "full", "parameters": ["3", "7"], "evaluate_at": "map"}),
    ("regression", {"curvature": "diag", "evaluate_at": "map"}),
    ("regression", {"curvature": "last_layer"}),
]


def values(share: slice) -> list[float]:
    found = []
    for kind, options in CASES:
        x, y = data(2, 5, 5, outputs=3, kind=kind)
        own = [(a, b) for a, b in zip(x[share].split(2), y[share].split(2), strict=True)]
        la = LinearizedLaplace(convolutional(), kind, prior="per_layer", **options).fit(own)  # type: ignore[arg-type]
        found += [float(la.summary.samples), la.summary.loss, la.log_marginal_likelihood()]
        if la.evaluate_at == "map":
            found.append(la.optimize_evidence().log_marginal_likelihood)
        found += [row.precision for row in la.report()] + la.function_covariance(x[:2])[1].flatten().tolist()
        found += la.theta.tolist()
    return found


def joint(share: slice) -> list[float]:
    """The joint optimum by the solver in the span of directions, and what held-out data choose."""
    found: list[float] = []
    for kind, memory, options in (  # linearized once, or in every product
        ("classification", 1 << 30, {"prior": "per_layer"}),
        ("regression", 0, {"prior": "single", "curvature": "last_layer"}),
    ):
        x, y = data(2, 5, 5, outputs=3, kind=kind)
        own = [(a, b) for a, b in zip(x[share].split(2), y[share].split(2), strict=True)]
        la = LinearizedLaplace(convolutional(), kind, **options).fit(own)  # type: ignore[arg-type]
        result = la.optimize_evidence(memory=memory)
        assert result.converged
        found += [result.log_marginal_likelihood, result.gap, *la.log_precision.tolist(), *la.theta.tolist()]
        found.append(la.calibrate(own).sharpness)
        calibration = la.calibrate(own, sharpen=False)
        found += [calibration.temperature, calibration.calibrated.nll, float(calibration.samples)]
        surely = la.calibrate(own, standard_errors=2.0, sharpen=False)
        vacuous = share == WHOLE and kind == "classification" and not 0 < surely.temperature < 100
        assert not vacuous, "that of the highest gain, or none"
        found += [surely.temperature, surely.standard_error]
    return found


def message(share: slice) -> str:
    """What a process says that has this share of nothing but the first samples."""
    x, y = data(2, 5, 5, outputs=3)
    loader = [(x[share], y[share])] if share.start == 0 else []
    try:
        LinearizedLaplace(convolutional(), prior="single").fit(loader)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def worker(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)  # no port, which another process could take meanwhile
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {"values": values(SHARES[rank]), "joint": joint(SHARES[rank]), "message": message(SHARES[rank])}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still runs would abort the interpreter on its way out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes found."""
    folder = tmp_path_factory.mktemp("processes")
    side_by_side(worker, folder, count=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_equal_one(found: list[dict[str, Any]]) -> None:
    expected = values(WHOLE)
    for own in found:
        assert own["values"] == pytest.approx(expected, rel=1e-6, abs=1e-7)
    apart = values(SHARES[0])
    assert apart != pytest.approx(expected, rel=1e-2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_joint_optimum_of_two_processes_is_that_of_one(found: list[dict[str, Any]]) -> None:
    expected = joint(WHOLE)
    for own in found:
        assert own["joint"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert joint(SHARES[0]) != pytest.approx(expected, rel=1e-2)


def test_a_process_without_data_stops_all_with_a_message(found: list[dict[str, Any]]) -> None:
    assert "another process" in found[0]["message"]
    assert "no samples" in found[1]["message"]
