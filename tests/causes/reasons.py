"""Prints how often the first screen names the reason and the fix of the programs in programs/:

    python tests/causes/reasons.py --build BUILD [--quick] [-k NAME] [--module NAME] [-v]

"reason": the first screen gives the one that the program expects (expected.py). "fix": what its three best fixes must mention. Each
program runs again as it was fixed. Exits 1 if a bar is missed, if a fixed program does not fit, or if a line of code is none.
"""
import argparse
import re
import subprocess
import sys

from expected import list_programs
from harness import run_jobs

BARS = {"reason": 0.9, "fix": 0.9}
MOST_LINES = 24


def job_of(program, fixed):
    return {"name": program.function + (", fixed" if fixed else ""), "module": program.module, "function": program.function,
            "arguments": {"fixed": True} if fixed else {}, "memory_mib": program.memory, "environment": {}, "screen": not fixed}


def best_fixes(report):
    """What a reader sees of the three best: the label and the lines."""
    return [" ".join([fix["label"], *fix["how"]]) for fix in report["fixes"][:3]]


def is_python(lines):
    """Whether Python reads them: as they are, as what follows a try, or with the body or the function that a line is for."""
    text = "\n".join(line.split("  #")[0].replace("…", "...") for line in lines)
    for attempt in (text, "try: pass\n" + text, text + " pass", text + "\ndef f(): pass"):
        try:
            compile(attempt, "fix", "exec")
            return True
        except SyntaxError:
            pass
    return False


def no_python(report):
    """Lines of code of the first fixes that Python does not read, neither as a block nor each alone."""
    shell = ("export ", "pip ", "torchrun ", "oomdiag ", "--")
    wrong = []
    for fix in report["fixes"][:4]:
        lines = [line for line in fix["how"] if not line.startswith(shell)]
        if not is_python(lines):
            wrong += [line for line in lines if not is_python([line.strip()])]
    return wrong


def judge(program, job):
    report = job["report"]
    if report is None:
        return {"reason": False, "fix": False, "lines": 0, "named": "no report: " + job["why_no_report"][-200:]}
    reasons = [report["reason"]] if report.get("reason") else []
    if reasons and report.get("besides"):
        reasons.append(report["besides"]["reason"])  # "besides"
    screen = job["screen_text"].replace("\n             ", " ")
    shown = [reason["id"] for reason in reasons if reason["text"].split(":")[0] in screen]
    cause = (report["cause"] or {}).get("kind", report["outcome"])
    named = " and ".join(shown) if reasons else cause
    shown += [cause] if "whole_step" in shown or not shown else []  # which says what there is, where nothing stands out
    mentions = any(re.search(program.fix, text, re.I) for text in best_fixes(report))
    ran = job["answer"]["ended"] in ("ok", "out_of_memory")  # another error is none of what the program is for
    return {"reason": ran and program.reason in shown, "fix": ran and mentions, "lines": job["screen_text"].count("\n"),
            "named": named}


def claim_of(program, job, cured):
    """What the report claims of the fix of its reason, and the measured peak of the fixed program; None where that has
    another fix, or none is known. A lower bound above the measured peak is false, and so is "fits" of what ran out of memory."""
    report = job["report"]
    reason = (report or {}).get("reason")
    fix = next((fix for fix in report["fixes"] if fix["id"] == reason["fix"]), None) if reason and reason["id"] == program.reason else None
    if fix is None or not re.search(program.fix, " ".join([fix["label"], *fix["how"]]), re.I):
        return None
    ended, measured = cured["answer"]["ended"], cured["answer"]["max_allocated"]
    predicted = fix["predicted_peak_bytes"]
    fits = fix["predicted_fits"] is True
    is_true = measured >= 0.99 * predicted if fix["at_least"] else not fits or ended == "ok"
    return {"name": program.function, "fix": fix["id"], "at_least": fix["at_least"], "fits": fits, "predicted": predicted,
            "measured": measured, "true": is_true}


def print_claims(claims):
    bounds = [claim for claim in claims if claim["at_least"]]
    fits = [claim for claim in claims if claim["fits"] and not claim["at_least"]]
    for claim in claims:
        if not claim["true"]:
            print(f"FALSE {claim['name']}: {claim['fix']} {'takes at least' if claim['at_least'] else 'fits with'} "
                  f"{claim['predicted'] >> 20} MiB, measured {claim['measured'] >> 20}")
    print(f"claims     {len(bounds)} bounds, of them {sum(claim['true'] for claim in bounds)} true; {len(fits)} that say it fits, of them "
          f"{sum(claim['true'] for claim in fits)} true")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true", help="the few that every test run has")
    parser.add_argument("-v", action="store_true", help="print each screen")
    parser.add_argument("-k", default="", help="programs with this in their name only")
    parser.add_argument("--module", default="", help="those of files with this in their name only")
    parser.add_argument("--seen", action="store_true", help="without those that are held back")
    parser.add_argument("--no-cure", action="store_true", help="do not run the fixed programs")
    options = parser.parse_args()
    chosen = [p for p in list_programs() if (p.quick or not options.quick) and options.k in p.function
              and options.module in p.module and not (options.seen and p.held_back)]
    cured = [] if options.no_cure or options.quick else chosen
    jobs = run_jobs(options.build, [job_of(p, False) for p in chosen] + [job_of(p, True) for p in cured])
    failures = 0
    sums = {}
    for program, job in zip(chosen, jobs):
        verdict = judge(program, job)
        group = sums.setdefault("held back" if program.held_back else "seen", [0, 0, 0])
        for i, hit in enumerate((True, verdict["reason"], verdict["fix"])):
            group[i] += hit
        failures += verdict["lines"] > MOST_LINES
        for line in no_python(job["report"]) if job["report"] else []:
            failures += 1
            print(f"NO  {program.function}: no Python: {line}")
        if options.v or not (verdict["reason"] and verdict["fix"]) or verdict["lines"] > MOST_LINES:
            print(f"{'ok ' if verdict['reason'] else 'NO '}{'ok ' if verdict['fix'] else 'NO '} {program.function}"
                  f"{' (held back)' if program.held_back else ''}: is {program.reason}, named {verdict['named']}; "
                  f"{job['answer']['ended'][:200]}; {verdict['lines']} lines")
        if options.v:
            print(job["screen_text"])
    claims = [claim_of(*of) for of in zip(chosen, jobs, jobs[len(chosen):])]
    if cured:
        print_claims([claim for claim in claims if claim])
    for job in jobs[len(chosen):]:
        if job["answer"]["ended"] != "ok":
            failures += 1
            print(f"NO  {job['name']}: does not fit: {job['answer']['ended'][:300]}")
    total = [sum(group[i] for group in sums.values()) for i in range(3)]
    for name, (count, reason, fix) in [*sums.items(), ("all", total)]:
        print(f"{name:10} {count:3} programs, reason named {reason}, needed fix among the first three {fix}")
    enough = total[1] >= BARS["reason"] * total[0] and total[2] >= BARS["fix"] * total[0]
    sys.exit(0 if enough and not failures else 1)


if __name__ == "__main__":
    main()
