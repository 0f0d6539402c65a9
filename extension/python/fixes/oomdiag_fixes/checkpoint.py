"""Activation checkpointing of blocks of a model: settings {"blocks": ["transformer.h.0", ...]} names those that are run again
in backward.
"""
import functools

from torch.utils.checkpoint import checkpoint

from . import tell
from .roots import on_root


def _name(path):
    """`model.layer1[0]` for layer1.0."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split("."))


def _write(root, paths):
    """Python for these blocks: `*model.h` for a whole container, `*model.h[:3]` for its first ones, else one by one."""
    words, chosen = [], {}
    for path in paths:
        container, _, name = path.rpartition(".")
        chosen.setdefault(container, []).append(name)
    for container, names in chosen.items():
        children = [name for name, _ in root.get_submodule(container).named_children()]
        if names == children[:len(names)]:
            words.append(f"*{_name(container)}" + ("" if len(names) == len(children) else f"[:{len(names)}]"))
        else:
            words += [_name(f"{container}.{name}") for name in names]
    return words[0][1:] if len(words) == 1 and words[0].startswith("*") else "[" + ", ".join(words) + "]"


def apply(settings):
    def prepare(root):
        try:
            blocks = [root.get_submodule(path) for path in settings["blocks"]]
        except AttributeError:
            return  # another root than the one that has these blocks
        lines = ["import functools"]
        config = getattr(root, "config", None)
        if getattr(config, "use_cache", False):  # keys and values that a second run of forward would write twice
            config.use_cache = False
            lines.append("model.config.use_cache = False")
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        lines += [f"for block in {_write(root, settings['blocks'])}:",
                  "    block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"]
        tell(id="checkpoint", applied=True, lines=lines)

    on_root(prepare)
