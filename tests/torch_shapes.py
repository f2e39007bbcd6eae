"""Models of PyTorch that use their parameters in all the ways that models do, for tests."""

from __future__ import annotations

from typing import Any

from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch_models import nn, torch

WORDS, WIDTH, LAYERS = 40, 16, 7


class Tied(nn.Module):  # type: ignore[misc]
    """A module used twice, an activation that is written in place, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        hidden = self.embed(x)
        hidden = functional.relu(self.inner(hidden), inplace=True) + self.inner(hidden)
        return self.head(self.norm(hidden))


class Functional(Tied):
    """A parameter that is used outside of its module."""

    def forward(self, x: Any) -> Any:
        return functional.linear(self.norm(self.inner(self.embed(x))), self.embed.weight)


class Checkpointed(Tied):
    """A block, twice, that is computed again in the backward pass."""

    def block(self, hidden: Any) -> Any:
        return self.norm(functional.relu(self.inner(hidden)))

    def forward(self, x: Any) -> Any:
        hidden = self.embed(x)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        return self.head(hidden)


class Reentrant(Checkpointed):
    """The other kind of checkpoint, whose backward pass is one inside of another."""

    def forward(self, x: Any) -> Any:
        return self.head(checkpoint(self.block, self.embed(x), use_reentrant=True))


class Places(nn.Module):  # type: ignore[misc]
    """A module whose output is in its parameter's memory."""

    def __init__(self, count: int = 9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, WIDTH))

    def forward(self, count: int) -> Any:
        return self.weight[:count]


class Mixed(nn.Module):  # type: ignore[misc]
    """Recurrence, attention, convolution, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = Places()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Any) -> Any:
        hidden = self.embed(x) + 2 * self.places(x.shape[1])
        hidden, _ = self.recurrent(hidden)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        hidden = self.norm(self.conv(hidden.transpose(1, 2))).transpose(1, 2)
        return self.head(self.scale * hidden)


class Odd(nn.Module):  # type: ignore[misc]
    """A sparse gradient, other dtypes, a key without elements, and a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.empty = Places(0)
        self.head = nn.Linear(WIDTH, WORDS).bfloat16()

    def forward(self, x: Any) -> Any:
        hidden = torch.tanh(self.normed(self.embed(x)))
        hidden = hidden + self.empty(0).sum()
        return self.head(self.wide(hidden.double()).bfloat16()).float()


def deep() -> Any:
    """Layers that are alike, of some blocks each."""
    parts: list[Any] = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 192)]
    for _ in range(LAYERS - 2):
        parts += [nn.Tanh(), nn.Linear(192, 192)]
    return nn.Sequential(*parts, nn.Tanh(), nn.Linear(192, WORDS))


MODELS = {
    "deep": deep,
    "tied": Tied,
    "functional": Functional,
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "mixed": Mixed,
    "odd": Odd,
}


def loss_of(model: Any, number: int) -> Any:
    """The loss of the batch with this number: to say the words that were heard."""
    chance = torch.Generator().manual_seed(number)
    words = torch.randint(0, WORDS, (4, 5), generator=chance)
    return functional.cross_entropy(model(words).reshape(-1, WORDS), words.reshape(-1))
