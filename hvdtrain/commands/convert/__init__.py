"""Conversion of weights and optimizer state between a PyTorch model and its Keras twin, checked by their outputs.

The core is numpy; each framework runs in a child process of its own (law 3).
"""
