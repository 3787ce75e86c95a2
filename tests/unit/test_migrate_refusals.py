"""Scripts whose edit could not be faithful are left as they are, with a finding; names that an edit needs are bound."""

import ast

import pytest

from hvdtrain.migrate import bound
from hvdtrain.migrate.plan import Migration, migrate
from hvdtrain.migrate.rules import Wish
from hvdtrain.migrate.source import of_text


def planned(text: str, target: str = "auto") -> Migration:
    ast.parse(text)
    return migrate(of_text(text), Wish(target))


def left(text: str, named: str, target: str = "auto") -> Migration:
    found = planned(text, target)
    assert found.after.decode() == text
    assert any(f.kind == "by hand" and named in f.what for f in found.findings), found.findings
    return found


HEAD = """import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group()
"""
LOOP = HEAD + """model = DDP(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
total = 0.0
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        total += loss.item()
"""


def test_the_loop_itself_is_moved():
    assert "trainer.fit(model, train)" in planned(LOOP).after.decode()


@pytest.mark.parametrize("above, line, named", [
    ("out = ", "x = x / 255.0", "reads x"), ("out = ", "x /= 255.0", "also does"),
    ("out = ", "x: object = x * 2", "reads x"), ("loss = ", "out = out[:, :3] / 2.0", "reads out"),
    ("loss = ", "y = y % 2", "reads y"), ("loss.", "loss = loss * 0.5", "reads loss"),
    ("loss.", "loss += 0.01", "also does"),
    ("out = ", "if epoch > 0:\n            criterion = other", "reads criterion"),
    ("out = ", "optimizer = second", "reads optimizer"), ("out = ", "model = ema", "reads model"),
    ("out = ", "x = x.to(torch.float64)", "also does"), ("out = ", "x = x.to(y.dtype)", "also does"),
    ("out = ", "a, b = y", "also does"), ("out = ", "print(x := x / 2)", "also does"),
    ("out = ", "w = bias\n        w += 1", "also does"), ("out = ", "w = bias.detach()\n        w += 1", "also does"),
    ("optimizer.step", "optimizer.zero_grad()", "also does"), ("optimizer.step", "loss.backward()", "2 loops train"),
    ("total", "optimizer.step()", "also does"),
    ("optimizer.step", "nn.utils.clip_grad_norm_(model.module.bias, 1.0)", "clip_grad_norm_"),
    ("optimizer.step", "nn.utils.clip_grad_norm_(list(model.parameters())[:1], 1.0)", "clip_grad_norm_"),
    ("optimizer.zero", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_norm_"),
    ("optimizer.step", "nn.utils.clip_grad_norm_(model.parameters(), 1.0, 1.0)", "clip_grad_norm_"),
])
def test_a_loop_that_computes_more_is_left_alone(above, line, named):
    at = LOOP.index("        " + above, LOOP.index("for x, y"))
    left(LOOP[:at] + "        " + line + "\n" + LOOP[at:], named)


def test_whole_clipping_and_moves_to_a_device_go_over():
    clip, move = "nn.utils.clip_grad_norm_(model.module.parameters(), 2.0)", "x = x.to('cuda', non_blocking=True)"
    text = LOOP.replace("        optimizer.step", f"        {clip}\n        optimizer.step")
    text = text.replace("        out =", f"        {move}\n        out =")
    assert "clip_norm=2.0" in planned(text).after.decode()


def test_horovod_that_clips_before_the_average_is_left_alone():
    text = LOOP.replace("import torch.distributed as dist", "import horovod.torch as hvd").replace(
        "dist.init_process_group", "hvd.init").replace("DDP(nn.Linear(8, 3))", "nn.Linear(8, 3)")
    assert planned(text).after.decode() != text
    left(text.replace("        optimizer.step", "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
                      "        optimizer.step"), "clipped before")


@pytest.mark.parametrize("old, new, named", [
    ("total = 0.0\n", "total = 0.0\nmodel.load_state_dict(torch.load('m.pt'))\n", "in its wrapper"),
    ("total = 0.0\n", "total = 0.0\nprint(model.device_ids)\n", "device_ids"),
    ("total = 0.0\n", "total = 0.0\ndef show(m):\n    print(m.module)\n", "m.module"),
    ("sampler = ", "train = train[dist.get_rank() * n:(dist.get_rank() + 1) * n]\nsampler = ", "cut by rank"),
    ("sampler = ", "r = dist.get_rank()\ntrain = Subset(train, range(r, len(train), 4))\nsampler = ", "cut by rank"),
    ("total = 0.0\n", "total = 0.0\ndef show():\n    print(loss)\n", "loss, which the loop binds"),
    ("sampler = ", "if big:\n    optimizer = other(model)\nsampler = ", "optimizer is not made once"),
    ("model = DDP(", "import torch as hvdtrain_torch\nmodel = DDP(", ""),
])
def test_what_is_beside_the_loop(old, new, named):
    text = LOOP.replace(old, new)
    if named:
        left(text, named)
    else:
        assert planned(text).after.decode() != text


def test_a_file_of_a_wrapped_model_is_not_rewritten_with_other_keys():
    left(LOOP + "torch.save(model.state_dict(), 'm.pt')\n", "in its wrapper")
    assert "torch.save(model.state_dict(), 'm.pt')" in planned(
        LOOP + "torch.save(model.module.state_dict(), 'm.pt')\n").after.decode()


ACCELERATE = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator()
loader = DataLoader(data, batch_size=16)
tests = DataLoader(test, batch_size=16)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in ():
    pass
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
"""


def test_the_accelerators_device_is_the_models():
    after = planned(ACCELERATE + "if accelerator.is_main_process:\n    p = accelerator.unwrap_model(model)(t.to("
                    "accelerator.device))\naccelerator.end_training()\n").after.decode()
    assert "    p = model(t.to(next(model.parameters()).device))\n" in after and "accelerat" not in after


@pytest.mark.parametrize("line", ["accelerator.print('done')", "p = accelerator.gather_for_metrics(model(t))",
                                  "accelerator.save_model(model, 'd')", "run(accelerator)"])
def test_what_else_the_accelerator_does_is_left_alone(line):
    left(ACCELERATE + line + "\n", "uses accelerator")
    before = ACCELERATE.replace("for x, y in ():\n    pass", "z = t.to(accelerator.device)")
    left(before, "uses accelerator")


def test_a_prepared_loader_of_tests_is_left_alone():
    text = ACCELERATE.replace("optimizer, loader = ", "optimizer, loader, tests = ").replace("r, loader)",
                                                                                             "r, loader, tests)")
    left(text + "for x, y in tests:\n    print(model(x))\n", "tests is prepared")


KERAS = """import keras
model = keras.Sequential()
model.compile("adam", "mse")
"""


def test_imports_come_before_their_first_use_and_behind_what_they_need():
    after = planned(LOOP + "import matplotlib\nmatplotlib.use('agg')\n").after.decode()
    assert after.index("from hvdtrain import") < after.index("trainer =") < after.index("import matplotlib")
    inside = planned("def main():\n    import keras\n    import tensorflow as tf\n    m = keras.Sequential()\n"
                     "    m.compile('sgd', 'mse')\n    m.fit(x, y)\nmain()\n").after.decode()
    assert inside.startswith("import hvdtrain.keras as hvd\nimport tensorflow\n") and not bound.unbound(
        inside.encode()) - {"x", "y"}
    late = planned("import os\nos.environ['A'] = 'b'\nimport tensorflow as tf\n" + KERAS + "model.fit(x, y)\n")
    assert late.after.decode().index("import tensorflow as tf") < late.after.decode().index("tf.config")


def test_an_edit_whose_names_nothing_binds_is_thrown_away(monkeypatch):
    text = LOOP.encode()
    monkeypatch.setattr(bound, "unbound", lambda data: {"old"} if data == text else {"old", "new"})
    found = left(LOOP, "new would be read where nothing binds it")
    assert not found.snippet and not any("old" in f.what for f in found.findings)


@pytest.mark.parametrize("text, names", [
    ("import a\nprint(a, b)\n", {"b"}), ("print(a)\na = 1\n", {"a"}), ("def f():\n    return a\n", {"a"}),
    ("def f():\n    return a\na = 1\n", set()), ("def f():\n    print(b)\n    b = 1\n", {"b"}),
    ("def f(x):\n    return [x + i for i in y]\n", {"y"}), ("class A:\n    z = 1\n    w = z\n", set()),
    ("def f():\n    import os\nprint(os)\n", {"os"}), ("from a import *\nprint(b)\n", set()),
    ("def f():\n    global g\n    g = 1\nprint(g)\n", set()), ("try:\n    pass\nexcept E as e:\n    print(e)\n", {"E"}),
    ("for i in range(3):\n    print(i)\n", set()), ("x = lambda q: q + r\n", {"r"})])
def test_unbound(text, names):
    assert bound.unbound(text.encode()) == names


@pytest.mark.parametrize("text, named", [
    (KERAS + "if e:\n    model = keras.models.load_model('m.keras')\nmodel.fit(x, y)\n", "can come from a file"),
    (KERAS + "def get():\n    return keras.models.load_model('m.keras')\nmodel = get()\nmodel.fit(x, y)\n",
     "can come from a file"),
    (KERAS + "model.fit(x, y)\nmodel.compile(model.optimizer, 'mse')\nmodel.fit(x, y)\n", "compiled a second time"),
    (KERAS + "go = model.fit\nmodel.fit(x, y)\n", "trains beside fit"),
    (KERAS + "model.fit(x, y)\nmodel.train_on_batch(x, y)\n", "trains beside fit"),
    (KERAS + "model.fit(x, y)\nbuild().fit(x, y)\n", "no compile is seen of"),
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
