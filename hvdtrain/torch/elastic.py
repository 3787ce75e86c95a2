"""Horovod's ``elastic``, which is left out: every name of it answers with the reason and with what replaces it."""

from hvdtrain.keras.elastic import __getattr__  # noqa: F401
