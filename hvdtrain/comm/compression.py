"""Classes of compression in Horovod's manner, for any framework: one for each compressor of this project.

Owns what `hvdtrain.tensorflow.Compression` and `hvdtrain.torch.Compression` share; casts are the frameworks'.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.comm.compressors import choices, create
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.errors import UserError


class Compressor:
    """Base class for scripts: both methods see one tensor; the result of ``compress`` is summed over ranks.

    ``project``: the compressor of this project that a gradient exchange uses instead, "" for the script's own.
    ``narrow``: the type that floating point of a single tensor travels as, None for its own.
    """

    project = ""
    narrow: Any = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return (what travels, what `decompress` needs to know)."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo `compress` on the sum."""
        raise NotImplementedError

    @classmethod
    def made(cls) -> Any:
        """Return a `hvdtrain.core.protocols.Compressor` of this kind."""
        return create(cls.project, Config())


class NoneCompressor(Compressor):
    """Every element as it is."""

    project = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Buckets(Compressor):
    """A compressor of a whole bucket of gradients, which keeps its error for the next step."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Raise `UserError`: it compresses no tensor alone."""
        raise UserError(f"Compression.{cls.project} for a single tensor", "Compression.none, fp16 or bf16: the "
                        "others keep error feedback between steps", "use it in DistributedOptimizer, or in "
                                                                    "DistributedGradientTape of TensorFlow")

    decompress = compress  # type: ignore[assignment]


class TopKCompressor(_Buckets):
    """The 1 % of largest magnitude, the others wait; ``Compression.topk.of(ratio)`` for another share."""

    project = "topk"
    ratio = ExchangeConfig().topk_ratio

    @classmethod
    def of(cls, ratio: float) -> type[TopKCompressor]:
        """Return the same with ``ratio`` of the entries, above 0 and at most 1."""
        if not 0 < ratio <= 1:
            raise UserError(f"topk with a ratio of {ratio}", "above 0 and at most 1", "pass such a share")
        return type(f"TopK{ratio:g}", (cls,), {"ratio": ratio})

    @classmethod
    def made(cls) -> Any:
        """Return one with this ratio, without a momentum of its own: the optimizer may have one."""
        return create("topk", Config(exchange=ExchangeConfig(topk_ratio=cls.ratio)))


class PowerSGDCompressor(_Buckets):
    """Each matrix as the product of two thin ones; ``Compression.powersgd.of(rank)`` for other than 4 columns."""

    project = "powersgd"
    rank = ExchangeConfig().powersgd_rank

    @classmethod
    def of(cls, rank: int) -> type[PowerSGDCompressor]:
        """Return the same with factors of ``rank`` columns."""
        if rank < 1:
            raise UserError(f"powersgd of rank {rank}", "at least 1", "pass such a number of columns")
        return type(f"PowerSGD{rank}", (cls,), {"rank": rank})

    @classmethod
    def made(cls) -> Any:
        return create("powersgd", Config(exchange=ExchangeConfig(powersgd_rank=cls.rank)))


def add_others(names: type) -> None:
    """Give ``names``, a framework's `Compression`, each compressor that it does not have."""
    for name in choices():
        if not hasattr(names, name):
            setattr(names, name, type(f"{name.capitalize()}Compressor", (_Buckets,), {"project": name}))


def kind_of(compression: Any, names: type) -> str:
    """Return the project's name of ``compression``; "" for a script's own class with compress and decompress.

    ``names``: the framework's `Compression`. Errors: `UserError` for anything else.
    """
    if isinstance(compression, str) and compression in vars(names):
        raise UserError(f"compression {compression!r}", "an object", f"pass hvd.Compression.{compression}")
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        known = ", ".join(f"hvd.Compression.{name}" for name in vars(names) if name[0] != "_")
        raise UserError(f"compression {compression!r}", f"one of {known}, or a class with compress and decompress",
                        "pass one of them")
    return str(getattr(compression, "project", ""))
