"""`benchmarks input`: what its table makes of the times, the counting of decodes, and one job of each reader."""

import importlib.util
import json
import pickle

import numpy as np
import pytest

from benchmarks import input as bench
from benchmarks import input_rank
from benchmarks.input_data import CONTEXT, FORMATS, made
from hvdtrain.core.errors import UserError
from hvdtrain.data import sources
from hvdtrain.data.sources import ArraySource


def about(seconds, decodes=40):
    return {"samples": 20, "epochs": 2, "seconds": seconds, "decodes": decodes, "workers": 1, "cpu_seconds": 4e-3}


def test_own_rate_is_held_against_the_best_of_the_others():
    found = {(2, "tfdata"): [about(2.0), about(1.0), about(4.0)], (2, "hvdtrain"): [about(1.0)],
             (2, "dataloader"): [about(4.0, decodes=42)]}
    assert bench.rows(found) == [["2", "hvdtrain", "1", "40", "40 to 40", "2.00", "1", "100"],
                                 ["2", "dataloader", "1", "10", "10 to 10", "-", "1.05", "100"],
                                 ["2", "tfdata", "1", "20", "15 to 30", "-", "1", "100"]]


def test_a_folder_without_pictures_is_told_before_any_job(tmp_path):
    with pytest.raises(UserError, match="no folder train"):
        bench.main(["--root", str(tmp_path), "--formats", "folder"])
    with pytest.raises(UserError, match="--root with several formats"):
        bench.main(["--root", str(tmp_path)])


def test_decodes_of_several_processes_are_counted_together(tmp_path):
    counted = input_rank.Counted(ArraySource([np.arange(5)]), input_rank.Decodes(str(tmp_path / "n")))
    counted.fetch(np.array([0, 1]))
    pickle.loads(pickle.dumps(counted)).fetch(np.array([4]))
    assert counted.decodes.total() == 3 and len(counted) == 5


def test_formats_hold_the_same_pictures(tmp_path):
    """And tokens of sequences that follow one another."""
    found = {}
    for kind in ("folder", "tar", "tfrecord", "parquet", "tokens"):
        package = {"parquet": "pyarrow", "tfrecord": "google_crc32c"}.get(kind, "numpy")
        if importlib.util.find_spec(package) is None:
            continue
        name, named = input_rank.SETS[kind](made(kind, tmp_path / kind, 22, 8))
        source = sources.resolve(name, named, "train")
        x, y = source.fetch(np.arange(22))
        order = np.lexsort(x.reshape(22, -1).T)
        found[kind] = x[order], y[order]
    tokens = found.pop("tokens")
    assert np.array_equal(tokens[0][:, 1:], tokens[1][:, :-1]) and tokens[0].shape == (22, CONTEXT)
    for x, y in found.values():
        assert np.array_equal(x, found["folder"][0]) and np.array_equal(y, found["folder"][1])


@pytest.mark.slow
@pytest.mark.parametrize("kind, reader", [*(("folder", reader) for reader in FORMATS["folder"]),
                                          ("tar", "webdataset"), ("stream", "hvdtrain")])
def test_a_reader_decodes_each_sample_once_an_epoch(kind, reader, tmp_path):
    for package in ("PIL", bench.CONTENDERS[reader]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found = tmp_path / "found.jsonl"
    assert bench.main(["--formats", kind, "--readers", reader, "--np", "1", "--samples", "22", "--size", "8",
                       "--batch", "4", "--rounds", "1", "--epochs", "2", "--jsonl", str(found)]) == 0
    told = json.loads(found.read_text())
    assert (told["samples"], told["read"], told["decodes"], told["reader"]) == (22, 44, 44, reader)
