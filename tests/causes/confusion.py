"""Prints how often oomdiag names the right cause: python tests/causes/confusion.py --build BUILD [--quick] [-v] [-k NAME]

Each case is a program with a known cause of its own, or one that looks like another cause and is not. Where a case has a cure,
the program is run once more with it and must fit: the counterfactual that proves the cause. Exits 1 if fewer than 97 % of
the cases are named right or a cure does not cure.
"""
import argparse
import collections
import dataclasses
import sys

from harness import run_jobs, train_jobs

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CLOCKED = ("--clocked",)  # work takes time, so that frees across streams wait
TWO_GPUS = ("--count", "2")


@dataclasses.dataclass
class Case:
    name: str
    cause: str  # or "none": it fits
    function: str = ""
    arguments: dict = dataclasses.field(default_factory=dict)
    memory: int = 1024  # MiB
    cure: dict = None  # of "arguments", "memory", "environment": what changes
    environment: dict = dataclasses.field(default_factory=dict)
    quick: bool = False
    options: tuple = ()  # of oomdiag run
    train: tuple = ()  # a reference model in C++ in place of the function: arguments of oomdiag train
    module: str = "loops"  # of the function


def cases():
    rising = list(range(4, 80, 4))
    mixed = [8, 3, 12, 5, 20, 7, 2, 15, 4, 9, 11, 6, 70]
    stop = {"arguments": {"kept": False}}
    larger = {"memory": 8192}
    return [
        Case("a batch too large in forward", "capacity", "one_step", {"mib": 90}, cure=larger, quick=True),
        Case("a batch too large in backward", "capacity", "one_step", {"mib": 70}, cure=larger),
        Case("twice the depth", "capacity", "one_step", {"mib": 40, "depth": 10}, cure=larger),
        Case("Adam's state does not fit", "capacity", "wide_linear", {"layers": 5}, cure=larger, quick=True),
        Case("Adam's state fits, step 2 does not", "capacity", "wide_linear", {"layers": 3, "steps": 3}, 768, cure=larger),
        Case("the whole data set on the GPU", "capacity", "data_set", cure=larger),
        Case("a data set just too large", "capacity", "data_set", {"mib": 32, "count": 24}, 800, cure=larger),
        Case("batches that rise until they do not fit", "capacity", "batches_of", {"sizes": rising}, cure=larger, quick=True),
        Case("batches of all sizes, one too large", "capacity", "batches_of", {"sizes": mixed}, cure=larger),
        Case("a large batch at last", "capacity", "batches_of", {"sizes": [8] * 12 + [80]}, cure=larger),
        Case("a cache that levelled off, then a large batch", "capacity", "cache_then_batch", cure=larger, quick=True),
        Case("a queue of three, then a large batch", "capacity", "queue_then_batch", cure=larger),
        Case("a long unrolled network", "capacity", "unrolled", cure=larger, quick=True),
        Case("a small request that needs a whole segment", "capacity", "nearly_full", quick=True),
        Case("a request that nearly fills the GPU", "capacity", "large_but_possible", cure=larger, quick=True),

        # Forward passes with memory for the request in free blocks, and none for what comes after it.
        *[Case(f"{name}, in forward with free blocks, {memory} MiB", "capacity", "train", arguments, memory, cure=larger,
               module="failing", quick=memory == 500)
          for name, arguments, memories in [
              ("a transformer", {"model": "gpt", "batch": 8}, (400, 500)),
              ("a transformer under autocast", {"model": "gpt", "batch": 8, "autocast": True}, (450,)),
              ("an encoder", {"model": "encoder", "batch": 32}, (500,)),
              ("residual blocks", {"model": "residual", "batch": 96}, (500, 900))]
          for memory in memories],

        Case("outputs in a list", "leak", "keep_outputs", {"steps": 80}, 640, cure=stop, quick=True),
        Case("outputs in a list, batches of all sizes", "leak", "keep_outputs", {"sizes": (mixed[:-1] * 10)}, 768, cure=stop),
        Case("losses that are not reduced in a list", "leak", "keep_losses", {"steps": 80}, 640, cure=stop),
        Case("losses that keep their graph", "leak", "keep_graph", cure=stop, quick=True),
        Case("batches in a list", "leak", "keep_batches", {"steps": 80}, 640, cure=stop),
        Case("a buffer that grows by cat", "leak", "grow_buffer", cure=stop, quick=True),
        Case("a hidden state that is not detached", "leak", "hidden_state", {"steps": 60}, 512, cure=stop, quick=True),
        Case("a history of gradients", "leak", "keep_gradients", cure=stop),
        Case("a hook that keeps activations", "leak", "hooked", {"steps": 160}, 640, cure=stop),
        Case("outputs in a list, no optimizer", "leak", "without_optimizer", {"steps": 80}, 640, cure=stop),
        Case("outputs in a list under a limit", "leak", "capped_leak", {"steps": 80}, 640, cure=stop),
        Case("a slow leak on a full GPU", "leak", "full_gpu_leak", {"base": 700}, cure=stop),

        Case("free blocks between live blocks", "fragmentation", "blocked_segments",
             cure={"environment": EXPANDABLE}, quick=True),
        Case("free blocks of ascending sizes", "fragmentation", "ascending_sizes",
             cure={"environment": EXPANDABLE}),
        Case("free blocks between live blocks, in training", "fragmentation", "blocked_segments_in_training",
             cure={"environment": EXPANDABLE}),
        Case("free blocks, but too few bytes in all", "capacity", "blocked_segments", {"request": 500}, cure=larger,
             quick=True),
        Case("the same without free blocks", "capacity", "blocked_segments", {"request": 500}, cure=larger,
             environment=EXPANDABLE),

        Case("20 GiB at once", "oversized_request", "oversized", cure=None, quick=True),
        Case("(n, 1) - (n)", "oversized_request", "wrong_broadcast", cure={"arguments": {"n": 3000}}),
        Case("scores of a long sequence", "oversized_request", "attention_scores", cure={"arguments": {"length": 2048}}),

        Case("a fraction of one half", "fraction_cap", "capped", {"fraction": 0.3, "mib": 40},
             cure={"arguments": {"fraction": 1}}, quick=True),
        Case("a fraction from the environment", "fraction_cap", "capped", {"fraction": 1, "mib": 40},
             environment={"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.3"},
             cure={"environment": {"PYTORCH_CUDA_ALLOC_CONF": ""}}),
        Case("a fraction that is not what stops it", "capacity", "capped", {"fraction": 0.99, "mib": 80}, cure=larger),

        Case("another library holds much of the GPU", "non_pytorch", "with_others", {"outside": 2300, "mib": 60}, 3072,
             cure={"arguments": {"outside": 0}}, quick=True),
        Case("another library holds a little, the batch is too large", "capacity", "with_others",
             {"outside": 20, "mib": 80}, cure=larger),

        Case("a matrix product without memory for its workspace", "workspace", "gemm_without_free_memory", cure={"arguments": {"spare": 40}}, quick=True),
        Case("a linear layer without memory for its workspace", "workspace", "linear_without_free_memory", cure={"arguments": {"spare": 40}}),
        Case("a matrix product whose result is too large", "capacity", "large_product", cure=larger),

        Case("a captured graph with a side stream", "pending_frees", "captured", quick=True,
             cure={"arguments": {"recorded": False}}),
        Case("the same where work takes time", "pending_frees", "captured", options=CLOCKED,
             cure={"arguments": {"recorded": False}}),
        Case("captured layers whose outputs go to the host", "pending_frees", "captured_offloading",
             cure={"arguments": {"recorded": False}}),
        Case("a captured graph that keeps its tensors", "capacity", "captured", {"recorded": False, "kept": True}, cure=larger),
        Case("the same with a side stream", "capacity", "captured", {"kept": True}, cure=larger, quick=True),
        Case("a slow side stream, outside of captures", "none", "side_stream", options=CLOCKED, quick=True),
        Case("a slow side stream, and too large a batch", "capacity", "side_stream", {"count": 4, "model": 400, "last": 600},
             options=CLOCKED, cure=larger),

        Case("scores gathered on the first GPU", "imbalance", "data_parallel", memory=512, options=TWO_GPUS,
             cure={"arguments": {"gathered": False}}, quick=True),
        Case("each GPU its own loss, the batch too large", "capacity", "data_parallel", {"gathered": False, "batch": 256}, 512,
             options=TWO_GPUS, cure=larger, quick=True),
        Case("nine layers on one GPU, one on the other", "imbalance", "split_layers", {"batches": [10, 30]}, 640,
             options=TWO_GPUS, cure={"arguments": {"first": 5, "second": 5}}),
        # Not to be known: the second GPU has not been used yet when the first one is full.
        Case("the same, in the first step", "imbalance", "split_layers", memory=640, options=TWO_GPUS,
             cure={"arguments": {"first": 5, "second": 5}}),
        Case("five layers on each GPU, a batch too large", "capacity", "split_layers",
             {"batches": [10, 60], "first": 5, "second": 5}, 640, options=TWO_GPUS, cure=larger),
        Case("the same, in the first step", "capacity", "split_layers", {"batches": [60], "first": 5, "second": 5}, 640,
             options=TWO_GPUS, cure=larger),

        Case("deepcnn, twice the batch that fits", "capacity", train=("--model", "deepcnn", "--batch", "12000"), memory=0,
             cure={"memory": 40960}, quick=True),
        Case("deepcnn, a batch that would just fit", "fragmentation", train=("--model", "deepcnn", "--batch", "6720"), memory=0,
             cure={"environment": EXPANDABLE}),
        Case("resnet50, a batch too large", "capacity", train=("--model", "resnet50", "--batch", "256"), memory=0,
             cure={"memory": 40960}),
        Case("gpt, a GPU too small", "capacity", train=("--model", "gpt"), memory=4096, cure={"memory": 24576}),
        Case("x + 1 beside x", "capacity", train=("--model", "copy"), memory=6144, 
             cure={"train": ("--model", "copy", "--variant", "in_place")}),
        Case("interleaved sizes", "fragmentation", train=("--model", "fragmented"), memory=4096,
             cure={"train": ("--model", "fragmented", "--variant", "expandable_segments")}),
        Case("the same sizes, the kept ones first", "none", train=("--model", "fragmented", "--variant", "kept_first"),
             memory=4096),
        Case("losses that keep their graph, in C++", "leak", memory=512,
             train=("--model", "growing", "--steps", "400", "--variant", "retained_graph"),
             cure={"train": ("--model", "growing", "--steps", "400", "--variant", "items")}),
        Case("losses of a validation loop with gradients", "leak", memory=512,
             train=("--model", "growing", "--steps", "400", "--variant", "validation_losses"),
             cure={"train": ("--model", "growing", "--steps", "400", "--variant", "items")}),
        Case("losses in a list, after backward", "none", train=("--model", "growing", "--steps", "400", "--variant", "losses"),
             memory=512),

        Case("a steady loop", "none", "steady"),
        Case("a leak that fits", "none", "keep_outputs", {"steps": 10}),
    ]


def job_of(case, cured):
    change = (case.cure or {}) if cured else {}
    return {"name": case.name, "module": case.module, "function": case.function,
            "arguments": {**case.arguments, **change.get("arguments", {})},
            "memory_mib": change.get("memory", case.memory),
            "environment": {**case.environment, **change.get("environment", {})},
            "options": case.options, "train": change.get("train", case.train)}


def run(build, jobs):
    train_jobs(build, [job for job in jobs if job["train"]])
    run_jobs(build, [job for job in jobs if not job["train"]])
    return jobs


def named_cause(report):
    return (report or {}).get("cause", {}).get("kind", "none") if report and report["cause"] else "none"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true", help="a third of the cases, without their cures")
    parser.add_argument("-v", action="store_true", help="print each case")
    parser.add_argument("-k", default="", help="cases with this in their name or function only")
    options = parser.parse_args()
    chosen = [c for c in cases() if (c.quick or not options.quick) and (options.k in c.name or options.k in c.function)]
    cures = [] if options.quick else [c for c in chosen if c.cure]
    jobs = run(options.build, [job_of(c, False) for c in chosen] + [job_of(c, True) for c in cures])
    done, cured = jobs[:len(chosen)], jobs[len(chosen):]

    matrix = collections.Counter()
    for case, job in zip(chosen, done):
        named = named_cause(job["report"])
        matrix[case.cause, named] += 1
        if named != case.cause or options.v:
            failure = (job["report"] or {}).get("failure") or {}
            print(f"{'ok ' if named == case.cause else 'NO '} {case.name}: is {case.cause}, named {named}; "
                  f"{job['answer']['ended']} in {failure.get('phase')}, step {failure.get('step')}")
            if named != case.cause and job["report"] and job["report"]["cause"]:
                print("      ", job["report"]["cause"]["evidence"], job["report"]["growth"][:1])
    not_cured = [job for job in cured if job["answer"]["ended"] != "ok"]
    for job in not_cured:
        print(f"NO  {job['name']}: the cure does not cure: {job['answer']['ended']}")

    kinds = sorted({k for pair in matrix for k in pair})
    print(f"{'is / named':20}" + "".join(f"{k[:13]:>15}" for k in kinds))
    for truth in kinds:
        if any(matrix[truth, k] for k in kinds):
            print(f"{truth:20}" + "".join(f"{matrix[truth, k] or '.':>15}" for k in kinds))
    right = sum(n for (truth, named), n in matrix.items() if truth == named)
    share = right / max(1, len(chosen))
    print(f"{right} of {len(chosen)} right, {100 * share:.1f} %; {len(cured) - len(not_cured)} of {len(cured)} cures cure")
    sys.exit(0 if share >= 0.97 and not not_cured else 1)


if __name__ == "__main__":
    main()
