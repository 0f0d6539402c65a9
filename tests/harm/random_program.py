"""A program that its seed decides: modules, custom Functions with backward passes inside, threads, checkpoints, forks, and
requests that fail and are caught. Single-threaded where the order would be chance; what it prints is the same each time."""
import gc
import os
import pathlib
import random
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Inner(torch.autograd.Function):
    """A backward inside of the backward, to some depth; at the bottom perhaps a request that fails."""

    @staticmethod
    def forward(context, x, depth, fails):
        context.save_for_backward(x)
        context.depth, context.fails = depth, fails
        return x * 2

    @staticmethod
    def backward(context, gradient):
        x, = context.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = Inner.apply(y, context.depth - 1, context.fails) if context.depth else (y * 2).relu()
            inner, = torch.autograd.grad(z.sum(), y)
        if context.fails and context.depth == 0:
            torch.empty(40 << 30, dtype=torch.uint8, device="cuda")
        return gradient * inner, None, None


def wait_until_others_sleep():
    """backward() returns while the engine's threads still let go of the pass. A fork just then copies the allocator's lock as
    they hold it, and the child waits for it for ever: with the recorder and without."""
    quiet, end = 0, time.monotonic() + 10
    while quiet < 3 and time.monotonic() < end:
        others = [task for task in pathlib.Path("/proc/self/task").iterdir() if int(task.name) != threading.get_native_id()]
        quiet = quiet + 1 if all(is_asleep(task) for task in others) else 0
        time.sleep(0.002)


def is_asleep(task):
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return True


class Random:
    def __init__(self, seed):
        self.choose = random.Random(seed)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
        self.optimizer = self.choose.choice([torch.optim.SGD, torch.optim.AdamW])(self.model.parameters(), 0.01)
        self.kept = []
        self.acts = [self.train, self.nest, self.recompute, self.fail, self.keep, self.drop, self.thread, self.fork,
                     self.twice, self.scope, self.loop]

    def x(self):
        return torch.randn(self.choose.choice([4, 32, 100]), 32, device="cuda")

    def train(self):
        self.optimizer.zero_grad(set_to_none=self.choose.random() < 0.5)
        self.model(self.x()).square().sum().backward()
        self.optimizer.step()

    def loop(self):
        batch = self.choose.choice([8, 16])
        for _ in range(self.choose.randint(3, 12)):
            self.optimizer.zero_grad()
            self.model(torch.randn(batch, 32, device="cuda")).square().sum().backward()
            self.optimizer.step()

    def nest(self):
        depth, fails = self.choose.randint(0, 3), self.choose.random() < 0.4
        w = torch.ones(32, 32, device="cuda", requires_grad=True)
        try:
            (Inner.apply(w @ w, depth, fails) @ w).sum().backward()
        except torch.OutOfMemoryError:
            wait_until_others_sleep()  # the engine's thread still holds what the failed node was given: when it goes is chance
            print("OOM in backward", depth)

    def recompute(self):
        x = self.x().requires_grad_()
        checkpoint(self.model, x, use_reentrant=self.choose.random() < 0.5).sum().backward()

    def fail(self):
        try:
            self.model(torch.empty(self.choose.choice([1 << 28, 1 << 30]), 32, device="cuda"))
        except torch.OutOfMemoryError:
            print("OOM in forward")

    def keep(self):
        self.kept.append(self.model(self.x()) if self.choose.random() < 0.5 else self.x())

    def drop(self):
        if self.kept:
            del self.kept[self.choose.randrange(len(self.kept))]
        if self.choose.random() < 0.3:
            torch.cuda.empty_cache()

    def thread(self):
        act = self.choose.choice([self.train, self.nest, self.fail, self.keep])
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    def fork(self):
        sys.stdout.flush()
        wait_until_others_sleep()
        child = os.fork()
        if child == 0:
            # its engine would wait ten seconds for threads that no fork copies
            os.environ["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "0"
            if self.choose.random() < 0.5:
                sys.exit(3)
            os._exit(4)
        self.choose.random()
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def twice(self):
        x = self.x().requires_grad_()
        gradient, = torch.autograd.grad((self.model(x) ** 2).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    def scope(self):
        with torch.profiler.record_function(f"part {self.choose.randrange(1000)}"):
            self.train()


def run(seed):
    gc.disable()  # when cycles are collected is chance
    torch.manual_seed(seed)
    program = Random(seed)
    for _ in range(program.choose.randint(5, 25)):
        act = program.choose.choice(program.acts)
        print(act.__name__, flush=True)
        act()
    end = program.choose.random()
    if end < 0.1:
        raise ValueError("of the program's own")
    if end < 0.2:
        sys.exit(7)
    if end < 0.25:
        os._exit(9)
