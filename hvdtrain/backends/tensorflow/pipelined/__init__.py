"""A Keras model that is cut over ranks: what a rank keeps of it, what it computes, what it hands on."""
