"""The whole path of recipes/cifar100.yaml and its twin, resumed and over two hosts too.

On an archive of the published format that the test makes, with a small network in the place of the large one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from runner import ROOT, mpirun, run

sys.path.insert(0, str(ROOT / "tests" / "fixtures"))
from cifar_archive import write_binary  # noqa: E402

CIFAR = {"torch": "cifar100.yaml", "tensorflow": "cifar100_keras.yaml"}
WIRE = {"torch": "mpi", "tensorflow": "horovod"}
"""What carries the sums of sync_batchnorm; in Keras Horovod alone can."""
TWO_HOSTS = str(ROOT / "mpi_scripts" / "two_hosts.sh")


def need(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Return a folder with an archive of 40 training and 8 test pictures, and its MD5."""
    root = tmp_path_factory.mktemp("cifar")
    return root, write_binary(root / "cifar-100-binary.tar.gz", train=40, test=8, classes=10)


def words(framework, archive, out, *more):
    root, md5 = archive
    models = {"torch": "torch_models", "tensorflow": "tf_models"}
    return ["-m", "hvdtrain", "train", "--config", str(ROOT / "recipes" / CIFAR[framework]), "--data.args.root",
            str(root), "--data.args.md5", md5, "--model", f"{models[framework]}.resnet:wide_resnet",
            "--model_args.depth", "10", "--model_args.widen", "1", "--global_batch", "16", "--epochs", "2",
            "--schedule.warmup_steps", "2", "--precision", "fp32", "--out", str(out), "--progress", "plain", *more]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", CIFAR)
def test_cifar_over_two_hosts_and_resumed_by_one_process_ends_alike(framework, archive, tmp_path):
    """Over two ranks of one host where two_hosts.sh cannot run, which test_two_hosts tells."""
    need(framework)
    need("mpi4py" if WIRE[framework] == "mpi" else "horovod")
    tried = subprocess.run([TWO_HOSTS, "1gbit", "true"], capture_output=True, text=True, timeout=30)
    norm = ["--model_args.norm", "batch", "--sync_batchnorm", "true"]
    first = words(framework, archive, tmp_path / "whole", "--checkpoint.every_steps", "4", *norm,
                  "--collectives", WIRE[framework])
    whole = mpirun(2, first, 120) if tried.returncode == 77 else run(
        [TWO_HOSTS, "none", "mpirun", "-np", "2", "python", *first], 120.0, {"HOSTS": "2", "SLOTS": "1"})
    assert whole.returncode == 0, whole.text
    (middle,) = (tmp_path / "whole" / "checkpoints").glob("step-*4")
    rest = run([sys.executable, *words(framework, archive, tmp_path / "rest", "--resume", str(middle), *norm)], 120)
    assert rest.returncode == 0 and "resumed at step 4" in rest.text, rest.text
    ends = [json.loads((tmp_path / name / "completed.json").read_text()) for name in ("whole", "rest")]
    assert [end["steps"] for end in ends] == [6, 6] and ends[0]["ledger"]["epochs"] == 2
    assert ends[1]["loss"] == pytest.approx(ends[0]["loss"], rel=1e-4)
    assert set(ends[0]["metrics"]) == {"loss", "accuracy"}
    hosts = ends[0]["hosts"]
    assert tried.returncode == 77 or "2 hosts" in hosts and "host0 (rank 0" in hosts and "host1 (rank 1" in hosts
