"""A PyTorch model whose file builds each block by itself (`block_names`, `build_block`): no rank has it whole.

Owns the model that stands for such blocks, and the proof that a block has the same weights wherever it is built.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.backends.torch import generators
from hvdtrain.core import rng
from hvdtrain.core.errors import UserError


class Blocks(torch.nn.Module):
    """A chain of named blocks: each gets what the one before gives."""

    def forward(self, x: Any) -> Any:
        """Give what the last block gives."""
        for block in self.children():
            x = block(x)
        return x


class ByBlock:
    """Builds the blocks of a model: ``names() -> [name]``, ``build(name) -> block``."""

    def __init__(self, names: Callable[[], Any], build: Callable[[str], Any]) -> None:
        self.names = [str(name) for name in names()]
        self._build = build
        self._prints: dict[str, int] = {}
        self._built = 0
        odd = [name for name in self.names if not name or "." in name or self.names.count(name) > 1]
        if odd or not self.names:
            raise UserError(f"block_names gives {self.names[:6]}", "the names of the model's blocks, each once and "
                            "without a dot", "mend block_names in the model file")

    def block(self, name: str) -> torch.nn.Module:
        """Return a block; generators are as before. Errors: `UserError` for one that has other weights than before.

        The generators are at another place each time.
        """
        random = generators.random_arrays()
        self._built += 1
        rng.seed(self._built, 0)
        torch.manual_seed(self._built)
        try:
            block = self._build(name)
        finally:
            generators.load_random(random)
        if not isinstance(block, torch.nn.Module):
            raise UserError(f"build_block gives a {type(block).__name__} for {name!r}", "a torch.nn.Module",
                            "mend build_block in the model file")
        found = _print(block)
        if self._prints.setdefault(name, found) != found:
            raise UserError(f"build_block gives block {name!r} other weights when random generators are at another "
                            "place", "weights that depend on the block alone, as build() gives them too",
                            "begin build_block with a seed made of the block's name")
        return block

    def outline(self) -> Blocks:
        """Return all blocks without their values, one built after the other."""
        model = Blocks()
        for name in self.names:
            model.add_module(name, self.block(name).to("meta"))
        return model


def _print(block: torch.nn.Module) -> int:
    """A checksum of a block's parameters and buffers."""
    found = 0
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(bits.numpy().tobytes(), found)
    return found
