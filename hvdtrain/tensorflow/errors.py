"""Mistakes of users that are Horovod's errors too: a script that catches what Horovod raises catches them here.

Owns the classes. Each is a `UserError`, so that a job that nobody catches it in ends with one message and status 2.
"""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.core.errors import UserError


class _OfTensorFlow(UserError):
    """What is one of `tf.errors` beside; those take an operation, which there is none of."""

    def __init__(self, got: str, expected: str = "", do: str = "") -> None:
        self.got, self.expected, self.do = got, expected, do
        super(UserError, self).__init__(None, None, UserError.__str__(self))  # type: ignore[call-arg]


class InvalidArgument(_OfTensorFlow, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An argument that is wrong on this rank: its process set, its root, its splits, its type."""


class Mismatch(_OfTensorFlow, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """Arguments that differ between ranks; raised on all of them."""


class NotSupported(UserError, NotImplementedError):
    """A reduction that there is none of."""


class WrongMode(UserError, RuntimeError):
    """A call that belongs to TensorFlow 1, or in another mode of TensorFlow."""


class WrongValue(UserError, ValueError):
    """An option that is not one, or does not go with another."""
