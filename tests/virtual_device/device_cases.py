"""The cases of test_device.py. This file is also what its children run: `device_cases.py <case>…`, with the device preloaded.

torch is imported by the cases, not here: some ask the mocked libraries alone, and the runner needs none of it.
"""

import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys

CASES = []
MIB = 1 << 20


class Skip(Exception):
    """A case that cannot run here, with the reason."""


def case(card="rtx3090", group="quick", **environment):
    def register(function):
        function.card, function.group, function.environment = card, group, environment
        CASES.append(function)
        return function

    return register


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def expect_equal(found, wanted, what="value"):
    expect(found == wanted, f"{what} is {found}, not {wanted}")


def read_card(card=None):
    """The numbers of a card file: of the one that this process has, or of another."""
    path = pathlib.Path(os.environ["OOMDIAG_CARDS"]) / f"{card}.json" if card else pathlib.Path(os.environ["OOMDIAG_CARD"])
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
    expect(2700 * MIB < peak < 3000 * MIB, f"peak is {peak / MIB:.1f} MiB")  # 2888 with torch 2.11, as on real cards


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


@case(card="h100-sxm")
def attention_runs_on_every_backend():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
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


@case()
def cudnn_benchmark_runs():
    import torch

    torch.backends.cudnn.benchmark = True
    layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    layer(torch.randn(32, 64, 56, 56, device="cuda")).sum().backward()
    torch.backends.cudnn.benchmark = False


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


def expect_card_in(text):
    total = read_card()["total_bytes"] / (1 << 30)
    expect(f"total capacity of {total:.2f} GiB" in text, f"no total of {total:.2f} GiB in: {text}")
    expect("this process has" in text, f"no use of this process in: {text}")


@case()
def out_of_memory_in_forward():
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(4)]).cuda()
    expect_card_in(with_out_of_memory(lambda: model(torch.randn(1 << 18, 8192, device="cuda"))))


@case()
def out_of_memory_in_backward():
    import torch

    # Input and three outputs of 5.4 GiB each leave 2 GiB: too little for the first gradient.
    x = torch.randn(1_450_000_000, device="cuda", requires_grad=True)
    loss = (x.exp().exp().exp()).sum()
    expect_card_in(with_out_of_memory(loss.backward))


@case(card="rtx3060")
def what_fits_is_what_the_card_has():
    import torch

    card = read_card()
    torch.ones(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    expect_equal(free, card["total_bytes"] - card["context_bytes"] - card["first_kernel_bytes"] - 2 * MIB, "free memory")
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
    expect_equal(child.stdout.split(), ["0", "1", str(read_card()["context_bytes"])], "contexts before and after, bytes taken")


@case()
def pinned_memory():
    import torch

    host = torch.ones(1 << 20).pin_memory()
    expect(host.is_pinned() and not torch.ones(4).is_pinned(), "pinned memory is not told from other")
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


def workspace_of_a_product():
    """The bytes that a first product of two small matrices needs beside its result of 16 KiB."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()

    x = torch.randn(64, 64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _result = x @ x  # noqa: F841, it must live
    return torch.cuda.max_memory_allocated() - before - 16384


@case(card="h100-sxm")
def cublas_workspace_on_hopper():
    expect_equal(workspace_of_a_product(), 32 * MIB, "the workspace")  # kept by torch 2.11, given back after each product by 2.15


@case(card="rtx3060")
def cublas_workspace_elsewhere():
    expect_equal(workspace_of_a_product(), 8519680, "the workspace")


@case(card="h100-sxm", TORCH_CUBLAS_WORKSPACE_CACHE="1")
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


@case()
def a_capture_refuses_what_a_card_refuses():
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
    driver, runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcudart.so.13")
    expect_equal(driver.cuInit(0), 0, "cuInit")
    child = os.fork()
    if child == 0:
        block = ctypes.c_void_p()
        os._exit(0 if runtime.cudaMalloc(ctypes.byref(block), 1024) == 3 and driver.cuInit(0) == 3 else 1)
    expect_equal(os.waitpid(child, 0)[1], 0, "the child's status")


# Cards and settings.

COUNT_DEVICES = "import ctypes; n = ctypes.c_int(7); print(ctypes.CDLL('libcudart.so.13').cudaGetDeviceCount(ctypes.byref(n)), n.value)"


@case(OOMDIAG_MEMORY=str(8 << 30))
def memory_can_be_overridden():
    import torch

    expect_equal(torch.cuda.get_device_properties(0).total_memory, 8 << 30, "total memory")
    text = with_out_of_memory(lambda: torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))
    expect("total capacity of 8.00 GiB" in text, text)


@case()
def visible_devices_are_obeyed():
    wanted = {"": "100 0", "-1": "100 0", "1": "100 0", "0": "0 1", "0,7": "0 1", "GPU-1111": "0 1", "GPU-22": "100 0"}
    for text, answer in wanted.items():
        child = run_python(COUNT_DEVICES, CUDA_VISIBLE_DEVICES=text)
        expect_equal((child.stdout.strip(), child.stderr), (answer, ""), f"the answer to {text!r}")
    child = run_python("import torch; print(torch.cuda.is_available(), torch.cuda.device_count())", CUDA_VISIBLE_DEVICES="")
    expect_equal(child.stdout.strip(), "False 0", "PyTorch's answer to none")


# Contents, and what is noted.


@case()
def device_memory_reads_as_zeros():
    import torch

    expect_equal(torch.full((4,), 7.0).cuda().cpu().tolist(), [0, 0, 0, 0], "what came back")


@case(OOMDIAG_CONTENTS="1")
def contents_can_be_kept():
    import torch

    sent = torch.arange(1 << 16)
    expect(torch.equal(sent.cuda().cpu(), sent), "what the host wrote did not come back")
    model = torch.nn.Linear(64, 64).cuda()
    train(model, lambda: torch.randn(8, 64, device="cuda"))


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
        expect_equal(ctypes.CDLL("libcudart.so.13").cudaArrayGetInfo(None), 801, "the stub's answer")
    expect_equal(heard[1:], [(b"unsupported", b"cudaArrayGetInfo")], "what was noted then")
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
    expect_equal(run_python(code).stderr, "", "what was said")


def run_one(function):
    try:
        function()
        return f"ok {function.__name__}"
    except Skip as reason:
        return f"skip {function.__name__}: {reason}"
    except BaseException as error:  # noqa: BLE001, a case may end in any way
        return f"FAIL {function.__name__}: {type(error).__name__}: {error}".replace("\n", " | ")


def main():
    wanted = {function.__name__: function for function in CASES}
    for name in sys.argv[1:]:
        print(run_one(wanted[name]), flush=True)
        if "torch" in sys.modules:
            gc.collect()
            sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    main()
