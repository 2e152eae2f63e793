"""The code of the kernels, in Triton: one source for every GPU, NVIDIA or AMD.

`tide.kernels.triton` launches them. Where a program multiplies by weights it takes `TOKENS` tokens,
the least that a matrix product on a GPU takes, so weights are read once for so many. Sums are in
float32. Nothing here is atomic, so the same inputs give the same bits.
"""
