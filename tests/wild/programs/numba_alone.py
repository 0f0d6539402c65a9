"""numba without PyTorch: an array that a kernel fills, then arrays until the GPU is full, which numba reports as it does."""
import numpy
from numba import cuda


@cuda.jit
def add_one(x, out):
    at = cuda.grid(1)
    if at < out.size:
        out[at] = x[at] + 1


x = cuda.to_device(numpy.arange(1 << 20, dtype=numpy.float32))
assert (x.copy_to_host() == numpy.arange(1 << 20)).all()
out = cuda.device_array_like(x)
add_one[4096, 256](x, out)
cuda.synchronize()
kept = []
try:
    while True:
        kept.append(cuda.device_array(1 << 28, dtype=numpy.float32))
except cuda.cudadrv.driver.CudaAPIError as error:
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
print(f"full after {len(kept)} GiB")
