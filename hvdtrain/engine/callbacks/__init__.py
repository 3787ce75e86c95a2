"""One idea per file; each observes a run at the moments named in `hvdtrain.core.events`."""
