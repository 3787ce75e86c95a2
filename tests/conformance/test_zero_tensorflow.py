"""ZeRO with Keras on TensorFlow, over ranks as threads: the unsharded run's bits, whatever the parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_runs import bits, config, fitted, lockstep, make_model, samples, weights

from hvdtrain.backends.model_spec import spec_of
from hvdtrain.config import DataParallelConfig, ExchangeConfig, Named
from hvdtrain.core.errors import UserError
from hvdtrain.core.protocols.run import Head
from hvdtrain.parallel.precision import LossScale

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

RUN = config(global_batch=24, max_steps=5, lr=0.01, exchange=ExchangeConfig(bucket_mb=0.0005))
DATA = samples(96)
OPTIMIZERS = {
    "SGD": {}, "momentum": {"momentum": 0.9}, "Nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {}, "AMSGrad": {"amsgrad": True}, "AdamW": {"weight_decay": 0.1}, "RMSprop": {"centered": True},
    "Adagrad": {}, "Nadam": {}, "Lion": {}, "Adadelta": {}, "Adamax": {}, "Ftrl": {}, "clipvalue": {"clipvalue": 0.01}}
CLASSES = {"momentum": "SGD", "Nesterov": "SGD", "AMSGrad": "Adam", "clipvalue": "Adam"}

ROUNDED = {"RMSprop": 1e-6}
"""TensorFlow's rsqrt rounds the last elements of a tensor, fewer than 16, otherwise than those before."""


def trained(size, settings, out):
    return lockstep(size, replace(settings, out=str(out)), lambda rank: make_model("tensorflow"), DATA, fitted)


SHAPES = (7, 5, 3), (40,), (), (9, 11)
SPANS = ([(0, 38), (0, 40), (0, 0), (0, 0)], [(38, 52), (0, 0), (0, 1), (0, 17)], [(52, 105), (0, 0), (0, 0), (17, 99)])
"""Which elements of each tensor three ranks own: rows in part and whole, nothing, and all."""


def params(named):
    import keras

    from hvdtrain.backends.tensorflow.optim import Optimization
    from hvdtrain.backends.tensorflow.params import Params

    class Holder(keras.layers.Layer):
        def build(self, _):
            draw = np.random.default_rng(0)
            for i, shape in enumerate(SHAPES):
                self.add_weight(shape=shape, name=f"w{i}").assign(draw.standard_normal(shape).astype(np.float32))

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((12,)), Holder()])
    opt = Optimization(replace(RUN, optimizer=named), spec_of(model), 1, whole=False)
    return Params(model, opt, LossScale())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_are_updated_to_the_bits_of_whole_tensors(name):
    from hvdtrain.backends.tensorflow.optimizer import Optimizer
    from hvdtrain.backends.tensorflow.state import without_counters

    named = Named(CLASSES.get(name, name), OPTIMIZERS[name])
    whole, ranks = params(named), [params(named) for _ in SPANS]
    whole._opt.build()
    optimizer = Optimizer(whole._opt, whole.variables, whole._scale)
    sliced = [own.sliced(spans) for own, spans in zip(ranks, SPANS)]
    for step in range(3):
        grads = [np.random.default_rng(step).standard_normal(shape).astype(np.float32) for shape in SHAPES]
        optimizer.step([tf.constant(g) for g in grads], [], 0.0, False)
        for own, part, spans in zip(ranks, sliced, SPANS):
            parts = [g.reshape(-1)[begin:end] for g, (begin, end) in zip(grads, spans)]
            held = [(v.value.read_value(), v.numpy()) for v in own.variables]
            assert part.step(parts if step else [tf.constant(x) for x in parts], [], 0.0, False)[0]
            for tensor, before in held:  # what somebody has read stays
                np.testing.assert_array_equal(tensor.numpy(), before)
            for v, want, (begin, end) in zip(own.variables, whole.variables, spans):
                got = v.numpy().reshape(-1)
                np.testing.assert_allclose(got[begin:end], want.numpy().reshape(-1)[begin:end], ROUNDED.get(name, 0), 0)
    for own, spans in zip(ranks, SPANS):  # what others own has stayed
        for v, first, (begin, end) in zip(own.variables, params(named).variables, spans):
            kept = np.delete(v.numpy().reshape(-1), slice(begin, end))
            np.testing.assert_array_equal(kept, np.delete(first.numpy().reshape(-1), slice(begin, end)))
    names = [[without_counters(v.path) for v in own.variables] for own in (sliced[0].own, whole._opt.optimizer)]
    assert names[0] == names[1]


@pytest.mark.parametrize("name, stage", [("Nesterov", 1), ("Adam", 2)])
def test_it_gives_the_bits_of_the_unsharded_run(name, stage, tmp_path):
    settings = replace(RUN, optimizer=Named(CLASSES.get(name, name), OPTIMIZERS[name]), shares=[3, 1], max_steps=3)
    whole, runs = both(2, settings, tmp_path, stage=stage, shards=[2, 1])
    assert {bits(run) for run in runs} == {bits(whole)}


def test_the_state_of_slices_is_that_of_the_unsharded_run(tmp_path):
    from hvdtrain.backends.tensorflow.state import without_counters

    settings = replace(RUN, optimizer=Named("Nadam"))
    whole = trained(3, settings, tmp_path / "whole")[0].parts.state.state()[0]["optimizer"]
    whole = {without_counters(name): array for name, array in whole.items()}
    runs = trained(3, replace(settings, data_parallel=DataParallelConfig("zero", 2, [3, 0, 2])), tmp_path / "zero")
    given = [shard for run in runs for shard in run.parts.state.slices()]
    assert len({shard.name for shard in given}) == len(whole)  # rank 0's names, whatever numbers Keras gave
    found = {name: np.full(array.shape, -9, array.dtype) for name, array in whole.items()}
    for shard in given:
        array = found[without_counters(shard.name)]
        assert shard.shape == array.shape and (array.flat[shard.begin:shard.begin + shard.values.size] == -9).all()
        array.flat[shard.begin:shard.begin + shard.values.size] = shard.values
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)
    heads = [Head("optimizer", name, a.shape, a.dtype.str, 0, a.size) for name, a in whole.items()]
    for run in runs:
        state = run.parts.state
        before = [shard.values for shard in state.slices()]
        wanted = state.wanted(heads)
        state.load_slices({name: np.zeros(end - begin, whole[name].dtype) for name, begin, end in wanted})
        assert not any(shard.values.any() for shard in state.slices())
        state.load_slices({name: whole[name].reshape(-1)[begin:end] for name, begin, end in wanted})
        for got, want in zip(state.slices(), before, strict=True):
            np.testing.assert_array_equal(got.values, want)


def both(size, settings, out, **zero):
    """Return a run of rank 0 unsharded, and those of all ranks under zero."""
    return (trained(size, settings, out / "whole")[0],
            trained(size, replace(settings, data_parallel=DataParallelConfig("zero", **zero)), out / "zero"))


@pytest.mark.parametrize("size, shares, shards", [(2, [0, 1], [1, 0]), (4, [1, 2, 4, 0], [1, 3, 0, 1])])
def test_shares_and_parts_are_independent(size, shares, shards, tmp_path):
    settings = replace(RUN, optimizer=Named("AdamW", {"weight_decay": 0.1}), shares=shares, max_steps=3)
    whole, runs = both(size, settings, tmp_path, stage=2, shards=shards)
    assert {bits(run) for run in runs} == {bits(whole)}
    held = [sum(slot.shape[0] for name, _, slot in run.parts.optimizer.slots()) for run in runs]
    total = 2 * sum(spec.n for spec in runs[0].parts.params.specs)
    assert sum(held) == total and all(h == 0 for h, part in zip(held, shards) if part == 0)
    for run in runs:  # no slice of a parameter stays, and no whole state was made
        assert all(v.value.numpy().size == 0 for v in run.parts.optimizer._variables)
        assert run.parts.optimizer.opt.optimizer is run.parts.optimizer.own


@pytest.mark.parametrize("changes", [{"accumulate": 3}, {"nan_guard": "skip"}, {"precision": "fp16"},
                                     {"compression": "fp16"}],
                         ids=lambda c: "-".join(c))
def test_what_goes_together_gives_the_bits_of_the_unsharded_run(changes, tmp_path):
    data = DATA
    if "nan_guard" in changes:
        data = DATA[0].copy(), DATA[1]
        data[0][7] = np.nan
    settings = replace(RUN, optimizer=Named("Adam"), max_steps=4, **changes)
    runs = {way: lockstep(2, replace(settings, data_parallel=DataParallelConfig(way, 2), out=str(tmp_path / way)),
                          lambda rank: make_model("tensorflow"), data, fitted) for way in ("replicate", "zero")}
    assert {bits(run) for run in runs["zero"]} == {bits(runs["replicate"][0])}
    if "nan_guard" in changes:
        assert int(runs["zero"][1].parts.optimizer.own.iterations.numpy()) == 3  # the step was left out by all


def test_the_norm_is_clipped_as_a_whole(tmp_path):
    whole, runs = both(3, replace(RUN, optimizer=Named("Adam"), clip_norm=0.05, max_steps=3), tmp_path, stage=2,
                       shards=[5, 0, 2])
    assert len({bits(run) for run in runs}) == 1
    for a, b in zip(weights(runs[0]), weights(whole)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("named, said", [
    (Named("Adafactor"), "Adafactor, which needs whole tensors"), (Named("Lamb"), "Lamb"), (Named("Muon"), "Muon"),
    (Named("Adam", {"clipnorm": 1.0}), "clipnorm.*clip_norm"), (Named("SGD", {"use_ema": True}), "use_ema"),
    (Named("SGD", {"global_clipnorm": 1.0}), "global_clipnorm.*set clip_norm")], ids=str)
def test_what_needs_whole_tensors_is_refused(named, said, tmp_path):
    with pytest.raises(UserError, match=said):
        trained(2, replace(RUN, optimizer=named, data_parallel=DataParallelConfig("zero", 2)), tmp_path)


def compiled(optimizer, constraint=None):
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="tanh"),
                              keras.layers.Dense(5, name="last", kernel_constraint=constraint)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def of_compiled(way, out, optimizer, prepare=lambda model, rank: None, work=fitted, **changes):
    models = [compiled(optimizer()) for _ in range(2)]
    for rank, model in enumerate(models):
        prepare(model, rank)
    settings = replace(RUN, optimizer=Named("auto"), metrics=[], max_steps=3, out=str(out / way),
                       data_parallel=DataParallelConfig(way, 2), **changes)
    return lockstep(2, settings, lambda rank: models[rank], DATA, work)


def test_constraints_are_refused(tmp_path):
    with pytest.raises(UserError, match="constraint on .*last/kernel"):
        lockstep(2, replace(RUN, out=str(tmp_path), data_parallel=DataParallelConfig("zero", 2)),
                 lambda rank: compiled("sgd", "non_neg"), DATA, fitted)


def test_variables_left_out_of_weight_decay_stay_so(tmp_path):
    import keras

    def prepare(model, rank):
        model.optimizer.exclude_from_weight_decay([model.layers[0].kernel], ["bias"])

    found = {way: of_compiled(way, tmp_path, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5), prepare)
             for way in ("replicate", "zero")}
    decayed = of_compiled("replicate", tmp_path / "all", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5))
    assert bits(found["zero"][1]) == bits(found["replicate"][0]) != bits(decayed[0])


def test_the_state_of_an_earlier_fit_is_taken_over_from_rank_0(tmp_path):
    """The user's optimizer then holds none; the rate that a callback sets is the run's."""
    import keras

    def prepare(model, rank):
        for _ in range(2 if rank == 0 else 1):
            model.train_on_batch(DATA[0][:32], DATA[1][:32])

    found = {way: of_compiled(way, tmp_path, lambda: keras.optimizers.Adam(0.01), prepare)
             for way in ("replicate", "zero")}
    assert {bits(run) for run in found["zero"]} == {bits(found["replicate"][0])}
    for run in found["zero"]:
        own = run.spec.model.optimizer
        assert not own.built and len(own.variables) == 2 and int(own.iterations) == 0
        assert int(run.parts.optimizer.own.iterations) == 5
        own.learning_rate = 0.25
        assert run.parts.optimizer.learning_rate() == 0.25
        own.build(run.spec.model.trainable_variables)
        assert len(own.variables) == 10
    assert "holds no state of the run" in found["zero"][0].parts.describe()["optimizer"]


def test_callbacks_see_the_rate_and_the_count_and_set_the_rate(tmp_path):
    import keras

    from hvdtrain.engine.keras_bridge import Bridge

    seen, files = [], []

    class Sets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(int(self.model.optimizer.iterations))
            self.model.optimizer.learning_rate = 0.01 / seen[-1]

        def on_train_end(self, logs=None):
            files.append(tmp_path / f"{len(files)}.keras")
            self.model.save(files[-1])

    def work(run):
        run.callbacks.append(Bridge([Sets()], run))
        return fitted(run)

    found = {way: of_compiled(way, tmp_path, lambda: keras.optimizers.Adam(0.01), work=work)
             for way in ("replicate", "zero")}
    assert {bits(run) for run in found["zero"]} == {bits(found["replicate"][0])}
    assert sorted(seen) == sorted([1, 2, 3] * 4)
    for run in found["zero"]:
        assert float(run.spec.model.optimizer.learning_rate) == pytest.approx(0.01 / 3)
        assert run.parts.optimizer.learning_rate() == pytest.approx(0.01 / 3)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):  # saved without state
        keras.models.load_model(files[-1]).train_on_batch(*(a[:8] for a in DATA))


@pytest.mark.parametrize("prepare, args, divisible", [
    (lambda model: model.optimizer.exclude_from_weight_decay([model.layers[0].kernel]), {"weight_decay": 0.1}, True),
    (lambda model: None, {"use_ema": True}, False), (lambda model: None, {"clipvalue": 0.1}, True),
    (lambda model: None, {"clipnorm": 0.1}, False)], ids=("exclusions", "use_ema", "clipvalue", "clipnorm"))
def test_plans_hold_an_optimizer_divisible_where_zero_does(prepare, args, divisible):
    """So that no line is offered that is then refused, and none left out that would do."""
    import keras

    from hvdtrain.backends.tensorflow.optim import Optimization
    from hvdtrain.backends.tensorflow.optimizer import Optimizer

    model = compiled(keras.optimizers.AdamW(0.01, **args))
    prepare(model)
    opt = Optimization(replace(RUN, optimizer=Named("auto")), spec_of(model), 1)
    assert Optimizer(opt, model.trainable_variables, None).elementwise is divisible


@pytest.mark.parametrize("rate", ("schedule", "function"))
def test_rates_that_cannot_be_told_as_text_go_along(rate, tmp_path):
    """A user's own schedule need not be registered with Keras, nor have a get_config, to train at all or divided."""
    import keras

    from hvdtrain.backends.tensorflow.state import without_counters

    class Falling(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.01 / (1 + keras.ops.cast(step, "float32"))

    def optimizer():
        return keras.optimizers.Adam(Falling() if rate == "schedule" else lambda: 0.01)

    found = {way: of_compiled(way, tmp_path, optimizer) for way in ("replicate", "zero")}
    assert {bits(run) for run in found["zero"]} == {bits(found["replicate"][0])}
    whole, zero = (found[way][0] for way in ("replicate", "zero"))
    names = [[without_counters(v.path) for v in run.parts.optimizer.own.variables] for run in (whole, zero)]
    assert names[0] == names[1] and "adam/learning_rate" not in names[0]
    held = 2 * sum(4 * spec.n for spec in whole.parts.params.specs)
    assert whole.memory["state"][0] == held + sum(v.value.numpy().nbytes for v in whole.parts.optimizer.own.variables)
