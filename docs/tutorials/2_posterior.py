"""
What your ensemble's posterior looks like without symmetries
============================================================

An ensemble is a set of samples from a posterior. Summarize it by a Gaussian, one mean and one standard deviation for
each weight, and much of the spread that you see is not uncertainty: it is the arbitrary order of hidden units. Without
it the Gaussian is narrower, and its draws are networks that work.
"""

# %%
# An ensemble
# -----------
# Six perceptrons on scikit-learn's digits, from different seeds.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import tu_symmetry as tus

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    network = perceptron()
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=1e-3)
    for _ in range(15):
        for batch in train[torch.randperm(len(train))].split(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    return network.state_dict()


states = [trained(seed) for seed in range(6)]

# %%
# How far apart are they?
# -----------------------
# NoT, the number of transpositions, counts the swaps of two units that bring one network into the order of another. For
# networks that were trained apart it is that of a random permutation: they share no order at all.

graph = tus.discover_symmetries(perceptron(), images[:2])
aligned = tus.align(graph, states, reference="first")
print("swaps to the order of the first network:", *aligned.transpositions)
print(f"distance of the weights: {aligned.distances_before[1]:.1f} before, {aligned.distances_after[1]:.1f} after")

# %%
# The Gaussian before and after
# -----------------------------
# q_d is fitted to the networks as they are, q_r to the aligned ones.

q_d = tus.CompactPosterior.from_states(states, graph, align=False)
q_r = tus.CompactPosterior.from_states(states, graph, align=True)

figure, axes = plt.subplots(figsize=(6, 3.5))
for name, posterior in {"as they are (q_d)": q_d, "aligned (q_r)": q_r}.items():
    deviations = torch.cat([s.flatten() for s in posterior.std.values()])
    axes.hist(deviations.numpy(), bins=60, alpha=0.6, label=name)
axes.set(xlabel="standard deviation of a weight", ylabel="number of weights")
axes.legend()
figure.tight_layout()

# %%
# Draws that work
# ---------------
# The accuracy of the mean, and of the average prediction of 20 draws. The ensemble and one member alone stand beside
# them: alignment makes the Gaussian usable, and need not make it better than what it was fitted to.


def accuracy(states: list[dict[str, torch.Tensor]]) -> float:
    outputs = [torch.func.functional_call(perceptron(), state, (images[test],)).softmax(-1) for state in states]
    return float((torch.stack(outputs).mean(0).argmax(-1) == labels[test]).float().mean())


for name, posterior in {"q_d": q_d, "q_r": q_r}.items():
    stack = posterior.sample(20, generator=torch.Generator().manual_seed(0))
    draws = [{key: tensor[k] for key, tensor in stack.items()} for k in range(20)]
    print(f"{name}: accuracy of its mean {accuracy([posterior.mean]):.3f}, of 20 draws {accuracy(draws):.3f}")
print(f"the ensemble itself: {accuracy(states):.3f}; its first member alone: {accuracy(states[:1]):.3f}")

# %%
# Keep it
# -------
# ``q_r.save("q_r.safetensors")`` writes the posterior, and ``q_r.as_module(perceptron(), 10)`` is ten draws as one
# module that TorchUncertainty's routines evaluate as an ensemble.

ensemble = q_r.as_module(perceptron(), 10)
print("logits of ten draws for three images, one below the other:", tuple(ensemble(images[:3]).shape))
