"""The numbers that a report shows, computed from results."""
