"""`chaos`: the plan of faults, the harm to processes and files, the verdict; the training is stood in for."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.chaos import cli as chaos
from benchmarks.chaos import inject, judge, look
from benchmarks.chaos.campaign import Campaign, Leg, Outcome
from benchmarks.chaos.plan import (
    DISK,
    FLIP,
    FREEZE,
    KILL,
    LAUNCHER,
    MOST_STARTS,
    RANK,
    SAVE,
    START,
    STEP,
    SUPERVISOR,
    Amounts,
    Fault,
    draw,
    spread,
)
from hvdtrain.checkpoint import CheckpointStore, Snapshot
from hvdtrain.core import comparison
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import Child


def test_the_plan_is_the_seed_s_alone():
    amounts = Amounts(200, 5, 4, 3)
    assert draw(amounts, 3, False, 7) == draw(amounts, 3, False, 7)
    assert draw(amounts, 3, False, 7) != draw(amounts, 3, False, 8)


@pytest.mark.parametrize("kills", [1, 2, 9, 100, 200])
def test_half_of_the_kills_fall_into_saves_and_starts(kills):
    plan = draw(Amounts(kills), 2, False, 0)
    moments = [fault.moment for fault in plan]
    assert len(plan) == kills and moments.count(STEP) == kills // 2
    assert moments.count(SAVE) - moments.count(START) in (0, 1)
    if kills == 200:
        assert [sum(f.target == t for f in plan) for t in (RANK, LAUNCHER, SUPERVISOR)] == [160, 20, 20]


def test_starts_do_not_come_in_rows_that_end_a_run():
    for seed in range(30):
        row = MOST_STARTS
        for fault in draw(Amounts(40, 2, 2, 2), 2, False, seed):
            row = row + 1 if fault.moment == START else 0
            assert row <= MOST_STARTS
    only = [(KILL, START, RANK)] * 4
    assert spread(only) == only, "without others there is nothing to put between"


def test_ranks_and_shares_change_unless_they_are_held():
    plan = draw(Amounts(60), 3, False, 1)
    assert {f.ranks for f in plan} == {1, 2, 3} and all(len(f.shares) == f.ranks and min(f.shares) > 0 for f in plan)
    assert {(f.ranks, f.shares) for f in draw(Amounts(60), 3, True, 1)} == {(3, (1, 1, 1))}


@pytest.fixture
def sleeper():
    """Return a process that a test may harm, as a rank is seen."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield look.Rank(child.pid, 0, os.getpid(), look._stat(child.pid)[2])
    child.kill()
    child.wait()


def test_a_kill_of_what_has_ended_is_no_hit(sleeper):
    assert look.alive(sleeper) and inject.kill(sleeper)
    assert not look.alive(sleeper), "a process that nobody has waited for is a zombie, which is not alive"
    assert not inject.kill(sleeper) and not inject.freeze([sleeper])


def test_another_process_of_the_same_number_is_left_alone(sleeper):
    other = look.Rank(sleeper.pid, 0, sleeper.parent, sleeper.born + 1)
    assert not look.alive(other) and not inject.kill(other)
    assert look.alive(sleeper)


def test_a_frozen_process_is_alive(sleeper):
    assert inject.freeze([sleeper])
    ends = time.monotonic() + 5
    while look._stat(sleeper.pid)[0] != "T" and time.monotonic() < ends:
        time.sleep(0.01)
    assert look._stat(sleeper.pid)[0] == "T" and look.alive(sleeper)
    os.kill(sleeper.pid, signal.SIGCONT)


RANKS = """
import os, subprocess, sys
own = dict(os.environ, HVDLAUNCH_DIR=sys.argv[1])
for rank in (1, 0):
    env = dict(own, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2")
    subprocess.Popen([sys.executable, "-m", "hvdtrain", "train", sys.argv[2]], env=env)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=own)
print("up", flush=True)
import time; time.sleep(60)
"""


def test_ranks_are_found_by_their_mark_and_their_command(tmp_path):
    """The two placeholders are of a package `hvdtrain` beside them, whose train sleeps."""
    (tmp_path / "hvdtrain").mkdir()
    (tmp_path / "hvdtrain" / "__main__.py").write_text("import time; time.sleep(60)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with Child([sys.executable, "-c", RANKS, str(tmp_path / "attempts" / "001"), "x"], env, cwd=tmp_path,
               stdout=subprocess.PIPE, text=True) as child:
        child.process.stdout.readline()
        ends = time.monotonic() + 10
        while len(look.ranks(child.mark)) < 2 and time.monotonic() < ends:
            time.sleep(0.05)
        found = look.ranks(child.mark)
        child.process.stdout.close()
    assert [rank.rank for rank in found] == [0, 1]
    assert {rank.parent for rank in found} == {child.process.pid}
    assert {rank.folder for rank in found} == {tmp_path / "attempts" / "001"}
    assert not look.ranks(child.mark), "leaving the context ended them"


def run_with(out, steps=(3, 6)):
    """Return a run's directory with checkpoints."""
    store = CheckpointStore(out / "checkpoints", 9)
    for step in steps:
        store.save(Snapshot({"model": {"w": np.full(50, step)}}, {"framework": "torch"}), step)
    return out


def test_a_flip_changes_one_bit_of_the_newest_checkpoint(tmp_path):
    assert inject.flip(tmp_path, random.Random(0)) == ""
    run_with(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert inject.flip(tmp_path, random.Random(0)) == "step-00000006"
    changed = [path for path, data in before.items() if path.read_bytes() != data]
    assert len(changed) == 1 and changed[0].parent.name == "step-00000006"
    a, b = (int.from_bytes(data, "big") for data in (before[changed[0]], changed[0].read_bytes()))
    assert (a ^ b).bit_count() == 1


def test_a_limit_on_files_is_a_full_disk_to_whoever_writes(tmp_path):
    code = "import sys; sys.stdin.readline()\ntry:\n open(sys.argv[1], 'wb').write(bytes(10000))\n" \
           "except OSError as e: print(e.errno)\nprint('after', flush=True); sys.stdin.readline()\n" \
           "open(sys.argv[1], 'wb').write(bytes(10000))"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file")], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    rank = look.Rank(child.pid, 0, os.getpid(), look._stat(child.pid)[2])
    disk = inject.LimitedFiles()
    assert disk.fill([rank])
    child.stdin.write("\n")
    child.stdin.flush()
    said = [child.stdout.readline().strip() for _ in range(2)]
    disk.free([rank])
    child.communicate("\n", timeout=30)
    assert said == ["27", "after"] and child.returncode == 0 and (tmp_path / "file").stat().st_size == 10000


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted by root")
def test_a_small_file_system_is_filled_seen_by_nobody_else_and_kept_afterwards(tmp_path):
    """In a process of its own, which leaves this one's mounts alone."""
    code = """
import errno, sys
from pathlib import Path
from benchmarks.chaos.space import disk
runs = Path(sys.argv[1])
with disk(runs, True, 1 << 20) as full:
    print(full.words, flush=True)
    if type(full).__name__ != "FilledDisk":
        sys.exit(77)
    (runs / "kept").write_text("mine")
    assert full.fill([])
    try:
        (runs / "more").write_bytes(bytes(5000))
        sys.exit("there was room")
    except OSError as error:
        assert error.errno == errno.ENOSPC
    full.free([])
    (runs / "more").write_bytes(bytes(5000))
"""
    runs = tmp_path / "runs"
    runs.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(runs)], capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip(f"no file system can be mounted here: {done.stdout}")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in runs.iterdir()) == ["kept", "more"] and list(tmp_path.iterdir()) == [runs]


def outcome(kind=KILL, hit=True, recovered=True, seconds=2.0, lost=1, moment=STEP, target=RANK):
    fault = Fault(0, kind, moment, target, 0.5, 0.5, 2, (1, 1))
    return Outcome(fault, hit, moment, recovered, seconds, lost)


LEDGER = {"epochs": 3, "samples": 300, "skipped": 0, "unchecked": [], "partial": 20}
REFERENCE = {"steps": 40, "ledger": LEDGER}


def leg(out, refused=(), flipped=(), **changes):
    return Leg(run_with(out), {"steps": 40, "ledger": {**LEDGER, **changes}}, set(refused), set(flipped))


def bad(found):
    return [finding.words for finding in found if not finding.good]


def test_nothing_lost_is_found_good(tmp_path):
    found = judge.findings([outcome(), outcome(FREEZE)], 2, "", [leg(tmp_path / "run-1")], REFERENCE)
    assert not bad(found)
    assert any("0 lost and 0 doubled of 320 samples in 40 steps" in finding.words for finding in found)
    assert any("all 2 saves that are kept are whole" in finding.words for finding in found)


@pytest.mark.parametrize(("outcomes", "planned", "trouble", "said"), [
    ([outcome(hit=False, recovered=False)], 1, "", "0 of 1 faults hit what was alive"),
    ([outcome()], 2, "", "1 of 2 faults hit what was alive"),
    ([outcome(), outcome(recovered=False)], 2, "", "went on after 1 of them"),
    ([outcome()], 1, "a hang: nothing has moved", "a hang"),
])
def test_a_fault_that_hit_nobody_or_had_no_way_back_is_bad(tmp_path, outcomes, planned, trouble, said):
    found = bad(judge.findings(outcomes, planned, trouble, [leg(tmp_path / "run-1")], REFERENCE))
    assert len(found) == 1 and said in found[0]


@pytest.mark.parametrize(("changes", "said"), [
    ({"samples": 299}, "samples 299 for 300"), ({"epochs": 2}, "epochs 2 for 3"),
    ({"partial": 21}, "partial 21 for 20"), ({"unchecked": [1]}, "epochs [1] not verified"),
])
def test_a_lost_or_doubled_or_unchecked_sample_is_bad(tmp_path, changes, said):
    found = bad(judge.findings([outcome()], 1, "", [leg(tmp_path / "run-1", **changes)], REFERENCE))
    assert len(found) == 1 and said in found[0]


def test_a_run_without_a_ledger_or_an_end_is_bad(tmp_path):
    without = Leg(run_with(tmp_path / "run-1"), {"steps": 40}, set(), set())
    assert "no ledger" in bad(judge.findings([outcome()], 1, "", [without], REFERENCE))[0]
    assert bad(judge.findings([outcome()], 1, "", [], REFERENCE)) == ["0 trainings came to their end"]


def test_torn_saves_and_changed_bits_that_were_used_are_bad(tmp_path):
    def said(one):
        return bad(judge.findings([outcome(FLIP)], 1, "", [one], REFERENCE))

    flipped = leg(tmp_path / "a", {"step-00000006"}, {"step-00000006"})
    inject.flip(flipped.out, random.Random(1))
    assert not said(flipped)
    assert said(leg(tmp_path / "b", {"step-00000006"}, ())) == ["b: torn: step-00000006"]
    assert said(leg(tmp_path / "c", (), {"step-00000006"})) == ["c: used although a bit was changed: step-00000006"]
    torn = leg(tmp_path / "d")
    inject.flip(torn.out, random.Random(1))
    assert said(torn) == ["d: torn: step-00000006"]


@pytest.mark.parametrize(("moved", "bits", "caveats", "good", "said"), [
    (0.0, True, [], True, "to the bit"), (0.0, False, [], True, "to the bit"),
    (1e-6, True, [], False, "must not"), (1e-6, False, [], True, "is rounding"),
    (1e-3, False, [], False, "is rounding"), (1e-3, False, ["not independent of ranks: dropout"], True, "not judged"),
    (1e-3, True, ["not independent of ranks: dropout"], False, "must not"),
])
def test_weights(tmp_path, moved, bits, caveats, good, said):
    reference = {"w": np.ones(3)}
    found, = judge.same_weights([leg(tmp_path / "run-1")], reference, lambda out: {"w": reference["w"] + moved}, bits,
                                lambda: comparison.Tolerance.of(0.0), caveats)
    assert found.good == good and said in found.words


def test_a_training_that_magnifies_rounding_is_not_called_good(tmp_path):
    found, = judge.same_weights([leg(tmp_path / "run-1")], {"w": np.ones(3)}, lambda out: {"w": np.full(3, 1.01)},
                                False, lambda: comparison.Tolerance.of(1e-2), [])
    assert not found.good and "cannot be judged" in found.words


def test_the_table_has_a_row_for_each_kind():
    rows = judge.table([outcome(seconds=1.0), outcome(seconds=3.0, lost=5), outcome(hit=False, recovered=False,
                        seconds=None, lost=None), outcome(DISK), outcome(target=SUPERVISOR, moment=SAVE)])
    assert rows == [["disk full", "1", "1", "1", "2.0", "2.0", "1", "1"],
                    ["kill of the supervisor, in a save", "1", "1", "1", "2.0", "2.0", "1", "1"],
                    ["kill, between", "3", "2", "2", "2.0", "3.0", "3", "5"]]
    assert all(len(row) == len(judge.HEADERS) for row in rows)


class StubJob:
    """Stands in for the supervised training: ``ends`` with a status at once, or continues with processes that sleep."""

    def __init__(self, tmp_path, ends=None, trains=True):
        self.out, self.mark, self.ends, self.trains = tmp_path, "", ends, trains
        self.children, self.worlds, self.attempt = [], [], 0

    def at(self, out):
        self.out = out
        out.mkdir(parents=True, exist_ok=True)

    def hosts(self, ranks):
        self.worlds.append(ranks)

    def start(self, ranks, shares):
        self.mark = "there"

    def ranks(self):
        """Return one rank, started again where it has ended, with more finished steps at each look."""
        if not self.trains:
            return []
        if not self.children or self.children[-1].poll() is not None:
            self.children.append(subprocess.Popen(["sleep", "60"]))
            self.attempt += 1
        folder = self.out / "attempts" / f"{self.attempt:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step").write_text(f"{7 + 20 * self.attempt:<20d} {time.time():<20.6f}\n")
        pid = self.children[-1].pid
        return [look.Rank(pid, 0, os.getpid(), look._stat(pid)[2], folder)]

    def status(self):
        if len(self.children) > 3 and not (self.out / "completed.json").exists():
            (self.out / "completed.json").write_text(json.dumps({"steps": 40, "ledger": LEDGER}))
        return 0 if len(self.children) > 3 else self.ends if self.mark else 0

    def said(self, since=0):
        return b"its last words"

    said_bytes = resumed = lambda self, *_: 0
    left = refused = lambda self: set()

    def end(self):
        for child in self.children:
            child.kill()
            child.wait()


def campaign(job, tmp_path, hang_s=5.0):
    return Campaign(job, tmp_path / "runs", 3, hang_s, inject.LimitedFiles(), lambda text: None)


KILLS = [Fault(i, KILL, STEP, RANK, 0.5, 0.0, 1 + i, (1,) * (1 + i)) for i in range(3)]


def test_every_fault_is_brought_about_and_the_training_is_seen_to_go_on(tmp_path):
    job = StubJob(tmp_path)
    found = campaign(job, tmp_path)
    found.run(KILLS, 2, (1, 1))
    assert found.trouble == "" and [o.hit for o in found.outcomes] == [True] * 3
    assert [o.recovered for o in found.outcomes] == [True] * 3 and len(found.legs) == 1
    assert job.worlds == [1, 2, 3], "the ranks of the next attempt are said before the harm is done"
    events = [json.loads(line)["event"] for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert events == ["fault", "went on"] * 3


def test_a_supervisor_that_gives_up_ends_the_campaign(tmp_path):
    found = campaign(StubJob(tmp_path, ends=1), tmp_path)
    found.run(KILLS, 2, (1, 1))
    assert "ended by itself with status 1" in found.trouble and "its last words" in found.trouble


def test_a_training_that_does_not_move_is_a_hang(tmp_path):
    found = campaign(StubJob(tmp_path, trains=False), tmp_path, hang_s=0.3)
    found.run(KILLS, 2, (1, 1))
    assert found.trouble.startswith("a hang: nothing has moved for 0.3 s; no rank lives")
    assert bad(judge.findings(found.outcomes, 3, found.trouble, found.legs, REFERENCE))


@pytest.mark.parametrize(("argv", "said"), [
    ([], "no training stands after"), (["--kills", "3"], "no training stands after"),
    (["--kills", "3", "--", "verify"], "no training stands after"), (["--", "train"], "no fault is asked for"),
    (["--kills", "-1", "--", "train"], "--kills is -1"), (["--kills", "1", "--", "train", "--out", "x"], "--out"),
    (["--kills", "1", "--", "train", "--shares", "1:2"], "--shares"),
    (["--kills", "1", "--", "train", "--nonsense", "2"], "nonsense"),
    (["--kills", "1", "-H", "a:1,b:1", "--", "train"], "2 hosts"),
    (["--kills", "1", "--every-steps", "0", "--", "train"], "--every-steps is 0"),
])
def test_wrong_calls_are_mistakes_and_start_nothing(argv, said):
    with pytest.raises(UserError, match=said):
        chaos.main(argv)


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine").write_text(json.dumps({}))
    with pytest.raises(UserError, match="is not empty"):
        chaos.main(["--kills", "1", "--out", str(tmp_path), "--", "train"])
