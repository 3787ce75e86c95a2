"""Host lists and host files: what is read, what is refused, and where ranks go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.launchers import HostSlots
from hvdtrain.cluster.launchers.spec import bounded, is_address, parse_hostfile, parse_hosts, place
from hvdtrain.core.errors import UserError


@pytest.mark.parametrize(("text", "hosts"), [
    ("fast:4,old:2", [("fast", 4), ("old", 2)]), ("a", [("a", 1)]), ("a,b", [("a", 1), ("b", 1)]),
    ("a:1, b:2", [("a", 1), ("b", 2)]), ("node-1.cluster_x.example:16", [("node-1.cluster_x.example", 16)]),
    ("gpu[08-10]:4,old", [("gpu08", 4), ("gpu09", 4), ("gpu10", 4), ("old", 1)]),
    ("a:1,r[1-2]n[0,3]:2", [("a", 1), ("r1n0", 2), ("r1n3", 2), ("r2n0", 2), ("r2n3", 2)]),
    ("10.0.0.1:2", [("10.0.0.1", 2)]), ("a:2,b:1,a:1", [("a", 3), ("b", 1)])])
def test_a_host_list_is_read(text, hosts):
    assert parse_hosts(text) == tuple(HostSlots(*host) for host in hosts)


BAD = ["", ",", "a,,b", "-oProxyCommand=id:1", "-a", "a;id", "a$(id)", "a`id`", "$HOME", "a b:2", "a|b", "a&b", "a>b",
       "a\nb", "a'b", 'a"b', "a\\b", "a*", "a?", "a/b", "a=b", "a%b", "a(b)", "a{b}", "~", "#a", "a:", "a:0", "a:-1",
       "a:x", "a:1.5", "a:99999", "a:²", "user@a:2", "a@b", "[::1]:2", "::1", "fe80::1%eth0", "a:1:2", "é", "a-",
       "a[", "a]", "a[]", "a[1-]", "a[3-1]", "a[1-2]:x", "a[1-2", "[1-2]", "a[x]", "@a[1-2]", "a[1-2]:1:2", "a[1-2]!b",
       "a[0-99999999]", "a[0-9999]b[0-9999]", "a[1-2]-", "a[99999999999999999999-9]",
       ".a", "300.1.1.1", "a:4096,a:4096"]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_plain_host_is_refused_and_never_passed_on(text):
    with pytest.raises(UserError) as caught:
        parse_hosts(text)
    assert caught.value.expected and caught.value.do
    with pytest.raises(UserError):
        parse_hosts(f"good:1,{text}" if text else "good:1,")


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text):
    try:
        hosts = parse_hosts(text)
    except UserError:
        return
    for host in hosts:
        assert host.slots >= 1
        assert not host.name.startswith("-")
        assert set(host.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_a_user_is_told_of_ssh_config():
    with pytest.raises(UserError, match="ssh/config"):
        parse_hosts("me@fast:4")


def test_a_host_file_is_read_in_every_form():
    text = "# two kinds\n\nfast slots=4  # A100\nold:2\r\none\nfast max_slots=9 slots=1\n"
    assert parse_hostfile(text, "F") == (HostSlots("fast", 5), HostSlots("old", 2), HostSlots("one", 1))


def test_a_line_per_slot_adds_up():
    assert parse_hostfile("a\na\nb\na\n", "F") == (HostSlots("a", 3), HostSlots("b", 1))


@pytest.mark.parametrize("line", ["a slots=x", "a slots=", "a slots=0", "a slots", "a:2 slots=2", "a cpu=2", "a b",
                                  "-a slots=1", "a;id slots=1", "a binding=user:0", "u@a slots=1", "a slots=2 slots=3",
                                  "a\u2028b slots=2"])
def test_a_wrong_line_is_named(line):
    with pytest.raises(UserError, match="F, line 2"):
        parse_hostfile(f"good slots=1\n{line}\n", "F")


def test_a_line_ends_where_it_does_for_every_other_program():
    for odd in "\u2028\x85\x0c":
        assert parse_hostfile(f"a slots=2 # one{odd}b slots=9\n", "F") == (HostSlots("a", 2),)


def test_more_ranks_than_anybody_means_are_refused():
    with pytest.raises(UserError, match="for 1,052,672 ranks"):
        bounded(tuple(HostSlots(f"h{i}", 4096) for i in range(257)))


def test_an_empty_host_file_is_refused():
    with pytest.raises(UserError, match="no host"):
        parse_hostfile("# nothing\n", "F")


@pytest.mark.parametrize(("ranks", "placed"), [(6, "a:4 b:2"), (5, "a:4 b:1"), (4, "a:4"), (1, "a:1"), (7, "a:5 b:2"),
                                               (8, "a:5 b:3"), (9, "a:6 b:3"), (12, "a:8 b:4")])
def test_ranks_fill_slots_in_order_and_beyond_them_in_proportion(ranks, placed):
    assert " ".join(map(str, place((HostSlots("a", 4), HostSlots("b", 2)), ranks, True))) == placed


def test_more_ranks_than_slots_must_be_said():
    with pytest.raises(UserError, match="--oversubscribe"):
        place((HostSlots("a", 4), HostSlots("b", 2)), 7, False)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 200))
def test_every_rank_has_a_place(slots, ranks):
    hosts = tuple(HostSlots(f"h{i}", n) for i, n in enumerate(slots))
    placed = place(hosts, ranks, True)
    assert sum(host.slots for host in placed) == ranks and all(host.slots for host in placed)
    if ranks >= sum(slots):
        assert [host.name for host in placed] == [host.name for host in hosts]
        assert all(abs(p.slots - ranks * n / sum(slots)) < 1 for p, n in zip(placed, slots))


def test_addresses():
    assert is_address("10.0.0.1") and not is_address("a.b.c.d") and not is_address("10.0.0")
