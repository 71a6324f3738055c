"""Paths of the simulator for CUDA devices."""
