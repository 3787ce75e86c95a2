"""Hosts as a supervisor sees them: ones that answer, a host file that changes, causes on other hosts."""

import json
import time

import pytest

from hvdtrain.cluster.launchers.prepare import Here
from hvdtrain.cluster.launchers.spec import HostSlots, LauncherProgram
from hvdtrain.cluster.liveness import causes
from hvdtrain.commands.launch import cli as launch
from hvdtrain.commands.launch.cli import UNREACHED, LaunchCommands, ask
from hvdtrain.commands.launch.job import job_of
from hvdtrain.core.errors import UserError

FAR = (HostSlots("near", 1), HostSlots("far", 2), HostSlots("gone", 1), HostSlots("silent", 1))
TOOL = LauncherProgram("openmpi4", "/mpi/bin/mpirun", "openmpi", "4.1.8", "/mpi/bin/mpirun")

SSH = """#!/bin/sh
host=$1
case $host in
    far) cat "$(dirname "$0")/there" 2>/dev/null; exit 1 ;;
    gone) exit 255 ;;
    silent) exec sleep 60 ;;
esac
shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path):
    """Replace ssh: ``shared`` sees this machine's files, ``far`` its own, ``gone`` fails, ``silent`` hangs."""
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return str(path)


def launching(*words, **here):
    """Return the launch that these words ask for, from a host called near."""
    args, _ = launch.parse([*words, "--restarts", "3", "--", "train"])
    return LaunchCommands(args, Here(**{"env": {}, "names": ("near",), "cores": 8} | here), TOOL)


def test_hosts_that_do_not_answer_are_seen_within_a_bound(ssh):
    begin = time.monotonic()
    found = ask(FAR[1:], [ssh], "true", bound_s=1.0)
    assert {name: status for name, (status, _) in found.items()} == {"far": 1, "gone": UNREACHED, "silent": UNREACHED}
    assert time.monotonic() - begin < 10
    assert ask(FAR[:1], ["/no/such/ssh"], "true") == {"near": (UNREACHED, "")}


def test_candidates_and_the_causes_that_lie_elsewhere(ssh, tmp_path):
    where = tmp_path / "attempts" / "it's 001"
    where.mkdir(parents=True)
    row = {"kind": "exception", "text": "ValueError: bad", "rank": 2, "host": "far", "step": 3, "time": 1.0}
    (tmp_path / "there").write_text(json.dumps(row) + "\n" + json.dumps({**row, "rank": "../../x"}) + "\nnoise\n")
    one = launching("-H", "near:1,far:2,gone:1,shared:1", "--ssh", ssh)
    assert all(seen.answers for seen in one.candidates(None)), "nobody is asked before the first attempt"
    near, far, gone, shared = one.candidates(where)
    assert near.here and near.answers and near.keeps
    assert far.answers and not far.keeps and not gone.answers
    assert shared.answers and shared.keeps, "it sees the folder"
    assert causes.read(where) == [row]


def test_a_host_file_is_read_anew(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("near slots=2\n")
    one = launching("--hostfile", str(path))
    assert [seen.host for seen in one.candidates(None)] == [HostSlots("near", 2)]
    path.write_text("near slots=3\n")
    assert [seen.host for seen in one.candidates(tmp_path)] == [HostSlots("near", 3)]
    path.write_text("")  # somebody writes it just now
    assert [seen.host for seen in one.candidates(tmp_path)] == [HostSlots("near", 3)]


def test_ranks_move_to_the_hosts_that_are_left():
    one = launching("-H", "near:2,far:2", "-np", "3")
    assert one.placed((HostSlots("near", 2), HostSlots("far", 2))) == (HostSlots("near", 2), HostSlots("far", 1))
    assert one.placed((HostSlots("far", 2),)) == (HostSlots("far", 2),)
    assert launching("-np", "2").hosts == (HostSlots("localhost", 2),)


def test_the_ranks_are_told_their_folder():
    folder = {causes.DIRECTORY: "/o/attempts/001"}
    words, env = launching("-H", "near:2").command((HostSlots("near", 2),), ("prog",), folder)
    assert env[causes.DIRECTORY] == "/o/attempts/001"
    assert words[words.index(causes.DIRECTORY) - 1] == "-x" and "-H near:2" in " ".join(words)


@pytest.mark.parametrize("words, text", [
    (["--restarts", "-1", "--", "train"], "--restarts is -1"),
    (["--out", "x", "--", "prog"], "--out is given without --restarts")])
def test_options_that_cannot_be(words, text):
    with pytest.raises(UserError, match=text):
        launch.parse(words)


def test_the_folder_of_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not know where python keeps its files"):
        job_of(["python", "x.py"], ("python", "x.py"), "", ())
    with pytest.raises(UserError, match="behind the --"):
        job_of(["train"], ("python", "train"), "x", ())
    mine = job_of(["python", "x.py"], ("python", "x.py"), "mine", ())
    assert mine.out == tmp_path / "mine" and mine.attempt(2, (), 0) == ("python", "x.py")
    first = job_of(["train", "--model", "torch_models.mlp:build"], ("t",), "", ())
    second = job_of(["--model", "torch_models.mlp:build"], ("t",), "", ())
    assert [job.out.name for job in (first, second)] == ["torch_models.mlp-001", "torch_models.mlp-002"]
    (first.out / "log.jsonl").touch()
    with pytest.raises(UserError, match="already holds a run"):
        job_of(["train", "--out", str(first.out)], ("t",), "", ())
    again = job_of(["train", "--out", str(first.out), "--resume", "auto"], ("t",), "", ())
    assert again.out == first.out and again.resume == "auto"
    words = ["train", "--output_dir", "there", "--micro_batch_size", "4"]
    assert job_of(words, ("t", *words), "", ()).attempt(2, (), 2) == (
        "t", "train", "--out=there", "--micro_batch=4", "--out", str(tmp_path / "there"), "--resume", "auto",
        "--micro_batch", "2")
