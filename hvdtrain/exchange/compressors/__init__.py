"""How a flat bucket is summed over ranks; one file per way."""
