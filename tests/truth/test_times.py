"""How long steps of published fine-tunings take, and how long they are modelled to take: of a GPU, programs and a library of which no
figure was fitted.

    python tests/truth/test_times.py --build BUILD_FOLDER [--rows FILE]

peft.csv has, as step_ms, the mean of 5000 steps of each method of PEFT's comparison ("train time" of its results; Llama-3.2-3B in bfloat16 on
an L40S). Each is run metered on the virtual L40S (peft_rows.py, and the environment that test_truth.py --source peft makes). Prints each
method and the errors; --rows keeps the modelled times in a file. Takes a quarter of an hour, so not part of scripts/test.
"""
import argparse
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import test_truth

HERE = pathlib.Path(__file__).resolve().parent
MOST_OFF = 15  # per cent, in the median
TOO_LONG = "FROD"  # whose matrices the host decomposes for more than five minutes


def measure(build, rows):
    """Milliseconds of a modelled step by experiment, and what bounds it."""
    with tempfile.TemporaryDirectory(prefix="oomdiag-times-") as folder:
        file = pathlib.Path(folder) / "rows.json"
        file.write_text(json.dumps([row | {"row": row["experiment"]} for row in rows if row["method"] != TOO_LONG]))
        command = [build / "bin/oomdiag", "run", "--meter", "--device", "l40s", "--folder", folder, "--no-progress", "--",
                   test_truth.VENV / "bin/python", HERE / "peft_rows.py", file]
        run = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                             env=os.environ | {"TORCH_DISABLE_NATIVE_JIT": "1"})
        times = {}
        for line in run.stdout.splitlines():
            answer = json.loads(line) if line.startswith("{") else {}
            if "mib" not in answer:
                continue
            place = next(pathlib.Path(folder).glob("oomdiag-*")) / str(answer["pid"])
            place = place if (place / "work").exists() else place.parent  # of the first child
            explained = subprocess.run([build / "bin/oomdiag", "explain", "--json", place / "trace"], stdout=subprocess.PIPE, check=True)
            if work := json.loads(explained.stdout)["work"]:
                times[answer["row"]] = {"experiment": answer["row"], "ms": work["step_time_ns"] * 1e-6, "bound_by": work["bound_by"]}
        return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build")
    parser.add_argument("--rows", type=pathlib.Path)
    options = parser.parse_args()
    with (HERE / "peft.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    if options.rows and options.rows.exists():
        times = json.loads(options.rows.read_text())
    else:
        test_truth.make_venvs({"peft"})
        times = measure(options.build.resolve(), rows)
        if options.rows and times:
            options.rows.write_text(json.dumps(times))
    errors = []
    for row in rows:
        if found := times.get(row["experiment"]):
            ratio = found["ms"] / float(row["step_ms"])
            errors.append(abs(ratio - 1) * 100)
            print(f"{row['experiment']:45} {float(row['step_ms']):7.1f} ms, modelled {found['ms']:7.1f}, {ratio:.2f}, bound by {found['bound_by']}")
        else:
            print(f"{row['experiment']:45} {float(row['step_ms']):7.1f} ms, not run")
    errors.sort()
    print(f"{len(errors)} of {len(rows)}: median error {statistics.median(errors):.1f} %, 90th percentile {errors[int(0.9 * len(errors))]:.1f} %, "
          f"within 25 % {100 * sum(error <= 25 for error in errors) / len(errors):.0f} %")
    return 1 if statistics.median(errors) > MOST_OFF else 0


if __name__ == "__main__":
    sys.exit(main())
