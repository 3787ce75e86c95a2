"""Prepare training and evaluation data: as stored, then augmented, then read by worker processes.

Owns that order and the number of workers (``data.workers``), on which samples do not depend.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdtrain.config import Config, DataConfig, Named
from hvdtrain.core.errors import UserError, count
from hvdtrain.core.resolve import load_callable
from hvdtrain.data import sources
from hvdtrain.data.augment import Augmented
from hvdtrain.data.collate import Collated
from hvdtrain.data.objects import indexed
from hvdtrain.data.pictures import LAYOUTS
from hvdtrain.data.rows import INPUTS, of_data
from hvdtrain.data.sources import ArraySource, Source
from hvdtrain.data.stream import ShuffledStream
from hvdtrain.data.workers.pool import Pool, Pooled
from hvdtrain.data.workers.worker import generators_kept, pack

START_S = 5.0  # about what workers take to start that import a framework


def read(config: Config, data: Any, adapters: Sequence[sources.Adapter], cores: int, notes: list[str],
         eval_sets: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return (training data, evaluation data or None, named evaluation sets); extends ``notes``.

    Of ``data``, else of ``config.data``. ``eval_sets``: `hvdtrain.config.Named` data or objects (`evaluation_set`).
    """
    if data is not None:
        pair = sources.interpret(data, "train", adapters), sources.interpret(data, "test", adapters)
    else:
        pair = sources.resolve_splits(config.data.name, config.data.args, adapters)
    named = [evaluation_set(name, given, adapters, config.eval_max_samples, notes) for name, given in eval_sets.items()]
    (train, test, *named), remark = with_workers(config, config.seed, [*prepared(config, *pair), *named], cores)
    notes += [remark] if remark else []
    return train, test, dict(zip(eval_sets, named))


NEW_DATA = (sources.ALL, "test", "train")
"""Splits of data that no training has seen, the preferred one first: all of it, unless it has a test split."""
_SPLIT_IN_WORDS = {sources.ALL: "all of it", "test": "its test split", "train": "its train split, the only one"}


def first_split(data: Any, splits: Sequence[str], adapters: Sequence[sources.Adapter]) -> tuple[Any, str]:
    """Return (the first of ``splits`` that ``data`` has, that split); (None, "") where it has none of them.

    ``data``: an object, or a section with ``name`` and ``args``.
    """
    def of(split: str) -> Any:
        if isinstance(data, (Named, DataConfig)):
            return sources.resolve(data.name, data.args, split, adapters)
        return sources.undivided(data, adapters) if split == sources.ALL else sources.interpret(data, split, adapters)

    return next(((one, split) for split in splits if (one := of(split)) is not None), (None, ""))


def evaluation_set(name: str, given: Any, adapters: Sequence[sources.Adapter], most: int, notes: list[str]) -> Any:
    """Return the data of an evaluation set: its test split if it has one of its own, else all of it.

    Adds to ``notes`` which, and of how many samples, the first ``most`` or all (0). Errors: `UserError` that names the
    set.
    """
    try:
        found, split = first_split(given, NEW_DATA, adapters)
    except UserError as error:
        raise of_set(name, error) from None
    n = len(found) if isinstance(found, Source) else 0
    whole = f", {count(n, 'sample')}" if n else ""
    first = f", of which the first {most} are evaluated" if 0 < most < n or most and not n else ""
    notes.append(f"evaluation set {name}: {_SPLIT_IN_WORDS[split]}{whole}{first}")
    return found


def of_set(name: str, error: UserError) -> UserError:
    """Return ``error`` about data as one about the evaluation set ``name``; as it is where ``name`` is ""."""
    if not name:
        return error
    got, expected, do = (re.sub(r"\bdata\.(name|args)\b", rf"eval.{name}.\1", text)
                         for text in (error.got, error.expected, error.do))
    return UserError(f"evaluation set {name}: {got}", expected, do).of_kind(error.kind)


def collator(config: Config) -> Callable[[list[Any]], Any] | None:
    """Return the function that ``data.collate`` names, if any."""
    return load_callable(config.data.collate, "data.collate") if config.data.collate else None


def later(config: Config, data: Any, adapters: Sequence[sources.Adapter], cores: int, ranks: int) -> tuple[Any, str]:
    """Return a begun run's evaluation data, with workers if reading takes longer than their start, and a remark."""
    test = sources.interpret(data, "test", adapters)
    test = sources.interpret(data, "train", adapters) if test is None else test
    (test,), remark = with_workers(config, config.seed, (test,), cores, START_S * ranks)
    return test, remark


def prepared(config: Config, train: Any, test: Any) -> tuple[Any, Any]:
    """Shuffle and augment the training data as configured; `UserError` for data that cannot be."""
    if config.data.bucket and not (config.data.shuffle and isinstance(train, Source)):
        raise UserError(f"data.bucket is {config.data.bucket}, and the training data is not shuffled by its index",
                        "data with an index, and data.shuffle", "leave data.bucket out")
    if config.data.shuffle_buffer and not isinstance(train, Source):
        train = ShuffledStream(train, config.data.shuffle_buffer, config.seed)
    elif config.data.shuffle_buffer:
        raise UserError(f"data.shuffle_buffer is {config.data.shuffle_buffer}, and the training data has an index",
                        "a stream, such as an IterableDataset", "leave it out: data.shuffle permutes all samples")
    if config.data.augment:
        train = Augmented(train, config.data.augment, config.seed, declared_layout(config))
        if train.draws and config.data.workers == 0 and config.data.prefetch:
            raise _shared_generators("data.workers: 0")
        if len(train):
            train.fetch(np.zeros(1, np.int64))  # what does not suit it is told before anything is made
        rows = of_data(train)
        if not rows.x_first or rows.layout is not None:
            raise UserError(f"data.augment with rows in which none or several columns are images ({rows.note})",
                            f"one of the columns {', '.join(INPUTS)}", "rename or drop columns, or leave it out")
    return train, test


def declared_layout(config: Config) -> str:
    """Return ``data.args.layout`` where it names a layout of pictures; else ""."""
    layout = config.data.args.get("layout", "")
    return layout if isinstance(layout, str) and layout in LAYOUTS else ""


def _shared_generators(why: str) -> UserError:
    return UserError(f"data.augment with a transform that draws from PyTorch's generators or Python's, and {why}",
                     "a process of its own for the data, or no thread that reads ahead: dropout draws from them too",
                     "set data.workers: auto, or data.prefetch: 0")


CHEAP_S = 50e-6  # a sample that takes less is read in the rank: handing it over takes about as long
MOST = 8  # most workers that auto takes
TIMED = 32  # samples that are read together to see what one takes
SLOW_S = 0.002  # a first sample that takes longer is followed by one more only, unless that one is cheap


def with_workers(config: Config, seed: int, found: Sequence[Any], cores: int,
                 least_s: float = 0.0) -> tuple[list[Any], str]:
    """Return the data ``found`` (training, evaluation; None stays), read by workers where that helps, and a remark.

    ``cores``: those that this rank has for itself. ``least_s``: least total reading time of a source without random
    numbers for which auto takes workers. Errors: `UserError` where ``data.workers`` is a number and a source cannot be
    pickled, or no process can be started.
    """
    asked = config.data.workers
    shares = list(map(_draws, found))
    data = list(found)
    if config.data.prefetch and not all(fits(each) for each in data if _draws(each)):
        raise _shared_generators("rows that a data collator puts together, in the rank")
    costs = {i: cost(each) if asked == "auto" else (0.0, False) for i, each in enumerate(data) if asked and fits(each)}
    # Workers seed each sample and a rank does not: a measured time must not decide what a source draws.
    chosen = [i for i, (each_s, draws) in costs.items() if asked != "auto" or draws or shares[i] or each_s >= CHEAP_S
              and each_s * len(data[i]) >= least_s]
    if not chosen:
        return data, ""
    n = spare(cores) if asked == "auto" else int(asked)
    try:
        pool = _pool(config, seed, [data[i] for i in chosen], n)
    except (UserError, OSError) as error:
        if any(shares) and config.data.prefetch:
            raise _shared_generators(error.got if isinstance(error, UserError) else str(error)) from error
        if asked != "auto":
            raise error if isinstance(error, UserError) else UserError(
                f"data.workers: no process can be started: {error}", "permission to start processes",
                "set data.workers: 0") from None
        said = error.got if isinstance(error, UserError) else f"no process can be started: {error}"
        return data, f"data.workers: 0, the rank reads the data itself: {said}"
    for number, i in enumerate(chosen):
        data[i] = Pooled(data[i], pool, number)
    slowest_s = max(costs[i][0] for i in chosen)
    took = "" if slowest_s in (0.0, float("inf")) else f", a sample of which takes about {slowest_s * 1e3:.2g} ms"
    took = ", which draws random numbers" if any(costs[i][1] for i in chosen) else took
    return data, f"data.workers: {count(n, 'process', 'processes')} read the data of rank 0{took}"


def fits(data: Any) -> bool:
    """Return whether workers could read ``data``: no stream, which reads by itself, no rows that are padded to the
    longest one read at once, and no arrays in memory unless a transform draws from generators of its process."""
    others = (Collated,) if _draws(data) else (ArraySource, Collated)
    return isinstance(data, Source) and not isinstance(sources.innermost(data), others)


def _draws(data: Any) -> bool:
    return isinstance(data, Augmented) and data.draws


def may_need(config: Config, data: Any, eval_sets: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a run could want workers, as far as known before its data is read; cheap."""
    if config.data.workers == 0:
        return False
    if any(":" in name for name in config.data.augment):
        return True
    return any(map(_may_need, (config.data if data is None else data, *eval_sets.values())))


def _may_need(data: Any) -> bool:
    if isinstance(data, (Named, DataConfig)):
        return data.name not in ("digits", "synthetic") and not data.name.endswith(".npz")
    if isinstance(data, list) and indexed(data):
        return True
    leaves = [data]
    while leaves and isinstance(leaves[0], (tuple, list, dict)):
        first = leaves.pop(0)
        leaves += first.values() if isinstance(first, dict) else first
    return any(not isinstance(leaf, (np.ndarray, tuple, list, dict, type(None))) for leaf in leaves)


def spare(cores: int) -> int:
    """Return the workers for a rank that has ``cores`` for itself, one of which computes."""
    return min(MOST, max(1, cores - 1))


def cost(source: Any) -> tuple[float, bool]:
    """Return a sample's seconds and whether it draws from the global generators, restored; 0 s if it raises."""
    numbers_n = np.unique(np.linspace(0, len(source) - 1, TIMED).astype(np.int64)) if len(source) else np.arange(0)
    with generators_kept() as drew:
        try:
            first_s = _timed(source, numbers_n[:1])  # opens files, and imports what it needs
            if first_s > SLOW_S and (last_s := _timed(source, numbers_n[-1:])) >= CHEAP_S:
                return last_s, drew()
            return _timed(source, numbers_n) / len(numbers_n), drew()
        except sources.Unreadable:
            return float("inf"), drew()
        except Exception:
            return 0.0, False


def _timed(source: Any, numbers_n: np.ndarray) -> float:
    begin = time.perf_counter()
    sources.fetched(source, numbers_n, 0)
    return time.perf_counter() - begin


def _pool(config: Config, seed: int, found: Sequence[Any], n: int) -> Pool:
    header = {"seed": seed, "folder": os.getcwd(), "argv": list(sys.argv), "files": [], "main": {}}
    try:
        fd, text = pack(header, found)
    except OSError:
        raise
    except Exception as error:  # pickling calls what the user wrote
        said = str(error).strip() or type(error).__name__
        raise UserError(f"workers cannot receive the data, which cannot be pickled: {said}", "a dataset that can be "
                        "handed to another process", "open files and connections on first use, and define classes and "
                        "functions at the top of a module, or set data.workers: 0") from None
    if b"__main__" in text or b"hvdtrain_user_" in text:
        os.close(fd)
        fd, text = pack({**header, **_homes(text)}, found)
    preload = [name for name in ("numpy", "torch") if name.encode() in text and name in sys.modules]
    return Pool(fd, n, config.control_timeout_s, preload)


def _homes(text: bytes) -> dict[str, Any]:
    """Return where a pickle's classes are defined: the user's script, and files loaded by their path."""
    from multiprocessing import spawn

    files = [str(module.__file__) for name, module in list(sys.modules.items())
             if name.startswith("hvdtrain_user_") and name.encode() in text]
    if b"__main__" not in text:
        return {"files": files}
    main = spawn.get_preparation_data("worker")
    return {"files": files, "main": {key: value for key, value in main.items() if key.startswith("init_main")}}
