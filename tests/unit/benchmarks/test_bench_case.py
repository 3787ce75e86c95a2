"""`benchmarks case`: which jobs it starts, what its table makes of them, and one job on a small recipe."""

import json

import pytest

from benchmarks import case
from hvdtrain.core.errors import UserError

MIB = 1 << 20


def about(ranks, rate, held, exchange=None):
    return {"ranks": ranks, "samples": rate * 2, "seconds": 2.0, "peak_bytes": [held * MIB] * ranks,
            "global_batch": 64, "epoch_samples": 6000, "exchange_percent": exchange}


def test_one_rank_has_nothing_to_divide():
    assert case.keys([1, 2], ["replicate", "zero2"]) == [(1, "replicate"), (2, "replicate"), (2, "zero2")]
    assert case.race.rotated([1, 2, 3], 1) == [2, 3, 1]


def test_the_table_is_of_medians_against_the_fewest_ranks():
    found = {(1, "replicate"): [about(1, 100, 50), about(1, 50, 50), about(1, 1000, 60)],
             (2, "replicate"): [about(2, 150, 40, 12.0)], (2, "zero2"): [about(2, 125, 30, 20.0)]}
    assert case.rows(found) == [["1", "replicate", "64", "100.0", "1", "50", "1.00", "-", "-"],
                                ["2", "replicate", "64", "150.0", "0.667", "40", "1.50", "12.0", "-"],
                                ["2", "zero2", "64", "125.0", "0.8", "30", "1.25", "20.0", "25"]]


def test_what_a_device_does_not_tell_is_left_open():
    assert case.rows({(2, "zero2"): [about(2, 10, 0) | {"peak_bytes": []}]})[0][5:] == ["-", "-", "-", "-"]
    assert "without replicate" in case.against({(2, "zero2"): []})
    assert "on 2 rank" in case.against({(4, "replicate"): [], (2, "zero2"): [], (2, "replicate"): []})


@pytest.mark.slow
def test_a_job_trains_the_recipe_for_the_steps_it_was_given(tmp_path, capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    recipe, found = tmp_path / "small.yaml", tmp_path / "found.jsonl"
    recipe.write_text("model: torch_models.mlp:build\nmodel_args: {in_features: 64}\n"
                      "data: {name: synthetic, args: {samples: 64}}\nglobal_batch: 8\nepochs: 3\n")
    assert case.main([str(recipe), "--np", "1", "--rounds", "1", "--steps", "3", "--warmup", "1", "--key",
                      "global_batch=16", "--batch", "4", "--quota", "1", "--jsonl", str(found)]) == 0
    told = json.loads(found.read_text())
    assert (told["samples"], told["global_batch"], told["epoch_samples"]) == (12, 4, 64) and told["seconds"] > 0
    assert f"{recipe}: 1 round(s) of 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("words, got", [([], "RECIPE"), (["no.yaml"], "no file"), (["R", "--np", "0"], "--np"),
                                        (["R", "--key", "lr"], "--key"),
                                        (["R", "--np", "1", "--ways", "zero2"], "no job"),
                                        (["R", "--np", "4096", "--threads", "4096"], "share"),
                                        (["R", "--key", "l=1"], "'l'|--l")])
def test_what_does_not_fit_is_told_before_any_job(words, got, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("epochs: 1\n")
    with pytest.raises(UserError, match=got):
        case.main([str(recipe) if word == "R" else word for word in words])


@pytest.mark.slow
def test_a_recipe_that_fits_no_data_is_told_once(tmp_path, capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: torch_models.mlp:build\ndata: {{name: folder, args: {{root: {tmp_path}/none}}}}\n")
    assert case.main([str(recipe), "--np", "1,2", "--rounds", "2", "--quota", "1"]) == 1
    told = capsys.readouterr()
    assert told.out.count("$ ") == 1 and "speed-up" not in told.out and told.err.count(f"{tmp_path}/none") == 1
