"""Experiments without code: the catalogue of parts, TOML configurations, run folders, studies and searches."""
