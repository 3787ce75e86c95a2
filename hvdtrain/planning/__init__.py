"""Decisions as pure functions of measurements: batch shares, memory, pipelines, compressors, transports, compilation.
"""
