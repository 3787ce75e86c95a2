"""Callbacks of a run, which see the events of `hvdtrain.core.events`."""
