"""Prints how much of the memory at the peak a snapshot that PyTorch wrote puts into the categories that our own recording of
the same process puts it into: python tests/causes/categories.py --build BUILD [--quick] [-v] [-k NAME]

Each program of recorded.py runs twice, with PyTorch's history recorded with stacks of Python and of all. Exits 1 where less than
95 % of the bytes are right.
"""
import argparse
import pathlib
import sys

from harness import DEVICE, run_jobs
from snapshots import STACKS, explain

WRITTEN_BY = ["cnn", "gpt_adamw", "lstm", "amp", "checkpointing", "inference", "low_rank", "sgd_momentum"]
KEPT_BACK = ["auto_encoder", "accumulated", "patches_bf16"]  # until the rules were there
BAR = 0.95


def share_right(own, other):
    """Of all bytes; what is unknown to either is wrong."""
    return sum(min(own[name], other[name]) for name in own if name != "unknown") / sum(own.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true", help="two of them")
    parser.add_argument("-v", action="store_true", help="print each category")
    parser.add_argument("-k", default="", help="programs with this in their name only")
    options = parser.parse_args()
    jobs = [{"name": f"{name}, stacks of {mode}", "module": "recorded", "function": name, "memory_mib": 0, "stacks": mode}
            for name in WRITTEN_BY + KEPT_BACK for mode in STACKS if options.k in name]
    jobs = [job for job in jobs if job["name"] in ("gpt_adamw, stacks of python", "sgd_momentum, stacks of all")] if options.quick else jobs
    wrong = 0
    for job in run_jobs(options.build, jobs):
        report = explain(options.build, pathlib.Path(job["folder"], "snapshot.pickle"), "--device", DEVICE)
        own, from_snapshot = job["report"]["categories"], report["categories"]
        right = share_right(own, from_snapshot)
        wrong += right < BAR or report["peak"]["allocated_bytes"] != job["report"]["peak"]["allocated_bytes"]
        sure = {one: sum(part["bytes"] for part in report["from_stacks"] if part["confidence"] == one) / sum(own.values())
                for one in ("high", "medium", "low")}
        print(f"{right:6.1%}  {job['name']:32}" + "".join(f" {share:6.1%} {one}" for one, share in sure.items()))
        for name in own if options.v or right < BAR else ():
            if own[name] or from_snapshot[name]:
                print(f"        {name:22}{own[name] / 2**20:10.2f} MiB by our recording, {from_snapshot[name] / 2**20:10.2f} by the snapshot")
    print(f"{len(jobs) - wrong} of {len(jobs)} snapshots have at least {BAR:.0%} of their bytes in the right category")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
