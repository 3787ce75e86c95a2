"""A PyTorch model that is cut over ranks, or over the devices of one: how parts are built, measured and computed."""
