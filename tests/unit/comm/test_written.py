"""Reductions of buffers that forward passes write to: the formulas, and what a declaration may say."""

import numpy as np
import pytest

from hvdtrain.backends.numpy.ops import Ops
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.reducer.transport import Transport
from hvdtrain.comm.reducer.written import combine, gathered, reduced
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import Writable
from hvdtrain.engine.written_state import resolved

F, I64 = np.float32, np.int64


@pytest.mark.parametrize("reduction, old, own_P, samples_P, want", [
    ("sum", F([1, 1]), [F([3, 1]), F([1, 5])], [2, 4], F([3, 5])),
    ("sum", I64(2**60), [I64(2**60 + 3), I64(2**60 + 4), I64(9)], [1, 1, 0], I64(2**60 + 7)),
    ("sum", F([-np.inf]), [F([-np.inf]), F([-np.inf])], [1, 1], F([-np.inf])),
    ("mean", F([1]), [F([3]), F([6])], [3, 1], F([3.75])),
    ("max", F([9]), [F([3]), F([4])], [1, 1], F([4])),
    ("min", I64([9]), [I64([3]), I64([1])], [1, 0], I64([3])),
    ("any", np.array(False), [np.array(False), np.array(True)], [1, 1], np.array(True)),
    ("any", I64(0), [I64(0), I64(7)], [1, 1], I64(1)),
    ("first", F([0]), [F([3]), F([4])], [0, 5], F([4])),
], ids=lambda x: x if isinstance(x, str) else "")
def test_each_reduction(reduction, old, own_P, samples_P, want):
    got = reduced(reduction, old, own_P, samples_P)
    assert got.dtype == want.dtype and got.shape == want.shape and got.tolist() == want.tolist()


def enqueue(queue, at, rows):
    """Return what a model in one process does with the position ``at``."""
    queue = queue.copy()
    queue[(at + np.arange(len(rows))) % len(queue)] = rows
    return queue, (at + len(rows)) % len(queue)


@pytest.mark.parametrize("how, at", [("gather", 0), ("gather:1", 5), ("gather", 6)])
@pytest.mark.parametrize("sizes", [(2, 2), (0, 3), (3, 0, 1), (4, 7)], ids=str)
def test_a_queue_has_the_rows_of_all_ranks(how, at, sizes):
    draw, turned = np.random.default_rng(0), (lambda x: x.T.copy()) if how == "gather:1" else (lambda x: x)
    old, labels = draw.normal(size=(8, 3)).astype(F), np.zeros(8, I64)
    parts = np.split(draw.normal(size=(sum(sizes), 3)).astype(F), np.cumsum(sizes)[:-1])
    numbers = np.split(np.arange(sum(sizes)) // 2, np.cumsum(sizes)[:-1])  # some rows keep their label
    own = [enqueue(old, at, rows) for rows in parts]
    got = gathered([("m.queue", how, turned(old), [turned(q) for q, _ in own]),
                    ("m.at", "gather", np.array([at]), [np.array([p]) for _, p in own]),
                    ("m.labels", "gather", labels, [enqueue(labels, at, rows)[0] for rows in numbers])], sizes)
    want, position = old, at
    wanted_labels = labels
    for rows, number in zip(parts, numbers):
        wanted_labels, _ = enqueue(wanted_labels, position, number)
        want, position = enqueue(want, position, rows)
    np.testing.assert_array_equal(turned(got["m.queue"]), want)
    np.testing.assert_array_equal(got["m.labels"], wanted_labels)
    assert got["m.at"].tolist() == [position]


@pytest.mark.parametrize("at", [0, 6])
def test_a_position_tells_rows_that_keep_their_value(at):
    """Features after a ReLU, with dead rows, and labels alone; the position stands in the same module."""
    old, labels = np.zeros((8, 2), F), np.ones(8, I64)
    parts, numbers = [F([[0, 0], [1, 2], [0, 0]]), F([[0, 0], [3, 4]])], [I64([1, 2, 1]), I64([1, 1])]

    def one_rank(control, wire):
        rank = control.rank
        queue, after = enqueue(old, at, parts[rank])
        held = [Held("m.queue", old, queue), Held("m.at", I64([at]), I64([after])),
                Held("l.labels", labels, enqueue(labels, at, numbers[rank])[0]), Held("l.at", I64([at]), I64([after])),
                Held("k.labels", labels, labels), Held("k.at", I64([at]), I64([after]))]
        combine(Transport(wire, Ops()), held, {one.name: "gather" for one in held}, samples=1)
        return [one.value.tolist() for one in held]

    queue, after = enqueue(old, at, np.concatenate(parts))
    want = [queue.tolist(), [after], enqueue(labels, at, np.concatenate(numbers))[0].tolist(), [after],
            labels.tolist(), [after]]
    assert LockstepWorld(2).run(one_rank) == [want, want]


def test_rows_that_are_no_queue_are_refused():
    old = np.zeros((4, 2), F)
    with pytest.raises(UserError, match="beyond the step of its position"):
        gathered([("q", "gather", old, [enqueue(old, 1, old[:2] + 1)[0]]), ("at", "gather", I64([1]), [I64([2])])], [1])
    with pytest.raises(UserError, match="all 4 rows"):
        gathered([("q", "gather", old, [old + 1, old])], [1, 1])
    with pytest.raises(UserError, match="from row 0 on and rank 1 from row 2"):
        gathered([("q", "gather", old, [enqueue(old, 0, old[:1] + 1)[0], enqueue(old, 2, old[:1] + 1)[0]])], [1, 1])


class Held:
    def __init__(self, name, old, own):
        self.name, self.form, self._old, self.value = name, f"{own.dtype}{own.shape}", old, own
        self.writes = 0

    def old(self):
        return self._old

    def own(self):
        return self.value.copy()

    def write(self, value):
        self.value, self.writes = value, self.writes + 1


def test_ranks_end_with_one_value_and_send_what_was_written():
    how = {"a": "first", "b": "sum", "c": "first", "d": "first"}

    def one_rank(control, wire):
        rank = control.rank
        held = [Held("a", F([0]), F([rank])), Held("b", I64(5), I64(5 + rank)), Held("c", F([2]), F([2])),
                Held("d", F(np.zeros(1 + rank)), F(np.ones(1 + rank)))]
        combine(Transport(wire, Ops()), held, how, samples=rank)  # rank 0 computed on a placeholder
        return held

    for rank, held in enumerate(LockstepWorld(3).run(one_rank)):
        assert [float(h.value[0]) for h in (held[0], held[2])] == [1, 2] and int(held[1].value) == 8
        assert held[2].writes == 0 and held[3].value.shape == (1 + rank,), "shapes that differ stay"


QUEUE = {"q": Writable("float32", "f", (8, 2)), "at": Writable("int64", "i", (1,)), "n": Writable("int64", "i", ()),
         "flag": Writable("bool", "b", ()), "labels": Writable("int64", "i", (8,)), "m.at": Writable("int64", "i", ()),
         "m.seen": Writable("float32", "f", (2,))}


@pytest.mark.parametrize("given, said", [
    ({"qq": "sum"}, "no such buffer; expected .*'q'"), ({"q": "average"}, "says 'average'"),
    ({"flag": "sum"}, "dtype bool; expected first . max . min . any"), ({"n": "mean"}, "dtype int64"),
    ({"bn.running_mean": "mean"}, "statistic of BatchNorm"), ({"n": "gather"}, "queues of no rows"),
    ({"labels": "gather"}, "integers alone"), ({"q": "gather:2"}, "shape"),
    ({"m.at": "gather", "q": "gather"}, "no rows"),
], ids=str)
def test_declarations_that_do_not_fit(given, said):
    with pytest.raises(UserError, match=said):
        resolved(given, QUEUE, ["bn.running_mean"])


def test_declarations_that_fit():
    given = {"m.seen": "sum", "q": "gather", "at": "gather", "flag": "any", "labels": "gather", "n": "max"}
    assert resolved(given, QUEUE, ["bn.running_mean"]) == given
    assert resolved({"labels": "gather", "at": "gather"}, QUEUE, [])
