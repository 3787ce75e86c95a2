"""Models of transformers and peft: load a local folder, and train and predict with the loss that the model's class has.

Owns the sums that make this loss exact over ranks; the mean in ``ModelOutput.loss`` is of one micro-batch. Imports
transformers only for ``--model hf:FOLDER``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.backends.pairs import Pair
from hvdtrain.core.errors import UserError, nearest
from hvdtrain.core.resolve import absolute, not_installed

IGNORED = -100
"""Label that does not count, in all losses of transformers."""
CLASSES = "single_label_classification"
SAMPLE, TOKEN, NEXT = "sample", "token", "next"
"""Labels of a loss: one or several per sample, one per token, or the tokens themselves, each predicted from those
before it."""
KINDS = {"ForSequenceClassification": SAMPLE, "ForImageClassification": SAMPLE, "ForAudioClassification": SAMPLE,
         "ForVideoClassification": SAMPLE, "ForMultipleChoice": SAMPLE, "ForTokenClassification": TOKEN,
         "ForMaskedLM": TOKEN, "ForCausalLM": NEXT, "LMHeadModel": NEXT, "ForConditionalGeneration": NEXT}
"""Kind of the labels by a part of the name of the model's class."""
TASKS = {"sequence_classification": "SequenceClassification", "token_classification": "TokenClassification",
         "image_classification": "ImageClassification", "audio_classification": "AudioClassification",
         "video_classification": "VideoClassification", "multiple_choice": "MultipleChoice", "masked_lm": "MaskedLM",
         "causal_lm": "CausalLM", "seq2seq_lm": "Seq2SeqLM"}
"""Values of ``model_args.task``, with the class AutoModelFor... that each loads."""
PEFT_TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS", "ForCausalLM": "CAUSAL_LM",
              "LMHeadModel": "CAUSAL_LM"}
"""Type of a task in peft, by a part of the name of the class: it trains the new head of a classifier, too."""
HEADS = ("classifier", "score")
"""Parts of the names of other classifiers' heads."""
SAME_LOSS, SAME_LOSS_16 = 1e-4, 0.02
"""Relative difference between the model's own loss and ours that rounding explains, and rounding to 16 bits: less than
a small further term, such as that of the router of a mixture of experts."""
OWN_TASK = "build the model in a file with a task(model, batch) -> (loss_sum, weight)"


def build(folder: str, task: str = "", from_scratch: bool = False, lora: dict[str, Any] | None = None,
          **more: Any) -> torch.nn.Module:
    """Return the model of a local folder of transformers, or of an installed package with its files.

    ``task``: one of `TASKS`; "": the class that config.json names. ``from_scratch``: random weights. ``lora``:
    arguments of peft's ``LoraConfig``. ``more``: those of ``from_pretrained``. Fetches nothing, and reads no pickle
    unless ``use_safetensors`` is given as false.
    """
    path = folder_of(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import, which reads it
    transformers = _imported("transformers")
    transformers.utils.logging.disable_progress_bar()  # each rank would show one
    dtype = more.pop("dtype", more.pop("torch_dtype", "float32"))
    local: dict[str, Any] = {"local_files_only": True}
    try:
        if from_scratch:
            config = transformers.AutoConfig.from_pretrained(path, **local, **more)
            made = _class(transformers, task, path, config.architectures)
            make = made.from_config if task else made._from_config
            model = make(config, dtype=getattr(torch, str(dtype).removeprefix("torch.")))
        else:
            named = transformers.AutoConfig.from_pretrained(path, **local).architectures
            made = _class(transformers, task, path, named)
            model = made.from_pretrained(path, **local, dtype=dtype, **{"use_safetensors": True, **more})
    except OSError as error:
        raise UserError(f"hf:{folder} cannot be loaded: {' '.join(str(error).split())}",
                        "a folder written by save_pretrained, with config.json and safetensors files",
                        "write it with model.save_pretrained(FOLDER); --model_args.use_safetensors false loads pickled "
                        "weights, which can run any code, and --model_args.from_scratch true random ones") from None
    if not parts_of(model):
        raise UserError(f"hf:{folder} is a {type(model).__name__}",
                        f"a class with one of {', '.join(KINDS)} in its name",
                        f"set model_args.task to one of {', '.join(TASKS)}, or {OWN_TASK}")
    return (with_lora(model, lora) if lora else model).train()


def with_lora(model: Any, lora: dict[str, Any]) -> torch.nn.Module:
    """Return ``model`` with adapters, which alone are trained, beside the head of a classifier."""
    peft = _imported("peft", "model_args.lora")
    kind = next((kind for part, kind in PEFT_TASKS.items() if part in type(model).__name__), None)
    heads = [name for name, _ in model.named_children() if kind is None and any(part in name for part in HEADS)]
    try:
        made: torch.nn.Module = peft.get_peft_model(model, peft.LoraConfig(
            **{"task_type": kind, "modules_to_save": heads or None, **lora}))
    except (TypeError, ValueError) as error:
        raise UserError(f"model_args.lora {lora}: {' '.join(str(error).split())}", "arguments of peft.LoraConfig, such "
                        "as r and target_modules", "correct model_args.lora") from None
    return made


def folder_of(text: str) -> str:
    """Return the folder that ``hf:`` names; `UserError` where there is none with a config.json."""
    path = absolute(Path(text).expanduser())
    if not path.is_dir() and all(part.isidentifier() for part in text.split(".")):
        try:
            found = importlib.util.find_spec(text)
        except ImportError:
            found = None
        path = Path((found.submodule_search_locations or [str(path)])[0]) if found else path
    if not (path / "config.json").is_file():
        raise UserError(f"--model hf:{text}: there is no {path / 'config.json'}",
                        "a local folder of transformers, or an installed package with its files",
                        "write one with model.save_pretrained(FOLDER), or download it beforehand; training fetches "
                        "nothing")
    return str(path)


def _class(transformers: Any, task: str, path: str, architectures: list[str] | None) -> Any:
    if task:
        if task not in TASKS:
            raise UserError(f"model_args.task is {task!r}", nearest(task, TASKS), "correct model_args.task")
        return getattr(transformers, f"AutoModelFor{TASKS[task]}")
    named = (architectures or [""])[0]
    made = getattr(transformers, named, None)
    if made is None:
        raise UserError(f"{path}/config.json names the class {named!r}", "a class of transformers in architectures",
                        f"set model_args.task to one of {', '.join(TASKS)}")
    return made


def _imported(package: str, what: str = "--model hf:FOLDER") -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise not_installed(what, package, "zoo") from None


def parts_of(model: Any) -> dict[str, Any]:
    """Return task, weight, metrics, predict, blocks and columns of a model of transformers or peft; {} for others."""
    base = base_of(model)
    own = next((c.__name__ for c in type(base).__mro__ if c.__module__.startswith("transformers.models.")), "")
    kind = next((kind for part, kind in KINDS.items() if part in own), "")
    if not kind:
        return {}
    task = ModelTask(base, TOKEN if kind == NEXT and base.config.is_encoder_decoder else kind)
    return {"task": task, "weight": task.weight, "metrics": task.metrics, "predict": task.predict, "blocks": blocks,
            "columns": task.columns}


def base_of(model: Any) -> Any:
    """Return the model of transformers within one of peft; ``model`` itself without adapters."""
    adapted = any(c.__module__.startswith("peft.") for c in type(model).__mro__)
    return model.get_base_model() if adapted else model


def blocks(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the layers that transformers checkpoints, too, by name."""
    return [(name, layer) for name, layer in model.named_modules()
            if any(c.__name__ == "GradientCheckpointingLayer" for c in type(layer).__mro__)]


class ModelTask:
    """The loss of a model's class as a sum and its weight.

    ``columns``: those that the model's forward takes, and other names of its labels. The first batch also goes through
    the model's own loss, which must be the mean of this sum: a class may have other terms.
    """

    OTHER_NAMES = {"label": "labels", "label_ids": "labels"}

    def __init__(self, base: Any, kind: str) -> None:
        self.kind = kind
        self._config, self._class = base.config, type(base).__name__
        self._takes = set(inspect.signature(base.forward).parameters)
        self.columns = frozenset((*self._takes, *self.OTHER_NAMES))
        self._main, self._needs_labels = str(base.main_input_name), bool(base.config.is_encoder_decoder)
        self._compared = False
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, model: torch.nn.Module, batch: Any) -> Pair:
        inputs = self._inputs(batch)
        labels = self._labels(inputs, batch)
        output = self._output(model, inputs, labels, own_loss=not self._compared)
        logits = output.logits.float()
        total, weight = self._pair(logits, labels)
        if not self._compared and float(weight):
            self._compare(float(total.detach()) / float(weight), output)
        self._last = None if torch.is_grad_enabled() else (labels, logits)
        return total, weight

    def weight(self, batch: Any) -> float:
        """Return the labels of a numpy batch that count, or its samples where a loss takes all."""
        labels = np.asarray(self._labels(self._inputs(batch), batch))
        if self.kind == SAMPLE and self._problem(labels.dtype.kind == "f") != CLASSES:
            return float(len(labels))
        return float(((labels[:, 1:] if self.kind == NEXT else labels) != IGNORED).sum())

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, Pair]:
        """Return the accuracy over labels that are classes."""
        inputs = self._inputs(batch)
        labels = self._labels(inputs, batch)
        last, self._last = self._last, None
        logits = last[1] if last is not None and last[0] is labels else self._output(model, inputs, labels).logits
        if self.kind == SAMPLE and self._problem(labels.is_floating_point()) != CLASSES:
            return {}
        logits, labels = self._aligned(logits, labels)
        counts = labels != IGNORED
        return {"accuracy": (((logits.argmax(-1) == labels) & counts).sum(), counts.sum())}

    def predict(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the logits."""
        inputs = self._inputs(batch)
        return self._output(model, inputs, inputs.pop("labels", None)).logits

    def _inputs(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            named = {self.OTHER_NAMES.get(name, name): value for name, value in batch.items()}
            found = {name: value for name, value in named.items() if name in self._takes}
            if not set(found) - {"labels"}:
                raise UserError(f"rows have the columns {', '.join(batch)}, none of which {self._class} takes",
                                f"columns such as {self._main}",
                                "tokenize texts first: dataset.map(lambda rows: tokenizer(rows['text'], "
                                "truncation=True), batched=True)")
            return found
        if len(batch) > 2:
            raise UserError(f"a sample has {len(batch)} arrays", f"({self._main}, labels), or columns by name",
                            f"return dicts from the data, with names that {self._class}.forward has")
        return dict(zip((self._main, "labels"), batch))

    def _labels(self, inputs: dict[str, Any], batch: Any) -> Any:
        if "labels" not in inputs:
            names = ", ".join(batch) if isinstance(batch, Mapping) else self._main
            raise UserError(f"rows have the columns {names} and no labels", "the column labels (or label)",
                            "add it, or give a data collator that does, such as transformers."
                            "DataCollatorForLanguageModeling(tokenizer, mlm=False) for a causal language model")
        return inputs.pop("labels")

    def _output(self, model: torch.nn.Module, inputs: dict[str, Any], labels: Any, own_loss: bool = False) -> Any:
        if inputs.get("input_ids") is not None:
            inputs = {**inputs, "input_ids": inputs["input_ids"].long()}
        if labels is not None and (own_loss or self._needs_labels):
            inputs = {**inputs, "labels": labels if labels.is_floating_point() else labels.long()}
        if "use_cache" in self._takes:
            inputs = {**inputs, "use_cache": False}
        return model(**inputs)

    def _problem(self, of_floats: bool) -> str:
        """Return the kind of a classification as `transformers` finds it; ``of_floats``: its labels are."""
        if self._config.problem_type is not None:
            return str(self._config.problem_type)
        if self._config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if of_floats else CLASSES

    def _aligned(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (..., C) and the label of each; those of a first token, which nothing predicts, are omitted."""
        if self.kind == NEXT:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if logits.shape[:-1] != labels.shape:
            raise UserError(f"{self._class} returned logits of shape {list(logits.shape)} for labels of shape "
                            f"{list(labels.shape)}", "one prediction for each label",
                            f"correct the labels, or {OWN_TASK}")
        return logits, labels.long()

    def _pair(self, logits: torch.Tensor, labels: torch.Tensor) -> Pair:
        problem = self._problem(labels.is_floating_point()) if self.kind == SAMPLE else ""
        if problem in ("regression", "multi_label_classification"):
            n = len(labels)
            loss = functional.mse_loss if problem == "regression" else functional.binary_cross_entropy_with_logits
            each = loss(logits.reshape(n, -1), labels.reshape(n, -1).to(logits.dtype), reduction="none")
            return each.mean(1).sum(), n
        logits, labels = self._aligned(logits, labels)
        total = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1),
                                         ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    def _compare(self, ours: float, output: Any) -> None:
        own, per_sample = float(output.loss.detach()), [output.logits] if self.kind == SAMPLE else []
        narrow = any(each.dtype.itemsize == 2 for each in (output.loss, *per_sample))  # the others use logits.float()
        within = SAME_LOSS_16 if narrow else SAME_LOSS
        if abs(ours - own) > within * max(abs(own), abs(ours)):
            raise UserError(f"{self._class} computes a loss of {own:.6g} for a batch whose mean over labels is "
                            f"{ours:.6g}", "a loss that is the mean over the labels and has no other terms, which a "
                            "sum over ranks can make exact",
                            f"switch these terms off in the model's config, or {OWN_TASK}")
        self._compared = True
