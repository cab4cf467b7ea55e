"""Small random networks of other libraries: what each reads, and which parameters it reads apart from the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers as hf
from laplace_oracles import randomize
from torch import Tensor, nn
from torch_geometric.nn import GCN

CLASSES, WORDS = 3, 12
SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = torch.randint(1, WORDS, (5, 6), generator=GENERATOR)
IMAGES = torch.randn(5, 3, 32, 32, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 1, 0])


class Pooled(nn.Module):
    """A backbone's last hidden state, averaged over positions, and a head."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=input_ids).last_hidden_state.mean(1))


class Nodes(nn.Module):
    """A graph convolution whose graph all samples share: features ``[graphs, nodes, features]``."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = GCN(5, 8, 2, CLASSES)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolutions(x, self.edges)


def bert() -> nn.Module:
    config = hf.BertConfig(vocab_size=WORDS, max_position_embeddings=8, num_labels=CLASSES, **SIZES)
    return hf.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=4, n_layer=1, n_head=2, n_inner=6, num_labels=CLASSES, **tokens
    )
    return hf.GPT2ForSequenceClassification(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        max_position_embeddings=8,
        num_key_value_heads=1,
        num_labels=CLASSES,
        pad_token_id=0,
        **(SIZES | {"hidden_size": 8}),
    )
    return hf.LlamaForSequenceClassification(config)


def t5() -> nn.Module:
    config = hf.T5Config(vocab_size=WORDS, d_model=4, d_kv=2, d_ff=6, num_layers=1, num_heads=2)
    return Pooled(hf.T5EncoderModel(config), 4)


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, num_labels=CLASSES, **SIZES))


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(hidden_sizes=[4, 4, 6, 6], depths=[1, 1, 1, 1], num_labels=CLASSES, image_size=32)
    return hf.ConvNextForImageClassification(config)


T5_BIAS = "backbone.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
SMALL = IMAGES[..., ::2, ::2]
NODES = torch.randn(5, 4, 5, generator=GENERATOR, dtype=torch.float64)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str]]] = {
    "bert": (bert, TEXTS, {"bert.embeddings.position_embeddings.weight"}),
    "gpt2": (gpt2, TEXTS, {"transformer.wpe.weight"}),
    "llama": (llama, TEXTS, set()),
    "t5": (t5, TEXTS, {T5_BIAS, "backbone.shared.weight"}),
    "vit": (vit, SMALL, set()),
    "convnext": (convnext, IMAGES, set()),
    "resnet": (lambda: timm.create_model("test_resnet", num_classes=CLASSES), SMALL, set()),
    "efficientnet": (lambda: timm.create_model("test_efficientnet", num_classes=CLASSES), SMALL, set()),
    "gcn": (Nodes, NODES, set()),
}


def build(name: str) -> tuple[nn.Module, Any, Tensor]:
    """A network in double precision, inputs, and targets; weights are random, those of timm as they begin."""
    make, inputs, _ = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().double().eval()
    if name not in ("resnet", "efficientnet"):
        model = randomize(model, scale=0.3)
    return model, inputs, LABELS.unsqueeze(1).expand(-1, 4).clone() if name == "gcn" else LABELS
