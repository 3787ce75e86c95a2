"""`verify`: which runs it makes, how it compares them, and what it refuses; the training itself is stood in for."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hvdtrain.cluster.machine.software import Mpi
from hvdtrain.commands import verify
from hvdtrain.commands.build_horovod.child_log import ChildFailed
from hvdtrain.core.errors import UserError


@pytest.fixture
def jobs(monkeypatch):
    """Stands in for the jobs: keeps their command lines, writes weights that ``weights[np, uneven]`` says."""
    class Jobs:
        commands: list = []
        weights: dict = {}
        completes, seconds = True, 0.0
        notes: list = []

    def logged(what, command, log, env, timeout_s):
        Jobs.commands.append(command)
        log.write_text("said this\n")
        if timeout_s <= Jobs.seconds:
            raise ChildFailed(what, f"took more than {timeout_s:.0f} s", log)
        n = int(command[command.index("-np") + 1]) if "-np" in command else 1
        out = Path(command[command.index("--out") + 1])
        (out / "model").mkdir(parents=True)
        cut = "--micro_batch" in command  # the same training, its batch cut otherwise
        w = np.ones(4, np.float32) * np.float32(Jobs.weights.get("cut" if cut else (n, "--shares" in command), 1.0))
        save_file({"w": w, "steps": np.array([20])}, str(out / "model" / "model.safetensors"))
        if Jobs.completes:
            (out / "completed.json").write_text(json.dumps({"notes": Jobs.notes}))

    Jobs.commands, Jobs.weights, Jobs.notes = [], {}, []
    monkeypatch.setattr(verify, "logged", logged)
    monkeypatch.setattr(verify, "find_mpi", lambda: Mpi("mpich", "4.3.2", "mpirun"))
    return Jobs


@pytest.mark.parametrize("size, shares", [(1, (1,)), (2, (1, 2)), (3, (1, 2, 0)), (4, (1, 2, 3, 0))])
def test_uneven_shares(size, shares):
    assert verify.uneven(size) == shares


def table(text):
    """Return the cells of the table that the output ends with, without its heads."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("--"))
    return [line.split() for line in lines[rule + 1:]]


def test_the_runs_and_the_report(jobs, capsys):
    jobs.weights[3, True] = 1 + 5e-7
    assert verify.main(["--np", "1,2,3", "--model", "m:f", "--seed", "3"]) == 0
    assert table(capsys.readouterr().out) == [
        ["1", "equal", "reference"], ["2", "equal", "same", "bits", "same", "bits"],
        ["3", "equal", "same", "bits", "same", "bits"], ["2", "1:2", "same", "bits", "same", "bits"],
        ["3", "1:2:0", "4.8e-07", "w", "same", "results"]]
    assert len(jobs.commands) == 5
    for command in jobs.commands:
        text = " ".join(command)
        assert "--model m:f --seed 3" in text and "--max_steps 20" in text and "--optimizer.name SGD" in text
        assert ("-np" in command) == (command[0] == "mpirun") and sys.executable in command
    assert len({command[command.index("--out") + 1] for command in jobs.commands}) == 5
    assert jobs.commands[-1][-4:-2] == ["--shares", "[1, 2, 0]"]
    assert not any(Path(command[command.index("--out") + 1]).exists() for command in jobs.commands)


def test_a_model_that_is_cut_over_ranks_is_compared_with_a_whole_one(jobs):
    assert verify.main(["--np", "1,2,4", "--pipeline", "2", "--pipeline.cut", "[b]"]) == 0
    whole = ["--pipeline.stages 1 --pipeline.depths [] --pipeline.cut []" in " ".join(c) for c in jobs.commands]
    assert whole == [True, False, False, False]
    assert "--shares [1, 2] --out" in " ".join(jobs.commands[3]), "of the two copies on four ranks"
    assert verify.cut(["--pipeline.depths", "[1, 2]"], 3) == ([], 2)
    assert verify.cut(["--pipeline.depths", "[1, 2]"], 2)[1] == 2
    assert verify.cut(["--schedule", "ReduceLROnPlateau"], 2) == (["--schedule.name", "none"], 2), "nothing evaluates"


def test_a_difference_beyond_the_tolerance_is_status_1(jobs, capsys):
    jobs.weights[2, False] = 1.001
    jobs.notes = ["not independent of the number of ranks: dropout", "another"]
    assert verify.main(["--np", "1,2", "--no-uneven", "--tolerance", "1e-4"]) == 1
    text = capsys.readouterr().out
    assert "beyond 0.0001" in text and len(jobs.commands) == 2
    assert text.count("note: ") == 1 and "note: not independent of the number of ranks: dropout" in text
    assert verify.main(["--np", "1,2", "--no-uneven", "--tolerance", "1e-2"]) == 0
    assert "note: " not in capsys.readouterr().out and len(jobs.commands) == 4


def test_growth_that_one_process_shows_too_is_no_difference(jobs, capsys):
    """float32 magnified by momentum: 1.4e-5 between ranks, 0.8e-5 between two cuts of one process."""
    jobs.weights.update({(2, False): 1 + 1.4e-5, "cut": 1 + 0.8e-5})
    assert verify.main(["--np", "1,2", "--no-uneven", "--accumulate", "3"]) == 0
    text = capsys.readouterr().out
    assert table(text)[1] == ["2", "equal", "1.4e-05", "w", "same", "results"]
    assert "np 1 alone changes by 8.0e-06" in text and "up to 3.2e-05" in text
    assert [c[-6:-2] for c in jobs.commands[2:]] == [["--accumulate", n, "--micro_batch", "0"] for n in ("4", "5")]
    assert not any("-np" in c for c in jobs.commands[2:])


@pytest.mark.parametrize("apart, cut, said", [
    (2e-5, 1e-6, "up to 1.0e-05"),  # one process hardly moves: what ranks do is none of its rounding
    (9e-5, 2e-5, "up to 8.0e-05"),  # more than four times what one process moves by
    (2e-4, 1.0, "amplifies rounding")])  # beyond the most that rounding may be, whatever one process does
def test_more_than_growth_is_beyond(jobs, capsys, apart, cut, said):
    jobs.weights.update({(2, False): 1 + apart, "cut": 1 + cut})
    assert verify.main(["--np", "1,2", "--no-uneven"]) == 1
    text = capsys.readouterr().out
    assert "beyond" in table(text)[1] and said in text and len(jobs.commands) == 4


def test_what_a_caveat_explains_is_not_looked_into(jobs):
    jobs.weights[2, False], jobs.notes = 1.001, ["not independent of the number of ranks: BatchNorm"]
    assert verify.main(["--np", "1,2", "--no-uneven"]) == 1 and len(jobs.commands) == 2


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
        (["--np", "2,2"], "each once"),
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
    with pytest.raises(UserError, match="the run on 1 rank did not complete"):
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
