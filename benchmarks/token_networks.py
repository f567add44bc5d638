"""Two small networks that predict the next token, for fedveil and for the environments of other libraries: torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, STEPS, WIDTH = 74, 32, 64


class TokenLSTM(nn.Module):
    """Embedding, one LSTM, a linear layer; `lstm` makes another library's LSTM."""

    def __init__(self, lstm: Callable[..., Any] = nn.LSTM) -> None:
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(TOKENS, 32), lstm(32, WIDTH, batch_first=True), nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Scores [batch, tokens, steps]."""
        scores: Tensor = self.out(self.lstm(self.table(x))[0])
        return scores.mT


class Block(nn.Module):
    """Causal attention and two linear layers, norms first."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The same shape, [batch, steps, width]."""
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        out: Tensor = x + self.outer(torch.relu(self.inner(self.norms[1](x))))
        return out


class TokenTransformer(nn.Module):
    """Two blocks of width 64 with 4 heads; places are numbers that do not train, or, `learned`, a parameter."""

    def __init__(self, attention: Callable[..., Any] = nn.MultiheadAttention, learned: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList([Block(attention) for _ in range(2)])
        places = 0.1 * torch.randn(STEPS, WIDTH)
        self.places = nn.Parameter(places) if learned else nn.Buffer(places)
        self.register_buffer("mask", torch.triu(torch.ones(STEPS, STEPS, dtype=torch.bool), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores [batch, tokens, steps]."""
        x = self.table(x) + self.places
        for block in self.blocks:
            x = block(x, self.mask)
        scores: Tensor = self.out(x)
        return scores.mT
