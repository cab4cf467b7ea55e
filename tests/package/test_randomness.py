"""No public constructor or call moves the global random states of torch, its CUDA devices, NumPy or Python.

Trainings with callbacks are in ``tests/callbacks/test_onlookers.py``, metrics on batches in ``tests/metrics``.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import public
import pytest
import torch
from lightning.pytorch import LightningModule
from randomness import moved, seed_all
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tu_symmetry as tus
from tu_symmetry.callbacks import LastCheckpoint, PosteriorDraws, ProgressLines, TrueTemperature
from tu_symmetry.datamodules import CIFARDataModule, DigitsDataModule, IDXDataModule, TomographyDataModule
from tu_symmetry.routines import SWAG

pytestmark = pytest.mark.filterwarnings("ignore")


class Augmented(Dataset[Any]):
    """Points that are read with noise from every global random state."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(4) + np.random.standard_normal() + random.random(), index % 3


def loader() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


def plain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@functools.cache
def graph() -> tus.SymmetryGraph:
    return tus.discover_symmetries(net(), torch.zeros(2, 4))


@functools.cache
def fitted() -> tus.LinearizedLaplace:
    return tus.LinearizedLaplace(plain()).fit(loader())


def states() -> list[dict[str, Tensor]]:
    return [{n: t + k for n, t in net().state_dict().items()} for k in (0, 1)]


def used(laplace: tus.LinearizedLaplace) -> Any:
    """Everything that an approximation is asked for, over data that come with noise."""
    laplace.optimize_evidence(max_iterations=2)
    laplace.log_marginal_likelihood(loader())
    laplace.calibrate(loader(), held_out=False)
    x = torch.ones(3, 4)
    for link in ("probit", "mc"):
        laplace.predictive(x, link_approx=link)
    laplace.function_samples(x, 2)
    laplace.report()
    return tus.laplace.LaplaceMixture([laplace, laplace]).predictive(x)


class Module(LightningModule):
    """A network inside of a routine."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net()


def identity_element() -> tus.symmetry.SignedPermutation:
    return tus.symmetry.SignedPermutation(tus.symmetry.identity_permutation(graph()), {})


CALLS: dict[str, Callable[[Path], Any]] = {
    "register_rule": lambda p: tus.register_rule("randomness.nothing"),
    "discover_symmetries": lambda p: tus.discover_symmetries(net(), torch.zeros(2, 4)),
    "verify_symmetries": lambda p: tus.verify_symmetries(graph(), net(), torch.zeros(2, 4)),
    "load_state": lambda p: tus.load_state(Module()),
    "certify": lambda p: tus.certify(graph(), *states()),
    "require_certificate": lambda p: tus.symmetry.require_certificate(
        tus.symmetry.Certificate(0.0, 1.0, torch.float32, 3), "it"
    ),
    "move_optimizer_state": lambda p: tus.move_optimizer_state(
        graph(), torch.optim.SGD(net().parameters(), lr=0.1), {}, permutation=tus.symmetry.identity_permutation(graph())
    ),
    "identity_permutation": lambda p: tus.symmetry.identity_permutation(graph()),
    "random_permutation": lambda p: tus.random_permutation(graph()),
    "random_scale": lambda p: tus.random_scale(graph()),
    "random_signs": lambda p: tus.random_signs(graph()),
    "apply_signed": lambda p: tus.symmetry.apply_signed(graph(), identity_element(), states()[0]),
    "compose_signed": lambda p: tus.symmetry.compose_signed(graph(), *[identity_element()] * 2),
    "invert_signed": lambda p: tus.symmetry.invert_signed(graph(), identity_element()),
    "random_linear": lambda p: tus.symmetry.random_linear(graph()),
    "apply_linear": lambda p: tus.symmetry.apply_linear(graph(), tus.symmetry.random_linear(graph()), states()[0]),
    "rotation_matching": lambda p: tus.alignment.rotation_matching(graph(), *states()),
    "balanced": lambda p: tus.alignment.balanced(graph(), states()[0]),
    "canonical_linear": lambda p: tus.alignment.canonical_linear(graph(), states()[0]),
    "fingerprint": lambda p: tus.fingerprint(graph(), states()[0]),
    "canonical_signs": lambda p: tus.scaling.canonical_signs(graph(), states()[0]),
    "apply_signs": lambda p: tus.apply_signs(graph(), tus.random_signs(graph()), states()[0]),
    "signed_matching": lambda p: tus.alignment.signed_matching(graph(), *states()),
    "straight_through_matching": lambda p: tus.alignment.straight_through_matching(
        graph(), net(), *states(), loader(), torch.nn.functional.cross_entropy, epochs=1
    ),
    "compose": lambda p: tus.compose(tus.random_permutation(graph()), tus.random_permutation(graph())),
    "invert": lambda p: tus.invert(tus.random_permutation(graph())),
    "apply_permutation": lambda p: tus.apply_permutation(graph(), tus.random_permutation(graph()), states()[0]),
    "apply_scale": lambda p: tus.apply_scale(graph(), tus.random_scale(graph()), states()[0]),
    "weight_matching": lambda p: tus.weight_matching(graph(), *states(), solver="descent"),
    "canonicalize": lambda p: tus.canonicalize(graph(), states()[0]),
    "fold_norms": lambda p: tus.fold_norms(graph(), states()[0]),
    "representation_cost": lambda p: tus.representation_cost(graph(), states()[0]),
    "remove_symmetries": lambda p: tus.remove_symmetries(graph(), states()[0]),
    "mass_profile": lambda p: tus.scaling.mass_profile(graph(), states()[0], [0.0, 1.0]),
    "CompactPosterior": lambda p: tus.CompactPosterior.from_states(states(), graph()).sample(2),
    "transposition_count": lambda p: tus.transposition_count(torch.tensor([1, 0, 2])),
    "show_progress": lambda p: tus.show_progress(),
    "posterior_ensemble": lambda p: tus.routines.posterior_ensemble(compact(p), plain(), num_samples=2)(
        torch.zeros(2, 4)
    ),
    "activation_matching": lambda p: tus.activation_matching(graph(), net(), *states(), loader()),
    "align": lambda p: tus.align(graph(), states(), match_on="activations", model=net(), dataloader=loader()),
    "interpolate": lambda p: tus.interpolate(*states(), 0.5),
    "mean_state": lambda p: tus.mean_state(states()),
    "repair": lambda p: tus.repair(net(), states(), [0.5, 0.5], states()[0], loader()),
    "average": lambda p: tus.alignment.average(states()),
    "correct": lambda p: tus.alignment.correct(net(), states(), [0.5, 0.5], states()[0], loader(), "repair"),
    "measure": lambda p: tus.alignment.measure(net(), states()[0], loader(), {"loss": nn.functional.cross_entropy}),
    "StateSource": lambda p: tus.alignment.StateSource(states()).only([1])[0],
    "transport": lambda p: tus.transport(graph(), *states(), states()[0]),
    "likeness": lambda p: tus.alignment.likeness(graph(), net(), *states(), loader()),
    "preflight": lambda p: tus.alignment.preflight(graph(), states(), net(), loader()),
    "merge": lambda p: tus.merge(graph(), states(), net(), loader(), correction="repair"),
    "reestimate_batchnorm": lambda p: tus.reestimate_batchnorm(net(), states()[0], loader()),
    "loss_barrier": lambda p: tus.loss_barrier(net(), *states(), loader(), nn.functional.cross_entropy, points=3),
    "loss_barriers": lambda p: tus.alignment.loss_barriers(
        net(), states(), loader(), nn.functional.cross_entropy, points=3
    ),
    "LinearizedLaplace": lambda p: used(tus.LinearizedLaplace(plain()).fit(loader())),
    "DualLaplace": lambda p: tus.laplace.DualLaplace(plain(), structured=[tus.laplace.IsotropicPrior(["0"])]),
    "LaplaceEnsemble": lambda p: tus.routines.LaplaceEnsemble(fitted().model, 2, laplace=fitted())(torch.zeros(2, 4)),
    "LaplacePostProcessing": lambda p: tus.routines.LaplacePostProcessing(fitted())(torch.zeros(2, 4)),
    "LaplaceRegressionRoutine": lambda p: tus.routines.LaplaceRegressionRoutine(plain(), 3, nn.MSELoss()),
    "EpistemicCriterion": lambda p: tus.routines.EpistemicCriterion(),
    "HMCRoutine": lambda p: tus.routines.HMCRoutine(net()),
    "MCLMCRoutine": lambda p: tus.routines.MCLMCRoutine(net()),
    "MembersRoutine": lambda p: tus.routines.MembersRoutine(net(), 2).member(1),
    "VariationalRoutine": lambda p: tus.routines.VariationalRoutine(plain()).posterior().sample(2),
    "DeepImagePriorRoutine": lambda p: tus.routines.DeepImagePriorRoutine(plain()),
    "SWAG": lambda p: SWAG(plain(), cycle_start=0, cycle_length=1),
    "Hyperprior": lambda p: tus.laplace.Hyperprior(),
    "IsotropicPrior": lambda p: tus.laplace.IsotropicPrior(["0.weight"]),
    "KernelPrior": lambda p: tus.laplace.KernelPrior(["0.weight"]),
    "TotalVariation": lambda p: tus.laplace.TotalVariation((4, 4), 1.0),
    "MarginalHomogeneity": lambda p: tus.MarginalHomogeneity(graph()),
    "MaximumMeanDiscrepancy": lambda p: tus.MaximumMeanDiscrepancy(),
    "PairwiseMutualInformation": lambda p: tus.PairwiseMutualInformation(2),
    "PredictiveAgreement": lambda p: tus.PredictiveAgreement(),
    "PredictiveTotalVariation": lambda p: tus.PredictiveTotalVariation(),
    "RepresentationCost": lambda p: tus.RepresentationCost(graph()),
    "TranspositionCount": lambda p: tus.TranspositionCount(),
    "SampleStore": lambda p: stored(p),
    "FitCompactPosterior": lambda p: tus.callbacks.FitCompactPosterior("samples", q_r="q_r", q_d="q_d"),
    "FitLaplace": lambda p: tus.FitLaplace(),
    "PosteriorSnapshots": lambda p: tus.PosteriorSnapshots("samples", every_n_epochs=1),
    "Rebasin": lambda p: tus.Rebasin(),
    "ScaleCanonicalization": lambda p: tus.ScaleCanonicalization(),
    "LastCheckpoint": lambda p: LastCheckpoint(),
    "PosteriorDraws": lambda p: PosteriorDraws(),
    "ProgressLines": lambda p: ProgressLines(),
    "TrueTemperature": lambda p: TrueTemperature(),
    "CIFARDataModule": lambda p: CIFARDataModule(p),
    "IDXDataModule": lambda p: IDXDataModule(root=p),
    "TomographyDataModule": lambda p: TomographyDataModule(p),
    "DigitsDataModule": lambda p: DigitsDataModule(train_size=200, orders=2).setup("fit"),
}
NO_CALL = {
    "LaplaceFileError", "PrunedGroupWarning", "SymmetryError", "SymmetryWarning",  # errors and warnings
    "Alignment", "BalancedForm", "CanonicalForm", "Certificate", "Explanation", "Fingerprint", "GaussianPredictive",
    "Likeness", "LossBarrier", "MassProfile", "Matching", "Merged", "NormalizationGroup", "PermutationGroup",
    "Preflight", "ScaleGroup", "SignGroup", "LinearGroup", "SignedPermutation", "SymmetryGraph",
    "Transported",  # what comes back
    "Bernoulli", "Categorical", # options of an approximation, numbers only
    "SampledEvidence", "DataFileError", "TomographyProblem", "Reconstructions",
    "ImageDataModule", "ScannedTomographyDataModule", "TinyImageNetDataModule",  # abstract, or with files of their own
    "UCIDataModule",
    "LaplaceMixture",  # with LinearizedLaplace
    "MembersStrategy",  # of a trainer of several processes
    "Call", "Likelihood", "elementwise",  # what a user's own class or rule is made of
}  # fmt: skip


def stored(folder: Path) -> Any:
    store = tus.SampleStore.create(folder / "samples", architecture="net", method="test")
    store.append(net().state_dict(), step=1)
    return tus.SampleStore.open(folder / "samples").load()


def compact(folder: Path) -> Path:
    """A saved Gaussian."""
    made = plain()
    mean = dict(made.named_parameters())
    tus.CompactPosterior.from_moments(made, mean, {n: t * 0 + 1 for n, t in mean.items()}).save(
        folder / "q.safetensors"
    )
    return folder / "q.safetensors"


def test_every_public_name_is_called_or_exempt() -> None:
    found = {path.rpartition(".")[2]: (path, value) for path, value in public.names() if callable(value)}
    assert found.keys() - CALLS.keys() - NO_CALL == set()
    assert found.keys() >= NO_CALL and not any(inspect.isfunction(found[n][1]) for n in NO_CALL - {"elementwise"})


@pytest.mark.parametrize("name", CALLS)
def test_it_leaves_every_global_random_state(name: str, tmp_path: Path) -> None:
    graph(), fitted()
    seed_all(5)
    assert moved(lambda: CALLS[name](tmp_path)) == []
