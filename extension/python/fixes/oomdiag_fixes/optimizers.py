"""Options of optimizers, set when they are constructed. No fix itself."""
import inspect

import torch


def force(**options):
    """Every optimizer of torch.optim that takes these options gets them; calls on_construction(class name) for each that is constructed."""

    def decorate(on_construction):
        for kind in vars(torch.optim).values():
            if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
                continue
            if set(options) <= set(inspect.signature(kind.__init__).parameters):
                _wrap(kind, options, on_construction)

    return decorate


def _wrap(kind, options, on_construction):
    plain = kind.__init__

    def init(self, *arguments, **keywords):
        bound = inspect.signature(plain).bind(self, *arguments, **keywords)
        bound.arguments.update(options)
        plain(*bound.args, **bound.kwargs)
        if type(self) is kind:
            on_construction(kind.__name__)

    kind.__init__ = init
