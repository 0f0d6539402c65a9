"""Kernels that are not ATen's: liger's for a Llama, or one in Triton."""
import sys

import torch

kind, batch = sys.argv[1], int(sys.argv[2])
if kind == "liger":
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM
    apply_liger_kernel_to_llama()
    model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
                                         vocab_size=32000)).cuda().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for step in range(3):
        tokens = torch.randint(32000, (batch, 1024), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.exit()

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


kept = []
for step in range(batch):
    x = torch.randn(64 << 20, device="cuda")
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 1024),)](x, x, out, x.numel(), BLOCK=1024)
    kept.append(out)
