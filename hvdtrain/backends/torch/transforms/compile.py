"""torch.compile block by block, and convolutions in channels_last (the key ``compile``)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.backends.torch.memory import out_of_memory
from hvdtrain.core.errors import some
from hvdtrain.planning.compile_choice import shortened

CHANNELS_LAST, COMPILED = "channels_last", "compiled"

_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_FORMATS = {torch.nn.Conv2d: torch.channels_last, torch.nn.Conv3d: torch.channels_last_3d,
            torch.nn.ConvTranspose2d: torch.channels_last, torch.nn.ConvTranspose3d: torch.channels_last_3d}

Named = Sequence[tuple[str, torch.nn.Module]]


class TorchCompile:
    """Implements `hvdtrain.core.protocols.Compile`.

    ``named``: the model's blocks as its file names them, or none. ``kind``: type of the devices. ``waits``: BatchNorm
    layers wait for other ranks in their forward pass. ``why``: the reason why this model is not compiled at all.
    """

    collective = False

    def __init__(self, model: torch.nn.Module, named: Named, kind: str, waits: bool = False, why: str = "") -> None:
        self._kind, self._why = kind, why
        self._switch = Switch()
        self._left: dict[str, str] = {}
        self._units: dict[str, Forward] = {}
        self._convolutions = [(m, f) for m in model.modules() for kind, f in _FORMATS.items() if isinstance(m, kind)]
        self._hooks: list[Any] = []
        self._sort(model, named, waits)
        self.chosen: tuple[str, ...] = ()
        self.options: Sequence[str] = (*([CHANNELS_LAST] if self._convolutions and not why else []), COMPILED)

    def _sort(self, model: torch.nn.Module, named: Named, waits: bool) -> None:
        """Find the blocks to compile, and why others are left."""
        for name, block in units(model, named):
            self._left[name] = refusal(block, waits)
            if not self._left[name]:
                self._units[name] = Forward(block, self._switch)

    def install(self, model: torch.nn.Module, blocks: Sequence[Any] = ()) -> None:
        for unit in self._units.values():
            unit.put()
        self._hook(CHANNELS_LAST in self.chosen)

    def remove(self, model: torch.nn.Module) -> None:
        self._hook(False)
        for unit in self._units.values():
            unit.take_back()

    def refusal(self, option: str) -> str:
        if self._why or option != COMPILED:
            return self._why
        if not self._units:
            return grouped(self._left) or "the model has no block to compile"
        return missing(self._kind)

    def use(self, options: Collection[str]) -> None:
        self.chosen = tuple(option for option in self.options if option in options)
        self._switch.on = COMPILED in self.chosen
        self._hook(CHANNELS_LAST in self.chosen)

    def prepare(self, work: Callable[[], None], until: float) -> str:
        if not self._switch.on:
            work()
            return ""
        with self._switch.compiling(until):
            work()
        left = self._left | {name: unit.left for name, unit in self._units.items()}
        if all(left.values()):
            raise RuntimeError(f"no block was compiled: {grouped(left)}")
        return grouped(left)

    def describe(self) -> dict[str, str]:
        return {"compile": " and ".join(self.chosen) or "nothing"}

    def caveats(self) -> list[str]:
        return []

    def _hook(self, on: bool) -> None:
        """Have the convolutions take their inputs in channels_last, or as they come."""
        if on == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = [module.register_forward_pre_hook(_channels_last if layout == torch.channels_last
                                                        else _channels_last_3d)
                       for module, layout in self._convolutions] if on else []


def units(model: torch.nn.Module, named: Named) -> list[tuple[str, torch.nn.Module]]:
    """Return the blocks to compile: the named ones; without any the modules of modules in the model; else the model.

    Not the model as a whole where it has submodules: gradients come out of a compiled block all at once, and could not
    be exchanged during backward.
    """
    found = [(name, block) for name, block in named if not _single(block)]
    found = found or [(name, block) for name, block in _walk("", model) if any(block.children())]
    return found or [("the model", model)]


def _single(block: torch.nn.Module) -> bool:
    """Return whether it is one of PyTorch's own layers, alone, which leaves a compiler nothing to fuse."""
    return type(block).__module__.startswith("torch.nn.modules") and not any(block.children())


def _walk(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules right below ``module``; of mere lists those in them."""
    for name, child in module.named_children():
        name = f"{prefix}{name}"
        if isinstance(child, _LISTS) and type(child) in _LISTS and any(any(c.children()) for c in child.children()):
            yield from _walk(f"{name}.", child)
        else:
            yield name, child


def refusal(block: torch.nn.Module, waits: bool) -> str:
    """Return the reason why ``block`` is not compiled; "" where it may be."""
    if isinstance(block, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return "a list, which computes nothing itself"
    for module in block.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "a script of TorchScript"
        if _users_own(module):
            return "already compiled by the user"
        if waits and isinstance(module, _BatchNorm):
            return "its BatchNorm waits for other ranks (sync_batchnorm)"
    return ""


def _users_own(module: torch.nn.Module) -> bool:
    """Return whether ``module`` was compiled with torch.compile, or by its own method."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported for the question's sake
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def grouped(left: dict[str, str]) -> str:
    """Return the blocks that are left with the reasons, those of one reason together; "" where none is."""
    reasons = dict.fromkeys(filter(None, left.values()))
    return "; ".join(f"{some([n for n, why in left.items() if why == reason])} ({reason})" for reason in reasons)


def _channels_last(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_laid_out(x, 4, torch.channels_last) for x in inputs)


def _channels_last_3d(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_laid_out(x, 5, torch.channels_last_3d) for x in inputs)


def _laid_out(x: Any, dims: int, layout: torch.memory_format) -> Any:
    fits = isinstance(x, torch.Tensor) and x.dim() == dims and x.is_floating_point()
    return x.contiguous(memory_format=layout) if fits else x


RECOMPILES = 64
"""Graphs that PyTorch may hold of one function: the blocks of a class share it, each with its shapes."""

NO_TIME = "not compiled in time"


class OutOfTime(BaseException):
    """The compiler's time is over; no `Exception`, which PyTorch would take for an error of the compiler."""


class Switch:
    """State that a model's compiled blocks share. ``on``: compute compiled. ``until``: bound of `compiling`."""

    def __init__(self) -> None:
        self.on = False
        self.until: float | None = None

    @contextlib.contextmanager
    def compiling(self, until: float) -> Iterator[None]:
        """Allow blocks to be compiled within the body; outside, only finished ones are used."""
        import torch._dynamo.config
        import torch._functorch.config
        import torch._inductor.config

        own_folder()
        self.until = until
        dynamo, functorch = torch._dynamo.config, torch._functorch.config
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "until", None)
            # A backward pass is compiled with its forward pass, where its errors have the name of a block.
            stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False))
            stack.enter_context(dynamo.patch(recompile_limit=max(RECOMPILES, dynamo.recompile_limit)))
            # One compiler process for each rank, none kept: ranks of a host compile at the same time.
            stack.enter_context(torch._inductor.config.patch(compile_threads=1))
            stack.enter_context(_alarm(until))
            yield


class Forward:
    """Replacement of the ``forward`` of ``block``, which may have had one of its own (``own``) beside its class's.

    ``left``: the reason why the block is not compiled. Copies and pickles of the block have the plain forward pass.
    """

    def __init__(self, block: torch.nn.Module, switch: Switch) -> None:
        self.block, self.switch = block, switch
        self.own: Callable[..., Any] | None = vars(block).get("forward")
        self.plain: Callable[..., Any] = self.own or types.MethodType(type(block).forward, block)
        self.left = ""
        self._compiled: Callable[..., Any] | None = None
        self._made: Callable[..., Any] | None = None
        self._placed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block, compiled where that is in use: in training."""
        switch = self.switch
        if not switch.on or self.left or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        if switch.until is not None:
            return self._tried(switch.until, *args, **kwargs)
        if self._made is None:
            return self.plain(*args, **kwargs)
        return self._made(*args, **kwargs)

    def put(self) -> None:
        """Replace the block's forward pass, once: recomputing may have replaced this one since."""
        if not self._placed:
            vars(self.block)["forward"] = self
        self._placed = True

    def take_back(self) -> None:
        """Restore the block's own forward pass, unless another one was put there since."""
        placed, self._placed = self._placed, False
        if not placed or vars(self.block).get("forward") is not self:
            return
        if self.own is None:
            del vars(self.block)["forward"]
        else:
            vars(self.block)["forward"] = self.own

    def _tried(self, until: float, *args: Any, **kwargs: Any) -> Any:
        """Compile and compute; where that fails, note why, and compute as the user wrote it."""
        if self._compiled is None and time.monotonic() >= until:
            self.left = NO_TIME
            return self.plain(*args, **kwargs)
        try:
            self._compiled = self._compiled or compiled(self.plain)
            found = self._compiled(*args, **kwargs)
            # Nothing is compiled while ranks train: other shapes are computed as the user wrote them. Not by
            # torch.compiler.set_stance, which holds for the process: ranks on threads left it set for later runs.
            self._made = torch._dynamo.run(self._compiled)
            return found
        except OutOfTime:
            self.left = NO_TIME
        except Exception as error:
            if out_of_memory(error):
                raise
            self.left = shortened(error)
        self._compiled = self._made = None
        return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return _plain_forward(copy.deepcopy(self.block, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> Any:
        return _plain_forward, (self.block, self.own)


def _plain_forward(block: torch.nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    return own or types.MethodType(type(block).forward, block)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` by PyTorch's compiler, with the random numbers that it draws uncompiled."""
    # Without the cache of graphs, whose files are pickles; code is kept in files by what it is made from.
    return torch.compile(function, options={"fallback_random": True, "fx_graph_cache": False})


def missing(kind: str) -> str:
    """Return what PyTorch's compiler lacks on this machine for devices of ``kind``; "" where it lacks nothing."""
    try:
        import torch._dynamo

        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except Exception as error:
        return f"this PyTorch cannot compile: {shortened(error)}"
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else ("g++", "clang++"))):
        return f"there is no C++ compiler here ({named or 'g++, clang++'}), which torch.compile needs"
    if kind == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "triton is not installed, which torch.compile needs for GPUs"
    return ""


def own_folder() -> str:
    """Have PyTorch keep compiled code in a folder that only this user can write to, unless the user has named one.

    PyTorch's own default is a name in the temporary folder that anybody could have made before.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named:
        return named
    path = os.path.join(tempfile.gettempdir(), f"hvdtrain-compiled-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        path = tempfile.mkdtemp(prefix="hvdtrain-compiled-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = path
    return path


@contextlib.contextmanager
def _alarm(until: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread once ``until`` (`time.monotonic`) is over; other threads have no bound."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise OutOfTime

    usual = signal.signal(signal.SIGALRM, ring)
    # Again after a second: what is raised within a destructor is lost.
    signal.setitimer(signal.ITIMER_REAL, max(0.01, until - time.monotonic()), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
