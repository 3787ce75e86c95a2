"""The parts of a job's end that can be seen from inside; whole jobs that die are in tests/jobs."""

import os
import sys

import pytest

from hvdtrain.cluster import boot
from hvdtrain.cluster.exit import install_hooks
from hvdtrain.core.launcher import launch_facts

pytestmark = pytest.mark.mpi(min_size=2)


def test_the_launcher_and_mpi_agree(control):
    facts = launch_facts(os.environ)
    assert facts.kind == "mpi"
    assert (facts.rank, facts.size) == (control.rank, control.size)


def test_mpi_gives_all_threads(control):
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE


def test_starting_twice_gives_the_same(control):
    assert boot.start_control(launch_facts(os.environ), control.timeout_s) is control


def test_leaving_has_a_communicator_of_its_own(control):
    leaving = boot.exit_control()
    assert leaving is not None and leaving is not control
    if control.rank == 0:
        got = leaving.gather("a"), control.gather(1)
    else:
        got = leaving.gather("b"), control.gather(2)
    assert got[0] == ["a"] + ["b"] * (control.size - 1) and got[1] == [1] + [2] * (control.size - 1)


def test_hooks_are_installed_once(control):
    sys.excepthook = sys.__excepthook__
    install_hooks(launch_facts(os.environ))
    hook = sys.excepthook
    assert hook is not sys.__excepthook__
    install_hooks(launch_facts(os.environ))
    assert sys.excepthook is hook
