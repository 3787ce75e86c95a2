"""Whole tensors out of shards, however they were cut: every element once, or a refusal that names the tensor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.checkpoint import CheckpointError
from hvdtrain.checkpoint.assembly import Assembly, head
from hvdtrain.checkpoint.transfer import whole_shards
from hvdtrain.protocols.state import Shard

DTYPES = ["float32", "float64", "float16", "int64", "uint16", "uint8", "bool"]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def cut_tensors(draw):
    """(tensors by group and name, their shards in any order)."""
    tensors, shards = {}, []
    for i in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
        size = int(np.prod(shape))
        group, name = f"group-{i % 2}", f"w{i}"
        array = (np.arange(size) % 2 if dtype == "bool" else np.arange(size) + 100 * i).astype(dtype).reshape(shape)
        tensors.setdefault(group, {})[name] = array
        places = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
        for begin, end in zip([0, *places], [*places, size]):
            shards.append(Shard(group, name, shape, begin, array.reshape(-1)[begin:end].copy()))
    return tensors, draw(st.permutations(shards))


def assembled(shards, how):
    """The arrays of ``shards``; ``how`` "add", or "place": by the memory that a receiver is given."""
    together = Assembly()
    for shard in shards:
        if how == "add":
            together.add(shard)
        else:
            together.place(head(shard))[...] = shard.values
    return together.finish()


@given(cut_tensors(), st.sampled_from(["add", "place"]))
def test_any_cut_gives_the_tensors_back(cut, how):
    tensors, shards = cut
    found = assembled(shards, how)
    assert {g: set(t) for g, t in found.items()} == {g: set(t) for g, t in tensors.items()}
    for group, arrays in tensors.items():
        for name, want in arrays.items():
            got = found[group][name]
            assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())


@given(cut_tensors(), st.sampled_from(["add", "place"]), st.data())
def test_a_shard_left_out_is_refused(cut, how, data):
    _, shards = cut
    left_out = data.draw(st.integers(0, len(shards) - 1))
    gone, kept = shards[left_out], [s for i, s in enumerate(shards) if i != left_out]
    if gone.values.size == 0:
        return
    if not any(s.name == gone.name for s in kept):  # nobody can know of a tensor of which nothing came
        return
    with pytest.raises(CheckpointError, match=rf"'{gone.name}' of group '{gone.group}': {gone.values.size} of"):
        assembled(kept, how)


@given(cut_tensors(), st.sampled_from(["add", "place"]), st.data())
def test_a_shard_that_came_twice_is_refused(cut, how, data):
    _, shards = cut
    twice = data.draw(st.sampled_from(shards))
    if twice.values.size == 0:
        return
    with pytest.raises(CheckpointError, match=f"'{twice.name}' of group '{twice.group}': some of the elements"):
        assembled([*shards, twice], how)


@pytest.mark.parametrize("odd, want", [
    (Shard("model", "w", (3, 2), 4, np.ones(2, np.float32)), "it came as float32[2, 3] and as float32[3, 2]"),
    (Shard("model", "w", (2, 3), 4, np.ones(2)), "it came as float32[2, 3] and as float64[2, 3]"),
    (Shard("model", "w", (2, 3), 5, np.ones(2, np.float32)), "elements 5 to 7 of 6"),
    (Shard("model", "w", (2, 3), -1, np.ones(2, np.float32)), "elements -1 to 1 of 6"),
    (Shard("model", "w", (2, 3), 3, np.ones(3, np.float32)), "some of the elements 3 to 6 came twice"),
], ids=["shape", "dtype", "beyond", "before", "overlap"])
def test_a_shard_that_does_not_fit_is_refused(odd, want):
    together = Assembly()
    together.add(Shard("model", "w", (2, 3), 0, np.zeros(4, np.float32)))
    together.add(odd)
    with pytest.raises(CheckpointError) as refused:
        together.finish()
    assert want in str(refused.value) and "expected every element from exactly one rank" in str(refused.value)


def test_whole_tensors_are_not_copied():
    own = {"model": {"w": np.arange(6.0).reshape(2, 3), "scalar": np.array(3)}}
    found = assembled(whole_shards(own, ["model", "optimizer"]), "add")
    assert np.shares_memory(found["model"]["w"], own["model"]["w"]) and found["model"]["scalar"].shape == ()
    assert set(found) == {"model"}
