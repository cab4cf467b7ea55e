"""The core on a CUDA device, real or fake: results lie there, are those of the CPU, and follow the network."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator, normal
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

import tu_symmetry as tus
from tu_symmetry.laplace.mixture import LaplaceMixture
from tu_symmetry.metrics.functional import discrepancy_test
from tu_symmetry.posterior.compact import sample_low_rank
from tu_symmetry.routines import SWAG

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}  # two devices add up in other orders, in float64
CURVATURES = ["kfac", "full", "diag", "last_layer"]


def network(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3)).double().eval()


def states(count: int = 3) -> list[dict[str, Tensor]]:
    names = network().state_dict().items()
    return [{n: (normal(*t.shape, seed=seed).abs() + 0.1).to(t.dtype) for n, t in names} for seed in range(count)]


def data() -> tuple[Tensor, Tensor]:
    x = normal(30, 5)
    return x, (x @ normal(5, 3, seed=1)).argmax(-1)


def moved(value: Any, device: Any) -> Any:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, value)


def with_waves(model: nn.Module) -> nn.Module:
    """A network with weights that no generator draws."""
    model.load_state_dict({n: (t * 0 + 0.1).cumsum(0).sin() for n, t in model.state_dict().items()})
    return model


def perceptron(device: Any) -> nn.Module:
    return with_waves(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(device))


def permuted(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    permutation = moved(tus.random_permutation(graph, generator=generator(1)), device)
    assert tus.transposition_count(tus.compose(permutation, tus.invert(permutation))) == 0
    return tus.apply_permutation(graph, permutation, every[0])


def scaled(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    return tus.apply_scale(graph, moved(tus.random_scale(graph, generator=generator(1)), device), every[0])


def matched(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    start = moved(tus.random_permutation(graph, generator=generator(1)), device)
    one, two = every[:2]
    found = [
        tus.weight_matching(graph, one, two),
        tus.weight_matching(graph, one, two, solver="descent", init=start),
        tus.activation_matching(graph, network().to(device), one, two, [x]),
    ]
    return [tus.apply_permutation(graph, m.permutation, two) for m in found]


def aligned(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    return [tus.align(graph, every, reference=name).states for name in ("first", "medoid", "mean", "universe")]


def over_all(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    """Scales, and matrices between two layers without an activation."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double().to(device)
    graph, over = tus.discover_symmetries(model, x), ("permutations", "signs", "scales", "rotations")
    names = model.state_dict().items()
    own = [{n: normal(*t.shape, seed=seed).to(device) for n, t in names} for seed in range(3)]
    found = [tus.align(graph, own, reference=name, over=over).states for name in ("first", "universe")]
    balance = tus.alignment.balanced(graph, own[0]).state, tus.alignment.canonical_linear(graph, own[0])
    matrices = {name: matrix.abs().to(device) for name, matrix in balance[1].items()}  # up to the signs of units
    return found, tus.merge(graph, own, model, over=over).state, balance[0], matrices


def merged(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    loader = [(x, data()[1].to(device))]
    found = tus.merge(graph, every, network().to(device), loader, correction="repair")
    barrier = tus.loss_barrier(network().to(device), *every[:2], loader, nn.functional.cross_entropy)
    found.explain()
    carried = tus.transport(graph, every[0], every[1], every[2])
    return found.state, carried.state, torch.as_tensor(float(barrier.barrier), device=device)


def canonical(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    return [tus.canonicalize(graph, every[0], method=name).state for name in ("min_mass", "unit_norm")]


def compact(graph: Any, every: Any, x: Tensor, device: Any) -> Any:
    posterior = tus.CompactPosterior.from_states(every, graph, align=True)
    drawn = posterior.sample(2, generator=generator())
    module = posterior.as_module(network().to(device), 2, generator=generator())
    low_rank = sample_low_rank(every, graph, 2, generator=generator())
    return posterior.mean, posterior.std, drawn, module(x).detach(), low_rank


OPERATIONS = (permuted, scaled, matched, aligned, over_all, merged, canonical, compact)


@pytest.fixture(params=[False, True], ids=["", "default"])
def default(request: pytest.FixtureRequest, cuda: torch.device) -> Any:
    """Within which the device is that of tensors that are made without one (``torch.set_default_device``), or not."""
    return cuda if request.param else nullcontext()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_states_stay_on_their_device_and_are_those_of_the_cpu(
    operation: Callable[..., Any], cuda: torch.device, default: Any
) -> None:
    x = data()[0]
    graph = tus.discover_symmetries(network(), x)
    expected = operation(graph, states(), x, "cpu")
    own = moved(states(), cuda)
    with default:
        graph = tus.discover_symmetries(network().to(cuda), x.to(cuda))
        found = operation(graph, own, x.to(cuda), cuda)
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert a.device == cuda
        torch.testing.assert_close(a.cpu(), b, **CLOSE)


def test_symmetries_are_found_and_verified_on_the_device(cuda: torch.device, default: Any) -> None:
    x, here = data()[0], tus.discover_symmetries(network(), data()[0])
    with default:
        there = tus.discover_symmetries(network().to(cuda), x.to(cuda))
        assert str(there) == str(here)
        tus.verify_symmetries(there, network().to(cuda), x.to(cuda), on_failure="raise")


def laplace(curvature: Any) -> Callable[..., Any]:
    def found(x: Tensor, y: Tensor, device: Any) -> Any:
        la = tus.LinearizedLaplace(perceptron(device), curvature=curvature, prior="per_layer")
        la.fit(DataLoader(TensorDataset(x, y), batch_size=10)).optimize_evidence(max_iterations=3)
        la.calibrate([(x, y)])
        return la.predictive(x), la.function_samples(x, 3), la.theta

    return found


def dual(x: Tensor, y: Tensor, device: Any) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1)).double()
    model = with_waves(model.to(device))
    images, matrix = x[:4].reshape(1, 1, 5, 4), x[:24].reshape(6, 20)
    prior = tus.laplace.KernelPrior(["0.weight", "2.weight"], name="kernels")
    found = tus.laplace.DualLaplace(model, structured=[prior], observation=matrix)
    found.fit([(images, x[:1, :1].expand(1, 6))]).optimize_evidence(
        hyperprior=tus.laplace.TotalVariation((5, 4), weight=0.1)
    )
    return found.function_samples(3)


def discrepancies(x: Tensor, y: Tensor, device: Any) -> Any:
    stacks = [{"weight": t.reshape(-1, 5)} for t in (x[:20], x[10:] + 0.5)]
    found = discrepancy_test(*stacks, permutations=9, bootstraps=9, generator=generator())
    return torch.tensor([found.value, found.p_value], device=device)


MORE: dict[str, Callable[..., Any]] = {c: laplace(c) for c in CURVATURES} | {"dual": dual, "discrepancy": discrepancies}


@pytest.mark.parametrize("name", MORE)
def test_a_default_device_changes_nothing(name: str, cuda: torch.device) -> None:
    """``torch.set_default_device``: what the library makes lies beside the data, or on the CPU where it says so."""
    expected = MORE[name](*data(), "cpu")
    with cuda:
        found = MORE[name](*moved(data(), cuda), cuda)
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b.to(cuda), rtol=1e-6, atol=1e-8)


FACTORIES = (
    "arange as_tensor asarray empty eye full linspace logspace ones rand randint randn randperm tensor tril_indices "
    "triu_indices zeros"
)


def test_every_tensor_is_made_on_a_device_that_is_said() -> None:
    """Else ``torch.set_default_device`` chooses it; parameters and metrics' states follow that on purpose."""
    lacking = []
    for path in sorted(Path(tus.__file__).parent.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {call: getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
        following = [call for call, name in names.items() if name in ("add_state", "Parameter", "register_buffer")]
        free = {inner for call in following for inner in ast.walk(call)}
        lacking += [
            f"{path.name}:{call.lineno}"
            for call, name in names.items()
            if name in FACTORIES.split() and ast.unparse(call.func) == f"torch.{name}"
            if call not in free and not {k.arg for k in call.keywords} & {"device", None}
        ]
    assert not lacking, 'say device=..., near the data or "cpu"'


def test_inputs_on_another_device_are_named(cuda: torch.device) -> None:
    x = data()[0]
    for model, inputs in ((network().to(cuda), x), (network(), x.to(cuda))):
        with pytest.raises(tus.SymmetryError, match=r"example inputs lie on .*: move one of them"):
            tus.discover_symmetries(model, inputs)


def test_profiles_take_factors_from_the_device(cuda: torch.device) -> None:
    graph, factors = tus.discover_symmetries(network(), data()[0]), torch.linspace(-1, 1, 5)
    found = tus.scaling.mass_profile(graph, moved(states()[0], cuda), factors.to(cuda))
    for name, masses in tus.scaling.mass_profile(graph, states()[0], factors).masses.items():
        torch.testing.assert_close(found.masses[name], masses, **CLOSE)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_posterior_follows_its_network(curvature: Any, cuda: torch.device) -> None:
    """Fitted on one device: predictions, evidence, calibration on the other, and back."""
    x, y = data()
    for first, second in ((torch.device("cpu"), cuda), (cuda, torch.device("cpu"))):
        model = perceptron(first)
        la = tus.LinearizedLaplace(model, curvature=curvature, prior="single").fit([(x, y)])
        la.optimize_evidence(max_iterations=3)
        expected = [la.predictive(x), la.function_samples(x, 3), la.function_covariance(x)[1], la.theta]
        evidence, fitted = la.log_marginal_likelihood(), la.fitted
        model.to(second)
        found = [la.predictive(x), la.function_samples(x, 3), la.function_covariance(x)[1], la.theta]
        for a, b in zip(found, expected, strict=True):
            assert a.device == second and b.device == first
            torch.testing.assert_close(a.to(first), b, **CLOSE)
        assert la.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-8)
        assert fitted.theta.device == first, "a frozen state was moved"
        la.calibrate([(x, y)])
        la.optimize_evidence(max_iterations=2)
        mixture = LaplaceMixture([la, la])
        model.to(first)
        assert mixture.predictive(x).device == first


def test_swag_takes_snapshots_of_a_network_on_the_device(cuda: torch.device) -> None:
    """With running statistics of its samples from the data, and a checkpoint that can be read where there is none."""
    model = SWAG(network().float(), cycle_start=0, cycle_length=1, num_estimators=2).to(cuda)
    loader = DataLoader(TensorDataset(data()[0].float()), batch_size=10)
    for epoch in (1, 2):
        model.update_wrapper(epoch)
        model.bn_update(loader, cuda)
        for p in model.core_model.parameters():
            p.data += 0.1
    assert int(model.num_avgd_models) == 2 and not model.need_bn_update
    x = data()[0].float().to(cuda)
    assert model.eval()(x).device == cuda
    there = SWAG(network().float(), cycle_start=0, cycle_length=1, num_estimators=2)
    there.load_state_dict(moved(model.state_dict(), "cpu"))
    assert int(there.num_avgd_models) == 2
