"""Unsafe habits: each is found, at its line, and its safe twin is not."""

import pytest

from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import migrate, of_text

KERAS = "import horovod.tensorflow.keras as hvd\nimport keras\n"
TORCH = "import horovod.torch as hvd\nimport torch\n"
DDP = ("import torch\nimport torch.distributed as dist\nfrom torch.utils.data import DataLoader\n"
       "from torch.utils.data.distributed import DistributedSampler\ndist.init_process_group()\n")
TF = "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\n"


def told(text: str) -> list[tuple[int, str]]:
    return [(f.line, f.what) for f in migrate(of_text(text), MigrateOptions()).findings if f.kind == "unsafe"]


@pytest.mark.parametrize("head, unsafe, safe, named", [
    (KERAS, "if hvd.rank() == 0:\n    hvd.allreduce(x)", "hvd.allreduce(x)\nif hvd.rank() == 0:\n    print(x)",
     "allreduce inside"),
    (TORCH, "r = hvd.rank()\nif not r:\n    hvd.broadcast(x, 0)", "r = 1\nif not r:\n    hvd.broadcast(x, 0)",
     "broadcast inside"),
    (DDP, "if dist.get_rank() == 0:\n    dist.barrier()", "dist.barrier()", "barrier inside"),
    (DDP, "def v():\n    dist.all_reduce(n)\nif dist.get_rank() == 0:\n    v()",
     "def v():\n    if dist.get_rank() == 0:\n        print(1)\nif dist.get_rank() == 0:\n    v()",
     "v (which calls"),
    (KERAS, "if hvd.rank() == 0:\n    m.evaluate(x, callbacks=[hvd.callbacks.MetricAverageCallback()])",
     "if hvd.rank() == 0:\n    m.evaluate(x)", "evaluate inside"),
    ("from accelerate import Accelerator\na = Accelerator()\n",
     "if a.is_main_process:\n    a.wait_for_everyone()", "a.wait_for_everyone()", "wait_for_everyone inside"),
    ("import hvdtrain\nt = hvdtrain.Trainer()\n", "if rank == 0:\n    t.evaluate()", "t.evaluate()",
     "Trainer.evaluate"),
    (TORCH, "o = hvd.DistributedOptimizer(p)",
     "o = hvd.DistributedOptimizer(p)\nhvd.broadcast_parameters(m, root_rank=0)", "no rank broadcasts"),
    (KERAS, "o = hvd.DistributedOptimizer(p)",
     "o = hvd.DistributedOptimizer(p)\nc = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]",
     "no rank broadcasts"),
    (TORCH, "torch.manual_seed(7 + hvd.rank())", "torch.manual_seed(7)", "seeds each rank"),
    (KERAS, "keras.utils.set_random_seed(hvd.rank())", "keras.utils.set_random_seed(hvd.size())", "seeds each rank"),
    (KERAS, "m.save('m.keras')", "if hvd.rank() == 0:\n    m.save('m.keras')", "every rank runs m.save"),
    (KERAS, "m.save('m.keras')", "verbose = 1 if hvd.rank() == 0 else 0\nif verbose:\n    m.save('m.keras')",
     "every rank runs m.save"),
    (KERAS, "m.save('m.keras')", "v = 0\nif hvd.rank() == 0:\n    v = 1\nif v == 1:\n    m.save('m.keras')",
     "every rank runs m.save"),
    (TORCH, "v = 1 if v else 0\nq = not q\nif v or q == 1:\n    torch.save(m, 'p')",
     "if hvd.rank() == 0:\n    torch.save(m, 'p')", "every rank runs"),
    (KERAS, "v = 1 if hvd.rank() == 0 else 0\nif v > 0:\n    hvd.allreduce(x)",
     "v = 1 if x else 0\nif v > 0:\n    hvd.allreduce(x)", "allreduce inside"),
    (TORCH, "torch.save(m, 'p')", "def f():\n    torch.save(m, 'p')\nif hvd.rank() == 0:\n    f()",
     "every rank runs"),
    (TORCH, "torch.save(m, 'p')", "torch.save(m, f'p{hvd.rank()}')", "every rank runs"),
    (TORCH, "def f():\n    torch.save(m, 'p')\nf()\nif hvd.rank() == 0:\n    f()",
     "def f():\n    torch.save(m, 'p')\ndef g():\n    f()\nif hvd.rank() == 0:\n    g()", "every rank runs"),
    (DDP, "class T:\n    def save(self):\n        torch.save(self.m, 'p')\n    def train(self):\n        self.save()",
     "import os\nclass T:\n    def __init__(self):\n        self.gpu = int(os.environ['LOCAL_RANK'])\n"
     "    def save(self):\n        torch.save(self.m, 'p')\n    def train(self):\n"
     "        if self.gpu == 0 and self.epoch % 2 == 0:\n            self.save()", "every rank runs torch.save"),
    (TORCH, "def f():\n    torch.save(m, 'p')",
     "def f():\n    if hvd.rank() != 0:\n        return\n    torch.save(m, 'p')",
     "every rank runs"),
    ("from accelerate import Accelerator\na = Accelerator()\n", "model.save_pretrained('m')",
     "def f(accelerator):\n    accelerator.save_model(m, 'd')", "every rank runs"),
    (KERAS, "c = [keras.callbacks.ModelCheckpoint('m.keras')]",
     "c = [keras.callbacks.ModelCheckpoint('m.keras')] if hvd.rank() == 0 else []", "every rank runs"),
    (TORCH, "s = hvd.elastic.TorchState(m)", "s = State(m)", "rendezvous"),
    (KERAS, "o = keras.optimizers.SGD(0.1 * hvd.size())", "o = keras.optimizers.SGD(0.1)", "learning rate is"),
    (DDP, "lr = 0.1 * dist.get_world_size()", "n = 2 * dist.get_world_size()", "learning rate is"),
    (KERAS, "n = hvd.size()\no = keras.optimizers.SGD(learning_rate=n * lr)",
     "n = hvd.size()\no = keras.optimizers.SGD(learning_rate=n)", "learning rate is"),
    (KERAS, "k = len(x) // hvd.size()", "x = x[hvd.rank()::hvd.size()]", "rounded down"),
    (KERAS, "m.fit(d, steps_per_epoch=n // hvd.size())", "b = batch // hvd.size()", "rounded down"),
    (KERAS, "m.fit(d, steps_per_epoch=n // hvd.size())", "d.take(500 // hvd.size())", "rounded down"),
    (KERAS, "steps = n // (batch * hvd.size())", "e = epochs // hvd.size()", "rounded down"),
    (DDP, "s = DistributedSampler(d)", "s = Sampler(d)", "repeats samples"),
    (DDP, "s = DistributedSampler(d, drop_last=True)", "s = None", "drops the last"),
    (DDP, "l = DataLoader(d, drop_last=True)", "l = DataLoader(d, drop_last=False)", "drops the last"),
    (TF, "d = d.batch(3, drop_remainder=True)", "d = d.batch(3)", "drops the last"),
    (DDP, "s = DistributedSampler(d)", "s = DistributedSampler(d)\ns.set_epoch(1)", "set_epoch is never"),
    (DDP, "s = DistributedSampler(d)", "s = DistributedSampler(d, shuffle=False)", "set_epoch is never"),
    (DDP, "l = DataLoader(d)", "l = DataLoader(d, sampler=DistributedSampler(d))", "no code divides the samples"),
    (KERAS, "m.fit(x, y)", "x = x[hvd.rank()::hvd.size()]\nm.fit(x, y)", "no code divides the samples"),
    (KERAS, "m.fit(x, y)", "d = d.shard(hvd.size(), hvd.rank())\nm.fit(d)", "no code divides the samples"),
    (KERAS, "g = gpus[hvd.local_rank()]\nm.fit(x, y)", "n = len(x)\nx = x[hvd.rank() * n:n]\nm.fit(x)",
     "no code divides the samples"),
    (TORCH, "def metric_average(v):\n    return hvd.allreduce(v)", "def f(v):\n    return hvd.allreduce(v)",
     "averages a metric"),
    (TORCH, "hvd.allreduce(test_loss, name='avg_loss')", "hvd.allreduce(total, op=hvd.Sum)", "averages a metric"),
    (DDP, "dist.all_reduce(loss)", "dist.all_reduce(loss_sum)", "averages a metric"),
    (TF, "tf.nn.compute_average_loss(l, global_batch_size=8)\ns.run(f)",
     "tf.nn.compute_average_loss(l, global_batch_size=8)", "divides by the global batch"),
    (TF, "tf.reduce_mean(l)\ns.run(f)", "tf.reduce_sum(l)\ns.run(f)", "this replica's own batch"),
    (TORCH, "if not hvd.rank():\n    hvd.allreduce(x)", "if not hvd.rank():\n    f(x)", "allreduce inside"),
    (TORCH, "root = hvd.rank() == 0\nroot and hvd.barrier()", "root = hvd.rank() == 0\nok and hvd.barrier()",
     "barrier behind 'root'"),
    (TORCH, "v = hvd.allgather(x) if hvd.rank() == 0 else 0", "v = hvd.allgather(x) if x else 0", "allgather inside"),
    (TORCH, "def f():\n    if hvd.rank() != 0:\n        return\n    hvd.barrier()",
     "def f():\n    if hvd.rank() != 0:\n        print(1)\n    hvd.barrier()", "barrier below"),
    (TORCH, "for i in n:\n    if hvd.rank(): continue\n    hvd.barrier()",
     "for i in n:\n    if i: continue\n    hvd.barrier()", "barrier below"),
    (TORCH, "while hvd.rank() == 0:\n    hvd.join()", "while x:\n    hvd.join()", "join inside"),
    (TORCH, "lr *= hvd.size()", "count *= hvd.size()", "multiplied by"),
    (TORCH, "rate = hvd.size() * 0.1", "count = hvd.size() * 2", "learning rate is"),
    (TORCH, "k = int(n / hvd.size())", "k = n / hvd.size()", "rounded down"),
    (KERAS, "g = gpus[hvd.local_rank()]\nv = 1 if hvd.rank() == 0 else 0\nm.fit(d, verbose=v)",
     "d = d.shard(hvd.size(), hvd.rank())\nm.fit(d)", "no code divides the samples"),
    (TF, "m.compile('sgd', jit_compile=True)", "m.compile('sgd', jit_compile=False)", "asks for XLA"),
])
def test_a_habit(head, unsafe, safe, named):
    lines = [line for line, what in told(head + unsafe + "\n") if named in what]
    assert len(lines) == 1 and head.count("\n") < lines[0] <= (head + unsafe).count("\n") + 1
    assert not [what for _, what in told(head + safe + "\n") if named in what]


@pytest.mark.parametrize("line, named", [
    ("m.fit_generator(*g)", "fit_generator"), ("keras.optimizers.SGD(0.1, decay=1e-6)", "ignores decay="),
    ("optimizer.get_weights()", "get_weights"), ("optimizer.set_weights(w)", "takes different values"),
    ("keras.backend.set_session(s)", "TensorFlow 1"),
    ("hvd.broadcast_variables(opt.variables(), 0)", "a list in Keras 3"),
    ("keras.optimizers.legacy.SGD(0.1)", "legacy"), ("model.save('folder/')", "'folder/'"),
    ("model.save('x.pt')", "'x.pt'"),
    ("model.load_weights('ckpt')", "'ckpt'"), ("keras.callbacks.ModelCheckpoint('c.keras', period=2)", "gets period"),
    ("keras.backend.get_value(v)", "get_value")])
def test_words_that_keras_3_refuses(line, named):
    findings = migrate(of_text(KERAS + line + "\n"), MigrateOptions()).findings
    assert [f.line for f in findings if f.kind == "by hand" and named in f.what] == [3]


@pytest.mark.parametrize("line", [
    "keras.callbacks.ModelCheckpoint('c-{epoch}.h5')", "model.save('m.h5')", "model.variables()", "copy.variables()"])
def test_what_keras_3_takes_is_not_complained_of(line):
    assert not [f for f in migrate(of_text(KERAS + line + "\n"), MigrateOptions()).findings if f.kind == "by hand"]


def test_ranks_that_draw_from_all_samples_by_themselves_are_no_repetition():
    text = KERAS + "m.fit(d, steps_per_epoch=500 // hvd.size())\n"
    found = [f for f in migrate(of_text(text), MigrateOptions()).findings if "divides the samples" in f.what]
    assert [f.kind for f in found] == ["note"] and "repeat the same work" not in found[0].why


def test_findings_come_in_the_order_of_lines_and_say_why_and_what_to_do():
    text = KERAS + "o = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))\n"
    text += "m.compile(o, 'mse')\nm.fit(x, y)\n"
    findings = migrate(of_text(text), MigrateOptions()).findings
    assert [f.line for f in findings] == sorted(f.line for f in findings) and len(findings) >= 5
    assert all(f.what and f.why and f.do and not f.do.endswith(".") for f in findings)
    assert findings[0].text("a.py").startswith("a.py:1: changed: ")
