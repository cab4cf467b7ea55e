"""Networks drawn from TorchUncertainty's methods and from Laplace approximations are those methods' networks."""

from __future__ import annotations

import copy
import functools

import drawn
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
from torch_uncertainty.methods import SWAG, StochasticModel, mc_dropout
from torch_uncertainty.models.classification import lenet

import tu_symmetry as tus
from tu_symmetry.experiments.symmetry_aware import SmallLeNet
from tu_symmetry.posterior.draws import bayesian_draws, dropout_draws, network_draws

normal = functools.partial(drawn.normal, dtype=torch.float32)
X = normal(3, 1, 28, 28)


def state(stack: dict[str, Tensor], k: int) -> dict[str, Tensor]:
    return {n: t[k] for n, t in stack.items()}


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    norm = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=4), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(147, 8),
        nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4),
    )  # fmt: skip
    return {
        "small": SmallLeNet(dropout=0.4),
        "TorchUncertainty's LeNet": lenet(1, 10, dropout_rate=0.3),  # one dropout module that runs twice
        "mc_dropout": mc_dropout(lenet(1, 10, dropout_rate=0.3), 4),
        "with normalization": norm,
    }


@pytest.mark.parametrize("name", models())
def test_dropout_draws_are_networks_under_masks(name: str) -> None:
    """Their mean over many masks is the network's own weights, and some units of each are gone."""
    model = models()[name].eval()
    core = getattr(model, "core_model", model)
    found = network_draws(model, 400, inputs=X, seed=1)
    assert found.method == "mc_dropout"
    changed = [n for n, t in core.state_dict().items() if not torch.equal(found.states[n][0], t)]
    assert changed and all(n.endswith("weight") for n in changed)
    for n in changed:
        own = core.state_dict()[n]
        columns = found.states[n].flatten(3).sum(-1).abs().sum(1) if own.ndim > 2 else found.states[n].abs().sum(1)
        share = float((columns == 0).double().mean())
        assert 0.2 < share < 0.6
        torch.testing.assert_close(found.states[n].mean(0), own, rtol=0.35, atol=1e-3)
    other = network_draws(model, 2, inputs=X, seed=2).states
    assert any(not torch.equal(other[n][0], found.states[n][0]) for n in changed)


def test_a_draw_computes_what_the_masked_network_computes() -> None:
    """The masks are read back from a draw's zero columns and multiplied into the network by hand."""
    model = SmallLeNet(dropout=0.4).eval()
    drawn = state(dropout_draws(model, X, 1, seed=3), 0)
    masks = {}
    for layer, reader, width in (("drop1", "conv2", 4), ("drop2", "hidden", 8), ("drop3", "output", 16)):
        columns = drawn[f"{reader}.weight"].abs().transpose(0, 1).reshape(width, -1).sum(1)
        masks[layer] = (columns > 0).float() / 0.6
    x = model.conv1(X).relu() * masks["drop1"].view(1, -1, 1, 1)
    x = model.conv2(x).relu() * masks["drop2"].view(1, -1, 1, 1)
    expected = model.output(model.hidden(x.flatten(1)).relu() * masks["drop3"])
    torch.testing.assert_close(functional_call(model, drawn, (X,)), expected)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x).relu())
        return self.head(x + self.second(x).relu())


PIXELS = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(1352, 2))


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Residual(), normal(2, 4), "compute something else"),
        (PIXELS, X, "single entries"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), normal(2, 4), "not read by one linear layer"),
        (SmallLeNet(dropout=0.1), None, "pass inputs"),
        (nn.Linear(4, 2), normal(2, 4), "known are"),
    ],
)
def test_what_gives_no_weights_is_refused(model: nn.Module, inputs: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network_draws(model, 3, inputs=inputs)


def test_swag_draws_have_its_moments() -> None:
    torch.manual_seed(0)
    swag = SWAG(nn.Linear(2, 2), cycle_start=0, cycle_length=1, max_num_models=4)
    with pytest.raises(ValueError, match="averaged 0 networks"):
        network_draws(swag, 3)
    seen = normal(5, 2, 2)
    for epoch, weight in enumerate(seen, 1):
        with torch.no_grad():
            swag.core_model.weight.copy_(weight)
        swag.update_wrapper(epoch)
    before = torch.get_rng_state()
    swag.scale = 1.0
    drawn = network_draws(swag, 4000, seed=0).states["weight"]
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(drawn.mean(0), seen.mean(0), atol=0.1, rtol=0)
    deviation = swag.swag_stats["model.swag_stats.weight_covariance_sqrt"]
    variance = seen.var(0, correction=0).flatten() + deviation.square().sum(0) / 3
    torch.testing.assert_close(drawn.flatten(1).var(0), variance, rtol=0.12, atol=0)
    swag.scale = 0.5
    half = network_draws(swag, 4000, seed=0).states["weight"]
    torch.testing.assert_close(half.flatten(1).var(0), variance / 2, rtol=0.12, atol=0)


class Bayesian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(BayesConv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.head = BayesLinear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean((2, 3)))


def test_bayesian_layers_become_plain_ones() -> None:
    torch.manual_seed(0)
    model = Bayesian().eval()
    with torch.no_grad():
        model.head.weight_sigma.fill_(0.0)
    for source in (model, StochasticModel(model, 4)):
        found = network_draws(source, 3000, seed=0)
        assert found.method == "variational"
        plain = nn.ModuleDict({"block": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "head": nn.Linear(2, 3)})
        assert found.states.keys() == plain.state_dict().keys()
        drawn = found.states["head.weight"]
        torch.testing.assert_close(drawn.mean(0), model.head.weight_mu.detach(), atol=0.06, rtol=0)
        torch.testing.assert_close(drawn.std(0), torch.full((3, 2), 0.6931), atol=0.04, rtol=0)  # log(1 + e^0)
    assert torch.equal(bayesian_draws(model, 2, seed=5)["head.bias"], bayesian_draws(model, 2, seed=5)["head.bias"])


def blobs(count: int = 60) -> DataLoader:
    y = torch.arange(count) % 3
    x = normal(count, 2) + 1.5 * torch.eye(3)[y][:, :2]
    return DataLoader(TensorDataset(x, y), batch_size=20)


@pytest.mark.parametrize("curvature", ["kfac", "last_layer"])
def test_laplace_draws_have_its_covariance(curvature: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3))
    la = tus.LinearizedLaplace(copy.deepcopy(model), curvature=curvature, prior="single").fit(blobs())
    la.set_precision(2.0)
    found = network_draws(la, 4000, seed=0)
    assert found.method == "laplace" and found.states.keys() == model.state_dict().keys()
    for name, own in model.state_dict().items():
        torch.testing.assert_close(found.states[name].mean(0), own, atol=0.06, rtol=0)
    assert torch.equal(found.states["0.weight"][0], model[0].weight) == (curvature == "last_layer")
    columns = torch.cat([found.states[n].flatten(1) for n in la.tangent.names], dim=1)
    variances = [la.posterior.covariance_product(row)[i] for i, row in enumerate(torch.eye(columns.shape[1]))]
    torch.testing.assert_close(columns.var(0), torch.stack(variances).to(columns), rtol=0.12, atol=1e-4)
