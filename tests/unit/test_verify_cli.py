"""`verify`: which runs it makes, how it compares them, and what it refuses; the training itself is stood in for."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hvdtrain.build.facts import Mpi
from hvdtrain.build.run import ChildFailed
from hvdtrain.cli import verify
from hvdtrain.errors import UserError


@pytest.fixture
def jobs(monkeypatch):
    """Stands in for the jobs: keeps their command lines, writes weights that ``weights[np, uneven]`` says."""
    class Jobs:
        commands: list = []
        weights: dict = {}
        completes, seconds = True, 0.0

    def logged(what, command, log, env, timeout_s):
        Jobs.commands.append(command)
        log.write_text("said this\n")
        if timeout_s <= Jobs.seconds:
            raise ChildFailed(what, f"took more than {timeout_s:.0f} s", log)
        n = int(command[command.index("-np") + 1]) if "-np" in command else 1
        out = Path(command[command.index("--out") + 1])
        (out / "model").mkdir(parents=True)
        w = np.ones(4, np.float32) * np.float32(Jobs.weights.get((n, "--shares" in command), 1.0))
        save_file({"w": w, "steps": np.array([20])}, str(out / "model" / "model.safetensors"))
        if Jobs.completes:
            (out / "completed.json").write_text("{}")

    Jobs.commands, Jobs.weights = [], {}
    monkeypatch.setattr(verify, "logged", logged)
    monkeypatch.setattr(verify, "find_mpi", lambda: Mpi("mpich", "4.3.2", "mpirun"))
    return Jobs


@pytest.mark.parametrize("size, shares", [(1, (1,)), (2, (1, 2)), (3, (1, 2, 0)), (4, (1, 2, 3, 0))])
def test_uneven_shares(size, shares):
    assert verify.uneven(size) == shares


def test_largest_difference():
    a = {"a": np.array([1.0, -2.0]), "b": np.array([[0.0]]), "empty": np.zeros(0)}
    assert verify.largest_difference(a, a) == (0.0, "")
    assert verify.largest_difference(a, {**a, "a": np.array([1.0, -2.1])}) == (pytest.approx(0.05), "a")
    assert verify.largest_difference(a, {**a, "b": np.array([[0.25]])}) == (0.25, "b")  # absolute where all is zero
    assert verify.largest_difference(a, {**a, "a": np.array([1.0, np.nan])}) == (float("inf"), "a")
    with pytest.raises(UserError, match=r"different names: \['b', 'c'\]"):
        verify.largest_difference(a, {"a": a["a"], "c": a["b"], "empty": a["empty"]})
    with pytest.raises(UserError, match=r"a has shape \(3,\)"):
        verify.largest_difference(a, {**a, "a": np.zeros(3)})


def test_the_runs_and_the_report(jobs, capsys):
    jobs.weights[3, True] = 1 + 5e-7
    assert verify.main(["--np", "1,2,3", "--model", "m:f", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "np 2 (equal shares) against np 1", "np 3 (equal shares) against np 1", "np 2 (shares 1", "np 3 (shares 1"]
    assert lines[0].endswith("0.00e+00") and "4.77e-07 in w" in lines[3]
    assert len(jobs.commands) == 5
    for command in jobs.commands:
        text = " ".join(command)
        assert "--model m:f --seed 3" in text and "--max_steps 20" in text and "--optimizer.name SGD" in text
        assert ("-np" in command) == (command[0] == "mpirun") and sys.executable in command
    assert len({command[command.index("--out") + 1] for command in jobs.commands}) == 5
    assert jobs.commands[-1][-2:] == ["--shares", "[1, 2, 0]"]
    assert not any(Path(command[command.index("--out") + 1]).exists() for command in jobs.commands)


def test_a_difference_beyond_the_tolerance_is_status_1(jobs, capsys):
    jobs.weights[2, False] = 1.001
    assert verify.main(["--np", "1,2", "--no-uneven", "--tolerance", "1e-4"]) == 1
    assert "beyond 0.0001" in capsys.readouterr().out and len(jobs.commands) == 2
    assert verify.main(["--np", "1,2", "--no-uneven", "--tolerance", "1e-2"]) == 0


def test_a_run_that_ends_in_nan_does_not_pass(jobs):
    jobs.weights[2, False] = float("nan")
    assert verify.main(["--np", "1,2", "--no-uneven", "--tolerance", "1"]) == 1


@pytest.mark.parametrize(
    "argv, env",
    [
        (["--optimizer.name", "Adam"], {}),
        (["--optimizer={name: Adam}"], {}),
        (["--config", "mine.yaml"], {}),
        ([], {"HVDTRAIN_OPTIMIZER__NAME": "Adam"}),
        ([], {"HVDTRAIN_CONFIG": "mine.yaml"}),
    ],
    ids=str,
)
def test_an_optimizer_of_the_users_is_kept(jobs, monkeypatch, argv, env):
    """Also one in a file: the command line would win over it."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    verify.main(["--np", "1", *argv, "--steps", "3"])
    text = " ".join(jobs.commands[0])
    assert "SGD" not in text and "--lr" not in text and "--max_steps 3 " in text and " ".join(argv) in text


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--np", "0"], "--np is '0'"),
        (["--np", "1,x"], "--np is '1,x'"),
        (["--np", ""], "--np is ''"),
        (["--np", "-1,2"], "--np is '-1,2'"),
        (["--steps", "0"], "--steps is 0"),
        (["--steps", "-3"], "--steps is -3"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--tolerance", "nan"], "--tolerance is nan"),
        (["--tolerance", "-1"], "--tolerance is -1"),
    ],
)
def test_what_is_refused(jobs, argv, said):
    with pytest.raises(UserError) as caught:
        verify.main([f"{argv[0]}={argv[1]}"])
    assert said in str(caught.value) and jobs.commands == []


def test_a_run_that_fails_shows_its_output(jobs, capsys):
    jobs.completes = False
    with pytest.raises(UserError, match="the run on 1 ranks did not complete"):
        verify.main(["--np", "1,2"])
    assert "said this" in capsys.readouterr().err


def test_a_run_that_takes_too_long(jobs):
    jobs.seconds = 60
    with pytest.raises(UserError, match="took more than 5 s"):
        verify.main(["--np", "1,2", "--timeout", "5"])


def test_without_an_mpi(monkeypatch):
    monkeypatch.setattr(verify, "find_mpi", lambda: None)
    with pytest.raises(UserError, match="there is no mpirun"):
        verify.launcher(2)


def test_more_ranks_than_cores_are_asked_of_open_mpi_only(monkeypatch):
    monkeypatch.setattr(verify, "find_mpi", lambda: Mpi("openmpi", "4.1.8", "/x/mpirun"))
    assert verify.launcher(3)[:2] == ["/x/mpirun", "--oversubscribe"]
    monkeypatch.setattr(verify, "find_mpi", lambda: Mpi("mpich", "4.3.2", "/x/mpirun"))
    assert verify.launcher(3) == ["/x/mpirun", "-np", "3"]
