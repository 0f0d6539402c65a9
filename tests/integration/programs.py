"""Ordinary PyTorch programs for the integration tests: python programs.py NAME [--batch N] [--steps N].

Each trains for a few steps and prints, as one line of JSON, what PyTorch itself knows of its memory: the peaks, and at every
out-of-memory error the allocator's own allocated_bytes. The tests compare these with what oomdiag reports.
"""
import argparse
import json
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

seen = {"allocated_at_oom": None}


def observe(_device, _wanted, _allocated, _free):
    seen["allocated_at_oom"] = torch.cuda.memory_stats()["allocated_bytes.all.current"]


def mlp(batch):
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
    x = torch.randn(batch, 512, device="cuda")
    return model, lambda: model(x).square().mean()


def batch_norm(batch):
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
                          nn.Linear(64 * 16 * 16, 10)).cuda()
    x = torch.randn(batch, 3, 32, 32, device="cuda")
    return model, lambda: model(x).square().mean()


def checkpointed(batch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
                                       for _ in range(4))

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    model = Model().cuda()
    x = torch.randn(batch, 1024, device="cuda", requires_grad=True)
    return model, lambda: model(x).square().mean()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        x, = context.saved_tensors
        return 2 * gradient * x


def custom_function(batch):
    class Module(nn.Module):
        def forward(self, x):
            return Square.apply(x)

    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), Module()) for _ in range(6)]).cuda()
    x = torch.randn(batch, 512, device="cuda")
    return model, lambda: model(x).mean()


def amp(batch):
    model, _ = batch_norm(1)
    x = torch.randn(batch, 3, 32, 32, device="cuda")

    def loss():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    return model, loss


def reentrant(batch):
    model, _ = checkpointed(1)
    x = torch.randn(batch, 1024, device="cuda", requires_grad=True)

    def loss():
        y = x
        for part in model.parts:
            y = checkpoint(part, y, use_reentrant=True)
        return y.square().mean()

    return model, loss


def two_threads(batch):
    """Two threads run forward and backward of a model each, at the same time; the loss that is returned is a third's."""
    import threading

    class MeanSquare(nn.Module):
        def forward(self, x):
            return x.square().mean()

    models = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), MeanSquare()).cuda() for _ in range(3)]
    x = torch.randn(batch, 512, device="cuda")

    def loss():
        threads = [threading.Thread(target=lambda m=m: m(x).backward()) for m in models[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return models[0](x)

    return nn.ModuleList(models), loss


def compiled(batch):
    """Backward as one node, CompiledFunctionBackward; the graphs run op by op, as no compiler is at hand everywhere."""
    model, _ = batch_norm(1)
    fast = torch.compile(model, backend="aot_eager")
    x = torch.randn(batch, 3, 32, 32, device="cuda")
    return model, lambda: fast(x).square().mean()


def resnet50(batch):
    import torchvision
    model = torchvision.models.resnet50().cuda()
    x = torch.randn(batch, 3, 224, 224, device="cuda")
    y = torch.zeros(batch, dtype=torch.long, device="cuda")
    return model, lambda: nn.functional.cross_entropy(model(x), y)


def gpt2(batch):
    import transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, use_cache=False)).cuda()
    ids = torch.zeros(batch, 512, dtype=torch.long, device="cuda")
    return model, lambda: model(ids, labels=ids).loss


def train(make, batch, steps):
    model, loss = make(batch)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def main():
    programs = {f.__name__: f for f in (mlp, batch_norm, checkpointed, reentrant, custom_function, amp, two_threads, compiled,
                                           resnet50, gpt2)}
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=programs)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.cuda.init()
    torch._C._cuda_attach_out_of_memory_observer(observe)
    outcome = 0
    try:
        train(programs[options.program], options.batch, options.steps)
    except torch.OutOfMemoryError:
        outcome = 9
    print(json.dumps({"max_allocated": torch.cuda.max_memory_allocated(), "max_reserved": torch.cuda.max_memory_reserved(),
                      **seen}))
    sys.exit(outcome)


if __name__ == "__main__":
    main()
