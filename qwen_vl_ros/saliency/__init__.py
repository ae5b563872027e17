"""Which units of a picture carry the answer: one file for each signal, one that combines them.

A signal is a float32 map over the unit grid [T, H/2, W/2] (one value for each 2x2 unit, 28x28
pixels of the resized picture), larger where it matters more. What is decided here is decided
before the encoder: units that are not kept cost nothing at all.
"""
