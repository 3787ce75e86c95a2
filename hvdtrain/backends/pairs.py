"""Pairs (sum, weight) of a loss or metric: the check of what a model file returns, their sums and means.

Owns also the facts of metrics by name (`METRICS`). Knows shapes, no framework.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.core.errors import UserError

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Metric:
    """Facts of a metric. ``better``: whether smaller or larger values are."""

    better: Literal["min", "max"] = "min"


METRICS = dict.fromkeys(
    ("accuracy", "acc", "binary_accuracy", "categorical_accuracy", "sparse_categorical_accuracy",
     "top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy", "AUC", "Precision", "Recall", "F1Score",
     "FBetaScore", "R2Score", "PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity",
     "SpecificityAtSensitivity", "IoU", "MeanIoU", "BinaryIoU", "OneHotIoU", "OneHotMeanIoU", "cosine_similarity",
     "PearsonCorrelation", "ConcordanceCorrelation", "TruePositives", "TrueNegatives", "AUROC", "AveragePrecision",
     "Specificity", "JaccardIndex", "CohenKappa", "MatthewsCorrCoef", "ExactMatch", "PearsonCorrCoef",
     "SpearmanCorrCoef", "ConcordanceCorrCoef", "KendallRankCorrCoef", "CosineSimilarity", "ExplainedVariance",
     "PeakSignalNoiseRatio", "StructuralSimilarityIndexMeasure", "BLEUScore", "SacreBLEUScore", "ROUGEScore",
     "RetrievalMAP", "RetrievalMRR", "RetrievalNormalizedDCG", "map", "map_50", "map_75"), Metric("max"))
METRICS |= dict.fromkeys(("WordErrorRate", "CharErrorRate", "MeanSquaredError", "MeanAbsoluteError", "RMSE",
                          "RootMeanSquaredError", "Perplexity", "HammingDistance", "CalibrationError",
                          "FrechetInceptionDistance", "FalsePositives", "FalseNegatives"), Metric())
"""Metrics of PyTorch, torchmetrics and Keras that are no losses, by name. A metric of one's own adds a line."""


def metric_of(name: str) -> Metric:
    """Return the facts of metric ``name``, in any case, also of a ``module:callable``; those of a loss if unknown.

    Keras puts the name of an output in front, and a number behind; torchmetrics puts the task's kind in front.
    """
    return _found(name) or Metric()


def is_known(name: str) -> bool:
    """Return whether it is known if larger values of ``name`` are better: of losses and of `METRICS`."""
    return _found(name) is not None or name.lower().endswith("loss")


def _found(name: str) -> Metric | None:
    known = {key.lower().replace("_", ""): facts for key, facts in METRICS.items()}
    last = re.split("[:/]", name)[-1].lower()  # of an evaluation set it is NAME/METRIC
    whole = re.sub(r"_\d+$", "", last).split("_")
    for words in (last.split("_"), whole):
        for i in range(len(words)):
            tail = "".join(words[i:])
            if i and tail.startswith("map"):  # depth_map
                continue
            if found := known.get(tail) or known.get(re.sub(r"^(binary|multiclass|multilabel)", "", tail)):
                return found
    return None


def checked_pair(found: Any, origin: str = "task", expected: str = "(loss_sum, weight)") -> Pair:
    """``found``, if it is two single numbers; `UserError` otherwise."""
    whole = isinstance(found, (tuple, list)) or getattr(found, "shape", None) == (2,)
    if not whole or len(found) != 2:
        length = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        raise UserError(f"{origin} returned a {type(found).__name__}{length}", expected, "fix the model file")
    for value, what in zip(found, ("a loss" if origin == "task" else "a sum", "a weight")):
        shape = _shape(value)
        if shape or not (hasattr(value, "shape") or isinstance(value, (int, float))):
            raise UserError(f"{origin} returned {what} of type {type(value).__name__} and shape {shape}",
                            f"{expected}, each a scalar", "sum over the samples in the model file")
    return found[0], found[1]


def _shape(value: Any) -> tuple[Any, ...]:
    try:
        return tuple(getattr(value, "shape", ()))
    except ValueError:  # a graph leaves even the number of dimensions open
        return ()


def of_model_file(task: Callable[..., Any], metrics: Callable[..., Any] | None, *args: Any,
                  **more: Any) -> dict[str, Pair]:
    """Return (sum, weight) of "loss" and each metric that a model file computes from ``args``, or `UserError`."""
    pairs = {"loss": checked_pair(task(*args, **more))}
    if metrics is not None:
        found = metrics(*args, **more)
        if not isinstance(found, Mapping):
            raise UserError(f"metrics returned a {type(found).__name__}", "a dict of name: (sum, weight)",
                            "fix the model file's metrics")
        for name, pair in found.items():
            pairs[name] = checked_pair(pair, f"metric {name!r}", "(sum, weight)")
    return pairs


class Totals:
    """Running sums of pairs by name, float64[2] each."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}

    def add(self, pairs: Mapping[str, Pair]) -> None:
        """Add one batch's pairs of numbers or scalar tensors; all of them, or none where reading one fails."""
        self._sums |= {name: self._sums.get(name, 0.0) + np.array([float(total), float(weight)])
                       for name, (total, weight) in pairs.items()}

    def take(self) -> dict[str, np.ndarray]:
        """Return the sums by name; they start again."""
        sums, self._sums = self._sums, {}
        return sums


def means(totals: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return sum / weight by name, NaN where the weight is 0."""
    return {name: float(s / w) if w else math.nan for name, (s, w) in totals.items()}
