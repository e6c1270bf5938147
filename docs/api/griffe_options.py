"""What the API pages say about dataclasses of options: the help of an option is the documentation of its field."""

import ast
from typing import Any

import griffe


class OptionHelp(griffe.Extension):
    """Reads the first argument of `option(…)`, which `attnscope.options` makes docstrings of when it is imported."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Documents a field whose value is `option("help", …)`."""
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "option" and value.args:
            help_text = value.args[0]
            if isinstance(help_text, ast.Constant) and isinstance(help_text.value, str):
                attr.docstring = griffe.Docstring(help_text.value, lineno=node.lineno)
            default = next((word.value for word in value.keywords if word.arg == "default"), None)
            attr.value = None if default is None else ast.unparse(default)
