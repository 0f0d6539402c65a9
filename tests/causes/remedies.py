"""Prints how near predicted remedies come to re-runs: python tests/causes/remedies.py --build BUILD [--quick]

Each loop runs as it is, its report predicts a peak for each remedy, and each remedy is applied and run. Exits 1 if the median
error is above 3 %, or a remedy that must be proposed is not.
"""
import argparse
import collections
import statistics
import sys

from harness import run_jobs

CARD = 65536  # MiB: everything fits

LOOPS = [
    ("convolutions", {"model": "convolutions"}, ["checkpoint", "autocast_bf16", "half_batch"]),
    ("mlp", {"model": "mlp"}, ["checkpoint", "autocast_bf16", "half_batch", "accumulate_2"]),
    ("transformer", {"model": "transformer"}, ["checkpoint", "autocast_bf16", "half_batch", "accumulate_2"]),
    ("wide mlp", {"model": "wide_mlp"}, ["fused_optimizer", "foreach_off", "sgd"]),
    ("mlp, gradients kept", {"model": "mlp", "keep_gradients": True, "batch": 4096,
                              "optimizer": "sgd"}, ["set_to_none"]),
    ("wide mlp, gradients kept", {"model": "wide_mlp", "keep_gradients": True, "batch": 8192}, ["half_batch"]),
    ("mlp, outputs held", {"model": "mlp", "hold_outputs": True, "optimizer": "sgd"}, ["drop_outputs"]),
    ("mlp without backward", {"model": "mlp", "backward": False, "steps": 1}, ["no_grad"]),
    ("convolutions without backward", {"model": "convolutions", "backward": False, "steps": 1}, ["no_grad"]),
    ("convolutions, inference", {"model": "convolutions", "backward": False, "steps": 2, "inference": True}, ["half_batch"]),
    ("mlp that leaks", {"model": "mlp", "leak": True, "steps": 8}, ["stop_growth"]),
    ("convolutions, SGD", {"model": "convolutions", "optimizer": "sgd", "batch": 32}, ["half_batch", "autocast_bf16"]),
]
QUICK = ("mlp", "wide mlp", "mlp without backward")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true", help="three loops only")
    parser.add_argument("-k", default="", help="loops with this in their name only")
    options = parser.parse_args()
    loops = [one for one in LOOPS if (not options.quick or one[0] in QUICK) and options.k in one[0]]
    job = lambda name, arguments: {"name": name, "module": "cures", "function": "train", "arguments": arguments,
                                   "memory_mib": CARD}
    bases = run_jobs(options.build, [job(name, arguments) for name, arguments, _ in loops], device="h200")
    reruns, missing = [], []
    for base, (name, arguments, wanted) in zip(bases, loops):
        proposed = {r["id"]: r for r in base["report"]["remedies"]}
        missing += [f"{name}: {one} was not proposed" for one in wanted if one not in proposed]
        for one in proposed.values():
            again = job(name, {**arguments, "remedy": one["id"], "modules": one["modules"]})
            reruns.append({**again, "remedy": one, "base": base["told"]["max_allocated"]})
    run_jobs(options.build, reruns, device="h200")

    errors = collections.defaultdict(list)
    print(f"{'loop':30}{'remedy':18}{'as it is':>10}{'predicted':>11}{'measured':>10}  MiB   error")
    for one in reruns:
        predicted, measured = one["remedy"]["predicted_peak_bytes"], one["told"]["max_allocated"]
        error = abs(predicted - measured) / measured
        errors[one["remedy"]["id"]].append(error)
        mib = [f"{b / (1 << 20):.1f}" for b in (one["base"], predicted, measured)]
        print(f"{one['name']:30}{one['remedy']['id']:18}{mib[0]:>10}{mib[1]:>11}{mib[2]:>10}  {100 * error:9.2f} %"
              + ("" if one["told"]["ended"] == "ok" else "  " + one["told"]["ended"][-60:]))
    for remedy, found in sorted(errors.items()):
        print(f"{remedy:18} median {100 * statistics.median(found):6.2f} %, largest {100 * max(found):6.2f} %, of {len(found)}")
    median = statistics.median([e for found in errors.values() for e in found])
    print(f"median error of {len(reruns)} predictions: {100 * median:.2f} %")
    print("\n".join(missing))
    sys.exit(0 if median <= 0.03 and not missing else 1)


if __name__ == "__main__":
    main()
