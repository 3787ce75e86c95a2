"""One device per local rank."""

import pytest

from hvdtrain.cluster.devices import count_gpus, sharing, usable, visible_devices

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


def test_every_local_rank_has_its_own_where_there_are_enough():
    assert len({visible_devices({}, 4, r, 4) for r in range(4)}) == 4


def test_sharing_is_said():
    assert sharing({}, 2, 2) == "" and sharing({}, 0, 4) == ""
    assert "4 ranks of this host share 2 GPUs" in sharing({}, 2, 4) and "NCCL" in sharing({}, 2, 4)
    assert "share 1 GPU " in sharing({}, 1, 2)
    assert sharing({V: "3"}, 8, 4) == "", "the launcher gave each rank its own"


def test_usable_stops_at_the_first_invalid_entry():
    assert usable({V: "0, 2,-1,3"}, 4) == ["0", "2"]


def test_count_gpus(tmp_path):
    assert count_gpus(str(tmp_path)) == 0
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert count_gpus(str(tmp_path)) == 1
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(str(tmp_path)) == 2
