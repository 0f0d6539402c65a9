"""oomdiag.estimate: what a function would allocate on a GPU that need not be there, in a process of its own."""
from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, List, Optional


@dataclasses.dataclass
class Estimate:
    """Bytes are those of a run on a virtual GPU. What fits is judged by the allocator's own algorithm."""
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    categories: Dict[str, int]                 # at the peak, or where it ran out of memory
    largest: Optional[Dict[str, int]] = None   # with vary: the largest value that fits, proved by a run
    formula: Optional[str] = None              # with vary: "0.97 GiB + 1.64 GiB·batch"
    report: Dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


def _run(arguments: List[str], codes: tuple) -> str:
    from . import _command
    done = subprocess.run([_command(), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode not in codes:
        raise RuntimeError(f"oomdiag.estimate: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _program(function: Callable[..., Any], inputs: Dict[str, Any], varied: Optional[str]) -> List[str]:
    file = inspect.getsourcefile(function)
    if file is None or "." in function.__qualname__ or not os.path.exists(file):
        raise ValueError("oomdiag.estimate: it needs a function at the top level of a file, as another process calls it by its name")
    values = {name: value for name, value in inputs.items() if name != varied}
    words = [sys.executable, str(pathlib.Path(__file__).resolve()), os.path.abspath(file), function.__name__, json.dumps(values)]
    return words + ([varied, f"{{{varied}}}"] if varied else [])


def estimate(function: Callable[..., Any], inputs: Optional[Dict[str, Any]] = None, *, device: str = "h200",
             vary: Optional[str] = None) -> Estimate:
    """Calls function(**inputs) in a child process on a virtual `device` and says what it took there.

        def train(batch):                      # at the top level of its file; makes its model on "cuda" and runs some steps
            ...
        oomdiag.estimate(train, {"batch": 32}, device="rtx4090", vary="batch=1..4096").largest

    Needs no GPU, and is not seen by the caller's own CUDA. `vary` names one of the inputs and its range, as `oomdiag fit --vary`.
    Inputs are what JSON has. Raises RuntimeError with the child's last words where it fails for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "report.json")
        _run(["run", "--device", device, "-o", file, "--", *_program(function, inputs or {}, None)], range(256))
        if not os.path.exists(file):
            raise RuntimeError(f"oomdiag.estimate: {function.__name__} used no CUDA memory, or failed before it did")
        with open(file) as stream:
            report = json.load(stream)
    if report["outcome"] not in ("ok", "out_of_memory", "caught"):
        raise RuntimeError(f"oomdiag.estimate: {function.__name__} failed: {report['outcome']}")
    gpu = report["devices"][report["main_device"]]
    found = Estimate(report["outcome"] == "ok", gpu["peak"]["allocated_bytes"], gpu["peak"]["reserved_bytes"],
                     {name: size for name, size in gpu["categories"].items() if size}, report=report)
    if vary is not None:
        name = vary.partition("=")[0]
        answer = json.loads(_run(["fit", "--device", device, "--vary", vary, "--json", "--", *_program(function, inputs or {}, name)], (0, 3)))
        found.largest, found.formula = answer["largest"], answer["formula"]
    return found


def _child(file: str, name: str, values: str, varied: str = "", value: str = "") -> None:
    """In the child: the module of the file, without its `if __name__ == "__main__"`."""
    import importlib.util
    sys.path.insert(0, os.path.dirname(file))
    spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    inputs = json.loads(values)
    if varied:
        inputs[varied] = int(value)
    getattr(module, name)(**inputs)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose names are not the program's
    _child(*sys.argv[1:])
