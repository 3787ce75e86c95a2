"""A PyTorch model and its optimizer for `hvdtrain.commands.convert`: layers, arrays, outputs, files, state by slot.

What they become in Keras is decided in numpy, in that package.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.backends.interchange import rule as rules
from hvdtrain.backends.interchange.layers import Layer, Model, Weight
from hvdtrain.backends.interchange.pairing import UNSUPPORTED, unfit
from hvdtrain.backends.interchange.rule import TORCH_SLOTS, Rule, Slots
from hvdtrain.backends.torch import modules, placement, state
from hvdtrain.backends.torch.modules import modes_kept
from hvdtrain.core.errors import UserError

_CONVS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TRANSPOSED = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
_PLAIN = {nn.Linear: "dense", nn.Embedding: "embedding", nn.LayerNorm: "layer norm", nn.GroupNorm: "group norm",
          nn.RMSNorm: "rms norm", nn.MultiheadAttention: "attention"}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WHOLE = (nn.MultiheadAttention, nn.LSTM, nn.GRU)
"""Layers that are converted with all that is in them."""
_SHORT = "torch."


def describe(model: nn.Module) -> Model:
    """Return the model's layers that have weights, in the order of registration; a shared weight once."""
    layers: list[Layer] = []
    seen: set[int] = set()
    inside: tuple[str, ...] = ()
    kept, plain = set(model.state_dict()), modules.PlainNames(model)
    for name, module in model.named_modules():
        if any(name.startswith(f"{whole}.") or not whole for whole in inside):
            continue
        if isinstance(module, _WHOLE):
            inside = (*inside, name)
        deep = isinstance(module, _WHOLE)
        weights = {}
        for role, tensor in [*module.named_parameters(recurse=deep), *module.named_buffers(recurse=deep)]:
            full = f"{name}.{role}" if name else role
            if id(tensor) in seen or role == "num_batches_tracked" or full not in kept:
                continue
            seen.add(id(tensor))
            dtype = str(tensor.dtype).removeprefix(_SHORT)
            weights[role] = Weight(plain(full), tuple(tensor.shape), dtype, bool(tensor.requires_grad))
        if weights:
            # Of a Linear that shares its weight (an output tied to an embedding) a bias is left, as of any layer's own.
            kind = "own" if isinstance(module, nn.Linear) and "weight" not in weights else _kind(module)
            layers.append(Layer(name, kind, type(module).__name__, weights, _facts(module)))
    draws = any(getattr(m, "p", 0) > 0 for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return Model("torch", tuple(layers), draws)


def _kind(module: nn.Module) -> str:
    """Return the layer's kind, a key of `hvdtrain.backends.interchange.layers.KINDS`."""
    for table in (_CONVS, _TRANSPOSED):
        for cls, rank in table.items():
            if isinstance(module, cls):
                return _conv_kind(module, rank, table is _TRANSPOSED)
    if isinstance(module, nn.MultiheadAttention) and module.bias_k is not None:
        return UNSUPPORTED + "add_bias_kv has no counterpart in Keras"
    if isinstance(module, (nn.LSTM, nn.GRU)):
        if module.num_layers > 1 or module.bidirectional or module.proj_size:
            return UNSUPPORTED + "several layers, two directions or a projection in one; use one layer for each"
        return type(module).__name__.lower()
    if isinstance(module, _BATCH_NORMS):
        return "batch norm"
    return next((kind for cls, kind in _PLAIN.items() if isinstance(module, cls)), "own")


def _conv_kind(module: Any, rank: int, transposed: bool) -> str:
    if transposed:
        if module.groups > 1:
            return UNSUPPORTED + "Keras' transposed convolutions have no groups"
        return f"transposed conv {rank}d"
    depthwise = module.groups == module.in_channels and module.groups > 1 and rank < 3
    return f"depthwise conv {rank}d" if depthwise else f"conv {rank}d"


def _facts(module: Any) -> dict[str, float]:
    """Return settings that the twin has too; BatchNorm's momentum is the share of the new value in PyTorch."""
    facts = {}
    if isinstance(getattr(module, "eps", None), float):
        facts["epsilon"] = module.eps
    if isinstance(module, _BATCH_NORMS) and module.momentum is not None:
        facts["the momentum of moving statistics"] = 1.0 - module.momentum
    return facts


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Return every weight by name, a shared one by its first; bfloat16 as its bits."""
    first: dict[int, str] = {}
    for name, tensor in modules.state_dict(model, keep_vars=True).items():
        first.setdefault(id(tensor), name)
    found = {name.removesuffix(state._BFLOAT16): a for name, a in state.model_arrays(model).items()}
    return {name: found[name] for name in first.values() if not name.endswith("num_batches_tracked")}


def assign(model: nn.Module, given: dict[str, np.ndarray]) -> None:
    """Copy arrays of `arrays`' form into the model."""
    own = modules.state_dict(model)
    for name, array in given.items():
        tensor = torch.from_numpy(np.array(array, copy=True))
        if own[name].dtype == torch.bfloat16:
            tensor = tensor.view(torch.bfloat16)
        own[name].copy_(tensor)  # a tensor of state_dict is the parameter's own memory


def outputs(model: nn.Module, x: list[np.ndarray]) -> list[np.ndarray]:
    """Return the model's outputs in evaluation mode, float32, in order."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        found = model(*(torch.from_numpy(np.array(part, copy=True)) for part in x))
    flat = torch.utils._pytree.tree_leaves(found)
    return [t.detach().float().cpu().numpy() for t in flat if isinstance(t, torch.Tensor)]


def input_shapes(model: nn.Module) -> list[tuple[tuple[int, ...], str]]:
    """Return []: a module does not declare its inputs."""
    return []


def read_file(model: nn.Module, path: Path) -> None:
    """Load a state_dict or a .safetensors file; `UserError` naming what does not fit. No pickled code is run."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_model

        try:
            load_model(model, str(path), strict=True)
        except Exception as error:  # the library's own, and torch's RuntimeError for shapes
            raise unfit(path, error) from None
        return
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        # torch's text advises to run what is pickled there.
        why = "it has Python objects other than tensors, which are not loaded: they may run code" if isinstance(
            error, pickle.UnpicklingError) or "weights_only" in str(error) else " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as a state_dict: {why[:300]}",
                        "what torch.save(model.state_dict(), path) writes", "save it so") from None
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        got = f"a dict with {sorted(map(str, found))[:4]}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise UserError(f"{path} holds {got}", "a state_dict: names and tensors",
                        "save only its state_dict to a separate file")
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        raise unfit(path, error) from None


def write_file(model: nn.Module, path: Path) -> None:
    """Write model.safetensors or a state_dict, by the file's ending."""
    if path.suffix == ".safetensors":
        state.write_safetensors(model, path)
    else:
        state.write_state_dict(model, path)


def own_optimizer(parts: Any) -> torch.optim.Optimizer:
    return parts.optimizer.optimizer


def scheduled(parts: Any) -> str:
    """Return "": only the configured schedule."""
    return ""


def compiled_loss(model: nn.Module) -> str:
    """Return "": no model of torch is compiled with a loss."""
    return ""


def optimizer(parts: Any) -> tuple[Rule, Slots]:
    """Return the rule of a run's optimizer, and its state by slot and parameter."""
    groups, rest = parts.state.state()
    own = own_optimizer(parts)
    rule = rules.from_torch(type(own).__name__, own.param_groups[0], rest["base_lr"], parts.optimizer.learning_rate(),
                            rest["updates"])
    held: dict[str, dict[str, np.ndarray]] = {}
    for full, array in groups["optimizer"].items():
        name, _, key = full.removesuffix(state._BFLOAT16).rpartition("/")
        held.setdefault(key, {})[name] = array
    rules.same_updates({name: float(step) for name, step in held.get("step", {}).items()}, rule.updates)
    slots: Slots = {}
    for slot in rule.slots():
        found = held.get(TORCH_SLOTS[slot], {})
        slots[slot] = {p.name: found.get(p.name, np.zeros(p.shape, p.dtype)) for p in parts.params.specs}
    return rule, slots


def state_of(parts: Any, rule: Rule, slots: Slots) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Return the arguments of ``parts.state.load`` for this rule and its slots; before the first update no state."""
    groups, rest = parts.state.state()
    held: dict[str, np.ndarray] = {}
    for slot, of in slots.items() if rule.updates else ():
        held |= {f"{name}/{TORCH_SLOTS[slot]}": array for name, array in of.items()}
    if rule.family == "adam" and rule.updates:
        held |= {f"{p.name}/step": np.array(rule.updates, np.float32) for p in parts.params.specs}
    group = {**rest["groups"][0], "lr": rule.lr}
    return {**groups, "optimizer": held}, {**rest, "updates": rule.updates, "base_lr": rule.base_lr, "groups": [group]}


def fresh_generators(model: nn.Module, seed: int, rank: int) -> dict[str, np.ndarray]:
    """Return the generators of a rank at the start of a run."""
    placement.seed(seed, rank)
    return placement.random_arrays()
