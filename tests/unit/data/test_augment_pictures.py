"""Augmentation of colours and areas, of channels-first pictures, and by transforms of torchvision and Keras."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from pictures import write_folder
from small_runs import config

from hvdtrain.config import Config, DataConfig
from hvdtrain.core import torchvision_parts
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import load_callable
from hvdtrain.data import prepare
from hvdtrain.data.augment import Augmented, check, color_jitter, resized_crop
from hvdtrain.data.augment.draw import uniform_of
from hvdtrain.data.sources import ArraySource, resolve

NUMPY = {"resized_crop": 0.2, "crop": 1, "flip": 0.5, "cutout": 3,
         "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}}
TORCH = {"torchvision.transforms.v2:RandAugment": {"magnitude": 9},
         "torchvision.transforms.v2:RandomResizedCrop": {"size": [7, 9]}}
KERAS = {"keras.layers:RandomColorJitter": {"value_range": [0, 1], "brightness_factor": 0.3, "hue_factor": 0.2},
         "keras.layers:RandomFlip": {"mode": "horizontal"}, "keras.layers:AugMix": {"value_range": [0, 1]}}


def pictures(n=24, dtype=np.float32):
    made = np.random.default_rng(0).integers(0, 256, (n, 7, 9, 3)).astype(np.uint8)
    return made if dtype == np.uint8 else (made / np.float32(255)).astype(dtype)


def library(spec):
    """Skip without the library of ``spec``."""
    if spec is TORCH:
        pytest.importorskip("torch")
        torchvision_parts.use()
        pytest.importorskip("torchvision")
    if spec is KERAS:
        pytest.importorskip("keras")


@pytest.mark.parametrize("spec", [NUMPY, TORCH, KERAS], ids=["numpy", "torchvision", "keras"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_picture_depends_on_its_number_alone(spec, dtype):
    library(spec)
    if spec is KERAS and dtype == np.uint8:
        with pytest.raises(UserError, match=r"value_range \[0, 1\] and the images are uint8"):
            Augmented(ArraySource((pictures(dtype=dtype),)), spec, 3).fetch(np.arange(1))
        spec = {"keras.layers:RandomBrightness": {"factor": 0.5}}
    source = Augmented(ArraySource((pictures(dtype=dtype),)), spec, 3)
    numbers = np.array([7, 3, 0, 12])
    together, = source.fetch_in(numbers, 5)
    alone, = pickle.loads(pickle.dumps(source)).fetch_in(numbers[1:2], 5)
    np.testing.assert_array_equal(alone[0], together[1])
    np.testing.assert_array_equal(source.fetch_in(numbers[::-1], 5)[0], together[::-1])
    assert together.dtype == dtype and (source.fetch_in(numbers, 6)[0] != together).any((1, 2, 3)).sum() > 2


@pytest.mark.parametrize("spec", [NUMPY, TORCH], ids=["numpy", "torchvision"])
def test_channels_first_is_the_same_augmentation(spec):
    library(spec)
    x = pictures()
    last, = Augmented(ArraySource((x,)), spec, 0).fetch(np.arange(24))
    turned = ArraySource((np.ascontiguousarray(x.transpose(0, 3, 1, 2)),))
    for source in (Augmented(turned, {**spec, "layout": "channels_first"}, 0),
                   Augmented(turned, spec, 0, "channels_first"),
                   prepare.prepared(Config(data=DataConfig(args={"layout": "channels_first"}, augment=spec)),
                                    turned, None)[0]):
        first, = source.fetch(np.arange(24))
        np.testing.assert_array_equal(first.transpose(0, 2, 3, 1), last)
        assert first.flags.c_contiguous
    with pytest.raises(UserError, match="with its channels first; expected images in channels_last"):
        Augmented(turned, NUMPY, 0).fetch(np.arange(2))
    with pytest.raises(UserError, match="with its channels last.*layout: channels_last"):
        Augmented(ArraySource((x,)), NUMPY, 0, "channels_first").fetch(np.arange(2))


def test_a_folder_declares_its_layout_and_colours_change_before_normalisation(tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path, size=(7, 9))
    args = {"root": str(tmp_path), "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}
    plain = Augmented(resolve("folder", {"root": str(tmp_path)}, "train"), NUMPY, 0).fetch(np.arange(6))[0]
    for layout, axes in (("channels_last", (0, 1, 2, 3)), ("channels_first", (0, 2, 3, 1))):
        source = Augmented(resolve("folder", {**args, "layout": layout}, "train"),
                           {**NUMPY, "cutout": 0, "crop": 0}, 0)
        want = Augmented(resolve("folder", {"root": str(tmp_path)}, "train"), {**NUMPY, "cutout": 0, "crop": 0}, 0)
        got = source.fetch(np.arange(6))[0].transpose(axes) * np.float32(args["std"]) + np.float32(args["mean"])
        np.testing.assert_allclose(got, want.fetch(np.arange(6))[0], atol=1e-5)
    assert plain.shape == (6, 7, 9, 3)
    with pytest.raises(UserError, match="channels_first and channels_last"):
        Augmented(resolve("folder", {**args, "layout": "channels_first"}, "train"), {"layout": "channels_last"}, 0)


def test_resized_crop_is_torchvisions_of_the_same_area():
    torch = pytest.importorskip("torch")
    x, uniform = pictures(200), uniform_of(np.arange(200), 0, 0, "r")
    got = resized_crop.apply(x, 0.1, uniform)
    top, left, height, width = resized_crop.areas((7, 9), 0.1, uniform)
    for i in range(0, 200, 10):
        area = x[i, top[i]:top[i] + height[i], left[i]:left[i] + width[i]]
        want = torch.nn.functional.interpolate(torch.from_numpy(area.transpose(2, 0, 1).copy())[None], (7, 9),
                                               mode="bilinear", antialias=True)
        np.testing.assert_allclose(got[i], want[0].permute(1, 2, 0), atol=1e-5)
    share = height * width / 63
    assert share.min() < 0.2 and share.max() > 0.8 and abs(share.mean() - 0.5) < 0.1
    assert (height <= 7).all() and (top + height <= 7).all() and (left + width <= 9).all()
    middle = resized_crop.areas((10, 1000), {"scale": [1, 1]}, uniform)
    assert [each[0] for each in middle] == [0, 493, 10, 13], "no area of that size fits: the middle, 4 : 3"


def test_colours_are_torchvisions_for_the_same_factors():
    library(TORCH)
    torch = pytest.importorskip("torch")
    functional = load_callable("torchvision.transforms.v2.functional:adjust_hue", "test").__globals__
    x, uniform = pictures(8), uniform_of(np.arange(8), 0, 0, "c")
    numbers = uniform(4)
    for at, name in enumerate(color_jitter.NAMES):
        got = color_jitter.apply(x, {name: 0.4}, uniform)
        for i in range(8):
            factor = (2 * numbers[i, at] - 1) * 0.4 if name == "hue" else 0.6 + 0.8 * numbers[i, at]
            want = functional[f"adjust_{name}"](torch.from_numpy(x[i].transpose(2, 0, 1).copy()), factor)
            np.testing.assert_allclose(got[i], want.permute(1, 2, 0), atol=2e-3 if name == "hue" else 1e-5)
    grey = color_jitter.apply(x[..., :1], NUMPY["color_jitter"], uniform)
    assert grey.shape == (8, 7, 9, 1) and (grey != x[..., :1]).any()
    with pytest.raises(UserError, match="pixels run from -.*floats from 0 to 1"):
        color_jitter.apply(x - 1, 0.2, uniform)


@pytest.mark.parametrize("spec, words", [
    ({"resized_crop": 1.5}, "scale"), ({"resized_crop": {"scal": 1}}, "did you mean 'scale'"),
    ({"resized_crop": {"ratio": [2, 1]}}, "ratio"), ({"color_jitter": {"hue": 0.6}}, "hue is 0.6"),
    ({"color_jitter": -1}, "brightness is -1"), ({"color_jitter": {"hew": 0.1}}, "did you mean 'hue'"),
    ({"layout": "first"}, "layout is 'first'")])
def test_wrong_values_are_named(spec, words):
    with pytest.raises(UserError, match=words):
        check(spec)


def no_transform():
    return 3


def test_what_is_no_transform_is_refused():
    library(TORCH)
    pytest.importorskip("keras")
    for spec, words in (({f"{__name__}:no_transform": True}, "made a int"),
                        ({"keras.layers:MixUp": {}}, "mixes the pictures of a batch"),
                        ({"torchvision.transforms.v2:RandAugment": 9}, "is 9; expected true, or"),
                        ({"torchvision.transforms.v2:RandAugment": {"magnitud": 9}}, "does not take"),
                        ({"torchvision.transforms.v2:RandomResizedCrop": {"size": [4, 4]}}, "the same type and shape")):
        with pytest.raises(UserError, match=words):
            Augmented(ArraySource((pictures(),)), spec, 0).fetch(np.arange(2))


def test_pytorchs_generators_are_not_shared_with_training():
    library(TORCH)
    settings = replace(config(), data=DataConfig(augment=TORCH, workers=0, prefetch=2))
    with pytest.raises(UserError, match="draws from PyTorch's generators.*data.prefetch: 0"):
        prepare.prepared(settings, ArraySource((pictures(),)), None)
    torch = pytest.importorskip("torch")
    train, _ = prepare.prepared(replace(settings, data=replace(settings.data, prefetch=0)),
                                ArraySource((pictures(),)), None)
    assert prepare.fits(train) and not prepare.fits(train.wraps), "also for arrays in memory"
    torch.manual_seed(1)
    want = torch.rand(1)
    torch.manual_seed(1)
    train.fetch(np.arange(3))
    assert torch.rand(1) == want
