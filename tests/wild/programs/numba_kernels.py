"""Kernels of numba on tensors of PyTorch, beside an array of numba's own, which PyTorch's allocator does not see."""
import sys

import numpy
import torch
from numba import cuda

count = int(sys.argv[1])


@cuda.jit
def add(x, y, out):
    at = cuda.grid(1)
    if at < out.size:
        out[at] = x[at] + y[at % y.size]


x = torch.randn(64 << 20, device="cuda")
own = cuda.to_device(numpy.ones(1 << 20, dtype=numpy.float32))
kept = []
for step in range(count):
    out = torch.empty_like(x)
    add[4096, 256](cuda.as_cuda_array(x), own, cuda.as_cuda_array(out))
    kept.append(out)
cuda.synchronize()
