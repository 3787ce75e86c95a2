"""The records of seconds: every rank's whole time by cause, once; the clocks of several machines."""

import time

import numpy as np
import pytest
from small_runs import config, fitted, lockstep, make_model, samples

from hvdtrain.cluster import clocks
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.core import timeline as birth
from hvdtrain.core.timeline import CAUSES
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.seconds import Seconds, longest


class Kept:
    every, at_once = "", True

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)

    def close(self):
        pass


class Busy(Callback):
    where = "all"

    def step_end(self, run):
        time.sleep(0.004)


def test_each_rank_s_whole_time_is_told_once(tmp_path):
    def work(run):
        kept, start_s = Kept(), run.timeline.clock.seconds()["start"]
        run.records._make = lambda: [kept]
        run.callbacks = [*(c for c in run.callbacks if not isinstance(c, Seconds)), Busy(), Seconds(0.05)]
        began = time.perf_counter()
        fitted(run)
        return kept.records, start_s, time.perf_counter() - began

    data = samples(64)
    settings = config(global_batch=16, max_steps=30, out=str(tmp_path), eval_every=3)
    ranks = lockstep(3, settings, lambda rank: make_model("numpy"), (data, data), work)
    records = [r for r in ranks[0][0] if r.event == "seconds"]
    assert len(records) >= 3 and records[-1] is ranks[0][0][-1] and not ranks[1][0]
    assert [r.values["from_step"] for r in records] == [0, *(r.step for r in records[:-1])]
    for rank, (_, start_s, took_s) in enumerate(ranks):
        told = {cause: sum(r.values["ranks"][rank][cause] for r in records) for cause in CAUSES}
        assert all(seconds >= 0 for seconds in told.values())
        assert sum(told.values()) == pytest.approx(start_s + took_s, abs=0.05)
        assert told["other"] > 30 * 0.004 and told["start"] >= start_s and told["compute"] > 0 < told["evaluation"]
        waits = sum(row[2] for r in records for row in r.values["waits"] if row[0] == rank)
        assert waits == pytest.approx(told["wait"], abs=1e-3) and told["wait"] + told["wire"] > 0


def test_the_longest_waits_come_first_and_zeros_not_at_all():
    assert longest(np.array([[0, 1, 3], [0, 0, 0], [2, 0, 0]]), most=1) == [[0, 2, 3], [2, 0, 2]]


@pytest.mark.parametrize("machines, measured", [("aaa", []), ("aba", [1])])
def test_clocks_of_other_machines_are_put_within_their_bound(machines, measured):
    ahead = {"a": 0.0, "b": 7000.0}

    def work(control, wire):
        machine = machines[control.rank]
        return clocks.compared(control, machine, lambda: time.perf_counter() + ahead[machine], 10)

    for found in LockstepWorld(3).run(work):
        assert [rank for rank, one in enumerate(found) if one.within_s] == measured
        for machine, (offset_s, within_s) in zip(machines, found):
            assert abs(offset_s - ahead[machine]) <= within_s + 1e-6 and within_s < 1.0


def test_a_process_s_life_is_claimed_once():
    lived_s = birth.unclaimed_s()
    birth.claim()
    assert birth.unclaimed_s() < max(lived_s, 5.0) and clocks.identity() == clocks.identity()
    assert 0 <= birth.unclaimed_s() < 5.0
