"""The programs of the matrix of harm: each is run twice on the same virtual GPU, with and without the recorder, and must end,
print and remember the same. What a program does not know for sure (addresses, times) it does not print.

A program is a function here. `@program` says how it differs from the ordinary: an ordinary one ends by itself and is followed
by its peaks, which the report must have as well.
"""
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref

import torch
import torch._dynamo  # an optimizer imports it, which takes two seconds; touches no CUDA
from torch import nn
from torch.utils.checkpoint import checkpoint

PROGRAMS = {}


def program(function=None, *, report=True, recorded=None):
    """`report` False: the recorder cannot write one, and says why in one line. `recorded`: a pattern for the reason."""
    def register(function):
        PROGRAMS[function.__name__] = function
        function.report, function.recorded = report, recorded
        return function
    return register if function is None else register(function)


def say(*words):
    print(*words, flush=True)


def peaks():
    say("peaks", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def net(width=64, depth=3):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 8)).cuda()


def train(steps=4, model=None, batch=32, width=64):
    model = model or net(width)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(batch, width, device="cuda")).square().sum().backward()
        optimizer.step()
    return model


def too_much():
    return torch.empty(40 << 30, dtype=torch.uint8, device="cuda")


def message(error):
    return str(error).split(". Of the allocated")[0].split("(")[0]


def let_the_engine_rest():
    """The engine's thread drops what a failed backward pass held after the error has reached us: the next peak would depend
    on who is faster. A pass of its own through that thread waits for it."""
    torch.ones((), device="cuda", requires_grad=True).backward()


# --- how programs end ---


@program
def normal():
    train()


@program
def uncaught_exception():
    train()
    raise ValueError("of the program's own")


@program
def uncaught_oom():
    train()
    too_much()


@program
def exit_code():
    atexit.register(say, "at exit")
    train()
    sys.exit(3)


@program
def exit_without_a_word():
    train()
    os._exit(7)


@program
def terminated():
    train()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


@program
def killed():
    train()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(5)


@program
def segmentation_fault():
    faulthandler.enable()
    train()
    ctypes.string_at(1)


@program
def interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train()
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        say("interrupted")


@program
def a_timeout_by_signal():
    def expire(*_):
        raise TimeoutError("the program's own")

    train()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(4000)]).cuda()
    x = torch.ones(1, 2, device="cuda")
    model(x)  # the peak, however far the time reaches
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        while True:
            model[0](x), model[:1](x), model(x)
    except TimeoutError as error:
        say("timeout:", error)


@program
def recursion_to_pythons_limit():
    def deeper(x, depth):
        return deeper(x + 1, depth + 1)

    try:
        deeper(torch.ones(4, device="cuda"), 0)
    except RecursionError as error:
        say(type(error).__name__)


@program
def a_stack_overflow():
    train()
    kind = ctypes.CFUNCTYPE(None)
    sys.setrecursionlimit(1 << 30)

    def deeper():
        x = torch.ones(4, device="cuda")  # noqa: F841
        kind(deeper)()

    threading.stack_size(1 << 20)
    thread = threading.Thread(target=deeper)
    thread.start()
    thread.join()


@program
def exception_at_exit():
    def late():
        say("late", torch.ones(1000, device="cuda").numel())
        raise KeyError("at exit")

    atexit.register(late)
    train()


@program
def an_object_that_outlives_everything():
    class Late:
        def __del__(self):
            say("deleted", self.x.numel())

    late = Late()
    late.x = torch.ones(1000, device="cuda")
    sys.modules["late"] = late
    train()


@program
def closed_streams():
    train()
    peaks()
    sys.stdout.close()
    os.close(1)
    train()
    os._exit(0)


@program
def warnings_as_errors():
    warnings.simplefilter("error")
    train()


# --- processes and threads ---


@program
def fork_and_exit():
    train()
    child = os.fork()
    if child == 0:
        sys.exit(5)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    train()


@program
def fork_and_leave():
    train()
    child = os.fork()
    if child == 0:
        torch.ones(4).sum()
        os._exit(6)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    train()


@program
def fork_then_cuda_in_the_child():
    train()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(4, device="cuda")
        except RuntimeError as error:
            say(str(error).splitlines()[0])
        os._exit(0)
    say(os.waitpid(child, 0)[1])


@program
def fork_before_cuda():
    child = os.fork()
    train(2 if child == 0 else 3)
    if child == 0:
        os._exit(0)
    say(os.waitpid(child, 0)[1])


@program
def fork_and_exec():
    train()
    say(subprocess.run(["/bin/sh", "-c", "echo of the shell; exit 4"], capture_output=True))
    train()


@program
def loader_with_workers():
    data = [(torch.ones(64) * i, i) for i in range(64)]
    model = net()
    for x, _ in torch.utils.data.DataLoader(data, 16, num_workers=2):
        model(x.cuda()).sum().backward()


@program
def five_hundred_threads():
    sums = []
    for _ in range(500):
        thread = threading.Thread(target=lambda: sums.append(torch.ones(64, device="cuda").numel()))
        thread.start()
        thread.join()
    say(sum(sums))


@program
def threads_that_train():
    threads = [threading.Thread(target=train, args=(3,)) for _ in range(6)]
    for thread in threads:
        thread.start()
        thread.join()  # one after the other: else the peak is chance
        time.sleep(0.05)  # what it held of cuBLAS comes back when the native thread ends, which is after that


@program
def threads_at_once():
    gate = threading.Barrier(40)

    def work():
        x = torch.ones(1024, device="cuda", requires_grad=True)
        gate.wait()
        (x * 2).sum().backward()
        gate.wait()

    threads = [threading.Thread(target=work) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("joined")
    os._exit(0)  # the peak is chance


@program
def a_subinterpreter():
    import _xxsubinterpreters as interpreters
    train()
    other = interpreters.create()
    interpreters.run_string(other, "import sys; print('of the other one', flush=True)")
    with torch.no_grad():  # autograd itself does not stand other interpreters
        net()(torch.ones(4, 64, device="cuda"))
    interpreters.destroy(other)


# --- autograd ---


class Scale(torch.autograd.Function):
    """Runs a backward of its own inside of its backward, then perhaps wants too much."""
    wants_too_much = False

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        x, = context.saved_tensors
        for _ in range(2):
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                inner, = torch.autograd.grad((y * 2).relu().sum(), y)
        more = [torch.ones(4096, 64, device="cuda").relu() for _ in range(20)]  # noqa: F841
        if Scale.wants_too_much:
            too_much()
        return gradient * inner


@program
def nested_backward():
    w = torch.ones(256, 256, device="cuda", requires_grad=True)
    for _ in range(3):
        Scale.apply(w @ w).sum().backward()


@program
def oom_after_nested_backward():
    Scale.wants_too_much = True
    w = torch.ones(256, 256, device="cuda", requires_grad=True)
    for _ in range(3):
        try:
            Scale.apply(w @ w).sum().backward()
        except torch.OutOfMemoryError as error:
            say(message(error))
        let_the_engine_rest()


@program
def outputs_are_swapped():
    """PyTorch swaps only tensors to which nothing refers weakly."""
    w = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = (w @ w).relu()
    torch.utils.swap_tensors(y, torch.zeros(64, 64, device="cuda"))
    say(y.requires_grad, torch.cuda.memory_allocated())


@program
def inputs_of_checkpoints_die_with_their_graph():
    """What hooks packed keeps the leaf that was saved for as long as the memory of its node exists."""
    model = net(256)
    for _ in range(3):
        x = torch.randn(64, 256, device="cuda").requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        del x
        say(torch.cuda.memory_allocated())


@program
def graphs_die_when_they_are_dropped():
    """Whatever their nodes are: what they saved is free at once."""
    model = net(256)
    for _ in range(3):
        x = model(torch.ones(4096, 256, device="cuda"))
        y = Scale.apply(x.view(-1)[:4096].mul_(2)).sigmoid()
        before = torch.cuda.memory_allocated()
        del x, y
        say(before, torch.cuda.memory_allocated())


@program
def double_backward():
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        gradient, = torch.autograd.grad((x ** 3).sum(), x, create_graph=True)
        gradient.square().sum().backward()


@program
def oom_in_forward_tried_again():
    model = net()
    for batch in (1 << 26, 1 << 25, 64):
        try:
            model(torch.ones(batch, 64, device="cuda")).sum().backward()
            say("fits", batch)
        except torch.OutOfMemoryError as error:
            say(message(error))


@program
def oom_in_backward():
    class Wants(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 1

        @staticmethod
        def backward(context, gradient):
            too_much()

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        try:
            (Wants.apply(x @ x) @ x).sum().backward()
        except torch.OutOfMemoryError as error:
            say(message(error))
        let_the_engine_rest()


@program
def oom_in_the_forward_of_a_function():
    class Wants(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            too_much()

        @staticmethod
        def backward(context, gradient):
            return gradient

    for _ in range(3):
        try:
            Wants.apply(torch.ones(64, device="cuda", requires_grad=True))
        except torch.OutOfMemoryError as error:
            say(message(error))


@program
def oom_in_hooks():
    model = net()
    model[0].register_forward_hook(lambda *_: wants and too_much())
    x = torch.ones(32, 64, device="cuda", requires_grad=True)
    x.register_hook(lambda gradient: too_much() if not wants else gradient)
    for wants in (True, False, True, False):
        try:
            model(x).sum().backward()
        except torch.OutOfMemoryError as error:
            say(message(error))
        let_the_engine_rest()


@program
def oom_in_the_optimizer():
    filler = torch.empty(11 << 30, dtype=torch.uint8, device="cuda")
    model = nn.Linear(4096, 4096 * 5).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4096, device="cuda")).sum().backward()
    for _ in range(2):
        try:
            optimizer.step()
            say("stepped")
        except torch.OutOfMemoryError as error:
            say(message(error))
            del filler


@program
def oom_in_a_recomputation():
    class Block(nn.Module):
        runs = 0

        def forward(self, x):
            Block.runs += 1
            if Block.runs % 4 == 0:
                too_much()
            return (x @ x).relu()

    block = Block()
    for reentrant in (True, False):
        for _ in range(3):
            x = torch.ones(128, 128, device="cuda", requires_grad=True)
            try:
                checkpoint(block, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
                say("fits")
            except torch.OutOfMemoryError as error:
                say(message(error))
            let_the_engine_rest()


@program
def an_exception_in_backward():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 1

        @staticmethod
        def backward(context, gradient):
            raise KeyError("in backward")

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        try:
            (Odd.apply(x @ x) @ x).sum().backward()
        except KeyError as error:
            say(error)
        time.sleep(0.05)  # the engine's thread still drops what it held; with and without us that may last into the next try


@program
def errors_of_pytorch():
    for wrong in (lambda: torch.ones(3, device="cuda") @ torch.ones(4, device="cuda"),
                  lambda: torch.ones(3, device="cuda").view(7),
                  lambda: torch.ones(3, device="cuda").backward(),
                  lambda: nn.Linear(3, 4).cuda()(torch.ones(2, 5, device="cuda"))):
        try:
            wrong()
        except Exception as error:
            say(type(error).__name__, error)


@program
def anomaly_detection():
    with torch.autograd.detect_anomaly(check_nan=False):
        train()


@program
def saved_tensors_on_the_host():
    with torch.autograd.graph.save_on_cpu():
        train()


@program
def accumulated_gradients_on_several_streams():
    model, stream = net(), torch.cuda.Stream()
    for step in range(4):
        with torch.cuda.stream(stream) if step % 2 else contextlib.nullcontext():
            x = torch.randn(32, 64, device="cuda")
            model(x).sum().backward()
        x.record_stream(stream)


@program
def autocast_and_scaler():
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler()
    for dtype in (torch.bfloat16, torch.float16):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=dtype):
                loss = model(torch.ones(32, 64, device="cuda")).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


# --- what a model is made of, and whether we touch it ---


class Curious(nn.Module):
    """Prints when somebody looks at it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x) + nn.GELU()(x)

    def named_modules(self, *arguments, **more):
        say("asked for modules")
        return super().named_modules(*arguments, **more)

    def named_parameters(self, *arguments, **more):
        say("asked for parameters")
        return super().named_parameters(*arguments, **more)

    def named_buffers(self, *arguments, **more):
        say("asked for buffers")
        return super().named_buffers(*arguments, **more)

    def __repr__(self):
        say("asked for its text")
        return "curious"


@program
def a_model_that_notices_who_looks():
    train(model=Curious().cuda())


@program
def a_model_dies_when_it_is_dropped():
    model = train()
    dead = weakref.ref(model)
    references = [sys.getrefcount(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    say(dead() is None, references, torch.cuda.memory_allocated())


@program
def modules_are_made_in_forward():
    class Lazy(nn.Module):
        def forward(self, x):
            return nn.GELU()(nn.Identity()(x))

    train(model=nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), Lazy()) for _ in range(10)]).cuda())


class Noticed(type):
    """Prints which of its attributes somebody asks for."""
    asked = []

    def __getattribute__(cls, name):
        type.__getattribute__(cls, "asked").append(name)
        return type.__getattribute__(cls, name)


@program
def a_metaclass_that_notices_who_asks():
    class Model(nn.Linear, metaclass=Noticed):
        pass

    class Optimizer(torch.optim.SGD, metaclass=Noticed):
        pass

    model = Model(64, 64).cuda()
    optimizer = Optimizer(model.parameters(), 0.1)
    Noticed.asked.clear()
    for _ in range(2):
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()
    say(sorted(Noticed.asked))


@program
def a_function_whose_key_is_asked_for():
    """torch.autograd.Function lets a class say what its graphs are compiled by."""
    asked = []

    class Keyed(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x, None)
            return x * 2

        @staticmethod
        def backward(context, gradient):
            x, _ = context.saved_tensors
            return gradient * x

        @staticmethod
        def _compiled_autograd_key(context):
            asked.append(context)
            return (context._autograd_function_id,)

    model = net()
    for _ in range(3):
        Keyed.apply(model(torch.ones(4, 64, device="cuda"))).sum().backward()
    y = Keyed.apply(model(torch.ones(4, 64, device="cuda")))
    try:
        too_much()
    except torch.OutOfMemoryError:
        say(len(asked), tuple(y.shape))


@program
def a_collector_that_is_the_programs_own():
    seen = []
    train(1)
    genuine, gc.get_objects = gc.get_objects, lambda *_: seen.append("asked") or []
    sys.addaudithook(lambda event, _: seen.append(event) if event.startswith("gc.") else None)
    optimizer = torch.optim.SGD(net().parameters(), 0.1)  # not registered by a step: it would have to be searched for
    try:
        too_much()
    except torch.OutOfMemoryError:
        say(seen, len(optimizer.param_groups))
    gc.get_objects = genuine


@program
def code_and_its_constants_die():
    """Code that a program makes may have anything as constants."""
    for i in range(20):
        large = torch.zeros(1 << 20, device="cuda")
        made = {}
        exec(compile("def scale(x):\n    return x * 2\n", f"made_{i}.py", "exec"), made)
        scale = made["scale"]
        scale.__code__ = scale.__code__.replace(co_consts=(*scale.__code__.co_consts, large))
        references = sys.getrefcount(scale.__code__)
        scale(torch.ones(4, device="cuda"))
        say(references == sys.getrefcount(scale.__code__))
        del large, made, scale
        gc.collect()
    say(torch.cuda.memory_allocated())


@program
def hooks_that_fail():
    model = net()
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(2):
        try:
            model(torch.ones(4, 64, device="cuda"))
        except ZeroDivisionError as error:
            say(error)
    handle.remove()
    train(model=model)


@program
def collector_counts():
    gc.disable()
    gc.collect()
    before = len(gc.get_objects())
    train()
    gc.collect()
    say(len(gc.get_objects()) - before < 2000, gc.garbage)


# --- who else listens ---


@program
def traced_by_settrace():
    lines = {"count": 0}

    def trace(frame, event, _):
        lines["count"] += event == "line" and frame.f_code.co_filename == __file__
        return trace

    sys.settrace(trace)
    train()
    sys.settrace(None)
    say("lines", lines["count"])


@program
def profiled_by_setprofile():
    calls = {"count": 0}

    def profile(frame, event, _):
        calls["count"] += event == "call"

    sys.setprofile(profile)
    train()
    sys.setprofile(None)
    say("calls", calls["count"])


@program
def monitored():
    if not hasattr(sys, "monitoring"):
        say("no sys.monitoring before Python 3.12")
        return train()
    calls = {"count": 0}

    def count(*_):
        calls["count"] += 1

    sys.monitoring.use_tool_id(2, "harm")
    sys.monitoring.register_callback(2, sys.monitoring.events.PY_START, count)
    sys.monitoring.set_events(2, sys.monitoring.events.PY_START)
    train()
    sys.monitoring.set_events(2, 0)
    say("calls", calls["count"])


@program
def pytorchs_profiler():
    from torch.profiler import ProfilerActivity, profile, schedule
    counts = []

    def ready(found):
        counts.append(sorted((event.key, event.count) for event in found.key_averages() if event.key.startswith("aten::")))

    model = net()
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2), on_trace_ready=ready) as p:
        for _ in range(4):
            train(1, model)
            p.step()
    say(counts)


@program
def pytorchs_history():
    torch.cuda.memory._record_memory_history(max_entries=10000)
    train()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    say([(entry["action"], entry["size"]) for entry in trace])
    torch.cuda.memory._record_memory_history(enabled=None)


@program
def pytorchs_history_of_an_oom():
    torch.cuda.memory._record_memory_history(max_entries=10000)
    train(1)
    w = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = (w @ w).relu()
    try:
        too_much()
    except torch.OutOfMemoryError:
        say(tuple(y.shape))
    say(sorted(entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]))


@program
def oom_observers():
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen.append(figures))
    try:
        too_much()
    except torch.OutOfMemoryError:
        say(seen)


# --- what PyTorch has besides ---


@program
def cuda_graphs():
    model, x = net(), torch.ones(32, 64, device="cuda")
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(3):
            graph.replay()
    say(tuple(y.shape))


@program
def memory_pools():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        parts = [torch.empty(1 << 20, device="cuda") for _ in range(4)]
    del parts
    train()


@program
def a_private_pool_keeps_what_is_missing():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        parts = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del parts
    torch.empty(5 << 30, dtype=torch.uint8, device="cuda")


@program
def compiled_with_graph_breaks():
    @torch.compile(backend="eager")
    def step(x):
        x = x.relu()
        torch._dynamo.graph_break()
        return (x * 2).sum()

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    for _ in range(3):
        step(x).backward()
    say(torch._dynamo.utils.counters["frames"], torch._dynamo.utils.counters["graph_break"].total())


@program
def functorch():
    from torch.func import functional_call, grad, vmap
    gc.disable()  # it leaves cycles, and when they are collected is chance
    model = net()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x[None],)).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, torch.ones(8, 64, device="cuda"))
    say({name: tuple(value.shape) for name, value in gradients.items()})


@program
def traced_by_jit():
    x = torch.ones(4, 64, device="cuda")
    traced = torch.jit.trace(net(), x)
    for _ in range(3):
        traced(x).sum().backward()
    say(traced.graph is not None)


@program
def modes_of_the_users():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = {"functions": 0, "ops": 0}

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), more=None):
            seen["functions"] += 1
            return function(*arguments, **(more or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), more=None):
            seen["ops"] += 1
            return function(*arguments, **(more or {}))

    model = net()
    with Functions(), Ops():
        train(model=model)
    say(seen)


@program
def numbered_scopes():
    model = net()
    for step in range(300):
        with torch.profiler.record_function(f"iteration {step}"):
            model(torch.ones(4, 64, device="cuda")).sum()


@program
def asyncio_tasks():
    import asyncio

    async def step(model):
        x = torch.ones(4, 64, device="cuda")
        await asyncio.sleep(0)
        return model(x).sum().numel()

    async def main():
        model = net()
        return sum(await asyncio.gather(*[step(model) for _ in range(10)]))

    say(asyncio.run(main()))


# --- the trace has no place, or loses it ---


@program(report=False, recorded="cannot create the trace")
def the_run_folder_is_gone():
    folder = os.environ.get("OOMDIAG_OUTPUT")
    if folder:
        os.environ["OOMDIAG_OUTPUT"] = folder + "/nowhere/to/be"
        open(folder + "/nowhere", "w").close()
    train()


@program(report=False, recorded="cannot create the trace")
def files_must_be_small():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    train()


@program(report=False)
def the_trace_is_deleted():
    train()
    folder = os.environ.get("OOMDIAG_OUTPUT")
    if folder and os.path.exists(folder + "/trace"):
        os.unlink(folder + "/trace")
    train()


def many_events(count=6000):
    """Enough for new chunks of the trace."""
    x = torch.ones(64, device="cuda")
    for i in range(count):
        y = x * 2 if i % 2 else x + 1
        del y


@program
def closes_descriptors_that_it_does_not_know():
    """As who becomes a daemon does: its next file has the number that one of ours would have had."""
    model = train()
    os.closerange(3, 1024)
    with tempfile.NamedTemporaryFile(suffix=".pt") as checkpoint:
        torch.save(model.state_dict(), checkpoint)
        checkpoint.flush()
        train(2, model)
        many_events()
        say(os.path.getsize(checkpoint.name), len(torch.load(checkpoint.name)))


@program
def a_thread_closes_descriptors_all_the_time():
    train()
    place, stop, is_mine = tempfile.mkdtemp(), threading.Event(), []

    def close_and_open():
        while not stop.is_set():
            os.closerange(3, 1024)
            mine = os.open(place + "/mine", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.write(mine, b"mine")
            time.sleep(1e-4)
            is_mine.append(os.pread(mine, 100, 0) == b"mine" and os.fstat(mine).st_ino == os.stat(place + "/mine").st_ino)

    thread = threading.Thread(target=close_and_open)
    thread.start()
    many_events()
    stop.set()
    thread.join()
    say(all(is_mine), os.path.getsize(place + "/mine"))


@program
def standard_streams_are_closed_from_the_start():
    kept = [os.dup(number) for number in range(3)]
    for number in range(3):
        os.close(number)
    train()
    ctypes.CDLL(None).perror(b"what a library says to whoever has number 2")
    many_events()
    found = [number for number in range(3) if os.path.exists(f"/proc/self/fd/{number}")]
    for number in range(3):
        os.dup2(kept[number], number)
    say("descriptors that somebody else opened:", found)


@program
def the_run_folder_is_elsewhere_for_a_while():
    train()
    folder = os.environ.get("OOMDIAG_OUTPUT")
    if folder:
        os.rename(folder, folder + "-moved")
    many_events()
    if folder:
        os.rename(folder + "-moved", folder)


@program
def the_run_folder_is_outside_of_a_chroot():
    model = train()
    try:
        os.chroot(tempfile.mkdtemp())
    except PermissionError:
        say("no right to do so")
    train(2, model)
    many_events()


@program(report=None)
def little_address_space():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        train()
    except (RuntimeError, MemoryError) as error:
        say(type(error).__name__)
        os._exit(0)


@program
def no_more_files():
    train()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    train()


@program(report=None)
def the_environment_is_cleared():
    """The recording goes to the folder that the process was started with, which is the server's."""
    os.environ.clear()
    train()


@program
def the_current_folder_is_gone():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    train()


@program(report=False, recorded="no space left")
def the_disk_is_full():
    place = tempfile.mkdtemp()
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"size=1800k") != 0:
        say("no right to mount a file system")
    if "OOMDIAG_OUTPUT" in os.environ:
        os.environ["OOMDIAG_OUTPUT"] = place
    model = net()
    for _ in range(500):
        train(1, model)
    ctypes.CDLL(None).umount2(place.encode(), 2)
