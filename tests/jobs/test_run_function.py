"""`hvdtrain.run`: functions of this process on ranks of their own, their results and their failures."""

import os
import pickle
import signal
import sys
import time

import pytest

import hvdtrain
from hvdtrain.core.errors import RankFailed

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
LONG_S = 100.0


def test_results_of_a_closure_by_rank(capsys):
    class Point:
        def __init__(self, x):
            self.x = x

    base, large = 10, "é" * 200_000

    def work(text, *, factor):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        print("rank", world.rank, "prints", text)
        print("and complains", file=sys.stderr)
        return Point(base + factor * world.allreduce(world.rank + 1)), world.rank, os.environ["MINE"], large

    found = hvdtrain.run(work, ("é;",), {"factor": 2}, env={"MINE": "a b", **AS_ROOT}, timeout=60)
    assert [row[1:] for row in found] == [(0, "a b", large), (1, "a b", large)]
    assert [type(row[0]) for row in found] == [Point, Point] and {row[0].x for row in found} == {16}
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == ["rank 0 prints é;", "rank 1 prints é;"]
    assert printed.err.count("and complains\n") == 2


def test_an_exception_names_the_rank_and_ends_the_others(capsys):
    class Odd(Exception):
        pass

    def work():
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            print("last words")
            raise Odd("of rank 1")
        time.sleep(LONG_S)

    with pytest.raises(RankFailed, match=r"(?s)rank 1 on host \S+ raised .*Odd: of rank 1.*in work\n") as caught:
        hvdtrain.run(work, env=AS_ROOT, timeout=60)
    assert (caught.value.rank, caught.value.exit_status) == (1, None) and isinstance(caught.value.__cause__, Odd)
    assert pickle.loads(pickle.dumps(caught.value)).rank == 1
    assert capsys.readouterr().out == "last words\n"


def test_a_rank_that_is_killed_is_named():
    def work():
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONG_S)

    with pytest.raises(RankFailed, match=r"rank 1 on host \S+ ended without a result: exit status 137 \(SIGKILL\)"):
        hvdtrain.run(work, env=AS_ROOT, timeout=60)


def test_one_rank_is_a_child_that_starts_no_mpi_by_itself():
    pid, loaded = hvdtrain.run(lambda: (os.getpid(), "mpi4py" in sys.modules), np=1)[0]
    assert pid != os.getpid() and not loaded

    def own_world():
        from mpi4py import MPI

        return MPI.COMM_WORLD.allreduce(3)

    assert hvdtrain.run(own_world, np=1) == [3], "MPI starts where the function asks for it"
    with pytest.raises(RankFailed, match="rank 0 .*exit status 7"):
        hvdtrain.run(lambda: os._exit(7), np=1)
    with pytest.raises(RankFailed, match="raised SystemExit: 3"):
        hvdtrain.run(lambda: sys.exit(3), np=1)


def test_a_result_that_cannot_be_pickled_is_refused():
    with pytest.raises(hvdtrain.UserError, match="the result of rank 0, of type generator, cannot be pickled"):
        hvdtrain.run(lambda: (i for i in range(3)), np=1)


def test_a_timeout_and_ctrl_c_end_the_ranks(tmp_path):
    def work(interrupts):
        (tmp_path / "pid").write_text(str(os.getpid()))
        if interrupts:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(LONG_S)

    for error, timeout in ((TimeoutError, 2), (KeyboardInterrupt, None)):
        with pytest.raises(error, match="rank 0 had not (returned|begun) within 2 s" if timeout else None):
            hvdtrain.run(work, (timeout is None,), np=1, timeout=timeout)
        if (tmp_path / "pid").exists():
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / "pid").read_text()), 0)
