"""Plain Keras scripts, to hvdtrain.keras and to Trainer."""

import pytest

from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import Migration, migrate, of_text
from hvdtrain.core.errors import UserError

PIN = ('gpus = tf.config.list_physical_devices("GPU")\n'
       '    tf.config.set_visible_devices(gpus[hvd.local_rank():][:1] or gpus[:1], "GPU")\n')


def moved(text: str, **wish) -> Migration:
    found = migrate(of_text(text), MigrateOptions(**wish))
    assert found.kind == "keras_fit"
    again = migrate(of_text(found.after.decode()), MigrateOptions(**wish))
    assert again.after == found.after
    return found


def test_a_script_of_functions():
    before = '''import keras
from keras import layers


def build():
    net = keras.Sequential([layers.Dense(4)])
    net.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=True)
    return net


def main():
    model = build()
    history = model.fit(x, y, 64, 3, sample_weight=w, class_weight=c, validation_data=(a, b))
    print(history.history)


if __name__ == "__main__":
    main()
'''
    assert moved(before).after.decode() == '''import keras
from keras import layers
import hvdtrain.keras as hvd
import tensorflow as tf


def build():
    net = keras.Sequential([layers.Dense(4)])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
    return net


def main():
    model = build()
    history = model.fit(hvd.shard(x, y, w, global_batch=64, class_weight=c), epochs=3, validation_data=(a, b),
                        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                                   hvd.callbacks.MetricAverageCallback()],
                        verbose="auto" if hvd.rank() == 0 else 0)
    print(history.history)


if __name__ == "__main__":
    hvd.init()
    ''' + PIN + '''    main()
'''


STEP = '''{}

class Net(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = {}
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, y_pred)


model = Net()
model.compile("sgd", "mse")
model.fit(x, y)
'''


@pytest.mark.parametrize("head, name", [
    ("import keras\nimport tensorflow as tf", "keras"),
    ("from tensorflow import keras\nimport tensorflow as tf", "keras"),
    ("import tensorflow as tf\nkeras = tf.keras", "tf.keras"), ("import tensorflow as tf\nimport keras as k", "k")])
def test_a_train_step_gets_the_weights_of_a_shard(head, name):
    other = "\n\nclass Agent:\n    def train_step(self, batch):\n        state, action = batch\n"
    found = moved(STEP.format(head, "self.compute_loss(y=y, y_pred=y_pred)") + other)
    after = found.after.decode()
    assert other in after
    assert f"        x, y, sample_weight = {name}.utils.unpack_x_y_sample_weight(data)\n" in after
    assert "self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)\n" in after
    assert "return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)\n" in after
    assert [f.kind for f in found.findings if "train_step takes the sample weights" in f.what] == ["changed"]


@pytest.mark.parametrize("old, new, target, named", [
    ("", "", "trainer", "has train_step"),
    ("self.compute_loss(y=y, y_pred=y_pred)", "f(y, y_pred)", "auto", "takes no sample weights"),
    ("x, y = data", "x, y = data[0], data[1]", "auto", "takes no sample weights"),
    ("x, y = data", "x, y, *_ = data", "auto", "takes no sample weights"),
    ('compile("sgd", ', 'compile(d_optimizer="sgd", loss=', "auto", "gets d_optimizer")])
def test_steps_of_ones_own_that_cannot_be_moved(old, new, target, named):
    text = STEP.format("import keras\nimport tensorflow as tf", "self.compute_loss(y=y, y_pred=y_pred)")
    text = text.replace(old, new).replace("class Net(keras.Model):\n", "class Net(keras.Model):\n    def compile(self, "
                                          "d_optimizer, *args):\n        pass\n\n")
    found = moved(text, target=target)
    assert found.after.decode() == text and named in next(f.what for f in found.findings if f.kind == "by hand")


PLAIN = '''import keras

model = keras.Sequential()
model.compile(loss="mse")
{}
'''


@pytest.mark.parametrize("fit, part", [
    ("model.fit(x, y)", "model.fit(hvd.shard(x, y, global_batch=32),\n          callbacks=["),
    ("model.fit(x=x, y=y, callbacks=None)", "model.fit(hvd.shard(x, y, global_batch=32),\n          callbacks=["),
    ("model.fit(x, y, callbacks=mine, verbose=0)", "*mine], verbose=0)"),
    ("model.fit(x, y, callbacks=a + b)", "*(a + b)]"),
    ("model.fit(x, y, verbose=1 if v else 2)", "verbose=(1 if v else 2) if hvd.rank() == 0 else 0,"),
    ("log = keras.callbacks.CSVLogger('l')\nmodel.fit(x, y, callbacks=[log])",
     "*([log] if hvd.rank() == 0 else [])"),
    ("cb = []\ncb.append(keras.callbacks.TensorBoard('l'))\nmodel.fit(x, y, callbacks=cb)",
     "if hvd.rank() == 0:\n    cb.append(keras.callbacks.TensorBoard('l'))\n"),
])
def test_arguments_of_fit(fit, part):
    after = moved(PLAIN.format(fit)).after.decode()
    assert part in after and 'model.compile(optimizer=hvd.DistributedOptimizer("rmsprop"), loss="mse")' in after


@pytest.mark.parametrize("fit, named", [
    ("model.fit(x, y, validation_split=0.1)", "validation_split"), ("model.fit([a, b], y)", "several inputs"),
    ("model.fit(data())", "batch size"),
    ("f(keras.callbacks.CSVLogger('l'))\nmodel.fit(x, y)", "write from every rank"),
    ("model.fit(x, y)\np = model.save('m.keras')", "result of"),
])
def test_what_is_left_alone(fit, named):
    text = PLAIN.format(fit)
    found = moved(text)
    assert found.after.decode() == text and named in next(f.what for f in found.findings if f.kind == "by hand")


def test_an_optimizer_that_is_used_elsewhere_is_wrapped_where_it_is_made():
    text = ("import keras\nopt = keras.optimizers.SGD(0.1)\nmodel = build()\nmodel.compile(opt, 'mse')\n"
            "model.fit(x, y)\nopt.learning_rate = 0.01\n")
    after = moved(text).after.decode()
    assert "\nopt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))\n" in after and "compile(opt, 'mse')" in after
    twice = text.replace("model = build()", "opt = opt or None\nmodel = build()")
    assert moved(twice).after.decode() == twice


def test_comments_among_the_arguments_stay():
    fit = """model.fit(
    x, y,  # digits
    batch_size=64,  # of all
    epochs=3,  # few
)"""
    assert moved(PLAIN.format(fit)).after.decode().endswith("""
# digits
# of all
model.fit(
    hvd.shard(x, y, global_batch=64),
    epochs=3,  # few
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
               hvd.callbacks.MetricAverageCallback()],
    verbose="auto" if hvd.rank() == 0 else 0,
)
""")
    assert """
# digits
# of all
# few
trainer = Trainer(Config(epochs=3, global_batch=64))
trainer.fit(model, (x, y))
""" in moved(PLAIN.format(fit), target="trainer").after.decode()


def test_to_the_trainer():
    before = PLAIN.format('''# go
h = model.fit(x, y, batch_size=64, epochs=3, shuffle=False, validation_data=(a, b), class_weight=c, callbacks=[k],
              verbose=0)
print(h.history["loss"])
model.save("m.keras")''')
    assert moved(before, target="trainer").after.decode() == '''import keras
from hvdtrain import Config, Trainer
from hvdtrain.config import DataConfig

model = keras.Sequential()
model.compile(loss="mse")
# go
trainer = Trainer(Config(epochs=3, global_batch=64, data=DataConfig(shuffle=False), progress="off"))
h = trainer.fit(model, ((x, y), (a, b)), callbacks=[k], class_weight=c)
print(h.history["loss"])
if trainer.run.control.rank == 0:
    model.save("m.keras")
'''


def test_names_that_are_taken_are_not_taken_again():
    script = PLAIN.format("Trainer = trainer = DataConfig = 1\nmodel.fit(x, y, shuffle=False)")
    after = moved(script, target="trainer").after
    assert """from hvdtrain import Config, Trainer as HvdTrainer
from hvdtrain.config import DataConfig as HvdDataConfig
""" in after.decode() and after.decode().endswith("""
hvd_trainer = HvdTrainer(Config(epochs=1, global_batch=32, data=HvdDataConfig(shuffle=False)))
hvd_trainer.fit(model, (x, y))
""")


def test_words_of_keras_2_go_with_it():
    after = moved("import keras\nmodel = keras.Sequential()\nmodel.compile(keras.optimizers.SGD(lr=0.1), 'mse',\n"
                  "              experimental_run_tf_function=False)\nmodel.fit(x, y, workers=4)\n").after.decode()
    assert "keras.optimizers.SGD(learning_rate=0.1)" in after and "workers" not in after and "experimental" not in after


@pytest.mark.parametrize("fit, named", [
    ("h = model.fit(x, y)\nplot(h)", "fit returns"), ("model.fit(x, y)\nmodel.fit(x, y)", "called 2 times"),
    ("model.fit(x, y, initial_epoch=2)", "initial_epoch"), ("model.fit(load())", "batch size"),
    ("model.save('m.keras')\nmodel.fit(x, y)", "directly after fit"),
])
def test_what_the_trainer_cannot_take_is_left_alone(fit, named):
    text = PLAIN.format(fit)
    found = moved(text, target="trainer")
    assert found.after.decode() == text and named in found.findings[0].what


def test_a_tape_is_told_and_left_alone():
    text = "import tensorflow as tf\nwith tf.GradientTape() as tape:\n    loss = f()\n"
    found = moved(text)
    assert found.after.decode() == text and found.findings[0].line == 2
    assert "DistributedGradientTape" in found.findings[0].do


@pytest.mark.parametrize("text", [
    "from sklearn.svm import SVC\nclf = SVC()\nclf.fit(x, y)\n", "import re\nre.compile('a')\n",
    "import keras\nclf.fit(x, y)\n", "import torch\ntorch.compile(model)\nmodel.fit(x)\n", ""])
def test_what_is_no_training_of_keras_is_not_recognised(text):
    assert migrate(of_text(text), MigrateOptions()).kind == ""


def test_wishes_that_cannot_be():
    with pytest.raises(UserError, match="--to is 'keras'"):
        migrate(of_text(""), MigrateOptions("keras"))
    with pytest.raises(UserError, match="--ranks is 0"):
        migrate(of_text(""), MigrateOptions("auto", 0))
    with pytest.raises(UserError, match="Horovod's Keras"):
        migrate(of_text("import horovod.keras as hvd\n"), MigrateOptions("trainer"))
