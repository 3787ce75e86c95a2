"""Weights and optimizer state between a PyTorch model and its Keras twin, both ways, checked by their outputs.

Owns what a layer of one framework is in the other, which layers belong together, what an optimizer's state is there,
and the order of a conversion. The core here is numpy; each framework is read and written in a child process of its
own by ``hvdtrain.backends.*.convert``, so that no process imports both (law 3).
"""

from __future__ import annotations

from hvdtrain.commands.convert.request import ModelPath, Request, convert, source_of, target_of

__all__ = ["ModelPath", "Request", "convert", "source_of", "target_of"]
