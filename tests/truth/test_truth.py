"""Published measurements of real GPUs, measured again on the virtual GPU of the same kind.

    python tests/truth/test_truth.py --build BUILD_FOLDER [--source liger] [--device a100-80] [--only REGEX] [--rows FILE]

The tables beside this file have the figures with their sources. The first time it makes .venv-truth with the packages that the
figures name, next to the torch that is there; the figures of an H100 and an H200 need another torch, in .venv-truth-h100, and so do
published processes that are run as a whole (liger_processes.csv), in .venv-truth-2.4.1 and the like. Prints each row that is
off with the reason that explained.csv has for it, and of each source the rows, the median, the 90th percentile and the worst error. A
series (one program, many sizes) whose rows all differ by the same bytes is counted apart: the published process held something besides.
--rows keeps what was measured in a file; what is in it is not measured again. Not part of scripts/test, as it takes hours.
"""
import argparse
import collections
import csv
import functools
import pathlib
import re
import statistics
import sys
import tempfile

import runs

VENV = runs.ROOT / ".venv-truth"
MOST_ROWS_OFF = 0.1  # of those that ran, by more than OFF and not by a constant of their series
SAME = 0.01  # MiB, by which the differences of a series may differ
OFF = 1.0  # per cent
MEDIAN = 0.1  # per cent
EQUAL = 1e-4  # per cent: published figures have seven digits
DIGITS = 2e-6  # of a figure, which its last digit and the first that is missing come to
PEFT_FITTED = "lora/rank32"  # the row that peft_rows.py has its length of a batch from
PEFT = ("peft==0.20.0", "accelerate==1.15.0", "psutil==7.1.3")  # the release after the published runs' commit
MEGATRON = ("megatron-core==0.16.1",)  # the newest release before the published runs

H100 = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0", "transformers==5.17.0", "numpy")  # of the runs on the GPU; transformers imports all

TORCH_OF_BUILD = ""  # in the place of a version

Row = collections.namedtuple("Row", "source device label series published job")
Explanation = collections.namedtuple("Explanation", "rows whose why")  # of the rows whose names the expression finds


def liger_processes():
    """Published processes in which tensors live on from one row to the next: an expression that finds the names of their rows, their torch,
    and before which of their measurements, counted from 1, Python's collector ran."""
    return [line | {"collected": [int(number) for number in line["collected"].split()]}
            for line in csv.DictReader((runs.HERE / "liger_processes.csv").open())]


def liger_rows():
    rows, processes = [], liger_processes()
    for number, series in enumerate(csv.DictReader((runs.HERE / "liger.csv").open())):
        sizes, figures = [int(size) for size in series["sizes"].split()], [float(figure) for figure in series["mib"].split()]
        for size, figure in zip(sizes, figures, strict=True):
            label = f"{series['operator']} {series['provider']} {series['mode']} {series['size_name']}={size} {series['config']}"
            job = {name: series[name] for name in ("operator", "provider", "mode", "config", "release", "commit")}
            row = Row("liger", series["device"], f"{label} ({series['commit']})", number, figure, job | {"size": size})
            process = next((line for line in processes if re.search(line["process"], name(row))), {})
            rows.append(row._replace(job=row.job | process))
    return rows


def peft_rows():
    return [Row("peft", "l40s", series["experiment"], series["experiment"], float(series["mib"]), series)
            for series in csv.DictReader((runs.HERE / "peft.csv").open()) if series["experiment"] != PEFT_FITTED]


MEASURED = {"h100": "h100-sxm", "h200": "h200"}  # tables of trainings measured by measured_rows.py, and the device


def measured_rows(source):
    return [Row(source, MEASURED[source], f"{training['program']} {training['plan']} {figure}", f"{training['program']} {figure}",
                int(training[figure]) / 2**20, {"program": training["program"], "plan": training["plan"], "figure": figure})
            for figure in ("allocated_bytes", "reserved_bytes") for training in csv.DictReader((runs.HERE / f"{source}.csv").open())]


SOURCES = {"liger": liger_rows, "peft": peft_rows, **{source: functools.partial(measured_rows, source) for source in MEASURED}}


def torch_of(row):
    """Of those that it needs, if not the build's."""
    return row.job.get("torch", TORCH_OF_BUILD)


def venv_of(source, torch):
    if source in MEASURED:
        return runs.ROOT / ".venv-truth-h100"
    return runs.ROOT / f".venv-truth-{torch}" if torch else VENV


def short_compilations(venv, caches):
    """Settings of Triton and Inductor. Their caches are ours, since the kernels in them are empty."""
    ptxas = max(venv.glob("lib/python3.*/site-packages/triton/backends/nvidia/bin/ptxas*"))  # that for Blackwell, where there are two
    return {"TRITON_PTXAS_PATH": str(runs.HERE / "short_ptxas"), "TRITON_PTXAS_BLACKWELL_PATH": str(runs.HERE / "short_ptxas"),
            "SHORT_PTXAS": str(ptxas), "TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}


def measure(build, source, device, torch, jobs, done):
    """Runs the source's program once on the device; calls `done` with each line that it prints."""
    venv = venv_of(source, torch)
    program = runs.HERE / f"{'measured' if source in MEASURED else source}_rows.py"
    # Published figures are of torch before 2.15, which kept cuBLAS's workspaces and had no kernels of its own in Triton.
    settings = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_DISABLE_NATIVE_JIT": "1"}
    with tempfile.TemporaryDirectory(prefix="oomdiag-truth-") as folder:
        if torch:  # no recorder is written for it; and compiled anew, each time the same tensors live on
            settings |= short_compilations(venv, pathlib.Path(folder))
        else:
            settings |= short_compilations(runs.BASE, VENV)
        runs.run_rows(build, device, (venv / "bin/python", program, VENV / source), jobs, folder, done, settings)


def measure_all(build, rows, file):
    """What each row came to, by source, device and label: {"mib": …} or {"error": …}."""
    kept = runs.Kept(file)
    groups = collections.defaultdict(list)
    for row in with_whole_processes([row for row in rows if name(row) not in kept.lines]):
        groups[row.source, row.device, torch_of(row)].append(row)
    for (source, device, torch), group in groups.items():
        measure(build, source, device, torch, [row.job | {"row": name(row)} for row in group], kept.add)
    return kept.lines


def with_whole_processes(rows):
    """In their order, with all the rows of each published process that has one of them."""
    wanted, processes = set(map(name, rows)), {row.job["process"] for row in rows if "process" in row.job}
    return [row for row in all_rows() if name(row) in wanted or row.job.get("process") in processes]


def name(row):
    return f"{row.source} {row.device} {row.label}"


def explanations():
    return [Explanation(re.compile(line["rows"]), line["whose"], line["why"]) for line in csv.DictReader((runs.HERE / "explained.csv").open())]


def explain(here, known):
    return next((explanation for explanation in known if explanation.rows.search(here)), None)


def differences(rows, found):
    """By name, what each row that ran differs by, in MiB; and the names of those that differ by the same as all of their series."""
    difference, series = {}, collections.defaultdict(list)
    for row in rows:
        if "mib" in found.get(name(row), {}):
            difference[name(row)] = found[name(row)]["mib"] - row.published
            series[row.source, row.series].append(row)
    same = set()
    for group in series.values():
        found_here = [difference[name(row)] for row in group]
        if len(group) > 2 and max(found_here) - min(found_here) < SAME + DIGITS * max(row.published for row in group):
            same.update(map(name, group))
    return difference, same


def summarize(errors, constant, not_run):
    """A line of the table of one source; errors in per cent, ascending."""
    rank = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return (f"{len(errors):5}  {not_run:7}  {sum(e <= EQUAL for e in errors):5}  {sum(e <= OFF for e in errors):10}  {constant:8}  "
            f"{statistics.median(errors):8.4f}  {rank:6.2f}  {errors[-1]:7.2f}")


def report(rows, found):
    """Prints the table, and returns what is wrong."""
    difference, same = differences(rows, found)
    errors = {name(row): abs(100 * difference[name(row)] / row.published) for row in rows if name(row) in difference}
    known, whose, unexplained = explanations(), collections.Counter(), []
    for row in rows:
        here = name(row)
        if here not in errors:
            print(f"{here}: not run: {found.get(here, {'error': 'the program did not come to it'})['error']}")
        elif errors[here] > OFF:
            explanation = explain(here, known)
            print(f"{here}: published {row.published:g} MiB, here {difference[here]:+.3f} MiB, {errors[here]:.2f} %"
                  f"{', the same at all sizes' if here in same else ''}: {explanation.why if explanation else 'not explained'}")
            whose[explanation.whose if explanation else "not explained"] += 1
            if not explanation:
                unexplained.append(here)
    print("\nsource    rows  not run  equal  within 1 %  constant  median %  90th %  worst %")
    for source in [*SOURCES, "all"]:
        these = [name(row) for row in rows if source in (row.source, "all")]
        if ran := [row for row in these if row in errors]:
            constant = sum(errors[row] > OFF and row in same for row in ran)
            print(f"{source:8}{summarize(sorted(map(errors.get, ran)), constant, len(these) - len(ran))}")
    print("\nrows off by more than 1 %, by what they differ in")
    for reason, count in whose.most_common():
        print(f"{count:5}  {reason}")
    if not errors:
        return ["no row ran"]
    wrong = [f"explained.csv does not say why {here} is off" for here in unexplained]
    off = sum(error > OFF and row not in same for row, error in errors.items())
    if off > MOST_ROWS_OFF * len(errors):
        wrong.append(f"{off} of {len(errors)} rows are off by more than {OFF:g} %, and not by a constant")
    if statistics.median(errors.values()) > MEDIAN:
        wrong.append(f"the median error is {statistics.median(errors.values()):.4f} %")
    return wrong


def all_rows():
    return [row for rows in SOURCES.values() for row in rows()]


def make_venvs(sources, torches=frozenset()):
    """One that finds the torch of the build's, with each release of liger-kernel in a folder of its own; that of the torch of the H100 and
    the H200; and those of published processes."""
    if sources & set(MEASURED):
        runs.make_venv(venv_of("h100", TORCH_OF_BUILD), H100)
    for torch in torches - {TORCH_OF_BUILD}:
        runs.make_venv(venv_of("liger", torch), (f"torch=={torch}", "numpy", "packaging"))
    if not sources & {"liger", "peft"}:
        return
    runs.make_venv(VENV, ("--no-deps", *PEFT, *MEGATRON))
    folder = next(runs.BASE.glob("lib/python3.*/site-packages"))
    (VENV / folder.relative_to(runs.BASE) / "torch.pth").write_text(f"{folder}\n")
    for release in sorted({row.job["release"] for row in liger_rows()}):
        if not (VENV / "liger" / release).exists():
            package = "liger-kernel-nightly" if "dev" in release else "liger-kernel"  # of the commit itself, where a row's release is later
            runs.install(VENV, "--no-deps", "--target", VENV / "liger" / release, f"{package}=={release}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=runs.ROOT / "build")
    parser.add_argument("--source", choices=SOURCES)
    parser.add_argument("--device")
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", type=pathlib.Path)
    options = parser.parse_args()
    rows = [row for row in all_rows() if options.source in (None, row.source) and options.device in (None, row.device)
            and re.search(options.only, name(row))]
    make_venvs({row.source for row in rows}, {torch_of(row) for row in rows})
    wrong = report(rows, measure_all(options.build.resolve(), rows, options.rows))
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
