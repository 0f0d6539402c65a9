"""What device_cases.py runs under torchrun, one process for each virtual card: `distributed_programs.py <program>…`. Each rank prints
"<program> <rank> ok" for each program that it trained."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()


def train(model, optimizer=None, steps=2, make_input=lambda: torch.randn(8, 64, device="cuda")):
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(make_input()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp():
    from torch.nn.parallel import DistributedDataParallel

    train(DistributedDataParallel(make_model(), device_ids=[RANK]))


def collectives():
    sent = torch.arange(4.0) + RANK
    gathered = [torch.empty(4, device="cuda") for _ in range(WORLD)]
    dist.all_gather(gathered, sent.cuda())
    assert all(torch.equal(one.cpu(), sent) for one in gathered), gathered
    whole = torch.empty(4 * WORLD, device="cuda")
    dist.all_gather_into_tensor(whole, sent.cuda())
    assert torch.equal(whole.cpu(), sent.repeat(WORLD)), whole
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, sent.cuda())
    assert torch.equal(part.cpu(), sent[2 * RANK : 2 * RANK + 2]), part
    received = torch.empty(4, device="cuda")
    peer = (RANK + 1) % WORLD
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent.cuda(), peer), dist.P2POp(dist.irecv, received, peer)]):
        request.wait()
    assert torch.equal(received.cpu(), sent), received
    alone = dist.new_group([RANK], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1, device="cuda"), group=alone)
    dist.broadcast(sent.cuda(), 0)
    dist.barrier()


def split():
    halves = dist.split_group(split_ranks=[[rank] for rank in range(WORLD)])
    dist.all_reduce(torch.ones(4, device="cuda"), group=halves)
    assert dist.get_world_size(halves) == 1
    everybody = dist.split_group(split_ranks=[list(range(WORLD))])
    whole = torch.empty(WORLD, device="cuda")
    dist.all_gather_into_tensor(whole, torch.ones(1).cuda(), group=everybody)
    assert whole.cpu().tolist() == [1.0] * WORLD, whole


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    train(FullyShardedDataParallel(make_model(), device_id=RANK))


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in model:
        fully_shard(layer)
    train(fully_shard(model))
    assert model[0].weight.to_local().shape[0] == 64 // WORLD


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    train(parallelize_module(make_model(), init_device_mesh("cuda", (WORLD,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def sync_batch_norm():
    from torch.nn.parallel import DistributedDataParallel

    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda())
    train(DistributedDataParallel(model, device_ids=[RANK]), make_input=lambda: torch.randn(4, 3, 16, 16, device="cuda"))


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(), device_ids=[RANK])
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))


def main():
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"{name} {RANK} ok\n", end="", flush=True)  # one write: the ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
