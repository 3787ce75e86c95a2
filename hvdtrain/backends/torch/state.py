"""A PyTorch run as named numpy arrays and back, bit by bit.

bfloat16, which numpy lacks, travels as its bits in uint16; the receiving tensor's dtype tells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain import rng
from hvdtrain.backends.torch.optim import Optimization
from hvdtrain.errors import UserError


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(np.uint16).copy()
    return host.numpy().copy()


def from_numpy(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Undo `to_numpy` for a tensor such as ``like``."""
    host = torch.from_numpy(np.array(array, copy=True))
    if like.dtype == torch.bfloat16 and array.dtype == np.uint16:
        host = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return host.to(device=like.device, dtype=like.dtype)


def model_arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Parameters and persistent buffers by name."""
    return {name: to_numpy(t) for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def load_model(model: torch.nn.Module, arrays: dict[str, np.ndarray]) -> None:
    """Copy arrays into the model in place; `UserError` names the first that does not fit."""
    own = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    check_names("model", own, arrays)
    for name, tensor in own.items():
        if tuple(tensor.shape) != tuple(arrays[name].shape):
            raise UserError(
                f"checkpoint tensor {name} has shape {tuple(arrays[name].shape)}",
                f"{tuple(tensor.shape)}, as in this model",
                "resume with the model and model_args of that run",
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(from_numpy(arrays[name], tensor))


def check_names(what: str, own: Any, got: Any) -> None:
    """Raise `UserError` unless both have the same names."""
    missing, extra = sorted(set(own) - set(got)), sorted(set(got) - set(own))
    if missing or extra:
        raise UserError(f"the checkpoint's {what} lacks {missing[:3]} and has {extra[:3]} besides",
                        f"the {len(own)} tensors of this {what}", "resume with the model and optimizer of that run")


def optimizer_arrays(opt: Optimization, names: list[str]) -> dict[str, np.ndarray]:
    """Every tensor of the optimizer's state as ``parameter/key``; plain numbers become 0-d arrays."""
    out = {}
    for index, entries in opt.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if value is None:
                continue
            array = to_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
            out[f"{names[int(index)]}/{key}"] = array
    return out


def check_optimizer(names: list[str], arrays: dict[str, np.ndarray]) -> None:
    """Raise `UserError` for the state of a parameter that this model does not have."""
    for name in {full.rpartition("/")[0] for full in arrays} - set(names):
        raise UserError(f"the checkpoint's optimizer has state for {name!r}", "parameters of this model only",
                        "resume with the model of that run")


def load_optimizer(opt: Optimization, names: list[str], params: list[torch.nn.Parameter],
                   arrays: dict[str, np.ndarray]) -> None:
    """Undo `optimizer_arrays`."""
    index = {name: i for i, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for full, array in arrays.items():
        name, _, key = full.rpartition("/")
        like = params[index[name]]
        fits = tuple(array.shape) == tuple(like.shape) and array.ndim > 0
        state.setdefault(index[name], {})[key] = from_numpy(array, like) if fits else torch.from_numpy(np.array(array))
    whole = opt.optimizer.state_dict()
    opt.optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def random_arrays() -> dict[str, np.ndarray]:
    """Every random generator of this process."""
    out = {**rng.capture(), "torch.cpu": torch.get_rng_state().numpy().copy()}
    if torch.cuda.is_available():
        out["torch.cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return out


def load_random(arrays: dict[str, np.ndarray]) -> None:
    """Undo `random_arrays`."""
    rng.restore(arrays)
    torch.set_rng_state(torch.from_numpy(np.array(arrays["torch.cpu"])))
    if "torch.cuda" in arrays and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays["torch.cuda"])))
