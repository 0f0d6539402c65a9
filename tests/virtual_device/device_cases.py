"""The cases of test_device.py. This file is also what its children run: `device_cases.py <case>…`, with the device preloaded.

torch is imported by the cases, not here: some ask the mocked libraries alone, and the runner needs none of it.
"""

import ctypes
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

from stand_ins import CUBLAS, CUDA_MAJOR, RUNTIME

CASES = []
MIB = 1 << 20


class Skip(Exception):
    """A case that cannot run here, with the reason."""


def case(gpu="rtx3090", group="quick", **environment):
    def register(function):
        function.gpu, function.group, function.environment = gpu, group, environment
        CASES.append(function)
        return function

    return register


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def expect_equal(found, expected, what="value"):
    expect(found == expected, f"{what} is {found}, not {expected}")


def read_gpu(gpu=None):
    """The numbers of a device file: of the one that this process has, or of another."""
    path = pathlib.Path(os.environ["OOMDIAG_DEVICE_FOLDER"]) / f"{gpu}.json" if gpu else pathlib.Path(os.environ["OOMDIAG_DEVICE_FILES"])
    return {key: value["value"] if isinstance(value, dict) else value for key, value in json.loads(path.read_text()).items()}


def load_optional(name):
    try:
        return __import__(name)
    except ImportError as reason:
        raise Skip(f"no {name}: {reason}")


def run_python(code, **environment):
    """A fresh process under the same device."""
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)


def train(model, make_input, optimizer=None, steps=2):
    """Trains on constant labels; returns the peak that PyTorch counted."""
    import torch

    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        output = model(make_input())
        labels = torch.zeros(output.shape[0], dtype=torch.long, device="cuda")
        torch.nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


# Training, as people do it.


@case()
def net_with_batch_norm_trains():
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64 * 64, 10)).cuda()
    peak = train(model, lambda: torch.randn(32, 3, 64, 64, device="cuda"))
    # Saved for backward at least: the outputs of convolution, batch norm (in place of ReLU's input) and ReLU.
    expect(peak > 3 * 32 * 64 * 64 * 64 * 4, f"peak of {peak} bytes is below what must be saved")


@case()
def resnet50_trains():
    import torch

    torchvision = load_optional("torchvision")
    model = torchvision.models.resnet50().cuda()
    peak = train(model, lambda: torch.randn(32, 3, 224, 224, device="cuda"))
    expect(2700 * MIB < peak < 3000 * MIB, f"peak is {peak / MIB:.1f} MiB")  # 2888 with torch 2.11, as on real GPUs


def train_gpt2(batch, layers):
    import torch

    transformers = load_optional("transformers")
    transformers.logging.set_verbosity_error()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(batch, 1024, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@case()
def gpt2_trains():
    peak = train_gpt2(batch=1, layers=2)
    expect(peak > 800 * MIB, f"peak is {peak / MIB:.1f} MiB")


@case(group="slow")
def gpt2_of_full_size_trains():
    peak = train_gpt2(batch=4, layers=12)
    expect(8150 * MIB < peak < 8350 * MIB, f"peak is {peak / MIB:.1f} MiB")


@case()
def amp_with_grad_scaler_trains():
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 32 * 32, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(torch.randn(16, 3, 32, 32, device="cuda"))
            loss = nn.functional.cross_entropy(output, torch.zeros(16, dtype=torch.long, device="cuda"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    expect_equal(output.dtype, torch.float16, "the output's type")


@case()
def checkpointing_lowers_the_peak():
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint_sequential

    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16)]).cuda()

    def peak_of(forward):
        torch.cuda.reset_peak_memory_stats()
        forward(torch.randn(8192, 1024, device="cuda", requires_grad=True)).sum().backward()
        return torch.cuda.max_memory_allocated()

    plain = peak_of(model)
    checkpointed = peak_of(lambda x: checkpoint_sequential(model, 4, x, use_reentrant=False))
    expect(checkpointed < 0.8 * plain, f"{checkpointed} bytes with checkpoints, {plain} without")


def meets_foreign_nvrtc():
    """cuDNN compiles its attention with the first libnvrtc.so that there is: that of a toolkit of another CUDA rejects its sources."""
    try:
        nvrtc = ctypes.CDLL("libnvrtc.so")
    except OSError:
        return False
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value != CUDA_MAJOR


@case(gpu="h100-sxm")
def attention_runs_on_every_backend():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    for backend in backends + ([] if meets_foreign_nvrtc() else [SDPBackend.CUDNN_ATTENTION]):
        query = torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        expect(query.grad is not None, f"no gradient with {backend}")


@case()
def lstm_with_dropout_and_ctc_train():
    import torch
    from torch import nn

    for model in (nn.LSTM(64, 128, 2, dropout=0.1, bidirectional=True), nn.GRU(64, 128), nn.RNN(64, 128), nn.LSTM(64, 128, proj_size=32)):
        model.cuda()(torch.randn(50, 8, 64, device="cuda"))[0].sum().backward()
    scores = torch.randn(50, 8, 20, device="cuda").log_softmax(2).requires_grad_()
    labels = torch.ones(8 * 10, dtype=torch.int32)
    lengths = torch.full((8,), 50, dtype=torch.int32, device="cuda")
    nn.functional.ctc_loss(scores, labels, lengths, torch.full((8,), 10, dtype=torch.int32, device="cuda")).backward()


@case(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
def expandable_segments_grow_and_give_back():
    import torch

    torch.ones(1, device="cuda")
    free_before, _ = torch.cuda.mem_get_info()
    blocks = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["is_expandable"]]
    expect(any(segment["total_size"] >= 2000 * MIB for segment in segments), "no segment holds all blocks")
    expect_equal(free_before - torch.cuda.mem_get_info()[0], 2000 * MIB, "what the blocks took")
    del blocks
    torch.cuda.empty_cache()
    expect(torch.cuda.mem_get_info()[0] >= free_before, "the memory did not come back")


@case(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
def the_async_allocator_runs():
    import torch

    x = torch.randn(1 << 20, device="cuda")
    expect(torch.cuda.memory_allocated() >= 4 * MIB, "the pool does not count")
    y = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    del y
    expect_equal(torch.cuda.mem_get_info()[0], free, "what is free while the pool keeps its pages")
    expect_equal((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()), (288 * MIB, 4 * MIB), "what the pool keeps and what is used")
    y = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    expect_equal(torch.cuda.mem_get_info()[0], free, "what is free when it serves from them")
    del y
    torch.cuda.empty_cache()
    expect_equal(torch.cuda.mem_get_info()[0], free + 256 * MIB, "what is free when it was trimmed")
    with_out_of_memory(lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
    del x


# Running out of memory.


def with_out_of_memory(run):
    """The text of the torch.OutOfMemoryError that `run` must raise."""
    import torch

    try:
        run()
    except torch.OutOfMemoryError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def expect_gpu_in(text):
    total = read_gpu()["total_bytes"] / (1 << 30)
    expect(f"total capacity of {total:.2f} GiB" in text, f"no total of {total:.2f} GiB in: {text}")
    expect("this process has" in text, f"no use of this process in: {text}")


@case()
def out_of_memory_in_forward():
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(4)]).cuda()
    expect_gpu_in(with_out_of_memory(lambda: model(torch.randn(1 << 18, 8192, device="cuda"))))


@case()
def out_of_memory_in_backward():
    import torch

    # Input and three outputs of 5.4 GiB each leave 2 GiB: too little for the first gradient.
    x = torch.randn(1_450_000_000, device="cuda", requires_grad=True)
    loss = (x.exp().exp().exp()).sum()
    expect_gpu_in(with_out_of_memory(loss.backward))


@case(gpu="rtx3060")
def what_fits_is_what_the_gpu_has():
    import torch

    gpu = read_gpu()
    torch.ones(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    expect_equal(free, gpu["total_bytes"] - gpu["context_bytes"] - gpu["first_kernel_bytes"] - 2 * MIB, "free memory")
    exact = free // (2 * MIB) * (2 * MIB)
    block = torch.empty(exact, dtype=torch.uint8, device="cuda")
    with_out_of_memory(lambda: torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
    del block


# Memory that is not the allocator's.


@case()
def questions_make_no_context():
    code = """
import torch, ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1"); count = ctypes.c_uint(1); handle = ctypes.c_void_p()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
def processes():
    count.value = 8; nvml.nvmlDeviceGetComputeRunningProcesses(handle, ctypes.byref(count), ctypes.create_string_buffer(1024)); return count.value
torch.cuda.init(); torch.cuda.get_device_properties(0); torch.cuda.device_count(); torch.cuda.get_device_capability()
before = processes(); free, total = torch.cuda.mem_get_info(); after = processes()
print(before, after, total - free)
"""
    child = run_python(code)
    expect_equal(child.stdout.split(), ["0", "1", str(read_gpu()["context_bytes"])], "contexts before and after, bytes taken")


@case()
def pinned_memory():
    import torch

    host = torch.ones(1 << 20).pin_memory()
    expect(host.is_pinned() and not torch.ones(4).is_pinned(), "pinned memory is not distinguished from other")
    before = torch.cuda.memory_allocated()
    host.cuda(non_blocking=True).cpu()
    expect_equal(torch.cuda.memory_allocated(), before, "what stays allocated")


@case()
def blocks_recorded_on_a_stream_come_back():
    import torch

    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    x = torch.randn(1 << 20, device="cuda")
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        y = x * 2
        x.record_stream(stream)
    before = torch.cuda.memory_allocated()
    del x
    end.record()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks at pending blocks when it is asked for one
    expect(torch.cuda.memory_allocated() < before, "the block is still held")
    expect(start.elapsed_time(end) > 0, "no time went by")
    expect_equal(y.shape[0], 1 << 20)


def reserved_peak_of_prefetching():
    """A side stream copies batches ahead of the products that use them, and record_stream keeps each block until it was used."""
    import torch

    weight = torch.empty(8192, 8192, device="cuda")
    side = torch.cuda.Stream()
    host = torch.empty(4096, 8192).pin_memory()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(12):
        with torch.cuda.stream(side):
            batch = host.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        for _ in range(30):  # half a second of modelled time: this machine may be slow
            torch.mm(batch, weight)
        del batch
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.synchronize()
    return peak


@case()
def without_clocks_blocks_of_other_streams_come_back_at_once():
    peak = reserved_peak_of_prefetching()
    expect(peak < 900 * MIB, f"{peak / MIB} MiB were reserved")  # the weight, one batch, one result, a workspace


@case(OOMDIAG_CLOCKED="1")
def with_clocks_blocks_wait_for_the_streams_that_use_them():
    peak = reserved_peak_of_prefetching()
    expect(peak > 1500 * MIB, f"{peak / MIB} MiB were reserved")


@case(OOMDIAG_CLOCKED="1")
def clocks_run_as_on_a_gpu():
    import torch

    x = torch.empty(8192, 8192, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    begin, end, other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        begin.record()
        for _ in range(50):
            torch.mm(x, x, out=x)
        end.record()
    expect(not first.query() and not end.query(), "work of two seconds is done at once")
    expect(second.query(), "the other stream is busy")
    second.wait_event(end)
    other.record(second)
    expect(not second.query() and not other.query(), "a stream that waits is done")
    end.synchronize()
    expect(end.query() and first.query() and other.query(), "what was waited for is not done")
    # 50 x 2 x 8192^3 operations at 2 x 128 x 82 x 1.695 GHz.
    expect(1300 < begin.elapsed_time(end) < 1700, f"the products took {begin.elapsed_time(end)} ms")
    for _ in range(50):
        torch.mm(x, x, out=x)
    expect(not torch.cuda.current_stream().query(), "products take no time")
    x[0, 0].item()
    expect(torch.cuda.current_stream().query(), "the host did not wait for what it read")


TIMED = """
import sys, threading, time, torch
torch.manual_seed(0)
pause = float(sys.argv[1])
if pause:
    threading.Thread(target=lambda: [i * i for i in iter(int, 1)], daemon=True).start()  # a core is busy, and so is the interpreter
model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 10)).cuda()
optimizer, side, times = torch.optim.SGD(model.parameters(), 0.1), torch.cuda.Stream(), []
for _ in range(3):
    begin, end, other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    output = model(torch.empty(64, 3, 32, 32, device="cuda"))
    time.sleep(pause)
    output.sum().backward()
    with torch.cuda.stream(side):
        torch.empty(2048, 2048, device="cuda") @ torch.empty(2048, 2048, device="cuda")
    time.sleep(pause)
    optimizer.step()
    end.record()
    other.record(side)
    questions = 1
    while not end.query():
        questions += 1
    other.synchronize()
    times += [begin.elapsed_time(end), begin.elapsed_time(other), questions]
    time.sleep(pause)
print(times)
"""


@case(OOMDIAG_CLOCKED="1")
def with_clocks_a_program_has_the_same_times_on_any_load():
    command = [sys.executable, "-c", TIMED]
    runs = [subprocess.run([*command, pause], capture_output=True, text=True) for pause in ("0", "0.03", "0")]
    expect(runs[0].stdout.startswith("["), runs[0].stderr[-500:])
    expect_equal([run.stdout for run in runs[1:]], [runs[0].stdout] * 2, "the times beside a busy thread, and again")
    times = json.loads(runs[0].stdout)
    expect(all(0 < time < 30 for time in times[::3]), f"a step takes {times[::3]} ms of modelled time")  # three pauses alone are 90


@case(OOMDIAG_CLOCKED="1")
def who_asks_until_work_is_done_comes_to_an_end():
    import torch

    x, event = torch.empty(8192, 8192, device="cuda"), torch.cuda.Event()
    for _ in range(500):
        torch.mm(x, x, out=x)
    event.record()
    questions = 1
    while not event.query():
        questions += 1
    expect(10 < questions < 40, f"{questions} questions for 17 seconds of work")


@case(OOMDIAG_CLOCKED="1")
def a_net_trains_with_clocks():
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 32 * 32, 10)).cuda()
    train(model, lambda: torch.randn(32, 3, 32, 32).pin_memory().to("cuda", non_blocking=True), steps=5)
    graph = torch.cuda.CUDAGraph()
    x = torch.empty(4096, 4096, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(300):
            x @ x
    graph.replay()
    expect(not torch.cuda.current_stream().query(), "a graph takes no time")
    torch.cuda.synchronize()


def milliseconds_of(run):
    import torch

    run()  # the host needs real time: once to choose algorithms, and a little to submit the first of ten
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 10


def expect_convolutions_to_take_time():
    import torch
    from torch import nn

    layer = nn.Conv2d(256, 256, 3, padding=1, bias=False).cuda()

    def training_step(batch):
        layer(torch.empty(batch, 256, 64, 64, device="cuda", requires_grad=True)).backward(torch.empty(batch, 256, 64, 64, device="cuda"))

    for batch in (16, 64):
        with torch.no_grad():
            forward = milliseconds_of(lambda: layer(torch.empty(batch, 256, 64, 64, device="cuda")))
        step = milliseconds_of(lambda: training_step(batch))
        peak_rate = 2 * batch * 256 * 64 * 64 * 256 * 9 / (2 * 128 * 82 * 1.695e9) * 1e3
        expect(0.9 * peak_rate < forward < 1.5 * peak_rate, f"batch {batch}: forward took {forward} ms, not {peak_rate}")
        expect(2.7 * peak_rate < step < 4.5 * peak_rate, f"batch {batch}: forward and two gradients took {step} ms, not three times {peak_rate}")


@case(OOMDIAG_CLOCKED="1")
def convolutions_take_time_as_their_batch_does():
    expect_convolutions_to_take_time()


@case(OOMDIAG_CLOCKED="1")
def a_sleeping_kernel_takes_the_cycles_that_it_is_given():
    import torch

    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    torch.cuda._sleep(50_000_000)
    after.record()
    expect(not after.query(), "the GPU should be busy")
    after.synchronize()
    expected = 50_000_000 / read_gpu()["clock_khz"]
    took = before.elapsed_time(after)
    expect(expected <= took < expected + 2, f"it took {took} ms, not {expected}")


@case(OOMDIAG_CLOCKED="1", TORCH_CUDNN_V8_API_DISABLED="1")
def convolutions_of_the_old_interface_take_as_long():
    expect_convolutions_to_take_time()


@case(OOMDIAG_CLOCKED="1")
def a_convolution_on_a_side_stream_defers_a_free():
    import torch

    layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    images = torch.empty(256, 64, 128, 128, device="cuda")
    address, side = images.data_ptr(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        result = layer(images)
    images.record_stream(side)
    del images
    early = torch.empty_like(result)
    side.synchronize()
    late = torch.empty_like(result)
    expect(early.data_ptr() != address, "the block came back while the convolution read it")
    expect_equal(late.data_ptr(), address, "the block once the convolution was done")


@case(gpu="h100-sxm", OOMDIAG_CLOCKED="1")
def attention_of_cudnn_takes_time():
    if meets_foreign_nvrtc():
        raise Skip("the toolkit of this machine is of another CUDA than torch, and cuDNN takes its libnvrtc")
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(length):
        query = torch.empty(4, 16, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    def train(length):
        result = attend(length)
        result.backward(torch.empty_like(result))

    for run in (attend, train):
        short, long = (milliseconds_of(lambda length=length, run=run: run(length)) for length in (8192, 16384))
        expect(2.5 * short < long < 5 * short, f"{run.__name__}: {short} ms, and {long} ms for twice the length")


def workspace_of_a_product():
    """The bytes that a first product of two small matrices needs beside its result of 16 KiB."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()

    x = torch.randn(64, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _result = x @ x  # noqa: F841, it must live
    return torch.cuda.max_memory_allocated() - before - 16384


@case(gpu="h100-sxm")
def cublas_workspace_on_hopper():
    expect_equal(workspace_of_a_product(), 32 * MIB, "the workspace")  # kept by torch 2.11, given back after each product by 2.15


@case(gpu="rtx3060")
def cublas_workspace_elsewhere():
    expect_equal(workspace_of_a_product(), 8519680, "the workspace")


@case(gpu="h100-sxm", TORCH_CUBLAS_WORKSPACE_CACHE="1")
def the_backward_thread_has_a_workspace_of_its_own():
    import torch

    torch._C._cuda_clearCublasWorkspaces()
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    x = torch.randn(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    loss = (x @ weight).sum()
    forward = torch.cuda.memory_allocated() - before
    loss.backward()
    both = torch.cuda.memory_allocated() - before
    expect(forward >= 32 * MIB, f"{forward} bytes after the forward product")
    expect(both >= 64 * MIB, f"{both} bytes after the backward product")


# Capture.


@case()
def a_cuda_graph_is_captured_and_replayed():
    import torch

    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
    x = torch.randn(8, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).sum().backward()
    for _ in range(3):
        graph.replay()


@case(gpu="h100-sxm", group="slow")
def compiled_models_run_as_cuda_graphs():
    import torch

    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        compiled(torch.randn(8, 64, device="cuda")).sum().backward()
        model.zero_grad()


def capture(stream, work):
    """A captured graph's nodes by type, and the status that ended the capture, asked of the runtime itself."""
    runtime = ctypes.CDLL(RUNTIME)
    runtime.cudaStreamBeginCapture(stream, 0)
    work(runtime)
    graph, count = ctypes.c_void_p(), ctypes.c_size_t()
    status = runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))
    if status:
        return [], status
    runtime.cudaGraphGetNodes(graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    runtime.cudaGraphGetNodes(graph, nodes, ctypes.byref(count))
    types = []
    for node in nodes[: count.value]:
        kind, before = ctypes.c_int(), ctypes.c_size_t()
        runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        edge_data = [None] if CUDA_MAJOR >= 13 else []
        runtime.cudaGraphNodeGetDependencies(ctypes.c_void_p(node), None, *edge_data, ctypes.byref(before))
        types.append((kind.value, before.value))
    return types, status


@case()
def a_capture_is_a_graph_of_its_work():
    runtime = ctypes.CDLL(RUNTIME)
    first, second, event, joined, block = (ctypes.c_void_p() for _ in range(5))
    for stream in (first, second):
        runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
    for one in (event, joined):
        runtime.cudaEventCreateWithFlags(ctypes.byref(one), 2)
    runtime.cudaMalloc(ctypes.byref(block), 1024)

    def fork_and_join(cuda, is_joined=True):
        cuda.cudaMemsetAsync(block, 0, 16, first)
        cuda.cudaEventRecord(event, first)
        cuda.cudaStreamWaitEvent(second, event, 0)
        cuda.cudaMemsetAsync(block, 0, 16, second)
        cuda.cudaMemcpyAsync(block, block, 16, 3, first)
        cuda.cudaEventRecord(joined, second)
        if is_joined:
            cuda.cudaStreamWaitEvent(first, joined, 0)
            cuda.cudaMemsetAsync(block, 0, 16, first)

    memcpy, memset = 1, 2
    expect_equal(capture(first, fork_and_join), ([(memset, 0), (memset, 1), (memcpy, 1), (memset, 2)], 0), "a fork and a join")
    expect_equal(capture(first, lambda cuda: None), ([], 0), "a capture of nothing")
    expect_equal(capture(first, lambda cuda: fork_and_join(cuda, False))[1], 904, "a stream that was not joined")
    expect_equal(capture(first, lambda cuda: expect_equal(cuda.cudaStreamSynchronize(first), 900))[1], 901, "after a synchronisation")
    expect_equal(capture(first, lambda cuda: expect_equal(cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1024), 900))[1], 901, "after an allocation")
    runtime.cudaEventRecord(event, second)
    expect_equal(capture(first, lambda cuda: expect_equal(cuda.cudaStreamWaitEvent(first, event, 0), 905))[1], 901, "after waiting for work outside")
    relaxed = ctypes.c_int(2)
    runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    expect_equal(capture(first, lambda cuda: expect_equal(cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1024), 0))[1], 0, "a relaxed thread's allocation")
    runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    expect_equal((relaxed.value, runtime.cudaGetLastError() and runtime.cudaGetLastError()), (2, 0), "the mode, and errors left over")


@case()
def pools_of_graphs_are_the_allocators():
    import torch

    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    x = torch.randn(1 << 20, device="cuda")
    torch.cuda.synchronize()
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            y = (x * 2).relu()
        graph.replay()
    private = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
    expect(private, "no segment is private")
    expect_equal(y.shape[0], 1 << 20)


@case()
def managed_memory_is_the_hosts_too():
    runtime = ctypes.CDLL(RUNTIME)
    free, total, block = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    before = free.value
    expect_equal(runtime.cudaMallocManaged(ctypes.byref(block), 64 * MIB, 1), 0)
    ctypes.memset(block, 7, 16)
    copy = ctypes.create_string_buffer(16)
    runtime.cudaMemcpy(copy, block, 16, 4)
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    expect_equal((copy.raw, free.value), (b"\7" * 16, before), "contents and what is free")

    attributes = (ctypes.c_int * 64)()
    runtime.cudaPointerGetAttributes(attributes, block)
    expect_equal(attributes[0], 3, "the type of managed memory")
    expect_equal(runtime.cudaFree(block), 0)
    host = ctypes.create_string_buffer(8192)
    expect_equal([runtime.cudaHostRegister(host, 8192, 0) for _ in range(2)], [0, 712], "registering twice")
    expect_equal([runtime.cudaHostUnregister(host) for _ in range(2)], [0, 713], "unregistering twice")
    expect_equal(runtime.cudaFreeHost(ctypes.c_void_p(12345 << 12)), 1, "freeing what was never allocated")
    runtime.cudaGetLastError()


@case(ALONE="1")  # torch 2.8's generators stay in a capture that failed
def a_capture_rejects_what_a_gpu_rejects():
    import torch

    for forbidden in (lambda: torch.cuda.synchronize(), lambda: torch.ones(4).cuda(), lambda: torch.ones(4, device="cuda").cpu()):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                forbidden()
        except RuntimeError as error:
            expect("captur" in str(error), f"another error: {error}")
        else:
            raise AssertionError("nothing was raised")
    torch.ones(4, device="cuda").cpu()  # and after it all is well again


# Processes.


@case()
def data_loader_with_forked_workers():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.ones(1, device="cuda")
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context="fork")
    total = sum(batch.sum().item() for (batch,) in loader)
    expect_equal(total, 64 * 63 / 2, "the sum")
    for (batch,) in loader:
        batch.cuda(non_blocking=True)


@case()
def a_forked_child_cannot_use_the_device():
    driver, runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(RUNTIME)
    expect_equal(driver.cuInit(0), 0, "cuInit")
    child = os.fork()
    if child == 0:
        block = ctypes.c_void_p()
        os._exit(0 if runtime.cudaMalloc(ctypes.byref(block), 1024) == 3 and driver.cuInit(0) == 3 else 1)
    expect_equal(os.waitpid(child, 0)[1], 0, "the child's status")


@case()
def a_forked_child_waits_for_no_lock_of_a_thread_of_its_parent():
    driver, noting, forked = ctypes.CDLL("libcuda.so.1"), threading.Event(), threading.Event()
    expect_equal(driver.cuInit(0), 0, "cuInit")

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    def observer(kind, name):
        if name == b"what the thread asks for":  # an observer also hears what the cases before have noted
            noting.set()
            forked.wait(60)

    driver.oomdiag_device_set_observer(observer)
    thread = threading.Thread(target=driver.oomdiag_device_note, args=(b"unsupported", b"what the thread asks for"))
    thread.start()
    noting.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        driver.oomdiag_device_note(b"unsupported", b"what the child asks for")
        driver.oomdiag_device_note_read()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    forked.set()
    thread.join()
    driver.oomdiag_device_set_observer(None)
    expect_equal(status, 0, "the child's status")


# GPUs and settings.

COUNT_DEVICES = f"import ctypes; n = ctypes.c_int(7); print(ctypes.CDLL('{RUNTIME}').cudaGetDeviceCount(ctypes.byref(n)), n.value)"


@case(OOMDIAG_MEMORY=str(8 << 30))
def memory_can_be_overridden():
    import torch

    expect_equal(torch.cuda.get_device_properties(0).total_memory, 8 << 30, "total memory")
    text = with_out_of_memory(lambda: torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))
    expect("total capacity of 8.00 GiB" in text, text)


@case(gpu="rtx3090", OOMDIAG_DRIVER="550")
def an_older_driver_leaves_more_memory():
    import torch

    expect_equal(torch.cuda.get_device_properties(0).total_memory, 25438126080, "total memory")
    expect_equal(torch.cuda.mem_get_info()[1], 25438126080, "what the driver says")
    nvml, text, version = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(80), ctypes.c_int()
    ctypes.CDLL(RUNTIME).cudaDriverGetVersion(ctypes.byref(version))
    expect_equal(version.value, 12040, "the driver's version of CUDA")
    nvml.nvmlSystemGetDriverVersion(text, 80)
    nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(version))
    expect_equal((text.value, version.value), (b"550.00.00", 12040), "what NVML says")


@case(gpu="rtx3090", OOMDIAG_DRIVER="wddm+1GiB")
def windows_keeps_some_memory_and_goes_on_in_that_of_the_host():
    import torch

    total, windows = 24576 << 20, 570 << 20
    expect_equal(torch.cuda.mem_get_info()[1], total, "total memory")
    with_context = torch.cuda.mem_get_info()[0]
    expect(total - with_context > windows, f"{with_context} bytes are free")
    everything = torch.empty(with_context, dtype=torch.uint8, device="cuda")
    more = torch.empty(1000 << 20, dtype=torch.uint8, device="cuda")
    expect_equal(torch.cuda.mem_get_info()[0], 0, "free bytes")
    text = with_out_of_memory(lambda: torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
    expect("0 bytes is free" in text, text)
    del everything, more


@case()
def visible_devices_are_obeyed():
    expected = {"": "100 0", "-1": "100 0", "1": "100 0", "0": "0 1", "0,7": "0 1", "0,0": "0 1", "GPU-1111": "0 1", "GPU-22": "100 0"}
    for text, answer in expected.items():
        child = run_python(COUNT_DEVICES, CUDA_VISIBLE_DEVICES=text)
        expect_equal((child.stdout.strip(), child.stderr), (answer, ""), f"the answer to {text!r}")
    child = run_python("import torch; print(torch.cuda.is_available(), torch.cuda.device_count())", CUDA_VISIBLE_DEVICES="")
    expect_equal(child.stdout.strip(), "False 0", "PyTorch's answer to none")


# Several GPUs.


@case(gpu="a100-80,t4,t4")
def several_gpus_are_distinguished():
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [read_gpu(name) for name in ("a100-80", "t4", "t4")]
    expect_equal([p.total_memory for p in properties], [gpu["total_bytes"] for gpu in gpus], "total memory")
    expect_equal([p.name for p in properties], [gpu["name"] for gpu in gpus], "names")
    expect_equal(len({str(p.uuid) for p in properties}), 3, "the number of uuids")
    bus = [ctypes.create_string_buffer(16) for _ in properties]
    for i, text in enumerate(bus):
        ctypes.CDLL(RUNTIME).cudaDeviceGetPCIBusId(text, 16, i)
    expect_equal(len({text.value for text in bus}), 3, "the number of bus ids")
    expect(torch.cuda.can_device_access_peer(1, 2) and not torch.cuda.can_device_access_peer(0, 1), "who reaches whom")


@case(gpu="a100-80,t4,t4")
def each_gpu_has_its_own_account():
    import torch

    x = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda:2")
    free = [torch.cuda.mem_get_info(i) for i in range(3)]
    expect(free[2][1] - free[2][0] > 256 * MIB > free[1][1] - free[1][0], f"free and total are {free}")
    y = x.to("cuda:1")
    expect_equal((y.device.index, torch.cuda.memory_allocated(1), torch.cuda.memory_allocated(2)), (1, 256 * MIB, 256 * MIB))
    expect_equal(torch.arange(5, device="cpu").to("cuda:0").to("cuda:1").cpu().tolist(), [0, 1, 2, 3, 4], "what went over two GPUs")
    text = with_out_of_memory(lambda: torch.empty(16 << 30, dtype=torch.uint8, device="cuda:1"))
    expect("GPU 1 has a total capacity of 14.56 GiB" in text, text)
    torch.empty(16 << 30, dtype=torch.uint8, device="cuda:0")


@case(gpu="rtx3090,rtx3090")
def a_model_is_split_over_two_gpus():
    import torch
    from torch import nn

    first, second = nn.Linear(512, 512).to("cuda:0"), nn.Linear(512, 10).to("cuda:1")
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    for _ in range(2):
        second(first(torch.randn(64, 512, device="cuda:0")).relu().to("cuda:1")).sum().backward()
        optimizer.step()
    expect(first.weight.grad.device.index == 0 and second.weight.grad.device.index == 1, "gradients are on the wrong GPU")
    replicas = nn.DataParallel(nn.Linear(32, 8).cuda(), device_ids=[0, 1])
    replicas(torch.randn(16, 32, device="cuda")).sum().backward()


@case(gpu="a100-80,t4")
def visible_devices_pick_and_order():
    names = [read_gpu(gpu)["name"] for gpu in ("a100-80", "t4")]
    uuids = "GPU-11111111-1111-1111-1111-111111111101,GPU-11111111-1111-1111-1111-111111111100"
    expected = {"1,0": names[::-1], "1": names[1:], uuids: names[::-1], "0,5,1": names[:1]}
    code = "import torch; print('|'.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))"
    for text, answer in expected.items():
        child = run_python(code, CUDA_VISIBLE_DEVICES=text)
        expect_equal(child.stdout.strip(), "|".join(answer), f"the GPUs for {text!r} ({child.stderr[-300:]})")


@case(gpu="t4")
def a_gpu_is_shared_with_other_processes():
    code = """
import sys, torch
x = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0] >> 20, flush=True)
sys.stdin.readline()
"""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OOMDIAG_OUTPUT": folder}
        start = lambda gib: subprocess.Popen([sys.executable, "-c", code, str(gib)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        first = start(9)
        alone = int(first.stdout.readline())
        second = start(4)
        both = int(second.stdout.readline())
        expect(4 << 10 < alone - both < (4 << 10) + 512, f"{alone} MiB were free for the first, {both} for both")
        third = start(4)
        _, error = third.communicate("\n")
        expect("OutOfMemoryError" in error and f"Process {first.pid} has 9." in error, error[-900:])
        first.kill()
        first.wait()
        fourth = start(4)
        expect(int(fourth.stdout.readline()) > both, "what a killed process had did not come back")
        for child in (second, fourth):
            child.communicate("\n")


# Several processes.


def torchrun(*programs):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(pathlib.Path(__file__).with_name("distributed_programs.py")), *programs]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def expect_all_ranks(programs):
    child = torchrun(*programs)
    expected = {f"{program} {rank} ok" for program in programs for rank in (0, 1)}
    expect_equal(set(child.stdout.splitlines()), expected, f"what the ranks said ({child.stderr[-1500:]})")


@case(gpu="rtx3090,rtx3090")
def ddp_trains_in_two_processes():
    expect_all_ranks(["ddp", "collectives", "objects"])


@case(gpu="a100-80,a100-80", group="slow")
def every_kind_of_parallel_training_runs_in_two_processes():
    expect_all_ranks(["split", "fsdp1", "fsdp2", "tensor_parallel", "sync_batch_norm", "zero_redundancy"])


@case(gpu="a100-80,a100-80")
def communicators_take_memory_of_their_gpus():
    nccl = ctypes.CDLL("libnccl.so.2")
    driver = ctypes.CDLL("libcuda.so.1")

    def used():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    runtime = ctypes.CDLL(RUNTIME)
    before = []
    for ordinal in (0, 1):
        runtime.cudaSetDevice(ordinal)
        library = ctypes.c_void_p()
        ctypes.CDLL(CUBLAS).cublasCreate_v2(ctypes.byref(library))  # kernels are loaded
        before.append(used())
    communicators = (ctypes.c_void_p * 2)()
    expect_equal(nccl.ncclCommInitAll(communicators, 2, None), 0, "ncclCommInitAll")
    count, rank = ctypes.c_int(), ctypes.c_int()
    for ordinal in (0, 1):
        runtime.cudaSetDevice(ordinal)
        handle = ctypes.c_void_p(communicators[ordinal])
        nccl.ncclCommCount(handle, ctypes.byref(count))
        nccl.ncclCommUserRank(handle, ctypes.byref(rank))
        expect_equal((count.value, rank.value), (2, ordinal), "count and rank")
        expect_equal(used(), before[ordinal], "before its first collective")
        buffer, stream = ctypes.c_void_p(), ctypes.c_void_p()
        expect_equal(nccl.ncclAllReduce(buffer, buffer, 0, 7, 0, handle, stream), 0)
        expect_equal(used() - before[ordinal], 24 * 14 * MIB, "a ring of 24 channels")
        expect_equal(nccl.ncclSend(buffer, 0, 7, 1 - ordinal, handle, stream), 0)
        expect_equal(used() - before[ordinal], (24 + 32) * 14 * MIB, "and a peer's 32")
        expect_equal(nccl.ncclCommDestroy(handle), 0)
        expect_equal(used(), before[ordinal], "what stays taken")
    expect_equal(nccl.ncclCommInitAll(communicators, 2, None), 0)
    runtime.cudaSetDevice(0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    rest = ctypes.c_void_p()
    expect_equal(runtime.cudaMalloc(ctypes.byref(rest), ctypes.c_size_t(free.value - 100 * MIB)), 0)
    expect_equal(nccl.ncclAllReduce(buffer, buffer, 0, 7, 0, ctypes.c_void_p(communicators[0]), stream), 1, "a full GPU")


@case(gpu="t4,rtx3060")
def a_tensor_is_shared_with_another_process():
    code = """
import torch, torch.multiprocessing as mp
used = lambda: sum(total - free for free, total in map(torch.cuda.mem_get_info, (0, 1))) >> 20
def child(tensors, answers):
    tensor, event = tensors.get(), tensors.get()
    event.wait()
    (tensor[:4] + 1).sum().item()
    answers.put((tuple(tensor.shape), tensor.device.index, torch.cuda.memory_allocated(1) >> 20, used()))
    del tensor
if __name__ == "__main__":
    mp.set_start_method("spawn")
    tensor = torch.ones(3 << 30, dtype=torch.uint8, device="cuda:1")
    torch.cuda.init()
    tensors, answers = mp.Queue(), mp.Queue()
    process = mp.Process(target=child, args=(tensors, answers))
    process.start()
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream(1))
    tensors.put(tensor)
    tensors.put(event)
    shape, device, allocated, there = answers.get()
    process.join()
    print(shape, device, allocated, there > 3 << 10, there < 4 << 10, process.exitcode)
"""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "program.py"
        program.write_text(code)
        child = subprocess.run([sys.executable, str(program)], env=os.environ | {"OOMDIAG_OUTPUT": folder}, capture_output=True, text=True)
    expect_equal(child.stdout.strip(), "(3221225472,) 1 0 True True 0", f"what was shared ({child.stderr[-800:]})")


# Contents, and what is noted.


@case(OOMDIAG_CONTENTS="0")
def contents_can_be_given_up():
    import torch

    expect_equal(torch.full((4,), 7.0).cuda().cpu().tolist(), [0, 0, 0, 0], "what came back")


@case()
def what_the_host_wrote_reads_back():
    import torch

    sent = torch.arange(1 << 16)
    there = sent.cuda()
    expect(torch.equal(there.cpu(), sent), "what the host wrote did not come back")
    expect(torch.equal(torch.empty_like(there).copy_(there).cpu(), sent), "a copy on the GPU lost it")
    there[10:20] = torch.ones(10, dtype=torch.long)
    expect_equal(there[8:22].cpu().tolist(), [8, 9] + [1] * 10 + [20, 21], "a part written later")
    expect_equal(torch.zeros(4, device="cuda").cpu().tolist(), [0] * 4)
    expect_equal(torch.tensor(7, device="cuda").item(), 7)


@case()
def a_new_block_forgets_its_last_owner():
    import torch

    first = torch.full((1 << 10,), 7, dtype=torch.long).cuda()
    address = first.data_ptr()
    expect_equal(first.sum().dim(), 0)
    del first
    second = torch.empty(1 << 10, dtype=torch.long, device="cuda")
    expect_equal(second.data_ptr(), address, "the address of the second owner")
    expect_equal(second.cpu().sum().item(), 0, "what the second owner reads")


@case()
def small_things_that_the_host_knows_are_computed():
    import torch

    x = torch.tensor([3, 1]).cuda()
    expect_equal((x.max().item(), x.sum().item(), (x == 1).any().item(), (x > 5).all().item()), (3, 4, True, False), "what was asked of it")
    expect_equal((torch.cat([x, x + 1]).tolist(), x[[1, 0]].tolist(), x.double().tolist()), ([3, 1, 4, 2], [1, 3], [3.0, 1.0]))
    x.add_(1)
    expect_equal(x.tolist(), [4, 2], "what an operator in place made of it")
    table = torch.zeros(3, 3, device="cuda")
    table[:, 1] = 5
    table[1] = torch.tensor([1.0, 2, 3])
    expect_equal(table.tolist(), [[0, 5, 0], [1, 2, 3], [0, 5, 0]], "a table that was filled in parts")
    expect_equal((torch.arange(4, device="cuda").tolist(), torch.full((2,), 7, device="cuda").tolist()), ([0, 1, 2, 3], [7, 7]), "what was made on the GPU")


@case()
def what_a_kernel_wrote_over_is_forgotten():
    import torch

    small, large = torch.tensor([5.0, 6.0]).cuda(), torch.ones(1 << 18).cuda()
    small += torch.randn(2, device="cuda")
    large *= 2
    expect_equal((small.tolist(), large[:2].tolist()), ([0, 0], [0, 0]), "what is left of the host's numbers")
    large.copy_(torch.full((1 << 18,), 3.0))
    expect_equal(large[:2].tolist(), [3, 3], "what the host wrote then")


@case()
def truth_of_what_is_not_known_is_that_of_zeros():
    import torch

    notes = []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: notes.append(kind))
    x = torch.randn(8, 8, device="cuda")
    answers = x.isfinite().all(), (x >= 0).all(), (x == 2).any()
    ctypes.CDLL("libcuda.so.1").oomdiag_device_set_observer(observer)
    del notes[:]
    expect_equal([answer.item() for answer in answers], [True, True, False], "the answers")
    ctypes.CDLL("libcuda.so.1").oomdiag_device_set_observer(None)
    expect_equal(notes.count(b"read"), 3, "how many reads were noted")


@case()
def operators_that_ask_the_gpu_are_noted():
    import torch

    known = lambda *numbers: torch.tensor(numbers).cuda()
    x, large = torch.randn(20, device="cuda"), torch.ones(1 << 22, device="cuda")
    equal = [torch.equal(*pair) for pair in ((known(1, 2), known(1, 2)), (known(1, 2), known(1, 3)), (large, large.clone()),
                                             (large, torch.zeros_like(large)), (x, x.clone()))]
    expect_equal(equal, [True, False, True, False, True], "what is equal")
    expect(torch.isin(x[:5], x).shape == (5,), "isin")  # it takes the last of the distinct ones: there is one
    lengths = [len(torch.unique(numbers)) for numbers in (known(3, 1, 3), known(True, False, True), known(False, False), x > 0, x, x[:0])]
    expect_equal(lengths, [2, 2, 1, 1, 1, 0], "how many are distinct")
    expect_equal(len(torch.unique(x.view(4, 5), dim=0)), 1, "distinct rows")
    window, second = torch.hann_window(400, device="cuda"), 16_000
    spectrum = torch.stft(torch.randn(30 * second, device="cuda"), 400, window=window, return_complex=True)
    expect_equal(len(torch.istft(spectrum, 400, window=window)), 30 * second, "istft")  # it looks at the sum of the windows
    expect(torch.cov(x.view(4, 5), aweights=torch.rand(5, device="cuda")).shape == (4, 4), "cov")  # and at that of the weights
    scalar, value = (torch.zeros((), device="cuda", requires_grad=True) for _ in range(2))
    scalar.index_fill(0, known(0), value).backward()


@case()
def large_copies_are_not_kept():
    import resource

    import torch

    host = torch.ones(64 * MIB, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blocks = [host.cuda() for _ in range(20)]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    expect(grown < 64, f"the host grew by {grown} MiB for 20 copies of 64 MiB")
    expect_equal(int(blocks[0][:8].cpu().sum()), 0, "what comes back of bulk data")


@case(gpu="b200", group="slow")
def thirty_billion_parameters_train_in_little_host_memory():
    code = """
import resource, torch
from torch import nn
with torch.device("cuda"):
    blocks = [nn.TransformerEncoderLayer(6656, 52, 4 * 6656, batch_first=True, dtype=torch.bfloat16) for _ in range(56)]
    model = nn.Sequential(nn.Embedding(32000, 6656, dtype=torch.bfloat16), *blocks, nn.Linear(6656, 32000, dtype=torch.bfloat16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tokens = torch.randint(32000, (1, 512)).cuda()
nn.functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
optimizer.step()
print(sum(p.numel() for p in model.parameters()), torch.cuda.max_memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""
    child = run_python(code)
    parameters, peak, host = map(int, child.stdout.split() or ["0"] * 3)
    expect(parameters > 30e9 and peak > 4 * parameters, f"{parameters} parameters, peak {peak}: {child.stderr[-500:]}")
    expect(host < 8 << 30, f"the host needed {host >> 20} MiB")


@case()
def reads_of_what_kernels_wrote_are_noted():
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    heard = []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: heard.append(kind))
    driver.oomdiag_device_set_observer(observer)
    from_host, rows = torch.tensor([1.0, 2.0]).cuda(), torch.tensor([0, 1]).cuda()
    into_zeros = lambda: torch.ops.aten.embedding_dense_backward(torch.randn(2, 3, device="cuda"), rows, 2, -1, False)
    reads = {
        "of the host's numbers": lambda: from_host.tolist(),
        "of their copy": lambda: from_host.clone().tolist(),
        "of a product": lambda: (from_host @ from_host).item(),
        "of how many are not zero": lambda: torch.randn(9, device="cuda").nonzero(),
        "of what a kernel wrote into zeros": lambda: into_zeros().tolist(),
    }
    noted = []
    for name, read in reads.items():
        del heard[:]
        read()
        noted += [name] if b"read" in heard else []
    driver.oomdiag_device_set_observer(None)
    expect_equal(noted, list(reads)[2:], "which reads were noted")


@case(OOMDIAG_DEVICE_LOG="1")
def unsupported_names_are_noted_once():
    driver = ctypes.CDLL("libcuda.so.1")
    heard = []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: heard.append((kind, name)))
    driver.cuInit(0)
    for _ in range(3):
        expect_equal(driver.cuCoredumpGetAttribute(0, None, None), 801, "the stub's answer")
    driver.oomdiag_device_set_observer(observer)
    expect_equal(heard, [(b"unsupported", b"cuCoredumpGetAttribute")], "what was replayed")
    for _ in range(3):
        expect_equal(ctypes.CDLL(RUNTIME).cudaArrayGetPlane(None), 801, "the stub's answer")
    expect_equal(heard[1:], [(b"unsupported", b"cudaArrayGetPlane")], "what was noted then")
    driver.oomdiag_device_set_observer(None)


@case(OOMDIAG_DEVICE_LOG="1")
def a_plain_training_step_meets_nothing_unsupported():
    code = """
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 32 * 32, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    nn.functional.cross_entropy(model(torch.randn(8, 3, 64, 64, device="cuda")), torch.zeros(8, dtype=torch.long, device="cuda")).backward()
    optimizer.step()
"""
    import torch
    old = "oomdiag: virtual device: estimate: workspaces of cuDNN, which before 9.8 gives them on a GPU only (taken as 0)\n"
    expect_equal(run_python(code).stderr, old if torch.backends.cudnn.version() < 90800 else "", "what was said")


def run_one(function):
    try:
        function()
        return f"ok {function.__name__}"
    except Skip as reason:
        return f"skip {function.__name__}: {reason}"
    except BaseException as error:  # noqa: BLE001, a case may end in any way
        return f"FAIL {function.__name__}: {type(error).__name__}: {error}".replace("\n", " | ")


def main():
    cases = {function.__name__: function for function in CASES}
    for name in sys.argv[1:]:
        print(run_one(cases[name]), flush=True)
        if "torch" in sys.modules:
            gc.collect()
            sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    main()
