"""What test_ranks.py runs, as all ranks of a job under torchrun and as one of them alone: rank_programs.py NAME. Each prints,
as one line of JSON, its rank and PyTorch's own peaks; to EVENTS-<rank>.json it writes what PyTorch's own history recorded of
every allocation, free and segment."""
import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

RANK, WORLD, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
WIDTH = 512


def blocks(count=4):
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                           for _ in range(count)])


def train(model, optimizer=torch.optim.Adam):
    optimizer = optimizer(model.parameters())
    for _ in range(3):
        model(torch.randn(128, WIDTH, device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(**options):
    train(nn.parallel.DistributedDataParallel(blocks().cuda(), device_ids=[LOCAL], **options))


def ddp_buckets():
    ddp(bucket_cap_mb=1, gradient_as_bucket_view=True, static_graph=True)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    train(FullyShardedDataParallel(blocks(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=LOCAL))


def fsdp2(mesh=None, model=None, **options):
    from torch.distributed.fsdp import fully_shard
    mesh = mesh or init_device_mesh("cuda", (WORLD,))
    model = model or blocks().cuda()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    train(fully_shard(model, mesh=mesh, **options))


def fsdp2_kept():
    fsdp2(reshard_after_forward=False)


def fsdp2_mixed():
    from torch.distributed.fsdp import MixedPrecisionPolicy
    fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def hsdp():
    fsdp2(init_device_mesh("cuda", (2, WORLD // 2), mesh_dim_names=("replicate", "shard")))


def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def tp():
    train(parallelize(blocks().cuda(), init_device_mesh("cuda", (WORLD,))))


def fsdp_tp():
    mesh = init_device_mesh("cuda", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    fsdp2(mesh["dp"], parallelize(blocks().cuda(), mesh["tp"]))


def pipeline(schedule, stages_of_rank=1, group=None, make=lambda stage: blocks(2).cuda()):
    """Stages differ: the first widens what it is given, and the last narrows it."""
    from torch.distributed.pipelining import PipelineStage
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    count = world * stages_of_rank
    stages = []
    for stage in range(rank, count, world):
        parts = [make(stage)]
        if stage == 0:
            parts.insert(0, nn.Linear(WIDTH // 4, WIDTH).cuda())
        if stage == count - 1:
            parts.append(nn.Linear(WIDTH, 10).cuda())
        stages.append(PipelineStage(nn.Sequential(*parts), stage, count, torch.device("cuda", LOCAL), group=group))
    loss = lambda y, target: (y - target).square().mean()
    run = schedule(stages if stages_of_rank > 1 else stages[0], 4, loss_fn=loss)
    optimizer = torch.optim.Adam([one for stage in stages for one in stage.submod.parameters()])
    for _ in range(2):
        given = [torch.randn(64, WIDTH // 4, device="cuda")] if rank == 0 else []
        targets = {"target": torch.randn(64, 10, device="cuda")} if rank == world - 1 else {}
        run.step(*given, **targets)
        optimizer.step()
        optimizer.zero_grad()


def gpipe():
    from torch.distributed.pipelining import ScheduleGPipe
    pipeline(ScheduleGPipe)


def one_f_one_b():
    from torch.distributed.pipelining import Schedule1F1B
    pipeline(Schedule1F1B)


def interleaved():
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    pipeline(ScheduleInterleaved1F1B, stages_of_rank=2)


def zero_bubble():
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble
    pipeline(ScheduleInterleavedZeroBubble, stages_of_rank=2)


def context_parallel():
    """Attention over a sequence that the ranks share, keys and values going round."""
    from torch.distributed.tensor.experimental import context_parallel as share
    mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("cp",))
    made = nn.Linear(WIDTH, 3 * WIDTH).cuda().bfloat16()
    optimizer = torch.optim.Adam(made.parameters())
    for _ in range(10):
        x = torch.randn(2, 1024, WIDTH, device="cuda", dtype=torch.bfloat16)
        with share(mesh, buffers=[x], buffer_seq_dims=[1]):
            heads = [one.unflatten(-1, (8, -1)).transpose(1, 2) for one in made(x).chunk(3, dim=-1)]
            nn.functional.scaled_dot_product_attention(*heads, is_causal=True).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def experts():
    """Tokens go to the ranks of their experts and come back; as many to each, as routers balance them."""
    from torch.distributed.nn.functional import all_to_all_single
    expert, router = blocks(1).cuda(), nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.Adam([*expert.parameters(), *router.parameters()])
    for _ in range(10):
        tokens = router(torch.randn(128 * WORLD, WIDTH, device="cuda"))
        sent = all_to_all_single(torch.empty_like(tokens), tokens)
        all_to_all_single(torch.empty_like(tokens), expert(sent)).square().mean().backward()
        for one in (*expert.parameters(), *router.parameters()):
            dist.all_reduce(one.grad)
        optimizer.step()
        optimizer.zero_grad()


def objects():
    """What a rank can know of others that are like it, and what only rank 0 knows."""
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, {"width": WIDTH})
    assert gathered == [{"width": WIDTH}] * WORLD, gathered
    objects_sent = [{"seed": 7}, "x" * 3000] if RANK == 0 else [None, None]
    dist.broadcast_object_list(objects_sent, src=0)
    assert objects_sent == [{"seed": 7}, "x" * 3000], objects_sent
    share = [None]
    dist.scatter_object_list(share, [f"part {rank}" for rank in range(WORLD)] if RANK == 0 else None, src=0)
    assert share == [f"part {RANK}"], share


def collectives():
    mine = torch.arange(4.0).cuda()
    gathered = [torch.empty(4, device="cuda") for _ in range(WORLD)]
    dist.all_gather(gathered, mine)
    assert all(one.tolist() == mine.tolist() for one in gathered), gathered
    uneven = [torch.empty(1 + rank, device="cuda") for rank in range(WORLD)]
    dist.all_gather(uneven, torch.ones(1 + RANK, device="cuda"))
    counts = torch.empty(WORLD, dtype=torch.int64, device="cuda")
    dist.all_to_all_single(counts, torch.full((WORLD,), 3, device="cuda"))
    assert counts.tolist() == [3] * WORLD, counts
    everybody = dist.new_group(list(range(WORLD)))
    half = dist.new_group([rank for rank in range(WORLD) if rank % 2 == RANK % 2], use_local_synchronization=True)
    for group in (everybody, half, dist.group.WORLD):
        dist.barrier(group=group)
    dist.all_reduce(mine, group=half)
    on_host = torch.ones(3)
    if "gloo" in dist.get_backend_config():
        dist.all_reduce(on_host)
        dist.monitored_barrier(dist.new_group(backend="gloo"))
    objects()


def stores():
    """A store that is made by hand, as programs do beside the one of their process group."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], 29511, WORLD, RANK == 0)
    store.set(f"host-{RANK}", "here")
    assert all(store.get(f"host-{rank}") == b"here" for rank in range(WORLD))
    store.add("arrived", 1)
    assert store.add("arrived", 0) == WORLD
    if RANK == 0:
        store.set("word", "by rank 0")
    assert store.get("word") == b"by rank 0"


def plan():
    """Half a GiB of parameters, which is 2 GiB with gradients and moments, in as many shards as there are ranks."""
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cuda", (WORLD,))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(int(sys.argv[2]), 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tracked():
    """Prints, too, what PyTorch's own FSDP2 tracker makes of the same training of tensors that are not there."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cuda", (WORLD,))
    batch = lambda: torch.randn(8, 512, 1024, device="cuda")

    def make():
        layers = nn.Sequential(*[nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0, batch_first=True, device="cuda")
                                 for _ in range(6)])
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
        return layers, torch.optim.Adam(layers.parameters(), foreach=True)

    def steps(model, optimizer):
        for _ in range(2):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with FakeTensorMode():
        model, optimizer = make()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch(),))
        with tracker:
            steps(model, optimizer)
    of_gpus = [sizes["Total"] for device, sizes in tracker.get_tracker_snapshot("peak").items() if device.type == "cuda"]
    steps(*make())
    print(json.dumps({"tracker": of_gpus[0], "allocator": torch.cuda.max_memory_allocated()}), flush=True)


def symmetric():
    """Buffers that all ranks map, of the world and of pairs; a matrix product whose parts are gathered through one."""
    import torch.distributed._symmetric_memory as symmetric_memory
    pairs = init_device_mesh("cuda", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    for group in (dist.group.WORLD, pairs):
        part = symmetric_memory.empty(1 << 20, device="cuda")
        mapped = symmetric_memory.rendezvous(part, group)
        assert len(set(mapped.buffer_ptrs)) == group.size(), mapped.buffer_ptrs
        for _ in range(100):
            torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group.group_name)
    weight = torch.randn(256, WIDTH, device="cuda").t()
    rows = symmetric_memory.empty(128, 256, device="cuda")
    for _ in range(20):
        torch.ops.symm_mem.fused_all_gather_matmul(rows, [weight.t()], 0, group_name=dist.group.WORLD.group_name)


def write_events(path):
    events = [(event["action"], event["size"]) for event in torch.cuda.memory._snapshot()["device_traces"][LOCAL]]
    with open(f"{path}-{RANK}.json", "w") as file:
        json.dump(events, file)


if __name__ == "__main__":
    torch.cuda.set_device(LOCAL)
    if "EVENTS" in os.environ:
        torch.cuda.memory._record_memory_history(context=None, stacks="python")
    backend = os.environ.get("BACKEND", "nccl")
    if os.environ.get("EAGER"):
        dist.init_process_group(backend, device_id=torch.device("cuda", LOCAL))
    else:
        dist.init_process_group(backend)
    globals()[sys.argv[1]]()
    torch.cuda.synchronize()
    for _ in range(20):  # what schedules leave in cycles, and what threads of autograd and NCCL let go a little later
        gc.collect()
        if torch.cuda.memory_allocated() == 0:
            break
        time.sleep(0.05)
    if "EVENTS" in os.environ and "OOMDIAG_RANK_SUMMONED" not in os.environ:
        write_events(os.environ["EVENTS"])
    print(json.dumps({"rank": RANK, "allocated": torch.cuda.max_memory_allocated(),
                      "reserved": torch.cuda.max_memory_reserved()}), flush=True)
    dist.destroy_process_group()
