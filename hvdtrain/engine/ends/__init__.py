"""The report of a run that ends, written by the run itself."""
