"""Models shared by ranks: data parallelism, pipelines, recovery from a shortage of memory."""
