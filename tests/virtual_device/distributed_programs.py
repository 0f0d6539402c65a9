"""What device_cases.py runs under torchrun, one process for each virtual GPU: `distributed_programs.py <program>…`. Each rank prints
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
    everybodys = torch.stack([torch.arange(4.0) + rank for rank in range(WORLD)])
    gathered = [torch.empty(4, device="cuda") for _ in range(WORLD)]
    dist.all_gather(gathered, sent.cuda())
    assert torch.equal(torch.stack([one.cpu() for one in gathered]), everybodys), gathered
    whole = torch.empty(4 * WORLD, device="cuda")
    dist.all_gather_into_tensor(whole, sent.cuda())
    assert torch.equal(whole.cpu(), everybodys.flatten()), whole
    uneven = [torch.empty(1 + rank, device="cuda") for rank in range(WORLD)]
    dist.all_gather(uneven, torch.full((1 + RANK,), float(RANK)).cuda())
    assert [one.tolist() for one in uneven] == [[float(rank)] * (1 + rank) for rank in range(WORLD)], uneven
    exchanged = torch.empty(4, device="cuda")
    dist.all_to_all_single(exchanged, sent.cuda())
    share = 4 // WORLD
    assert torch.equal(exchanged.cpu(), everybodys[:, RANK * share : (RANK + 1) * share].flatten()), exchanged
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, sent.cuda())
    received = torch.empty(4, device="cuda")
    peer, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent.cuda(), peer), dist.P2POp(dist.irecv, received, before)]):
        request.wait()
    assert torch.equal(received.cpu(), everybodys[before]), received
    alone = dist.new_group([RANK], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1, device="cuda"), group=alone)
    received = sent.cuda()
    dist.broadcast(received, 1)
    assert torch.equal(received.cpu(), everybodys[1]), received
    scattered = torch.empty(4, device="cuda")
    dist.scatter(scattered, list(everybodys.cuda().unbind()) if RANK == 0 else None, src=0)
    assert torch.equal(scattered.cpu(), everybodys[RANK]), scattered
    dist.barrier()


def objects():
    mine = {"rank": RANK, "values": list(range(20))}
    everybodys = [{"rank": rank, "values": list(range(20))} for rank in range(WORLD)]
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, mine)
    assert gathered == everybodys, gathered
    gathered = [None] * WORLD if RANK == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert RANK != 1 or gathered == everybodys, gathered
    received = [mine, "x" * 10000] if RANK == 1 else [None, None]
    dist.broadcast_object_list(received, src=1)
    assert received == [everybodys[1], "x" * 10000], received
    share = [None]
    dist.scatter_object_list(share, everybodys if RANK == 0 else None, src=0)
    assert share == [mine], share
    if RANK == 0:
        dist.send_object_list([mine, 7], dst=1)
    else:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == [everybodys[0], 7], received


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
