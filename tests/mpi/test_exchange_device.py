"""Gradients over host memory on real wires: the bits of the direct wire, while the control plane continues beside it.

Ranks have no GPU here: `HostLane` copies within host memory where `CudaLane` copies between a GPU and pinned memory.
"""

import numpy as np
import pytest
from collectives_cases import CASES, check_allgather, check_alltoall, check_broadcast, check_many_at_once, name_of
from small_runs import CUTS, FRAMEWORKS, bits, config, fitted, make_model, samples

from hvdtrain.backends import load
from hvdtrain.cluster import horovod
from hvdtrain.comm.collectives.mpi import MpiCollectives
from hvdtrain.config import ExchangeConfig, Named
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


def over_horovod(framework, control, **options):
    reason = horovod.horovod_reason(framework)
    if reason:
        pytest.skip(reason)

    def start(name, exchange):
        return horovod.start_horovod(name, exchange, control, over_host=True)

    return load(framework).collectives("horovod", control, ExchangeConfig(), start, **options)


@pytest.fixture(params=["horovod", "mpi"])
def inner(request, control, comm):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return over_horovod("torch", control) if request.param == "horovod" else MpiCollectives(comm, timeout_s=30.0)


@pytest.fixture
def staged(inner):
    from host_lane import HostLane

    from hvdtrain.backends.torch.collectives import StagedCollectives

    return StagedCollectives(inner, timeout_s=30.0, lane=HostLane())


def trained(control, tmp_path, framework, wire):
    """Return the bits of eight steps over ``wire`` with unequal shares, and how the transport is called."""
    out = str(tmp_path / wire.name.replace(" ", "-"))
    settings = config(global_batch=53, max_steps=8, out=control.bcast(out), accumulate=2,
                      shares=CUTS[control.size][-1], optimizer=Named("SGD", {"momentum": 0.5}))
    run = fitted(assemble(settings, make_model(framework), samples(107), collectives=wire))
    assert run.state.cursor.step == 8
    return bits(run), run.collectives.name


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("check", CASES, ids=name_of)
def test_cases(staged, check):
    import torch

    check(staged, torch.from_numpy, lambda t: t.numpy())


def test_training_over_host_memory_has_the_bits_of_the_direct_wire(control, inner, staged, tmp_path):
    direct, name = trained(control, tmp_path, "torch", inner)
    assert trained(control, tmp_path, "torch", staged) == (direct, f"{name} over host memory")
    assert len(set(control.gather(direct))) == 1


def test_the_control_plane_goes_on_beside_an_open_transfer(control, staged):
    """Two threads of a rank in MPI at once, which each must find its own answers."""
    import torch

    for step in range(20):
        handles = [staged.allreduce(torch.full((10_000,), float(control.rank + i)), f"beside.{i}") for i in range(4)]
        assert control.gather(control.rank * step) == [r * step for r in range(control.size)]
        for i, handle in enumerate(handles):
            want = sum(r + i for r in range(control.size))
            np.testing.assert_array_equal(handle.wait().numpy(), np.full(10_000, want, np.float32))


def test_ranks_with_and_without_copies_are_one_job(control, inner):
    """As CPU ranks beside ranks with a GPU."""
    import torch
    from host_lane import HostLane

    from hvdtrain.backends.torch.collectives import StagedCollectives
    from hvdtrain.backends.torch.pinned import DirectLane

    wire = StagedCollectives(inner, timeout_s=30.0, lane=DirectLane() if control.rank == 0 else HostLane())
    handles = [wire.allreduce(torch.full((7,), float(control.rank)), f"mixed.{i}") for i in range(5)]
    assert all(h.wait().tolist() == [control.size * (control.size - 1) / 2] * 7 for h in handles)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_cpus_alone_the_key_changes_nothing(control, framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    if horovod.horovod_reason(framework):
        pytest.skip(horovod.horovod_reason(framework))
    settings = config(global_batch=20, max_steps=1, out=control.bcast(str(tmp_path)), collectives="horovod",
                      exchange_device="cpu")
    run = assemble(settings, make_model(framework), samples(40))
    assert run.collectives.name == "horovod"
    assert not [note for note in run.notes if "host memory" in note]


@pytest.mark.world_size(2)
def test_tensorflow_puts_its_nodes_on_the_cpu_with_their_names(control, tmp_path):
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    direct, over_host = over_horovod("tensorflow", control), over_horovod("tensorflow", control, over_host=True)
    assert (over_host.name, over_host.hierarchical) == ("horovod over host memory", False)

    def nodes(wire):
        def calls(x):
            wire.allreduce(x, "place.sum"), wire.allgather(x, "place.gather"), wire.broadcast(x, "place.root")
            wire.alltoall(tf.reshape(x, [wire.size, -1]), "place.all"), wire.reducescatter(x, "place.scatter")
        graph = tf.function(calls, input_signature=[tf.TensorSpec([wire.size * 2])]).get_concrete_function().graph
        return {op.name: op.device for op in graph.get_operations() if op.name.startswith("place.")}

    assert set(nodes(over_host)) >= {f"place.{n}" for n in ("sum", "gather", "root", "all", "scatter")}
    assert nodes(over_host).keys() == nodes(direct).keys()
    assert all(device.endswith("CPU:0") for device in nodes(over_host).values())
    assert not any(nodes(direct).values())
    bits_direct, _ = trained(control, tmp_path, "tensorflow", direct)
    assert trained(control, tmp_path, "tensorflow", over_host) == (bits_direct, "horovod over host memory")


@pytest.fixture(scope="module")
def on_cpu(control):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    return over_horovod("tensorflow", control, over_host=True)


@pytest.mark.parametrize("check", [check_allgather, check_alltoall, check_broadcast, check_many_at_once], ids=name_of)
def test_tensorflow_outside_a_graph(on_cpu, check):
    import tensorflow as tf

    check(on_cpu, tf.constant, lambda t: t.numpy())
