"""The package's metadata and recipes, and what a run says where an optional package is not installed."""

import configparser
import os
import shutil
import subprocess
import sys

import pytest

from hvdtrain import __version__, recipes
from hvdtrain.commands import init, main, train
from hvdtrain.commands.migrate import cli as migrate
from hvdtrain.config import yaml_file
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError
from hvdtrain.core.object_store import ObjectStore
from hvdtrain.data import pictures
from hvdtrain.data.sets import digits, tfrecord
from hvdtrain.data.sources import resolve
from hvdtrain.reports.html import page

TREE = ROOT.parent
EXTRAS = {"torch", "tensorflow", "tensorflow-cuda", "mpi", "horovod", "data", "migrate", "report", "trackers", "gpu",
          "parquet", "tfrecord", "datasets", "onnx", "remote", "zoo", "bench", "dev", "docs"}


@pytest.fixture(scope="module")
def metadata():
    found = configparser.ConfigParser()
    found.read(TREE / "setup.cfg", encoding="utf-8")
    return found


def packages(text):
    """Return the names of the packages of a list of requirements."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {line.partition(";")[0].partition("[")[0].partition(">")[0].partition("=")[0].strip().lower()
            for line in lines if line and not line.startswith("-")}


def test_the_version_is_written_once(metadata):
    assert metadata["metadata"]["version"] == "attr: hvdtrain.core.__version__"
    assert __version__ not in (TREE / "CITATION.cff").read_text()


def test_extras_are_ranges_and_what_they_install_is_pinned(metadata):
    extras = metadata["options.extras_require"]
    assert set(extras) == EXTRAS
    pinned = set().union(*(packages(path.read_text()) for path in (TREE / "requirements").glob("*.txt")))
    for name, text in {**extras, "": metadata["options"]["install_requires"]}.items():
        assert all("==" not in line.partition(";")[0] for line in text.splitlines()), name
        assert packages(text) <= pinned | {"psutil", "pyyaml"}, name


def test_top_level_recipes_are_those_of_the_package():
    assert (TREE / "recipes").resolve() == recipes.FOLDER
    assert {"cifar100", "gpt_keras"} <= set(recipes.names())


def test_a_recipe_is_named_in_config():
    for name in recipes.names():
        assert yaml_file.read(f"hvdtrain:{name}") == yaml_file.read(str(TREE / "recipes" / f"{name}.yaml"))
    config = train.parse(["--config", "hvdtrain:cifar100", "--epochs", "7"], {})
    assert config.model == "torch_models.resnet:resnet18" and config.epochs == 7
    for name in ("cifar10", "../recipes/gpt", "", "groups"):
        with pytest.raises(UserError, match=f"there is no recipe 'hvdtrain:{name}'; expected one of bert, .*--config"):
            yaml_file.read(f"hvdtrain:{name}")


@pytest.mark.parametrize("package, extra, use", [
    ("sklearn", "data", digits.table),
    ("PIL", "data", pictures._pillow),
    ("fsspec.core", "remote", lambda: ObjectStore.open("memory://run", "out")),
    ("pyarrow", "parquet", lambda: resolve("parquet", {"files": "x"}, "train")),
    ("google_crc32c", "tfrecord", tfrecord._crc32c.__wrapped__),
    ("datasets", "datasets", lambda: resolve("hf", {"files": "x"}, "train")),
    ("libcst", "migrate", lambda: migrate.main(["script.py"])),
    ("jinja2", "report", page._environment.__wrapped__)])
def test_a_package_that_is_missing_is_named_with_its_extra(package, extra, use, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf'Run pip install "hvdtrain\[{extra}\]"\.'):
        use()


@pytest.mark.parametrize("framework", init.SCRIPTS)
def test_init_writes_a_project_and_overwrites_nothing(framework, tmp_path, monkeypatch, capsys):
    assert main(["init", str(tmp_path / "a b"), "--framework", framework]) == 0
    assert f"cd '{tmp_path / 'a b'}' && mpirun -np 2 python script.py" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "a b")
    assert train.parse(["--config", "config.yaml"], {}).check().model == "script.py:build"
    compile((tmp_path / "a b" / "script.py").read_text(), "script.py", "exec")
    checker = shutil.which("shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    if checker:
        subprocess.run([checker, "run.sbatch"], check=True)
    (tmp_path / "a b" / "script.py").write_text("mine")
    (tmp_path / "a b" / "config.yaml").unlink()
    with pytest.raises(UserError, match="already holds script.py, hostfile, run.sbatch"):
        init.main([])
    assert (tmp_path / "a b" / "script.py").read_text() == "mine" and not (tmp_path / "a b" / "config.yaml").exists()
