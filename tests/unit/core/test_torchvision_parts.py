"""The Python parts of torchvision: found by user code where no torchvision is installed, never before another one."""

import sys

import pytest

from hvdtrain.core import torchvision_parts
from hvdtrain.core.resolve import load_callable


@pytest.fixture
def without_torchvision(tmp_path, monkeypatch):
    """Set a prefix with an own ``zoo/torchvision``, in a process that has no other one."""
    package = tmp_path / "zoo" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\ntorch.ops.torchvision.nms.default\nfrom . import transforms\n")
    (package / "transforms.py").write_text("def flip(x):\n    return x\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "zoo" not in path])
    others = [each for each in sys.meta_path if not isinstance(each, torchvision_parts.Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torchvision"}
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_user_code_finds_the_parts_with_their_operators_declared(without_torchvision):
    pytest.importorskip("torch")
    if torchvision_installed():
        pytest.skip("a torchvision is installed")
    (without_torchvision / "pictures_of_user.py").write_text("from torchvision.transforms import flip\n")
    assert torchvision_parts.notes() == []
    assert load_callable(f"{without_torchvision}/pictures_of_user.py:flip", "data")(3) == 3
    assert "without compiled operators (nms" in torchvision_parts.notes()[0]
    torchvision_parts.use()
    assert sum(isinstance(each, torchvision_parts.Finder) for each in sys.meta_path) == 1


def test_an_installed_torchvision_comes_first(without_torchvision, monkeypatch):
    own = without_torchvision / "site" / "torchvision"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("installed = True\n")
    monkeypatch.syspath_prepend(str(own.parent))
    torchvision_parts.use()
    import torchvision

    assert torchvision.installed and torchvision_parts.notes() == []


def test_without_parts_there_is_no_hook(without_torchvision, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(without_torchvision / "elsewhere"))
    torchvision_parts.use()
    assert not any(isinstance(each, torchvision_parts.Finder) for each in sys.meta_path)


def torchvision_installed():
    """Return whether another finder has a torchvision."""
    from importlib.util import find_spec

    return find_spec("torchvision") is not None
