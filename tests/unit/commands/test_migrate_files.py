"""`migrate` as a command: diffs, files, line ends, encodings, mistakes; nothing is written without --write."""

import os
import subprocess
import sys

import pytest

from hvdtrain.commands.migrate import cli as command
from hvdtrain.commands.migrate import plan as source
from hvdtrain.core.errors import UserError

BEFORE = "import horovod.keras as hvd\nhvd.init()\n"
AFTER = "import hvdtrain.keras as hvd\nhvd.init()\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(BEFORE)
    return tmp_path / "s.py"


def test_a_diff_is_printed_and_nothing_is_written(script, capsys):
    at = os.stat(script)
    assert command.main(["s.py"]) == 0
    out = capsys.readouterr().out
    assert "--- a/s.py\n+++ b/s.py\n" in out and "-import horovod.keras as hvd\n+import hvdtrain.keras as hvd\n" in out
    assert "s.py:1: changed: " in out and "nothing was written" in out
    assert script.read_text() == BEFORE and os.stat(script).st_mtime_ns == at.st_mtime_ns
    assert os.listdir() == ["s.py"]


def test_write_replaces_the_file_and_keeps_its_mode_and_links(script, capsys):
    os.chmod(script, 0o751)
    os.symlink("s.py", "link.py")
    assert command.main(["link.py", "--write"]) == 0
    assert script.read_text() == AFTER and os.stat(script).st_mode & 0o777 == 0o751
    assert os.path.islink("link.py") and sorted(os.listdir()) == ["link.py", "s.py"]
    assert command.main(["s.py", "--write"]) == 0, "a second time"
    assert script.read_text() == AFTER and "the file is unchanged" in capsys.readouterr().out


def test_one_mistake_among_several_files_writes_none(script, tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(UserError, match="bad.py is not Python.*line 1"):
        command.main(["s.py", "bad.py", "--write"])
    assert script.read_text() == BEFORE


def test_a_file_that_changed_meanwhile_is_left_alone(script):
    read = source.read("s.py")
    script.write_text("print(1)\n")
    with pytest.raises(UserError, match="has changed since"):
        source.write(read, AFTER.encode())
    assert script.read_text() == "print(1)\n" and os.listdir() == ["s.py"]


@pytest.mark.parametrize("name, content, named", [
    ("gone.py", None, "there is no file gone.py"), (".", None, "is a folder"), ("a\0b.py", None, "cannot be read"),
    ("two.py", b"print 'python 2'\n", "line 1"), ("nul.py", b"x = 1\0\n", "not Python"),
    ("latin.py", b"x = '\xe9'\n", "not Python"), ("comment.py", b"x = 1  # \xe9\n", "not Python"),
    ("coding.py", b"# coding: nonsense\n", "not Python"),
    ("big.py", b"#" * (source.MOST_BYTES + 1), "bytes")])
def test_mistakes(name, content, named, script, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=named):
        command.main([name])


@pytest.mark.parametrize("data", [
    BEFORE.replace("\n", "\r\n").encode(), BEFORE.rstrip("\n").encode(),
    b"# coding: latin-1\nx = '\xe9'\n" + BEFORE.encode(),
    b"#!/usr/bin/env python\n\n\n" + BEFORE.encode() + b"\n\n", "x = 'ü \u2028 \x0c'\n".encode() + BEFORE.encode(),
    BEFORE.encode() + b"if 1:\n\tx = (1,\n\t     2)  # two\n"])
def test_every_other_byte_is_kept(data, script):
    script.write_bytes(data)
    command.main(["s.py", "--write"])
    assert script.read_bytes() == data.replace(b"horovod", b"hvdtrain")


@pytest.mark.parametrize("data", [BEFORE.encode(), BEFORE.replace("\n", "\r\n").encode(),
                                  BEFORE.rstrip("\n").encode()])
def test_the_diff_is_one_that_patch_takes(data, script, tmp_path):
    script.write_bytes(data)
    read = source.read("s.py")
    after = data.replace(b"horovod", b"hvdtrain")
    text = source.diff(read, after)
    lines = text.split("\n")
    old = [line[1:] for line in lines[3:] if line[:1] in ("-", " ")]
    new = [line[1:] for line in lines[3:] if line[:1] in ("+", " ")]
    assert "\n".join(old).encode().rstrip(b"\n") == data.rstrip(b"\n")
    assert "\n".join(new).encode().rstrip(b"\n") == after.rstrip(b"\n")
    assert ("\\ No newline at end of file" in text) == (not data.endswith(b"\n"))
    assert source.diff(read, data) == ""


def test_a_byte_order_mark(script):
    script.write_bytes(b"\xef\xbb\xbf" + BEFORE.encode())
    try:
        command.main(["s.py", "--write"])
    except UserError as error:
        assert "byte order mark" in str(error) and script.read_bytes() == b"\xef\xbb\xbf" + BEFORE.encode()
    else:
        assert script.read_bytes() == b"\xef\xbb\xbf" + AFTER.encode()


def test_nothing_recognised(script, capsys):
    script.write_text("print(1)\n")
    assert command.main(["s.py"]) == 1
    assert "nothing recognised" in capsys.readouterr().out


def test_a_terminal_of_ascii_gets_every_line(script, capsys):
    script.write_text("# über\n" + BEFORE)
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import sys; from hvdtrain.commands.migrate.cli import main; sys.exit(main(['s.py']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert done.returncode == 0 and b"\\xfcber" in done.stdout and b"+import hvdtrain.keras" in done.stdout


def test_help_loads_no_parser_of_python(capsys):
    before = set(sys.modules)
    with pytest.raises(SystemExit) as done:
        command.main(["--help"])
    assert done.value.code == 0 and "--write" in capsys.readouterr().out
    assert not {name for name in set(sys.modules) - before if name.startswith("libcst")}


def test_every_rule_has_what_the_registry_asks_for():
    from hvdtrain.commands.migrate.plan import RULES, TARGETS, rule

    for name in RULES:
        found = rule(name)
        assert found.TITLE and set(found.TARGETS) <= set(TARGETS) and callable(found.recognise) and callable(found.plan)
