"""An extension is known wherever the package lists, checks or describes extensions."""

import importlib.util
import sys
from dataclasses import dataclass

import pytest

from hvdtrain.backends.numpy import Ops
from hvdtrain.comm import compressors
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.comm.sweep import measure
from hvdtrain.commands import train
from hvdtrain.config import (
    Config,
    ConfigContext,
    notes,
    schema,
)
from hvdtrain.config.sections import Unused, key
from hvdtrain.core import ROOT
from hvdtrain.core import resolve as slots
from hvdtrain.core.buckets import plan_buckets
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols import ParamSpec

# --- lists, checks and texts know a thing by what it says of itself ------------------------------------------------

GENTLE = """
from hvdtrain.comm.compressors.none import NoCompression


class Gentle(NoCompression):
    name, numerics, auto_order = "gentle", "lossy: gently", {order}


def make(exchange):
    return Gentle()
"""


@pytest.mark.parametrize("order", [0, 9])
def test_a_compressor_in_the_folder_is_known_everywhere(tmp_path, monkeypatch, order):
    """A file is put into the folder; ``auto`` tries it only where the class says so."""
    with pytest.raises(UserError, match="compression is 'gentle'"):
        train.parse(["--compression", "gentle"], {})
    (tmp_path / "gentle.py").write_text(GENTLE.format(order=order))
    monkeypatch.setattr(compressors, "__path__", [*compressors.__path__, str(tmp_path)])
    slots.in_slot.cache_clear()
    try:
        assert train.parse(["--compression", "gentle"], {}).compression == "gentle"
        assert "powersgd, gentle, or" in " ".join(train.make_parser().format_help().split())
        texts = {each.name: each.help for each in schema.keys(Config)}
        assert "powersgd, gentle, or module:callable" in texts["compression"]
        swept = LockstepWorld(2).run(lambda control, wire: measure(
            wire, Ops(), control, plan_buckets([ParamSpec("w", (30,), "float32")], 1.0), Config()))[0]
        assert ("gentle" in [cost.name for cost in swept.costs]) == bool(order)
        assert [cost.numerics for cost in swept.costs if cost.name == "gentle"] == ["lossy: gently"] * bool(order)
    finally:
        vars(compressors).pop("gentle", None)
        sys.modules.pop("hvdtrain.comm.compressors.gentle", None)
        slots.in_slot.cache_clear()


@dataclass(frozen=True)
class More(Config):
    """Someone else's keys."""

    check_tea_every: int = key(3, "steps", "look after the tea", least=1, most=9, affects="nothing", quiet=9)
    spoons: list[float] = key([], "", "sugar of each rank", per_rank=True,
                              unused=(Unused("nobody checks", lambda s: s.config.check_tea_every == 9),))


def test_a_key_is_known_everywhere(monkeypatch):
    with pytest.raises(UserError, match="check_tea_every is 0"):
        More(check_tea_every=0).check()
    with pytest.raises(UserError, match="9 at most"):
        More(check_tea_every=10).check()
    assert "check_tea_every" in schema.affecting(More, "nothing") and "spoons" not in schema.affecting(More, "nothing")
    assert schema.per_rank(More(spoons=[1.0, 2.0]))["spoons"] == [1.0, 2.0]
    assert More().quiet().check_tea_every == 9 and More().quiet().eval_every == 0
    assert notes(ConfigContext(More(check_tea_every=9, spoons=[1.0]))) == ["spoons has no effect: nobody checks"]
    monkeypatch.setattr(train, "Config", More)
    assert "look after the tea [steps]" in " ".join(train.make_parser().format_help().split())
    spec = importlib.util.spec_from_file_location("generate", ROOT.parent / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    monkeypatch.setattr(generate, "Config", More)
    assert "| `check_tea_every` | whole number | `3` | steps | look after the tea |" in generate.page()
