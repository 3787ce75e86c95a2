"""Half of a conversion in a process of its own: reading SOURCE with its framework, or writing TARGET with its.

``python -m hvdtrain.commands.convert.worker read|write REQUEST EXCHANGE [MADE]``. EXCHANGE is a checkpoint whose groups
hold the weights ("model"), the optimizer's state by slot ("slot-m"), the random generators by rank, input and outputs
of the check, and random weights ("chance") with their outputs. A user's mistake is left in EXCHANGE.error.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import backends
from hvdtrain.backends.interchange import layers
from hvdtrain.backends.interchange import rule as rules
from hvdtrain.backends.interchange.layers import Model
from hvdtrain.backends.interchange.pairing import Pairs, carry, carry_moments, hints, pair
from hvdtrain.backends.interchange.rule import Rule, remarks
from hvdtrain.backends.model_spec import Spec, build_spec
from hvdtrain.checkpoint import OpenCheckpoint, Snapshot, read_snapshot, write_snapshot
from hvdtrain.checkpoint.run_directory import RunDirectory
from hvdtrain.cluster import exit_calls
from hvdtrain.cluster.control import SoloControl
from hvdtrain.comm.collectives.base import NullCollectives
from hvdtrain.commands.convert import cli
from hvdtrain.commands.convert import request as target_run
from hvdtrain.commands.convert.request import Request
from hvdtrain.config import Config
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core import rng
from hvdtrain.core.errors import UserError
from hvdtrain.parallel.parts import ModelParts

SHORT = {"torch": "torch", "tensorflow": "keras"}


def read(request: Request, exchange: Path) -> None:
    snapshot = read_snapshot(request.source.path) if request.source.kind == "checkpoint" else None
    config = target_run.config_of(snapshot.meta["config"]) if snapshot else Config()
    spec, side = _built(request.model, request.model_args, config.seed)
    request.source.require(spec.framework, "--model")
    meta: dict[str, Any] = {"framework": spec.framework, "notes": []}
    groups: dict[str, dict[str, np.ndarray]] = {}
    if snapshot is None:
        side.read_file(spec.model, request.source.path)
    else:
        if snapshot.meta["framework"] != spec.framework:
            raise UserError(f"the checkpoint is of a {snapshot.meta['framework']} model and --model names one of "
                            f"{spec.framework}", "the model of that run", "correct --model")
        parts = _parts(spec, config)
        held = {name: dict(snapshot.tensors[name]) for name in ("model", "optimizer")}
        parts.state.load(held, snapshot.meta["step_rest"])
        if request.with_state:
            target_run.require_constant_rate(config, side.scheduled(parts))
            rules.require_one_rule(side.own_optimizer(parts))
            rule, slots = side.optimizer(parts)
            groups |= {f"slot-{slot}": arrays for slot, arrays in slots.items()}
            groups |= {name: dict(arrays) for name, arrays in snapshot.tensors.items() if name.startswith("rank-")}
            meta |= {"run": dict(snapshot.meta), "rule": rule.to_dict(), "loss": side.compiled_loss(spec.model)}
    meta["model"] = side.describe(spec.model).to_dict()
    groups["model"] = {name: np.array(array, copy=True) for name, array in side.arrays(spec.model).items()}
    if request.check:
        x = cli.inputs(spec.example, request.input_shape, side.input_shapes(spec.model))
        groups |= {"input": _numbered(x), "output": _numbered(_outputs(request.model, side, spec, x))}
        groups |= _by_chance(request, side, spec, x)
    write_snapshot(exchange, Snapshot(groups, meta))


def write(request: Request, exchange: Path, made: Path) -> dict[str, Any]:
    """Make TARGET in ``made`` from ``exchange``; return the report. `UserError` leaves nothing."""
    found = read_snapshot(exchange)
    meta, rule = found.meta, Rule.from_dict(found.meta["rule"]) if "rule" in found.meta else None
    old = target_run.config_of(meta["run"]["config"]) if rule else Config()
    spec, side = _built(request.twin, request.twin_args, old.seed)
    request.target.require(spec.framework, "--twin")
    if meta["framework"] == spec.framework:
        raise UserError(f"{request.model} and {request.twin} are both models of {spec.framework}",
                        "one of PyTorch and one of Keras", "correct --model or --twin")
    source, target = Model.from_dict(meta["model"]), side.describe(spec.model)
    torch, keras = (source, target) if source.framework == "torch" else (target, source)
    pairs = pair(torch, keras, request.pairs, {name: tuple(shape) for name, shape in request.flats.items()})
    side.assign(spec.model, carry(pairs, found.tensors["model"], SHORT[spec.framework]))
    report: dict[str, Any] = {"rows": pairs.rows(), "how": pairs.how, "notes": [], "frameworks":
                              [meta["framework"], spec.framework], "weights": len(target.weights())}
    if request.check:
        report |= _checked(request, pairs, side, spec, found)
        side.assign(spec.model, carry(pairs, found.tensors["model"], SHORT[spec.framework]))
    if rule is None:
        side.write_file(spec.model, made / request.target.path.name)
        return report
    if spec.optimizer is not None:
        raise UserError(f"{request.twin} defines optimizer(model, config), and the run continues with "
                        "the optimizer of its checkpoint", "an optimizer by name", "leave optimizer out of the twin's "
                        "file, or convert the weights alone: give a file as TARGET")
    config = target_run.config_for(old, spec.framework, rule, request.twin, request.twin_args, request.target.path)
    slots = {slot: carry_moments(pairs, found.tensors[f"slot-{slot}"], SHORT[spec.framework]) for slot in rule.slots()
             if f"slot-{slot}" in found.tensors}
    parts = _parts(spec, config)
    rules.require_one_rule(side.own_optimizer(parts))
    parts.state.load(*side.state_of(parts, rule, slots))  # what --resume will do
    _save(request, side, parts, config, found, made)
    compressor_state = any(name.startswith("compressor.") for arrays in found.tensors.values() for name in arrays)
    report["notes"] = [*remarks(rule, config.schedule.warmup_steps), *_training_remarks(pairs), *target_run.remarks(
        config, source.draws or target.draws, compressor_state, str(meta["loss"]))]
    name, args = config.optimizer.name, config.optimizer.args
    return report | {"optimizer": f"{name} {args}", "step": meta["run"]["cursor"]["step"], "slots": sorted(slots)}


def _save(request: Request, side: Any, parts: ModelParts, config: Config, found: OpenCheckpoint, made: Path) -> None:
    """Write the run's directory: one checkpoint, as the run itself would write it, and its configuration."""
    run = found.meta["run"]
    groups, rest = parts.state.state()
    ranks = {name: target_run.rank_arrays(arrays, side.fresh_generators(parts.model, config.seed, int(name[5:])))
             for name, arrays in found.tensors.items() if name.startswith("rank-")}
    number = int(run["cursor"]["step"])
    meta = target_run.meta_for(run, backends.framework_of(parts.model), request.twin, rest, config)
    write_snapshot(RunDirectory(made).checkpoints / f"step-{number:08d}", Snapshot({**groups, **ranks}, meta),
                   step=number)
    plain = json.loads(json.dumps(config.to_dict(), default=repr))
    (made / RunDirectory.CONFIG).write_text(recipe.dump(plain), encoding="utf-8")


def _training_remarks(pairs: Pairs) -> list[str]:
    found = [text for ends in pairs.ends for text in layers.remark(ends)]
    if any(ends.torch.kind == "batch norm" for ends in pairs.ends):
        found.append("BatchNorm's running variance is unbiased in PyTorch and biased in Keras: evaluation differs "
                     "by about 1 / (values per channel of a micro-batch), training does not")
    return found


def _checked(request: Request, pairs: Pairs, side: Any, spec: Spec, found: OpenCheckpoint) -> dict[str, Any]:
    x = _in_order(found, "input")
    may = "; ".join(hints(pairs)) or "the layers' settings or activations differ, or the order of operations"
    apart = cli.apart(_outputs(request.twin, side, spec, x), _in_order(found, "output"))
    if not apart <= request.tolerance:
        raise UserError(f"the twins' outputs differ by {apart:.1e} of the largest on the same random input",
                        f"at most {request.tolerance:g}", f"check: {may}")
    report = {"apart": apart, "input": [list(a.shape) for a in x]}
    if "chance" not in found.tensors:  # its outputs were not finite
        return report
    side.assign(spec.model, carry(pairs, found.tensors["chance"], SHORT[spec.framework]))
    by_chance = cli.apart(_outputs(request.twin, side, spec, x), _in_order(found, "chance-output"))
    if not by_chance <= max(cli.APART_BY_CHANCE, request.tolerance):
        raise UserError("the twins' outputs agree with SOURCE's weights, but with random "
                        f"weights of the same pairs they differ by {by_chance:.1e} of the largest: weights such as 0 "
                        "hide it",
                        f"at most {cli.APART_BY_CHANCE:g}", f"check: {may}")
    return report | {"apart_by_chance": by_chance}


def _by_chance(request: Request, side: Any, spec: Spec, x: list[np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return random weights and the outputs with them, so that no weight of SOURCE, such as 0, hides a layer; {} where
    not finite.

    The model keeps its own weights.
    """
    own = {name: np.array(array, copy=True) for name, array in side.arrays(spec.model).items()}
    side.assign(spec.model, cli.random_weights(side.describe(spec.model), own))
    drawn = {name: np.array(array, copy=True) for name, array in side.arrays(spec.model).items()}  # shared ones once
    outputs = _outputs(request.model, side, spec, x)
    side.assign(spec.model, own)
    if not all(np.isfinite(a).all() for a in outputs):
        return {}
    return {"chance": drawn, "chance-output": _numbered(outputs)}


def _outputs(text: str, side: Any, spec: Spec, x: list[np.ndarray]) -> list[np.ndarray]:
    try:
        return side.outputs(spec.model, x)
    except Exception as error:  # each framework and each model has its own
        shapes = ", ".join(f"{a.shape} {a.dtype}" for a in x)
        raise UserError(f"{text} does not take random input {shapes}: {' '.join(str(error).split())[:300]}",
                        "input like that of the model's file, its example(B)",
                        "pass --input_shape with the shape of one sample, or --no-check") from error


def _built(text: str, args: dict[str, Any], seed: int) -> tuple[Spec, Any]:
    def prepare() -> None:
        rng.seed(seed, 0)
        for name in backends.imported():
            backends.load(name).seed(seed, 0)

    spec = build_spec(text, args, prepare)
    if spec.framework not in SHORT:
        raise UserError(f"{text} is a {spec.framework} model", "one of PyTorch or Keras", "correct the model")
    return spec, importlib.import_module(f"hvdtrain.backends.{spec.framework}.convert")


def _parts(spec: Spec, config: Config) -> ModelParts:
    plain = replace(spec, task=None, metrics=None, weight=None)
    make = backends.load(spec.framework).make_parts
    return make(plain, target_run.bare(config), SoloControl(), NullCollectives(), 0)


def _numbered(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{i:03d}": array for i, array in enumerate(arrays)}


def _in_order(found: OpenCheckpoint, group: str) -> list[np.ndarray]:
    return [array for _, array in sorted(found.tensors[group].items())]


def main(argv: list[str]) -> int:
    """Run one half; return 2 after a user's mistake, which is left as JSON in EXCHANGE.error."""
    request, exchange = Request.read(Path(argv[1])), Path(argv[2])
    try:
        with exit_calls.told():
            if argv[0] == "read":
                read(request, exchange)
            else:
                report = write(request, exchange, Path(argv[3]))
                exchange.with_suffix(".report").write_text(json.dumps(report), encoding="utf-8")
    except UserError as error:
        exchange.with_suffix(".error").write_text(json.dumps([error.got, error.expected, error.do]), encoding="utf-8")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
