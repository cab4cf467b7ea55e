"""Random modules for the symmetry tests: ordinary torch code, made from a seed.

Building a module is writing its source and executing it, so that what is tested, what is printed in a failure and what a
user would write are the same text. The generator keeps a pool of values, computed as it goes: an operator (``@operator``
below) looks at their shapes, and one that does not fit draws something else. Some operators *plant* a hidden layer that
nothing else can touch: ``Module.planted`` names those that an output depends on, a lower bound on what has to be found.
"""

from __future__ import annotations

import itertools
import linecache
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

IMPORTS = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


def executed(source: str, name: str, space: dict[str, Any]) -> dict[str, Any]:
    """The names that a source defines, which tracebacks show."""
    file = f"<{name} {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = dict(space)
    exec(compile(source, file, "exec"), space)
    return space


@dataclass(frozen=True)
class Node:
    """A few lines of a module, with the names of the values that they read and make."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    lines: tuple[str, ...]  # of ``forward``
    init: tuple[str, ...] = ()  # lines of ``__init__``
    planted: tuple[str, ...] = ()  # parameters whose first axis is a planted hidden layer
    kind: str = ""  # the operator that made it


@dataclass(frozen=True)
class Module:
    """A random module: its inputs (name to the expression that makes one), its nodes, and the names that it returns."""

    inputs: dict[str, str]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()  # arguments of ``forward`` that may be left out

    @property
    def source(self) -> str:
        """Source code of the class and of ``inputs``, runnable as it stands."""
        init, lines = (
            "".join(f"        {line}\n" for node in self.nodes for line in getattr(node, part))
            for part in ("init", "lines")
        )
        returned = self.outputs[0] if len(self.outputs) == 1 else f"({', '.join(self.outputs)})"
        return (
            f"{IMPORTS}\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n"
            f"    def forward(self, {', '.join((*self.inputs, *self.options))}):\n{lines}        return {returned}\n\n\n"
            f"model = Net().eval()\ninputs = ({''.join(f'{e}, ' for e in self.inputs.values())})\n"
        )

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
        """The module in evaluation mode, and its inputs; weights are torch's own, seeded."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            space = executed(self.source, "random module", {"__name__": "random_module"})
        return space["model"], space["inputs"]

    @property
    def live(self) -> set[str]:
        """Names that the outputs depend on."""
        needed = set(self.outputs)
        for node in reversed(self.nodes):
            if needed & set(node.makes):
                needed |= set(node.reads)
        return needed

    @property
    def planted(self) -> list[str]:
        """Parameters whose first axis is a planted hidden layer that the outputs depend on."""
        live = self.live
        return [name for node in self.nodes if live & set(node.makes) for name in node.planted]


# -- the generator ----------------------------------------------------------------------------------------------------


class Unfit(Exception):
    """An operator found no value that it fits."""


class Builder:
    """Makes nodes, and keeps the values that they make to know their shapes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.numbers = itertools.count()
        self.space: dict[str, Any] = {"self": nn.Module(), "torch": torch, "nn": nn, "F": nn.functional}
        self.inputs: dict[str, str] = {}
        self.pool: list[str] = []  # floating-point values, oldest first
        self.nodes: list[Node] = []
        self.layers: list[tuple[str, int]] = []  # linear layers that may be called again, with their input sizes
        self.kind = ""

    def fresh(self, letter: str) -> str:
        return f"{letter}{next(self.numbers)}"

    def width(self) -> int:
        return self.random.choice((2, 3, 4, 4, 5, 6, 6, 8))

    def flip(self, p: float = 0.5) -> bool:
        return self.random.random() < p

    def among(self, *options: Any) -> Any:
        return self.random.choice(options)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.space[name].shape)

    def values(self, *ndims: int, where: Callable[[tuple[int, ...]], bool] = lambda _: True) -> list[str]:
        return [n for n in self.pool if len(self.shape(n)) in ndims and where(self.shape(n))]

    def pick(self, *ndims: int, where: Callable[[tuple[int, ...]], bool] = lambda _: True) -> str:
        """A value of one of the given numbers of axes, rather a late one than an early one."""
        found = self.values(*ndims, where=where)
        if not found:
            raise Unfit
        return found[-1 - min(int(self.random.expovariate(0.7)), len(found) - 1)]

    def like(self, name: str) -> str:
        """Another value of the same shape."""
        shape = self.shape(name)
        found = [n for n in self.pool if n != name and self.shape(n) == shape]
        if not found:
            raise Unfit
        return self.random.choice(found)

    def add(
        self, reads: tuple[str, ...], forward: str | list[str], init: list[str] | None = None, *, makes: int = 1,
        planted: list[str] | None = None, **values: Any,
    ) -> str:  # fmt: skip
        """Add a node, ``{0} = forward`` or lines; ``{0}``, ``{1}`` are the new names, others stand in ``values``."""
        names = tuple(self.fresh("h") for _ in range(makes))
        values |= {str(k): name for k, name in enumerate(names)}

        def filled(line: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]), line)

        lines = [filled(line) for line in (["{0} = " + forward] if isinstance(forward, str) else forward)]
        reads = tuple(r for r in dict.fromkeys(reads) if any(re.search(rf"\b{r}\b", line) for line in lines))
        made = tuple(filled(line) for line in init or ())
        node = Node(reads, names, tuple(lines), made, tuple(planted or ()), self.kind)
        with torch.no_grad():
            exec("\n".join((*node.init, *node.lines)), self.space)
        for name in names:
            value = self.space[name]
            if not isinstance(value, Tensor) or value.is_complex() or value.numel() > 4000 or value.numel() == 0:
                raise Unfit
            if value.dtype == torch.float32 and not bool(value.isfinite().all()):
                raise Unfit
        self.nodes.append(node)
        self.pool += [n for n in names if self.space[n].dtype == torch.float32]
        return names[0]

    def linear(self, value: str, out: int | None = None, *, bias: bool | None = None) -> tuple[str, str]:
        """A linear layer for the last axis of a value: its name, and the line that makes it."""
        name, size = self.fresh("l"), self.shape(value)[-1]
        out = out or self.width()
        bias = self.flip(0.8) if bias is None else bias
        return name, f"self.{name} = nn.Linear({size}, {out}{'' if bias else ', bias=False'})"

    def parameter(self, *shape: int) -> tuple[str, str]:
        name = self.fresh("p")
        return name, f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, shape)) or '()'}))"

    def axis(self, value: str) -> int:
        """Where a value has its features: last, or first after the batch for an image."""
        return 1 if len(self.shape(value)) == 4 else len(self.shape(value)) - 1


Operator = Callable[[Builder], Any]
OPERATORS: list[tuple[Operator, float]] = []
BEYOND: list[tuple[Operator, float]] = []


def operator(weight: float, into: list[tuple[Operator, float]] = OPERATORS) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        into.append((function, weight))
        return function

    return register


def beyond(weight: float) -> Callable[[Operator], Operator]:
    """An operator that does something else on other inputs, or in training, than on the example."""
    return operator(weight, BEYOND)


ACTIVATIONS = (
    "torch.relu({0})", "torch.relu({0})", "F.relu({0})", "torch.tanh({0})", "F.gelu({0})", "F.leaky_relu({0}, 0.1)",
    "torch.sigmoid({0})", "{0}.abs()", "torch.sin({0})", "F.silu({0})", "F.elu({0})", "F.hardtanh({0})", "F.relu6({0})",
    "{0} ** 2", "{0} * {0}", "torch.relu({0}) ** 2", "-{0}", "2.0 * {0}", "{0} / 3", "{0}.clamp(min=0)", "{0}.clamp(-1, 1)",
    "F.softplus({0})", "torch.exp(-{0}.abs())", "({0}.abs() + 1e-6).sqrt()", "torch.atan({0})", "{0}.sign() * {0}",
    "F.dropout({0}, 0.5, self.training)", "{0}.clone()", "{0}.detach()", "{0}.contiguous()", "F.mish({0})",
    "torch.where({0} > 0, {0}, 0.3 * {0})", "F.threshold({0}, 0.0, 0.0)", "{0}.float()", "torch.square({0})",
    "{0} + (torch.relu({0}) - {0}).detach()", "1 - {0}", "{0} + 1", "{0} * 0.5 - 0.1", "torch.clamp({0}, min=1e-6)",
    "F.hardswish({0})", "torch.addcmul({0}, {0}, {0}, value=0.5)", "torch.lerp({0}, torch.relu({0}), 0.3)",
    "{0}.masked_fill({0} < 0, 0.0)", "{0} * ({0} > 0)", "torch.nan_to_num({0})", "torch.logit({0}.sigmoid() * 0.9 + 0.05)",
)  # fmt: skip


# the linear family, and what is planted


@operator(4)
def linear(b: Builder) -> None:
    h = b.pick(2, 3)
    name, line = b.linear(h)
    b.layers.append((name, b.shape(h)[-1]))
    b.add((h,), f"self.{name}({h})", [line])


@operator(4)
def planted_layer(b: Builder) -> None:
    h = b.pick(2, 3)
    (up, up_line), width = b.linear(h, size := b.width()), size
    down = b.fresh("l")
    act = b.among(*ACTIVATIONS).format(f"self.{up}({h})")
    init = [up_line, f"self.{down} = nn.Linear({width}, {b.width()})"]
    b.add((h,), f"self.{down}({act})", init, planted=[f"{up}.weight"])


@operator(6)
def activation(b: Builder) -> None:
    h = b.pick(2, 3, 4)
    b.add((h,), b.among(*ACTIVATIONS).format(h))


@operator(2)
def layer_and_activation(b: Builder) -> None:
    h = b.pick(2, 3)
    name, line = b.linear(h)
    b.layers.append((name, b.shape(h)[-1]))
    b.add((h,), b.among(*ACTIVATIONS[:8]).format(f"self.{name}({h})"), [line])


@operator(1.5)
def called_again(b: Builder) -> None:
    name, size = b.random.choice(b.layers) if b.layers else ("", 0)
    h = b.pick(2, 3, where=lambda s: s[-1] == size)
    b.add((h,), f"self.{name}({h})")


@operator(1.5)
def tied(b: Builder) -> None:
    if not b.layers:
        raise Unfit
    name, size = b.random.choice(b.layers)
    out = b.space["self"].get_submodule(name).out_features
    style = b.among("transposed", "same", "object", "embedding")
    if style == "transposed":
        h = b.pick(2, 3, where=lambda s: s[-1] == out)
        b.add((h,), b.among(f"{h} @ self.{name}.weight", f"F.linear({h}, self.{name}.weight.t())"))
    elif style == "same":
        h = b.pick(2, 3, where=lambda s: s[-1] == size)
        b.add((h,), b.among(f"{h} @ self.{name}.weight.T", f"F.linear({h}, self.{name}.weight)"))
    elif style == "object":
        h = b.pick(2, 3, where=lambda s: s[-1] == size)
        new = b.fresh("l")
        init = [f"self.{new} = nn.Linear({size}, {out})", f"self.{new}.weight = self.{name}.weight"]
        b.add((h,), f"self.{new}({h})", init)
    else:
        h = b.pick(2, 3, where=lambda s: s[-1] == size)
        b.add((h,), f"{h} + self.{name}.weight.mean(0)")


# sums of two values


@operator(5)
def residual(b: Builder) -> None:
    h = b.pick(2, 3, 4)
    g = b.like(h)
    h, g = (h, g) if b.flip() else (g, h)
    form = b.among(
        "{0} + {1}", "{0} + {1}", "{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})",
        "torch.where({0} > {1}, {0}, {1})", "torch.add({0}, {1}, alpha=0.5)", "{0} * torch.sigmoid({1})",
        "torch.stack([{0}, {1}]).mean(0)", "torch.stack([{0}, {1}], -1).amax(-1)", "0.5 * ({0} + {1})",
        "torch.relu({0} + {1})", "{0} + {1}.detach()", "torch.lerp({0}, {1}, 0.3)", "({0}, {1})[0] + ({0}, {1})[1]",
    )  # fmt: skip
    b.add((h, g), form.format(h, g))


@operator(3)
def residual_branch(b: Builder) -> None:
    h = b.pick(2, 3)
    name, line = b.linear(h, b.shape(h)[-1])
    act = b.among(*ACTIVATIONS[:8])
    form = b.among("{0} + {1}", "{1} + {0}", "{0} * torch.sigmoid({1})", "{1} - {0}", "{0} + 0.1 * {1}")
    b.add((h,), form.format(h, act.format(f"self.{name}({h})")), [line])


@operator(2)
def matched_sum(b: Builder) -> None:
    h, g = b.pick(2, 3), b.pick(2, 3)
    if len(b.shape(h)) != len(b.shape(g)) or h == g:
        raise Unfit
    name, line = b.linear(g, b.shape(h)[-1])
    form = b.among("{0} + {1}", "{1} + {0}", "torch.relu({0}) + {1}", "torch.relu({0} + {1})")
    b.add((h, g), form.format(h, f"self.{name}({g})"), [line])


@operator(2)
def joined(b: Builder) -> None:
    h = b.pick(2, 3, 4)
    axis = b.axis(h)
    shape = b.shape(h)
    g = b.pick(len(shape), where=lambda s: s[:axis] == shape[:axis] and s[axis + 1 :] == shape[axis + 1 :])
    form = b.among("torch.cat([{0}, {1}], {2})", "torch.cat([{0}, {0}], {2})", "torch.cat([{1}, {0}, {1}], {2})",
                   "torch.cat([torch.relu({0}), torch.relu(-{0})], {2})", "torch.hstack([{0}, {1}])" if axis == 1
                   else "torch.cat(({0}, {1}), {2})")  # fmt: skip
    b.add((h, g), form.format(h, g, axis))


# constants


@operator(3)
def padded(b: Builder) -> None:
    h = b.pick(2, 3, 4)
    shape, axis = b.shape(h), b.axis(h)
    lo, hi = b.among((1, 1), (0, 2), (2, 0), (1, 2), (0, 1))
    if len(shape) == 4:
        lines = [
            f"F.pad({h}, (0, 0, 0, 0, {lo}, {hi}))",
            f"torch.cat([{h}, torch.zeros_like({h})], 1)",
            f"torch.cat([{h}, torch.zeros({shape[0]}, {hi + 1}, {shape[2]}, {shape[3]})], 1)",
        ]
    else:
        rest = ", ".join(map(str, shape[:-1]))
        lines = [
            f"F.pad({h}, ({lo}, {hi}))",
            f"F.pad({h}, ({lo}, {hi}), value=1.0)",
            f"torch.cat([{h}, torch.zeros({rest}, 2)], -1)",
            f"torch.cat([torch.ones({rest}, 1), {h}], -1)",
            f"torch.cat([{h}, torch.zeros_like({h})], -1)",
            f"torch.cat([{h}, torch.full(({rest}, 2), 0.5), torch.zeros({rest}, 1)], -1)",
            f"torch.cat([{h}, {h}.new_zeros({rest}, 2)], dim={axis})",
        ]
    p = b.add((h,), b.random.choice(lines))
    if len(shape) < 4 and b.flip(0.8):  # and something is added to units and constants alike
        g = b.pick(len(shape), where=lambda s: s[:-1] == shape[:-1])
        name, line = b.linear(g, b.shape(p)[-1])
        form = b.among(
            "{0} + {1}", "{1} + {0}", "torch.relu({0} + {1})", "{0} * {1}", "{0} - {1}", "torch.maximum({0}, {1})"
        )
        b.add((p, g), form.format(p, f"self.{name}({g})"), [line])


@operator(2)
def constant_vector(b: Builder) -> None:
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    name = b.fresh("c")
    numbers = str([b.among(0.0, 1.0, 1.0, 0.5, -1.0) for _ in range(n)])
    form = b.among(
        "{0} * {1}", "{0} + {1}", "{1} + {0}", "torch.where({1} > 0, {0}, torch.relu({0}))", "{0} * {1} + {1}"
    )
    where = b.among("literal", "attribute", "buffer", "transient", "computed")
    if where == "literal":
        b.add((h,), form.format(h, f"torch.tensor({numbers})"))
    elif where == "attribute":
        b.add((h,), form.format(h, f"self.{name}"), [f"self.{name} = torch.tensor({numbers})"])
    elif where == "computed":
        made = b.among(f"torch.arange({n})", f"torch.linspace(0, 1, {n})", f"torch.ones({n})", f"(torch.arange({n}) % 2)",
                       f"(torch.arange({n}) // 2).float()", f"torch.eye({n})[0]", f"torch.full(({n},), 0.3)")  # fmt: skip
        b.add((h,), form.format(h, made))
    else:
        last = ", persistent=False" if where == "transient" else ""
        b.add((h,), form.format(h, f"self.{name}"), [f'self.register_buffer("{name}", torch.tensor({numbers}){last})'])


@operator(2)
def mask(b: Builder) -> None:
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    name = b.fresh("m")
    bits = [b.flip() for _ in range(n)]
    style = b.among("bool", "int", "index", "keep", "weights", "position")
    register = f'self.register_buffer("{name}", torch.tensor({{}}))'
    if style == "bool":
        form = b.among("{0} * self.{1}", "{0}.masked_fill(self.{1}, 0.0)", "torch.where(self.{1}, {0}, torch.tanh({0}))",
                       "{0}.masked_fill(~self.{1}, 0.5)", "{0} * self.{1}.float()")  # fmt: skip
        b.add((h,), form.format(h, name), [register.format(bits)])
    elif style == "int":
        b.add((h,), f"{h} * self.{name}", [register.format([b.among(0, 1, 1, 2) for _ in range(n)])])
    elif style == "index":
        order = b.random.sample(range(n), n)
        form = b.among("{0}[..., self.{1}]", "{0}.index_select(-1, self.{1})", "{0}.index_select(-1, self.{1}) + {0}")
        b.add((h,), form.format(h, name), [register.format(order)])
    elif style == "keep":
        kept = sorted(b.random.sample(range(n), b.random.randint(1, n)))
        b.add((h,), f"{h}[..., self.{name}]", [register.format(kept)])
    elif style == "weights":
        out = b.width()
        layer, line = b.linear(h, out)
        rows = [[b.flip(0.6) for _ in range(n)] for _ in range(out)]
        form = f"F.linear({h}, self.{layer}.weight * self.{name})"
        b.add((h,), form, [line, register.format(rows if b.flip() else [[float(x) for x in r] for r in rows])])
    else:
        T = b.shape(h)[1] if len(b.shape(h)) == 3 else 0
        if not T:
            raise Unfit
        b.add((h,), f"{h} * self.{name}", [register.format([[float(b.flip())] for _ in range(T)])])


@operator(1.5)
def edited_weight(b: Builder) -> None:
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    layer, line = b.linear(h, n)
    form = b.among(
        "F.linear({h}, self.{l}.weight + torch.eye({n}))", "{h} @ (self.{l}.weight + torch.eye({n}))",
        "F.linear({h}, self.{l}.weight.triu())", "F.linear({h}, self.{l}.weight + self.{l}.weight.T)",
        "F.linear({h}, F.normalize(self.{l}.weight, dim=1))", "F.linear({h}, self.{l}.weight / self.{l}.weight.norm())",
        "F.linear({h}, self.{l}.weight.softmax(-1))", "F.linear({h}, self.{l}.weight.abs())",
        "F.linear({h}, self.{l}.weight - self.{l}.weight.mean(1, keepdim=True))", "F.linear({h}, self.{l}.weight.flip(0))",
        "F.linear({h}, torch.sigmoid(self.{l}.weight))", "F.linear({h}, self.{l}.weight * self.{l}.weight)",
        "{h} @ torch.block_diag(self.{l}.weight[:1, :1], self.{l}.weight[1:, 1:])", "F.linear({h}, self.{l}.weight.sign())",
        "F.linear({h}, torch.roll(self.{l}.weight, 1, 0))", "F.linear({h}, self.{l}.weight.detach().clone())",
        "{h} + {h} @ self.{l}.weight", "F.linear({h}, self.{l}.weight.cumsum(0))",
    )  # fmt: skip
    b.add((h,), form.format(h=h, l=layer, n=n), [line])


@operator(2)
def own_parameter(b: Builder) -> None:
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    style = b.among(
        "gain", "gain", "bias", "scalar", "one", "both", "complex", "view", "prelu", "token", "matrix", "exp"
    )
    if style in ("gain", "bias", "exp"):
        name, line = b.parameter(n)
        form = {"gain": "{0} * self.{1}", "bias": "{0} + self.{1}", "exp": "{0} * torch.exp(self.{1})"}[style]
        b.add((h,), form.format(h, name), [line])
    elif style == "scalar":
        name, line = b.parameter()
        form = b.among(
            "{0} * self.{1}", "{0} + self.{1} * torch.tanh({0})", "torch.relu({0}) * self.{1}", "{0} + self.{1}"
        )
        b.add((h,), form.format(h, name), [line])
    elif style == "one":
        name, line = b.parameter(1)
        b.add((h,), f"{h} * self.{name}", [line])
    elif style == "both":
        (p, first), (q, second) = b.parameter(n), b.parameter(n)
        b.add((h,), f"self.{p} * {h} + self.{q}", [first, second])
    elif style == "complex":
        name = b.fresh("p")
        form = b.among(
            "({0} * self.{1}).real", "({0} * self.{1}).abs()", "torch.view_as_real({0} * self.{1}).flatten(-2)"
        )
        b.add((h,), form.format(h, name), [f"self.{name} = nn.Parameter(torch.randn({n}, dtype=torch.complex64))"])
    elif style == "view":
        name, line = b.parameter(n, 2)
        b.add((h,), f"({h} * torch.view_as_complex(self.{name})).real", [line])
    elif style == "prelu":
        name = b.fresh("l")
        if len(b.shape(h)) == 2 and b.flip():
            b.add((h,), f"self.{name}({h})", [f"self.{name} = nn.PReLU({n})"])
        else:
            b.add((h,), f"self.{name}({h})", [f"self.{name} = nn.PReLU()"])
    elif style == "token":
        if len(b.shape(h)) != 3:
            raise Unfit
        T = b.shape(h)[1]
        name, line = b.parameter(*b.among((T, n), (1, T, n), (T, 1), (1, 1, n)))
        b.add((h,), f"{h} {b.among('+', '*')} self.{name}", [line])
    else:
        name, line = b.parameter(n, b.width())
        b.add((h,), b.among("{0} @ self.{1}", "torch.matmul({0}, self.{1})", "torch.einsum('...i,io->...o', {0}, self.{1})")
              .format(h, name), [line])  # fmt: skip


# moving data


@operator(2)
def cut(b: Builder) -> None:
    h = b.pick(2, 3, 4, where=lambda s: True)
    axis, n = b.axis(h), b.shape(h)[b.axis(h)]
    if n < 3:
        raise Unfit
    slot = "[:, {}]" if axis == 1 else "[..., {}]"
    k = b.random.randint(1, n - 1)
    b.add((h,), h + slot.format(b.among("1:", ":-1", "::2", "1::2", f":{k}", f"{k}:")))


@operator(2)
def parts(b: Builder) -> None:
    h = b.pick(2, 3, 4, where=lambda s: (s[1] if len(s) == 4 else s[-1]) % 2 == 0)
    axis, n = b.axis(h), b.shape(h)[b.axis(h)]
    halves = "a, c = {h}.chunk(2, {d})"
    form = b.among(
        ["{0}, {1} = {h}.chunk(2, {d})"], ["{0}, {1} = torch.split({h}, {n}, dim={d})"],
        ["{1}, {0} = {h}.tensor_split(2, {d})"], [halves, "{0} = a * torch.sigmoid(c)"],
        [halves, "{0} = torch.relu(a) + c"], [halves, "{0} = torch.cat([c, a], {d})"],
        [halves, "{0} = torch.cat([a, torch.tanh(c)], {d})"], ["{0} = F.glu({h}, {d})"],
        [halves, "{0} = torch.maximum(a, c)"],
    )  # fmt: skip
    b.add((h,), form, makes=2 if "{1}" in form[0] else 1, h=h, d=axis, n=n // 2)


@operator(2)
def moved(b: Builder) -> None:
    h = b.pick(2, 3, 4)
    axis, n = b.axis(h), b.shape(h)[b.axis(h)]
    order = b.random.sample(range(n), n)
    b.add((h,), b.among(
        f"{h}.flip({axis})", f"torch.roll({h}, 1, {axis})", f"{h}.index_select({axis}, torch.tensor({order}))",
        f"torch.repeat_interleave({h}, 2, {axis})", f"torch.cat([{h}, {h}], {axis})", f"{h} + {h}.flip({axis})",
        f"{h}.repeat({', '.join('2' if k == axis else '1' for k in range(len(b.shape(h))))})",
        f"torch.roll({h}, 1, 1)" if len(b.shape(h)) == 3 else f"{h}.flip({axis})",
        f"{h}.transpose(-1, -2)" if len(b.shape(h)) > 2 else f"{h}.flip(-1)",
        f"{h}.unsqueeze(1).expand(-1, 2, {', '.join(['-1'] * (len(b.shape(h)) - 1))}).flatten(1, 2)",
        f"{h}[..., torch.tensor({order if axis > 1 or len(b.shape(h)) == 2 else list(range(b.shape(h)[-1]))})]",
        f"{h}.flatten(1)", f"{h}.reshape({b.shape(h)[0]}, -1)", f"{h}.unflatten({axis}, (-1, 2)).transpose({axis}, {axis + 1}).flatten({axis}, {axis + 1})",
    ))  # fmt: skip


@operator(1)
def axes(b: Builder) -> None:
    """Between vectors, sequences and images."""
    h = b.pick(2, 3, 4)
    shape = b.shape(h)
    if len(shape) == 2:
        n = shape[1]
        form = b.among(f"{h}.view({shape[0]}, {n // 2}, 2)", f"{h}.reshape({shape[0]}, 2, {n // 2})", f"{h}.unsqueeze(1)") \
            if n % 2 == 0 else f"{h}.unsqueeze(-1)"  # fmt: skip
    elif len(shape) == 3:
        form = b.among(f"{h}.mean(1)", f"{h}.flatten(1)", f"{h}[:, 0]", f"{h}[:, -1]", f"{h}.amax(1)", f"{h}.sum(1)",
                       f"{h}.transpose(1, 2)", f"{h}.transpose(1, 2).unsqueeze(-1)", f"torch.cat([{h}.mean(1), {h}.amax(1)], -1)",
                       f"{h}.std(1)", f"{h}.flatten(0, 1)")  # fmt: skip
    else:
        form = b.among(f"{h}.mean((2, 3))", f"{h}.flatten(1)", f"{h}.amax((-2, -1))", f"{h}.flatten(2).transpose(1, 2)",
                       f"F.adaptive_avg_pool2d({h}, 1).flatten(1)", f"{h}[:, :, 0, 0]", f"{h}.permute(0, 2, 3, 1).flatten(1, 2)",
                       f"F.adaptive_max_pool2d({h}, 1).squeeze(-1).squeeze(-1)")  # fmt: skip
    b.add((h,), form)


# in-place writes


@operator(3)
def written(b: Builder) -> None:
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    if n < 3:
        raise Unfit
    name, line = b.linear(h, n)
    k = b.random.randint(1, n - 1)
    form = b.among(
        "{0} = {h}.clone(); {0}[..., 0] = 1", "{0} = {h}.clone(); {0}[..., ::2] = 0.5",
        "{0} = {h}.clone(); {0}[..., :{k}] *= 2", "{0} = {h}.clone(); {0}[..., :{k}].relu_()",
        "{0} = {h}.clone(); {0}[..., {k}:] = torch.tanh({0}[..., {k}:])",
        "{0} = {h} + 0; {0}.chunk(2, -1)[0].mul_(0.5)", "{0} = {h} + 0; {0}.split([{k}, {m}], -1)[1].tanh_()",
        "{0} = {h} + 0; {0}.unbind(-1)[1].zero_()",
        "{0} = {h} + 0; {0}.narrow(-1, 0, {k}).copy_(torch.sigmoid({h}.narrow(-1, 0, {k})))",
        "{0} = {h} + 0; {0}[:, -1].add_(1)", "{0} = torch.zeros_like({h}); {0}[..., :{k}] = {h}[..., :{k}]",
        "{0} = torch.zeros_like({h}); {0} += {h}", "{0} = {h}.clone(); {0} += self.{l}({h})",
        "{0} = self.{l}({h}); {0}[..., :{k}] += {h}[..., :{k}]", "{0} = self.{l}({h}); {0}.mul_(torch.sigmoid({h}))",
        "{0} = self.{l}({h}); {0}.relu_()", "{0} = self.{l}({h}); torch.relu_({0}); {0} = {0}.add(1)",
        "{0} = self.{l}({h}); {0}.masked_fill_({0} < 0, 0)",
        "{0} = self.{l}({h}); v = {0}.view(-1, {n}); v[0].zero_()",
        "{0} = self.{l}({h}); {0}.transpose(0, -1)[0] = 0",
        "{0} = {h}.clone(); {0}.index_fill_(-1, torch.tensor([0, {k}]), 0.0)", "{0} = {h}.clone(); {0}[{0} < 0] = 0",
        "{0} = torch.empty_like({h}); {0}.copy_({h}); {0}.clamp_(min=0)",
        "{0} = {h}.clone(); a, c = {0}[..., :1], {0}[..., 1:]; a.add_(c.sum(-1, keepdim=True))",
        "{0} = {h}.clone(); {0}.diagonal().zero_()",
        "{0} = {h}.clone(); {0}.index_copy_(-1, torch.tensor([0]), {h}[..., 1:2])",
        "{0} = {h}.clone(); {0}.index_add_(-1, torch.tensor([0, 1]), {h}[..., :2])",
    )  # fmt: skip
    b.add((h,), form.split("; "), [line] if "{l}" in form else [], h=h, k=k, m=n - k, n=n, l=name)


@operator(0.7)
def written_for_all(b: Builder) -> None:
    """A write that later readers of the older name see as well."""
    h = b.pick(2, 3)
    if h in b.inputs or not any(h in n.makes for n in b.nodes):
        raise Unfit
    b.add(
        (h,),
        [b.among(f"{h}.mul_(2)", f"{h}[..., 0] = 0", f"{h}.relu_()", f"{h}[..., :2].tanh_()"), "{0} = " + f"{h} * 1"],
    )


@operator(0.7)
def buffer_updated(b: Builder) -> None:
    h = b.pick(2, where=lambda s: True)
    n = b.shape(h)[-1]
    name = b.fresh("m")
    b.add((h,), b.among(
        [f"self.{name}.mul_(0.9).add_(0.1 * {h}.detach().mean(0))", "{0} = " + f"{h} - self.{name}"],
        [f"self.{name} += 1", "{0} = " + f"{h} * self.{name}"],
        [f"self.{name} = 0.9 * self.{name} + 0.1 * {h}.mean(0)", "{0} = " + f"{h} + self.{name}"],
        [f"self.{name}.copy_({h}.mean(0))", "{0} = " + f"{h} + 1"],
    ), [f'self.register_buffer("{name}", torch.zeros({n}))'])  # fmt: skip


# reductions and normalizations


@operator(3)
def reduced(b: Builder) -> None:
    h = b.pick(2, 3)
    d = b.among("-1", "-1", "1")
    b.add((h,), b.among(
        "{h} / {h}.norm(dim={d}, keepdim=True)", "{h} / ({h}.std({d}, keepdim=True) + 1e-5)", "{h} - {h}.mean({d}, keepdim=True)",
        "{h} / {h}.abs().amax({d}, keepdim=True).clamp(min=1e-6)", "{h}.softmax({d})", "F.normalize({h}, dim={d})",
        "{h} * {h}.sum({d}, keepdim=True)", "{h} * torch.sigmoid({h}.mean({d}, keepdim=True))", "{h}.log_softmax({d})",
        "{h} / ({h}.norm(dim={d}, keepdim=True) + 1e-6)", "({h} - {h}.mean({d}, True)) / ({h}.var({d}, keepdim=True) + 1e-5).sqrt()",
        "{h} * torch.rsqrt({h}.pow(2).mean({d}, keepdim=True) + 1e-5)", "{h}.cumsum({d})", "{h}.sort({d})[0]",
        "{h} - {h}.logsumexp({d}, keepdim=True)", "torch.linalg.vector_norm({h}, dim={d}, keepdim=True) + {h}",
        "torch.cat([{h}, {h}.sum({d}, keepdim=True)], {d})", "{h} / ({h}.abs().sum({d}, keepdim=True) + 1e-8)",
        "torch.linalg.vector_norm({h}, ord=0, dim={d}, keepdim=True) * {h}", "{h} / {h}.norm().clamp_min(1e-6)",
        "{h} * {h}.amax({d}, keepdim=True)", "{h} - {h}.min({d}, keepdim=True)[0]", "{h}.cummax({d})[0]",
        "{h} - {h}.median({d}, keepdim=True)[0]", "({h} == {h}.amax({d}, keepdim=True)) * {h}", "{h} * ({h} > {h}.mean())",
        "{h} / {h}.std(unbiased=False)", "{h}.prod({d}, keepdim=True) + {h}", "F.softmin({h}, dim={d})", "{h}.topk(2, {d})[0]",
        "{h}.kthvalue(2, {d}, keepdim=True)[0] + {h}", "{h}.aminmax(dim={d}, keepdim=True)[1] - {h}",
    ), h=h, d=d)  # fmt: skip


@operator(3)
def normalized(b: Builder) -> None:
    h = b.pick(2, 3, 4)
    shape, axis = b.shape(h), b.axis(h)
    n, name = shape[axis], b.fresh("n")
    if len(shape) == 4:
        form, init = b.among(
            ("self.{n}({h})", "nn.BatchNorm2d({c})"), ("self.{n}({h})", "nn.GroupNorm(1, {c})"),
            ("self.{n}({h})", "nn.GroupNorm({g}, {c})"), ("self.{n}({h})", "nn.InstanceNorm2d({c}, affine=True)"),
            ("self.{n}({h})", "nn.InstanceNorm2d({c})"), ("F.local_response_norm({h}, 2)", ""),
            ("self.{n}({h}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)", "nn.LayerNorm({c})"),
        )  # fmt: skip
    else:
        form, init = b.among(
            ("self.{n}({h})", "nn.LayerNorm({c})"), ("self.{n}({h})", "nn.LayerNorm({c}, elementwise_affine=False)"),
            ("F.layer_norm({h}, ({c},))", ""), ("F.rms_norm({h}, ({c},))", ""), ("self.{n}({h})", "nn.RMSNorm({c})"),
            ("F.layer_norm({h}, {h}.shape[1:])", ""), ("F.rms_norm({h}, ({c},), eps=1e-6)", ""),
            ("self.{n}({h}) + {h}", "nn.LayerNorm({c})"),
            *([("self.{n}({h})", "nn.BatchNorm1d({c})"), ("self.{n}({h})", "nn.GroupNorm({g}, {c})"),
               ("self.{n}({h})", "nn.BatchNorm1d({c}, affine=False)")] if len(shape) == 2 else
              [("self.{n}({h}.transpose(1, 2)).transpose(1, 2)", "nn.BatchNorm1d({c})"), ("F.instance_norm({h})", "")]),
        )  # fmt: skip
    groups = b.among(*[g for g in (1, 2, 3, 4) if n % g == 0])
    b.add((h,), form, ["self.{n} = " + init] if init else [], n=name, h=h, c=n, g=groups)


@operator(1)
def normalized_layer(b: Builder) -> None:
    """A normalization right after a layer: its weights' scale is undone."""
    h = b.pick(2)
    layer, line = b.linear(h)
    out = int(line.split(", ")[1].rstrip(")"))
    name = b.fresh("n")
    form = b.among(
        "F.layer_norm({}, ({n},))", "F.normalize({}, dim=-1)", "self.{m}({})", "F.rms_norm({}, ({n},), eps=1e-6)"
    )
    init = [line] + (
        [f"self.{name} = nn.{b.among('BatchNorm1d', 'LayerNorm', 'RMSNorm')}({out})"] if "{m}" in form else []
    )
    b.add((h,), "torch.relu(" + form.format(f"self.{layer}({h})", n=out, m=name) + ")", init)


# products of two units


@operator(2)
def product(b: Builder) -> None:
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    if n > 6:
        raise Unfit
    out = b.width()
    name, layer = b.fresh("p"), b.fresh("l")
    if len(b.shape(h)) == 2:
        g = b.pick(2, where=lambda s: s[0] == b.shape(h)[0] and s[1] <= 6)
        m = b.shape(g)[-1]
        form, init = b.among(
            ("torch.einsum('bi,oij,bj->bo', {h}, self.{p}, {g})", ["self.{p} = nn.Parameter(torch.randn({o}, {n}, {m}))"]),
            ("torch.einsum('bi,ij,bj->b', {h}, self.{p}, {g}).unsqueeze(-1)", ["self.{p} = nn.Parameter(torch.randn({n}, {m}))"]),
            ("self.{l}({h}, {g})", ["self.{l} = nn.Bilinear({n}, {m}, {o})"]),
            ("self.{l}(({h}.unsqueeze(2) * {g}.unsqueeze(1)).flatten(1))", ["self.{l} = nn.Linear({n} * {m}, {o})"]),
            ("self.{l}(torch.bmm({h}.unsqueeze(2), {g}.unsqueeze(1)).flatten(1))", ["self.{l} = nn.Linear({n} * {m}, {o})"]),
            ("self.{l}(torch.einsum('bi,bj->bij', {h}, {h}).flatten(1))", ["self.{l} = nn.Linear({n} * {n}, {o})"]),
            ("({h} @ self.{p} * {g}).sum(-1, keepdim=True)", ["self.{p} = nn.Parameter(torch.randn({n}, {m}))"]),
            ("torch.relu({h}.unsqueeze(-1) * self.{p}).flatten(1)", ["self.{p} = nn.Parameter(torch.randn({n}, 2))"]),
            ("self.{l}(torch.relu({h} @ {g}.T if {h}.shape == {g}.shape else {h} @ {h}.T))", ["self.{l} = nn.Linear({B}, {o})"]),
            ("torch.cdist({h}, self.{p})", ["self.{p} = nn.Parameter(torch.randn({o}, {n}))"]),
            ("F.cosine_similarity({h}.unsqueeze(1), self.{p}, dim=-1)", ["self.{p} = nn.Parameter(torch.randn({o}, {n}))"]),
            ("({h}.unsqueeze(1) - self.{p}).pow(2).sum(-1)", ["self.{p} = nn.Parameter(torch.randn({o}, {n}))"]),
            ("torch.vmap(torch.outer)({h}, {g}).flatten(1)", []),
        )  # fmt: skip
    else:
        g, m = h, n
        form, init = b.among(
            ("self.{l}((({h}.transpose(1, 2) @ {h}) / {h}.shape[1]).flatten(1))", ["self.{l} = nn.Linear({n} * {n}, {o})"]),
            ("{h}.transpose(1, 2) @ {h}", []),
            ("self.{l}({h} @ {h}.transpose(1, 2))", ["self.{l} = nn.Linear({T}, {o})"]),
            ("torch.einsum('bti,btj->bij', {h}, {h}).flatten(1)", []),
            ("torch.einsum('bti,ij,bsj->bts', {h}, self.{p}, {h})", ["self.{p} = nn.Parameter(torch.randn({n}, {n}))"]),
            ("torch.cdist({h}, {h})", []),
        )  # fmt: skip
    batch, tokens = b.shape(h)[:2]
    b.add((h, g), form, init, h=h, g=g, n=n, m=m, o=out, p=name, l=layer, B=batch, T=tokens)


# attention


@operator(2.5)
def attention(b: Builder) -> None:
    h = b.pick(3)
    batch, tokens, n = b.shape(h)
    heads, d = b.among((2, 2), (2, 3), (1, 4), (3, 2), (4, 2))
    inner = heads * d
    q, out, p, norm = b.fresh("l"), b.fresh("l"), b.fresh("p"), b.fresh("n")
    values = {
        "h": h, "B": batch, "T": tokens, "n": n, "H": heads, "d": d, "D": inner, "q": q, "o": out, "p": p, "m": norm,
    }  # fmt: skip
    init = ["self.{q} = nn.Linear({n}, 3 * {D})", f"self.{out} = nn.Linear({inner}, {n if b.flip() else b.width()})"]
    split, merge = b.among(
        (["q, k, v = self.{q}({h}).view({B}, {T}, 3, {H}, {d}).permute(2, 0, 3, 1, 4)"], "y.transpose(1, 2).reshape({B}, {T}, {D})"),
        (["q, k, v = self.{q}({h}).view({B}, {T}, 3, {d}, {H}).permute(2, 0, 4, 1, 3)"], "y.permute(0, 2, 3, 1).reshape({B}, {T}, {D})"),
        (["q, k, v = (z.view({B}, {T}, {H}, {d}).transpose(1, 2) for z in self.{q}({h}).chunk(3, -1))"],
         "y.transpose(1, 2).reshape({B}, {T}, {D})"),
        (["q, k, v = (z.view({B}, {T}, {d}, {H}).permute(0, 3, 1, 2) for z in self.{q}({h}).chunk(3, -1))"],
         "y.permute(0, 2, 3, 1).reshape({B}, {T}, {D})"),
        (["q, k, v = self.{q}({h}).view({B}, {T}, {H}, 3, {d}).permute(3, 0, 2, 1, 4)"], "y.transpose(1, 2).flatten(2)"),
        (["q, k, v = self.{q}({h}).view({B}, {T}, {H}, 3 * {d}).transpose(1, 2).chunk(3, -1)"], "y.transpose(1, 2).flatten(2)"),
        (["q, k, v = self.{q}({h}).unflatten(-1, (3, {H}, {d})).unbind(2)", "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)"],
         "torch.cat(y.unbind(1), -1)"),
    )  # fmt: skip
    qk = b.among(
        ([], []), ([], []), (["q, k = F.layer_norm(q, ({d},)), F.layer_norm(k, ({d},))"], []),
        (["q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)"], []),
        (["q, k = F.rms_norm(q, ({d},)), F.rms_norm(k, ({d},))"], []),
        (["q, k = self.{m}(q), self.{m}(k)"], ["self.{m} = nn.LayerNorm({d})"]),
        (["q, k = self.{m}(q), self.{m}(k)"], ["self.{m} = nn.RMSNorm({d})"]),
        (["q, k = torch.relu(q), torch.relu(k)"], []),
        (["q = q * self.{p}"], ["self.{p} = nn.Parameter(torch.randn({H}, 1, 1))"]),
    )  # fmt: skip
    core = b.among(
        ["y = F.scaled_dot_product_attention(q, k, v)"], ["y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"],
        ["a = (q @ k.transpose(-1, -2)) * {d} ** -0.5", "y = a.softmax(-1) @ v"],
        ["a = torch.einsum('bhid,bhjd->bhij', q, k)", "y = torch.einsum('bhij,bhjd->bhid', a.softmax(-1), v)"],
        ["a = (q @ k.transpose(-1, -2)).masked_fill(torch.ones({T}, {T}).triu(1).bool(), float('-inf'))", "y = a.softmax(-1) @ v"],
        ["a = (q @ k.transpose(-1, -2)).masked_fill(torch.ones({T}, {T}).triu(1).bool(), -1e9)", "y = a.softmax(-1) @ v"],
        ["y = q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)"],
        ["a = torch.relu(q @ k.transpose(-1, -2))", "a = a / (a.sum(-1, keepdim=True) + 1e-6)", "y = a @ v"],
        ["a = (q @ k.transpose(-1, -2)).softmax(-1)", "y = (a - a.mean(1, keepdim=True)) @ v"],
    )  # fmt: skip
    if b.flip(0.15):
        name = b.fresh("l")
        if n % heads:
            raise Unfit
        g = b.pick(3, where=lambda s: s[0] == batch and s[2] == n)
        b.add((h, g), b.among(f"self.{name}({h}, {g}, {g})[0]", f"self.{name}({h}, {h}, {h}, need_weights=False)[0]"),
              [f"self.{name} = nn.MultiheadAttention({n}, {heads}, batch_first=True)"])  # fmt: skip
        return
    body = [*split, *qk[0], *core, "{0} = self.{o}(" + merge + ")"]
    b.add((h,), body, [*init, *qk[1]], **values)


# several maps in one weight


@operator(2.5)
def stacked(b: Builder) -> None:
    """Experts and heads whose weights are one tensor each, with axes in any order."""
    h = b.pick(2, 3)
    n = b.shape(h)[-1]
    e, f, o = b.among(2, 3, 4), b.among(2, 3, 4), b.width()
    w, v, c, r = b.fresh("w"), b.fresh("w"), b.fresh("p"), b.fresh("l")
    lead = "bt"[: len(b.shape(h)) - 1]
    sizes = {"e": e, "f": f, "i": n, "o": o}

    def weight(name: str, letters: str) -> tuple[str, str]:
        """The axes of a weight, and how it is written: itself, or a view of a parameter that is laid out otherwise."""
        letters = "".join(b.random.sample(letters, len(letters))) if b.flip(0.7) else letters
        held = "".join(b.random.sample(letters, len(letters))) if b.flip(0.3) else letters
        view = "" if held == letters else f".permute({', '.join(str(held.index(x)) for x in letters)})"
        shape = [sizes[x] for x in held]
        if b.flip(0.2):
            view = f".view({', '.join(map(str, shape))}){view}"
            shape = b.among([shape[0] * shape[1], *shape[2:]], [*shape[:-2], shape[-2] * shape[-1]])
        init.append(f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}))")
        return letters, f"self.{name}{view}"

    init: list[str] = []
    lines: list[str] = []
    order = "".join(b.random.sample("ef", 2))
    bias = b.flip()
    activation = b.among(*ACTIVATIONS[:12]).format("y")
    if b.flip(0.3):  # all of a batched matrix product
        flat = f"{h}.reshape(-1, {n})"
        tokens = int(torch.Size(b.shape(h)).numel() // n)
        copies = b.among(
            f"{flat}.repeat({e}, 1).view({e}, -1, {n})", f"{flat}.unsqueeze(0).expand({e}, -1, -1)",
            f"{flat}.unsqueeze(0).repeat({e}, 1, 1)", f"torch.stack([{flat}] * {e})",
        )  # fmt: skip
        gated = b.flip()
        turned, made = b.flip(), 2 * f if gated else f
        init.append(f"self.{v} = nn.Parameter(torch.randn({e}, {f}, {o}))")
        init.append(f"self.{w} = nn.Parameter(torch.randn({e}, {made}, {n}){'' if turned else '.transpose(1, 2)'})")
        lines.append(f"y = torch.bmm({copies}, self.{w}{'.transpose(1, 2)' if turned else ''})")
        if bias:
            init.append(f"self.{c} = nn.Parameter(torch.randn({e}, {made}))")
            lines.append(
                "y = y + " + b.among(f"self.{c}[:, None]", f"self.{c}.unsqueeze(1)", f"self.{c}.view({e}, 1, -1)")
            )
        if gated:
            lines += [b.among("y, g = y.chunk(2, -1)", "y, g = y[..., ::2], y[..., 1::2]"), "y = y * torch.sigmoid(g)"]
        else:
            lines.append(f"y = {activation}")
        lines.append(f"y = torch.bmm(y, self.{v})")
        init.append(f"self.{r} = nn.Linear({n}, {e})")
        lines.append(f"g = self.{r}({flat}).softmax(-1)")
        if b.flip():
            lines.append(f"g = torch.zeros_like(g).scatter(1, g.topk({min(2, e)}, -1)[1], 1.0) * g")
        summed = f"(y * g.t().view({e}, {tokens}, 1)).sum(0)"
        lines.append("y = " + b.among(summed, "torch.einsum('teo,te->to', y.transpose(0, 1), g)"))
        lines.append(f"{{0}} = y.reshape({', '.join(map(str, (*b.shape(h)[:-1], o)))})")
    else:
        first, read = weight(w, "eif")
        lines.append(f"y = torch.einsum('{lead}i,{first}->{lead}{order}', {h}, {read})")
        if bias:
            init.append(f"self.{c} = nn.Parameter(torch.randn({', '.join(str(sizes[x]) for x in order)}))")
            lines.append(f"y = y + self.{c}")
        how = b.among("experts", "summed", "flat", "attention", "mean", "experts")
        lines.append(f"y = {activation}")
        if how == "experts":
            init.append(f"self.{r} = nn.Linear({n}, {e})")
            lines.append(f"g = self.{r}({h}).softmax(-1)")
            second, read = weight(v, "efo")
            whole = f"torch.einsum('{lead}{order},{second},{lead}e->{lead}o', y, {read}, g)"
            each = f"(torch.einsum('{lead}{order},{second}->{lead}eo', y, {read}) * g[..., None]).sum(-2)"
            lines.append("{0} = " + b.among(whole, each))
        elif how == "attention":
            if len(lead) < 2:
                raise Unfit
            second, read = weight(v, "efo")
            lines += [
                f"g = torch.einsum('bt{order},bs{order}->bets', y, y.flip(1)).softmax(-1)",
                f"y = torch.einsum('bets,bs{order}->bt{order}', g, y)",
                f"{{0}} = torch.einsum('bt{order},{second}->bto', y, {read})",
            ]
        elif how == "flat":
            init.append(f"self.{r} = nn.Linear({e * f}, {o})")
            lines.append(f"{{0}} = self.{r}(y.flatten(-2))")
        else:
            second, read = weight(v, "efo")
            lines.append(f"{{0}} = torch.einsum('{lead}{order},{second}->{lead}o', y, {read})" if how == "summed"
                         else f"{{0}} = y.mean({b.among(-1, -2)})")  # fmt: skip
    b.add((h,), lines, init)


# convolutions


@operator(4)
def convolution(b: Builder) -> None:
    h = b.pick(4)
    c = b.shape(h)[1]
    out = b.width()
    name = b.fresh("l")
    divisors = [g for g in (2, 3, 4, c) if c % g == 0] or [1]
    g = b.random.choice(divisors)
    b.add((h,), f"self.{name}({h})", [f"self.{name} = " + b.among(
        f"nn.Conv2d({c}, {out}, 3, padding=1)", f"nn.Conv2d({c}, {out}, 1)", f"nn.Conv2d({c}, {out}, 1, bias=False)",
        f"nn.Conv2d({c}, {c}, 3, padding=1, groups={c})", f"nn.Conv2d({c}, {2 * c}, 1, groups={c})",
        f"nn.Conv2d({c}, {g * b.among(1, 2)}, 1, groups={g})", f"nn.Conv2d({c}, {c}, 3, padding=1, groups={g}, bias=False)",
        f"nn.ConvTranspose2d({c}, {out}, 1)", f"nn.ConvTranspose2d({c}, {c}, 1, groups={g})",
        f"nn.Conv2d({c}, {out}, 3, padding=1, padding_mode='circular')",
    )])  # fmt: skip


@operator(2)
def planted_convolution(b: Builder) -> None:
    h = b.pick(4)
    c = b.shape(h)[1]
    width, first, second, norm = b.width(), b.fresh("l"), b.fresh("l"), b.fresh("n")
    inner, extra = f"self.{first}({h})", []
    if b.flip(0.4):
        inner, extra = (
            f"self.{norm}({inner})",
            [f"self.{norm} = nn.{b.among('BatchNorm2d', 'InstanceNorm2d')}({width})"],
        )
    act = b.among(*ACTIVATIONS[:8]).format(inner)
    b.add((h,), f"self.{second}({act})", [
        f"self.{first} = nn.Conv2d({c}, {width}, {b.among('1', '3, padding=1')})", *extra,
        f"self.{second} = nn.Conv2d({width}, {b.width()}, 1)",
    ], planted=[f"{first}.weight"])  # fmt: skip


@operator(3)
def image(b: Builder) -> None:
    h = b.pick(4)
    batch, c, height, width = b.shape(h)
    name, out = b.fresh("l"), b.width()
    options: list[tuple[str, list[str]]] = [
        ("F.max_pool2d({h}, 2, ceil_mode=True)", []), ("F.avg_pool2d({h}, 2, ceil_mode=True)", []), ("F.interpolate({h}, scale_factor=2)", []),
        ("F.interpolate({h}, size=(4, 4), mode='bilinear')", []), ("{h}.mean((2, 3), keepdim=True)", []),
        ("F.adaptive_avg_pool2d({h}, 2)", []), ("self.{l}({h}.flatten(1))", ["nn.Linear({c} * {H} * {W}, {o})"]),
        ("{h} * torch.sigmoid(self.{l}({h}.mean((2, 3), keepdim=True)))", ["nn.Conv2d({c}, {c}, 1)"]),
        ("{h} * torch.sigmoid(self.{l}({h}.mean((2, 3))))[:, :, None, None]", ["nn.Linear({c}, {c})"]),
        ("{h} + self.{l}({h})", ["nn.Conv2d({c}, {c}, 3, padding=1)"]), ("self.{l}({h}) + {h}", ["nn.Conv2d({c}, {c}, 1, bias=False)"]),
        ("torch.roll({h}, (1, 1), (2, 3))", []), ("F.pad({h}, (1, 1, 1, 1), mode='reflect')" if height > 1 and width > 1 else "{h}", []),
        ("torch.rot90({h}, 1, (2, 3))", []), ("{h} * self.{l}", ["nn.Parameter(torch.randn({c}, 1, 1))"]),
        ("self.{l}({h})", ["nn.PReLU({c})"]), ("F.pixel_unshuffle({h}, 2)" if height % 2 == 0 and width % 2 == 0 else "{h}", []),
        ("F.unfold({h}, 2).transpose(1, 2)" if height > 1 and width > 1 else "{h}", []), ("{h}.amax(1, keepdim=True) * {h}", []),
        ("{h} * torch.sigmoid(self.{l}(torch.cat([{h}.mean(1, keepdim=True), {h}.amax(1, keepdim=True)], 1)))", ["nn.Conv2d(2, 1, 3, padding=1)"]),
        ("torch.fft.irfft2(torch.fft.rfft2({h}) * self.{l}, s=({H}, {W}))",
         ["nn.Parameter(torch.randn({c}, {H}, {W} // 2 + 1, dtype=torch.complex64))"]),
        ("{h}.softmax(1)", []), ("{h}.flatten(2).softmax(-1).view({B}, {c}, {H}, {W})", []),
        ("self.{l}(({h}.flatten(2) @ {h}.flatten(2).transpose(1, 2)).flatten(1))", ["nn.Linear({c} * {c}, {o})"]),
        ("torch.cat([{h}, torch.zeros_like({h})], 1)[:, :, ::1]", []),
        ("F.pad({h}[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)) + self.{l}({h})" if height % 2 == 0 and width % 2 == 0 else "{h}",
         ["nn.Conv2d({c}, {c} + 2, 1, stride=2)"]),
        ("self.{l}({h}) + F.pad({h}, (0, 0, 0, 0, 0, 2))", ["nn.Conv2d({c}, {c} + 2, 1)"]),
    ]  # fmt: skip
    if c % 2 == 0:
        options += [
            ("{h}.view({B}, 2, {c} // 2, {H}, {W}).transpose(1, 2).reshape({B}, {c}, {H}, {W})", []),
            ("torch.cat([{h}.chunk(2, 1)[0], torch.relu({h}.chunk(2, 1)[1])], 1)", []),
            ("self.{l}({h}).chunk(2, 1)[0] + {h}.chunk(2, 1)[1]", ["nn.Conv2d({c}, {c}, 1, groups=2)"]),
            ("{h}.view({B}, {c} // 2, 2, {H}, {W}).amax(2)", []),
        ]
    if c % 4 == 0:
        options += [("F.pixel_shuffle({h}, 2)", []), ("F.pixel_shuffle(F.channel_shuffle({h}, 2), 2)", [])]
    if c % 2 == 0:
        options += [("F.pixel_shuffle(torch.cat([{h}, {h}], 1), 2)", [])]
    form, init = b.random.choice(options)
    if form == "{h}":
        raise Unfit
    made = [f"self.{name} = {line}" for line in init]
    b.add((h,), form, made, h=h, l=name, c=c, B=batch, H=height, W=width, o=out)


@operator(1)
def convolution_of_a_sequence(b: Builder) -> None:
    h = b.pick(3)
    c, name = b.shape(h)[1], b.fresh("l")
    n = b.shape(h)[2]
    b.add((h,), *b.among(
        (f"self.{name}({h})", [f"self.{name} = nn.Conv1d({c}, {b.width()}, 1)"]),
        (f"self.{name}({h}.transpose(1, 2)).transpose(1, 2)", [f"self.{name} = nn.Conv1d({n}, {b.width()}, 3, padding=1)"]),
        (f"self.{name}({h}.transpose(1, 2)).transpose(1, 2)", [f"self.{name} = nn.Conv1d({n}, {n}, 3, padding=1, groups={n})"]),
        (f"F.avg_pool1d({h}.transpose(1, 2), 2).transpose(1, 2)", []),
        (f"F.max_pool1d({h}.transpose(1, 2), 2).transpose(1, 2)", []),
        (f"self.{name}({h}.transpose(1, 2)).transpose(1, 2) + {h}", [f"self.{name} = nn.Linear({c}, {c})"]),
    ))  # fmt: skip


# recurrent cells


@operator(1.2)
def recurrent(b: Builder) -> None:
    h = b.pick(3)
    n, width, name = b.shape(h)[2], b.width(), b.fresh("l")
    batch, tokens = b.shape(h)[:2]
    both = b.flip(0.3)
    style = b.among("cell", "lstm cell", "module", "module", "lstm", "own")
    if style == "cell":
        cell = b.among(
            f"nn.RNNCell({n}, {width})", f"nn.GRUCell({n}, {width})", f"nn.RNNCell({n}, {width}, nonlinearity='relu')"
        )
        b.add((h,), ["s = " + f"{h}.new_zeros({batch}, {width})", f"for t in range({tokens}):", f"    s = self.{name}({h}[:, t], s)", "{0} = s"],
              [f"self.{name} = {cell}"], planted=[])  # fmt: skip
    elif style == "lstm cell":
        b.add((h,), [f"s, c = torch.zeros({batch}, {width}), torch.zeros({batch}, {width})", f"for t in range({tokens}):",
                     f"    s, c = self.{name}({h}[:, t], (s, c))", "{0} = s"], [f"self.{name} = nn.LSTMCell({n}, {width})"])  # fmt: skip
    elif style == "own":
        other = b.fresh("l")
        b.add((h,), [f"s = torch.zeros({batch}, {width})", "kept = []", f"for z in {h}.unbind(1):",
                     f"    s = torch.tanh(self.{name}(z) + self.{other}(s))", "    kept.append(s)", "{0} = torch.stack(kept, 1)"],
              [f"self.{name} = nn.Linear({n}, {width})", f"self.{other} = nn.Linear({width}, {width})"])  # fmt: skip
    else:
        kind = "LSTM" if style == "lstm" else b.among("GRU", "RNN")
        extra = ", bidirectional=True" if both else ""
        layers = ", num_layers=2" if b.flip(0.3) else ""
        b.add((h,), f"self.{name}({h})[0]", [f"self.{name} = nn.{kind}({n}, {width}, batch_first=True{extra}{layers})"])


# indices


@operator(1.5)
def indexed(b: Builder) -> None:
    h = b.pick(2, 3)
    shape = b.shape(h)
    n, out, name, layer = shape[-1], b.width(), b.fresh("l"), b.fresh("l")
    options: list[tuple[list[str], list[str]]] = [
        (["{0} = self.{l}({h}.argmax(-1))"], ["self.{l} = nn.Embedding({n}, {o})"]),
        (["i = ({h}.unsqueeze(-2) - self.{l}.weight).pow(2).sum(-1).argmin(-1)", "{0} = self.{l}(i)"], ["self.{l} = nn.Embedding(4, {n})"]),
        (["i = ({h}.unsqueeze(-2) - self.{l}.weight).pow(2).sum(-1).argmin(-1)", "{0} = {h} + (self.{l}(i) - {h}).detach()"],
         ["self.{l} = nn.Embedding(4, {n})"]),
        (["{0} = F.one_hot({h}.argmax(-1), {n}).float() @ self.{l}"], ["self.{l} = nn.Parameter(torch.randn({n}, {o}))"]),
        (["{0} = F.one_hot({h}.argmax(-1), {n}) * {h}"], []),
        (["v, i = {h}.topk(2, -1)", "{0} = torch.zeros_like({h}).scatter(-1, i, v)"], []),
        (["v, i = {h}.max(-1, keepdim=True)", "{0} = {h} * v + i.float()"], []),
        (["i = {h}.argsort(-1)", "{0} = {h}.gather(-1, i)"], []),
        (["v, i = {h}.sort(-1, descending=True)", "{0} = v"], []),
        (["g = self.{l}({h}).softmax(-1)", "{0} = g[..., :1] * self.{m}({h}) + g[..., 1:2] * torch.relu({h} @ self.{m}.weight.T)"],
         ["self.{l} = nn.Linear({n}, 2)", "self.{m} = nn.Linear({n}, {o})"]),
        (["{0} = {h}.round() * 0.5"], []), (["{0} = {h} * {h}.argmax(-1, keepdim=True)"], []),
        (["{0} = torch.where({h}.long() > 0, {h}, -{h})"], []), (["{0} = ({h} > 0).float() * 0.5"], []),
        (["{0} = torch.bucketize({h}, torch.tensor([-1.0, 0.0, 1.0])).float()"], []),
        (["{0} = torch.take_along_dim({h}, {h}.argsort(-1), -1)"], []),
    ]  # fmt: skip
    if len(shape) == 3:
        T = shape[1]
        edges = [[b.random.randrange(T) for _ in range(6)] for _ in range(2)]
        options += [
            ([f"s, d = torch.tensor({edges})", "{0} = torch.zeros_like({h}).index_add(1, d, torch.relu(self.{m}({h}))[:, s])"],
             ["self.{m} = nn.Linear({n}, {n})"]),
            ([f"s, d = torch.tensor({edges})", "{0} = self.{m}({h}) + torch.zeros({B}, {T}, {o}).index_add(1, d, self.{l}({h})[:, s])"],
             ["self.{m} = nn.Linear({n}, {o})", "self.{l} = nn.Linear({n}, {o})"]),
            ([f"d = torch.tensor({edges[0]})", "{0} = {h}.new_zeros({B}, {T}, {n}).scatter_add(1, d.view(1, -1, 1).expand({B}, -1, {n}), {h}[:, d])"], []),
            (["i = {h}.norm(dim=-1).argmax(1)", "{0} = {h}[torch.arange({B}), i]"], []),
            (["i = self.{m}({h}).squeeze(-1).topk(2, 1)[1]", "{0} = {h}.gather(1, i.unsqueeze(-1).expand(-1, -1, {n}))"],
             ["self.{m} = nn.Linear({n}, 1)"]),
        ]  # fmt: skip
    form, init = b.random.choice(options)
    b.add((h,), form, init, h=h, n=n, o=out, l=name, m=layer, B=shape[0], T=shape[1])


@operator(0.8)
def dead(b: Builder) -> None:
    """Something that no output depends on, over a hidden layer that one does."""
    h = b.pick(2, 3, 4)
    g = b.like(h) if b.flip() and [n for n in b.pool if n != h and b.shape(n) == b.shape(h)] else h
    form = b.among("{0}.cumsum(-1)", "{0} + {1}", "{0} * torch.arange({2})", "{0}.flip(-1) + {0}", "{0}[..., 0] * 2")
    b.add((h, g) if g != h else (h,), form.format(h, g, b.shape(h)[-1]))
    b.pool.pop()


@operator(0.6)
def embedded(b: Builder) -> None:
    name, out = b.fresh("l"), b.width()
    if "tokens" not in b.inputs:
        tokens = [[b.random.randrange(7) for _ in range(4)] for _ in range(3)]
        b.inputs["tokens"] = f"torch.tensor({tokens})"
        b.space["tokens"] = torch.tensor(tokens)
    form = b.among("self.{l}(tokens)", "self.{l}(tokens).sum(1)", "F.embedding(tokens, self.{l}.weight)",
                   "F.one_hot(tokens, 7).float() @ self.{l}.weight", "self.{l}.weight[tokens]")  # fmt: skip
    b.add(("tokens",), form.format(l=name), [f"self.{name} = nn.Embedding(7, {out})"])


# -- a module ---------------------------------------------------------------------------------------------------------


def random_module(seed: int) -> Module:
    """A random module whose outputs depend on its weights; the same for the same seed."""
    return _first(seed, OPERATORS, (), lambda module: True)


def beyond_module(seed: int) -> Module:
    """A random module that does something else on other inputs, or in training, than on its example."""
    names = {function.__name__ for function, _ in BEYOND}
    beyond = [*OPERATORS, *BEYOND, *BEYOND]
    return _first(seed, beyond, OPTIONS, lambda module: bool(names & {node.kind for node in module.nodes}))


def _first(
    seed: int, operators: list[tuple[Operator, float]], options: tuple[str, ...], fits: Callable[[Module], bool]
) -> Module:
    for attempt in range(20):
        module = _drawn(seed + 1_000_003 * attempt, operators, options)
        if fits(module) and module.outputs and depends_on_weights(module):
            return module
    raise RuntimeError(f"no module that fits was drawn from seed {seed}")


OPTIONS = ("n=2", "m=None")
WAYS: tuple[tuple[int, float | None], ...] = ((2, None), (1, None), (3, None), (5, None), (2, 0.7), (4, 0.3))
"""Values of ``n`` and ``m`` in :func:`beyond_module`, first those that are left out."""


@beyond(5)
def rows_of_a_table(b: Builder) -> None:
    """``n`` rows of six, or one of them: the example reads the first two, or the third."""
    h = b.pick(2, 3)
    name, line = b.parameter(6, b.shape(h)[-1])
    table = b.among(f"self.{name}", f"(2 * self.{name})", f"(self.{name} - self.{name}.mean(0))", f"self.{name}.tanh()",
                    f"F.normalize(self.{name}, dim=-1)")  # fmt: skip
    read = b.among("{0}[:n].sum(0)", "{0}[n]", "{0}[torch.arange(n)].amax(0)", "{0}.narrow(0, 0, n).sum(0)",
                   "F.embedding(torch.arange(n), {0}).sum(0)", "F.normalize({0}[:n], dim=-1).sum(0)",
                   "{0}.split([n, 6 - n])[0].sum(0)", "{0}.unbind(0)[n]").format(table)  # fmt: skip
    b.add((h,), f"{h} + {read}", [line])


@beyond(3)
def some_units(b: Builder) -> None:
    """The first units, as many as ``n`` says, of a layer that nothing else reads."""
    h = b.pick(2, 3)
    name, line = b.linear(h, 6)
    b.add((h,), b.among(*ACTIVATIONS[:8]).format(f"self.{name}({h})") + "[..., :n].sum(-1, keepdim=True)", [line])


@beyond(4)
def weighed_by_the_size(b: Builder) -> None:
    """Constants that follow ``n``, for rows of a table and for units; and a table of which a part is read twice."""
    h = b.pick(2, 3)
    constant = b.among(
        "(torch.arange(6) < n).float()", "(torch.arange(6.) / n).tanh()", "F.one_hot(torch.tensor(n), 6).float()"
    )
    if b.flip():
        name, line = b.linear(h, 6)
        b.add(
            (h,),
            f"({b.among(*ACTIVATIONS[:8]).format(f'self.{name}({h})')} * {constant}).sum(-1, keepdim=True)",
            [line],
        )
        return
    name, line = b.parameter(6, b.shape(h)[-1])
    read = b.among(f"{constant} @ self.{name}", f"self.{name}[:n].sum(0) + self.{name}.mean(0)")
    b.add((h,), f"{h} + {read}", [line])


@beyond(2)
def another_way(b: Builder) -> None:
    h = b.pick(2, 3)
    name, line = b.linear(h)
    one, two = (
        b.among(*ACTIVATIONS, "{0}.cumsum(-1)", "{0}.sort(-1)[0]").format(f"self.{name}({h})") for _ in range(2)
    )
    b.add((h,), f"{one} if n < 3 else {two}", [line])


@beyond(3)
def in_training(b: Builder) -> None:
    h, other = b.pick(2, 3), b.pick(2, 3)
    (name, line), size = b.linear(other, b.shape(h)[-1]), b.shape(h)[-1]
    p, p_line = b.parameter(size)
    more = b.among(f"self.{name}({other}).mean()", f"self.{name}({other}).sum(0).sum() * self.{p}", f"self.{p}")
    b.add((h, other), f"({h} + {more}) if self.training else {h}", [line, p_line])


@beyond(3)
def an_expert(b: Builder) -> None:
    h = b.pick(2, 3)
    (one, first), (two, second) = b.linear(h, size := b.width()), b.linear(h, size)
    b.add((h,), f"self.{one}({h}) if n < 3 else self.{two}({h})", [first, second])


@beyond(3)
def an_option(b: Builder) -> None:
    h = b.pick(2, 3)
    name, line = b.parameter(b.shape(h)[-1])
    b.add(
        (h,),
        b.among(f"{h} if m is None else {h} + m * self.{name}", f"{h} if m is None else {h} * self.{name}"),
        [line],
    )


@beyond(6)
def the_largest(b: Builder) -> None:
    """Positions of the largest entries, which equal numbers have in an order of their own."""
    h = b.pick(2)
    act = b.among("{0}", "torch.relu({0})", "{0}.sigmoid()", "F.leaky_relu({0})", "{0}.softmax(-1)", "({0} - {0}.relu())",
                  "F.elu({0}, 0.0)", "F.dropout({0}, 0.5, False)", "F.layer_norm({0}, {0}.shape[-1:])",
                  "({0} * {0}.relu())", "{0}.exp()")  # fmt: skip
    if b.flip():
        name, line = b.linear(h, size := b.width())
        bias, source = b.flip(), f"self.{name}({h})"
        init = [line if bias or "bias" in line else line.replace(")", ", bias=False)")]
    else:
        size, source, init = b.shape(h)[-1], h, []
    codes, code_line = b.parameter(size, b.width())
    found = b.among("{0}.argmax(-1)", "{0}.topk(1).indices[:, 0]", "{0}.max(-1)[1]", "{0}.argsort(-1)[:, -1]")
    b.add((h,), f"self.{codes}[{found.format(act.format(source))}]", [*init, code_line])


def depends_on_weights(module: Module) -> bool:
    """Whether other weights give other outputs."""
    results = []
    for seed in range(4):
        model, inputs = module.build(seed)
        with torch.no_grad():
            results.append([t for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor)])
    return any(
        not torch.equal(a.nan_to_num(), b.nan_to_num())
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def _drawn(seed: int, operators: list[tuple[Operator, float]], options: tuple[str, ...]) -> Module:
    b = Builder(seed)
    b.space |= {"n": 2, "m": None}
    kind = b.among("vector", "vector", "sequence", "sequence", "image", "mixed")
    shapes = {"vector": [(3, 5)], "sequence": [(2, 4, 5)], "image": [(2, 3, 4, 4)], "mixed": [(2, 4), (2, 4, 4)]}[kind]
    if b.flip(0.15):
        shapes = [*shapes, shapes[0]]
    for k, shape in enumerate(shapes):
        name = f"x{k}" if k else "x"
        expression = f"torch.randn({', '.join(map(str, shape))}, generator=torch.Generator().manual_seed({k}))"
        b.inputs[name] = expression
        b.space[name] = torch.randn(*shape, generator=torch.Generator().manual_seed(k))
        b.pool.append(name)
    size = b.random.randint(3, 11)
    functions, weights = zip(*operators, strict=True)
    _try(b, convolution if kind == "image" else linear)
    for _ in range(400):
        if len(b.nodes) >= size:
            break
        _try(b, b.random.choices(functions, weights)[0])
    outputs = _outputs(b)  # adds nodes
    return Module(dict(b.inputs), tuple(b.nodes), tuple(outputs), options=options)


def _try(b: Builder, function: Operator) -> bool:
    """Add an operator's nodes, if it fits."""
    nodes, pool, names = len(b.nodes), list(b.pool), set(b.space)
    before = {n: b.space[n].clone() for n in pool}
    b.kind = function.__name__
    try:
        function(b)
    except (Unfit, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        del b.nodes[nodes:]
        b.pool = pool
        for name, value in before.items():
            b.space[name] = value
        for name in set(b.space) - names:
            if re.fullmatch(r"h\d+", name):
                del b.space[name]
        return False
    return True


def _outputs(b: Builder) -> list[str]:
    """Heads on late values: most of them linear, so that the hidden units stay hidden."""
    b.kind = "head"
    outputs: list[str] = []
    read = {r for n in b.nodes for r in n.reads}
    leaves = [n for n in b.pool if n not in read and n not in b.inputs]
    for _ in range(b.among(1, 1, 2, 2, 3)):
        for _ in range(20):
            h = b.random.choice(leaves) if leaves and b.flip(0.8) else b.pick(2, 3, 4)
            if h in b.inputs or len(b.shape(h)) not in (2, 3, 4):
                continue
            count, head = len(b.nodes), b.fresh("l")
            if len(b.shape(h)) == 4:
                c = b.shape(h)[1]
                flat = b.shape(h)[1] * b.shape(h)[2] * b.shape(h)[3]
                value, init = b.among(
                    (f"self.{head}({h}.mean((2, 3)))", [f"self.{head} = nn.Linear({c}, 3)"]),
                    (f"self.{head}({h}.flatten(1))", [f"self.{head} = nn.Linear({flat}, 3)"]),
                    (f"self.{head}({h})", [f"self.{head} = nn.Conv2d({c}, 2, 1)"]),
                    (h + ".clone()", []),
                )  # fmt: skip
            else:
                n = b.shape(h)[-1]
                linear_head = (f"self.{head}({h})", [f"self.{head} = nn.Linear({n}, 3)"])
                value, init = b.among(
                    linear_head, linear_head, linear_head, linear_head, (f"({h} * 1)", []), (f"{h}.sum(-1)", [])
                )
            form = b.among(*["{0}"] * 10, "{0}.softmax(-1)", "{0}.log_softmax(-1)", "({0} / 0.1).tanh()", "{0}.argmax(-1)",
                           "{0}.max(-1)[0]", "{0}.max(-1)[1]", "{0}.min(-1)[1]", "{0}.topk(1, -1)[1]", "{0} > 0", "{0}.argsort(-1)",
                           "{0}.median(-1)[1]", "{0}.masked_fill({0} < -1, float('-inf'))", "torch.cat([{0}, 0 * {0}], -1)",
                           "{0}.masked_fill({0} < 0, -1e9)", "{0}.sort(-1)[1]", "{0}.norm(dim=-1)", "{0}.sum()")  # fmt: skip
            try:
                outputs.append(b.add((h,), form.format(value), init))
            except (Unfit, RuntimeError, IndexError):
                del b.nodes[count:]
                continue
            break
    return outputs
