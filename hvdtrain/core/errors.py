"""Errors a user can fix: what was got, what was expected, what to do.

Owns the exception types, the nearest-name hint and counts with their nouns. `hvdtrain.cluster.exit` prints and exits.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import locale
import os
import traceback
from collections.abc import Iterable, Sequence

EXIT_USER_ERROR = 2
"""Exit status of every rank after a user's mistake."""


class UserError(Exception):
    """A mistake the user can fix; ends every rank with one message and exit status 2.

    ``got`` is what was found, ``expected`` what would have been right, ``do`` the next action. Each is one
    plain sentence or clause without a closing full stop. ``kind``: what a supervisor takes it for: "user", which no
    restart fixes, or another kind of `hvdtrain.cluster.liveness.causes`.
    """

    kind = "user"

    def __init__(self, got: str, expected: str = "", do: str = "") -> None:
        self.got, self.expected, self.do = got, expected, do
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.got]
        if self.expected:
            parts.append(f"expected {self.expected}")
        text = "; ".join(parts) + "."
        return f"{text} {self.do[:1].upper()}{self.do[1:]}." if self.do else text

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.got, self.expected, self.do)

    def of_kind(self, kind: str) -> UserError:
        """Have a supervisor take this error for ``kind`` ("non_finite", "disk", ...); return self."""
        self.kind = kind
        return self


class NotSupported(UserError, NotImplementedError):
    """A reduction that the transport lacks."""


class WrongMode(UserError, RuntimeError):
    """A call that this job, or a framework's mode, does not have."""


class WrongValue(UserError, ValueError):
    """An unknown option, or one that excludes another."""


def of_locale(error: BaseException) -> BaseException:
    """Return a `UserError` for a text that the locale's encoding does not hold, ``error`` for any other error."""
    encoding = codecs.lookup(locale.getpreferredencoding(False)).name
    if not isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)) or encoding == "utf-8":
        return error
    other = ""
    with contextlib.suppress(LookupError):  # a library may name an encoding that is none
        other = codecs.lookup(error.encoding).name
    # Surrogates stand for the bytes of a file name that the locale did not decode.
    if other != encoding and "surrogates" not in error.reason:
        return error
    cause = next((f"{name}={os.environ[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)),
                 "no LC_ALL and no LANG")
    places = [place for place in traceback.extract_tb(error.__traceback__) if not place.filename.startswith("<")]
    where = f", {places[-1].filename}:{places[-1].lineno}" if places else ""
    found = UserError(f"a text or file name that the locale's encoding {encoding} does not hold ({error}{where})",
                      f"a UTF-8 locale, not {cause} with Python's UTF-8 mode off",
                      "set LC_ALL=C.UTF-8 or PYTHONUTF8=1 on every host")
    found.__cause__ = error
    return found.with_traceback(error.__traceback__)


def through_trace(error: UserError) -> UserError:
    """Mark ``error`` so that neither Keras nor AutoGraph replaces it on its way out of a trace."""
    for mark in ("_keras_call_info_injected", "ag_pass_through"):
        setattr(error, mark, True)
    return error


class Interrupted(KeyboardInterrupt):
    """A SIGINT (Ctrl-C) ended a fit on all ranks, after the run was saved; the message says where it is."""


class ExitCalled(RuntimeError):
    """A callable of the user's called ``sys.exit()`` in the middle of a run; the message names it."""


class WaitTimeout(RuntimeError):
    """A bounded wait for other ranks ran out; names the wait, the rank and the seconds."""


class PeerFailed(RuntimeError):
    """A collective failed because another rank went away; that rank's own error is the one to read."""


class RankFailed(RuntimeError):
    """A rank of `hvdtrain.run` raised an exception, which is the cause of this one, or ended without a result.

    ``exit_status``: of a rank that ended, None after an exception; ``traceback``: the rank's, "" where there is none.
    """

    def __init__(self, text: str, rank: int = -1, host: str = "", exit_status: int | None = None,
                 traceback: str = "") -> None:
        super().__init__(text)
        self.rank, self.host, self.exit_status, self.traceback = rank, host, exit_status, traceback


def count(n: float, one: str, many: str = "") -> str:
    """Return a number with its noun, which is plural but for 1.

    >>> count(1, "restart"), count(1200, "step"), count(2, "loss", "losses"), count(0.5, "core")
    ('1 restart', '1,200 steps', '2 losses', '0.5 cores')
    """
    number = f"{n:,}" if isinstance(n, int) else f"{n:g}"
    return f"{number} {one if n == 1 else many or one + 's'}"


def some(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return the first ``most`` names, and how many there are more.

    >>> some(["a", "b"], 2), some(["a", "b", "c", "d"], 2)
    ('a, b', 'a, b and 2 more')
    """
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice that is spelled most like ``name``, any case; None where none is alike."""
    known = sorted(choices)
    close = difflib.get_close_matches(name.lower(), [c.lower() for c in known], n=1, cutoff=cutoff)
    return next((c for c in known if close and c.lower() == close[0]), None)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Say which choices exist and which is nearest to ``name``, for use as ``expected``."""
    known = sorted(choices)
    if not known:
        return "one that exists (there is none here)"
    hint = closest(name, known)
    if hint and len(known) > 12:
        return f"a known name (did you mean {hint!r}?)"
    names = ", ".join(known)
    if len(names) > 400:
        return "a known name"
    return f"one of {names}" + (f" (did you mean {hint!r}?)" if hint else "")
