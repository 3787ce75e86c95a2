"""The accuracy bench: what the runs are told, what is read from them, and the verdict."""

import json
import sys

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy import WORKLOADS, Trial, parsed, summary, train_options, wire_bytes
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.commands import verify
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec

DIGITS, TEXT = WORKLOADS["digits"], WORKLOADS["text"]


def table_of(workload, *groups):
    """{compression: (worse, verdict)} of [(compression, values by seed)]."""
    trials = [Trial(name, seed, value, 100 if name == "none" else 10) for name, values in groups
              for seed, value in enumerate(values)]
    headers, rows = summary(workload, trials)
    assert all(len(row) == len(headers) for row in rows)
    return {row[0]: (row[4], row[-1]) for row in rows}


def test_a_run_is_told_the_recipe_then_the_users_options_then_ours():
    options = train_options(TEXT, "tensorflow", 0, "topk", 3, ["--lr", "0.5", "--model_args.width", "32"])
    config = parsed(options)
    assert config.model == "tf_models.gpt:build" and config.data.name == "text"
    assert (config.compression, config.seed, config.lr) == ("topk", 3, 0.5)
    assert config.model_args == {"width": 32, "depth": 2}, "the later wins"
    assert config.max_steps == TEXT.steps and config.eval_every == 0 and not config.checkpoint.at_end
    assert (config.schedule.name, config.schedule.args) == ("CosineDecay", {"decay_steps": TEXT.steps})
    shorter = parsed(train_options(TEXT, "torch", 7, "none", 0, []))
    assert shorter.max_steps == 7 and shorter.schedule.args == {"T_max": 7}


def test_digits_is_the_default_recipe_but_for_its_optimizer():
    ours, default = parsed(train_options(DIGITS, "torch", 0, "none", 0, [])), Config()
    for key in ("epochs", "max_steps", "global_batch", "schedule", "data", "exchange"):
        assert getattr(ours, key) == getattr(default, key)
    assert ours.model == "torch_models.cnn:build"
    assert parsed(train_options(DIGITS, "torch", 5, "none", 0, [])).max_steps == 5


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_topk_has_the_base_runs_momentum_before_its_choice(workload):
    base, topk, powersgd = (parsed(train_options(workload, "torch", 0, name, 0, []))
                            for name in ("none", "topk", "powersgd"))
    assert base.optimizer == powersgd.optimizer and base.exchange.topk_momentum == 0
    assert topk.optimizer.name == base.optimizer.name == "SGD" and topk.lr == base.lr
    assert topk.exchange.topk_momentum == base.optimizer.args["momentum"] > 0 == topk.optimizer.args["momentum"]
    without = parsed(train_options(workload, "torch", 0, "topk", 0, ["--exchange.topk_momentum", "0"]))
    assert without.exchange.topk_momentum == 0, "the user's word is the last"


def test_accuracy_is_compared_in_points():
    found = table_of(DIGITS, ("none", [0.99, 0.98]), ("fp16", [0.98, 0.98]), ("int8", [0.97, 0.98]),
                     ("topk", [1.0, 1.0]), ("bf16", [0.99, 0.96]), ("powersgd", [float("nan"), 0.99]))
    assert found["none"] == ("-", "-")
    assert found["fp16"] == ("0.50", "yes"), "half a point is within, whatever the last bit says"
    assert found["int8"] == ("1.00", "no") and found["bf16"] == ("1.00", "no")
    assert found["topk"] == ("-1.50", "yes"), "better is no fault"
    assert found["powersgd"] == ("nan", "no")


def test_loss_is_compared_in_per_cent():
    found = table_of(TEXT, ("none", [2.0]), ("fp16", [2.02]), ("topk", [2.021]), ("int8", [1.5]))
    assert found["fp16"] == ("1.00", "yes") and found["topk"] == ("1.05", "no") and found["int8"][1] == "yes"


def test_the_table_shows_means_spread_and_bytes():
    trials = [Trial("none", 0, 0.98, 4000), Trial("none", 1, 0.99, 4000),
              Trial("topk", 0, 0.97, 320, {"compression": "topk 1%"}), Trial("topk", 1, 0.99, 320)]
    headers, rows = summary(DIGITS, trials)
    assert headers[1] == "test accuracy %" and headers[-1] == "within 0.5 points"
    assert rows[0] == ["none", "98.50", "98.00", "99.00", "-", "4,000", "1.0x", "-"]
    assert rows[1] == ["topk 1%", "98.00", "97.00", "99.00", "0.50", "320", "12.5x", "yes"]


def test_bytes_are_the_compressors_own_over_all_buckets():
    params = [ParamSpec("a", (1024, 1024), "float32"), ParamSpec("b", (1024, 512), "float32")]
    whole = 4 * (1024 * 1024 + 1024 * 512)
    for bucket_mb in (16.0, 1.0, "auto"):
        config = Config(exchange=ExchangeConfig(bucket_mb=bucket_mb))
        assert wire_bytes(config, "none", params, 2) == whole  # 2 (P-1)/P of the vector
        assert wire_bytes(config, "none", params, 4) == whole * 3 // 2
    assert wire_bytes(Config(), "none", [], 2) == 0


def test_statistics_of_a_norm_are_not_sent(tmp_path):
    from safetensors.numpy import save_file

    save_file({"n.weight": np.ones(3, np.float32), "n.running_mean": np.ones(3, np.float32),
               "k.moving_variance": np.ones(3, np.float32)}, str(tmp_path / "model.safetensors"))
    (found,) = accuracy._params(tmp_path / "model.safetensors")
    assert (found.name, found.shape) == ("n.weight", (3,))


@pytest.mark.slow
@pytest.mark.parametrize("argv, words", [
    (["--workload", "digit"], "did you mean 'digits'"), (["--framework", "keras"], "one of tensorflow, torch"),
    (["--compression", "none,topq"], "did you mean 'topk'"), (["--compression", "auto"], "auto"),
    (["--seeds", "0,x"], "--seeds"), (["--seeds", ""], "--seeds"), (["--np", "1"], "from 2"),
    (["--out", "x"], "--out is set by the bench"), (["--seed=3"], "--seeds"), (["--max_steps", "-1"], "--max_steps"),
    (["--print_config"], "print_config"), (["--lrr", "3"], "no option --lrr"), (["--lr", "fast"], "lr is"),
    (["--for", "topk", "lr"], "KEY=VALUE"), (["--for", "topq", "lr=1"], "did you mean 'topk'"),
    (["--for", "topk", "lrr=1"], "no option --lrr"), (["--for", "topk", "seed=1"], "--seed is set by the bench"),
    (["--compression", "none", "--for", "topk", "lr=1"], "--compression"),
])
def test_mistakes_are_told_before_the_first_run(argv, words, monkeypatch):
    monkeypatch.setattr(accuracy, "_run", lambda *args: pytest.fail("a run was started"))
    with pytest.raises(UserError, match=words):
        accuracy.main(argv)


@pytest.fixture
def fake_runs(monkeypatch):
    """Replace runs by ones that write accuracy 0.9 + seed / 100, or a user's ``lr``; return their list."""
    seen = []

    def run(ranks, options, out, timeout_s):
        from safetensors.numpy import save_file

        config = parsed(options)
        seen.append((ranks, config))
        (out / "model").mkdir(parents=True)
        save_file({"w": np.ones((10, 5), np.float32)}, str(out / "model" / "model.safetensors"))
        value = config.lr if config.lr != 0.05 else 0.9 + config.seed / 100
        (out / RunDirectory.COMPLETED).write_text(json.dumps({
            "framework": "torch", "model": config.model, "ranks": ranks, "hosts": "1 host", "wire": "mpi",
            "compression": config.compression, "steps": 9, "loss": 1.0, "metrics": {"accuracy": value, "loss": 0.5}}))

    monkeypatch.setattr(accuracy, "_run", run)
    return seen


def test_every_compression_runs_with_every_seed_and_none_first(fake_runs, capsys, tmp_path):
    jsonl = tmp_path / "runs.jsonl"
    argv = ["--compression", "none", "--seeds", "1,0,1", "--np", "3", "--jsonl", str(jsonl), "--markdown"]
    assert accuracy.main(argv) == 0
    assert [(ranks, config.compression, config.seed) for ranks, config in fake_runs] == [(3, "none", 1), (3, "none", 0)]
    printed = capsys.readouterr().out
    assert "| none | 90.50 | 90.00 | 91.00 | - | 267 |" in printed
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert [(r["seed"], r["value"], r["ranks"], r["bench"]) for r in records] == [
        (1, 0.91, 3, "accuracy"), (0, 0.9, 3, "accuracy")]
    assert records[0]["wire_bytes"] == 267 and records[0]["versions"]["numpy"]


def test_a_compression_beyond_the_bar_makes_the_status_1(fake_runs, capsys, monkeypatch):
    monkeypatch.setattr(accuracy, "wire_bytes", lambda config, name, params, size: 7)
    argv = ["--compression", "topk,fp16", "--seeds", "0"]
    assert accuracy.main(argv) == 0
    assert [config.compression for _, config in fake_runs] == ["none", "topk", "fp16"]
    assert accuracy.main([*argv, "--for", "topk", "lr=0.5", "--for", "topk", "exchange.topk_ratio=0.1"]) == 1
    ratios = {config.compression: config.exchange.topk_ratio for _, config in fake_runs[3:]}
    assert ratios == {"none": 0.01, "topk": 0.1, "fp16": 0.01}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("topk")]
    assert rows[0].endswith("yes") and rows[1].endswith("no") and "50.00" in rows[1]


def test_a_run_without_the_metric_is_told(fake_runs):
    with pytest.raises(UserError, match="no test perplexity, only accuracy, loss"):
        from dataclasses import replace

        out_of = replace(DIGITS, metric="perplexity")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(WORKLOADS, "digits", out_of)
            accuracy.main(["--compression", "none", "--seeds", "0"])


@pytest.mark.slow
@pytest.mark.parametrize("program, words", [
    ("print('the last words'); raise SystemExit(3)", "failed with exit status 3"),
    ("print('the last words')", "did not complete"),
    ("import time; print('the last words', flush=True); time.sleep(60)", "took more than 2 s"),
])
def test_a_run_that_fails_shows_its_last_lines(program, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify, "launcher", lambda ranks: [sys.executable, "-c", program])
    with pytest.raises(UserError, match=f"the run x-0 {words}"):
        accuracy._run(2, [], tmp_path / "x-0", 2.0)
    assert "the last words" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_job_is_measured(tmp_path, capsys):
    from hvdtrain.cluster.machine.software import find_mpi

    pytest.importorskip("torch", reason="PyTorch is not installed")
    if find_mpi() is None:
        pytest.skip("there is no mpirun")
    jsonl = tmp_path / "runs.jsonl"
    argv = ["--workload", "text", "--compression", "none", "--seeds", "5", "--max_steps", "3", "--timeout", "100",
            "--model_args.width", "16", "--data.args.samples", "64", "--jsonl", str(jsonl)]
    assert accuracy.main(argv) == 0
    (found,) = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert (found["ranks"], found["steps"], found["seed"], found["metric"]) == (2, 3, 5, "loss")
    assert 3.0 < found["value"] < np.log(96) + 1 and found["wire_bytes"] > 10_000
    assert f"{found['value']:.4f}" in capsys.readouterr().out
