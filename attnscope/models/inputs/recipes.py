"""Recipes: files of Python code that make a model and its inputs, for the command line."""

import contextlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from attnscope.core.plain_torch import keep_settings
from attnscope.errors import AttnscopeError, first_line
from attnscope.models.inputs.model import InputsModel, load_inputs

FUNCTION = "attnscope_model"
"""What a recipe defines: a function without arguments that returns the model, its inputs and, if it likes, labels."""

_FORM = f"define {FUNCTION}(), which returns model, inputs, labels (docs/own-inputs.md)"


def load_recipe(path: Path, *, name: str, source: str, check: bool = True) -> InputsModel:
    """Runs a recipe, and makes a Model of what it returns. What it prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr), keep_settings():
        function = getattr(_run(path), FUNCTION, None)
        if not callable(function):
            raise AttnscopeError(f"{path.name} has no function {FUNCTION}", _FORM)
        result = _call(path, function)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise AttnscopeError(f"{FUNCTION} of {path.name} returns {type(result).__name__}", _FORM)
    return load_inputs(*result, name=name, source=source, check=check)


def _run(path: Path) -> Any:
    """The module that a file is."""
    spec = importlib.util.spec_from_file_location(f"attnscope_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    _call(path, lambda: spec.loader.exec_module(module))
    return module


def _call(path: Path, function: Any) -> Any:
    """What a function of a recipe returns; whatever it raises becomes one line, with the line of the recipe."""
    try:
        return function()
    except (AttnscopeError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        message = f"{path.name} is no Python: {error.msg}, line {error.lineno}"
        raise AttnscopeError(message, "mend that line") from error
    except BaseException as error:  # SystemExit too
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        message = f"{path.name} fails{where}: {type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(message, "run it with python first") from error
