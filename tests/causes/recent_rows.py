"""What is wrong with the programs of recent_threads.py, and what cured it in the thread: written before the first run, by someone who
had not read the rules.
"""


def recent(Pattern):
    row = lambda *args, **kwargs: Pattern(*args, module="recent_threads", **kwargs)
    return [
        row("play_gait", "evaluation_keeps_graphs", r"no_grad", "Improbable-AI/walk-these-ways#10", memory=1000),
        row("predictions_and_masks", "kept_tensors", r"\.cpu\(\)", "fastai/fastai#2337", memory=800),
        row("train_on_aerial_images", "all_pairs", r"\.cpu\(\)|split|chunk", "open-mmlab/mmdetection#1581", memory=1000),
        row("train_critic", "create_graph", r"autograd\.grad", "akanimax/pro_gan_pytorch#12", memory=1200),
        row("compare_checkpoints", "kept_tensors", r"cache_clear", "huggingface/transformers#45412", memory=800),
        # The report names the list of answers, and not the key-value cache in each.
        row("instruct_again_and_again", "kept_tensors", r"\bdel\b|\.cpu\(\)", "generative-computing/mellea#544", memory=1000),
        # Only a whole run shows that no backward pass comes (`run --complete`); these programs are run once.
        row("create_voice_prompt", "evaluation_keeps_graphs", r"no_grad", "jamiepine/voicebox#890", memory=1000),
        row("train_graph_net", "output_on_ctx", r"save_for_backward", "dmlc/dgl#1060", memory=1000),
        row("train_route_decoder", "repeated_casts", r"cache_enabled=True", "Lightning-AI/pytorch-lightning#21611", memory=1200),
        row("train_on_signals", "graph_of_earlier_steps", r"detach", "Lightning-AI/torchmetrics#1461", memory=1000),
        row("logprobs_of_rollouts", "logits", r"split|chunk", "NovaSky-AI/SkyRL#1610", memory=900),
        row("run_dynamics", "graph_of_earlier_steps", r"_energies\.detach", "NVIDIA/nvalchemi-toolkit#82", memory=800),
        row("fit_field_and_poses", "equal_rows", r"chosen|index|first", "chenhsuanlin/bundle-adjusting-NeRF#41", memory=900),
        row("resume_training", "loaded_onto_gpu", r"map_location", "rosinality/stylegan2-pytorch#36", memory=920),
        row("embed_nodes", "enlarged", r"sparse", "pyg-team/pytorch_geometric#459", memory=900),
    ]
