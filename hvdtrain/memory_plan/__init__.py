"""How much memory training takes, before it does: by rank and kind, with what would make it less."""
