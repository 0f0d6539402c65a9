"""Training programs that run out of memory on a GPU that is a little too small, and every fix that is proposed for them, so
that what the report says of each can be held against the program with it. advice.py runs them in forked children.
"""
import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FIXES = set()  # of this run; what stands inside of models asks for it


class Stage(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
                         nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = Stage(width, width)

    def forward(self, x):
        return x + self.body(x)


class Attention(nn.Module):
    """Causal self-attention that writes out the matrix of scores."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if "sdpa" in FIXES:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            y = torch.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, words=8192, width=256, heads=4, layers=6, length=256):
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.length = length

    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = layer(x)
        x = self.norm(x)
        if "chunked_cross_entropy" in FIXES:
            return chunked_loss(self.head, x, ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def chunked_loss(head, x, ids, chunks=8):
    """Logits of an eighth of the words at a time, in backward once more."""
    parts = zip(x.flatten(0, 1).chunk(chunks), ids.flatten().chunk(chunks))
    one = lambda part, targets: F.cross_entropy(head(part), targets, reduction="sum")
    return sum(checkpoint(one, part, targets, use_reentrant=False) for part, targets in parts) / ids.numel()


class Lstm(nn.Module):
    def __init__(self, words=4096, width=256):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        x = self.lstm(self.embedding(ids))[0]
        if "chunked_cross_entropy" in FIXES:
            return chunked_loss(self.head, x, ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class WithLoss(nn.Module):
    """A net of features, and the mean of their squares. `held`: scores that nobody needs any more live on in a variable."""

    def __init__(self, net, held=False):
        super().__init__()
        self.net = net
        self.held = held

    def forward(self, x):
        features = self.net(x)
        if not self.held:
            return features.float().square().mean()
        scores = torch.softmax(features.repeat(1, 10), -1)
        loss = features.square().mean() + scores.detach().mean()
        return (loss, None) if "drop_outputs" in FIXES else (loss, scores)


def images(size, channels=3):
    return lambda batch: torch.randn(batch, channels, size, size, device="cuda")


def rows(width, dtype=torch.float32):
    return lambda batch: torch.randn(batch, width, device="cuda", dtype=dtype)


def words(length, count):
    return lambda batch: torch.zeros(batch, length, dtype=torch.long, device="cuda")


def cnn():
    return WithLoss(nn.Sequential(Stage(3, 32), nn.MaxPool2d(2), Stage(32, 64), nn.MaxPool2d(2), Stage(64, 128),
                                  nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128 * 64, 10))), images(64)


def residual():
    return WithLoss(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[Residual(32) for _ in range(8)],
                                  nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))), images(48)


def mlp(held=False):
    return WithLoss(nn.Sequential(*[nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.GELU())
                                    for _ in range(6)], nn.Linear(512, 100)), held), rows(512)


def wide():
    return WithLoss(nn.Sequential(*[nn.Linear(6144, 6144, device="cuda") for _ in range(8)])), rows(6144)


def gpt(length=256, vocabulary=8192, layers=6):
    return Gpt(vocabulary, length=length, layers=layers), words(length, vocabulary)


def encoder():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.1), 6,
                                enable_nested_tensor=False)
    return WithLoss(net), lambda batch: torch.randn(batch, 128, 256, device="cuda")


def lstm():
    return Lstm(), words(128, 4096)


class EightBitAdamW(torch.optim.Optimizer):
    """Keeps what bitsandbytes' AdamW8bit keeps: a byte for each of two moments, and a scale of each 256 of them."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or self.state[p]:
                    continue
                bits = torch.uint8 if p.numel() >= 4096 else torch.float32
                for name in ("state1", "state2"):
                    self.state[p][name] = torch.zeros_like(p, dtype=bits)
                    self.state[p]["max" + name] = torch.zeros(p.numel() // 256 + 1, device=p.device)


def make_optimizer(name, parameters):
    if "sgd" in FIXES:
        return torch.optim.SGD(parameters, 0.1)
    if "adam_8bit" in FIXES:
        return EightBitAdamW(parameters)
    if name == "sgd":
        return torch.optim.SGD(parameters, 0.1)
    if name == "momentum":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    if "fused_optimizer" in FIXES:
        return torch.optim.AdamW(parameters, fused=True)
    return torch.optim.AdamW(parameters, foreach="foreach_off" not in FIXES)


def resume(net, optimizer):
    """State as it comes from a file."""
    state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p, device="cpu"),
                 "exp_avg_sq": torch.zeros_like(p, device="cpu")} for i, p in enumerate(net.parameters())}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def train(model, batch, fixes=(), modules=(), arguments=None, optimizer="adamw", steps=3, autocast=False, bf16=False,
          checkpointed=False, keep_gradients=False, zero_late=False, resumed=False, parts=1, frozen=0, warm=0):
    """Trains for some steps, changed by `fixes` (ids of the report). warm: so many steps with a small batch come first."""
    FIXES.clear()
    FIXES.update(fixes)
    torch.manual_seed(0)
    net, data = globals()[model](**(arguments or {}))
    net.cuda()
    if bf16:
        net.to(torch.bfloat16)
    for p in list(net.parameters())[:frozen]:
        p.requires_grad_(False)
    if "half_batch" in FIXES or "accumulate_2" in FIXES:
        batch = batch // 2
        parts *= 2 if "accumulate_2" in FIXES else 1
    if "relu_in_place" in FIXES:
        for module in net.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True
    chosen = list(modules) if "checkpoint" in FIXES else []
    if checkpointed:
        chosen += [path for path, module in net.named_modules() if isinstance(module, (Layer, Residual))]
    for path in chosen:
        module = net.get_submodule(path)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    stepper = make_optimizer(optimizer, [p for p in net.parameters()])
    if resumed and not FIXES & {"sgd", "adam_8bit"}:
        resume(net, stepper)
    dtype = "bf16" if "autocast_bf16" in FIXES or autocast else ""
    cast = torch.autocast("cuda", torch.bfloat16) if dtype else contextlib.nullcontext()
    saved = torch.autograd.graph.save_on_cpu() if "offload_activations" in FIXES else contextlib.nullcontext()
    none = not keep_gradients or "set_to_none" in FIXES
    for step in range(steps + warm):
        if not zero_late:
            stepper.zero_grad(set_to_none=none)
        for part in range(parts):
            x = data(max(1, batch // 8) if step < warm else batch)
            if bf16 and x.is_floating_point():
                x = x.bfloat16()
            with cast, saved:
                result = net(x)
            loss = result[0] if isinstance(result, tuple) else result
            if zero_late and part == 0:
                stepper.zero_grad(set_to_none=none)
            (loss / parts).backward()
        stepper.step()
    return {"steps": steps + warm}
