"""Where the host waits for the device: never in an inner loop, and not more often the more there is to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.alignment.products import WeightSimilarities
from tu_symmetry.alignment.relaxation import RelaxedPair
from tu_symmetry.datamodules.loading import ResumableLoader, SeededOrder, TensorPairs, flip_and_shift
from tu_symmetry.datamodules.tomography import measured, repeated, strip_projector
from tu_symmetry.laplace.dual.priors import IsotropicPrior
from tu_symmetry.laplace.joint.data import TrainingData
from tu_symmetry.laplace.joint.informative import Informative, choose
from tu_symmetry.laplace.joint.search import _Search
from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.mode import EvaluateAt
from tu_symmetry.laplace.tangent import TangentModel
from tu_symmetry.metrics.functional.two_sample import vectors_test
from tu_symmetry.posterior.hamiltonian import HamiltonianChain
from tu_symmetry.posterior.network import BayesianNetwork, categorical_nll
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import DeepImagePriorRoutine
from tu_symmetry.symmetry.action import largest_entry, permute_tensors_

State = dict[str, Tensor]
Waits = Callable[[Callable[[], object]], int]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def waits(cuda: torch.device) -> Waits:
    """How often the host waits for the device while a function runs."""
    fake: Any = sys.modules.get("fake_cuda.device")
    if fake is None or fake.real_device():
        pytest.skip("waits are counted on the fake CUDA device: `make test-device`")

    def counted(function: Callable[[], object]) -> int:
        before = fake.counts().get("sync", 0)
        function()
        return int(fake.counts().get("sync", 0) - before)

    return counted


def same(counts: Iterable[int]) -> int:
    """The one number that all counts are."""
    (count,) = set(counts)
    return count


def network(hidden: int = 1, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, width), nn.Tanh()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3)).eval()


def verified(hidden: int) -> tuple[tus.SymmetryGraph, State, State]:
    """A deep network's graph, and two states on the device."""
    model = network(hidden)
    graph = tus.discover_symmetries(model, torch.randn(2, 4))
    graph.require_verified()
    return graph, state(model, 0), state(model, 1)


def data(count: int = 20) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 3


def state(model: nn.Module, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator).to(CUDA) for n, t in model.state_dict().items()}


def test_leapfrog_steps(waits: Waits) -> None:
    def counted(steps: int) -> int:
        posterior = BayesianNetwork(network(), *data(), 1.0, categorical_nll, CUDA)
        chain = HamiltonianChain(posterior, step_size=1e-3, leapfrog_steps=steps)
        chain.step()
        return waits(chain.step)

    same(map(counted, (3, 30)))


@pytest.mark.parametrize("hidden", [2, 5])
def test_tensors_that_a_permutation_moves(waits: Waits, hidden: int) -> None:
    """The permutation is checked on the host, then all indices go to the device; finite numbers, largest entries."""
    graph, held, other = verified(hidden)
    drawn = tus.random_permutation(graph, generator=torch.Generator().manual_seed(0))
    there = {g: p.to(CUDA) for g, p in drawn.items()}
    assert waits(lambda: tus.apply_permutation(graph, drawn, held)) == 1
    assert waits(lambda: tus.apply_permutation(graph, there, held)) == 2
    assert waits(lambda: permute_tensors_(graph, drawn, held)) == 1
    assert waits(lambda: graph.check_state(held)) == 1
    assert waits(lambda: largest_entry(held["0.weight"])) == 1
    assert waits(lambda: weight_distance(graph, held, other)) <= 2


@pytest.mark.parametrize("hidden", [2, 5])
def test_iterations_of_a_relaxation(waits: Waits, hidden: int) -> None:
    """One copy to the host for the gradients of all groups, one for the step; of indices one more for each group."""
    pair = RelaxedPair(WeightSimilarities.of(*verified(hidden)).products)
    assert waits(pair.vertex) == 1
    _, sources, gap, _ = pair.vertex()
    assert waits(lambda: pair.advance(sources, gap)) <= 2 + hidden


def test_kernels_and_networks_of_a_discrepancy(waits: Waits) -> None:
    """Two for each part: its labels, and what is left; not for kernels, bandwidths, replicates and networks."""

    def counted(parts: int, networks: int) -> int:
        x, y = ({str(k): torch.randn(networks, 7, device=CUDA) for k in range(parts)} for _ in range(2))
        return waits(lambda: vectors_test(x, y, permutations=9, bootstraps=9))

    few, many = (same(counted(parts, networks) for networks in (5, 20)) for parts in (2, 6))
    assert many - few <= 2 * 4


def test_samples_of_a_stack(waits: Waits, tmp_path: Path) -> None:
    model = network()

    def counted(count: int) -> int:
        store = SampleStore.create(tmp_path / str(count), architecture="a", method="test")
        for k in range(count):
            store.append({n: t.cpu() for n, t in state(model, k).items()}, step=k)
        return waits(lambda: store.load(device=CUDA))

    assert same(map(counted, (3, 30))) == len(model.state_dict())


@pytest.mark.parametrize("augmented", [False, True])
def test_members_of_a_training_step(waits: Waits, augmented: bool) -> None:
    images = TensorPairs(torch.rand(40, 1, 8, 8, device=CUDA), torch.arange(40, device=CUDA))

    def epoch(members: int, batch_size: int) -> int:
        orders = [SeededOrder(images, num_replicas=1, rank=0, seed=seed) for seed in range(max(members, 1))]
        own = orders if members else []
        loader = ResumableLoader(images, batch_size, orders[0], own, flip_and_shift if augmented else None)
        return waits(lambda: list(loader))

    assert same(epoch(members, 10) for members in (0, 2, 8)) == 1 + 4 * augmented
    assert same(epoch(members, 5) for members in (0, 2)) == 1 + 8 * augmented


def test_laplace_products(waits: Waits) -> None:
    """None of those with kept data; of those that read a loader a few for each batch, whether it is the same."""
    x, y = (t.to(CUDA) for t in data(40))
    model = network().to(CUDA)
    tangent = TangentModel(model, [name for name, _ in model.named_parameters()])
    vector = torch.randn_like(tangent.point())
    kept = TrainingData(tangent, Categorical(), [(x, y)])
    assert waits(lambda: kept.pull(kept.push(vector))) == 0

    def counted(batches: int) -> int:
        loader = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
        read = TrainingData(tangent, Categorical(), loader, budget=0)
        return waits(lambda: read.push(vector)) // batches

    assert same(map(counted, (2, 8))) <= 4


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
@pytest.mark.parametrize("hidden", [1, 4])
def test_an_evaluation_of_a_dual_evidence(waits: Waits, evaluate_at: EvaluateAt, hidden: int) -> None:
    """Coefficients go there, whether the factor is good and the numbers of all blocks come back."""
    x, model = data()[0].double().to(CUDA), network(hidden).double().to(CUDA)
    blocks = [IsotropicPrior((name,), name=name) for name, _ in model.named_parameters()]
    la = tus.laplace.DualLaplace(model, structured=blocks, evaluate_at=evaluate_at)
    la.fit([(x, torch.randn(len(x), 3, dtype=torch.float64, device=CUDA))])
    assert waits(lambda: la.value_and_gradient(la.phi)) <= 4


def test_evaluations_of_the_joint_model(waits: Waits) -> None:
    """Its Gram matrices stay where the rows are: precisions go there, value and slopes come back."""
    x, y = (t.to(CUDA) for t in data(40))
    model = network().double().to(CUDA)
    la = tus.LinearizedLaplace(model, prior="per_layer").fit([(x.double(), y)])
    found = TrainingData(la.tangent, la.likelihood, [(x.double(), y)], budget=0)
    own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 1000))
    assert own.grams.device == CUDA
    search = _Search(la.fitted, found, 1 << 30, False)
    point = search.start()
    gradient = search.gradient(point)
    evaluations = 0

    def energy(rho: Tensor) -> tuple[float, Tensor]:
        nonlocal evaluations
        evaluations += 1
        return search.energy(rho, point.tau)

    bounds = (search.low, search.high)
    total = waits(lambda: own.optimum(point.theta, gradient, point.rho, 1.0, energy, bounds))
    assert evaluations > 2 and total <= 3 * evaluations + 3 * len(la.prior_groups) + 6


@pytest.mark.parametrize("max_iterations", [None, {3: 2, 5: 100}])
def test_steps_of_deep_image_priors(waits: Waits, max_iterations: Any) -> None:
    """The problems go to the device once; a step asks once whether losses are finite and lower, Lightning once."""
    truth = (torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.6).double()
    problem = measured(truth, [0], {a: strip_projector(8, a, 11, 1.1) for a in (3, 5)}, [0.05], bin_width=1.1)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1), nn.Sigmoid())

    def fit(steps: int) -> int:
        routine = DeepImagePriorRoutine(model, 2, tv_weight={3: 1e-3, 5: 2e-3}, max_iterations=max_iterations)
        own = Trainer(
            accelerator="gpu", devices=1, max_steps=steps, max_epochs=-1, gradient_clip_val=0.5, log_every_n_steps=1000,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        return waits(lambda: own.fit(routine, repeated(problem, 100)))

    fit(5)
    assert fit(25) - fit(5) == 2 * 20
