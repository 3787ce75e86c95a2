"""Read how a custom ``train_step`` or ``test_step`` uses a batch of `hvdtrain.keras.shard`, from its source.

Refuses steps that drop the sample weights; runs nothing. Imports no framework, as `hvdtrain.commands.migrate` needs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.core.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.keras.data import ShardedDataset

STEPS = ("train_step", "test_step")
UNPACK = "unpack_x_y_sample_weight"
Taken = Literal["pairs", "unweighted", "weighted", "unknown"]


def check(model: Any, name: str, shard: ShardedDataset) -> None:
    """Refuse (`UserError`) a custom step ``name`` that fails on sample weights or drops them, unless all are 1."""
    import keras

    step = getattr(type(model), name)
    if step is getattr(keras.Model, name):
        return
    try:
        how = taken(inspect.getsource(inspect.unwrap(step)))
    except (OSError, TypeError, SyntaxError):
        return
    if how == "pairs" or how == "unweighted" and not shard.of_ones():
        does = "takes two elements of a batch" if how == "pairs" else "drops the sample weights of a batch"
        raise UserError(f"{type(model).__name__}.{name} {does} of hvdtrain.keras.shard",
                        "x, y and sample_weight, which makes the mean over ranks that of the global batch",
                        f"write x, y, sample_weight = keras.utils.{UNPACK}(data) in {name}, and give sample_weight "
                        "to compute_loss")


def taken(source: str) -> Taken:
    """Return how a step's source takes its batch: two elements, three with the weights unread, or with them read."""
    function = next((node for node in ast.walk(ast.parse(textwrap.dedent(source)))
                     if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    if function is None or len(function.args.args) < 2:  # a lambda
        return "unknown"
    data = function.args.args[1].arg
    if any(isinstance(node, ast.Name) and node.id == data and isinstance(node.ctx, ast.Store)
           for node in ast.walk(function)):
        return "unknown"  # what is taken apart may be another batch
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unpacked = [node.targets[0].elts for node in ast.walk(function) if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], (ast.Tuple, ast.List)) and _is_batch(node.value, data)]
    if unpacked:
        most = max(unpacked, key=len)
        last = most[-1].value if isinstance(most[-1], ast.Starred) else most[-1]
        if len(most) == 2 and last is most[-1]:
            return "pairs"
        return "unweighted" if isinstance(last, ast.Name) and last.id not in read else "weighted"
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == data]
    indices = [node.slice.value for node in ast.walk(function) if isinstance(node, ast.Subscript)
               and isinstance(node.value, ast.Name) and node.value.id == data and isinstance(node.slice, ast.Constant)]
    if not uses or len(indices) < len(uses):
        return "unknown"
    return "weighted" if 2 in indices else "unweighted"


def _is_batch(value: ast.expr, data: str) -> bool:
    """Return whether an expression is the parameter ``data``, or Keras' unpacking of it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == UNPACK and value.args:
        value = value.args[0]
    return isinstance(value, ast.Name) and value.id == data
