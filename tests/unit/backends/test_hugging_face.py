"""Models of transformers from a folder and as objects, on rows of ``datasets``: exact over ranks, by their own loss."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import zoo  # noqa: E402
from small_runs import config, fitted, lockstep, solo, weights  # noqa: E402
from torch_tools import one_thread  # noqa: E402,F401

from hvdtrain.backends.torch import pretrained  # noqa: E402
from hvdtrain.config import DataConfig, DataParallelConfig, Named  # noqa: E402
from hvdtrain.core.errors import UserError  # noqa: E402
from hvdtrain.data.hugging_face import DatasetRows  # noqa: E402
from hvdtrain.data.rows import ColumnNames  # noqa: E402

transformers = zoo.wanted("transformers")
datasets = zoo.wanted("datasets")

BASE = config(global_batch=8, max_steps=3, optimizer=Named("SGD", {"momentum": 0.9}), metrics=[],
              control_timeout_s=zoo.WAIT_S)
SIZE = {"vocab_size": zoo.TOKENS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 24, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    zoo.prepared(monkeypatch, tmp_path)


def rows(label="label"):
    """Texts with their tokens, as a dataset in memory whose columns a tokenizer and labels have filled."""
    x, y = zoo.texts()
    labels = {"label": y, "some": np.where(x[:, 0] % 3 == 0, -100, y), "next": np.where(x == 0, -100, x),
              "token": np.where(x == 0, -100, x % 2)}
    return datasets.Dataset.from_dict({
        "text": ["a b"] * len(x), "number": list(range(len(x))), "input_ids": x.tolist(),
        "attention_mask": (x != 0).astype(int).tolist(),
        "label" if label == "label" else "labels": labels[label].tolist()})


def same_over_ranks(made, asked, data, sizes=((1, []), (2, [3, 1]), (3, [2, 0, 1]))):
    """Train on several numbers of ranks; return the run of one rank, and the loss and metrics of each."""
    found, alone = [], None
    for size, shares in sizes:
        runs = (zoo.runs(size, replace(asked, shares=shares), data) if made is None else
                lockstep(size, replace(asked, shares=shares), lambda rank: made(), data, fitted))
        alone = alone or runs[0]
        assert all(zoo.same(weights(run), weights(alone)) for run in runs)
        found.append(runs[0].state)
    for state in found:
        assert state.loss == pytest.approx(found[0].loss, rel=1e-5)
        assert state.metrics == pytest.approx(found[0].metrics, rel=1e-5)
    return alone


def test_a_folder_trains_on_rows_of_a_dataset_alike_on_any_number_of_ranks(tmp_path):
    asked = replace(BASE, model=f"hf:{zoo.folder_of('bert', tmp_path)}", eval_every=1, epochs=1, max_steps=0)
    run = same_over_ranks(None, asked, datasets.DatasetDict(train=rows(), validation=rows()))
    assert "left out: text, number" in " ".join(run.notes) and set(run.state.metrics) == {"loss", "accuracy"}
    assert any("layer" in name for name, _ in run.spec.blocks(run.spec.model))


def of_kind(kind):
    def made():
        torch.manual_seed(0)
        if kind == "next":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(
                vocab_size=zoo.TOKENS, n_positions=24, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=1, eos_token_id=1))
        name = "BertForSequenceClassification" if kind == "some" else "BertForTokenClassification"
        return getattr(transformers, name)(transformers.BertConfig(**SIZE))
    return made


@pytest.mark.parametrize("kind", ["next", "token", "some"])
def test_the_loss_of_a_model_object_is_its_own_over_the_tokens_of_all_ranks(kind):
    made, data = of_kind(kind), rows(kind)
    run = same_over_ranks(made, replace(BASE, max_steps=1), data, sizes=((1, []), (2, [3, 1])))
    first = next(run.feed.epoch(run.state.cursor.__class__()))
    columns = {name: torch.from_numpy(np.concatenate([micro[i] for micro in first.micros]))
               for i, name in enumerate(("input_ids", "labels", "attention_mask"))}
    assert run.state.loss == pytest.approx(made()(**columns).loss.item(), rel=1e-5)


def test_zero_trains_a_folder_alike(tmp_path):
    asked = replace(BASE, model=f"hf:{zoo.folder_of('bert', tmp_path)}", max_steps=2)
    alone = zoo.runs(1, asked, rows())[0]
    for run in zoo.runs(2, replace(asked, data_parallel=DataParallelConfig("zero", 2)), rows()):
        assert zoo.same(weights(run), weights(alone))


LORA = {"lora": {"r": 4, "target_modules": ["query", "value"]}}


def test_lora_trains_and_stores_adapters_and_the_new_head_alone(tmp_path):
    zoo.wanted("peft")
    asked = replace(BASE, model=f"hf:{zoo.folder_of('bert', tmp_path)}", model_args=LORA, max_steps=2)
    alone = zoo.runs(1, asked, rows())[0]
    trained = {spec.name for spec in alone.parts.params.specs}
    assert all("lora_" in name or "modules_to_save" in name for name in trained) and len(trained) == 10
    assert {name.rpartition("/")[0] for name in alone.parts.state.state()[0]["optimizer"]} == trained
    for changes in ({"shares": [3, 1], "remat": "every:1"}, {"data_parallel": DataParallelConfig("zero", 2)}):
        for run in zoo.runs(2, replace(asked, **changes), rows()):
            assert zoo.same(weights(run), weights(alone)), changes
    base = {name: value for name, value in pretrained.build(str(tmp_path / "bert")).state_dict().items()}
    for name, value in alone.spec.model.get_base_model().state_dict().items():
        if name.replace(".base_layer", "") in base:
            assert torch.equal(value, base[name.replace(".base_layer", "")])


def test_a_model_of_peft_is_trained_as_it_is():
    peft = zoo.wanted("peft")

    def made():
        return peft.get_peft_model(of_kind("next")(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True))

    run = same_over_ranks(made, replace(BASE, max_steps=2), rows("next"), sizes=((1, []), (2, [1, 3])))
    assert {spec.name.rpartition(".lora_")[2] for spec in run.parts.params.specs} == {
        "A.default.weight", "B.default.weight"}


def test_arguments_that_lora_does_not_have_are_refused(tmp_path):
    zoo.wanted("peft")
    with pytest.raises(UserError, match="arguments of peft.LoraConfig"):
        pretrained.build(zoo.folder_of("bert", tmp_path), lora={"rank": 4})


def test_a_loss_with_other_terms_is_refused():
    model = of_kind("next")()
    own = model.loss_function
    model.loss_function = lambda *args, **more: own(*args, **more) + 1.0
    with pytest.raises(UserError, match="has no other terms"):
        solo(BASE, model, rows("next"))


@pytest.mark.parametrize("name, changes", [
    ("Mixtral", {"output_router_logits": True, "num_key_value_heads": 2, "num_local_experts": 4}),  # a small term
    ("Marian", {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32})])  # no shift
def test_a_loss_that_differs_little_before_any_training_is_refused(name, changes):
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**{**SIZE, "pad_token_id": 0, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(made)
    with pytest.raises(UserError, match="has no other terms"):
        solo(BASE, model, rows("next"))


def test_lora_trains_the_head_of_a_classifier_of_images():
    zoo.wanted("peft")
    model = transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8))
    made = pretrained.with_lora(model, {"r": 2, "target_modules": "all-linear"})
    trained = {name for name, p in made.named_parameters() if p.requires_grad and "lora_" not in name}
    assert {name.rpartition(".modules_to_save.")[0] for name in trained} == {"base_model.model.classifier"}


def test_a_task_that_returns_a_model_output_is_refused(tmp_path):
    zoo.folder_of("bert", tmp_path)
    (tmp_path / "mine.py").write_text(
        "from transformers import BertForSequenceClassification\n\ndef build():\n"
        "    return BertForSequenceClassification.from_pretrained('bert')\n\n"
        "def task(model, batch):\n    return model(input_ids=batch['input_ids'], labels=batch['label'])\n")
    with pytest.raises(UserError, match="(?i)task returned a SequenceClassifierOutput.*leave task out"):
        solo(replace(BASE, model="mine.py:build"), None, rows().remove_columns("text"))


def test_task_dtype_and_random_weights_of_a_folder(tmp_path):
    folder = zoo.folder_of("bert", tmp_path)
    made = pretrained.build(folder, task="token_classification", from_scratch=True, num_labels=5)
    assert type(made).__name__ == "BertForTokenClassification" and made.num_labels == 5 and made.training
    assert pretrained.build(folder, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(("change", "words"), [
    (lambda folder: (folder / "config.json").unlink(), "there is no .*config.json"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "use_safetensors false"),
    (lambda folder: (folder / "config.json").write_text(json.dumps(
        {**json.loads((folder / "config.json").read_text()), "architectures": ["BertModel"]})), "is a BertModel")])
def test_other_folders_are_refused(tmp_path, change, words):
    folder = zoo.folder_of("bert", tmp_path)
    change(tmp_path / "bert")
    with pytest.raises(UserError, match=words):
        pretrained.build(folder)


def test_rows_that_the_model_cannot_take_are_refused():
    texts = rows("token").remove_columns(["input_ids", "attention_mask", "labels"])
    with pytest.raises(UserError, match="(?i)tokenize texts first"):
        solo(BASE, of_kind("token")(), texts)
    with pytest.raises(UserError, match="no labels"):
        solo(BASE, of_kind("token")(), rows("token").remove_columns("labels"))
    ragged = rows("token").map(lambda row: {"input_ids": row["input_ids"][:5 + row["number"] % 2]})
    with pytest.raises(UserError, match="'input_ids' have different lengths"):
        solo(BASE, of_kind("token")(), ragged)


def test_workers_map_the_files_of_a_dataset(tmp_path):
    rows().save_to_disk(tmp_path / "rows")
    source = DatasetRows(datasets.load_from_disk(tmp_path / "rows").shuffle(seed=1),
                         ColumnNames(columns=("input_ids", "label")), np.asarray)
    packed = pickle.dumps(source)
    assert zoo.texts()[0].tobytes() not in packed and b".arrow" in packed
    for mine, theirs in zip(source.fetch(np.array([3, 1])), pickle.loads(packed).fetch(np.array([3, 1])), strict=True):
        assert np.array_equal(mine, theirs)


def test_a_dataset_with_a_transform_of_the_users_is_read_through_it():
    data = rows().with_transform(lambda batch: {"x": [np.full(3, n, np.float32) for n in batch["number"]],
                                                "y": np.array(batch["label"])})
    x, y = DatasetRows(data, ColumnNames(), np.asarray).fetch(np.array([2, 5]))
    assert x.tolist() == [[2, 2, 2], [5, 5, 5]] and y.dtype.kind == "i"


def test_a_data_file_gives_a_dataset(tmp_path):
    rows().save_to_disk(tmp_path / "rows")
    (tmp_path / "mydata.py").write_text(
        f"import datasets\n\ndef load():\n    return datasets.load_from_disk({str(tmp_path / 'rows')!r})\n")
    asked = replace(BASE, model=f"hf:{zoo.folder_of('bert', tmp_path)}", data=DataConfig(
        f"{tmp_path / 'mydata.py'}:load", prefetch=0, workers=0), max_steps=1)
    assert np.isfinite(zoo.runs(1, asked, None)[0].state.loss)
