"""An optimizer that goes from parameter to parameter, so that its temporaries are those of one."""
from . import report_applied
from .optimizers import force


def apply(_settings):
    @force(foreach=False, fused=False)
    def on_construction(name):
        report_applied("foreach_off", [f"optimizer = torch.optim.{name}(..., foreach=False, fused=False)"])
