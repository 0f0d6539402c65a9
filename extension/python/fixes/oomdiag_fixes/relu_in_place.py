"""ReLUs that write into their input."""
from torch import nn

from .roots import on_root, report_for

_LINES = ["model.apply(lambda module: isinstance(module, torch.nn.ReLU) and setattr(module, \"inplace\", True))"]


def apply(_settings):
    def prepare(root):
        found = [module for module in root.modules() if isinstance(module, nn.ReLU) and not module.inplace]
        for module in found:
            module.inplace = True
        if found:
            report_for(root, "relu_in_place", _LINES)

    on_root(prepare)
