"""Put rows together by a data collator, such as those of transformers: rows of different lengths, padded.

Owns the seeds of a collator that draws random masks. Each rank pads to the longest row that it reads at once: a model
that follows its attention mask gives the same result for any padding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.rows import ColumnNames
from hvdtrain.data.sources import EpochSource, innermost
from hvdtrain.data.stream import Arrays
from hvdtrain.data.workers.worker import generators_kept

FOR_COLLATORS = ("special_tokens_mask", "offset_mapping")
"""Columns that collators of transformers take and no model."""
IGNORED = -100
_LENGTHS_AT_ONCE = 10_000  # rows whose lengths are read together


class Collated(EpochSource):
    """Rows of a ``dataset`` with ``__getitem__``, put together by ``rows.collate(list of rows) -> dict or tuple``.

    The rank reads these rows itself, since workers would pad differently. A collator with a ``generator`` of its own
    (``DataCollatorForLanguageModeling``) is called for each sample, with a generator of (``seed``, epoch, sample).
    Errors: `UserError` for a dataset or a collator that draws from the global generators, and for a tokenizer that pads
    on the left: positions of tokens would depend on the longest row.
    """

    def __init__(self, dataset: Any, rows: ColumnNames, seed: int, to_array: Callable[[Any], np.ndarray]) -> None:
        self.rows, self._dataset, self._seed, self._to_array = rows.for_source(), dataset, seed, to_array
        self._collate: Any = copy.copy(rows.collate)
        self._draws = callable(getattr(self._collate, "get_generator", None)) and getattr(self._collate, "mlm", True)
        self._tried = False
        if getattr(getattr(self._collate, "tokenizer", None), "padding_side", "") == "left":
            raise UserError("a data collator whose tokenizer pads on the left, where the positions of tokens depend on "
                            "the longest row", "padding on the right", 'set tokenizer.padding_side = "right"')

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def layout(self) -> Any:
        """Structure of nested inputs of a Keras model."""
        return self.rows.layout

    @property
    def lengths(self) -> Any:
        """Return the lengths of the rows, which the dataset has, or the lists of its column input_ids; None for others.
        """
        known = getattr(self._dataset, "lengths", None)
        columns = getattr(self._dataset, "column_names", ())
        if known is not None or "input_ids" not in columns:
            return known
        if "length" in columns:
            return np.asarray(self._dataset.with_format("numpy", columns=["length"])["length"])
        rows = self._dataset.with_format("arrow", columns=["input_ids"])
        return np.concatenate([np.diff(each.offsets) for batch in rows.iter(_LENGTHS_AT_ONCE)
                               for each in batch["input_ids"].chunks])

    def fetch_in(self, indices_n: np.ndarray, epoch: int) -> Arrays:
        # Watched before the first step, when no model draws meanwhile.
        with contextlib.nullcontext(lambda: False) if self._tried else generators_kept() as drew:
            rows = self._rows(indices_n)
            if drew():
                raise UserError("the dataset draws from the global random generators, and a data collator reads it in "
                                "the rank, so that samples would depend on the number of ranks",
                                "a dataset that draws nothing", "leave the collator out and return rows of one length, "
                                "which workers seed by sample, or draw from a generator of the row's number")
            found = self._drawn_alone(rows, indices_n, epoch) if self._draws else self._arrays(self._collate(rows))
            if drew():
                raise UserError("the data collator draws from the global random generators, so that samples would "
                                "depend on the number of ranks", "a collator that draws nothing, or from its generator "
                                "as transformers.DataCollatorForLanguageModeling does",
                                "draw from a generator of the row's number in the dataset's transform or __getitem__")
        self._tried = True
        return found

    def _rows(self, indices_n: np.ndarray) -> list[Any]:
        numbers = indices_n.tolist()
        many = getattr(self._dataset, "__getitems__", None)
        return [self._taken(row) for row in (many(numbers) if callable(many) else [self._dataset[i] for i in numbers])]

    def _drawn_alone(self, rows: Sequence[Any], indices_n: np.ndarray, epoch: int) -> Arrays:
        return self._padded([self._drawn(row, number, epoch) for row, number in zip(rows, indices_n.tolist())])

    def _taken(self, row: Any) -> Any:
        if not isinstance(row, Mapping) or not self.rows.columns:
            return row
        return {name: value for name, value in row.items() if name in self.rows.columns or name in FOR_COLLATORS}

    def _arrays(self, batch: Any) -> Arrays:
        return self.rows.arrays(dict(batch) if isinstance(batch, Mapping) else batch, self._to_array)

    def _drawn(self, row: Any, number: int, epoch: int) -> dict[str, np.ndarray]:
        """Return one row as a batch, whose random numbers are its own."""
        words = np.random.SeedSequence([self._seed, epoch, number]).generate_state(1)
        self._collate.generator = self._collate.get_generator(int(words[0]))
        return {name: np.asarray(values) for name, values in self._collate([row]).items()}

    def _padded(self, batches: Sequence[dict[str, np.ndarray]]) -> Arrays:
        tokenizer = self._collate.tokenizer
        fill = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "labels": IGNORED,
                "token_type_ids": tokenizer.pad_token_type_id}
        made: dict[str, np.ndarray] = {}
        for name in batches[0]:
            width = max(each[name].shape[-1] for each in batches)
            if name not in fill and any(each[name].shape[-1] != width for each in batches):
                raise UserError(f"rows of the column {name!r} have different lengths", f"the columns {', '.join(fill)}",
                                "drop the column")
            lacking = [width - each[name].shape[-1] for each in batches]
            made[name] = np.concatenate([
                np.pad(each[name], ((0, 0), (0, n)), constant_values=fill[name]) if n else each[name]
                for each, n in zip(batches, lacking)])
        return self._arrays(made)


def check(rows: ColumnNames, *found: Any) -> None:
    """Raise `UserError` for a collator with data that has no rows to put together."""
    other = next((each for each in found if each is not None and not isinstance(innermost(each), Collated)), None)
    if rows.collate is not None and other is not None:
        raise UserError(f"collate (or data.collate) with data of the kind {type(innermost(other)).__name__}",
                        "a torch Dataset, a datasets.Dataset or another object with rows, which it puts together",
                        "leave it out, or give such a dataset; a DataLoader has its own collate_fn")
