"""Prints how often the first screen names the root cause and the fix: python tests/causes/reasons.py --build BUILD [--quick]

Each pattern is a program of patterns.py with a cause that people found in public threads. "root": the first screen gives this
reason (the name of a row of kReasons, or of a cause where that says it all). "fix": what its three best fixes must mention. A
third of the patterns was held back while the rules were written. Exits 1 if a bar is missed, or if the fixed program does not
fit.
"""
import argparse
import dataclasses
import pathlib
import re
import subprocess
import sys

from field_rows import fields
from final_rows import final
from fresh_rows import fresh
from harness import run_jobs
from issue_rows import issues
from latest_rows import latest
from other_rows import other
from public_rows import public
from recent_rows import recent
from unseen_rows import unseen

BARS = {"root": 0.9, "fix": 0.9}
MOST_LINES = 24


@dataclasses.dataclass
class Pattern:
    function: str
    root: str
    fix: str  # a regular expression
    thread: str  # where it was read; empty: a known habit, without one thread
    memory: int = 1024  # MiB
    held_back: bool = False
    module: str = "patterns"
    quick: bool = False
    environment: dict = dataclasses.field(default_factory=dict)


def patterns():
    evaluation, retained = ("evaluation_keeps_graphs", r"no_grad"), "graph_of_earlier_steps"
    return [
        Pattern("validation_sums_losses", *evaluation, "leftthomas/SRGAN#43", quick=True),
        Pattern("validation_larger_batch", *evaluation, "hszhao/semseg#60", memory=1070, held_back=True),
        Pattern("evaluation_keeps_outputs", *evaluation, "pytorch/pytorch#4932"),
        Pattern("inference_holds_last_result", *evaluation, "pytorch/pytorch#4050"),
        Pattern("features_to_host_with_graph", *evaluation, "pytorch/pytorch#16417", held_back=True),
        Pattern("test_after_epoch_with_metric", *evaluation, "sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning#57"),
        Pattern("dropout_samples", *evaluation, "", held_back=True),
        Pattern("outputs_of_last_iteration", "outputs_of_earlier_step", r"\bdel\b", "pytorch/pytorch#4050", memory=1200),
        Pattern("lstm_state_not_detached", "recurrent_state", r"detach", "pytorch/pytorch#2198", quick=True),
        Pattern("gru_cell_over_episode", "recurrent_state", r"detach", "pytorch/pytorch#1536", held_back=True),
        Pattern("backward_create_graph", "create_graph", r"autograd\.grad", "pytorch/pytorch#4661"),
        Pattern("maml_inner_loop", "create_graph", r"detach|autograd\.grad|create_graph", "", memory=1600,
                held_back=True),
        Pattern("penalty_history", retained, r"\.item\(\)|detach", "", held_back=True),
        Pattern("several_forwards_one_backward", "several_forward_passes", r"backward\(\)", ""),
        Pattern("key_value_cache", "key_value_cache", r"max_new_tokens|shorter|offload|StaticCache|window",
                ""),
        Pattern("generate_with_transformers", "key_value_cache", r"max_new_tokens|shorter|offload|quantized|StaticCache",
                "", held_back=True),
        Pattern("predictions_on_the_gpu", "growing_buffer", r"\.cpu\(\)", "huggingface/transformers#7232"),
        Pattern("history_list", "kept_tensors", r"\.item\(\)|\.cpu\(\)", "", memory=620),
        Pattern("replay_buffer_on_the_gpu", "kept_tensors", r"\.cpu\(\)|item\(\)", "", held_back=True),
        Pattern("data_set_on_the_gpu", "data_on_gpu", r"on the host|DataLoader|\.cpu\(\)|pin_memory",
                "pytorch/pytorch#16417"),
        Pattern("resume_from_checkpoint", "loaded_onto_gpu", r"map_location", "huggingface/pytorch-image-models#72"),
        Pattern("load_pretrained_twice", "loaded_onto_gpu", r"map_location", "pytorch/pytorch#7415", memory=1200, held_back=True),
        Pattern("small_view_of_large_tensor", "small_view", r"\.clone\(\)", "pytorch/pytorch#33101", memory=800, quick=True),
        Pattern("last_token_of_each_batch", "small_view", r"\.clone\(\)", "pytorch/pytorch#50432", held_back=True),
        Pattern("one_checkpoint_around_all", "one_checkpoint", r"checkpoint", "pytorch/pytorch#147449", memory=600),
        Pattern("one_segment", "one_checkpoint", r"checkpoint", "pytorch/pytorch#78731", memory=600, held_back=True),
        Pattern("autocast_around_generation", "autocast_cache", r"cache_enabled=False", "ecmwf/anemoi-core#134", memory=900),
        Pattern("autocast_in_sampler", "autocast_cache", r"cache_enabled=False", "", held_back=True),
        Pattern("attention_by_hand", "attention_scores", r"scaled_dot_product_attention|SDPA", ""),
        Pattern("multihead_attention_weights", "attention_scores", r"need_weights=False|SDPA", ""),
        Pattern("attention_by_einsum", "attention_scores", r"scaled_dot_product_attention|SDPA", "",
                memory=2048, held_back=True),
        Pattern("all_distances", "all_pairs", r"split|chunk", "pytorch/pytorch#57720"),
        Pattern("differences_by_broadcast", "all_pairs", r"split|chunk|cdist", "hcw-00/PatchCore_anomaly_detection#19",
                held_back=True),
        Pattern("similarity_of_all_pairs", "all_pairs", r"split|chunk", "OML-Team/open-metric-learning#283"),
        Pattern("svd_with_full_matrices", "full_matrices", r"full_matrices=False", "pytorch/pytorch#61949"),
        Pattern("one_hot_masks", "one_hot", r"cross_entropy|gather|uint8|bool", ""),
        Pattern("logits_in_float32", "logits", r"chunk|liger", "linkedin/Liger-Kernel#241"),
        Pattern("shifted_logits", "logits", r"chunk|liger", "NVIDIA-NeMo/Automodel#3907", held_back=True),
        Pattern("folds_keep_models", "several_models", r"\bdel\b", "", memory=1400),
        Pattern("policy_and_reference", "several_models", r"\bdel\b|bfloat16|half|host|\.cpu\(\)", "",
                memory=900, held_back=True),
        Pattern("large_embedding", "dense_embedding_gradients", r"sparse=True", "pytorch/pytorch#41128", memory=800),
        Pattern("recommender_tables", "dense_embedding_gradients", r"sparse=True", "", memory=800,
                held_back=True),
        Pattern("foreach_temporaries", "optimizer_temporaries", r"foreach=False|fused=True", "pytorch/pytorch#97712",
                memory=1000),
        Pattern("sparse_operand", "dense_gradient_of_sparse", r"requires_grad|detach", "pytorch/pytorch#41128"),
        Pattern("double_precision", "float64", r"float\(\)|float32", "", memory=860, held_back=True),
        Pattern("graphs_without_shared_pool", "private_pools", r"pool=", "NVIDIA-NeMo/Automodel#2943", memory=600),
        Pattern("retry_inside_except", "caught_traceback", r"outside|after the except|del ", "pytorch/pytorch#27600", memory=960),
        Pattern("smaller_batch_in_handler", "caught_traceback", r"outside|after the except|del ", "pytorch/pytorch#36874",
                held_back=True),
        Pattern("decode_all_at_once", "batch_without_gradients", r"split|slicing|chunk|batch", "",
                held_back=True),
    ]


def threads():
    """Written after the rules, from other threads; those that are held back were looked at last."""
    evaluation = ("evaluation_keeps_graphs", r"no_grad")
    return [dataclasses.replace(pattern, module="threads") for pattern in [
        Pattern("rollout_refers_to_itself", "reference_cycle", r"gc\.collect", "pytorch/pytorch#50185"),
        Pattern("checkpoint_stays_after_resume", "loaded_onto_gpu", r"map_location", "karpathy/nanoGPT#236", memory=1800),
        Pattern("evaluation_collects_outputs_and_labels", "kept_tensors", r"\.cpu\(\)", "facebookresearch/SlowFast#411", memory=700),
        Pattern("metric_is_given_a_graph", "graph_of_earlier_steps", r"detach|item\(\)", "Lightning-AI/torchmetrics#2597"),
        Pattern("compute_features_without_no_grad", *evaluation, "facebookresearch/deepcluster#55", memory=1000),
        # Capacity, until a row compared the step with the one before: one sentence is 43 times as long.
        Pattern("one_long_sequence", "larger_step", r"half|batch|checkpoint|autocast|sequence", "allenai/allennlp#2515"),
        Pattern("generator_is_not_detached", "graph_without_use", r"no_grad|detach", "", memory=900),
        Pattern("target_network_with_graph", "graph_without_use", r"no_grad", "", memory=1000),
        Pattern("messages_of_all_edges", "enlarged", r"half|batch|checkpoint|split|autocast", ""),
        Pattern("logits_are_enlarged", "capacity", r"half|batch|autocast|accumulation", "", memory=1600),
        Pattern("episode_keeps_its_callback", "reference_cycle", r"gc\.collect|detach", "NVlabs/GR00T-WholeBodyControl#220",
                held_back=True),
        Pattern("statistics_keep_activations", "kept_tensors", r"\.cpu\(\)|item\(\)|mean", "", held_back=True),
        Pattern("beams_without_no_grad", *evaluation, "serend1p1ty/SeqNet#14", held_back=True),
        Pattern("whole_validation_set_at_once", "batch_without_gradients", r"split|chunk", "", memory=1400, held_back=True),
    ]]


def later_threads():
    """Looked up when the rules for the programs above were known: how a reason is named where nobody has tuned for it."""
    evaluation = ("evaluation_keeps_graphs", r"no_grad")
    unused, retained = "graph_without_use", "graph_of_earlier_steps"
    return [dataclasses.replace(pattern, module="later_threads") for pattern in [
        Pattern("features_are_concatenated", *evaluation, "pytorch/pytorch#2302", memory=700),
        Pattern("score_corpus", *evaluation, "IBM/low-resource-text-classification-framework#1", memory=900, held_back=True),
        Pattern("values_of_rollout", *evaluation, "ray-project/ray#6962", memory=380, held_back=True),
        Pattern("teacher_keeps_graph", unused, r"no_grad|detach", "haitongli/knowledge-distillation-pytorch#25",
                memory=550, quick=True),
        Pattern("backbone_outside_optimizer", unused, r"no_grad|requires_grad|detach", "BINE022/EEGPT#18", memory=610),
        Pattern("critic_gets_generator_graph", unused, r"detach|no_grad", "znxlwm/pytorch-generative-model-collections#4",
                held_back=True, memory=600),
        Pattern("attack_keeps_forward_graphs", retained, r"no_grad|detach", "BorealisAI/advertorch#73", memory=900),
        Pattern("statistics_of_inputs_keep_graph", retained, r"no_grad|detach", "growingnet/gromo#137", memory=900),
        Pattern("replay_keeps_graph_of_policy", retained, r"no_grad|detach", "oxwhirl/pymarl#73", memory=1900),
        Pattern("weights_of_samples_keep_graph", retained, r"detach", "lxuechen/BDMC#3", memory=1100, held_back=True),
        Pattern("losses_of_all_queries", "several_forward_passes", r"backward\(\)", "pytorch/pytorch#14936", memory=800),
        Pattern("module_hook_refers_to_module", "reference_cycle", r"gc\.collect|weakref", "pytorch/pytorch#46386", memory=700),
        Pattern("schedule_refers_to_trainer", "reference_cycle", r"gc\.collect|weakref", "pytorch/pytorch#47589",
                held_back=True, memory=1500),
        Pattern("attributions_stay_on_modules", "kept_tensors", r"\bdel\b|\.cpu\(\)", "jmschrei/tangermeme#84", memory=1100),
        Pattern("weights_of_all_epochs", "kept_tensors", r"\.cpu\(\)", "facebookresearch/pytext#204", memory=930),
        Pattern("resume_generator_and_average", "loaded_onto_gpu", r"map_location", "rosinality/stylegan2-pytorch#31",
                held_back=True, memory=1590),
        Pattern("file_and_model_at_once", "loaded_onto_gpu", r"map_location", "Robbyant/lingbot-map#43", memory=900),
        Pattern("gradients_of_each_sample", "vectorized_over_all", r"chunk_size", "pytorch/functorch#680", memory=900),
        Pattern("gradients_of_all_steps_at_once", "capacity", r"batch|split|chunk", "meta-pytorch/captum#538", memory=1500, held_back=True),
        Pattern("score_log_probabilities", "logits", r"chunk|split", "inclusionAI/AReno#125", memory=620),
    ]]


def new_threads():
    """Looked up when the rules for the programs above were known; what is wrong was written down before any was run. Every third
    is held back."""
    evaluation, retained, pairs = ("evaluation_keeps_graphs", r"no_grad"), "graph_of_earlier_steps", ("all_pairs", r"split|chunk")
    listed = [
        Pattern("losses_and_depths_of_epoch", "kept_tensors", r"item\(\)|detach|\.cpu\(\)", "TRI-ML/packnet-sfm#47"),
        Pattern("average_of_losses_keeps_graph", retained, r"detach|item\(\)", "alexhernandezgarcia/gflownet#133", memory=1300),
        Pattern("history_of_positions", retained, r"detach", "TorchSim/torch-sim#559"),
        Pattern("sample_by_denoising", *evaluation, "TeaPearce/Conditional_Diffusion_MNIST#12"),
        Pattern("captions_by_beams", *evaluation, "sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning#43"),
        Pattern("penalty_on_large_images", "second_derivatives", r"half|batch|checkpoint|autocast|part", "tamarott/SinGAN#141"),
        Pattern("full_size_image", "batch_without_gradients", r"tile|crop|patch", "IDKiro/CBDNet-pytorch#14"),
        Pattern("masks_at_full_size", "enlarged", r"split|chunk|part", "tue-mps/eomt#12"),
        Pattern("overlaps_of_boxes", *pairs, "open-mmlab/mmdetection#188"),
        Pattern("contrast_of_pixels", *pairs, "winycg/CIRKD#23"),
        Pattern("correlation_of_frames", *pairs, "princeton-vl/RAFT#39"),
        Pattern("rays_of_all_images", "data_on_gpu", r"on the host|DataLoader|\.cpu\(\)|pin_memory", "yenchenlin/nerf-pytorch#23"),
        Pattern("view_at_once", "batch_without_gradients", r"split|chunk", "dunbar12138/DSNeRF#72"),
        Pattern("hooks_without_backward", "kept_tensors", r"\bdel\b|\.cpu\(\)|clear", "meta-pytorch/opacus#176"),
        Pattern("best_weights_beside_model", "several_models", r"\bdel\b|host|cpu", "facebookresearch/pytext#1367"),
        Pattern("average_on_the_gpu", "several_models", r"host|cpu", "rwightman/efficientdet-pytorch#38", memory=900),
        Pattern("cell_over_long_sequence", "unrolled_sequence", r"sequence|truncat|detach|checkpoint|half", "salesforce/awd-lstm-lm#29"),
        Pattern("volume_at_once", "large_images", r"half|crop|patch|checkpoint|autocast", "JuliaWolleb/Diffusion-based-Segmentation#29"),
        Pattern("moments_of_large_model", "model_states", r"8-?bit|SGD|offload|LoRA", "Alpha-VLLM/LLaMA2-Accessory#85"),
        Pattern("strings_of_all_pairs", *pairs, "huawei-noah/HEBO#13"),
        Pattern("perceptual_target_with_graph", "graph_without_use", r"no_grad|requires_grad|detach", "KupynOrest/DeblurGAN#77"),
        Pattern("lengths_vary", "fragmentation", r"expandable_segments", "sgl-project/SpecForge#739", memory=860),
        Pattern("masked_sentences_at_once", "logits", r"split|chunk", "marcotcr/checklist#14"),
        Pattern("inception_features_of_all_images", "kept_tensors", r"\.cpu\(\)", "Lightning-AI/torchmetrics#468"),
        Pattern("outputs_of_micro_batches", retained, r"detach", "verl-project/verl#6699"),
        Pattern("gradients_of_all_images", "kept_tensors", r"\.cpu\(\)", "chirag-agarwall/VOG#5"),
        Pattern("labels_as_masks", "one_hot", r"cross_entropy|gather|ind(ex|ices)", "microsoft/InnerEye-DeepLearning#338"),
        Pattern("kernel_of_all_samples", *pairs, "meta-pytorch/botorch#798"),
        Pattern("distances_of_clouds", *pairs, "SeldonIO/alibi-detect#213"),
        Pattern("attention_without_subsampling", "attention_scores", r"scaled_dot_product_attention|SDPA", "wenet-e2e/wenet#1889"),
        Pattern("dense_adjacency", "dense_matrix", r"sparse", "pyg-team/pytorch_geometric#5101"),
        Pattern("batches_on_the_gpu", "data_on_gpu", r"on the host|DataLoader|\.cpu\(\)|pin_memory", "pytorch/pytorch#22333",
                memory=1100),
        Pattern("share_of_the_gpu", "fraction_cap", r"fraction", "predibase/lorax#94"),
    ]
    return [dataclasses.replace(pattern, module="new_threads", held_back=number % 3 == 2) for number, pattern in enumerate(listed)]


def newest_threads():
    """Looked up when the rules for new_threads() were known."""
    listed = [
        # In a loop behind training nothing says whether a backward pass is to come: the screen names the loop and its list.
        Pattern("likelihoods_of_all_samples", "evaluation_keeps_graphs", r"backward\(\)|autograd\.grad", "kuc2477/pytorch-ewc#5"),
        Pattern("embeddings_of_notes", "evaluation_keeps_graphs", r"no_grad", "RyanWangZf/MedCLIP#33"),
        Pattern("networks_of_earlier_tasks", "kept_tensors", r"\.cpu\(\)|\bdel\b", "WuYichen-97/SD-Lora-CL#11"),
        Pattern("video_on_the_gpu", "data_on_gpu", r"on the host|DataLoader|\.cpu\(\)", "facebookresearch/co-tracker#126"),
        Pattern("frames_decoded_at_once", "batch_without_gradients", r"split|chunk", "jeanne-wang/svd_keyframe_interpolation#4"),
        Pattern("loss_of_a_column", "all_pairs", r"squeeze|view", "IntelLabs/matsciml#347"),
        Pattern("classifier_of_flat_features", "large_layer", r"[Pp]ool", "huyvnphan/PyTorch_CIFAR10#9"),
        Pattern("tokens_of_whole_corpus", "data_on_gpu", r"on the host|DataLoader|\.cpu\(\)", "kimiyoung/transformer-xl#63"),
        Pattern("ranks_of_all_images", "all_pairs", r"split|chunk", "Xuanmeng-Zhang/gnn-re-ranking#2"),
        Pattern("clusters_of_all_points", "all_pairs", r"split|chunk", "subhadarship/kmeans_pytorch#13"),
        Pattern("memory_of_all_frames", "growing_buffer", r"\.cpu\(\)|host", "hkchengrex/STCN#3"),
        Pattern("solution_over_all_windows", "graph_of_earlier_steps", r"detach", "isds-neu/PeRCNN#3"),
    ]
    return [dataclasses.replace(pattern, module="new_threads", held_back=number % 3 == 2) for number, pattern in enumerate(listed)]


# By the option that chooses it, in the order of their writing: where its programs are, and its patterns.
SUITES = {
    "threads": ("threads.py", threads),
    "later": ("later_threads.py", later_threads),
    "new": ("new_threads.py", new_threads),
    "newest": ("new_threads.py, those of its end", newest_threads),
    "fresh": ("fresh_threads.py", lambda: fresh(Pattern)),
    "other": ("other_threads.py", lambda: other(Pattern)),
    "unseen": ("unseen_threads.py", lambda: unseen(Pattern)),
    "public": ("public_threads.py", lambda: public(Pattern)),
    "issues": ("issue_threads.py", lambda: issues(Pattern)),
    "recent": ("recent_threads.py", lambda: recent(Pattern)),
    "latest": ("latest_threads.py", lambda: latest(Pattern)),
    "final": ("final_threads.py", lambda: final(Pattern)),
    "fields": ("fields/", lambda: fields(Pattern)),
}


def job_of(pattern, fixed):
    return {"name": pattern.function + (", fixed" if fixed else ""), "module": pattern.module, "function": pattern.function,
            "arguments": {"fixed": True} if fixed else {}, "memory_mib": pattern.memory, "environment": pattern.environment,
            "screen": not fixed}


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


def judge(pattern, job):
    report = job["report"]
    if report is None:
        return {"root": False, "fix": False, "lines": 0, "named": "no report: " + job["why_no_report"][-200:]}
    reasons = [report["reason"]] if report.get("reason") else []
    if reasons and report.get("besides"):
        reasons.append(report["besides"]["reason"])  # "besides"
    screen = job["screen_text"].replace("\n             ", " ")
    shown = [reason["id"] for reason in reasons if reason["text"].split(":")[0] in screen]
    cause = (report["cause"] or {}).get("kind", report["outcome"])
    named = " and ".join(shown) if reasons else cause
    shown += [cause] if "whole_step" in shown or not shown else []  # which says what there is, where nothing stands out
    root = pattern.root in shown
    return {"root": root, "fix": any(re.search(pattern.fix, text, re.I) for text in best_fixes(report)),
            "lines": job["screen_text"].count("\n"), "named": named}


def claim_of(pattern, job, cured):
    """What the report claims of the fix of its reason, and the measured peak of the fixed program; None where that has
    another fix, or none is known. A lower bound above the measured peak is false, and so is "fits" of what ran out of memory."""
    report = job["report"]
    reason = (report or {}).get("reason")
    fix = next((fix for fix in report["fixes"] if fix["id"] == reason["fix"]), None) if reason and reason["id"] == pattern.root else None
    if fix is None or not re.search(pattern.fix, " ".join([fix["label"], *fix["how"]]), re.I):
        return None
    ended, measured = cured["answer"]["ended"], cured["answer"]["max_allocated"]
    predicted = fix["predicted_peak_bytes"]
    fits = fix["predicted_fits"] is True
    is_true = measured >= 0.99 * predicted if fix["at_least"] else not fits or ended == "ok"
    return {"name": pattern.function, "fix": fix["id"], "at_least": fix["at_least"], "fits": fits, "predicted": predicted,
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
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-v", action="store_true")
    parser.add_argument("-k", default="", help="patterns with this in their function only")
    parser.add_argument("--seen", action="store_true", help="without those that are held back")
    for name, (file, _) in SUITES.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"the programs of {file}")
    parser.add_argument("--no-cure", action="store_true", help="do not run the fixed programs")
    options = parser.parse_args()
    chosen_suite = next((suite for name, (_, suite) in SUITES.items() if getattr(options, name)), patterns)
    listed = chosen_suite()
    if options.quick:
        listed = patterns() + threads() + later_threads()
    chosen = [p for p in listed if (p.quick or not options.quick) and options.k in p.function
              and not (options.seen and p.held_back)]
    cured = [] if options.no_cure or options.quick else chosen
    jobs = run_jobs(options.build, [job_of(p, False) for p in chosen] + [job_of(p, True) for p in cured])
    failures = 0
    sums = {}
    for pattern, job in zip(chosen, jobs):
        verdict = judge(pattern, job)
        group = sums.setdefault("held back" if pattern.held_back else "seen", [0, 0, 0])
        for i, hit in enumerate((True, verdict["root"], verdict["fix"])):
            group[i] += hit
        failures += verdict["lines"] > MOST_LINES
        for line in no_python(job["report"]) if job["report"] else []:
            failures += 1
            print(f"NO  {pattern.function}: no Python: {line}")
        if options.v or not (verdict["root"] and verdict["fix"]) or verdict["lines"] > MOST_LINES:
            print(f"{'ok ' if verdict['root'] else 'NO '}{'ok ' if verdict['fix'] else 'NO '} {pattern.function}"
                  f"{' (held back)' if pattern.held_back else ''}: is {pattern.root}, named {verdict['named']}; "
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
    for name, (count, root, fix) in [*sums.items(), ("all", total)]:
        print(f"{name:10} {count:3} patterns, root cause named {root}, needed fix among the first three {fix}")
    enough = total[1] >= BARS["root"] * total[0] and total[2] >= BARS["fix"] * total[0]
    sys.exit(0 if enough and not failures else 1)


if __name__ == "__main__":
    main()
