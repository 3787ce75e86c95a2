"""``python -m hvdtrain migrate``: options and output. Changes files only with ``--write``."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

from hvdtrain.core.resolve import not_installed
from hvdtrain.core.terminal import say

if TYPE_CHECKING:
    from hvdtrain.commands.migrate.plan import Migration

NOTHING = ("{name}: nothing recognised: no Horovod, tf.distribute, model.fit of Keras, "
           "DistributedDataParallel, DataParallel or Accelerate is used in it")


def main(argv: list[str]) -> int:
    """Print diffs and findings; return 1 where no script was recognised. Errors: `UserError` for a bad file."""
    args = parser().parse_args(argv)
    if importlib.util.find_spec("libcst") is None:
        raise not_installed("migrate", "libcst", "migrate")
    from hvdtrain.commands.migrate import plan
    from hvdtrain.commands.migrate.finding import MigrateOptions

    options = MigrateOptions(args.to, args.ranks)
    plan.check(options)
    found = [plan.migrate(plan.read(name), options) for name in dict.fromkeys(args.scripts)]
    for migration in found:
        show(migration)
    changed = [m for m in found if m.after != m.source.data]
    if args.write:
        for migration in changed:
            plan.write(migration.source, migration.after)
            say(f"{migration.source.name}: written")
    elif changed:
        say(f"{len(changed)} of {len(found)} files would change; nothing was written: --write does")
    return 0 if any(m.kind for m in found) else 1


def show(migration: Migration) -> None:
    from hvdtrain.commands.migrate.plan import diff

    name = migration.source.name
    if not migration.kind:
        say(_shown(NOTHING.format(name=name)))
        return
    text = diff(migration.source, migration.after)
    say(_shown(f"{name}: {migration.title}" + ("" if text else "; the file is unchanged")))
    if text:
        say(_shown(text.removesuffix("\n")))
    for finding in migration.findings:
        say(_shown(finding.text(name)))
    if migration.snippet:
        say(_shown(f"{name}: code for a manual migration:\n\n{migration.snippet}\n"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(
        prog="python -m hvdtrain migrate", allow_abbrev=False,
        description="Convert training scripts to hvdtrain: Horovod (Keras, TensorFlow, PyTorch), tf.distribute, "
                    "plain Keras fit, DistributedDataParallel, DataParallel, Accelerate. Prints a "
                    "unified diff and the unsafe lines of each script. A script that cannot be converted "
                    "faithfully stays unchanged; the output names the lines and the manual steps. "
                    "Exit status 1 if nothing was recognised.",
        epilog="For example: python -m hvdtrain migrate train.py --write")
    made.add_argument("scripts", nargs="+", metavar="script.py", help="the scripts")
    made.add_argument("--write", action="store_true", help="write the files, each in one rename")
    made.add_argument("--to", default="auto", metavar="TARGET",
                      help="auto, hvdtrain.keras, hvdtrain.torch (Horovod's APIs; the loop stays) or trainer "
                           "(hvdtrain.Trainer; code that replaces a PyTorch loop). auto: hvdtrain.keras for "
                           "TensorFlow and Keras, hvdtrain.torch for Horovod's PyTorch API and "
                           "DistributedDataParallel, trainer for Accelerate and DataParallel")
    made.add_argument("--ranks", type=int, default=1, metavar="N",
                      help="number of processes of the old job: if its batch was per "
                           "process, the global batch is N times that batch (default 1)")
    return made


def _shown(text: str) -> str:
    import sys

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
