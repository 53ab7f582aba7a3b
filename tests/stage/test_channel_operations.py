"""Every operation, in every way that the layout may choose for it, is exact for unequal shares."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hetpipe.stage.layout import Cost
from tests.helpers.ranks import run_ranks
from tests.stage.parity import free_communication, parity

SHARES = {2: [(1, 1), (7, 1)], 3: [(1, 1, 1), (5, 2, 1), (7, 1, 1)]}


class Drawn(Cost):
    """Prices drawn from a seed, so that unusual ways win too; equal on every rank."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def compute_s(self, work: float, shared: bool) -> float:
        return self._draw("shared" if shared else "whole", work) * (1 if shared else 2)

    def collective_s(self, kind: str, size_bytes: float) -> float:
        return self._draw(kind, size_bytes)

    def _draw(self, kind: str, amount: float) -> float:
        digest = hashlib.sha256(f"{self.seed} {kind} {amount}".encode()).digest()
        return digest[0] / 255 + 0.01


class Residual(nn.Module):
    """Both branches in place, and a value that is used after it was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.short = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.relu(self.norm(self.conv1(x))))
        y += self.short(x)
        self.relu(y)
        z = y.mean((2, 3), keepdim=True)
        return y * torch.sigmoid(z)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.up = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 3, 1), nn.Conv2d(3, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Dense(nn.Module):
    """Joins channels, as DenseNet does, and lets rows go their own way, as attention would."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(10, 6, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(10), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, F.relu(self.first(x))], 1)
        z = torch.cat([y, self.second(self.norm(y))], 1)
        return F.max_pool2d(F.relu(self.last(z)), 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 20), nn.Linear(20, 8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class Attention(nn.Module):
    def __init__(self, bias: bool, batch_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 8, bias=bias, batch_first=batch_first)
        self.up, self.down = nn.Linear(32, 24), nn.Linear(24, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.down(F.gelu(self.up(self.second(x))))


class Masked(nn.Module):
    """Causal attention, the mask as numbers or as truth."""

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(32, 8, batch_first=True), nn.Linear(32, 6)
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        self.register_buffer("mask", later if truth else torch.zeros(5, 5).masked_fill(later, -9.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, attn_mask=self.mask, need_weights=False, is_causal=False)[0]
        return self.last(x + y)


class Tied(nn.Module):
    """One convolution in two places must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.conv(F.relu(self.conv(x)))))


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 6, 3), nn.Linear(6 * 16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.linear(x.view(x.size(0), -1)) / x.shape[1]


class Frozen(nn.Module):
    """A stage that begins with frozen layers: no gradient flows into them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Conv2d(8, 6, 3),
        )
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.detach()))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(11, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(F.relu(self.words(x))), dim=-1)


def _seq(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


IMAGE, TOKENS = (3, 3, 6, 6), (2, 5, 32)
CASES = {
    "pair": (lambda: _seq(nn.Conv2d(3, 9, 3), nn.ReLU(), nn.Conv2d(9, 5, 3)), IMAGE),
    "strided_dilated": (
        lambda: _seq(nn.Conv2d(3, 8, 3, 2, 1), nn.Tanh(), nn.Conv2d(8, 6, 2, dilation=2)),
        IMAGE,
    ),
    "circular": (
        lambda: _seq(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=8, padding_mode="circular")),
        IMAGE,
    ),
    "transposed": (
        lambda: _seq(nn.ConvTranspose2d(3, 8, 3, 2), nn.ReLU(), nn.ConvTranspose2d(8, 5, 2, bias=False)),
        IMAGE,
    ),
    "one_dimension": (lambda: _seq(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 2)), (2, 3, 8)),
    "three_dimensions": (
        lambda: _seq(nn.Conv3d(2, 6, 2), nn.MaxPool3d(2), nn.Conv3d(6, 4, 1)),
        (2, 2, 5, 5, 5),
    ),
    "depthwise": (
        lambda: _seq(
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=8), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)
        ),
        IMAGE,
    ),
    "grouped": (
        lambda: _seq(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 3, groups=8, bias=False), nn.Conv2d(32, 8, 1)),
        IMAGE,
    ),
    "few_groups": (lambda: _seq(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 4, 1)), IMAGE),
    "group_norm": (lambda: _seq(nn.Conv2d(3, 24, 3), nn.GroupNorm(8, 24), nn.Conv2d(24, 5, 1)), IMAGE),
    "one_group_norm": (lambda: _seq(nn.Conv2d(3, 24, 3), nn.GroupNorm(1, 24), nn.Conv2d(24, 5, 1)), IMAGE),
    "instance_norm": (
        lambda: _seq(
            nn.Conv2d(3, 8, 3),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.Conv2d(8, 5, 1),
        ),
        IMAGE,
    ),
    "slopes": (lambda: _seq(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.PReLU(), nn.Conv2d(8, 5, 1)), IMAGE),
    "flatten": (
        lambda: _seq(
            nn.Conv2d(3, 8, 3),
            nn.AdaptiveAvgPool2d((2, 3)),
            nn.Flatten(),
            nn.Linear(48, 10),
            nn.Linear(10, 4),
        ),
        IMAGE,
    ),
    "linear": (
        lambda: _seq(nn.Linear(32, 12), nn.GELU(), nn.Linear(12, 9, bias=False), nn.LayerNorm(9)),
        TOKENS,
    ),
    "residual": (Residual, (2, 8, 5, 5)),
    "squeeze_excite": (SqueezeExcite, IMAGE),
    "dense": (Dense, (2, 4, 6, 6)),
    "convnext": (ConvNext, IMAGE),
    "attention": (lambda: Attention(True, True), TOKENS),
    "attention_time_first": (lambda: Attention(False, False), TOKENS),
    "masked_by_numbers": (lambda: Masked(False), TOKENS),
    "masked_by_truth": (lambda: Masked(True), TOKENS),
    "tied": (Tied, (2, 4, 6, 6)),
    "sizes": (Sizes, IMAGE),
    "frozen": (Frozen, IMAGE),
    "words": (Words, (3, 7)),
}


def _all_cases(
    rank: int, shares_list: list[tuple[int, ...]], n_draws: int
) -> tuple[dict[str, float], set[str]]:
    errors: dict[str, float] = {}
    ways: set[str] = set()
    for name, (make, shape) in CASES.items():
        generator = torch.Generator().manual_seed(3)
        if name == "words":
            x = torch.randint(11, shape, generator=generator)
        else:
            x = torch.randn(shape, dtype=torch.float64, generator=generator)
        for place, shares in enumerate(shares_list):
            parts = tuple(share / sum(shares) for share in shares)
            for draw in range(n_draws + 1):
                cost = Drawn(10 * place + draw) if draw else free_communication(parts)
                found, layout = parity(rank, make, (x,), parts, cost, steps=2)
                ways |= {way.name for way in layout.choice.ways.values()}
                errors[f"{name} {shares} cost {draw}"] = max(found.values())
    return errors, ways


@pytest.mark.parametrize("n", [2, 3])
def test_every_operation_in_every_way_is_exact(n: int):
    for errors, ways in run_ranks(n, _all_cases, SHARES[n], {2: 2, 3: 1}[n], timeout_s=110):
        wrong = {name: error for name, error in errors.items() if not error < 1e-11}
        assert not wrong, wrong
        assert ways == {"whole", "local", "column", "row", "row+scatter", "heads"}
