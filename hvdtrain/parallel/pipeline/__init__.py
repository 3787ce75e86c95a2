"""Order of a step's forwards and backwards, and models partitioned over ranks or devices."""
