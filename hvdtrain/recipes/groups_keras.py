"""The transformers of `tf_models`, without weight decay on norms and biases; twin of `groups.py`.

    mpirun -np 4 python -m hvdtrain train --config recipes/gpt_keras.yaml --model recipes/groups_keras.py:gpt2_small

Owns: the groups. Losses and blocks are those of each model's own file. See docs/how-to/recipes.md.
"""
from __future__ import annotations

from typing import Any

import keras

from tf_models.bert import bert_base, bert_large
from tf_models.bert import build as bert
from tf_models.gpt import build as gpt
from tf_models.gpt import gpt2_medium, gpt2_small
from tf_models.vit import build as vit
from tf_models.vit import vit_base, vit_small

__all__ = ["bert", "bert_base", "bert_large", "gpt", "gpt2_medium", "gpt2_small", "vit", "vit_base", "vit_small",
           "parameter_groups"]


def parameter_groups(model: keras.Model) -> list[dict[str, Any]]:
    """Return one group: the variables with one axis, which norms and biases have; all others decay as configured."""
    return [{"variables": [v for v in model.trainable_variables if len(v.shape) < 2], "weight_decay": 0.0}]
