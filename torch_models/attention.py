"""Self-attention and linear layers with normal weights, for the transformers; twin of `tf_models/attention.py`.

Owns: these layers. No model of its own.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention: (B, T, width) -> (B, T, width).

    ``causal``: each token sees those before it and itself alone. ``std``, ``out_std``: of the weights.
    """

    def __init__(self, width: int, heads: int, dropout: float, std: float, out_std: float, causal: bool = False):
        super().__init__()
        self.heads, self.rate, self.causal = heads, dropout, causal
        self.qkv = linear(width, 3 * width, std)
        self.out = linear(width, width, out_std)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """``seen``: bool (B, T), the tokens that others may look at; None: all."""
        B, T, width = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=None if seen is None else seen[:, None, None, :],
                                               is_causal=self.causal, dropout_p=self.rate if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).reshape(B, T, width))


def linear(in_features: int, out_features: int, std: float, bias: bool = True) -> nn.Linear:
    """Return a linear layer with normal weights of standard deviation `std` and a zero bias."""
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
