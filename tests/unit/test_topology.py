"""Hosts, cores and threads."""

import pytest

from hvdtrain.cluster.topology import affinity, arrange, compute_threads, cpu_quota, survey
from hvdtrain.collectives.lockstep import LockstepWorld

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


def test_cpu_quota_of_both_versions(tmp_path):
    assert cpu_quota(str(tmp_path)) == NO
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(str(tmp_path)) == NO
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert cpu_quota(str(tmp_path)) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(str(tmp_path)) == NO
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(str(tmp_path)) == 4.0


def test_survey_is_the_same_everywhere():
    results = LockstepWorld(3).run(lambda control, wire: survey(control))
    assert results[0] == results[1] == results[2]
    assert results[0].hosts[0].ranks == (0, 1, 2) and results[0].hosts[0].cores <= len(affinity())
