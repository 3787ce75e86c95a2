"""Names of Horovod that are answered with a reason and with what replaces them.

Owns those texts. Elastic training is left out on purpose; the rest belongs to TensorFlow 1's sessions.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.core.errors import UserError


def no_elastic() -> UserError:
    """Why there is no ``elastic``."""
    return UserError(
        "hvd.elastic, which is left out: its rendezvous is an HTTP server without authentication that unpickles what "
        "it is sent, so whoever reaches it runs code on every host (CVE-2024-10190, no fixed release)",
        "checkpoints, and a job that is started again and resumes from the last one",
        "use hvdtrain.Trainer with checkpoint.every_steps and resume: auto, which goes on with another number of ranks "
        "too")


def broadcast_global_variables(root_rank: int) -> None:
    """`UserError`: TensorFlow 2 keeps no list of all variables."""
    from hvdtrain.tensorflow.errors import WrongMode

    raise WrongMode(f"broadcast_global_variables({root_rank}), which belongs to TensorFlow 1: there is no list of all "
                    "variables any more", "the variables themselves",
                    "call hvd.broadcast_variables(model.variables, root_rank) and the same for optimizer.variables, or "
                    "give model.fit hvdtrain.keras' BroadcastGlobalVariablesCallback(root_rank)")


class BroadcastGlobalVariablesHook:
    """`UserError`: a hook of TensorFlow 1's sessions."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        from hvdtrain.tensorflow.errors import WrongMode

        raise WrongMode(f"BroadcastGlobalVariablesHook({root_rank}), which belongs to TensorFlow 1's sessions",
                        "eager TensorFlow 2", "call hvd.broadcast_variables(model.variables, root_rank) after the "
                        "first step, or give model.fit hvdtrain.keras' BroadcastGlobalVariablesCallback(root_rank)")


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: Any = None) -> Any:
    """`UserError`: builds a graph for TensorFlow 1's sessions."""
    from hvdtrain.tensorflow.errors import WrongMode

    raise WrongMode("broadcast_object_fn, which builds a graph for TensorFlow 1's sessions", "eager TensorFlow 2",
                    "call hvd.broadcast_object(obj, root_rank)")
