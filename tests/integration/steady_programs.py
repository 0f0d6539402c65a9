"""Programs whose training repeats itself, and then does not quite: the report must be the same whether their ops were watched
in every step or only while they were learned. Run by test_steady.py.

`@program(steady=False)`: no steady training is expected of it, since no two of its steps are alike. `quick`: part of CI.
"""
import threading

import torch
import torch._dynamo  # an optimizer imports it, which takes two seconds; touches no CUDA
from torch import nn
from torch.utils.checkpoint import checkpoint

PROGRAMS = {}


def program(function=None, *, steady=True, quick=False):
    def register(function):
        PROGRAMS[function.__name__] = function
        return function
    return register if function is None else register(function)


class Net(nn.Module):
    def __init__(self, width=256, depth=3, act=nn.ReLU):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = act()
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


class Loop:
    """A training loop, a step of which is a call."""

    def __init__(self, model=None, optimizer=torch.optim.Adam, width=256, batch=512):
        self.model = (model or Net(width)).cuda()
        self.optimizer = optimizer(self.model.parameters(), 0.001)
        self.width, self.batch = width, batch

    def step(self, batch=None, loss=None, set_to_none=True):
        x = torch.randn(batch or self.batch, self.width, device="cuda")
        self.optimizer.zero_grad(set_to_none=set_to_none)
        y = self.model(x)
        (loss(y) if loss else y.square().mean()).backward()
        self.optimizer.step()

    def steps(self, count=20, **more):
        for _ in range(count):
            self.step(**more)


def fill_the_gpu():
    return [torch.empty(1 << 28, device="cuda") for _ in range(40)]


# --- the same sizes, somewhere else ---


def early(x):
    return torch.sigmoid(x)


def late(x):
    return torch.tanh(x)


@program(quick=True)
def same_sizes_from_another_line():
    layer = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    kept = []
    for step in range(60):
        x = torch.randn(4096, 512, device="cuda")
        optimizer.zero_grad()
        z = (early if step < 30 else late)(layer(x))
        if step >= 30:
            kept.append(z.detach())
        z.sum().backward()
        optimizer.step()
    fill_the_gpu()


@program
def an_input_from_another_line():
    loop, kept = Loop(), []
    loop.steps()
    for _ in range(20):
        x = torch.randn(512, 256, device="cuda")
        kept.append(x)
        loop.optimizer.zero_grad()
        loop.model(x).square().mean().backward()
        loop.optimizer.step()
    fill_the_gpu()


@program(quick=True)
def a_module_switched_for_another():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 10)
            self.uses_second = False
            self.kept = []

        def forward(self, x):
            body = self.second if self.uses_second else self.first
            y = body(x)
            if self.uses_second:
                self.kept.append(y.detach())
            return self.head(y.relu())

    loop = Loop(Two())
    loop.steps()
    loop.model.uses_second = True
    loop.steps()
    fill_the_gpu()


@program(quick=True)
def a_module_at_the_address_of_one_that_died():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(256, 256), nn.Linear(256, 10)
            self.acts = nn.ModuleDict({f"before{i}": nn.Sigmoid() for i in range(100)})
            self.kept = []

        def forward(self, x):
            y = self.body(x)
            for name, act in self.acts.items():
                y = act(y)
                if name == "after":
                    self.kept.append(y.detach())
            return self.head(y)

    loop, others = Loop(Model()), []
    loop.steps()
    addresses = {id(act) for act in loop.model.acts.values()}
    loop.model.acts.clear()
    while id(after := nn.Sigmoid()) not in addresses:
        others.append(after)
    loop.model.acts["after"] = after
    loop.steps()
    fill_the_gpu()


@program
def an_activation_switched_in_the_same_line():
    loop, kept = Loop(), []
    loop.steps()
    loop.model.act.forward = torch.tanh

    def loss(y):
        kept.append(y)
        return y.square().mean()
    loop.steps(loss=loss)
    fill_the_gpu()


@program
def optimizers_switched():
    loop = Loop(optimizer=torch.optim.SGD)
    loop.steps()
    loop.optimizer = torch.optim.Adam(loop.model.parameters())
    loop.steps()
    loop.optimizer = torch.optim.RMSprop(loop.model.parameters())
    loop.steps()


# --- other sizes ---


@program
def changing_shapes():
    loop = Loop()
    for batch in (512, 1024, 256, 512):
        loop.steps(12, batch=batch)
    loop.step(batch=4096)
    loop.steps(8)


@program(quick=True)
def an_oom_in_a_steady_step():
    loop, kept = Loop(batch=65536), []

    def loss(y):
        kept.append(y.grad_fn)
        return y.square().mean()
    loop.steps(60, loss=loss)


@program
def a_leak_in_the_middle_of_training():
    loop, kept = Loop(batch=65536), []
    loop.steps(20)
    for _ in range(60):
        loop.step()
        kept.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))


# --- what a step is made of ---


@program(quick=True)
def several_threads():
    loop = Loop()

    def other():
        for _ in range(5):
            (torch.ones(300, 300, device="cuda") @ torch.ones(300, 300, device="cuda")).relu()

    for _ in range(20):
        loop.step()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    loop.steps()


@program
def a_second_thread_of_training():
    loops = [Loop(), Loop(width=128)]
    loops[0].steps(12)
    thread = threading.Thread(target=loops[1].steps, args=(24,))
    thread.start()
    thread.join()
    loops[0].steps(12)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(context, gradient):
        x, = context.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner, = torch.autograd.grad((y.exp() * 2).sum(), y)
        return gradient * inner


@program
def nested_backward():
    loop = Loop()
    loop.steps(30, loss=lambda y: Nested.apply(y).square().mean())
    loop.steps(8, batch=700, loss=lambda y: Nested.apply(y).square().mean())


@program(quick=True)
def checkpointing():
    class Checkpointed(Net):
        def forward(self, x):
            for at, layer in enumerate(self.layers):
                x = checkpoint(lambda x: self.act(layer(x)), x, use_reentrant=at == 1)
            return self.head(x)

    loop = Loop(Checkpointed())
    loop.steps(30)
    loop.steps(4, batch=700)


@program
def accumulation():
    loop = Loop()
    for step in range(60):
        loop.optimizer.zero_grad(set_to_none=step < 30)
        for _ in range(4):
            loop.model(torch.randn(512, 256, device="cuda")).square().mean().backward()
        loop.optimizer.step()


@program
def eval_between():
    loop = Loop()
    for _ in range(4):
        loop.steps(10)
        with torch.no_grad():
            for _ in range(3):
                loop.model(torch.randn(2048, 256, device="cuda")).argmax(-1).cpu()


@program
def an_exception_in_a_step():
    loop = Loop()
    for _ in range(3):
        loop.steps(10)
        try:
            loop.step(loss=lambda y: y.no_such_attribute)
        except AttributeError:
            pass


@program(quick=True)
def ooms_that_are_caught():
    loop = Loop()
    for _ in range(3):
        loop.steps(10)
        try:
            loop.step(batch=1 << 24)
        except torch.OutOfMemoryError:
            pass


@program(steady=False)
def a_generate_loop():
    model, cache = Net().cuda().eval(), []
    with torch.no_grad():
        x = torch.randn(64, 256, device="cuda")
        for _ in range(40):
            y = model(x)
            cache.append(torch.cat([y, y], 1))
            if len(cache) > 1:
                torch.cat(cache[-8:])


@program
def two_optimizers():
    generator, critic = Loop(), Loop()
    for _ in range(20):
        critic.step()
        generator.step()
    critic.steps()


@program
def autocast_with_a_scaler():
    loop, scaler = Loop(), torch.amp.GradScaler()
    for step in range(40):
        loop.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16 if step < 25 else torch.bfloat16):
            y = loop.model(torch.randn(512, 256, device="cuda"))
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(loop.optimizer)
        scaler.update()
