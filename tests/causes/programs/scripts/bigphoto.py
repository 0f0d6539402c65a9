"""Segments photos of a folder, one after the other."""
import torch
from PIL import Image
from torchvision import transforms
from torchvision.models.segmentation import deeplabv3_resnet50

from expected import expected


def load(path, size):
    # stand-in for Image.open(path).convert("RGB")
    return Image.new("RGB", size, (120, 90, 60))


@expected("batch_without_gradients", fix="resize|interpolate", thread="microsoft/Bringing-Old-Photos-Back-to-Life#54", memory=4096)
def bigphoto(fixed=False):
    device = torch.device("cuda")
    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    model = model.to(device).eval()
    preprocess = transforms.Compose([
        *([transforms.Resize(520)] if fixed else []),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    photos = {"a.png": (640, 480), "b.png": (1024, 768), "c.jpg": (4000, 3000)}
    masks = []
    for name, size in photos.items():
        image = load(name, size)
        x = preprocess(image).unsqueeze(0).to(device)
        with torch.no_grad():
            out = model(x)["out"][0]
        masks.append(out.argmax(0).byte().cpu())
    return masks
