"""Activation checkpointing of the repeated blocks of a model: settings {"parts": [["transformer.h", 12], ...]} names
containers, and how many of their children, from the first on, are run again in backward.
"""
import functools

from torch.utils.checkpoint import checkpoint

from . import tell
from .roots import on_root


def _slice(path, count, length):
    return f"*model.{path}" + ("" if count >= length else f"[:{count}]")


def apply(settings):
    def prepare(root):
        blocks, slices = [], []
        for path, count in settings["parts"]:
            try:
                children = list(root.get_submodule(path))
            except AttributeError:
                return  # another root than the one that has these blocks
            blocks += children[:count]
            slices.append(_slice(path, count, len(children)))
        lines = []
        config = getattr(root, "config", None)
        if getattr(config, "use_cache", False):  # keys and values that a second run of forward would write twice
            config.use_cache = False
            lines.append("model.config.use_cache = False")
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        whole = slices[0][1:] if len(slices) == 1 else "[" + ", ".join(slices) + "]"
        lines += [f"for block in {whole}:",
                  "    block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"]
        tell(id="checkpoint", applied=True, lines=lines)

    on_root(prepare)
