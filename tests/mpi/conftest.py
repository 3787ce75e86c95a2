"""Fixtures of tests that every rank of a job runs at once, and the end of a job whose ranks came apart.

After each test all ranks meet. A rank whose test failed while another still waits inside it would hang both: after
`MEET_S` it shows its failure and aborts the job.
"""

from __future__ import annotations

import os
import sys

import pytest

from hvdtrain.cluster import boot
from hvdtrain.cluster.control import MpiControl
from hvdtrain.core.errors import WaitTimeout
from hvdtrain.core.launcher import launch_facts

MEET_S = 60.0


@pytest.fixture(scope="session")
def control():
    """Return the control plane of this job, with a bound below that of a test."""
    return boot.start_control(launch_facts(os.environ), 60.0)


@pytest.fixture(scope="session")
def comm(control):
    """Return a communicator for collectives."""
    return boot.mpi_comm()


@pytest.fixture
def few_ranks(comm):
    """For what the number of ranks does not change much: it costs most where ranks outnumber the cores twice."""
    if comm.size > 3:
        pytest.skip("runs with 2 and 3 ranks, to keep the whole short")


def pytest_runtest_setup(item):
    """Skip a test or case marked ``world_size(n, ...)`` with other numbers of ranks, and one of TensorFlow marked
    ``tensorflow_size(n, ...)``.
    """
    graphs = getattr(item, "callspec", None) is not None and item.callspec.params.get("framework") == "tensorflow"
    markers = [item.get_closest_marker(name) for name in ("world_size", *["tensorflow_size"] * graphs)]
    sizes = [marker.args for marker in markers if marker is not None]
    if not sizes or not item.config.getoption("--with-mpi", False):
        return
    from mpi4py import MPI

    for among in sizes:
        if MPI.COMM_WORLD.size not in among:
            pytest.skip(f"runs with {' and '.join(map(str, among))} ranks, to keep the whole short")


_meeting = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Meet the other ranks after the body of a test; leave with its failure where they do not come."""
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" or not item.config.getoption("--with-mpi", False):
        return
    from mpi4py import MPI

    if not _meeting:
        _meeting.append(MpiControl(MPI.COMM_WORLD.Dup(), MEET_S))
    try:
        failed = [r for r, bad in enumerate(_meeting[0].gather(report.failed)) if bad]
    except WaitTimeout:
        print(f"\nrank {_meeting[0].rank}: {item.nodeid} {report.outcome}, and other ranks have not come out of it\n"
              f"{report.longreprtext}", file=sys.__stderr__, flush=True)
        _meeting[0].abort(1)
    if failed and not report.failed:
        report.sections.append(("other ranks", f"failed on rank(s) {failed}"))
