"""Tensors of a step that its variables keep until the next step assigns them again: they are deleted where the next one begins.

What a variable got after the model was called and held at the end of optimizer.step(), and still holds when the model is called
again, belongs to the step that is over; unless the program hands it to the model, as a recurrent state.
"""
import functools

import torch

from . import report_applied
from .frames import forget, locals_of, own_frames, place_of
from .roots import replace_forward

_LEAST_BYTES = 1 << 20  # a loss that is logged later costs nothing


def _tensors_of(frame):
    """Address by name, of each variable that keeps much of the GPU."""
    return {name: id(value) for name, value in locals_of(frame).items()
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.is_cuda
            and value.untyped_storage().nbytes() >= _LEAST_BYTES}


class _Steps:
    """The variables of the frame whose loop this is: `before` at the call of the model, `over` when its step had ended."""

    def __init__(self):
        self.code, self.before, self.over, self.reported = None, {}, {}, False

    def begin(self, arguments):
        frame = next(own_frames(), None)
        if frame is None:
            return
        given = {id(value) for value in arguments}
        now = _tensors_of(frame) if frame.f_code is self.code else {}
        names = [name for name, value in self.over.items() if now.get(name) == value and value not in given]
        for name in names:
            forget(frame, name)
        if names and not self.reported:
            self.reported = True
            report_applied("delete_outputs",
                         [f"del {', '.join(names)}  # at the end of the loop's body of {place_of(frame)}"])
        self.code, self.before, self.over = frame.f_code, _tensors_of(frame), {}

    def end(self):
        frame = next((frame for frame in own_frames() if frame.f_code is self.code), None)
        if frame is not None:
            self.over = {name: value for name, value in _tensors_of(frame).items() if self.before.get(name) != value}


def apply(_settings):
    steps = _Steps()
    plain_init = torch.optim.Optimizer.__init__

    def delete_before(forward):
        @functools.wraps(forward)
        def begin_and_run(*arguments, **keywords):
            steps.begin([*arguments, *keywords.values()])
            return forward(*arguments, **keywords)

        return begin_and_run

    def init(self, *arguments, **keywords):
        plain_init(self, *arguments, **keywords)
        self.register_step_post_hook(lambda *_: steps.end())

    torch.optim.Optimizer.__init__ = init
    replace_forward(delete_before)
