"""End of a process of a job: one message, the right exit status on every rank, and no hang."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hvdtrain.cluster import boot
from hvdtrain.cluster.control import MpiControl, flush_streams
from hvdtrain.cluster.deadline import deadline
from hvdtrain.cluster.liveness import causes, pulse
from hvdtrain.core.errors import EXIT_USER_ERROR, ExitCalled, Interrupted, UserError, WaitTimeout, of_locale
from hvdtrain.core.launcher import LaunchFacts
from hvdtrain.core.terminal import log

EXIT_CRASH = 1
EXIT_INTERRUPTED = 130

EXIT_REQUEUE = 75
"""The run is saved and is to be resumed in another job (EX_TEMPFAIL of sysexits.h)."""

MEET_S = 1.5
"""How long a rank that ends with an error waits for the others to end too, before it ends them."""

START_S = 60.0
"""Longest wait for MPI to start when it is started only to report a mistake."""

STAGGER_S = 0.4
"""Rank r waits r times this before it prints (2 s at most): whoever aborts first silences the rest."""

PEER_S = 2.0
"""Further wait of a rank whose error is only the echo of another rank's."""

LEAVE_S = 20.0
"""Longest time from the last word to the end of the process."""

_ECHOES = ("PeerFailed", "HorovodInternalError", "WaitTimeout")
_ECHO_TEXTS = ("Horovod has been shut down", "HorovodInternalError")

ALARM_GRACE_S = 5.0
"""How much later than the watchdog's bound the alarm clock rings that needs no Python."""


def run_guarded(main: Callable[[], int | None], facts: LaunchFacts) -> int:
    """Run ``main`` and return the exit status of this process; a job that cannot end in order is aborted instead.

    For ``sys.exit(run_guarded(main, launch_facts(os.environ)))``. `UserError`: one message, 2 on every rank. Any
    other exception: its traceback once, with rank and host, then the job is aborted with 1. SystemExit keeps its
    status, and aborts the job with it where other ranks stay behind; a run turns it into `ExitCalled`, which is 1.
    """
    try:
        status = main() or 0
        causes.leave({0: "done", EXIT_REQUEUE: "requeue"}.get(status, "exception"), f"exit status {status}")
    except BrokenPipeError:  # nobody reads any more (| head): not a failure, and nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        causes.leave("exception", "the reader of the output has ended")
        return _leave("", EXIT_CRASH, facts)
    except BaseException as error:  # this is where every exception ends
        return end(error, facts)
    if status == EXIT_REQUEUE:
        _keep_status()
    return _leave("", status, facts)


def _keep_status() -> None:
    """Ignore SIGTERM: a launcher ends the others as soon as one has left with a status, which must stay theirs too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def install_hooks(facts: LaunchFacts) -> None:
    """Make an uncaught exception of a user's own script end the job as `run_guarded` would.

    An uncaught exception in a thread is printed with its rank; it does not end the job by itself, as in any Python
    program: what waits for that thread ends with its own bound.
    """
    if getattr(sys.excepthook, "hvdtrain", False):
        return
    usual, usual_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        error = of_locale(error)
        if facts.kind == "solo" and not isinstance(error, (UserError, ExitCalled, Interrupted)):
            causes.leave_error(error)
            usual(kind, error, tb)
            return
        raise SystemExit(end(error.with_traceback(tb), facts))

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if facts.kind != "solo":
            _say(f"{_who(facts)}: uncaught exception in a thread")
        usual_thread(args)

    hook.hvdtrain = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = hook, thread_hook


def end(error: BaseException, facts: LaunchFacts) -> int:
    """Say what is to be said about ``error`` and return the exit status, or abort the job and not return."""
    pulse.leaving()
    error = of_locale(error)
    if isinstance(error, SystemExit) and error.code in (None, 0, EXIT_REQUEUE):
        causes.leave("requeue" if error.code else "done", "")
    else:
        causes.leave_error(error, echo=is_echo(error))
    if isinstance(error, UserError):
        return _leave(str(error), EXIT_USER_ERROR, facts)
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return _leave("", error.code or 0, facts)
        return _leave(str(error.code), EXIT_CRASH, facts)
    if isinstance(error, ExitCalled):
        return _exit_called(error, facts)
    if isinstance(error, Interrupted):  # on all ranks, which leave together
        if facts.kind != "solo":
            _keep_status()
        return _leave(str(error), EXIT_INTERRUPTED, facts)
    if isinstance(error, KeyboardInterrupt):
        return _abort(f"{_who(facts)}: interrupted", EXIT_INTERRUPTED)
    return _crash(error, facts)


def is_echo(error: BaseException) -> bool:
    """Return whether ``error`` only says that another rank went away, whose own error is the one to read."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names.intersection(_ECHOES)) or any(text in str(error) for text in _ECHO_TEXTS)


def _leave(text: str, status: int, facts: LaunchFacts) -> int:
    """End with ``status``; ``text`` is said by one rank. Returns when all ranks leave, else aborts the job."""
    pulse.leaving()
    if facts.kind == "solo":
        if text:
            _say(text)
        return status
    if status == 0:
        _bound_leaving()
        return status
    meeting = _meeting_place(text, facts) if facts.kind == "mpi" else None
    if meeting is None:
        return _leave_apart(text, status, facts)
    meeting.timeout_s = MEET_S
    try:
        rows = meeting.gather((text, meeting.node))
        if meeting.rank == 0:
            _say_one(rows)
        meeting.barrier("leaving")
    except WaitTimeout:
        time.sleep(min(STAGGER_S * meeting.rank, PEER_S))
        return _abort(f"rank {meeting.rank} on host {meeting.node}: {text}" if text else "", status)
    deadline(LEAVE_S, "leaving the job").__enter__()
    return status


def _bound_leaving() -> None:
    """Bound the time to the end of the process, in which Horovod and MPI wait for all ranks again.

    Python's threads, and so the watchdog, are gone by MPI_Finalize: from there an alarm ends the process and the job.
    """
    control = boot.current_control()
    if control is None or control.size == 1:
        return
    bound_s = control.timeout_s
    pulse.at("end")
    deadline(bound_s, "leaving the job").__enter__()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, bound_s + ALARM_GRACE_S)


def _meeting_place(text: str, facts: LaunchFacts) -> MpiControl | None:
    """Return the control plane for leaving, starting MPI if need be: a lone exit would cut the others off."""
    if boot.exit_control() is None:
        try:
            with deadline(START_S, f"starting MPI to report this error: {text}"):
                boot.start_control(facts, START_S)
        except Exception:  # MPI cannot start; that may be the very mistake being reported
            return None
    return boot.exit_control()


def _leave_apart(text: str, status: int, facts: LaunchFacts) -> int:
    """Leave without a control plane: rank 0 speaks at once, another rank only if it has not been ended by then."""
    if facts.rank > 0:
        time.sleep(MEET_S + PEER_S)
    if text:
        _say(text if facts.rank == 0 else f"{_who(facts)}: {text}")
    if facts.kind == "gloo":
        deadline(LEAVE_S, "leaving the job").__enter__()
    return status


def _say_one(rows: list[tuple[str, str]]) -> None:
    """Print the first text, with its rank and host unless all are equal. ``rows``: (text, node) by rank."""
    spoken = [(rank, text, node) for rank, (text, node) in enumerate(rows) if text]
    if not spoken:
        return
    rank, text, node = spoken[0]
    alike = len(spoken) == len(rows) and len({text for _, text, _ in spoken}) == 1
    _say(text if alike else f"rank {rank} on host {node}: {text}")


def _crash(error: BaseException, facts: LaunchFacts) -> int:
    trace = "".join(traceback.format_exception(error)).rstrip()
    if facts.kind == "solo":
        flush_streams()
        print(trace, file=sys.stderr, flush=True)
        return EXIT_CRASH
    time.sleep(min(STAGGER_S * facts.rank, PEER_S) + (PEER_S if is_echo(error) else 0.0))
    return _abort(f"{_who(facts)} failed and ends the job\n{trace}", EXIT_CRASH)


def _exit_called(error: ExitCalled, facts: LaunchFacts) -> int:
    if facts.kind == "solo":
        _say(str(error))
        return EXIT_CRASH
    time.sleep(min(STAGGER_S * facts.rank, PEER_S))
    return _abort(f"{_who(facts)}: {error}", EXIT_CRASH)


def _abort(text: str, status: int) -> int:
    """Say ``text`` and end every rank; returns ``status`` where there is nobody else or no control plane."""
    if text:
        _say(text)
    control = boot.current_control()
    if control is not None and control.size > 1:
        control.abort(status)
    return status


def _who(facts: LaunchFacts) -> str:
    return ", ".join(part for part in (f"rank {facts.rank} on host {socket.gethostname()}", pulse.own_role()) if part)


def _say(text: str) -> None:
    """Write one message to stderr, after what was printed before; works where nobody reads it any more."""
    flush_streams()
    stream: Any = sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.write(f"hvdtrain: {text}\n")
    with contextlib.suppress(Exception):  # a handler of the user's must not keep a rank from ending
        log(text, logging.ERROR, printed=True)
    flush_streams()
