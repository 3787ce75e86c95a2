"""Choice of compile auto from the ranks' times: pure."""

import math

from hvdtrain.planning.compile_choice import MARGIN, Tried, verdict, verdicts, words


def tried(kind, base, option, **more):
    return Tried(kind, tuple(base), tuple(option), **more)


def test_the_slowest_rank_of_a_kind_decides_by_the_middle_turn():
    fast = tried("cpu", (1.0, 1.0, 1.0), (0.5, 0.5, 0.5))
    slow = tried("cpu", (2.0, 2.0, 2.0), (1.5, 1.96, 9.0))
    assert verdict([fast]).kept and verdict([fast]).ratio == 0.5
    found = verdict([fast, slow])  # its ratios are 0.75, 0.98 and 4.5
    assert not found.kept and math.isclose(found.ratio, 0.98)
    assert (found.base_s, found.tried_s) == (2.0, 1.96)


def test_an_option_is_kept_from_the_margin_on():
    base = (1.0,) * 3
    assert verdict([tried("cpu", base, (1 - MARGIN,) * 3)]).kept
    assert not verdict([tried("cpu", base, (1 - MARGIN / 2,) * 3)]).kept


def test_kinds_choose_each_for_itself_and_what_one_rank_cannot_none_of_its_kind_does():
    rows = [tried("gpu", (1.0,), (0.5,)), tried("cpu", (1.0,), (0.5,)), Tried("cpu", why="there is no compiler")]
    found = verdicts(rows)
    assert list(found) == ["gpu", "cpu"] and found["gpu"].kept and not found["cpu"].kept
    said = words("compiled", rows, found)
    assert said[0].startswith("compiled is used on rank 0: ") and "500 ms" in said[0]
    assert said[1] == "compiled is left on ranks 1, 2: there is no compiler"


def test_ranks_of_one_kind_that_compiled_unlike_parts_use_none():
    """A rank recomputes another's work to the bit (`audit`)."""
    rows = [tried("cpu", (1.0,), (0.5,)), tried("cpu", (1.0,), (0.5,), left="block_1 (not compiled in time)")]
    assert not verdict(rows).kept
    assert "different parts" in verdict(rows).why and "block_1" in verdict(rows).why


def test_what_stays_as_it_was_is_told_and_ranks_without_samples_have_no_say():
    rows = [tried("cpu", (1.0,), (0.5,), left="norm (why)"), Tried("cpu")]
    found = verdicts(rows)
    assert found["cpu"].kept
    assert words("compiled", rows, found)[0].endswith("; not compiled: norm (why)")
    assert not verdict([Tried("cpu")]).kept
