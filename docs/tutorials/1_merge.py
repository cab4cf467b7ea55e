"""
Merge two networks
==================

Two networks that were trained apart share no order of their hidden units. Their plain average therefore mixes units
that have nothing to do with each other, and predicts badly. Permuting the units of one network so that they match the
other changes neither function, and makes the average a good network.
"""

# %%
# Two trained networks
# --------------------
# Two perceptrons with three hidden layers and batch normalization, from different seeds and on different halves of
# scikit-learn's digits.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tu_symmetry as tus

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
labels = torch.tensor(digits.target)[order]
halves = [slice(0, 700), slice(700, 1400)]
test = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=400)
training = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=100)


def perceptron() -> nn.Module:
    hidden = [(nn.Linear(n, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU()) for n in (64, 96, 96)]
    return nn.Sequential(*(layer for block in hidden for layer in block), nn.Linear(96, 10))


def train(seed: int, rows: slice) -> nn.Module:
    torch.manual_seed(seed)
    network = perceptron()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(15):
        for batch in torch.randperm(700).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[rows][batch]), labels[rows][batch]).backward()
            optimizer.step()
    return network.eval()


networks = [train(seed, rows) for seed, rows in enumerate(halves)]
states = [network.state_dict() for network in networks]

# %%
# What may be permuted
# --------------------
# Discovery needs the architecture and an example input. Nothing is annotated; the statistics of the normalization move
# along with the units.

graph = tus.discover_symmetries(perceptron().eval(), images[:2])
print(graph)

# %%
# Align and average
# -----------------
# ``merge`` aligns, averages, re-estimates the running statistics, which averaging breaks, and measures every step. One
# network that has seen both halves of the data need not be better than the best that has seen one; compare them.

accuracy = {"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()}
merged = tus.merge(
    graph,
    states,
    perceptron(),
    training,
    correction="batchnorm",
    loss=nn.functional.cross_entropy,
    metrics=accuracy,
    validation=test,
)
for k, scores in enumerate(merged.members):
    print(f"network {k}: loss {scores['loss']:.3f}, accuracy {scores['accuracy']:.3f}")
for step, scores in merged.scores.items():
    print(f"average, {step}: loss {scores['loss']:.3f}, accuracy {scores['accuracy']:.3f}")

# %%
# The way from one network to the other
# -------------------------------------
# The loss on the straight line between the two, as they are and after alignment. The height above the straight line
# between the ends is the *barrier*.

aligned = tus.align(graph, states, reference="first").states
figure, axes = plt.subplots(figsize=(6, 3.5))
for name, second in {"as they are": states[1], "aligned": aligned[1]}.items():
    barrier = tus.loss_barrier(perceptron(), states[0], second, test, nn.functional.cross_entropy)
    axes.plot(barrier.ratios, barrier.losses, marker="o", label=f"{name}: barrier {barrier.barrier:.2f} nats")
axes.set(xlabel="share of the second network", ylabel="test loss in nats")
axes.legend()
figure.tight_layout()

# %%
# Use it
# ------
# The result is an ordinary state dict.

network = perceptron()
network.load_state_dict(merged.state)
network.eval()
print(f"accuracy of the merged network: {(network(images[1400:]).argmax(-1) == labels[1400:]).float().mean():.3f}")
