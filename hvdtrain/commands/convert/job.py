"""A conversion from beginning to end: two children, one for each framework, and the result renamed into place.

Owns the order, the children and the directory in which TARGET is made before it gets its name. Imports no framework.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.files import fsync_directory, make_directories
from hvdtrain.commands.build_horovod.run import ChildFailed, logged
from hvdtrain.commands.convert.request import Request, completed
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.processes import orderly_signals

CHILD_TIMEOUT_S = 1800.0
"""Longest time that one half may take."""


def convert(request: Request) -> dict[str, Any]:
    """Convert, check and put TARGET in place; return the report of `hvdtrain.commands.convert.worker.write`.

    Errors: `UserError` where something does not fit; TARGET is then not there.
    """
    request = completed(request)
    parent = request.target.path.parent
    try:
        make_directories(parent)
        aside = Path(tempfile.mkdtemp(prefix=".hvdtrain-convert-", dir=parent))
    except OSError as error:
        raise UserError(f"nothing can be made in {parent}: {error.strerror or error}",
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
        raise failed.told("models that can be built and loaded here", "see its last lines above") from None


def _publish(made: Path, request: Request) -> None:
    """Give what was made its name."""
    target = request.target.path
    try:
        os.rename(made if request.with_state else made / target.name, target)
        fsync_directory(target.parent)
    except OSError as error:
        raise UserError(f"TARGET {target} could not be made: {error}", "a free name in a writable directory",
                        "choose another TARGET") from None
