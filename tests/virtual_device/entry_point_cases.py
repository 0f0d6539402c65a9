"""Entry points that PyTorch does not call and other programs do: cases of test_device.py."""

import ctypes
import pathlib
import threading

from device_cases import MIB, Skip, case, expect, expect_equal, load_optional, main
from stand_ins import CUBLAS, CUBLASLT, CUDA_MAJOR, CUFFT, CUPTI, CUSOLVER, RUNTIME

DRIVER = "libcuda.so.1"
PTX = b".version 8.0\n.target sm_75\n.visible .entry kernel() { ret; }\n"


def start():
    """Both libraries, with a context."""
    runtime = ctypes.CDLL(RUNTIME)
    expect_equal(runtime.cudaFree(None), 0, "cudaFree(0)")
    return runtime, ctypes.CDLL(DRIVER)


def allocate(runtime, bytes):
    block = ctypes.c_void_p()
    expect_equal(runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(bytes)), 0, "cudaMalloc")
    return block


def read(runtime, block, bytes, offset=0):
    back = ctypes.create_string_buffer(bytes)
    expect_equal(runtime.cudaMemcpy(back, ctypes.c_void_p(block.value + offset), ctypes.c_size_t(bytes), 4), 0, "cudaMemcpy")
    return back.raw


def free_bytes(runtime):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return free.value


def structure(*fields):
    return type("Structure", (ctypes.Structure,), {"_fields_": [(name, kind) for names, kind in fields for name in names.split()]})


Extent = structure(("width height depth", ctypes.c_size_t))
PitchedPointer = structure(("ptr", ctypes.c_void_p), ("pitch xsize ysize", ctypes.c_size_t))
Box = structure(("from_array", ctypes.c_void_p), ("from_at", Extent), ("source", PitchedPointer), ("to_array", ctypes.c_void_p),
                ("to_at", Extent), ("target", PitchedPointer), ("extent", Extent), ("kind", ctypes.c_int))
Channels = structure(("x y z w kind", ctypes.c_int))


@case()
def batches_of_copies_and_libraries_of_code_are_served():
    runtime, _ = start()
    block, host = allocate(runtime, 64), ctypes.create_string_buffer(b"abcdefgh", 8)
    targets = (ctypes.c_void_p * 2)(block.value, block.value + 32)
    sources = (ctypes.c_void_p * 2)(ctypes.addressof(host), ctypes.addressof(host) + 4)
    which_failed = [ctypes.byref(ctypes.c_size_t())] if CUDA_MAJOR == 12 else []
    sizes, no_attributes = (ctypes.c_size_t * 2)(4, 4), (None, None, ctypes.c_size_t(0))
    expect_equal(runtime.cudaMemcpyBatchAsync(targets, sources, sizes, ctypes.c_size_t(2), *no_attributes, *which_failed, None), 0)
    expect_equal((read(runtime, block, 4), read(runtime, block, 4, 32)), (b"abcd", b"efgh"), "what the batch copied")
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    expect_equal(runtime.cudaLibraryLoadData(ctypes.byref(library), PTX, None, None, 0, None, None, 0), 0)
    expect_equal(runtime.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"kernel"), 0)
    expect_equal(runtime.cudaGetDriverEntryPoint(b"cuMemAlloc", ctypes.byref(function), ctypes.c_ulonglong(0), None), 0)
    expect(kernel.value and function.value, "no kernel, or no function of the driver")


@case()
def rectangles_boxes_and_half_words_are_copied_and_set():
    runtime, driver = start()
    block, host = allocate(runtime, 4096), ctypes.create_string_buffer(bytes(range(24)), 24)
    box = Box(source=PitchedPointer(ctypes.addressof(host), 4, 4, 3), target=PitchedPointer(block.value, 16, 16, 8), extent=Extent(2, 3, 2),
              from_at=Extent(1, 0, 0), kind=4)  # two planes of three rows of four bytes, of which the middle two go
    expect_equal(runtime.cudaMemcpy3D(ctypes.byref(box)), 0)
    rows = [read(runtime, block, 2, z * 128 + y * 16) for z in range(2) for y in range(3)]
    expect_equal(rows, [bytes([first, first + 1]) for first in (1, 5, 9, 13, 17, 21)], "the rows")
    expect_equal(driver.cuMemsetD16_v2(block, 0x0102, ctypes.c_size_t(3)), 0)
    expect_equal(read(runtime, block, 6), b"\2\1" * 3, "the half words")
    expect_equal(driver.cuMemsetD2D32_v2(block, ctypes.c_size_t(64), 7, ctypes.c_size_t(2), ctypes.c_size_t(2)), 0)
    expect_equal(read(runtime, block, 8, 64), b"\7\0\0\0" * 2, "the words of the second row")


@case()
def a_program_of_the_driver_alone_links_and_runs_a_kernel():
    """The calls of numba and PyCUDA, in their order."""
    driver = ctypes.CDLL(DRIVER)
    context, linker, code, size, module, kernel, block = (ctypes.c_void_p() for _ in range(7))
    registers, back = ctypes.c_int(), ctypes.create_string_buffer(64)
    results = [
        driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), driver.cuCtxPushCurrent_v2(context),
        driver.cuLinkCreate_v2(0, None, None, ctypes.byref(linker)), driver.cuLinkAddData_v2(linker, 1, PTX, ctypes.c_size_t(len(PTX)), b"name", 0, None, None),
        driver.cuLinkComplete(linker, ctypes.byref(code), ctypes.byref(size)), driver.cuModuleLoadDataEx(ctypes.byref(module), code, 0, None, None),
        driver.cuLinkDestroy(linker), driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"kernel"), driver.cuFuncGetAttribute(ctypes.byref(registers), 4, kernel),
        driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(64)), driver.cuMemsetD8_v2(block, 3, ctypes.c_size_t(64)),
        driver.cuMemcpyDtoH_v2(back, block, ctypes.c_size_t(64)),
        driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, (ctypes.c_void_p * 1)(ctypes.addressof(block)), None),
        driver.cuCtxSynchronize(), driver.cuMemFree_v2(block), driver.cuModuleUnload(module), driver.cuCtxPopCurrent_v2(ctypes.byref(context))]
    expect_equal(results, [0] * len(results), "the answers")
    expect(code.value and size.value and module.value and kernel.value, "a handle is null")
    expect_equal(back.raw, b"\3" * 64, "what was set")


@case()
def a_managed_variable_is_the_hosts_before_cuda_is_used():
    runtime, host, address = ctypes.CDLL(RUNTIME), ctypes.c_void_p(), ctypes.c_void_p()
    runtime.__getattr__("__cudaRegisterManagedVar")(None, ctypes.byref(host), b"name", b"name", 0, ctypes.c_size_t(8), 0, 0)
    expect(host.value, "the host's pointer is null")
    expect_equal(ctypes.c_int64.from_address(host.value).value, 0, "what it has at first")
    ctypes.c_int64.from_address(host.value).value = 7
    expect_equal(runtime.cudaGetSymbolAddress(ctypes.byref(address), ctypes.byref(host)), 0)
    expect_equal(address.value, host.value, "the GPU's address of it")


@case()
def vectors_and_matrices_are_copied_by_cublas():
    runtime, _ = start()
    cublas, block = ctypes.CDLL(CUBLAS), allocate(runtime, 256)
    host, back = ctypes.create_string_buffer(bytes(range(12)), 12), ctypes.create_string_buffer(6)
    # Two columns of three rows each, of matrices that have four and eight; then every second element of a vector.
    expect_equal((cublas.cublasSetMatrix(3, 2, 1, host, 4, block, 8), cublas.cublasGetMatrixAsync(3, 2, 1, block, 8, back, 3, None)), (0, 0))
    expect_equal(back.raw, bytes([0, 1, 2, 4, 5, 6]), "the matrix")
    expect_equal((cublas.cublasSetVectorAsync(3, 2, host, 2, block, 1, None), cublas.cublasGetVector(3, 2, block, 1, back, 1)), (0, 0))
    expect_equal(back.raw, bytes([0, 1, 4, 5, 8, 9]), "the vector")
    expect_equal(cublas.cublasSetMatrix(5, 2, 1, host, 4, block, 8), 7, "more rows than the matrix has")  # CUBLAS_STATUS_INVALID_VALUE


@case()
def an_array_takes_its_bytes_and_textures_look_at_it():
    runtime, _ = start()
    array, channels, before = ctypes.c_void_p(), Channels(32, 0, 0, 0, 2), free_bytes(runtime)
    expect_equal(runtime.cudaMallocArray(ctypes.byref(array), ctypes.byref(channels), ctypes.c_size_t(4096), ctypes.c_size_t(4096), 0), 0)
    expect_equal(before - free_bytes(runtime), 64 * MIB, "what 4096 x 4096 floats take")
    host, back = (ctypes.c_float * 4)(1, 2, 3, 4), (ctypes.c_float * 4)()
    for place, to in ((host, "cudaMemcpy2DToArray"), (back, "cudaMemcpy2DFromArray")):
        size = ctypes.c_size_t
        arguments = (array, size(8), size(5), place, size(8)) if place is host else (place, size(8), array, size(8), size(5))
        expect_equal(getattr(runtime, to)(*arguments, size(8), size(2), 4), 0, to)
    expect_equal(list(back), [1, 2, 3, 4], "what came back")
    found, extent = Channels(), Extent()
    runtime.cudaArrayGetInfo(ctypes.byref(found), ctypes.byref(extent), None, array)
    expect_equal((found.x, found.y, found.kind, extent.width, extent.height), (32, 0, 2, 4096, 4096), "the array's shape")
    texture, resource, asked = ctypes.c_ulonglong(), (ctypes.c_ulonglong * 32)(0, array.value), (ctypes.c_ulonglong * 32)()
    expect_equal(runtime.cudaCreateTextureObject(ctypes.byref(texture), resource, None, None), 0)
    expect_equal(runtime.cudaGetTextureObjectResourceDesc(asked, texture), 0)
    expect_equal(asked[1], array.value, "the texture's array")
    expect_equal((runtime.cudaDestroyTextureObject(texture), runtime.cudaFreeArray(array)), (0, 0))
    expect_equal(free_bytes(runtime), before, "what is free afterwards")


@case(gpu="h100-sxm")
def a_green_context_has_some_of_the_multiprocessors():
    load_optional("cuda.bindings")
    import torch

    torch.zeros(1, device="cuda")
    with_twelve = torch.cuda.GreenContext.create(num_sms=12, device_id=0)
    stream = with_twelve.Stream()
    with torch.cuda.stream(stream):
        total = torch.zeros(8, device="cuda").sum()
    stream.synchronize()
    expect_equal(total.item(), 0.0)
    from cuda.bindings import driver

    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = driver.cuDeviceGetDevResource(0, kind)[1]
    _, parts, count, rest = driver.cuDevSmResourceSplitByCount(3, whole, 0, 40)
    expect_equal((count, [part.sm.smCount for part in parts], rest.sm.smCount), (3, [40] * 3, 12), "three parts of 132 multiprocessors")
    _, parts, count, rest = driver.cuDevSmResourceSplitByCount(1, whole, 0, 12)
    expect_equal((count, parts[0].sm.smCount), (1, 16), "a part of at least 12, in eights")


@case()
def streams_write_numbers_and_wait_for_them():
    runtime, driver = start()
    block = allocate(runtime, 64)
    expect_equal(driver.cuStreamWriteValue32_v2(None, block, 7, 0), 0)
    expect_equal(driver.cuStreamWriteValue64_v2(None, ctypes.c_void_p(block.value + 8), ctypes.c_ulonglong(9), 0), 0)
    expect_equal(driver.cuStreamWaitValue64_v2(None, ctypes.c_void_p(block.value + 8), ctypes.c_ulonglong(9), 0), 0)
    operation = (ctypes.c_ulonglong * 6)(2, block.value + 16, 11)  # CU_STREAM_MEM_OP_WRITE_VALUE_32
    expect_equal(driver.cuStreamBatchMemOp_v2(None, 1, operation, 0), 0)
    expect_equal(read(runtime, block, 24), bytes([7] + [0] * 7 + [9] + [0] * 7 + [11] + [0] * 7), "what was written")


@case()
def allocations_come_from_the_pool_that_was_chosen():
    if CUDA_MAJOR == 12:
        raise Skip("CUDA 12 chooses pools by cudaDeviceSetMemPool only")
    runtime, _ = start()
    properties, pool, found, block, used = (ctypes.c_int * 22)(1, 0, 1, 0), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_ulonglong()
    expect_equal(runtime.cudaMemPoolCreate(ctypes.byref(pool), properties), 0)
    location = (ctypes.c_int * 2)(1, 0)
    expect_equal(runtime.cudaMemSetMemPool(location, 1, pool), 0)
    runtime.cudaDeviceGetMemPool(ctypes.byref(found), 0)
    expect_equal(found.value, pool.value, "the device's pool")
    runtime.cudaMallocAsync(ctypes.byref(block), ctypes.c_size_t(MIB), None)
    runtime.cudaMemPoolGetAttribute(pool, 7, ctypes.byref(used))  # cudaMemPoolAttrUsedMemCurrent
    expect_equal(used.value, MIB, "what the pool has in use")
    runtime.cudaFreeAsync(block, None)
    runtime.cudaMemPoolDestroy(pool)
    runtime.cudaMemGetMemPool(ctypes.byref(found), location, 1)
    default = ctypes.c_void_p()
    runtime.cudaMemGetDefaultMemPool(ctypes.byref(default), location, 1)
    expect(found.value == default.value != pool.value, "a pool that is destroyed is not the device's")


@case()
def an_older_name_of_the_same_function_is_that_function():
    runtime, driver = start()
    context, event, active, flags = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    expect_equal(driver.cuCtxPushCurrent(context), 0)
    expect_equal(driver.cuEventCreate(ctypes.byref(event), 0), 0)
    expect_equal((driver.cuEventDestroy(event), driver.cuCtxPopCurrent(ctypes.byref(context)), driver.cuDevicePrimaryCtxRelease(0)), (0, 0, 0))
    state = ctypes.c_void_p()
    expect_equal((driver.cuLinkCreate(0, None, None, ctypes.byref(state)), driver.cuLinkAddData(state, 1, PTX, ctypes.c_size_t(len(PTX)), b"", 0, None, None)), (0, 0))
    # One with other types, of 32 bits, must not be taken for today's.
    expect_equal(driver.cuMemAlloc(ctypes.byref(context), 64), 801, "cuMemAlloc of CUDA 3.1")
    expect_equal(driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)), 0)


@case()
def what_nvml_does_not_answer_is_not_supported_and_named():
    driver, nvml = ctypes.CDLL(DRIVER), ctypes.CDLL("libnvidia-ml.so.1")
    heard = []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: heard.append((kind, name)))
    driver.oomdiag_device_set_observer(observer)
    del heard[:]
    for _ in range(2):
        expect_equal(nvml.nvmlDeviceGetBAR1MemoryInfo(ctypes.c_void_p(1), None), 3, "NVML_ERROR_NOT_SUPPORTED")
    driver.oomdiag_device_set_observer(None)
    expect_equal(heard, [(b"unsupported", b"nvmlDeviceGetBAR1MemoryInfo")], "what was noted")
    names = pathlib.Path(__file__).resolve().parents[2] / "extension/virtual_device/names/libnvidia-ml.so.1.txt"
    missing = [name for name in names.read_text().split() if not hasattr(nvml, name)]
    expect_equal(missing, [], "names that are missing")


@case()
def every_line_of_the_tables_names_a_function_of_its_library():
    folder = pathlib.Path(__file__).resolve().parents[2] / "extension/virtual_device"
    rows_of = lambda table: [line.split("#")[0].split() for line in table.read_text().splitlines() if line.split("#")[0].split()]
    names_of = lambda table: [row[1] for row in rows_of(table) if row[0] != "unsupported"]
    libraries = {"driver/": DRIVER, "runtime/": RUNTIME, "cupti/": CUPTI, "blas/": CUBLAS, "blas/cublaslt_": CUBLASLT, "fft/": CUFFT,
                 "solver/": CUSOLVER, "sparse/": "libcusparse.so.12", "sparselt/": "libcusparseLt.so.0", "dnn/": "liboomdiag_cudnn.so", "nccl/": "libnccl.so.2"}
    tables = {table.relative_to(folder).as_posix().removesuffix("entry_points.txt") for table in folder.glob("*/*entry_points.txt")}
    expect_equal(tables, set(libraries), "the tables")
    other_forms = set((folder / "names/libcudart.so.12.txt").read_text().split())
    if not hasattr(ctypes.CDLL("libnccl.so.2"), "ncclCommGetUniqueId"):  # one before 2.30
        other_forms |= {"ncclCommGetUniqueId", "ncclCommMemStats", "ncclCommRevoke", "ncclPutSignal", "ncclSignal", "ncclWaitSignal", "ncclWinGetUserPtr"}
    for name, library in libraries.items():
        found = ctypes.CDLL(library)
        missing = [function for function in names_of(folder / f"{name}entry_points.txt") if not hasattr(found, function) and function not in other_forms]
        expect_equal(missing, [], f"what the library of {name} lacks")


@case()
def a_status_has_the_name_of_the_librarys_header():
    for library, function, value, text in ((CUBLAS, "cublasGetStatusName", 8, b"CUBLAS_STATUS_ARCH_MISMATCH"), (CUBLAS, "cublasGetStatusString", 0, b"success"),
                                           (CUBLASLT, "cublasLtGetStatusString", 15, b"not supported"), (CUBLASLT, "cublasLtGetStatusName", 999, b"unrecognized status"),
                                           ("libcusparse.so.12", "cusparseGetErrorString", 3, b"invalid value"),
                                           ("libcusparseLt.so.0", "cusparseLtGetErrorName", 11, b"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES")):
        answer = getattr(ctypes.CDLL(library), function)
        answer.restype = ctypes.c_char_p
        expect_equal(answer(value), text, f"{function}({value})")
    text = ctypes.c_char_p()
    expect_equal((ctypes.CDLL(DRIVER).cuGetErrorName(914, ctypes.byref(text)), text.value), (0, b"CUDA_ERROR_INVALID_RESOURCE_TYPE"), "the driver's 914")


@case()
def an_object_that_a_graph_keeps_is_destroyed_under_no_lock():
    _, driver = start()
    graph, stream, object, destroyed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), []

    def use_the_device():
        made = ctypes.c_void_p()
        driver.cuCtxPushCurrent_v2(context)
        destroyed.append((driver.cuStreamCreate(ctypes.byref(made), 0), driver.cuStreamDestroy_v2(made)))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def destroy(_):
        other = threading.Thread(target=use_the_device, daemon=True)
        other.start()
        other.join(10)

    context = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    by_graph = lambda: expect_equal((driver.cuGraphCreate(ctypes.byref(graph), 0), driver.cuGraphRetainUserObject(graph, object, 1, 1), driver.cuGraphDestroy(graph)), (0, 0, 0))

    def by_lost_capture():
        driver.cuStreamCreate(ctypes.byref(stream), 0)
        driver.cuStreamBeginCapture_v2(stream, 2)
        driver.cuStreamGetCaptureInfo_v2(stream, ctypes.byref(ctypes.c_int()), None, ctypes.byref(graph), None, None)
        driver.cuGraphRetainUserObject(graph, object, 1, 1)
        expect_equal((driver.cuStreamQuery(stream), driver.cuStreamEndCapture(stream, ctypes.byref(graph))), (900, 901), "a query, and the end of its capture")

    for drop in (lambda: driver.cuUserObjectRelease(object, 1), by_graph, by_lost_capture):
        del destroyed[:]
        expect_equal(driver.cuUserObjectCreate(ctypes.byref(object), None, destroy, 1, 1), 0)
        drop()
        expect_equal(destroyed, [(0, 0)], "what another thread was answered meanwhile")


if __name__ == "__main__":
    main()
