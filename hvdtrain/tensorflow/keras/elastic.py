"""`hvdtrain.keras.elastic` by Horovod's name."""

from hvdtrain.keras.elastic import __getattr__  # noqa: F401
