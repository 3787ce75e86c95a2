"""An encoder-only transformer for masked language modelling; twin of `tf_models/bert.py`.

Owns: the layers, their names, and the loss over masked tokens (`task`). Does not own: tokenising, masking, anything
distributed.

J. Devlin et al., "BERT", NAACL 2019: sum of token, position and segment embeddings (one segment here), post-LayerNorm
blocks, GELU, and before the logits one more layer. Sizes below base are those of I. Turc et al., "Well-Read Students
Learn Better", 2019.
"""
from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torch_models import is_count, require
from torch_models.attention import Attention, linear

EPSILON = 1e-12      # of every LayerNorm, in both twins
INIT_STD = 0.02      # of linear and embedding weights
IGNORED = -1         # a target that does not count
SEGMENTS = 2         # of which a masked language model on plain text uses the first

Seen = tuple[torch.Tensor, torch.Tensor]
"""What goes from block to block: (B, T, width), and bool (B, T), the tokens that others may look at."""


class BERT(nn.Module):
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
    """Normed sum of token, position and segment embeddings: (B, T) -> ((B, T, width), seen)."""

    def __init__(self, vocab: int, context: int, width: int, pad: int, dropout: float):
        super().__init__()
        self.pad = pad
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(SEGMENTS, width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions, self.segments):
            nn.init.normal_(table.weight, std=INIT_STD)

    def forward(self, x: torch.Tensor) -> Seen:
        T, context = x.shape[1], self.positions.num_embeddings
        require(T <= context, "sequence", T, f"at most {context} tokens (context)")
        y = self.tokens(x) + self.positions(torch.arange(T, device=x.device)) + self.segments(torch.zeros_like(x))
        return self.dropout(self.norm(y)), x != self.pad


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)): ((B, T, width), seen) -> ((B, T, width), seen)."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.attention = Attention(width, heads, dropout, INIT_STD, INIT_STD)
        self.norm_attention = nn.LayerNorm(width, eps=EPSILON)
        self.mlp_in = linear(width, 4 * width, INIT_STD)
        self.mlp_out = linear(4 * width, width, INIT_STD)
        self.norm_mlp = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, came: Seen) -> Seen:
        x, seen = came
        x = self.norm_attention(x + self.dropout(self.attention(x, seen)))
        return self.norm_mlp(x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(x))))), seen


class Head(nn.Module):
    """A layer more and the map to logits, with the weights of ``table``: ((B, T, width), seen) -> (B, T, vocab)."""

    def __init__(self, width: int, vocab: int, table: nn.Embedding | None = None):
        super().__init__()
        self.linear = linear(width, width, INIT_STD)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.logits = linear(width, vocab, INIT_STD)
        if table is not None:
            self.logits.weight = table.weight

    def forward(self, came: Seen) -> torch.Tensor:
        return self.logits(self.norm(F.gelu(self.linear(came[0]))))


def build(*, vocab: int = 96, context: int = 64, width: int = 128, depth: int = 4, heads: int = 4, pad: int = 0,
          dropout: float = 0.0, tied: bool = False) -> BERT:
    """Build the encoder with normal weights (fixed by `torch.manual_seed`).

    vocab: number of different tokens.
    context: longest sequence, in tokens.
    width: channels of the residual stream; a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads.
    pad: the token that fills sequences up, which nobody looks at; -1: none does.
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
    embed = Embed(vocab, context, width, pad, dropout)
    named: OrderedDict[str, nn.Module] = OrderedDict(embed=embed)
    for index in range(depth):
        named[f"block_{index}"] = Block(width, heads, dropout)
    named["head"] = Head(width, vocab, embed.tokens if tied else None)
    return BERT(named)


def bert_mini(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
              tied: bool = True) -> BERT:
    """Build BERT-Mini: 11,201,594 parameters (untied 7.8M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=256, depth=4, heads=4, pad=pad, dropout=dropout, tied=tied)


def bert_small(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
               tied: bool = True) -> BERT:
    """Build BERT-Small: 28,795,194 parameters (untied 15.6M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=512, depth=4, heads=8, pad=pad, dropout=dropout, tied=tied)


def bert_medium(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
                tied: bool = True) -> BERT:
    """Build BERT-Medium: 41,404,730 parameters (untied 15.6M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=512, depth=8, heads=8, pad=pad, dropout=dropout, tied=tied)


def bert_base(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
              tied: bool = True) -> BERT:
    """Build BERT-Base: 109,514,298 parameters (untied 23.4M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=768, depth=12, heads=12, pad=pad, dropout=dropout, tied=tied)


def bert_large(*, vocab: int = 30522, context: int = 512, pad: int = 0, dropout: float = 0.1,
               tied: bool = True) -> BERT:
    """Build BERT-Large: 335,174,458 parameters (untied 31.3M more). Arguments and errors as of `build`."""
    return build(vocab=vocab, context=context, width=1024, depth=24, heads=16, pad=pad, dropout=dropout, tied=tied)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in the order of the forward pass, each with its name: embed, block_0, ..., head."""
    return list(model.named_children())


def task(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy summed over the tokens that count, in nats, and their number, both scalars.

    batch: x (B, T) token numbers, some of them masked, and y (B, T) what these were, -1 elsewhere.
    """
    x, y = batch
    logits = model(x).flatten(0, 1).float()
    loss_sum = F.cross_entropy(logits, y.flatten().long(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (y != IGNORED).sum()


def weight(batch: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the number of tokens that count in a numpy batch (x (B, T), y (B, T))."""
    return float(np.count_nonzero(batch[1] != IGNORED))


def example(B: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same B samples at every call: x (B, 64) with a seventh masked (95), y (B, 64), both int64."""
    y = np.random.default_rng(0).integers(1, 95, (B, 64), dtype=np.int64)
    masked = np.arange(64) % 7 == 3
    return np.where(masked, 95, y), np.where(masked, y, IGNORED)
