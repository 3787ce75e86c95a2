"""The throttle: quotas, where control groups lie, and that none is left, whatever happens. No timings are judged."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks import throttle
from benchmarks.throttle import Home, Throttle, locate, quota
from hvdtrain.core.errors import UserError

V1 = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def groups():
    """Skips where this user may make no groups; afterwards there must be as many as before."""
    reason = throttle.available()
    if reason:
        pytest.skip(f"processors cannot be throttled here: {reason}")
    parent = throttle._home().parent
    before = set(parent.glob(f"{throttle.PREFIX}{os.getpid()}-*"))
    yield parent
    assert set(parent.glob(f"{throttle.PREFIX}{os.getpid()}-*")) == before


@pytest.mark.parametrize("speed, threads, expected", [
    (1.0, 1, None), (0.4, 1, (4_000, 10_000)), (0.4, 2, (8_000, 10_000)), (0.9, 4, (36_000, 10_000)),
    (0.05, 1, (5_000, 100_000)), (0.1, 1, (1_000, 10_000)), (0.0001, 1, (1_000, 1_000_000))])
def test_a_speed_is_so_much_time_of_so_many_cores(speed, threads, expected):
    assert quota(speed, threads) == expected


@pytest.mark.parametrize("mounts, own, expected", [
    (V1, "4:cpu,cpuacct:/user.slice\n0::/x\n", (1, "/sys/fs/cgroup/cpu,cpuacct/user.slice")),
    (V1, "4:cpu,cpuacct:/\n", (1, "/sys/fs/cgroup/cpu,cpuacct")),
    (V2, "0::/user.slice/run-7:1.scope\n", (2, "/sys/fs/cgroup/user.slice/run-7:1.scope")),
    (V2, "0::/../../elsewhere\n", (2, "/sys/fs/cgroup")),
    (V1.replace(" / /sys/fs/cgroup/cpu,", " /docker/a /sys/fs/cgroup/cpu,"), "4:cpu:/docker/a/b\n",
     (1, "/sys/fs/cgroup/cpu,cpuacct/b")),
    (V2.replace("/sys/fs/cgroup", "/a\\040b"), "0::/\n", (2, "/a b")),
    (V1.splitlines()[0], "4:cpu:/\n", None), ("", "", None)])
def test_where_the_groups_lie(mounts, own, expected):
    found = locate(mounts, own)
    assert (found and (found[0], str(found[1]))) == expected


@pytest.mark.parametrize("speed, expected", [(0.25, "2500 10000"), (1.0, "max 10000")])
def test_version_2_gets_both_numbers_in_one_file(speed, expected, tmp_path):
    with Throttle([0.5], home=Home(2, tmp_path, tmp_path)) as made:
        made.set(0, speed)
        assert (made.paths[0] / "cpu.max").read_text() == expected
        (made.paths[0] / "cpu.max").unlink()  # a control file, which would not stand in the way of rmdir
    assert not list(tmp_path.iterdir())


def test_processes_enter_change_speed_and_come_back(groups):
    child = subprocess.Popen([sys.executable, "-c", "import sys; from benchmarks.throttle import enter\n"
                              "enter(sys.argv[1]); print('in', flush=True); sys.stdin.read()", str(groups)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "in\n"
        with Throttle([0.5, 0.25]) as made:
            made.put(1, [child.pid, 2**22 + 1])
            assert (made.paths[1] / "cgroup.procs").read_text().split() == [str(child.pid)]
            assert (made.paths[0] / "cgroup.procs").read_text() == ""
            made.set(1, 1.0)
            made.set(1, 0.05)
            assert made.speeds == [0.5, 0.05]
            paths = made.paths
        assert not any(path.exists() for path in paths) and child.poll() is None
        assert str(child.pid) in (throttle._home().own / "cgroup.procs").read_text().split()
    finally:
        child.kill()
        child.communicate()


def test_the_groups_go_when_the_work_fails(groups):
    with pytest.raises(ZeroDivisionError), Throttle([0.5, 1.0]) as made:
        paths = made.paths
        assert len(paths) == 2 and all(path.exists() for path in paths)
        1 / 0
    assert not any(path.exists() for path in paths)


def test_groups_of_one_who_was_killed_are_swept_and_others_are_not(groups):
    hold = ("import sys; from benchmarks.throttle import Throttle\n"
            "with Throttle([0.5]) as made: print(made.paths[0], flush=True); sys.stdin.read()")
    child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        path = groups / os.path.basename(child.stdout.readline().strip())
        throttle.sweep(throttle._home())
        assert path.exists(), "its owner lives"
        child.kill()
        child.communicate()
        assert path.exists()
        ends_at = time.monotonic() + 5
        while path.exists() and time.monotonic() < ends_at:
            throttle.sweep(throttle._home())
        assert not path.exists()
    finally:
        child.kill()
        child.communicate()


def test_where_there_are_no_groups_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(throttle, "locate", lambda *texts: None)
    assert throttle.available() == "there is no cpu control group"
    monkeypatch.setattr(throttle, "locate", lambda *texts: (2, tmp_path / "own"))
    assert "not handed down" in throttle.available()
    monkeypatch.setattr(throttle, "locate", lambda *texts: (1, tmp_path / "gone"))
    assert "No such file" in throttle.available()
    with pytest.raises(UserError, match="Run as root, or emulate"), Throttle([0.5]):
        pass
    with pytest.raises(UserError, match="cannot be entered: No such file"):
        throttle.enter(tmp_path / "gone")


def test_a_plain_folder_is_no_group(tmp_path):
    with pytest.raises(UserError, match="cannot be entered"):
        throttle.enter(tmp_path)
    assert not list(tmp_path.iterdir())
