"""Detects objects in a folder of pictures, one by one, with an SSD network."""
import torch
from torchvision.models.detection import ssd300_vgg16

from expected import expected

DEVICE = torch.device("cuda")
CLASSES = ["background", "car", "person", "bike"]


def pictures(n):
    """With their names."""
    for i in range(n):
        yield f"img_{i:05d}.jpg", torch.rand(3, 300, 300)


def load_model():
    model = ssd300_vgg16(weights=None, weights_backbone=None, num_classes=len(CLASSES))
    return model.to(DEVICE).eval()


class Detector:
    def __init__(self, model, fixed, threshold=0.4):
        self.model, self.fixed, self.threshold = model, fixed, threshold

    def __call__(self, picture):
        if self.fixed:
            with torch.no_grad():
                return self.model([picture.to(DEVICE)])[0]
        out = self.model([picture.to(DEVICE)])[0]
        return out


def to_rows(name, found, threshold):
    rows = []
    for box, label, score in zip(found["boxes"].tolist(), found["labels"].tolist(), found["scores"].tolist()):
        if score >= threshold:
            rows.append({"box": [round(v, 1) for v in box], "label": CLASSES[label % len(CLASSES)], "score": score})
    return {"file": name, "objects": rows}


def summary(results):
    counts = dict.fromkeys(CLASSES, 0)
    for result in results:
        for o in result["objects"]:
            counts[o["label"]] += 1
    return counts


@expected("evaluation_keeps_graphs", fix="no_grad", thread="kouhan.cn/en/article/00034093", memory=4096)
def so_ssd_inference(fixed=False):
    torch.manual_seed(0)
    detector = Detector(load_model(), fixed)
    detections = {}
    for i, (name, picture) in enumerate(pictures(40)):
        detections[name] = detector(picture)
        if i % 5 == 0:
            torch.cuda.empty_cache()
    return summary([to_rows(name, found, detector.threshold) for name, found in detections.items()])
