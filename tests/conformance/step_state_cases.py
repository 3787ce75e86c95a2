"""Cases of the state of a training step for any backend: loaded again to the bit, or refused; see `step_cases`."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from one_step import SGD, TwoRanksInOne, batch
from step_kit import Halves, given, gradient, near, needs, same, same_state

from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.config import Config, Named, ScheduleConfig
from hvdtrain.core.errors import UserError


def goes_on(step, other, steps=6, saved_at=2):
    """Check that a step which loads another's state through JSON continues bit for bit."""
    for t in range(steps):
        step.run([batch(t)], 1 / 32)
        if t == saved_at:
            groups, rest = step.state()
            own = step.rank_state()
    assert set(groups) == {"model", "optimizer"}
    assert all(isinstance(array, np.ndarray) for group in groups.values() for array in group.values())
    for t in (11, 12):
        other.run([batch(t)], 1 / 32)
    other.load({name: dict(sorted(arrays.items(), reverse=True)) for name, arrays in groups.items()},
               json.loads(json.dumps(rest, allow_nan=False)))
    assert other.load_rank(own) == ""
    for t in range(saved_at + 1, steps):
        other.run([batch(t)], 1 / 32)
    same_state(other.state(), step.state())
    same(other.rank_state(), step.rank_state())
    assert other.learning_rate() == step.learning_rate()


def test_a_loaded_state_goes_on_to_the_bit(kit):
    goes_on(*(kit.step(kit.noisy(start), compressor=Halves()) for start in (1, 2)))


@needs("Adam")
def test_a_loaded_state_of_adam_in_its_warm_up_goes_on_to_the_bit(kit):
    config = Config(lr=0.01, schedule=ScheduleConfig(warmup_steps=8))
    goes_on(*(kit.step(kit.noisy(start), config, TwoRanksInOne()) for start in (1, 2)))


def test_compressor_state_lives_between_steps(kit):
    """In one process and in lockstep: half of a gradient comes a step later."""
    def rank(control, wire):
        step = kit.step(model, replace(SGD, optimizer=Named("sgd")), wire, compressor=Halves())
        step.run([batch(0)], 1 / 32)
        assert step.rank_state()["compressor.steps"] == [1]
        step.run([], 0.0)
        return kit.plain(step.model)

    model, start = kit.model(), given()
    grads = gradient(start, *batch(0))[1]
    want = [a - 0.1 * 0.75 * g / 32 for a, g in zip(start, grads)]
    near(LockstepWorld(1).run(rank)[0], want, 1e-5)
    model = kit.model()
    near(rank(None, NullCollectives()), want, 1e-5)


def test_compressor_state_of_another_compression_starts_anew_and_says_so(kit):
    with_state, without = kit.step(compressor=Halves()), kit.step()
    with_state.run([batch(0)], 1 / 32)
    own = with_state.rank_state()
    assert without.load_rank(own) != "" and "starts from scratch" in with_state.load_rank(without.rank_state())
    owed = [array for name, array in with_state.rank_state().items() if name.endswith(".owed")]
    assert owed and not any(part.any() for part in owed)


def test_a_rank_takes_its_generators_back(kit):
    step = kit.step(kit.noisy())
    step.run([batch(0)], 1 / 32)
    own, groups = step.rank_state(), step.state()
    draws = []
    for _ in range(2):
        draws.append((random.random(), np.random.rand(), step.run([batch(1)], 1 / 32)[1]))
        assert step.load_rank(own) == ""
        step.load(*groups)
        same(step.rank_state(), own)
    assert draws[0] == draws[1]


@needs("refusals")
def test_a_foreign_checkpoint_is_refused_and_changes_nothing(kit):
    donor = kit.step()
    donor.run([batch(0)], 1 / 32)
    checkpoint = donor.state()
    for model, config, said in ((kit.model(hidden=17), SGD, r"has shape \(.*16.*\); expected \(.*17.*\)"),
                                (kit.noisy(), SGD, "lacks.*has|has state for"),
                                (kit.model(8), Config(), "made with SGD; expected Adam")):
        step = kit.step(model, config)
        before = step.state()
        with pytest.raises(UserError, match=said):
            step.load(*checkpoint)
        same_state(step.state(), before)


__all__ = ["goes_on", *(name for name in dir() if name.startswith("test_"))]
