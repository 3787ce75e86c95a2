"""Records, tables and options of the bench: everything about them that needs no clock."""

import doctest
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from hvdtrain.comm.sweep import settle
from hvdtrain.commands.bench import cli as bench
from hvdtrain.commands.bench import cli as options
from hvdtrain.commands.bench import session as record
from hvdtrain.core import terminal as table
from hvdtrain.core import units
from hvdtrain.core.errors import UserError
from hvdtrain.core.terminal import spread
from hvdtrain.core.units import format_number

# --- records -------------------------------------------------------------------------------------------------------


def test_the_environment_names_what_a_number_depends_on():
    found = record.environment("1 host: a", 2, "mpi", 7, 3, "torch")
    assert [found[key] for key in ("hosts", "ranks", "wire", "seed", "threads")] == ["1 host: a", 2, "mpi", 7, 3]
    assert found["versions"]["numpy"] == np.__version__ and found["versions"]["hvdtrain"]
    assert {"torch", "tensorflow", "keras", "horovod", "mpi4py"} <= set(found["versions"])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"] >= 1 and found["cpu"] and found["time"].endswith("+00:00")
    assert json.loads(json.dumps(found)) == found


def test_versions_are_read_without_an_import():
    probe = ("import sys; from hvdtrain.commands.bench import session; session.environment(); "
             "print(sorted({'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    monkeypatch.setitem(record.PACKAGES, "nothing", ("no-such-distribution",))
    assert record.versions()["nothing"] is None


def test_the_mpi_that_runs_tells_its_version(monkeypatch):
    text = "Open MPI v4.1.8, package: Open MPI root@host Distribution, ident: 4.1.8\0"
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(Get_library_version=lambda: text))
    assert record.mpi_library() == "Open MPI 4.1.8"
    text = "MPICH Version:      4.2.3\nMPICH Release date: x"
    assert record.mpi_library() == "MPICH Version:      4.2.3"


@pytest.mark.parametrize("text, name", [
    ("processor\t: 0\nmodel name\t: A  Fast(R) CPU @ 3GHz\nmodel name\t: B\n", "A Fast(R) CPU @ 3GHz"),
    ("processor : 0\nModel\t\t: Raspberry Pi 4\n", "Raspberry Pi 4"), ("", "")])
def test_cpu_model(text, name):
    assert record.cpu_model(text) == name


def test_gpus_by_name(tmp_path):
    for bus, name in (("0000:01", "H100"), ("0000:02", "A100")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {name}\nIRQ: 5\n")
    assert record.gpus(str(tmp_path)) == ["H100", "A100"]
    assert record.gpus(str(tmp_path / "none")) == []


def test_settings_are_those_that_bear_on_speed():
    env = {"OMP_NUM_THREADS": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4", "OMPI_MCA_ess_base_jobid": "5",
           "HOROVOD_CYCLE_TIME": "1", "HOROVOD_RANK": "0", "NCCL_DEBUG": "INFO", "HOME": "/root"}
    assert list(record.settings(env)) == ["HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "OMPI_MCA_coll_tuned_allreduce_algorithm",
                                          "OMP_NUM_THREADS"]


def test_append_writes_one_line_of_plain_json_a_record(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    record.append(path, {"a": np.float64(1.5), "b": np.arange(2), "c": float("nan"), "d": (1, None, True)})
    record.append(path, {"e": {1: np.inf}, "f": path})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"a": 1.5, "b": [0, 1], "c": None, "d": [1, None, True]}
    assert second == {"e": {"1": None}, "f": str(path)}


def test_a_file_that_cannot_be_written_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        record.append(tmp_path, {"a": 1})
    with pytest.raises(UserError, match="cannot be written"):
        record.check(str(tmp_path))
    record.check("")


def test_a_check_before_the_first_record_keeps_those_that_are_there(tmp_path):
    path = tmp_path / "r.jsonl"
    record.append(path, {"a": 1})
    record.check(str(path))
    assert path.read_text() == '{"a": 1}\n'


# --- tables --------------------------------------------------------------------------------------------------------

HEADERS, ROWS = ("name", "n", "wrong"), [("a|b", "5", "N/A"), ("c", "1,234.5", "0")]


def test_a_table_as_text():
    assert table.as_text(HEADERS, ROWS).splitlines() == [
        "name        n  wrong", "----  -------  -----", "a|b         5    N/A", "c     1,234.5      0"]


def test_a_table_as_markdown():
    assert table.as_markdown(HEADERS, ROWS).splitlines() == [
        "| name | n | wrong |", "|---|---:|---:|", "| a\\|b | 5 | N/A |", "| c | 1,234.5 | 0 |"]


def test_columns_of_numbers():
    rows = [["1", "1.5x", "-", "", "2e-05", "v1"], ["-3", "10.0x", "4", "", "1e+10", "2"]]
    assert table.numeric(["a"] * 6, rows) == [True] * 5 + [False]


def test_quantities():
    assert doctest.testmod(units).attempted and not doctest.testmod(units).failed
    assert table.numeric("ab", [["1.00 KiB", "v1"], ["12 B", "2"]]) == [True, False]


def test_show_is_plain_where_nobody_sees_a_terminal(capsys):
    table.show("a title [of it]", HEADERS, ROWS)
    table.show("another", HEADERS, ROWS, markdown=True)
    table.note("mind this")
    out = capsys.readouterr().out
    assert out == (f"\na title [of it]\n{table.as_text(HEADERS, ROWS)}\n"
                   f"\nanother\n\n{table.as_markdown(HEADERS, ROWS)}\n\nnote: mind this\n")


def test_show_on_a_terminal_keeps_brackets(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    table.show("title", ("name", "n"), [("[bold]x", "5")])
    assert "[bold]x" in capsys.readouterr().out


# --- numbers -------------------------------------------------------------------------------------------------------

def test_spread_has_median_and_quartiles():
    assert spread([5, 1, 3, 2, 4]) == {"median": 3, "p25": 2, "p75": 4, "min": 1, "max": 5}


@pytest.mark.parametrize("value, text", [(None, "-"), (0, "0"), (12345.6, "12346"), (123.45, "123.5"), (1.234, "1.23"),
                                         (0.01234, "0.0123"), (0.000012, "1.2e-05")])
def test_shown(value, text):
    assert format_number(value) == text


def test_settle_reads_one_element_from_an_accelerator_and_none_from_host_memory():
    class Ops:
        read = []

        def reshape(self, x, shape):
            return x.data.reshape(shape)

        def to_host(self, x):
            self.read.append(x.size)

    ops = Ops()
    settle(ops, np.ones((2, 3)))
    assert ops.read == []
    for device in ("cuda:0", "/job:localhost/device:GPU:0"):
        settle(ops, types.SimpleNamespace(device=device, data=np.ones((2, 3))))
    assert ops.read == [1, 1]


# --- options and the command ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, n", [("4096", 4096), ("4K", 4096), ("4k", 4096), ("64MiB", 64 << 20), ("1GB", 1 << 30)])
def test_sizes(text, n):
    assert options.size("--max")(text) == n


@pytest.mark.parametrize("read, text", [
    (options.size("--max"), "0"), (options.size("--max"), "4T"), (options.size("--max"), "-1"),
    (options.whole("--n", 1, 9), "0"), (options.whole("--n", 1, 9), "ten"), (options.whole("--n", 1, 9), "1.5"),
    (options.number("--x", 0, 1), "0"), (options.number("--x", 0, 1), "nan"), (options.number("--x", 0, 1), "much"),
    (options.one_of("--kind", ["a", "b"]), "c"), (options.some_of("--kinds", ["a", "b"]), "a,"),
    (options.shapes("--shapes"), "3x0"), (options.shapes("--shapes"), "3x"), (options.shapes("--shapes"), "")])
def test_a_bad_value_says_what_is_right(read, text):
    with pytest.raises(UserError) as caught:
        read(text)
    assert repr(text.rstrip(",")) in caught.value.got or "''" in caught.value.got
    assert caught.value.expected and "orrect" in caught.value.do


def test_good_values():
    assert options.some_of("--kinds", ["a", "b"])("b, a,b") == ["b", "a"]
    assert options.shapes("--shapes")("3x4, 5") == ((3, 4), (5,))
    assert options.whole("--n", -1)("-1") == -1 and options.number("--x", 0, 1)("1") == 1.0


def test_the_parser_complains_as_a_user_error(capsys):
    parser = options.Parser("hvdtrain bench this", "that")
    parser.common(repeats=4)
    assert parser.parse([]).repeats == 4
    for argv, said in ((["--repeat", "3"], "did you mean '--repeats'"), (["--repeats"], "expected one argument"),
                       (["file"], "there is no option file")):
        with pytest.raises(UserError, match=said) as caught:
            parser.parse(argv)
        assert "bench this --help" in caught.value.do
    with pytest.raises(SystemExit):
        parser.parse(["--help"])
    out = capsys.readouterr().out
    assert "(default: 4)" in out and "default: False" not in out


def test_bench_tells_its_benches(capsys):
    assert bench.main(["--help"]) == 0 and bench.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("wire", "compressors")) and "python -m benchmarks" in out


def test_an_unknown_bench_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'wire'"):
        bench.main(["wires"])


def test_the_help_of_bench_imports_nothing_heavy():
    heavy = {"torch", "tensorflow", "keras", "horovod", "mpi4py", "rich", "jsonargparse", "safetensors", "sklearn"}
    probe = ("import sys; from hvdtrain.commands import main; status = main(['bench', '--help']); "
             f"print(status, sorted({heavy!r} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


@pytest.mark.parametrize("name", bench.BENCHES)
def test_every_bench_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main([name, "--help"])
    assert caught.value.code == 0 and f"bench {name}" in capsys.readouterr().out
