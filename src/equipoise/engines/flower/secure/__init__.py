"""Secure sums over a network, and the protections that are built on them."""
