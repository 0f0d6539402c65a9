"""What is wrong with the programs of latest_threads.py, and what cured it in the thread: written before the first run, by someone who
had not read the rules.
"""


def latest(Pattern):
    row = lambda *args, **kwargs: Pattern(*args, module="latest_threads", **kwargs)
    return [
        row("predict_land_cover", "kept_tensors", r"\.cpu\(\)", "nitrain/nitrain#27", memory=900),
        row("run_classifier_cv", "reference_cycle", r"gc\.collect", "dbiir/UER-py#167", memory=1200),
        row("format_source_code", "enlarged", r"one for each row of the table", "dmlc/dgl#852", memory=1600),
        row("train_on_cuts", "larger_step", r"parts|half|batch", "lhotse-speech/lhotse#640", memory=1000),
        row("play_car_racing", "evaluation_keeps_graphs", r"no_grad", "kc-ml2/SimpleDreamer#7", memory=800),
        row("embed_images", "caught_traceback", r"after the except", "Kitware/nrtk-explorer#87", memory=1000),
        row("create_perturbed_dataset", "graph_of_earlier_steps", r"old_image\.detach", "LostOxygen/poison_froggo#1", memory=1000),
        # The report says where they are joined; that their argmax would do, it cannot know.
        row("evaluate_language_model", "growing_buffer", r"\.cpu\(\)|argmax", "huggingface/transformers#15466", memory=1000),
        row("fit_forecaster", "large_result", r"part", "Nixtla/neuralforecast#783", memory=800),
        row("animate_faces", "evaluation_keeps_graphs", r"no_grad", "EvelynFan/FaceFormer#2", memory=1000),
        # They are made between two steps, and so are those of the step that fails: only "kept by" names their list.
        row("train_diffusion", "outputs_of_earlier_step", r"\bdel\b", "lucidrains/denoising-diffusion-pytorch#75", memory=820),
        row("show_camera", "kept_tensors", r"only what is used|\.cpu\(\)", "nerfstudio-project/nerfstudio#1748", memory=1000),
    ]
