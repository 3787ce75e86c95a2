"""The order of a step's forwards and backwards; a file for each order."""
