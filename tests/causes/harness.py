"""Runs jobs through nursery.py under `oomdiag run` and reads the report of each."""
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_jobs(build, jobs, device="rtx3060"):
    """The jobs (see nursery.py), each with "told", what its process printed, and "report", or None where there is none."""
    base = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-causes-"))
    oomdiag = str(pathlib.Path(build) / "bin/oomdiag")
    for number, job in enumerate(jobs):
        job["folder"] = str(base / str(number))
    (base / "jobs.json").write_text(json.dumps(jobs))
    nursery = str(ROOT / "tests/causes/nursery.py")
    done = subprocess.run([oomdiag, "run", "--device", device, "--folder", str(base), "--", sys.executable, nursery,
                           str(base / "jobs.json")], capture_output=True, text=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(told) != len(jobs):
        raise RuntimeError(f"{len(told)} of {len(jobs)} programs ran\n{done.stderr[-2000:]}")
    for job, words in zip(jobs, told):
        explained = subprocess.run([oomdiag, "explain", job["folder"] + "/trace", "--json"], capture_output=True, text=True)
        job["told"] = words
        job["report"] = json.loads(explained.stdout) if explained.returncode == 0 else None
        pathlib.Path(job["folder"], "trace").unlink(missing_ok=True)
    return jobs
