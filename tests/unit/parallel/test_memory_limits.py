"""Memory that hosts, control groups of both versions and limits of a process leave, and micro-batches without room
for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import apart, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.cluster.machine import memory
from hvdtrain.engine import loop
from hvdtrain.parallel.recovery import MemoryGuard

KB, HOST = 1024, 4000


class Machine:
    """Made-up /proc and /sys/fs/cgroup in which a process is in ``group`` of version 1 or 2."""

    def __init__(self, root: Path, version: int = 2, group: str = "/job/step") -> None:
        self.proc, self.groups, self.version = root / "proc", root / "group", version
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 9000 kB\nMemAvailable:    {HOST} kB\n")
        status = {"VmHWM": 150, "VmSize": 500, "VmRSS": 100, "VmData": 60}
        (self.proc / "self" / "status").write_text("".join(f"{k}:\t {n} kB\n" for k, n in status.items()))
        (self.proc / "self" / "cgroup").write_text(f"0::{group}\n" if version == 2 else
                                                   f"5:cpu,cpuacct:/other\n4:memory:{group}\n0::/\n")

    def limit(self, group: str, most: Any, used: int, idle: int = 0, **more: Any) -> None:
        folder = self.groups / ("memory" if self.version == 1 else "") / group.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current", "inactive_file") if self.version == 2 else (
            "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (folder / names[0]).write_text(f"{most}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 9\nactive_file 7\n{names[2]} {idle}\nunevictable 0\n")
        for name, value in more.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    @property
    def left(self) -> int | None:
        return memory.left_bytes(str(self.proc), str(self.groups))

    @property
    def limited(self) -> bool:
        return memory.limited(str(self.proc), str(self.groups))


@pytest.mark.parametrize("version", (1, 2))
def test_the_tightest_group_around_a_process_counts(tmp_path, version):
    machine = Machine(tmp_path, version)
    assert machine.left == HOST * KB and not machine.limited
    none = "max" if version == 2 else 0x7FFFFFFFFFFFF000
    machine.limit("/job/step", none, 3000 * KB)
    assert machine.left == HOST * KB and not machine.limited
    machine.limit("/job", 2000 * KB, 500 * KB)
    assert machine.left == 1500 * KB and machine.limited
    machine.limit("/job/step", 1000 * KB, 900 * KB)
    assert machine.left == 100 * KB
    machine.limit("/job/step", 1000 * KB, 900 * KB, idle=300 * KB)
    assert machine.left == 400 * KB, "pages of files that go when memory is wanted"
    machine.limit("/job", 2000 * KB, 2100 * KB)
    assert machine.left == 0


def test_a_group_that_is_slowed_down_before_its_limit_has_that_for_one(tmp_path):
    machine = Machine(tmp_path)
    machine.limit("/job/step", "max", 100 * KB, high=300 * KB)
    assert machine.left == 200 * KB and machine.limited
    machine.limit("/job/step", 250 * KB, 100 * KB, high="max")
    assert machine.left == 150 * KB


def test_groups_that_cannot_be_read_are_none(tmp_path):
    machine = Machine(tmp_path, group="/../outside")
    (machine.groups / "outside").mkdir(parents=True)
    (machine.groups / "outside" / "memory.max").write_text("12 apples\n")
    (machine.groups / "outside" / "memory.current").write_text("1\n")
    assert machine.left == HOST * KB
    (machine.proc / "meminfo").unlink()
    assert machine.left is None and not machine.limited


def test_limits_of_the_process_itself_count(tmp_path):
    machine = Machine(tmp_path)
    limits = machine.proc / "self" / "limits"
    limits.write_text("Limit  Soft Limit  Hard Limit  Units\nMax data size    unlimited   unlimited  bytes\n"
                      f"Max address space    {800 * KB}    unlimited   bytes\n")
    assert machine.left == 300 * KB and not machine.limited, "it is refused memory, and lives"
    assert memory.left_alive_bytes(str(machine.proc), str(machine.groups)) == HOST * KB
    limits.write_text(f"Max data size    {70 * KB}   {90 * KB}  bytes\nMax address space  unlimited unlimited bytes\n")
    assert machine.left == 10 * KB


def guard(left: int | None = 100, local: int = 1) -> tuple[MemoryGuard, SimpleNamespace]:
    now = SimpleNamespace(held=1000, peak=1000, left=left)
    return MemoryGuard(local, lambda: now.held, lambda: now.peak, lambda: now.left), now


def test_a_size_that_is_reckoned_not_to_fit_is_refused_and_a_smaller_one_is_not():
    one, _ = guard(left=100)
    one.check(64)  # nobody knows
    one.estimated = lambda n: 900 + 10 * n
    with pytest.raises(MemoryError, match="a micro-batch of 21 would take .* more than this process uses"):
        one.check(21)
    one.check(20)
    two, _ = guard(left=100, local=2)
    two.estimated = one.estimated
    with pytest.raises(MemoryError, match="is left for 2 ranks"):
        two.check(20)
    unknown, _ = guard(left=None)
    unknown.estimated = one.estimated
    unknown.check(10**9)


def test_what_a_process_has_held_once_it_can_hold_again(monkeypatch):
    from hvdtrain.parallel import recovery as room

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(room.time, "monotonic", lambda: clock.now)
    one, now = guard(left=10**6)
    one.check(8)
    now.peak = 1800
    one.ran(8)
    now.held, now.left = 1800, 0
    clock.now += 1
    one.check(8)
    with pytest.raises(MemoryError):
        one.check(9)
    now.held, now.left = 1100, 500  # it gave memory back, and others took it
    one.check(4)
    one.check(8)  # looked at a moment ago
    clock.now += 1
    with pytest.raises(MemoryError):
        one.check(8)


def test_what_a_process_held_before_it_trained_is_not_what_a_micro_batch_takes(monkeypatch):
    from hvdtrain.parallel import recovery as room

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(room.time, "monotonic", lambda: clock.now)
    one, now = guard(left=500)
    now.peak = 5000  # data were read
    for _ in range(3):
        clock.now += 1
        one.check(8)
        one.ran(8)
    one.estimated = lambda n: 1000 + 100 * n
    one.ran(9)
    clock.now += 1
    with pytest.raises(MemoryError):
        one.check(9)


def test_a_rank_whose_host_has_no_room_goes_on_with_smaller_micro_batches(tmp_path):
    """Room for 4 samples; the group ends nobody, since nothing larger is computed."""
    def work(run: Any) -> Any:
        if run.control.rank == 1:
            run.recovery.guard.estimated = lambda n: 900 + 100 * n
            run.recovery.guard._held, run.recovery.guard._left = (lambda: 1000), (lambda: 2 * 350)
            run.recovery.guard._peak = lambda: 1300
        computed, own = [], run.parts.stage.run
        run.parts.stage.run = lambda micro, *rest: (computed.append(len(micro[0])), own(micro, *rest))[1]
        loop.fit(run)
        return weights(run), computed

    settings = config(max_steps=4, global_batch=24, out=str(tmp_path / "ample"))
    want = lockstep(2, settings, lambda r: make_model("numpy"), samples(96), lambda run: weights(fitted(run)))
    tight = replace(settings, out=str(tmp_path / "tight"))
    (first, sizes), (second, small) = lockstep(2, tight, lambda r: make_model("numpy"), samples(96), work)
    assert set(sizes) == {12} and set(small) == {3}, "12 and then 6 were refused before they were computed"
    assert apart(first, second) == 0 and apart(first, want[0]) < 1e-12
