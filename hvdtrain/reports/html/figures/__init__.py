"""Figures as plain data: places in percent of the width and height of a box, so that they fit any screen."""
