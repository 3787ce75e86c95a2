"""torch.compile of one block in place: what calls its forward pass, and what PyTorch's compiler is told.

Owns when a compiled block computes (in training, for what it has been compiled for) and when the block as its user
wrote it; where the compiler keeps its files; the bound on its time. The module tree, its names and its hooks stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdtrain.backends.torch.trial import out_of_memory
from hvdtrain.planning.compile_choice import shortened

RECOMPILES = 64
"""Graphs that PyTorch may hold of one function: the blocks of a class share it, each with its shapes."""

NO_TIME = "not compiled in time"


class OutOfTime(BaseException):
    """The compiler's time is over; no `Exception`, which PyTorch would take for an error of the compiler."""


class Switch:
    """What the compiled blocks of a model share. ``on``: they compute compiled. ``until``: in `compiling`, its bound.
    """

    def __init__(self) -> None:
        self.on = False
        self.until: float | None = None

    @contextlib.contextmanager
    def compiling(self, until: float) -> Iterator[None]:
        """Within it blocks may be compiled; outside only what has been compiled is used."""
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
    """Stands in for the ``forward`` of ``block``, which may have had one of its own (``own``) beside its class's.

    Callable like it. ``left``: why the block is not compiled, in words. In copies of the block, and when it is pickled,
    it is the plain forward pass.
    """

    def __init__(self, block: torch.nn.Module, switch: Switch) -> None:
        self.block, self.switch = block, switch
        self.own: Callable[..., Any] | None = vars(block).get("forward")
        self.plain: Callable[..., Any] = self.own or types.MethodType(type(block).forward, block)
        self.left = ""
        self._compiled: Callable[..., Any] | None = None
        self._placed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block, compiled where that is in use: in training."""
        switch = self.switch
        if not switch.on or self.left or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        if switch.until is not None:
            return self._tried(switch.until, *args, **kwargs)
        if self._compiled is None:
            return self.plain(*args, **kwargs)
        # Nothing is compiled while ranks train: other shapes are computed as the user wrote them.
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._compiled(*args, **kwargs)

    def put(self) -> None:
        """Stand in, where that is not done; what recomputes the block may stand in for this since."""
        if not self._placed:
            vars(self.block)["forward"] = self
        self._placed = True

    def take_back(self) -> None:
        """Give the block its own forward pass back, unless somebody else has put another one there."""
        placed, self._placed = self._placed, False
        if not placed or vars(self.block).get("forward") is not self:
            return
        if self.own is None:
            del vars(self.block)["forward"]
        else:
            vars(self.block)["forward"] = self.own

    def _tried(self, until: float, *args: Any, **kwargs: Any) -> Any:
        """Compile and compute; where that fails, remember why, and compute as the user wrote it."""
        if self._compiled is None and time.monotonic() >= until:
            self.left = NO_TIME
            return self.plain(*args, **kwargs)
        try:
            self._compiled = self._compiled or compiled(self.plain)
            return self._compiled(*args, **kwargs)
        except OutOfTime:
            self.left = NO_TIME
        except Exception as error:
            if out_of_memory(error):
                raise
            self.left = shortened(error)
        self._compiled = None
        return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return _plain_forward(copy.deepcopy(self.block, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> Any:
        return _plain_forward, (self.block, self.own)


def _plain_forward(block: torch.nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The forward pass of ``block`` without a compiler."""
    return own or types.MethodType(type(block).forward, block)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` by PyTorch's compiler, with the random numbers that it draws uncompiled."""
    # Without the cache of graphs, whose files are pickles; code is kept in files by what it is made from.
    return torch.compile(function, options={"fallback_random": True, "fx_graph_cache": False})


def missing(kind: str) -> str:
    """Return what PyTorch's compiler lacks on this machine for devices of ``kind``, in words; "" where nothing."""
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
    """Have PyTorch keep compiled code in a folder that nobody else can write to, unless the user has named one.

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
    """Raise `OutOfTime` in the main thread once ``until`` (`time.monotonic`) is over; elsewhere nothing does."""
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
