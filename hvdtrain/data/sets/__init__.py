"""Data sets by name, a file each: ``data.name`` is the file's name, and ``make(split, **data.args)`` gives the data."""
