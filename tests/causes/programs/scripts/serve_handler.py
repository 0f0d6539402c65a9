"""Answers batches of requests with the handler of an image classifier."""
import contextlib
import io

import numpy as np
import torch
import torchvision

from expected import expected


class ImageClassifier:
    def __init__(self, fixed):
        self.fixed = fixed
        self.model = None
        self.initialized = False

    def initialize(self, ctx):
        self.device = torch.device("cuda:" + str(ctx["gpu_id"]))
        self.model = torchvision.models.densenet161(weights=None)
        self.model.to(self.device)
        self.model.eval()
        self.initialized = True

    def preprocess(self, requests):
        images = [torch.from_numpy(np.load(io.BytesIO(r["body"]))) for r in requests]
        return torch.stack(images).to(self.device)

    def inference(self, img):
        with torch.no_grad() if self.fixed else contextlib.nullcontext():
            return self.model.forward(img)

    def postprocess(self, output):
        probs = torch.softmax(output, dim=1)
        scores, classes = torch.topk(probs, 5)
        return [dict(zip(map(str, c.tolist()), s.tolist())) for c, s in zip(classes, scores)]

    def handle(self, requests):
        return self.postprocess(self.inference(self.preprocess(requests)))


def fake_request():
    f = io.BytesIO()
    np.save(f, np.random.rand(3, 224, 224).astype("float32"))
    return {"body": f.getvalue()}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/serve#501", memory=3072)
def serve_handler(fixed=False):
    """`inference` of the handler runs the model without `torch.no_grad()`, so that each layer keeps what a backward pass would need. Cured
    by: `with torch.no_grad():` in `inference`.
    """
    service = ImageClassifier(fixed)
    service.initialize({"gpu_id": 0})
    for size in (1, 4, 8, 16, 16):
        reply = service.handle([fake_request() for _ in range(size)])
    return reply
