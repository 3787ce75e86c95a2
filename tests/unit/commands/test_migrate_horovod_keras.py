"""Scripts of Horovod's Keras and TensorFlow APIs: every way to import them moves, and what hvdtrain lacks stays."""

import pytest

from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import migrate, of_text


def moved(text: str) -> str:
    found = migrate(of_text(text), MigrateOptions())
    assert found.kind == "horovod_keras"
    again = migrate(of_text(found.after.decode()), MigrateOptions())
    assert again.after == found.after
    return found.after.decode()


@pytest.mark.parametrize("before, after", [
    ("import horovod.tensorflow.keras as hvd\nhvd.init()\n", "import hvdtrain.keras as hvd\nhvd.init()\n"),
    ("import horovod.keras as hvd\nimport horovod.torch as other\nother.size()\n",
     "import hvdtrain.keras as hvd\nimport hvdtrain.torch as other\nother.size()\n"),
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
    ("import horovod.keras as hvd\nimport horovod.mxnet as mx\n", "horovod.mxnet", 2),
])
def test_what_hvdtrain_lacks_stays_and_is_told(text, named, line):
    found = migrate(of_text(text), MigrateOptions())
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


@pytest.mark.parametrize("before, after", [
    ("import horovod\nimport horovod.tensorflow.keras as hvd\nhorovod.run(main, np=2)\n",
     "import horovod\nimport hvdtrain.keras as hvd\nhorovod.run(main, np=2)\n"),
    ("from horovod import run\nimport horovod.tensorflow as hvd\nrun(main)\n",
     "from horovod import run\nimport hvdtrain.tensorflow as hvd\nrun(main)\n"),
    ("import horovod.runner\nimport horovod.keras as hvd\nhorovod.runner.run(main)\n",
     "import horovod.runner\nimport hvdtrain.keras as hvd\nhorovod.runner.run(main)\n"),
    ("import horovod\nimport horovod.keras\nhorovod.run(horovod.keras.size)\n",
     "import horovod\nimport hvdtrain.keras\nhorovod.run(hvdtrain.keras.size)\n"),
])
def test_horovods_launcher_stays_beside_what_moves_and_is_told(before, after):
    assert moved(before) == after
    told = [f for f in migrate(of_text(before), MigrateOptions()).findings if "open port" in f.what]
    assert [(f.line, f.kind) for f in told] == [(3, "unsafe")]


HEAD = "import keras\nimport tensorflow as tf\nimport horovod.keras as hvd\n"
PIN = '''gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
'''


@pytest.mark.parametrize("before, after", [
    ("opt = tf.optimizers.Adam(0.1)\n\ndef step():\n    f(opt.variables())\n",
     "opt = tf.optimizers.Adam(0.1)\n\ndef step():\n    f(opt.variables)\n"),
    ("opt = keras.optimizers.SGD()\nopt = hvd.DistributedOptimizer(opt)\nf(opt.variables())\n",
     "opt = keras.optimizers.SGD()\nopt = hvd.DistributedOptimizer(opt)\nf(opt.variables)\n"),
    ("from keras.preprocessing.image import ImageDataGenerator, img_to_array\n",
     "from tensorflow.keras.preprocessing.image import ImageDataGenerator, img_to_array\n"),
    ("from keras.preprocessing import image\ng = image.ImageDataGenerator()\n",
     "from tensorflow.keras.preprocessing import image\ng = image.ImageDataGenerator()\n"),
    ("from keras.preprocessing import image\ng = image.img_to_array(i)\n",
     "from keras.preprocessing import image\ng = image.img_to_array(i)\n"),
    ("g = keras.preprocessing.image.ImageDataGenerator()\n",
     "g = tf.keras.preprocessing.image.ImageDataGenerator()\n"),
    ("model.fit_generator(generator=g, shuffle=True,\n                    workers=4, epochs=2)\n",
     "model.fit(g, shuffle=True,\n          epochs=2)\n"),
    ("model.fit_generator(g, None, 2)\n", "model.fit(g, steps_per_epoch=None, epochs=2)\n"),
    ("s = model.evaluate_generator(g, 3, workers=4)\n", "s = model.evaluate(g, steps=3, verbose=0)\n"),
    ("s = model.predict_generator(g, verbose=1)\n", "s = model.predict(g, verbose=1)\n"),
    ("m.save_weights('x.h5')\nm.load_weights('x.h5')\nf('x.h5')\n",
     "m.save_weights('x.weights.h5')\nm.load_weights('x.weights.h5')\nf('x.h5')\n"),
    ("p = os.path.join(d, 'w')\nm.save_weights(p, save_format='tf')\nm.load_weights(os.path.join(e, 'w'))\n",
     "p = os.path.join(d, 'w.weights.h5')\nm.save_weights(p)\nm.load_weights(os.path.join(e, 'w.weights.h5'))\n"),
    ("m.save_weights('x.h5')\nshutil.copy('x.h5', d)\n",
     "m.save_weights('x.weights.h5')\nshutil.copy('x.weights.h5', d)\n"),
    ("m.save_weights(d + f'/w-{e}.hdf5')\n", "m.save_weights(d + f'/w-{e}.weights.h5')\n"),
    ("m.save_weights('w-%d.ckpt' % e)\n", "m.save_weights('w-%d.weights.h5' % e)\n"),
    ("keras.callbacks.ModelCheckpoint('c-{epoch}')\n", "keras.callbacks.ModelCheckpoint('c-{epoch}.keras')\n"),
    ("keras.callbacks.ModelCheckpoint(filepath='c.h5', save_weights_only=True)\n",
     "keras.callbacks.ModelCheckpoint(filepath='c.weights.h5', save_weights_only=True)\n"),
    ("model.save('folder', save_format='tf')\nkeras.models.load_model('folder')\n",
     "model.save('folder.keras')\nkeras.models.load_model('folder.keras')\n"),
    ("keras.models.save_model(m, 'folder', save_format='h5')\n", "keras.models.save_model(m, 'folder.h5')\n"),
    ("# Pin.\nc = tf.ConfigProto()\nc.gpu_options.allow_growth = True\n"
     "c.gpu_options.visible_device_list = str(hvd.local_rank())\nkeras.backend.set_session(tf.Session(config=c))\n",
     "# Pin.\n" + PIN),
    ("c = tf.compat.v1.ConfigProto()\nc.gpu_options.visible_device_list = str(hvd.local_rank())\n"
     "c.gpu_options.allow_growth = True\ntf.compat.v1.enable_eager_execution(config=c)\n", PIN),
])
def test_words_of_keras_2_and_tensorflow_1(before, after):
    text = HEAD + before
    assert moved(text).endswith(HEAD.replace("import keras\n", "").replace("horovod", "hvdtrain") + after)
    told = migrate(of_text(text), MigrateOptions()).findings
    assert not [f for f in told if f.kind == "by hand"]
    assert before == after or [f for f in told if "diff does" in f.do]


@pytest.mark.parametrize("line, named", [
    ("f(optimizer.variables())", "a list in Keras 3"), ("model.fit_generator(g, 9, 2, 1, c, v, 3, w)", "fit_generator"),
    ("c = tf.ConfigProto()\nc.intra_op_parallelism_threads = 1\nkeras.backend.set_session(tf.Session(config=c))",
     "TensorFlow 1"),
    ("c = tf.ConfigProto()\nif gpu:\n    c.gpu_options.allow_growth = True\ns = tf.Session(config=c)", "TensorFlow 1"),
])
def test_words_that_are_not_sure_are_left_with_what_to_do(line, named):
    found = migrate(of_text(HEAD + line + "\n"), MigrateOptions())
    assert found.after.decode() == HEAD.replace("horovod", "hvdtrain") + line + "\n"
    assert [f for f in found.findings if f.kind == "by hand" and named in f.what]


@pytest.mark.parametrize("line, told", [
    ("model.fit_generator(g, steps_per_epoch=9)", True), ("model.fit_generator(g, validation_steps=9)", True),
    ("model.fit(images.flow(x, y), steps_per_epoch=9)", True), ("model.fit(d, steps_per_epoch=9)", False),
    ("model.fit_generator(g, 9, 2)", True), ("model.fit_generator(g, None, 2)", False)])
def test_steps_of_a_generator_that_ends_are_told(line, told):
    found = [f for f in migrate(of_text(HEAD + line + "\n"), MigrateOptions()).findings
             if "fit of a generator gets" in f.what]
    assert [f.kind for f in found] == (["by hand"] if told else [])


def test_a_script_whose_import_was_changed_by_hand_gets_the_rest():
    text = "import tensorflow as tf\nimport hvdtrain.tensorflow as hvd\n"
    text += "opt = tf.optimizers.Adam(lr=1)\nf(opt.variables())\n"
    after = migrate(of_text(text), MigrateOptions()).after.decode()
    assert after.endswith("opt = tf.optimizers.Adam(learning_rate=1)\nf(opt.variables)\n")


def test_what_iterations_counts_is_told_where_there_are_several_passes():
    def told(passes: str) -> list[tuple[int, str]]:
        text = HEAD + f"opt = hvd.DistributedOptimizer(o, backward_passes_per_step={passes})\n"
        return [(f.line, f.do) for f in migrate(of_text(text), MigrateOptions()).findings if "iterations" in f.what]

    assert told("1") == [] and told("n")[0][0] == 4 and "schedules, whose length stays" in told("n")[0][1]


def test_the_silent_divergence_is_told():
    text = ("import horovod.tensorflow.keras as hvd\nopt = hvd.DistributedOptimizer(o)\nmodel.compile(opt, 'mse')\n"
            "model.fit(x, y)\n")
    found = migrate(of_text(text), MigrateOptions())
    assert [(f.line, f.kind) for f in found.findings if "does nothing under Keras 3" in f.what] == [(2, "unsafe")]


def test_the_names_are_those_that_hvdtrain_has():
    import hvdtrain.keras
    import hvdtrain.tensorflow

    for module, some in ((hvdtrain.keras, "DistributedOptimizer PartialDistributedOptimizer callbacks load_model"),
                         (hvdtrain.tensorflow, "DistributedGradientTape broadcast_variables join alltoall")):
        assert set(some.split()) <= set(module.__all__)
