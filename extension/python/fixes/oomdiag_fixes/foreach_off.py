"""An optimizer that goes from parameter to parameter, so that its temporaries are those of one."""
from . import report_applied
from .optimizers import force


def apply(_settings):
    @force(foreach=False, if_taken={"fused": False})
    def on_construction(name, options):
        words = ", ".join(f"{option}={value}" for option, value in options.items())
        report_applied("foreach_off", [f"optimizer = torch.optim.{name}(..., {words})"])
