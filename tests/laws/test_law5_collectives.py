"""Law 5: every collective has a deterministic name and is entered by all; a root-only callback can enter none."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import Record, config, fitted, lockstep, make_model, samples

import hvdtrain.engine.callbacks
from hvdtrain.backends.numpy import Ops
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.compressors.base import Uncompressed
from hvdtrain.comm.compressors.none import NoCompression
from hvdtrain.comm.reducer.reducer import Reducer
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.mesh import Group, world
from hvdtrain.core.protocols import AllGather, AllReduce, AllToAll, ParamSpec
from hvdtrain.engine.callbacks.base import Callback

# --- entered by all ------------------------------------------------------------------------------------------------

DIFFERENT = {
    "name": lambda control, wire: wire.allreduce(np.ones(4), f"grad.b{control.rank}"),
    "shape": lambda control, wire: wire.allreduce(np.ones(4 + control.rank), "grad.b0"),
    "dtype": lambda control, wire: wire.allreduce(np.ones(4, "float32" if control.rank else "float64"), "grad.b0"),
    "kind": lambda control, wire: (wire.allreduce if control.rank else wire.allgather)(np.ones(4), "grad.b0"),
    "plane": lambda control, wire: control.agree(True) if control.rank else wire.allreduce(np.ones(4), "grad.b0"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_enter_different_collectives_are_told(what):
    with pytest.raises(RuntimeError, match="ranks disagree: rank 0 entered .*; rank [12] entered "):
        LockstepWorld(3).run(DIFFERENT[what], timeout_s=10)


def test_a_collective_that_a_rank_leaves_out_is_told():
    def work(control, wire):
        if control.rank != 1:
            wire.allreduce(np.ones(4), "grad.b0")

    with pytest.raises(RuntimeError, match=r"waits in allreduce 'grad.b0'.* rank 1 has finished"):
        LockstepWorld(3).run(work, timeout_s=10)


class RootSums(Callback):
    """A callback that breaks the law."""

    where = "root"

    def step_end(self, run):
        run.control.sum(np.ones(1))


def test_a_root_only_callback_that_enters_a_collective_is_told(tmp_path):
    def work(run):
        run.callbacks.append(RootSums())
        return fitted(run)

    with pytest.raises(UserError, match="step_end of RootSums entered the exchange .* on rank 0 alone"):
        lockstep(2, config(max_steps=3, out=str(tmp_path)), lambda rank: make_model("numpy"), samples(9), work)


def test_the_callbacks_that_exist_enter_none_alone(tmp_path, capsys):
    """Every root-only callback at every step, on three ranks."""
    def work(run):
        run.callbacks.append(record := Record())
        fitted(run)
        return [c for c in run.callbacks if c.where == "root"], record.losses

    setting = config(epochs=2, global_batch=8, log_every=1, progress="plain", eval_every=1, out=str(tmp_path))
    results = lockstep(3, setting, lambda rank: make_model("numpy"), (samples(20), samples(7)), work)
    assert len(results[0][0]) >= 2, "progress and log are root-only"
    assert len(results[0][1]) == 6 and results[0][1] == results[1][1] == results[2][1]
    assert "step" in capsys.readouterr().out


# --- deterministic names ---------------------------------------------------------------------------------------------

class TwoRounds(Uncompressed):
    """A compressor that asks for two collectives of different kinds for each bucket."""

    name = "two rounds"

    def exchange(self, ops, flat_N, state, bucket, size, stage=0):
        rows_PK = yield AllGather(flat_N[:1])
        mixed_PK = yield AllToAll(np.repeat(flat_N[None, :1], size, axis=0))
        total_N = yield AllReduce(flat_N)
        return total_N + 0 * (rows_PK.sum() + mixed_PK.sum()), state


class Listening(NullCollectives):
    """Keeps what is put on the wire."""

    def __init__(self):
        super().__init__(0, 1)
        self.heard = []

    def allreduce(self, flat_N, name, op="sum"):
        self.heard.append(("allreduce", name, flat_N.shape))
        return super().allreduce(flat_N, name, op)

    def allgather(self, x_K, name):
        self.heard.append(("allgather", name, x_K.shape))
        return super().allgather(x_K, name)

    def alltoall(self, x_PK, name):
        self.heard.append(("alltoall", name, x_PK.shape))
        return super().alltoall(x_PK, name)


def heard(order, compressor, steps=2):
    """Return what a rank whose buckets fill in ``order`` puts on the wire."""
    params = [ParamSpec(f"p{i}", (5 + i,), "float64") for i in range(len(order))]
    buckets = plan_buckets(params, 1e-9, world(3, 1).name("grad"))
    assert len(buckets) == len(order)
    wire = Listening()
    reducer = Reducer(buckets, compressor, wire, Ops())
    for _ in range(steps):
        for i in order:
            reducer.start(i, np.full(buckets[i].n, float(i)))
        assert [total_N[0] for total_N in reducer.finish()] == [float(i) for i in range(len(order))]
    return wire.heard


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.sampled_from([NoCompression(), TwoRounds()]))
def test_names_and_their_order_do_not_depend_on_which_bucket_fills_first(order, compressor):
    got = heard(order, compressor)
    assert got == heard(range(5), compressor)
    one_step = [name for _, name, _ in got[:len(got) // 2]]
    assert len(set(one_step)) == len(one_step), "a name is used once a step"
    assert all(name.startswith("g0-2.grad.b") for name in one_step)


def test_buckets_that_fill_in_another_order_on_each_rank_are_summed(tmp_path):
    def work(control, wire):
        params = [ParamSpec(f"p{i}", (3,), "float64") for i in range(4)]
        reducer = Reducer(plan_buckets(params, 1e-9, "grad"), TwoRounds(), wire, Ops())
        for i in np.random.default_rng(control.rank).permutation(4):
            reducer.start(int(i), np.full(3, 10.0 * i + control.rank))
        return [total_N[0] for total_N in reducer.finish()]

    assert LockstepWorld(3).run(work, timeout_s=10) == [[30.0 * i + 3 for i in range(4)]] * 3


def test_groups_name_their_collectives_apart():
    assert world(3, 0).name("grad") == world(3, 2).name("grad")
    assert len({Group(ranks, ranks[0]).name("grad") for ranks in [(0, 1), (0, 1, 2), (0, 2), (1, 2)]}) == 4


# --- root-only callbacks, by reading them --------------------------------------------------------------------------

COLLECTIVE = {
    "control": {"bcast", "gather", "sum", "agree", "barrier"},
    "collectives": {"allreduce", "allgather", "alltoall", "reducescatter", "broadcast"},
    "step": {"share_initial", "sync_buffers", "exchange", "apply", "evaluate", "forward_backward"},
    "run": {"settle", "hear"},
    "feed": {"epoch", "eval_epoch", "check_ranks_agree", "compare"},
}
FUNCTIONS = {"agreed", "begin", "ensure_out", "export", "evaluate", "fit", "restore", "save", "starting", "survey"}
"""Collective methods by the attribute they are reached through, and collective functions of hvdtrain."""


def collective_calls(source: str) -> list[str]:
    """Return the calls in ``source`` that would enter a collective."""
    found = []
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
            called = node.func.attr
            if called in COLLECTIVE.get(owner, ()) or owner in ("session", "loop") and called in FUNCTIONS:
                found.append(f"{owner}.{called}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS:
            found.append(node.func.id)
    return found


def callbacks() -> list[type[Callback]]:
    """Every callback class of the project."""
    found = []
    for module in pkgutil.iter_modules(hvdtrain.engine.callbacks.__path__):
        members = vars(importlib.import_module(f"hvdtrain.engine.callbacks.{module.name}")).values()
        found += [m for m in members if isinstance(m, type) and issubclass(m, Callback)
                  and m.__module__.endswith(module.name)]
    return found


def test_root_only_callbacks_call_nothing_collective():
    root = [cls for cls in callbacks() if cls.where == "root"]
    assert "Recorder" in {cls.__name__ for cls in root} and len(root) > 1
    shown = [member for module in (
                "hvdtrain.reports.trackers.prometheus", "hvdtrain.reports.jsonl", "hvdtrain.reports.progress")
             for member in vars(importlib.import_module(module)).values()
             if isinstance(member, type) and member.__module__ == module]
    assert {"Jsonl", "PlainProgress"} <= {cls.__name__ for cls in shown}
    root += shown
    wrong = {cls.__name__: calls for cls in root for calls in [collective_calls(inspect.getsource(cls))] if calls}
    assert not wrong


def test_the_check_reads_them_right():
    assert collective_calls(inspect.getsource(RootSums)) == ["control.sum"]
    everywhere = {cls.__name__: cls for cls in callbacks()}
    assert "save" in collective_calls(inspect.getsource(everywhere["Checkpoint"]))
    assert everywhere["Checkpoint"].where == "all"
