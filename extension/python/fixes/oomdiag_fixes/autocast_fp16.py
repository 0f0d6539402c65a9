"""Mixed precision with the loss scaled, for GPUs that have no bfloat16."""
import types

import torch

from .roots import wrap_forward

_LINES = ['model.forward = torch.autocast("cuda", dtype=torch.float16)(model.forward)',
          'scaler = torch.amp.GradScaler("cuda")  # once',
          "scaler.scale(loss).backward()          # in place of loss.backward()",
          "scaler.step(optimizer); scaler.update()  # in place of optimizer.step()"]


def apply(_settings):
    scaler = torch.amp.GradScaler("cuda")
    plain_backward, plain_step = torch.Tensor.backward, torch.amp.GradScaler.step
    wrap_forward("autocast_fp16", torch.autocast("cuda", dtype=torch.float16), _LINES)

    def backward(self, *arguments, **keywords):
        return plain_backward(scaler.scale(self) if self.is_cuda else self, *arguments, **keywords)

    def after_init(optimizer):
        step = optimizer.step

        def scaled_step(_self, closure=None):
            optimizer.step = step
            try:
                result = plain_step(scaler, optimizer)
                scaler.update()
                return result
            finally:
                optimizer.step = bound

        bound = types.MethodType(scaled_step, optimizer)
        optimizer.step = bound

    plain_init = torch.optim.Optimizer.__init__

    def init(self, *arguments, **keywords):
        plain_init(self, *arguments, **keywords)
        after_init(self)

    torch.Tensor.backward = backward
    torch.optim.Optimizer.__init__ = init
