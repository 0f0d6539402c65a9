"""ReLUs that write into their input."""
from torch import nn

from . import tell_applied
from .roots import on_root

_LINES = ["for module in model.modules():",
          "    if isinstance(module, torch.nn.ReLU):",
          "        module.inplace = True"]


def apply(_settings):
    def prepare(root):
        found = [module for module in root.modules() if isinstance(module, nn.ReLU) and not module.inplace]
        for module in found:
            module.inplace = True
        if found:
            tell_applied("relu_in_place", _LINES)

    on_root(prepare)
