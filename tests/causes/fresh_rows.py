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
        row("results_hold_images", kept, r"\bdel\b|\.cpu\(\)|\bpop\b", "microsoft/hi-ml#293", memory=400),
        row("metric_loads_second_model", "several_models", r"\bdel\b|\.cpu\(\)|host", "PrunaAI/pruna#78", memory=800),
        row("pickle_stays_loaded", "loaded_onto_gpu", r"\bdel\b", "autonomousvision/projected-gan#47", memory=1450),
        row("trials_of_search", "several_models", r"\bdel\b|None", "huggingface/transformers#35440", memory=1200),
        row("results_of_folds", kept, r"\.cpu\(\)|\bdel\b", "deepset-ai/FARM#544", memory=900),
        row("schedules_of_folds", "reference_cycle", r"gc\.collect|weakref", "huggingface/transformers#1134"),
        row("recall_of_all_pairs", *pairs, "mlfoundations/open_clip#11"),
        # A sort of all columns at once: its values, its indices in int64 and its scratch, for a few numbers.
        row("bins_by_quantile", "sort_temporaries", r"\.cpu\(\)|on the host|split|chunk|sample|column",
            "yandex-research/rtdl-num-embeddings#18"),
        row("sum_of_wrong_shapes", "all_pairs", r"squeeze|view", "pytorch/pytorch#2225"),
        row("windows_stay_on_gpu", kept, r"\.cpu\(\)", "Project-MONAI/MONAI#854"),
        row("separation_of_long_recording", "batch_without_gradients", r"split|chunk|shorter|part",
            "speechbrain/speechbrain#1255"),
        row("memory_of_agent", kept, r"\.cpu\(\)", "pytorch/tutorials#1620", memory=600),
        row("adaptation_steps", "create_graph", r"create_graph|first.order|fewer|detach", "tristandeleu/pytorch-maml#21"),
        row("running_mean_of_flow", graphs, r"detach|no_grad", "bayesiains/nflows#11"),
        # Three of a batch at once: memory with the third power of the batch.
        row("semi_hard_triplets", "all_pairs", r"split|chunk|batch", "huggingface/sentence-transformers#4026"),
        row("tiles_decoded_with_graph", *evaluation, "huggingface/diffusers#9648"),
        row("checkpoint_of_face_network", "loaded_onto_gpu", r"\bdel\b|map_location", "cavalleria/cavaface#4"),
        row("errors_of_trials", "caught_traceback", r"outside|after the except|\bdel\b|str\(|traceback",
            "pytorch/pytorch#10348", memory=900),
        row("edges_as_one_hot", "large_buffers", r"sparse|index|scatter", "ethanfetaya/NRI#19", memory=900),
        row("scores_of_all_triples", "kept_tensors", r"split|chunk|top|batch", "pykeen/pykeen#96"),
        row("style_of_large_image", "many_rows", r"half|small|crop|checkpoint|autocast", "ray075hl/DeepPhotoStyle_pytorch#1"),
        row("step_outputs_with_graph", graphs, r"detach", "sktime/pytorch-forecasting#1924"),
        row("perceptual_metric_in_training", graphs, r"no_grad|detach", "Lightning-AI/torchmetrics#2093"),
        row("validation_of_large_graph", *evaluation, "dmlc/dgl#745"),
        row("images_decoded_as_batch", "batch_without_gradients", r"split|chunk|one at a time|batch",
            "AUTOMATIC1111/stable-diffusion-webui#5165"),
        # The node holds what holds the node; no collector sees through it.
        row("output_saved_on_ctx", "output_on_ctx", r"save_for_backward", "pytorch/pytorch#25340", memory=400),
        row("non_local_on_low_level", "attention_scores", r"scaled_dot_product_attention|SDPA|pool|subsampl",
            "AlexHex7/Non-local_pytorch#46"),
        row("matcher_of_all_targets", *pairs, "facebookresearch/detr#606"),
        row("jacobian_in_one_sweep", "vectorized_over_all", r"chunk_size", "pytorch/functorch#1058"),
        row("image_pool_with_graph", graphs, r"detach", "junyanz/pytorch-CycleGAN-and-pix2pix#512"),
        row("auxiliary_phase", "larger_step", r"half|batch|accumul|checkpoint|autocast", "openai/phasic-policy-gradient#2"),
        row("joint_of_transducer", "logits", r"chunk|split|half|batch|prun|sampl", "NVIDIA-NeMo/Speech#5216", memory=800),
        # Gradients that nobody reads any more.
        row("gradients_during_validation", "gradients_kept", r"zero_grad|set_to_none", "speechbrain/speechbrain#1739"),
        row("checkpoints_evaluated", "several_models", r"\bdel\b|None",
            "ThilinaRajapakse/pytorch-transformers-classification#1", memory=640),
        row("picture_upscaled_at_once", "batch_without_gradients", r"split|chunk|crop|tile|patch", "Guaishou74851/AdcSR#7"),
        row("large_tensor_of_second_step", "fragmentation", r"expandable_segments|max_split_size|empty_cache",
            "pytorch/pytorch#35901", memory=1060),
        # The same encoder output once for each beam.
        row("encoder_copied_for_beams", "repeated_copies", r"expand|beam", "facebookresearch/fairseq#1957"),
    ]
