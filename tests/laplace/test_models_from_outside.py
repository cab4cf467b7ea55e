"""Networks of transformers, timm, torch_geometric and PEFT, compiled ones and MC dropout: the defaults run, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch
import trainings
import transformers as hf
from laplace_oracles import dense_curvature, exact_ggn, fitted, mlp, randomize
from lightning.pytorch import LightningModule, Trainer
from oracle import judge
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.nn import GCN
from torch_uncertainty.methods import deep_ensembles, mc_dropout
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget

import tu_symmetry as tus
from tu_symmetry.callbacks import FitLaplace, Rebasin
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import ReadElsewhereWarning

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS, GENERATOR = 12, torch.Generator().manual_seed(0)
TEXTS = torch.randint(1, WORDS, (5, 6), generator=GENERATOR)
IMAGES = torch.randn(5, 3, 32, 32, generator=GENERATOR, dtype=torch.float64)
NODES = torch.randn(5, 4, 5, generator=GENERATOR, dtype=torch.float64)
X = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 1, 0])
SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6, "num_labels": 3}


class Nodes(GCN):
    """A graph network whose edges all samples share: features ``[graphs, nodes, features]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=WORDS, max_position_embeddings=8, **SIZES))


def gpt2() -> nn.Module:
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": WORDS, "num_labels": 3}
    return hf.GPT2ForSequenceClassification(hf.GPT2Config(n_positions=8, n_embd=4, n_layer=1, n_head=2, **tokens))


def llama() -> nn.Module:
    sizes = SIZES | {"hidden_size": 8, "num_key_value_heads": 1, "pad_token_id": 0}
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(vocab_size=WORDS, max_position_embeddings=8, **sizes))


def t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 4, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_heads": 2, "num_labels": 3}
    return hf.T5ForTokenClassification(hf.T5Config(**sizes))  # the encoder, and a head


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(hidden_sizes=[4, 4, 6, 6], depths=[1, 1, 1, 1], num_labels=3, image_size=32)
    return hf.ConvNextForImageClassification(config)


T5_BIAS = "transformer.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
SMALL = IMAGES[..., ::2, ::2]
# what builds it, what its argument is called, inputs, parameters that are read apart from the batch
MODELS: dict[str, tuple[Callable[[], nn.Module], str, Tensor, list[str]]] = {
    "bert": (bert, "input_ids", TEXTS, ["bert.embeddings.position_embeddings.weight"]),
    "gpt2": (gpt2, "input_ids", TEXTS, ["transformer.wpe.weight"]),
    "llama": (llama, "input_ids", TEXTS, []),
    "t5": (t5, "input_ids", TEXTS, ["transformer.shared.weight", T5_BIAS]),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, **SIZES)),
        "pixel_values",
        SMALL,
        [],
    ),
    "convnext": (convnext, "pixel_values", IMAGES, []),
    "resnet": (lambda: timm.create_model("test_resnet", num_classes=3), "x", SMALL, []),
    "efficientnet": (lambda: timm.create_model("test_efficientnet", num_classes=3), "x", SMALL, []),
    "gcn": (lambda: Nodes(5, 8, 2, 3), "x", NODES, []),
}


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in double precision with random weights (of timm: as they begin, lest they blow up), and a batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name][0]().double().eval()
    if MODELS[name][1] != "x":
        model = randomize(model, scale=0.3)
    positions = {"t5": 6, "gcn": 4}.get(name)
    return model, MODELS[name][2], LABELS.unsqueeze(1).expand(-1, positions).clone() if positions else LABELS


class Logits(nn.Sequential):
    """What an oracle differentiates: the tensor in an output."""

    def forward(self, x: Tensor) -> Tensor:
        found = self[0](x)
        return getattr(found, "logits", found)


class Routine(LightningModule):
    """Trains on the mappings of a collator."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        found = Logits(self.model)(batch[self.name])
        return nn.functional.cross_entropy(found.flatten(0, -2), batch["labels"].flatten())

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(MODELS))
def test_defaults_fit_predict_save_and_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Of FitLaplace, which looks for symmetries once, and of LinearizedLaplace.

    What has no Kronecker factors is exact: its block is that of the Gauss-Newton matrix from dense Jacobians.
    """
    discover = Mock(side_effect=tus.discover_symmetries)
    monkeypatch.setattr("tu_symmetry.symmetry.discovery.discover_symmetries", discover)
    (model, x, y), (_, argument, _, shared) = build(name), MODELS[name]
    rows = [{argument: a, "labels": b} for a, b in zip(x, y, strict=True)]
    callback = FitLaplace(budget=None, max_iterations=2)
    trainer = trainings.trainer(callback, max_epochs=1, precision="64-true")
    trainer.fit(Routine(model, argument), DataLoader(rows[:3], batch_size=2), DataLoader(rows[3:], batch_size=2))
    model.eval()
    assert discover.call_count == 1
    last, *fits = [fit.laplace for fit in callback.fits[0]]
    assert (last is None) == (name in ("gpt2", "llama", "gcn")) and len(fits) == 2 and callback.calibration is not None
    training = [({argument: a}, b) for a, b in zip(x[:3].split(2), y[:3].split(2), strict=True)]
    la = LinearizedLaplace(model, "classification").fit(training)
    la.optimize_evidence(max_iterations=2)
    assert la.prior == "per_group" and la.evaluate_at == "tangent_mode"
    for parameter in shared:
        expected = exact_ggn(Logits(model), [f"0.{parameter}"], x[:3], y[:3], "classification")
        (block,) = (b for b in la.posterior.blocks if b.name == parameter)
        found = block.from_basis(block.to_basis(torch.eye(len(expected)).double()) * block.eigenvalues())
        limit = 1e-6 * float(expected.abs().max())  # some normalize in single precision
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=limit)
        assert limit > 0 and parameter in la.fitted.curvature.whole
    said = [str(w.message) for w in recwarn if issubclass(w.category, ReadElsewhereWarning)]
    assert bool(said) == bool(shared) and all(shared[0] in text for text in said)
    found = la.predictive({argument: x}, num_samples=3)
    torch.testing.assert_close(found.sum(-1), torch.ones(y.shape, dtype=torch.float64))
    la.save(tmp_path / "la.safetensors")
    loaded = LinearizedLaplace.load(tmp_path / "la.safetensors", model)
    torch.testing.assert_close(loaded.predictive({argument: x}, num_samples=3), found)


HEADS = [2, 2, 2, 4]  # heads, units that queries and keys have in each, values likewise, the width of all
SYMMETRIES = {
    "bert": [*HEADS, 4, 6],
    "gpt2": [*HEADS, 16],
    "llama": [2, 4, 6, 8],
    "t5": [*HEADS, 6],
    "vit": [*HEADS, 6],
}


@pytest.mark.parametrize(("name", "sizes"), [*SYMMETRIES.items(), ("gcn", [8])])
def test_their_symmetries(name: str, sizes: list[int]) -> None:
    """Of heads too: the keys and values that a network caches are none of its outputs."""
    model, x, _ = build(name)
    graph = tus.discover_symmetries(model, x[:2])
    tus.verify_symmetries(graph, model, x[:2])
    assert sorted(group.size for group in graph.permutations) == sizes
    assert not judge(graph, model, (x[:2],)).wrong


@pytest.mark.parametrize("samples", [1, 2])
def test_a_first_batch_of_any_size_tells_what_is_shared(samples: int) -> None:
    """One sample looks like numbers of positions ``[1, n]``."""
    model, x, y = build("bert")
    found = LinearizedLaplace(model, prior="single").fit([(x[:samples], y[:samples]), (x[samples:], y[samples:])])
    expected = LinearizedLaplace(model, prior="single").fit([(x, y)])
    torch.testing.assert_close(dense_curvature(found), dense_curvature(expected))


def test_what_cannot_be_done_names_what_can() -> None:
    batch = ({"x": X, "edge_index": torch.tensor([[0, 1, 2], [1, 2, 0]])}, LABELS)
    with pytest.raises(ValueError, match=r"\(5, 4\), \(2, 3\).*edges of a graph, belongs into a module as a buffer"):
        LinearizedLaplace(GCN(4, 8, 2, 3).eval()).fit([batch])

    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if x.sum() > 0 else 2)

    with pytest.raises(tus.SymmetryError, match=r"branches on the values(?s:.*)prior='per_layer'"):
        LinearizedLaplace(randomize(Branching(nn.Linear(4, 3)))).fit([(X, LABELS)])
    compiled = torch.compile(mlp(), backend="eager")
    with pytest.raises(ValueError, match=r"graph= is of another network \(no \['_orig_mod\.0\.weight'"):
        LinearizedLaplace(compiled, graph=tus.discover_symmetries(compiled, X)).fit([(X, LABELS)])


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "compiled_part": lambda m: nn.Sequential(torch.compile(m, backend="eager")),
    "compiled_in_place": lambda m: (m.compile(backend="eager"), m)[1],
    "mc_dropout": lambda m: mc_dropout(m, 4).eval(),
    "mc_dropout_loop": lambda m: mc_dropout(m, 4, on_batch=False).eval(),
}


def dropping() -> nn.Module:
    return randomize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)))


@pytest.mark.parametrize("around", list(AROUND))
def test_what_is_around_a_network_changes_nothing(around: str, tmp_path: Path) -> None:
    wrapped = AROUND[around](dropping())
    modes = {name: m.training for name, m in wrapped.named_modules()}
    expected, la = (fitted(m, X, LABELS) for m in (dropping(), wrapped))
    torch.testing.assert_close(dense_curvature(la), dense_curvature(expected))
    la.save(tmp_path / "la.safetensors")
    loaded = LinearizedLaplace.load(tmp_path / "la.safetensors", wrapped)
    torch.testing.assert_close(loaded.predictive(X), expected.predictive(X))
    graph, state = tus.discover_symmetries(wrapped, X), wrapped.state_dict()
    assert [group.size for group in graph.permutations] == [5]
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(2))
    states, loss = [state, tus.apply_permutation(graph, planted, state)], nn.functional.cross_entropy
    merged = tus.merge(graph, states, wrapped, [(X, LABELS)], loss=loss)
    torch.testing.assert_close(dict(merged.state), dict(state))
    assert merged.scores["aligned"]["loss"] == pytest.approx(float(loss(dropping()(X), LABELS)), rel=1e-6)
    assert {name: m.training for name, m in wrapped.named_modules()} == modes


def test_adapters_of_peft() -> None:
    """They alone are uncertain, exactly as in a network with all else frozen, and their ranks are units, too."""
    network, x, y = build("bert")
    model = randomize(get_peft_model(network, LoraConfig(target_modules=["query", "value"], r=2)), scale=0.3)
    la = LinearizedLaplace(model, curvature="full").fit([(x, y)])
    assert len(la.tangent.names) == 4 and all("lora" in name for name in la.tangent.names)
    expected = exact_ggn(Logits(model), [f"0.{name}" for name in la.tangent.names], x, y, "classification")
    torch.testing.assert_close(dense_curvature(la), expected, rtol=1e-6, atol=1e-9)
    model = randomize(get_peft_model(mlp(), LoraConfig(target_modules=["0"], r=2)))
    graph, state = tus.discover_symmetries(model, X), model.state_dict()
    assert sorted(group.size for group in graph.permutations) == [2, 5]
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(2))
    (found,) = tus.align(graph, [tus.apply_permutation(graph, planted, state)], reference=state).states
    torch.testing.assert_close(dict(found), dict(state))


def train(model: nn.Module, callback: Any, members: int = 1) -> DataLoader[Any]:
    """By TorchUncertainty's routine."""
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=3)
    options = {"is_ensemble": True, "format_batch_fn": RepeatTarget(members), "loss": nn.CrossEntropyLoss()}
    recipe = {"optimizer": torch.optim.SGD(model.parameters(), lr=1e-2)}
    routine = ClassificationRoutine(model=model, num_classes=3, optim_recipe=recipe, **options)
    trainings.trainer(callback, max_epochs=1, precision="64-true").fit(routine, loader, loader)
    return loader


def test_mc_dropout_is_one_network() -> None:
    core, callback = dropping(), FitLaplace(evaluate_at="map", calibrate=False)
    loader = train(mc_dropout(core, 4), callback)
    assert [la.model for la in callback.laplaces] == [core]
    expected = LinearizedLaplace(copy.deepcopy(core).eval(), evaluate_at="map").fit(loader)
    expected.optimize_evidence()
    torch.testing.assert_close(callback.laplaces[0].predictive(X), expected.predictive(X), rtol=1e-3, atol=1e-5)


def test_members_with_mc_dropout_are_aligned() -> None:
    first, second = mc_dropout(dropping(), 4), mc_dropout(dropping(), 4)
    graph = tus.discover_symmetries(first, X)
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(1))
    second.load_state_dict(tus.apply_permutation(graph, planted, first.state_dict()))
    callback = Rebasin(barrier_loader="val", in_place=True)
    train(deep_ensembles([first, second]), callback, members=2)
    (record,) = callback.history
    assert record["NoT"] == [tus.transposition_count(planted)]
    assert record["distance_after"][0] < record["distance_before"][0]


def test_fit_laplace_after_a_training_of_adapters() -> None:
    """A callback without options finds the adapters, which alone were trained, or the last layer behind them."""
    network, x, y = build("bert")
    model = get_peft_model(network.float(), LoraConfig(target_modules=["query", "value"], r=2))

    class Adapters(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any) -> Any:
            return Logits(self.model)(inputs)

        def training_step(self, batch: Any, _: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-2)

    callback, loader = FitLaplace(budget=None), DataLoader(TensorDataset(x, y), len(x))
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    Trainer(max_epochs=2, callbacks=[callback], **options).fit(Adapters(), loader, loader)
    assert callback.laplace is not None and callback.calibration is not None
    assert callback.calibration.calibrated.nll <= callback.calibration.network.nll + 1e-6
    torch.testing.assert_close(callback.laplace.predictive(x).sum(-1), torch.ones(len(x)))
