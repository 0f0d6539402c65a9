"""How long steps of published fine-tunings take, and how long they are modelled to take: of a GPU, programs and a library of which no
figure was fitted.

    python tests/truth/test_times.py --build BUILD_FOLDER [--rows FILE]

peft.csv has, as step_ms, the mean of 5000 steps of each method of PEFT's comparison ("train time" of its results; Llama-3.2-3B in bfloat16 on
an L40S). Each is run metered on the virtual L40S (peft_rows.py, and the environment that test_truth.py --source peft makes). Prints each
method and the errors; --rows keeps the modelled times in a file; what is in it is not run again. Takes a quarter of an hour, so not part of scripts/test.
"""
import argparse
import csv
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import runs
import test_truth

MOST_OFF = 15  # per cent, in the median
TOO_LONG = "FROD"  # whose matrices the host decomposes for more than five minutes


def measure(build, rows):
    """Of each experiment that ran the milliseconds of a modelled step, and what bounds it."""
    with tempfile.TemporaryDirectory(prefix="oomdiag-times-") as folder:
        answers = []
        runs.run_rows(build, "l40s", (test_truth.VENV / "bin/python", runs.HERE / "peft_rows.py"), rows, folder, answers.append,
                      {"TORCH_DISABLE_NATIVE_JIT": "1"}, ["--meter"])
        for answer in answers:
            if "mib" not in answer:
                continue
            place = next(pathlib.Path(folder).glob("oomdiag-*")) / str(answer["pid"])
            place = place if (place / "work").exists() else place.parent  # of the first child
            explained = subprocess.run([build / "bin/oomdiag", "explain", "--json", place / "trace"], stdout=subprocess.PIPE, check=True)
            if work := json.loads(explained.stdout)["work"]:
                yield {"row": answer["row"], "ms": work["step_time_ns"] * 1e-6, "bound_by": work["bound_by"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=runs.ROOT / "build")
    parser.add_argument("--rows", type=pathlib.Path)
    options = parser.parse_args()
    with (runs.HERE / "peft.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    kept = runs.Kept(options.rows)
    missing = [row | {"row": row["experiment"]} for row in rows if row["experiment"] not in kept.lines and row["method"] != TOO_LONG]
    if missing:
        test_truth.make_venvs({"peft"})
        for line in measure(options.build.resolve(), missing):
            kept.add(line)
    errors = []
    for row in rows:
        if found := kept.lines.get(row["experiment"]):
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
