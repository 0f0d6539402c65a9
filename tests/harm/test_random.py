"""Random programs end with the recorder as they do without it. The seed of each one that does not is printed.

    python tests/harm/test_random.py --build BUILD_FOLDER [--runs 200] [--first SEED]
"""
import argparse
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness


def is_harmed(both, seed):
    """What differs, or an empty text."""
    with_us, without, folder = both.run(f"seed-{seed}", seed=seed)
    try:
        if with_us.comparable() != without.comparable():
            return f"with: {with_us.comparable()}\n  without: {without.comparable()}"
        if with_us.said_by_oomdiag():
            return with_us.stderr
        report, done = both.report(folder)
        if report is None:
            return f"no report: {done.stderr}"
        return "" if report["replay_error_bytes"] == 0 else f"the replay errs by {report['replay_error_bytes']}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    both = harness.Both(options.build.resolve())
    harmed = 0
    try:
        for seed in range(options.first, options.first + options.runs):
            if difference := is_harmed(both, seed):
                harmed += 1
                print(f"seed {seed}: {difference}", flush=True)
    finally:
        both.end()
    print(f"{options.runs} programs, {harmed} ended otherwise than without the recorder")
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
