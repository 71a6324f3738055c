"""Data sets: drawn from a seed, of LEAF and of papers, and of other libraries and folders. Users' own tables are not here."""
