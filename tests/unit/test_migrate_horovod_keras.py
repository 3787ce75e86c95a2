"""Scripts of Horovod's Keras and TensorFlow APIs: every way to import them moves, and what hvdtrain lacks stays."""

import pytest

from hvdtrain.migrate.plan import migrate
from hvdtrain.migrate.rules import Wish
from hvdtrain.migrate.source import of_text


def moved(text: str) -> str:
    found = migrate(of_text(text), Wish())
    assert found.kind == "horovod_keras"
    again = migrate(of_text(found.after.decode()), Wish())
    assert again.after == found.after
    return found.after.decode()


@pytest.mark.parametrize("before, after", [
    ("import horovod.tensorflow.keras as hvd\nhvd.init()\n", "import hvdtrain.keras as hvd\nhvd.init()\n"),
    ("import horovod.keras as hvd  # the API\nhvd.size()\n",
     "import hvdtrain.keras as hvd  # the API\nhvd.size()\n"),
    ("import os, horovod.keras as hvd\n", "import os, hvdtrain.keras as hvd\n"),
    ("import horovod.tensorflow as hvd\nhvd.DistributedGradientTape(t)\n",
     "import hvdtrain.tensorflow as hvd\nhvd.DistributedGradientTape(t)\n"),
    ("import horovod.keras.callbacks as cb\ncb.MetricAverageCallback()\n",
     "import hvdtrain.keras.callbacks as cb\ncb.MetricAverageCallback()\n"),
    ("from horovod.tensorflow.keras.callbacks import (\n    MetricAverageCallback,  # averages\n)\n",
     "from hvdtrain.keras.callbacks import (\n    MetricAverageCallback,  # averages\n)\n"),
    ("from horovod.tensorflow import keras as hvd\nhvd.rank()\n", "from hvdtrain import keras as hvd\nhvd.rank()\n"),
    ("from horovod import tensorflow as hvd\nhvd.rank()\n", "from hvdtrain import tensorflow as hvd\nhvd.rank()\n"),
    ("from horovod.keras import rank, size as n\n", "from hvdtrain.keras import rank, size as n\n"),
    ("from horovod.tensorflow.mpi_ops import allgather\n", "from hvdtrain.tensorflow import allgather\n"),
    ("from horovod.keras import *\n", "from hvdtrain.keras import *\n"),
    ("def f():\n\timport horovod.keras as h\n\treturn h.rank()\n",
     "def f():\n\timport hvdtrain.keras as h\n\treturn h.rank()\n"),
    ("import horovod.tensorflow.keras\nprint(horovod.tensorflow.keras.rank() + horovod.tensorflow.keras.size())\n",
     "import hvdtrain.keras\nprint(hvdtrain.keras.rank() + hvdtrain.keras.size())\n"),
])
def test_an_import_moves(before, after):
    assert moved(before) == after


def test_the_tensorflow_module_around_a_keras_optimizer_is_the_keras_one():
    before = ("import tensorflow as tf\nimport horovod.tensorflow as hvd\n"
              "opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD())\nmodel.compile(opt, 'mse')\nmodel.fit(x, "
              "y)\n")
    assert "import hvdtrain.keras as hvd\n" in moved(before)
    with_ops = before + "hvd.alltoall(x)\n"
    assert "import hvdtrain.tensorflow as hvd\n" in moved(with_ops), "a name that only the TensorFlow module has"


@pytest.mark.parametrize("text, named, line", [
    ("import horovod.tensorflow.keras as hvd\n\n@hvd.elastic.run\ndef train(state):\n    pass\n", "elastic", 1),
    ("import numpy\nfrom horovod.tensorflow import elastic\n", "elastic", 2),
    ("import horovod.tensorflow as hvd\nhvd.no_such_name()\n", "no_such_name", 1),
    ("import horovod.tensorflow.keras\nprint(horovod.spark.run)\n", "horovod.spark.run", 1),
    ("import horovod.tensorflow.data.compute_service as s\n", "no counterpart", 1),
    ("import horovod.keras as hvd\nfrom horovod.keras import elastic\nhvd.size()\n", "elastic", 2),
    ("import horovod.keras as hvd\nimport horovod.torch as thvd\n", "horovod.torch", 2),
])
def test_what_hvdtrain_lacks_stays_and_is_told(text, named, line):
    found = migrate(of_text(text), Wish())
    assert found.after.decode() == text
    told = [f for f in found.findings if f.kind == "by hand" and named in f.what]
    assert told and told[0].line == line


def test_words_of_keras_2_that_have_one_new_form():
    before = '''import tensorflow as tf
import horovod.tensorflow.keras as hvd
opt = tf.keras.optimizers.Adam(lr=0.1,
                               beta_1=0.8)
opt = hvd.DistributedOptimizer(opt)
model.compile(optimizer=opt,
              loss="mse",
              experimental_run_tf_function=False)  # said by Horovod's pages
'''
    after = '''import tensorflow as tf
import hvdtrain.keras as hvd
opt = tf.keras.optimizers.Adam(learning_rate=0.1,
                               beta_1=0.8)
opt = hvd.DistributedOptimizer(opt)
model.compile(optimizer=opt,
              loss="mse")  # said by Horovod's pages
'''
    assert moved(before) == after


def test_the_silent_divergence_is_told():
    text = ("import horovod.tensorflow.keras as hvd\nopt = hvd.DistributedOptimizer(o)\nmodel.compile(opt, 'mse')\n"
            "model.fit(x, y)\n")
    found = migrate(of_text(text), Wish())
    assert [(f.line, f.kind) for f in found.findings if "does nothing under Keras 3" in f.what] == [(2, "unsafe")]


def test_the_names_are_those_that_hvdtrain_has():
    import hvdtrain.keras
    import hvdtrain.tensorflow

    for module, some in ((hvdtrain.keras, "DistributedOptimizer PartialDistributedOptimizer callbacks load_model"),
                         (hvdtrain.tensorflow, "DistributedGradientTape broadcast_variables join alltoall")):
        assert set(some.split()) <= set(module.__all__)
