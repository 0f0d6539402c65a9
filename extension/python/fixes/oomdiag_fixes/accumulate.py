"""Smaller batches, as many of them per optimizer step as keep the sum: settings {"batches": 2}. Applied to what a DataLoader
yields: it makes batches of the smaller size, the loss is divided, and the optimizer steps every so often only.
"""
import types

import torch
from torch.utils.data import DataLoader

from . import report


def _lines(size, parts):
    return [f"DataLoader(..., batch_size={size})",
            f"(loss / {parts}).backward()",
            f"if (index + 1) % {parts} == 0:",
            "    optimizer.step()",
            "    optimizer.zero_grad()"]


def apply(settings):
    parts = settings["batches"]
    sizes = set()
    plain_loader, plain_backward = DataLoader.__init__, torch.Tensor.backward
    plain_init, plain_zero = torch.optim.Optimizer.__init__, torch.optim.Optimizer.zero_grad

    def loader(self, dataset, batch_size=1, *arguments, **keywords):
        if batch_size is not None and batch_size >= parts and batch_size % parts == 0:
            batch_size //= parts
            if batch_size not in sizes:
                sizes.add(batch_size)
                report(id="accumulate", applied=True, lines=_lines(batch_size, parts))
        plain_loader(self, dataset, batch_size, *arguments, **keywords)

    def backward(self, *arguments, **keywords):
        return plain_backward(self / parts if sizes else self, *arguments, **keywords)

    def init(self, *arguments, **keywords):
        plain_init(self, *arguments, **keywords)
        step, calls = self.step, 0

        def every_so_often(_self, *step_arguments, **step_keywords):
            nonlocal calls
            calls += 1
            self._oomdiag_waits = bool(sizes) and calls % parts != 0
            return None if self._oomdiag_waits else step(*step_arguments, **step_keywords)

        self.step = types.MethodType(every_so_often, self)

    def zero_grad(self, set_to_none=True):
        if not getattr(self, "_oomdiag_waits", False):
            plain_zero(self, set_to_none)

    DataLoader.__init__ = loader
    torch.Tensor.backward = backward
    torch.optim.Optimizer.__init__ = init
    torch.optim.Optimizer.zero_grad = zero_grad
