"""Usage: oomdiag run --meter --device DEVICE --memory 400GiB -- python scripts/time_model/programs.py WANTED.json

Runs, on a virtual device, the programs behind published step times: each line of WANTED.json (a list of [suite, name, batch, size])
in a child of its own, whose process id it prints beside it. Kernels compute nothing there, so that each takes a second.

Needs timm for the suites timm-train and timm-infer-… (benchmark.py of timm with --amp: float16 autocast, SGD with momentum, cross-entropy).
The suites h100 and h200 are trainings of tests/truth/measured_rows.py, name "program:plan".
The suite liger is what Liger-Kernel's benchmarks compare its kernels with: plain PyTorch in bfloat16; its batch is the varied size. The suite
fused has those kernels themselves, and needs liger-kernel.
"""

import functools
import json
import os
import pathlib
import sys

STEPS = 2  # the first makes the optimizer's state


def train_timm(name, batch, size):
    import timm
    import torch

    with torch.device("cuda"):
        model = timm.create_model(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=False)
    images = torch.randn(batch, 3, size, size, device="cuda")
    labels = torch.zeros(batch, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            output = model(images)
            output = output[0] if isinstance(output, tuple) else output
            loss = torch.nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()


def infer_timm(name, batch, size, fast_norm=False, reparam=False):
    import timm
    import timm.layers
    import timm.utils
    import torch

    timm.layers.set_fast_norm(fast_norm)
    with torch.device("cuda"):
        model = timm.create_model(name)
    model = (timm.utils.reparameterize_model(model) if reparam else model).eval()
    images = torch.randn(batch, 3, size, size, device="cuda")
    marker = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))], lr=1)  # its steps are those of the meter
    for _ in range(STEPS):
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            model(images)
        marker.step()


def make_liger(name, size):
    """What a Liger benchmark of this name compares its kernel with: inputs, and what is called with them."""
    import torch
    from torch.nn import functional

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    if name in ("swiglu", "geglu"):
        batch, act = (4, functional.silu) if name == "swiglu" else (8, lambda x: functional.gelu(x, approximate="tanh"))
        gate, up, down = (torch.nn.Linear(a, b, bias=False, device="cuda", dtype=torch.bfloat16) for a, b in ((4096, 11008), (4096, 11008), (11008, 4096)))
        return (random(batch, size, 4096),), lambda x: down(act(gate(x)) * up(x))
    if name == "cross_entropy":
        labels = torch.zeros(8 * 2048, dtype=torch.long, device="cuda")
        return (random(8 * 2048, size, dtype=torch.float32),), lambda x: functional.cross_entropy(x, labels)
    if name == "fused_linear_cross_entropy":
        head = torch.nn.Linear(4096, 128256, bias=False, device="cuda", dtype=torch.bfloat16)
        labels = torch.zeros(size, dtype=torch.long, device="cuda")
        return (random(size, 4096),), lambda x: functional.cross_entropy(head(x).float(), labels)
    if name == "layer_norm":
        norm = torch.nn.LayerNorm(size, eps=1e-6, device="cuda")
        return (random(4096, size, dtype=torch.float32),), norm
    weight = torch.nn.Parameter(torch.ones(size, device="cuda", dtype=torch.bfloat16))  # rms_norm, as LlamaRMSNorm has it

    def rms_norm(x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    return (random(2048, size),), rms_norm


def make_fused(name, size):
    """Kernels in Triton, Liger's and those that torch.compile writes, of the same benchmarks."""
    import torch
    from liger_kernel import transformers as liger
    from liger_kernel.transformers.experimental.embedding import LigerEmbedding
    from transformers import LlamaConfig

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, hidden_act="gelu_pytorch_tanh" if name == "geglu" else "silu")
    labels = torch.zeros(size if name == "fused_linear_cross_entropy" else 8 * 2048, dtype=torch.long, device="cuda")
    if name in ("swiglu", "geglu"):
        mlp = (liger.LigerSwiGLUMLP if name == "swiglu" else liger.LigerGEGLUMLP)(config).to("cuda", torch.bfloat16)
        return (random(4 if name == "swiglu" else 8, size, 4096),), mlp
    if name == "cross_entropy":
        loss = liger.LigerCrossEntropyLoss()
        return (random(8 * 2048, size, dtype=torch.float32),), lambda x: loss(x, labels)
    if name == "fused_linear_cross_entropy":
        head, loss = torch.nn.Linear(4096, 128256, bias=False, device="cuda", dtype=torch.bfloat16), liger.LigerFusedLinearCrossEntropyLoss()
        return (random(size, 4096),), lambda x: loss(head.weight, x, labels)
    if name == "layer_norm":
        return (random(4096, size, dtype=torch.float32),), liger.LigerLayerNorm(size, eps=1e-6).cuda()
    if name == "rms_norm":
        return (random(2048, size),), liger.LigerRMSNorm(size).to("cuda", torch.bfloat16)
    if name == "rope":
        queries, keys = random(1, 2048, 32, size // 32).transpose(1, 2), random(1, 2048, 8, size // 32).transpose(1, 2)
        angles = random(1, 2048, size // 32).detach()
        return (queries, keys), lambda q, k: liger.liger_rotary_pos_emb(q, k, angles, angles)
    tokens, wide = torch.zeros(8, 2048, dtype=torch.long, device="cuda"), 4096
    layer = (LigerEmbedding if name == "embedding" else torch.nn.Embedding)(size, wide).cuda()
    layer = torch.compile(layer) if name == "compiled_embedding" else layer
    return (), lambda: layer(tokens)


def run_liger(name, size, _, make=make_liger):
    import torch

    kernel, mode = name.split(":")
    inputs, function = make(kernel, size)
    marker = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))], lr=1)  # its steps are those of the meter

    def run_forward():
        results = function(*inputs)
        return results if isinstance(results, tuple) else (results,)

    given = [torch.empty_like(result) for result in run_forward()]
    for _ in range(STEPS):
        results = run_forward()
        if mode == "full":
            torch.autograd.backward(results, given)
        marker.step()


def train_measured(name, *_):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/truth"))
    import measured_rows

    step = measured_rows.make_step(*name.split(":"))
    for _ in range(STEPS):
        step()


# Which options of benchmark.py a table of inference was made with is not published: with others, models that an option changes take half or
# twice the time.
SUITES = {"h100": train_measured, "h200": train_measured, "timm-train": train_timm, "liger": run_liger, "fused": functools.partial(run_liger, make=make_fused),
          "timm-infer-fast-norm": functools.partial(infer_timm, fast_norm=True),
          "timm-infer-reparam": functools.partial(infer_timm, reparam=True),
          "timm-infer-fast-norm-reparam": functools.partial(infer_timm, fast_norm=True, reparam=True)}


def run(suite, name, batch, size):
    if suite == "timm-train":
        os.environ["TIMM_FUSED_ATTN"] = "0"  # torch 1.12 had no fused attention
        import timm.layers

        timm.layers.set_fused_attn(False)
    try:
        SUITES[suite](name, batch, size)
        return 0
    except Exception as error:  # a model that this timm does not have, or cannot make as it did then
        print(f"{suite} {name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
        return 1


def main():
    import torch  # noqa: F401  (once, for all children)

    chosen = json.load(open(sys.argv[1]))
    if any(suite.startswith("timm") for suite, *_ in chosen):
        import timm  # noqa: F401
    for suite, name, batch, size in chosen:
        child = os.fork()
        if child == 0:
            sys.exit(run(suite, name, batch, size))
        _, status = os.waitpid(child, 0)
        print(json.dumps([suite, name, batch, size, child, os.waitstatus_to_exitcode(status)]), flush=True)


main()
