"""Command lines, environments and files that `train` refuses, and the messages."""

import os

import pytest
from command_lines import cli, refusal
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdtrain.commands.train import parse
from hvdtrain.config import Config, schema
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
        (["--fsdp", "3"], ["did you mean 'data_parallel', which does not divide parameters"]),
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
        (["--shares", "x"], ["shares is 'x'", "a list of numbers such as [3, 1]"]),
        (["--shares", "[a, 1]"], ["shares is '[a, 1]'", "a list of numbers"]),
        (["--shares", "[1, .nan]"], ["shares is nan", "finite"]),
        (["--shares", "[0, 0]"], ["shares", "above 0"]),
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
