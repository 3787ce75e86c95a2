"""`hvdtrain.torch` on several ranks, over Horovod and over plain MPI."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import hvdtrain.torch as hvd  # noqa: E402
from hvdtrain.cluster import boot, horovod  # noqa: E402
from hvdtrain.comm.collectives.mpi import MpiCollectives  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.job import world  # noqa: E402
from hvdtrain.torch import basics, transports  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)
ROWS = [1, 0, 3, 2]
"""Rows of each rank where they differ."""


@pytest.fixture(scope="module", autouse=True)
def job(control):
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


@pytest.fixture(params=["horovod", "mpi"])
def wire(request, comm, monkeypatch):
    """Each test runs over both transports."""
    if request.param == "mpi":
        plain = transports.MpiWire(MpiCollectives(comm, timeout_s=60.0), range(hvd.size()))
        monkeypatch.setattr(world(), "wires", {0: plain})
    elif horovod.horovod_reason("torch"):
        pytest.skip("Horovod is not built")
    return request.param


def own(dtype=torch.float32, rows=4):
    """Return this rank's tensor, and all ranks'."""
    every = [torch.arange(rows * 3).reshape(rows, 3).to(dtype) + (r + 1 if dtype != torch.bool else 0)
             for r in range(hvd.size())]
    return every[hvd.rank()], every


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32,
                                   torch.int64], ids=str)
def test_reductions(wire, dtype):
    x, every = own(dtype)
    wide = torch.stack([y.double() for y in every])
    mean = wide.mean(0) if dtype.is_floating_point else (wide.sum(0) / hvd.size()).trunc()
    for op, right in ((hvd.Sum, wide.sum(0)), (hvd.Average, mean), (hvd.Min, wide.amin(0)), (hvd.Max, wide.amax(0))):
        out = hvd.allreduce(x, op=op)
        assert out.dtype == dtype and out is not x
        torch.testing.assert_close(out.double(), right.to(dtype).double(), rtol=2e-2, atol=0)
    torch.testing.assert_close(x, every[hvd.rank()], rtol=0, atol=0)


def test_factors_and_forms(wire):
    x, every = own()
    total = torch.stack(every).sum(0)
    scale = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}
    for out in (hvd.allreduce(x, **scale), hvd.synchronize(hvd.allreduce_async(x, name="named", **scale)),
                hvd.grouped_allreduce([x, x], **scale)[1], hvd.allreduce_(x.clone(), **scale)):
        torch.testing.assert_close(out, 2 * total)
    turned = x.t().clone().t()  # not contiguous, which Horovod refuses
    assert hvd.allreduce_(turned, op=hvd.Sum) is turned
    torch.testing.assert_close(turned, total)
    pair = [x.clone(), x.clone().bfloat16()]
    handle = hvd.grouped_allreduce_async_(pair[1:], op=hvd.Sum)
    assert hvd.synchronize(handle)[0] is pair[1] and hvd.poll(handle)
    torch.testing.assert_close(pair[1].float(), total)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        out = hvd.allreduce(x, op=hvd.Sum, compression=compression)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
def test_moved_rows(wire, dtype):
    rank, size = hvd.rank(), hvd.size()
    parts = [torch.full((ROWS[r], 2), r + 1).to(dtype) for r in range(size)]
    everything = torch.cat(parts)
    for out in (hvd.allgather(parts[rank]), hvd.grouped_allgather([parts[rank]])[0],
                hvd.allgather_async(parts[rank]).wait()):
        assert out.dtype == dtype and torch.equal(out, everything)
    x, every = own(dtype)
    assert torch.equal(hvd.broadcast(x, size - 1), every[-1])
    turned = x.t().clone().t()
    assert hvd.broadcast_(turned, 0) is turned and torch.equal(turned, every[0])
    even = torch.arange(2 * size)[:, None].to(dtype)
    assert torch.equal(hvd.alltoall(even), torch.cat([even[2 * rank:2 * rank + 2]] * size))
    splits = list(range(size))
    rows, received_P = hvd.alltoall(torch.full((sum(splits), 1), rank).to(dtype), splits)
    assert received_P.tolist() == [rank] * size
    assert torch.equal(rows, torch.arange(size).repeat_interleave(rank)[:, None].to(dtype))


def test_scattered_rows(wire):
    rows = hvd.size() + 1  # the first rank gets a row more
    x, every = own(rows=rows)
    total = torch.stack(every).sum(0).tensor_split(hvd.size())[hvd.rank()]
    torch.testing.assert_close(hvd.reducescatter(x, op=hvd.Sum), total)
    torch.testing.assert_close(hvd.reducescatter_async(x).wait(), total / hvd.size())
    torch.testing.assert_close(hvd.grouped_reducescatter([x, x], op=hvd.Sum)[1], total)


def test_gradients(wire):
    size, rank = hvd.size(), hvd.rank()
    x, _ = own()
    parts = torch.full((ROWS[rank], 2), 1.0)
    weights = torch.arange(float(sum(ROWS[:size])))[:, None]
    begin = sum(ROWS[:rank])
    splits = [1] * size

    def grad_of(call, value):
        leaf = value.clone().requires_grad_()
        call(leaf).sum().backward()
        return leaf.grad

    ones = torch.ones_like(x)
    torch.testing.assert_close(grad_of(lambda t: hvd.allreduce(t, op=hvd.Sum), x), ones * size)
    torch.testing.assert_close(grad_of(lambda t: hvd.grouped_allreduce([t, 2 * t])[1], x), 2 * ones)
    torch.testing.assert_close(grad_of(lambda t: hvd.broadcast(t, 1) * (rank + 1), x),
                               ones * (size + 1) / 2 * (rank == 1))
    torch.testing.assert_close(grad_of(lambda t: hvd.allgather(t) * weights, parts),
                               weights[begin:begin + ROWS[rank]].expand(-1, 2))
    torch.testing.assert_close(grad_of(lambda t: hvd.alltoall(t, splits)[0] * (rank + 1), torch.ones(size, 2)),
                               torch.arange(1.0, size + 1)[:, None].expand(-1, 2))
    torch.testing.assert_close(grad_of(lambda t: hvd.reducescatter(t, op=hvd.Sum), x), ones * size)


def test_a_sparse_tensor(wire):
    rank, size = hvd.rank(), hvd.size()
    mine = torch.sparse_coo_tensor([[rank, size]], [[1.0, 2.0], [3.0, 4.0]], (size + 1, 2))
    out = hvd.synchronize(hvd.sparse_allreduce_async(mine, "sparse", hvd.Average)).to_dense()
    torch.testing.assert_close(out[size], torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(out[:size], torch.tensor([[1.0, 2.0]]).expand(size, -1) / size)
    with pytest.raises(UserError, match="sparse tensor reduced"):
        hvd.sparse_allreduce_async(mine, "sparse", hvd.Max)


def test_objects_and_parameters(wire):
    rank = hvd.rank()
    assert hvd.broadcast_object({"of": rank}, 1) == {"of": 1}
    assert hvd.allgather_object((rank, "x" * rank)) == [(r, "x" * r) for r in range(hvd.size())]
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert len({tuple(p.detach().reshape(-1).tolist()) for p in hvd.allgather_object(model[0].weight)}) == 1


def test_parameters_that_differ_are_named(wire):
    model = torch.nn.Linear(2, 3 + (hvd.rank() == 1))
    with pytest.raises(UserError, match=r"at place 0 rank 1 has bias \(float32 \[4\]\), rank 0 has bias \(float32"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with pytest.raises(UserError, match="root_rank"):
        hvd.broadcast_parameters([torch.zeros(1)], root_rank=hvd.rank())


KINDS = sorted({kind for kind in vars(torch.optim).values()
                if isinstance(kind, type) and kind is not torch.optim.Optimizer}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
@pytest.mark.world_size(2)
def test_optimizer_state_of_the_root_arrives(kind):
    """Also where only the root has stepped, and without a step on the others."""
    def made(lr):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 3))
        return weight, kind([weight], lr=lr)

    def stepped(weight, optimizer, times):
        for t in range(times):
            weight.grad = torch.full_like(weight, 0.1 * (t + 1))
            if kind is torch.optim.SparseAdam:
                weight.grad = weight.grad.to_sparse()
            optimizer.step(lambda: (weight * weight).sum())

    root = 1
    weight, optimizer = made(0.01 if hvd.rank() == root else 0.5)
    reference = made(0.01)
    stepped(*reference, 2)
    if hvd.rank() == root:
        stepped(weight, optimizer, 2)
    hvd.broadcast_parameters([weight], root)
    hvd.broadcast_optimizer_state(optimizer, root)
    assert optimizer.param_groups[0]["lr"] == 0.01
    stepped(weight, optimizer, 1)
    stepped(*reference, 1)
    torch.testing.assert_close(weight, reference[0], rtol=0, atol=0)


@pytest.mark.parametrize("momentum, samples", [(0.1, 3), (None, 1)])
def test_sync_batch_norm(wire, momentum, samples):
    """Forward, statistics and gradients are those of one process with all samples, also of uneven ranks."""
    torch.manual_seed(0)
    rank, sizes = hvd.rank(), [samples + r for r in range(hvd.size())]
    everything = torch.randn(sum(sizes), 4, 5, dtype=torch.float64) * 3 + 2
    target = torch.randn_like(everything)
    mine = slice(sum(sizes[:rank]), sum(sizes[:rank + 1]))
    ours, whole = hvd.SyncBatchNorm(4, momentum=momentum).double(), torch.nn.BatchNorm1d(4, momentum=momentum).double()
    for _ in range(2):
        x, y = everything[mine].clone().requires_grad_(), everything.clone().requires_grad_()
        out, right = ours(x), whole(y)
        (out * target[mine]).sum().backward()
        (right * target).sum().backward()
    torch.testing.assert_close(out, right[mine])
    torch.testing.assert_close(x.grad, y.grad[mine])
    torch.testing.assert_close(ours.running_mean, whole.running_mean)
    torch.testing.assert_close(ours.running_var, whole.running_var)
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), whole.weight.grad)
    torch.testing.assert_close(ours.eval()(everything), whole.eval()(everything))


def test_process_sets(control):
    if horovod.horovod_reason("torch"):
        pytest.skip("Horovod is not built")
    pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set
    last = hvd.add_process_set([hvd.size() - 1])
    if pair.included():
        x = torch.tensor([hvd.rank() + 1.0])
        for _ in range(3):  # unnamed: ranks outside do not count along
            assert float(hvd.allreduce(x, op=hvd.Sum, process_set=pair)) == 3.0
        assert hvd.broadcast_object(hvd.rank(), 1, process_set=pair) == 1
        hvd.barrier(pair)
    if last.included():
        assert float(hvd.allreduce(torch.tensor(5.0), process_set=last)) == 5.0
    else:
        with pytest.raises(UserError, match="which is not one of them"):
            hvd.allreduce(torch.tensor(5.0), process_set=last)
    assert float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)) == hvd.size()  # of all ranks, unnamed too
    assert hvd.remove_process_set(last)
    assert pair is hvd.global_process_set or hvd.remove_process_set(pair)


def test_a_set_that_one_rank_lists_twice_is_refused_on_all(control):
    if horovod.horovod_reason("torch"):
        pytest.skip("Horovod is not built")
    hvd.shutdown()
    with pytest.raises(ValueError, match="duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([0])] * (1 + (hvd.global_process_set.here == 0)))
    hvd.init(process_sets="dynamic")  # again, with other sets
    assert float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)) == hvd.size()


def test_join_and_names_afterwards(control):
    if horovod.horovod_reason("torch"):
        pytest.skip("Horovod is not built")
    for _ in range(hvd.rank()):
        hvd.allreduce(torch.ones(2), op=hvd.Sum)
    assert hvd.join() == hvd.size() - 1
    assert float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)) == hvd.size()


def test_what_ranks_disagree_about_fails_on_all(control):
    if horovod.horovod_reason("torch"):
        pytest.skip("Horovod is not built")
    with pytest.raises(hvd.HorovodInternalError, match="[Mm]ismatched"):
        hvd.allreduce(torch.zeros(2 + hvd.rank()), name="shapes")
    with pytest.raises(UserError, match="root_rank 9"):
        hvd.broadcast(torch.zeros(1), 9)


@pytest.mark.world_size(2)
def test_plain_mpi_says_what_it_lacks(comm, monkeypatch):
    plain = transports.MpiWire(MpiCollectives(comm, timeout_s=60.0), range(hvd.size()))
    monkeypatch.setattr(world(), "wires", {0: plain})
    for call in (hvd.join, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum)):
        with pytest.raises(UserError, match="python -m hvdtrain build"):
            call()
    hvd.barrier()


def test_the_shared_transport_sums_in_place(control):
    found = basics.shared_wire(hvd.global_process_set)
    assert found is basics.shared_wire(hvd.global_process_set)
    if found is not None:
        x = np.full(5, float(hvd.rank()))
        assert found.allreduce(x, "shared sum").wait().tolist() == [sum(range(hvd.size()))] * 5
    assert boot.has_mpi()
