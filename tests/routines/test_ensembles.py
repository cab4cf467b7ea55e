"""A compact posterior, evaluated by TorchUncertainty's routine as an ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator, normal
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine
from trainings import trainer

from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import posterior_ensemble
from tu_symmetry.states import SampleFileError
from tu_symmetry.symmetry.discovery import discover_symmetries

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, CLASSES = 5, 3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.fixture(scope="module")
def posterior() -> CompactPosterior:
    torch.manual_seed(0)
    members = [mlp().state_dict() for _ in range(4)]
    return CompactPosterior.from_states(members, discover_symmetries(mlp(), torch.randn(2, 4)), align=True)


X, Y = normal(50, 4, dtype=torch.float32), torch.randint(CLASSES, (50,), generator=generator(2))


def probabilities(posterior: CompactPosterior, x: Tensor) -> Tensor:
    """Sample by sample, the softmax outputs ``[samples, inputs, classes]`` of the same draws."""
    stack = posterior.sample(SAMPLES, generator=generator(7))
    draws = [{name: t[i] for name, t in stack.items()} for i in range(SAMPLES)]
    return torch.stack([functional_call(mlp(), draw, (x,)).softmax(-1) for draw in draws])


def test_metrics_equal_a_hand_computation(posterior: CompactPosterior) -> None:
    x, y = X, Y
    module = posterior.as_module(mlp(), SAMPLES, generator=generator(7))
    routine = ClassificationRoutine(
        module, num_classes=CLASSES, is_ensemble=True, eval_ood=True, ood_criterion="mutual_information"
    )
    assert not list(routine.parameters()) or all(not p.requires_grad for p in routine.parameters())
    far = DataLoader(TensorDataset(5 * x, y), batch_size=16)
    (results,) = trainer().test(routine, [DataLoader(TensorDataset(x, y), batch_size=16), far], verbose=False)[:1]
    p = probabilities(posterior, x)
    mean = p.mean(0)
    accuracy = float((mean.argmax(-1) == y).float().mean())
    nll = float(-mean[torch.arange(len(y)), y].log().mean())

    def entropy(q: Tensor) -> Tensor:
        return -(q * q.log()).sum(-1)

    mutual_information = float((entropy(mean) - entropy(p).mean(0)).mean())
    found: dict[str, Any] = {k.split("/dataloader")[0]: v for k, v in results.items()}
    assert found["test/cls/Acc"] == pytest.approx(accuracy, abs=1e-6)
    assert found["test/cls/NLL"] == pytest.approx(nll, rel=1e-4)
    assert found["test/ens_MI"] == pytest.approx(mutual_information, rel=1e-3, abs=1e-6)
    assert mutual_information > 1e-3, "vacuous: all samples agree"


def test_saved_posterior_is_evaluated_alike(posterior: CompactPosterior, tmp_path: Path) -> None:
    posterior.save(tmp_path / "q.safetensors")
    module = posterior_ensemble(tmp_path / "q.safetensors", mlp(), num_samples=SAMPLES, seed=7)
    outputs = module(X).reshape(SAMPLES, -1, CLASSES).softmax(-1)
    torch.testing.assert_close(outputs, probabilities(posterior, X))
    with pytest.raises(ValueError, match="does not say how many"):
        posterior_ensemble(tmp_path / "q.safetensors", mlp())
    with pytest.raises(ValueError, match="than the Linear"):
        posterior_ensemble(tmp_path / "q.safetensors", nn.Linear(4, 3), num_samples=SAMPLES)


def test_stored_samples_as_an_ensemble(tmp_path: Path) -> None:
    nets = [mlp() for _ in range(5)]
    store = SampleStore.create(tmp_path / "s", architecture="mlp", method="test")
    for i, net in enumerate(nets):
        store.append(net.state_dict(), chain=0, step=i)
    for number, chosen in ((None, [0, 1, 2, 3, 4]), (3, [0, 2, 4])):
        expected = torch.cat([nets[i](X) for i in chosen])
        torch.testing.assert_close(posterior_ensemble(tmp_path / "s", mlp(), num_samples=number)(X), expected)
    with pytest.raises(ValueError, match="holds 5 samples"):
        posterior_ensemble(tmp_path / "s", mlp(), num_samples=6)
    with pytest.raises(SampleFileError, match="another architecture"):
        posterior_ensemble(tmp_path / "s", nn.Linear(4, 3))
