"""Run Python command lines one after the other, each in a fork of a process that has imported the frameworks.

Owns the server that `test_docs_run` starts: a line of JSON ``[argv, cwd, env, file]`` in, the exit status out. A fork
starts no MPI before its own command does, so that each command line behaves as in a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys
import threading
from typing import NoReturn

import keras
import sklearn.datasets
import torch

import hvdtrain.backends.tensorflow.create
import hvdtrain.backends.torch.create
import hvdtrain.commands.train
import hvdtrain.reports.html.page

IMPORTED = (keras, sklearn.datasets, torch, hvdtrain)
"""What takes seconds to import: done once."""


def serve() -> tuple[list[str], str, dict[str, str], str] | None:
    """Answer each line with an exit status; return the command line in the fork that runs it, None at the end."""
    gc.freeze()  # a fork's collector would write to all that it shares
    for line in sys.stdin:
        argv, cwd, env, file = json.loads(line)
        child = os.fork()
        if not child:
            return argv, cwd, env, file
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def run(argv: list[str], cwd: str, env: dict[str, str], file: str) -> NoReturn:
    """Become ``python argv...`` in ``cwd`` with ``env``; output goes to ``file``.

    The process ends without taking its modules apart, which would copy all that it shares with the server: two seconds
    for each command.
    """
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(stream, target)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[0] = cwd
    status = 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as leaves:
        status = leaves.code if isinstance(leaves.code, int) else int(leaves.code is not None)
        if isinstance(leaves.code, str):
            print(leaves.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # waits for threads, as an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__" and (command := serve()) is not None:
    run(*command)
