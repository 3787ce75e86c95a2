"""Which blocks of a model are recomputed in backward: by name, every so many, or the cheapest set that fits memory."""
