"""The programs of the rows; each file's functions are rows of these names."""
