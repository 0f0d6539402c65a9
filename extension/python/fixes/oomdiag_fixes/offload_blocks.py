"""What autograd keeps of some blocks waits in the memory of the host, copied beside what the next blocks compute: settings
{"blocks": [...]} names all blocks of the list, {"chosen": [...]} those whose tensors go. One tensor for a storage, as saved twice it is
one; parameters and what is below a megabyte stay.
"""
import functools
import inspect
import weakref

import torch

from .checkpoint import write_blocks
from .roots import on_root, report_for


class HostBlock:
    """One call of a block: what autograd saves of it. On the GPU until the next block begins, and from the backward of the next on."""

    def __init__(self, stream, before):
        self.stream, self.before = stream, before
        self.places, self.on_gpu, self.on_host, self.loaded = {}, [], [], None

    @staticmethod
    def is_weight(tensor):  # or what autocast made of one, which it keeps
        tensor = tensor if tensor._base is None else tensor._base
        above = getattr(tensor.grad_fn, "next_functions", ())
        return isinstance(tensor, torch.nn.Parameter) or (len(above) == 1 and hasattr(above[0][0], "variable"))

    def pack(self, tensor):
        if not tensor.is_cuda or tensor.nbytes < 1 << 20 or self.is_weight(tensor):
            return tensor if tensor.is_leaf else tensor.detach()
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self.places:
            self.places[key] = len(self.on_gpu)
            self.stream.wait_stream(torch.cuda.current_stream())
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            with torch.cuda.stream(self.stream):
                host.copy_(tensor, non_blocking=True)
            self.on_gpu.append(tensor.detach())
            self.on_host.append(host)
        return self.places[key]

    def settle(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        self.on_gpu.clear()

    def load(self):
        if self.loaded is None:
            self.loaded = [torch.empty_like(host, device="cuda") for host in self.on_host]
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for tensor, host in zip(self.loaded, self.on_host):
                    tensor.copy_(host, non_blocking=True)

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        self.load()
        torch.cuda.current_stream().wait_stream(self.stream)
        before = self.before and self.before()
        if before is not None:
            self.before = None
            before.load()
        return self.loaded[packed]


def keep_on_host(blocks, chosen):
    stream, last = torch.cuda.Stream(), []

    def run(forward, is_chosen, *arguments, **keywords):
        before = last[0]() if last else None
        if before is not None:
            before.settle()
        if not is_chosen or not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        block = HostBlock(stream, last[0] if before is not None else None)
        last[:] = [weakref.ref(block)]
        with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
            return forward(*arguments, **keywords)

    for block in blocks:
        block.forward = functools.partial(run, block.forward, block in chosen)


def apply(settings):
    def prepare(root):
        try:
            blocks = [root.get_submodule(path) for path in settings["blocks"]]
        except AttributeError:
            return  # another root than the one that has these blocks
        chosen = [root.get_submodule(path) for path in settings["chosen"]]
        keep_on_host(blocks, chosen)
        report_for(root, "offload_blocks", [
            "import functools, weakref", *inspect.getsource(HostBlock).splitlines(), *inspect.getsource(keep_on_host).splitlines(),
            f"keep_on_host([{write_blocks(root, settings['blocks'])}], [{write_blocks(root, settings['chosen'])}])"])

    on_root(prepare)
