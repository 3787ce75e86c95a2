"""Play a Containerfile in fresh roots, with chroot, where no container engine can run: what ran is what the file says.

    debootstrap --variant=minbase bookworm /tmp/base
    unshare --mount --fork python3 containers/steps.py containers/Containerfile --base /tmp/base --work /tmp/played

Owns the reading of the file, stage by stage, and the playing of its COPY and RUN steps; as root. ``--base`` is the root
that stands for the image that the file begins from. It is no engine: no layers, no limits, no network of its own.
The standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

MOUNTS = ("proc", "sys", "dev")


@dataclass
class Stage:
    """A stage: what it begins ``base`` from, its ``name``, and its (instruction, text) steps in order."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read(text: str) -> list[Stage]:
    """Return the stages of a Containerfile's text; variables in FROM are those of ARG lines before it. ValueError else.

    Only what this project's files use is known: a step that is not would otherwise be left out in silence.
    """
    lines = re.sub(r"\\\n", " ", "\n".join(row for row in text.splitlines() if not row.lstrip().startswith("#")))
    stages: list[Stage] = []
    variables: dict[str, str] = {}
    for line in filter(str.strip, lines.splitlines()):
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "FROM":
            image, _, name = re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], rest).partition(" AS ")
            stages.append(Stage(image.strip(), name.strip() or "final"))
        elif word == "ARG" and not stages:
            name, _, value = rest.partition("=")
            variables[name] = value.strip('"')
        elif word in ("ARG", "ENV", "COPY", "RUN", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD") and stages:
            stages[-1].steps.append((word, rest))
        else:
            raise ValueError(f"the step {line!r} is not known here")
    return stages


def play(stages: list[Stage], base: Path, context: Path, work: Path, only: str = "") -> Path:
    """Play the stages below ``work``; the root of the last one. A stage that is already there is kept as it is.

    ``only``: the name of the stage to end with.
    """
    roots: dict[str, Path] = {}
    for stage in stages:
        root = roots[stage.name] = work / stage.name
        if not (work / f"{stage.name}.done").exists():
            if root.exists():
                raise FileExistsError(f"{root} was left half done; remove it")
            subprocess.run(["cp", "-a", "--one-file-system", str(roots.get(stage.base, base)), str(root)], check=True)
            _play_stage(stage, root, roots, context)
            (work / f"{stage.name}.done").touch()
        if stage.name == only:
            break
    return root


def _play_stage(stage: Stage, root: Path, roots: dict[str, Path], context: Path) -> None:
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    for word, rest in stage.steps:
        begun = time.monotonic()
        print(f"== {stage.name}: {word} {rest}", flush=True)
        if word in ("ARG", "ENV"):
            name, _, value = rest.partition("=")
            env[name] = value.strip('"')
        elif word == "COPY":
            _copy(shlex.split(rest), root, roots, context)
        elif word == "RUN":
            inside(root, ["/bin/sh", "-c", rest], env)
            print(f"   {time.monotonic() - begun:.0f} s", flush=True)
        elif word == "WORKDIR":
            (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)


def _copy(words: list[str], root: Path, roots: dict[str, Path], context: Path) -> None:
    """COPY [--from=STAGE] SOURCE... TARGET: a folder's contents go into TARGET, files into TARGET/."""
    origin = context
    if words[0].startswith("--from="):
        origin = roots[words.pop(0).removeprefix("--from=")]
    target = root / words[-1].lstrip("/")
    for name in words[:-1]:
        source = origin / name.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("__pycache__") if origin == context else None)
        else:
            into = target / source.name if words[-1].endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into)
    if origin == context:
        subprocess.run(["chown", "-R", "0:0", str(target)], check=True)


def inside(root: Path, words: list[str], env: dict[str, str], uid: int = 0, cwd: str = "/") -> None:
    """Run a command in ``root`` as ``uid``, with /proc, /sys, /dev and host names as out here. CalledProcessError."""
    for name in MOUNTS:
        (root / name).mkdir(exist_ok=True)
        if not os.path.ismount(root / name):
            subprocess.run(["mount", "--rbind", f"/{name}", str(root / name)], check=True)
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", root / "etc" / name)
    user = [f"--userspec={uid}:{uid}"] if uid else []
    shell = f"cd {shlex.quote(cwd)} && exec {shlex.join(words)}"
    chroot = shutil.which("chroot") or "/usr/sbin/chroot"
    subprocess.run([chroot, *user, str(root), "/bin/sh", "-c", shell], env=env, check=True, stdin=subprocess.DEVNULL)


def start(stages: list[Stage], root: Path, words: list[str]) -> None:
    """Run ``words`` as a container of the last stage would: its user, folder and variables, behind its entry point."""
    env, uid, cwd, entry, command = {"HOME": "/home/trainer"}, 0, "/", [], []
    for word, rest in stages[-1].steps:
        if word == "ENV":
            name, _, value = rest.partition("=")
            env[name] = value
        elif word == "USER":
            uid = int(rest.split(":")[0])
        elif word == "WORKDIR":
            cwd = rest
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
        elif word == "CMD":
            command = json.loads(rest)
    inside(root, [*entry, *(words or command)], env, uid, cwd)


def main() -> int:
    """Play the file that the command line names, then run a command as its container would."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="a root, such as debootstrap makes")
    parser.add_argument("--work", type=Path, required=True, help="the folder that the stages' roots come into")
    parser.add_argument("--stage", default="", help="end with this stage, and run nothing")
    parser.add_argument("command", nargs="*", help="in the container; the file's CMD without any")
    args = parser.parse_intermixed_args()
    stages = read(args.file.read_text())
    args.work.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # nothing that is mounted here is seen outside
    try:
        root = play(stages, args.base, Path.cwd(), args.work, args.stage)
        if not args.stage:
            start(stages, root, args.command)
    except subprocess.CalledProcessError as error:
        print(f"error: {shlex.join(map(str, error.cmd))[:200]} ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
