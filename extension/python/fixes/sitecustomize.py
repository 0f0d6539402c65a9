# First on PYTHONPATH of a program that oomdiag runs to measure a fix or as one rank of a job: waits for torch to be
# imported, then applies what OOMDIAG_FIXES names, and what a rank needs that is alone. The sitecustomize of the user's own environment, which this one hides, is run as ever.
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_apply(module):
                execute(module)
                _apply()

            spec.loader.exec_module = execute_and_apply
        return spec


def _run_hidden_one():
    others = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _apply():
    if os.environ.get("OOMDIAG_RANK_JOB"):
        import oomdiag_ranks
        oomdiag_ranks.apply()
    if os.environ.get("OOMDIAG_FIXES"):
        import oomdiag_fixes
        oomdiag_fixes.apply_all()


def apply_what_the_environment_names():
    """Now, if torch is there, else when it is imported."""
    if "torch" in sys.modules:
        _apply()
    elif os.environ.get("OOMDIAG_FIXES") or os.environ.get("OOMDIAG_RANK_JOB"):
        sys.meta_path.insert(0, _AfterTorch())


if "OOMDIAG_RANK_SUMMONED" in os.environ:
    import oomdiag_ranks
    oomdiag_ranks.end_with_owner()
apply_what_the_environment_names()
_run_hidden_one()
