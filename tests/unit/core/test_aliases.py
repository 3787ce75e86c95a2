"""Module names of earlier releases: importable for one release, the same classes, one warning each."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib import import_module

import pytest

import hvdtrain
from hvdtrain.core.aliases import MOVED

CASES = [
    ("import hvdtrain.callbacks.base as m", "hvdtrain.engine.callbacks.base"),
    ("from hvdtrain.callbacks import base as m", "hvdtrain.engine.callbacks.base"),
    ("from hvdtrain.callbacks.base import Callback as m", "hvdtrain.engine.callbacks.base:Callback"),
    ("from hvdtrain.balance import line as m", "hvdtrain.planning.linear"),
    ("from hvdtrain.balance.plan import Plan as m", "hvdtrain.planning.batch.plan:Plan"),
    ("import hvdtrain.sections; m = hvdtrain.sections", "hvdtrain.config.sections"),
    ("from hvdtrain.sections import Schedule as m", "hvdtrain.config.sections:ScheduleConfig"),
    ("from hvdtrain.data_parallel.replicate import Replicate as m",
     "hvdtrain.parallel.data_parallel.replicate:Replicate"),
    ("from hvdtrain.records.numbers import numbers as m", "hvdtrain.core.records:numbers"),
    ("from hvdtrain.protocols import Tracker as m", "hvdtrain.core.protocols:Tracker"),
    ("from hvdtrain.protocols.state import Head as m", "hvdtrain.core.protocols.run:Head"),
    ("from hvdtrain.errors import UserError as m", "hvdtrain.core.errors:UserError"),
    ("from hvdtrain.exchange.compressors.base import Uncompressed as m", "hvdtrain.comm.compressors.base:Uncompressed"),
    ("from hvdtrain.cluster.launcher import launch_facts as m", "hvdtrain.core.launcher:launch_facts"),
]


@pytest.fixture
def fresh(monkeypatch):
    """Forget old names that other tests have imported."""
    from hvdtrain.core import aliases

    monkeypatch.setattr(aliases, "_warned", set())
    for name in [n for n in sys.modules if aliases.moved_to(n)]:
        monkeypatch.delitem(sys.modules, name)


def named(text):
    """Return the module or attribute that ``text`` names."""
    module, _, attribute = text.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@pytest.mark.parametrize("line, new", CASES, ids=[line for line, _ in CASES])
def test_an_old_name_is_the_new_thing_with_one_warning_at_the_line(line, new, fresh):
    space = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(f"\n\n{line}", "script.py", "exec"), space)
    assert space["m"] is named(new)
    (one,) = [each for each in seen if "hvdtrain" in str(each.message)]
    assert one.category is DeprecationWarning and (one.filename, one.lineno) == ("script.py", 3)
    old, there = re.match(r"(\S+) is now (\S+); the old name is removed in release ", str(one.message)).groups()
    assert old in line.replace(" import ", ".") and new.startswith(there)


@pytest.mark.parametrize("old", [name for name in MOVED if "keras" not in name])
def test_every_old_name_is_importable(old, fresh):
    new = import_module(MOVED[old])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = import_module(old)
        assert found is new or all(getattr(found, name) is value for name, value in vars(new).items()
                                   if not name.startswith("__"))


def test_a_left_over_folder_of_an_old_package_does_not_hide_its_name(tmp_path, monkeypatch, fresh):
    """An updated checkout keeps folders in which only ``__pycache__`` is left."""
    (tmp_path / "protocols" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(hvdtrain, "__path__", [*hvdtrain.__path__, str(tmp_path)])
    with pytest.warns(DeprecationWarning, match="hvdtrain.core.protocols"):
        from hvdtrain.protocols import Tracker  # noqa: F401


def test_a_keras_file_of_before_names_a_module_that_is_there(fresh):
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    with pytest.warns(DeprecationWarning, match="hvdtrain.backends.keras.one_cycle"):
        assert import_module("hvdtrain.keras.one_cycle") is import_module("hvdtrain.backends.keras.one_cycle")


@pytest.mark.parametrize("name", ["hvdtrain.nothing", "hvdtrain.callbacks.nothing", "hvdtrain.balance.nothing"])
def test_other_names_stay_unknown(name, fresh):
    with pytest.raises(ModuleNotFoundError, match=name):
        import_module(name)


def test_modules_that_kept_their_names_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        import_module("hvdtrain.config")
        pytest.importorskip("torch", reason="torch is not installed")
        import_module("hvdtrain.backends.torch.pipelined.over_devices")


def test_the_import_of_hvdtrain_stays_light():
    done = subprocess.run([sys.executable, "-S", "-c", "import sys; before = set(sys.modules); import hvdtrain;"
                           "print(sorted(n for n in set(sys.modules) - before if n.startswith('hvdtrain')))"],
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['hvdtrain', 'hvdtrain.core', 'hvdtrain.core.aliases']"
