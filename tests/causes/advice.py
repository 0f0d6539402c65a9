"""Holds what reports advise against programs that took the advice: python tests/causes/advice.py --build BUILD [--quick] [-v] [-k NAME]

Each program runs on a large GPU, to know what it needs, and on GPUs that are a little too small, where it fails. Each fix of
the report of the failure is applied and run: on the small GPU if it is said to fit, on the large one for its peak. Prints

    what is said to fit     and how much of it does
    whole steps             how far predicted peaks are from measured ones
    "at least"              how often the truth is below it, which it never may be

Programs with a star were kept back while the rules were written. Exits 1 if a bar is missed.
"""
import argparse
import dataclasses
import statistics
import sys

from harness import run_jobs, train_jobs

LARGE = 65536  # MiB
APPLIED = {"half_batch", "accumulate_2", "relu_in_place", "checkpoint", "autocast_bf16", "set_to_none", "fused_optimizer",
           "foreach_off", "sgd", "drop_outputs", "expandable_segments", "sdpa", "chunked_cross_entropy", "adam_8bit",
           "offload_activations"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclasses.dataclass
class Program:
    name: str
    model: str
    batch: int
    arguments: dict = dataclasses.field(default_factory=dict)
    gpus: tuple = (0.4, 0.9)  # parts of what it needs
    kept_back: bool = False
    quick: bool = False
    cpp: bool = False  # a reference model of oomdiag train


PROGRAMS = [
    Program("cnn", "cnn", 1024, quick=True, gpus=(0.3, 0.6, 0.9)),
    Program("cnn, momentum", "cnn", 1024, {"optimizer": "momentum"}, kept_back=True),
    Program("cnn, a larger batch later", "cnn", 1024, {"warm": 1, "steps": 1}, gpus=(0.7,)),
    Program("residual", "residual", 768),
    Program("residual, checkpointed", "residual", 1536, {"checkpointed": True}, kept_back=True),
    Program("residual, autocast", "residual", 768, {"autocast": True}, gpus=(0.8,)),
    Program("mlp", "mlp", 131072, quick=True, gpus=(0.5, 0.95)),
    Program("mlp, outputs held", "mlp", 131072, {"arguments": {"held": True}}, gpus=(0.7,)),
    Program("mlp, zero_grad before backward", "mlp", 32768, {"zero_late": True}, gpus=(0.95,), kept_back=True),
    Program("wide", "wide", 64, gpus=(0.55, 0.8, 0.95), quick=True),
    Program("wide, gradients kept", "wide", 1024, {"keep_gradients": True}, gpus=(0.9,)),
    Program("wide, resumed", "wide", 256, {"resumed": True}, gpus=(0.7, 0.95)),
    Program("wide, bf16", "wide", 4096, {"bf16": True}, gpus=(0.6, 0.95), kept_back=True),
    Program("wide, frozen", "wide", 1024, {"frozen": 8}, gpus=(0.9,)),
    Program("gpt", "gpt", 128, gpus=(0.3, 0.6, 0.97)),
    Program("gpt, long", "gpt", 32, {"arguments": {"length": 1024}}, gpus=(0.5, 0.9), kept_back=True),
    Program("gpt, autocast", "gpt", 128, {"autocast": True}, gpus=(0.8,)),
    Program("gpt, checkpointed", "gpt", 128, {"checkpointed": True}, gpus=(0.8,)),
    Program("gpt, accumulated", "gpt", 128, {"parts": 2}, gpus=(0.9,)),
    Program("gpt, bf16, SGD", "gpt", 128, {"bf16": True, "optimizer": "sgd"}, gpus=(0.7,), kept_back=True),
    Program("encoder", "encoder", 256, gpus=(0.4, 0.95)),
    Program("encoder, resumed", "encoder", 256, {"resumed": True}, gpus=(0.9,), kept_back=True),
    Program("lstm", "lstm", 512, gpus=(0.4, 0.9)),
    Program("mlp in C++", "mlp", 8000000, cpp=True, gpus=(0.6, 0.9)),
    Program("deepcnn in C++", "deepcnn", 6400, cpp=True, gpus=(0.5, 0.8)),
    Program("simplecnn in C++", "simplecnn", 65536, cpp=True, gpus=(0.7,), kept_back=True),
    Program("lstm, momentum", "lstm", 512, {"optimizer": "momentum"}, gpus=(0.7,), kept_back=True),
]


def is_applied(fix):
    return fix in APPLIED or fix.startswith("batch_")


def job_of(program, memory, fixes=(), modules=()):
    environment = EXPANDABLE if "expandable_segments" in fixes else {}
    batch = next((int(fix[6:]) for fix in fixes if fix.startswith("batch_")), program.batch)
    if program.cpp:
        return {"name": program.name, "memory_mib": memory, "environment": environment,
                "train": ("--model", program.model, "--batch", str(batch))}
    return {"name": program.name, "module": "failing", "function": "train", "memory_mib": memory, "environment": environment,
            "arguments": {"model": program.model, "batch": program.batch, **program.arguments, "fixes": list(fixes),
                          "modules": list(modules)}}


@dataclasses.dataclass
class Claim:
    program: Program
    gpu: int  # MiB
    failed: str
    fix: dict
    large: dict  # the job on the large GPU
    small: dict  # on the GPU that it failed on, where it is said to fit

    @property
    def predicted(self):
        return self.fix["predicted_peak_bytes"]

    @property
    def measured(self):
        return self.large["report"]["peak"]["allocated_bytes"]

    @property
    def error(self):
        return abs(self.predicted - self.measured) / self.measured


def run(build, jobs):
    train_jobs(build, [job for job in jobs if "train" in job])
    run_jobs(build, [job for job in jobs if "train" not in job])
    return jobs


def collect(build, programs, quick):
    whole = run(build, [job_of(p, LARGE) for p in programs])
    failing = []
    for program, job in zip(programs, whole):
        if job["answer"]["ended"] != "ok":
            sys.exit(f"{program.name}: {job['answer']['ended']}")
        needs, outside = job["report"]["peak"]["allocated_bytes"], job["report"]["card"]["non_pytorch_bytes"]
        failing += [(program, int((needs * part + outside) / (1 << 20))) for part in program.gpus[-1 if quick else 0:]]
        first = max(p["peak_allocated_bytes"] for p in job["report"]["phases"] if p["step"] <= 1)
        if first < 0.97 * needs:  # between the two it fails in a later step
            failing.append((program, int(((first + needs) / 2 + outside) / (1 << 20))))
    failed = run(build, [job_of(program, gpu) for program, gpu in failing])
    claims, larges = [], {}
    for (program, gpu), job in zip(failing, failed):
        if job["report"] is None:
            print(f"{program.name} on {gpu} MiB: {job['answer']['ended']}, {job['why_no_report']}")
            continue
        failure = job["report"]["failure"]
        if not failure:
            print(f"{program.name} on {gpu} MiB: {job['answer']['ended']}")
            continue
        where = f"{failure['phase']} {failure['step']}, {job['report']['cause']['kind']}"
        for fix in job["report"]["fixes"]:
            ids = fix["ids"] or [fix["id"]]
            if not all(is_applied(one) for one in ids) or (program.cpp and not ids[0].startswith(("batch_", "expandable"))):
                continue
            key = (program.name, tuple(ids), tuple(fix["modules"]))
            large = larges.setdefault(key, job_of(program, LARGE, ids, fix["modules"]))
            small = job_of(program, gpu, ids, fix["modules"]) if fix["predicted_fits"] else None
            claims.append(Claim(program, gpu, where, fix, large, small))
    run(build, list(larges.values()))
    run(build, [claim.small for claim in claims if claim.small])
    return claims


def judge(title, claims):
    """Prints the three figures; whether they are good enough."""
    fits = [claim for claim in claims if claim.small]
    right = [claim for claim in fits if claim.small["answer"]["ended"] == "ok"]
    whole = sorted(claim.error for claim in claims if not claim.fix["at_least"])
    least = [claim for claim in claims if claim.fix["at_least"]]
    above = [claim for claim in least if claim.predicted > claim.measured]
    print(f"{title}: {len(claims)} claims about {len({(c.program.name, c.gpu) for c in claims})} failures")
    if fits:
        print(f"  said to fit: {len(right)} of {len(fits)} do, {100 * len(right) / len(fits):.1f} %")
    if whole:
        print(f"  whole steps: {len(whole)} peaks, error {100 * statistics.median(whole):.2f} % in the median, {100 * whole[-1]:.1f} % at most")
    if least:
        near = statistics.median(claim.predicted / claim.measured for claim in least)
        print(f"  at least: {len(above)} of {len(least)} above the truth; {100 * near:.0f} % of it in the median")
    enough = not fits or len(right) >= 0.97 * len(fits)
    return enough and not above and (not whole or (statistics.median(whole) <= 0.03 and whole[-1] <= 0.10))


def describe(claim):
    mib = lambda size: f"{size / (1 << 20):9.1f}"
    verdict = {True: "fits", False: "too much", None: "unknown"}[claim.fix["predicted_fits"]]
    went = "" if not claim.small else " and does" if claim.small["answer"]["ended"] == "ok" else " BUT FAILS"
    bad = claim.error > 0.1 if not claim.fix["at_least"] else claim.predicted > claim.measured
    return (f"{claim.program.name[:28]:28} {claim.gpu:5} {claim.failed[:28]:28} {claim.fix['id'][:24]:24}"
            f"{'>=' if claim.fix['at_least'] else '  '}{mib(claim.predicted)}{mib(claim.measured)} MiB  {verdict}{went}"
            + (f"   {100 * (claim.predicted / claim.measured - 1):+.1f} %" if bad else "")
            + ("" if claim.large["answer"]["ended"] == "ok" else "  " + claim.large["answer"]["ended"][-80:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true", help="three programs only")
    parser.add_argument("-v", action="store_true", help="print each claim")
    parser.add_argument("-k", default="", help="programs with this in their name only")
    parser.add_argument("--seen", action="store_true", help="not those that were kept back")
    options = parser.parse_args()
    programs = [p for p in PROGRAMS if (p.quick or not options.quick) and options.k in p.name
                and not (options.seen and p.kept_back)]
    claims = collect(options.build, programs, options.quick)
    wrong = [c for c in claims if (c.small and c.small["answer"]["ended"] != "ok") or c.large["answer"]["ended"] != "ok"
             or (c.predicted > c.measured if c.fix["at_least"] else c.error > 0.1)]
    for claim in claims if options.v else wrong:
        print(describe(claim))
    parts = [("programs that the rules were written with", [c for c in claims if not c.program.kept_back]),
             ("programs that were kept back", [c for c in claims if c.program.kept_back])]
    good = [judge(title, part) for title, part in parts if part]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
