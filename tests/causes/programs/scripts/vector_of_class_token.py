"""Extracts one feature vector per image of a stimulus set from a vision transformer, with a forward hook."""
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTModel

from expected import expected


class StimulusSet(Dataset):
    def __init__(self, n_images, size=224):
        self.n_images = n_images
        self.size = size
        self.base = torch.randn(3, size, size)

    def __len__(self):
        return self.n_images

    def __getitem__(self, i):
        return self.base.roll(i % self.size, dims=-1), f"stim_{i:05d}.jpg"


class FeatureExtractor:
    def __init__(self, model, module_name, token="cls", fixed=False):
        self.model = model.eval()
        self.module_name = module_name
        self.token = token
        self.fixed = fixed
        self.activations = {}
        module = dict(model.named_modules())[module_name]
        self.handle = module.register_forward_hook(self._store)

    def _store(self, module, inputs, output):
        act = output[0] if isinstance(output, tuple) else output
        if self.token == "cls":
            act = act[:, 0, :].clone() if self.fixed else act[:, 0, :]
        elif self.token == "avg":
            act = act[:, 1:, :].mean(dim=1)
        self.activations[self.module_name] = act

    @torch.no_grad()
    def extract(self, loader, device):
        features, names = [], []
        for images, files in loader:
            images = images.to(device, non_blocking=True)
            self.model(pixel_values=images)
            features.append(self.activations[self.module_name])
            names.extend(files)
        return torch.cat(features), names

    def close(self):
        self.handle.remove()


def build_model(device):
    config = ViTConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    return ViTModel(config, add_pooling_layer=False).to(device)


def rsm(features):
    """Representational similarity matrix."""
    f = torch.nn.functional.normalize(features - features.mean(0), dim=1)
    return f @ f.T


@expected("small_view", fix=r"\.clone\(\)", thread="ViCCo-Group/thingsvision#150", memory=2048)
def vector_of_class_token(fixed=False, n_images=2240):
    device = torch.device("cuda")
    loader = DataLoader(StimulusSet(n_images), batch_size=64, shuffle=False)
    extractor = FeatureExtractor(build_model(device), "layernorm", token="cls", fixed=fixed)
    features, names = extractor.extract(loader, device)
    extractor.close()
    return rsm(features).cpu(), names
