"""Llama 7B under FSDP with full or selective activation checkpointing, as one rank of a job: our own program of a published pair.

    oomdiag run --meter --device a100-80 --world-size 8 --rank 1 -- python tests/truth/llama_pair.py full
    oomdiag run --meter --device a100-80 --world-size 8 --rank 1 -- python tests/truth/llama_pair.py selective

Published (pytorch/torchtitan, pull request 97, the program at 2c8cec2bf with its llama_7b.toml: eight sequences of 2048 tokens): 4.9126 and
4.5459 seconds, 28.12 % and 62.0 % of the GPU allocated. The GPU is not named; what is allocated is that of an A100 of 80 GB. Prints the peak
of allocated memory in percent of the GPU.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from llama_fsdp import keep_every_second_product, linear, rotate

WIDTH, LAYERS, HEADS, HIDDEN, WORDS = 4096, 32, 32, 11008, 32000
BATCH, LENGTH, STEPS = 8, 2048, 2


class Norm(nn.Module):
    """In float32, op by op, as the published program has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.mixed = (linear(WIDTH, WIDTH) for _ in range(4))
        self.attention_norm, self.norm = Norm(), Norm()
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def attend(self, x, rotation):
        query, key, value = (layer(x).view(BATCH, LENGTH, HEADS, -1) for layer in (self.query, self.key, self.value))
        heads = (part.transpose(1, 2) for part in (rotate(query, rotation), rotate(key, rotation), value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.mixed(mixed.transpose(1, 2).reshape(BATCH * LENGTH, WIDTH))

    def forward(self, x, rotation):
        x = x + self.attend(self.attention_norm(x), rotation)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = Norm(), linear(WIDTH, WORDS)

    def forward(self, tokens, rotation):
        x = self.embedding(tokens).view(BATCH * LENGTH, WIDTH)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.output(self.norm(x).view(BATCH, LENGTH, WIDTH)).float()


def main(kept):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama()
    options = {"preserve_rng_state": False} | ({"context_fn": keep_every_second_product} if kept == "selective" else {})
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block, **options)
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}), use_orig_params=True,
                                     mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
                                     param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False), device_id=torch.cuda.current_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    rotation = torch.zeros(LENGTH, 1, WIDTH // HEADS // 2, dtype=torch.complex64, device="cuda")
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        optimizer.zero_grad()
        predicted = model(tokens, rotation)
        F.cross_entropy(predicted.flatten(0, 1), tokens.flatten(), reduction="none").mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    print(100 * torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties().total_memory)


if __name__ == "__main__":
    main(sys.argv[1])
