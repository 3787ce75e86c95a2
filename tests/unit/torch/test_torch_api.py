"""`hvdtrain.torch` against Horovod's signatures, in one process, and what it refuses."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hvdtrain.torch as hvd  # noqa: E402
from hvdtrain import job  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.torch import ops, transports  # noqa: E402


def horovods(file):
    """Return the tree of one of Horovod's files; read, not run."""
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        pytest.skip("Horovod is not installed")
    return ast.parse(Path(spec.submodule_search_locations[0], file).read_text(encoding="utf-8"))


SAME = """
allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async
barrier broadcast broadcast_ broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async
grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
grouped_reducescatter_async join poll reducescatter reducescatter_async sparse_allreduce_async synchronize
broadcast_object broadcast_optimizer_state broadcast_parameters
""".split()


def test_signatures_are_horovods():
    functions = {node.name: node for file in ("torch/mpi_ops.py", "torch/functions.py") for node in horovods(file).body
                 if isinstance(node, ast.FunctionDef)}
    for name in SAME:
        theirs = functions[name].args
        found = inspect.signature(getattr(hvd, name)).parameters
        assert list(found) == [a.arg for a in theirs.args], name
        assert len([p for p in found.values() if p.default is not p.empty]) == len(theirs.defaults), name


def test_every_name_of_horovods_is_there():
    names = {alias.name for node in ast.walk(horovods("torch/__init__.py")) if isinstance(node, ast.ImportFrom)
             for alias in node.names} - {"elastic"}
    assert names <= set(dir(hvd)) and len(names) > 50
    assert set(importlib.import_module("hvdtrain.torch.mpi_ops").__all__) <= set(dir(hvd)) - {"DistributedOptimizer"}
    for name in sorted(set(importlib.import_module("hvdtrain.torch.mpi_ops").__all__)):
        assert getattr(hvd.mpi_ops, name) is getattr(hvd, name)
    with pytest.raises(AttributeError, match="nothing_such"):
        hvd.nothing_such
    for elastic in (lambda: hvd.elastic, lambda: importlib.import_module("hvdtrain.torch.elastic").run):
        with pytest.raises(UserError, match="CVE"):
            elastic()


def test_importing_is_free_and_nothing_loads_tensorflow():
    script = ("import sys, hvdtrain.torch as hvd, hvdtrain.torch.mpi_ops; first = set(sys.modules); hvd.init(); "
              "hvd.allreduce, hvd.broadcast_parameters, hvd.SyncBatchNorm; "
              "print(sorted({m.partition('.')[0] for m in first}), '|', 'tensorflow' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded, tensorflow = done.stdout.split("|")
    assert not {"torch", "tensorflow", "horovod", "mpi4py"}.intersection(ast.literal_eval(loaded.strip()))
    assert tensorflow.strip() == "False"


@pytest.fixture
def alone(monkeypatch):
    """Return an initialized job of one process that leaves no control plane behind."""
    control = SoloControl()
    monkeypatch.setattr(job.boot, "current_control", lambda: control)
    monkeypatch.setattr(job, "_worlds", [])
    monkeypatch.setattr(hvd.global_process_set, "ranks", [])
    hvd.init()
    return control


def test_before_init_there_is_no_rank(monkeypatch):
    monkeypatch.setattr(job, "_worlds", [])
    assert not hvd.is_initialized()
    for ask in (hvd.rank, hvd.size, hvd.local_rank, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
            ask()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_collectives_of_one_process_are_the_identity(alone, dtype):
    x = torch.arange(6).reshape(3, 2).to(dtype)
    calls = [hvd.allgather, lambda t: hvd.broadcast(t, 0), hvd.alltoall, lambda t: hvd.alltoall(t, [3])[0],
             lambda t: hvd.grouped_allgather([t])[0]]
    if dtype != torch.complex64:
        calls += [hvd.allreduce, hvd.reducescatter, lambda t: hvd.allreduce(t, op=hvd.Adasum),
                  lambda t: hvd.grouped_allreduce([t], op=hvd.Max)[0], lambda t: hvd.grouped_reducescatter([t])[0]]
    for call in calls:
        assert torch.equal(call(x), x)
    assert hvd.join() == 0 and hvd.broadcast_object({"a": 1}) == {"a": 1} and hvd.allgather_object(2) == [2]
    hvd.barrier()


def test_one_process_multiplies_and_differentiates(alone):
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0).sum().backward()
    assert x.grad.tolist() == [6.0] * 3
    whole = torch.tensor([3, -3])
    assert hvd.allreduce(whole, prescale_factor=0.5).tolist() == [1, -1]


def test_what_is_refused(alone):
    x = torch.ones(3)
    for call, text in [(lambda: hvd.broadcast(x, 1), "root_rank 1 among ranks"),
                       (lambda: hvd.alltoall(x, [4]), "3 rows with splits"),
                       (lambda: hvd.allgather(torch.tensor(1.0)), "a scalar tensor"),
                       (lambda: hvd.reducescatter(x, op=hvd.Max), "reducescatter by max"),
                       (lambda: hvd.synchronize(3), "synchronize"),
                       (lambda: hvd.broadcast_parameters({"a": 1}, 0), "not a tensor"),
                       (lambda: hvd.broadcast_parameters(x, 0), "broadcast_parameters of Tensor")]:
        with pytest.raises(UserError, match=text):
            call()
    with pytest.raises(ValueError, match="old form of op"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(x, process_set=hvd.ProcessSet([0]))


class Refusing:
    """Horovod's module, whose collectives wait for ever or fail."""

    def __init__(self, error=None):
        self.error, self.waits = error, []

    def allreduce_async(self, tensor, **options):
        self.sent, self.options = tensor, options
        return 7

    def synchronize(self, handle):
        self.waits.append((handle, str(transports.pulse.missing())))
        if self.error is not None:
            raise self.error
        return self.sent

    def poll(self, handle):
        return False


def test_a_wait_over_horovod_has_a_bound_and_names_failures(monkeypatch):
    error = type("HorovodInternalError", (RuntimeError,), {})("rank 1 left")
    bounds = []

    class bound(transports.deadline):
        def __init__(self, seconds, what):
            bounds.append((seconds, what))
            super().__init__(seconds, what)

    monkeypatch.setattr(transports, "deadline", bound)
    module = Refusing()
    wire = transports.HorovodWire(module, "theirs", 2, 30.0)
    handle = wire.allreduce([torch.ones(2, dtype=torch.bfloat16)], "grad", hvd.Sum, (1.0, 1.0), False, False)
    assert not hvd.poll(handle) and hvd.synchronize(handle).dtype == torch.bfloat16
    assert module.sent.dtype == torch.float32 and module.options["process_set"] == "theirs"
    assert bounds == [(30.0, "Horovod's allreduce 'grad'")]
    assert hvd.poll(handle) and hvd.synchronize(handle) is handle.wait() and len(module.waits) == 1
    wire = transports.HorovodWire(Refusing(error), None, 2, 30.0)
    handle = wire.allreduce([torch.ones(2)], "grad", hvd.Sum, (1.0, 1.0), False, False)
    with pytest.raises(hvd.HorovodInternalError, match="could not complete a collective: rank 1 left"):
        hvd.synchronize(handle)


def test_names_are_numbered_within_a_set(alone):
    first, other = ops.unnamed(hvd.global_process_set), hvd.ProcessSet([0])
    other.process_set_id = 4
    assert ops.unnamed(other) == first.rpartition(".")[0] + ".0"
    assert ops.unnamed(hvd.global_process_set) != first


def test_compression_is_horovods():
    x = torch.tensor([1.0, 70000.0])
    for kind, narrow in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        small, context = kind.compress(x)
        assert small.dtype == narrow and kind.decompress(small, context).dtype == torch.float32
        whole = torch.tensor([1, 2])
        assert kind.compress(whole)[0] is whole and torch.equal(kind.decompress(*kind.compress(whole)), whole)
    assert hvd.Compression.none.compress(x)[0] is x
