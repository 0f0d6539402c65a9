"""Activation checkpointing of blocks of a model: settings {"blocks": ["transformer.h.0", ...]} names those that are run again
in backward. {"sequential": "features", "segments": 4} runs so many parts of an nn.Sequential again whose layers are no blocks;
"" is the model itself.
"""
import functools

from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .roots import on_root, report_for


# Imports inside of a function: in main(), `import torch.…` would make torch a local name, unknown to the lines before.
_FUNCTION = ["def checkpoint_forward(*modules):",
             "    import functools",
             "    from torch.utils.checkpoint import checkpoint",
             "    for module in modules:",
             "        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)"]
_SEQUENTIAL = ["def checkpoint_segments(layers, segments):",
               "    import functools",
               "    from torch.utils.checkpoint import checkpoint_sequential",
               "    layers.forward = functools.partial(checkpoint_sequential, list(layers), segments, use_reentrant=False)"]


def name_of(path):
    """`model.layer1[0]` for layer1.0."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".") if part)


def write_blocks(root, paths):
    """Python for these blocks, as arguments: `*model.h` for a whole container, `*model.h[:3]` for its first ones, else one by one."""
    words, chosen = [], {}
    for path in paths:
        container, _, name = path.rpartition(".")
        chosen.setdefault(container, []).append(name)
    for container, names in chosen.items():
        children = [name for name, _ in root.get_submodule(container).named_children()]
        if names == children[:len(names)]:
            words.append(f"*{name_of(container)}" + ("" if len(names) == len(children) else f"[:{len(names)}]"))
        else:
            words += [name_of(f"{container}.{name}") for name in names]
    return ", ".join(words)


def _apply_to_sequential(path, segments):
    def prepare(root):
        try:
            layers = root.get_submodule(path)
        except AttributeError:
            return  # another root than the one that has it
        if type(layers) is not nn.Sequential or len(layers) < 2 * segments:
            return
        layers.forward = functools.partial(checkpoint_sequential, list(layers), segments, use_reentrant=False)
        report_for(root, "checkpoint", [*_SEQUENTIAL, f"checkpoint_segments({name_of(path)}, {segments})"])

    on_root(prepare)


def apply(settings):
    if "segments" in settings:
        _apply_to_sequential(settings["sequential"], settings["segments"])
        return

    def prepare(root):
        try:
            blocks = [root.get_submodule(path) for path in settings["blocks"]]
        except AttributeError:
            return  # another root than the one that has these blocks
        lines = []
        config = getattr(root, "config", None)
        if getattr(config, "use_cache", False):  # keys and values that a second run of forward would write twice
            config.use_cache = False
            lines.append("model.config.use_cache = False")
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        report_for(root, "checkpoint", [*lines, *_FUNCTION, f"checkpoint_forward({write_blocks(root, settings['blocks'])})"])

    on_root(prepare)
