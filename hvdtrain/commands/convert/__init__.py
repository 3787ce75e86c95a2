"""Conversion of weights and optimizer state between a PyTorch model and its Keras twin, checked by their outputs.

The core is numpy; each framework runs in a child process of its own (law 3).
"""

from __future__ import annotations

from hvdtrain.commands.convert.request import ModelPath, Request, convert, source_of, target_of

__all__ = ["ModelPath", "Request", "convert", "source_of", "target_of"]
