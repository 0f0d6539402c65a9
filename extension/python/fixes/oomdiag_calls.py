"""Makes operator calls alone and writes down what each asks of the allocator.

    python oomdiag_calls.py CALLS SIZES

CALLS has a call a line, as extension/record/op_arguments.h describes it. SIZES gets a line for each: a JSON list of what it asked of
the GPU's allocator, in order, or null where it could not be made: the bytes of a request, or -n where it gave the n-th of them back. Each is made twice, and the second time counts: a
process makes workspaces of its own the first time. The tensors are those of the call in dtype, shape, strides and need of a gradient;
what they hold is not. Run by `oomdiag fit` on a virtual device that has more memory than any call needs.
"""
import json
import sys

import torch

NAMES = {"Byte": torch.uint8, "Char": torch.int8, "ComplexHalf": torch.complex32, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
MAX_HISTORY = 1 << 16


def dtype_of(name):
    return NAMES.get(name) or getattr(torch, name.lower())


class Tensors:
    """The tensors of a call. Those of one storage there have one here."""

    def __init__(self, arguments, in_grad_mode):
        self._in_grad_mode, self._extents, self._made = in_grad_mode, {}, {}
        self.arguments = [self._argument_of(value, self._measure) for value in arguments]
        self.arguments = [self._argument_of(value, self._make) for value in arguments]

    def _argument_of(self, value, of_tensor):
        if isinstance(value, list):
            return [self._argument_of(element, of_tensor) for element in value]
        if not isinstance(value, dict):
            return value
        (kind, content), = value.items()
        if kind == "t":
            return of_tensor(*content)
        return float.fromhex(content) if kind == "f" else content

    def _measure(self, dtype, sizes, strides, requires_grad, is_on_gpu, storage, offset):
        end = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides)) + 1 if 0 not in sizes else 0
        self._extents.setdefault(storage, []).append((offset, end))

    def _make(self, dtype, sizes, strides, requires_grad, is_on_gpu, storage, offset):
        first = min(begin for begin, _ in self._extents[storage])
        length = max(max(end for _, end in self._extents[storage]) - first, 0)
        key = storage, dtype, requires_grad and self._in_grad_mode
        if key not in self._made:
            self._made[key] = torch.empty(length, dtype=dtype_of(dtype), device="cuda" if is_on_gpu else "cpu")
            self._made[key].requires_grad_(key[2])  # what is written to is a view: a leaf must not be
        return self._made[key].as_strided(sizes, strides, offset - first)


def set_mode(mode):
    """As current_mode() of op_arguments.cpp writes it."""
    on = [letter != "-" for letter in mode]
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = on[1], on[2]
    torch.use_deterministic_algorithms(on[3], warn_only=True)
    torch.backends.cuda.enable_flash_sdp(on[4])
    torch.backends.cuda.enable_mem_efficient_sdp(on[5])
    return on[0]


def requests_of(operator, arguments):
    """What one call asks of the allocator, as main() writes it. Read from the allocator's own history, which is begun anew for each."""
    places = operator._schema.arguments
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_HISTORY)
    try:
        positional = [value for place, value in zip(places, arguments) if not place.kwarg_only]
        by_name = {place.name: value for place, value in zip(places, arguments) if place.kwarg_only}
        results = operator(*positional, **by_name)  # noqa: F841, freed after the snapshot
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    events, numbers, made = [], {}, 0
    for entry in (entry for trace in traces for entry in trace):
        if entry["action"] == "alloc":
            made += 1
            numbers[entry["addr"]] = made
            events.append(entry["size"])
        elif entry["action"] == "free_requested" and entry["addr"] in numbers:
            events.append(-numbers.pop(entry["addr"]))
    return events


def sizes_of(call):
    in_grad_mode = set_mode(call["mode"])
    (name, overload) = call["op"]
    package, _, short = name.partition("::")
    operator = getattr(getattr(getattr(torch.ops, package), short), overload or "default")
    sizes = None
    for _ in range(2):
        with torch.set_grad_enabled(in_grad_mode):
            sizes = requests_of(operator, Tensors(call["in"], in_grad_mode).arguments)
    return sizes


def main(calls, sizes):
    with open(calls, encoding="utf-8") as lines, open(sizes, "w", encoding="utf-8") as out:
        for line in lines:
            try:
                answer = sizes_of(json.loads(line))
            except Exception:  # an operator that takes other arguments, or that this process does not have: not known
                answer = None
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
