"""Rows of different lengths, put together by collators of transformers: exact over ranks, masks from each sample."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import zoo  # noqa: E402
from small_runs import config, make_model, samples, solo  # noqa: E402
from torch_tools import one_thread  # noqa: E402,F401

from hvdtrain.backends.torch.data import adapt  # noqa: E402
from hvdtrain.config import DataConfig, Named  # noqa: E402
from hvdtrain.core import ROOT  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.data.rows import ColumnNames  # noqa: E402
from hvdtrain.engine.assemble import assemble  # noqa: E402

transformers = zoo.wanted("transformers")
datasets = zoo.wanted("datasets")

BASE = config(global_batch=8, max_steps=3, optimizer=Named("SGD", {"momentum": 0.9}), metrics=[],
              control_timeout_s=zoo.WAIT_S)
WORDS = ["[PAD]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(20))]
TEXTS = [" ".join(f"w{(i * j) % 20}" for j in range(2 + i % 7)) for i in range(24)]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    zoo.prepared(monkeypatch, tmp_path)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]",
                                                unk_token="[UNK]")


def texts():
    return datasets.Dataset.from_dict({"text": TEXTS, "label": [i % 2 for i in range(len(TEXTS))]})


def tokens():
    words = tokenizer()
    return texts().map(lambda rows: words(rows["text"]), batched=True)


def masked():
    """Return rows as a run reads them whose collator masks tokens."""
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5)
    return adapt(tokens(), 7, ColumnNames(True, columns=("input_ids", "attention_mask", "labels"), collate=collate))


def test_the_page_trains_alike_on_any_number_of_ranks_though_each_pads_to_its_own_longest_row(tmp_path):
    page = (ROOT.parent / "docs" / "how-to" / "hugging-face.md").read_text()
    (tmp_path / "reviews.py").write_text(re.search(r"```python\n# reviews.py\n(.*?)```", page, re.DOTALL)[1])
    zoo.folder_of("bert", tmp_path / "weights")
    tokenizer().save_pretrained(tmp_path / "weights" / "bert")
    datasets.DatasetDict(train=texts(), test=texts()).save_to_disk(tmp_path / "reviews")
    asked = replace(BASE, model="hf:weights/bert", model_args={"num_labels": 2}, eval_every=1, epochs=1, max_steps=2,
                    data=DataConfig("reviews.py:load", collate="reviews.py:collate", prefetch=0))
    alone = zoo.runs(1, asked, None)[0]
    widths = {micro[0].shape[1] for step in alone.eval_feeds[""].eval_epoch() for micro in step.micros}
    assert len(widths) > 1 or widths == {8}
    for run in zoo.runs(2, replace(asked, shares=[3, 1]), None):
        assert zoo.same([a for _, a in sorted(run.parts.state.state()[0]["model"].items())],
                        [a for _, a in sorted(alone.parts.state.state()[0]["model"].items())])
        assert run.state.metrics == pytest.approx(alone.state.metrics, rel=1e-5)


def test_masks_come_from_seed_epoch_and_sample():
    source = masked()
    together = source.fetch_in(np.array([5, 0, 3]), 1)
    for place, number in enumerate((5, 0, 3)):
        for whole, own in zip(together, source.fetch_in(np.array([number]), 1), strict=True):
            n = own.shape[1]
            assert np.array_equal(whole[place, :n], own[0]) and (whole[place, n:] == whole[1, -1]).all()
    assert any((a != b).any() for a, b in zip(together, source.fetch_in(np.array([5, 0, 3]), 2)))
    ids, labels, mask = together
    assert (ids[1, 2:] == 0).all() and (labels[1, 2:] == -100).all() and (mask[1, 2:] == 0).all()
    assert (labels != -100).any() and mask.dtype == ids.dtype == np.int64


def test_a_collator_also_puts_rows_of_a_torch_dataset_together():
    x, y = samples(24)

    def collate(rows):
        return torch.stack([torch.from_numpy(x) for x, _ in rows]), torch.tensor([y for _, y in rows])

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, number):
            return x[number], y[number]

    run = assemble(BASE, make_model("torch"), Rows(), *_alone(), collate=collate)
    assert np.array_equal(run.feed.data.fetch(np.array([4, 2]))[0], x[[4, 2]])


def _alone():
    from hvdtrain.cluster.control import SoloControl
    from hvdtrain.comm.collectives.base import NullCollectives

    return SoloControl(), NullCollectives(0, 1)


def test_a_collator_that_draws_from_the_global_generators_is_refused():
    def collate(rows):
        return {"x": torch.rand(len(rows), 2), "y": torch.zeros(len(rows))}

    source = adapt(tokens(), 0, ColumnNames(collate=collate))
    with pytest.raises(UserError, match="collator draws from the global random generators"):
        source.fetch(np.array([0, 1]))
    noisy = tokens().with_transform(lambda rows: {**rows, "x": [np.random.random() for _ in rows["label"]]})
    with pytest.raises(UserError, match="dataset draws from the global random generators.*which workers seed"):
        adapt(noisy, 0, ColumnNames(collate=list)).fetch(np.array([0, 1]))


def test_padding_on_the_left_is_refused():
    words = tokenizer()
    words.padding_side = "left"
    with pytest.raises(UserError, match="pads on the left"):
        adapt(tokens(), 0, ColumnNames(collate=transformers.DataCollatorWithPadding(words)))


def test_a_collator_for_arrays_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def collate(rows):\n    return rows\n")
    with pytest.raises(UserError, match="collate .*ArraySource"):
        solo(replace(BASE, data=DataConfig(collate="mine.py:collate", prefetch=0)), make_model("torch"), samples(24))
