"""A small decoder-only transformer for next-token prediction; twin of `tf_models/gpt.py`.

Owns: the layers, their names, and the loss over tokens (`task`). Does not own: tokenising, sampling, anything
distributed.

Pre-LayerNorm, learned positions, causal attention, GELU (tanh form), untied output weights.
"""
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torch_models import is_count, require

EPSILON = 1e-5       # of every LayerNorm, in both twins
INIT_STD = 0.02      # of linear and embedding weights, as in GPT-2
IGNORED = -1         # a target that does not count


class GPT(nn.Module):
    """A chain of named blocks; x (B, T) token numbers, T <= context -> logits (B, T, vocab)."""

    def __init__(self, named_blocks: OrderedDict[str, nn.Module]):
        super().__init__()
        for name, block in named_blocks.items():
            self.add_module(name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, block in blocks(self):
            x = block(x)
        return x


class Embed(nn.Module):
    """Sum of token and position embeddings: (B, T) -> (B, T, width)."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=INIT_STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T, context = x.shape[1], self.positions.num_embeddings
        require(T <= context, "sequence", T, f"at most {context} tokens (context)")
        return self.dropout(self.tokens(x) + self.positions(torch.arange(T, device=x.device)))


class Attention(nn.Module):
    """Causal self-attention: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, out_std: float):
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.qkv = linear(width, 3 * width, INIT_STD)
        self.out = linear(width, width, out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, width = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).reshape(B, T, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, out_std: float):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, eps=EPSILON)
        self.attention = Attention(width, heads, dropout, out_std)
        self.norm_mlp = nn.LayerNorm(width, eps=EPSILON)
        self.mlp_in = linear(width, 4 * width, INIT_STD)
        self.mlp_out = linear(4 * width, width, out_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")))


class Head(nn.Module):
    """Last LayerNorm and the map to logits: (B, T, width) -> (B, T, vocab)."""

    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.logits = linear(width, vocab, INIT_STD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def linear(in_features: int, out_features: int, std: float, bias: bool = True) -> nn.Linear:
    """A linear layer with normal weights of standard deviation `std` and a zero bias."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def build(*, vocab: int = 96, context: int = 64, width: int = 128, depth: int = 4, heads: int = 4,
          dropout: float = 0.0) -> GPT:
    """Build the decoder with normal weights (fixed by `torch.manual_seed`).

    vocab: number of different tokens.
    context: longest sequence, in tokens.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    dropout: share of values dropped in training, 0 <= dropout < 1, after the embedding, on attention weights
        and on each residual branch. Above 0 a run depends on the number of ranks.
    Raises ValueError for a size below 1, a width that heads do not divide, or a dropout outside its range.
    """
    sizes = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads}
    for name, value in sizes.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    require(width % heads == 0, "width", width, f"a multiple of heads ({heads})")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    named: OrderedDict[str, nn.Module] = OrderedDict(embed=Embed(vocab, context, width, dropout))
    for index in range(depth):
        # GPT-2's rule: 2 * depth branches add into the residual stream.
        named[f"block_{index}"] = Block(width, heads, dropout, out_std=INIT_STD / (2 * depth) ** 0.5)
    named["head"] = Head(width, vocab)
    return GPT(named)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: embed, block_0, ..., head."""
    return list(model.named_children())


def task(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy summed over the tokens that count, in nats, and their number, both scalars.

    batch: x (B, T) token numbers and y (B, T) the tokens that follow, -1 where none counts.
    """
    x, y = batch
    logits = model(x).flatten(0, 1).float()
    loss_sum = F.cross_entropy(logits, y.flatten().long(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (y != IGNORED).sum()


def weight(batch: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the number of tokens that count in a numpy batch (x (B, T), y (B, T))."""
    return float(np.count_nonzero(batch[1] != IGNORED))


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 64) and y (B, 64), the tokens one later, both int64."""
    x = np.random.default_rng(0).integers(0, 96, (B, 64), dtype=np.int64)
    return x, np.concatenate([x[:, 1:], np.full((B, 1), IGNORED)], axis=1)
