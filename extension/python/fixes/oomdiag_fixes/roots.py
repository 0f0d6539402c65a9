"""The outermost modules that a program calls on the GPU, registered when they are first called."""
import re
import weakref

import torch
from torch import nn

from . import report, report_applied
from .frames import locals_of, own_frames

_MAX_CALLS_REPORTED = 3
_prepare = []
_plain_call = nn.Module.__call__
_members = weakref.WeakSet()  # of registered roots, with all modules inside
_roots = weakref.WeakKeyDictionary()  # root -> calls whose outputs were reported


def _shapes(value):
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, dict):
        return {str(key): _shapes(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shapes(each) for each in value]
    return None


def _is_on_gpu(module):
    return any(parameter.is_cuda for parameter in module.parameters())


def _call(self, *arguments, **keywords):
    if self not in _members:
        if not _is_on_gpu(self):
            return _plain_call(self, *arguments, **keywords)
        for function in _prepare:
            function(self)
        _members.update(self.modules())
        _roots[self] = 0
    output = _plain_call(self, *arguments, **keywords)
    reported = _roots.get(self)
    if reported is not None and reported < _MAX_CALLS_REPORTED and not torch.compiler.is_compiling():
        _roots[self] = reported + 1
        report(output=_shapes(output))
    return output


def watch():
    nn.Module.__call__ = _call


def on_root(function):
    """Calls function(module) with each outermost module, before its first call on the GPU."""
    _prepare.append(function)
    watch()


def _name_in_program(root):
    """What the program calls it where it calls it: "net", "self.net"; "model" where that is not known."""
    for frame in own_frames():
        held = list(locals_of(frame).items())
        for name, value in held:
            if value is root and name.isidentifier():
                return name
        for holder in (value for name, value in held if name == "self" and hasattr(value, "__dict__")):
            for name, value in [*vars(holder).items(), *(getattr(holder, "_modules", None) or {}).items()]:
                if value is root:
                    return f"self.{name}"
    return "model"


def report_for(root, id, lines):
    """Reports lines written for `model` with the program's own name of it. Only while the program calls `root`."""
    name = _name_in_program(root)
    report_applied(id, [re.sub(r"\bmodel\b(?!_)", name, line) for line in lines])


def replace_forward(wrapper, then=lambda root: None):
    """Puts wrapper(forward) in the place of the forward of each outermost module that is trained or run; calls then(root)."""

    def prepare(root):
        root.forward = wrapper(root.forward)
        then(root)

    on_root(prepare)


def wrap_forward(id, wrapper, lines):
    """The same, and reports these lines."""
    replace_forward(wrapper, lambda root: report_for(root, id, lines))
