"""`export --format pretrained` and `merged`: folders that transformers and peft load without hvdtrain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import zoo  # noqa: E402
from torch_tools import one_thread  # noqa: E402,F401

from hvdtrain import Config, Trainer  # noqa: E402
from hvdtrain.commands import evaluate, export, predict  # noqa: E402
from hvdtrain.config import CheckpointConfig, DataConfig  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402

transformers = zoo.wanted("transformers")
DATA = """
import datasets
import numpy as np

x, y = np.load("rows.npz").values()

def load():
    rows = datasets.Dataset.from_dict({"input_ids": x, "attention_mask": (x != 0).astype(int), "label": y})
    return datasets.DatasetDict(train=rows, test=rows)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return what trains a tiny BERT with given model_args in a folder, and gives the outputs that predict writes."""
    zoo.wanted("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = Path(zoo.folder_of("bert", tmp_path))
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "mydata.py").write_text(DATA)
    np.savez(tmp_path / "rows.npz", *zoo.texts())

    def trained(**args):
        Trainer(Config(model=f"hf:{folder}", model_args=args, data=DataConfig("mydata.py:load", prefetch=0, workers=0),
                       global_batch=8, max_steps=2, lr=1e-2, out="run", progress="off", metrics=[],
                       checkpoint=CheckpointConfig(at_end=False))).fit()
        assert evaluate.main(["run", "--out", "metrics.json"]) == 0
        assert predict.main(["run", "--out", "outputs.npz"]) == 0
        return np.load("outputs.npz")["output"]
    return trained


def logits(model):
    x = torch.from_numpy(zoo.texts()[0])
    with torch.no_grad():
        return model.eval()(input_ids=x, attention_mask=(x != 0).long()).logits.numpy()


def test_a_merged_model_is_one_of_transformers_and_adapters_fit_their_base(run):
    peft = zoo.wanted("peft")
    want = run(lora={"r": 4, "target_modules": ["query", "value"]})
    assert export.main(["run", "--format", "merged", "--out", "merged"]) == 0
    assert export.main(["run", "--format", "pretrained", "--out", "adapters"]) == 0
    whole = transformers.AutoModelForSequenceClassification.from_pretrained("merged", local_files_only=True)
    assert not any("lora" in name for name, _ in whole.named_parameters()) and Path("merged/tokenizer.json").exists()
    base = transformers.AutoModelForSequenceClassification.from_pretrained("bert", local_files_only=True)
    assert np.abs(logits(base) - want).max() > 1e-3
    for model in (whole, peft.PeftModel.from_pretrained(base, "adapters")):
        assert np.abs(logits(model) - want).max() < 1e-5
    small, large = Path("adapters/adapter_model.safetensors"), Path("merged/model.safetensors")
    assert small.stat().st_size < large.stat().st_size / 2


def test_a_model_without_adapters_is_written_whole(run):
    want = run()
    assert export.main(["run", "--format", "pretrained", "--out", "whole"]) == 0
    whole = transformers.AutoModelForSequenceClassification.from_pretrained("whole", local_files_only=True)
    assert np.abs(logits(whole) - want).max() < 1e-5
    with pytest.raises(UserError, match="no adapters"):
        export.main(["run", "--format", "merged", "--out", "merged"])
    assert not Path("merged").exists()
