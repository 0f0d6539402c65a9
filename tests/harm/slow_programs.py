"""Programs that start processes of their own which import torch anew: seconds each. python slow_programs.py NAME"""
import sys

import torch
from torch import nn


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((64,), float(index))


def load(context):
    model = nn.Linear(64, 8).cuda()
    for x in torch.utils.data.DataLoader(Numbers(), 16, num_workers=2, multiprocessing_context=context):
        model(x.cuda()).sum().backward()
    print(float(x.sum()))


def spawned_loader():
    load("spawn")


def loader_of_a_fork_server():
    load("forkserver")


def work(rank, queue):
    x = torch.ones(1024 * (rank + 1), device="cuda", requires_grad=True)
    (x * 2).sum().backward()
    queue.put((rank, torch.cuda.max_memory_allocated()))


def spawned_ranks():
    import torch.multiprocessing as mp
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (queue,), nprocs=2)
    print(sorted(queue.get() for _ in range(2)))
    torch.ones(4, device="cuda")


def compiled():
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(16, 64, device="cuda")).square().sum().backward()
        optimizer.step()
    print(torch._dynamo.utils.counters["frames"], torch._dynamo.utils.counters["stats"])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("peaks", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
