"""Adam and AdamW with moments of 8 bits: of bitsandbytes, or else of torchao."""
import importlib
import inspect

import torch

from . import report, report_applied

_HOMES = ("bitsandbytes.optim", "torchao.optim")
_TAKEN = ("params", "lr", "betas", "eps", "weight_decay")


def _find_home():
    for name in _HOMES:
        try:
            return importlib.import_module(name), name
        except ImportError:
            pass
    raise ImportError("neither bitsandbytes nor torchao is installed: pip install bitsandbytes")


def _replace(kind):
    signature = inspect.signature(kind.__init__)
    name = f"{kind.__name__}8bit"

    def new(cls, *arguments, **keywords):
        if cls is not kind:
            return object.__new__(cls)
        given = signature.bind(None, *arguments, **keywords).arguments
        try:
            home, path = _find_home()
        except ImportError as error:
            report(id="adam_8bit", not_applied=str(error))
            return object.__new__(cls)
        optimizer = getattr(home, name)(**{key: given[key] for key in _TAKEN if key in given})
        report_applied("adam_8bit", [f"import {path}", f"optimizer = {path}.{name}(...)"])
        return optimizer

    kind.__new__ = new


def apply(_settings):
    for kind in torch.optim.Adam, torch.optim.AdamW:
        _replace(kind)
