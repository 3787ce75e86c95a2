"""Settings by the name of a host or device: what a name means, which one counts, and what runs make of it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import config, lockstep, make_model, samples

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.topology import arrange
from hvdtrain.commands.train import parse
from hvdtrain.config import Config, RebalanceConfig
from hvdtrain.config import yaml_file as recipe
from hvdtrain.config.placed import RankPlace, absent, as_yaml, by_rank, entries, meaning
from hvdtrain.core.errors import UserError
from hvdtrain.engine import loop
from hvdtrain.engine.compare_ranks import resolved_config

H200 = RankPlace("node1.cluster.org", "cuda", "NVIDIA H200")
A100 = RankPlace("node2", "cuda", "NVIDIA A100-SXM4-40GB")
OLD = RankPlace("old", "cpu", "Intel(R) Xeon(R) CPU E5-2680")


@pytest.mark.parametrize("name, place, want", [
    ("node1.cluster.org", H200, 0), ("node1", H200, 0), ("NODE1", H200, 0), ("node2.cluster.org", A100, 0),
    ("node1.other.org", H200, -1), ("node", H200, -1), ("node11", H200, -1),
    ("NVIDIA H200", H200, 1), ("H200", H200, 2), ("h200", H200, 2), ("H20", H200, -1), ("A100", A100, 2),
    ("A10", A100, -1), ("A100-SXM4", A100, 2), ("nvidia", H200, 2), ("xeon", OLD, 2), ("E5-2680", OLD, 2),
    ("cuda", H200, 3), ("gpu", H200, 3), ("gpu", OLD, -1), ("cpu", replace(OLD, device="unknown"), 3),
    ("cpu", A100, -1), ("*", OLD, 4), ("", OLD, -1), ("a.b", RankPlace("a", "cpu", ""), 0),
    ("a", RankPlace("", "cpu", ""), -1),
])
def test_what_a_name_means(name, place, want):
    assert meaning(name, place) == want


def test_the_more_particular_name_counts():
    given_ = {"*": 0, "gpu": 1, "NVIDIA": 2, "NVIDIA H200": 3, "node2": 4}
    assert by_rank("k", given_, [H200, A100, OLD, replace(A100, node="node3")]) == [3, 4, 0, 2]


def test_two_names_of_one_kind_are_refused_where_they_differ():
    assert by_rank("shares", {"A100": 1, "SXM4": 1}, [A100]) == [1]
    with pytest.raises(UserError, match="shares has different values for rank 1 on node2 .* by 'A100' and by "
                                        "'SXM4'.*one part of a dev"):
        by_rank("shares", {"A100": 1, "SXM4": 2, "*": 1}, [OLD, A100])


def test_a_rank_that_nothing_names_is_an_error_and_a_name_without_ranks_is_none():
    assert by_rank("shares", {"node2": 1, "away": 5}, [A100, A100]) == [1, 1]
    assert absent({"node2": 1, "away": 5, "*": 1}, [A100]) == ["away"]
    with pytest.raises(UserError) as caught:
        by_rank("shares", {"odl": 1, "node2": 3}, [A100, OLD])
    assert "rank 1 on old" in str(caught.value) and "did you mean 'old'" in str(caught.value)
    assert by_rank("limit", {"node2": 64}, [A100, OLD], rest=0) == [64, 0]


def facts(*places):
    return [DeviceFacts(place.kind, place.device, "") for place in places]


def spelled(settings, *places):
    notes = []
    topology = arrange([(place.node, [0], 9.0) for place in places])
    return resolved_config(settings.check(), topology, facts(*places), notes), notes


def test_all_three_settings_follow_the_ranks_that_there_are():
    settings = Config(shares={"node2": 3, "old": 1}, precision="cpu=fp32,gpu=bf16",
                      rebalance=RebalanceConfig(max_micro_batch={"old": 8}))
    made, notes = spelled(settings, A100, replace(OLD, device="unknown"))
    assert (made.shares, made.precision, made.rebalance.max_micro_batch) == ([3, 1], "bf16:fp32", [0, 8]) and not notes
    made, notes = spelled(settings, A100, A100, A100)
    assert (made.shares, made.precision, made.rebalance.max_micro_batch) == ([3, 3, 3], "bf16:bf16:bf16", [0, 0, 0])
    assert notes == ["precision: 'cpu' means no rank of this run", "rebalance.max_micro_batch: 'old' means no rank of "
                     "this run", "shares: 'old' means no rank of this run"]
    plain = Config(shares=[1, 2])
    assert spelled(plain, A100, OLD) == (plain, [])


def test_no_names_at_all_are_no_setting():
    made, notes = spelled(config(shares={}, precision={}, rebalance=RebalanceConfig(max_micro_batch={})), H200, OLD)
    assert (made.shares, made.precision, made.rebalance.max_micro_batch, notes) == ([], "fp32", [], [])


def test_auto_may_be_one_of_several_by_name():
    from hvdtrain.parallel.precision import resolve

    made, _ = spelled(Config(precision={"old": "fp16", "*": "auto"}), A100, OLD)
    devices = [DeviceFacts("cuda", "NVIDIA A100", "sm_80"), DeviceFacts("cpu", "Xeon", "x86_64")]
    assert resolve(made.precision, devices) == ["bf16", "fp16"]


# --- where they are given --------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="ascii", exclude_characters=",=", exclude_categories=["Cc"]), min_size=1,
                max_size=12).filter(lambda name: name == name.strip() and name[0] not in "{[")


@given(st.dictionaries(NAMES, st.integers(0, 1000), min_size=1, max_size=5))
def test_the_text_form_means_the_mapping(values):
    text = ",".join(f"{name}={value}" for name, value in values.items())
    assert entries(text) == {name: str(value) for name, value in values.items()}
    assert json.loads(as_yaml(text)) == recipe.load(as_yaml(text), "text") == values


@pytest.mark.slow
@pytest.mark.parametrize("argv, name, value", [
    (["--shares", "fast=3,old=1"], "shares", {"fast": 3.0, "old": 1.0}),
    (["--shares", "{fast: 3}"], "shares", {"fast": 3.0}),
    (["--precision", "cpu=fp32, NVIDIA H200=bf16"], "precision", {"cpu": "fp32", "NVIDIA H200": "bf16"}),
    (["--precision", "{cpu: fp16}"], "precision", {"cpu": "fp16"}),
    (["--precision", "bf16:fp32"], "precision", "bf16:fp32"),
])
def test_command_line_environment_file_and_print_config_agree(argv, name, value, tmp_path, capsys):
    assert getattr(parse(argv, {}), name) == value
    assert getattr(parse([], {f"HVDTRAIN_{name.upper()}": argv[1]}), name) == value
    assert parse([*argv, "--print_config"], {}) is None
    path = tmp_path / "again.yaml"
    path.write_text(capsys.readouterr().out)
    assert getattr(parse(["--config", str(path)], {}), name) == value
    assert getattr(Config(**{name: value}).check(), name) == value


@pytest.mark.parametrize("argv, words", [
    (["--shares", "fast=1,fast=2"], "names 'fast' twice"), (["--shares", "=3"], "NAME=VALUE"),
    (["--shares", "fast="], "NAME=VALUE"), (["--shares", "fast=x"], "a number for each name"),
    (["--shares", "fast=0"], "at least one above 0"), (["--shares", "fast=-1,old=2"], "0 or more"),
    (["--shares", "fast=.nan"], "finite"), (["--precision", "cpu=fp31"], "fp32"),
    (["--rebalance.max_micro_batch", "old=1.5"], "a whole number for each name"),
    (["--rebalance.max_micro_batch", "old=-1"], "0 or more"), (["--precision", "cpu"], "by host or device"),
])
def test_what_is_refused(argv, words):
    with pytest.raises(UserError, match=words):
        parse(argv, {})


# --- runs ------------------------------------------------------------------------------------------------------------

def test_a_run_is_cut_by_names_and_keeps_them_in_its_records(tmp_path):
    settings = config(out=str(tmp_path / "run"), epochs=1, global_batch=8, shares={"*": 2, "nobody": 9},
                      precision={"*": "fp32"})

    def work(run):
        loop.fit(run)
        return run.feed.cut_at(0).shares_P, run.timeline.totals.own_samples, run.config.shares

    seen = lockstep(3, settings, lambda rank: make_model("numpy"), samples(24), work)
    assert [shares for shares, _, _ in seen] == [(2.0, 2.0, 2.0)] * 3 and sum(own for _, own, _ in seen) == 24
    kept = recipe.read(str(tmp_path / "run/config.yaml"))
    assert kept["shares"] == {"*": 2, "nobody": 9} == seen[0][2]
    with pytest.raises(UserError, match="shares has no entry for rank 0 on"):
        lockstep(2, replace(settings, shares={"nobody": 1}), lambda rank: make_model("numpy"), samples(24), work)
