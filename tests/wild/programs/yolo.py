"""YOLO by ultralytics' own trainer, on pictures that it makes first."""
import pathlib
import sys

import numpy
from PIL import Image
from ultralytics import YOLO

batch, size = sys.argv[1:]
for part in ("train", "val"):
    for kind in ("images", "labels"):
        pathlib.Path("data", kind, part).mkdir(parents=True, exist_ok=True)
    for i in range(2 * int(batch)):
        Image.fromarray(numpy.random.randint(0, 255, (160, 160, 3), dtype=numpy.uint8)).save(f"data/images/{part}/{i}.jpg")
        pathlib.Path(f"data/labels/{part}/{i}.txt").write_text(f"{i % 2} 0.5 0.5 0.3 0.4\n{(i + 1) % 2} 0.3 0.2 0.1 0.1\n")
pathlib.Path("data.yaml").write_text(f"path: {pathlib.Path('data').resolve()}\ntrain: images/train\nval: images/val\nnames: [a, b]\n")
YOLO("yolo11n.yaml").train(data="data.yaml", epochs=1, imgsz=int(size), batch=int(batch), workers=0, plots=False, amp=False,
                           device=0, val=False, project="runs", save=False)
