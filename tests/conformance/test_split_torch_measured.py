"""PyTorch models partitioned over devices: what is measured first, and what is refused."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from small_runs import config, solo  # noqa: E402
from split_models import Chain, Skips, blocks, deep, example, tied  # noqa: E402
from split_torch_tools import BASE, CPU, DATA, META, all_cpu, elsewhere, plan_of, replicated, split_parts  # noqa: E402,F401
from torch import nn  # noqa: E402
from torch_tools import one_thread, spec  # noqa: E402,F401

from hvdtrain.backends.torch import make_parts, placement  # noqa: E402
from hvdtrain.backends.torch.blocks import measure  # noqa: E402
from hvdtrain.backends.torch.optimizer import slot_share  # noqa: E402
from hvdtrain.backends.torch.transforms.placement import Placement  # noqa: E402
from hvdtrain.backends.torch.transforms.precision import MixedPrecision  # noqa: E402
from hvdtrain.cluster.control import SoloControl  # noqa: E402
from hvdtrain.comm.collectives.base import NullCollectives  # noqa: E402
from hvdtrain.config import Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.parallel.pipeline.partition import agree_devices  # noqa: E402
from hvdtrain.parallel.precision import FP32, LossScale  # noqa: E402
from hvdtrain.planning.pipeline.blocks import Block  # noqa: E402

EXACT = MixedPrecision(FP32, LossScale(), [CPU])


def made_parts(model, settings=BASE, **more):
    """Parts of a model that is to be split over two devices, by what is measured."""
    return make_parts(spec(model, **more), replace(settings, model_parallel=2), SoloControl(), NullCollectives(), 10)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_blocks_are_measured_and_left_as_they_were():
    model = nn.Sequential(nn.Linear(12, 100), nn.BatchNorm1d(100), nn.Tanh())
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = measure(list(model.named_children()), torch.randn(8, 12), CPU)
    assert [b.name for b in found] == ["0", "1", "2"] and all(b.cost_s > 0 for b in found)
    assert found[0].param_bytes == 4 * 1300 and found[2].param_bytes == 0
    assert found[0].activation_bytes == 8 * 12 * 4, "a linear layer keeps its input"
    assert found[2].activation_bytes == 8 * 100 * 4, "tanh keeps its output"
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("optimizer, want", [
    (Named("SGD"), 0), (Named("SGD", {"momentum": 0.9}), 1), (Named("Adam"), 2), (Named("Adam", {"amsgrad": True}), 3)])
def test_slots_are_counted_as_the_optimizer_makes_them(optimizer, want):
    assert slot_share(config(optimizer=optimizer)) == want


def test_blocks_are_told_apart_by_processor_time_where_it_is_rationed(monkeypatch):
    """This process has half a core, and stands still for 100 s within the second block."""
    own = [0.0]

    class Works(torch.nn.Linear):
        def forward(self, x):
            own[0] += self.seconds
            return super().forward(x)

    def named(name, seconds):
        block = Works(2, 2)
        block.seconds = seconds
        return name, block

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("hvdtrain.backends.torch.blocks.time", SimpleNamespace(
        process_time=lambda: own[0], perf_counter=lambda: 2 * own[0] + 100 * (own[0] > 6)))
    found = measure([named("a", 1.0), named("b", 3.0)], torch.zeros(1, 2), CPU)
    assert found[1].cost_s == 3 * found[0].cost_s and 2 < found[0].cost_s < 20


def test_random_generators_go_on_as_if_nothing_had_been_measured(cpus):
    model = deep(drop=nn.Dropout(0.5))
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    made = Placement(spec(model, blocks=blocks, example=example), replace(BASE, model_parallel=2))
    made.measure(lambda model, batch: model(batch[0]), None, SoloControl(), EXACT)
    assert torch.equal(torch.rand(3), want)


def test_a_cpu_beside_a_gpu_is_given_what_it_can_do(monkeypatch):
    """A GPU that is three times as fast as the CPU before it gets three times the blocks."""
    def costs(named, x, device):
        return tuple(Block(name, 3.0 if device == CPU else 1.0, 4, 4) for name, _ in named)

    monkeypatch.setattr("hvdtrain.backends.torch.blocks.measure", costs)
    monkeypatch.setattr(placement, "devices", lambda n: [CPU, META])
    made = Placement(spec(deep(), blocks=blocks, example=example), replace(BASE, model_parallel=2))
    found = made.measure(lambda model, batch: model(batch[0]), None, SoloControl(), EXACT)
    assert [profile.cost_s / len(profile.blocks) for profile in found] == [3.0, 1.0]
    assert agree_devices(found, replace(BASE, model_parallel=2), SoloControl()).choice.starts == (0, 1)


@pytest.mark.parametrize("model, words", [
    (lambda: nn.Sequential(nn.Linear(12, 5)), "model_parallel is 2 and the model has 1 block"),
    (lambda: deep(kind=Skips), "give an output that differs from the model's"),
    (lambda: Unnamed(), "Unnamed, which has no named blocks"),
    (lambda: Loose(), "extra of the model is in none of its blocks"),
], ids=["one block", "skips", "unnamed", "loose"])
def test_what_cannot_be_split_says_so(cpus, model, words):
    built = model()
    parts = {"blocks": None if isinstance(built, (Unnamed, nn.Sequential)) else blocks, "example": example}
    with pytest.raises(UserError, match=words):
        made_parts(built, **parts)


class Trains(Chain):
    """Between its blocks it does something while it trains, and only then."""

    def __init__(self, extra, **named):
        super().__init__(**named)
        vars(self)["extra"] = extra  # no module of its own: not a block either

    def forward(self, x):
        (_, first), *rest = blocks(self)
        x = self.extra(first(x), self)
        for _, block in rest:
            x = block(x)
        return x


def put_between(extra):
    return deep(kind=lambda **named: Trains(extra, **named))


@pytest.mark.parametrize("extra", [
    lambda x, model: nn.functional.dropout(x, 0.5, model.training),
    lambda x, model: nn.Dropout(0.1).train(model.training)(x),
    lambda x, model: x * 2 if model.training else x,
    lambda x, model: x if not model.training or torch.rand(()) < 2 else 0 * x,
], ids=["function", "layer", "factor", "a draw alone"])
def test_what_a_model_does_between_its_blocks_only_while_it_trains_is_refused(cpus, extra):
    with pytest.raises(UserError, match="give an output that differs from the model's in training"):
        made_parts(put_between(extra), blocks=blocks, example=example)


class Leaves(nn.Linear):
    """Leaves something on itself that a task may read."""

    always = True

    def forward(self, x):
        y = super().forward(x)
        if self.always or self.training:
            self.aux = y.square().sum()
        return y


def read_aux(model, batch):
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    return loss + 0.01 * model.extra.aux, len(x)


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Identity()],
                         ids=["dropout", "batchnorm", "nothing"])
def test_a_task_that_reads_what_a_forward_pass_left_on_a_block_is_refused(cpus, between):
    def made_of(settings, task, **extra):
        return made_parts(deep(between=between, **extra), settings, blocks=blocks, example=example, task=task)

    with pytest.raises(UserError, match="in one part and .* in two.*split_micro_batches: 1"):
        made_of(BASE, read_aux, extra=Leaves(16, 16))
    only_training = Leaves(16, 16)
    only_training.always = False
    with pytest.raises(UserError, match="in one part and .* in two"):
        made_of(BASE, read_aux, extra=only_training)
    made_of(replace(BASE, split_micro_batches=1), read_aux, extra=Leaves(16, 16))
    made = made_of(BASE, lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), extra=Leaves(16, 16))
    assert all(m.training for m in made.model.modules()) and "forward" in vars(made.model)


def test_buffers_that_each_part_changes_are_named(cpus):
    def made(*layers):
        torch.manual_seed(0)
        return nn.Sequential(nn.Unflatten(1, (3, 4)), *layers, nn.Flatten(), nn.Linear(12, 5))

    model = made(nn.InstanceNorm1d(3, track_running_stats=True), nn.utils.parametrizations.spectral_norm(
        nn.Linear(4, 4)), nn.BatchNorm1d(3))
    before = {n: b.clone() for n, b in model.named_buffers()}
    parts = made_parts(model, example=example)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers()), "measuring leaves no trace"
    assert "buffers of 1 (InstanceNorm1d), 2.parametrizations.weight.0 (_SpectralNorm) change with each part of a " \
           "micro-batch" in parts.caveats() and "BatchNorm computes" in " ".join(parts.transforms[0].caveats())
    assert made_parts(made(), example=example).transforms[0].caveats() == []


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(12, 5)


class Loose(Chain):
    def __init__(self):
        super().__init__(first=nn.Linear(12, 12), head=nn.Linear(12, 5))
        self.extra = nn.Parameter(torch.zeros(1))


def test_a_matrix_of_two_stages_is_refused_and_of_one_stage_is_not():
    with pytest.raises(UserError, match="blocks second and third share a parameter or buffer but are on two devices"):
        split_parts(tied(), (0, 2), BASE)
    split_parts(tied(), (0, 1), BASE)


def test_sync_batchnorm_in_parts_is_refused(cpus):
    with pytest.raises(UserError, match="split_micro_batches: 1"):
        solo(replace(BASE, model_parallel=2, sync_batchnorm=True), deep(), DATA)


def test_samples_that_do_not_fit_the_blocks_are_told_before_anything_is_measured(cpus):
    with pytest.raises(UserError, match=r"the model does not take the data, x float32\[B, 7\].*in Linear"):
        solo(replace(BASE, model_parallel=2), deep(), (DATA[0][:, :7], DATA[1]))


def test_a_keras_model_on_pytorch_is_not_split():
    model = type("Model", (nn.Module,), {"__module__": "keras.src.models.model"})()
    with pytest.raises(UserError, match="a Keras model on PyTorch"):
        made_parts(model)


def test_devices_that_finish_buckets_at_once_hand_them_over_one_by_one():
    """In backward each device has a thread of autograd's, and hooks run in it."""
    parts, inside, most = split_parts(deep(), (0, 2), BASE), [], []
    dp = replicated(parts, 0.0, "none")

    def put(bucket, flat_N):
        inside.append(bucket)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(bucket)

    dp.put = put
    parts.stage.connect(dp)
    parts.stage.begin()
    loss, waits = torch.zeros((), requires_grad=True), threading.Barrier(len(dp.buckets) - 1)

    class InThreads(torch.autograd.Function):
        """A backward that fills every bucket but the last at once, each in a thread of its own."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            def fill(tensor):
                waits.wait(10)
                torch.autograd.backward(tensor.sum())

            tensors = [parts.params.tensors[b.params[0]] for b in dp.buckets[:-1]]
            threads = [threading.Thread(target=fill, args=(tensor,)) for tensor in tensors]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            return dy

    parts.stage._gradients.backward(InThreads.apply(loss), 1.0, final=True)
    assert most == [1] * len(dp.buckets)
