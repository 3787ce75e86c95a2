"""Folders for ``from_pretrained`` of models of transformers and peft: the model, its adapters, or both merged.

Writers of `hvdtrain.commands.export`. Owns what a folder has beside the weights; the files are transformers' own.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch

from hvdtrain.backends.exporting import Exportable, verdict, verified
from hvdtrain.backends.torch.pretrained import base_of
from hvdtrain.core.errors import UserError

FOR_DATA = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece",
            "chat_template", "preprocessor", "processor", "video_preprocessor")
"""Starts of the names of files that turn data into inputs."""


def pretrained(subject: Exportable, path: Path) -> str:
    """Write the model as ``save_pretrained`` does, of peft its adapters; return what was verified. `UserError`."""
    model, base = _ends(subject, "pretrained")
    model.save_pretrained(path)
    _copy_files(base, path)
    if model is not base:
        own = importlib.import_module("peft").get_peft_model_state_dict(model)
        read = importlib.import_module("safetensors.torch").load_file(path / "adapter_model.safetensors")
        _refuse_other(own, read)
        return f"the adapters alone, of the base model {base.name_or_path}; read back and compared"
    return _read_back(model, path)


def merged(subject: Exportable, path: Path) -> str:
    """Write the model of transformers with its adapters added to its weights; return what was verified.

    Errors: `UserError`, also where the merged model has other outputs. OSError.
    """
    model, base = _ends(subject, "merged")
    if model is base:
        raise UserError(f"--format merged of a {type(model).__name__}, which has no adapters", "a model of peft",
                        "choose --format pretrained")
    want = subject.parts.evaluator.outputs(subject.batch)
    whole = model.merge_and_unload()
    difference = verified(subject.parts.evaluator.outputs(subject.batch), want, "the merged model")
    whole.save_pretrained(path)
    _copy_files(base, path)
    return f"{_read_back(whole, path)}; {verdict('the merged model', [len(subject.batch[0])], difference)}"


def _ends(subject: Exportable, format_: str) -> tuple[Any, Any]:
    """Return the model and the model of transformers in it, which are one without adapters."""
    model: Any = subject.parts.model
    if not any(c.__module__.startswith(("transformers.", "peft.")) for c in type(model).__mro__):
        raise UserError(f"--format {format_} of a {type(model).__name__}", "a model of transformers or peft",
                        "choose another --format")
    return model, base_of(model)


def _copy_files(base: Any, path: Path) -> None:
    """Copy tokenizer and processor from the folder that the model came from, where it did."""
    home = Path(str(base.name_or_path or ""))
    for file in sorted(home.iterdir()) if str(base.name_or_path or "") and home.is_dir() else ():
        if file.is_file() and file.name.startswith(FOR_DATA) and not (path / file.name).exists():
            shutil.copyfile(file, path / file.name)


def _read_back(model: Any, path: Path) -> str:
    again = type(model).from_pretrained(path, local_files_only=True, use_safetensors=True, dtype=model.dtype)
    _refuse_other(model.state_dict(), again.state_dict())
    return f"{type(model).__name__}.from_pretrained gives the same weights"


def _refuse_other(own: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> None:
    other = next((name for name, tensor in own.items()
                  if name not in read or not torch.equal(read[name].cpu(), tensor.detach().cpu())), None)
    if other is not None:
        raise UserError(f"{other} in the written folder differs from the model's", "the same weights",
                        "report this model to hvdtrain; nothing was written")
