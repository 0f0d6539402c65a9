"""What optimizers are told when they are made. No fix itself."""
import inspect

import torch


def force(**options):
    """Every optimizer of torch.optim that takes these options gets them; calls told(class name) for each that is made."""

    def decorate(told):
        for kind in vars(torch.optim).values():
            if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
                continue
            if set(options) <= set(inspect.signature(kind.__init__).parameters):
                _wrap(kind, options, told)

    return decorate


def _wrap(kind, options, told):
    plain = kind.__init__

    def init(self, *arguments, **keywords):
        bound = inspect.signature(plain).bind(self, *arguments, **keywords)
        bound.arguments.update(options)
        plain(*bound.args, **bound.kwargs)
        if type(self) is kind:
            told(kind.__name__)

    kind.__init__ = init
