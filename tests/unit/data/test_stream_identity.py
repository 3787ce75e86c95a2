"""An identity vouches for a stream only where its graph and files determine the samples."""

import json
import os
from pathlib import Path

import pytest

from hvdtrain.data.hugging_face import identity_of
from hvdtrain.data.stream_reading import files_identity


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_text("".join(json.dumps({"x": [float(i), j / 4], "y": j}) + "\n" for j in range(4)))
        Path(f"{path}.more").write_text("{}\n")
    return [str(path) for path in paths]


def test_files_of_one_name_and_size_with_other_bytes_differ(files):
    before = files_identity(files)
    assert before and before == files_identity(files)
    for at in (0, 2):  # near the start of the first file, and in another one
        path = Path(files[at])
        text = path.read_text()
        path.write_text(text.replace("0.25", "0.26"))
        assert path.stat().st_size == len(text) and files_identity(files) != before
        path.write_text(text)
    assert files_identity(files) == before != files_identity(files[::-1])
    assert files_identity(["s3://bucket/a"]) != files_identity(["s3://bucket/b"])
    for unknown in ([], [*files, files[0] + ".absent"], ["memory://a"], ["zip://a::/b.zip"], ["file:///a"]):
        assert files_identity(unknown) == ""


def test_hugging_face_streams_with_functions_of_the_user_have_none(files):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")

    def load(**more):
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True, **more)

    def rows(names):
        for name in names:
            yield {"x": float(os.environ.get("RANK", 0))}

    known = [load(), load().with_format("torch"), load().shuffle(seed=3, buffer_size=4),
             load().shuffle(seed=4, buffer_size=4), load().select_columns(["x"])]
    found = [identity_of(stream) for stream in known]
    assert all(found) and len(set(found)) == len(found)
    assert identity_of(load()) == found[0] and identity_of(load().shuffle(seed=3, buffer_size=4)) == found[2]
    Path(files[1]).write_text(Path(files[1]).read_text().replace("0.25", "0.26"))
    assert identity_of(load()) not in ("", found[0])
    for stream in (load().map(lambda row: {"x": os.getpid()}), load().filter(lambda row: os.getpid() > 0),
                   datasets.IterableDataset.from_generator(rows, gen_kwargs={"names": files}), load().take(5), [1, 2]):
        assert identity_of(stream) == ""


def test_tensorflow_streams_have_one_where_graph_and_files_determine_them(files):
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    from hvdtrain.backends.tensorflow.data import DatasetStream

    def parsed(line):
        return tf.cast(tf.strings.length(line), tf.float32)

    lines, names = tf.data.TextLineDataset, tf.data.Dataset.from_tensor_slices(files)
    text, records = lines(files), tf.data.TFRecordDataset(files)
    numbers, captured = text.map(parsed), tf.constant(files[0] + ".more")
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)
    variable, generator = tf.Variable(1.0), tf.random.Generator.from_seed(1)
    known = [numbers, numbers.shuffle(4, seed=1), numbers.shuffle(4, seed=2), numbers.batch(2), records.map(parsed),
             names.interleave(lines).map(parsed), names.flat_map(tf.data.TFRecordDataset).map(parsed),
             *(numbers.map(lambda x, by=by: x * by) for by in (2.0, 3.0, tf.random.normal([4], seed=1)))]
    found = [DatasetStream(dataset).identity for dataset in known]
    assert all(found) and len(set(found)) == len(found)
    # As on another rank, which has made more functions before: their names hold a number of the process.
    again = [lines(files).map(parsed), names.interleave(lines).map(parsed),
             lines(files).map(parsed).map(lambda x: x * 2.0)]
    assert [DatasetStream(dataset).identity for dataset in again] == [found[0], found[5], found[7]]
    unknown = [
        names.flat_map(lambda name: lines(name + ".more")).map(parsed),
        names.map(lambda name: name + ".more").flat_map(lines).map(parsed),
        names.flat_map(lambda name: lines(files[0] + ".more")).map(parsed),
        names.flat_map(lambda name: lines(captured)).map(parsed),
        numbers.map(lambda x: tf.py_function(lambda v: v, [x], tf.float32)),
        numbers.map(lambda x: tf.numpy_function(lambda v: v, [x], tf.float32, stateful=False)),
        numbers.filter(lambda x: tf.py_function(lambda v: True, [x], tf.bool)),
        numbers.map(lambda x: x + tf.random.uniform([])), numbers.map(lambda x: x * generator.uniform([])),
        numbers.map(lambda x: x * variable), text.map(lambda line: table.lookup(line)),
        text.map(lambda line: tf.strings.length(tf.io.read_file(line)))]
    for i, dataset in enumerate(unknown):
        stream = DatasetStream(dataset)
        assert stream.num_shards == 3 and stream.identity == "", i
    Path(files[1]).write_text(Path(files[1]).read_text().replace("0.25", "0.26"))
    assert DatasetStream(numbers).identity not in ("", found[0])
    Path(files[1]).unlink()
    assert DatasetStream(numbers).identity == ""
