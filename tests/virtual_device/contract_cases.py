"""What cuda.h and cuda_runtime_api.h promise for wrong arguments and for the end of contexts: cases of test_device.py."""

import ctypes
import mmap

from device_cases import MIB, Skip, case, expect, expect_equal, load_optional, main, read_gpu
from entry_point_cases import DRIVER, allocate, free_bytes, read, start

INVALID_VALUE = 1


# Addresses that are wrong.


@case()
def an_address_that_is_nobodys_is_an_invalid_value():
    runtime, driver = start()
    host, wild, freed = ctypes.create_string_buffer(64), ctypes.c_void_p(0xDEAD000), allocate(runtime, 4 * MIB)
    runtime.cudaFree(freed)
    size = ctypes.c_size_t(16)
    for place in (wild, freed):
        answers = [runtime.cudaMemset(place, 0, size), runtime.cudaMemcpy(host, place, size, 2), runtime.cudaMemcpy(place, host, size, 1),
                   runtime.cudaMemcpyAsync(place, host, size, 1, None), driver.cuMemsetD32_v2(place, 0, size),
                   runtime.cudaMemset2D(place, size, 0, size, ctypes.c_size_t(2)),
                   runtime.cudaMemcpy2D(host, size, place, size, size, ctypes.c_size_t(2), 2)]
        expect_equal(answers, [INVALID_VALUE] * 7, f"the answers for {place.value:#x}")
    expect_equal(runtime.cudaMemset(wild, 0, ctypes.c_size_t(0)), 0, "no bytes at all")
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_size_t(0)))
    block = allocate(runtime, 64)
    expect_equal((runtime.cudaMemcpy(address, block, size, 2), runtime.cudaMemcpy(block, address, size, 1)), (INVALID_VALUE, 0), "memory that may only be read")
    runtime.cudaGetLastError()


@case()
def a_copy_or_a_set_ends_with_its_block():
    runtime, driver = start()
    block, big = allocate(runtime, MIB), ctypes.create_string_buffer(8 * MIB)
    beyond, inside, size = ctypes.c_size_t(8 * MIB), ctypes.c_size_t(MIB), ctypes.c_size_t
    expect_equal((runtime.cudaMemcpy(block, big, beyond, 1), runtime.cudaMemset(block, 0, beyond)), (INVALID_VALUE, INVALID_VALUE), "8 MiB into 1 MiB")
    expect_equal((runtime.cudaMemcpy(block, big, inside, 1), runtime.cudaMemset(block, 0, inside)), (0, 0), "1 MiB into 1 MiB")
    end = ctypes.c_void_p(block.value + MIB - 8)
    expect_equal((runtime.cudaMemcpy(end, big, size(8), 1), runtime.cudaMemcpy(end, big, size(4096), 1)), (0, INVALID_VALUE), "the last bytes")
    expect_equal(runtime.cudaMemcpy2D(block, size(4096), big, size(4096), size(4096), size(256), 1), 0, "all rows of the block")
    expect_equal(runtime.cudaMemcpy2D(block, size(4096), big, size(4096), size(4096), size(257), 1), INVALID_VALUE, "a row too many")
    runtime.cudaGetLastError()


@case(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
def a_copy_may_cross_the_mappings_of_one_segment():
    import torch

    there = torch.ones(50 << 18, dtype=torch.int32, device="cuda")  # 50 MiB, of pages of 20 MiB each
    here = there.cpu()
    there.copy_(here)
    expect_equal(here.shape[0], 50 << 18, "numbers")


# Contexts.


def context_bytes(*, kernels=False):
    gpu = read_gpu()
    return gpu["context_bytes"] + (gpu["first_kernel_bytes"] if kernels else 0)


@case(ALONE="reset")
def a_reset_gives_all_back_and_the_next_call_begins_anew():
    runtime, driver = start()
    driver.cuMemsetD8_v2(allocate(runtime, 4), 0, ctypes.c_size_t(4))  # the first kernel
    empty = free_bytes(runtime)
    stream, event, block, pooled, flags, active = (ctypes.c_void_p() for _ in range(6))
    runtime.cudaStreamCreate(ctypes.byref(stream))
    runtime.cudaEventCreate(ctypes.byref(event))
    block = allocate(runtime, 1024 * MIB)
    runtime.cudaMallocAsync(ctypes.byref(pooled), ctypes.c_size_t(512 * MIB), stream)
    runtime.cudaDeviceSetLimit(2, ctypes.c_size_t(256 * MIB))  # cudaLimitMallocHeapSize
    expect_equal(empty - free_bytes(runtime), (1024 + 512 + 248) * MIB, "what was taken")
    expect_equal(runtime.cudaDeviceReset(), 0, "cudaDeviceReset")
    driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
    expect_equal(active.value or 0, 0, "whether there is a context")
    expect_equal(driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(64)), 709, "the driver's call without one")
    total = read_gpu()["total_bytes"]
    expect_equal(total - free_bytes(runtime), context_bytes(), "what the GPU has lost after a call of the runtime")
    expect_equal([runtime.cudaFree(block), runtime.cudaStreamSynchronize(stream), runtime.cudaEventRecord(event, None)], [1, 400, 400], "what is gone")
    allocate(runtime, 1024 * MIB)
    runtime.cudaGetLastError()


@case(gpu="t4,rtx3090", ALONE="reset")
def a_reset_is_of_the_current_device():
    runtime, _ = start()
    runtime.cudaSetDevice(1)
    allocate(runtime, 1024 * MIB)
    runtime.cudaDeviceReset()
    ordinal = ctypes.c_int()
    runtime.cudaGetDevice(ctypes.byref(ordinal))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    expect_equal((ordinal.value, total.value), (1, read_gpu("rtx3090")["total_bytes"]), "the device afterwards")
    expect_equal(total.value - free.value, read_gpu("rtx3090")["context_bytes"], "what it has lost")


@case()
def a_second_context_costs_what_a_context_costs():
    """As PyCUDA makes them: cuCtxCreate, pop, push, cuCtxDestroy."""
    runtime, driver = start()
    before, first, second, current, block, other = free_bytes(runtime), *(ctypes.c_void_p() for _ in range(5))
    driver.cuCtxGetCurrent(ctypes.byref(first))
    expect_equal(driver.cuCtxCreate_v2(ctypes.byref(second), 0, 0), 0, "cuCtxCreate")
    expect(second.value != first.value, "two contexts have one handle")
    expect_equal(before - free_bytes(runtime), context_bytes(), "what it takes")
    driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1024 * MIB))
    driver.cuMemsetD8_v2(block, 0, ctypes.c_size_t(16))
    expect_equal(before - free_bytes(runtime), 1024 * MIB + context_bytes(), "and a set is no kernel")
    driver.cuPointerGetAttribute(ctypes.byref(other), 1, block)
    expect_equal(other.value, second.value, "the context of the block")
    expect_equal((driver.cuCtxPopCurrent_v2(ctypes.byref(current)), current.value), (0, second.value), "what was popped")
    driver.cuCtxGetCurrent(ctypes.byref(current))
    expect_equal(current.value, first.value, "the context before")
    expect_equal(driver.cuCtxPushCurrent_v2(second), 0)
    expect_equal(driver.cuCtxDestroy_v2(second), 0, "cuCtxDestroy")
    driver.cuCtxGetCurrent(ctypes.byref(current))
    expect_equal((current.value, before - free_bytes(runtime)), (first.value, 0), "what is current, and what is lost")
    expect_equal((driver.cuCtxDestroy_v2(second), driver.cuMemFree_v2(block), driver.cuCtxDestroy_v2(first)), (201, 1, 201), "a second time, and the primary one")


@case(ALONE="release")
def the_last_release_of_the_primary_context_gives_it_back():
    """As numba does: retain, push, work, pop, release."""
    driver, nvml = ctypes.CDLL(DRIVER), ctypes.CDLL("libnvidia-ml.so.1")
    context, block, active, flags = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
    driver.cuInit(0)
    expect_equal(driver.cuDevicePrimaryCtxRelease_v2(0), 201, "a release before any retain")
    for _ in range(2):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxPushCurrent_v2(context)
    driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1024 * MIB))
    states = []
    for _ in range(2):
        driver.cuDevicePrimaryCtxRelease_v2(0)
        driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
        states.append(active.value)
    expect_equal(states, [1, 0], "whether it is active after each release")
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    expect_equal(total.value - free.value, context_bytes(), "what a new one takes")


@case()
def handles_of_destroyed_streams_and_events_are_errors():
    runtime, _ = start()
    stream, event = ctypes.c_void_p(), ctypes.c_void_p()
    runtime.cudaStreamCreate(ctypes.byref(stream))
    runtime.cudaEventCreate(ctypes.byref(event))
    expect_equal((runtime.cudaStreamDestroy(stream), runtime.cudaEventDestroy(event)), (0, 0))
    answers = [runtime.cudaStreamSynchronize(stream), runtime.cudaStreamDestroy(stream), runtime.cudaEventQuery(event), runtime.cudaEventDestroy(event),
               runtime.cudaEventRecord(event, None), runtime.cudaEventRecord(None, None), runtime.cudaStreamWaitEvent(None, event, 0)]
    expect_equal(answers, [400] * 7, "the answers")
    runtime.cudaGetLastError()


# Pools.


@case()
def memory_that_is_freed_in_stream_order_comes_back_when_the_host_waits():
    runtime, driver = start()
    stream, event, block = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    runtime.cudaStreamCreate(ctypes.byref(stream))
    runtime.cudaEventCreate(ctypes.byref(event))
    waits = {"stream": lambda: runtime.cudaStreamSynchronize(stream), "event": lambda: runtime.cudaEventSynchronize(event),
             "context": runtime.cudaDeviceSynchronize}
    for name, wait in waits.items():
        runtime.cudaMallocAsync(ctypes.byref(block), ctypes.c_size_t(1024 * MIB), stream)
        taken = free_bytes(runtime)
        runtime.cudaFreeAsync(block, stream)
        runtime.cudaEventRecord(event, stream)
        expect_equal(free_bytes(runtime) - taken, 0, "what came back before the host waited")
        wait()
        expect_equal(free_bytes(runtime) - taken, 1024 * MIB, f"what came back when it waited for a {name}")
    runtime.cudaMallocAsync(ctypes.byref(block), ctypes.c_size_t(1024 * MIB), stream)
    runtime.cudaFreeAsync(block, stream)
    rest = allocate(runtime, free_bytes(runtime) // (2 * MIB) * (2 * MIB) + 512 * MIB)  # of what is about to come back
    runtime.cudaFree(rest)


# Code.

PTX = b"""// .entry in_a_comment
.version 8.0
.target sm_75
.address_size 64
.global .align 4 .u32 a;
.visible .global .align 8 .f64 b[3][5] = {0d0};
.const .align 4 .b8 text[12] = {"; .entry in_a_string"};
.extern .global .u32 elsewhere;
.func helper() { ret; }
.visible .entry kernel(.param .u64 p) { .reg .b32 %r<2>; ret; }
.entry other() { ret; }
"""


def load(driver, image=PTX):
    module = ctypes.c_void_p()
    expect_equal(driver.cuModuleLoadData(ctypes.byref(module), image), 0, "cuModuleLoadData")
    return module


def find(driver, module, name):
    """The address and the bytes of a global, or the error."""
    address, bytes = ctypes.c_uint64(), ctypes.c_size_t()
    error = driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(bytes), module, name)
    return (address.value, bytes.value) if not error else error


@case()
def each_variable_of_each_module_is_its_own():
    runtime, driver = start()
    first, second = load(driver), load(driver)
    places = [find(driver, module, name) for module in (first, second) for name in (b"a", b"b", b"text")]
    expect_equal([bytes for _, bytes in places], [4, 120, 12] * 2, "their sizes")
    expect_equal(len({address for address, _ in places}), 6, "the number of addresses")
    expect_equal(find(driver, first, b"a"), places[0], "the same one again")
    for number, (address, _) in enumerate(places):
        driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), ctypes.byref(ctypes.c_int(number)), ctypes.c_size_t(4))
    numbers = [int.from_bytes(read(runtime, ctypes.c_void_p(address), 4), "little") for address, _ in places]
    expect_equal(numbers, list(range(6)), "what they read")
    expect_equal([find(driver, first, name) for name in (b"elsewhere", b"absent", b"kernel")], [500] * 3, "what is not there")
    expect_equal((driver.cuModuleUnload(first), find(driver, first, b"a")), (0, 400), "after the module was unloaded")


@case()
def code_that_is_none_and_kernels_that_are_not_there_are_errors():
    runtime, driver = start()
    module, kernel, other, absent = (ctypes.c_void_p() for _ in range(4))
    loads = [driver.cuModuleLoadData(ctypes.byref(module), image) for image in (b"this is no code", b"", None, ctypes.c_void_p(0xDEAD000))]
    expect_equal(loads, [200, 200, 1, 1], "what is no code")
    expect_equal([driver.cuModuleLoad(ctypes.byref(module), b"/no/such/file.cubin"), driver.cuLibraryLoadFromFile(ctypes.byref(module), b"/no/such", *[None] * 6)], [301, 301])
    module, name, owner = load(driver), ctypes.c_char_p(), ctypes.c_void_p()
    names = {b"kernel": 0, b"other": 0, b"helper": 500, b"in_a_comment": 500, b"in_a_string": 500, b"absent": 500}
    expect_equal({one: driver.cuModuleGetFunction(ctypes.byref(absent), module, one) for one in names}, names, "which are kernels")
    driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"kernel")
    driver.cuModuleGetFunction(ctypes.byref(other), module, b"other")
    driver.cuFuncGetName(ctypes.byref(name), other)
    driver.cuFuncGetModule(ctypes.byref(owner), kernel)
    expect_equal((kernel.value != other.value, name.value, owner.value), (True, b"other", module.value), "two kernels, two handles")
    library = ctypes.c_void_p()
    expect_equal(runtime.cudaLibraryLoadData(ctypes.byref(library), PTX, None, None, 0, None, None, 0), 0)
    expect_equal([runtime.cudaLibraryGetKernel(ctypes.byref(kernel), library, one) for one in (b"kernel", b"absent")], [0, 500], "of a library")
    expect_equal([runtime.cudaLibraryUnload(library), runtime.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"kernel")], [0, 400], "after it was unloaded")
    runtime.cudaGetLastError()


@case()
def a_cubin_and_a_fat_binary_are_read_as_far_as_they_can_be():
    import struct

    _, driver = start()
    strings = b"\0kernel\0variable\0missing\0"
    symbols = b"".join(struct.pack("<IBBHQQ", strings.index(name), kind, 0, section, 0, size)
                       for name, kind, section, size in ((b"kernel", 0x12, 1, 64), (b"variable", 0x11, 1, 24), (b"missing", 0x11, 0, 8)))
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 190, 1, 0, 0, 64, 0, 64, 0, 0, 64, 3, 0)
    sections = [(0, 0, 0, 0), (2, 256, len(symbols), 2), (3, 256 + len(symbols), len(strings), 0)]
    table = b"".join(struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, link, 0, 0, 0) for kind, offset, size, link in sections)
    module, kernel = load(driver, header + table + symbols + strings), ctypes.c_void_p()
    expect_equal([driver.cuModuleGetFunction(ctypes.byref(kernel), module, name) for name in (b"kernel", b"variable", b"absent")], [0, 500, 500], "kernels")
    expect_equal((find(driver, module, b"variable")[1], find(driver, module, b"missing")), (24, 500), "variables")
    fat = load(driver, b"\x50\xed\x55\xba" + bytes(60))
    expect_equal(driver.cuModuleGetFunction(ctypes.byref(kernel), fat, b"anything"), 0, "a fat binary has any name")


@case()
def what_is_linked_has_the_names_of_its_parts():
    _, driver = start()
    state, image, bytes, kernel = (ctypes.c_void_p() for _ in range(4))
    driver.cuLinkCreate_v2(0, None, None, ctypes.byref(state))
    add = lambda kind, data: driver.cuLinkAddData_v2(state, kind, data, ctypes.c_size_t(len(data)), b"", 0, None, None)
    expect_equal([add(1, PTX), add(1, b"no code"), driver.cuLinkAddFile_v2(state, 4, b"/no/such/library.a", 0, None, None)], [0, 200, 301], "what was added")
    driver.cuLinkComplete(state, ctypes.byref(image), ctypes.byref(bytes))
    module = load(driver, image)
    answers = [driver.cuModuleGetFunction(ctypes.byref(kernel), module, name) for name in (b"kernel", b"absent")]
    expect_equal((answers, find(driver, module, b"b")[1]), ([0, 500], 120), "what it has")
    add(3, b"an object")
    driver.cuLinkComplete(state, ctypes.byref(image), ctypes.byref(bytes))
    expect_equal(driver.cuModuleGetFunction(ctypes.byref(kernel), load(driver, image), b"absent"), 0, "with an object any name may exist")
    expect_equal(driver.cuLinkDestroy(state), 0)


@case()
def a_kernel_has_48_kib_of_dynamic_shared_memory_unless_it_opts_in():
    runtime, driver = start()
    kernel, found, optin = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(optin), 97, 0)  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = optin.value
    driver.cuModuleGetFunction(ctypes.byref(kernel), load(driver), b"kernel")
    launch = lambda bytes: driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, bytes, None, None, None)
    expect_equal([launch(48 << 10), launch((48 << 10) + 1)], [0, INVALID_VALUE], "before it opts in")
    expect_equal([driver.cuFuncSetAttribute(kernel, 8, bytes) for bytes in (most + 1, most)], [INVALID_VALUE, 0], "what it may opt in to")
    expect_equal([driver.cuFuncSetAttribute(kernel, attribute, 3) for attribute in (-1, 17)], [INVALID_VALUE] * 2, "attributes of no driver, and of a later one")
    driver.cuFuncGetAttribute(ctypes.byref(found), 8, kernel)
    expect_equal((found.value, launch(most), launch(most + 1)), (most, 0, INVALID_VALUE), "and then")
    stub, size, no_arguments = ctypes.create_string_buffer(8), ctypes.c_size_t, (ctypes.c_void_p * 1)()
    dim3 = type("Dim3", (ctypes.Structure,), {"_fields_": [(axis, ctypes.c_uint) for axis in "xyz"]})
    run = lambda: runtime.cudaLaunchKernel(stub, dim3(1, 1, 1), dim3(32, 1, 1), no_arguments, size(64 << 10), None)
    expect_equal([run(), runtime.cudaFuncSetAttribute(stub, 8, 64 << 10), run()], [INVALID_VALUE, 0, 0], "a kernel of the runtime")
    runtime.cudaGetLastError()


# Memory of the host, and what a pointer points at.


@case()
def what_is_not_known_of_a_pointer_is_null_in_all_its_bytes():
    runtime, driver = start()
    wide, narrow = (1, 3, 4, 7, 11, 12, 17), (2, 8, 9, 13)  # context, addresses, sizes; kind, managed, ordinal, mapped
    host = ctypes.create_string_buffer(64)

    def ask(attributes, address):
        values = [ctypes.c_uint64(0xAAAAAAAAAAAAAAAA) for _ in attributes]
        places = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        expect_equal(driver.cuPointerGetAttributes(len(values), (ctypes.c_int * len(values))(*attributes), places, ctypes.c_uint64(address)), 0)
        return [value.value for value in values]

    expect_equal(ask(wide, ctypes.addressof(host)), [0] * len(wide), "answers of eight bytes")
    expect_equal(ask(narrow, ctypes.addressof(host)), [0xAAAAAAAA00000000] * len(narrow), "answers of four, and what lies behind them")
    block, context = allocate(runtime, 4096), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    expect_equal(ask(wide, block.value + 8), [context.value, block.value + 8, 0, block.value + 8, block.value, 4096, 0], "of a block")


@case()
def pinned_host_memory_ends_with_the_machines():
    runtime, _ = start()
    block, other, host = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(3 << 12)
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) << 10
    expect_equal(runtime.cudaHostAlloc(ctypes.byref(block), ctypes.c_size_t(total + (1 << 30)), 0), 2, "more than the machine has")
    half = ctypes.c_size_t(total // 2 + (1 << 30))
    expect_equal([runtime.cudaHostAlloc(ctypes.byref(block), half, 0), runtime.cudaHostAlloc(ctypes.byref(other), half, 0)], bounded(half.value), "twice more than its half")
    runtime.cudaFreeHost(block)
    expect_equal(runtime.cudaHostAlloc(ctypes.byref(other), ctypes.c_size_t(MIB), 0), 0, "afterwards")
    size = ctypes.c_size_t
    expect_equal([runtime.cudaHostRegister(ctypes.c_void_p(0x10), size(MIB), 0), runtime.cudaHostRegister(host, size(1 << 40), 0)], [INVALID_VALUE] * 2, "what is not there")
    page = (ctypes.addressof(host) + 4095) & ~4095
    expect_equal([runtime.cudaHostRegister(ctypes.c_void_p(page + 4096), size(4096), 0), runtime.cudaHostRegister(ctypes.c_void_p(page), size(8192), 0)], [0, 712], "a part twice")
    runtime.cudaHostUnregister(ctypes.c_void_p(page + 4096))
    runtime.cudaGetLastError()


def bounded(bytes):
    """The answers to two such requests: a control group may allow less than one."""
    import pathlib

    limits = [file.read_text().strip() for file in map(pathlib.Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")) if file.exists()]
    return [2, 2] if any(limit.isdigit() and int(limit) < bytes for limit in limits) else [0, 2]


@case()
def mappings_lie_in_reservations_and_are_unmapped_whole():
    runtime, driver = start()
    page, size = 2 * MIB, ctypes.c_size_t
    begin, handle = ctypes.c_uint64(), ctypes.c_uint64()
    properties = (ctypes.c_int * 8)(1, 0, 1, 0)  # pinned memory of device 0
    driver.cuMemAddressReserve(ctypes.byref(begin), size(4 * page), size(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0))
    driver.cuMemCreate(ctypes.byref(handle), size(page), properties, ctypes.c_ulonglong(0))
    map_at = lambda place, bytes=page, offset=0: driver.cuMemMap(ctypes.c_uint64(place), size(bytes), size(offset), handle, ctypes.c_ulonglong(0))
    unmap = lambda place, bytes=page: driver.cuMemUnmap(ctypes.c_uint64(place), size(bytes))
    rejected = [map_at(0x700000000000), map_at(begin.value, offset=page), map_at(begin.value, bytes=2 * page), map_at(begin.value + 4096), map_at(begin.value + 4 * page)]
    expect_equal(rejected, [INVALID_VALUE] * 5, "mappings that cannot be")
    expect_equal([map_at(begin.value), map_at(begin.value + page), map_at(begin.value)], [0, 0, INVALID_VALUE], "mappings, and one over another")
    rejected = [unmap(0x700000000000), unmap(begin.value + 2 * page), unmap(begin.value, 3 * page), unmap(begin.value, page // 2)]
    expect_equal(rejected, [INVALID_VALUE] * 4, "what is not mapped so")
    expect_equal([unmap(begin.value, 2 * page), unmap(begin.value), driver.cuMemRelease(handle)], [0, INVALID_VALUE, 0], "both at once")


# Types of products.


def heuristic(first, second):
    """What cublasLtMatmulAlgoGetHeuristic answers for factors of these types, and how many it gives."""
    from stand_ins import CUBLASLT

    start()
    library, handle, description, layouts = ctypes.CDLL(CUBLASLT), ctypes.c_void_p(), ctypes.c_void_p(), []
    library.cublasLtCreate(ctypes.byref(handle))
    library.cublasLtMatmulDescCreate(ctypes.byref(description), 68, 0)
    for kind in (first, second, 0):
        layouts.append(ctypes.c_void_p())
        library.cublasLtMatrixLayoutCreate(ctypes.byref(layouts[-1]), kind, ctypes.c_uint64(64), ctypes.c_uint64(64), ctypes.c_int64(64))
    results, count = ctypes.create_string_buffer(4096), ctypes.c_int()
    answer = library.cublasLtMatmulAlgoGetHeuristic(handle, description, layouts[0], layouts[1], layouts[2], layouts[2], None, 1, results, ctypes.byref(count))
    return answer, count.value


FLOAT, HALF, BFLOAT, INT8, E4M3, E5M2, E2M1, INT16 = 0, 2, 14, 3, 28, 29, 33, 20


def expect_multiplied(*pairs):
    every = [(FLOAT, FLOAT), (HALF, HALF), (BFLOAT, BFLOAT), (INT8, INT8), (E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2), (E2M1, E2M1), (INT16, INT16)]
    expected = {pair: (0, 1) if pair in every[:4] or pair in pairs else (15, 0) for pair in every}  # CUBLAS_STATUS_NOT_SUPPORTED
    expect_equal({pair: heuristic(*pair) for pair in every}, expected, "what is multiplied")


@case(gpu="rtx3090")
def a_gpu_of_8_6_multiplies_no_8_bit_floats():
    expect_multiplied()


@case(gpu="rtx4090")
def a_gpu_of_8_9_multiplies_8_bit_floats():
    expect_multiplied((E4M3, E4M3), (E4M3, E5M2))


@case(gpu="b200")
def a_gpu_of_10_0_multiplies_4_bit_floats():
    expect_multiplied((E4M3, E4M3), (E4M3, E5M2), (E2M1, E2M1))


# Managed memory.


@case(gpu="rtx3060")
def managed_tensors_may_be_larger_than_the_gpu():
    """PyTorch's own way there calls cuda-python's runtime."""
    import torch

    load_optional("cuda.bindings")
    if not hasattr(torch.cuda.memory, "_use_uvm"):
        raise Skip("this torch has no _use_uvm")
    free, total = torch.cuda.mem_get_info()
    with torch.cuda.memory._use_uvm():
        tensors = [torch.zeros(total // 2, dtype=torch.uint8, device="cuda") for _ in range(3)]
        known = torch.tensor([3, 1, 2], device="cuda")
    expect_equal(torch.cuda.mem_get_info()[0], free, "what is free of the GPU")
    expect_equal((len(tensors), known.tolist()), (3, [3, 1, 2]), "what the host wrote")


@case()
def a_read_of_managed_memory_that_no_host_wrote_is_noted():
    runtime, driver = start()
    heard, block = [], ctypes.c_void_p()
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: heard.append(kind))
    runtime.cudaMallocManaged(ctypes.byref(block), ctypes.c_size_t(4096), 1)
    driver.oomdiag_device_set_observer(observer)
    runtime.cudaMemset(block, 7, ctypes.c_size_t(64))
    runtime.cudaMemcpy(ctypes.c_void_p(block.value + 64), b"x" * 64, ctypes.c_size_t(64), 1)
    del heard[:]
    expect_equal((read(runtime, block, 65), heard.count(b"read")), (b"\7" * 64 + b"x", 0), "what was set and copied there")
    read(runtime, block, 129)
    driver.oomdiag_device_set_observer(None)
    expect_equal(heard.count(b"read"), 1, "how many reads of the rest were noted")


@case()
def the_runtime_of_cuda_python_is_the_virtual_one():
    load_optional("cuda.bindings")
    from cuda.bindings import runtime as cuda

    error, count = cuda.cudaGetDeviceCount()
    expect_equal((int(error), count), (0, 1), "cudaGetDeviceCount")
    error, block = cuda.cudaMalloc(64 * MIB)
    properties = cuda.cudaGetDeviceProperties(0)[1]
    expect_equal((int(error), properties.totalGlobalMem, int(cuda.cudaFree(block)[0]), int(cuda.cudaFree(block)[0])),
                 (0, read_gpu()["total_bytes"], 0, INVALID_VALUE), "a block, and the GPU")


if __name__ == "__main__":
    main()
