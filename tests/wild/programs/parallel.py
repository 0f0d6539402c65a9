"""A transformer of two GPUs: DDP, FSDP2 or tensor parallel."""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

kind, batch = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = nn.Sequential(*[nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0) for _ in range(8)]).cuda()
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif kind == "fsdp2":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
else:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model:
        parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)
for step in range(3):
    model(torch.randn(batch, 512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
