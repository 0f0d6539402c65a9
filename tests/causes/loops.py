"""Programs with a known reason to run out of memory, and their doubles that only look like it. Each is a function; run_forked.py
runs them in forked children, so that torch is imported once.

Sizes are in MiB of one float32 tensor, so that a program and the GPU it runs on can be read off side by side.
"""
import collections
import ctypes

import torch
from torch import nn

MIB_ROWS = 64  # rows of 4096 float32 in 1 MiB


def rows(mib):
    return int(mib * MIB_ROWS)


def mib_tensor(mib):
    return torch.empty(int(mib * (1 << 20)), dtype=torch.uint8, device="cuda")


class Block(nn.Module):
    """Saves three tensors of its input's size."""

    def __init__(self, width=4096):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(x * self.scale)


def elementwise_net(depth=4):
    return nn.Sequential(*[Block() for _ in range(depth)]).cuda()


def train(batches, depth=4, optimizer=torch.optim.Adam, each_step=lambda step, x, out, loss: None, model=None,
          retain_graph=False):
    """Trains on batches of so many MiB each; each_step is called between forward and backward."""
    model = model or elementwise_net(depth)
    stepper = optimizer(model.parameters(), lr=1e-3)
    for step, mib in enumerate(batches):
        x = torch.randn(rows(mib), 4096, device="cuda")
        out = model(x)
        loss = out.square().mean()
        each_step(step, x, out, loss)
        stepper.zero_grad()
        loss.backward(retain_graph=retain_graph)
        stepper.step()


# Capacity, and what looks like something else.

def one_step(mib=40, depth=4):
    train([mib], depth)


def wide_linear(width=4096, layers=4, steps=2):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).cuda()
    stepper = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        stepper.zero_grad()
        model(torch.randn(8, width, device="cuda")).sum().backward()
        stepper.step()


def data_set(mib=30, count=100):
    keep = [torch.randn(rows(mib), 4096).to("cuda") for _ in range(count)]
    return len(keep)


def batches_of(sizes, depth=4):
    train(sizes, depth)


def cache_then_batch(entries=5, mib=20, steps=12, last=80):
    cache = {}

    def remember(step, _x, _out, _loss):
        cache.setdefault(step % entries, mib_tensor(mib))

    train([8] * steps + [last], each_step=remember)


def queue_then_batch(length=3, steps=12, last=80):
    queue = collections.deque(maxlen=length)
    train([8] * steps + [last], each_step=lambda _s, x, _o, _l: queue.append(x))


def unrolled(mib=12, length=60):
    cell = Block().cuda()
    state = torch.randn(rows(mib), 4096, device="cuda", requires_grad=True)
    for _ in range(length):
        state = cell(state)
    state.sum().backward()


def nearly_full(spare=6, request=2):
    """A small request in a GPU without memory for the segment of 20 MiB that PyTorch makes for it."""
    keep = []
    try:
        while True:
            keep.append(mib_tensor(20))
    except torch.OutOfMemoryError:
        pass
    free, _ = torch.cuda.mem_get_info()
    while free > spare << 20:
        keep.append(mib_tensor(12 if free > (18 << 20) else (free >> 20) - spare))
        free, _ = torch.cuda.mem_get_info()
    nn.ReLU()(torch.ones(1, device="cuda", requires_grad=True))
    return keep, mib_tensor(request)


# Leaks.

def keep_outputs(mib=8, steps=60, kept=True, sizes=None):
    outputs = []
    train(sizes or [mib] * steps,
          each_step=lambda _s, _x, out, _l: outputs.append(out.detach().clone()) if kept else None)


def keep_losses(mib=8, steps=60, kept=True):
    losses = []
    train([mib] * steps, each_step=lambda _s, _x, out, _l: losses.append(out.detach().square()) if kept else None)


def keep_graph(mib=4, steps=40, kept=True):
    losses = []
    train([mib] * steps, each_step=lambda _s, _x, _o, loss: losses.append(loss) if kept else None, retain_graph=True)


def keep_batches(mib=8, steps=80, kept=True):
    seen = []
    train([mib] * steps, each_step=lambda _s, x, _o, _l: seen.append(x) if kept else None)


def grow_buffer(mib=8, steps=60, kept=True):
    state = {"buffer": mib_tensor(1)}

    def append(_step, _x, _out, _loss):
        new = mib_tensor(mib)
        state["buffer"] = torch.cat([state["buffer"], new]) if kept else new

    train([4] * steps, each_step=append)


def hidden_state(mib=4, steps=30, kept=True):
    """A recurrent state that is never detached: each backward goes through all steps before."""
    cell = Block().cuda()
    state = torch.zeros(rows(mib), 4096, device="cuda")
    for _ in range(steps):
        state = cell(state + torch.randn(rows(mib), 4096, device="cuda"))
        state.square().mean().backward(retain_graph=True)
        for parameter in cell.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)  # as older code does; .sub_ under no_grad would be noticed
            parameter.grad = None
        if not kept:
            state = state.detach()


def keep_gradients(width=2048, steps=60, kept=True):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(steps):
        stepper.zero_grad()
        model(torch.randn(64, width, device="cuda")).sum().backward()
        if kept:
            history.append(model[0].weight.grad.clone())
        stepper.step()


def hooked(mib=4, steps=60, kept=True):
    model, seen = elementwise_net(), []
    if kept:
        model[2].register_forward_hook(lambda _m, _i, out: seen.append(out.detach().cpu().cuda()))
    train([mib] * steps, model=model)


def without_optimizer(mib=8, steps=60, kept=True):
    model, outputs = elementwise_net(), []
    for _ in range(steps):
        out = model(torch.randn(rows(mib), 4096, device="cuda"))
        out.mean().backward()
        if kept:
            outputs.append(out.detach().clone())
        for parameter in model.parameters():
            parameter.grad = None


def capped_leak(mib=8, steps=60, kept=True):
    torch.cuda.set_per_process_memory_fraction(0.8)
    keep_outputs(mib, steps, kept)


def full_gpu_leak(base=700, mib=1, steps=200, kept=True):
    keep, outputs = mib_tensor(base), []
    train([2] * steps, each_step=lambda _s, _x, _o, _l: outputs.append(mib_tensor(mib + 1)) if kept else None)
    return keep


# Fragmentation.

def blocked_segments(count=20, large=40, small=24, request=200):
    """Each large block is freed and a small one takes its front; what is left is too small for the next one."""
    keep = []
    for _ in range(count):
        large_one = mib_tensor(large)
        del large_one
        keep.append(mib_tensor(small))
    return keep, mib_tensor(request)


def ascending_sizes(count=18, request=200):
    keep = []
    for i in range(count):
        temporary = mib_tensor(30 + 2 * i)
        del temporary
        keep.append(mib_tensor(20 + i))
    return keep, mib_tensor(request)


def blocked_segments_in_training(count=20, large=40, small=24, request=200):
    train([1, 1], depth=1)
    return blocked_segments(count, large, small, request)


# Requests that no such GPU can grant.

def oversized(gib=20):
    return torch.empty(int(gib * (1 << 30)), dtype=torch.uint8, device="cuda")


def wrong_broadcast(n=30000):
    prediction = nn.Linear(8, 1).cuda()(torch.randn(n, 8, device="cuda"))
    return (prediction - torch.randn(n, device="cuda")).square().mean()  # (n, 1) - (n) is (n, n)


def attention_scores(length=32768):
    model = nn.Linear(64, 64).cuda()
    q = model(torch.randn(length, 64, device="cuda"))
    return torch.softmax(q @ q.T, -1)


def large_but_possible(model=400, request=500):
    keep = mib_tensor(model)
    nn.ReLU()(torch.ones(1, device="cuda", requires_grad=True))
    return keep, mib_tensor(request)


# Limits and others.

def capped(fraction=0.5, mib=40):
    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction)
    train([mib] * 2)


def with_others(outside=500, mib=40):
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    runtime = ctypes.CDLL("libcudart.so.13")
    pointer = ctypes.c_void_p()
    if outside:
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(outside << 20)) == 0
    train([mib] * 2)


# Workspace.

def gemm_without_free_memory(spare=4, size=64):
    a = torch.randn(size, size, device="cuda")
    keep, _ = fill(spare)
    nn.Sequential(nn.Identity())(a)
    return keep, a @ a


def linear_without_free_memory(spare=0):
    layer = nn.Linear(64, 64).cuda()
    x = torch.randn(16, 64, device="cuda")
    small = [torch.empty(480 << 10, dtype=torch.uint8, device="cuda") for _ in range(4)]
    keep, _ = fill(spare)
    keep += small
    return keep, layer(x)


def fill(spare):
    """Takes the GPU but for `spare` MiB, in blocks that leave no free ones."""
    keep = []
    free, _ = torch.cuda.mem_get_info()
    keep.append(mib_tensor((free >> 20) // 2 * 2 - spare - spare % 2))
    return keep, torch.cuda.mem_get_info()[0]


def large_product(n=12800, kept=300):
    a = torch.randn(n, 16, device="cuda", requires_grad=True)
    return mib_tensor(kept), a @ a.T


# Fits.

def steady(mib=8, steps=12):
    train([mib] * steps)


# Several streams. Outside of captures the allocator waits for the other stream before it gives up; inside it cannot.

def side_stream(count=16, mib=64, passes=200, recorded=True, model=0, last=0):
    """Each batch is worked on for long by a side stream, which the program does not wait for."""
    weights, side = mib_tensor(model), torch.cuda.Stream()
    for _ in range(count):
        x = mib_tensor(mib)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(passes):
                x.add_(1)
        if recorded:
            x.record_stream(side)
        else:
            torch.cuda.current_stream().wait_stream(side)
        del x
    nn.ReLU()(torch.ones(1, device="cuda", requires_grad=True))
    return weights, mib_tensor(last)


def captured(count=16, mib=64, recorded=True, kept=False):
    """A CUDA graph of which parts run on a side stream."""
    x, keep, side = mib_tensor(mib), [], torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            y = x + 1
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.mul_(2)
            if recorded:
                y.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            if kept:
                keep.append(y)
            del y
    return graph, keep


def captured_offloading(mib=64, depth=16, recorded=True):
    """A captured forward pass that copies what its layers give to the host, on a side stream."""
    model, side = elementwise_net(depth), torch.cuda.Stream()
    x = torch.randn(rows(mib), 4096, device="cuda")
    host = torch.empty(x.shape, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        for layer in model:
            x = layer(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(x, non_blocking=True)
            if recorded:
                x.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
    return graph


# Several GPUs in one process.

class Words(nn.Module):
    """A language model without its middle: the scores of all words are its largest tensors."""

    def __init__(self, words=8192, width=256):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, words)

    def forward(self, ids, labels=None):
        scores = self.head(self.body(self.embedding(ids)))
        if labels is None:
            return scores
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).unsqueeze(0)


def data_parallel(batch=64, length=64, gathered=True, steps=2):
    """With gathered scores the first GPU computes the loss of all."""
    model = nn.DataParallel(Words().cuda())
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        ids = torch.zeros(batch, length, dtype=torch.long, device="cuda")
        if gathered:
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        else:
            loss = model(ids, ids).mean()
        stepper.zero_grad()
        loss.backward()
        stepper.step()


def split_layers(batches=(30, 30), first=9, second=1):
    """The first layers on one GPU, the others on the next; batches of so many MiB."""
    front = nn.Sequential(*[Block() for _ in range(first)]).to("cuda:0")
    back = nn.Sequential(*[Block() for _ in range(second)]).to("cuda:1")
    stepper = torch.optim.SGD([*front.parameters(), *back.parameters()], lr=0.1)
    for mib in batches:
        out = back(front(torch.randn(rows(mib), 4096, device="cuda:0")).to("cuda:1"))
        stepper.zero_grad()
        out.square().mean().backward()
        stepper.step()
