"""Training loops on which every predicted remedy can be applied, to compare its peak with the prediction."""
import contextlib
import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Stage(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
                         nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def convolutions():
    net = nn.Sequential(Stage(3, 32), nn.MaxPool2d(2), Stage(32, 64), nn.MaxPool2d(2), Stage(64, 128), nn.MaxPool2d(2),
                        nn.Flatten(), nn.Linear(128 * 64, 10))
    return net, lambda batch: torch.randn(batch, 3, 64, 64, device="cuda"), 96


def mlp():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.GELU())
                          for _ in range(4)], nn.Linear(1024, 100))
    return net, lambda batch: torch.randn(batch, 1024, device="cuda"), 16384


def wide_mlp():
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)])
    return net, lambda batch: torch.randn(batch, 2048, device="cuda"), 64


def transformer():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.1), 4,
                                enable_nested_tensor=False)
    return net, lambda batch: torch.randn(batch, 256, 512, device="cuda"), 32


def train(model, remedy="", modules=(), batch=0, steps=3, optimizer="adamw", keep_gradients=False, hold_outputs=False,
          backward=True, leak=False, inference=False):
    torch.manual_seed(0)
    net, data, default_batch = globals()[model]()
    net.cuda()
    batch = batch or default_batch
    parts = 2 if remedy == "accumulate_2" else 1
    batch = batch // 2 if remedy in ("half_batch", "accumulate_2") else batch
    if remedy == "relu_in_place":
        for module in net.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True
    if remedy == "checkpoint":
        for name in modules:
            module = net.get_submodule(name)
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    make = {"adamw": lambda p: torch.optim.AdamW(p, foreach=remedy not in ("foreach_off", "fused_optimizer"),
                                                 fused=remedy == "fused_optimizer"),
            "sgd": lambda p: torch.optim.SGD(p, 0.1)}
    stepper = make["sgd" if remedy == "sgd" else optimizer](net.parameters())
    autocast = torch.autocast("cuda", torch.bfloat16) if remedy == "autocast_bf16" else contextlib.nullcontext()
    grad = torch.no_grad() if remedy == "no_grad" or inference else contextlib.nullcontext()
    kept = []
    for _ in range(steps):
        stepper.zero_grad(set_to_none=not keep_gradients or remedy == "set_to_none")
        for _ in range(parts):
            x = data(batch)
            with autocast, grad:
                features = net(x)
                if hold_outputs:
                    weights = torch.softmax(features.repeat(1, 10), -1)  # held, though only its mean is needed
                    loss = features.square().mean() + weights.detach().mean()
                    if remedy == "drop_outputs":
                        del weights
                else:
                    loss = features.float().square().mean()
            if leak and remedy != "stop_growth":
                kept.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
            if backward:
                del features
                (loss / parts).backward()
        if backward:
            stepper.step()
