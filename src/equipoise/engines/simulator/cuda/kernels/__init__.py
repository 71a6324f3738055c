"""Kernels for one kind of device, written in Triton. Triton is imported only when one of these modules is."""
