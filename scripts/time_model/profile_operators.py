"""Usage: python scripts/time_model/profile_operators.py [--plans plain,bf16] [--seconds N] [PROGRAM...] > operators.csv

On a real GPU: how long the kernels of each operator take in one step of the trainings of tests/truth/measured_rows.py, by PyTorch's
profiler. A line has the operator with the dtypes and shapes of its tensors ("1x8,8x4"; lists of tensors are left out), how often it
was called, and the nanoseconds of its kernels with those of the operators that it calls. The operator "step" has those of all kernels.
"""
import argparse
import collections
import csv
import gc
import json
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/truth"))
import measured_rows  # noqa: E402

COLUMNS = ("program", "plan", "operator", "dtypes", "shapes", "calls", "kernels", "ns")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def profile(program, plan, trace):
    """Writes a trace of the third step."""
    import torch
    from torch.profiler import ProfilerActivity
    step = measured_rows.make_step(program, plan)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(trace)


def describe(call):
    dims, types = call["args"].get("Input Dims", []), call["args"].get("Input type", [])
    tensors = [(one, kind) for one, kind in zip(dims, types)
               if kind not in ("", "Scalar", "ScalarList", "TensorList", "GenericList") and not any(isinstance(size, list) for size in one)]
    return ",".join(kind for _, kind in tensors), ",".join("x".join(map(str, one)) for one, _ in tensors)


def read_calls(trace):
    """Sums of (calls, kernels, ns) by (operator, dtypes, shapes). A kernel belongs to the operator that launched it and to those around it."""
    with open(trace) as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    threads, by_id = collections.defaultdict(list), {}
    sums = collections.defaultdict(lambda: [0, 0, 0])
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
            by_id[event["args"].get("External id")] = event
            event["key"] = (event["name"], *describe(event))
            sums[event["key"]][0] += 1
    for calls in threads.values():
        calls.sort(key=lambda call: (call["ts"], -call["dur"]))
        open_calls = []
        for call in calls:
            while open_calls and open_calls[-1]["ts"] + open_calls[-1]["dur"] <= call["ts"]:
                open_calls.pop()
            call["parent"] = open_calls[-1] if open_calls else None
            open_calls.append(call)
    for event in events:
        if event.get("cat") not in ON_GPU:
            continue
        call, keys = by_id.get(event["args"].get("External id")), {("step", "", "")}
        while call is not None:
            keys.add(call["key"])
            call = call["parent"]
        for key in keys:
            sums[key][1] += 1
            sums[key][2] += round(event["dur"] * 1000)
    sums[("step", "", "")][0] = 1
    return sums


def write_rows(program, plan, trace):
    """In a child, while the GPU has the next program."""
    if os.fork() != 0:
        return
    sums = read_calls(trace)
    with open(f"{trace}.csv", "w") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows((program, plan, *key, *value) for key, value in sorted(sums.items()) if value[2] > 0)
    os.unlink(trace)
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="plain,bf16")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other program after these")
    parser.add_argument("programs", nargs="*")
    arguments = parser.parse_args()
    import torch
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for program in arguments.programs or measured_rows.PROGRAMS:
            for plan in arguments.plans.split(",") if time.monotonic() < end else ():
                trace = f"{folder}/{len(traces)}.json"
                try:
                    profile(program, plan, trace)
                except Exception as error:  # the others shall run
                    print(f"{program} {plan}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
                else:
                    traces.append(trace)
                    write_rows(program, plan, trace)
                gc.collect()
                torch.cuda.empty_cache()
        for _ in traces:
            os.wait()
        print(*COLUMNS, sep=",")
        for trace in traces:
            if os.path.exists(f"{trace}.csv"):
                sys.stdout.write(pathlib.Path(f"{trace}.csv").read_text())


if __name__ == "__main__":
    main()
