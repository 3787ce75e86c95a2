"""The order of a step's forwards and backwards, and a model that is cut over ranks: where it is cut, what travels."""
