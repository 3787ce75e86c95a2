"""The half of the build with effects, on small placeholders: children, cache, unpacking, record, flow, tools."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cluster.machine.software import BuildFacts, Cuda, Framework, Mpi
from hvdtrain.commands.build_horovod import cli as flow
from hvdtrain.commands.build_horovod import tools, verify, wheel
from hvdtrain.commands.build_horovod import verify as record
from hvdtrain.commands.build_horovod import wheel as cache
from hvdtrain.commands.build_horovod import wheel as toolkit
from hvdtrain.commands.build_horovod.child_log import BuildProgress, ChildFailed, Display, clock, logged
from hvdtrain.commands.build_horovod.plan import BuildPlan, plan
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError

MPI = Mpi("openmpi", "4.1.8", "mpirun", "mpicxx", "/usr/lib")
FACTS = BuildFacts("cp311", "linux_x86_64", "/env", "/env/lib/python3.11/site-packages",
              (Framework("torch", "torch", "2.13.0+cpu"),), MPI)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hvdtrain"


@pytest.fixture
def own_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    return tmp_path / "env"


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_build_package_imports_no_third_party_and_no_framework() -> None:
    code = ("import sys; before = set(sys.modules); import hvdtrain.commands.build_horovod.cli, os;"
            "import hvdtrain.commands.build_horovod.cli;"
            "new = {m.split('.')[0] for m in set(sys.modules) - before};"
            "print(sorted(new - set(sys.stdlib_module_names) - {'hvdtrain'}))")
    done = subprocess.run(_python(code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_failed_child_is_reported_with_its_last_lines_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ChildFailed) as caught:
        code = "import sys\nfor i in range(50): print('line', i)\nsys.exit(3)"
        logged("the build", _python(code), log, {}, 60)
    said = caught.value.report().splitlines()
    assert said[:-1] == [f"line {i}" for i in range(30, 50)]
    assert said[-1] == f"the build failed with exit status 3. The whole log: {log}"
    assert "line 0\n" in log.read_text()


@pytest.mark.slow
def test_a_child_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    grandchild = f"import time, pathlib; time.sleep(4); pathlib.Path({str(mark)!r}).touch()"
    code = ("import subprocess, sys, time;"
            f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(ChildFailed, match="took more than 2 s"):
        logged("the child", _python(code), tmp_path / "log", {}, 2.0)
    assert time.monotonic() - started < 20
    time.sleep(4)
    assert not mark.exists()


def test_progress_reads_phase_and_percent_and_never_falls() -> None:
    seen = BuildProgress()
    phases = []
    for line in ("Processing /x", "  -- The CXX compiler identification is GNU",
                 "  [ 45%] Building CXX object a.o", "[ 12%] Building CXX object b.o",
                 "[ 98%] Linking CXX shared library c.so", "noise"):
        seen.read(line)
        phases.append((seen.phase, seen.percent))
    assert phases == [("prepare", 0), ("configure", 0), ("compile", 45), ("compile", 45),
                      ("link", 98), ("link", 98)]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, lines", [(io.StringIO(), 1), (_Terminal(), 3)])
def test_a_terminal_gets_one_moving_line_and_a_file_gets_few(stream: io.StringIO, lines: int) -> None:
    display = Display("horovod", stream)
    for percent in (10, 20, 30):
        display.show(BuildProgress("compile", percent))
    text = stream.getvalue()
    assert text.count("horovod: compile") == lines
    assert text.count("\n") == (0 if stream.isatty() else 1)
    display.end("built")
    assert stream.getvalue().endswith("horovod: built in 0:00\n")
    assert clock(187.4) == "3:07"


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()])
def test_what_is_quickly_done_is_not_shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    clock_s = [0.0]
    monkeypatch.setattr("hvdtrain.commands.build_horovod.child_log.time.monotonic", lambda: clock_s[0])
    display = Display("installing the wheel", stream, after_s=3.0)
    for clock_s[0] in (1.0, 2.0):
        display.show(BuildProgress())
        display.clear()
    assert stream.getvalue() == ""
    clock_s[0] = 4.0
    display.show(BuildProgress())
    assert "installing the wheel: start  0:04" in stream.getvalue()
    display.clear()
    assert stream.getvalue().endswith("\r\x1b[2K" if stream.isatty() else "0:04\n")


def test_a_wheel_appears_whole_and_replaces_an_older_one(own_cache: Path) -> None:
    assert cache.find("key") is None
    for content in (b"old", b"new"):
        with cache.workspace() as work:
            (work / "wheel").mkdir()
            (work / "wheel" / "horovod-0.28.1-x.whl").write_bytes(content)
            assert cache.place("key", work / "wheel").read_bytes() == content
    assert [p.name for p in own_cache.iterdir() if p.name.startswith(".building")] == []


def test_two_builds_of_one_key_take_turns() -> None:
    order, said = [], []
    held = threading.Event()

    def first() -> None:
        with cache.lock("key"):
            held.set()
            time.sleep(0.6)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(10)
    with cache.lock("key", lambda: said.append("waiting")):
        order.append("second")
    thread.join(10)
    assert order == ["first", "second"] and said == ["waiting"]


def test_a_lock_that_is_never_given_up_is_named() -> None:
    with cache.lock("key"), pytest.raises(UserError, match="no lock"):
        with cache.lock("key", timeout_s=0.3):
            pytest.fail("two holders at once")


@pytest.mark.parametrize("member", ["../outside", "/tmp/absolute", "link"])
def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path: Path, member: str) -> None:
    archive = tmp_path / "bad.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo(member)
        if member == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "../../elsewhere"
        tar.addfile(info)
    (tmp_path / "into").mkdir()
    with pytest.raises(UserError, match="paths inside the package"):
        wheel.unpack(archive, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_a_source_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(what: str, argv: list[str], *rest: object) -> None:
        Path(argv[argv.index("-d") + 1], "horovod-0.28.1.tar.gz").write_bytes(b"something else")

    monkeypatch.setattr(wheel, "logged", download)
    with pytest.raises(UserError, match="SHA-256"):
        wheel.fetch_source({}, tmp_path / "log")
    assert list((cache.root() / "source").iterdir()) == []


def test_the_childs_environment_holds_no_other_horovod_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("UNRELATED", "kept")
    env = wheel.child_env(plan(FACTS))
    assert "HOROVOD_WITHOUT_GLOO" not in env and env["UNRELATED"] == "kept" and env["HOROVOD_WITH_MPI"] == "1"


def test_cuda_wheels_are_staged_under_the_names_that_linkers_look_for(tmp_path: Path) -> None:
    home, nccl = tmp_path / "cu13", tmp_path / "nccl"
    for path in (home / "bin/nvcc", home / "include/cccl/nv/target", home / "lib/libcudart.so.13",
                 home / "lib/libcudart_static.a", nccl / "include/nccl.h", nccl / "lib/libnccl.so.2"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    env = toolkit.stage(Cuda(str(home), "13.0", str(nccl), "2.29.7"), tmp_path / "stage")
    assert Path(env["CUDACXX"]).read_text() == "nvcc"
    assert Path(env["CUDA_HOME"], "lib64", "libcudart.so").read_text() == "libcudart.so.13"
    assert Path(env["CUDA_HOME"], "lib", "libcudart_static.a").exists()
    assert Path(env["HOROVOD_NCCL_HOME"], "lib", "libnccl.so").read_text() == "libnccl.so.2"
    assert Path(env["CPLUS_INCLUDE_PATH"], "nv", "target").exists()


@pytest.mark.parametrize("mpi, root, words, names", [
    (MPI, True, ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"], {"OMPI_ALLOW_RUN_AS_ROOT"}),
    (MPI, False, ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"], set()),
    (replace(MPI, flavour="mpich"), True, ["mpirun", "-np", "2"], set()),
    (None, True, ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"], set()),
])
def test_check_commands(mpi: Mpi | None, root: bool, words: list[str], names: set[str]) -> None:
    (check,) = verify.checks(plan(replace(FACTS, mpi=mpi)), "python", "horovodrun", root)
    assert list(check.argv[:len(words)]) == words and check.argv[len(words)] == "python"
    assert {n for n in dict(check.env) if n == "OMPI_ALLOW_RUN_AS_ROOT"} == names
    compile(check.argv[-1], "check", "exec")


@pytest.mark.parametrize("prints, passes", [(2, True), (1, False)])
def test_a_check_wants_the_sum_from_every_rank(tmp_path: Path, prints: int, passes: bool) -> None:
    argv = _python(f"for _ in range({prints}): print('hvdtrain-sum-ok', 'cpu')")
    check = verify.Check("torch", tuple(argv), (), 2)
    log = tmp_path / "log"
    log.write_text("hvdtrain-sum-ok cpu\n")  # what an earlier check said does not count
    if passes:
        assert verify.run(check, log, {}) == "cpu"
    else:
        with pytest.raises(ChildFailed, match="1 of 2 ranks"):
            verify.run(check, log, {})


def _record(**changes: object) -> record.BuildRecord:
    made = record.BuildRecord("key", "digest", "0.28.1", "cp311", {"numpy": "0.0"}, "openmpi 4.1.8", False)
    return replace(made, **changes)


def test_a_record_is_read_back_and_a_damaged_one_is_none(own_prefix: Path) -> None:
    assert record.read() is None
    record.write(_record())
    assert record.read() == _record()
    assert [p.name for p in record.path().parent.iterdir()] == ["horovod-build.json"]
    record.path().write_text('{"key": 1')
    assert record.read() is None


def test_a_record_counts_only_for_its_own_wheel(own_prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dist:
        def read_text(self, name: str) -> str:
            return '{"archive_info": {"hash": "sha256=digest", "hashes": {"sha256": "digest"}}}'

    monkeypatch.setattr(record.importlib.metadata, "distribution", lambda name: Dist())
    record.write(_record())
    assert record.installed() == _record()
    record.write(_record(wheel_sha256="another"))
    assert record.installed() is None


def test_a_missing_tool_is_one_line_that_names_its_package() -> None:
    there = tools.RequiredTool("here", lambda: True, "a", "b")
    gone = tools.RequiredTool("cmake", lambda: False, "cmake-deb", "cmake-rpm")
    line = tools.missing((there, gone))
    assert line is not None and "\n" not in line and "cmake is missing" in line
    assert "cmake-deb" in line and "cmake-rpm" in line
    assert tools.missing((there,)) is None


def test_without_a_path_the_tools_check_fails_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hvdtrain.commands.build_horovod.tools"], env={"PATH": str(tmp_path)},
                          text=True, capture_output=True, timeout=60, cwd=ROOT.parent)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "install the package" in done.stderr


class _Steps:
    """Stands in for the slow steps of the flow and writes down which of them ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.ran: list[str] = []
        self.said: list[str] = []
        monkeypatch.setattr(flow, "make_plan", lambda options: plan(FACTS))
        monkeypatch.setattr(flow.tools, "missing", lambda: None)
        monkeypatch.setattr(flow.wheel, "check_build_needs", lambda: None)
        monkeypatch.setattr(flow.wheel, "build", self.build)
        monkeypatch.setattr(flow.wheel, "install", lambda *args: self.ran.append("install"))
        monkeypatch.setattr(flow.verify, "run_all", self.verify)
        monkeypatch.setattr(record, "installed", record.read)

    def build(self, todo: BuildPlan, log: Path, jobs: int, display: Display) -> Path:
        self.ran.append("build")
        with cache.workspace() as work:
            (work / "w").mkdir()
            (work / "w" / "horovod-0.28.1-x.whl").write_bytes(b"wheel")
            return cache.place(todo.key, work / "w")

    def verify(self, *args: object) -> list[str]:
        self.ran.append("verify")
        return ["torch"]

    def flow(self, **options: bool) -> list[str]:
        self.ran.clear()
        assert flow.run(flow.Options(**options), self.said.append) == 0
        return list(self.ran)


def test_the_second_time_does_nothing_and_a_fresh_environment_takes_the_cached_wheel(
        own_prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _Steps(monkeypatch, tmp_path)
    assert steps.flow() == ["build", "install", "verify"]
    assert steps.flow() == []
    assert "verified before: torch" in steps.said
    record.path().unlink()
    assert steps.flow() == ["install", "verify"]
    assert steps.flow(force=True) == ["build", "install", "verify"]
    record.path().unlink()
    assert steps.flow(verify=False) == ["install"]
    assert steps.flow() == ["verify"]


def test_a_failed_build_ends_with_status_1_and_leaves_no_record(
        own_prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _Steps(monkeypatch, tmp_path)

    def fail(*args: object) -> Path:
        log = tmp_path / "the.log"
        log.write_text("the last line")
        raise ChildFailed("the build", "failed with exit status 1", log)

    monkeypatch.setattr(flow.wheel, "build", fail)
    assert flow.run(flow.Options(), steps.said.append) == 1
    assert "the last line" in steps.said[-1] and str(tmp_path / "the.log") in steps.said[-1]
    assert record.read() is None and steps.ran == []
