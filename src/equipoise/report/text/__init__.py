"""The sentences and tables of a report."""
