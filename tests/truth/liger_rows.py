"""The peaks of Liger-Kernel's published benchmark, measured again: our own programs of what each row says that it ran.

    oomdiag run --device a100-80 -- python liger_rows.py ROWS.json RELEASES

Prints a line of JSON per row: the median of the peaks, in MiB, or why it could not be run. An operator has a process of its own,
as it has in the published runs, and RELEASES/<release> has the liger-kernel of its rows. A published process measures the speed of all
its rows before their memory; where tensors live on from one measurement to the next (liger_processes.csv), ours does so too.
"""
import gc
import importlib
import itertools
import json
import math
import os
import signal
import statistics
import sys
import traceback
import types

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

REPETITIONS = 5  # the first may differ, as gradients do not exist yet; the published median is one of ten
MIB = 1 << 20
IGNORED = -100  # a target that is no token
LONGEST = 1800  # seconds for an operator's rows
BENCHMARK_CACHE = 256 * MIB  # which triton.testing.do_bench writes to between two runs, so that nothing is in the GPU's cache


def liger(module, name):
    """From the release of the rows. Its packages' own __init__ are left out: they patch models of a transformers of their time."""
    package = module.split(".")[0]
    if f"liger_kernel.{package}" not in sys.modules:
        bare = types.ModuleType(f"liger_kernel.{package}")
        bare.__path__ = [os.path.join(path, package) for path in importlib.import_module("liger_kernel").__path__]
        sys.modules[bare.__name__] = bare
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)


def randn(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def ids(high, *shape):
    return torch.randint(high, shape, device="cuda")


def holding(things, step):
    """A step whose peak has also what the published program keeps and does not use."""
    step.things = things
    return step


def back(forward, gradient=None, retain=False):
    """A step: forward, then backward from the gradient of its result."""
    def step():
        y = forward()
        y.backward(gradient(y) if gradient else None, retain_graph=retain)
    return step


def once(mode, forward, gradient=None):
    """A step of one mode, forward alone or both, whose graph backward frees."""
    return forward if mode == "forward" else back(forward, gradient)


def only(mode, forward, gradient):
    """A step of one mode: forward alone, backward alone, or both."""
    if mode == "forward":
        return forward
    if mode == "full":
        return back(forward, gradient, retain=True)
    y = forward()
    do = gradient(y)
    return lambda: y.backward(do, retain_graph=True)


# Each of these takes the row's config, its size, who computes, and its mode, and returns the step that is measured. What is not
# used by the row's provider is made all the same where the published program makes it: it is part of the peak.

def cross_entropy(c, vocabulary, provider, mode):
    loss = liger("transformers.cross_entropy", "LigerCrossEntropyLoss")() if provider == "liger" else nn.CrossEntropyLoss()
    x, target = randn(c.B * c.T, vocabulary), ids(vocabulary, c.B * c.T, 1).squeeze(1)
    return back(lambda: loss(x, target))


def embedding(c, vocabulary, provider, mode):
    torchs = nn.Embedding(vocabulary, c.D).cuda().to(c.dtype)
    ligers = liger("transformers.experimental.embedding", "LigerEmbedding")(vocabulary, c.D).cuda().to(c.dtype)
    layer = {"liger": ligers, "huggingface": torchs, "torch_compile": torch.compile(torchs)}[provider]
    tokens = ids(vocabulary, c.B, c.T)
    return holding((torchs, ligers), once(mode, lambda: layer(tokens), torch.randn_like))


def fused_linear_cross_entropy(c, tokens, provider, mode):
    heads = [nn.Linear(c.H, c.V, bias=False, dtype=c.dtype).cuda() for _ in range(2)]
    fused, plain = liger("transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")(), nn.CrossEntropyLoss()
    x, target = randn(tokens, c.H, dtype=c.dtype), ids(c.V, tokens, 1).squeeze(1)
    if provider == "liger":
        return back(lambda: fused(heads[1].weight, x, target))
    return back(lambda: plain(heads[0](x), target))


class GatedMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.act_fn = F.silu if c.hidden_act == "silu" else lambda x: F.gelu(x, approximate="tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Tiled(torch.autograd.Function):
    """DeepSpeed's TiledMLP: the tiles' activations are computed again in backward, one tile at a time."""

    @staticmethod
    def forward(ctx, mlp, x, tiles):
        ctx.mlp, ctx.tiles = mlp, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([mlp(tile) for tile in x.chunk(tiles, dim=-2)], dim=-2)

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        x = saved.detach().view(-1, saved.shape[-1]).requires_grad_()
        x_gradient = torch.zeros_like(x)
        gradients = gradient.view(-1, saved.shape[-1]).chunk(ctx.tiles)
        for tile, place, above in zip(x.chunk(ctx.tiles), x_gradient.chunk(ctx.tiles), gradients):
            tile = tile.detach().requires_grad_()
            tile.grad = place
            with torch.enable_grad():
                y = ctx.mlp(tile)
            torch.autograd.backward(y, above)
        return None, x_gradient.view(saved.shape), None


def gated_mlp(kind):
    def operator(c, length, provider, mode):
        x = randn(c.bsz if hasattr(c, "bsz") else c.B, length, c.hidden_size, dtype=c.dtype)
        if provider == "liger":
            layer = liger(f"transformers.{kind.lower()}", f"Liger{kind}MLP")(config=c)
        elif provider == "liger_tiled":
            layer = liger("transformers.tiled_mlp", f"LigerTiled{kind}MLP")(config=c, num_shards=c.num_shards)
        else:
            layer = GatedMlp(c)
        layer = layer.cuda().to(c.dtype)
        tiled = provider == "deepspeed_tiled"
        return only(mode, (lambda: Tiled.apply(layer, x, c.num_shards)) if tiled else (lambda: layer(x)), torch.randn_like)
    return operator


def normalised(torchs, ligers, provider, x):
    """Both layers exist; the gradient is made before."""
    dy = torch.randn_like(x)
    x.requires_grad_()
    layer = ligers if provider == "liger" else torchs

    def step():
        y = layer(x)
        y.backward(dy, retain_graph=True)
    return holding((torchs, ligers), step)


def layer_norm(c, hidden, provider, mode):
    ligers = liger("transformers.layer_norm", "LigerLayerNorm")(hidden_size=hidden).cuda()
    torchs = nn.LayerNorm(hidden, eps=c.eps).cuda()
    return normalised(torchs, ligers, provider, randn(c.M, hidden, dtype=c.dtype, grad=False))


def group_norm(c, channels, provider, mode):
    groups = channels // c.channels_per_group
    ligers = liger("transformers.group_norm", "LigerGroupNorm")(num_channels=channels, num_groups=groups, eps=c.eps).cuda()
    torchs = nn.GroupNorm(groups, channels, eps=c.eps).cuda()
    return normalised(torchs, ligers, provider, randn(c.M, channels, c.H, dtype=c.dtype, grad=False))


class RmsNorm(nn.Module):
    """As transformers writes it: in float32, and the weight at the end; with a residual it is added before."""

    def __init__(self, hidden, eps, inner=None):
        super().__init__()
        self.weight, self.eps, self.inner = nn.Parameter(torch.ones(hidden)), eps, inner

    def forward(self, x, residual=None):
        kind = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            residual = residual.to(torch.float32)
            x = residual = x + residual
        if self.inner:
            x = self.inner(x)
        else:
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(variance + self.eps)
        y = self.weight * x.to(kind)
        return y if residual is None else (y, residual.to(kind))


def rms_norm(c, hidden, provider, mode):
    ligers = liger("transformers.rms_norm", "LigerRMSNorm")(hidden_size=hidden, eps=c.eps).cuda()
    return normalised(RmsNorm(hidden, c.eps).cuda(), ligers, provider, randn(c.M, hidden, dtype=c.dtype, grad=False))


def fused_add_rms_norm(c, hidden, provider, mode):
    norm = liger("transformers.rms_norm", "LigerRMSNorm")
    layers = {"liger_fused_add_rms_norm": liger("transformers.fused_add_rms_norm", "LigerFusedAddRMSNorm")(hidden, c.eps).cuda(),
              "huggingface": RmsNorm(hidden, c.eps).cuda(),
              "liger_rms_norm": RmsNorm(hidden, c.eps, norm(hidden, c.eps, in_place=False)).cuda()}
    x, residual = randn(c.M, hidden, dtype=c.dtype, grad=False), randn(c.M, hidden, dtype=c.dtype, grad=False)
    gradients = torch.randn_like(x), torch.randn_like(residual)
    x.requires_grad_(), residual.requires_grad_()

    def step():
        y, sums = layers[provider](x, residual)
        torch.autograd.backward((y, sums), gradients)
    return step


def angles(positions, head):
    """Of rotary embeddings: [1, positions, head / 2], as a product of matrices."""
    rates = 1.0 / 10000 ** (torch.arange(0, head, 2, device="cuda").float() / head)
    places = torch.arange(positions, device="cuda")[None]
    return (rates[None, :, None].expand(1, -1, 1) @ places[:, None, :].float()).transpose(1, 2), rates, places


def rotated(x):
    low, high = x[..., :x.shape[-1] // 2], x[..., x.shape[-1] // 2:]  # in this order, which is that of backward
    return torch.cat((-high, low), dim=-1)


def heads_of(c, x):
    hidden, length = getattr(c, "hidden_size", x), getattr(c, "seq_len", x)
    head = hidden // c.num_q_heads
    return length, head, [randn(1, length, heads, head, dtype=c.dtype) for heads in (c.num_q_heads, c.num_kv_heads)]


def rope(c, size, provider, mode):
    length, head, both = heads_of(c, size)
    q, k = (x.transpose(1, 2) for x in both)
    gradients = torch.randn_like(q), torch.randn_like(k)
    turns, *rest = angles(length, head)
    turns = torch.cat((turns, turns), dim=-1)
    cos, sin = turns.cos().to(c.dtype), turns.sin().to(c.dtype)
    del turns
    apply = liger("transformers.rope", "liger_rotary_pos_emb")

    def step():
        if provider == "liger":
            out = apply(q, k, cos, sin, rest[1])
        else:
            wide, high = cos.unsqueeze(1), sin.unsqueeze(1)
            out = q * wide + rotated(q) * high, k * wide + rotated(k) * high
        torch.autograd.grad(out, (q, k), gradients, allow_unused=True, retain_graph=True)
    return holding(rest, step)


def turned(q, k, turns):
    """Both as complex numbers, which live until it returns, as what they come to in float32 does."""
    a, b = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (q, k))
    long_a, long_b = (torch.view_as_real(x * turns[:, :, None, :]).flatten(3) for x in (a, b))
    return long_a.type_as(q), long_b.type_as(k)


def llama4_rope(c, size, provider, mode):
    length, head, (q, k) = heads_of(c, size)
    gradients = torch.randn_like(q), torch.randn_like(k)
    turns, *rest = angles(length, head)
    turns = torch.polar(torch.ones_like(turns), turns)
    turns = turns * 1.0  # the scaling of attention
    apply = liger("transformers.llama4_rope", "liger_llama4_text_rotary_pos_emb")

    def step():
        if provider == "liger":
            out = apply(q, k, turns)
        else:
            out = turned(q, k, turns)
        torch.autograd.grad(out, (q, k), gradients, allow_unused=True, retain_graph=True)
    return holding(rest, step)


def two_distributions(c, vocabulary, second):
    x = randn(c.B * c.T, vocabulary).log_softmax(dim=-1)
    return x, second(randn(c.B * c.T, vocabulary, grad=False), dim=-1)


def kl_div(c, vocabulary, provider, mode):
    loss = (liger("transformers.kl_div", "LigerKLDIVLoss") if provider == "liger" else nn.KLDivLoss)(reduction="batchmean")
    x, target = two_distributions(c, vocabulary, torch.softmax)
    return back(lambda: loss(x, target), retain=True)


def torch_jsd(q, p, beta=0.5, reduction="batchmean"):
    """The Jensen-Shannon divergence of two logarithms of probabilities."""
    kl = nn.KLDivLoss(reduction=reduction, log_target=True)
    whole = (lambda x: x.sum(dim=-1)) if reduction == "none" else (lambda x: x)
    m = torch.lerp(torch.exp(p), torch.exp(q), beta)
    loss = beta * whole(kl(torch.log(m), p)) + (1 - beta) * whole(kl(torch.log(m), q))
    return (loss / q.shape[0]).sum() if reduction == "none" else loss


def jsd(c, size, provider, mode):
    if hasattr(c, "vocab_size"):  # the later programs: sizes are tokens
        x = randn(size, c.vocab_size).log_softmax(dim=-1)
        target = randn(size, c.vocab_size, grad=False).log_softmax(dim=-1)
        loss = liger("transformers.jsd", "LigerJSD")() if provider == "liger" else lambda q, p: torch_jsd(q, p, reduction="none")
        return back(lambda: loss(x, target), torch.randn_like, retain=True)
    loss = liger("transformers.jsd", "LigerJSD")() if provider == "liger" else torch_jsd
    x, target = two_distributions(c, size, torch.log_softmax)
    return back(lambda: loss(x, target), retain=True)


def fused_linear_jsd(c, tokens, provider, mode):
    student, teacher = (nn.Parameter(torch.rand(c.V, c.H, device="cuda", dtype=c.dtype)) for _ in range(2))
    fused = liger("transformers.fused_linear_jsd", "LigerFusedLinearJSD")(0.5, 1.0)
    x = torch.rand(tokens, c.H, dtype=c.dtype, device="cuda", requires_grad=True)
    known = torch.rand(tokens, c.H, dtype=c.dtype, device="cuda")

    def plain():
        logits, wanted = F.linear(x, student), F.linear(known, teacher)
        q, p = torch.log_softmax(logits / 1.0, dim=-1), torch.log_softmax(wanted / 1.0, dim=-1)
        return torch_jsd(q.float(), p.float()).to(c.dtype)
    return back((lambda: fused(x, student, known, teacher)) if provider == "liger" else plain)


def tvd(c, vocabulary, provider, mode):
    x = randn(c.B * c.T, vocabulary).softmax(dim=-1)
    target = randn(c.B * c.T, vocabulary, grad=False).softmax(dim=-1)
    loss = liger("transformers.tvd", "LigerTVDLoss")(reduction="batchmean")

    def plain():
        distance = torch.abs(x - target) / 2.0
        return torch.sum(distance) / x.size(0)
    return back((lambda: loss(x, target)) if provider == "liger" else plain, retain=True)


def plain_sparsemax(x):
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    count = torch.arange(1, x.shape[-1] + 1, device="cuda", dtype=x.dtype).view(1, -1)
    bound = 1 + count * ordered
    support = bound > sums
    k = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    tau = (total - 1) / k
    return torch.clamp(x - tau, min=0)


def sparsemax(c, vocabulary, provider, mode):
    ligers = liger("transformers.sparsemax", "LigerSparsemax")(dim=-1)
    return normalised(plain_sparsemax, ligers, provider, randn(c.B * c.T, vocabulary, dtype=c.dtype, grad=False))


def elementwise(plain, module, name):
    """The published programs take the size for the whole shape."""
    def operator(c, size, provider, mode):
        layer = liger(module, name)() if provider == "liger" else plain
        x = randn(size, dtype=c.dtype)
        return only(mode, lambda: layer(x), torch.ones_like)
    return operator


def multi_token_attention(sparse):
    def operator(c, length, provider, mode):
        layer = liger("transformers.multi_token_attention", "LigerMultiTokenAttention")
        made = layer(in_channels=c.C_in, out_channels=c.C_out, kernel_size=c.K, stride=1, padding=c.K // 2, dilation=1,
                     groups=c.groups, bias=c.bias, **({"sparse": True} if sparse else {})).cuda().to(c.dtype)
        weight, bias = (nn.Parameter(torch.empty_like(p)) for p in (made.weight, made.bias))

        def plain(scores):
            mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device="cuda")).view(1, 1, length, length)
            # float32 is what the sparse one computes in
            low = torch.tensor(-1e9, device="cuda", dtype=scores.dtype)
            zero = torch.tensor(0.0, device="cuda", dtype=scores.dtype)
            scores = scores.masked_fill(~mask, low)
            if sparse:
                probabilities = sparse_probabilities(scores)
            else:
                probabilities = F.softmax(scores, dim=-1)
            y = F.conv2d(probabilities, weight, bias, stride=1, padding=c.K // 2, groups=c.groups)
            return y.masked_fill(~mask, zero)
        return normalised(plain, made, provider, randn(c.B, c.C_in, length, length, dtype=c.dtype, grad=False))
    return operator


def sparse_probabilities(z):
    ordered, _ = torch.sort(z, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    count = torch.arange(1, z.shape[-1] + 1, device="cuda", dtype=z.dtype).view(1, 1, 1, -1)
    positive = ordered > -1e8
    condition = (1 + count * ordered > sums) & positive
    k = torch.sum(condition, dim=-1, keepdim=True)
    at_least = torch.max(k, torch.ones_like(k))
    last = torch.gather(sums, dim=-1, index=at_least.long() - 1)
    tau = (last - 1) / at_least.to(z.dtype)
    tau = torch.where(k == 0, torch.full_like(tau, math.inf), tau)
    return torch.clamp(z - tau, min=0)


class NeighborhoodAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4))

    def forward(self, x):
        batch, length, hidden = x.shape
        split = lambda y: y.view(batch, length, self.heads, -1).transpose(1, 2)
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = split(query), split(key), split(value)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (hidden // self.heads) ** -0.5
        # Which of its bytes are set makes no difference to the memory.
        mask = torch.zeros(length, length, device="cuda", dtype=torch.bool)
        scores = scores.masked_fill(~mask, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        y = torch.matmul(weights, value)
        y = y.transpose(1, 2).contiguous().view(batch, length, hidden)
        return self.out_proj(y)


def fused_neighborhood_attention(c, length, provider, mode):
    layer = liger("transformers.fused_neighborhood_attention", "LigerFusedNeighborhoodAttention")
    ligers = layer(hidden_size=c.hidden_size, num_heads=c.num_heads, kernel_size=c.kernel_size, dilation=c.dilation, bias=c.bias,
                   dropout=0.0).cuda().to(c.dtype)
    torchs = NeighborhoodAttention(c).cuda().to(c.dtype)
    return normalised(torchs, ligers, provider, randn(c.batch_size, length, c.hidden_size, dtype=c.dtype, grad=False))


def log_probabilities(logits, target, ignored=IGNORED):
    """Mean over the tokens of each sequence, as trl computes it."""
    mask = target != ignored
    target = torch.where(target == ignored, 0, target)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=target.unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1) / mask.sum(-1)


def preference(ligers_name, plain_loss):
    """A loss of chosen and rejected sequences, from the last hidden states on: the whole logits, or in chunks. The rows of 4096 tokens
    are of an earlier program, whose logits stayed bfloat16: each token takes half of what it takes in those of 1024."""
    def operator(c, batch, provider, mode):
        heads = [nn.Linear(c.H, c.V, bias=False, dtype=c.dtype).cuda() for _ in range(2)]
        x, target = randn(batch, c.T, c.H, dtype=c.dtype), ids(c.V, batch, c.T)
        function = liger(f"chunked_loss.{ligers_name.lower()}_loss", f"LigerFusedLinear{ligers_name}Function")

        def chunked():
            out = function.apply(x, heads[1].weight, target)
            return out[0] if isinstance(out, tuple) else out

        def plain():
            half = batch // 2
            logits = x @ heads[0].weight.t()
            logits = logits if c.T == 4096 else logits.float()
            nll = nn.CrossEntropyLoss()(logits[:half].view(-1, c.V), target[:half].view(-1))
            each = log_probabilities(logits, target)
            return nll - plain_loss(each[:half], each[half:]).mean()
        return holding(heads, once(mode, chunked if provider == "liger" else plain))
    return operator


def odds_ratio(chosen, rejected):
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * F.logsigmoid(odds)


def contrast(chosen, rejected):
    logits = chosen - rejected
    return F.logsigmoid(0.1 * logits) * 1.0 + F.logsigmoid(-0.1 * logits) * 0.0


def distilled(ligers_name, soft_loss, with_biases):
    """The student has half of the teacher's width. Both providers' heads and inputs exist."""
    def operator(c, tokens, provider, mode):
        heads = [[nn.Linear(width, c.V, bias=False, dtype=c.dtype).cuda() for width in (c.H // 2, c.H)] for _ in range(2)]
        made = torch.rand(tokens, c.H // 2, device="cuda", dtype=c.dtype)
        inputs = [made.detach().clone().requires_grad_() for _ in range(2)]
        known, target = torch.rand(tokens, c.H, device="cuda", dtype=c.dtype), ids(c.V, tokens)
        function = liger(f"chunked_loss.{ligers_name[0]}", f"LigerFusedLinear{ligers_name[1]}Function")
        biases = (None, None) if with_biases else ()

        def chunked():
            (student, teacher), x = heads[1], inputs[0]
            out = function.apply(x, student.weight, known, teacher.weight, target, *biases, 0.5, 0.5)
            return out[0] if isinstance(out, tuple) else out

        def plain():
            (student, teacher), x = heads[0], inputs[1]
            logits = (x @ student.weight.t()).float()
            with torch.no_grad():
                wanted_logits = (known @ teacher.weight.t()).float()
            hard = nn.CrossEntropyLoss()(logits, target)
            logits /= 1.0
            wanted_logits /= 1.0
            return 0.5 * hard + 0.5 * soft_loss(logits, wanted_logits)
        return holding((heads, made), back(chunked if provider == "liger" else plain))
    return operator


def divergence(logits, wanted, beta=0.5):
    q, p = F.log_softmax(logits, dim=-1), F.log_softmax(wanted, dim=-1)
    log_mean = (beta * q.exp() + (1 - beta) * p.exp()).log()
    student = F.kl_div(log_mean, q, reduction="batchmean", log_target=True)
    teacher = F.kl_div(log_mean, p, reduction="batchmean", log_target=True)
    return beta * teacher + (1 - beta) * student


def cosine(logits, wanted):
    a, b = F.normalize(logits, p=2, dim=-1), F.normalize(wanted, p=2, dim=-1)
    return (1.0 * (1 - F.cosine_similarity(a, b, dim=-1))).mean()


def grpo(c, batch, provider, mode):
    heads = [[nn.Linear(c.H, c.V, bias=False, dtype=c.dtype).cuda() for _ in range(2)] for _ in range(2)]
    x, chosen = randn(batch, c.T, c.H, dtype=c.dtype), ids(c.V, batch, c.T)
    mask, advantages = torch.ones(batch, c.T, device="cuda"), randn(batch, dtype=c.dtype, grad=False)
    reference = randn(batch, c.T, c.H, dtype=c.dtype, grad=False)
    fused = liger("chunked_loss.grpo_loss", "LigerFusedLinearGRPOLoss")(
        beta=0.1, epsilon_low=0.2, epsilon_high=0.2, temperature=1.0, use_ref_model=True, compiled=True, loss_type="bnpo",
        max_completion_length=None, importance_sampling_level=c.importance_sampling_level)

    def chunked():
        head, known = heads[1]
        return fused(x, head.weight, chosen, mask, advantages, None, None, None, reference, known.weight, None)[0]

    def plain():
        head, known = heads[0]
        logits = x @ head.weight.t()
        # All of these live until the function returns.
        log_probs = F.log_softmax(logits.float(), dim=-1)
        each = log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            wanted = reference @ known.weight.t()
            wanted_log_probs = F.log_softmax(wanted.float(), dim=-1)
            known_each = wanted_log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        ratio = each - each.detach()
        if c.importance_sampling_level == "sequence":
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        weight = torch.exp(ratio)
        loss = -torch.min(weight * advantages.unsqueeze(1), torch.clamp(weight, 0.8, 1.2) * advantages.unsqueeze(1))
        loss = loss + 0.1 * (torch.exp(known_each - each) - (known_each - each) - 1.0)
        return (loss * mask).sum() / torch.clamp(mask.sum(), min=1.0)
    return holding(heads, back(chunked if provider == "liger" else plain))

def kto(c, batch, provider, mode):
    """Chosen and rejected sequences as labels say, of which every other is chosen here."""
    heads = [[nn.Linear(c.H, c.V, bias=c.bias, dtype=c.dtype).cuda() for _ in range(2)] for _ in range(2)]
    fused = liger("chunked_loss.kto_loss", "LigerFusedLinearKTOLoss")(ignore_index=c.ignore_index, beta=c.beta, use_ref_model=True)
    x, target = randn(batch, c.T, c.H, dtype=c.dtype, grad=False), ids(c.V, batch, c.T)
    chosen, kl = (torch.arange(batch) % 2 == 0).cuda(), randn(1, dtype=c.dtype, grad=False)
    known = randn(batch, c.T, c.H, dtype=c.dtype, grad=False)

    def chunked():
        head, reference = heads[1]
        out = fused(_input=x, lin_weight=head.weight, target=target, preference_labels=chosen, bias=head.bias, ref_input=known,
                    ref_weight=reference.weight, ref_bias=reference.bias, kl=kl)
        return out[0] if isinstance(out, tuple) else out

    def known_each():
        with torch.no_grad():
            logits = known @ heads[0][1].weight.t()
            logits = logits + heads[0][1].bias
            each = log_probabilities(logits, target, c.ignore_index)
            return each[chosen], each[~chosen]

    def logits_and_each():
        logits = x @ heads[0][0].weight.t()
        logits = logits + heads[0][0].bias
        wide = logits.float()
        each = log_probabilities(wide, target, c.ignore_index)
        return each[chosen], each[~chosen], wide[chosen], wide[~chosen]

    def plain():
        good, bad, *logits = logits_and_each()
        known_good, known_bad = known_each()
        ratios = good - known_good, bad - known_bad
        losses = torch.cat((1 - torch.sigmoid(c.beta * (ratios[0] - kl)), 1 - torch.sigmoid(c.beta * (kl - ratios[1]))))
        sums = [x.detach().sum() for x in (good, bad, *logits)]
        return losses.mean() + 0.0 * sums[0]
    return holding(heads, back(chunked if provider == "liger" else plain))


def experts_of(tokens, experts, k):
    """Each token's experts, drawn by the host; and of each expert the tokens that have it, and as which of their choices."""
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(42)).topk(k).indices
    return chosen, [(chosen == expert).nonzero() for expert in range(experts)]


def moe_by_expert(x, gates, downs, chosen, weights, places):
    """One expert after the other, as transformers' Mixtral has it. A kernel would say which tokens an expert has: the host does here."""
    y = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen.long(), num_classes=gates.shape[0])
        mask = mask.permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0)
    for expert, place in enumerate(places):
        token, position = place.cuda().unbind(1)
        part = x[token]
        gate, up = F.linear(part, gates[expert]).chunk(2, dim=-1)
        part = F.silu(gate) * up
        part = F.linear(part, downs[expert])
        part = part * weights[token, position, None]
        y.index_add_(0, token, part.to(y.dtype))
    del hit
    return y


def fused_moe(c, size, provider, mode):
    tokens, experts = (size, c.E) if c.sweep_dim == "T" else (c.T, size)
    x = randn(tokens, c.H, dtype=c.dtype)
    gates = randn(experts, 2 * c.intermediate_dim, c.H, dtype=c.dtype) * 0.02
    downs = randn(experts, c.H, c.intermediate_dim, dtype=c.dtype) * 0.02
    chosen, places = experts_of(tokens, experts, c.K)
    logits, chosen = randn(tokens, experts, grad=False), chosen.to(torch.int32).cuda()
    weights = torch.softmax(torch.gather(logits, 1, chosen.long()), dim=-1).to(c.dtype).requires_grad_()
    del logits
    fused = liger("ops.fused_moe", "LigerFusedMoEFunction")
    for kernel in vars(importlib.import_module("liger_kernel.ops.fused_moe")).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]  # the fastest one takes no other memory, and each takes seconds to compile
    a = randn(8, 8, dtype=c.dtype)
    (a @ a).sum().backward()  # the published process ran the plain one before, from which on it has two workspaces of cuBLAS
    ours = lambda: moe_by_expert(x, gates, downs, chosen, weights, places)
    return only(mode, (lambda: fused.apply(x, gates, downs, chosen, weights)) if provider == "liger" else ours, torch.randn_like)


def megatrons_group():
    """Megatron's operators ask for the ranks that share a tensor: this process alone."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def megatrons(module, name):
    return getattr(importlib.import_module(f"megatron.core.{module}"), name)


def summed(forward, x=None):
    """A step whose loss is the sum of its result; without gradients from before, where the published program has none."""
    def step():
        if x is not None:
            x.grad = None
        y = forward()
        y.sum().backward()
    return step


def megatron_cross_entropy(c, vocabulary, provider, mode):
    sharded = hasattr(c, "TP")  # the later programs, which may have shards of the vocabulary
    x, target = randn(c.S, c.B, vocabulary, dtype=torch.bfloat16), ids(vocabulary, c.S, c.B)
    if provider == "liger" and sharded:
        loss = liger("transformers.vocab_parallel_cross_entropy", "LigerVocabParallelCrossEntropy")()
        group = megatrons_group()
        forward = lambda: loss(x, target, tp_group=group)
    elif provider == "liger":
        loss = liger("transformers.cross_entropy", "LigerCrossEntropyLoss")(reduction="none")
        forward = lambda: loss(x.reshape(-1, vocabulary), target.reshape(-1)).reshape(c.S, c.B)
    elif provider == "torch":
        forward = lambda: F.cross_entropy(x.reshape(-1, vocabulary).float(), target.reshape(-1), reduction="none").reshape(c.S, c.B)
    elif provider == "megatron-unfused":
        megatrons_group()
        unfused = megatrons("tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")
        forward = lambda: unfused(x, target)
    else:
        group, fused = megatrons_group(), megatrons("fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")
        forward = lambda: fused(x, target, group)
    return summed(forward, x if sharded else None)


def megatron_rms_norm(c, hidden, provider, mode):
    if provider == "liger":
        layer = liger("transformers.rms_norm", "LigerRMSNorm")(hidden, 1e-6, in_place=False)
    else:
        layer = nn.RMSNorm(hidden, eps=1e-6)  # which is also what Megatron's wrapper makes
    layer, x = layer.cuda().to(torch.bfloat16), randn(c.S, c.B, hidden, dtype=torch.bfloat16)
    return summed(lambda: layer(x))


def megatron_swiglu(c, width, provider, mode):
    if provider == "megatron":
        swiglu = megatrons("fusions.fused_bias_swiglu", "bias_swiglu_impl")
        forward = lambda x: swiglu(x, None, False, False)
    elif provider == "torch":
        def forward(x):
            gate, up = torch.chunk(x, 2, -1)
            return F.silu(gate) * up
    else:
        fused = liger("ops.swiglu", "LigerFusedGateUpSiLUMulFunction")
        forward = lambda x: fused.apply(x.view(-1, x.shape[-1]), provider == "liger_in_place").view(c.S, c.B, -1)
    x = randn(c.S, c.B, 2 * width, dtype=torch.bfloat16)
    return summed(lambda: forward(x), x)


OPERATORS = {
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "distill_cosine_loss": distilled(("cosine_similarity_loss", "CosineSimilarity"), cosine, with_biases=True),
    "distill_jsd_loss": distilled(("jsd_loss", "JSD"), divergence, with_biases=False),
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_linear_cpo_loss": preference("CPO", contrast),
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_grpo_loss_sequence": grpo,
    "fused_linear_grpo_loss_token": grpo,
    "fused_linear_jsd": fused_linear_jsd,
    "fused_linear_orpo_loss": preference("ORPO", odds_ratio),
    "fused_linear_simpo_loss": preference("SimPO", contrast),
    "fused_moe": fused_moe,
    "fused_neighborhood_attention": fused_neighborhood_attention,
    "geglu": gated_mlp("GEGLU"),
    "group_norm": group_norm,
    "jsd": jsd,
    "kl_div": kl_div,
    "kto_loss": kto,
    "layer_norm": layer_norm,
    "llama4_rope": llama4_rope,
    "megatron_cross_entropy": megatron_cross_entropy,
    "megatron_rms_norm": megatron_rms_norm,
    "megatron_swiglu": megatron_swiglu,
    "multi_token_attention": multi_token_attention(sparse=False),
    "relu_squared": elementwise(lambda x: torch.square(F.relu(x)), "transformers.relu_squared", "LigerReLUSquared"),
    "rms_norm": rms_norm,
    "rope": rope,
    "softmax": elementwise(nn.Softmax(dim=-1), "transformers.softmax", "LigerSoftmax"),
    "sparse_multi_token_attention": multi_token_attention(sparse=True),
    "sparsemax": sparsemax,
    "swiglu": gated_mlp("SwiGLU"),
    "tiled_geglu": gated_mlp("GEGLU"),
    "tiled_swiglu": gated_mlp("SwiGLU"),
    "tvd": tvd,
}


def config(text):
    """The words of a row, as B=8 dtype=bfloat16, as an object that also serves for a transformers' config."""
    def value(word):
        if hasattr(torch, word):
            return getattr(torch, word)
        try:
            return json.loads(word)
        except json.JSONDecodeError:
            return word
    pairs = (pair.split("=", 1) for pair in text.split())
    return types.SimpleNamespace(**{name: value(word) for name, word in pairs})


def peak(step):
    peaks = []
    for _ in range(REPETITIONS):
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated() / MIB)
    return statistics.median_low(peaks)


def report(row, **answer):
    print(json.dumps({"row": row["row"], **answer}), flush=True)


def step_of(row, mode):
    return OPERATORS[row["operator"]](config(row["config"]), row["size"], row["provider"], mode)


def run_row(row):
    try:
        report(row, mib=peak(step_of(row, row["mode"])))
    except Exception as error:  # one row that cannot be run does not end the others
        traceback.print_exc()
        report(row, error=f"{type(error).__name__}: {error}".splitlines()[0])


def run_alone(rows):
    torch._dynamo.mark_dynamic = torch._dynamo.maybe_mark_dynamic  # the losses mark sizes that they fix, which only torch of their time let pass
    for row in rows:
        run_row(row)


def run_twice(step):
    """As much of a measurement of speed as changes what is allocated after it."""
    cache = torch.empty(BENCHMARK_CACHE, dtype=torch.int8, device="cuda")
    for _ in range(2):
        step()
    del cache


def run_together(rows):
    """The published process. Python's collector runs only before the measurements that rows[0]["collected"] counts."""
    gc.disable()
    nn.Linear.reset_parameters = nn.Embedding.reset_parameters = lambda self: None  # takes the host seconds, and nothing reads the weights
    number = itertools.count(1)

    def measured(measure, row, mode):
        if next(number) in rows[0]["collected"]:
            gc.collect()
        return measure(step_of(row, mode))

    configs = [list(group) for _, group in itertools.groupby(rows, lambda row: row["config"])]
    for these, mode in itertools.product(configs, ("forward", "full")):
        for row in these:
            measured(run_twice, row, mode)
    for row in rows:
        report(row, mib=measured(peak, row, row["mode"]))


def run_rows(rows, releases):
    """In a process of their own."""
    child = os.fork()
    if child == 0:
        signal.alarm(LONGEST)
        sys.path.insert(0, f"{releases}/{rows[0]['release']}")
        (run_together if "process" in rows[0] else run_alone)(rows)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(f"{rows[0]['operator']} ended with {status}", file=sys.stderr)


def main():
    rows, releases = json.load(open(sys.argv[1])), sys.argv[2]
    known = [row for row in rows if row["operator"] in OPERATORS]
    for row in rows:
        if row not in known:
            report(row, error="no program of ours for it yet")
    for _, group in itertools.groupby(known, lambda row: (row["commit"], row["operator"], row.get("process"))):
        run_rows(list(group), releases)


main()
