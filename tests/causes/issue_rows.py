"""What is wrong with the programs of issue_threads.py, and what cured it in the thread: written before the first run."""


def issues(Pattern):
    """Rows in the order of their writing; every third is held back."""
    row = lambda *args, **kwargs: Pattern(*args, module="issue_threads", **kwargs)
    return [
        # One batch of many long utterances, after batches of about equal frames.
        row("uneven_frames", "larger_step", r"batch|frames|bucket|length|sort", "wenet-e2e/wenet#724"),
        row("candidates_one_by_one", "reference_cycle", r"gc\.collect|weakref|hook", "pytorch/pytorch#46386"),
        row("attributions_of_ensemble", "kept_tensors", r"\bdel\b|remove|None|\.cpu\(\)", "jmschrei/tangermeme#84", held_back=True),
        row("points_of_film", "evaluation_keeps_graphs", r"no_grad", "LiZizun/WinT3R#1"),
        # The sum of all windows of all classes, and beside it what a division makes of it; no row was known to say so.
        row("whole_scan", "elementwise_copies", r"\.cpu\(\)|device=|host|cpu", "Project-MONAI/MONAI#854"),
        row("mask_of_clip", "data_on_gpu", r"frame by frame|part|chunk|\.cuda\(\)|host|\.cpu\(\)|cpu", "hkchengrex/STCN#23", held_back=True, memory=800),
        # In the thread the frames are written into one tensor; here the screen names the list, and not what cat() adds to it.
        row("smoother_film", "joined_results", r"\.cpu\(\)|preallocat|empty|write", "Fannovel16/ComfyUI-Frame-Interpolation#52", memory=700),
        # The matrices come from the host: no op of the GPU made them.
        row("relations_of_bodies", "one_hot", r"index|sparse|scatter", "ethanfetaya/NRI#19"),
        # Features of edges before the layer that makes them narrow.
        row("coauthors", "enlarged", r"linear|narrow|sparse|split|chunk", "pyg-team/pytorch_geometric#404", held_back=True, memory=1400),
        row("private_accuracy", "kept_tensors", r"\.eval\(\)|clear|\bdel\b|\.cpu\(\)", "meta-pytorch/opacus#176"),
        row("best_of_epochs", "kept_tensors", r"\.cpu\(\)", "facebookresearch/fairscale#790"),
        row("features_of_neighbours", "wide_index", r"split|chunk|part|int32|points\[", "lxxue/FRNN#6", held_back=True),
        row("digits_after_each_epoch", "evaluation_keeps_graphs", r"no_grad|detach", "TeaPearce/Conditional_Diffusion_MNIST#12", memory=700),
        # Backward has freed what the graph had saved: what stays is the tensors of each trajectory.
        row("flows_with_replay", "kept_tensors", r"detach", "recursionpharma/gflownet#130"),
        # An embedding of each sample of the data set, twice, as buffers.
        row("distilled_faces", "large_buffers", r"queue|fewer|host|\.cpu\(\)|half", "HobbitLong/RepDistiller#40", held_back=True),
        row("picture_of_scene", "batch_without_gradients", r"chunk|split|part", "dunbar12138/DSNeRF#72"),
        row("boxes_of_crowd", "all_pairs", r"chunk|split|part|cpu", "facebookresearch/maskrcnn-benchmark#18", memory=500),
        row("heat_maps_of_epoch", "kept_tensors", r"\.cpu\(\)|\.item\(\)|\bdel\b", "Lightning-AI/pytorch-lightning#8453", held_back=True),
        row("summaries_by_beams", "enlarged", r"expand|view|later|repeat", "facebookresearch/fairseq#1957", memory=700),
        row("sharper_pictures", "graph_without_use", r"no_grad|requires_grad", "junyanz/pytorch-CycleGAN-and-pix2pix#822", memory=1100),
        row("episode_of_pong", "several_forward_passes", r"backward", "pytorch/pytorch#5353", held_back=True),
        row("surface_of_scan", "kept_tensors", r"\.cpu\(\)|host", "nv-tlabs/NKSR#8"),
        row("flow_of_film", "batch_without_gradients", r"split|chunk|part", "sczhou/Upscale-A-Video#42", memory=900),
        # Coordinates of each pixel of each mask: the screen names the grid beside what failed.
        row("masks_of_crowd", "large_result", r"split|chunk|part|cpu", "facebookresearch/maskrcnn-benchmark#18", held_back=True),
        row("memory_of_nodes", "recurrent_state", r"detach", "twitter-research/tgn#16"),
        row("average_of_clients", "kept_tensors", r"\.cpu\(\)|sum|\+=|running|host", "APPFL/APPFL#112"),
        row("words_of_recording", "data_on_gpu", r"split|chunk|part|batch", "", held_back=True, memory=700),
    ]
