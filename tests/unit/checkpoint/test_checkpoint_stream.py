"""Whole tensors out of shards, however they were cut and sent: every element once, or a refusal that names the tensor.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.checkpoint import CheckpointError, stream
from hvdtrain.checkpoint.stream import (
    StreamedContent,
    head,
    in_order,
    local_pieces,
    messages,
    n_bytes,
    packed,
    unpacked,
)
from hvdtrain.checkpoint.tensors import layout
from hvdtrain.checkpoint.transfer import whole_shards
from hvdtrain.core.protocols.run import Shard

DTYPES = ["float32", "float64", "float16", "int64", "uint16", "uint8", "bool"]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    """Pieces of 16 bytes; those below 12 travel together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", 16)
        patch.setattr(stream, "PACKED_BYTES", 12)
        yield


@st.composite
def cut_tensors(draw):
    """(tensors by group and name, their shards by rank in any order)."""
    tensors, shards_P = {}, [[] for _ in range(draw(st.integers(1, 3)))]
    for i in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
        size = int(np.prod(shape))
        group, name = f"group-{i % 2}", f"w{i}"
        array = (np.arange(size) % 2 if dtype == "bool" else np.arange(size) + 100 * i).astype(dtype).reshape(shape)
        tensors.setdefault(group, {})[name] = array
        places = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
        for begin, end in zip([0, *places], [*places, size]):
            rank = draw(st.integers(0, len(shards_P) - 1))
            shards_P[rank].append(Shard(group, name, shape, begin, array.reshape(-1)[begin:end].copy()))
    return tensors, [draw(st.permutations(shards)) for shards in shards_P]


def sent(shards):
    """Return the heads of a rank's shards and their pieces, through messages."""
    ready = in_order(shards)
    heads, wire = [head(shard) for shard in ready], packed(ready)

    def receive(memory):
        memory[...] = next(wire)
        return memory

    return heads, unpacked(heads, receive)


def content(shards_P):
    """All ranks' shards; the first rank's are in memory, the others' are sent."""
    first = in_order(shards_P[0])
    pairs = [([head(shard) for shard in first], local_pieces(first)), *(sent(shards) for shards in shards_P[1:])]
    return StreamedContent([heads for heads, _ in pairs], [pieces for _, pieces in pairs], {})


def assembled(shards_P):
    """Return the arrays that shards make up, by group and name."""
    whole, found = content(shards_P), {}
    for group, specs in whole.specs().items():
        names = layout(specs, group).names
        data, at = b"".join(whole.blocks(group, names)), 0
        for name in names:
            spec, end = specs[name], at + specs[name].n_bytes
            found.setdefault(group, {})[name] = np.frombuffer(data[at:end], spec.dtype).reshape(spec.shape)
            at = end
        assert at == len(data)
    assert list(whole._left) == []
    return found


@settings(deadline=None)
@given(cut_tensors())
def test_any_cut_gives_the_tensors_back(cut):
    tensors, shards_P = cut
    found = assembled(shards_P)
    assert {g: set(t) for g, t in found.items()} == {g: set(t) for g, t in tensors.items()}
    for group, arrays in tensors.items():
        for name, want in arrays.items():
            got = found[group][name]
            assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())


@given(cut_tensors(), st.data())
def test_a_shard_left_out_is_refused(cut, data):
    _, shards_P = cut
    everything = [shard for shards in shards_P for shard in shards]
    gone = data.draw(st.sampled_from(everything))
    if gone.values.size == 0 or not any(s.name == gone.name for s in everything if s is not gone):
        return  # nobody can know of a tensor of which nothing came
    with pytest.raises(CheckpointError, match=rf"'{gone.name}' of group '{gone.group}': {gone.values.size} of"):
        content([[s for s in shards if s is not gone] for shards in shards_P])


@given(cut_tensors(), st.data())
def test_a_shard_that_came_twice_is_refused(cut, data):
    _, shards_P = cut
    twice = data.draw(st.sampled_from([shard for shards in shards_P for shard in shards]))
    if twice.values.size == 0:
        return
    with pytest.raises(CheckpointError, match=f"'{twice.name}' of group '{twice.group}': some of the elements"):
        content([*shards_P, [twice]])


@given(cut_tensors())
def test_messages_are_bounded_and_hold_small_shards_together(cut):
    _, shards_P = cut
    for shards in shards_P:
        heads = [head(shard) for shard in in_order(shards)]
        sent_ = [sum(high - low for _, low, high in message) for message in messages(heads)]
        assert sum(sent_) == sum(n_bytes(one) for one in heads) and max(sent_, default=0) <= 16
        small = [all(n_bytes(heads[i]) < 12 for i, _, _ in message) for message in messages(heads)]
        pairs = zip(zip(sent_, small), zip(sent_[1:], small[1:]))
        assert all(a + b > 12 for (a, one), (b, other) in pairs if one and other)


@pytest.mark.parametrize("odd, want", [
    (Shard("model", "w", (3, 2), 4, np.ones(2, np.float32)), "it was sent as float32[2, 3] and as float32[3, 2]"),
    (Shard("model", "w", (2, 3), 4, np.ones(2)), "it was sent as float32[2, 3] and as float64[2, 3]"),
    (Shard("model", "w", (2, 3), 5, np.ones(2, np.float32)), "elements 5 to 7 of 6"),
    (Shard("model", "w", (2, 3), -1, np.ones(2, np.float32)), "elements -1 to 1 of 6"),
    (Shard("model", "w", (2, 3), 3, np.ones(3, np.float32)), "some of the elements 3 to 6 were sent twice"),
], ids=["shape", "dtype", "beyond", "before", "overlap"])
def test_a_shard_that_does_not_fit_is_refused(odd, want):
    with pytest.raises(CheckpointError) as refused:
        content([[Shard("model", "w", (2, 3), 0, np.zeros(4, np.float32))], [odd]])
    assert want in str(refused.value) and "expected every element from exactly one rank" in str(refused.value)


def test_what_a_rank_holds_is_not_copied():
    own = {"model": {"w": np.arange(6.0).reshape(2, 3), "scalar": np.array(3)}}
    shards = in_order(whole_shards(own, ["model", "optimizer"]))
    assert [shard.name for shard in shards] == ["scalar", "w"]
    assert all(np.shares_memory(piece, own["model"]["w"]) for piece in list(local_pieces(shards))[1:])


def test_what_is_not_written_is_let_go_to_the_last_piece():
    shards = [Shard("model", f"w{i}", (9,), 0, np.arange(9.0)) for i in range(3)]
    whole = content([[], shards])
    next(whole.blocks("model", ["w0", "w1", "w2"]))
    whole.drain()
    assert list(whole._left) == []
