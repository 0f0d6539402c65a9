"""What is wrong with the programs of final_threads.py, and what cured it in the thread: written before the first run, by someone who had
not read the rules.
"""


def final(Pattern):
    row = lambda *args, **kwargs: Pattern(*args, module="final_threads", **kwargs)
    return [
        row("validate_timit", "evaluation_keeps_graphs", r"no_grad", "mravanelli/pytorch-kaldi#41"),
        row("match_photos", "enlarged", r"lower resolution|smaller", "Parskatt/RoMa#5"),
        row("train_next_basket", "enlarged", r"adjacency", "yule-BUAA/DNNTSP#1"),
        row("detect_faces", "evaluation_keeps_graphs", r"no_grad", "Tencent/FaceDetection-DSFD#11", memory=1400),
        row("train_fmri_lstm", "recurrent_state", r"detach", "sgadgil6/cnslab_fmri#4"),
        row("segment_brats", "output_on_ctx", r"save_for_backward|detach", "RobinBruegger/RevTorch#1"),
        row("train_cityscapes", "larger_step", r"scaled down|half|autocast", "NVIDIA/semantic-segmentation#171"),
        row("forecast_shops", "large_result", r"larger step", "Nixtla/neuralforecast#1202"),
        row("run_weather_segments", "kept_tensors", r"watched\.clear|without the models", "ai2cm/ace#37", memory=900),
        row("serve_videos", "reference_cycle", r"gc\.collect", "vllm-project/vllm-omni#6385"),
        row("fit_glass_horse", "kept_tensors", r"\.cpu\(\)", "lvjiahui/DRT#6", memory=800),
        row("infer_structures", "kept_tensors", r"\.cpu\(\)", "MDIL-SNU/SevenNet#187"),
    ]
