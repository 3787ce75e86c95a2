"""``bench scale``: predictions from the steps of copies and a job's transport, the picture, and what is refused."""

import xml.etree.ElementTree as ElementTree

import pytest

from hvdtrain.commands.bench import scale
from hvdtrain.commands.bench.scale import ScalePoint, picture, predicted
from hvdtrain.core.errors import UserError

FACTS = {"lines": [(16, 0.026), (32, 0.042), (64, 0.074)], "cores": [4], "ranks": 2, "wire": "mpi", "overlaps": False,
         "buckets": [1 << 20], "agreement_s": 0.0,
         "transport": {"link": {"alpha_s": 1e-4, "beta_s_per_byte": 1e-9}, "busy_cores": 0.0}, "outside_s": 0.0,
         "alone": {"share": 64, "seconds": 4.0, "steps": 50, "parts_s": {"data": 0.001}}}


def test_an_exchange_takes_what_was_measured():
    """On a host with a core for each rank, and on one where they shared cores while it was measured."""
    for ranks, cores in ((2, 4), (4, 2)):
        link = {"alpha_s": 0.5, "beta_s_per_byte": 0.0}
        slow = {**FACTS, "ranks": ranks, "cores": [cores], "transport": {"link": link, "busy_cores": 0.0}}
        points = [ScalePoint("weak", ranks, 64 * ranks, 0.0, 64 * cores / 0.080)] * 2
        free, found = (64 * ranks / predicted(facts, point, 1) for facts, point in zip(
            ({**slow, "buckets": []}, slow), points))
        assert found - free == pytest.approx(0.5)


def test_predictions():
    alone = predicted(FACTS, ScalePoint("weak", 1, 64, 0.0, 64 / 0.080), 1)
    assert alone == pytest.approx(64 / 0.080), "the step that was measured: what is no forward and backward stays"
    exchange_s = 1e-4 + (1 << 20) * 1e-9
    two = predicted(FACTS, ScalePoint("weak", 2, 128, 0.0, 128 / 0.080), 1)
    assert two == pytest.approx(128 / (0.080 + exchange_s), rel=1e-3)
    slowed = predicted(FACTS, ScalePoint("weak", 2, 128, 0.0, 128 / 0.090), 1)
    assert slowed == pytest.approx(128 / (0.090 + exchange_s), rel=1e-3), "copies that slow one another down"
    crowded = predicted({**FACTS, "cores": [1]}, ScalePoint("weak", 2, 128, 0.0, 64 / 0.080), 1)
    assert crowded < 0.6 * two, "two ranks share a core"
    more = {**FACTS, "agreement_s": 0.002, "outside_s": 0.003}
    slower = predicted(more, ScalePoint("weak", 2, 128, 0.0, 128 / 0.080), 1)
    assert 128 / slower - 128 / two == pytest.approx(0.005), "agreements and the ends of epochs"
    strong = predicted(FACTS, ScalePoint("strong", 4, 64, 0.0, 64 / 0.032), 1)
    assert alone < strong < 4 * alone
    unknown = {name: value for name, value in FACTS.items() if name != "transport"}
    assert predicted(unknown, ScalePoint("weak", 2, 128, 0.0, 1.0), 1) is None


def test_the_picture_is_svg_with_every_point():
    points = [ScalePoint(way, n, 64 * n, 900.0 * n, 1000.0 * n, 950.0 * n if n > 1 else None)
              for way in scale.WAYS for n in (1, 2, 4)]
    root = ElementTree.fromstring(picture("a < b", points))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2 * (3 + 3 + 2)
    rows = scale._rows(points)
    assert rows[2][4:7] == ["4.00", "4,000", "90.0"] and rows[0][7:] == ["-", "-"]


@pytest.mark.parametrize("argv, words", [(["--np", "0"], "--np is"), (["--nq", "1"], "no option"),
                                         (["--", "--lrr", "1"], "no option --lrr")])
def test_mistakes(argv, words):
    with pytest.raises(UserError, match=words):
        scale.main(argv)


def test_under_a_launcher_it_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without mpirun"):
        scale.main([])
