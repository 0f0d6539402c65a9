"""The virtual device's libraries, as they are preloaded for the torch of this Python: CUDA 12's have other numbers."""
import importlib.util
import pathlib
import re

_TORCH = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
CUDA_MAJOR = int(re.search(r"^cuda.*= '(\d+)\.", (_TORCH / "version.py").read_text(), re.M)[1])
RUNTIME, CUBLAS, CUBLASLT, CUPTI = (f"lib{name}.so.{CUDA_MAJOR}" for name in ("cudart", "cublas", "cublasLt", "cupti"))
CUFFT, CUSOLVER = (f"lib{name}.so.{CUDA_MAJOR - 1}" for name in ("cufft", "cusolver"))
LIBRARIES = ["libcuda.so.1", RUNTIME, CUBLAS, CUBLASLT, "liboomdiag_cudnn.so", "libnvidia-ml.so.1", CUFFT, CUSOLVER,
             "libcusparse.so.12", "libcusparseLt.so.0", "libnccl.so.2", CUPTI]
