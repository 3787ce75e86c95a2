"""The final files of a PyTorch model hold each tensor alone, whatever memory it lies in."""

import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, load_model  # noqa: E402

from hvdtrain.backends.torch import state  # noqa: E402
from hvdtrain.checkpoint.manifest import CheckpointError  # noqa: E402


class Parts(torch.nn.Module):
    """Parameters that are parts of larger storages, tied, overlapping, empty, transposed and of 16 bits."""

    def __init__(self):
        super().__init__()
        large = torch.arange(80_000, dtype=torch.float32).reshape(10_000, 8)
        self.cut = torch.nn.Parameter(large[:3])
        self.lstm = torch.nn.LSTM(3, 4)
        packed = torch.cat([p.detach().reshape(-1) for p in self.lstm.parameters()])  # as cuDNN leaves them
        place = 0
        for name, p in list(self.lstm.named_parameters()):
            setattr(self.lstm, name, torch.nn.Parameter(packed[place:place + p.numel()].view_as(p)))
            place += p.numel()
        self.whole = torch.nn.Parameter(torch.ones(4, 4))
        self.tied = self.whole
        self.over = torch.nn.Parameter(self.whole.detach()[:2])
        self.turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.narrow = torch.nn.Parameter(torch.full((3,), 1.5, dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("flag", torch.tensor(True))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    model, folder = Parts(), tmp_path_factory.mktemp("final")
    with torch.no_grad():
        model.over += 1  # shares memory with the first rows of ``whole``
    assert state.write_files(model, folder) == ["model.safetensors", "model.pt"]
    return model, folder


def test_both_files_hold_every_tensor(written):
    model, folder = written
    want = model.state_dict()
    for found in (load_file(folder / "model.safetensors"), torch.load(folder / "model.pt", weights_only=True)):
        assert set(want) - set(found) in ({"whole"}, set())  # "tied" comes first by name
        assert all(found[name].dtype == want[name].dtype and torch.equal(found[name], want[name]) for name in found)


def test_tied_weights_load_as_safetensors_loads_them(tmp_path):
    def tied():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    state.write_files(model, tmp_path)
    assert "1.weight" not in load_file(tmp_path / "model.safetensors")
    load_model(other, str(tmp_path / "model.safetensors"), strict=True)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in model.state_dict().items())


def test_neither_file_holds_the_storage_around_a_part(written):
    _, folder = written
    assert all((folder / name).stat().st_size < 30_000 for name in ("model.safetensors", "model.pt"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"whole": "tied"}
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_files_follow_the_umask(written, tmp_path):
    before = os.umask(0o027)
    try:
        state.write_files(written[0], tmp_path)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o640}


def test_a_type_that_no_file_holds_is_named():
    with pytest.raises(CheckpointError, match="'wave' of group 'model' has dtype complex64"):
        state.plan_of({"wave": torch.zeros(2, dtype=torch.complex64)})
