"""A session of TensorFlow 1 that pins a GPU: ``ConfigProto``, ``set_session``, and the four lines that do it today.

Owns the pattern. Edits it only where the configuration is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hvdtrain.commands.migrate.edit import Edits, statement
from hvdtrain.commands.migrate.rules import Word
from hvdtrain.commands.migrate.scan import Scan, argument, name_of

WORDS = ("ConfigProto", "set_session", "Session", "get_session", "enable_eager_execution")
DO = "use tf.config.set_visible_devices and tf.config.experimental.set_memory_growth"
IDLE = "TensorFlow 2 has it under compat.v1 alone, and Keras 3 computes in no session"
HOMES = ("tensorflow", "tensorflow.compat.v1")


def words(scan: Scan) -> Iterator[Word]:
    """A word for each configuration that can be replaced whole, and one for every other use of sessions."""
    seen: set[cst.CSTNode] = set()
    for call in scan.calls("ConfigProto"):
        found = _Pin.of(scan, call)
        if found is not None:
            seen |= {node for line in found.lines for node in scan.inner(line)}
            yield Word(call, "GPUs are pinned by a session of TensorFlow 1", DO, found.edit)
    for call in scan.all(cst.Call):
        dotted, last = scan.dotted(call.func), (name_of(call.func) or "").rpartition(".")[2]
        if last in WORDS and ("tensorflow" in dotted or "keras" in dotted) and call not in seen:
            idle = "compat.v1" in dotted and ".keras." not in dotted
            yield Word(call, f"{scan.short(call.func)} is of TensorFlow 1", DO, None, IDLE if idle else Word.why)


class _Pin:
    """The lines of one configuration: its making, its settings, its session. ``index``: code of this rank's GPU."""

    def __init__(self, scan: Scan, tf: str, lines: list[cst.SimpleStatementLine], index: str, growth: bool) -> None:
        self.lines = lines
        self._tf, self._index, self._growth = tf, index, growth
        self._gpus, self._gpu = ("gpus", "gpu") if not {"gpus", "gpu"} & scan.bound else ("rank_gpus", "rank_gpu")

    @staticmethod
    def of(scan: Scan, call: cst.Call) -> _Pin | None:
        """The lines of the configuration that ``call`` makes; None where it is used for anything else."""
        up = scan.parent[call]
        target = up.targets[0].target if isinstance(up, cst.Assign) and len(up.targets) == 1 else None
        tf = (name_of(call.func) or "").removesuffix(".ConfigProto").removesuffix(".compat.v1")
        if not isinstance(target, cst.Name) or call.args or scan.imports.get(tf) not in HOMES or (
                scan.bindings(target.value) != 1):
            return None
        lines, index, growth, ends = [scan.statement(call)], "", False, False
        for use in scan.uses(target.value):
            line = scan.statement(use)
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
            text = scan.code(small) if small is not None else ""
            value = small.value if isinstance(small, cst.Assign) else None
            if text.startswith(f"{target.value}.gpu_options.allow_growth =") and isinstance(value, cst.Name):
                growth = value.value == "True"
            elif text.startswith(f"{target.value}.gpu_options.visible_device_list =") and isinstance(
                    value, cst.Call) and name_of(value.func) == "str" and len(value.args) == 1:
                index = scan.code(value.args[0].value)
            elif isinstance(small, cst.Expr) and _starts(scan, small.value, target.value):
                ends = True
            else:
                return None
            lines.append(line)
        blocks = {id(scan.parent[line]) for line in lines}
        plain = [line for line in lines if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1]
        if not ends or len(blocks) > 1 or len(plain) != len(lines):
            return None
        return _Pin(scan, tf, plain, index, growth)

    def edit(self, edits: Edits) -> None:
        """Put today's lines where the session was made, with the comment that stood above the configuration."""
        first, last = self.lines[0], self.lines[-1]
        texts = [f'{self._gpus} = {self._tf}.config.list_physical_devices("GPU")']
        if self._growth:
            texts.append(f"for {self._gpu} in {self._gpus}:\n"
                         f"    {self._tf}.config.experimental.set_memory_growth({self._gpu}, True)")
        if self._index:
            texts.append(f"if {self._gpus}:\n"
                         f'    {self._tf}.config.set_visible_devices({self._gpus}[{self._index}], "GPU")')
        blank = max((i for i, line in enumerate(first.leading_lines) if line.comment is None), default=-1)
        said = first.leading_lines[blank + 1:]
        for line in self.lines[:-1]:
            edits.remove(line)
        new = [statement(text) for text in texts]
        edits.put(last, lambda old: cst.FlattenSentinel(
            [new[0].with_changes(leading_lines=[*old.leading_lines, *said]), *new[1:]]))


def _starts(scan: Scan, node: cst.BaseExpression, config: str) -> bool:
    """Whether an expression is ``set_session(Session(config=config))``, or eager execution with it."""
    if not isinstance(node, cst.Call):
        return False
    if scan.means(node.func, "enable_eager_execution"):
        return len(node.args) == 1 and scan.code(node.args[0].value) == config
    inner = node.args[0].value if len(node.args) == 1 and scan.means(node.func, "set_session") else None
    if not isinstance(inner, cst.Call) or not scan.means(inner.func, "Session") or len(inner.args) != 1:
        return False
    given = argument(inner, "config")
    return given is not None and scan.code(given.value) == config
