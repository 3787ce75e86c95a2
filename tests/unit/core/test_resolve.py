"""`module:callable` and `file.py:callable` as users write them, and the words for what is missing."""

import pickle
import subprocess
import sys

import pytest

from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable, load_module


@pytest.fixture(autouse=True)
def own_imports(tmp_path, monkeypatch):
    """Run in an empty directory, and forget modules and search paths afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(text, key="model"):
    with pytest.raises(UserError) as caught:
        load_callable(text, key)
    return str(caught.value)


def test_a_dotted_module():
    import os.path

    assert load_callable("os.path:join", "model") is os.path.join
    assert load_module("os.path", "model") is os.path


def test_a_module_of_the_current_directory(tmp_path):
    (tmp_path / "mine_here.py").write_text("def build(): return 7\n")
    assert load_callable("mine_here:build", "model")() == 7


def test_a_file_anywhere_finds_its_neighbours_and_is_loaded_once(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "helper_of_mine.py").write_text("VALUE = 3\n")
    (folder / "net-1.py").write_text(
        "import helper_of_mine\ncount = []\nclass Net: pass\ndef build(): return helper_of_mine.VALUE\n"
    )
    build = load_callable("a folder/net-1.py:build", "model")
    assert build() == 3 and load_callable(f"{folder}/net-1.py:build", "model") is build
    net = load_callable("a folder/net-1.py:Net", "model")
    assert type(pickle.loads(pickle.dumps(net()))) is net


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(f"def build(): return {name!r}\n")
    assert load_callable("a/net.py:build", "model")() == "a" and load_callable("b/net.py:build", "model")() == "b"


def test_a_files_module_has_the_same_name_in_every_process(tmp_path):
    """Ranks pickle objects of a user's classes to each other; the name must not depend on the hash seed."""
    (tmp_path / "net.py").write_text("def build(): return 1\n")
    code = "from hvdtrain.core.resolve import load_callable as l; print(l('net.py:build', 'model').__module__)"
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1


@pytest.mark.parametrize("text, words", [
    ("cnn", ["model is 'cnn'", "module:callable"]),
    ("cnn:", ["model is 'cnn:'"]),
    (":build", ["model is ':build'"]),
    ("", ["model is ''"]),
    ("nowhere_at_all:build", ["there is no module 'nowhere_at_all'", "path/file.py:callable"]),
    ("os.nowhere:build", ["there is no module 'os.nowhere'"]),
    ("os.path:jion", ["os.path has no callable 'jion'", "did you mean 'join'"]),
    ("os.path:sep", ["no callable 'sep'"]),
    ("./net:build", ["'./net' is no module name", "a file that ends in .py"]),
    (".net:build", ["is no module name"]),
    ("a b:build", ["is no module name"]),
    ("nowhere/net.py:build", ["there is no file nowhere/net.py"])])
def test_names_that_are_refused(text, words):
    said = refusal(text)
    for word in words:
        assert word in said, said


def test_the_key_is_named():
    assert "data.name is 'x'" in refusal("x", "data.name")


@pytest.mark.parametrize("text", ["needy:build", "needy.py:build"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, text):
    (tmp_path / "needy.py").write_text("import package_that_is_not_there.sub\n")
    said = refusal(text)
    assert "'package_that_is_not_there'" in said and "Run `pip install package_that_is_not_there`." in said


@pytest.mark.parametrize("text", ["garbled:build", "garbled.py:build"])
def test_a_file_that_is_not_python_is_named_with_the_line(tmp_path, text):
    (tmp_path / "garbled.py").write_text("x = 1\ndef build(:\n")
    assert "garbled.py, line 2: invalid syntax" in refusal(text)


@pytest.mark.parametrize("text", ["broken:build", "broken.py:build"])
def test_a_users_own_error_keeps_its_traceback(tmp_path, text):
    (tmp_path / "broken.py").write_text("raise ValueError('my own bug')\n")
    for _ in range(2):  # a file that failed is not remembered as loaded
        with pytest.raises(ValueError, match="my own bug"):
            load_callable(text, "model")
