"""From wishes to one launch: hosts, environment, ssh, cores; the choice of a launcher; the command's own options."""

import shlex
import subprocess
import time

import psutil
import pytest

from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots, LauncherProgram
from hvdtrain.cluster.launchers.mpich import LAST
from hvdtrain.cluster.launchers.prepare import PROGRAMS, Here, Wishes, choose, hosts_of, parse_mpi_args, prepare
from hvdtrain.cluster.launchers.spec import AGENT_VARIABLES, UNREAD, parse_env, parse_ssh, passed
from hvdtrain.cluster.machine import software as build_detect
from hvdtrain.commands.launch import cli
from hvdtrain.core.errors import UserError

OPENMPI = LauncherProgram("openmpi4", "/v/bin/mpirun", "openmpi", "4.1.8", "/v/bin/mpirun")
HERE = Here(env={"PATH": "/usr/bin", "SECRET": "s"}, names=("localhost", "127.0.0.1", "me"), cores=4,
            search_path="/v/bin:/usr/bin")
FAR = (HostSlots("fast", 4), HostSlots("old", 2))


def spec(tool=OPENMPI, here=HERE, **wishes):
    return prepare(Wishes(**{"program": ("p",), "hosts": FAR, **wishes}), here, tool)[0]


def notes(tool=OPENMPI, here=HERE, **wishes):
    return prepare(Wishes(**{"program": ("p",), "hosts": FAR, **wishes}), here, tool)[1]


def slurm(**env):
    return Here(env={"SLURM_JOB_ID": "7", **env}, cores=4)


def test_all_slots_are_used_unless_a_number_is_named():
    assert spec().ranks == 6 and spec().hosts == FAR
    assert spec(ranks=5).hosts == (HostSlots("fast", 4), HostSlots("old", 1))
    assert spec(ranks=8, oversubscribe=True).hosts == (HostSlots("fast", 5), HostSlots("old", 3))


def test_a_number_alone_means_this_host_and_in_slurm_the_allocation():
    assert spec(hosts=(), ranks=3).hosts == (HostSlots("localhost", 3),)
    assert (spec(hosts=(), ranks=3, here=slurm()).hosts, spec(hosts=(), ranks=3, here=slurm()).ranks) == ((), 3)
    assert spec(hosts=(), here=slurm()).ranks == 0
    with pytest.raises(UserError, match="neither hosts"):
        spec(hosts=())


def test_cores_count_on_this_host_only_and_are_said():
    assert not spec(hosts=(HostSlots("far", 99),)).oversubscribe
    assert not spec(hosts=(HostSlots("me", 4),)).oversubscribe
    assert spec(hosts=(HostSlots("me", 5),)).oversubscribe
    assert notes(hosts=(HostSlots("me", 5),)) == ["5 ranks share the 4 cores of this host"]
    assert notes(hosts=(HostSlots("me", 4),)) == []
    with pytest.raises(UserError, match="--bind core"):
        spec(hosts=(HostSlots("me", 3),), bind="core", cores_per_rank=2)


def test_ssh_is_ours_only_for_other_hosts_where_nobody_chose():
    assert spec().over_ssh and spec().remote
    assert not spec(hosts=(HostSlots("me", 2), HostSlots("localhost", 1))).over_ssh
    assert not spec(here=slurm()).over_ssh and spec(here=slurm()).remote
    for launcher, names in AGENT_VARIABLES.items():
        for name in names:
            assert not spec(LauncherProgram(launcher, "mpirun"), Here(env={name: "rsh"})).over_ssh
    assert spec(here=Here(env={"HYDRA_LAUNCHER": "rsh", "I_MPI_HYDRA_BOOTSTRAP": "rsh"})).over_ssh, "not Open MPI's"


@pytest.mark.parametrize("name", UNREAD)
def test_an_agent_that_open_mpi_5_does_not_read_is_read_for_it(name):
    five, here = LauncherProgram("openmpi5", "mpirun", "openmpi", "5.0.11"), Here(env={name: "/my/agent -v"})
    made, said = prepare(Wishes(("p",), FAR), here, five)
    words = LAUNCHERS["openmpi5"].command(made)[0]
    assert words[words.index("plm_ssh_agent") - 1:][:3] == ["--prtemca", "plm_ssh_agent", "/my/agent -v"]
    assert said == [f"Open MPI 5.0.11 does not read {name}: its value is used as --ssh"]
    assert spec(five, here, ssh=("ssh",)).ssh == ("ssh",), "what is said now goes first"
    assert spec(five, Here(env={name: "a", "PRTE_MCA_plm_ssh_agent": "b"})).ssh == (), "mpirun reads that one"
    assert spec(five, here, hosts=(HostSlots("localhost", 1),)).ssh == () == spec(OPENMPI, here).ssh


def test_open_mpi_4_is_known_to_take_this_host_first():
    assert "to this host, me, though far is named first" in notes(hosts=(HostSlots("far", 1), HostSlots("me", 1)))[0]
    assert notes(hosts=(HostSlots("me", 1), HostSlots("far", 1))) == notes(hosts=FAR) == []
    five = LauncherProgram("openmpi5", "mpirun", "openmpi", "5.0.11")
    assert notes(five, hosts=(HostSlots("far", 1), HostSlots("me", 1))) == []


def test_the_environment_is_a_list_of_names():
    env = {"PATH": "/b", "HVDTRAIN_LR": "1", "NCCL_DEBUG": "INFO", "HOROVOD_CYCLE_TIME": "1", "SECRET": "s",
           "CUDA_VISIBLE_DEVICES": "0", "HOME": "/h", "OMPI_COMM_WORLD_RANK_X": "1", "HOROVOD_RANK": "0",
           "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_SECRET_KEY": "k", "NCCL_;id": "x", "OMPI_MCA_btl": "tcp"}
    assert passed(env) == ("HOROVOD_CYCLE_TIME", "HVDTRAIN_LR", "NCCL_DEBUG", "PATH")
    srun = LauncherProgram("srun", "/usr/bin/srun", "openmpi")
    assert spec(srun, Here(env=env), hosts=(HostSlots("a", 1),)).env_names == (
        "HOME", "HOROVOD_CYCLE_TIME", "HVDTRAIN_LR", "NCCL_DEBUG", "OMPI_MCA_btl", "PATH", "PMIX_MCA_psec")


def test_env_adds_names_and_sets_values():
    made = spec(env=("SECRET", "A=x=y;$z", "B="))
    assert made.env_names == ("A", "B", "PATH", "SECRET")
    assert made.env_values == (("A", "x=y;$z"), ("B", ""))


@pytest.mark.parametrize("word", ["A;id", "A;id=1", "1A", "", "=1", "A B=1", "A-B=1", "$(id)=1", "é=1", "UNSET",
                                  "A=line\nbreak", "A=nul\0"])
def test_a_wrong_env_is_refused(word):
    with pytest.raises(UserError, match="--env"):
        parse_env([word], {})


def test_an_interface_is_told_to_nccl_and_gloo_unless_they_know():
    assert dict(spec(interface="ib0").env_values) == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}
    made = spec(interface="ib0", here=Here(env={"NCCL_SOCKET_IFNAME": "eth9"}))
    assert dict(made.env_values) == {"GLOO_SOCKET_IFNAME": "ib0"} and "NCCL_SOCKET_IFNAME" in made.env_names


@pytest.mark.parametrize("wrong", [
    {"interface": "eth0;id"}, {"interface": "-x"}, {"interface": "eth0,eth1"}, {"program": ()}, {"program": ("-x",)},
    {"program": ("a", ":", "b")}, {"program": ("a", "nul\0")}, {"cores_per_rank": 0}, {"ranks": -1},
    {"cores_per_rank": 2}, {"program": ("",)}, {"ranks": 4294967297}, {"ranks": 4097, "hosts": ()},
    {"ranks": 9000, "oversubscribe": True}])
def test_wishes_that_no_launcher_can_meet(wrong):
    with pytest.raises(UserError):
        spec(**wrong)


def test_a_launch_inside_a_job_is_refused():
    with pytest.raises(UserError, match="already belongs to a job, started by Open MPI mpirun"):
        spec(here=Here(inside="Open MPI mpirun"))


def test_horovodrun_finds_the_mpirun_beside_this_python():
    run = LauncherProgram("horovodrun", "/v/bin/horovodrun", "openmpi", "4.1.8")
    assert dict(spec(run).env_values) == {"PATH": "/v/bin:/usr/bin"} and spec(OPENMPI).env_values == ()


@pytest.mark.parametrize(("version", "said"), [("5.0.8", True), ("5.0.11", False), ("4.1.8", False)])
def test_addresses_are_doubtful_before_open_mpi_5_0_11(version, said):
    tool = LauncherProgram("openmpi5", "mpirun", "openmpi", version)
    assert bool(notes(tool, hosts=(HostSlots("10.0.0.1", 1),))) is said
    assert not notes(tool, hosts=(HostSlots("a", 1),))


def test_root_needs_both_variables():
    both = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert spec(here=Here(env=both)).root_in_environment
    assert not spec(here=Here(env={"OMPI_ALLOW_RUN_AS_ROOT": "1"})).root_in_environment


@pytest.mark.parametrize("text", ["", "   ", "-p 22", "ssh 'open", "''"])
def test_an_ssh_command_needs_a_program(text):
    if text == "''":
        assert parse_ssh(text) == ("",)  # the launchers refuse the empty word
        return
    with pytest.raises(UserError):
        parse_ssh(text)


PATHS = {"mpirun": "/v/bin/mpirun", "horovodrun": "/v/bin/horovodrun", "srun": "/usr/bin/srun"}
NOTHING = dict.fromkeys(PATHS, "")


@pytest.mark.parametrize(("mpi", "slurm_here", "launcher"), [
    (("openmpi", "4.1.8"), False, "openmpi4"), (("openmpi", "5.0.11"), False, "openmpi5"),
    (("openmpi", "6.0.0"), False, "openmpi5"), (("mpich", "4.3.2"), False, "mpich"),
    (("intel", "2021.14"), False, "intelmpi"), (("openmpi", "4.1.8"), True, "srun"), (("unknown", ""), True, "srun")])
def test_auto_takes_srun_in_an_allocation_and_else_what_mpirun_is(mpi, slurm_here, launcher):
    assert choose("auto", PATHS, mpi, slurm_here, False)[0].launcher == launcher


@pytest.mark.parametrize(("paths", "mpi"), [(NOTHING, ("", "")), (PATHS, ("unknown", "")), (PATHS, ("openmpi", "3.1"))])
def test_auto_without_a_known_mpi_is_refused(paths, mpi):
    with pytest.raises(UserError, match="MPI|mpirun"):
        choose("auto", paths, mpi, False, True)


@pytest.mark.parametrize("wanted", sorted(PROGRAMS))
def test_a_named_launcher_that_is_not_here_is_an_error_or_in_a_dry_run_a_note(wanted):
    with pytest.raises(UserError, match="there is no"):
        choose(wanted, NOTHING, ("", ""), False, False)
    tool, said = choose(wanted, NOTHING, ("", ""), False, True)
    assert (tool.launcher, tool.path) == (wanted, PROGRAMS[wanted]) and "there is no" in said[0]


def test_another_version_than_the_named_one_is_told():
    with pytest.raises(UserError, match="openmpi 4.1.8, not to openmpi5.*--launcher openmpi4"):
        choose("openmpi5", PATHS, ("openmpi", "4.1.8"), False, False)
    assert choose("openmpi4", PATHS, ("openmpi", "4.1.8"), False, False) == (OPENMPI, [])


def test_every_launcher_has_a_program():
    assert set(PROGRAMS) == set(LAUNCHERS)


def test_our_commands_run_under_this_interpreter_and_others_as_given():
    python = cli.interpreter()
    assert cli.rank_program(["train", "--lr", "1"]) == (python, "-m", "hvdtrain", "train", "--lr", "1")
    assert cli.rank_program(["--epochs", "1"]) == (python, "-m", "hvdtrain", "--epochs", "1")
    assert cli.rank_program(["python", "my.py"]) == ("python", "my.py")
    with pytest.raises(UserError, match="launch itself"):
        cli.rank_program(["launch", "--", "train"])


@pytest.mark.parametrize("argv", [[], ["-np", "2"], ["-np", "2", "--"]])
def test_a_launch_of_nothing_is_refused(argv):
    with pytest.raises(UserError, match="no program"):
        cli.parse(argv)


def test_only_the_first_two_dashes_divide():
    args, program = cli.parse(["-H", "a:1", "--", "x", "--", "-H", "b"])
    assert args.hosts == ["a:1"] and program == ("x", "--", "-H", "b")


def test_the_printed_lines_mean_the_same_to_a_shell():
    words, env = ["printf", "%s|", "a b", "$HOME", "`id`", "'\"\\", "x\ny"], {"A_1": "a'b $c;"}
    script = "\n".join([*cli.shell_lines(words, env), "printenv A_1"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=10)
    assert done.stdout == "|".join(words[2:]) + "|" + "a'b $c;\n"


def test_a_dry_run_prints_and_runs_nothing(capsys, tmp_path, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    hostfile, made = tmp_path / "hosts", tmp_path / "made"
    hostfile.write_text("fast slots=4\nold slots=2\n")
    assert cli.main(["--hostfile", str(hostfile), "--launcher", "mpich", "--ssh", "ssh -p 2222", "--dry-run", "--env",
                     "TOKEN=a b", "--", "touch", str(made)]) == 0
    *exports, line = capsys.readouterr().out.splitlines()
    assert exports == ["export HYDRA_LAUNCHER_EXTRA_ARGS='-p 2222'", "export TOKEN='a b'"]
    words = shlex.split(line)
    assert words[:4] == ["env", "-u", LAST, f"{LAST}=1"] and "mpi" in words[4]
    assert words[words.index("-hosts") + 1] == "fast:4,old:2" and words[-2:] == ["touch", str(made)]
    assert "TOKEN" in words[words.index("-genvlist") + 1].split(",") and not made.exists()


@pytest.mark.parametrize(("argv", "said"), [
    (["-H", "a;id:2"], "-H has 'a;id:2'"), (["--hostfile", "/no/such/file"], "cannot be read"),
    (["-np", "2", "--mpi-args", "'open"], "--mpi-args"), (["-np", "2", "--ssh", "-p 22"], "names no program"),
    (["-np", "2", "--ssh", ""], "names no program"), (["-H", ""], "-H has ''"), (["--hostfile", ""], "cannot be read"),
    (["--hostfile", "/dev/zero"], "longer than 1 MiB"), (["-np", "2", "--mpi-args", "rm -r"], "begins with 'rm'")])
def test_a_wrong_option_is_told(argv, said):
    with pytest.raises(UserError, match=said):
        cli.main([*argv, "--launcher", "mpich", "--dry-run", "--", "true"])


def test_hosts_and_words_that_are_given_twice_add_up(tmp_path):
    args, _ = cli.parse(["-H", "a:1,b", "-H", "c:2,a", "--mpi-args=--mca pml ucx", "--mpi-args=-v", "--", "p"])
    assert hosts_of(args.hosts, args.hostfile) == (HostSlots("a", 2), HostSlots("b", 1), HostSlots("c", 2))
    assert parse_mpi_args(args.mpi_args) == ("--mca", "pml", "ucx", "-v")
    assert parse_mpi_args([]) == parse_mpi_args([""]) == ()
    for wrong in ("-np 1 prog : -np 1", "-- prog"):
        with pytest.raises(UserError, match="lone colon or --"):
            parse_mpi_args([wrong])


def test_a_host_file_is_measured_in_bytes_and_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbffast slots=2\n")
    assert hosts_of([], [str(path)]) == (HostSlots("fast", 2),)
    path.write_bytes("#é\n".encode() * (1 << 18) + b"a")  # 3 characters, 4 bytes
    with pytest.raises(UserError, match="longer than 1 MiB"):
        hosts_of([], [str(path)])


def test_an_mpirun_that_does_not_answer_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    script, told = tmp_path / "mpirun", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 50 & echo $! > {told}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(build_detect, "PROBE_TIMEOUT_S", 0.5)
    started = time.monotonic()
    assert build_detect.answer_of([str(script), "--version"]) == ("", "did not answer within 0.5 s")
    assert time.monotonic() - started < 20
    child = int(told.read_text())
    while not gone(child):
        assert time.monotonic() - started < 20
        time.sleep(0.01)
    with pytest.raises(UserError, match="--version did not answer within 0.5 s"):
        choose("auto", PATHS, ("unknown", ""), False, True, "did not answer within 0.5 s")
    assert build_detect.answer_of(["/no/such"]) == ("", "cannot be started: No such file or directory")
    assert build_detect.answer_of(["sh", "-c", "exit 3"]) == ("", "ended with exit status 3")


def gone(pid):
    """Return whether a process has ended, be it reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_srun_gets_every_component_of_a_heterogeneous_job_and_no_number():
    srun = LauncherProgram("srun", "/usr/bin/srun", "openmpi", "4.1.8")
    here = slurm(SLURM_HET_SIZE="2", PATH="/bin")
    made = spec(srun, here, hosts=())
    words, env = LAUNCHERS["srun"].command(made)
    assert words[:3] == ["/usr/bin/srun", "--het-group=0-1", "--mpi=pmix"] and env["PMIX_MCA_psec"] == "native"
    assert "PMIX_MCA_psec" in made.env_names
    for asked in ({"hosts": (), "ranks": 3}, {"hosts": FAR}):
        with pytest.raises(UserError, match="heterogeneous job of 2 components"):
            LAUNCHERS["srun"].command(spec(srun, here, **asked))
    with pytest.raises(UserError, match="of which it sees one"):
        spec(OPENMPI, here, hosts=())
    assert spec(OPENMPI, here, hosts=(HostSlots("localhost", 1),)).ranks == 1
    kept = Here(env={**here.env, "PMIX_MCA_psec": "munge"})
    assert "PMIX_MCA_psec" not in dict(spec(srun, kept, hosts=()).env_values), "the user's own stays"


@pytest.mark.parametrize(("launcher", "words"), [
    ("openmpi4", ["--mca", "plm_rsh_agent"]), ("openmpi5", ["--prtemca", "plm_ssh_agent"]),
    ("mpich", ["-launcher", "rsh", "-launcher-exec"]), ("intelmpi", ["-bootstrap", "rsh", "-bootstrap-exec"])])
def test_a_job_of_pbs_or_lsf_names_the_hosts_and_the_remote_shell(tmp_path, launcher, words):
    (tmp_path / "nodes").write_text("me\nme\nfar\nfar\n")
    for name in ("pbs_tmrsh", "blaunch"):
        (tmp_path / name).touch(mode=0o755)
    pbs = {"PBS_JOBID": "1.s", "PBS_NODEFILE": str(tmp_path / "nodes"), "PATH": str(tmp_path)}
    lsf = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "me 2 far 2", "PATH": str(tmp_path)}
    tool = LauncherProgram(launcher, "mpirun", {"mpich": "mpich", "intelmpi": "intel"}.get(launcher, "openmpi"), "")
    for env, agent in ((pbs, "pbs_tmrsh"), (lsf, "blaunch")):
        here = Here(env=env, names=("localhost", "me"), cores=8)
        made = spec(tool, here, hosts=())
        assert made.hosts == (HostSlots("me", 2), HostSlots("far", 2))
        line = LAUNCHERS[launcher].command(made)[0]
        assert " ".join([*words, str(tmp_path / agent)]) in " ".join(line)
        assert spec(tool, here, hosts=(), ranks=3).hosts == (HostSlots("me", 2), HostSlots("far", 1))
        assert spec(tool, here, ssh=("ssh", "-v")).ssh == ("ssh", "-v") and spec(tool, here).hosts == FAR
