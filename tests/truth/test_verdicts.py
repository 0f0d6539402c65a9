"""Which batches real GPUs survived and which they refused, tried again on the virtual GPU of the same kind.

    python tests/truth/test_verdicts.py --build BUILD_FOLDER [--device rtx4090] [--part I/N] [--rows FILE]

timm.csv has, of timm's published tables of inference (commit 90cae8c5; torch 2.9.1, float16 autocast), each model that did not survive 1024
images, and the largest batch of the list 1024, 768, 512, 384, … that it survived: two verdicts, as the next larger one was refused. The first
time this makes .venv-truth-timm with that torch. Prints each model of which a verdict differs, with what was allocated and reserved at the
batch in question, and how many verdicts are right. --part takes every Nth model, and --rows keeps what was found, as in test_truth.py; all
models take about three hours on a core. Not part of scripts/test.
"""
import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-truth-timm"
PACKAGES = ("torch==2.9.1", "torchvision==0.24.1", "numpy", "pyyaml", "safetensors", "huggingface_hub")
# Of the published program. Which ones a table was made with is not said; the times of models that they change are met with these
# (scripts/time_model/programs.py).
OPTIONS = {"rtx4090": {"fast_norm": True, "reparam": True}, "rtx5090": {"fast_norm": False, "reparam": True}}
LEAST_RIGHT = 0.85  # of the verdicts


def make_venv():
    if not (VENV / "bin/python").exists():
        subprocess.run([ROOT / ".venv/bin/python", "-m", "venv", VENV], check=True)
        for packages in (PACKAGES, ("--no-deps", "timm==1.0.24")):
            subprocess.run([VENV / "bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)


def published(device, part):
    with (HERE / "timm.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if device in (None, row["device"])]
    first, step = map(int, part.split("/"))
    return [row | OPTIONS[row["device"]] | {"row": f"{row['device']} {row['model']} {row['size']}"} for row in rows[first::step]]


def measure(build, device, rows, keep):
    with tempfile.TemporaryDirectory(prefix="oomdiag-verdicts-") as folder:
        file = pathlib.Path(folder) / "rows.json"
        file.write_text(json.dumps(rows))
        command = [build / "bin/oomdiag", "run", "--device", device, "--folder", folder, "--no-progress", "--", VENV / "bin/python",
                   HERE / "timm_rows.py", file]
        run = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env=os.environ | {"HF_HUB_OFFLINE": "1"})
        for line in run.stdout:
            if line.startswith("{"):
                keep(json.loads(line))
        run.wait()


def judge(row, found):
    """How many of the two verdicts are right, and what to print where one is not. The batches that were tried end with the one that fits."""
    there, here = int(row["batch"]), found["batch"]
    if here == there:
        return 2, None
    tried = next(one for one in found["tries"] if one["batch"] == max(here, there))
    return 1, (f"{row['row']}: {there} survive on the GPU, and {here} here; at {tried['batch']} {tried['allocated_mib']} MiB were allocated and "
               f"{tried['reserved_mib']} reserved{': ' + tried['error'][:60] if tried['error'] else ''}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--device")
    parser.add_argument("--part", default="0/1", metavar="I/N")
    parser.add_argument("--rows", type=pathlib.Path)
    options = parser.parse_args()
    rows = published(options.device, options.part)
    found = {}
    if options.rows and options.rows.exists():
        found = {line["row"]: line for line in map(json.loads, options.rows.read_text().splitlines())}
    make_venv()
    with open(options.rows or os.devnull, "a") as stream:
        def keep(line):
            found[line["row"]] = line
            print(json.dumps(line), file=stream, flush=True)
        for device in sorted({row["device"] for row in rows}):
            if missing := [row for row in rows if row["device"] == device and row["row"] not in found]:
                measure(options.build.resolve(), device, missing, keep)
    ran = [row for row in rows if "batch" in found.get(row["row"], {})]
    for row in rows:
        if row not in ran:
            print(f"{row['row']}: not run: {found.get(row['row'], {'error': 'the program did not come to it'})['error']}")
    print("\ndevice   models  not run  verdicts  right  too large here  too small here")
    right = 0
    for device in sorted({row["device"] for row in rows}):
        these = [row for row in ran if row["device"] == device]
        judged = [judge(row, found[row["row"]]) for row in these]
        for _, text in judged:
            if text:
                print(text)
        larger = sum(found[row["row"]]["batch"] > int(row["batch"]) for row in these)
        smaller = sum(found[row["row"]]["batch"] < int(row["batch"]) for row in these)
        here = sum(count for count, _ in judged)
        right += here
        not_run = sum(row["device"] == device for row in rows) - len(these)
        print(f"{device:8} {len(these):6}  {not_run:7}  {2 * len(these):8}  {here:5}  {larger:14}  {smaller:14}")
    return 0 if ran and right >= LEAST_RIGHT * 2 * len(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
