"""A small decoder-only transformer for next-token prediction; twin of `tf_models/gpt.py`.

Owns: the layers, their names, and the loss over tokens (`task`). Does not own: tokenising, sampling, anything
distributed.

Pre-LayerNorm, learned positions, causal attention, GELU (tanh form). `gpt2_small` and `gpt2_medium` have the sizes of
A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, and its tied output weights.
"""
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torch_models import is_count, require
from torch_models.attention import Attention, linear

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


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, out_std: float):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, eps=EPSILON)
        self.attention = Attention(width, heads, dropout, INIT_STD, out_std, causal=True)
        self.norm_mlp = nn.LayerNorm(width, eps=EPSILON)
        self.mlp_in = linear(width, 4 * width, INIT_STD)
        self.mlp_out = linear(4 * width, width, out_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")))


class Head(nn.Module):
    """Last LayerNorm and the map to logits, with the weights of ``table``: (B, T, width) -> (B, T, vocab)."""

    def __init__(self, width: int, vocab: int, table: nn.Embedding | None = None):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.logits = linear(width, vocab, INIT_STD, bias=False)
        if table is not None:
            self.logits.weight = table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def build(*, vocab: int = 96, context: int = 64, width: int = 128, depth: int = 4, heads: int = 4,
          dropout: float = 0.0, tied: bool = False) -> GPT:
    """Build the decoder with normal weights (fixed by `torch.manual_seed`).

    vocab: number of different tokens.
    context: longest sequence, in tokens.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    dropout: share of values dropped in training, 0 <= dropout < 1, after the embedding, on attention weights
        and on each residual branch. Above 0 a run depends on the number of ranks.
    tied: one matrix for token embeddings and logits; such a model cannot be cut between its first and last block.
    Raises ValueError for a size below 1, a width that heads do not divide, or a dropout outside its range.
    """
    sizes = {"vocab": vocab, "context": context, "width": width, "depth": depth, "heads": heads}
    for name, value in sizes.items():
        require(is_count(value), name, value, "a whole number of at least 1")
    require(width % heads == 0, "width", width, f"a multiple of heads ({heads})")
    require(isinstance(dropout, (int, float)) and 0 <= dropout < 1, "dropout", dropout, "0 <= dropout < 1")
    embed = Embed(vocab, context, width, dropout)
    named: OrderedDict[str, nn.Module] = OrderedDict(embed=embed)
    for index in range(depth):
        # GPT-2's rule: 2 * depth branches add into the residual stream.
        named[f"block_{index}"] = Block(width, heads, dropout, out_std=INIT_STD / (2 * depth) ** 0.5)
    named["head"] = Head(width, vocab, embed.tokens if tied else None)
    return GPT(named)


def gpt2_small(*, vocab: int = 50257, context: int = 1024, dropout: float = 0.1, tied: bool = True) -> GPT:
    """Build GPT-2's smallest: 124,439,808 parameters (untied 38.6M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=768, depth=12, heads=12, dropout=dropout, tied=tied)


def gpt2_medium(*, vocab: int = 50257, context: int = 1024, dropout: float = 0.1, tied: bool = True) -> GPT:
    """Build GPT-2's second: 354,823,168 parameters (untied 51.5M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=1024, depth=24, heads=16, dropout=dropout, tied=tied)


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
