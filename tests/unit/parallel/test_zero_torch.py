"""ZeRO in PyTorch over ranks as threads: the unsharded run's bits, whatever the optimizer and the parts, and what each
rank keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_runs import CUTS, bits, config, fitted, lockstep, make_model, samples, weights

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named, ScheduleConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.core.protocols.run import Head  # noqa: E402
from hvdtrain.parallel.data_parallel.zero import Zero  # noqa: E402

UNFUSED = config(global_batch=24, max_steps=6, optimizer=Named("SGD", {"momentum": 0.9, "fused": False}),
                 exchange=ExchangeConfig(bucket_mb=0.0005))
DATA = samples(96)
ELEMENTWISE = [("SGD", {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": True, "fused": False}), ("Adam", {}),
               ("Adam", {"amsgrad": True, "foreach": True}), ("AdamW", {"weight_decay": 0.1}), ("NAdam", {}),
               ("RAdam", {}), ("Adamax", {}), ("Adagrad", {"initial_accumulator_value": 0.1}), ("Adadelta", {}),
               ("RMSprop", {"momentum": 0.9, "centered": True}), ("ASGD", {}), ("Rprop", {})]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(size, settings, out, model=None, data=DATA):
    return lockstep(size, replace(settings, out=str(out)), model or (lambda rank: make_model("torch")), data, fitted)


def zero(settings, stage=2, shards=()):
    return replace(settings, data_parallel=DataParallelConfig("zero", stage, list(shards)))


def keeps(settings, tmp_path, size=3, shards=(2, 0, 1), model=None, data=DATA, stages=(1, 2)):
    """Train unsharded and with zero: the same bits on all ranks."""
    want = bits(trained(size, settings, tmp_path / "whole", model, data)[0])
    for stage in stages:
        runs = trained(size, zero(settings, stage, shards), tmp_path / f"zero{stage}", model, data)
        assert {bits(run) for run in runs} == {want}
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("name, args", ELEMENTWISE, ids=lambda x: x if isinstance(x, str) else "")
def test_every_elementwise_optimizer_keeps_its_bits(name, args, tmp_path):
    settings = replace(UNFUSED, optimizer=Named(name, args), lr=0.01,
                       schedule=ScheduleConfig("CosineAnnealingLR", {"T_max": 9}, warmup_steps=3))
    runs = keeps(settings, tmp_path)
    assert all(isinstance(run.dp, Zero) for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 3, 4))
def test_unequal_parts_and_shares_keep_the_bits(size, tmp_path):
    for i, shares in enumerate(CUTS[size]):
        settings = replace(UNFUSED, shares=shares)
        want = bits(trained(size, settings, tmp_path / f"whole{i}")[0])
        for stage, shards in itertools.product((1, 2), ([], list(range(size, 0, -1)), [1] + [0] * (size - 1))):
            runs = trained(size, zero(settings, stage, shards), tmp_path / f"zero{i}{stage}{len(shards)}{sum(shards)}")
            assert {bits(run) for run in runs} == {want}


@pytest.mark.parametrize("accumulate", (1, 3))
def test_accumulated_gradients_keep_their_bits(accumulate, tmp_path):
    keeps(replace(UNFUSED, accumulate=accumulate, shares=[3, 1, 2]), tmp_path)


def test_fused_sgd_differs_by_rounding_alone(tmp_path):
    settings = replace(UNFUSED, optimizer=Named("SGD", {"momentum": 0.9}))
    want = weights(trained(3, settings, tmp_path / "whole")[0])
    runs = trained(3, zero(settings), tmp_path / "zero")
    assert len({bits(run) for run in runs}) == 1
    assert runs[0].parts.optimizer.optimizer.param_groups[0]["fused"]
    for a, b in zip(weights(runs[0]), want):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_each_rank_keeps_the_state_of_its_part_alone(tmp_path):
    runs = trained(3, zero(replace(UNFUSED, optimizer=Named("Adam")), 2, [2, 1, 1]), tmp_path / "run")
    total = sum(p.numel() for p in runs[0].parts.params.tensors)
    held = [sum(x.numel() for slot, _, x in run.parts.optimizer.slots() if slot == "exp_avg") for run in runs]
    assert sum(held) == total and held[0] == pytest.approx(total / 2, rel=0.2)  # edges are multiples of 16
    for run in runs:
        assert all(p.grad is None for p in (*run.parts.params.tensors, *run.parts.optimizer.tensors))


@pytest.mark.parametrize("name", ("Adafactor",))
def test_an_optimizer_of_whole_tensors_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=f"optimizer {name}.*whole tensors.*AdamW"):
        trained(2, zero(replace(UNFUSED, optimizer=Named(name))), tmp_path / "run")


def test_whole_state_that_is_there_from_the_start_is_given_back(tmp_path):
    runs = trained(2, zero(replace(UNFUSED, optimizer=Named("Adagrad"))), tmp_path / "run")
    for run in runs:
        n = sum(t.numel() for t in run.parts.optimizer.tensors)
        assert sum(x.numel() for _, _, x in run.parts.optimizer.slots()) == n < 0.7 * sum(
            p.numel() for p in run.parts.params.tensors)


def bytes_of_states(run):
    """Bytes that a rank keeps from backward to update: parameters, gradients and the optimizer's state."""
    params, dp, found = run.parts.params.tensors, run.dp, []
    update = dp.update

    def spy(step, grads, unused=()):
        own = [p.grad for p in params if p.grad is not None] or grads  # stage 2 has but this rank's part by now
        found.append(sum(g.numel() * g.element_size() for g in own))
        return update(step, grads, unused)

    dp.update = spy
    fitted(run)
    state = sum(v.numel() * v.element_size() for entries in run.parts.optimizer.optimizer.state.values()
                for v in entries.values())
    own = sum(p.numel() * p.element_size() for p in params)
    return (own + max(found) + state) / sum(p.numel() for p in params)


@pytest.mark.parametrize("stage, n, formula", [(0, 4, 16), (1, 2, 8 + 8 / 2), (1, 4, 8 + 8 / 4), (2, 2, 4 + 12 / 2),
                                               (2, 4, 4 + 12 / 4)])
def test_states_take_the_bytes_of_the_formula(stage, n, formula, tmp_path):
    def model(rank):
        return torch.nn.Sequential(torch.nn.Linear(12, 500), torch.nn.ReLU(), torch.nn.Linear(500, 500),
                                   torch.nn.ReLU(), torch.nn.Linear(500, 5))

    settings = replace(UNFUSED, optimizer=Named("Adam"), max_steps=2, exchange=ExchangeConfig(bucket_mb=0.1),
                       out=str(tmp_path))
    settings = zero(settings, stage, [1] * n) if stage else settings
    found = lockstep(n, settings, model, DATA, bytes_of_states)
    assert found == pytest.approx([formula] * n, rel=0.02)


# --- state -----------------------------------------------------------------------------------------------------------

def whole_state(runs):
    """Return the optimizer's arrays put together from all ranks' slices, and the JSON-able rest."""
    arrays, seen = {}, {}
    for shard in (shard for run in runs for shard in run.parts.state.slices()):
        whole = arrays.setdefault(shard.name, np.zeros(shard.shape, shard.values.dtype))
        span = slice(shard.begin, shard.begin + shard.values.size)
        whole.reshape(-1)[span] = shard.values
        seen.setdefault(shard.name, np.zeros(whole.size, int))[span] += 1
    assert all((times == 1).all() for times in seen.values()), "each element comes exactly once"
    groups, rest = runs[0].parts.state.state()
    assert set(groups) == {"model"}
    return {**groups, "optimizer": arrays}, rest


def resumed(groups, rest, size, settings):
    """Return runs that have loaded a state of any run and trained on."""
    heads = [Head("optimizer", n, a.shape, a.dtype.str, 0, a.size) for n, a in groups["optimizer"].items()]

    def go_on(run):
        state = run.parts.state
        if not isinstance(run.dp, Zero):
            state.load(groups, rest)
            return fitted(run)
        values = {name: groups["optimizer"][name].reshape(-1)[begin:end].copy()
                  for name, begin, end in state.wanted(heads)}
        state.load({"model": groups["model"]}, rest)
        state.load_slices(values)
        return fitted(run)

    return lockstep(size, settings, lambda rank: with_a_number(rank + 5), DATA, go_on)


class WithANumber(torch.nn.Module):
    """A perceptron with a parameter that has no dimension, and one of another memory order."""

    def __init__(self):
        super().__init__()
        self.inner = make_model("torch")
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.turn = torch.nn.Parameter(torch.eye(12).reshape(3, 4, 12, 1).contiguous(
            memory_format=torch.channels_last))

    def forward(self, x):
        return self.inner(x @ self.turn.reshape(12, 12)) * self.scale


def with_a_number(seed=0):
    torch.manual_seed(seed)
    model = WithANumber()
    assert not model.turn.is_contiguous()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name, args", [("Adam", {}), ("NAdam", {}), ("Adagrad", {}), ("SGD", {"momentum": 0.9}),
                                        ("SGD", {})],
                         ids=["Adam", "NAdam", "Adagrad", "momentum", "sgd"])
def test_slices_make_the_state_of_an_unsharded_run_and_go_on_anywhere(name, args, tmp_path):
    settings = replace(UNFUSED, optimizer=Named(name, args), lr=0.01,
                       schedule=ScheduleConfig("ExponentialLR", {"gamma": 0.9}))

    def models(rank):
        return with_a_number()

    whole = trained(3, settings, tmp_path / "whole", models)
    runs = trained(3, zero(settings, 2, [3, 0, 1]), tmp_path / "zero", models)
    assert {bits(run) for run in runs} == {bits(whole[0])}
    groups, rest = whole_state(runs)
    want, rest_of_whole = whole[0].parts.state.state()
    assert set(groups["optimizer"]) == set(want["optimizer"]) and rest == rest_of_whole
    for key, array in want["optimizer"].items():
        assert groups["optimizer"][key].shape == array.shape and groups["optimizer"][key].dtype == array.dtype
        np.testing.assert_array_equal(groups["optimizer"][key], array)
    for shards in ([1, 1], [0, 1, 2, 3]):
        further = [resumed(groups, rest, len(shards), replace(on, out=str(tmp_path / f"{len(shards)}{i}")))
                   for i, on in enumerate((settings, zero(settings, 2, shards)))]
        assert len({bits(run) for runs in further for run in runs}) == 1


def test_state_of_another_model_is_refused(tmp_path):
    def look(run):
        for name, shape, words in (("nobody/exp_avg", (3,), "has state for 'nobody'"),
                                   (f"{run.parts.params.names[0]}/exp_avg", (3,), "has shape.*optimizer of that run")):
            with pytest.raises(UserError, match=words):
                run.parts.state.wanted([Head("optimizer", name, shape, "<f4", 0, 3)])

    lockstep(2, zero(replace(UNFUSED, out=str(tmp_path))), lambda rank: make_model("torch"), DATA, look)
