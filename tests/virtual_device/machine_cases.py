"""What kind of machine the GPUs are in, and what bounds a GPU sets to launches: cases of test_device.py."""

import ctypes

from device_cases import MIB, case, expect, expect_equal, main
from stand_ins import CUBLAS, RUNTIME

DRIVER = "libcuda.so.1"
NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


def reach():
    """Whether the first GPU reaches the second: by CUDA, by NVML, by NVLink."""
    nvml, runtime = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL(RUNTIME)
    can, status, gpus = ctypes.c_int(), ctypes.c_int(), [ctypes.c_void_p(), ctypes.c_void_p()]
    runtime.cudaDeviceCanAccessPeer(ctypes.byref(can), 0, 1)
    for index, gpu in enumerate(gpus):
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
    answers = [bool(can.value)]
    for what in (0, NVLINK):
        nvml.nvmlDeviceGetP2PStatus(*gpus, what, ctypes.byref(status))
        answers.append(status.value == 0)
    return answers


def communicator_bytes():
    nccl, runtime, free, total = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL(RUNTIME), ctypes.c_size_t(), ctypes.c_size_t()
    ctypes.CDLL(CUBLAS).cublasCreate_v2(ctypes.byref(ctypes.c_void_p()))  # kernels are loaded
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    before = free.value
    communicators = (ctypes.c_void_p * 2)()
    expect_equal(nccl.ncclCommInitAll(communicators, 2, None), 0)
    runtime.cudaSetDevice(0)
    nothing = ctypes.c_void_p()
    expect_equal(nccl.ncclAllGather(nothing, nothing, 0, 7, ctypes.c_void_p(communicators[0]), nothing), 0)
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return before - free.value


@case(gpu="rtx4090,rtx4090")
def geforce_gpus_do_not_reach_each_other():
    expect_equal(reach(), [False, False, False])
    import torch

    moved = torch.arange(12, device="cuda:0").reshape(3, 4).t().to("cuda:1")
    expect_equal((moved.device.index, moved.sum().item()), (1, 66), "what went over the bus")


@case(gpu="rtx6000-ada,rtx6000-ada")
def gpus_of_workstations_reach_each_other_without_nvlink():
    expect_equal(reach(), [True, True, False])


@case(gpu="h100-sxm,h100-sxm")
def gpus_of_data_centres_are_linked():
    expect_equal(reach(), [True, True, True])
    expect_equal(communicator_bytes(), 336 * MIB, "a communicator")


@case(gpu="h100-sxm")
def a_gpu_is_in_no_fabric_of_hosts_and_the_question_succeeds():
    nvml, gpu, info = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ubyte * 48)(*[255] * 48)
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
    for version, size in ((2, 36), (3, 40)):
        ctypes.cast(info, ctypes.POINTER(ctypes.c_uint))[0] = size | version << 24
        expect_equal(nvml.nvmlDeviceGetGpuFabricInfoV(gpu, info), 0)
        expect_equal((bytes(info[4:size]), info[size]), (bytes(size - 4), 255), "the answer and the byte behind it")
    ctypes.cast(info, ctypes.POINTER(ctypes.c_uint))[0] = 400
    expect_equal(nvml.nvmlDeviceGetGpuFabricInfoV(gpu, info), 25, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH")


@case(gpu="b300,b300")
def so_is_a_b300():
    expect_equal((reach(), communicator_bytes()), ([True, True, True], 336 * MIB))


@case(gpu="rtx6000-ada,rtx6000-ada")
def a_communicator_between_gpus_without_nvlink_is_small():
    expect_equal(communicator_bytes(), 28 * MIB, "two channels")


@case(gpu="rtx5090,rtx5090")
def and_through_the_hosts_memory_where_gpus_do_not_reach_each_other():
    expect_equal(communicator_bytes(), 0)


@case(gpu="t4,rtx4090")
def unlike_gpus_do_not_reach_each_other():
    expect_equal(reach(), [False, False, False])


@case(gpu="gb10", OOMDIAG_DEVICE_LOG="1")
def memory_of_a_gb10_is_the_hosts_too():
    value = ctypes.c_int()
    ctypes.CDLL(RUNTIME).cudaDeviceGetAttribute(ctypes.byref(value), 18, 0)
    expect_equal(value.value, 1, "cudaDevAttrIntegrated")


@case(OOMDIAG_CLOCKED="1")
def a_callback_is_taken_on_a_busy_stream():
    import torch

    runtime, called = ctypes.CDLL(RUNTIME), []
    x = torch.empty(8192, 8192, device="cuda")
    for _ in range(20):
        torch.mm(x, x, out=x)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda stream, status, data: called.append(status))
    expect_equal((runtime.cudaStreamAddCallback(None, callback, None, 0), called), (0, [0]), "the answer, and what was called")


@case(gpu="rtx3060")
def launches_keep_to_the_gpus_bounds():
    runtime, driver = ctypes.CDLL(RUNTIME), ctypes.CDLL(DRIVER)

    class Dim3(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    launch = runtime.cudaLaunchKernel
    launch.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    answers = [launch(1, grid, block, None, 0, None) for grid, block in (
        (Dim3(1 << 20, 65535, 1), Dim3(32, 1, 32)), (Dim3(1, 65536, 1), Dim3(1, 1, 1)), (Dim3(1, 1, 1), Dim3(2, 1, 65)), (Dim3(1, 1, 1), Dim3(1025, 1, 1)))]
    expect_equal(answers, [0, 9, 9, 9], "the answers")
    runtime.cudaGetLastError()
    blocks, found = ctypes.c_int(), []
    for threads, shared in ((256, 0), (1024, 0), (256, 30 << 10), (256, 99 << 10), (256, 100 << 10)):
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(blocks), None, threads, ctypes.c_size_t(shared))
        found.append(blocks.value)
    expect_equal(found, [6, 1, 3, 1, 0], "blocks on a multiprocessor")


def launches(launch):
    """What a launch answers for a grid, a block and so many KiB of dynamic shared memory."""
    shapes = {"fits": ((1, 65535, 65535), (1024, 1, 1), 0), "grid.y": ((1, 65536, 1), (1, 1, 1), 0), "grid.z": ((1, 1, 65536), (1, 1, 1), 0),
              "no grid": ((0, 1, 1), (1, 1, 1), 0), "threads": ((1, 1, 1), (33, 32, 1), 0), "block.z": ((1, 1, 1), (1, 1, 65), 0),
              "most shared": ((1, 1, 1), (1, 1, 1), 99), "shared": ((1, 1, 1), (1, 1, 1), 100)}
    return {name: launch(grid, block, shared << 10) for name, (grid, block, shared) in shapes.items()}


@case(gpu="rtx3060")
def the_driver_rejects_what_a_gpu_would():
    runtime, driver = ctypes.CDLL(RUNTIME), ctypes.CDLL(DRIVER)
    runtime.cudaFree(None)
    for function, kernel in ((runtime.cudaFuncSetAttribute, 1), (driver.cuFuncSetAttribute, None)):
        expect_equal([function(kernel, 8, kib << 10) for kib in (99, 100)], [0, 1], "who opts in to 99 and 100 KiB")
    answers = launches(lambda grid, block, shared: driver.cuLaunchKernel(None, *grid, *block, shared, None, None, None))
    expect_equal(answers, {name: 0 if name in ("fits", "most shared") else 1 for name in answers}, "the driver's answers")

    class Config(ctypes.Structure):
        _fields_ = [("shape", ctypes.c_uint * 6), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]

    answers = launches(lambda grid, block, shared: driver.cuLaunchKernelEx(ctypes.byref(Config((ctypes.c_uint * 6)(*grid, *block), shared)), None, None, None))
    expect_equal(answers, {name: 0 if name in ("fits", "most shared") else 1 for name in answers}, "those of cuLaunchKernelEx")

    class Dim3(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    runtime.cudaLaunchKernel.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    answers = launches(lambda grid, block, shared: runtime.cudaLaunchKernel(1, Dim3(*grid), Dim3(*block), None, shared, None))
    expect_equal(answers, {name: 0 if name in ("fits", "most shared") else 1 if name == "shared" else 9 for name in answers}, "the runtime's")
    runtime.cudaGetLastError()


@case(gpu="rtx3060")
def occupancy_follows_threads_and_shared_memory_and_says_what_it_leaves_out():
    runtime, driver = ctypes.CDLL(RUNTIME), ctypes.CDLL(DRIVER)
    runtime.cudaFree(None)
    heard = []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: heard.append((kind, name)))
    driver.oomdiag_device_set_observer(observer)
    grid, block, bytes = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()

    def find_block(shared, most):
        driver.cuOccupancyMaxPotentialBlockSize(ctypes.byref(grid), ctypes.byref(block), None, None, ctypes.c_size_t(shared), most)
        return grid.value, block.value

    # 28 multiprocessors take 1536 threads and 100 KiB each: two blocks of 768, six of 256, or one whose block has 60 KiB (and 1 of the GPU's).
    expect_equal((find_block(0, 0), find_block(0, 256), find_block(60 << 10, 0)), ((56, 768), (168, 256), (28, 1024)), "grids and blocks")
    of_thread = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(lambda threads: threads * 80)
    driver.cuOccupancyMaxPotentialBlockSize(ctypes.byref(grid), ctypes.byref(block), None, of_thread, ctypes.c_size_t(0), 0)
    expect(grid.value // 28 * (block.value * 80 + 1024) <= 100 << 10, f"{grid.value} blocks of {block.value} threads do not fit the shared memory")
    driver.cuOccupancyAvailableDynamicSMemPerBlock(ctypes.byref(bytes), None, 4, 128)
    expect_equal(bytes.value, 24 << 10, "what each of four blocks may have")
    driver.oomdiag_device_set_observer(None)
    expect_equal(sum(kind == b"estimate" and b"registers" in name for kind, name in heard), 1, f"how often it was said: {heard}")


if __name__ == "__main__":
    main()
