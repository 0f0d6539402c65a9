"""What is wrong with the programs of other_threads.py, and what cured it in the thread: written before the first run."""


def other(Pattern):
    """Rows in the order of their writing. An id with a comment is one that its writer would want where none is known to fit."""
    evaluation, kept, pairs = ("evaluation_keeps_graphs", r"no_grad|inference_mode"), "kept_tensors", "all_pairs"
    row = lambda *args, **kwargs: Pattern(*args, module="other_threads", **kwargs)
    return [
        row("last_of_trajectory", "small_view", r"\.clone\(\)", "woongzip1/UniverSR#9"),
        # A cache of the standard library holds the models of earlier folds: del does not help.
        row("adapters_of_folds", "several_models", r"lru_cache|cache_clear", "meta-pytorch/torchtune#904"),
        # Gradients of weights that no optimizer changes.
        row("base_model_not_frozen", "gradients_of_frozen", r"requires_grad", "TUDB-Labs/mLoRA#90"),
        # One buffer is larger than the GPU. The screen says that a tensor of this size is copied there as a whole, and at which line.
        row("covariance_of_each_class", "data_on_gpu", r"diagonal|fewer|smaller", "BIT-DA/MetaSAug#4"),
        row("kernel_of_both_domains", pairs, r"split|chunk|cdist", "jindongwang/transferlearning#83"),
        row("counterparts_of_entities", pairs, r"matmul|einsum|@|bmm", "rusty1s/deep-graph-matching-consensus#4"),
        # matmul copies the matrix of each component for each sample.
        row("likelihood_of_components", "large_intermediate", r"split|chunk|transpose|permute|one large product|einsum",
            "ldeecke/gmm-torch#23"),
        row("inverted_frames", kept, r"\.cpu\(\)", "yuval-alaluf/stylegan3-editing#37"),
        row("flow_of_full_hd", *evaluation, "msu-video-group/memfof#5"),
        row("cameras_hold_images", "data_on_gpu", r"on the host|DataLoader|\.cpu\(\)|pin_memory",
            "graphdeco-inria/gaussian-splatting#723", memory=600),
        # The order of the products makes an intermediate result far larger than what goes in and what comes out.
        row("einsum_of_four", "large_intermediate", r"matmul|@|order|opt_einsum|two at a time", "pytorch/pytorch#114943"),
        row("prompt_of_state_space_model", pairs, r"matmul|einsum|@|bmm", "huggingface/transformers#48978"),
        row("batches_from_generator", *evaluation, "pytorch/pytorch#31497"),
        row("world_of_training_stays", "several_models", r"lru_cache|cache_clear", "facebookresearch/ParlAI#2487", memory=760),
        row("gradients_of_each_task", "capacity", r"half|batch|accumul|checkpoint|autocast", "Cranial-XIX/CAGrad#2"),
        row("estimate_of_influence", "graph_of_earlier_steps", r"no_grad|detach", "nimarb/pytorch_influence_functions#6"),
        row("lists_of_encoders_deleted", "several_models", r"\bdel\b", "huggingface/diffusers#8511"),
        # Concatenation needs the parts and the whole at once.
        row("gradients_of_test_samples", "joined_results", r"prealloc|torch\.empty|torch\.zeros|allocate|\.cpu\(\)",
            "aai-institute/pyDVL#374"),
        row("states_of_all_layers_in_evaluation", "growing_buffer", r"\.cpu\(\)|output_hidden_states",
            "huggingface/transformers#20887"),
        # The copies refer to themselves.
        row("snapshots_of_average", "reference_cycle", r"gc\.collect|weakref|state_dict", "lucidrains/ema-pytorch#35"),
        # A softmax whose argmax is that of its operand. Its writer called it softmax_before_argmax; since then one row names any
        # single op that makes as much.
        row("labels_of_whole_body", "large_result", r"argmax|softmax", "lassoan/SlicerMONAIAuto3DSeg#98", memory=1300),
        row("samples_of_explainer", "batch_without_gradients", r"split|chunk|batch", "shap/shap#1977"),
        row("inputs_beside_predictions", kept, r"\.cpu\(\)|\bdel\b", "muellerzr/fastinference#7"),
        # A buffer for each layer where one, or none, would do.
        row("mask_in_every_layer", "same_buffer_in_layers",
            r"is_causal|shared?\b|one mask|scaled_dot_product_attention|when it is needed",
            "TransformerLensOrg/TransformerLens#479", memory=700),
        row("uncertainty_of_all_rows", pairs, r"diagonal|einsum|split|chunk", "mit-ll-responsible-ai/equine#181"),
        row("class_maps_of_validation", kept, r"\.cpu\(\)|clear|\bdel\b", "jacobgil/pytorch-grad-cam#71"),
        # The steps of training run in half precision, validation does not.
        row("validation_without_autocast", "not_under_autocast", r"autocast|half", "Lightning-AI/pytorch-lightning#6566"),
        row("tokens_keep_embeddings", kept, r"\.cpu\(\)|clear|\bdel\b", "flairNLP/flair#1124"),
        row("parameters_of_all_folds", "loaded_onto_gpu", r"map_location", "MIC-DKFZ/nnUNet#34", memory=900),
        row("metrics_of_epochs", "graph_of_earlier_steps", r"detach|\.item\(\)", "pnnl/neuromancer#292", memory=600),
    ]
