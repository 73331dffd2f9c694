"""A GPU on paper: kernels run unmodified, instruction by instruction, and are checked.

May import: errors, engines.gpu.
"""
