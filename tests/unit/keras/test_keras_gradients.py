"""Gradients of hvdtrain.keras in one process: the guard's fingerprints, several passes, variables without one."""

from contextlib import nullcontext

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
import keras  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)
import hvdtrain.keras as hvd  # noqa: E402
from hvdtrain.core.errors import UserError, WaitTimeout  # noqa: E402
from hvdtrain.keras.guard import fingerprints  # noqa: E402


@pytest.fixture(autouse=True)
def started():
    hvd.init()


# --- the guard's fingerprints ----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_the_distance_of_fingerprints_is_the_distance_of_variables_in_the_mean():
    rng = np.random.default_rng(3)
    ratios = []
    for shape in [(300,), (20, 30), (3, 3, 8, 16), (1000, 2)] * 40:
        a = rng.normal(size=shape).astype("float32")
        change = (1e-3 * rng.normal(size=shape)).astype("float32")
        (pa, pb), norms = fingerprints([tf.Variable(a), tf.Variable(a + change)])
        np.testing.assert_allclose(norms[0], np.linalg.norm(a), rtol=1e-5)
        ratios.append(float(abs(pa - pb)) / np.linalg.norm(change))
    assert 0.6 < np.sqrt(np.mean(np.square(ratios))) < 1.5


def test_a_change_of_one_weight_changes_the_fingerprint_by_about_as_much():
    for shape, place in [((), ()), ((7,), (3,)), ((4, 5), (2, 4)), ((2, 2, 3), (1, 0, 2))]:
        a = np.zeros(shape, "float32")
        a[place] = 0.5
        prints, norms = fingerprints([tf.Variable(a), tf.Variable(a * 0)])
        assert 0.2 < abs(float(prints[0] - prints[1])) / 0.5 < 2.1 and float(norms[0]) == 0.5


def test_one_constant_added_to_all_elements_changes_the_fingerprint():
    for shape in [(2,), (32,), (64,), (4, 5), (2, 64), (64, 32), (3, 3, 8, 16)]:
        (print_,), (norm,) = fingerprints([tf.Variable(np.full(shape, 0.25, "float32"))])
        assert abs(float(print_)) > 1e-4 * float(norm), shape


# --- ranks that are unlike -------------------------------------------------------------------------------------------

def two_variables():
    return keras.Variable([1.0, 2.0]), keras.Variable([3.0])


def test_several_passes_take_one_list_of_variables():
    a, b = two_variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    optimizer.build([a, b])
    optimizer.apply([tf.ones(2)], [a])
    with pytest.raises(UserError, match="list of variables that differs"):
        optimizer.apply([tf.ones(1)], [b])
    optimizer.apply([tf.ones(2)], [a])
    assert a.numpy().tolist() == pytest.approx([0.8, 1.8])


def test_a_gradient_that_one_rank_alone_lacks_is_named_in_bounded_time(monkeypatch):
    from types import SimpleNamespace

    from hvdtrain import job
    from hvdtrain.tensorflow import gradients
    from hvdtrain.tensorflow.gradients import DENSE, NONE, GradientItem

    def barrier(tag, timeout_s):
        assert timeout_s == gradients.LATE_S
        raise WaitTimeout("rank 1 waited")

    monkeypatch.setattr(job, "world", lambda: SimpleNamespace(control=SimpleNamespace(barrier=barrier)))
    monkeypatch.setattr(hvd.global_process_set, "process_set_id", 0)
    a, b = two_variables()
    exchange = gradients.GradientExchange()
    before = [GradientItem(DENSE, (2,), "float32", "a"), GradientItem(DENSE, (1,), "float32", "b")]
    exchange._plans["key"] = SimpleNamespace(items=before), [a, b]
    with pytest.raises(UserError, match=r"rank 1 waited: this rank has no gradient of b .* where it had a gradient"):
        exchange._expect_others([before[0], GradientItem(NONE, (1,), "float32", "b")], [a, b])
    with pytest.raises(UserError, match="list of variables that differs"):
        exchange._expect_others(before[:1], [a])


@pytest.mark.parametrize("settings", [{}, {"use_ema": True}, {"global_clipnorm": 0.1}], ids=str)
def test_variables_without_a_gradient_stay_as_plain_keras_leaves_them(settings):
    pairs = []
    for wrapped in (hvd.DistributedOptimizer, lambda optimizer: optimizer):
        a, b = two_variables()
        optimizer = wrapped(keras.optimizers.AdamW(0.1, weight_decay=0.3, **settings))
        for second in (tf.ones(1), None, None):
            with pytest.warns(UserWarning, match="Gradients do not exist") if second is None else nullcontext():
                optimizer.apply([tf.ones(2), second], [a, b])
        pairs.append([v.numpy() for v in (a, b, *optimizer.variables)])
    for ours, plain in zip(*pairs, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_a_gradient_of_one_of_several_passes_is_not_lost():
    a, b = two_variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.5), backward_passes_per_step=2)
    for second in (tf.ones(1), None):
        optimizer.apply([tf.ones(2), second], [a, b])
    assert b.numpy().tolist() == pytest.approx([3.0 * 0.95 - 0.1])
    before = b.numpy()
    optimizer.apply([tf.ones(2), None], [a, b])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.ones(2), None], [a, b])
    np.testing.assert_array_equal(b.numpy(), before)


def test_passes_whose_graphs_have_gradients_of_other_variables_are_refused():
    c, d = two_variables()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    step = tf.function(lambda second: optimizer.apply([tf.ones(2), second], [c, d]))
    step(None)
    with pytest.raises(UserError, match="which earlier batches did not have"):
        step(tf.ones(1))


def test_what_migrate_says_of_keras_3_is_so():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    space, files = {"keras": keras, "m": model, "o": model.optimizer, "K": keras.backend}, keras.callbacks
    for line in ("m.fit_generator", "K.get_value", "K.set_value", "K.set_session", "keras.optimizers.legacy.SGD()",
                 "keras.optimizers.SGD(lr=1)", "o.variables()", "o.get_weights", "m.fit(x=1, workers=2)",
                 "m.evaluate(x=1, workers=2)", "m.compile(experimental_run_tf_function=False)", "m.save('folder')",
                 "m.save('folder', save_format='tf')", "m.save_weights('x.h5')", "m.save_weights('x')",
                 "m.save_weights('x.weights.h5', save_format='h5')", "m.load_weights('x')",
                 "keras.preprocessing.image.ImageDataGenerator"):
        with pytest.raises((AttributeError, ValueError, TypeError, ImportError)):
            eval(line, space)
    for given in ({"filepath": "c"}, {"filepath": "c.hdf5"}, {"filepath": "c.h5", "save_weights_only": True},
                  {"filepath": "c.keras", "period": 2}):
        with pytest.raises((ValueError, TypeError)):
            files.ModelCheckpoint(**given)
    assert files.ModelCheckpoint("c.h5") and files.ModelCheckpoint("c.weights.h5", save_weights_only=True)
    with pytest.warns(UserWarning, match="decay.* ignored"):
        keras.optimizers.SGD(0.1, decay=0.5)
