"""A model split over the devices of a rank: where it is cut, in which order parts run, what each device holds."""
