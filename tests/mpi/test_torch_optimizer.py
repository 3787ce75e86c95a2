"""`hvdtrain.torch.DistributedOptimizer` on several ranks: weights equal to each other's and to one process."""

import copy
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch.nn.functional import mse_loss  # noqa: E402

import hvdtrain.torch as hvd  # noqa: E402
from hvdtrain.cluster import horovod  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.job import world  # noqa: E402
from hvdtrain.torch import exchange  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}
RNG = torch.Generator().manual_seed(5)
X = torch.randn(8, 24, 6, generator=RNG, dtype=torch.float64)
Y = torch.randn(8, 24, 3, generator=RNG, dtype=torch.float64)


@pytest.fixture(scope="module", autouse=True)
def job(control):
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def mlp(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()


def equal_on_ranks(model, control):
    assert len(set(control.gather(weights(model).numpy().tobytes()))) == 1


def share(x):
    """Return this rank's rows of a batch that all ranks divide equally."""
    return x[hvd.rank() * len(x) // hvd.size():(hvd.rank() + 1) * len(x) // hvd.size()]


def backward(model, step, own=True):
    x, y = X[step], Y[step]
    dtype = next(model.parameters()).dtype
    mse_loss(model(share(x).to(dtype)), share(y).to(dtype)).backward() if own else mse_loss(model(x), y).backward()


def trained(name, wrap, passes=1, clip=False, dtype=torch.float64, steps=4):
    model = mlp(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if wrap is not None:
        optimizer = wrap(optimizer, model)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            backward(model, (step * passes + i) % len(X), own=wrap is not None)
        if clip and wrap is not None:
            optimizer.synchronize()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if clip and wrap is not None:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return model


def wrapped(**options):
    return lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("passes, clip", [(1, False), (2, False), (1, True)])
def test_weights_equal_one_process(control, name, passes, clip):
    model = trained(name, wrapped(backward_passes_per_step=passes), passes, clip)
    equal_on_ranks(model, control)
    torch.testing.assert_close(weights(model), weights(trained(name, None, passes, clip)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind, within", [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 1e-2), ("powersgd", 0.1)])
def test_compression_within_its_bound(control, kind, within):
    chosen = getattr(hvd.Compression, kind)
    model = trained("momentum", wrapped(compression=chosen), dtype=torch.float64 if kind == "bf16" else torch.float32)
    equal_on_ranks(model, control)
    plain = trained("momentum", None)
    assert 0 < (weights(model) - weights(plain)).abs().max() < within


def test_half_precision_parameters_are_summed_in_float32(control):
    model = trained("sgd", wrapped(), dtype=torch.bfloat16)
    equal_on_ranks(model, control)
    assert (weights(model) - weights(trained("sgd", None))).abs().max() < 2e-2


def test_a_sum_is_not_divided(control):
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], 1.0), op=hvd.Sum)
    (param * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert param.tolist() == [-sum(range(1, hvd.size() + 1))] * 3


def test_parameters_that_only_some_ranks_use(control):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(hvd.size() + 1)])
    for p in model.parameters():
        torch.nn.init.ones_(p)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    model[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    equal_on_ranks(model, control)
    assert model[0].bias.tolist() == pytest.approx([1 - 1 / hvd.size()] * 2) and model[-1].bias.tolist() == [1.0, 1.0]
    assert model[-1].bias.grad.tolist() == [0.0, 0.0]


def test_two_optimizers_in_turns_frozen_and_added_parameters(control):
    torch.manual_seed(2)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    second.bias.requires_grad_(False)
    one = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.1), first.named_parameters())
    two = hvd.DistributedOptimizer(torch.optim.SGD(second.parameters(), 0.1), second.named_parameters())
    for step in range(4):
        for model, optimizer in ((first, one), (second, two)):
            if step == 2 and optimizer is two:
                added = torch.nn.Parameter(torch.zeros(2))
                two.add_param_group({"params": [added]})
            one.zero_grad()
            two.zero_grad()
            for p in first.parameters():
                p.requires_grad_(optimizer is one)
            second.weight.requires_grad_(optimizer is two)
            second.bias.requires_grad_(optimizer is two and step >= 2)
            loss = second(first(torch.full((3, 2), float(hvd.rank() + 1)))).sum()
            if step >= 2 and optimizer is two:
                loss = loss + (added * hvd.rank()).sum()
            loss.backward()
            optimizer.step()
            equal_on_ranks(first, control)
            equal_on_ranks(second, control)
    assert added.tolist() == pytest.approx([-0.2 * (hvd.size() - 1) / 2] * 2)
    assert second.bias.grad.tolist() == [3.0]


def test_sparse_gradients(control):
    for dense in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(),
                                             sparse_as_dense=dense)
        before = model.weight.detach().clone()
        model(torch.tensor([hvd.rank(), 5])).sum().backward()
        optimizer.step()
        equal_on_ranks(model, control)
        assert model.weight.grad.is_sparse
        if horovod.horovod_reason("torch") is None:
            assert hvd.join() >= 0
        torch.testing.assert_close(model.weight[0], before[0] - 1 / hvd.size())
        torch.testing.assert_close(model.weight[5], before[5] - 1)


def test_a_closure_is_exchanged_also_of_lbfgs(control):
    ways = {"sgd": OPTIMIZERS["sgd"], "lbfgs": lambda params: torch.optim.LBFGS(params, 0.5, max_iter=3)}
    for make in ways.values():
        models = []
        for own in (True, False):
            model = mlp()
            optimizer = make(model.parameters())
            if own:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

            def closure(model=model, optimizer=optimizer, own=own):
                optimizer.zero_grad()
                x, y = (share(X[0]), share(Y[0])) if own else (X[0], Y[0])
                loss = mse_loss(model(x), y)
                loss.backward()
                return loss

            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(2):
                    optimizer.step(closure)
            models.append(model)
        equal_on_ranks(models[0], control)
        torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=0, atol=1e-9)


def test_state_schedule_and_class_are_the_optimizers():
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    backward(model, 0, own=False)
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert optimizer.state_dict()["state"], "the momentum so far"
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("by", ["broadcast", "load"])
def test_a_schedule_made_before_and_a_group_added_after_a_state_was_loaded(control, by):
    model = mlp()
    inner = torch.optim.SGD(model[0].parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0) if by == "broadcast" else \
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": list(model[2].parameters())})
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    equal_on_ranks(model, control)


def test_a_replaced_parameter_is_exchanged_and_a_frozen_one_stays(control):
    models = []
    for wrap in (wrapped(), None):
        model = mlp()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        optimizer = optimizer if wrap is None else wrap(optimizer, model)
        for step in range(4):
            if step == 1:
                model[0].weight = torch.nn.Parameter(model[0].weight.detach() * 2)
                optimizer.param_groups[0]["params"][0] = model[0].weight
            model[2].requires_grad_(step != 2)
            optimizer.zero_grad()
            backward(model, step, own=wrap is not None)
            optimizer.step()
        models.append(model)
    equal_on_ranks(models[0], control)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=0, atol=1e-9)


def test_state_of_another_type_than_the_parameter_arrives_as_it_is(control):
    model = mlp()
    optimizer = torch.optim.NAdam(model.parameters(), 0.01)
    for step in range(3 if hvd.rank() == 0 else 0):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    backward(model, 4)
    optimizer.step()
    equal_on_ranks(model, control)


def test_calls_in_a_wrong_order_and_a_warning():
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    backward(model, 0)
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        backward(model, 0)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    with pytest.raises(UserError, match="copy or pickle"):
        copy.deepcopy(optimizer)
    with pytest.raises(UserError, match="Wrap it once"):
        hvd.DistributedOptimizer(optimizer)


def test_arguments_are_checked():
    model = mlp()
    inner, named = torch.optim.SGD(model.parameters(), 0.1), list(model.named_parameters())
    for options in ({"named_parameters": [*named, named[0]]}, {"named_parameters": named[:1]}, {"groups": [[1]]},
                    {"named_parameters": [p for _, p in named]}, {"backward_passes_per_step": 0}, {"op": hvd.Max},
                    {"gradient_predivide_factor": 2.0, "op": hvd.Sum}):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(inner, **options)


def test_ranks_with_different_parameters_end_with_a_named_difference():
    model = torch.nn.Linear(2, 2 + (hvd.rank() == 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    with pytest.raises(UserError, match=r"parameter weight is float32 \[2, 2\] on rank 0, float32 \[3, 2\] on rank 1"):
        optimizer.step()


def test_scaled_gradients_with_an_overflow_update_no_rank(control):
    model = mlp(torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    for overflow in (True, False):
        optimizer.zero_grad()
        loss = mse_loss(model(share(X[0]).float()), share(Y[0]).float())
        scaler.scale(loss * (float("inf") if overflow and hvd.rank() == 0 else 1.0)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        equal_on_ranks(model, control)
        assert torch.equal(before, weights(model)) == overflow


def test_a_converted_parameter_is_summed_in_its_new_type():
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param := torch.nn.Parameter(torch.zeros(2))], 1.0))
    for param.data in (param.data, param.data.double()):
        param.grad = None
        (param * (1 / 3 + hvd.rank())).sum().backward()
        optimizer.step()
    assert param.grad.tolist() == pytest.approx([1 / 3 + (hvd.size() - 1) / 2] * 2, abs=1e-12)


@pytest.mark.skipif(horovod.horovod_reason("torch") is not None, reason="Horovod is not built")
def test_join_counts_as_zeros(control):
    for late in range(hvd.size()):
        param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], 1.0), [("p", param)])
        for _ in range(3 if hvd.rank() == late else late % 2):
            (param * float(hvd.rank() + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            hvd.allreduce(torch.ones(1), name="metric")
        assert hvd.join() == late
        every = sum(range(1, hvd.size() + 1)) / hvd.size()
        alone = (late + 1) / hvd.size()
        expected = -(every * (late % 2) + alone * (3 - late % 2)) if hvd.rank() == late else -every * (late % 2)
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-12)
        (param * 1.0).sum().backward()
        optimizer.step()
        assert param.grad.tolist() == [1.0, 1.0], "after join all ranks exchange again"


@pytest.mark.skipif(horovod.horovod_reason("torch") is not None, reason="Horovod is not built")
def test_horovod_exchanges_what_shared_memory_does_not(control):
    class Own:
        compress = staticmethod(lambda tensor: (tensor * 2, None))
        decompress = staticmethod(lambda tensor, ctx: tensor / 2)

    ranks = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.global_process_set
    for options in ({"compression": Own}, {"process_set": ranks}):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    equal = set(control.gather(weights(model).numpy().tobytes()))
    assert len(equal) == (1 if hvd.size() == 2 else hvd.size() - 1)
    if hvd.size() > 2:
        hvd.remove_process_set(ranks)


def test_an_overflow_on_one_rank_that_a_fused_update_would_not_see():
    model = mlp(torch.float32)
    inner = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(mse_loss(model(share(X[0]).float()), share(Y[0]).float()) *
                 (float("inf") if hvd.rank() == 0 else 1.0)).backward()
    if hvd.rank() == 0:
        scaler.step(optimizer)
    else:
        with pytest.raises(AssertionError, match="before an exchange"):
            scaler.step(optimizer)


def test_without_horovod_and_shared_memory_mpi_exchanges(control, comm, monkeypatch):
    from hvdtrain.comm.collectives.mpi import MpiCollectives
    from hvdtrain.torch.transports import MpiWire

    for name, value in (("wires", {0: MpiWire(MpiCollectives(comm, timeout_s=60.0), range(hvd.size()))}),
                        ("shared", [None]), ("hvd", None)):
        monkeypatch.setattr(world(), name, value)
    monkeypatch.setattr(exchange, "_notes", [])
    model = trained("adam", wrapped())
    equal_on_ranks(model, control)
    torch.testing.assert_close(weights(model), weights(trained("adam", None)), rtol=0, atol=1e-9)
    monkeypatch.setattr(exchange, "_notes", [])
    with pytest.raises(NotImplementedError, match="plain MPI"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum)
