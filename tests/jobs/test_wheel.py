"""The wheel in an environment of its own: it sees this environment's packages, and not the checkout.

The workflow of .github installs it with its extras from PyPI.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from runner import ROOT, mpirun, run

from hvdtrain import __version__, recipes

ISOLATED = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
"""The runner's PYTHONPATH names the checkout. Without bytecode every rank of every job would compile the package."""
FEW = ["--collectives", "mpi", "--progress", "off", "--out", "run"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy: setuptools writes beside its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("hvdtrain", "torch_models", "tf_models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"import setuptools.build_meta as build; build.build_wheel({str(out)!r})"
    made = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=100)
    assert made.returncode == 0, made.stderr
    path, = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """Install the wheel; return the directory of the environment's programs."""
    made = tmp_path_factory.mktemp("installed")
    venv.create(made, symlinks=True)
    # Before the .pth file: pip must not see, and replace, the hvdtrain of this environment.
    done = subprocess.run([sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install",
                           "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", str(wheel)],
                          capture_output=True, text=True, timeout=100, cwd=made)
    assert done.returncode == 0, done.stderr
    own, = made.glob("lib/python*/site-packages")
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made / "bin"


def test_the_wheel_holds_what_a_run_reads_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"hvdtrain-{__version__}-py3-none-any.whl"
    assert {"hvdtrain/py.typed", "hvdtrain/reports/html/templates/run.html"} <= set(names)
    assert {f"hvdtrain/recipes/{name}.yaml" for name in recipes.names()} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hvdtrain", "tf_models", "torch_models"}


def test_a_recipe_is_read_from_the_wheel(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run([str(programs / "hvdtrain"), "train", "--config", "hvdtrain:cifar100", "--print_config"], env=ISOLATED)
    assert shown.returncode == 0 and "model: torch_models.resnet:resnet18\n" in shown.stdout, shown.text
    where = run([str(programs / "python"), "-c", "import hvdtrain.recipes; print(hvdtrain.recipes.FOLDER)"],
                env=ISOLATED)
    assert Path(where.stdout.strip()).is_relative_to(programs.parent), where.text


@pytest.mark.parametrize("framework, program, words", [
    ("torch", "python", ["script.py", "--max_steps", "1"]),
    ("tensorflow", "hvdtrain", ["train", "--config", "config.yaml", "--max_steps", "3"])])
def test_a_project_of_init_trains_over_plain_mpi(framework, program, words, programs, tmp_path, monkeypatch):
    """Also that Open MPI and TensorFlow, which each bring an hwloc, end in order without Horovod: once signal 11."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    monkeypatch.chdir(tmp_path)
    made = run([str(programs / "hvdtrain"), "init", "--framework", framework], env=ISOLATED)
    assert made.returncode == 0, made.text
    written = {"script.py", "config.yaml", "hostfile", "run.sbatch"}
    assert set(os.listdir()) == written
    trained = mpirun(2, [*words, *FEW], 100.0, ISOLATED, program=[str(programs / program)])
    assert (trained.returncode, trained.orphans) == (0, []), trained.text
    assert not re.search("oneDNN|cpu_feature_guard|absl::", trained.text), "TensorFlow's start-up lines"
    assert set(os.listdir()) - {"__pycache__"} == {*written, "run"}
    assert {"completed.json", "report.html"} <= set(os.listdir("run"))
