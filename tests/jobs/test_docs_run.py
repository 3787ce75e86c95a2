"""Every code block of docs/tutorials and docs/how-to runs, or a comment on the line above names what it needs.

The blocks of a page run in order in one folder. A block whose first line is ``# name.py`` (or .yaml) is that file;
other Python is run as it stands; each line of a ``bash`` block is a command. ``text`` and ``diff`` are output.
``<!-- needs: cluster -->`` on the line above leaves a block out. Commands of training end after two steps, which
HVDTRAIN_MAX_STEPS says, and run as one rank where `REALLY` does not name them; `ELSEWHERE` has those that other
tests run. ``DIR`` in a command is a folder of small data.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner import ROOT, mpirun, run
from shards import write_shards, write_tar

pytest.importorskip("torch")
pytest.importorskip("tensorflow")

PAGES = sorted(path for folder in ("tutorials", "how-to") for path in (ROOT / "docs" / folder).rglob("*.md"))
TASKS = ROOT / "docs" / "how-to" / "tasks.md"
LINKED = {"hugging-face.md": "tests/unit/backends/test_hugging_face.py"}
"""Pages of the table of tasks whose commands need libraries -> the tests that run what they show."""
NEEDS = {"cluster", "gpu", "network", "containers", "files", "kubernetes", "libraries"}
"""What a block may need. files: data or weights of the reader's own. libraries: packages of the zoo."""
REALLY = {"mpirun -np 2 python script.py",
          "mpirun -np 2 python -m hvdtrain predict runs/digits --out outputs.npz",
          "python -m hvdtrain launch -H localhost:2 --restarts 3 -- train --out runs/job"}
"""Commands that run under MPI as they stand; of others `launch` shows what it would run, and one rank runs it."""
ELSEWHERE = {
    r"python -m hvdtrain verify": "tests/unit/commands/test_verify_cli.py",
    r"python -m hvdtrain convert|.*runs/cnn-": "tests/jobs/test_convert_run.py",
    r".* hvdtrain doctor": "tests/jobs/test_doctor_run.py",
    r"python -m benchmarks case": "tests/unit/benchmarks/test_bench_case.py",
    r".* hvdtrain plan --inventory ": "tests/unit/commands/test_plan_inventory.py",
    r".* --(emulate_speed|balance)|.* hvdtrain plan ": "tests/unit/engine/test_balance_run.py",
    r".* --compile": "tests/mpi/test_compile.py",
    r".*( --model_parallel|tf_models\.device_split)": "tests/jobs/test_device_split_tensorflow.py",
    r".* --data\.augment": "tests/unit/data/test_augment.py",
    r".* --data\.name folder": "tests/unit/data/test_data_folder.py",
    r".* --data\.name (npy|\S*\.npy)": "tests/unit/data/test_data_npy.py",
    r".* --data\.name text_files": "tests/unit/data/test_data_text_files.py",
    r".* --eval\.": "tests/unit/engine/test_eval_sets.py",
    r".* --ema": "tests/unit/engine/test_ema.py",
    r".* --schedule [COo]": "tests/unit/config/test_schedules.py",
    r".*_models\.gan:": "tests/conformance/test_step_torch_models.py",
    r".* --loss\.name": "tests/conformance/test_ignored_labels_keras.py",
    r".* --accumulate": "tests/conformance/test_step_torch.py",
    r".* --trackers tensorboard": "tests/unit/reports/test_trackers.py",
    r".*--out runs/mine|.* hvdtrain checkpoints runs/mine": "tests/unit/engine/test_resume.py",
    r"KERAS_BACKEND=torch": "tests/jobs/test_keras_on_torch.py",
    r".* --optimizer SGD": "tests/unit/commands/test_cli_train.py",
    r".* hvdtrain (evaluate|predict) runs/mine": "tests/unit/commands/test_predict_command.py",
    r".* hvdtrain export runs/mine": "tests/unit/commands/test_export_command.py",
    r".* --data_parallel zero": "tests/mpi/test_zero_torch.py",
}
"""Commands, as patterns of their beginning -> the tests that run what they show; test_docs_commands parses them."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its line in the page, language, text, and what the comment above says it needs."""

    line: int
    language: str
    text: str
    needs: str

    @property
    def file(self) -> str:
        """The name of the file that the block is, or "" """
        found = re.match(r"# ([\w./-]+\.(?:py|yaml|txt))(?=[:\n ])", self.text)
        return found[1] if found and self.language in ("python", "yaml") else ""


def blocks(page: Path) -> list[Block]:
    """Return the page's fenced blocks."""
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if (fence := re.match(r"( *)```(\w*)", lines[at])) is None:
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        needs = re.fullmatch(r" *<!-- needs: ([\w, ]+) -->", lines[at - 1]) if at else None
        indent = len(fence[1])
        text = "\n".join(line[indent:] for line in lines[at + 1:end]) + "\n"
        found.append(Block(at + 1, fence[2], text, needs[1] if needs else ""))
        at = end + 1
    return found


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, continued lines joined, without comments."""
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line]


def tasks() -> dict[str, str]:
    """Return how each task of the table of everyday tasks is done: a command, or a link to a page with examples."""
    row = r"^\| ([^|`]+) \| (`python[^|]+`|`mpirun[^|]+`|\[[^|]+\)) \|$"
    return dict(re.findall(row, TASKS.read_text(encoding="utf-8"), re.M))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_language_and_known_needs(page):
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        assert block.language in ("bash", "python", "yaml", "text", "diff"), f"{where}: no such language"
        assert not block.needs or set(block.needs.split(", ")) <= NEEDS, f"{where}: needs {block.needs}"


def test_what_runs_elsewhere_is_there():
    shown = {line for page in PAGES for b in blocks(page) if b.language == "bash" for line in commands(b.text)}
    shown |= {how.strip("`") for how in tasks().values()}
    for pattern, test in ELSEWHERE.items():
        assert (ROOT / test).exists(), test
        assert any(re.match(pattern, line) for line in shown), f"no page has {pattern}"
    assert shown >= REALLY


class Shell:
    """Runs a page's commands in its folder; Python in forks of one process that has the frameworks."""

    ran: set[tuple[str, ...]] = set()

    def __init__(self, folder: Path) -> None:
        self.cwd = folder
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMIX_"))},
                    "HVDTRAIN_MAX_STEPS": "2", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
                    "PYTHONPATH": str(ROOT), "HVDTRAIN_PROGRESS": "off"}
        self.server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("docs_server.py"))], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env, cwd=ROOT)

    def python(self, argv: list[str], env: dict[str, str]) -> tuple[int, str]:
        """Run ``python argv``; return the exit status and the output."""
        assert self.server.stdin and self.server.stdout
        output = self.cwd / ".output"
        self.server.stdin.write(json.dumps([argv, str(self.cwd), self.env | env, str(output)]) + "\n")
        self.server.stdin.flush()
        status = int(self.server.stdout.readline())
        return status, output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        assert self.server.stdin
        self.server.stdin.close()
        self.server.wait()

    def do(self, line: str) -> None:
        """Run one command; it must end with 0, or as ``|| echo status $?`` after it allows."""
        line, _, may_fail = line.partition(" || ")
        words = shlex.split(line)
        env = {}
        while "=" in words[0] and not words[0].startswith("-"):
            key, _, env[key] = words.pop(0).partition("=")
        if "launch" not in words and any(re.match(pattern, line) for pattern in ELSEWHERE):
            return
        if words[0] == "cd":
            self.cwd = self.cwd / words[1]
            return
        if " && " in line:
            for part in line.split(" && "):
                self.do(part)
            return
        # What writes a run serves the page's later commands: it runs on each page.
        scripts = sorted(f"{p.name}:{p.read_text()}" for p in self.cwd.glob("*.py"))
        key = (str(self.cwd) if "--out" in words else "", line, *scripts)
        if key in self.ran:
            return
        self.ran.add(key)
        status, text = self.result(line, words, env)
        assert status == 0 or may_fail, f"{line}\n{text}"

    def result(self, line: str, words: list[str], env: dict[str, str]) -> tuple[int, Any]:
        """Run the command in the way that suits it; return the exit status and the output."""
        if words[0] == "hvdtrain":
            words = ["python", "-m", *words]
        if words[0] == "mpirun" and line not in REALLY:
            words = words[words.index("python"):]
        if words[0] == "python" and "launch" not in words[:4]:
            return self.python(words[1:], env)
        if "launch" in words[:4] and "--dry-run" not in words and line not in REALLY:
            at = words.index("--")
            status, text = self.python([*words[1:at], "--dry-run", *words[at:]], env)
            return (status, text) if status else self.python(["-m", "hvdtrain", *words[at + 1:]], env)
        os.chdir(self.cwd)
        try:
            if words[0] == "mpirun":
                job = mpirun(int(words[2]), words[words.index("python") + 1:], timeout_s=120)
            else:
                words = [sys.executable if word == "python" else word for word in words]
                job = run(words, timeout_s=120, env=env)
        finally:
            os.chdir(ROOT)
        return job.returncode or 0, job.text


@pytest.fixture(scope="module")
def shell_of():
    """Return the shell, whose one server serves all pages."""
    made: list[Shell] = []

    def shell(folder: Path) -> Shell:
        if not made:
            made.append(Shell(folder))
        made[0].cwd = folder
        return made[0]

    yield shell
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """Return a folder with pictures of two classes, arrays and a text."""
    from PIL import Image

    top, draw = tmp_path_factory.mktemp("small"), np.random.default_rng(0)
    for part in ("train", "test"):
        for kind in ("cat", "dog"):
            (top / part / kind).mkdir(parents=True)
            for i in range(4):
                pixels = draw.integers(0, 255, (36, 40, 3), "uint8")
                Image.fromarray(pixels).save(top / part / kind / f"{i}.png")
    np.save(top / "x.npy", draw.random((64, 8, 8), "float32"))
    np.save(top / "y.npy", draw.integers(0, 10, 64))
    x, y = np.load(top / "x.npy"), np.load(top / "y.npy")
    for kind in ("jsonl", "tfrecord", "parquet"):
        write_shards(top, kind, x, y)
    pictures = sorted(top.glob("train/*/*.png"))
    write_tar(top / "pictures.tar", [file for i, path in enumerate(pictures) for file in (
        (f"{i}.cls", b"%d" % (path.parent.name == "dog")), (f"{i}.png", path.read_bytes()))])
    (top / "book.txt").write_text("All happy families are alike. " * 400, encoding="utf-8")
    return top


@pytest.mark.timeout(240)
def test_all_25_everyday_tasks_run(shell_of, tmp_path):
    """Commands here, or by the tests of `ELSEWHERE`; the blocks of a linked page by the test below.

    Options of training in one process are tried in one command.
    """
    assert len(tasks()) == 25 and sum(how.startswith("`mpirun") or " launch " in how for how in tasks().values()) <= 8
    rows = re.findall(r"^\| ", TASKS.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 25 + 1, "a row, the head apart, is no task"
    shell = shell_of(tmp_path)
    link(tmp_path)
    alone, together = "python -m hvdtrain train ", ""
    for task, how in tasks().items():
        if how.startswith("`"):
            line = how.strip("`")
            if not line.startswith(alone):
                print(f"{task}: {line}", flush=True)
                shell.do(line)
            elif not any(re.match(pattern, line) for pattern in ELSEWHERE):
                together += " " + line.removeprefix(alone)
            continue
        page = how.partition("(")[2].partition(")")[0].partition("#")[0]
        ran = [block for block in blocks(TASKS.parent / page) if not block.needs and block.language != "text"]
        assert ran or (ROOT / LINKED[page]).exists(), task
    print(together, flush=True)
    assert together.count("--") > 5
    shell.do(alone + together)


def link(folder: Path) -> None:
    """Make the folders of the repository that commands name visible in ``folder``."""
    for named in ("torch_models", "tf_models", "mpi_scripts", "recipes", "benchmarks"):
        (folder / named).symlink_to(ROOT / named)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_blocks_of_a_page_run(page, shell_of, small_data, tmp_path):
    todo = [block for block in blocks(page) if not block.needs and block.language in ("bash", "python", "yaml")]
    if not todo:
        return
    link(tmp_path)
    for script in page.parent.glob("*/*.py" if page.parent.name == "migrate" else "*.py"):
        shutil.copy(script, tmp_path / script.name)
    shell = shell_of(tmp_path)
    for block in todo:
        where = f"{name(page)}:{block.line}"
        if block.file:
            (shell.cwd / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            for line in commands(block.text):
                print(f"{where}: {line}", flush=True)
                shell.do(re.sub(r"\bDIR\b", str(small_data), line))
        elif block.language == "python":
            (shell.cwd / "_block.py").write_text(block.text, encoding="utf-8")
            status, text = shell.python(["_block.py"], {})
            assert status == 0, f"{where}\n{text}"
        else:
            (shell.cwd / "_block.yaml").write_text(block.text, encoding="utf-8")
            status, text = shell.python(["-m", "hvdtrain", "--config", "_block.yaml", "--print_config"], {})
            assert status == 0, f"{where}\n{text}"
    if page.name == "predict.md":
        metrics_and_outputs_agree(shell.cwd)


def metrics_and_outputs_agree(folder):
    """Compare what the run, ``evaluate`` in one process and ``predict`` on two ranks tell of the test samples."""
    from hvdtrain.data.sets import digits

    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    assert metrics == json.loads((folder / "runs/digits/completed.json").read_text())["metrics"]
    classes = np.load(folder / "outputs.npz")["output"].argmax(axis=1)
    labels = digits.make("test").fetch(np.arange(len(classes)))[1]
    assert len(labels) == len(digits.make("test"))
    assert np.mean(classes == labels) == metrics["accuracy"]
