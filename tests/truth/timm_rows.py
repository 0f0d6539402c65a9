"""The largest batch that fits in timm's benchmark of inference, tried again: our own program of its steps.

    oomdiag run --device rtx4090 -- python timm_rows.py ROWS.json

Prints a line of JSON per row: the batch, with what was allocated and reserved at each one that was tried, or why it could not be run. Like
the published runs it begins with 1024 images and goes down a fixed list in one process, the model of the batch that failed being alive while
the next one is made; float32 weights, autocast to float16, cudnn.benchmark. A row says which options its table was made with: fast_norm
(normalization in half precision) and reparam (branches that were trained are joined). Weights are left as they come: no size depends on them.
"""
import copy
import math

import timm
import timm.layers
import timm.utils
import torch
from timm.data import resolve_data_config

from each_row import read_rows, run_each

MIB = 1 << 20
MOST = 1024
STEPS = 2  # the first chooses cuDNN's plans, the second shows what a step needs
LONGEST = 900  # seconds for a row

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True


def next_batch(batch):
    """Half way to the next power of two, or to it: 1024, 768, 512, 384, …; 0 after 1."""
    if batch <= 1:
        return 0
    power = 2 ** math.ceil(math.log2(batch) - 1)
    half_way = power + max(power // 2, 1)
    return half_way if half_way < batch else power


def model_of(row):
    kept = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
    for name in kept:
        setattr(torch.Tensor, name, lambda tensor, *_, **__: tensor)
    try:
        model = timm.create_model(row["model"], in_chans=3)
        return timm.utils.reparameterize_model(model) if row["reparam"] else model
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


class Inference:
    def __init__(self, model, batch, size):
        self.model = copy.deepcopy(model).to("cuda").eval()
        self.shape = (batch, *size)
        self.images = None

    def run(self):
        with torch.inference_mode():
            self.images = torch.randn(self.shape, device="cuda")
            for _ in range(STEPS):
                with torch.autocast("cuda", torch.float16):
                    self.model(self.images)
                torch.cuda.synchronize()


def measure(row):
    timm.layers.set_fast_norm(row["fast_norm"])
    model = model_of(row)
    size = resolve_data_config({"img_size": int(row["size"])}, model=model, use_test_size=True)["input_size"]
    batch, tries, inference = MOST, [], None
    torch.cuda.init()
    while batch:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        said = None
        try:
            inference = Inference(model, batch, size)
            inference.run()
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        tries.append({"batch": batch, "allocated_mib": torch.cuda.max_memory_allocated() // MIB,
                      "reserved_mib": torch.cuda.max_memory_reserved() // MIB, "error": said})
        if said is None:
            break
        batch = next_batch(batch)
    return {"batch": batch, "tries": tries}


run_each(read_rows(), measure, LONGEST)
