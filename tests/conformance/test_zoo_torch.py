"""timm and transformers in the scripts of docs/how-to/models.md: over ranks, with remat, with ZeRO."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import zoo  # noqa: E402
from small_runs import config, solo, weights  # noqa: E402
from torch_tools import one_thread  # noqa: E402,F401

from hvdtrain.config import DataParallelConfig, Named, PipelineConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

BASE = config(global_batch=8, max_steps=4, optimizer=Named("SGD", {"momentum": 0.9}), metrics=[],
              control_timeout_s=zoo.WAIT_S)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    zoo.prepared(monkeypatch, tmp_path)


def settings(file, **args):
    return replace(BASE, model=f"{file}:build", model_args=args)


def pictures():
    x, y = zoo.images()
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y


def timm_model(tmp_path, name, **more):
    """Return (settings, data) of a timm model whose weights, all but the head of 7 classes, are in a file."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(zoo.timm().create_model(name, num_classes=7, **more).state_dict(), tmp_path / "weights.safetensors")
    return settings("timm_model.py", name=name, classes=4, weights=str(tmp_path / "weights.safetensors"), **more), (
        pictures())


def vit(tmp_path):
    return timm_model(tmp_path, "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2)


def hugging(kind):
    def made(tmp_path):
        file, data = ("hf_classifier.py", zoo.texts()) if kind == "bert" else ("hf_causal.py", zoo.following())
        return settings(file, folder=zoo.folder_of(kind, tmp_path)), data
    return made


def left(size, asked, data):
    """Return the weights that all ranks end with, and the first rank's run."""
    runs = zoo.runs(size, asked, data)
    assert all(a.tobytes() == b.tobytes() for run in runs for a, b in zip(weights(run), weights(runs[0])))
    return weights(runs[0]), runs[0]


@pytest.mark.parametrize("case", [vit, hugging("bert"), hugging("gpt2"), hugging("llama")],
                         ids=["vit", "bert", "gpt2", "llama"])
def test_ranks_remat_and_zero_have_the_curve_of_one_process(case, tmp_path):
    asked, data = case(tmp_path)
    alone, run = left(1, asked, data)
    assert run.spec.model.training and run.state.grad_norm > 0
    for size, changes in ((2, {"shares": [3, 1]}),
                          (2, {"data_parallel": DataParallelConfig("zero", 2), "remat": "every:1"})):
        got, run = left(size, replace(asked, **changes), data)
        assert zoo.same(got, alone), changes
        assert bool(run.parts.remat.chosen) == ("remat" in changes)


def test_a_resnet_of_timm_is_cut_over_ranks(tmp_path):
    asked, data = timm_model(tmp_path, "resnet10t", stem_width=8, channels=(16, 16, 32, 32))
    asked = replace(asked, max_steps=2, pipeline=PipelineConfig(2, micro_batches=2))
    runs = zoo.runs(2, asked, data)
    names = [set(run.parts.state.state()[0]["model"]) for run in runs]
    assert all(names) and not names[0] & names[1] and {"conv1.0.weight", "fc.weight"} <= names[0] | names[1]


@pytest.mark.parametrize(("case", "words"), [(vit, "cls_token of the model is in none of its blocks"),
                                             (hugging("gpt2"), "wte.weight of the model is in none of its blocks")])
def test_what_is_no_chain_is_refused_where_it_is_to_be_cut(case, words, tmp_path):
    asked, data = case(tmp_path)
    with pytest.raises(UserError, match=words):
        zoo.runs(2, replace(asked, pipeline=PipelineConfig(2)), data)


OWN_DATACLASS = """
import dataclasses
import torch

@dataclasses.dataclass
class Out:
    logits: torch.Tensor

class Model(torch.nn.Linear):
    def forward(self, x):
        return Out(super().forward(x))

def build():
    return Model(4, 3)
"""


def test_a_models_own_dataclass_without_a_task_is_told(tmp_path):
    (tmp_path / "bare.py").write_text(OWN_DATACLASS)
    data = np.ones((16, 4), np.float32), np.zeros(16, np.int64)
    with pytest.raises(UserError, match="returns a Out.*task"):
        solo(replace(BASE, model="bare.py:build"), None, data)
