"""Runs many small programs under the recorder, importing torch once: run_forked.py JOBS.json

A job is {"name", "module", "function", "arguments", "memory_mib", "environment", "folder"}. Each runs in a forked child, which sets
up CUDA for itself, so that it has a trace of its own. With "stacks" PyTorch records beside it, and its snapshot of the OOM
(else of the end) lies in the folder. Must be started by `oomdiag run`, which sets the environment. Prints a
line with JSON per job: how it ended, and what the program returned.
"""
import atexit
import importlib
import json
import os
import pathlib
import sys
import time
import traceback

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

ANSWER = "answer of run_forked: "  # before each line that is not the program's own


def record(stacks, file):
    """Has PyTorch record, and write its snapshot as people do it: when a request failed."""
    torch.cuda.memory._record_memory_history(stacks=stacks, max_entries=200_000)
    dump = lambda *_: torch.cuda.memory._dump_snapshot(str(file))
    torch._C._cuda_attach_out_of_memory_observer(dump)
    return dump


def run(job):
    os.environ["OOMDIAG_OUTPUT"] = job["folder"]
    if job.get("memory_mib"):
        os.environ["OOMDIAG_MEMORY"] = str(job["memory_mib"] << 20)
    os.environ.update(job.get("environment", {}))
    function = getattr(importlib.import_module(job["module"]), job["function"])
    ended, result = "ok", None
    dump = record(job["stacks"], pathlib.Path(job["folder"], "snapshot.pickle")) if job.get("stacks") else None
    try:
        result = function(**job.get("arguments", {}))
    except torch.OutOfMemoryError as error:
        ended = "out_of_memory"
        sys.last_traceback = error.__traceback__  # as the interpreter keeps what ends a program
    except BaseException as error:  # the parent reports it; a kernel that is loaded asks the driver, and not PyTorch's allocator
        ended = "out_of_memory" if "out of memory" in str(error) else "failed: " + traceback.format_exc(limit=-2)
    if dump and ended == "ok":
        dump()
    peak = {"max_allocated": torch.cuda.max_memory_allocated(), "max_reserved": torch.cuda.max_memory_reserved()}
    if not isinstance(result, dict):
        result = None
    return {"name": job["name"], "ended": ended, "result": result, **peak}


def main():
    jobs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    assert not torch.cuda.is_initialized()
    for job in jobs:
        pathlib.Path(job["folder"]).mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(run(job), pipe)
            atexit._run_exitfuncs()  # the recorder's last look at what variables refer to
            time.sleep(0.05)  # torch 2.15 aborts now and then when a process ends right after a backward
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        died = {"name": job["name"], "ended": f"died: {os.waitstatus_to_exitcode(status)}", "result": None,
                "max_allocated": 0, "max_reserved": 0}
        print(ANSWER + (answer or json.dumps(died)), flush=True)


if __name__ == "__main__":
    main()
