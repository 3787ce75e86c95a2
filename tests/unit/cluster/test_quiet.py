"""Of what is written to standard error while TensorFlow loads, its own start-up lines alone are left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

ABSL = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
ONEDNN = "I0000 00:00:1795348944.243529     792 port.cc:153] oneDNN custom operations are on. You may see slightly ..."
GUARD = ("2026-01-02 03:04:05.678: I tensorflow/core/platform/cpu_feature_guard.cc:227] This TensorFlow binary is "
         "optimized to use available CPU instructions in performance-critical operations.")
ENABLE = ("To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the "
          "appropriate compiler flags.")
OURS = "E0000 00:00:17 cuda_platform.cc:52] failed call to cuInit"

SCRIPT = """
import os, signal, subprocess, sys
from hvdtrain.cluster import quiet

print("before", file=sys.stderr)
with quiet.filtered():
{body}
print("after", file=sys.stderr)
"""


def told(body, env=(), **how):
    """(status, standard error as bytes) of a script whose body runs within the filter."""
    text = SCRIPT.format(body="\n".join("    " + line for line in body))
    own = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")} | dict(env)
    job = subprocess.run([sys.executable, "-c", text], stderr=subprocess.PIPE, env=own, timeout=60, check=False, **how)
    return job.returncode, job.stderr


def write(*lines):
    return [f"os.write(2, {line!r})" for line in lines]


def test_the_rest_passes_through_as_it_is():
    noise = [f"{line}\n".encode() for line in (ABSL, ONEDNN, GUARD, ENABLE)]
    status, said = told(write(noise[0], b"mine\n", noise[1] + noise[2], b"\xff\x00bytes\n", noise[3],
                              f"{OURS}\n{ONEDNN}\n".encode(), b"no end"))
    assert status == 0 and said == b"before\nmine\n\xff\x00bytes\n" + f"{OURS}\n".encode() + b"no endafter\n"


@pytest.mark.parametrize("end, status", [
    ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("os._exit(7)", 7), ("os.abort()", -signal.SIGABRT),
    ("raise ValueError('mine')", 1),
])
def test_the_last_words_of_a_process_that_ends_meanwhile_are_not_lost(end, status):
    found, said = told([*write(f"{ONEDNN}\nthe last words".encode()), end])
    assert found == status and said.startswith(b"before\nthe last words") and b"oneDNN" not in said
    assert (b"ValueError: mine" in said) == (status == 1)


def test_a_child_that_outlives_the_filter_is_heard():
    child = [sys.executable, "-c", "import os, time; time.sleep(0.3); os.write(2, b'child\\n')"]
    status, said = told([f"child = subprocess.Popen({child!r})", "quiet.LAST_S = 0.01"])
    assert status == 0 and sorted(said.split()) == [b"after", b"before", b"child"]


@pytest.mark.parametrize("env", [{"TF_CPP_MIN_LOG_LEVEL": "0"}, {"TF_CPP_MAX_VLOG_LEVEL": "1"}])
def test_who_asks_for_tensorflows_log_gets_it(env):
    assert told(write(f"{ONEDNN}\n".encode()), env) == (0, f"before\n{ONEDNN}\nafter\n".encode())


def test_without_a_standard_error_nothing_happens():
    assert told(["pass"], preexec_fn=lambda: os.close(2))[0] == 0


def test_only_the_first_import_of_tensorflow_is_filtered(tmp_path):
    """With a placeholder for TensorFlow, which may be missing here."""
    folder = tmp_path / "tensorflow"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"import os\nos.write(2, {ONEDNN + chr(10)!r}.encode() + b'real\\n')\n")
    (folder / "data.txt").write_text("x")
    text = ("import importlib.util, importlib.resources, os, sys\nfrom hvdtrain.cluster import quiet\n"
            "finders = list(sys.meta_path)\nquiet.watch_import()\nquiet.watch_import()\n"
            "assert importlib.util.find_spec('tensorflow') and 'tensorflow' not in sys.modules\n"
            "others = lambda: [one for one in sys.meta_path if not isinstance(one, quiet._KerasFinder)]\n"
            "import tensorflow\nassert others() == finders, sys.meta_path\nquiet.watch_import()\n"
            "assert others() == finders and 'Source' in type(tensorflow.__spec__.loader).__name__\n"
            "assert importlib.resources.files(tensorflow).joinpath('data.txt').read_text() == 'x'\n"
            f"os.write(2, {ONEDNN + chr(10)!r}.encode())\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    job = subprocess.run([sys.executable, "-c", text], stderr=subprocess.PIPE, timeout=60, check=False,
                         env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"})
    assert job.returncode == 0 and job.stderr.decode() == f"real\n{ONEDNN}\n", job.stderr
