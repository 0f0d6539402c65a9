"""Options of optimizers, set when they are constructed. No fix itself."""
import inspect

import torch


def force(if_taken=(), **options):
    """Every optimizer of torch.optim that takes these options gets them, and of `if_taken` those that it takes; calls
    on_construction(class name, what it got) for each that is constructed."""

    def decorate(on_construction):
        for kind in vars(torch.optim).values():
            if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
                continue
            taken = set(inspect.signature(kind.__init__).parameters)
            if set(options) <= taken:
                more = {name: value for name, value in dict(if_taken).items() if name in taken}
                _wrap(kind, {**options, **more}, on_construction)

    return decorate


def _wrap(kind, options, on_construction):
    plain = kind.__init__

    def init(self, *arguments, **keywords):
        bound = inspect.signature(plain).bind(self, *arguments, **keywords)
        bound.arguments.update(options)
        plain(*bound.args, **bound.kwargs)
        if type(self) is kind:
            on_construction(kind.__name__, options)

    kind.__init__ = init
