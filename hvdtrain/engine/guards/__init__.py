"""What goes wrong in a run, told in sentences. Pure; acts on nothing."""
