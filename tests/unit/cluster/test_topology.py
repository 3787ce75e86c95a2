"""Hosts, cores and threads."""

import pytest

from hvdtrain.cluster.machine.usage import cpu_quota, tightest_quota
from hvdtrain.cluster.topology import affinity, arrange, compute_threads, survey
from hvdtrain.comm.collectives.lockstep import LockstepWorld

NO = float("inf")


def test_ranks_that_share_all_cores():
    topology = arrange([("a", range(8), NO), ("a", range(8), NO)])
    assert topology.hosts[0].cores == 8 and topology.size == 2 and topology.homogeneous
    assert topology.describe() == "1 host: a (ranks 0-1, 8 cores)"


def test_ranks_bound_to_a_core_each_add_up():
    assert arrange([("a", [0], NO), ("a", [4], NO)]).hosts[0].cores == 2


def test_uneven_hosts_and_round_robin_ranks():
    topology = arrange([("a", [0, 1], NO), ("b", [0], NO), ("a", [0, 1], NO)])
    assert not topology.homogeneous
    assert topology.host_of(2).node == "a" and topology.host_of(1).ranks == (1,)
    assert topology.describe() == "2 hosts: a (ranks 0,2, 2 cores), b (rank 1, 1 core)"


def test_a_quota_lowers_the_cores():
    assert arrange([("a", range(64), 2.5)]).hosts[0].cores == 2
    assert arrange([("a", range(64), 0.5)]).hosts[0].cores == 1


def test_many_hosts_are_cut_short():
    assert arrange([(f"n{i}", [0], NO) for i in range(12)]).describe().endswith(", and 4 more")


@pytest.mark.parametrize("bound, cores, local_size, asked, want", [
    (8, 8, 1, 0, 8), (8, 8, 2, 0, 4), (8, 8, 3, 0, 2), (2, 2, 4, 0, 1), (1, 8, 2, 0, 1), (4, 8, 2, 0, 4),
    (2, 2, 4, 3, 3)])
def test_compute_threads(bound, cores, local_size, asked, want):
    assert compute_threads(bound, cores, local_size, asked) == want


def one(folder, quota_us, period_us=100_000):
    """Make a group of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period_us}\n")


def two(folder, text):
    """Make a group of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text)


def test_a_containers_quota_is_seen_at_the_top(tmp_path):
    assert tightest_quota(str(tmp_path), str(tmp_path)) == (NO, "")
    one(tmp_path / "cpu", -1)
    assert cpu_quota(str(tmp_path), "/nowhere") == NO
    one(tmp_path / "cpu", 150_000)
    assert tightest_quota(str(tmp_path), "/nowhere") == (1.5, str(tmp_path / "cpu"))
    two(tmp_path / "v2", "max 100000\n")
    assert cpu_quota(str(tmp_path / "v2"), "/nowhere") == NO
    two(tmp_path / "v2", "400000 100000\n")
    assert cpu_quota(str(tmp_path / "v2"), "/nowhere") == 4.0


@pytest.mark.parametrize("line, folder, version", [
    ("4:cpu,cpuacct:/jobs/7", "cpu,cpuacct/jobs/7", one), ("1:cpu:/jobs/7", "cpu/jobs/7", one),
    ("1:cpu:/jobs/7", "cpu/jobs", one), ("0::/jobs/7", "jobs/7", two), ("0::/jobs/7", "jobs", two),
    ("0::/jobs/7", "unified/jobs/7", two)])
def test_the_quota_of_the_own_group_and_of_those_around_it(tmp_path, line, folder, version):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:memory:/other\n{line}\n")
    groups = tmp_path / "groups"
    one(groups / "cpu" / "other", 10_000)
    assert cpu_quota(str(groups), str(tmp_path)) == NO, "a group that this process is not in"
    version(groups / folder, 30_000 if version is one else "30000 100000\n")
    assert tightest_quota(str(groups), str(tmp_path)) == (0.3, str(groups / folder))
    one(groups / "cpu", 20_000)
    assert cpu_quota(str(groups), str(tmp_path)) == 0.2, "the tightest"


def test_quotas_of_groups_of_their_own_add_up():
    assert arrange([("a", range(8), 4.0, "pod"), ("a", range(8), 4.0, "pod")]).hosts[0].cores == 4
    assert arrange([("a", range(8), 2.0, "x"), ("a", range(8), 3.0, "y")]).hosts[0].cores == 5
    assert arrange([("a", range(8), 0.3, "x"), ("a", range(8), NO, "")]).hosts[0].cores == 8


def test_survey_is_the_same_everywhere():
    results = LockstepWorld(3).run(lambda control, wire: survey(control))
    assert results[0] == results[1] == results[2]
    assert results[0].hosts[0].ranks == (0, 1, 2) and results[0].hosts[0].cores <= len(affinity())
