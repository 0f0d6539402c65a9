"""No graph where no backward follows: settings {"function": "validate"} names the program's function that evaluates, or {"line":
"train.py:68"} the line of its loop that calls the model.
"""
import torch

from . import report_applied
from .frames import own_frames, place_of
from .roots import replace_forward


def _evaluates(settings):
    if "function" in settings:
        return any(frame.f_code.co_name == settings["function"] for frame in own_frames())
    return any(place_of(frame) == settings["line"] for frame in own_frames())


def apply(settings):
    reported = False

    def without_graph(forward):
        def forward_without_graph(*arguments, **keywords):
            nonlocal reported
            if not torch.is_grad_enabled() or not _evaluates(settings):
                return forward(*arguments, **keywords)
            if not reported:
                reported = True
                report_applied("no_grad_in_evaluation", settings["lines"])
            with torch.no_grad():
                return forward(*arguments, **keywords)

        return forward_without_graph

    replace_forward(without_graph)
