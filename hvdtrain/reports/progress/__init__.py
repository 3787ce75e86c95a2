"""Progress of a run on a terminal or as plain lines, and announcements of long phases."""
