"""The set ``folder``: which pictures it finds, how they are decoded, and the words for what is wrong with a folder."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from pictures import write_folder

from hvdtrain.commands.train import parse
from hvdtrain.core.errors import UserError
from hvdtrain.data.pictures import load_picture
from hvdtrain.data.sources import Source, Unreadable, resolve, resolve_splits

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def numbers(source):
    return np.arange(len(source), dtype=np.int64)


def train(root, **args):
    return resolve("folder", {"root": str(root), **args}, "train")


def one(tmp_path, image, name="a.png", **how):
    """Return the set of one class with this picture only."""
    folder = tmp_path / "train" / "it"
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / name, **how)
    return tmp_path


def test_pictures_are_floats_channels_last_and_labels_the_place_of_their_folder(tmp_path):
    write_folder(tmp_path, size=(6, 5))
    source, test = resolve_splits("folder", {"root": str(tmp_path)})
    x, y = source.fetch(numbers(source))
    assert isinstance(source, Source) and source.classes == test.classes == ("class_0", "class_1", "class_2")
    assert x.shape == (12, 6, 5, 3) and x.dtype == np.float32 and 0 <= x.min() and x.max() <= 1 and len(test) == 6
    assert y.dtype == np.int64 and y.tolist() == sorted(y) and np.array_equal(np.bincount(y), [4, 4, 4])
    assert np.array_equal(x.mean((1, 2)).argmax(1), y), "each class has the colour of its number"
    stored = np.asarray(Image.open(tmp_path / "train/class_1/00004.png"))
    assert np.array_equal(x[5], stored / np.float32(255))
    again = [part[[7, 2]] for part in (x, y)]
    assert all(np.array_equal(a, b) for a, b in zip(source.fetch(np.array([7, 2])), again))


def test_normalised_first_channels_and_grey(tmp_path):
    write_folder(tmp_path, size=(6, 5))
    plain = train(tmp_path).fetch(np.array([3]))[0]
    scaled = train(tmp_path, mean=[0.1, 0.2, 0.3], std=0.5, layout="channels_first").fetch(np.array([3]))[0]
    assert scaled.shape == (1, 3, 6, 5) and scaled.flags.c_contiguous
    assert np.allclose(scaled.transpose(0, 2, 3, 1), (plain - [0.1, 0.2, 0.3]) / 0.5, atol=1e-6)
    assert train(tmp_path, channels=1).fetch(np.array([3]))[0].shape == (1, 6, 5, 1)


def test_the_order_is_bytewise_whatever_the_file_system_says(tmp_path, monkeypatch):
    for name in ("b/2.png", "b/10.PNG", "B/x.jpg", "a/é.png", "a/deep/z.bmp", "a/.hidden.png", ".git/x.png",
                 "a/notes.txt"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / "train" / name, format="png")
    os.symlink(tmp_path / "train/b/2.png", tmp_path / "train/a/link.png")
    scan = os.scandir

    class Backwards(list):
        __enter__, __exit__ = lambda self: self, lambda *_: None

    found = []
    for order in (list, reversed):
        monkeypatch.setattr(os, "scandir", lambda path: Backwards(order(sorted(scan(path), key=lambda e: e.name))))
        source = train(tmp_path)
        found.append([os.path.relpath(os.fsdecode(source.path(i)), tmp_path / "train") for i in numbers(source)])
    assert found[0] == found[1] == ["B/x.jpg", "a/deep/z.bmp", "a/link.png", "a/é.png", "b/10.PNG", "b/2.png"]
    assert source.labels(numbers(source)).tolist() == [0, 1, 1, 1, 2, 2]


def test_it_is_pickled_as_a_list_of_names(tmp_path):
    write_folder(tmp_path, train=300, size=(4, 4))
    source = train(tmp_path)
    sent = pickle.dumps(source)
    assert len(sent) < 300 * 20 + 1000
    for mine, theirs in zip(source.fetch(numbers(source)), pickle.loads(sent).fetch(numbers(source))):
        assert np.array_equal(mine, theirs)


def test_size_scales_and_cuts_out_the_middle(tmp_path):
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40, 0] = 255
    x = train(one(tmp_path, Image.fromarray(pixels)), size=10).fetch(np.array([0]))[0]
    assert x.shape == (1, 10, 10, 3) and x[0, :, 1:-1, 0].min() == 1 and x[0, ..., 1:].max() == 0
    assert train(tmp_path, size=[10, 30]).fetch(np.array([0]))[0].shape == (1, 10, 30, 3)
    large = np.full((900, 700, 3), 128, np.uint8)
    x = train(one(tmp_path, Image.fromarray(large), "a.png"), size=[30, 20]).fetch(np.array([0]))[0]
    assert np.abs(x - 128 / 255).max() < 0.02


def test_modes_and_orientation_become_rgb_upright(tmp_path):
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, :4] = 200  # bright to the left
    image = Image.fromarray(wide)
    grey16 = Image.fromarray(np.full((4, 8), 200 * 257, np.uint16))
    clear = image.quantize()
    clear.info["transparency"] = bytes([0] * 3)
    cases = {"L": image.convert("L"), "P": image.quantize(), "RGBA": image.convert("RGBA"), "1": image.convert("1"),
             "clear": clear, "I;16": grey16, "LA": image.convert("LA")}
    for name, case in cases.items():
        x = train(one(tmp_path, case)).fetch(np.array([0]))[0]
        assert x.shape == (1, 4, 8, 3) and abs(x[0, 0, 0, 0] - 200 / 255) < 0.3, name
    assert x[0, 0, -1].max() < 0.1
    exif = Image.Exif()
    turns = {3: (0, -1), 6: (0, 0), 8: (-1, 0)}  # where the bright half of the stored picture ends up
    for value, at in turns.items():
        exif[0x0112] = value
        root = one(tmp_path / str(value), image, "a.jpg", exif=exif, quality=95)
        x = train(root).fetch(np.array([0]))[0][0]
        assert x.shape == ((4, 8, 3) if value == 3 else (8, 4, 3))
        assert x[at].mean() > 0.7 and x[-1 - at[0] if at[0] else -1, 0 if at[1] else -1].mean() < 0.1, value
        assert train(root, size=4).fetch(np.array([0]))[0].shape == (1, 4, 4, 3)


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_picture_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_folder(tmp_path, classes=1, train=6)
    folder = tmp_path / "train/class_0"
    whole = (folder / "00000.png").read_bytes()
    (folder / "00000.png").write_bytes(whole[:len(whole) // 2])
    (folder / "00001.png").write_bytes(b"no picture")
    (folder / "00002.png").write_bytes(b"")
    (folder / "00003.png").unlink()
    os.symlink("nowhere", folder / "00003.png")
    (folder / "00004.png").unlink()
    os.symlink("00004.png", folder / "00004.png")
    os.symlink("itself", tmp_path / "train" / "itself")
    source = train(tmp_path)
    assert len(source) == 6 and source.size == (32, 32)
    for number in range(5):
        with pytest.raises(Unreadable, match=f"sample {number} cannot be read: .*0000{number}.png: ") as told:
            source.fetch(np.array([5, number, 0]))
        assert (told.value.number, Path(told.value.place)) == (number, folder / f"0000{number}.png")
    for most, words in ((600, "32 x 32 pixels, more than"), (100, "exceeds limit of 200 pixels")):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(Unreadable, match=words):
            source.fetch(np.array([5]))
    assert isinstance(pickle.loads(pickle.dumps(told.value)), Unreadable)


def test_pictures_of_two_sizes_are_refused_with_the_way_out(tmp_path):
    write_folder(tmp_path, classes=1)
    Image.new("RGB", (7, 5)).save(tmp_path / "train/class_0/other.png")
    with pytest.raises(UserError, match=r"other.png has 5 x 7 pixels and .*00000.png 32 x 32.*data.args.size") as told:
        train(tmp_path).fetch(np.array([12]))
    assert not isinstance(told.value, Unreadable)
    assert train(tmp_path, size=8).fetch(np.arange(13))[0].shape == (13, 8, 8, 3)


@pytest.mark.parametrize("args, words", [
    ({}, "needs the argument 'root'"), ({"root": 3}, "root is 3"), ({"root": ""}, "root is ''"),
    ({"root": "nowhere"}, "does not exist"), ({"root": "file"}, "is a file"),
    ({"root": "flat"}, "has no folder train.*where there are cat, dog"), ({"root": "loose"}, "images without a class"),
    ({"root": "hollow"}, "hollow/train/none holds no image"),
    ({"root": "unlike"}, "test lacks the class folders dog"),
    ({"root": "more"}, "train lacks the class folders fox"), ({"root": "untested"}, "test holds no image"),
    ({"root": "loop"}, "link to one of its parent folders"), ({"root": "good", "test": "val"}, "no folder val"),
    ({"root": "good", "layout": "NCHW"}, "channels_last"), ({"root": "good", "channels": 4}, "3 .colours. or 1"),
    ({"root": "good", "size": -1}, "size"), ({"root": "good", "size": [2, 2, 2]}, "size"),
    ({"root": "good", "mean": [0, 0]}, "mean"), ({"root": "good", "std": 0}, "above 0"),
    ({"root": "good", "sise": 4}, "did you mean 'size'"),
])
def test_what_is_wrong_with_a_folder_is_one_clear_error(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("flat/cat", "flat/dog", "loose/train", "hollow/train/none", "hollow/train/some", "unlike/train/cat",
                   "unlike/train/dog", "unlike/test/cat", "more/train/cat", "more/test/cat", "more/test/fox",
                   "untested/train/cat", "untested/test/cat", "loop/train/cat", "good/train/cat"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("loose/train", "hollow/train/some", "unlike/train/cat", "unlike/train/dog", "more/train/cat",
                   "untested/train/cat", "loop/train/cat", "good/train/cat"):
        Image.new("RGB", (2, 2)).save(tmp_path / folder / "a.png")
    (tmp_path / "file").write_text("")
    os.symlink("..", tmp_path / "loop/train/cat/up")
    with pytest.raises(UserError, match=words):
        resolve_splits("folder", args)


def test_without_a_test_folder_there_is_no_test_split_and_another_may_be_named(tmp_path):
    write_folder(tmp_path, test=0)
    assert resolve_splits("folder", {"root": str(tmp_path)})[1] is None
    write_folder(tmp_path)
    (tmp_path / "test").rename(tmp_path / "val")
    assert len(resolve_splits("folder", {"root": str(tmp_path), "test": "val"})[1]) == 6


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_residual_network_trains_on_a_folder(tmp_path, framework):
    """The words of a command, in this process: the model takes the pictures as they come."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    from hvdtrain import Trainer

    tested = 6 if framework == "torch" else 0  # another graph of TensorFlow's takes seconds
    write_folder(tmp_path / "set", test=tested, size=(16, 16))
    models = {"torch": "torch_models", "tensorflow": "tf_models"}[framework]
    config = parse(["--model", f"{models}.resnet:build", "--model_args.width", "4", "--model_args.depth", "1",
                    "--model_args.in_shape", "[16,16,3]", "--model_args.classes", "3", "--data.name", "folder",
                    "--data.args.root", str(tmp_path / "set"), "--epochs", "1", "--global_batch", "4", "--out",
                    str(tmp_path / "run"), "--progress", "off", "--checkpoint.at_end", "false"], {})
    result = Trainer(config).fit()
    assert result.steps == 3 and np.isfinite(result.loss) and ("accuracy" in result.metrics) == bool(tested)


def test_a_served_picture_is_the_one_that_training_reads(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (150, 211, 3), np.uint8)
    args = {"size": [20, 24], "mean": [0.1, 0.2, 0.3], "std": 0.5, "layout": "channels_first"}
    one(tmp_path, Image.fromarray(pixels), "a.jpg", quality=90)
    one(tmp_path, Image.fromarray(pixels), "b.png")
    want = train(tmp_path, **args).fetch(np.arange(2))[0]
    for row, name in enumerate(("a.jpg", "b.png")):
        path = tmp_path / "train" / "it" / name
        for file in (path, str(path), path.read_bytes(), path.open("rb")):
            assert np.array_equal(load_picture(file, **args), want[row])
    assert load_picture(path).shape == (150, 211, 3)
    middle = Image.fromarray(pixels).resize((24, 20), Image.Resampling.BILINEAR, box=(15.5, 0, 195.5, 150))
    assert np.array_equal(load_picture(path, [20, 24]), np.asarray(middle) / np.float32(255)), "the filter"
    with pytest.raises(Unreadable, match="the given bytes"):
        load_picture(b"no picture")
