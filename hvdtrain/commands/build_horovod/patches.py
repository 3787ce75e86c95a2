"""The edits that let Horovod 0.28.1 compile against today's frameworks, as data, and the one function that
applies them.

Owns the edited text. An edit that does not apply exactly once is an error: it means that the source is
another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.errors import UserError

PATCH_LEVEL = 1
"""Part of the cache key: raise it when an edit changes, so that no old wheel is used."""


@dataclass(frozen=True)
class Edit:
    """Replace ``old`` with ``new``, once, in ``path`` (relative to the unpacked source); ``why`` is for the
    reader.
    """

    path: str
    old: str
    new: str
    why: str


EDITS = (
    Edit("CMakeLists.txt",
         "set(CMAKE_CXX_STANDARD 14)\n",
         "set(CMAKE_CXX_STANDARD 17)\n"
         'set(CMAKE_INSTALL_RPATH "$ENV{HVDTRAIN_RPATH}")\n'
         "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n",
         "the frameworks' headers are C++17; and the run path must not name the environment of the build"),
    Edit("horovod/torch/CMakeLists.txt",
         "set(CMAKE_CXX_STANDARD 14)\n",
         "set(CMAKE_CXX_STANDARD 17)\n",
         "PyTorch's headers are C++17"),
    Edit("horovod/tensorflow/CMakeLists.txt",
         'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
         "",
         "TensorFlow no longer ships the XLA headers that this file includes"),
)


def apply(source_dir: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Apply every edit to the source unpacked at ``source_dir``, or none: all are checked before the first is
    written.

    Raises UserError naming the file and the text where an edit does not apply exactly once.
    """
    texts = {path: _read(source_dir / path) for path in {e.path for e in edits}}
    for edit in edits:
        times = texts[edit.path].count(edit.old)
        if times != 1:
            raise UserError(f"got {edit.path} with {times} occurrences of {edit.old.strip()!r}",
                            "exactly one, as in Horovod 0.28.1",
                            "build from the unmodified source package; this edit no longer applies")
        texts[edit.path] = texts[edit.path].replace(edit.old, edit.new)
    for path, text in texts.items():
        (source_dir / path).write_text(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"got a source without {path.name} ({error.strerror}: {path})",
                        "the source package of Horovod 0.28.1",
                        "delete the cached source and try again") from error
