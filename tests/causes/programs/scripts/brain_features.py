"""Reconstructs images from brain activity by optimizing pixels to match decoded features of a network."""
import torch
import torch.nn as nn
from torchvision.models import vgg19

from expected import expected

LAYERS = ["3", "8", "17", "26"]


class FeatureExtractor:
    def __init__(self, encoder, layers):
        self.encoder = encoder
        self.features = {name: [] for name in layers}
        self.handles = [encoder.get_submodule(name).register_forward_hook(self._hook(name)) for name in layers]

    def remove(self):
        for handle in self.handles:
            handle.remove()

    def _hook(self, name):
        def store(module, inputs, output):
            self.features[name].append(output)
        return store

    def run(self, x):
        for values in self.features.values():
            values.clear()
        self.encoder(x)
        return {name: values[-1] for name, values in self.features.items()}


def load_encoder():
    net = vgg19(weights=None).features.cuda().eval()
    for m in net.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False
    for p in net.parameters():
        p.requires_grad_(False)
    return net


def decoded_features(encoder, layers, size):
    out, x = {}, torch.rand(1, 3, size, size, device="cuda")
    with torch.no_grad():
        for name, module in encoder.named_children():
            x = module(x)
            if name in layers:
                out[name] = x.mean((2, 3), keepdim=True)
    return out


def feature_loss(features, target):
    return sum(((features[name].mean((2, 3), keepdim=True) - target[name]) ** 2).mean() for name in target)


def reconstruct(encoder, target, size=224, n_iter=2, fixed=False):
    extractor = FeatureExtractor(encoder, LAYERS)
    image = torch.full((1, 3, size, size), 0.5, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([image], lr=0.02)
    for _ in range(n_iter):
        optimizer.zero_grad()
        loss = feature_loss(extractor.run(image), target)
        loss.backward()
        optimizer.step()
    if fixed:
        extractor.remove()
    return image.detach().clamp(0, 1).cpu()


@expected("kept_tensors", fix=r"\.remove\(\)", thread="KamitaniLab/bdpy#91", memory=1536)
def brain_features(fixed=False, n_samples=30, size=224):
    """Each `FeatureExtractor` registers forward hooks on the encoder that all share, and never removes them: the hooks keep the extractors
    before, which store the features of all later images. Cured by: `handle.remove()` when the extractor is no longer used.
    """
    encoder = load_encoder()
    images = []
    for _ in range(n_samples):
        target = decoded_features(encoder, LAYERS, size)
        images.append(reconstruct(encoder, target, size, fixed=fixed))
    return torch.cat(images).shape
