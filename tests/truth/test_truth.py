"""Published measurements of real GPUs, measured again on the virtual GPU of the same kind.

    python tests/truth/test_truth.py --build BUILD_FOLDER [--source liger] [--device a100-80] [--only REGEX] [--rows FILE]

The tables beside this file have the figures with their sources. The first time it makes .venv-truth with the packages that the
figures name, next to the torch that is there. Prints each row that is off, and of each source the rows, the median, the 90th
percentile and the worst error. --rows keeps what was measured in a file; what is in it is not measured again.
"""
import argparse
import collections
import csv
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-truth"
MOST_ROWS_OFF = 0.1  # of those that ran, by more than OFF
OFF = 1.0  # per cent
MEDIAN = 0.1  # per cent
EQUAL = 1e-4  # per cent: published figures have seven digits
PEFT_FITTED = "lora/rank32"  # the row that peft_rows.py has its length of a batch from
PEFT = ("peft==0.20.0", "accelerate==1.15.0", "psutil==7.1.3")  # the release after the published runs' commit

Row = collections.namedtuple("Row", "source device label published job")

# Why rows are off by more than a per cent, or cannot be run here: by the start of "source device label". A row that has no reason
# here fails the test, and so does a reason that no row needs any more.
REASONS = json.loads((HERE / "reasons.json").read_text())


def liger_rows():
    rows = []
    for number, series in enumerate(csv.DictReader((HERE / "liger.csv").open())):
        sizes, figures = [int(size) for size in series["sizes"].split()], [float(figure) for figure in series["mib"].split()]
        for size, figure in zip(sizes, figures, strict=True):
            label = f"{series['operator']} {series['provider']} {series['mode']} {series['size_name']}={size} {series['config']}"
            job = {name: series[name] for name in ("operator", "provider", "mode", "config", "release", "commit")}
            rows.append(Row("liger", series["device"], f"{label} ({series['commit']})", figure, job | {"size": size}))
    return rows


def peft_rows():
    return [Row("peft", "l40s", series["experiment"], float(series["mib"]), series)
            for series in csv.DictReader((HERE / "peft.csv").open()) if series["experiment"] != PEFT_FITTED]


SOURCES = {"liger": liger_rows, "peft": peft_rows}


def short_compilations():
    """Settings of Triton and Inductor. Their caches are ours, since the kernels in them are empty."""
    ptxas = next((ROOT / ".venv").glob("lib/python3.*/site-packages/triton/backends/nvidia/bin/ptxas-blackwell"))
    return {"TRITON_PTXAS_PATH": str(HERE / "short_ptxas"), "TRITON_PTXAS_BLACKWELL_PATH": str(HERE / "short_ptxas"),
            "SHORT_PTXAS": str(ptxas), "TRITON_CACHE_DIR": str(VENV / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(VENV / "inductor")}


def measure(build, source, device, jobs, done):
    """Runs the source's program once on the device; calls `done` with each line that it prints."""
    with tempfile.TemporaryDirectory(prefix="oomdiag-truth-") as folder:
        file = pathlib.Path(folder) / "jobs.json"
        file.write_text(json.dumps(jobs))
        # Published figures are of torch before 2.15, which kept cuBLAS's workspaces and had no kernels of its own in Triton.
        environment = os.environ | short_compilations() | {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_DISABLE_NATIVE_JIT": "1"}
        command = [build / "bin/oomdiag", "run", "--device", device, "--folder", folder, "--no-progress", "--",
                   VENV / "bin/python", HERE / f"{source}_rows.py", file, VENV / source]
        with (pathlib.Path(folder) / "said").open("w+") as said:
            run = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
            for line in run.stdout:
                if line.startswith("{"):
                    done(json.loads(line))
            if run.wait() != 0:
                said.seek(0)
                print(said.read()[-3000:], file=sys.stderr)


def measure_all(build, rows, file):
    """What each row came to, by source, device and label: {"mib": …} or {"error": …}."""
    found = {}
    if file and file.exists():
        found = {line["row"]: line for line in map(json.loads, file.read_text().splitlines())}
    keep = file.open("a") if file else open(os.devnull, "w")
    groups = collections.defaultdict(list)
    for row in rows:
        if name(row) not in found:
            groups[row.source, row.device].append(row)
    for (source, device), group in groups.items():
        def done(told):
            found[told["row"]] = told
            print(json.dumps(told), file=keep, flush=True)
        measure(build, source, device, [row.job | {"row": name(row)} for row in group], done)
    keep.close()
    return found


def name(row):
    return f"{row.source} {row.device} {row.label}"


def reason(row):
    return next((start for start in REASONS if name(row).startswith(start)), None)


def report(rows, found):
    """Prints the table, and returns what is wrong."""
    wrong, used = [], set()
    errors = collections.defaultdict(list)
    missing = collections.Counter()
    for row in rows:
        told = found.get(name(row), {"error": "the program did not come to it"})
        why = reason(row)
        if "error" in told:
            missing[row.source] += 1
            shown, off = told["error"], True
        else:
            error = 100 * (told["mib"] - row.published) / row.published
            errors[row.source].append(abs(error))
            shown, off = f"published {row.published:g} MiB, here {told['mib']:g}, {error:+.2f} %", abs(error) > OFF
        if off:
            used.add(why)
            print(f"{name(row)}: {shown}; {REASONS.get(why, 'no reason is known')}")
            if not why:
                wrong.append(f"{name(row)}: no reason is known")
    print("\nsource    rows  not run  equal  within 1 %  median %  90th %  worst %")
    for source in [*SOURCES, "all"]:
        these = sorted(sum(errors.values(), []) if source == "all" else errors[source])
        if these:
            rank = these[min(len(these) - 1, int(0.9 * len(these)))]
            print(f"{source:9} {len(these):4}  {sum(missing.values()) if source == 'all' else missing[source]:7}  "
                  f"{sum(e <= EQUAL for e in these):5}  {sum(e <= OFF for e in these):10}  {statistics.median(these):8.4f}  {rank:6.2f}  {these[-1]:7.2f}")
    every = sum(errors.values(), [])
    if not every:
        return ["no row ran"]
    if sum(e > OFF for e in every) > MOST_ROWS_OFF * len(every):
        wrong.append(f"{sum(e > OFF for e in every)} of {len(every)} rows are off by more than {OFF:g} %")
    if statistics.median(every) > MEDIAN:
        wrong.append(f"the median error is {statistics.median(every):.4f} %")
    if len(rows) == len(all_rows()):
        wrong += [f"the reason of '{start}' is not needed any more" for start in REASONS if start not in used]
    return wrong


def all_rows():
    return [row for rows in SOURCES.values() for row in rows()]


def make_venv():
    """An environment that finds the torch of the build's, and each release of liger-kernel in a folder of its own."""
    wanted = sorted({row.job["release"] for row in liger_rows()})
    if not (VENV / "bin/python").exists():
        base = ROOT / ".venv"
        subprocess.run([base / "bin/python", "-m", "venv", VENV], check=True)
        folder = next(base.glob("lib/python3.*/site-packages"))
        (VENV / folder.relative_to(base) / "torch.pth").write_text(f"{folder}\n")
        subprocess.run([VENV / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", *PEFT], check=True)
    for release in wanted:
        if not (VENV / "liger" / release).exists():
            subprocess.run([VENV / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", VENV / "liger" / release,
                            f"liger-kernel=={release}"], check=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--source", choices=SOURCES)
    parser.add_argument("--device")
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", type=pathlib.Path)
    options = parser.parse_args()
    rows = [row for row in all_rows() if options.source in (None, row.source) and options.device in (None, row.device)
            and re.search(options.only, name(row))]
    make_venv()
    wrong = report(rows, measure_all(options.build.resolve(), rows, options.rows))
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
