"""Scripts of tf.distribute with fit: the strategy, its scope and TF_CONFIG go; what cannot go whole, stays whole."""

import pytest

from hvdtrain.commands.migrate.finding import MigrateOptions
from hvdtrain.commands.migrate.plan import Migration, migrate, of_text

PIN = ('gpus = tf.config.list_physical_devices("GPU")\n'
       'tf.config.set_visible_devices(gpus[hvd.local_rank():][:1] or gpus[:1], "GPU")\n')


def moved(text: str, **wish) -> Migration:
    found = migrate(of_text(text), MigrateOptions(**wish))
    assert found.kind == "tf_distribute"
    again = migrate(of_text(found.after.decode()), MigrateOptions(**wish))
    assert again.after == found.after
    return found


BEFORE = '''"""A script."""
import json
import os

import tensorflow as tf

# Two hosts.
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}})

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # all GPUs
BATCH = 16 * strategy.num_replicas_in_sync

with strategy.scope():  # mirrored
    # The model.
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(10),
    ])
    model.compile(
        optimizer="adam",
        loss="mse",  # squared
    )
    # Made.

# Train.
model.fit(x, y, batch_size=BATCH, epochs=3)
model.save("m.keras")  # keep
'''
AFTER = '''"""A script."""

import tensorflow as tf
import hvdtrain.keras as hvd

hvd.init()  # all GPUs
''' + PIN + '''BATCH = 16 * hvd.size()

# mirrored
# The model.
model = tf.keras.Sequential([
    tf.keras.layers.Dense(10),
])
model.compile(
    optimizer=hvd.DistributedOptimizer("adam"),
    loss="mse",  # squared
)
# Made.

# Train.
model.fit(hvd.shard(x, y, global_batch=BATCH), epochs=3,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                     hvd.callbacks.MetricAverageCallback()],
          verbose="auto" if hvd.rank() == 0 else 0)
if hvd.rank() == 0:
    model.save("m.keras")  # keep
'''


def test_a_whole_script():
    assert moved(BEFORE).after.decode() == AFTER


def test_line_ends_and_tabs_are_kept():
    crlf, tabs = BEFORE.replace("\n", "\r\n"), BEFORE.replace("    ", "\t")
    assert moved(crlf).after.decode() == AFTER.replace("\n", "\r\n")
    after = moved(tabs).after.decode()
    assert "\n\ttf.keras.layers.Dense(10),\n" in after and "\n\tmodel.save(" in after


def dataset(pipeline: str, more: str = "") -> str:
    return ("import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\n"
            f"train = {pipeline}\nwith s.scope():\n    m = tf.keras.Sequential()\n    m.compile('sgd', 'mse')\n"
            f"m.fit(train, epochs=2)\n{more}")


@pytest.mark.parametrize("pipeline, shard", [
    ("tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9).batch(64).prefetch(tf.data.AUTOTUNE)",
     "hvd.shard(x, y, global_batch=64)"),
    ("tf.data.Dataset.from_tensor_slices((x, y, w)).cache().batch(8 * s.num_replicas_in_sync)",
     "hvd.shard(x, y, w, global_batch=8 * hvd.size(), shuffle=False)"),
    ("tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9, seed=5).batch(4, drop_remainder=True)",
     "hvd.shard(x, y, global_batch=4, seed=5)"),
])
def test_a_dataset_of_arrays_becomes_a_shard(pipeline, shard):
    found = moved(dataset(pipeline))
    assert f"\ntrain = {shard}\n" in found.after.decode() and "m.fit(train, epochs=2,\n" in found.after.decode()
    assert ("drop_remainder" in pipeline) == any("drop_remainder=True is removed" in f.what for f in found.findings)


@pytest.mark.parametrize("pipeline, more", [
    ("tf.data.Dataset.from_tensor_slices((x, y)).map(f).batch(64)", ""),
    ("tf.data.Dataset.from_tensor_slices((x, y)).batch(64).shuffle(9, 0)", ""),
    ("tf.data.Dataset.from_tensor_slices((x, y)).shuffle(9, 0, reshuffle_each_iteration=False).batch(64)", ""),
    ("tf.data.Dataset.from_tensor_slices(x).batch(64)", ""),
    ("tf.data.Dataset.from_tensor_slices((x, y)).batch(64)", "m.evaluate(train)\n"),
])
def test_another_dataset_goes_to_the_trainer_as_it_is(pipeline, more):
    found = moved(dataset(pipeline, more))
    after = found.after.decode()
    assert f"\ntrain = {pipeline}\n" in after
    assert "Config(epochs=2, global_batch=64))\ntrainer.fit(m, train)\n" in after
    assert [f.kind for f in found.findings if "tf.data" in f.what + f.do or "used for more" in f.what] == ["note"]
    stays = moved(dataset(pipeline, more), target="hvdtrain.keras")
    assert stays.after.decode() == dataset(pipeline, more) and not stays.snippet


def test_a_dataset_that_a_function_makes_is_looked_up_there():
    text = '''import tensorflow as tf


def load():
    size = 32
    a, b = tf.data.Dataset.from_tensor_slices((x, y)), tf.data.Dataset.from_tensor_slices((v, w))
    return a.shuffle(99).batch(size), b.batch(size)


strategy = tf.distribute.MirroredStrategy()
print(strategy.num_replicas_in_sync)
with strategy.scope():
    m = build()
    m.compile("sgd", "mse")
    train, test = load()
    m.fit(train, epochs=2, validation_data=test)
'''
    after = moved(text).after.decode()
    assert "a.shuffle(99, seed=0).batch(size), b.batch(size)" in after
    assert "print(launch_facts(os.environ).size)" in after
    assert '''train, test = load()
trainer = Trainer(Config(epochs=2, global_batch=32))
trainer.fit(m, (train, test))
''' in after


@pytest.mark.parametrize("pipeline, named", [
    ("tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat()", "has no end"), ("load()", "batch size of")])
def test_a_dataset_that_nothing_is_known_of_leaves_the_script_alone(pipeline, named):
    found = moved(dataset(pipeline))
    assert found.after.decode() == dataset(pipeline) and "--to" not in "".join(f.do for f in found.findings)
    assert [named in f.what for f in found.findings if f.kind == "by hand"] == [True]
    assert "trainer.fit(m, train)" in found.snippet


def test_several_strategies_leave_the_script_alone_with_a_trainer_for_each_fit():
    text = dataset("tf.data.Dataset.from_tensor_slices((x, y)).batch(8)")
    text += text.partition("\n")[2].replace("epochs=2", "epochs=5, callbacks=[log]").replace("train", "more")
    found = moved(text)
    assert found.after.decode() == text and "not created once" in found.findings[0].what
    assert "Config(epochs=2, global_batch=8))" in found.snippet and "trainer.fit(m, more, callbacks=[log])" in (
        found.snippet)


@pytest.mark.parametrize("line, named", [
    ("strategy.run(step, args=(x,))", "strategy.run"), ("d = strategy.experimental_distribute_dataset(t)",
                                                        "distribute"),
    ("r = strategy.cluster_resolver.task_id", "task_id"), ("train(strategy)", "train(strategy)"),
    ("strategy = tf.distribute.get_strategy()", "not created once"),
    ("t = tf.distribute.TPUStrategy(r)", "TPUStrategy"),
    ("w = json.loads(os.environ['TF_CONFIG'])['task']", "TF_CONFIG"), ("model.fit(x, y, steps_per_epoch=9)",
                                                                       "steps_per"),
    ("model.fit(x, y, **more)", "**kwargs"), ("a = 1; model.save('m.keras')", "shares its line"),
    ("b = keras.callbacks.BackupAndRestore('d')", "BackupAndRestore"), ("hvd = 3", "name hvd"),
])
def test_what_has_no_counterpart_leaves_the_script_alone(line, named):
    text = BEFORE + line + "\n"
    found = moved(text)
    assert found.after.decode() == text
    told = [f for f in found.findings if f.kind == "by hand"]
    assert told and named in told[0].what


def test_the_number_of_workers_is_the_size():
    text = BEFORE.replace("BATCH = 16 * strategy.num_replicas_in_sync",
                          'config = json.loads(os.environ["TF_CONFIG"])\nBATCH = 16 * '
                          'len(config["cluster"]["worker"])')
    after = moved(text).after.decode()
    assert "BATCH = 16 * hvd.size()\n" in after and "config" not in after.replace("tf.config", "")


def test_callbacks_that_write_files_run_on_rank_0():
    text = BEFORE.replace("epochs=3)", '''epochs=3,
          callbacks=[
              tf.keras.callbacks.ModelCheckpoint("a.keras"),  # best
              tf.keras.callbacks.EarlyStopping(),
          ], verbose=2)''')
    assert '''
          callbacks=[
              hvd.callbacks.BroadcastGlobalVariablesCallback(0),
              hvd.callbacks.MetricAverageCallback(),
              *([tf.keras.callbacks.ModelCheckpoint("a.keras")] if hvd.rank() == 0 else []),  # best
              tf.keras.callbacks.EarlyStopping(),
          ], verbose=2 if hvd.rank() == 0 else 0)
''' in moved(text).after.decode()


def test_to_the_trainer():
    text = '''import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()

with strategy.scope():
    model = tf.keras.Sequential()
    model.compile("adam", "mse")
train = load().map(f).batch(64)
# go
model.fit(train, epochs=3, validation_data=test)
model.save("m.keras")
'''
    assert moved(text, target="trainer").after.decode() == '''import tensorflow as tf
from hvdtrain import Config, Trainer

model = tf.keras.Sequential()
model.compile("adam", "mse")
train = load().map(f).batch(64)
# go
trainer = Trainer(Config(epochs=3, global_batch=64))
trainer.fit(model, (train, test))
if trainer.run.control.rank == 0:
    model.save("m.keras")
'''
