"""Choice of a transport and a compressor by measured times."""
