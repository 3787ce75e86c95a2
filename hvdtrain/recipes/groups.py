"""The transformers of `torch_models`, without weight decay on norms and biases; twin of `groups_keras.py`.

    mpirun -np 4 python -m hvdtrain train --config recipes/gpt.yaml --model recipes/groups.py:gpt2_small

Owns: the groups. Losses and blocks are those of each model's own file. See docs/how-to/recipes.md.
"""
from __future__ import annotations

from typing import Any

from torch import nn

from torch_models.bert import bert_base, bert_large
from torch_models.bert import build as bert
from torch_models.gpt import build as gpt
from torch_models.gpt import gpt2_medium, gpt2_small
from torch_models.vit import build as vit
from torch_models.vit import vit_base, vit_small

__all__ = ["bert", "bert_base", "bert_large", "gpt", "gpt2_medium", "gpt2_small", "vit", "vit_base", "vit_small",
           "parameter_groups"]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return one group: the parameters with one axis, which norms and biases have; all others decay as configured."""
    return [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
