"""Augmented pictures: functions of (seed, epoch, sample), whoever fetches them; what each augmentation does."""

import math
import pickle

import numpy as np
import pytest

from hvdtrain.config import Config, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.data.augment import Augmented, check
from hvdtrain.data.augment.draw import beta, uniform_of
from hvdtrain.data.prepare import prepared
from hvdtrain.data.sources import ArraySource, Unreadable

ALL = {"mixup": 0.4, "cutout": 3, "flip": 0.5, "crop": 2, f"{__name__}:brighter": 2.0}
N = np.arange(20000)


def brighter(x, value, uniform):
    return (x + value * uniform(1).astype(x.dtype)[:, :, None, None]).astype(x.dtype)


def pictures(n=40, shape=(6, 5, 3), dtype=np.float32, classes=4):
    made = np.random.default_rng(0).integers(1, 200, (n, *shape)).astype(dtype)
    return ArraySource((made, np.arange(n) % classes))


def test_a_picture_depends_on_seed_epoch_and_number_alone():
    source = Augmented(pictures(), ALL, 3)
    numbers = np.array([7, 3, 39, 0, 12])
    together = source.fetch_in(numbers, 5)
    for at, number in enumerate(numbers):
        for got, want in zip(pickle.loads(pickle.dumps(source)).fetch_in(numbers[at:at + 1], 5), together):
            np.testing.assert_array_equal(got[0], want[at], err_msg=f"sample {number}")
    for other in (source.fetch_in(numbers, 6), Augmented(pictures(), ALL, 4).fetch_in(numbers, 5)):
        assert all((a != b).any() for a, b in zip(other[0], together[0]))


def test_random_numbers_are_uniform_and_unrelated():
    drawn = np.concatenate([uniform_of(N, seed, epoch, name)(2) for seed, epoch, name in (
        (0, 0, "crop"), (0, 1, "crop"), (1, 0, "crop"), (0, 0, "flip"))], axis=1)
    assert drawn.min() >= 0 and drawn.max() < 1
    for column in drawn.T:
        counts = np.bincount((column * 16).astype(int), minlength=16)
        chi2 = ((counts - len(N) / 16) ** 2 / (len(N) / 16)).sum()
        assert chi2 < 45, "15 degrees of freedom pass 45 once in 13,000"
    off_diagonal = np.abs(np.corrcoef(drawn.T) - np.eye(8)).max()
    assert off_diagonal < 5 / math.sqrt(len(N))
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 5 / math.sqrt(len(N)), "neighbouring samples"


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 8.0])
def test_the_weight_of_mixup_has_its_distribution(alpha):
    weights = beta(uniform_of(N, 0, 0, "w"), alpha)
    assert np.isfinite(weights).all() and weights.min() >= 0 and weights.max() <= 1
    deviation = math.sqrt(1 / (4 * (2 * alpha + 1)))
    assert abs(weights.mean() - 0.5) < 5 * deviation / math.sqrt(len(N))
    assert abs(weights.std() - deviation) < 0.02 * deviation
    if alpha == 1:
        assert abs((weights < 0.1).mean() - 0.1) < 0.015


def test_crop_and_cutout_and_flip_do_what_they_say():
    x = pictures(300, (6, 5, 3), np.uint8).arrays[0]
    numbers = np.arange(300)
    cropped, = Augmented(ArraySource((x,)), {"crop": 2}, 0).fetch(numbers)
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = [{(t, c) for t in range(5) for c in range(5) if (padded[i, t:t + 6, c:c + 5] == cropped[i]).all()}
              for i in numbers]
    assert all(places) and len(set().union(*places)) == 25
    flipped, = Augmented(ArraySource((x,)), {"flip": 0.3}, 0).fetch(numbers)
    mirrored = (flipped == x[:, :, ::-1]).all((1, 2, 3))
    assert ((flipped == x).all((1, 2, 3)) | mirrored).all() and 60 < mirrored.sum() < 120
    cut, = Augmented(ArraySource((x,)), {"cutout": 3}, 0).fetch(numbers)
    holes = (cut != x).all(3)
    np.testing.assert_array_equal(np.where(holes[..., None], 0, x), cut)
    sizes = holes.sum((1, 2))
    assert sizes.max() == 9 and sizes.min() == 4, "a hole at the border is smaller"
    for augmented in (cropped, flipped, cut):
        assert augmented.dtype == np.uint8
    grey, = Augmented(ArraySource((x[..., 0],)), {"crop": 2}, 0).fetch(numbers)
    np.testing.assert_array_equal(grey, cropped[..., 0])


def test_mixup_mixes_pictures_and_classes_by_one_weight():
    x = np.eye(50, dtype=np.float32).reshape(50, 5, 10)  # of which a mean tells its parts
    source = ArraySource((x, np.arange(50)))
    mixed, shares = Augmented(source, {"mixup": 1.0}, 0).fetch_in(np.arange(50), 1)
    assert shares.dtype == mixed.dtype == np.float32 and shares.shape == (50, 50)
    np.testing.assert_allclose(mixed.reshape(50, 50), shares, atol=1e-6)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert len({int(np.delete(row, i).argmax()) for i, row in enumerate(shares)}) > 20, "partners of the whole set"


def test_only_training_data_is_augmented():
    config = Config(data=DataConfig(augment={"flip": 1.0}))
    train, test = prepared(config, pictures(), pictures())
    assert isinstance(train, Augmented) and isinstance(test, ArraySource)
    assert prepared(Config(), pictures(), None)[0].arrays


def test_a_partner_that_cannot_be_read_is_told_for_the_sample_that_asked():
    class Torn(ArraySource):
        def fetch(self, indices_n):
            if 5 in indices_n:
                raise Unreadable(5, "five.png", "is torn")
            return super().fetch(indices_n)

    source = Augmented(Torn(pictures().arrays), {"mixup": {"alpha": 1, "classes": 4}}, 0)
    told = set()
    for number in range(40):
        try:
            source.fetch(np.array([number]))
        except Unreadable as error:
            assert error.number == number and error.place == "five.png"
            told.add(number)
    assert 5 in told and len(told) < 10


@pytest.mark.parametrize("spec, words", [
    ({"krop": 4}, "names 'krop'.*did you mean 'crop'"), ({"crop": -1}, "0 or more"), ({"crop": 1.5}, "whole number"),
    ({"flip": 1.5}, "from 0 to 1"), ({"flip": True}, "from 0 to 1"), ({"mixup": -1}, "alpha"),
    ({"mixup": {"alfa": 1}}, "did you mean 'alpha'"), ({"mixup": {"alpha": "x"}}, "alpha"), ({"cutout": "big"}, "side"),
])
def test_a_wrong_augmentation_is_named(spec, words):
    with pytest.raises(UserError, match=words):
        check(spec)
    with pytest.raises(UserError, match=words):
        Config(data=DataConfig(augment=spec)).check()


def test_data_that_does_not_suit_is_refused_in_words():
    class Numbered(ArraySource):
        pass

    class Chunks:
        def chunks(self, epoch):
            yield (np.zeros((2, 4, 4)),)

    x, y = pictures().arrays
    for spec, data, words in (
            ({"flip": 1.0}, Chunks(), "a stream"),
            ({"flip": 1.0}, ArraySource((y,)), "x is int64 of shape"),
            ({"flip": 1.0}, ArraySource((np.zeros((4, 3, 8, 8)),)), "channels first"),
            ({"crop": 6}, ArraySource((np.zeros((4, 6, 8)),)), "crop is 6, and the images have 6 x 8 pixels.*than 6"),
            ({"cutout": 16}, ArraySource((np.zeros((4, 6, 8)),)), "cutout is 16.*less than 16"),
            ({"flip": 1.0}, ArraySource((x, x)), "would not be augmented"),
            ({"mixup": 1.0}, ArraySource((x,)), "how many classes"),
            ({"mixup": 1.0}, ArraySource((x, y, y)), "3 arrays"),
            ({"mixup": 1.0}, ArraySource((x, y.astype(np.float32))), "one class number"),
            ({"mixup": {"classes": 3}}, ArraySource((x, y)), "run from 0 to 3"),
            ({f"{__name__}:math.pi": 1}, ArraySource((x, y)), "no callable")):
        with pytest.raises(UserError, match=words):
            Augmented(data, spec, 0).fetch(np.arange(4))
