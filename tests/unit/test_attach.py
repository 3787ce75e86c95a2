"""What a run's exchange is made of, and which combinations are refused in words. No framework."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.cluster.group import world
from hvdtrain.cluster.topology import Host, Topology
from hvdtrain.collectives.null import NullCollectives
from hvdtrain.config import Config, Exchange
from hvdtrain.errors import UserError
from hvdtrain.exchange.attach import exchange, use_compressor
from hvdtrain.protocols import ParamSpec

PARAMS = [ParamSpec("w", (30, 20), "float32"), ParamSpec("b", (20,), "float32")]


def made(size=2, plain_sgd=True, params=PARAMS, others=(), **settings):
    """A run of ``size`` ranks after `exchange`."""
    options = Exchange(**settings.pop("exchange", {}))
    attached = []
    control = SimpleNamespace(rank=0, gather=lambda own: [own, *others][:size] if others else [own] * size)
    step = SimpleNamespace(params=lambda: params, attach=attached.append, plain_sgd=lambda: plain_sgd)
    run = SimpleNamespace(config=replace(Config(**settings), exchange=options), step=step, notes=[], reducer=None,
                          collectives=NullCollectives(0, size), group=world(size, 0), control=control,
                          attached=attached,
                          topology=Topology((Host("here", tuple(range(size)), 64),)))
    exchange(run, Ops())
    assert attached == [run.reducer]
    return run


def test_none_by_default_and_silent():
    run = made()
    assert run.reducer.compressor.name == "none" and run.notes == []
    assert len(run.reducer.buckets) == 1


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_a_compressor_is_named_in_the_notes(name):
    run = made(compression=name)
    assert run.reducer.compressor.name == name
    assert run.notes == [f"gradients are approximated by {run.reducer.compressor.describe()}"]


def test_one_rank_compresses_nothing_and_says_so():
    run = made(size=1, compression="topk")
    assert run.reducer.alone and run.notes == ["compression topk is off: one rank sends nothing"]


def test_one_rank_keeps_the_momentum_that_topk_has():
    run = made(size=1, compression="topk", exchange={"topk_momentum": 0.9})
    assert run.reducer.compressor.name == "topk" and not run.reducer.alone


def test_auto_begins_without_compression():
    run = made(compression="auto")
    assert run.reducer.compressor.name == "none" and run.notes == []


def test_another_compressor_between_steps():
    run = made()
    first = run.reducer
    use_compressor(run, "powersgd")
    assert run.reducer.compressor.name == "powersgd" and run.reducer.buckets == first.buckets
    assert run.attached == [first, run.reducer]
    kept = run.reducer
    use_compressor(run, "powersgd")
    assert run.reducer is kept, "the same one keeps its state"


def test_adasum_looks_at_each_tensor_by_itself():
    run = made(exchange={"adasum": True})
    assert run.reducer.compressor.name == "adasum" and [b.params for b in run.reducer.buckets] == [(1,), (0,)]


@pytest.mark.parametrize("words, settings", [
    ("topk_momentum 0.9 with an optimizer that has a memory",
     {"compression": "topk", "plain_sgd": False, "exchange": {"topk_momentum": 0.9}}),
    ("adasum with compression fp16", {"compression": "fp16", "exchange": {"adasum": True}}),
    (r"adasum with shares \[3, 1\]", {"shares": [3, 1], "exchange": {"adasum": True}}),
    ("powersgd on ranks with 2 to 8 compute threads", {"compression": "powersgd", "threads": 2, "others": [8]}),
    ("adasum on 3 ranks", {"size": 3, "exchange": {"adasum": True}}),
    ("compression int8 with parameters of type float64",
     {"compression": "int8", "params": [ParamSpec("w", (3,), "float64")]}),
])
def test_what_does_not_go_together_is_refused(words, settings):
    with pytest.raises(UserError, match=words):
        made(**settings)
