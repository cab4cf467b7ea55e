"""
A rule for your own operator
============================

Discovery has a table of rules, one for each operator of torch that it knows. One that it does not know is *pinned*: no
symmetry is claimed for what it touches, and the graph says so. A rule of a few lines lifts that, and verification tells
you if the rule is wrong.
"""

# %%
# An operator that nobody knows
# -----------------------------
# A custom operator: half of a ReLU.

import torch
from torch import nn

import tu_symmetry as tus
from tu_symmetry.rules import elementwise


@torch.library.custom_op("tutorial::half_relu", mutates_args=())
def half_relu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x.clamp(min=0)


@half_relu.register_fake
def _(x):
    return torch.empty_like(x)


class HalfReLU(nn.Module):
    def forward(self, x):
        return half_relu(x)


network = nn.Sequential(nn.Linear(5, 8), HalfReLU(), nn.Linear(8, 3))
x = torch.randn(4, 5)
graph = tus.discover_symmetries(network, x)
print(graph)

# %%
# The rule
# --------
# It acts entry by entry, and a positive factor passes through: both are said in one line. It makes zeros of different
# numbers, so that it has no trait ``"injective"``: without that, ``argmax`` behind it pins the units.


@tus.register_rule("tutorial.half_relu")
def half_relu_rule(call):
    return elementwise(call, homogeneous=True)


graph = tus.discover_symmetries(network, x)
tus.verify_symmetries(graph, network, x)
print(graph)

# %%
# The eight hidden units may be permuted and scaled. Both leave the function as it is.

moved = tus.apply_permutation(graph, tus.random_permutation(graph), network.state_dict())
moved = tus.apply_scale(graph, tus.random_scale(graph), moved)
with torch.no_grad():
    change = (torch.func.functional_call(network, moved, (x,)) - network(x)).abs().max()
print(f"largest change of an output: {float(change):.1e}")

# %%
# A rule that claims too much
# ---------------------------
# A shifted ReLU passes no factor. A rule that says so is caught before it moves any weights: the groups that fail the
# numerical check are taken out and named, and the permutation, which is right, stays.

import warnings


@torch.library.custom_op("tutorial::shifted_relu", mutates_args=())
def shifted_relu(x: torch.Tensor) -> torch.Tensor:
    return (x + 0.5).clamp(min=0)


@shifted_relu.register_fake
def _(x):
    return torch.empty_like(x)


class ShiftedReLU(nn.Module):
    def forward(self, x):
        return shifted_relu(x)


@tus.register_rule("tutorial.shifted_relu")
def shifted_relu_rule(call):
    return elementwise(call, homogeneous=True)  # wrong: the shift does not scale


wrong = nn.Sequential(nn.Linear(5, 8), ShiftedReLU(), nn.Linear(8, 3))
graph = tus.discover_symmetries(wrong, x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tus.verify_symmetries(graph, wrong, x)
print(next(str(w.message) for w in caught if issubclass(w.category, tus.SymmetryWarning)))
print("sizes of the permutation groups that stay:", [group.size for group in graph.permutations])
print("sizes of the scale groups that stay:", [group.size for group in graph.scales])
