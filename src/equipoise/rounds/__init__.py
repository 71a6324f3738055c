"""One round of one run, and the drivers that answer what it asks.

Here belong the round, its drivers, and the one module that makes stages of parts. What a feature does belongs to its stage, in
the room of the feature; how questions are answered belongs to the engines.
"""
