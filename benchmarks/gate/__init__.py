"""The gate: whether two trees of the library give the same numbers, bit for bit. README.md says how to use it."""
