"""Mixed precision with the loss scaled, for GPUs that have no bfloat16."""
import types
import weakref

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

    optimizers, stepped = weakref.WeakSet(), weakref.WeakSet()

    def update():
        if len(stepped) > 0:
            stepped.clear()
            scaler.update()

    def backward(self, *arguments, **keywords):
        update()
        return plain_backward(scaler.scale(self) if self.is_cuda else self, *arguments, **keywords)

    def after_init(optimizer):
        optimizers.add(optimizer)
        step = optimizer.step

        def scaled_step(_self, closure=None):
            loss = None
            if closure is not None:  # GradScaler takes none: it is called first, as most optimizers do
                with torch.enable_grad():
                    loss = closure()
            if optimizer in stepped:
                update()
            optimizer.step = step
            try:
                result = plain_step(scaler, optimizer)
                stepped.add(optimizer)
                if len(stepped) == len(optimizers):  # gradients of the others have the same scale
                    update()
                return result if closure is None else loss
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
