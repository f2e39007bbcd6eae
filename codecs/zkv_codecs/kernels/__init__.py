"""The loops of the codecs: one module for each family and backend, all with the same functions.

Rules that every kernel keeps: flat C-contiguous arrays in, results into arrays that the caller has
made; float32 arithmetic in the order that the NumPy module states, no fused multiply-add, no fast
math, so that all backends give the same bits; no bound is checked here, for frames are checked
before.
"""
