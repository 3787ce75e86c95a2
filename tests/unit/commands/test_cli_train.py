"""`train`: what a user may write in a file, the environment and a command, and the words for what is wrong."""

import os
import subprocess
import sys
import time
from dataclasses import fields

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdtrain.commands.train import make_parser, parse
from hvdtrain.config import Config, DataConfig, Named, schema
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core.errors import UserError

BIG = "9" * 5000


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file and returns its path as text."""
    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)
    return write


def cli(*argv, **env):
    return parse(list(argv), env)


def refusal(*argv, **env):
    """Return the message that refuses this command line: one line, computed within bounds (a file may grow)."""
    begin = time.thread_time()
    with pytest.raises(UserError) as caught:
        cli(*argv, **env)
    assert time.thread_time() - begin < 20.0  # far above a slow machine's, far below a bomb's
    text = str(caught.value)
    assert "\n" not in text and "class '" not in text and len(text) < 500, text
    return text


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
        and cli("--resume", "null").resume == "null"
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


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, words",
    [
        (["--lrr", "3"], ["--lrr", "did you mean 'lr'"]),
        (["--lrr=3"], ["--lrr", "did you mean 'lr'"]),
        (["--data.nme", "3"], ["--data.nme", "did you mean 'data.name'"]),
        (["--global-btch", "3"], ["--global-btch", "did you mean 'global_batch'"]),
        (["--epoch", "3"], ["--epoch", "did you mean 'epochs'"]),
        (["--optimizer.momentum", "3"], ["--optimizer.momentum", "optimizer."]),
        (["--model_args.", "3"], ["model_args"]),
        (["--zzzzzz", "3"], ["there is no option --zzzzzz"]),
        (["--data.nmae", "digits"], ["did you mean 'data.name'"]),
        (["--nmae", "digits"], ["did you mean 'data.name' or 'optimizer.name'"]),
        (["--bucket_mb", "3"], ["did you mean 'exchange.bucket_mb'"]),
        (["--exchange.bucket_md", "3"], ["did you mean 'exchange.bucket_mb'"]),
        (["--optimizer.momentum", "3"], ["optimizer.args.momentum", "optimizer.name"]),
        (["--momentum", "3"], ["did you mean 'optimizer.args.momentum'"]),
        (["--learning_rate", "3"], ["did you mean 'lr'"]),
        (["--data", "{nme: 3}"], ["data.nme", "--data", "did you mean 'data.name'"]),
        (["foo"], ["'foo' is no option"]),
        (["--lr", "0.1", "0.2"], ["'0.2' is no option"]),
        (["--lr"], ["--lr has no value", "a number"]),
        (["--lr", "--seed", "3"], ["--lr has no value", "a number"]),
        (["--deterministic"], ["no value", "true or false"]),
        (["--config"], ["--config has no value"]),
        (["--lr", "x"], ["lr is 'x'", "expected a number", "--lr"]),
        (["--lr", ""], ["lr is ''", "expected a number"]),
        (["--lr", BIG], ["lr is '999", "expected a number"]),
        (["--global_batch", "1.5"], ["global_batch is '1.5'", "expected a whole number"]),
        (["--global_batch", "true"], ["global_batch is 'true'", "expected a whole number"]),
        (["--global_batch", "0"], ["global_batch is 0", "1 or more"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--seed", BIG], ["seed is '999"]),
        (["--seed", "4294967296"], ["seed is 4294967296", "4294967295 at most"]),
        (["--nan_guard", "foo"], ["nan_guard is 'foo'", "one of stop, skip"]),
        (["--deterministic", "maybe"], ["deterministic is 'maybe'", "true or false"]),
        (["--shares", "3"], ["shares is '3'", "a list of numbers such as [3, 1]"]),
        (["--shares", "[a, 1]"], ["shares is '[a, 1]'", "a list of numbers"]),
        (["--shares", "[1, .nan]"], ["shares is nan", "finite"]),
        (["--shares", "[0, 0]"], ["shares", "above 0"]),
        (["--metrics", "accuracy"], ["metrics is 'accuracy'", "a list of names"]),
        (["--model_args", "foo"], ["--model_args is 'foo'", "keyword arguments such as {width: 64}"]),
        (["--model_args", "{a: 1, a: 2}"], ["--model_args", "'a' is there twice"]),
        (["--model_args", "{1: 2}"], ["model_args is {1: 2}", "keyword arguments"]),
        (["--model_args.a", BIG], ["--model_args.a"]),
        (["--model_args.a", "!!python/name:os.system"], ["--model_args.a", "tag"]),
        (["--model_args.a", "["], ["--model_args.a, line 2", "YAML"]),
        (["--optimizer", "5"], ["--optimizer is 5", "a name, or a section with name, args"]),
        (["--exchange", "fp16"], ["--exchange is 'fp16'", "expected a section with bucket_mb"]),
        (["--lr", "nan"], ["lr is 'nan'", "a number"]),
        (["--lr", ".nan"], ["lr is nan", "finite"]),
        (["--lr", "-.inf"], ["lr is -inf", "finite"]),
        (["--lr", "0"], ["lr is 0.0", "above 0"]),
        (["--control_timeout_s", "1e12"], ["control_timeout_s", "1000000000 at most"]),
        (["--control_timeout_s", "0.001"], ["control_timeout_s is 0.001", "1 or more"]),
        (["--threads", "100000"], ["threads", "4096 at most"]),
    ],
    ids=lambda v: " ".join(v)[:30] if isinstance(v, list) else None,
)
def test_command_lines_that_are_refused(argv, words):
    text = refusal(*argv)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    "env, words",
    [
        ({"HVDTRAIN_LRR": "1"}, ["HVDTRAIN_LRR names no key", "did you mean 'HVDTRAIN_LR'"]),
        ({"HVDTRAIN_DATA_NAME": "x"}, ["did you mean 'HVDTRAIN_DATA__NAME'"]),
        ({"HVDTRAIN_MODEL_ARGS__NORM": "x"}, ["did you mean 'HVDTRAIN_MODEL_ARGS'"]),
        ({"HVDTRAIN_LR": "abc"}, ["lr is 'abc'", "expected a number", "HVDTRAIN_LR"]),
        ({"HVDTRAIN_CONFIG": "nowhere.yaml"}, ["nowhere.yaml"]),
        (
            {"HVDTRAIN_OPTIMIZER": "{nam: SGD}"},
            ["optimizer.nam", "HVDTRAIN_OPTIMIZER", "did you mean 'optimizer.name'"],
        ),
    ],
    ids=str,
)
def test_environments_that_are_refused(env, words):
    text = refusal(**env)
    for word in words:
        assert word in text, text


BOMB = "model_args:\n  a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"  {new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefghij", "bcdefghijk"))
FILES = {
    "lrr: 0.9": ["'lrr'", "did you mean 'lr'"],
    "data: {nme: 3}": ["'data.nme'", "did you mean 'data.name'"],
    "data.name: x": ["'data.name'", "data: with name: below it"],
    "config: other.yaml": ["'config'"],
    "1: 5": ["'1'"],
    "null: 5": ["no key 'None'"],
    "? [a, b]\n: 5": ["line 1", "a key that is no text"],
    "lr: abc": ["lr is 'abc'", "expected a number", "in the config file"],
    "lr: null": ["lr is empty (null)", "a number"],
    "lr: [1]": ["lr is [1]", "a number"],
    "lr: true": ["lr is true", "a number"],
    "lr: .nan": ["lr is nan", "finite"],
    "lr: -.inf": ["lr is -inf", "finite"],
    "epochs: true": ["epochs is true", "a whole number"],
    "epochs: 1.5": ["epochs is 1.5", "a whole number"],
    "deterministic: 1": ["deterministic is 1", "true or false"],
    "model: null": ["model is empty (null)", "text"],
    "data:": ["data is empty (null)", "a section with name, args, "],
    "data: 5": ["data is 5", "a section"],
    "optimizer: 5": ["optimizer is 5", "a name, or a section with name, args"],
    "checkpoint: often": ["checkpoint is 'often'", "expected a section with every, every_steps"],
    "optimizer: {nmae: SGD}": ["'optimizer.nmae'", "did you mean 'optimizer.name'"],
    "exchange: {bucket_md: 3}": ["'exchange.bucket_md'", "did you mean 'exchange.bucket_mb'"],
    "bucket_mb: 3": ["'bucket_mb'", "did you mean 'exchange.bucket_mb'"],
    "optimizer: {momentum: 0.9}": ["'optimizer.momentum'", "optimizer.args.momentum"],
    "data: {name: null}": ["data.name is empty (null)"],
    "data: {args: [1]}": ["data.args is [1]", "keyword arguments"],
    "data: {args: {1: 2}}": ["data.args is {1: 2}", "keyword arguments"],
    "nan_guard: [stop]": ["nan_guard is ['stop']", "one of stop, skip"],
    f"seed: {BIG}": ["digits"],
    "seed: 100000000000000000000000000": ["seed is 100000000000000000000000000", "2^53"],
    "lr: 1\nlr: 2": ["line 2, column 1", "'lr' is there twice"],
    "data: {name: a, name: b}": ["'name' is there twice"],
    'model_args: !!python/object/apply:os.system ["echo hi"]': ["line 1", "the tag", "without tags"],
    "model_args: !mine {a: 1}": ["the tag !mine"],
    "lr: 1\n---\nlr: 2": ["line 2", "another document"],
    "lr: [": ["line 2", "YAML"],
    "\tlr: 3": ["line 1"],
    "lr: *a": ["alias"],
    "model_args: &a {x: *a}": ["holds itself"],
    BOMB: ["more than 20000 values"],
    "model_args: {a: " + "[" * 20000: ["50 deep"],
    "model_args: {a: [" + "1, " * 21000 + "]}": ["more than 20000 values"],
    "#" * 70000: ["over 64 KiB"],
    "": ["is empty", "a mapping"],
    "# nothing": ["is empty", "a mapping"],
    "- 1": ["holds a list", "a mapping"],
    "hello": ["holds a str", "a mapping"],
    b"\x00\xff\xfe\x01": ["not a text file in UTF-8"],
    b"lr: \x00": ["cannot be read as YAML"],
    b"\x89PNG\r\n\x1a\n\x00\x00": ["UTF-8"],
}


@pytest.mark.parametrize("text", FILES, ids=lambda t: repr(t)[:30])
def test_files_that_are_refused(write, text):
    said = refusal("--config", write(text))
    for word in FILES[text]:
        assert word in said, said


def test_paths_that_are_refused(tmp_path, write):
    assert "there is no file" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "is not a file" in refusal("--config", str(tmp_path))
    assert "is not a file" in refusal("--config", os.devnull)
    assert "there is no file" in refusal("--config", "a\0b")
    assert "is not a file" in refusal("--config", "")
    assert "File name too long" in refusal("--config", "x" * 300)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "is not a file" in refusal("--config", str(fifo))
    if os.geteuid() != 0:
        locked = write("lr: 1")
        os.chmod(locked, 0)
        assert "cannot be read" in refusal("--config", locked)


def test_aliases_in_reason_and_merges_are_allowed(write):
    path = write("model_args: {base: &b {width: 4, depth: 2}, wide: {<<: *b, width: 9}, wider: *b}\n")
    assert cli("--config", path).model_args == {
        "base": {"width": 4, "depth": 2}, "wide": {"width": 9, "depth": 2}, "wider": {"width": 4, "depth": 2}}


@given(st.binary(max_size=60) | st.text("lrmode_args:{}[]&*!?|>-#'\"\n\t .0123e~<,@%", max_size=60).map(str.encode))
@example(b"lr: 0x7fffffffffffffffffffffffffffffffff")
@example(b"? ? ? a")
@example(b"%YAML 1.1\n---\nlr: 1")
@example(b"lr: 1:2:3")
@example(b"model: 2001-13-41")
@example("\ufefflr: 0.5".encode())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_configuration_or_refused(tmp_path, data):
    path = tmp_path / "any.yaml"
    path.write_bytes(data)
    try:
        found = parse(["--config", str(path)], {})
    except UserError as error:
        assert error.got
    else:
        assert isinstance(found, Config) and found.check() is found


@pytest.mark.slow
@given(st.sampled_from([k.name for k in schema.keys(Config)]), st.text(max_size=20).filter(lambda t: "\0" not in t))
@settings(max_examples=80, deadline=None)
def test_any_text_for_any_key_is_a_configuration_or_refused(name, text):
    try:
        found = parse([f"--{name}={text}"], {})
    except UserError as error:
        assert error.got
    else:
        assert isinstance(found, Config)


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


def test_the_parser_knows_exactly_the_keys():
    known = {a.dest for a in make_parser()._actions} - {"help", "config", "print_config", *schema.sections(Config)}
    assert known == {k.name for k in schema.keys(Config)}


def test_a_bare_off_in_a_file_is_the_word(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("balance: off\nremat: off\ncheckpoint: {every: off}\ndata: {shuffle: off}\n")
    found = parse(["--config", str(path)])
    assert (found.balance, found.remat, found.checkpoint.every, found.data.shuffle) == ("off", "off", "off", False)
