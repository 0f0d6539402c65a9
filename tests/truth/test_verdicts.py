"""Which batches fitted on real GPUs, and with which they ran out of memory, tried again on the virtual GPU of the same kind.

    python tests/truth/test_verdicts.py --build BUILD_FOLDER [--device rtx4090] [--part I/N] [--rows FILE]

timm.csv has, of timm's published tables of inference (commit 90cae8c5; torch 2.9.1, float16 autocast), each model with which 1024
images did not fit, and the largest batch of the list 1024, 768, 512, 384, … that did: two verdicts, as the next larger one failed. The first
time this makes .venv-truth-timm with that torch. Prints each model of which a verdict differs, with what was allocated and reserved at the
batch in question, and how many verdicts are right. --part takes every Nth model, and --rows keeps what was found, as in test_truth.py; all
models take about three hours on a core. Not part of scripts/test.
"""
import argparse
import csv
import pathlib
import sys
import tempfile

import runs

VENV = runs.ROOT / ".venv-truth-timm"
PACKAGES = ("torch==2.9.1", "torchvision==0.24.1", "numpy", "pyyaml", "safetensors", "huggingface_hub")
TIMES = runs.ROOT / "scripts/time_model/published.csv"
LEAST_RIGHT = 0.85  # of the verdicts


def options_of(device):
    """Those that the table of this GPU was made with, as its times have it: they are in the name of its suite (scripts/time_model/programs.py)."""
    with TIMES.open() as stream:
        suite = next(row["suite"] for row in csv.DictReader(stream) if row["device"] == device and row["suite"].startswith("timm-infer"))
    return {"fast_norm": "fast-norm" in suite, "reparam": "reparam" in suite}


def published(device, part):
    with (runs.HERE / "timm.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if device in (None, row["device"])]
    options = {device: options_of(device) for device in {row["device"] for row in rows}}
    first, step = map(int, part.split("/"))
    return [row | options[row["device"]] | {"row": f"{row['device']} {row['model']} {row['size']}"} for row in rows[first::step]]


def judge(row, found):
    """How many of the two verdicts are right, and what to print where one is not. The batches that were tried end with the one that fits."""
    there, here = int(row["batch"]), found["batch"]
    if here == there:
        return 2, None
    tried = next(one for one in found["tries"] if one["batch"] == max(here, there))
    return 1, (f"{row['row']}: {there} fit on the GPU, and {here} here; at {tried['batch']} {tried['allocated_mib']} MiB were allocated and "
               f"{tried['reserved_mib']} reserved{': ' + tried['error'][:60] if tried['error'] else ''}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=runs.ROOT / "build")
    parser.add_argument("--device")
    parser.add_argument("--part", default="0/1", metavar="I/N")
    parser.add_argument("--rows", type=pathlib.Path)
    options = parser.parse_args()
    rows = published(options.device, options.part)
    kept = runs.Kept(options.rows)
    runs.make_venv(VENV, PACKAGES, ("--no-deps", "timm==1.0.24"))
    for device in sorted({row["device"] for row in rows}):
        if missing := [row for row in rows if row["device"] == device and row["row"] not in kept.lines]:
            with tempfile.TemporaryDirectory(prefix="oomdiag-verdicts-") as folder:
                runs.run_rows(options.build.resolve(), device, (VENV / "bin/python", runs.HERE / "timm_rows.py"), missing, folder, kept.add,
                              {"HF_HUB_OFFLINE": "1"})
    found = kept.lines
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
