"""Code of a Config and a Trainer, for the rewrite and for scripts that are left to be moved by hand.

Owns its text, and the guess of its values where a script is not of the standard form.
"""

from __future__ import annotations

import libcst as cst

from hvdtrain.migrate.finding import Refused
from hvdtrain.migrate.rules import torch_parts
from hvdtrain.migrate.scan import Scan, argument, name_of

WIDTH = 88
"""Longest line of a Config that is written."""
MODEL = "model"


def named(name: str, args: dict[str, str]) -> str:
    """``Named("SGD", {"momentum": 0.9})``."""
    if not args:
        return f'Named("{name}")'
    inner = ", ".join(f'"{key}": {value}' for key, value in args.items())
    return f'Named("{name}", {{{inner}}})'


def config(keys: dict[str, str]) -> str:
    """``Trainer(Config(...))`` in lines of at most `WIDTH`, where its parts allow."""
    parts = [f"{key}={value}" for key, value in keys.items()]
    whole = f"Trainer(Config({', '.join(parts)}))"
    if len(whole) + len("trainer = ") <= WIDTH:
        return whole
    lines, line = [], ""
    for part in parts:
        if line and len(line) + len(part) + 6 > WIDTH:
            lines.append(line)
            line = ""
        line += (" " if line else "") + part + ","
    lines.append(line)
    return "Trainer(Config(\n    " + "\n    ".join(lines) + "\n))"


def guess(scan: Scan, per_rank: bool, ranks: int, more: dict[str, str]) -> str:
    """A whole example with the values that were found, and ``...`` for those that were not."""
    keys = {"epochs": _epochs(scan), "global_batch": _batch(scan, per_rank, ranks), **_optimizer(scan, ranks)}
    loss = _loss(scan)
    if loss:
        keys["loss"] = loss
    text = config({**keys, **more})
    names = [name for name in ("Data", "Exchange", "Named") if f"{name}(" in text]
    imports = "from hvdtrain import Config, Trainer\n" + (
        f"from hvdtrain.config import {', '.join(names)}\n" if names else "")
    return f"{imports}\ntrainer = {text}\ntrainer.fit(model, {_dataset(scan)})"


def _epochs(scan: Scan) -> str:
    for loop in scan.all(cst.For):
        call = loop.iter
        if isinstance(call, cst.Call) and name_of(call.func) in ("range", "trange") and call.args and (
                "epoch" in scan.code(loop.target) or "epoch" in scan.code(call)):
            return scan.code(call.args[-1].value)
    return "..."


def _batch(scan: Scan, per_rank: bool, ranks: int) -> str:
    for call in scan.calls("DataLoader"):
        size = argument(call, "batch_size", 1)
        if size is not None:
            return torch_parts.batch_of_all(scan, scan.code(size.value), ranks if per_rank else 1)
    return "..."


def _dataset(scan: Scan) -> str:
    for call in scan.calls("DataLoader"):
        dataset = argument(call, "dataset", 0)
        if dataset is not None:
            return scan.code(dataset.value)
    return "dataset"


def _optimizer(scan: Scan, ranks: int) -> dict[str, str]:
    """``lr`` and ``optimizer`` from the first optimizer of torch.optim that is made."""
    for call in scan.all(cst.Call):
        name = (name_of(call.func) or "").rpartition(".")[2]
        if name in torch_parts.RATES and scan.dotted(call.func).startswith("torch.optim."):
            lr = argument(call, "lr", 1)
            try:
                rate = torch_parts.RATES[name] if lr is None else torch_parts.with_ranks(scan, lr.value, ranks)
            except Refused:
                rate = "..."
            args = {a.keyword.value: scan.code(a.value) for a in call.args
                    if a.keyword is not None and a.keyword.value not in ("lr", "params")}
            return {"lr": rate, "optimizer": named(name, args)}
    return {"lr": "...", "optimizer": 'Named("...")'}


def _loss(scan: Scan) -> str:
    for call in scan.all(cst.Call):
        name = (name_of(call.func) or "").rpartition(".")[2]
        if name in torch_parts.LOSSES and scan.dotted(call.func).startswith("torch.nn"):
            args = {a.keyword.value: scan.code(a.value) for a in call.args if a.keyword is not None}
            return named(name, args)
    return ""
