"""Law 4: the core imports the standard library and numpy only, and importing it does nothing else.

Checked in one fresh interpreter: every module of the core is imported, one after the other, and each is asked what it
brought along.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(hvdtrain.__file__).parent
ELSEWHERE = ("hvdtrain.backends.torch", "hvdtrain.backends.tensorflow", "hvdtrain.keras", "hvdtrain.backends.keras",
             "hvdtrain.engine.keras_bridge", "hvdtrain.engine.keras_callback_state", "hvdtrain.data.layout",
             "hvdtrain.engine.keras_measured_weights", "hvdtrain.engine.keras_training_metrics", "hvdtrain.tensorflow",
             "hvdtrain.torch", "hvdtrain.commands.migrate", "hvdtrain.commands.migrate.cli", "hvdtrain.__main__",
             "hvdtrain.recipes.groups", "hvdtrain.recipes.groups_keras")
"""The backends of the frameworks, Horovod's APIs for their users, and migrate, which edits syntax trees; the models of
recipes; and ``__main__``, which runs. The rest of cli and cluster keeps to the law too."""

PROBE = """
import importlib, json, os, signal, sys, threading
import numpy
def state():
    return [sorted(os.environ.items()), [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
            threading.active_count(), str(sys.excepthook), sys.path[:], os.listdir(".")]
known = set(sys.modules)
before, wrong, effects = state(), {}, []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    tops = {m.partition(".")[0] for m in set(sys.modules) - known}
    known |= set(sys.modules)
    foreign = sorted(t for t in tops - set(sys.stdlib_module_names) - {"hvdtrain", "numpy"})
    if foreign:
        wrong[name] = foreign
    if state() != before:
        effects.append(name)
        before = state()
print(json.dumps([wrong, effects]))
"""


def modules() -> list[str]:
    """Dotted names of the core."""
    files = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in sorted(ROOT.rglob("*.py"))]
    names = [file.removesuffix(".__init__") for file in files]
    return [name for name in names if not any(name == place or name.startswith(f"{place}.") for place in ELSEWHERE)]


def probe(names: list[str], cwd: Path, *paths: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return ({module: foreign packages it imported}, [modules whose import had an effect])."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *paths])}
    done = subprocess.run([sys.executable, "-B", "-c", PROBE, json.dumps(names)], text=True, timeout=60,
                          capture_output=True, cwd=cwd, env=env)  # -B: no cache files
    assert done.returncode == 0, done.stderr
    wrong, effects = json.loads(done.stdout)
    return wrong, effects


def test_the_core_imports_the_standard_library_and_numpy(tmp_path):
    names = modules()
    assert {"hvdtrain.engine.loop", "hvdtrain.engine.assemble", "hvdtrain.comm.reducer.reducer",
            "hvdtrain.backends.numpy.model", "hvdtrain.commands.train",
            "hvdtrain.comm.collectives.mpi", "hvdtrain"} <= set(names)
    wrong, effects = probe(names, tmp_path)
    assert not wrong, "these modules import what is not standard"
    assert not effects, "importing these modules changed the process"


@pytest.mark.parametrize("text, foreign, effect", [
    ("import yaml", True, False), ("import os\nos.environ['A_NAME'] = '1'", False, True),
    ("import threading as t, time\nt.Thread(target=lambda: time.sleep(9), daemon=True).start()", False, True),
    ("import json", False, False)], ids=["package", "environment", "thread", "good"])
def test_the_check_sees_what_is_wrong(text, foreign, effect, tmp_path):
    (tmp_path / "suspect.py").write_text(text)
    wrong, effects = probe(["suspect"], tmp_path, str(tmp_path))
    assert ("yaml" in wrong.get("suspect", []) or "_yaml" in wrong.get("suspect", [])) is foreign
    assert bool(effects) is effect
