"""`train`: what a user may write in a file, the environment and a command, and the words for what is wrong."""

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest
import yaml
from command_lines import cli, refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdtrain.commands.train import make_parser, parse
from hvdtrain.config import Config, DataConfig, Named, schema
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core.errors import UserError


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file and returns its path as text."""
    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)
    return write


# --- the three layers ----------------------------------------------------------------------------------------------

def test_nothing_given_is_the_built_in_recipe():
    assert cli() == Config()


def test_file_then_environment_then_command_line(write):
    path = write("lr: 0.5\nglobal_batch: 32\nseed: 1\noptimizer: {name: SGD, args: {momentum: 0.9}}\n")
    assert cli("--config", path) == Config(lr=0.5, global_batch=32, seed=1, optimizer=Named("SGD", {"momentum": 0.9}))
    env = {"HVDTRAIN_LR": "0.6", "HVDTRAIN_SEED": "2", "HVDTRAIN_OPTIMIZER__NAME": "AdamW"}
    seen = cli("--config", path, "--seed", "3", **env)
    assert (seen.lr, seen.global_batch, seen.seed, seen.optimizer.name) == (0.6, 32, 3, "AdamW")
    assert cli("--seed=3", f"--config={path}", **env) == seen  # the order on the command line does not matter
    assert cli("--seed=3", **env, HVDTRAIN_CONFIG=path) == seen


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_GLOBAL_BATCH", "48")
    monkeypatch.setenv("HVDTRAIN_DATA", "{name: synthetic, args: {samples: 7}}")
    monkeypatch.setenv("HVDTRAIN_DATA__SHUFFLE", "false")
    seen = parse([])
    assert seen.global_batch == 48 and seen.data == DataConfig("synthetic", {"samples": 7}, shuffle=False)


@pytest.mark.parametrize("text, seconds", [("3600", 3600), ("1:30:00", 5400), ("04:00:00", 14400), ("90.5", 90.5)])
def test_a_files_time_limit_may_look_like_a_number(write, text, seconds):
    config = parse(["--config", write(f"time_limit: {text}")], {})
    assert config is not None and config.time_limit_s() == seconds


def test_several_files_are_laid_over_each_other_key_by_key(write):
    first = write("lr: 0.5\nseed: 4\ndata: {name: synthetic, prefetch: 0}\nmodel_args: {a: 1}\n", "a.yaml")
    second = write("lr: 0.7\ndata: {shuffle: false}\nmodel_args: {b: 2}\n", "b.yaml")
    seen = cli("--config", first, "--config", second)
    assert (seen.lr, seen.seed, seen.model_args) == (0.7, 4, {"b": 2})
    assert seen.data == DataConfig("synthetic", shuffle=False, prefetch=0)
    assert cli("--config", second, HVDTRAIN_CONFIG=first) == seen


def test_entries_of_free_form_keys_one_by_one(write):
    path = write("model_args: {channels: [8], norm: group}\n")
    seen = cli("--config", path, "--model_args.norm", "none", "--model_args.rate=1e-3", "--model_args.on", "true",
               "--data.args.samples", "100", "--optimizer.args.momentum", "0.9", "--model_args.head.width", "3",
               "--model_args.what", "null")
    assert seen.model_args == {
        "channels": [8],
        "norm": "none",
        "rate": 1e-3,
        "on": True,
        "head": {"width": 3},
        "what": None,
    }
    assert seen.data.args == {"samples": 100} and seen.optimizer.args == {"momentum": 0.9}
    assert cli("--config", path, "--model_args", "{norm: none}").model_args == {"norm": "none"}
    assert "not a mapping" in refusal("--config", path, "--model_args.norm.deep", "1")


def test_a_bare_text_is_the_name_of_a_section(write):
    seen = cli("--data", "synthetic", "--loss=mse", "--schedule", "StepLR", "--schedule.args.step_size", "3")
    assert (seen.data.name, seen.loss.name, seen.schedule.name) == ("synthetic", "mse", "StepLR")
    assert seen.schedule.args == {"step_size": 3}
    sgd = Named("SGD", {"momentum": 0.9})
    assert cli("--optimizer", "SGD", "--optimizer.args.momentum", "0.9").optimizer == sgd
    assert cli("--optimizer.args.momentum", "0.9", "--optimizer", "SGD").optimizer == sgd
    path = write("data: mydata.py:load\noptimizer: SGD\n")
    assert cli("--config", path).data == DataConfig("mydata.py:load") and cli("--config",
                                                                              path).optimizer == Named("SGD")
    assert cli("--config", path, "--optimizer.args", "{momentum: 0.9}").optimizer == sgd
    assert cli(HVDTRAIN_DATA="synthetic", HVDTRAIN_OPTIMIZER__ARGS="{momentum: 0.9}",
               HVDTRAIN_OPTIMIZER="SGD") == Config(data="synthetic", optimizer=sgd)


def test_a_bare_name_comes_without_the_args_of_another(write):
    sgd = write("optimizer: {name: SGD, args: {momentum: 0.9}}\ndata: {name: text, args: {n: 3}, shuffle: false}\n")
    adam = write("optimizer: AdamW\n", "adam.yaml")
    seen = cli("--config", sgd, "--optimizer", "AdamW", "--optimizer.args.amsgrad", "true", "--data", "digits")
    assert seen.optimizer == Named("AdamW", {"amsgrad": True}) and seen.data == DataConfig("digits", shuffle=False)
    assert cli("--config", sgd, "--config", adam).optimizer == Named("AdamW")
    assert cli("--config", sgd, HVDTRAIN_OPTIMIZER="AdamW").optimizer == Named("AdamW")
    env = {"HVDTRAIN_OPTIMIZER": "{name: SGD, args: {nesterov: true}}"}
    assert cli("--optimizer", "Adam", **env).optimizer == Named("Adam")
    assert cli("--config", sgd, "--optimizer", "sgd").optimizer == Named("sgd", {"momentum": 0.9})  # the same one
    assert cli("--config", sgd, "--optimizer.name", "AdamW").optimizer.args == {"momentum": 0.9}  # that key alone
    unnamed = write("optimizer: {args: {momentum: 0.9}}\n", "unnamed.yaml")
    assert cli("--config", unnamed, "--optimizer", "SGD").optimizer == Named("SGD", {"momentum": 0.9})


def test_lists():
    assert cli("--shares", "[3,1]").shares == [3.0, 1.0]
    assert cli("--shares", "3:3:1:1").shares == [3.0, 3.0, 1.0, 1.0]
    assert cli("--emulate-speed", "1,0.4").emulate_speed == [1.0, 0.4]
    assert cli("--rebalance.max_micro_batch=64:16").rebalance.max_micro_batch == [64, 16]
    assert cli("--model-args.width", "3", "--log-every=4").model_args == {"width": 3}
    assert cli(HVDTRAIN_SHARES="3:1").shares == [3.0, 1.0]
    assert cli("--metrics", "[accuracy, mse_loss]").metrics == ["accuracy", "mse_loss"]
    assert cli("--metrics+", "mse_loss").metrics == ["accuracy", "mse_loss"]
    assert cli("--metrics", "[]").metrics == []


def test_numbers_and_texts_as_yaml_1_2_has_them(write):
    path = write(
        "lr: 1e-3\nclip_norm: 5\nmodel: 'a:b'\nmodel_args: {a: 2e5, b: '1e-3', c: 2020-01-01, d: on}\nout: '2024'\n"
    )
    seen = cli("--config", path)
    assert (seen.lr, seen.clip_norm, seen.out) == (1e-3, 5.0, "2024")
    assert seen.model_args == {"a": 2e5, "b": "1e-3", "c": "2020-01-01", "d": True}
    assert (
        cli("--out", "2024").out == "2024"
        and cli("--model", "5").model == "5"
        and cli("--resume", "null").resume == ""
    )


def test_a_recipe_names_no_code(write):
    """jsonargparse imports what a mapping names as class_path where a type allows it; ours must stay data."""
    wanted = {"a": {"class_path": "wave.Wave_read", "init_args": {"f": "x"}}}
    path = write("model_args: {a: {class_path: wave.Wave_read, init_args: {f: x}}}\n")
    sys.modules.pop("wave", None)
    assert cli("--config", path).model_args == wanted
    assert cli("--model_args", str(wanted).replace("'", '"')).model_args == wanted
    assert cli("--model_args.a.class_path", "wave.Wave_read").model_args == {"a": {"class_path": "wave.Wave_read"}}
    assert "wave" not in sys.modules


# --- printing ------------------------------------------------------------------------------------------------------

def test_print_config_is_yaml_that_parses_back(write, capsys):
    argv = ["--lr", "3e-4", "--model_args.text", "1e-3", "--data.args.when", "2020-01-01", "--shares", "[2, 1]",
            "--out", "", "--model_args.none", "null", "--seed", "4294967295", "--model_args.umlaut", "ä: b"]
    for order in (["--print_config", *argv], [*argv, "--print_config"]):
        assert cli(*order, HVDTRAIN_EPOCHS="7") is None
        text = capsys.readouterr().out
        assert isinstance(yaml.safe_load(text), dict) and set(yaml.safe_load(text)) == {f.name for f in fields(Config)}
        assert cli("--config", write(text)) == cli(*argv, HVDTRAIN_EPOCHS="7")


def test_print_config_prints_no_impossible_configuration(capsys):
    assert "epochs" in refusal("--print_config", "--epochs", "-1")
    assert capsys.readouterr().out == ""


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=6), values, max_size=4))
@example(
    {
        "a": "1e-3",
        "b": "null",
        "c": "2020-01-01",
        "d": 1e300,
        "e": "0x10",
        "f": "1_0",
        "g": "~",
        "h": "=",
        "i": "<<",
        "j": ".5e3",
    }
)
@settings(max_examples=150, deadline=None)
def test_what_is_dumped_is_loaded_alike(data):
    assert recipe.load(recipe.dump(data), "x") == data


def test_help_has_every_key_with_its_meaning(capsys):
    assert cli("--help") is None
    text = " ".join(capsys.readouterr().out.split())
    for key in schema.keys(Config):
        assert f"--{key.name} " in text
        assert " ".join(key.help.split()).replace("- ", "-") in text.replace("- ", "-"), key.name
    assert "HVDTRAIN_" in text and "--config" in text and "--print_config" in text


# --- the whole program ---------------------------------------------------------------------------------------------

def python(code, *args, **env):
    return subprocess.run(
        [sys.executable, *code, *args],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "HVDTRAIN_"))},
            **env,
        },
    )


def test_help_of_the_whole_imports_the_standard_library_only():
    done = python(["-c", """
import sys
before = set(sys.modules)
sys.argv = ["hvdtrain", "--help"]
from hvdtrain.commands import main
assert main(["--help"]) == 0 and main(["--version"]) == 0
roots = {m.partition(".")[0] for m in set(sys.modules) - before}
print(sorted(roots - set(sys.stdlib_module_names) - {"hvdtrain"}))
"""])
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("[]") and "train a model" in done.stdout and "mpirun" in done.stdout


def test_help_of_train_imports_no_framework():
    done = python(["-c", """
import sys
from hvdtrain.commands import main
assert main(["train", "--help"]) == 0
print(sorted({"torch", "tensorflow", "keras", "horovod", "mpi4py"} & set(sys.modules)))
"""])
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("[]") and "--global_batch" in done.stdout


def test_a_mistake_is_one_line_and_status_2(tmp_path):
    for argv in (
        ["train", "--lrr", "3"],
        ["trian"],
        ["--epochs", "x"],
        ["train", "--config", str(tmp_path / "none.yaml")],
    ):
        done = python(["-m", "hvdtrain"], *argv)
        assert done.returncode == 2 and done.stdout == "", (argv, done)
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("hvdtrain: "), done.stderr
    assert "did you mean 'train'" in python(["-m", "hvdtrain"], "trian").stderr


def test_parses_of_a_process_share_nothing(write):
    path = write("lr: 0.5\nschedule: {warmup_steps: 7}\nmodel_args: {a: {b: 1}}\nshares: [1, 2]\n")
    first = cli("--config", path, "--epochs", "5", "--data.args.samples", "7", HVDTRAIN_SEED="3")
    assert (first.lr, first.epochs, first.seed, first.model_args) == (0.5, 5, 3, {"a": {"b": 1}})
    with pytest.raises(UserError):
        cli("--global_batch", "x", "--lr", "9")
    for _ in range(2):
        seen = cli()
        assert seen == Config()
        for each in (seen, *(getattr(seen, f.name) for f in fields(seen) if is_dataclass(getattr(seen, f.name)))):
            for value in vars(each).values():
                if isinstance(value, dict):
                    value["leaked"] = 1
                elif isinstance(value, list):
                    value.append(1)


def test_the_parser_knows_exactly_the_keys():
    cli("--lr", "0.5")
    known = {a.dest for a in make_parser()._actions} - {"help", "config", "print_config", *schema.sections(Config)}
    assert known == {k.name for k in schema.keys(Config)}


def test_a_bare_off_in_a_file_is_the_word(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("balance: off\nremat: off\ncheckpoint: {every: off}\ndata: {shuffle: off}\n")
    found = parse(["--config", str(path)])
    assert (found.balance, found.remat, found.checkpoint.every, found.data.shuffle) == ("off", "off", "off", False)
