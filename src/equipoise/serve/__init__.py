"""Run folders behind a web server: families with their knob, runs as they grow, models to download and to ask."""
