"""``python tests/fuzz/configs.py --n 10000 --seed 1``: made-up configurations through assembly and two steps.

Each runs on 1 to 3 ranks as threads with the numpy reference. It has to end in steps or in a `UserError`; anything
else is printed with what led to it, and the status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fixtures")]

from fuzzed import changes, kinds, outcome  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def main() -> int:
    """Run, print a line a thousand and every finding once by its kind; return 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    done: list[str] = []
    findings: Counter[str] = Counter()
    begin = time.monotonic()

    def one(changed: dict[str, Any], size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    done.append(outcome(changed, size, Path(folder) / "run"))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                frame = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} at {frame.filename}:{frame.lineno}: {str(error)[:200]}"
                if kind not in findings:
                    print(f"FOUND {kind}\n  {size} ranks, {changed!r}", flush=True)
                findings[kind] += 1
        if len(done) % 1000 == 0:
            print(f"{len(done)}: {dict(kinds(done))}, {time.monotonic() - begin:.0f} s", flush=True)

    run = settings(max_examples=asked.n, deadline=None, database=None, phases=[Phase.generate],
                   suppress_health_check=list(HealthCheck))(given(changes(), st.sampled_from([1, 2, 2, 3]))(one))
    seed(asked.seed)(run)()
    print(f"{len(done)} configurations: {dict(kinds(done))}; {sum(findings.values())} findings of {len(findings)} "
          f"kinds; {time.monotonic() - begin:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
