"""Explains the predictions of a DenseNet classifier with integrated gradients."""
import torch
import torch.nn as nn
from torchvision.models import densenet201

from expected import expected

device = torch.device("cuda")


class IntegratedGradients:
    def __init__(self, forward_func):
        self.forward_func = forward_func

    def _gradients(self, inputs, target):
        inputs.requires_grad_(True)
        scores = self.forward_func(inputs)[:, target].sum()
        return torch.autograd.grad(scores, inputs)[0]

    def attribute(self, image, baseline, target, n_steps=50, internal_batch_size=None):
        alphas = torch.linspace(0.0, 1.0, n_steps, device=image.device).view(-1, 1, 1, 1)
        path = baseline + alphas * (image - baseline)
        grads = torch.cat([self._gradients(part.detach(), target) for part in path.split(internal_batch_size or n_steps)])
        return (image - baseline) * grads.mean(0, keepdim=True)


def load_model(classes=14):
    model = densenet201(weights=None)
    model.classifier = nn.Linear(model.classifier.in_features, classes)
    return model.to(device).eval()


def read_image(size=320):
    return torch.rand(1, 3, size, size)


def saliency(attr):
    heat = attr.abs().sum(1)[0]
    return (heat / (heat.max() + 1e-8)).cpu()


def predict(model, image):
    with torch.no_grad():
        return model(image).softmax(1)


@expected("many_rows", fix="batch|split|part", thread="meta-pytorch/captum#245", memory=11900)
def attribution_ig(fixed=False):
    """Integrated gradients take all 50 points between baseline and image as one batch, with gradients. Cured by: Fewer steps, or a part of
    them at a time (`internal_batch_size`).
    """
    model = load_model()
    ig = IntegratedGradients(model)
    for _ in range(3):
        image = read_image().to(device)
        predict(model, image).argmax().item()
        attr = ig.attribute(image, torch.zeros_like(image), target=3, internal_batch_size=5 if fixed else None)
        heat = saliency(attr)
    return heat.shape
