"""What a program itself knows of the bytes that it holds, to compare reports with: each function trains for two steps and stops
at a known moment of the second with a request that no GPU grants, so that the report describes that moment.
"""
import torch
from torch import nn


def block_sizes():
    """Bytes of each block in use, by address, as the allocator has them."""
    sizes = {}
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sizes[address] = block["size"]
            address += block["size"]
    return sizes


def blocks_of(tensors, sizes):
    storages = [t.untyped_storage() for t in tensors if t is not None and t.is_cuda]
    return sum(sizes[p] for p in {s.data_ptr() for s in storages if s.nbytes()})  # cuDNN's reserve may be empty


def stop(*_):
    torch.empty(1 << 46, dtype=torch.uint8, device="cuda")


def mlp():
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
    return model, torch.randn(512, 512, device="cuda")


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(),
                          nn.Flatten(), nn.Linear(64 * 16 * 16, 10)).cuda()
    return model, torch.randn(64, 3, 32, 32, device="cuda")


def transformer():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), 2,
                                  enable_nested_tensor=False).cuda()
    return model, torch.randn(16, 64, 256, device="cuda")


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, foreach=False, fused=False),
}


def held(model, optimizer, moment, witness=False):
    """Bytes by category at `moment`: "backward", as its first node begins, or "optimizer", as its step begins. Only a witness
    knows what autograd saved: its hooks see each tensor, and change when it is freed.
    """
    network, x = globals()[model]()
    stepper = OPTIMIZERS[optimizer](network.parameters())
    saved, found = [], {}

    def measure(*_):
        sizes = block_sizes()
        parameters = list(network.parameters())
        found.update(parameter=blocks_of(parameters, sizes), buffer=blocks_of(network.buffers(), sizes),
                    gradient=blocks_of([p.grad for p in parameters], sizes),
                    optimizer_state=blocks_of([v for s in stepper.state.values() for v in s.values()
                                               if isinstance(v, torch.Tensor)], sizes))
        if witness:
            known = {t.untyped_storage().data_ptr() for t in [*parameters, *network.buffers(), x]}
            found["activation"] = blocks_of([t for t in saved if t.untyped_storage().data_ptr() not in known], sizes)
            found["input"] = blocks_of([x], sizes)

    def pack(tensor):
        saved.append(tensor.detach())
        return tensor

    def step(last):
        stepper.zero_grad()
        if last and witness:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = network(x).square().mean()
        else:
            loss = network(x).square().mean()
        if last and moment == "backward":
            loss.register_hook(lambda _: (measure(), stop()))
        loss.backward()
        if last:
            stepper.register_step_pre_hook(lambda *_: (measure(), stop()))
        stepper.step()

    step(False)
    try:
        step(True)
    except torch.OutOfMemoryError:
        return found


def made(how, *shape):
    """A batch that no module made."""
    if how == "empty":
        return torch.empty(*shape, device="cuda")
    if how == "normalised":
        return (torch.randint(256, shape, device="cuda", dtype=torch.uint8).float() - 128) / 128
    return torch.randn(*shape, device="cuda")


def forward_oom(model_name, batch, how="randn"):
    """The first forward pass of a large model on a GPU that is too small for it."""
    if model_name == "resnet50":
        import torchvision
        model, x = torchvision.models.resnet50().cuda(), made(how, batch, 3, 224, 224)
        return {"loss": model(x).sum().item()}
    import transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6, use_cache=False)).cuda()
    ids = torch.zeros(batch, 512, dtype=torch.long, device="cuda")
    return {"loss": model(ids, labels=ids).loss.item()}


def whole_steps(model_name, batch, steps=2):
    if model_name == "resnet50":
        import torchvision
        model, x = torchvision.models.resnet50().cuda(), torch.randn(batch, 3, 224, 224, device="cuda")
        loss = lambda: model(x).square().mean()
    else:
        import transformers
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6, use_cache=False)).cuda()
        ids = torch.zeros(batch, 512, dtype=torch.long, device="cuda")
        loss = lambda: model(ids, labels=ids).loss
    stepper = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        stepper.zero_grad()
        loss().backward()
        stepper.step()
