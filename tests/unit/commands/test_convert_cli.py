"""The command line of convert: what SOURCE and TARGET may be, options, the check's numbers, the table, no leftovers."""

from __future__ import annotations

import json
import os
import re
import shlex

import numpy as np
import pytest

from hvdtrain.checkpoint import Snapshot, write_snapshot
from hvdtrain.commands.convert import cli
from hvdtrain.commands.convert import cli as check
from hvdtrain.commands.convert.request import ModelPath, Request, completed, convert, source_of, target_of
from hvdtrain.core import ROOT
from hvdtrain.core.errors import UserError


def run_directory(path, step=12, **meta):
    """Return a run with one checkpoint."""
    facts = {"framework": "torch", "model": "torch_models.cnn:build",
             "config": {"model": "auto", "model_args": {"classes": 3}}, **meta}
    write_snapshot(path / "checkpoints" / f"step-{step:08d}", Snapshot({"model": {"w": np.ones(2)}}, facts), step=step)
    return path


def test_what_a_source_is(tmp_path):
    run = run_directory(tmp_path / "run")
    step = run / "checkpoints" / "step-00000012"
    assert {source_of(str(p), print) for p in (run, run / "checkpoints", step)} == {ModelPath(step, "checkpoint")}
    for name, kind in (("a.safetensors", "safetensors"), ("a.pt", "state_dict"), ("a.pth", "state_dict"),
                       ("a.keras", "keras"), ("a.weights.h5", "weights")):
        (tmp_path / name).touch()
        assert source_of(str(tmp_path / name), print).kind == target_of(str(tmp_path / f"new-{name}")).kind == kind
    (tmp_path / "a.h5").touch()
    (tmp_path / "empty").mkdir()
    for text in ("a.h5", "empty", "nothing"):
        with pytest.raises(UserError):
            source_of(str(tmp_path / text), print)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    run = run_directory(tmp_path / "run")
    run_directory(run, 24)
    (run / "checkpoints" / "step-00000024" / "model.safetensors").write_bytes(b"")
    told = []
    assert source_of(str(run), told.append).path.name == "step-00000012" and "step-00000024 is not used" in told[0]


def test_a_target_that_no_folder_can_hold_is_a_mistake(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "a.pt").touch()
    for target in (tmp_path / "file" / "b.keras", tmp_path / "file" / "deep" / "b.keras"):
        asked = Request(ModelPath(tmp_path / "a.pt", "state_dict"), ModelPath(target, "keras"), "a:b", "c:d")
        with pytest.raises(UserError, match="nothing can be created in|writable directory"):
            convert(asked)


def test_random_weights_are_none_of_them_zero():
    from hvdtrain.backends.interchange.layers import Layer, Model, Weight

    given = {"w": np.zeros((3, 4), np.float32), "b": np.ones(5, np.float32), "running_var": np.ones(5, np.float32),
             "n": np.array(3), "h": np.zeros((2, 2), np.uint16), "other": np.zeros(2, np.float32)}
    weights = {name: Weight(name, a.shape, "bfloat16" if name == "h" else str(a.dtype), True)
               for name, a in given.items() if name != "other"}
    model = Model("torch", (Layer("l", "dense", "Linear", weights, {}),), False)
    drawn = check.random_weights(model, given)
    assert all(np.unique(drawn[name]).size == drawn[name].size and drawn[name].all() for name in "wbh")
    assert all(drawn[n].dtype == given[n].dtype and drawn[n].shape == given[n].shape for n in given)
    assert drawn["n"] == 3 and not drawn["other"].any() and drawn["running_var"].min() >= 0.5
    assert all(np.array_equal(a, drawn[n]) for n, a in check.random_weights(model, given).items()), "seeded"


def test_a_target_is_never_overwritten(tmp_path):
    (tmp_path / "a.pt").touch()
    run_directory(tmp_path / "run")
    wrong = {"a.pt": "there already", "run": "there already", "b.h5": "ends in", "b.onnx": "ends in"}
    for text, words in wrong.items():
        with pytest.raises(UserError, match=words):
            target_of(str(tmp_path / text))
    (tmp_path / "empty").mkdir()
    assert target_of(str(tmp_path / "empty")).kind == target_of(str(tmp_path / "new")).kind == "checkpoint"


def test_a_file_belongs_to_a_framework(tmp_path):
    ModelPath(tmp_path / "a.safetensors", "safetensors").require("torch", "--twin")
    with pytest.raises(UserError, match="a.pt is a file of torch and --twin names a tensorflow model"):
        ModelPath(tmp_path / "a.pt", "state_dict").require("tensorflow", "--twin")


def test_what_a_run_knows_of_its_model(tmp_path):
    source, target = source_of(str(run_directory(tmp_path / "run")), print), target_of(str(tmp_path / "new"))
    found = completed(Request(source, target, twin_args={"classes": 4}))
    assert (found.model, found.twin) == ("torch_models.cnn:build", "tf_models.cnn:build")
    assert (found.model_args, found.twin_args) == ({"classes": 3}, {"classes": 4})
    found = completed(Request(source, target, model="mine.py:build", twin="other:build", model_args={"width": 2}))
    assert (found.model, found.model_args, found.twin_args) == ("mine.py:build", {"width": 2}, {"width": 2})
    own = run_directory(tmp_path / "own", model="Net")
    for request, words in ((Request(source_of(str(own), print), target), "--model"),
                           (Request(source, target, model="mine.py:build"), "--twin"),
                           (Request(ModelPath(tmp_path / "a.pt", "state_dict"), target, model="m:b"), "weights alone")):
        with pytest.raises(UserError, match=words):
            completed(request)


def test_a_request_survives_json(tmp_path):
    request = Request(ModelPath(tmp_path, "checkpoint"), ModelPath(tmp_path / "x.pt", "state_dict"), "a:b", "c:d",
                      {"hidden": [3]}, {}, {"x": "y"}, {"h": [8, 2, 2]}, [8, 8], 1e-4, False)
    request.write(tmp_path / "r.json")
    assert Request.read(tmp_path / "r.json") == request


def parsed(monkeypatch, tmp_path, *argv):
    """Return the request that a command line makes."""
    seen = []
    report = {"rows": [["a: weight (2, 3)", "a: kernel (3, 2)", "(out, in) -> (in, out)"]], "how": "by name",
              "frameworks": ["torch", "tensorflow"], "notes": ["a remark"], "apart": 1.5e-7, "input": [[4, 8]],
              "optimizer": "SGD {}", "step": 7}
    monkeypatch.setattr(cli, "convert", lambda request: seen.append(request) or report)
    (tmp_path / "a.pt").touch()
    assert cli.main([str(tmp_path / "a.pt"), str(tmp_path / "b.keras"), *argv]) == 0
    return seen[0]


def test_options(monkeypatch, tmp_path, capsys):
    given, rest = cli._entries(["--model_args.norm", "batch", "a.pt", "b.keras"])
    assert given["model_args"] == {"norm": "batch"} and rest == ["a.pt", "b.keras"]
    request = parsed(monkeypatch, tmp_path, "--model", "a:b", "--twin", "c:d", "--model_args.hidden", "[3, 4]",
                     "--twin_args.name=x", "--pair", "0=dense", "--pair", "1=out", "--flatten", "1=8,2,2",
                     "--input_shape", "8,8", "--tolerance", "1e-4", "--no-check")
    assert (request.model_args, request.twin_args) == ({"hidden": [3, 4]}, {"name": "x"})
    assert (request.pairs, request.flats) == ({"0": "dense", "1": "out"}, {"1": [8, 2, 2]})
    assert (request.input_shape, request.tolerance, request.check) == ([8, 8], 1e-4, False)
    told = capsys.readouterr().out
    for words in ("a: weight (2, 3)  a: kernel (3, 2)  (out, in) -> (in, out)", "differ by 1.5e-07", "note: a remark",
                  "1 weights matched by name", "made "):
        assert words in told


def test_the_commands_of_the_docs_parse():
    text = (ROOT.parent / "docs" / "how-to" / "convert.md").read_text()
    lines = re.findall(r"^python -m hvdtrain convert (.*)$", text, re.M)
    assert len(lines) >= 4
    for line in lines:
        args, unknown = cli.make_parser().parse_known_args(cli._entries(shlex.split(line))[1])
        assert args.source and args.target and not unknown
    for option in re.findall(r"`(--[a-z_-]+)", text):
        assert option in cli.make_parser().format_help(), option


@pytest.mark.parametrize("argv, words", [
    (["--modle", "x"], "no option --modle; .*'--model'|no option --modle"),
    (["--model_args.hidden"], "has no value"), (["stray"], "no option stray"),
    (["--pair", "0"], "not a pair"), (["--flatten", "h=8,x"], "whole numbers"),
    (["--input_shape", "0"], "whole numbers"), (["--tolerance", "-1"], "a number of 0 or more")])
def test_options_that_are_wrong(argv, words, tmp_path):
    (tmp_path / "a.pt").touch()
    with pytest.raises(UserError, match=words):
        cli.main([str(tmp_path / "a.pt"), str(tmp_path / "b.keras"), *argv])


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    """A child's mistake is told as our own; neither TARGET nor the directory it would be made in is left."""
    (tmp_path / "a.pt").touch()
    request = Request(source_of(str(tmp_path / "a.pt"), print), target_of(str(tmp_path / "new" / "b.keras")),
                      "no_such_module:build", "tf_models.mlp:build")
    with pytest.raises(UserError, match="no module 'no_such_module'"):
        convert(request)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "new"] and not os.listdir(tmp_path / "new")


def test_random_input():
    x = np.arange(24, dtype=np.int64).reshape(4, 6) + 5
    found = check.random_like([x, np.full((4, 2), 3.0, np.float32)])
    assert found[0].dtype == np.int64 and found[0].min() >= 5 and found[0].max() < 29 and (found[0] != x).any()
    assert found[1].dtype == np.float32 and abs(float(found[1].mean()) - 3) < 2 and found[1].std() > 0
    assert [a.tobytes() for a in check.random_like([x])] == [found[0].tobytes()]


def test_where_input_comes_from():
    assert check.inputs(lambda B: (np.ones((B, 3), np.float32), None), [], [])[0].shape == (check.SAMPLES, 3)
    assert check.inputs(lambda B: (np.ones((B, 3), np.float32), None), [5], [])[0].shape == (check.SAMPLES, 5)
    two = check.inputs(None, [], [((2, 3), "float32"), ((4,), "int32")])
    assert [(a.shape, a.dtype.name) for a in two] == [((4, 2, 3), "float32"), ((4, 4), "int32")]
    with pytest.raises(UserError, match="--input_shape"):
        check.inputs(None, [], [])


def test_how_far_outputs_are_apart():
    a = np.array([1.0, -4.0], np.float32)
    assert check.apart([a], [a]) == 0 and check.apart([a + np.float32(0.5)], [a]) == 0.125
    assert check.apart([a * np.nan], [a]) == float("inf") and check.apart([a * 0], [a * 0]) == 0
    assert check.apart([a, a * np.nan], [a, a]) == check.apart([a, a], [a, a * np.nan]) == float("inf")
    with pytest.raises(UserError, match=r"shapes \[\(1,\)\]; expected \[\(2,\)\]"):
        check.apart([a[:1]], [a])


def test_the_report_is_plain(tmp_path):
    rows = cli.table({"rows": [], "how": "by name", "frameworks": ["torch", "tensorflow"], "notes": []})
    assert "outputs were not compared" in rows and json.dumps(rows)
