"""Aliases of keys, hints for names of another meaning, spellings of off, and lists from bare items."""

from dataclasses import replace

import pytest

from hvdtrain import Trainer
from hvdtrain.commands.train import by_keys, parse
from hvdtrain.config import Config, DataParallelConfig, ExchangeConfig, ScheduleConfig, aliases, schema
from hvdtrain.core.errors import UserError

ALIASES = {
    "global_batch_size": (8, "global_batch"), "gradient_accumulation_steps": (2, "accumulate"),
    "accumulate_grad_batches": (2, "accumulate"), "micro_batch_size": (4, "micro_batch"),
    "activation_checkpointing": ("auto", "remat"), "gradient_checkpointing": ("every:2", "remat"),
    "bucket_cap_mb": (25.0, "exchange.bucket_mb"), "backend": ("mpi", "collectives"),
    "max_grad_norm": (1.5, "clip_norm"), "gradient_clip_val": (0.5, "clip_norm"), "learning_rate": (0.25, "lr"),
    "output_dir": ("there", "out"), "default_root_dir": ("there", "out"), "resume_from_checkpoint": ("auto", "resume"),
    "ckpt_path": ("auto", "resume"), "max_time": ("04:00:00", "time_limit"), "logger": ("csv", "trackers"),
    "report_to": ("csv", "trackers"), "log_with": ("csv", "trackers"), "zero_stage": (1, "data_parallel.stage")}
OFF = [None, False, 0, "off", "none", "null", "false", "0", "", "Off"]
KEYS = {key.name: key for key in schema.keys(Config)}
CAN_BE_OFF = [key.name for key in KEYS.values() if key.off is not None]


def in_file(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return parse(["--config", str(path)], {})


def value_of(config, name):
    return dict(schema.leaves(config))[name]


def refused(make, *words):
    with pytest.raises(UserError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), caught.value


def test_these_are_all_aliases():
    assert {alias: key.name for alias, key in aliases.of(Config).items()} == {a: k for a, (_, k) in ALIASES.items()}
    assert not set(ALIASES) & (set(KEYS) | set(aliases.HINTS))


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_key_everywhere(alias, tmp_path, capsys):
    value, name = ALIASES[alias]
    made = parse([f"--{alias}", str(value)], {})
    assert value_of(made, name) == ([value] if name == "trackers" else value) != KEYS[name].default
    assert made == in_file(tmp_path, f"{alias}: {value!r}") == Config(**{alias: value}).check()
    assert made == parse([], {f"HVDTRAIN_{alias.upper()}": str(value)}) == Trainer(**{alias: value}).config
    assert made.data_parallel.name == ("zero" if alias == "zero_stage" else "replicate")
    top, own = name.partition(".")[0], value_of(made, name)
    plain = f"--{name}={own if isinstance(own, str) else str(own)}"
    for make in (lambda: parse([f"--{alias}", str(value), plain], {}),
                 lambda: Config(**{alias: value, top: getattr(made, top)}).check()):
        refused(make, f"{alias} is set together with {top}", f"another name for {name}", f"Leave {alias} out")
    refused(lambda: in_file(tmp_path, f"{alias}: {value!r}\n{top}: " + (
        f"{{{name.partition('.')[2]}: {value!r}}}" if "." in name else repr(value))), "set together", "run.yaml")
    refused(lambda: in_file(tmp_path, f"{alias}: {{a: b}}"), f"{alias} is {{'a': 'b'}}",
            f"expected {schema.in_words(KEYS[name].hint)}", f"Correct {alias}")
    refused(lambda: Config(**{alias: object()}).check(), f"{alias} is <object", f"Correct {alias}")


def test_aliases_over_places(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("global_batch_size: 8\nexchange: {adasum: false}\nbucket_cap_mb: 3\n")
    made = parse(["--config", str(path), "--global_batch", "9"], {"HVDTRAIN_LEARNING_RATE": "0.5"})
    assert (made.global_batch, made.lr, made.exchange.bucket_mb) == (9, 0.5, 3)
    refused(lambda: parse(["--max_grad_norm", "1", "--gradient_clip_val", "2"], {}), "set together")
    refused(lambda: parse(["--zero_stage", "1", "--data_parallel", "zero"], {}), "set together")
    refused(lambda: parse(["--global_batch_size", "0"], {}), "global_batch_size is 0")
    refused(lambda: Trainer(Config(lr=1, learning_rate=2), seed=1), "set together")
    refused(lambda: Trainer(Config(learning_rate="x"), seed=1), "learning_rate is 'x'")
    assert Config(zero_stage=0) == Config() and parse(["--zero_stage", "off"], {}) == Config()
    assert Config(zero_stage=2, data_parallel=DataParallelConfig(shards=[2, 1])).data_parallel.shards == [2, 1]
    assert Config(**vars(Config(learning_rate=4.0))) == Config(lr=4.0)
    assert replace(Config(bucket_cap_mb=4), seed=1).exchange == ExchangeConfig(bucket_mb=4)
    assert replace(Config(lr=1), learning_rate=2).check().lr == 2
    assert replace(Config(data_parallel="zero"), zero_stage=0).check().data_parallel.name == "replicate"
    refused(lambda: parse(["--config", str(path), "--exchange", "{bucket_mb: -1}"], {}), "exchange.bucket_mb is -1")


def test_a_section_by_name_or_off_beside_its_alias(tmp_path):
    for word in (None, "off", "replicate", "zero"):
        refused(lambda: Config(zero_stage=2, data_parallel=word).check(), "zero_stage is set together")
        text = f"zero_stage: 2\ndata_parallel: {word or 'null'}\n"
        refused(lambda: in_file(tmp_path, text), "set together", "run.yaml")
    assert parse(["--data_parallel", "replicate"], {"HVDTRAIN_ZERO_STAGE": "1"}).data_parallel.name == "replicate"


def test_keys_of_a_command_follow_aliases_of_the_user():
    """As verify, launch and chaos append theirs."""
    assert by_keys(["--lr", "1"]) == ["--lr", "1"]
    words = by_keys(["--learning_rate", "0.1", "--logger", "csv,wandb", "--zero_stage=1", "--schedule", "off",
                     "--optimizer", "SGD", "--model_args.w", "3", "--output_dir", "x"])
    made = parse([*words, "--lr", "0.2", "--out", "y", "--trackers=[]"], {})
    assert (made.lr, made.out, made.trackers, made.optimizer.name) == (0.2, "y", [], "SGD")
    assert made.data_parallel == DataParallelConfig("zero", 1) and made.model_args == {"w": 3}


@pytest.mark.parametrize("name", aliases.HINTS)
def test_a_name_of_another_meaning_leads_to_a_key(name):
    key, comma, how = aliases.HINTS[name].partition(",")
    assert key in KEYS or key in schema.sections(Config) or key.rpartition(".")[0] in KEYS
    refused(lambda: parse([f"--{name}", "1"], {}), f"no option --{name};", f"'{key}'" if "." in key else
            f"did you mean '{key}'{comma}{how}?")
    with pytest.raises(TypeError, match=f"no key '{name}'"):
        Config(**{name: 1})


@pytest.mark.parametrize("name", ["fsdp_", "nodes", "xyzzy", "loss_fn_weight"])
def test_no_key_is_suggested_that_is_not_alike(name):
    with pytest.raises(UserError) as caught:
        parse([f"--{name}", "1"], {})
    assert "'seed'" not in str(caught.value) and "'model'" not in str(caught.value)


def test_a_truth_value_in_any_case_is_no_block_of_the_model():
    for word in ("true", "True"):
        refused(lambda: parse(["--gradient_checkpointing", word], {}), "gradient_checkpointing is", "every:K")
    assert parse(["--gradient_checkpointing", "False", "--logger", "false"], {}) == Config()


@pytest.mark.parametrize("name", CAN_BE_OFF)
def test_every_spelling_of_off(name):
    key = KEYS[name]
    block = name == "remat"  # whose text 0 is the name of a block
    for word in OFF:
        if not (block and word == "0"):
            own = schema.own_value(key, word)
            assert own == key.off and schema.fits(own, key.hint), word
    section, _, last = name.rpartition(".")
    holder = schema.sections(Config)[section] if section else Config
    made = holder(**{last: None})
    assert value_of(Config(**{section: made}) if section else made, name) == key.off
    if name != "data.augment":
        assert value_of(parse([f"--{name}", "none"], {}), name) == key.off


def test_an_empty_variable_does_not_end_the_exchange_of_gradients():
    refused(lambda: parse([], {"HVDTRAIN_COLLECTIVES": ""}), "collectives is empty", "null")
    refused(lambda: parse(["--backend", ""], {}), "backend is empty", "null")


def test_off_in_files_and_sections(tmp_path):
    names = [name for name in CAN_BE_OFF if "." not in name]
    for word in ("off", "none", "null", "0", "''", ""):
        made = in_file(tmp_path, "".join(f"{name}: {word}\n" for name in names) + "checkpoint: {every: " + word + "}\n"
                       + "".join(f"{name}: {word}\n" for name in schema.off_sections(Config)))
        assert [value_of(made, name) for name in names] == [KEYS[name].off for name in names]
        assert made.checkpoint.every == "off" and not made.schedule.on and not made.pipeline.over_ranks
    for word in OFF:
        assert Config(schedule=word).schedule == ScheduleConfig() and Config(pipeline=word).pipeline.stages == 1
    assert parse(["--schedule", "off", "--early_stop", "none", "--pipeline", "0"], {}) == Config()
    path = tmp_path / "more.yaml"
    path.write_text("schedule: {name: StepLR, args: {step_size: 2}, warmup_steps: 9, linear_scaling_base: 8}\n")
    assert parse(["--config", str(path), "--schedule", "off"], {}) == Config()
    assert parse(["--config", str(path)], {"HVDTRAIN_SCHEDULE": "null"}) == Config()
    assert parse(["--config", str(path), "--schedule", "none"], {}).schedule == ScheduleConfig(
        warmup_steps=9, linear_scaling_base=8)  # a name, as ever


def test_lists_from_bare_items_and_commas(tmp_path):
    assert parse(["--trackers", "wandb,csv"], {}).trackers == ["wandb", "csv"] == Config(trackers="wandb, csv").trackers
    assert in_file(tmp_path, "trackers: csv\nshares: 3\n").shares == [3] == parse(["--shares", "3"], {}).shares
    assert parse(["--metrics+", "mse_loss,l1_loss"], {}).metrics == ["accuracy", "mse_loss", "l1_loss"]


@pytest.mark.parametrize("name", ["fusion_threshold_mb", "cycle_time_ms"])
def test_horovods_own_numbers_take_auto(name, tmp_path):
    assert Config().exchange.bucket_mb == "auto" and ExchangeConfig(bucket_mb=16).unmeasured_mb == 16
    for word in ("auto", "null", "none"):
        assert value_of(parse([f"--exchange.{name}", word], {}), f"exchange.{name}") == -1
        assert value_of(in_file(tmp_path, f"exchange: {{{name}: {word}}}"), f"exchange.{name}") == -1
    assert value_of(parse([f"--exchange.{name}", "0"], {}), f"exchange.{name}") == 0
