"""Runs jobs through run_forked.py under `oomdiag run` and reads the report of each."""
import atexit
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report_json import load_report  # noqa: E402


def write_device_file():
    """The programs' memory is chosen to a few MiB: on this RTX 3060 they have as much of it when the estimate of a context changes."""
    file = json.loads((ROOT / "extension/virtual_device/device_files/rtx3060.json").read_text())
    for field, mebibytes in (("context_bytes", 84), ("first_kernel_bytes", 66)):
        file[field] = {"value": mebibytes << 20, "mark": "U", "source": "estimate: of the tests"}
    folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-causes-device-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "rtx3060.json"
    path.write_text(json.dumps(file))
    return str(path)


DEVICE = write_device_file()
ANSWER = "answer of run_forked: "  # as run_forked.py, which imports torch, has it


def run_jobs(build, jobs, device=DEVICE):
    """The jobs (see run_forked.py; "options" are further ones of oomdiag run), each with "answer", what its process printed, and
    "report", or None where there is none; with "screen" also "screen_text", the first screen."""
    base = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-causes-"))
    oomdiag = str(pathlib.Path(build) / "bin/oomdiag")
    for number, job in enumerate(jobs):
        job["folder"] = str(base / str(number))
    for options in sorted({tuple(job.get("options", ())) for job in jobs}):
        run_folder([oomdiag, "run", "--device", device, *options, "--folder", str(base)], base,
              [job for job in jobs if tuple(job.get("options", ())) == options])
    for job in jobs:
        explained = subprocess.run([oomdiag, "explain", job["folder"] + "/trace", "--json"], capture_output=True, text=True)
        job["report"] = load_report(explained.stdout) if explained.returncode == 0 else None
        job["why_no_report"] = explained.stderr
        if job.get("screen"):
            shown = subprocess.run([oomdiag, "explain", job["folder"] + "/trace"], capture_output=True, text=True)
            job["screen_text"] = shown.stdout
        pathlib.Path(job["folder"], "trace").unlink(missing_ok=True)
    return jobs


def run_folder(command, base, jobs):
    (base / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([*command, "--", sys.executable, str(ROOT / "tests/causes/run_forked.py"), str(base / "jobs.json")],
                          capture_output=True, text=True)
    answers = [json.loads(line.removeprefix(ANSWER)) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if len(answers) != len(jobs):
        raise RuntimeError(f"{len(answers)} of {len(jobs)} programs ran\n{done.stderr[-2000:]}")
    for job, words in zip(jobs, answers):
        job["answer"] = words


def train_jobs(build, jobs, device=DEVICE):
    """The jobs are reference models in C++, "train" the arguments of oomdiag train; each with "answer" and "report" as above."""
    ends = {0: "ok", 3: "out_of_memory"}
    for job in jobs:
        with tempfile.TemporaryDirectory(prefix="oomdiag-causes-") as folder:
            memory = ["--memory", f"{job['memory_mib']}MiB"] if job["memory_mib"] else []
            done = subprocess.run([str(pathlib.Path(build) / "bin/oomdiag"), "train", "--device", device, *memory, "--json",
                                   "--folder", folder, *job["train"]], capture_output=True, text=True,
                                  env={**os.environ, **job["environment"]})
        job["answer"] = {"name": job["name"], "ended": ends.get(done.returncode, "failed: " + done.stderr[-500:]), "result": None}
        job["report"] = load_report(done.stdout) if done.stdout else None
        job["why_no_report"] = done.stderr
    return jobs
