"""Runs a detector at many resolutions, each replayed from its own captured CUDA graph."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

SCALES = [704, 672, 640, 608, 576, 544, 512, 480, 448, 416, 384]
BATCH = 8


class ConvBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(16, cout)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.down = ConvBlock(cin, cout, 2)
        self.body = nn.ModuleList(ConvBlock(cout, cout) for _ in range(3))

    def forward(self, x):
        x = self.down(x)
        for block in self.body:
            x = x + block(x)
        return x


class Detector(nn.Module):
    def __init__(self, width=64, classes=80):
        super().__init__()
        self.stages = nn.ModuleList([Stage(3, width), Stage(width, 2 * width), Stage(2 * width, 4 * width)])
        self.cls, self.box = nn.Conv2d(4 * width, classes, 1), nn.Conv2d(4 * width, 4, 1)

    def forward(self, images):
        x = images
        for stage in self.stages:
            x = stage(x)
        return self.cls(x), self.box(x)


class GraphedModel:
    """Holds one captured graph per shape of the input."""

    def __init__(self, model, warmup=2, fixed=False):
        self.model = model
        self.warmup = warmup
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle() if fixed else None
        self.entries = {}

    def capture(self, shape):
        static_input = torch.zeros(shape, device="cuda")
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(self.warmup):
                self.model(static_input)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            static_output = self.model(static_input)
        self.entries[shape] = (graph, static_input, static_output)

    def __call__(self, images):
        shape = tuple(images.shape)
        if shape not in self.entries:
            self.capture(shape)
        graph, static_input, static_output = self.entries[shape]
        static_input.copy_(images)
        graph.replay()
        return tuple(t.clone() for t in static_output)


def decode(logits, boxes, top=100):
    scores = logits.flatten(2).sigmoid().amax(1)
    keep = scores.topk(top, dim=1).indices
    return boxes.flatten(2).gather(2, keep.unsqueeze(1).expand(-1, 4, -1)).cpu()


@expected("private_pools", fix="pool=", thread="roboflow/rf-detr#1490", memory=4096)
@torch.inference_mode()
def graph_per_size(fixed=False):
    random.seed(7)
    model = Detector().to("cuda").eval()
    runner = GraphedModel(model, fixed=fixed)
    for size in SCALES:
        runner.capture((BATCH, 3, size, size))
    detections = 0
    for _ in range(20):
        size = random.choice(SCALES)
        images = torch.rand(1, 3, size, size).expand(BATCH, -1, -1, -1).to("cuda")
        detections += decode(*runner(images)).shape[-1] * BATCH
    return detections
