"""Scripts whose edit could not be faithful are left as they are, with a finding; names that an edit needs are bound."""

import ast

import libcst as cst
import pytest

from hvdtrain.commands.migrate import plan
from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import Migration, migrate, of_text


def planned(text: str, target: str = "auto") -> Migration:
    ast.parse(text)
    return migrate(of_text(text), MigrateOptions(target))


def left(text: str, named: str, target: str = "auto") -> Migration:
    found = planned(text, target)
    assert found.after.decode() == text
    assert any(f.kind == "by hand" and named in f.what for f in found.findings), found.findings
    return found


KERAS = """import keras
model = keras.Sequential()
model.compile("adam", "mse")
"""


def test_imports_come_before_their_first_use_and_behind_what_they_need():
    inside = planned("def main():\n    import keras\n    import tensorflow as tf\n    m = keras.Sequential()\n"
                     "    m.compile('sgd', 'mse')\n    m.fit(x, y)\nmain()\n").after.decode()
    assert inside.startswith("import hvdtrain.keras as hvd\nimport tensorflow\n") and not plan.undefined_names(
        cst.parse_module(inside)) - {"x", "y"}
    late = planned("import os\nos.environ['A'] = 'b'\nimport tensorflow as tf\n" + KERAS + "model.fit(x, y)\n")
    assert late.after.decode().index("import tensorflow as tf") < late.after.decode().index("tf.config")


def test_an_edit_whose_names_nothing_binds_is_thrown_away(monkeypatch):
    text = KERAS + "model.fit(x, y)\n"
    monkeypatch.setattr(plan, "undefined_names", lambda module: {"old"} if module.code == text else {"old", "new"})
    found = left(text, "new would be read where it is not defined")
    assert not found.snippet and not any("old" in f.what for f in found.findings)


@pytest.mark.parametrize("text, names", [
    ("import a\nprint(a, b)\n", {"b"}), ("print(a)\na = 1\n", {"a"}), ("def f():\n    return a\n", {"a"}),
    ("def f():\n    return a\na = 1\n", set()), ("def f():\n    print(b)\n    b = 1\n", {"b"}),
    ("def f(x):\n    return [x + i for i in y]\n", {"y"}), ("class A:\n    z = 1\n    w = z\n", set()),
    ("def f():\n    import os\nprint(os)\n", {"os"}), ("import a\ndef f():\n    a.b()\n    import a\n", {"a"}),
    ("import a.b\ndef f(x):\n    a.b.c(x)\n    x = 1\n", set()), ("from a import *\nprint(b)\n", set()),
    ("def f():\n    global g\n    g = 1\nprint(g)\n", set()), ("try:\n    pass\nexcept E as e:\n    print(e)\n", {"E"}),
    ("for i in range(3):\n    print(i)\n", set()), ("x = lambda q: q + r\n", {"r"})])
def test_undefined_names(text, names):
    assert plan.undefined_names(cst.parse_module(text)) == names


@pytest.mark.parametrize("text, named", [
    (KERAS + "if e:\n    model = keras.models.load_model('m.keras')\nmodel.fit(x, y)\n", "can come from a file"),
    (KERAS + "def get():\n    return keras.models.load_model('m.keras')\nmodel = get()\nmodel.fit(x, y)\n",
     "can come from a file"),
    (KERAS + "model.fit(x, y)\nmodel.compile(model.optimizer, 'mse')\nmodel.fit(x, y)\n", "compiled a second time"),
    (KERAS + "go = model.fit\nmodel.fit(x, y)\n", "trains outside of fit"),
    (KERAS + "model.fit(x, y)\nmodel.train_on_batch(x, y)\n", "trains outside of fit"),
    (KERAS + "model.fit(x, y)\nbuild().fit(x, y)\n", "without a visible compile"),
    (KERAS + "def g():\n    yield 1\nmodel.fit(g())\n", "fit gets a generator"),
])
def test_a_model_that_may_train_undistributed_is_left_alone(text, named):
    left(text, named)


def test_models_that_are_compiled_anew_and_other_packages_are_no_hindrance():
    text = ("import keras\nfrom sklearn.preprocessing import StandardScaler\nscaler = StandardScaler()\nscaler.fit(x)\n"
            "m = keras.models.load_model('m.keras')\nm.compile('sgd', 'mse')\nm.fit(x, y, batch_size=None)\n")
    assert "hvd.shard(x, y, global_batch=32)" in planned(text).after.decode()
    assert "global_batch=32" in planned(KERAS + "model.fit(x, y, batch_size=None)\n", "trainer").after.decode()


@pytest.mark.parametrize("argument", ["steps_per_epoch=4", "validation_split=0.1"])
def test_advice_does_not_go_in_circles(argument):
    text = KERAS + f"model.fit(x, y, {argument})\n"
    for target in ("hvdtrain.keras", "trainer"):
        assert all("--to" not in f.do for f in left(text, argument.partition("=")[0], target).findings)


def test_what_one_process_printed_is_told():
    found = planned(KERAS + "model.fit(x, y)\nprint(model.evaluate(x, y))\n")
    assert [f.line for f in found.findings if f.kind == "note" and f.what.startswith("every rank runs print")] == [5]
