"""Llama 3.1 8B under FSDP2 with selective activation checkpointing, as one rank of a job: our own program of a published configuration.

    oomdiag run --meter --device h100-sxm --memory 95GiB --world-size 8 --rank 1 -- python tests/truth/llama_fsdp.py

Published for 8 and for 128 H100 of 96 GB, two sequences of 8192 tokens for each, bfloat16, without torch.compile: 5 762 and 5 605
tokens per second and GPU, 82.4 and 67.0 GiB (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf, tables 1 and 3).
Prints the peak of reserved memory in GiB.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, WORDS = 4096, 32, 32, 8, 14336, 128256
BATCH, LENGTH, STEPS = 2, 8192, 2
KEPT = (torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(heads, rotation):
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(3).type_as(heads)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.output = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.key, self.value = (linear(WIDTH, WIDTH * KEY_HEADS // HEADS) for _ in range(2))

    def forward(self, x, rotation):
        batch, length, _ = x.shape
        query = rotate(self.query(x).view(batch, length, HEADS, -1), rotation)
        key = rotate(self.key(x).view(batch, length, KEY_HEADS, -1), rotation)
        value = self.value(x).view(batch, length, KEY_HEADS, -1)
        key, value = (heads.repeat_interleave(HEADS // KEY_HEADS, dim=2) for heads in (key, value))
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def keep_every_second_product():
    """Attention and the first, third, … product of a block are kept, all else is computed again."""
    products = [0, 0]

    def policy(context, op, *_, **__):
        if op == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if products[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, rotation):
        return checkpoint(self.block, x, rotation, use_reentrant=False, context_fn=keep_every_second_product)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Checkpointed() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-5), linear(WIDTH, WORDS)

    def forward(self, tokens, rotation):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x))


def main():
    dist.init_process_group("nccl")
    options = {"mesh": init_device_mesh("cuda", (dist.get_world_size(),)),
               "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    with torch.device("meta"):
        model = Llama()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rotation = torch.zeros(LENGTH, 1, WIDTH // HEADS // 2, dtype=torch.complex64, device="cuda")
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        F.cross_entropy(model(tokens, rotation).flatten(0, 1).float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(torch.cuda.max_memory_reserved() / 2**30)


if __name__ == "__main__":
    main()
