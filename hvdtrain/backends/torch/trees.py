"""Trees of PyTorch tensors, as models take and give them: one tensor, or tuples, lists and dicts of such. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.core.errors import UserError


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for child in children for t in tensors_of(child)]


def like(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree ``value`` with other tensors, in the order of `tensors_of`."""
    rest = iter(tensors)

    def built(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(rest)
        if isinstance(part, (tuple, list)):
            return type(part)(built(v) for v in part)
        return {k: built(v) for k, v in part.items()} if isinstance(part, dict) else part

    return built(value)


def count_samples(x: Any) -> int:
    """First dimension of all tensors; `UserError` where they have not one in common."""
    sizes = {t.shape[0] if t.dim() else -1 for t in tensors_of(x)}
    if len(sizes) != 1 or -1 in sizes:
        raise UserError(f"a split model was given {type(x).__name__} with first dimensions {sorted(sizes)}",
                        "tensors (B, ...) with one B, which is cut into parts", "set model_parallel: 1, or give it one")
    return sizes.pop()


def cut(x: Any, parts: int) -> list[Any]:
    """``parts`` trees of about B / parts samples each."""
    columns = [torch.tensor_split(t, parts) for t in tensors_of(x)]
    return [like(x, [column[i] for column in columns]) for i in range(parts)]


def joined(parts: Sequence[Any]) -> Any:
    """Undo `cut` for outputs; `UserError` for what has no samples to put one behind the other."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(list(parts))
    if isinstance(first, (tuple, list)):
        return type(first)(joined(each) for each in zip(*parts))
    if isinstance(first, dict):
        return {k: joined([part[k] for part in parts]) for k in first}
    raise UserError(f"the last block of a split model returns a {type(first).__name__} without samples",
                    "tensors (B, ...), which the parts of a micro-batch are put together to",
                    "set split_micro_batches: 1, or take the sum over samples into task")
