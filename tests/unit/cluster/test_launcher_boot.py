"""Starting without MPI, and the pure parts of starting with it."""

import os
import subprocess
import sys

import pytest

from hvdtrain.cluster import boot, horovod
from hvdtrain.cluster.control import SoloControl, agreed
from hvdtrain.cluster.exit import run_guarded
from hvdtrain.config import ExchangeConfig
from hvdtrain.core import ROOT
from hvdtrain.core.errors import Interrupted, UserError
from hvdtrain.core.launcher import SOLO, LaunchFacts

TWO = LaunchFacts("mpi", 1, 2, 1, 2, "Open MPI mpirun")


def test_importing_the_cluster_starts_nothing():
    code = ("import sys, os; before = dict(os.environ)\n"
            "import hvdtrain.cluster.boot, hvdtrain.cluster.exit\n"
            "import hvdtrain.comm.collectives.mpi, hvdtrain.comm.collectives.lockstep\n"
            "assert not {'mpi4py', 'horovod', 'torch', 'tensorflow'} & set(sys.modules), 'imported'\n"
            "assert dict(os.environ) == before, 'environment'\n"
            "import threading; assert threading.active_count() == 1, 'threads'\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_solo_control():
    import numpy as np

    control = SoloControl()
    assert (control.rank, control.size, control.local_rank, control.local_size) == (0, 1, 0, 1)
    assert control.bcast("x") == "x" and control.gather("x") == ["x"]
    assert control.agree(True) and not control.agree(False)
    values = np.array([1, 2])
    total = control.sum(values)
    assert total.dtype == np.float64 and total.tolist() == [1, 2] and total is not values
    control.barrier("here")
    with pytest.raises(SystemExit) as caught:
        control.abort(3)
    assert caught.value.code == 3


def test_start_control_alone_is_solo_and_the_same_twice(monkeypatch):
    monkeypatch.setattr(boot, "_started", {})
    control = boot.start_control(SOLO, 5.0)
    assert isinstance(control, SoloControl) and boot.start_control(SOLO, 5.0) is control is boot.current_control()


def test_processes_of_torchrun_are_refused_as_each_would_train_alone(monkeypatch):
    monkeypatch.setattr(boot, "_started", {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match="2 processes of torchrun"):
        boot.start_control(SOLO, 5.0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert boot.start_control(SOLO, 5.0).size == 1


@pytest.mark.parametrize("bound, cores, ranks, want", [(2, 2, 2, True), (2, 2, 1, False), (16, 16, 8, False),
                                                       (16, 16, 9, True), (1, 16, 2, True), (4, 1.5, 1, True)])
def test_should_yield_where_busy_threads_outnumber_cores(bound, cores, ranks, want):
    assert boot.should_yield(bound, cores, ranks) is want


def test_the_users_setting_of_yield_wins():
    env = {boot.YIELD: "0"}
    assert boot.yield_when_idle(TWO, env) == "" and env == {boot.YIELD: "0"}
    crowd = LaunchFacts("mpi", 0, 10_000, 0, 10_000, "Open MPI mpirun")
    env = {}
    assert "10000 ranks" in boot.yield_when_idle(crowd, env) and env == {boot.YIELD: "1"}


def test_send_only_on_several_hosts_of_open_mpi():
    hosts = LaunchFacts("mpi", 0, 4, 0, 2, "Open MPI mpirun")
    env = {}
    assert boot.SEND_ONLY in boot.send_only(hosts, env) and env == {boot.SEND_ONLY: "send"}
    own = {boot.SEND_ONLY: "put"}
    assert boot.send_only(hosts, own) == "" and own == {boot.SEND_ONLY: "put"}
    for other in (TWO, SOLO, LaunchFacts("mpi", 0, 4, -1, 0, "Open MPI mpirun"),
                  LaunchFacts("mpi", 0, 4, 0, 2, "MPICH mpiexec")):
        assert boot.send_only(other, (left := {})) == "" and left == {}


def test_claim_device(monkeypatch):
    monkeypatch.setattr(boot, "count_gpus", lambda: 2)
    env = {}
    assert boot.claim_device(TWO, env) == "" and env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert boot.claim_device(SOLO, (alone := {})) == "" and alone == {}
    monkeypatch.setattr(boot, "count_gpus", lambda: 0)
    assert boot.claim_device(TWO, (none := {})) == "" and none == {}
    monkeypatch.setattr(boot, "count_gpus", lambda: 1)
    assert "share 1 GPU" in boot.claim_device(TWO, (shared := {})) and shared == {"CUDA_VISIBLE_DEVICES": "0"}


def test_several_devices_for_each_rank(monkeypatch):
    monkeypatch.setattr(boot, "count_gpus", lambda: 4)
    env = {}
    assert boot.claim_device(TWO, env, 2) == "" and env == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setattr(boot, "count_gpus", lambda: 3)
    with pytest.raises(UserError, match="this host shows 3 GPUs for 2 ranks x 2 devices"):
        boot.claim_device(TWO, (left := {}), 2)
    assert left == {}
    monkeypatch.setattr(boot, "count_gpus", lambda: 0)
    assert boot.claim_device(TWO, (none := {}), 2) == "" and none == {}


class Ranks(SoloControl):
    """The control plane of a rank whose neighbour on this host says the same of itself."""

    size = 2

    def gather(self, obj):
        return [obj, obj]


def start(monkeypatch, env, gpus):
    """Start on a host with so many GPUs, in an environment of its own."""
    monkeypatch.setattr(boot, "_started", {})
    monkeypatch.setattr(boot, "count_gpus", lambda: gpus)
    monkeypatch.setattr(boot.os, "environ", env)
    monkeypatch.setattr(boot, "_start_mpi", lambda facts, timeout_s: Ranks())
    monkeypatch.setattr(boot, "set_owner", lambda name, abort: None)


def test_a_start_without_claiming_leaves_the_devices_to_the_script(monkeypatch):
    env = {}
    start(monkeypatch, env, gpus=2)
    control = boot.start_control(TWO, 5.0, claim=False)
    assert boot.VISIBLE not in env
    assert boot.start_control(TWO, 5.0) is control and env[boot.VISIBLE] == "1", "a later start that claims still does"
    env[boot.VISIBLE] = "0"
    boot.start_control(TWO, 5.0)
    assert env[boot.VISIBLE] == "0", "once"


def test_too_few_devices_end_the_start_on_every_rank_after_mpi_has_started(monkeypatch):
    start(monkeypatch, {}, gpus=3)
    with pytest.raises(UserError, match="3 GPUs for 2 ranks x 2 devices"):
        boot.start_control(TWO, 5.0, devices_per_rank=2)
    assert boot.current_control() is not None, "the ranks leave together"


def test_two_ranks_with_one_list_of_the_launchers_overlap_unless_slurm_confines_them(monkeypatch):
    start(monkeypatch, {boot.VISIBLE: "0,1"}, gpus=2)
    with pytest.raises(UserError, match="both use GPU 0"):
        boot.start_control(TWO, 5.0, devices_per_rank=2)
    start(monkeypatch, (env := {boot.VISIBLE: "0,1", "SLURM_GPUS_PER_TASK": "2"}), gpus=2)
    boot.start_control(TWO, 5.0, devices_per_rank=2)
    assert env[boot.VISIBLE] == "0,1"


@pytest.mark.parametrize("given, ends", [
    ({}, "600"), ({horovod.STALL: "0"}, "0"), ({horovod.STALL_CHECK: "600"}, "600"),
    ({horovod.STALL_CHECK: "900"}, None),
    ({horovod.STALL_CHECK: "soon"}, None)])
def test_horovod_ends_a_stall_unless_told_otherwise(given, ends):
    env = dict(given)
    horovod.bound_stalls(600.0, env)
    assert env.get(horovod.STALL) == ends and env.keys() <= given.keys() | {horovod.STALL}


def test_horovod_environment_only_where_asked():
    env = {}
    horovod._horovod_env(ExchangeConfig(), env)
    assert env == {}
    horovod._horovod_env(ExchangeConfig(fusion_threshold_mb=2, cycle_time_ms=0.5), env)
    assert env == {"HOROVOD_FUSION_THRESHOLD": str(2 * 2**20), "HOROVOD_CYCLE_TIME": "0.5"}


def test_horovod_reason_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    assert "not installed" in horovod.horovod_reason("torch")
    assert "python -m hvdtrain build" in horovod.horovod_reason("torch")
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    __import__("importlib").invalidate_caches()
    assert "without torch support" in horovod.horovod_reason("torch")
    (tmp_path / "horovod" / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").write_text("")
    assert horovod.horovod_reason("torch") is None
    assert "without tensorflow support" in horovod.horovod_reason("tensorflow")
    monkeypatch.setenv("OPAL_PREFIX", "set already")
    with pytest.raises(horovod.HorovodUnavailable, match="does not load .*must not be imported"):
        horovod.start_horovod("torch", ExchangeConfig(), SOLO)


def test_a_lone_mpi_process_is_told_where_the_wheel_is(tmp_path):
    boot.prepare_lone_mpi(env := {}, str(tmp_path))
    assert env == {}, "no Open MPI in this environment"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "orted").touch()
    boot.prepare_lone_mpi(env, str(tmp_path))
    assert env == {"OPAL_PREFIX": str(tmp_path)}
    for env in ({"OPAL_PREFIX": "/mine"}, {"OMPI_COMM_WORLD_RANK": "0"}, {"PMI_RANK": "0"}):
        boot.prepare_lone_mpi(changed := dict(env), str(tmp_path))
        assert changed == env


def test_mismatch_names_both():
    text = boot._mismatch(TWO, 1, "MPICH Version: 4.3.0\nMore")
    assert "Open MPI mpirun started 2" in text and "(MPICH Version: 4.3.0) sees 1" in text


@pytest.mark.parametrize("raised, status", [
    (UserError("x is 1", "2", "set x"), 2), (SystemExit(5), 5), (SystemExit(), 0), (SystemExit("words"), 1),
    (KeyboardInterrupt(), 130), (Interrupted("saved"), 130), (ValueError("v"), 1)])
def test_run_guarded_alone(raised, status, capsys):
    def main():
        raise raised

    assert run_guarded(main, SOLO) == status
    said = capsys.readouterr().err
    assert ("Traceback" in said) is isinstance(raised, ValueError)
    if status == 2:
        assert said == "hvdtrain: x is 1; expected 2. Set x.\n"
    assert (said == "hvdtrain: saved\n") is isinstance(raised, Interrupted)


def test_run_guarded_passes_the_status_on():
    assert run_guarded(lambda: None, SOLO) == 0 and run_guarded(lambda: 4, SOLO) == 4


def test_agreed_alone_raises_as_it_is():
    def fail():
        raise UserError("a", "b", "c")

    with pytest.raises(UserError, match=r"^a; expected b. C.$"):
        agreed(SoloControl(), fail, "reading")
    assert agreed(SoloControl(), lambda: 3, "reading") == 3


def test_a_script_alone_says_its_mistake_without_traceback(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("from hvdtrain.cluster import boot, exit\nfrom hvdtrain.core.launcher import SOLO\n"
                    "from hvdtrain.core.errors import UserError\n"
                    "exit.install_hooks(SOLO)\nboot.start_control(SOLO, 5)\n"
                    "raise UserError('x is 1', '2', 'set x')\n")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(ROOT.parent)})
    assert (done.returncode, done.stderr) == (2, "hvdtrain: x is 1; expected 2. Set x.\n")


@pytest.mark.parametrize("env, library, refused", [
    ({}, "Open MPI v4.1.8", "no --mpi=pmix"), ({"PMI_RANK": "0"}, "Open MPI v5.0.11", "--mpi=pmi2"),
    ({"PMI_RANK": "0"}, "MPICH Version: 4.0.2", ""), ({"PMIX_RANK": "0"}, None, "")])
def test_open_mpi_under_srun_needs_pmix(monkeypatch, env, library, refused):
    class Library:
        Get_library_version = staticmethod(lambda: library)

    monkeypatch.setattr(boot, "_import_mpi", lambda launcher, init: Library)
    facts = LaunchFacts("mpi", 0, 2, 0, 1, "srun")
    if not refused:
        return boot._check_srun(facts, env)
    with pytest.raises(UserError, match=f"srun with {refused}, and mpi4py uses Open MPI"):
        boot._check_srun(facts, env)
