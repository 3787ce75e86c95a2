"""Files for sites and clouds that cannot be built here: Spack, EasyBuild, SkyPilot, and the bill of materials."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from hvdtrain.core import ROOT, __version__

TREE = ROOT.parent
SPACK = TREE / "containers/spack/package.py"
EASYBUILD = TREE / f"containers/easybuild/hvdtrain-{__version__}-foss-2025b.eb"
SKYPILOT = TREE / "mpi_scripts/skypilot.yaml"


def required():
    """Return {name: lowest version} of install_requires in setup.cfg."""
    text = re.search(r"^install_requires =\n((?:    .+\n)+)", (TREE / "setup.cfg").read_text(), re.M)
    rows = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+).*", row.strip()) for row in text[1].splitlines()]
    return {row[1].lower(): row[2] for row in rows}


@pytest.mark.parametrize("path", [SPACK, EASYBUILD, SKYPILOT], ids=lambda path: path.name)
def test_the_first_line_states_what_was_not_run(path):
    assert re.match("# (Not built here|.*have not run it on a cloud)", path.read_text())


def test_spack_requires_what_setup_cfg_does():
    calls = [node for node in ast.walk(ast.parse(SPACK.read_text()))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "depends_on"]
    words = {str(ast.literal_eval(call.args[0])) for call in calls}
    found = {name: version for name, version in re.findall(r"^py-([\w-]+)@([\d.]+)", "\n".join(sorted(words)), re.M)}
    assert required().items() <= found.items()


def test_easybuild_installs_the_pins():
    tree = ast.parse(EASYBUILD.read_text())
    names = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert {"easyblock", "name", "homepage", "description", "toolchain", "exts_list", "moduleclass"} <= set(names)
    assert ast.literal_eval(names["version"]) == __version__
    pins = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)", (TREE / "requirements/base.txt").read_text(), re.M))
    pins = {name.lower(): version for name, version in pins.items()}
    found = {row.elts[0].value.lower(): row.elts[1].value for row in names["exts_list"].elts
             if isinstance(row.elts[0], ast.Constant)}
    assert {name: version for name, version in found.items() if name in pins}.items() <= pins.items()
    modules = {"numpy", "mpi4py"}  # of the toolchain
    assert set(required()) - modules <= set(found)


def test_skypilot_launches_on_the_first_node_and_hands_status_75_on(tmp_path):
    task = yaml.safe_load(SKYPILOT.read_text())
    recovery = task["resources"]["job_recovery"]
    assert task["resources"]["use_spot"] is True and recovery["recover_on_exit_codes"] == [75]
    assert set(task) <= {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run", "file_mounts", "secrets"}
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\nexit 75\n')
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7",
           "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "0", **task["envs"]}
    words = ["bash", "-c", task["run"]]
    first = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert first.returncode == 75, first.stderr
    own = os.uname().nodename
    assert f"launch --restarts 20 -H {own}:8,10.0.0.6:8,10.0.0.7:8 -- train" in first.stdout
    assert "--out s3://BUCKET/run --resume auto" in first.stdout
    other = subprocess.run(words, cwd=tmp_path, env={**env, "SKYPILOT_NODE_RANK": "1"}, capture_output=True, text=True)
    assert (other.returncode, other.stdout) == (0, "")
    alone = subprocess.run(words, cwd=tmp_path, env={**env, "SKYPILOT_NODE_IPS": "10.0.0.5"}, capture_output=True,
                           text=True)
    assert f"-H {own}:8 -- train" in alone.stdout


def test_the_bill_of_materials_names_what_is_installed():
    path = TREE / "containers/sbom.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True,
                          env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    found = json.loads(done.stdout)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
    assert found["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    parts = {part["name"].lower(): part for part in found["components"]}
    for name in required():
        assert parts[name]["version"] == importlib.metadata.version(name)
        assert parts[name]["purl"].startswith("pkg:pypi/")
    references = [part["bom-ref"] for part in found["components"]]
    assert len(set(references)) == len(references)
    edges = {row["ref"]: row["dependsOn"] for row in found["dependencies"]}
    assert set(edges) == set(references) and {end for ends in edges.values() for end in ends} <= set(references)
    assert parts["pygments"]["bom-ref"] in edges[parts["rich"]["bom-ref"]]
