"""Images in the layout that tensor cores take without a copy."""
import torch

from .roots import on_root, report_for


def apply(_settings):
    def prepare(root):
        if any(parameter.dim() == 4 for parameter in root.parameters()):
            root.to(memory_format=torch.channels_last)
            report_for(root, "channels_last", ["model = model.to(memory_format=torch.channels_last)"])

    on_root(prepare)
