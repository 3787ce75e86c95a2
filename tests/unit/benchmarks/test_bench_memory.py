"""`benchmarks memory`: the formula beside what is measured, and one job on a small model."""

import json

import pytest

from benchmarks import memory, memory_rank
from hvdtrain.core.errors import UserError


def test_bytes_a_parameter():
    assert [memory.formula(way, 4) for way in memory.WAYS] == [16, 10, 7, 16, 16]
    assert {memory.formula(way, 1) for way in memory.WAYS} == {16}


@pytest.mark.parametrize("parameters, layer", [(60_000_000, 5_000_000), (1000, 5000), (10**6, 10**5)])
def test_layers_are_no_larger_than_asked_for(parameters, layer):
    widths = memory_rank.layers(parameters, layer)
    sizes = [width * width + width for width in widths]
    assert max(sizes) <= layer and abs(sum(sizes) - parameters) <= max(layer, parameters // 20)


def test_the_rank_that_holds_most_stands_in_the_table():
    found = {way: {"parameters": 1 << 20, "pss_bytes": [part << 20, 3 << 20], "rss_bytes": [part << 20, 5 << 20]}
             for way, part in (("replicate", 16), ("zero2", 8))}
    assert memory._rows(found, 4) == [["replicate", "0", "16", "16.0", "16", "16.0", "16.0", "+0 %"],
                                      ["zero2", "0", "8", "8.0", "8", "8.0", "7.0", "-50 %"]]


@pytest.mark.slow
def test_a_job_tells_what_its_rank_held(tmp_path, capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    file = tmp_path / "found.jsonl"
    assert memory.main(["--ranks", "1", "--ways", "replicate", "--parameters", "8000000", "--layer", "1000000",
                        "--jsonl", str(file)]) == 0
    found = json.loads(file.read_text())
    (peak,) = found["rss_bytes"]
    assert 12 * found["parameters"] < peak < 40 * found["parameters"], "parameters and moments, and no other model"
    assert "bytes a parameter" in capsys.readouterr().out


def test_it_starts_its_jobs_itself(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UserError, match="started under a launcher"):
        memory.main([])
