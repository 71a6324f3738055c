"""The simulator: local work of many clients as one batched computation, by one of several paths."""
