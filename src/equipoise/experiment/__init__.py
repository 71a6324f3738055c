"""Experiments without code: the catalogue of parts, TOML configurations, and the folder that a run leaves."""
