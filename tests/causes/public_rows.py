"""What is wrong with the programs of public_threads.py, and what cured it in the thread: written before the first run."""


def public(Pattern):
    """Rows in the order of their writing; every third is held back. An id with a comment is one that its writer would want where
    none is known to fit."""
    kept = "kept_tensors"
    row = lambda *args, **kwargs: Pattern(*args, module="public_threads", **kwargs)
    return [
        # create_graph=True in the backward pass of each row, of which no further derivative is taken.
        row("hessian_of_molecule", "create_graph", r"create_graph=(training|False)|create_graph", "facebookresearch/fairchem#2099"),
        row("curve_over_pixels", "all_pairs", r"split|chunk|loop|part", "Lightning-AI/torchmetrics#1492"),
        row("likelihood_of_prompt", "logits", r"split|chunk", "ModelTC/LightLLM#1435", held_back=True),
        # Autograd keeps the float32 result of each chunk: chunks alone save nothing.
        row("policy_in_chunks", "logits", r"checkpoint", "NVIDIA-NeMo/RL#4222"),
        # Float32 copies of a large tensor, three at a time.
        row("rounded_activations", "elementwise_copies", r"in.place|div_|clamp_", "pytorch/ao#4068", memory=1024),
        row("speakers_of_long_recording", "all_pairs", r"split|chunk|part", "NVIDIA-NeMo/Speech#7691", held_back=True),
        # A model that nothing has called yet holds most of the memory.
        row("latents_before_training", "idle_model", r"\.cpu\(\)|before it is|until|later|host", "huggingface/peft#3395"),
        # Training runs parts of a batch, and this the whole of it. No row of kReasons said so, and its writer expected capacity.
        row("gradients_of_query", "larger_step", r"chunk|split|accumul|batch", "EleutherAI/bergson#400"),
        row("pictures_without_sketch", kept, r"clear|\bdel\b|\.cpu\(\)|remove", "Mikubill/sketch2img#7", held_back=True),
        # Its writer expected kept_tensors; what is kept are small parts, each of which keeps the states of a whole frame.
        row("people_of_long_video", "small_view", r"\.cpu\(\)|clone|\bdel\b", "timmeinhardt/trackformer#101"),
        # Copies of the weights, one for each client. Its writer expected several_models; the screen says that the dictionary keeps
        # tensors as large as weights, and which one, which is as true and says more.
        row("letters_of_clients", kept, r"\.cpu\(\)|host", "APPFL/APPFL#112"),
        row("states_of_breakout", kept, r"\.cpu\(\)|host|smaller", "cpnota/autonomous-learning-library#144", held_back=True, memory=500),
    ]
