"""Sums gradients over ranks: buckets (fusion), weighting, compressors, and the reducer that drives them."""
