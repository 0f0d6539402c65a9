"""Which kernels cuDNN chooses for convolutions, and what workspace they want: on a real H200 (h200_plans.csv: cuDNN 9.19, driver
580.159.04), and on the virtual one.

    python tests/truth/test_plans.py --build BUILD_FOLDER [--rows]

Wants the environment that test_truth.py --source h200 makes, whose cuDNN is the same. --rows prints each workspace that differs. Part of
no group of scripts/test, as that environment is 5 GB.
"""
import argparse
import csv
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-truth-h100"
PROBLEM = "direction dtype batch channels size out_channels window stride padding groups".split()
LEAST_EQUAL = 0.75


def ask(build, problems, folder):
    packages = next(VENV.glob("lib/python3.*/site-packages/nvidia"))
    libraries = [packages / "cudnn/lib/libcudnn.so.9", packages / "cu13/lib/libcudart.so.13"]
    program = folder / "plans"
    subprocess.run(["c++", "-std=c++20", "-O1", f"-I{packages}/cudnn/include", f"-I{packages}/cu13/include", HERE / "plans.cpp", *libraries,
                    *(f"-Wl,-rpath,{library.parent}" for library in libraries), "-o", program], check=True)
    command = [build / "bin/oomdiag", "run", "--device", "h200", "--no-progress", "--folder", folder, "--", program]
    done = subprocess.run([str(word) for word in command], input="".join(",".join(problem) + "\n" for problem in problems),
                          stdout=subprocess.PIPE, text=True, check=True)
    return list(csv.DictReader(done.stdout.splitlines(), [*PROBLEM, "place", "engine", "knobs", "workspace_bytes"]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--rows", action="store_true")
    arguments = parser.parse_args()
    with (HERE / "h200_plans.csv").open() as stream:
        real = list(csv.DictReader(stream))
    problems = list(dict.fromkeys(tuple(row[name] for name in PROBLEM) for row in real))
    with tempfile.TemporaryDirectory() as folder:
        here = ask(arguments.build.resolve(), problems, pathlib.Path(folder))
    without = [{name: value for name, value in row.items() if name != "workspace_bytes"} for row in here]
    is_same_list = without == [{name: value for name, value in row.items() if name != "workspace_bytes"} for row in real]
    differ = [(there, row) for there, row in zip(real, here) if there["workspace_bytes"] != row["workspace_bytes"]]
    best = sum(row["place"] == "0" for _, row in differ)
    print(f"{len(problems)} convolutions and gradients, {len(real)} plans: "
          f"{'the same ones in the same order' if is_same_list else 'other ones'}; {len(real) - len(differ)} want the same workspace, "
          f"and of the best ones {len(problems) - best}")
    for there, row in differ if arguments.rows else ():
        print(*(row[name] for name in PROBLEM), "engine", row["engine"], "knobs", row["knobs"], "workspace", there["workspace_bytes"], "here",
              row["workspace_bytes"])
    return 0 if is_same_list and len(differ) < (1 - LEAST_EQUAL) * len(real) else 1


if __name__ == "__main__":
    sys.exit(main())
