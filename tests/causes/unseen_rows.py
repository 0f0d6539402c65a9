"""What is wrong with the programs of unseen_threads.py, and what cured it in the thread: written before the first run."""


def unseen(Pattern):
    """Rows in the order of their writing: threads as a search had them, those with a confirmed cause that no suite had cited."""
    evaluation, graphs, kept = ("evaluation_keeps_graphs", r"no_grad|inference_mode"), "graph_of_earlier_steps", "kept_tensors"
    pairs = ("all_pairs", r"split|chunk")
    row = lambda *args, **kwargs: Pattern(*args, module="unseen_threads", **kwargs)
    return [
        row("pictures_between_steps", *evaluation, "znxlwm/UGATIT-pytorch#74"),
        row("projectors_of_layers", graphs, r"no_grad|detach", "beijixiong3510/OWM#3"),
        row("sizes_of_pictures_change", "capacity", r"half|batch|accumul|checkpoint|autocast", "microsoft/singleshotpose#112"),
        row("questions_of_all_subjects", *evaluation, "qualcomm/aimet#4073"),
        # Features at points of lines between all pairs of junctions, by an index: the screen names its line, and says how much it makes of
        # how little. Its writer expected all_pairs.
        row("lines_between_all_junctions", "enlarged", pairs[1], "zhou13/lcnn#9"),
        row("report_in_each_batch", kept, r"\.cpu\(\)|\bdel\b|clear", "Stonesjtu/pytorch_memlab#17"),
        row("patches_of_volume", "reference_cycle", r"gc\.collect|weakref", "keras-team/keras#23110", memory=450),
        row("slices_of_test_volumes", *evaluation, "guopengf/FL-MRCM#2"),
        row("citations_of_papers", "all_pairs", r"split|chunk|broadcast|sparse", "diegoantognini/pyGAT#56"),
        # A matrix for each edge: nothing more special than activations.
        row("energies_of_molecules", "many_rows", r"half|batch|accumul|checkpoint|autocast|split|chunk", "pyg-team/pytorch_geometric#1415"),
        row("cells_in_another_order", "dense_matrix", r"sparse", "schwartzlab-methods/CellNEST#34"),
        row("field_at_all_points", *pairs, "cornellius-gp/gpytorch#2754"),
        row("registration_of_large_scene", *pairs, "qinzheng93/GeoTransformer#69"),
        row("metric_over_epochs", kept, r"\.cpu\(\)|reset|\bdel\b|clear", "NRCan/geo-deep-learning#582", memory=700),
        row("best_weights_at_the_end", "loaded_onto_gpu", r"map_location", "huggingface/transformers#20920", memory=930),
        row("denoiser_comes_back", "several_models", r"host|cpu|\bdel\b|clone", "Comfy-Org/ComfyUI#13372", memory=600),
        row("anchors_of_crowded_picture", "one_hot", r"scatter|gather|ind(ex|ices)", "Deci-AI/super-gradients#1499"),
        row("windows_of_long_series", "batch_without_gradients", r"split|chunk", "Nixtla/neuralforecast#521"),
        row("recordings_of_all_lengths", "unrolled_sequence", r"sequence|truncat|detach|checkpoint|half|short", "NVIDIA/tacotron2#213"),
        row("preferences_of_long_completions", "logits", r"chunk|split|liger", "huggingface/trl#3701"),
        row("losses_of_lazy_regularization", graphs, r"\.item\(\)|detach", "adriansahlman/stylegan2_pytorch#11"),
        row("captions_of_all_pictures", *pairs, "ZihaoWang-CV/CAMP_iccv19#5", memory=820),
    ]
