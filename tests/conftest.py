"""The police of all tests: no test leaks environment variables, hooks, threads or deadlines.

Owns what holds for every test. Time limits are pytest-timeout's (setup.cfg).
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

# Ranks as threads share TensorFlow's pool, and a node that waits for other ranks holds one of its threads.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")

# What runs remember of the devices (hvdtrain.engine.step_history) is not this user's.
CACHE = tempfile.mkdtemp(prefix="hvdtrain-tests-cache-")
os.environ.setdefault("XDG_CACHE_HOME", CACHE)
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

pytest.register_assert_rewrite("step_cases", "step_kit", "step_state_cases")
for shared in ("conformance", "fixtures"):  # cases and small runs that several folders share
    sys.path.insert(0, str(Path(__file__).parent / shared))

MAY_CHANGE = ("PYTEST_", "COV_", "TF_", "TF2_", "KMP_", "KERAS_", "TORCH", "PYTORCH_", "GRPC_", "HYPOTHESIS_",
              "HDF5_", "TPU_", "MLFLOW_", "_MLFLOW_", "WANDB_", "ENABLE_RUNTIME_UPTIME_TELEMETRY",
              "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
"""Prefixes of variables that pytest and the frameworks set by themselves, and what stays once Horovod has started."""

MANY_OBJECTS = 100_000
"""How many the collector may have to look through when a file begins."""


def pytest_configure(config):
    """Let a deadline, which ends this process, write past the capture of file descriptor 2.

    The process ends without the interpreter's last collections: they took seconds after both frameworks.
    """
    atexit.register(gc.freeze)
    gc.disable()  # what is imported is no garbage, and collections took a fifth of the imports
    from hvdtrain.cluster import deadline

    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        deadline._STDERR = os.dup(2)


def pytest_collection_finish():
    """Leave what was imported out of every later collection of garbage: with both frameworks each took a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def short_collections():
    """Leave what earlier files keep (graphs, and what a framework imports as it is used) out of later collections too.

    A run that is short of memory collects at once, which took seconds in the later files of a folder.
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def records_are_documented():
    """Fail wherever a record is made that `hvdtrain.core.records` does not tell of."""
    from hvdtrain.core import records as schema
    from hvdtrain.core import records as stream

    def check(record):
        assert not schema.problems(record)

    stream.checks.append(check)
    yield
    stream.checks.remove(check)


@pytest.fixture(autouse=True)
def untuned_datasets():
    """Every `tf.data` iterator without its tuning thread: one that the garbage collector ends may hold the process for
    up to 60 s (see `hvdtrain.backends.tensorflow.data.untuned`), in the middle of whichever test comes next.
    """
    data = sys.modules.get("tensorflow.python.data.ops.dataset_ops")
    iterate = getattr(getattr(data, "DatasetV2", None), "__iter__", None)  # absent while TensorFlow is being imported
    if iterate is None or hasattr(iterate, "untuned"):
        return

    @functools.wraps(iterate)
    def __iter__(dataset):
        options = data.options_lib.Options()
        options.autotune.enabled = False
        return iterate(dataset.with_options(options))

    __iter__.untuned = True
    data.DatasetV2.__iter__ = __iter__


@pytest.fixture(autouse=True)
def no_leaked_environment():
    """Fail a test that leaves environment variables changed, and put them back."""
    before = dict(os.environ)
    yield
    changed = sorted(name for name in before.keys() | os.environ.keys()
                     if before.get(name) != os.environ.get(name) and not name.startswith(MAY_CHANGE))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left these environment variables changed: {changed}"


@pytest.fixture(autouse=True)
def no_leaked_threads():
    """Fail a test that leaves a thread which would keep the interpreter from ending."""
    before = set(threading.enumerate())
    yield
    ends_at = time.monotonic() + 2.0
    while left := [t for t in threading.enumerate() if t not in before and not t.daemon and t.is_alive()]:
        if time.monotonic() > ends_at:
            raise AssertionError(f"the test left threads: {[t.name for t in left]}")
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_leaked_deadlines():
    """Fail a test that leaves a deadline, which would end the process in a later one."""
    yield
    watchdog = sys.modules["hvdtrain.cluster.deadline"]._watchdog
    ends_at = time.monotonic() + 2.0
    while left := [what for _, _, what in list(watchdog.open.values())]:
        if time.monotonic() > ends_at:
            watchdog.open.clear()
            faulthandler.dump_traceback(sys.__stderr__)
            raise AssertionError(f"the test left the deadlines of {left}; the stacks are in its output")
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def torch_threads_put_back():
    """Put torch's number of compute threads back: a run sets it to its own share of the cores, and two per rank, where
    ranks outnumber the cores, make what comes after many times slower.
    """
    def threads(*number):
        torch = sys.modules.get("torch")
        return getattr(torch, "set_num_threads" if number else "get_num_threads", lambda *n: None)(*number)

    before = threads() or int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0])
    yield
    if threads() not in (None, before):
        threads(before)


@pytest.fixture(autouse=True)
def no_leaked_hooks():
    """Put the exception hooks and the handlers of signals back: a process that ends with 75 ignores SIGTERM."""
    before = sys.excepthook, threading.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)}
    yield
    sys.excepthook, threading.excepthook = before
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
