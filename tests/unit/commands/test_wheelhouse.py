"""A folder of wheels: what fills it, what installs from it without an index, and which Horovod is taken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.commands.build_horovod import cli as flow
from hvdtrain.commands.build_horovod import tools, wheelhouse
from hvdtrain.commands.build_horovod import wheel as cache
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use a cache of wheels of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def would_run(*words):
    """Return what make would run."""
    env = {k: v for k, v in os.environ.items() if k not in ("WHEELHOUSE", "MAKEFLAGS", "MAKELEVEL", "WITH")}
    return subprocess.run(["make", "-n", *words, f"PYTHON={sys.executable}", "DEVICE=cpu"], cwd=ROOT.parent, env=env,
                          text=True, capture_output=True, timeout=60, check=True).stdout


def test_a_set_up_from_a_wheelhouse_asks_no_index(tmp_path):
    said = would_run("setup", f"WHEELHOUSE={tmp_path}", f"VENV={tmp_path}/venv")
    (install, other) = [line for line in said.splitlines() if "pip" in line and " install " in line and "-r " in line]
    assert f'--no-index --find-links "{tmp_path}"' in install and "requirements/torch-cpu.txt" in install
    assert f'[ -z "{tmp_path}" ] && ' in said and "--extra-index-url" in other, "the other index is for no wheelhouse"
    assert f'hvdtrain build --frameworks tensorflow torch --cpu --wheelhouse "{tmp_path}"' in said
    assert "hvdtrain.commands.build_horovod.tools --wheels" in said, "no compiler is asked for"
    assert "--no-index" not in would_run("setup", f"VENV={tmp_path}/venv")


def test_a_wheelhouse_without_wheels_is_told_before_anything_is_made(tmp_path):
    tried = subprocess.run(["make", "packages", f"WHEELHOUSE={tmp_path}/none", f"VENV={tmp_path}/venv",
                            f"PYTHON={sys.executable}", "DEVICE=cpu"], cwd=ROOT.parent, text=True,
                           capture_output=True, timeout=60)
    assert tried.returncode and "holds no wheels" in tried.stderr and not (tmp_path / "venv").exists()


def test_what_beside_the_trainer_is_left_out_when_asked(tmp_path):
    said = would_run("packages", "WITH=", "FRAMEWORKS=torch", f"VENV={tmp_path}/venv")
    assert "requirements/dev.txt" not in said and "requirements/base.txt" in said
    assert ".pinned-torch-cpu-lean" in said, "a set-up without tests is another than one with them"


def test_pip_gets_every_pin_and_a_second_index_only_if_one_is_named():
    first, second = wheelhouse.download(Path("w"), ["a.txt", "b.txt"], "https://x")
    assert first[3:] == ["--disable-pip-version-check", "wheel", "-q", "-w", "w", "--find-links", "w", "-r", "a.txt",
                         "-r", "b.txt"]
    assert second[-2:] == ["--extra-index-url", "https://x"] and second[:len(first)] == first
    assert wheelhouse.download(Path("w"), ["a.txt"]) == [first[:-2]]


def test_horovod_goes_through_the_folder_by_its_key(tmp_path, monkeypatch):
    house = tmp_path / "house"
    with pytest.raises(UserError, match="make wheelhouse"):
        cache.take_over(house, "key")
    built = cache.root() / "wheels" / "key" / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    cache.copy(Path(__file__), built)
    (cache.root() / "source" / cache.SOURCE).write_text("source")
    monkeypatch.setattr(wheelhouse.wheel, "fetch_source", lambda env, log: cache.root() / "source" / cache.SOURCE)
    assert wheelhouse.add_horovod(house, "other") is None
    wheelhouse.add_horovod(house, "key")
    wheelhouse.add_source(house / "horovod")
    lines, total = wheelhouse.listing(house)
    assert len(lines) == 2 and total == built.stat().st_size + len("source")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache.take_over(house, "other") is None, "none that was built for something else"
    taken = cache.take_over(house, "key")
    assert taken is not None and taken.read_bytes() == Path(__file__).read_bytes()
    assert (cache.root() / "source" / cache.SOURCE).read_text() == "source", "a machine with another key can build"
    assert cache.take_over(house, "key") == taken, "a second time nothing is copied"


@pytest.mark.parametrize("codes, status, said", [
    ([0], 0, "no built Horovod"), ([1, 0], 0, ""), ([1, 1], 1, "every pin")])
def test_filling_says_what_is_missing(tmp_path, monkeypatch, capsys, codes, status, said):
    left = list(codes)
    monkeypatch.setattr(wheelhouse.subprocess, "run",
                        lambda words, **_: subprocess.CompletedProcess(words, left.pop(0)))
    monkeypatch.setattr(flow, "make_plan", lambda options: type("Plan", (), {"key": "none"}))
    monkeypatch.setattr(wheelhouse.wheel, "fetch_source", lambda env, log: Path(__file__))
    assert wheelhouse.fill(tmp_path / "house", ["a.txt"], "https://x", flow.Options()) == status
    out = capsys.readouterr()
    assert said in out.out + out.err and not left


def test_without_a_compiler_wheels_can_still_be_installed(monkeypatch, capsys):
    monkeypatch.setattr(tools, "compiles_cpp17", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tools", "--wheels"])
    assert tools.main() == 0
    monkeypatch.setattr(sys, "argv", ["tools"])
    assert tools.main() == 1 and "is missing" in capsys.readouterr().err
