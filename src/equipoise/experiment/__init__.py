"""Experiments without code: the catalogue of parts, configurations in TOML, folders of runs, studies and searches.

How a run trains does not belong here, nor what a report shows: a module here reads, checks, plans, and keeps files.
"""
