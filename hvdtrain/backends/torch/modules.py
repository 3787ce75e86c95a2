"""Modules and tensors of a PyTorch model: plain names, modes, trees of tensors, writes of forward, checks."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.backends.torch.snapshot import of_keras
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Writable
from hvdtrain.parallel.data_parallel.reducing import without_gradient

WRAPPERS = (("torch.nn", "DataParallel", "module"),
            ("torch.nn.parallel", "DistributedDataParallel", "module"),
            ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
            ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper",
             "_checkpoint_wrapped_module"))
"""Module and name of each class of wrappers, and the attribute that holds the user's module."""


class PlainNames:
    """Names of ``model`` without its wrappers, which are known by type: a layer that is called "module" stays."""

    def __init__(self, model: torch.nn.Module) -> None:
        loaded = [(sys.modules[home], name, held) for home, name, held in WRAPPERS if home in sys.modules]
        kinds = [(kind, held) for home, name, held in loaded if (kind := getattr(home, name, None)) is not None]
        types = tuple(kind for kind, _ in kinds)
        wrappers = [one for one in model.named_modules(remove_duplicate=False) if isinstance(one[1], types)]
        self._inner = {f"{path}.{held}" if path else held
                       for path, module in wrappers for kind, held in kinds if isinstance(module, kind)}
        self._inner |= {path.replace("_checkpoint_wrapped_module.", "") for path in self._inner}  # as state_dict has it

    def __call__(self, name: str) -> str:
        """Return ``name``, which the model gives a tensor or a module, without the parts of wrappers."""
        if not self._inner:
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts, 1) if ".".join(parts[:i]) not in self._inner)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters in the model's order, a shared one once, by names without wrappers."""
    plain = PlainNames(model)
    return ((plain(name), param) for name, param in model.named_parameters())


def state_dict(model: torch.nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the model's state_dict by names without wrappers, with the versions of its modules."""
    plain, own = PlainNames(model), model.state_dict(**kwargs)
    versions = getattr(own, "_metadata", {})
    return _versioned({plain(name): tensor for name, tensor in own.items()},
                      {plain(path): facts for path, facts in versions.items()})


def load_state_dict(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Undo `state_dict`."""
    plain, own = PlainNames(model), model.state_dict()
    given = {name: tensors[plain(name)] for name in own}
    with _expanded_written(model):
        model.load_state_dict(_versioned(given, getattr(own, "_metadata", {})))


def _versioned(tensors: Mapping[str, torch.Tensor], versions: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return ``tensors`` with the versions of modules, without which some convert weights as if of an old version."""
    found = OrderedDict(tensors)
    found._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def _expanded_written(model: torch.nn.Module) -> Iterator[None]:
    """Let the body write to expanded buffers, whose elements share memory; restore those with unchanged values."""
    places = [(module._buffers, key, buffer) for module in model.modules() if isinstance(module._buffers, dict)
              for key, buffer in module._buffers.items()
              if buffer is not None and any(n > 1 and not step for n, step in zip(buffer.shape, buffer.stride()))]
    copies = {id(buffer): buffer.clone() for _, _, buffer in places}
    for holder, key, buffer in places:
        holder[key] = copies[id(buffer)]
    try:
        yield
    finally:
        for holder, key, buffer in places:
            if torch.equal(copies[id(buffer)], buffer):
                holder[key] = buffer


def check_unique_names(model: torch.nn.Module) -> None:
    """Raise `UserError` where two tensors would have one name without wrappers: a checkpoint would lose one."""
    plain, first = PlainNames(model), dict[str, str]()
    for name in model.state_dict():
        other = first.setdefault(plain(name), name)
        if other != name:
            raise UserError(f"a wrapper of the model has a tensor {other!r} in addition to {name!r}",
                            f"one tensor of the name {plain(name)!r}", "rename one of them")


def check_model(model: torch.nn.Module) -> None:
    """Raise `UserError` for sparse gradients, and for state that no checkpoint can hold."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UserError(f"{type(module).__name__} {name!r} gives sparse gradients",
                            "dense gradients, which the exchange sums", "build it with sparse=False")
    check_unique_names(model)
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            owner = name.rpartition(".")[0] or type(model).__name__
            raise UserError(f"module {owner!r} has extra state of type {type(value).__name__}",
                            "tensors only in the model's state_dict, as checkpoints hold nothing else",
                            "keep it in a tensor given to register_buffer, in place of get_extra_state")
        try:
            torch.empty(0, dtype=value.dtype if value.dtype != torch.bfloat16 else torch.int16).numpy()
        except TypeError:
            raise UserError(f"{name!r} is of {value.dtype}", "a type that a checkpoint can hold",
                            "keep its bits, by tensor.view(torch.uint8)") from None


def made_of(model: torch.nn.Module) -> list[str]:
    """Return kind, name, dtype and shape of each parameter and buffer, in the order in which ranks exchange them."""
    def line(kind: str, name: str, tensor: torch.Tensor) -> str:
        return f"{kind} {name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    parameters = [line("parameter" if p.requires_grad else "frozen parameter", n, p)
                  for n, p in named_parameters(model)]
    return parameters + [line("buffer", n, b) for n, b in model.named_buffers()]


def caveats(model: torch.nn.Module, synchronised: bool = False) -> list[str]:
    """Return the layers in training mode that depend on how a batch is divided (law 2), unless ``synchronised``."""
    found = []
    active = [m for m in model.modules() if m.training]
    norms = [m for m in active if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if norms and not synchronised:  # torch's SyncBatchNorm too, for which there is no torch.distributed here
        found.append("BatchNorm computes its statistics over each rank's own samples, without sync_batchnorm: true")
    if any(drops(m) for m in active):
        found.append("dropout draws differ with the number of ranks")
    return found


def drops(module: torch.nn.Module) -> bool:
    """Return whether it is a dropout layer, or one (attention, RNN) whose attribute ``dropout`` is a rate."""
    layer = isinstance(module, torch.nn.modules.dropout._DropoutNd)
    rate = module.p if layer else getattr(module, "dropout", 0.0)
    return isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0


def check_loss(model: torch.nn.Module, loss_sum: torch.Tensor) -> None:
    """Raise `UserError` for a loss without a gradient, of samples that stand for all.

    Not for a rank's own samples of a step: other samples of the global batch may use parameters.
    """
    if torch.is_grad_enabled() and not loss_sum.requires_grad and any(
            p.requires_grad for p in model.parameters()):
        raise without_gradient()


@contextlib.contextmanager
def modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore every module's mode after the body."""
    modes = {m: m.training for m in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def set_modes(model: torch.nn.Module, modes: dict[torch.nn.Module, bool]) -> None:
    """Put the model into training mode by its own method, except the modules of ``modes``."""
    model.train()
    for module, training in modes.items():
        module.training = training


class Place(NamedTuple):
    """Place of a tensor that forward may write: ``holder[key]``; ``name``: in the model; ``at``: in `Buffers`."""

    name: str
    holder: Any
    key: str
    at: tuple[int, str]

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.holder[self.key] if self.key in self.holder else None  # TorchScript lacks get


class OneEntry:
    """Entry of a module's dict of parameters, as a dict."""

    def __init__(self, holder: dict[str, Any], key: str) -> None:
        self._holder, self._key = holder, key

    def items(self) -> list[tuple[str, Any]]:
        return [(self._key, self._holder[self._key])] if self._key in self._holder else []

    def __contains__(self, key: str) -> bool:
        return key in self._holder

    def __getitem__(self, key: str) -> Any:
        return self._holder[key]


class Entry:
    """`hvdtrain.comm.reducer.written.Entry`. ``before``: value at the step's begin; ``device``: of a lacking one."""

    def __init__(self, place: Place, before: torch.Tensor | None, device: torch.device) -> None:
        tensor = place.tensor
        self.name, self._place, self._device = place.name, place, device
        self._tensor = None if tensor is None or not tensor.numel() else tensor
        self._before = before if tensor is not None and before is not None and before.shape == tensor.shape else None
        self.form = "" if self._tensor is None else f"{self._tensor.dtype} {tuple(self._tensor.shape)}"

    def old(self) -> np.ndarray | None:
        return None if self._before is None or self._tensor is None else array(self._before)

    def own(self) -> np.ndarray:
        return np.zeros(0, np.float32) if self._tensor is None else array(self._tensor)

    def write(self, value: np.ndarray) -> None:
        if self._tensor is None:  # ``form`` has come from a rank that has the tensor
            dtype = getattr(torch, self.form.split()[0].removeprefix("torch."))
            self._tensor = self._place.holder[self._place.key] = torch.zeros(value.shape, dtype=dtype,
                                                                             device=self._device)
        assign(self._tensor, torch.from_numpy(np.array(value)).to(self._tensor.dtype).reshape(self._tensor.shape))


def holders_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, dict[str, torch.Tensor | None]]]:
    """Return the modules of ``model`` that are not Keras', with the prefix of their names and the buffers of now."""
    return [(f"{prefix}." if prefix else "", module, dict(module._buffers)) for prefix, module in model.named_modules()
            if isinstance(module._buffers, dict) and not of_keras(module)]


def put_back_buffers(prefix: str, module: torch.nn.Module, before: dict[str, torch.Tensor | None],
                     copies: dict[str, torch.Tensor], appeared: dict[str, torch.Tensor]) -> list[str]:
    """Give ``module`` the tensors of ``before`` again; return the names of state that had changed.

    ``appeared`` gets the tensors that were made, state if persistent. One replaced by another shape is a cache.
    """
    written = []
    for key, now in list(module._buffers.items()):
        name, was = prefix + key, before.get(key)
        copy = copies.get(name, was)
        made = copy is None or not copy.numel()
        if now is None or now is was and not (made and now.numel()):
            continue
        persistent = key not in module._non_persistent_buffers_set
        if key not in before:
            del module._buffers[key]
            module._non_persistent_buffers_set.discard(key)
        else:
            module._buffers[key] = copy if now is was else was
        if made:
            appeared[name] = now.detach()
        if persistent if made else copy is not None and now.shape == copy.shape and not torch.equal(now, copy):
            written.append(name)
    return written


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Mark those of ``tensors`` that are parameters for `written_parameters`."""
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter):
            tensor._hvdtrain_written = True  # type: ignore[attr-defined]


def written_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters that forward passes are known to write, among them those of an Embedding with max_norm."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None
            and (getattr(module, "max_norm", None) is not None or getattr(p, "_hvdtrain_written", False))]


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` in, unless it is there already: an expanded buffer cannot be written to."""
    value = value.to(tensor.device)
    with torch.no_grad():
        if not torch.equal(tensor, value):
            tensor.copy_(value)


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy on the host, float64 for a dtype that numpy lacks."""
    host = tensor.detach().cpu()
    try:
        return np.array(host.numpy())
    except TypeError:
        return np.array((host.to(torch.complex128) if host.is_complex() else host.double()).numpy())


def describe(tensor: torch.Tensor) -> Writable:
    kind = "f" if tensor.is_floating_point() else "c" if tensor.is_complex() else "i"
    kind = "b" if tensor.dtype == torch.bool else kind
    return Writable(str(tensor.dtype).removeprefix("torch."), kind, tuple(tensor.shape))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree: one tensor, or tuples, lists and dicts of such."""
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for child in children for t in tensors_of(child)]


def like(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the tree ``value`` with other tensors, in the order of `tensors_of`."""
    rest = iter(tensors)

    def built(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(rest)
        if isinstance(part, (tuple, list)):
            return type(part)(built(v) for v in part)
        return {k: built(v) for k, v in part.items()} if isinstance(part, dict) else part

    return built(value)


def count_samples(x: Any) -> int:
    """Return the first dimension of all tensors; `UserError` where they have not one in common."""
    sizes = {t.shape[0] if t.dim() else -1 for t in tensors_of(x)}
    if len(sizes) != 1 or -1 in sizes:
        raise UserError(f"a partitioned model got {type(x).__name__} with first dimensions {sorted(sizes)}",
                        "tensors (B, ...) with one B, which is divided into "
                        "parts", "set model_parallel: 1, or pass such tensors")
    return sizes.pop()


def cut(x: Any, parts: int) -> list[Any]:
    """Return ``parts`` trees of about B / parts samples each."""
    columns = [torch.tensor_split(t, parts) for t in tensors_of(x)]
    return [like(x, [column[i] for column in columns]) for i in range(parts)]


def joined(parts: Sequence[Any]) -> Any:
    """Undo `cut` for outputs; `UserError` for what has no samples to concatenate."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(list(parts))
    if isinstance(first, (tuple, list)):
        return type(first)(joined(each) for each in zip(*parts))
    if isinstance(first, dict):
        return {k: joined([part[k] for part in parts]) for k in first}
    raise UserError(f"the last block of a partitioned model returns a {type(first).__name__} without samples",
                    "tensors (B, ...), into which the parts of a micro-batch are joined",
                    "set split_micro_batches: 1, or take the sum over samples into task")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device, one.layout) != (other.shape, other.dtype, other.device, other.layout):
        return False
    if one.layout != torch.strided or one.is_quantized:
        return bool(torch.equal(one, other))
    a, b = (flat_bytes(t) for t in (one, other))
    return bool(torch.equal(a, b))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided tensor (n,)."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
