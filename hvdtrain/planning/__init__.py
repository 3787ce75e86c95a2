"""Pure functions that decide from measurements: batch shares, memory, pipelines, compressors, compilation."""
