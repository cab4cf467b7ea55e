"""The two backends of exact curvatures, torch.func and BackPACK: where is which faster?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks._measure import Stopwatch, figure, times
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.laplace.curvature import Backend
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.reporting.grid import Grid

BACKENDS: tuple[Backend, ...] = ("hooks", "backpack")
REPEATS = 3


class Block(nn.Module):
    """Two convolutions with normalization, and a residual sum."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return torch.relu(self.skip(x) + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


def networks(quick: bool) -> dict[str, tuple[nn.Module, tuple[int, ...], str]]:
    """Name to a network, the shape of its inputs, and the curvature."""
    n, w = (8, 4) if quick else (128, 16)
    mlp = nn.Sequential(nn.Linear(784, 32 * w), nn.ReLU(), nn.Linear(32 * w, 10))
    convolutions = nn.Sequential(
        nn.Conv2d(1, w, 5, 2, 2), nn.ReLU(), nn.Conv2d(w, 2 * w, 5, 2, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(2 * w * 49, 10),
    )  # fmt: skip
    residual = nn.Sequential(
        nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(), Block(w, w, 1), Block(w, 2 * w, 2),
        Block(2 * w, 4 * w, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10),
    )  # fmt: skip
    small = nn.Sequential(nn.Linear(20, 2 * w), nn.Tanh(), nn.Linear(2 * w, 2 * w), nn.Tanh(), nn.Linear(2 * w, 10))
    return {
        f"MLP 784-{32 * w}-10": (mlp, (n, 784), "diag"),
        f"two convolutions, {w} and {2 * w} channels": (convolutions, (n, 1, 28, 28), "diag"),
        f"ResNet-8, width {w}": (residual, (n // 4, 3, 32, 32), "diag"),
        f"MLP 20-{2 * w}-{2 * w}-10": (small, (4 * n, 20), "full"),
    }


def run(settings: Settings) -> Section:
    """Fit the same curvature with both."""
    torch.manual_seed(0)
    rows, data, worst = [], [], 0.0
    for name, (network, shape, curvature) in networks(settings.quick).items():
        x, y = torch.randn(shape), torch.arange(shape[0]) % 10
        seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        evidence: dict[str, float] = {}
        for _ in range(1 if settings.quick else REPEATS):
            for backend in BACKENDS:
                la = LinearizedLaplace(
                    network,
                    "classification",
                    prior="single",
                    evaluate_at="map",
                    curvature=curvature,  # type: ignore[arg-type]
                    backend=backend,
                )
                with Stopwatch() as watch:
                    la.fit([(x, y)])
                seconds[backend].append(watch.cpu)
                evidence[backend] = float(la.log_marginal_likelihood())
        hooks, peer = (sorted(seconds[backend])[len(seconds[backend]) // 2] for backend in BACKENDS)
        difference = abs(evidence["hooks"] - evidence["backpack"]) / abs(evidence["hooks"])
        worst = max(worst, difference)
        rows.append([name, curvature, str(shape[0]), figure(hooks), figure(peer), times(hooks, peer)])
        data.append({"network": name, "curvature": curvature, "hooks": hooks, "backpack": peer, "differ": difference})
        settings.say(f"{name}, {curvature}: torch.func {figure(hooks)} s, BackPACK {figure(peer)} s")
    columns = ["network", "curvature", "samples", "torch.func\ncpu s", "BackPACK\ncpu s", "BackPACK\nis faster"]
    grid = Grid("Exact curvature from gradients of samples", columns, rows)
    text = (
        "`LinearizedLaplace(curvature=..., backend=...)`: exact generalized Gauss-Newton matrix of a classifier with "
        "10 classes, or its diagonal, of random weights and inputs, float32, one batch with all checks. Both take one "
        "backward pass for each column of the output Hessian's root. Sums of squares of a linear layer's gradients are "
        "a product of two matrices in BackPACK, where torch.func makes the gradient of every sample; those of a "
        "convolution are made sample by sample in both."
    )
    goal = Goal("the evidence of both is the same to 1e-4", worst < 1e-4, f"largest relative difference {worst:.1g}")
    return Section("Exact curvature: torch.func against BackPACK", text, [grid], [goal], data)
