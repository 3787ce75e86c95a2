"""`benchmarks forecast`: predictions from a job's calibration, command lines, and the table's verdict."""

import json

import pytest

from benchmarks import forecast
from benchmarks.forecast_rank import ours_row
from hvdtrain.core.errors import UserError


def phases(compute_s):
    return {"compute": compute_s, "data": 1e-3, "update": 2e-3, "wait": 0.0}


def calibration(hosts, slow=1.0):
    """Ranks of 10 ms + 1 ms a sample (the last one ``slow`` times that), sums of 1 ms + 10 ms a MB."""
    factors = [1.0] * (len(hosts) - 1) + [slow]
    runs = [{"batch": n, "beside_s": 0.0, "step_s": max(factors) * (10e-3 + n * 1e-3) + 4e-3,
             "phases": [phases(f * (10e-3 + n * 1e-3)) for f in factors]} for n in (4, 12)]
    link = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-8}
    sums = {"kind": "allreduce float32", "later": False, "calls": 2, "wire_bytes": 2e6}
    halves = {**sums, "kind": "alltoall", "wire_bytes": 1e6}
    wire = {"link": link, "busy_cores": 0.0, "overlaps": False, "buckets": [1000000, 1000000],
            "links": {"allreduce float32": link, "alltoall": link},
            "costs": {"none": {"name": "none", "codec_s": 0.0, "traffic": [sums], "wire_bytes": 2000000},
                      "fp16": {"name": "fp16", "codec_s": 3e-3, "traffic": [halves], "wire_bytes": 1000000}}}
    return {"event": "calibrated", "ranks": len(hosts), "cores": 2, "batch": 8, "hosts": hosts, "compute": runs,
            "transports": {"mpi": wire, "shared": wire}}


@pytest.mark.parametrize("row, ms", [
    ("mpi", 18 + 1 + 2 + 1 + 22),  # compute, input, update, agreement, two sums of 11 ms
    ("mpi+fp16", 18 + 1 + 2 + 1 + 12 + 3),
    ("mpi/zero2", 18 + 1 + 1 + 1 + 12 + 11),  # half an update; sums of half the bytes, then one gathering
])
def test_a_step_is_predicted_from_its_parts(row, ms):
    assert 1e3 * forecast.predict(calibration([0, 1]), row).mid_s == pytest.approx(ms)


def test_a_compressor_has_buckets_of_its_own():
    """Give it one bucket in place of two, whose requests start up once."""
    calibrated = calibration([0, 1])
    fp16 = calibrated["transports"]["mpi"]["costs"]["fp16"]
    fp16["buckets"], fp16["traffic"][0]["calls"] = [2000000], 1
    assert 1e3 * forecast.predict(calibrated, "mpi+fp16").mid_s == pytest.approx(18 + 1 + 2 + 1 + 11 + 3)


def test_zero_updates_and_copies_as_measured():
    calibrated = calibration([0, 1])
    calibrated["transports"]["mpi"]["shard"] = {"overlaps": False, "buckets": [1000000, 1000000],
                                                "updates_P": [5e-3, 4e-3], "copy_s": 3e-3}
    assert 1e3 * forecast.predict(calibrated, "mpi/zero2").mid_s == pytest.approx(18 + 1 + 5 + 1 + 12 + 11 + 3)


def test_of_one_rank_only_its_line_counts():
    assert 1e3 * forecast.predict(calibration([0]), "auto").mid_s == pytest.approx(18 + 1 + 2 + 1)


def test_a_static_balance_gives_a_slow_rank_less():
    calibrated = calibration([0, 0], slow=2.5)
    assert 1e3 * forecast.predict(calibrated, "shared").parts["compute"] == pytest.approx(18 * 1.75)
    off, static = (forecast.predict(calibrated, row).mid_s for row in ("shared", "shared@static"))
    # The fast rank computes all 16 samples in 26 ms; with equal shares the slow one takes 45.
    assert 1e3 * off == pytest.approx(45 + 4 + 22) and 1e3 * static == pytest.approx(26 + 4 + 22)
    planned = forecast.predict(calibrated, "shared@static", samples_P=[12, 4]).mid_s
    assert 1e3 * planned == pytest.approx(35 + 4 + 22)  # the slow rank: 2.5 (10 + 4)


def test_buckets_travel_once_backward_has_completed_them():
    """Two buckets of 11 ms each; backward takes 12 ms of the 18, and hands over the first one when it ends, or begins.
    """
    calibrated = calibration([0, 1])
    calibrated["transports"]["mpi"] |= {"overlaps": True, "ready": [1.0, 1.0]}
    late = forecast.predict(calibrated, "mpi").mid_s
    calibrated["transports"]["mpi"]["ready"] = [0.0, 1.0]
    assert 1e3 * late == pytest.approx(44) and 1e3 * (late - forecast.predict(calibrated, "mpi").mid_s) == (
        pytest.approx(11))


def test_a_pipeline_is_played_in_its_order():
    blocks = {"cost_s": [1.0, 3.0], "samples": 4.0, "starts": [0, 1], "order": "gpipe", "micros": 4,
              "cargo": [50000, 0], "parameters": [100, 300]}
    found = forecast.predict(calibration([0, 1]), "mpi/pipeline", blocks)
    # Micro-batches of 4 samples take 14 ms, a quarter of it on the first stage; messages take 1.5 ms.
    assert 1e3 * found.parts["compute"] == pytest.approx(4 * 14 / 2)
    assert 1e3 * found.mid_s == pytest.approx(3.5 + 2 * 1.5 + 4 * 10.5 + 3)
    # Two micro-batches of 4 took 8 ms more than 28: of that stages add 1/4 and 3/4 in three of four micro-batches.
    added = {**calibration([0, 1]), "accumulated": {"batch": 8, "beside_s": 18e-3, "step_s": 40e-3,
                                                    "phases": [phases(36e-3)] * 2}}
    found = forecast.predict(added, "mpi/pipeline", blocks)
    assert 1e3 * found.mid_s == pytest.approx(3.5 + 1.5 + 2 * 1.5 + 4 * (10.5 + 4.5) + 3)


def test_records_are_predicted_again_and_judged(tmp_path, capsys):
    def run(measured_ms):
        path = tmp_path / "r.jsonl"
        measured = {"step_s": measured_ms / 1e3, "beside_s": 18e-3}
        path.write_text(json.dumps({"framework": "torch", "case": "2 hosts", "row": "mpi", "workload": "gpt",
                                    "calibrated": calibration([0, 1]), "measured": measured}))
        return forecast.main(["--again", str(path)]), capsys.readouterr().out

    status, text = run(44.0)
    assert status == 0 and "off by 0.0 % (median)" in text
    status, text = run(30.0)
    assert status == 1 and "+46.7" in text
    with pytest.raises(UserError, match="cannot be read"):
        forecast.main(["--again", str(tmp_path / "none")])


def test_rows_name_transport_compression_balance_and_kind():
    assert ours_row("mpi+fp16@static/zero2") == {"wire": "mpi", "compression": "fp16", "balance": "static",
                                                 "kind": "zero2"}
    assert ours_row("shared") == {"wire": "shared", "compression": "none", "balance": "off", "kind": "whole"}


def test_two_hosts_are_started_by_their_script():
    args = forecast._parser().parse([])
    case = next(case for case in forecast.CASES if case.name == "2 hosts 1gbit")
    words = forecast._words(args, "torch", case, ["mpi"], "/tmp/x", ())
    assert words[0].endswith("two_hosts.sh") and words[1] == "1gbit" and "-np" in words
    assert words[-2:] == ["--row", "mpi"]
