"""`benchmarks saves`: its two cases on a small model, and the parts that its table tells."""

import json

import pytest

from benchmarks import saves


@pytest.mark.parametrize("case, more", [("often", ["--workload", "tiny", "--every", "5", "--steps", "20"]),
                                        ("large", ["--parameters", "4096", "--repeats", "2"])])
def test_a_case_tells_its_rows_and_keeps_a_record(tmp_path, capsys, case, more):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    file = tmp_path / "found.jsonl"
    assert saves.main(["--case", case, "--jsonl", str(file), "--dir", str(tmp_path), *more]) == 0
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    if case == "often":
        row, = found["rows"]
        assert row["saves"] == 4 and 0 < row["blocked_s"] < row["wall_s"] and row["threads_cpu_s"] > 0
        assert "held up ms a save" in text
    else:
        assert set(found["seconds"]) == {"beside", "waiting"} and len(found["seconds"]["beside"]) == 2
        assert all(0 < blocked <= whole for way in found["seconds"].values() for blocked, whole in way)
        assert "% of waiting" in text
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]
