"""What a GPU gives, to whom, and what it says when it has no more: cases of test_device.py that ask the mocked libraries themselves."""

import ctypes

from device_cases import MIB, Skip, case, expect, expect_equal, main, read_gpu, run_python, with_out_of_memory
from stand_ins import CUBLAS, CUBLASLT, CUFFT, CUSOLVER, RUNTIME

DRIVER = "libcuda.so.1"


def runtime():
    return ctypes.CDLL(RUNTIME)


def free_bytes():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime().cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value


def allocate(bytes, expected=0):
    block = ctypes.c_void_p()
    expect_equal(runtime().cudaMalloc(ctypes.byref(block), ctypes.c_size_t(bytes)), expected, f"cudaMalloc of {bytes}")
    return block


def fill_gpu(left=0):
    """Takes all of the GPU but `left` bytes and a remainder of a page; the block."""
    runtime().cudaFree(None)
    return allocate((free_bytes() - left) // (2 * MIB) * (2 * MIB))


@case()
def small_blocks_share_pages():
    allocate(1)
    before = free_bytes()
    blocks = [allocate(512) for _ in range(4095)]
    expect_equal(before - free_bytes(), 0, "what the rest of a page takes")
    blocks += [allocate(512) for _ in range(4096)]
    expect_equal(before - free_bytes(), 2 * MIB, "what another 4096 blocks of 512 bytes take")
    expect_equal(len({block.value for block in blocks}), 8191, "the number of addresses")
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    ctypes.CDLL(DRIVER).cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(blocks[7].value + 100))
    expect_equal((base.value, size.value), (blocks[7].value, 512), "the range of a small block")
    for block in blocks:
        expect_equal(runtime().cudaFree(block), 0)
    expect_equal(before - free_bytes(), 0, "what is taken once all are free")
    large = allocate(MIB + 1)
    expect_equal(before - free_bytes(), 2 * MIB, "what a block above 1 MiB takes: a page of its own")
    runtime().cudaFree(large)


@case()
def pools_suballocate_too():
    cuda = runtime()
    pool, value = ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cudaFree(None)
    cuda.cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    used_now, reserved_now = 7, 5  # cudaMemPoolAttrUsedMemCurrent, …ReservedMemCurrent

    def ask(attribute):
        cuda.cudaMemPoolGetAttribute(pool, attribute, ctypes.byref(value))
        return value.value

    before = free_bytes()
    blocks = [ctypes.c_void_p() for _ in range(1000)]
    for block in blocks:
        expect_equal(cuda.cudaMallocAsync(ctypes.byref(block), ctypes.c_size_t(512), None), 0)
    expect_equal((ask(used_now), ask(reserved_now), before - free_bytes()), (512000, 32 * MIB, 32 * MIB), "1000 blocks of 512 bytes")
    large = ctypes.c_void_p()
    cuda.cudaMallocAsync(ctypes.byref(large), ctypes.c_size_t(100 * MIB), None)
    expect_equal((ask(used_now) - 512000, ask(reserved_now)), (100 * MIB, 128 * MIB), "and one of 100 MiB")
    expect_equal(cuda.cudaFree(large), 0, "cudaFree of a pool's block")
    expect_equal((ask(used_now), ask(reserved_now)), (512000, 32 * MIB), "after it")
    for block in blocks:
        cuda.cudaFreeAsync(block, None)
    cuda.cudaDeviceSynchronize()
    expect_equal((ask(used_now), ask(reserved_now), before - free_bytes()), (0, 0, 0), "an empty pool")


@case()
def a_pool_on_a_nearly_full_gpu_takes_what_there_is():
    cuda = runtime()
    block = fill_gpu(left=6 * MIB)
    small = ctypes.c_void_p()
    expect_equal(cuda.cudaMallocAsync(ctypes.byref(small), ctypes.c_size_t(3 * MIB), None), 0, "3 MiB of the last 6")
    expect_equal(cuda.cudaMallocAsync(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(3 * MIB), None), 2, "3 MiB of the last 2")
    cuda.cudaGetLastError()
    cuda.cudaFreeAsync(small, None)
    cuda.cudaFree(block)


@case()
def limits_of_kernels_take_memory():
    cuda = runtime()
    cuda.cudaFree(None)
    gpu, value, before = read_gpu(), ctypes.c_size_t(), free_bytes()
    stack, heap = 0, 2
    expect_equal(cuda.cudaDeviceSetLimit(heap, ctypes.c_size_t(1 << 30)), 0)
    cuda.cudaDeviceGetLimit(ctypes.byref(value), heap)
    expect_equal((value.value, before - free_bytes()), (1 << 30, (1 << 30) - 8 * MIB), "a heap of 1 GiB")
    expect_equal(cuda.cudaDeviceSetLimit(heap, ctypes.c_size_t(1 << 36)), 2, "a heap larger than the GPU")
    cuda.cudaGetLastError()
    cuda.cudaDeviceSetLimit(heap, ctypes.c_size_t(8 << 20))
    cuda.cudaDeviceSetLimit(stack, ctypes.c_size_t(3 << 10))
    expect_equal(before - free_bytes(), gpu["multiprocessors"] * 1536 * (2 << 10), "stacks of 3 KiB for all resident threads")
    cuda.cudaDeviceSetLimit(stack, ctypes.c_size_t(1 << 10))
    expect_equal(before - free_bytes(), 0, "what is taken when the defaults are back")


@case()
def executables_of_graphs_take_memory():
    import torch

    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graphs = []
    if not hasattr(torch.cuda.CUDAGraph, "instantiate"):
        raise Skip("this torch keeps no graph for later")
    for _ in range(3):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for _ in range(256):
                x += 1
        graphs.append(graph)
    before = free_bytes()
    for graph in graphs:
        graph.instantiate()
    expect_equal(before - free_bytes(), 3 * 256 * 16 << 10, "what three graphs of 256 kernels take")
    del graph
    graphs.clear()
    torch.cuda.synchronize()
    expect_equal(before - free_bytes(), 0, "what is left of them")


@case(gpu="rtx3060")
def each_further_handle_of_cublas_has_a_workspace():
    blas, cuda = ctypes.CDLL(CUBLAS), runtime()
    first, second = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cudaFree(None)
    expect_equal(blas.cublasCreate_v2(ctypes.byref(first)), 0)
    before = free_bytes()
    expect_equal(blas.cublasCreate_v2(ctypes.byref(second)), 0)
    expect_equal(before - free_bytes(), 10 * MIB, "8.1 MiB in pages")
    blas.cublasDestroy_v2(second)
    expect_equal(before - free_bytes(), 0, "what stays of it")
    block = fill_gpu()
    expect_equal(blas.cublasCreate_v2(ctypes.byref(second)), 3, "CUBLAS_STATUS_ALLOC_FAILED")
    cuda.cudaFree(block)
    cuda.cudaGetLastError()


# A full GPU. Whoever comes too late hears it in his own words.

FULL = f"""
import ctypes
cuda = ctypes.CDLL({RUNTIME!r})
free, total, block = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
cuda.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(free.value // (2 << 20) * (2 << 20)))
handle = ctypes.c_void_p()
def create(library, name): return getattr(ctypes.CDLL(library), name)(ctypes.byref(handle))
"""


@case()
def a_full_gpu_makes_no_handles():
    expected = {
        f'create("{CUBLAS}", "cublasCreate_v2")': 1,  # CUBLAS_STATUS_NOT_INITIALIZED
        f'create("{CUBLASLT}", "cublasLtCreate")': 1,
        'create("libcusparse.so.12", "cusparseCreate")': 2,  # …_ALLOC_FAILED
        f'create("{CUSOLVER}", "cusolverDnCreate")': 2,
        f'create("{CUFFT}", "cufftCreate")': 2,
        'create("liboomdiag_cudnn.so", "cudnnCreate")': 4004,  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    }
    code = FULL + "print(" + ", ".join(expected) + ", ctypes.CDLL('libcuda.so.1').cuMemsetD8_v2(block, 0, 16))"
    child = run_python(code)
    expect_equal(list(map(int, child.stdout.split()))[:-1], list(expected.values()), f"what the libraries say ({child.stderr[-300:]})")


@case()
def a_full_gpu_runs_no_kernel():
    code = """
import torch
free, _ = torch.cuda.mem_get_info()
x = torch.empty(free // (2 << 20) * (2 << 20), dtype=torch.uint8, device="cuda")
try:
    x.add_(1)
except RuntimeError as error:
    print(type(error).__name__, str(error).splitlines()[0])
del x
torch.cuda.empty_cache()
print(torch.ones(4, device="cuda").add_(1).sum().item())
"""
    child = run_python(code)
    first, _, second = child.stdout.partition("\n")
    expect("out of memory" in first, f"the error is: {first} {child.stderr[-500:]}")
    expect_equal(second.strip(), "8.0", "a sum when there is free memory again")


@case(OOMDIAG_OTHER_PROCESSES="77:other:25300000000")
def a_full_gpu_makes_no_context():
    cuda = runtime()
    expect_equal([cuda.cudaSetDevice(0), cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 4), cuda.cudaGetLastError()], [2, 2, 2], "the answers")
    active, flags = ctypes.c_int(), ctypes.c_uint()
    ctypes.CDLL(DRIVER).cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
    expect_equal(active.value, 0, "whether there is a context")


@case(OOMDIAG_OTHER_PROCESSES=",".join(f"{100 + index}:other:{index}" for index in range(300)))
def nvml_lists_any_number_of_processes():
    nvml, count, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(400), ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    entries = (ctypes.c_ulonglong * (3 * 400))()  # pid, bytes and instances
    expect_equal(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), entries), 0, "the answer")
    expect_equal(count.value, 300, "how many there are")
    expect_equal([(entries[3 * index] & 0xffffffff, entries[3 * index + 1]) for index in range(300)],
                 [(100 + index, index) for index in range(300)], "their bytes")


@case()
def a_block_for_a_stream_that_was_destroyed_is_not_kept():
    cuda, driver, pool, value, block = runtime(), ctypes.CDLL(DRIVER), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    cuda.cudaFree(None)
    cuda.cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    stream = ctypes.c_void_p()
    driver.cuStreamCreate(ctypes.byref(stream), 0)
    driver.cuStreamDestroy_v2(stream)
    expect_equal(driver.cuMemAllocFromPoolAsync(ctypes.byref(block), ctypes.c_size_t(MIB), pool, stream), 400, "the answer")
    cuda.cudaMemPoolGetAttribute(pool, 7, ctypes.byref(value))  # cudaMemPoolAttrUsedMemCurrent
    expect_equal(value.value, 0, "bytes that are in use")


@case()
def pytorch_names_the_handle_that_failed():
    code = """
import torch
x = torch.ones(64, 64, device="cuda", requires_grad=True)
y = x @ x
free, _ = torch.cuda.mem_get_info()
rest = torch.empty((free >> 21) << 21, dtype=torch.uint8, device="cuda")
held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
try:
    y.sum().backward()
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    said = run_python(code).stdout
    expect("CUBLAS_STATUS_ALLOC_FAILED" in said, f"the text is: {said}")


@case()
def the_hosts_bounds_have_their_own_words():
    code = f"""
import ctypes, resource
cuda = ctypes.CDLL({RUNTIME!r})
cuda.cudaFree(None)
block = ctypes.c_void_p()
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
print(cuda.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(4 << 30)), cuda.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(64 << 20)))
"""
    child = run_python(code, OOMDIAG_DEVICE_LOG="1")
    expect_equal(child.stdout.split(), ["2", "0"], "4 GiB and 64 MiB of 2")
    expect("ulimit -v" in child.stderr, child.stderr)


@case(gpu="a100-80")
def blocks_need_no_mapping_each():
    allocate(4)
    count = lambda: sum(1 for _ in open("/proc/self/maps"))
    before = count()
    blocks = [allocate(3 * MIB) for _ in range(2000)]
    for block in blocks[::2]:
        runtime().cudaFree(block)
    expect(count() - before < 20, f"{count() - before} mappings for 2000 blocks")


if __name__ == "__main__":
    main()
