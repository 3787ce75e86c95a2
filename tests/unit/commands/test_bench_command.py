"""Former commands of benches: they lead to benchmarks/ in a checkout, and say where it is elsewhere."""

import pytest

from benchmarks.__main__ import BENCHES
from hvdtrain.commands import main
from hvdtrain.commands.bench import cli as bench


@pytest.mark.parametrize("words", [["bench", "step"], ["chaos"]])
def test_a_former_command_warns_and_runs_the_new_one(words, capsys):
    with pytest.warns(DeprecationWarning, match=rf"hvdtrain {' '.join(words)} is now python -m benchmarks {words[-1]}"):
        with pytest.raises(SystemExit) as end:
            bench.forward(" ".join(words), words[-1], ["--help"])
    assert end.value.code == 0 and f"usage: python -m benchmarks {words[-1]}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["bench", "step"], ["chaos"]])
def test_without_a_checkout_a_former_command_names_the_new_one(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ROOT", tmp_path / "hvdtrain")
    assert main([*words, "--help"]) == 2
    assert f"python -m benchmarks {words[-1]}, in a checkout" in capsys.readouterr().err


def test_every_bench_that_moved_is_there():
    assert {*bench.MOVED, "chaos"} <= BENCHES.keys() and not bench.BENCHES.keys() & BENCHES.keys()
