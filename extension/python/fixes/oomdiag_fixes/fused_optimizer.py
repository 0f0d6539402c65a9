"""An optimizer whose kernels keep their temporaries in registers."""
from . import tell_applied
from .optimizers import force


def apply(_settings):
    @force(foreach=None, fused=True)
    def told(name):
        tell_applied("fused_optimizer", [f"optimizer = torch.optim.{name}(..., fused=True)"])
