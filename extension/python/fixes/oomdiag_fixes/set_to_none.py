"""Gradients that are freed between steps in place of being filled with zeros."""
import torch

from . import report_applied


def apply(_settings):
    plain = torch.optim.Optimizer.zero_grad

    def zero_grad(self, set_to_none=True):
        if not set_to_none:
            report_applied("set_to_none", ["optimizer.zero_grad(set_to_none=True)"])
        return plain(self, set_to_none=True)

    def module_zero_grad(self, set_to_none=True):
        if not set_to_none:
            report_applied("set_to_none", ["model.zero_grad(set_to_none=True)"])
        return plain_module(self, set_to_none=True)

    plain_module = torch.nn.Module.zero_grad
    torch.optim.Optimizer.zero_grad = zero_grad
    torch.nn.Module.zero_grad = module_zero_grad
