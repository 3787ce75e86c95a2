"""The launchers' command lines, golden: one test per flag and per MPI version; measured in docs/how-to/launch.md."""

import pytest

from hvdtrain.cluster.launchers import LAUNCHERS, HostSlots, LauncherProgram, LaunchSpec, mpich
from hvdtrain.cluster.launchers.spec import BINDINGS, laid_over
from hvdtrain.core.errors import UserError

PROGRAM = ("/v/python", "-m", "hvdtrain", "train", "a b", "$HOME", ";")
TOOLS = {
    "openmpi4": LauncherProgram("openmpi4", "/v/bin/mpirun", "openmpi", "4.1.8", "/v/bin/mpirun"),
    "openmpi5": LauncherProgram("openmpi5", "/v/bin/mpirun", "openmpi", "5.0.11", "/v/bin/mpirun"),
    "mpich": LauncherProgram("mpich", "/v/bin/mpirun", "mpich", "4.3.2", "/v/bin/mpirun"),
    "intelmpi": LauncherProgram("intelmpi", "/v/bin/mpirun", "intel", "2021.14", "/v/bin/mpirun"),
    "horovodrun": LauncherProgram("horovodrun", "/v/bin/horovodrun", "openmpi", "4.1.8", "/v/bin/mpirun"),
    "horovodrun5": LauncherProgram("horovodrun", "/v/bin/horovodrun", "openmpi", "5.0.11", "/v/bin/mpirun"),
    "srun": LauncherProgram("srun", "/usr/bin/srun", "openmpi", "4.1.8", "/v/bin/mpirun"),
}
HOSTS = (HostSlots("fast", 4), HostSlots("old", 2))
LAST = {mpich.LAST: "1"}


def built(name, **changes):
    """(words before the program, environment) of a launch on fast:4,old:2."""
    spec = LaunchSpec(**{"tool": TOOLS[name], "program": PROGRAM, "hosts": HOSTS, "ranks": 6, **changes})
    words, env = LAUNCHERS[spec.tool.launcher].command(spec)
    at = len(words) - len(PROGRAM)
    assert tuple(words[at:]) == PROGRAM, "the program arrives word for word"
    return " ".join(words[:at]), env


BARE = {
    "openmpi4": "/v/bin/mpirun -np 6 -H fast:4,old:2 --map-by slot --bind-to none --stdin none",
    "openmpi5": "/v/bin/mpirun -np 6 -H fast:4,old:2 --map-by slot --bind-to none --stdin none",
    "mpich": "/v/bin/mpirun -n 6 -hosts fast:4,old:2 -bind-to none -genvnone",
    "horovodrun": "/v/bin/horovodrun --mpi -np 6 -H fast:4,old:2 --binding-args=--map-by slot --bind-to none "
                  "--mpi-args=--stdin none",
    "horovodrun5": "/v/bin/horovodrun --mpi -np 6 -H fast:4,old:2 --binding-args=--map-by slot --bind-to none "
                   "--mpi-args=--stdin none",
    "srun": "/usr/bin/srun --ntasks=6 --nodes=2 --distribution=arbitrary --nodelist=fast,fast,fast,fast,old,old "
            "--mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 --input=none --export=NONE",
}


@pytest.mark.parametrize("name", BARE)
def test_the_bare_line(name):
    assert built(name) == (BARE[name], LAST if name == "mpich" else {})


def test_hydra_finds_a_variable_at_the_end_that_is_on_no_list():
    """It loses whichever listed one stands last there, on other hosts."""
    words, env = built("mpich", env_names=("A", "B"), env_values=(("B", "1"),), ssh=("ssh", "-v"))
    assert list(env)[-1] == mpich.LAST and mpich.LAST not in words
    inherited = {mpich.LAST: "old", "A": "0", "B": "0", "C": "0"}
    assert list(laid_over(inherited, env)) == ["A", "C", "B", "HYDRA_LAUNCHER_EXTRA_ARGS", mpich.LAST]


def test_intel_mpi_wants_argument_sets_for_unlike_hosts():
    words, env = LAUNCHERS["intelmpi"].command(LaunchSpec(TOOLS["intelmpi"], ("p", "x"), HOSTS, 6))
    assert words == ["/v/bin/mpirun", "-genvnone", "-n", "4", "-host", "fast", "p", "x",
                     ":", "-n", "2", "-host", "old", "p", "x"]
    assert env == {"I_MPI_PIN": "0"}


def test_intel_mpi_takes_a_list_of_like_hosts():
    alike = (HostSlots("a", 2), HostSlots("b", 2))
    assert built("intelmpi", hosts=alike, ranks=4)[0] == "/v/bin/mpirun -genvnone -n 4 -ppn 2 -hosts a,b"


def added(name, **changes):
    """Return (the words that a change adds to the bare line, those it takes away, environment)."""
    alike = {"hosts": (HostSlots("a", 2), HostSlots("b", 2)), "ranks": 4} if name == "intelmpi" else {}
    before, after = built(name, **alike)[0].split(), built(name, **alike, **changes)
    words = after[0].split()
    more, less = list(words), []
    for word in before:
        if word in more:
            more.remove(word)
        else:
            less.append(word)
    return " ".join(more), " ".join(less), after[1]


@pytest.mark.parametrize(("name", "more", "less"), [
    ("openmpi4", "-x A -x B_1", ""), ("openmpi5", "-x A -x B_1", ""), ("mpich", "-genvlist A,B_1", "-genvnone"),
    ("intelmpi", "-genvlist A,B_1", "-genvnone"), ("horovodrun", "", ""), ("srun", "--export=A,B_1", "--export=NONE")])
def test_the_environment_goes_by_name_and_no_value_is_on_the_line(name, more, less):
    found = added(name, env_names=("A", "B_1"), env_values=(("A", "a;b $x"),))
    assert found[:2] == (more, less)
    assert found[2]["A"] == "a;b $x"


@pytest.mark.parametrize(("name", "more", "env"), [
    ("openmpi4", "--mca plm_rsh_agent ssh -p 2222", {}), ("openmpi5", "--prtemca plm_ssh_agent ssh -p 2222", {}),
    ("mpich", "-launcher ssh -launcher-exec ssh", {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222"} | LAST),
    ("intelmpi", "-bootstrap ssh -bootstrap-exec ssh -bootstrap-exec-args -p 2222", {"I_MPI_PIN": "0"}),
    ("horovodrun", "--ssh-port 2222", {})])
def test_an_ssh_command(name, more, env):
    assert added(name, ssh=("ssh", "-p", "2222")) == (more, "", env)


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5", "intelmpi"])
def test_the_ssh_command_is_one_word_of_the_line(name):
    words, _ = LAUNCHERS[name].command(LaunchSpec(TOOLS[name], PROGRAM, HOSTS, 6, ssh=("ssh", "-p", "2222")))
    assert ("-p 2222" if name == "intelmpi" else "ssh -p 2222") in words


@pytest.mark.parametrize(("name", "more", "env"), [
    ("openmpi4", "--mca plm_rsh_agent ssh -o BatchMode=yes -o ConnectTimeout=30", {}),
    ("openmpi5", "--prtemca plm_ssh_agent ssh -o BatchMode=yes -o ConnectTimeout=30", {}),
    ("mpich", "-launcher ssh -launcher-exec ssh",
     {"HYDRA_LAUNCHER_EXTRA_ARGS": "-o BatchMode=yes -o ConnectTimeout=30"} | LAST),
    ("srun", "", {}), ("horovodrun", "", {})])
def test_other_hosts_are_reached_by_an_ssh_that_does_not_ask(name, more, env):
    assert added(name, over_ssh=True) == (more, "", env)


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5", "mpich", "intelmpi"])
@pytest.mark.parametrize("word", ["a b", "", "a\"b", "a'b", "a\\b", "a\tb", "a\nb"])
def test_ssh_words_that_a_launcher_would_take_apart_are_refused(name, word):
    with pytest.raises(UserError, match="would split"):
        built(name, ssh=("ssh", word))


@pytest.mark.parametrize(("name", "refused"), [("openmpi4", True), ("openmpi5", True), ("mpich", False)])
def test_a_colon_divides_agents_for_open_mpi_only(name, refused):
    if refused:
        with pytest.raises(UserError, match="and colons"):
            built(name, ssh=("ssh", "-J", "gate:22"))
    else:
        assert built(name, ssh=("ssh", "-J", "gate:22"))[1]["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-J gate:22"


@pytest.mark.parametrize(("name", "words"), [
    ("srun", ("ssh", "-p", "2222")), ("horovodrun5", ("ssh", "-p", "2222")), ("horovodrun", ("ssh", "-v")),
    ("horovodrun", ("rsh", "-p", "22")), ("horovodrun", ("ssh", "-p", "22;id")), ("horovodrun", ("ssh", "-i", "k;id")),
    ("horovodrun", ("ssh", "-p"))])
def test_an_ssh_command_that_would_be_ignored_or_is_unsafe_is_refused(name, words):
    with pytest.raises(UserError, match="ssh"):
        built(name, ssh=words)


def test_horovodrun_takes_a_port_and_a_key():
    assert added("horovodrun", ssh=("ssh", "-i", "~/.ssh/k", "-p", "22"))[0] == \
        "--ssh-identity-file ~/.ssh/k --ssh-port 22"


@pytest.mark.parametrize(("name", "more", "env"), [
    ("openmpi4", "--mca oob_tcp_if_include eth1 --mca btl_tcp_if_include eth1", {}),
    ("openmpi5", "--prtemca prte_if_include eth1 --mca btl_tcp_if_include eth1", {}),
    ("mpich", "-iface eth1", LAST), ("intelmpi", "-iface eth1", {"I_MPI_PIN": "0"}),
    ("horovodrun", "--network-interfaces eth1", {})])
def test_an_interface(name, more, env):
    assert added(name, interface="eth1") == (more, "", env)


def test_srun_is_told_of_an_interface_by_open_mpis_variable():
    assert added("srun", interface="eth1", env_names=("A",)) == (
        "--export=A,OMPI_MCA_btl_tcp_if_include", "--export=NONE", {"OMPI_MCA_btl_tcp_if_include": "eth1"})
    assert added("srun", interface="eth1") == (
        "--export=OMPI_MCA_btl_tcp_if_include", "--export=NONE", {"OMPI_MCA_btl_tcp_if_include": "eth1"})


@pytest.mark.parametrize(("name", "bind", "more", "less"), [
    ("openmpi4", "core", "slot:PE=3 core", "slot none"), ("openmpi4", "socket", "socket", "none"),
    ("openmpi4", "numa", "numa", "none"), ("openmpi5", "core", "slot:PE=3 core", "slot none"),
    ("openmpi5", "socket", "package", "none"), ("openmpi5", "numa", "numa", "none"),
    ("mpich", "core", "core:3", "none"), ("mpich", "socket", "socket", "none"), ("mpich", "numa", "numa", "none"),
    ("horovodrun", "core", "slot:PE=3 core", "slot none"), ("horovodrun", "socket", "socket", "none"),
    ("horovodrun5", "socket", "package", "none"),
    ("srun", "core", "--cpu-bind=cores --cpus-per-task=3", "--cpu-bind=none"),
    ("srun", "socket", "--cpu-bind=sockets", "--cpu-bind=none"),
    ("srun", "numa", "--cpu-bind=ldoms", "--cpu-bind=none")])
def test_a_binding(name, bind, more, less):
    assert added(name, bind=bind, cores_per_rank=3 if bind == "core" else 1)[:2] == (more, less)


@pytest.mark.parametrize(("bind", "domain"), [("core", "3"), ("socket", "socket"), ("numa", "numa")])
def test_intel_mpi_binds_by_variables(bind, domain):
    assert added("intelmpi", bind=bind, cores_per_rank=3) == ("", "", {"I_MPI_PIN": "1", "I_MPI_PIN_DOMAIN": domain})


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("bind", BINDINGS)
def test_every_launcher_says_the_binding(name, bind):
    assert "bind" in built(name, bind=bind)[0]


@pytest.mark.parametrize(("name", "more"), [
    ("openmpi4", "--oversubscribe"), ("openmpi5", "--oversubscribe"), ("horovodrun", "--oversubscribe"), ("mpich", ""),
    ("intelmpi", ""), ("srun", "--overcommit")])
def test_more_ranks_than_cores(name, more):
    assert added(name, oversubscribe=True)[:2] == (more, "")


@pytest.mark.parametrize(("name", "flag"), [
    ("openmpi4", "--allow-run-as-root"), ("openmpi5", "--allow-run-as-root"), ("horovodrun", "")])
def test_root_is_said_only_where_the_user_says_it(name, flag):
    with pytest.raises(UserError, match="this is root"):
        built(name, as_root=True)
    assert added(name, as_root=True, root_allowed=True)[:2] == (flag, "")
    assert added(name, as_root=True, root_in_environment=True)[:2] == ("", "")
    assert added(name, as_root=False, root_allowed=True)[:2] == ("", "")


@pytest.mark.parametrize("name", ["mpich", "intelmpi", "srun"])
def test_these_do_not_mind_root(name):
    assert added(name, as_root=True)[:2] == ("", "")


@pytest.mark.parametrize("name", BARE)
def test_more_words_for_the_launcher_stand_before_the_program(name):
    line, _ = built(name, mpi_args=("--one", "two words"))
    if name.startswith("horovodrun"):  # a shell reads these
        assert line.endswith("--mpi-args=--stdin none --one 'two words'")
    else:
        assert line.endswith("--one two words")


@pytest.mark.parametrize(("name", "line"), [
    ("openmpi4", "/v/bin/mpirun --map-by slot --bind-to none --stdin none"),
    ("openmpi5", "/v/bin/mpirun --map-by slot --bind-to none --stdin none"),
    ("mpich", "/v/bin/mpirun -bind-to none -genvnone"), ("intelmpi", "/v/bin/mpirun -genvnone"),
    ("srun", "/usr/bin/srun --mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 --input=none --export=NONE")])
def test_without_hosts_the_allocation_says_where(name, line):
    assert built(name, hosts=(), ranks=0)[0] == line


def test_horovodrun_reads_no_allocation():
    with pytest.raises(UserError, match="no hosts"):
        built("horovodrun", hosts=(), ranks=0)


def test_horovodrun_on_other_hosts_needs_an_interface_and_says_where_open_mpi_is():
    with pytest.raises(UserError, match="--iface NAME"):
        built("horovodrun", remote=True)
    assert added("horovodrun", remote=True, interface="eth1")[0] == "--network-interfaces eth1 --prefix /v"


@pytest.mark.parametrize(("flavour", "version"), [("mpich", "4.3.2"), ("intel", "2021.14")])
def test_horovodrun_is_refused_over_an_mpi_it_cannot_use(flavour, version):
    with pytest.raises(UserError, match="Open MPI"):
        built("horovodrun", tool=LauncherProgram("horovodrun", "/v/bin/horovodrun", flavour, version))


@pytest.mark.parametrize(("flavour", "flag"), [("openmpi", "--mpi=pmix"), ("mpich", "--mpi=pmi2"),
                                               ("intel", "--mpi=pmi2"), ("", "")])
def test_srun_speaks_what_the_mpi_speaks(flavour, flag):
    line, _ = built("srun", tool=LauncherProgram("srun", "/usr/bin/srun", flavour))
    assert [word for word in line.split() if word.startswith("--mpi")] == ([flag] if flag else [])
