"""``text``: English for language models that every Python ships, the topics of its ``help()``, by character."""

from __future__ import annotations

import importlib

import numpy as np

from hvdtrain.core.errors import UserError
from hvdtrain.data.sources import ArraySource, Source, chosen
from hvdtrain.planning.batch.sampler import at_least

VOCAB = 96  # tokens: the 95 printable ASCII characters in their order, then the line break
MODULE = "pydoc_data.topics"


def make(split: str, context: int = 64, samples: int = 0, test_fraction: float = 0.1, seed: int = 0) -> Source:
    """Return Python's help texts by character: x int64 (n, context) tokens below 96, y the tokens that follow.

    The test split takes ``test_fraction`` of the sequences, chosen by ``seed``, and either split at most ``samples``
    (0: all) of its own, spread over the text.
    """
    at_least("data.args.context", context, 1)
    at_least("data.args.samples", samples, 0)
    x, y = sequences(encode(paragraphs()), context)
    if len(x) < 2:
        raise UserError(f"data.args.context is {context}", "a length that gives 2 sequences or more",
                        "set data.args.context: 64")
    taken = np.flatnonzero(chosen(np.zeros(len(x), np.int64), test_fraction, seed, split))
    if 0 < samples < len(taken):
        taken = taken[np.arange(samples) * len(taken) // samples]
    return ArraySource((x[taken], y[taken]))


def paragraphs() -> str:
    """Return the topics in order as one text, each paragraph once; `UserError` where Python lacks them."""
    try:
        topics = importlib.import_module(MODULE).topics
    except ModuleNotFoundError:
        raise UserError(f"data: text needs the module {MODULE}, which this Python lacks", "the whole standard library",
                        "install the rest of it, or use data: synthetic with data.args.vocab") from None
    parts = (part for _, topic in sorted(topics.items()) for part in topic.split("\n\n"))
    return "\n\n".join(dict.fromkeys(part.strip("\n") for part in parts if part.strip()))


def encode(text: str) -> np.ndarray:
    """Return token numbers int64: printable ASCII as 0 to 94, a line break as 95, any other as a "?"."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    tokens = np.where((codes >= 32) & (codes < 127), codes - 32, ord("?") - 32)
    return np.where(codes == ord("\n"), VOCAB - 1, tokens)


def decode(tokens: np.ndarray) -> str:
    """Return the text of token numbers."""
    codes = np.where(np.asarray(tokens) == VOCAB - 1, ord("\n"), np.asarray(tokens) + 32)
    return bytes(codes.astype(np.uint8)).decode("ascii")


def sequences(tokens_N: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut (N,) tokens into x (n, context) and y (n, context), the tokens one later; n = (N - 1) // context."""
    n = (len(tokens_N) - 1) // context
    return tokens_N[:n * context].reshape(n, context), tokens_N[1:n * context + 1].reshape(n, context)
