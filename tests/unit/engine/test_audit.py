"""Audits of whole runs, ranks as threads: a device that computes wrongly is found and named, nothing else is."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from audit_faults import BITS, Fault, audited, drawn, numpy_model
from small_runs import (
    FRAMEWORKS,
    SLOW_TENSORFLOW,
    Recut,
    config,
    fitted,
    lockstep,
    make_model,
    replans,
    samples,
    weights,
)

from hvdtrain.config import Named
from hvdtrain.core.errors import UserError
from hvdtrain.engine.callbacks import audit as room
from hvdtrain.engine.callbacks.audit import Audit
from hvdtrain.engine.recompute import Miscomputed, case_of, clearly_farther, distance, resolution


def audit(run):
    return next(c for c in run.callbacks if isinstance(c, Audit))


def trained(size, *callbacks, model=lambda rank: numpy_model(None), steps=30, **settings):
    def work(run):
        run.callbacks[:0] = callbacks
        return fitted(run)

    setting = config(**{"global_batch": 8, "max_steps": steps, "audit": 1, **settings})
    return lockstep(size, setting, model, samples(64), work)


@pytest.mark.parametrize("kind", sorted(BITS))
@pytest.mark.parametrize("seed", range(6))
def test_a_fault_is_found_within_fifty_audits_and_named(kind, seed):
    size = 2 + seed % 3
    fault = drawn(seed, size, kind)
    found = audited("numpy", size, fault)
    assert found is not None and found.ranks == ((fault.rank,) if size > 2 else found.ranks), (fault, found)
    assert fault.rank in found.ranks and found.parameter in ("w0", "b0", "w1", "b1")


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_fault_is_found_in_the_frameworks(framework):
    found = audited(framework, 3, Fault("activation", 18, 5, 1), audits=10)
    assert found.ranks == (1,) and "rank 1 on host" in str(found) and "a gradient that differs from ranks" in str(found)
    found = audited(framework, 2, Fault("gradient", 3, 7, 0), audits=10)
    assert found.ranks in ((0, 1), (1, 0)) and "two ranks do not show which one is right" in str(found)


def test_it_tells_which_checkpoint_to_go_back_to(tmp_path):
    model = numpy_model(None)

    class Breaks(Recut):
        def __init__(self):
            super().__init__({})

        def step_end(self, run):
            if run.control.rank == 1 and run.state.cursor.step == 17:
                run.parts.stage._model = numpy_model(Fault("gradient", 9, 3, 1, 2))
                run.parts.stage._model.params = run.spec.model.params

    with pytest.raises(Miscomputed, match="last at step 15: resume from a checkpoint of step 15 or before") as found:
        trained(3, Breaks(), model=lambda rank: numpy_model(None) if rank else model, audit=5, out=str(tmp_path))
    assert found.value.ranks == (1,) and found.value.parameter == "w1" and found.value.step in (20, 25)
    with pytest.raises(Miscomputed, match="its checkpoints are not reliable"):
        trained(3, model=lambda rank: numpy_model(Fault("gradient", 9, 3, 1) if rank == 1 else None),
                out=str(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {}, {"accumulate": 3}, {"shares": [1, 0, 2]}, {"micro_batch": 2}, {"optimizer": Named("SGD", {"momentum": 0.9})}],
    ids=str)
def test_clean_runs_pass_and_train_as_without(settings, tmp_path):
    runs = trained(3, Recut({} if "shares" in settings else replans(3)), out=str(tmp_path / "a"), **settings)
    plain = trained(3, Recut({} if "shares" in settings else replans(3)), audit=0, out=str(tmp_path / "b"), **settings)
    assert all(np.array_equal(a, b) for a, b in zip(weights(runs[0]), weights(plain[0])))
    assert audit(runs[0]).audits == 30 and set(audit(runs[0]).good) == {0, 1, 2}
    assert "30 audits of a micro-batch on another rank found no difference" in runs[0].notes[-1]


@pytest.mark.slow
def test_hundreds_of_clean_audits(tmp_path):
    runs = trained(3, steps=500, out=str(tmp_path))
    assert audit(runs[0]).audits == 500 and min(audit(runs[0]).good.values()) >= 498


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_an_audit_leaves_nothing_behind(framework, tmp_path):
    got, want = (trained(2, model=lambda rank: make_model(framework), steps=6, audit=n, precision=precision,
                         out=str(tmp_path / f"{n}{precision}"))
                 for precision in ("fp32",) for n in (1, 0))
    assert all(np.array_equal(a, b) for a, b in zip(weights(got[0]), weights(want[0])))
    runs = trained(2, model=lambda rank: make_model(framework), steps=6, precision="fp16", out=str(tmp_path / "h"))
    assert audit(runs[0]).good == {0: 6, 1: 6}


def test_unlike_devices_may_round_and_no_more(monkeypatch, tmp_path):
    monkeypatch.setattr(room, "kinds", lambda run: ["cpu a", "cpu b", "cpu c"])

    def model(fault):
        def made(rank):
            own = numpy_model(fault if fault and rank == fault.rank else None)
            plain = own.gradient

            def gradient(x, y):
                loss_sum, grads = plain(x, y)
                return loss_sum, {n: g * np.float32(1 + 3e-7 * rank) for n, g in grads.items()}

            own.gradient = gradient
            return own
        return made

    runs = trained(3, model=model(None), steps=60, check_every=0, out=str(tmp_path / "clean"))
    assert audit(runs[0]).audits == 60 and not audit(runs[0])._doubts
    count = Counter()
    for seed in range(6):
        fault = drawn(seed, 3, "exponent" if seed % 2 else "mantissa")
        try:
            trained(3, model=model(fault), steps=50, check_every=0, lr=1e-4, nan_guard="skip", max_skipped=1000,
                    out=str(tmp_path / f"{seed}"))
        except Miscomputed as found:
            count[found.ranks == (fault.rank,)] += 1
    assert count[True] >= 5, count


@pytest.mark.parametrize("precision, audits", [("fp32:bf16", 0), ("fp32:fp32:fp16", 12), ("bf16:bf16:fp32", 12)])
def test_ranks_in_other_types_accuse_nobody(precision, audits, tmp_path):
    """The gradient of a bias before a BatchNorm is nothing but rounding: in 16 bits as large as any other."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def made(rank):
        torch.manual_seed(1)
        layers = torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 5)
        return torch.nn.Sequential(*layers)

    size = precision.count(":") + 1
    runs = trained(size, model=made, steps=12, global_batch=16, precision=precision, check_every=0, out=str(tmp_path))
    told = next(note for note in runs[0].notes if note.startswith("audit skips"))
    assert ("ranks 0 (fp32), 1 (bf16)" if size == 2 else f"rank 2 ({precision.split(':')[2]})") in told
    assert audit(runs[0]).audits == audits and set(audit(runs[0]).good) == ({0, 1} if audits else set())


def test_a_model_that_draws_by_itself_is_not_audited(tmp_path):
    def made(rank):
        own, draw = numpy_model(None), np.random.default_rng(rank)
        plain = own.gradient

        def gradient(x, y):
            return plain(x * draw.uniform(0.5, 1.5, x.shape).astype(np.float32), y)

        own.gradient = gradient
        return own

    runs = trained(2, model=made, out=str(tmp_path))
    assert any(note.startswith("audit is off: gradients of one rank differ") for note in runs[0].notes)


def test_a_rank_that_computes_otherwise_each_time_is_named_among_two(tmp_path):
    def made(rank):
        own, draw = numpy_model(None), np.random.default_rng(0)
        plain = own.gradient

        def gradient(x, y):
            loss_sum, grads = plain(x, y)
            return loss_sum, {n: g * np.float32(draw.uniform(0.5, 1.5)) for n, g in grads.items()}

        own.gradient = gradient if rank == 1 else plain
        return own

    with pytest.raises(Miscomputed, match="rank 1 .* does not give the same gradient twice") as found:
        trained(2, model=made, out=str(tmp_path))
    assert found.value.ranks == (1,)


def test_rounding_by_chance_is_forgiven_once_it_is_known(tmp_path):
    def made(rank):
        own, draw = numpy_model(None), np.random.default_rng(rank)
        plain = own.gradient

        def gradient(x, y):
            loss_sum, grads = plain(x, y)
            return loss_sum, {n: g * np.float32(1 + 1e-6 * draw.standard_normal()) for n, g in grads.items()}

        own.gradient = gradient
        return own

    runs = trained(2, model=made, steps=60, out=str(tmp_path))
    assert sum("compares up to rounding" in note for note in runs[0].notes) == 1 and audit(runs[0]).audits == 60


def test_distances():
    a = np.array([1.0, -2.0, 0.5], np.float32)
    assert distance(a, a) == 0 and distance(a, a * 1.5) == pytest.approx(0.5)
    assert distance(a, np.array([1.0, np.nan, 0.5])) == np.inf and distance(a * np.nan, a * np.nan) == 0
    assert distance(a * 1e-9, -a * 1e-9, floor=1.0) < 1e-8 and distance(a[:0], a[:0]) == 0
    assert clearly_farther(0.5, 0.01, 0.001) == 0 and clearly_farther(1e-5, 0.0, 0.001) is None
    assert resolution("cpu", "fp32") < resolution("cuda", "fp32") < resolution("cuda", "bf16")


def test_audits_that_had_nothing_to_compare_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "case_of", lambda *args: None)  # as of arrays of text
    runs = trained(2, steps=6, out=str(tmp_path))
    assert audit(runs[0]).audits == 0 and not any("found no difference" in note for note in runs[0].notes)


def test_what_cannot_travel_is_not_audited():
    assert case_of([(np.array(["a"]),)], dict) is None and case_of([], dict) is None
    assert case_of([(np.zeros((0, 2)),), (np.ones((3, 2)),)], dict).arrays[0].shape == (3, 2)
    with pytest.raises(UserError, match="audit is -1"):
        config(audit=-1).check()
    with pytest.raises(UserError, match="audit is"):
        config(audit=SimpleNamespace()).check()


@pytest.mark.parametrize("room_P, sizes, audits", [
    ([9, 3], [8, 4, 2, 2], 2), ([9, 9], [8, 8, 8, 8], 4), ([9, 1], [8, 4, 2, 1], 1), ([9, 0], [8, 4, 2, 1], 0)])
def test_a_rank_without_memory_for_an_audit_is_audited_with_fewer_samples(room_P, sizes, audits):
    computed = {0: [], 1: []}

    def work(run):
        rank, alone = run.control.rank, run.parts.stage.alone

        def short(batch):
            computed[rank].append(len(batch[0]))
            if len(batch[0]) > room_P[rank]:
                raise MemoryError("of a test")
            return alone(batch)

        run.parts.stage.alone = short
        return fitted(run)

    runs = lockstep(2, config(global_batch=16, max_steps=4, audit=1), lambda rank: numpy_model(None), samples(64), work)
    assert computed[0] == computed[1] == sizes
    for run in runs:
        assert [(s["rank"], s["phase"]) for s in run.shortages] == [(1, "an audit")] * sum(n > room_P[1] for n in sizes)
        assert audit(run).audits == audits and run.state.cursor.step == 4


def test_a_third_rank_that_is_in_no_audit_may_run_out_of_memory():
    callback, told = Audit(1), []
    callback._ranks = [1, 2]
    run = SimpleNamespace(
        control=SimpleNamespace(rank=0, gather=lambda row: [row]), deliver=told.extend,
        recovery=SimpleNamespace(attempt=lambda compute: (None, "of a test")),
        parts=SimpleNamespace(caveats=list), state=SimpleNamespace(cursor=SimpleNamespace(step=3)))
    assert callback._compute(run, SimpleNamespace(arrays=[[0]]), [0]) == (None, {0})
    assert callback._ranks == [1, 2] and len(told) == 1
