"""A device for each local rank."""

import pytest

from hvdtrain.cluster.devices import (
    DeviceFacts,
    count_gpus,
    describe_difference,
    overlap,
    sharing,
    usable,
    visible_devices,
)
from hvdtrain.core.errors import UserError

V = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize("env, count, local_rank, local_size, want", [
    ({}, 0, 0, 2, None),
    ({}, 4, 2, 4, "2"),
    ({}, 2, 3, 4, "1"),
    ({}, 4, -1, 0, None),
    ({V: "3,5"}, 8, 1, 2, "5"),
    ({V: "GPU-aa,GPU-bb"}, 8, 0, 2, "GPU-aa"),
    ({V: "6"}, 8, 1, 2, "6"),
    ({V: ""}, 8, 0, 2, None),
    ({V: "-1"}, 8, 0, 2, None),
    ({V: "1,-1,2"}, 8, 1, 2, "1"),
    ({V: "0,1"}, 0, 0, 2, None),
], ids=range(11))
def test_visible_devices(env, count, local_rank, local_size, want):
    assert visible_devices(env, count, local_rank, local_size) == want


@pytest.mark.parametrize("env, count, per_rank, want", [
    ({}, 4, 2, ["0,1", "2,3"]),
    ({}, 5, 2, ["0,1", "2,3"]),
    ({V: "4,5,6,7"}, 8, 2, ["4,5", "6,7"]),
    ({V: "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f"}, 8, 3, ["GPU-a,GPU-b,GPU-c", "GPU-d,GPU-e,GPU-f"]),
    ({}, 0, 2, [None, None]),
    ({V: ""}, 8, 2, [None, None]),
], ids=range(6))
def test_two_ranks_own_several_devices_each_without_overlap(env, count, per_rank, want):
    assert [visible_devices(env, count, r, 2, per_rank) for r in range(2)] == want


def test_a_launchers_own_list_for_each_rank_is_kept():
    assert visible_devices({V: "6,7"}, 8, 1, 2, per_rank=2) == "6,7"
    assert visible_devices({}, 4, -1, 0, per_rank=2) is None


@pytest.mark.parametrize("env, count, shown, fits", [
    ({}, 3, "3 GPUs", "at most 1 rank on"),
    ({V: "5"}, 8, "1 GPU", "take a host"),
    ({V: "5,6,7"}, 8, "3 GPUs", "at most 1 rank on"),
], ids=range(3))
def test_too_few_says_how_many(env, count, shown, fits):
    for local_rank in range(2):  # every rank of the host alike, also the one whose entries are there
        with pytest.raises(UserError) as caught:
            visible_devices(env, count, local_rank, 2, per_rank=2)
        assert f"this host shows {shown} for 2 ranks x 2 devices" in caught.value.got
        assert caught.value.expected.startswith("4, ") and fits in caught.value.do


def test_too_few_names_the_way_without_gpus():
    with pytest.raises(UserError, match=rf"use CPUs only with {V}= \(empty\)"):
        visible_devices({}, 1, 0, 2, per_rank=2)


@pytest.mark.parametrize("listed, count, words", [
    ("0,0", 4, "lists GPU 0 twice"),
    ("00,0,1,2", 4, "lists GPU 0 twice"),
    ("GPU-a,GPU-a,GPU-b,GPU-c", 4, "lists GPU GPU-a twice"),
    ("MIG-a,MIG-b", 1, "lists MIG instances (MIG-a)"),
    ("0,7", 4, "shows 1 GPU for"),
], ids=range(5))
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cuda_would_not_show_one_process_is_refused_for_several_devices(listed, count, words, ranks):
    with pytest.raises(UserError) as caught:
        visible_devices({V: listed}, count, 0, ranks, per_rank=2)
    assert words in caught.value.got
    assert visible_devices({V: listed}, count, 0, 1) in listed, "one device each: as ever"


def test_the_only_rank_keeps_the_only_gpu():
    """PyTorch splits over it and the CPU."""
    assert visible_devices({}, 1, 0, 1, per_rank=2) == "0"
    with pytest.raises(UserError, match="1 GPU for 1 rank x 2 devices"):
        visible_devices({V: "3"}, 4, 0, 1, per_rank=2)


def test_overlap_is_found_among_ranks_of_one_host_only():
    assert overlap([("a", ("0", "1")), ("a", ("2", "3")), ("b", ("0", "1"))]) is None
    assert overlap([("a", ()), ("a", ())]) is None
    error = overlap([("b", ("0", "1")), ("a", ("4", "5")), ("a", ("4", "5"))])
    assert error.got.startswith("ranks 1 and 2 on host a both use GPU 4: it shows 2 GPUs for 2 ranks x 2 ")
    assert error.expected.startswith("4, ")


def test_every_local_rank_has_its_own_where_there_are_enough():
    assert len({visible_devices({}, 4, r, 4) for r in range(4)}) == 4


def test_sharing_is_said():
    assert sharing({}, 2, 2) == "" and sharing({}, 0, 4) == ""
    assert "4 ranks of this host share 2 GPUs" in sharing({}, 2, 4) and "NCCL" in sharing({}, 2, 4)
    assert "share 1 GPU " in sharing({}, 1, 2)
    assert sharing({V: "3"}, 8, 4) == "", "the launcher gave each rank its own"


def test_usable_stops_at_the_first_invalid_entry():
    assert usable({V: "0, 2,-1,3"}, 4) == ["0", "2"]
    assert usable({V: "0,1,4,3"}, 4) == ["0", "1"] and usable({V: "9"}, 4) == []
    assert usable({V: "GPU-4,1"}, 4) == ["GPU-4", "1"] and usable({V: "NoDevFiles"}, 4) == []


def test_count_gpus(tmp_path):
    assert count_gpus(str(tmp_path)) == 0
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert count_gpus(str(tmp_path)) == 1
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(str(tmp_path)) == 2


def test_a_host_with_more_ranks_than_gpus_beside_one_with_fewer():
    """3 + 1 ranks on hosts with 2 and 1 GPUs: each host counts its own devices and local ranks."""
    first = [visible_devices({}, 2, local, 3) for local in range(3)]
    assert first == ["0", "1", "0"] and visible_devices({}, 1, 0, 1) == "0"
    assert "3 ranks of this host share 2 GPUs" in sharing({}, 2, 3) and sharing({}, 1, 1) == ""


def device(kind="cuda", arch="sm_80", name="A100", memory_bytes=0):
    return DeviceFacts(kind, name, arch, memory_bytes)


@pytest.mark.parametrize("devices, want", [
    ([], ""),
    ([device()], ""),
    ([device(), device(name="A100 80GB", memory_bytes=80)], ""),
    ([device("cpu", "x86_64", "Xeon"), device("cpu", "aarch64", "Grace")], ""),
    ([device(), device(), device(arch="sm_86"), device()], "cuda sm_80 (ranks 0-1,3), cuda sm_86 (rank 2)"),
    ([device("cpu", "x86_64"), device()], "cpu (rank 0), cuda sm_80 (rank 1)"),
    ([device("rocm", "gfx90a:sramecc+:xnack-"), device("rocm", "gfx90a")], ""),
    ([device("rocm", "gfx90a"), device()], "rocm gfx90a (rank 0), cuda sm_80 (rank 1)"),
    ([device("rocm", "", "MI250"), device("rocm", "", "MI100")], "rocm MI250 (rank 0), rocm MI100 (rank 1)"),
], ids=range(9))
def test_unlike(devices, want):
    assert describe_difference(devices) == (want and f"different devices: {want}")
