"""What autograd keeps for backward waits in the memory of the host."""
import inspect

import torch

from .roots import wrap_forward


def saved_on_host(forward):
    def run(*arguments, **keywords):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return forward(*arguments, **keywords)

    return run


def apply(_settings):
    lines = [*inspect.getsource(saved_on_host).splitlines(), "model.forward = saved_on_host(model.forward)"]
    wrap_forward("offload_activations", saved_on_host, lines)
