"""What is told of a run at each of its ends, also where rank 0 could not tell it any more."""
