"""CuPy, whose wheels link NVIDIA's runtime into themselves: that one asks the driver for tables that are not documented."""
import cupy

print(cupy.zeros(1024).nbytes)
