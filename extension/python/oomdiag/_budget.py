"""oomdiag.budget: what a piece of a program may allocate on the GPU, for tests."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CATEGORIES = {"activation": "activations (saved for backward)", "parameter": "parameters", "gradient": "gradients", "input": "inputs",
               "optimizer_state": "optimizer state", "output": "outputs (live, not saved)", "buffer": "buffers",
               "activation_gradient": "activation gradients", "temporary": "temporaries", "workspace": "workspaces"}


class BudgetExceeded(AssertionError):
    """More was allocated than the budget allows; the message says by how much, where, and who held it."""


def parse_size(size: Union[int, str]) -> int:
    """Bytes of 2147483648, "2GiB", "1.5 GiB", "800 MB"."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", size)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"oomdiag: '{size}' is no size; give bytes, or as in 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _with_unit(count: int) -> str:
    for unit in "GiB", "MiB", "KiB":
        if abs(count) >= _UNITS[unit.upper()]:
            return f"{count / _UNITS[unit.upper()]:.2f} {unit}"
    return f"{count} B"


def _place(where: Dict[str, Any]) -> str:
    op = where.get("node") or where.get("op")
    parts = [op, where.get("module"), os.path.basename(where["source"]) if where.get("source") else None]
    return " ← ".join(part for part in parts if part)


def _describe(report: Dict[str, Any], peak: int) -> List[str]:
    """Where the peak was and who holds it, or one line that says why not."""
    device = report["devices"][report["main_device"]]
    at = device["peak"]
    if at["allocated_bytes"] != peak:
        return ["who held it is not known: another part of this process held more; run this test alone"]
    phase = "" if at["phase"] == "other" else f"in {at['phase']}, step {at['step']}, "
    largest = sorted(device["categories"].items(), key=lambda item: -item[1])
    lines = [f"at the peak: {phase}{_place(at)}",
             "who holds it: " + ", ".join(f"{_CATEGORIES.get(name, name)} {_with_unit(count)}" for name, count in largest[:4] if count)]
    for holder in sorted(device["top_allocations"], key=lambda one: -one["bytes"])[:3]:
        shape = f"  {holder['shape']}" if holder.get("shape") else ""
        lines.append(f"  {_with_unit(holder['bytes']):>11}  {holder.get('name') or ''} {_place({**holder, 'module': None})}{shape}")
    return lines


@dataclasses.dataclass
class _Measured:
    """Of one GPU: bytes that lived when the block began, and the most while it ran."""
    before: int
    peak: int


def _excess(measured: List[_Measured], added: Optional[int], total: Optional[int]) -> Optional[Tuple[str, int]]:
    """What is above its budget, in words, and that GPU's peak; None where all is kept."""
    for gpu in measured:
        own = gpu.peak - gpu.before
        if added is not None and own > added:
            return (f"this block adds {_with_unit(own)}, above its budget of {_with_unit(added)} by {_with_unit(own - added)} "
                    f"({_with_unit(gpu.before)} lived before it)"), gpu.peak
        if total is not None and gpu.peak > total:
            return (f"peak of {_with_unit(gpu.peak)} is above the budget of {_with_unit(total)} in total by {_with_unit(gpu.peak - total)} "
                    f"({_with_unit(gpu.before)} lived before this block)"), gpu.peak
    return None


@contextlib.contextmanager
def budget(added: Union[int, str, None] = None, *, total: Union[int, str, None] = None) -> Iterator[None]:
    """What runs inside may add so many bytes at once on each GPU; else BudgetExceeded.

        def test_a_step_fits():
            with oomdiag.budget("2GiB"):                 # beyond what lived before, as in a fixture
                train_one_step()

    `total` bounds all that lives, what lived before included: what torch.cuda.max_memory_allocated says. Both may be given.
    The message names the line that reached the peak.

    On a machine without a GPU: `oomdiag run --device rtx4090 -- pytest`, or pytest's option --oomdiag-device.
    PyTorch's own peaks (torch.cuda.max_memory_allocated) begin anew here.
    """
    import torch
    from . import _begin, _said_or_why_not, report, stop
    if added is None and total is None:
        raise TypeError('oomdiag.budget: say how much, as in budget("2GiB") or budget(total="2GiB")')
    bounds = tuple(None if size is None else parse_size(size) for size in (added, total))
    if not torch.cuda.is_available():
        raise RuntimeError("oomdiag.budget: there is no CUDA device; try pytest --oomdiag-device rtx4090, "
                           "or oomdiag run --device rtx4090 -- pytest")
    torch.cuda.init()  # the allocator keeps no peaks before
    began = _begin()
    gpus = range(torch.cuda.device_count())
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    try:
        yield
        excess = _excess([_Measured(before[gpu], torch.cuda.max_memory_allocated(gpu)) for gpu in gpus], *bounds)
        if excess:
            holders = _said_or_why_not(lambda: "\n".join(_describe(report(), excess[1])))
            raise BudgetExceeded(f"{excess[0]}\n{holders}")
    finally:
        if began:
            stop()
