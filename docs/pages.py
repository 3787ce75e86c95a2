"""Pages of the reference that are made at build: commands, API, exit statuses, environment variables.

Leaves settings and records, which are stored, to generate.py, and combinations to tests/fixtures.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path

from hvdtrain.cluster.deadline import EXIT_DEADLINE
from hvdtrain.cluster.exit import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_REQUEUE
from hvdtrain.commands import COMMANDS, _home, main
from hvdtrain.commands.bench.cli import BENCHES
from hvdtrain.core.errors import EXIT_USER_ERROR

TREE = Path(__file__).resolve().parents[1]
COLUMNS = "110"
"""Width of the help texts."""

STATUSES = {
    0: "The run is complete, or the command found nothing wrong. An MPI launcher may return 0 after it lost a host: "
       "only `completed.json` in the run's folder says that a run is complete.",
    EXIT_CRASH: "An exception that is not a mistake of configuration: its traceback is printed once, with rank and "
                "host, and the job is aborted. Also `sys.exit()` inside a callable of the user.",
    EXIT_USER_ERROR: "A mistake that the user can fix (`UserError`): one message, this status on every rank. No "
                     "restart fixes it, and `launch --restarts` does not try.",
    EXIT_DEADLINE: "A wait ran out: a rank did not answer within `control_timeout_s` or stood still for "
                   "`heartbeat_timeout_s`, and the job could not be aborted in another way.",
    EXIT_REQUEUE: "The run is saved and not complete, since its job was about to end (SIGTERM, SIGUSR2, `time_limit`). "
                  "Start it again with `--resume auto`; Slurm scripts requeue on this status.",
    EXIT_INTERRUPTED: "Ctrl-C: the run is saved, and all ranks ended together.",
}
"""Exit status -> meaning."""

OF_COMMANDS = {
    "verify": "a run is beyond the tolerance",
    "checkpoints --verify": "a checkpoint is not whole",
    "doctor": "a problem would stop a run",
    "migrate": "no script was recognized",
    "bench wire": "a result was wrong",
    "build": "the built Horovod failed its check",
}
"""Command -> meaning of its status 1."""

VARIABLES = {
    "Configuration": {
        "HVDTRAIN_<KEY>": "A key of the [configuration](settings.md) in capitals, two underscores for a dot: "
                          "`HVDTRAIN_OPTIMIZER__NAME=SGD`. A name that is no key is an error.",
        "HVDTRAIN_CONFIG": "YAML file of the configuration, as `--config`.",
    },
    "Scripts of Horovod's API": {
        "HVDTRAIN_COLLECTIVES": "For `hvdtrain.keras` and `hvdtrain.tensorflow`: `auto` (default) and `shared` use "
                                "shared memory within a host, anything else leaves all gradients to Horovod.",
        "HVDTRAIN_HEARTBEAT_TIMEOUT_S": "Longest standstill of a rank in seconds, for scripts without a "
                                        "configuration (default 30; 0 disables the watchdog).",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "Allows process sets that are added after `init()`.",
    },
    "Choice of devices and libraries": {
        "CUDA_VISIBLE_DEVICES": "GPUs that ranks may use, as anywhere.",
        "KERAS_BACKEND": "`tensorflow` or `torch`: the framework of a Keras model.",
        "CUBLAS_WORKSPACE_CONFIG": "Set to `:4096:8` by a run with `deterministic` if unset.",
        "TF_NUM_INTEROP_THREADS": "Threads in which operations of TensorFlow wait; read, not set.",
        "TF_CPP_MIN_LOG_LEVEL": "Set to 2 by the commands if unset, which hides TensorFlow's start-up messages.",
        "HF_HUB_OFFLINE": "Set to 1 by `--model hf:FOLDER` if unset: nothing is fetched.",
        "CXX": "C++ compiler of `build` and of `compile` in PyTorch.",
        "TORCHINDUCTOR_CACHE_DIR": "Cache of `compile` in PyTorch; else a folder of the user.",
        "XDG_CACHE_HOME": "Caches of built Horovod wheels, probes and tokenizers: `$XDG_CACHE_HOME/hvdtrain` "
                          "(default `~/.cache/hvdtrain`).",
        "HOROVOD_CUDA_HOME": "CUDA that `build` uses; then `CUDA_HOME` and `CUDA_PATH`.",
        "HOROVOD_NCCL_HOME": "NCCL that `build` uses.",
    },
    "Trackers": {
        "WANDB_MODE": "Mode of W&B; without it and without a login a run is logged offline.",
        "WANDB_PROJECT": "Project of W&B (default `hvdtrain`).",
        "WANDB_ERROR_REPORTING": "Set to `false` if unset: W&B would call its makers, offline too.",
        "MLFLOW_TRACKING_URI": "Where MLflow writes (default: the folder `mlruns` of the run).",
        "MLFLOW_EXPERIMENT_NAME": "Experiment of MLflow (default `hvdtrain`).",
    },
    "Output": {
        "TERM": "Empty, `dumb` or `unknown`: progress is printed as plain lines.",
        "CI": "`1` or `true`: progress is printed as plain lines.",
    },
    "Set by hvdtrain for its own processes; do not set": {
        "HVDLAUNCH_*": "What `launch --restarts` tells its ranks: folder of the attempt, its number, end of the job.",
        "JOB_OF_HVDTRAIN": "Mark of the processes that a command has started, by which it ends them.",
        "HOROVOD_FUSION_THRESHOLD": "From `exchange.fusion_threshold_mb`.",
        "HOROVOD_CYCLE_TIME": "From `exchange.cycle_time_ms`.",
        "HVDTRAIN_RPATH": "Library paths during a build of Horovod.",
    },
}
"""Section -> variable -> meaning."""

BARE = "    options: {show_signature: false, members: false}\n"
"""Options of a class whose signature would repeat the table of its keys."""

API = {
    "Trainer": {"hvdtrain.trainer.Trainer": ""},
    "Config": {"hvdtrain.config.Config": BARE},
    "Named": {"hvdtrain.config.Named": BARE},
    "Schedule": {"hvdtrain.config.ScheduleConfig": BARE},
    "run": {"hvdtrain.cluster.run_function.run": "", "hvdtrain.core.errors.RankFailed": BARE},
    "Result": {"hvdtrain.trainer.Result": BARE},
    "Callback": {"hvdtrain.engine.callbacks.base.Callback":
                 "    options: {members: [where, every, doing, state_dict, load_state_dict]}\n"},
    "Events": {"hvdtrain.core.events": "    options: {members: false, show_root_heading: false}\n"},
    "UserError": {"hvdtrain.core.errors.UserError": ""},
}
"""Section of the page -> object -> options of mkdocstrings."""


def help_text(*words: str) -> str:
    """Return the help text of a command; nothing is started."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            (_home(words[0]).main([*words[1:], "--help"]) if words else main(["--help"]))
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return out.getvalue().strip()


def cli() -> str:
    """Return the page of the command line: each command's help."""
    text = ["# Command line", "", "`hvdtrain COMMAND` and `python -m hvdtrain COMMAND` are the same.", "",
            "```text", help_text(), "```", ""]
    names = [(name,) for name in COMMANDS] + [("bench", bench) for bench in BENCHES]
    for words in names:
        meaning = BENCHES[words[1]] if len(words) > 1 else COMMANDS[words[0]]
        text += [f"## {' '.join(words)}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        if words == ("train",):
            text += ["Each key of the [configuration](settings.md) is an option.", ""]
        text += ["```text", help_text(*words), "```", ""]
    return "\n".join(text)


def api() -> str:
    """Return the page of the API, for mkdocstrings."""
    text = ["# API", "", "Import these names from `hvdtrain`. Importing the package loads no framework.", ""]
    for section, names in API.items():
        text += [f"## {section}", "", *(f"::: {name}\n{options}" for name, options in names.items()), ""]
        if section == "Config":
            text += ["Keys, with type, default and unit: [settings](settings.md).", ""]
    for package, note in (("hvdtrain.keras", "`import hvdtrain.keras as hvd` replaces `horovod.tensorflow.keras`."),
                          ("hvdtrain.tensorflow", "`import hvdtrain.tensorflow as hvd` replaces `horovod.tensorflow`."),
                          ):
        text += [f"## {package}", "", note, "", *_horovod_names(package), ""]
    return "\n".join(text)


def _horovod_names(package: str) -> list[str]:
    """Return directives for the names of a package with lazy names; those of Horovod's basics as a list."""
    module = importlib.import_module(package)
    homes = {name: home if "." in home else f"{package}.{home}" for name, home in module._HOME.items()}
    shown = {name: home for name, home in homes.items() if home.startswith(package) and _documented(home, name)}
    rest = sorted(set(module.__all__) - set(shown))
    return [*(f"::: {home}.{name}\n" for name, home in shown.items()),
            "As in Horovod: " + ", ".join(f"`{name}`" for name in rest) + "."]


def _documented(module: str, name: str) -> bool:
    """Return whether a module defines a function or class of this name with a docstring, by its source."""
    import ast

    path = TREE.joinpath(*module.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    return any(getattr(node, "name", "") == name and ast.get_docstring(node)  # type: ignore[arg-type]
               for node in ast.parse(source.read_text(encoding="utf-8")).body)


def exit_codes() -> str:
    """Return the page of exit statuses."""
    text = ["# Exit statuses", "", "All ranks of a job end with the same status.", "", "| status | meaning |",
            "|---|---|"]
    text += [f"| {status} | {meaning} |" for status, meaning in sorted(STATUSES.items())]
    text += ["", "Status 1 of a command that checks something:", "", "| command | meaning of 1 |", "|---|---|"]
    text += [f"| `{command}` | {meaning} |" for command, meaning in OF_COMMANDS.items()]
    text += ["", "A launcher returns the status of a rank, or one of its own: 128 + N after signal N, for example 137 "
             "after SIGKILL. See [reliability](../explanation/reliability.md) for what ends a run.", ""]
    return "\n".join(text)


def environment() -> str:
    """Return the page of environment variables."""
    text = ["# Environment variables", "", "`launch` and `horovodrun` pass `HVDTRAIN_*` to all ranks; see "
            "[launching](../how-to/launch.md) for others.", ""]
    for section, names in VARIABLES.items():
        text += [f"## {section}", "", "| variable | meaning |", "|---|---|"]
        text += [f"| `{name}` | {meaning} |" for name, meaning in names.items()] + [""]
    return "\n".join(text)


def combinations() -> str:
    """Return the page of combinations, from the data that the tests run."""
    if str(TREE / "tests" / "fixtures") not in sys.path:
        sys.path.append(str(TREE / "tests" / "fixtures"))
    table = importlib.import_module("combinations")
    text = ["# Combinations", "", "Settings two and two: **yes**, a test trains with both and compares with one rank "
            "alone; **refused** with an error message; empty: no test has both. Settings that are not named have their "
            "defaults: replicas, fp32, no compression. GPUs: [what was verified](verified.md).", ""]
    for framework, title in table.FRAMEWORKS.items():
        refused: list[str] = []
        text += [f"## {title}", "", "| | " + " | ".join(table.KEYS) + " |", "|---" * (len(table.KEYS) + 1) + "|"]
        for row in table.KEYS:
            cells = []
            for column in table.KEYS:
                if table.GROUP[row] == table.GROUP[column]:
                    cells.append("–")
                    continue
                found, why = table.verdict(framework, row, column)
                if found == "refused" and why not in refused:
                    refused.append(why)
                cells.append({"works": "yes", "untested": ""}.get(found) or (
                    f"refused {refused.index(why) + 1}" if found == "refused" else ""))
            text.append(f"| {row} | " + " | ".join(cells) + " |")
        text += ["", *(f"{i}. `{message} ...`" for i, message in enumerate(refused, 1)), ""]
    text += ["The tests: `python -m pytest tests/conformance/test_combinations.py`, `tests/mpi/test_combinations.py` "
             "under `mpirun`, and those that `tests/fixtures/combinations.py` names.", ""]
    return "\n".join(text)


PAGES = {"cli": cli, "api": api, "exit-codes": exit_codes, "environment": environment, "combinations": combinations}
"""Name of the page -> the function that returns its text."""
