"""The exchange of a run, and messages for combinations that are refused. No framework."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.cluster.topology import HostRanks, Topology
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.compressors import create as compressor
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import world
from hvdtrain.core.protocols import ParamSpec
from hvdtrain.parallel.data_parallel import DataParallelSetup, create
from hvdtrain.parallel.data_parallel.alone import Alone

PARAMS = [ParamSpec("w", (30, 20), "float32"), ParamSpec("b", (20,), "float32")]


def made(size=2, plain_sgd=True, params=PARAMS, others=(), **settings):
    """Return (the data parallelism that is made for ``size`` ranks, its notes)."""
    options = ExchangeConfig(**settings.pop("exchange", {}))
    control = SimpleNamespace(rank=0, gather=lambda own: [own, *others][:size] if others else [own] * size)
    parts = SimpleNamespace(params=SimpleNamespace(specs=params),
                            optimizer=SimpleNamespace(plain_sgd=lambda: plain_sgd),
                            stage=SimpleNamespace(asynchronous=False), scale=SimpleNamespace(on=False), ops_of_place=(),
                            layout=None, replicas=())
    notes = []
    setup = DataParallelSetup(replace(Config(**settings), exchange=options), control,
                  Topology((HostRanks("here", tuple(range(size)), 64),)), world(size, 0), NullCollectives(0, size),
                  Ops(), parts, notes)
    return create(setup), notes


def test_none_by_default_and_silent():
    dp, notes = made()
    assert dp.compression == "none" and notes == []
    assert len(dp.buckets) == 1 and dp.buckets[0].group == "g0-1.grad"


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_a_compressor_is_named_in_the_notes(name):
    dp, notes = made(compression=name)
    assert dp.compression == name
    assert notes == [f"gradients are approximated by {dp.describe()}"]


def test_one_rank_compresses_nothing_and_says_so():
    dp, notes = made(size=1, compression="topk")
    assert isinstance(dp, Alone) and notes == ["compression topk is off: one rank sends nothing"]
    assert isinstance(made(size=1)[0], Alone) and not isinstance(made(size=2)[0], Alone)


def test_one_rank_keeps_the_momentum_that_topk_has():
    dp, _ = made(size=1, compression="topk", exchange={"topk_momentum": 0.9})
    assert dp.compression == "topk" and not isinstance(dp, Alone)


def test_auto_begins_without_compression():
    dp, notes = made(compression="auto")
    assert dp.compression == "none" and notes == []


def test_another_compressor_between_steps():
    dp, _ = made()
    buckets = dp.buckets
    dp.use(compressor("powersgd", Config()))
    assert dp.compression == "powersgd" and dp.buckets == buckets


def test_adasum_looks_at_each_tensor_by_itself():
    dp, _ = made(exchange={"adasum": True})
    assert dp.compression == "adasum" and [b.params for b in dp.buckets] == [(1,), (0,)]


@pytest.mark.parametrize("words, settings", [
    ("topk_momentum 0.9 with an optimizer that has its own momentum",
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
