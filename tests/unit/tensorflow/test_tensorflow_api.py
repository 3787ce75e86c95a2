"""`hvdtrain.tensorflow` against Horovod's signatures, in one process, and what it refuses."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import hvdtrain.tensorflow as hvd  # noqa: E402
from hvdtrain import job  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.config import ExchangeConfig  # noqa: E402
from hvdtrain.core.buckets import plan_buckets  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.protocols import ParamSpec  # noqa: E402
from hvdtrain.tensorflow.gradients import DENSE, GradientItem, check_options, check_same_plan, fused, identity_of  # noqa: E402

SOURCES = {"common/basics.py": "HorovodBasics", "tensorflow/__init__.py": None, "tensorflow/mpi_ops.py": None,
           "tensorflow/functions.py": None, "common/process_sets.py": None, "common/util.py": None}
"""Files of Horovod that its public functions are in -> the class, where they are methods."""


def horovods():
    """Name -> (arguments with their defaults as text) of every function in Horovod's sources; read, not run."""
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        pytest.skip("Horovod is not installed")
    found = {}
    for file, inside in SOURCES.items():
        tree = ast.parse(Path(spec.submodule_search_locations[0], file).read_text(encoding="utf-8"))
        body = next(n.body for n in tree.body if getattr(n, "name", "") == inside) if inside else tree.body
        for node in [*body, *(x for n in body if isinstance(n, ast.If) for x in n.body)]:
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in node.args.args if a.arg != "self"]
                defaults = [ast.unparse(d) for d in node.args.defaults]
                padded = ["", *([""] * len(names))][:len(names) - len(defaults)] + defaults
                found.setdefault(node.name, list(zip(names, padded)))
    return found


def ours(function):
    """Return the same of one of ours."""
    known = {id(hvd.Compression.none): "Compression.none", id(hvd.global_process_set): "global_process_set"}
    rows = []
    for p in inspect.signature(function).parameters.values():
        if p.default is p.empty:
            text = ""
        elif p.name == "op" and p.default is not None:
            text = {hvd.Average: "Average", hvd.Sum: "Sum"}[p.default]
        else:
            text = known.get(id(p.default), repr(p.default))
        rows.append((p.name, text))
    return rows


SAME = [
    "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape", "add_process_set", "allgather",
    "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_", "broadcast_global_variables",
    "broadcast_object", "broadcast_variables", "ccl_built", "check_extension", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_rank_op", "local_size", "local_size_op",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op",
    "reducescatter", "remove_process_set", "rocm_built", "shutdown", "size", "size_op", "start_timeline",
    "stop_timeline"]


def test_signatures_are_horovods():
    theirs = horovods()
    wrong = {name: (ours(getattr(hvd, name)), theirs[name]) for name in SAME if ours(getattr(hvd, name)) != [
        row for row in theirs[name] if row[0] != "args"] and name != "check_extension"}
    assert not wrong
    assert ours(hvd.init) == theirs["init"]
    assert [row[0] for row in ours(hvd.check_extension)] == ["ext_name", "ext_env_var", "pkg_path", "args"]


def test_every_public_name_is_there():
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    assert set(SAME) <= set(hvd.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        hvd.nothing_such


def public_names(file):
    """Return what a file of Horovod's defines or takes from Horovod's other files, but for what is private or another
    framework's."""
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        pytest.skip("Horovod is not installed")
    tree, found = ast.parse(Path(spec.submodule_search_locations[0], file).read_text(encoding="utf-8")), set()
    for node in [*tree.body, *(x for n in tree.body if isinstance(n, (ast.If, ast.Try)) for x in n.body)]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod."):
            found.update(alias.asname or alias.name for alias in node.names)
    return {name for name in found if name[0] != "_"}


INNER = {"MPI_LIB", "LocalGradientAggregationHelper", "check_installed_version", "get_ext_suffix", "impl",
         "get_average_backwards_compatibility_fun", "is_version_greater_equal_than", "num_rank_is_power_2",
         "refs_to_vars", "split_list", "vars_to_refs"}
"""Horovod's tools for itself."""


@pytest.mark.parametrize("file, module", [
    ("tensorflow/__init__.py", "hvdtrain.tensorflow"), ("tensorflow/mpi_ops.py", "hvdtrain.tensorflow.mpi_ops"),
    ("tensorflow/functions.py", "hvdtrain.tensorflow.functions"),
    ("tensorflow/keras/__init__.py", "hvdtrain.tensorflow.keras"),
    ("tensorflow/keras/callbacks.py", "hvdtrain.tensorflow.keras.callbacks")])
def test_modules_hold_what_horovods_hold(file, module):
    ours = importlib.import_module(module)
    lacking = []
    for name in sorted(public_names(file) - INNER):
        try:
            getattr(ours, name)
        except UserError as error:  # elastic, which says why
            assert name == "elastic" and "CVE" in str(error)
        except AttributeError:
            lacking.append(name)
    assert not lacking
    assert set(ours.__all__) <= set(dir(ours))


def test_importing_is_free():
    script = ("import sys, hvdtrain.tensorflow as hvd, hvdtrain.tensorflow.mpi_ops, hvdtrain.tensorflow.keras; "
              "print(sorted({m.partition('.')[0] for m in sys.modules}))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert not {"tensorflow", "keras", "horovod", "mpi4py"}.intersection(ast.literal_eval(done.stdout))


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
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous,
                lambda: hvd.allreduce(tf.constant(1.0)), lambda: hvd.DistributedGradientTape(tf.GradientTape())):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
            ask()


def test_facts_of_one_process(alone):
    hvd.init()  # a second time changes nothing
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
        0, 1, 0, 1, 0, 1)
    assert hvd.is_homogeneous() and hvd.mpi_threads_supported() and not hvd.mpi_enabled()
    assert int(hvd.size_op()) == 1 and int(hvd.rank_op()) == 0 and int(hvd.process_set_included_op()) == 1
    assert hvd.global_process_set.ranks == [0] and hvd.get_process_set_ids_and_ranks() == {0: [0]}
    with pytest.warns(UserWarning, match="no timeline"):
        hvd.start_timeline("never.json")
    hvd.stop_timeline()


def test_collectives_of_one_process_are_the_identity(alone):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    for out in (hvd.allreduce(x), hvd.allreduce(x, op=hvd.Adasum), hvd.allgather(x), hvd.broadcast(x, 0),
                hvd.alltoall(x), hvd.reducescatter(x), hvd.grouped_allreduce([x])[0], hvd.grouped_allgather([x])[0],
                hvd.grouped_reducescatter([x])[0]):
        np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5), 1.5 * x)
    rows, splits = hvd.alltoall(x, [2])
    np.testing.assert_array_equal(rows, x)
    assert splits.numpy().tolist() == [2] and int(hvd.join()) == 0
    assert hvd.broadcast_object("a") == "a" and hvd.allgather_object("a") == ["a"]
    hvd.broadcast_variables([tf.Variable(1.0)], 0)
    with pytest.warns(DeprecationWarning):
        np.testing.assert_array_equal(hvd.allreduce(x, average=False), x)
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(UserError, match="root_rank 1"):
        hvd.broadcast(x, 1)


@pytest.mark.parametrize("graph", [True, False])
def test_gradients_of_one_process_are_its_own(alone, graph):
    v, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))
    unused = tf.Variable(3.0)

    def grads(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * x * tf.gather(table, [1, 1]))
        return hvd.DistributedGradientTape(tape).gradient(loss, {"v": v, "table": table, "unused": unused})

    if graph:
        traced = tf.function(lambda x: {k: g for k, g in grads(x).items() if g is not None})
        nodes = traced.get_concrete_function(tf.constant(2.0)).graph.get_operations()
        assert not [op for op in nodes if "orovod" in op.type or "PyFunc" in op.type]
        found = traced(tf.constant(2.0))
    else:
        found = grads(tf.constant(2.0))
        assert found["unused"] is None
    np.testing.assert_array_equal(found["v"], [4.0, 4.0])
    assert isinstance(found["table"], tf.IndexedSlices)


def test_tapes_know_local_sources_by_identity(alone):
    import keras

    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    tape = hvd.PartialDistributedGradientTape(tf.GradientTape(persistent=True), local_layers=[layer])
    with tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2])))
    local, shared = tape.get_local_and_global_gradients(loss, layer.trainable_variables)
    assert len(local) == 2 and not shared
    assert identity_of(layer.kernel) == identity_of(layer.kernel.value) != identity_of(layer.bias)
    with pytest.raises(ValueError, match="Keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])
    with pytest.raises(UserError, match="register_local_source"):
        tape.register_local_source(tf.constant(1.0))


def test_sync_batch_norm_alone_is_keras_own(alone):
    import keras

    x = np.random.default_rng(0).standard_normal((8, 3)).astype("float32")
    ours, theirs = hvd.SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)
    np.testing.assert_array_equal(ours(x, training=True), theirs(x, training=True))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(ours))
    assert type(again) is type(ours) and again.momentum == 0.5
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


def test_elastic_says_why_and_what_instead():
    with pytest.raises(UserError, match=r"CVE-2024-10190.*resume"):
        hvd.elastic
    with pytest.raises(UserError, match="CVE-2024-10190"):
        from hvdtrain.tensorflow import elastic  # noqa: F401


@pytest.mark.parametrize("call", [lambda: hvd.broadcast_global_variables(0),
                                  lambda: hvd.BroadcastGlobalVariablesHook(0)])
def test_sessions_are_answered_with_what_replaces_them(call):
    with pytest.raises(UserError, match=r"TensorFlow 1.*hvd.broadcast_variables.*BroadcastGlobalVariablesCallback"):
        call()


IN_A_GRAPH = {
    "allreduce": lambda x: hvd.allreduce(x), "grouped": lambda x: hvd.grouped_allreduce([x]),
    "allgather": lambda x: hvd.allgather(x), "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": lambda x: hvd.alltoall(x), "reducescatter": lambda x: hvd.reducescatter(x),
    "object": lambda x: hvd.broadcast_object(1), "objects": lambda x: hvd.allgather_object(1),
    "variables": lambda x: hvd.broadcast_variables([tf.Variable(1.0)], 0),
    "gradients": lambda x: hvd.GradientExchange()([x], [tf.Variable(1.0)]), "join": lambda x: hvd.join()}


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_a_graph_of_sessions_is_refused_in_words(alone, name):
    with tf.Graph().as_default():
        with pytest.raises(UserError, match=r"tf\.Graph.*expected eager TensorFlow 2, or a tf\.function") as found:
            IN_A_GRAPH[name](tf.constant([1.0]))
    assert isinstance(found.value, RuntimeError)
    tf.function(lambda x: IN_A_GRAPH["allreduce"](x))(tf.constant([1.0]))


@pytest.mark.parametrize("call, kind", [
    (lambda: hvd.broadcast(tf.constant([1.0]), 7), tf.errors.InvalidArgumentError),
    (lambda: hvd.reducescatter(tf.constant([1.0]), op=hvd.Max), tf.errors.InvalidArgumentError),
    (lambda: hvd.allreduce(tf.constant([1], tf.int16)), tf.errors.InvalidArgumentError),
    (lambda: hvd.allreduce(tf.IndexedSlices([[1.0]], [0]), op=hvd.Min), NotImplementedError),
    (lambda: hvd.broadcast_global_variables(0), RuntimeError),
    (lambda: hvd.GradientExchange(op=hvd.Max), ValueError),
    (lambda: hvd.DistributedOptimizer("sgd", backward_passes_per_step=0), ValueError)])
def test_errors_have_horovods_types_too(alone, call, kind):
    with pytest.raises(kind) as found:
        call()
    assert isinstance(found.value, UserError)
    again = pickle.loads(pickle.dumps(found.value))
    assert type(again) is type(found.value) and str(again) == str(found.value)


def test_options_that_do_not_go_together():
    for bad in ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, {"groups": 0}, {"groups": "all"}):
        with pytest.raises(ValueError):
            hvd.GradientExchange(**bad)
    for bad in ({"op": hvd.Max}, {"compression": "fp16"}, {"compression": 3},
                {"op": hvd.Adasum, "compression": hvd.Compression.fp16}):
        with pytest.raises(UserError):
            hvd.GradientExchange(**bad)
    check_options(hvd.Average, 2.0, [[1]], "int8")


def test_compression_of_one_tensor():
    x = tf.constant([1.0, 1 + 2**-12])
    for kind, dtype in ((hvd.Compression.none, "float32"), (hvd.Compression.fp16, "float16"),
                        (hvd.Compression.bf16, "bfloat16")):
        small, context = kind.compress(x)
        assert small.dtype == dtype and kind.decompress(small, context).dtype == "float32"
        whole, context = kind.compress(tf.constant([3]))
        assert whole.dtype == kind.decompress(whole, context).dtype == "int32"
    with pytest.raises(UserError, match="a single tensor"):
        hvd.Compression.int8.compress(x)
    assert hvd.Compression.topk.of(0.2).made().ratio == 0.2 and hvd.Compression.powersgd.of(2).made().rank == 2
    assert hvd.Compression.topk.made().ratio == ExchangeConfig().topk_ratio
    for bad in (lambda: hvd.Compression.topk.of(0), lambda: hvd.Compression.powersgd.of(0)):
        with pytest.raises(UserError):
            bad()


def test_buckets_of_groups():
    specs = {i: ParamSpec(f"p{i}", (i + 1,), "float64" if i == 3 else "float32") for i in (0, 1, 3, 4)}
    found = fused(specs, [[1, 3], [9]], 16)
    assert [(b.index, b.params, b.dtype) for b in found] == [(0, (3,), "float64"), (1, (1,), "float32"),
                                                             (2, (4, 0), "float32")]
    plain = plan_buckets([specs[i] for i in (0, 1, 4)], 16)
    assert fused({i: specs[i] for i in (0, 1, 4)}, [], 16)[0].n == plain[0].n


def test_the_first_difference_between_ranks_is_named():
    a, b = GradientItem(DENSE, (2,), "float32", "a/kernel"), GradientItem(DENSE, (3,), "float32", "b/kernel")
    check_same_plan([("x", [a, b]), ("x", [GradientItem(DENSE, (2,), "float32", "other/name"), b])], [0, 1])
    with pytest.raises(UserError, match=r"at place 1 .* rank 5 has a gradient of a/kernel .*\[2\]\), rank 4 has a "
                                        r"gradient of b/kernel"):
        check_same_plan([("x", [a, b]), ("x", [a, a])], [4, 5])
    with pytest.raises(UserError, match="rank 1 has nothing"):
        check_same_plan([("x", [a, b]), ("x", [a])], [0, 1])
    with pytest.raises(UserError, match="rank 1 exchanges gradients with y, rank 0 with x"):
        check_same_plan([("x", [a]), ("y", [a])], [0, 1])


@pytest.mark.parametrize("bad", [3, "ab", [0.5]])
def test_process_sets_are_of_ranks(bad):
    with pytest.raises(ValueError, match="list of rank numbers"):
        hvd.ProcessSet(bad)


def test_process_sets_before_they_are_registered(alone):
    one = hvd.ProcessSet([1, 0])
    assert one.ranks == [0, 1] and one.size() is None and one.rank() is None and one.included() is None
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(tf.constant(1.0), process_set=one)
    assert not hvd.remove_process_set(one) and not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(UserError, match="has been initialized"):
        hvd.init(process_sets=[one])


def test_without_horovod_nothing_is_built(alone, monkeypatch):
    monkeypatch.setattr(job.horovod, "horovod_reason", lambda framework: "Horovod is not installed; build it")
    assert not any((hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.cuda_built(), hvd.gloo_enabled()))
    with pytest.raises(ImportError, match="not installed; build it"):
        hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
