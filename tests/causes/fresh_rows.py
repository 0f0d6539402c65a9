"""What is wrong with the programs of fresh_threads.py, and what cured it in the thread: written before the first run."""


def fresh(Pattern):
    """Rows in the order of their writing. An id with a comment is one that its writer would want where none is known to fit."""
    evaluation, graphs, kept = ("evaluation_keeps_graphs", r"no_grad"), "graph_of_earlier_steps", "kept_tensors"
    pairs = ("all_pairs", r"split|chunk")
    row = lambda *args, **kwargs: Pattern(*args, module="fresh_threads", **kwargs)
    return [
        row("ten_crop_test", *evaluation, "arnoweng/CheXNet#39"),
        row("losses_for_visualization", graphs, r"\.item\(\)|detach", "microsoft/SpareNet#12"),
        row("predictions_of_all_sessions", kept, r"\.cpu\(\)", "SPOClab-ca/dn3#38", memory=700),
        row("results_hold_images", kept, r"\bdel\b|\.cpu\(\)|\bpop\b", "microsoft/hi-ml#293", memory=600),
        row("metric_loads_second_model", "several_models", r"\bdel\b|\.cpu\(\)|host", "PrunaAI/pruna#78"),
        row("pickle_stays_loaded", "loaded_onto_gpu", r"\bdel\b", "autonomousvision/projected-gan#47"),
        row("trials_of_search", "several_models", r"\bdel\b|None", "huggingface/transformers#35440"),
        row("results_of_folds", kept, r"\.cpu\(\)|\bdel\b", "deepset-ai/FARM#544", memory=900),
        row("schedules_of_folds", "reference_cycle", r"gc\.collect|weakref", "huggingface/transformers#1134"),
        row("recall_of_all_pairs", *pairs, "mlfoundations/open_clip#11"),
        # A sort of all columns at once: its values, its indices in int64 and its scratch, for a few numbers.
        row("bins_by_quantile", "sort_temporaries", r"\.cpu\(\)|on the host|split|chunk|sample|column",
            "yandex-research/rtdl-num-embeddings#18"),
        row("sum_of_wrong_shapes", "all_pairs", r"squeeze|view", "pytorch/pytorch#2225"),
        row("windows_stay_on_card", kept, r"\.cpu\(\)", "Project-MONAI/MONAI#854"),
        row("separation_of_long_recording", "batch_without_gradients", r"split|chunk|shorter|part",
            "speechbrain/speechbrain#1255"),
        row("memory_of_agent", kept, r"\.cpu\(\)", "pytorch/tutorials#1620", memory=600),
        row("adaptation_steps", "create_graph", r"create_graph|first.order|fewer|detach", "tristandeleu/pytorch-maml#21"),
        row("running_mean_of_flow", graphs, r"detach|no_grad", "bayesiains/nflows#11"),
        # Three of a batch at once: memory with the third power of the batch.
        row("semi_hard_triplets", "all_pairs", r"split|chunk|batch", "huggingface/sentence-transformers#4026"),
        row("tiles_decoded_with_graph", *evaluation, "huggingface/diffusers#9648"),
        row("optimizer_state_onto_card", "loaded_onto_gpu", r"map_location", "huggingface/transformers#22159"),
    ]
