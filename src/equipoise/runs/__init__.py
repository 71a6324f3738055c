"""Runs: set-up, checkpoints, health checks, families, and several runs in one."""
