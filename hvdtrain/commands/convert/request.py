"""Conversion from beginning to end: its request, a child process for each framework, and the rename into place."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.interchange.rule import Rule
from hvdtrain.checkpoint import CheckpointStore, inspect
from hvdtrain.checkpoint.downloads import refuse
from hvdtrain.checkpoint.files import fsync_directory, make_directories
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.commands.build_horovod.child_log import ChildFailed, logged
from hvdtrain.config import Config, Named, PipelineConfig, schema
from hvdtrain.core import ROOT, __version__
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals

TOLERANCE = 1e-5
"""Largest difference of outputs that passes, as a part of the largest output."""

_TWINS = {"torch_models.": "tf_models.", "tf_models.": "torch_models."}


@dataclass(frozen=True)
class Request:
    """Conversion of ``source``, made with ``model``, to ``target``, made with ``twin``.

    ``model``, ``twin``: module:callable; ``model_args``, ``twin_args``: their keyword arguments. ``pairs``: torch layer
    -> Keras layer. ``flats``: torch Linear -> the (C, ...) that torch flattens. ``input_shape``: of one sample, where
    the model's file has no example. ``check``: compare outputs, within ``tolerance``.
    """

    source: ModelPath
    target: ModelPath
    model: str = ""
    twin: str = ""
    model_args: dict[str, Any] = field(default_factory=dict)
    twin_args: dict[str, Any] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    flats: dict[str, list[int]] = field(default_factory=dict)
    input_shape: list[int] = field(default_factory=list)
    tolerance: float = TOLERANCE
    check: bool = True

    @property
    def with_state(self) -> bool:
        """Return whether the optimizer's state and the run's position are converted too."""
        return self.target.kind == "checkpoint"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        """Undo `write`."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        for key in ("source", "target"):
            plain[key] = ModelPath(Path(plain[key]["path"]), plain[key]["kind"])
        return cls(**plain)


def completed(request: Request) -> Request:
    """Return ``request`` with what a checkpoint knows of its model, and the twin of a model of this project.

    Errors: `UserError` where either model is not known, or a whole run is asked for and SOURCE is none.
    """
    if request.with_state and request.source.kind != "checkpoint":
        raise UserError(f"{request.source.path} holds weights alone and TARGET {request.target.path} would be a run",
                        "a file as TARGET, or a run's directory as SOURCE", "correct one of them")
    if request.source.kind == "checkpoint":
        meta = inspect(request.source.path).meta
        config = meta.get("config", {})
        known = next((str(name) for name in (config.get("model"), meta.get("model")) if ":" in str(name)), "")
        if request.model in ("", known):
            request = replace(request, model=known, model_args={**config.get("model_args", {}), **request.model_args})
    if not request.model:
        raise UserError("the model of SOURCE is not known", "module:callable or path/file.py:callable",
                        "pass --model torch_models.cnn:build")
    if not request.twin:
        for mine, other in _TWINS.items():
            if request.model.startswith(mine):
                request = replace(request, twin=other + request.model.removeprefix(mine))
    if not request.twin:
        raise UserError(f"the twin of {request.model} is not known", "module:callable or path/file.py:callable",
                        "pass --twin tf_models.cnn:build")
    return replace(request, twin_args={**request.model_args, **request.twin_args})


ENDINGS = {".weights.h5": "weights", ".keras": "keras", ".safetensors": "safetensors", ".pt": "state_dict",
           ".pth": "state_dict"}
FRAMEWORKS = {"weights": "tensorflow", "keras": "tensorflow", "state_dict": "torch"}
"""The framework that a kind of file belongs to; .safetensors and checkpoints are of either."""

_KINDS = "a run's directory, one of its checkpoints, or a file that ends in " + ", ".join(ENDINGS)


@dataclass(frozen=True)
class ModelPath:
    """Path and its kind: "checkpoint" (of a run), "safetensors", "state_dict", "keras" or "weights"."""

    path: Path
    kind: str

    def require(self, framework: str, key: str) -> None:
        """Raise `UserError` where this kind of file is not one of ``framework``; ``key`` names the model's option."""
        own = FRAMEWORKS.get(self.kind, framework)
        if own != framework:
            raise UserError(f"{self.path} is a file of {own} and {key} names a {framework} model", f"a {own} model",
                            f"correct {key}, or the ending of the file")


def kind_of_file(path: Path) -> str:
    return next((kind for ending, kind in ENDINGS.items() if path.name.endswith(ending)), "")


def source_of(text: str, log: Callable[[str], None]) -> ModelPath:
    """Return SOURCE, of a run its newest whole checkpoint, with a ``log`` of damaged ones. Errors: `UserError`."""
    refuse("SOURCE", text)
    path = Path(text)
    if not path.exists():
        raise UserError(f"there is no {text}", _KINDS, "correct SOURCE")
    if path.is_dir():
        for root in RunDirectory(path).roots:
            if root.is_dir() and any(root.glob("step-*")):
                found = CheckpointStore(root, 1).latest_whole(log)
                if found is None:
                    raise UserError(f"{root} holds no complete checkpoint", "at least one", "correct SOURCE")
                return ModelPath(found[0], "checkpoint")
        inspect(path)
        return ModelPath(path, "checkpoint")
    kind = kind_of_file(path)
    if not kind:
        raise UserError(f"SOURCE is {text}", _KINDS, "correct SOURCE, or save it as one of these")
    return ModelPath(path, kind)


def target_of(text: str) -> ModelPath:
    """Return TARGET: a file by its ending, else a run's directory. Errors: `UserError` if it exists."""
    path = Path(os.path.abspath(text))
    kind = kind_of_file(path)
    if os.path.lexists(path) and not (not kind and path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{text} is there already", "a new name, so that nothing is overwritten",
                        "choose another TARGET")
    if not kind and path.suffix in (".h5", ".hdf5", ".pb", ".onnx", ".bin", ".ckpt", ".npz"):
        raise UserError(f"TARGET is {text}", "a new directory, or a file that ends in " + ", ".join(ENDINGS),
                        "correct TARGET")
    return ModelPath(path, kind or "checkpoint")


CHILD_TIMEOUT_S = 1800.0
"""Longest time that one half may take."""


def convert(request: Request) -> dict[str, Any]:
    """Convert, check and put TARGET in place; return the report of `hvdtrain.commands.convert.worker.write`.

    Errors: `UserError` where something does not fit; TARGET does not exist then.
    """
    request = completed(request)
    parent = request.target.path.parent
    try:
        make_directories(parent)
        aside = Path(tempfile.mkdtemp(prefix=".hvdtrain-convert-", dir=parent))
    except OSError as error:
        raise UserError(f"nothing can be created in {parent}: {error.strerror or error}",
                        "a writable directory for TARGET", "choose another TARGET") from None
    try:
        with orderly_signals():
            made, asked, exchange = aside / "made", aside / "request.json", aside / "exchange"
            made.mkdir()
            request.write(asked)
            _child("reading SOURCE", ["read", str(asked), str(exchange)], exchange)
            _child("writing TARGET", ["write", str(asked), str(exchange), str(made)], exchange)
        _publish(made, request)
        return json.loads(exchange.with_suffix(".report").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _child(what: str, argv: list[str], exchange: Path) -> None:
    """Run one half; its `UserError` becomes ours."""
    log, said = exchange.with_suffix(f".{argv[0]}.log"), exchange.with_suffix(".error")
    # Outputs are compared on the CPU, where both frameworks compute in full fp32.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2",
           "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT.parent), os.environ.get("PYTHONPATH", "")]))}
    try:
        logged(what, [sys.executable, "-m", "hvdtrain.commands.convert.worker", *argv], log, env, CHILD_TIMEOUT_S)
    except ChildFailed as failed:
        if said.is_file():
            raise UserError(*json.loads(said.read_text(encoding="utf-8"))) from None
        raise failed.user_error("models that can be built and loaded here", "see its output above") from None


def _publish(made: Path, request: Request) -> None:
    target = request.target.path
    try:
        os.rename(made if request.with_state else made / target.name, target)
        fsync_directory(target.parent)
    except OSError as error:
        raise UserError(f"TARGET {target} could not be created: {error}", "a free name in a writable directory",
                        "choose another TARGET") from None


_GENERATORS = ("python.", "numpy.")
"""Random generators that every framework's run has; their state goes over bit by bit."""


def config_of(plain: Mapping[str, Any]) -> Config:
    """Return the configuration in a manifest, without keys of another release."""
    deep = schema.sections(Config)
    values: dict[str, Any] = {}
    for one in fields(Config):
        if one.name in deep and isinstance(plain.get(one.name), Mapping):
            known = {f.name for f in fields(deep[one.name])}
            values[one.name] = deep[one.name](**{k: v for k, v in plain[one.name].items() if k in known})
        elif one.name in plain:
            values[one.name] = plain[one.name]
    return Config(**values).check()


def bare(config: Config) -> Config:
    """Return what decides the model and its optimizer: for a step that trains nothing, in one process on the CPU."""
    return replace(config, loss=Named(), metrics=[], precision="fp32", balance="off", shares=[], emulate_speed=[],
                   compression="none", model_parallel=1, split_micro_batches=0, devices_per_rank=0,
                   pipeline=PipelineConfig())


def require_constant_rate(config: Config, scheduled: str = "") -> None:
    """Raise `UserError` where a schedule moves the rate; ``scheduled``: the name of one that the optimizer holds."""
    name = scheduled or config.schedule.name * config.schedule.on
    if name:
        raise UserError(f"the run's rate follows {name}, which the other framework does not have",
                        "a constant rate, with warm-up or without", "convert the weights alone: give a file as TARGET")


def config_for(config: Config, framework: str, rule: Rule, model: str, model_args: dict[str, Any],
               target: Path) -> Config:
    """Return the configuration with which the run continues in ``framework``, from its directory ``target``."""
    name, args = rule.in_torch() if framework == "torch" else rule.in_keras()
    scale = config.global_batch / config.schedule.linear_scaling_base if config.schedule.linear_scaling_base else 1.0
    schedule, lr = config.schedule, config.lr
    if not math.isclose(rule.base_lr, lr * scale, rel_tol=1e-6):  # as compiled, or as an argument of the optimizer
        schedule, lr = replace(schedule, linear_scaling_base=0), rule.base_lr
    pipeline = replace(config.pipeline, cut=[])  # the twin's blocks may have other names
    return replace(config, model=model, model_args=dict(model_args), optimizer=Named(name, args), lr=lr,
                   schedule=schedule, pipeline=pipeline, out=str(target), resume="auto")


def meta_for(meta: Mapping[str, Any], framework: str, model: str, rest: Mapping[str, Any],
             config: Config) -> dict[str, Any]:
    """Return the manifest: position, samples and callbacks unchanged, the rest of the other framework."""
    scale = {k: v for k, v in meta["step_rest"].items() if k == "loss_scale"}
    meta = {k: v for k, v in meta.items() if k != "schedule"}  # follows from the configuration
    return {**meta, "hvdtrain": __version__, "framework": framework, "model": model, "step_rest": {**rest, **scale},
            "config": config.to_dict(), "converted_from": meta["framework"]}


def rank_arrays(old: Mapping[str, np.ndarray], fresh: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return one rank's generators: Python's and numpy's unchanged, the framework's ``fresh`` from (seed, rank).

    Compressor state is left out: it belongs to the gradients' buckets of one framework.
    """
    kept = {name: array for name, array in old.items() if name.startswith(_GENERATORS)}
    return {**fresh, **kept}


def remarks(config: Config, draws: bool, compressor_state: bool, compiled_loss: str) -> list[str]:
    """Return what is not converted, as sentences."""
    found = []
    if draws:
        found.append("the frameworks draw dropout from different generators: results agree like those of two seeds")
    if compressor_state:
        found.append("compressor state (error feedback) is not converted and starts from zero")
    if config.loss.name != "auto":
        found.append(f"loss {config.loss.name} is a name of the run's framework: set loss.name in config.yaml to its "
                     "twin if resuming does not know it")
    elif compiled_loss:
        found.append(f"the Keras model was compiled with {compiled_loss}: set loss.name in config.yaml to its twin")
    return found
