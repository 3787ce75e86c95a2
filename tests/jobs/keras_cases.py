"""Keras models that a test trains in a process of its own, with the backend that KERAS_BACKEND names.

``python keras_cases.py OUT CASE...``: each case is a function of this file and writes OUT/CASE.json, on rank 0. The
facts are compared in the test, also with those of other processes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import keras
import numpy as np

from hvdtrain import Config, Trainer
from hvdtrain.config import CheckpointConfig, Named
from hvdtrain.core.errors import UserError

OUT = Path(sys.argv[1])
RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 8, 8)).astype("float32")
Y = X[:, :2, :2].reshape(50, 4).argmax(1)
W = RNG.random(50).astype("float32")
rank = 0
CE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weighted(model):
    """Return the same weights in every process and on every backend."""
    rng = np.random.default_rng(1)
    shapes = [(v.path, tuple(v.shape)) for v in model.weights]
    drawn = [rng.standard_normal(s).astype("float32") / 4 for _, s in shapes]
    model.set_weights([np.abs(d) + 0.5 if "variance" in path else d for (path, _), d in zip(shapes, drawn)])
    return model


def perceptron(*extra):
    layers = [keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(9, activation="tanh"), *extra]
    return weighted(keras.Sequential([*layers, keras.layers.Dense(4)]))


def cnn(norm="group"):
    from tf_models.cnn import build

    return weighted(build(in_shape=(8, 8), channels=(4,), classes=4, norm=norm))


def train(model, case, data=((X, Y), (X, Y)), more=None, **settings):
    """(trainer, facts): the curve of losses, metrics, weights, and whether all ranks hold the same bits."""
    settings = {"global_batch": 10, "max_steps": 20, "log_every": 1, "progress": "off", "out": str(OUT / "runs" / case),
                "checkpoint": CheckpointConfig(at_end=False), **settings}
    trainer = Trainer(Config(**settings))
    result = trainer.fit(model, data, **(more or {}))
    bits = hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())).hexdigest()
    alike = len(set(trainer.run.control.gather(bits))) == 1
    global rank
    rank = trainer.run.control.rank
    log = (Path(settings["out"]) / "log.jsonl").read_text().splitlines() if rank == 0 else []
    curve = [entry["loss"] for entry in map(json.loads, log) if entry["event"] == "step"]
    return trainer, {"curve": curve, "metrics": result.metrics, "alike": alike, "steps": result.steps,
                     "weights": [w.tolist() for w in model.get_weights()]}


# --- the same on any number of ranks, and on either backend ------------------------------------------------------

def momentum():
    model = cnn()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CE, metrics=["accuracy"])
    return train(model, "momentum")[1]


def adamw():
    """Return a schedule of Keras', accumulation, sample weights, a metric with a state of its own, clipping."""
    model = perceptron()
    rate = keras.optimizers.schedules.CosineDecay(0.05, 30)
    model.compile(keras.optimizers.AdamW(rate), CE, metrics=["accuracy"],
                  weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="xe", from_logits=True)])
    return train(model, "adamw", ((X, Y, W), (X, Y, W)), accumulate=2, clip_norm=0.5)[1]


def uncompiled():
    """config's own optimizer, on a model with a regulariser."""
    model = perceptron(keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.01)))
    return train(model, "uncompiled", optimizer=Named("sgd"), lr=0.1, metrics=["accuracy"])[1]


def callbacks():
    """Keras' own callbacks, class weights, and the metrics of training that callbacks see."""
    model = perceptron()
    model.compile(keras.optimizers.SGD(0.1), CE, metrics=["accuracy"])
    seen = []
    more = {"class_weight": {0: 3.0}, "callbacks": [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.2 / (epoch + 1)),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(sorted(logs.items())))]}
    return {**train(model, "callbacks", more=more)[1], "seen": seen}


# --- several ranks -----------------------------------------------------------------------------------------------

def uneven():
    """Unequal shares and int8 gradients: near the curve of `momentum`, and the ranks alike."""
    model = cnn()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), CE, metrics=["accuracy"])
    return train(model, "uneven", shares=[3.0, 1.0], compression="int8")[1]


def statistics():
    """BatchNorm's are each rank's own until they are averaged; seeded dropout draws another mask on each rank."""
    model = perceptron(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=4))
    model.compile("adam", CE)
    trainer, facts = train(model, "statistics")
    seeds = trainer.run.control.gather([int(n) for n in trainer.run.rank_state()["keras.seed.0"]])
    return {**facts, "seeds": seeds, "caveats": trainer.run.parts.caveats()}


class Counter(keras.layers.Layer):
    """Counts the samples that it has seen in training, and keeps the sum of the last ones."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        self.last = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="last")

    def call(self, x, training=None):
        if training:
            self.count.assign(self.count + keras.ops.cast(keras.ops.shape(x)[0], "int32"))
            self.last.assign(keras.ops.sum(x, 0))
        return x


class Counting(keras.Sequential):
    def buffer_reduction(self):
        return {next(v.path for v in self.weights if v.path.endswith("count")): "sum"}


def written():
    """Variables that layers write to: one is declared, the other is rank 0's."""
    model = Counting([keras.Input((8, 8)), keras.layers.Flatten(), Counter(), keras.layers.Dense(4),
                      keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.SGD(0.1), CE)
    trainer, facts = train(model, "written", shares=[3.0, 2.0])
    return {**facts, "count": int(model.layers[1].count), "notes": trainer.run.notes}


# --- one process, PyTorch ----------------------------------------------------------------------------------------

def resumed():
    """10 steps and 10 more in a new trainer, against 20."""
    def model():
        made = perceptron(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=4))
        made.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 7, 0.5)), CE)
        return made
    whole = train(model(), "whole")[1]
    train(model(), "half", max_steps=10, checkpoint=CheckpointConfig())
    trainer, rest = train(model(), "rest", resume=str(OUT / "runs" / "half"))
    return {"whole": whole, "rest": rest, "names": [p.name for p in trainer.run.parts.params.specs],
            "state": sorted(trainer.run.parts.state.state()[0]["optimizer"]),
            "buffers": [name for name, _ in trainer.run.parts.model.named_buffers()]}


def callbacks_resumed():
    """10 steps, ended inside an epoch, and the rest of 3 epochs in a new trainer, with callbacks that hold state."""
    def more():
        stop = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)  # epoch 0
        return {"callbacks": [stop, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
                              keras.callbacks.ReduceLROnPlateau("accuracy", factor=0.5, patience=0, min_delta=9.0)]}

    def model():
        made = perceptron()
        made.compile(keras.optimizers.SGD(0.1), CE, metrics=["accuracy"])
        return made
    settings = {"epochs": 3, "checkpoint": CheckpointConfig(at_end=True), "ema": 0.5}
    trainer, whole = train(model(), "undisturbed", more=more(), **{**settings, "max_steps": 0})
    train(model(), "cut", more=more(), **{**settings, "max_steps": 8})
    own = model()
    _, rest = train(own, "cut", more=more(), **{**settings, "max_steps": 0, "resume": "auto"})
    loss = float(keras.ops.mean(CE(Y, own(X, training=False))))
    return {"whole": whole, "rest": rest, "loss": loss, "at": trainer.run.state.findings.metrics_at}


def exported():
    """Check that Keras reads the export with equal outputs, and that plain Keras trains the same weights."""
    model = perceptron()
    model.compile(keras.optimizers.SGD(0.1), CE)
    trainer, facts = train(model, "exported", data=(X, Y), max_steps=3)
    where = OUT / "runs" / "exported" / "model"
    again = keras.models.load_model(where / "model.keras")
    return {"files": sorted(p.name for p in where.iterdir()), **facts,
            "outputs": [keras.ops.convert_to_numpy(m(X, training=False)).tolist() for m in (model, again)]}


def frozen():
    model = perceptron(keras.layers.BatchNormalization())
    model.layers[1].trainable = False
    before = model.get_weights()
    model.compile("sgd", CE)
    trainer, facts = train(model, "frozen", max_steps=3)
    moved = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
    return {"moved": moved, "params": [p.name for p in trainer.run.parts.params.specs]}


def lora():
    """Train Keras' adapters: the kernel under them stays as it is, and has no state in the optimizer."""
    model = perceptron()
    model.layers[1].enable_lora(3)
    weighted(model)  # set_random_seed of Keras imports TensorFlow
    before = keras.ops.convert_to_numpy(model.layers[1]._kernel)
    trainer, facts = train(model, "lora", max_steps=3)
    names = [spec.name for spec in trainer.run.parts.params.specs]
    return {**facts, "kept": bool((keras.ops.convert_to_numpy(model.layers[1]._kernel) == before).all()),
            "trained": [name.rpartition("/")[2] for name in names]}


def rates():
    """Return the owner of a compiled optimizer may set its rate; warm-up and scaling are laid over it."""
    from hvdtrain.config import ScheduleConfig

    model = perceptron()
    model.compile(keras.optimizers.SGD(0.1), CE)
    trainer, _ = train(model, "rates", max_steps=2, schedule=ScheduleConfig(warmup_steps=4, linear_scaling_base=5))
    warming = trainer.run.parts.optimizer.learning_rate()
    model.optimizer.learning_rate = 0.01
    warmed = trainer.run.parts.optimizer.learning_rate()
    return {"rates": [warming, warmed], "own": float(model.optimizer.learning_rate)}


def gpt():
    """Return a model file's own task, in Keras' words, and bfloat16 by autocast."""
    from tf_models import gpt as file

    model = file.build(vocab=16, context=8, width=8, depth=1, heads=2)
    tokens = RNG.integers(0, 16, (40, 9))
    _, facts = train(model, "gpt", (tokens[:, :-1], tokens[:, 1:]), max_steps=3)
    model = perceptron()
    _, narrow = train(model, "bf16", precision="bf16", max_steps=3)
    return {"gpt": facts["curve"], "bf16": narrow["curve"]}


def seeded():
    """Weights from the seed alone, whatever the process has drawn before."""
    def drawn(seed, n):
        trainer = Trainer(Config(model="tf_models.mlp:build", model_args={"hidden": [5]}, seed=seed, max_steps=1,
                                 progress="off", out=str(OUT / "runs" / f"seed{n}"),
                                 checkpoint=CheckpointConfig(at_end=False)))
        trainer.fit(data=(X, Y))
        return [w.tolist() for w in trainer.run.spec.model.get_weights()]
    return [drawn(5, 0), drawn(5, 1), drawn(6, 2)]


class Lazy(keras.Model):
    """Named inputs whose shapes nobody has said, BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.chain = [keras.layers.Dense(9), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3),
                      keras.layers.Dense(4)]

    def call(self, x, training=False):
        h = x["left"] + x["right"]
        for layer in self.chain:
            h = layer(h, training=training) if isinstance(layer, keras.layers.Dropout) else layer(h)
        return h


def lazy():
    """Return a model that is built from its data; the same bits without the try of a first sample."""
    from hvdtrain.engine import first_sample

    x = {"left": X[:, 0], "right": X[:, 1]}
    found, check = [], first_sample.check
    for case, tried in {"lazy": check, "untried": lambda run, backend: None}.items():
        first_sample.check = tried
        random.seed(2)  # where layers take their seeds from
        model = Lazy()
        model.compile("sgd", CE, metrics=["accuracy"])
        facts = train(model, case, ((x, Y), (x, Y)), max_steps=6)[1]
        found.append([facts["curve"], facts["metrics"], facts["weights"]])
    first_sample.check = check
    return {"with": found[0], "without": found[1], "shapes": [list(v.shape) for v in model.weights]}


def outputs():
    """Two inputs by name, two outputs with a loss, its weight and a metric each."""
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    both = keras.layers.Concatenate()([left, right])
    heads = {"kind": keras.layers.Dense(4, name="kind")(both), "size": keras.layers.Dense(1, name="size")(both)}
    model = weighted(keras.Model({"left": left, "right": right}, heads))
    model.compile(keras.optimizers.SGD(0.05), {"kind": CE, "size": "mse"}, loss_weights={"kind": 1.0, "size": 0.5},
                  metrics={"kind": ["accuracy"], "size": ["mae"]})
    data = ({"left": X[:, 0], "right": X[:, 1]}, {"kind": Y, "size": X.mean((1, 2), keepdims=True)[:, 0]})
    return train(model, "outputs", (data, data), metrics=[])[1]


def mistakes():
    """Return what is said of settings and models that cannot be; nothing is trained."""
    def said(model, optimizer="sgd", **settings):
        model.compile(optimizer, CE)
        try:
            train(model, "mistakes", max_steps=1, **settings)
        except UserError as error:
            return str(error)
    from hvdtrain.config import ScheduleConfig

    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    elsewhere = perceptron()
    elsewhere.compile("sgd", CE)
    try:
        from hvdtrain.backends.torch.keras.create import KerasModule

        KerasModule(elsewhere).to("meta")
    except UserError as error:
        device = str(error)
    return {"batchnorm": said(perceptron(keras.layers.BatchNormalization()), sync_batchnorm=True),
            "scaled": said(perceptron(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
            "accumulating": said(perceptron(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
            "schedules": said(perceptron(), keras.optimizers.SGD(decay), schedule=ScheduleConfig(name="ConstantLR")),
            "function": said(perceptron(), keras.optimizers.SGD(lambda: 0.1)),
            "misfit": said(keras.Sequential([keras.Input((64,)), keras.layers.Dense(4)])),
            "width": said(keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(3)])),
            "optimizer": said(perceptron(), "adam", resume=str(OUT / "runs" / "half")),
            "loss": said(perceptron(), loss=Named("no_such")), "device": device}


def modules():
    return {"imported": sorted(m for m in ("tensorflow", "torch", "keras", "jax") if m in sys.modules)}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        facts = globals()[name]()
        if rank == 0:
            (OUT / f"{name}.json").write_text(json.dumps(facts))
