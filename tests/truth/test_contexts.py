"""What published out-of-memory messages say that a process takes beyond PyTorch's allocator, against the device files.

    python tests/truth/test_contexts.py [-v]

"this process has X in use. Of the allocated memory Y is allocated by PyTorch, and Z is reserved but unallocated" gives X − Y − Z: the
context, kernels, and what libraries of the program took. contexts.csv has such figures with the threads that they are from. Sizes in GiB
have two digits, so the difference is known to a few MiB. A process that has much more runs libraries (NCCL, TensorRT, a renderer), of
which a device file knows nothing: it is counted apart. Processes on one GPU differ among themselves, by the kernels that
they loaded: how much is printed beside it, and no figure for a GPU can be nearer than that. Exits 1 where the median of the others is
off by more than MOST_OFF.
"""
import argparse
import collections
import csv
import json
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
DEVICE_FILES = HERE.parents[1] / "extension/virtual_device/device_files"
UNITS = {"bytes": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 1024}
LIBRARIES = 300  # MiB more than the device file has
MOST_OFF = 25  # MiB
SEVERAL = 4  # processes


def mebibytes(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def predicted(device, has_run):
    """Before its first allocation a process has run no kernel."""
    file = json.loads((DEVICE_FILES / f"{device}.json").read_text())
    fields = ("context_bytes", "first_kernel_bytes") if has_run else ("context_bytes",)
    return sum(file[field]["value"] for field in fields) / 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-v", action="store_true", help="print each process")
    options = parser.parse_args()
    with open(HERE / "contexts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    off, by_gpu = [], collections.defaultdict(list)
    for row in rows:
        taken = mebibytes(row["in_use"]) - mebibytes(row["allocated"]) - mebibytes(row["unallocated"])
        off.append(taken - predicted(row["device"], has_run=mebibytes(row["allocated"]) > 0))
        if off[-1] < LIBRARIES:
            by_gpu[row["device"]].append(off[-1])
        if options.v:
            print(f"{row['device']:12} {taken:7.0f} MiB, {off[-1]:+6.0f}  {row['program']} ({row['source']})")
    plain = sorted(abs(one) for one in off if one < LIBRARIES)
    median = statistics.median(plain)
    print(f"{len(rows)} processes on {len({row['device'] for row in rows})} GPUs; {len(rows) - len(plain)} with libraries of their own. "
          f"Of the others: median {median:.0f} MiB off, 90th percentile {plain[int(0.9 * len(plain))]:.0f} MiB")
    several = [one for one in by_gpu.values() if len(one) >= SEVERAL]
    apart = statistics.median(abs(one - statistics.median(processes)) for processes in several for one in processes)
    print(f"Processes on the same GPU, of {len(several)} with {SEVERAL} or more: median {apart:.0f} MiB from their own median")
    sys.exit(median > MOST_OFF)


if __name__ == "__main__":
    main()
