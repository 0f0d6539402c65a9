// Stands for the CUDA runtime, and for a libtorch: three GPUs.

extern "C" __attribute__((visibility("default"))) int cudaGetDeviceCount(int* count);
int cudaGetDeviceCount(int* count) {
  *count = 3;
  return 0;
}
