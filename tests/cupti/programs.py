"""Programs for test_outside.py: python programs.py NAME. Each takes memory of the GPU beside PyTorch, through the small libraries of
tests/cupti/asking.cpp, and prints what it knows of it as a line of JSON.
"""
import ctypes
import json
import os
import sys
import threading

import torch

MIB = 1 << 20
LIBRARIES = os.environ["OOMDIAG_TEST_LIBRARIES"]


class Asker:
    """One of the libraries: extension, nccl or workspace."""

    def __init__(self, name):
        self.library = ctypes.CDLL(f"{LIBRARIES}/lib{name}.so")
        for function in ("take_device", "take_pages", "take_pool", "take_pinned", "take_managed"):
            getattr(self.library, function).restype = ctypes.c_void_p
            getattr(self.library, function).argtypes = [ctypes.c_size_t]
        for function in ("give_device", "give_pages", "give_pool"):
            getattr(self.library, function).argtypes = [ctypes.c_void_p]
        self.library.used_bytes.restype = ctypes.c_size_t

    def __getattr__(self, name):
        return getattr(self.library, name)


def extension():
    return Asker("oomdiag_test_extension")


def nccl():
    return Asker("nccl_test")


def workspace():
    return Asker("oomdiag_test_workspace")


def say(**what):
    print(json.dumps(what), flush=True)


def peak():
    """The peak of the program; what the GPU says is used right then."""
    block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    used = extension().used_bytes()
    del block
    torch.cuda.empty_cache()
    return used


def everything():
    """All ways to take memory, some of it given back; a library that takes workspace before PyTorch allocates anything."""
    torch.cuda.init()
    torch.cuda.current_stream()
    early = workspace().take_device(3 * MIB + 1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
                                torch.nn.Linear(16 * 32 * 32, 10)).cuda()
    model(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
    own, collectives = extension(), nccl()
    own.take_device(100 * MIB)
    own.give_device(own.take_device(50 * MIB))
    own.take_pool(32 * MIB)
    own.give_pool(own.take_pool(10 * MIB))
    torch.cuda.synchronize()  # until then the pool keeps what was given back
    collectives.take_pages(64 * MIB)
    collectives.give_pages(collectives.take_pages(8 * MIB))
    own.take_pinned(16 * MIB)
    own.take_managed(4 * MIB)
    torch.empty(8 * MIB, dtype=torch.uint8).pin_memory()
    used = peak()
    workspace().give_device(early)
    own.take_device(40 * MIB)  # after the peak
    say(used=used)


def expandable():
    """PyTorch's own segments are pages that it maps: they must not be counted as somebody else's."""
    blocks = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
    nccl().take_pages(20 * MIB)
    del blocks[1:3]
    torch.cuda.empty_cache()
    say(used=peak())


def pool_of_its_own():
    """A torch.cuda.MemPool whose allocator is a library's: its segments are PyTorch's, whoever asked the driver."""
    from torch.cuda.memory import CUDAPluggableAllocator
    allocator = CUDAPluggableAllocator(f"{LIBRARIES}/liboomdiag_test_extension.so", "pool_take", "pool_give")
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    used = peak()
    say(used=used, inside=inside.numel())


def library_in_the_way():
    torch.zeros(1, device="cuda")
    nccl().take_device(3000 * MIB)  # more than there is
    extension().take_device(1024 * MIB)
    nccl().take_pages(200 * MIB)
    try:
        torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        sys.exit(9)


def no_room_for_a_handle():
    """PyTorch caches the whole GPU when the backward thread's cuBLAS asks for its own workspace."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    y = x @ x
    free, _ = torch.cuda.mem_get_info()
    rest = torch.empty((free >> 21) << 21, dtype=torch.uint8, device="cuda")
    del rest
    try:
        y.sum().backward()
    except RuntimeError as error:
        say(error=str(error))
        sys.exit(9)


def process_in_the_way():
    torch.zeros(1, device="cuda")
    try:
        torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        sys.exit(9)


def profiled():
    """torch.profiler, twice; what it shows, and memory that a library takes before, between and after."""
    from torch.profiler import ProfilerActivity, profile
    own = extension()
    model = torch.nn.Linear(64, 64).cuda()
    own.take_device(2 * MIB)
    shown = []
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as session:
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            own.take_device(4 * MIB)
        shown.append(sorted({event.name for event in session.events()}))
        own.take_device(8 * MIB)
    say(shown=shown, used=peak())


def tools():
    """Another tool that wants CUPTI's only slot, and what it hears; then somebody ends CUPTI; then a child of fork allocates."""
    tool = ctypes.CDLL(f"{LIBRARIES}/liboomdiag_test_guest.so")
    own = extension()
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(8, 64, device="cuda")).sum().backward()  # loads the modules
    own.take_device(2 * MIB)
    first, second = tool.subscribe(), tool.subscribe_again()
    own.take_device(4 * MIB)
    own.take_pinned(4 * MIB)
    heard = tool.heard()
    left = tool.unsubscribe()
    own.take_device(8 * MIB)

    tool.finalize()
    optimizer.step()  # at the end of a step we listen again
    own.take_device(16 * MIB)

    child = os.fork()
    if child == 0:
        own.take_device(32 * MIB)
        os._exit(0)
    os.waitpid(child, 0)
    say(first=first, second=second, left=left, heard=heard, heard_later=tool.heard(), used=peak())


def tool_of_all():
    """Another tool that enables everything and nothing; a library takes memory after each, and a thread all the while."""
    tool = ctypes.CDLL(f"{LIBRARIES}/liboomdiag_test_guest.so")
    own, other = extension(), workspace()
    torch.zeros(1, device="cuda")
    heard, enabled, results = [], [], [tool.subscribe_to_all()]

    def take():
        before = tool.heard_allocations()
        own.take_device(2 * MIB)
        heard.append(tool.heard_allocations() - before)
        enabled.append(tool.receives_allocations())

    take()
    for enable in (tool.enable_all, tool.enable_driver):
        for wish in (0, 1, 0):
            results.append(enable(wish))
            take()
    beside = threading.Thread(target=lambda: [other.take_device(2 * MIB) for _ in range(200)])
    beside.start()
    while beside.is_alive():
        tool.enable_driver(1)
        tool.enable_driver(0)
        tool.enable_all(1)
        tool.enable_all(0)
    results.append(tool.enable_all(1))
    results.append(tool.unsubscribe())
    take()
    say(results=results, heard=heard, enabled=enabled[:-1], used=peak())


def long():
    """More events than the trace keeps, after a library took its memory; then the peak."""
    torch.zeros(1, device="cuda")
    extension().take_device(12 * MIB)
    x = torch.zeros(8, device="cuda")
    for _ in range(30000):
        x = x + 1
    say(used=peak())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
