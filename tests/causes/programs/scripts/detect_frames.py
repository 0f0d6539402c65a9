"""Detects objects in the frames of a clip and counts them per class."""
import json
import os
import tempfile
from collections import Counter

import numpy as np
import torch
from torchvision.models.detection import fasterrcnn_resnet50_fpn

from expected import expected

DEVICE = "cuda"
SCORE = 0.5


class Config:
    num_classes = 91
    min_size = 800
    max_size = 1333
    detections = 100


def build_model(cfg):
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=cfg.num_classes,
                                    min_size=cfg.min_size, max_size=cfg.max_size,
                                    box_detections_per_img=cfg.detections)
    model.to(DEVICE)
    model.train(False)
    return model


def read_clip(frames=20, height=720, width=1280):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (height, width, 3), dtype=np.uint8) for _ in range(frames)]


def to_tensor(image):
    return torch.from_numpy(np.transpose(image, (2, 0, 1)).copy()).float() / 255


class Predictor:
    def __init__(self, cfg, fixed):
        self.fixed = fixed
        self.model = build_model(cfg)

    def __call__(self, images):
        if self.fixed:
            out = []
            with torch.no_grad():
                for im in images:
                    out += self.model([to_tensor(im).to(DEVICE)])
            return out
        inputs = [to_tensor(im).to(DEVICE) for im in images]
        return self.model(inputs)


def keep_best(pred):
    keep = pred["scores"] > SCORE
    return {k: v[keep].detach().cpu() for k, v in pred.items()}


def summarize(results):
    counts = Counter()
    for r in results:
        counts.update(r["labels"].tolist())
    return counts


@expected("evaluation_keeps_graphs", fix="no_grad", thread="facebookresearch/detectron2#1539", memory=12288)
def detect_frames(fixed=False):
    """All frames of the clip go through the detector in one call, without `torch.no_grad()`. Cured by: One frame after the other, under
    `torch.no_grad()`.
    """
    cfg = Config()
    predictor = Predictor(cfg, fixed)
    clip = read_clip()
    predictions = predictor(clip)
    results = [keep_best(p) for p in predictions]
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "boxes.json"), "w") as f:
        json.dump([r["boxes"].tolist() for r in results], f)
    return summarize(results)
