"""Unlike devices in one job: how fast each rank is, how many samples it gets, and what that leaves on the table."""
