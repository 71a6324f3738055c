"""Inner loops in C, for CPUs: compiled on first use where the machine has a C compiler. Where it has none, only time is lost.

`c_library.py` compiles and loads; `compiled_softmax.py` calls `softmax.c`.
"""
