"""``python tests/fuzz/shortages.py --n 460 --jobs 40 --seed 1``: a rank runs out of memory, any one, anywhere.

``--n`` cases with ranks as threads, of which `tests/fixtures/shortages.py` tells what must come; ``--jobs`` real ones
of two and three ranks under mpirun, over every wire, which must end with status 0, with the shortages in their record,
and with the weights of the undisturbed job within `verify`'s tolerance, to the bit where no size has changed. What is
wrong is printed with its case, and the status is 1. ``--skip`` leaves out the first jobs of a seed, to run in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")  # ranks as threads share TensorFlow's pool, and nodes wait in it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from shortages import drawn, wrong  # noqa: E402

from hvdtrain.commands.verify import weights_of  # noqa: E402
from hvdtrain.core import comparison  # noqa: E402

LIMIT_S = 120
MODELS = ROOT / "tests" / "fixtures" / "short_of_memory.py"
TRAINED = (("3,1", "horovod", 2, "none", "replicate", 1, "Adam"), ("1,1", "shared", 1, "none", "zero", 2, "SGD"),
           ("2,1,1", "horovod", 1, "none", "zero", 2, "Adam"), ("1,1", "mpi", 2, "topk", "replicate", 1, "SGD"),
           ("1,1", "horovod", 2, "fp16", "replicate", 1, "SGD"))
"""What jobs train: shares, wire, accumulate, compression, data_parallel, its stage, optimizer. Few, since each is run
undisturbed, too."""


def threads(n: int, seed: int, frameworks: tuple[str, ...]) -> tuple[int, Counter[str]]:
    """Run ``n`` cases in this process; return how many ended wrong, and how many there were by framework and place."""
    bad, kinds = 0, Counter[str]()
    for case in drawn(n, seed, frameworks):
        with contextlib.redirect_stdout(io.StringIO()):
            said = wrong(case)
        kinds[f"{case.setting.framework} {case.place}"] += 1
        if said:
            bad += 1
            print(f"FOUND {said}\n{case}", flush=True)
    return bad, kinds


def job_of(draw: random.Random, framework: str) -> dict[str, Any]:
    """Run one job: its options, and what fails in it."""
    names = ("shares", "collectives", "accumulate", "compression", "data_parallel.name", "data_parallel.stage",
             "optimizer.name")
    options: dict[str, Any] = dict(zip(names, draw.choice(TRAINED)))
    ranks, phase = options["shares"].count(",") + 1, draw.choice(("forward", "backward", "evaluation"))
    # The first three are of the first sample, which is tried at the start: what it lacks the first step tells.
    fails = {"rank": draw.randrange(ranks), "phase": phase, "at": draw.randrange(3, 9), "times": draw.choice((1, 2, 3))}
    return {"framework": framework, "ranks": ranks, "options": options, "fails": fails}


def run(job: dict[str, Any], out: Path, fails: dict[str, Any]) -> tuple[int | None, str]:
    """(status, output); None: it did not end in time, and was killed with its ranks."""
    options = {"model": f"{MODELS}:{job['framework']}_model", "global_batch": 16, "max_steps": 5, "epochs": 100,
               "eval_every": 1, "progress": "off", "lr": 0.01, "checkpoint.every": "off", "control_timeout_s": 60,
               "exchange.bucket_mb": 0.005, "data.name": "digits", "metrics": "[accuracy]", "out": out,
               **job["options"], **{f"model_args.{key}": value for key, value in fails.items()}}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = ["mpirun", "-n", str(job["ranks"]), "--oversubscribe", "--bind-to", "none", sys.executable, "-m",
               "hvdtrain", "train", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=out.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", start_new_session=True)
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return None, process.communicate()[0]


def verdict(job: dict[str, Any], folder: Path, plain: Path) -> str:
    """Run a job; what is wrong with how it ended, or ""."""
    for out, fails in ((plain, {}), (folder / "run", job["fails"])):
        if out == plain and (plain / "completed.json").exists():
            continue
        status, said = run(job, out, fails)
        if status != 0:
            return f"{'it hung' if status is None else f'status {status}'}\n{said[-3000:]}"
    told = json.loads((folder / "run" / "completed.json").read_text())["out_of_memory"]["each"]
    if len(told) != job["fails"]["times"] or {each["rank"] for each in told} != {job["fails"]["rank"]}:
        return f"these shortages were told: {told}"
    own, other = weights_of(folder / "run"), weights_of(plain)
    sizes = all(each["then"] == each["size"] or each["phase"] == "evaluation" for each in told)
    apart, where = comparison.largest_difference(other, own)
    if sizes and not comparison.same_bits(own, other):
        return f"no size has changed, but {where} is {apart:.1e} apart"
    if job["options"]["compression"] == "none" and not apart <= comparison.MOST:
        return f"{where} is {apart:.1e} apart"
    print(f"  {job['options']} {job['fails']}: {len(told)} times, {'same bits' if sizes else f'{apart:.1e} apart'}")
    return ""


def jobs(n: int, skip: int, seed: int, frameworks: tuple[str, ...]) -> int:
    """Run jobs ``skip`` to ``n`` of the seed; return how many ended wrong."""
    draw, bad = random.Random(f"jobs {seed}"), 0
    asked = [job_of(draw, frameworks[i % len(frameworks)]) for i in range(n)][skip:]
    with tempfile.TemporaryDirectory() as temp:
        for i, job in enumerate(asked):
            folder = Path(temp) / str(i)
            folder.mkdir()
            key = json.dumps({**job, "fails": 0}, sort_keys=True)
            said = verdict(job, folder, Path(temp) / f"plain{zlib.crc32(key.encode())}")
            if said:
                bad += 1
                print(f"FOUND {said}\n{job}", flush=True)
    return bad


def main() -> int:
    """Run what is asked for; return 1 where anything ended wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=460)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frameworks", default="torch,numpy,tensorflow")
    asked = parser.parse_args()
    frameworks, begin = tuple(asked.frameworks.split(",")), time.monotonic()
    bad, kinds = threads(asked.n, asked.seed, frameworks)
    print(f"{asked.n} cases, {bad} wrong: {dict(sorted(kinds.items()))}, {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    wrong_jobs = jobs(asked.jobs, asked.skip, asked.seed, tuple(f for f in frameworks if f != "numpy"))
    print(f"{asked.jobs - asked.skip} jobs, {wrong_jobs} wrong, {time.monotonic() - begin:.0f} s")
    return 1 if bad or wrong_jobs else 0


if __name__ == "__main__":
    sys.exit(main())
