"""The step of a Keras model on PyTorch passes the cases of every backend's step, and resumes a kept checkpoint.

Keras' backend is fixed when it is imported, and this process may have it on TensorFlow: a child runs this file, and
`test_combinations` for the same backend.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

HERE = os.environ.get("KERAS_BACKEND") == "torch"

if HERE:
    import best_weights
    import kept_runs
    import keras
    import numpy as np
    import torch
    from keras_kit import KerasKit
    from one_step import OneStep
    from small_runs import apart, config, fitted, lockstep, samples, solo, weights
    from step_cases import *  # noqa: F401,F403
    from torch_tools import TorchKit, one_thread  # noqa: F401
    from unused_keras import chain

    from hvdtrain import Trainer
    from hvdtrain.backends.model_spec import spec_of
    from hvdtrain.backends.torch.create import make_parts
    from hvdtrain.cluster.control import SoloControl
    from hvdtrain.comm.collectives.base import NullCollectives
    from hvdtrain.commands import evaluate, predict
    from hvdtrain.config import CheckpointConfig, Config, DataConfig, DataParallelConfig, Named
    from hvdtrain.core.buckets import plan_buckets
    from hvdtrain.core.errors import UserError
    from hvdtrain.engine.callbacks.base import Callback

    class KerasOnTorch(KerasKit):
        """Optimizer and schedule that the configuration names are PyTorch's."""

        adam, epsilon, halving = TorchKit.adam, TorchKit.epsilon, TorchKit.halving
        lacks = {"pipelines": "a Keras model on PyTorch is not cut over ranks"}

    @pytest.fixture(name="kit")
    def keras_kit():
        return KerasOnTorch()

    @pytest.mark.parametrize("compiled", (False, True))
    def test_layers_are_frozen_with_their_statistics_and_unfrozen_at_an_epoch(compiled, tmp_path):
        """The key freeze: as if the user had frozen the layer in an epoch of a run, on any number of ranks."""
        def model(rank=0):
            keras.utils.set_random_seed(1)
            layers = keras.layers
            body = keras.Sequential([layers.Dense(8), layers.BatchNormalization()], name="body")
            made = keras.Sequential([keras.Input((12,)), body, layers.Dense(8, "tanh", name="middle"),
                                     layers.Dense(5)])
            if compiled:
                made.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(True))
            return made

        setting = config(epochs=4, global_batch=24, data=DataConfig(shuffle=False, prefetch=0), metrics=[], lr=0.05,
                         freeze={"body": 3, "middle": 2}, optimizer=Named("auto" if compiled else "Adam"),
                         checkpoint=CheckpointConfig(at_end=True))
        cut, frozen, whole = (replace(setting, out=str(tmp_path / name), **more) for name, more in (
            ("cut", {"max_steps": 5}), ("frozen", {"epochs": 3}), ("whole", {})))
        before = model().get_layer("body").get_weights()
        for run in lockstep(2, replace(frozen, out=str(tmp_path / "two")), model, samples(48), fitted):
            assert all(map(np.array_equal, run.spec.model.get_layer("body").get_weights(), before))
        one = solo(frozen, model(), samples(48))
        assert apart(weights(run), weights(fitted(one))) < 1e-5
        trained = fitted(solo(whole, model(), samples(48)))
        assert not any(map(np.array_equal, trained.spec.model.get_layer("body").get_weights()[1:], before[1:]))
        fitted(solo(cut, model(), samples(48)))
        again = replace(whole, resume=cut.out, out=str(tmp_path / "on"))
        assert apart(weights(fitted(solo(again, model(), samples(48)))), weights(trained)) < 1e-5

    @pytest.mark.parametrize("added, refused", [(keras.ops.sum, True), (keras.ops.mean, False)], ids=["sum", "mean"])
    def test_a_sum_over_the_batch_that_a_layer_adds_while_it_trains_is_refused(added, refused):
        class Adds(keras.layers.Layer):
            def call(self, x, training=False):
                self.add_loss(added(x) * float(bool(training)))
                return x

        layers = keras.layers
        model = keras.Sequential([keras.Input((12,)), layers.Dense(5), layers.BatchNormalization(),
                                  layers.Dropout(0.5), Adds()])
        with pytest.raises(UserError, match="add_loss.* not means") if refused else contextlib.nullcontext():
            solo(config(global_batch=10, accumulate=2, max_steps=1), model, samples(30))
        assert not any("call" in vars(layer) for layer in model._flatten_layers())

    def test_a_kept_checkpoint_goes_on_as_it_did(tmp_path):
        got, want = kept_runs.resumed("keras_torch", tmp_path / "run")
        assert apart(got, want) <= 1e-6

    @pytest.mark.parametrize("made, elementwise", [
        (lambda o: o.SGD(0.01, momentum=0.9, nesterov=True), True), (lambda o: o.Adam(0.01), True),
        (lambda o: o.AdamW(0.01, weight_decay=0.1), True), (lambda o: o.RMSprop(0.01), True),
        (lambda o: o.Adafactor(0.01), False), (lambda o: o.SGD(0.01, clipnorm=0.1), False)],
        ids=["sgd", "adam", "adamw", "rmsprop", "adafactor", "clipnorm"])
    def test_a_compiled_optimizer_updates_vectors_to_the_bits_of_tensors_where_it_says_so(made, elementwise):
        model = KerasOnTorch().model()
        model.compile(optimizer=made(keras.optimizers), loss="mse")
        parts, rng = OneStep("torch", model, Config()).parts, np.random.default_rng(1)
        (bucket,) = plan_buckets(parts.params.specs, 16.0)
        whole = parts.params.flat(bucket)
        vectors = [whole[:99].clone(), whole[99:].clone()]
        other = parts.params.optimizer(vectors)
        for _ in range(5):
            grad_N = torch.from_numpy(rng.standard_normal(bucket.n).astype(np.float32))
            parts.optimizer.step([grad_N], [bucket], 0.0, False)
            other.step([grad_N[:99].clone(), grad_N[99:].clone()], [], 0.0, False)
        assert parts.optimizer.elementwise == other.elementwise == elementwise
        assert torch.equal(torch.cat(vectors), parts.params.flat(bucket)) == elementwise
        assert not torch.equal(parts.params.flat(bucket), whole)

    def test_groups_and_an_optimizer_of_the_file_are_refused(monkeypatch):
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
        for part in ("parameter_groups", "optimizer"):
            asked = spec_of(model)
            object.__setattr__(asked, part, lambda *given: None)
            with pytest.raises(UserError, match=f"{part} in the file of a Keras model on PyTorch"):
                make_parts(asked, config(), SoloControl(), NullCollectives(0, 1), 1)

    def test_runs_are_evaluated_and_predicted_from_their_files(tmp_path):
        x, y = samples(12)
        np.savez(tmp_path / "data.npz", x=x, y=y, x_test=x, y_test=y)
        trainer = Trainer(config(
            model="tf_models.mlp:build", model_args={"in_features": 12, "hidden": [8], "classes": 5}, max_steps=2,
            global_batch=4, out=str(tmp_path / "run"), checkpoint=CheckpointConfig(),
            data=DataConfig(name=str(tmp_path / "data.npz"), prefetch=0, workers=0)))
        trainer.fit()
        expected, outputs = trainer.evaluate(), trainer.predict(x)
        for finished in (True, False):
            found, predicted = tmp_path / f"{finished}.json", tmp_path / f"{finished}.npz"
            evaluate.main([str(tmp_path / "run"), "--out", str(found)])
            predict.main([str(tmp_path / "run"), "--out", str(predicted)])
            assert json.loads(found.read_text())["metrics"] == pytest.approx(expected)
            assert np.allclose(np.load(predicted)["output"], outputs, atol=1e-6)
            (tmp_path / "run" / "completed.json").unlink(missing_ok=True)  # as of a run that was killed

    def test_recomputed_blocks_are_refused(tmp_path):
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
        with pytest.raises(UserError, match="remat is 'every:1' with a Keras model on PyTorch"):
            lockstep(1, config(remat="every:1", out=str(tmp_path)), lambda rank: model, samples(8), fitted)

    def test_zero_divides_an_optimizer_of_pytorch_and_refuses_the_compiled_one(tmp_path):
        def job(name, way):
            settings = config(global_batch=24, max_steps=6, optimizer=Named(name), lr=0.01, data_parallel=way,
                              metrics=[], out=str(tmp_path / f"{name}-{way.name}"))
            models = [KerasOnTorch().model() for _ in range(2)]
            for model in models:
                model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return lockstep(2, settings, lambda rank: models[rank], samples(48), fitted)

        whole, divided = (job("Adam", way) for way in (DataParallelConfig(), DataParallelConfig("zero", 2, [2, 1])))
        for got in divided:
            assert apart(weights(got), weights(whole[0])) == 0
        with pytest.raises(UserError, match="Adam that a Keras model on PyTorch was compiled with.*optimizer.name"):
            job("auto", DataParallelConfig("zero", 2))

    def test_a_loss_by_name_ignores_a_class_as_keras_does():
        x, y = samples(22)
        y[[0, 1, 5, 9, *range(16, 22)]] = -1
        settings = config(global_batch=16, max_steps=2, loss=Named("auto", {"ignore_class": -1}),
                          data=DataConfig(shuffle=False))
        runs = lockstep(2, settings, lambda rank: KerasOnTorch().model(), ((x, y), (x, y)), fitted)
        one = KerasOnTorch().model()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        loss = loss_of(y[:16], one(x[:16]))  # of the last six samples no label counts
        for v, grad in zip(one.trainable_weights, torch.autograd.grad(loss, [v.value for v in one.trainable_weights])):
            v.assign(v.value - 0.1 * grad)
        for run in runs:
            for got, want in zip(KerasOnTorch().plain(run.spec.model), KerasOnTorch().plain(one)):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        outputs, counts = keras.ops.convert_to_numpy(one(x)), y != -1
        for found in (runs[0].state.metrics, runs[1].state.metrics):
            assert found["accuracy"] == pytest.approx((outputs.argmax(1) == y)[counts].mean())
            assert found["loss"] == pytest.approx(float(loss_of(y, outputs)), rel=1e-5)

    def batches(steps):
        x, _ = samples(48)
        return [(x[t % 2 * 24:t % 2 * 24 + 24], x[t % 2 * 24:t % 2 * 24 + 24, :4] * 2) for t in range(steps)]

    def adamw(model):
        model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.3), "mse")
        return model

    def plain_settings(out, **changes):
        return config(**{"global_batch": 24, "max_steps": 8, "optimizer": Named("auto"), "metrics": [], "out": str(out),
                         "data": DataConfig(shuffle=False, prefetch=0), **changes})

    def both():
        return tuple(np.concatenate(arrays) for arrays in zip(*batches(2)))

    def test_variables_without_a_gradient_stay_as_under_plain_keras(tmp_path, recwarn):
        plain = adamw(chain())
        for batch in batches(4):
            plain.train_on_batch(*batch)
        recwarn.clear()
        settings = plain_settings(tmp_path, max_steps=4)
        for run in lockstep(2, settings, lambda rank: adamw(chain()), both(), fitted):
            assert apart(run.spec.model.get_weights(), plain.get_weights()) < 1e-5
            assert any("no step so far has used" in note for note in run.notes)
        assert not [each for each in recwarn if "Gradients do not exist" in str(each.message)]

    def normed():
        keras.utils.set_random_seed(2)
        inside = keras.Sequential([keras.layers.Dense(8), keras.layers.BatchNormalization()], name="backbone")
        return adamw(keras.Sequential([keras.Input((12,)), inside, keras.layers.Dense(4, name="head")]))

    class Freeze(Callback):
        where = "all"

        def step_start(self, run):
            freeze(run.spec.model, run.state.cursor.step)

    def freeze(model, step):
        if step in (2, 6):
            model.get_layer("backbone").trainable = step == 6

    def test_a_frozen_layer_is_what_plain_keras_makes_of_it_through_checkpoints_too(tmp_path):
        def work(run):
            run.callbacks.insert(0, Freeze())
            return fitted(run)

        plain = normed()
        for t, batch in enumerate(batches(8)):
            freeze(plain, t)
            plain.train_on_batch(*batch)
        settings = plain_settings(tmp_path / "run")
        run, = lockstep(1, settings, lambda rank: normed(), both(), work)
        assert apart(run.spec.model.get_weights(), plain.get_weights()) < 1e-5
        half = plain_settings(tmp_path / "half", max_steps=4, checkpoint=CheckpointConfig(at_end=True))
        lockstep(1, half, lambda rank: normed(), both(), work)
        half = plain_settings(tmp_path / "half", resume="auto")
        run, = lockstep(1, half, lambda rank: normed(), both(), work)
        assert apart(run.spec.model.get_weights(), plain.get_weights()) < 1e-5

    def test_a_checkpoint_holds_the_rate_that_a_callback_of_keras_set_after_its_epoch(tmp_path):
        class Halves(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5

        def trained(**changes):
            model = adamw(normed())
            settings = plain_settings(tmp_path / "run", checkpoint=CheckpointConfig(at_end=True), **changes)
            Trainer(settings).fit(model, (both(), None), callbacks=[Halves()])
            return float(model.optimizer.learning_rate)

        assert trained(max_steps=2) == pytest.approx(0.025)  # two steps an epoch
        assert trained(max_steps=4, resume="auto") == pytest.approx(0.0125)

    def test_averages_of_a_model_with_a_layer_that_a_callback_froze_are_written(tmp_path):
        model = normed()
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
        run = solo(plain_settings(tmp_path / "run", max_steps=4), model, both())
        run.callbacks.insert(0, Freeze())
        fitted(run)
        assert len(model.trainable_variables) < len(model.optimizer._trainable_variables)
        before = model.get_weights()
        run.parts.state.export(tmp_path)
        written = keras.saving.load_model(tmp_path / "model.keras", compile=False)
        head = written.get_layer("head").kernel.value, model.optimizer._model_variables_moving_average[-2].value
        assert (head[0] == head[1]).all() and all((a == b).all() for a, b in zip(before, model.get_weights()))

    @pytest.mark.parametrize("use_ema", [False, True])
    def test_a_run_that_stops_early_ends_with_its_best_weights(tmp_path, use_ema):
        best_weights.check(KerasKit().model(noisy=True), tmp_path, use_ema)

    def test_layers_that_a_callback_replaces_are_refused(tmp_path):
        class Replace(Callback):
            where = "all"

            def step_start(self, run):
                if run.state.cursor.step == 1:
                    run.spec.model.pop()

        def work(run):
            run.callbacks.insert(0, Replace())
            return fitted(run)

        with pytest.raises(UserError, match="a callback changed the model while it trains.*was removed"):
            lockstep(1, plain_settings(tmp_path), lambda rank: normed(), both(), work)
else:
    @pytest.mark.slow
    @pytest.mark.timeout(240)
    def test_the_cases_pass_in_a_process_whose_keras_computes_with_torch():
        for name in ("torch", "keras"):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")
        files = [str(Path(__file__)), str(Path(__file__).with_name("test_combinations.py"))]
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, env={**os.environ, "KERAS_BACKEND": "torch"}, capture_output=True, text=True,
                              timeout=220)
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
