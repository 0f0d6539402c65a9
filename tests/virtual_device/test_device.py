#!/usr/bin/env python3
"""Tests of the virtual device, under the unmodified torch wheel of the Python that runs this.

    python test_device.py --libraries build/lib/virtual_device --GPUs extension/virtual_device/device_files [--group slow] [case …]

Cases that want the same GPU and environment share one child process, in which the libraries are preloaded; it is forked from one that has
imported torch (prepared.py), except where torch reads the environment as it is imported. One line per case, then "N passed, N failed,
N skipped"; exit 1 if any failed. The cases are in the *_cases.py beside this file; device_cases.py has what they share.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import gpu_cases  # noqa: F401, the import registers its cases
import contents_cases  # noqa: F401
import contract_cases  # noqa: F401
import device_cases
import entry_point_cases  # noqa: F401
import memory_account_cases  # noqa: F401
import library_cases  # noqa: F401
import lookup_cases  # noqa: F401
import machine_cases  # noqa: F401
import nccl_cases  # noqa: F401
import program_cases  # noqa: F401
from stand_ins import LIBRARIES

HERE = pathlib.Path(__file__).resolve().parent
# Settings of torch, which it may look at while it is imported.
READ_AT_IMPORT = ("PYTORCH_", "TORCH_")
# What a developer's shell may hold and no test must see.
FOREIGN = ("OOMDIAG_", "CUDA_VISIBLE_DEVICES", "PYTORCH_", "CUBLAS", "TORCH_CUBLAS")


def child_environment(args, gpu, extra):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    environment["LD_PRELOAD"] = ":".join(str(args.libraries / name) for name in LIBRARIES)
    environment["TRITON_LIBCUDA_PATH"] = str(args.libraries)
    environment["OOMDIAG_DEVICE_FOLDER"] = str(args.gpus)  # for the cases, not for the device
    if gpu:
        environment["OOMDIAG_DEVICE_FILES"] = "\n".join(str(args.gpus / f"{name}.json") for name in gpu.split(","))
    return environment | extra


class Prepared:
    """The process of prepared.py. run() is subprocess.run() of a program in Python, without the import of torch."""

    def __init__(self, args, folder):
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, HERE / "prepared.py"], env=child_environment(args, None, {}), text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, program, arguments, environment):
        files = {name: str(self.folder / name) for name in ("output", "errors")}
        job = {"program": program, "arguments": arguments, "environment": environment, **files}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        texts = [pathlib.Path(file).read_text(errors="replace") for file in files.values()]
        return subprocess.CompletedProcess([program, *arguments], code, *texts)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def run_child(args, prepared, gpu, extra, program, arguments):
    environment = child_environment(args, gpu, extra)
    if not any(name.startswith(READ_AT_IMPORT) for name in extra):
        return prepared.run(program, arguments, environment)
    return subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)


def run_cases(args, prepared, gpu, extra, cases):
    """Runs `cases` in one child; returns {name: outcome}, a case without an outcome having died."""
    child = run_child(args, prepared, gpu, dict(extra), cases[0].__code__.co_filename, [case.__name__ for case in cases])
    outcomes = {}
    for line in child.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("ok", "FAIL", "skip"):
            outcomes[rest.split(":")[0]] = line
    for case in cases:
        if case.__name__ not in outcomes:
            last_words = " | ".join(child.stderr.strip().splitlines()[-3:])
            outcomes[case.__name__] = f"FAIL {case.__name__}: the process died with {child.returncode}: {last_words}"
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=lambda text: pathlib.Path(text).resolve(), required=True)
    parser.add_argument("--gpus", type=lambda text: pathlib.Path(text).resolve(), required=True)
    parser.add_argument("--group", choices=["quick", "slow"], default="quick")
    parser.add_argument("cases", nargs="*", help="only these")
    args = parser.parse_args()

    chosen = [case for case in device_cases.CASES if (case.__name__ in args.cases if args.cases else case.group == args.group)]
    batches = {}
    for case in chosen:
        key = (case.gpu, tuple(sorted(case.environment.items())), case.__code__.co_filename)
        batches.setdefault(key, []).append(case)

    # LD_PRELOAD splits at spaces and colons, which the path of a checkout may have.
    folder = tempfile.TemporaryDirectory()
    link = pathlib.Path(folder.name) / "libraries"
    link.symlink_to(args.libraries)
    args.libraries = link

    prepared = Prepared(args, pathlib.Path(folder.name))
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    for (gpu, extra, _), cases in batches.items():
        outcomes = run_cases(args, prepared, gpu, extra, cases)
        for case in cases:
            line = outcomes[case.__name__]
            counts[line.split(" ")[0]] += 1
            print(line, flush=True)
    prepared.end()
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
