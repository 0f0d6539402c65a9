"""No fix: reports what there is to fix, when it is first seen. Changes nothing."""
import argparse
import collections
import functools
import importlib.util
import io
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from . import report
from .roots import on_root


def _leaves(module):
    return sum(1 for each in module.modules() if next(each.children(), None) is None)


def _list_blocks(container):
    """The children of a list of modules that are worth running again: each has layers and parameters of its own."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return []
    blocks = [(name, child) for name, child in container.named_children()
              if _leaves(child) > 1 and next(child.parameters(), None) is not None]
    return blocks if len(blocks) > 1 else []


def _join(path, name):
    return f"{path}.{name}" if path else name


def _blocks(module, path=""):
    """The blocks of the outermost lists of modules."""
    blocks = _list_blocks(module)
    for name, child in blocks:
        yield {"container": path, "path": _join(path, name), "leaves": _leaves(child)}
    if not blocks:
        for name, child in module.named_children():
            yield from _blocks(child, _join(path, name))


def _layers(root):
    """The nn.Sequential with most layers that have no layers in them."""
    found = {"path": "", "count": 0}
    for path, module in root.named_modules():
        if type(module) is nn.Sequential:
            count = sum(next(child.children(), None) is None for child in module)
            found = max(found, {"path": path, "count": count}, key=lambda one: one["count"])
    return found


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _ops_between(inputs, outputs):
    """How many nodes autograd made of a call: the ops that a checkpoint runs again, but for those without a gradient."""
    seen = {tensor.grad_fn for tensor in _tensors(inputs)} | {None}
    todo = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn not in seen]
    count = 0
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        count += not hasattr(node, "variable")  # a leaf's: no op
        todo += [each for each, _ in node.next_functions]
    return count


def _count_ops(root, path):
    """Reports it for the first call that is differentiated."""

    def count(module, arguments, keywords, output):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        hook.remove()
        report(ops={"path": path, "count": _ops_between([arguments, keywords], output)})

    hook = root.get_submodule(path).register_forward_hook(count, with_kwargs=True)


def _report_root(root):
    modules = list(root.modules())
    trained = any(parameter.requires_grad for parameter in root.parameters())
    if isinstance(root, torch.jit.ScriptModule):
        return
    blocks = list(_blocks(root))
    if trained and not hasattr(root, "_orig_mod"):  # what is compiled would have the hooks compiled in
        for block in blocks:
            _count_ops(root, block["path"])
    report(root={
        "kind": type(root).__name__,
        "trained": trained and torch.is_grad_enabled(),
        "leaves": _leaves(root),
        "blocks": blocks,
        "layers": _layers(root),
        "modules": collections.Counter(kind.__name__ for each in modules if not getattr(each, "inplace", False)
                                       for kind in type(each).__mro__),
        "bytes_of_float32": sum(p.nbytes for p in root.parameters() if p.dtype == torch.float32),
        "autocast": torch.is_autocast_enabled("cuda"),
    })


def _watch_loaders():
    plain = DataLoader.__init__

    def init(self, dataset, batch_size=1, *arguments, **keywords):
        plain(self, dataset, batch_size, *arguments, **keywords)
        report(loader={"batch_size": batch_size})

    DataLoader.__init__ = init


def _watch_losses():
    plain, most = torch.nn.functional.cross_entropy, 0

    @functools.wraps(plain)
    def cross_entropy(input, *arguments, **keywords):
        nonlocal most
        if input.dim() == 2 and input.is_cuda and input.requires_grad and input.numel() > most:
            most = input.numel()
            report(logits={"elements": most})
        return plain(input, *arguments, **keywords)

    torch.nn.functional.cross_entropy = cross_entropy


def _watch_optimizers():
    plain, plain_zero = torch.optim.Optimizer.__init__, torch.optim.Optimizer.zero_grad
    seen = set()

    def init(self, params, defaults):
        plain(self, params, defaults)
        report(optimizer={"kind": type(self).__name__, "of_torch": type(self).__module__.startswith("torch.optim"),
                        "foreach": defaults.get("foreach"), "fused": defaults.get("fused")})

    def zero_grad(self, set_to_none=True):
        if not set_to_none and not seen:
            seen.add(self)
            report(keeps_gradients=True)
        return plain_zero(self, set_to_none)

    torch.optim.Optimizer.__init__ = init
    torch.optim.Optimizer.zero_grad = zero_grad


def _watch_arguments():
    """Batch sizes that the program's command line takes, and their values."""
    plain = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self, *arguments, **keywords):
        values, rest = plain(self, *arguments, **keywords)
        for action in self._actions:
            value = getattr(values, action.dest, None)
            if action.option_strings and type(value) is int:
                report(argument={"option": max(action.option_strings, key=len), "value": value})
        return values, rest

    argparse.ArgumentParser.parse_known_args = parse_known_args


class _WatchedInput(io.FileIO):
    """Reports the first read."""

    is_reported = False

    def _report(self):
        if not self.is_reported:
            self.is_reported = True
            report(reads_input=True)

    def readinto(self, buffer):
        self._report()
        return super().readinto(buffer)

    def readall(self):
        self._report()
        return super().readall()


def _watch_input():
    """sys.stdin over a file that reports. What is read by the descriptor itself, as by another program, is not seen."""
    plain = sys.stdin
    if not isinstance(plain, io.TextIOWrapper) or plain.fileno() != 0:
        return
    file = _WatchedInput(0, "r", closefd=False)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(file), encoding=plain.encoding, errors=plain.errors)


def apply(_settings):
    report(has_8bit=any(importlib.util.find_spec(name) for name in ("bitsandbytes", "torchao")))
    on_root(_report_root)
    _watch_arguments()
    _watch_input()
    _watch_loaders()
    _watch_losses()
    _watch_optimizers()
