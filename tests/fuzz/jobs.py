"""``python tests/fuzz/jobs.py --n 300 --framework torch --seed 1``: made-up configurations as real jobs of two ranks.

Each is a file that ``python -m hvdtrain train`` reads under mpirun with a small model and made-up data. Its status has
to be 0 or 2, on 2 with one message, and no traceback; anything else is printed with the file, and the status is 1.
``--skip`` leaves out the first of a seed's configurations, so that they can be run in portions. ``--accepted`` takes
only those that `Config.check` accepts: of the others nearly all end with status 2 before a model is built.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]

from fuzzed import built, changes  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from hvdtrain.config import yaml_file as recipe  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

MODELS = {"torch": "torch_models.mlp:build", "tensorflow": "tf_models.mlp:build"}
BASE = {"epochs": 1, "max_steps": 2, "global_batch": 8, "progress": "off", "control_timeout_s": 60.0,
        "data": {"name": "synthetic", "args": {"samples": 24, "shape": [8, 8]}}}
LIMIT_S = 120


def drawn(n: int, number: int, accepted: bool = False) -> list[dict[str, Any]]:
    """Return the first ``n`` configurations of seed ``number``, by dotted names; ``accepted``: of those that pass."""
    found: list[dict[str, Any]] = []
    seen: set[frozenset[str]] = set()

    def keep(changed: dict[str, Any]) -> None:
        if not accepted:
            found.append(changed)
        elif frozenset(changed) not in seen and passes(changed):  # hypothesis varies what it drew
            seen.add(frozenset(changed))
            found.append(changed)

    run = settings(max_examples=60 * n if accepted else n, deadline=None, database=None, phases=[Phase.generate],
                   suppress_health_check=list(HealthCheck))(given(changes())(keep))
    seed(number)(run)()
    return found[:n]


def passes(changed: dict[str, Any]) -> bool:
    """Return whether `Config.check` accepts a configuration."""
    try:
        built(changed, Path("run")).check()
    except UserError:
        return False
    return True


def text_of(changed: dict[str, Any], framework: str, out: Path) -> str:
    """Return the recipe in YAML; what YAML does not hold is left out."""
    whole: dict[str, Any] = {**copy.deepcopy(BASE), "model": MODELS[framework], "out": str(out)}
    for name, value in changed.items():
        if name == "out" or name == "model" and value == "auto":
            continue
        section, _, key = name.rpartition(".")
        at = whole.setdefault(section, {}) if section else whole
        try:
            recipe.load(recipe.dump({"value": value}), "a value")
        except Exception:  # noqa: BLE001  (bytes, a number of hundreds of digits, a key that is no text)
            continue
        at[key] = list(value) if isinstance(value, tuple) else value
    return recipe.dump(whole)


def run(text: str, folder: Path, ranks: int) -> tuple[int | None, str]:
    """(status, all output) of one job; None: it did not end in time, and was killed with its ranks."""
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", sys.executable, "-m", "hvdtrain",
               "train", "--config", str(folder / "recipe.yaml")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", start_new_session=True)
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        return None, said
    return process.returncode, said


def verdict(status: int | None, said: str) -> str:
    """Return what is wrong with how a job ended, or ""."""
    if status not in (0, 2):
        return "it hung" if status is None else f"status {status}"
    if "Traceback" in said:
        return "a traceback"
    messages = said.count("hvdtrain: ")
    return f"{messages} messages with status 2" if status == 2 and messages != 1 else ""


def main() -> int:
    """Run the jobs one after another; return 1 where one ended otherwise than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--framework", choices=sorted(MODELS), default="torch")
    parser.add_argument("--accepted", action="store_true")
    asked = parser.parse_args()
    statuses: Counter[int | None] = Counter()
    bad = 0
    begin = time.monotonic()
    for changed in drawn(asked.skip + asked.n, asked.seed, asked.accepted)[asked.skip:]:
        with tempfile.TemporaryDirectory() as folder:
            text = text_of(changed, asked.framework, Path(folder) / "run")
            status, said = run(text, Path(folder), asked.ranks)
        statuses[status] += 1
        wrong = verdict(status, said)
        if wrong:
            bad += 1
            print(f"FOUND {wrong}\n{text}\n{said[-3000:]}", flush=True)
        print(f"{statuses.total()} jobs: {dict(statuses)}, {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
