"""Names of Keras' variables that do not depend on what else a process has built."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from hvdtrain.backends.keras.saving import stable_names  # noqa: E402


def named(*paths):
    return stable_names([SimpleNamespace(path=path) for path in paths])


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_counters_begin_at_their_least(offset):
    def counted(stem, n):
        return stem if n + offset == 0 else f"{stem}_{n + offset}"
    paths = [f"{counted('sequential', 0)}/{counted('dense', n)}/{v}" for n in (0, 1, 2) for v in ("kernel", "bias")]
    assert named(*paths) == [f"sequential/{d}/{v}" for d in ("dense", "dense_1", "dense_2") for v in ("kernel", "bias")]


def test_names_of_the_users_stay():
    own = ["cnn/conv_0/conv/kernel", "cnn/conv_1/conv/kernel", "cnn/head/linear/bias", "gpt/block_0/mlp_in/kernel"]
    assert named(*own) == own


def test_each_parent_counts_for_itself():
    assert named("net/a/dense_3/kernel", "net/b/dense_4/kernel") == ["net/a/dense/kernel", "net/b/dense/kernel"]


def test_no_two_are_alike_and_none_has_a_dot():
    assert named("m/x.y/kernel", "m/x.y/kernel", "m/x.y/kernel") == ["m/x_y/kernel", "m/x_y/kernel#2", "m/x_y/kernel#3"]
