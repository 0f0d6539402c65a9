"""An optimizer whose kernels keep their temporaries in registers."""
from . import report_applied
from .optimizers import force


def apply(_settings):
    @force(foreach=None, fused=True)
    def on_construction(name, _options):
        report_applied("fused_optimizer", [f"optimizer = torch.optim.{name}(..., fused=True)"])
