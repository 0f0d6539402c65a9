"""How programs find the driver's functions, and what they may do before they use CUDA: cases of test_device.py."""

import ctypes

from device_cases import case, expect, expect_equal, main, run_python
from stand_ins import CUDA_MAJOR, RUNTIME

DRIVER = "libcuda.so.1"


def find(name, version, flags=0):
    """What cuGetProcAddress gives a program that was built for this version of CUDA: the function, and the status."""
    function, status = ctypes.c_void_p(), ctypes.c_int(-1)
    ctypes.CDLL(DRIVER).cuGetProcAddress_v2(name.encode(), ctypes.byref(function), version, ctypes.c_uint64(flags), ctypes.byref(status))
    return function.value, status.value


def call(name, version, *arguments):
    address, _ = find(name, version)
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)(*arguments)


@case()
def the_version_asked_for_is_the_one_that_is_given():
    runtime = ctypes.CDLL(RUNTIME)
    runtime.cudaFree(None)
    ordinal, stray = ctypes.c_int(-1), ctypes.c_void_p(0x10)
    get_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(find("cuCtxGetDevice", 12000)[0])
    expect_equal((get_device(ctypes.addressof(ordinal), stray), ordinal.value), (0, 0), "the one-argument form, with a second register")
    get_device = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(find("cuCtxGetDevice", 13000)[0])
    expect_equal((get_device(ctypes.addressof(ordinal), None), ordinal.value), (0, 0), "the two-argument form")
    for version in (12000, 13000):
        synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(find("cuCtxSynchronize", version)[0])
        expect_equal(synchronize(None), 0, f"cuCtxSynchronize of {version}")
    called = []
    host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    for version in (12000, 13020):
        launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)(find("cuLaunchHostFunc", version)[0])
        expect_equal(launch(None, ctypes.cast(host_function, ctypes.c_void_p), 5, 0), 0, f"cuLaunchHostFunc of {version}")
    expect_equal(called, [5, 5], "what was called")
    expect_equal(find("cuCtxGetDevice", 1000), (None, 2), "a version before the function")
    expect_equal(find("cuNoSuchThing", 13000), (None, 1), "a name that does not exist")
    expect(find("cuMemAlloc", 12000, flags=2)[0] == find("cuMemAlloc", 12000)[0], "per-thread default streams have other functions")


@case()
def every_form_of_every_name_is_there():
    import pathlib
    import re
    import torch

    packages = pathlib.Path(torch.__file__).parents[1] / "nvidia"
    header = packages / ("cu13" if CUDA_MAJOR == 13 else "cuda_runtime") / "include/cudaTypedefs.h"
    names = set(re.findall(r"PFN_(cu\w+?)_v\d+\)", header.read_text()))
    missing = [name for name in names if find(name, 13020)[0] is None and find(name, 2000)[0] is None and not find(name, 20000)[0]]
    expect_equal(missing, [], "what is missing")
    expect(len(names) > 400, f"only {len(names)} names")


@case()
def contexts_of_the_driver_api_and_copies_of_it():
    driver = ctypes.CDLL(DRIVER)
    context, block = ctypes.c_void_p(), ctypes.c_uint64()
    driver.cuInit(0)
    expect_equal(driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0), 0)
    expect_equal(driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(4096)), 0)

    class Copy(ctypes.Structure):
        _fields_ = [(name, kind) for side in ("src", "dst") for name, kind in (
            (side + "X", ctypes.c_size_t), (side + "Y", ctypes.c_size_t), (side + "Type", ctypes.c_int), (side + "Host", ctypes.c_void_p),
            (side + "Device", ctypes.c_uint64), (side + "Array", ctypes.c_void_p), (side + "Pitch", ctypes.c_size_t))] + [
            ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]

    host = ctypes.create_string_buffer(b"abcdefghijkl", 12)
    there = Copy(srcType=1, srcHost=ctypes.addressof(host), srcPitch=4, srcX=1, dstType=2, dstDevice=block.value, dstPitch=16, width=2, height=3)
    expect_equal(driver.cuMemcpy2D_v2(ctypes.byref(there)), 0)
    back = ctypes.create_string_buffer(34)
    expect_equal(driver.cuMemcpyDtoH_v2(back, block, ctypes.c_size_t(34)), 0)
    expect_equal((back.raw[:2], back.raw[16:18], back.raw[32:34]), (b"bc", b"fg", b"jk"), "three rows")
    expect_equal(driver.cuCtxDestroy_v2(context), 0)
    expect_equal(ctypes.CDLL(RUNTIME).cudaDeviceReset(), 0)


@case()
def variants_for_per_thread_streams_are_served():
    runtime, driver = ctypes.CDLL(RUNTIME), ctypes.CDLL(DRIVER)
    block, back = ctypes.c_void_p(), ctypes.create_string_buffer(4)
    expect_equal(runtime.cudaMallocAsync_ptsz(ctypes.byref(block), ctypes.c_size_t(64), None), 0)
    expect_equal(runtime.cudaMemsetAsync_ptsz(block, 7, ctypes.c_size_t(4), None), 0)
    expect_equal(driver.cuMemcpyDtoHAsync_v2_ptsz(back, block, ctypes.c_size_t(4), None), 0)
    expect_equal(back.raw, b"\7" * 4, "what came back")
    expect_equal(runtime.cudaStreamSynchronize_ptsz(None), 0)


@case()
def who_brings_a_runtime_of_its_own_is_named_at_the_end():
    code = "import ctypes; t = ctypes.c_void_p(); d = ctypes.CDLL('libcuda.so.1'); [print(d.cuGetExportTable(ctypes.byref(t), None)) for _ in range(2)]"
    child = run_python(code)
    expect_equal(child.stdout.split(), ["500", "500"])
    expect_equal(child.stderr.count("does not serve"), 1, child.stderr)


@case()
def who_asked_nvml_only_may_fork():
    code = f"""
import ctypes, os
nvml, runtime, driver = (ctypes.CDLL(name) for name in ("libnvidia-ml.so.1", {RUNTIME!r}, "libcuda.so.1"))
count = ctypes.c_uint()
nvml.nvmlInit_v2(); nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
os.environ["CUDA_VISIBLE_DEVICES"] = "0"; os.putenv("CUDA_VISIBLE_DEVICES", "0")
block, active, flags = ctypes.c_void_p(), ctypes.c_int(7), ctypes.c_uint()
child = os.fork()
if child == 0:
    os._exit(runtime.cudaMalloc(ctypes.byref(block), 1024))
answers = [count.value, os.waitpid(child, 0)[1], runtime.cudaMalloc(ctypes.byref(block), 1024)]
child = os.fork()
if child == 0:
    driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
    os._exit(active.value * 10 + runtime.cudaMalloc(ctypes.byref(block), 1024))
print(*answers, os.waitpid(child, 0)[1] >> 8)
"""
    child = run_python(code)
    expect_equal(child.stdout.split(), ["1", "0", "0", "3"], f"GPUs, a child after NVML, the parent, a child after CUDA ({child.stderr[-300:]})")


if __name__ == "__main__":
    main()
