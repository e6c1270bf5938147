"""Load plugins, by which other packages add measures of heads and commands to attnscope.

A package names a module under the entry point `attnscope.plugins`. The module may have

- `TOKEN_SETS`: functions by name that say which tokens of a text belong to a set: from `Tokens` to (token,) bool,
- `measures()`: returns `core.catalogue.Measure`s, whose family is `Keys(name)` of such a set. It must import the
  catalogue inside, for the catalogue asks plugins for their measures while it is imported,
- `COMMANDS`: functions by name, with options as in `attnscope.cli`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from attnscope.results.tokens import Tokens

    TokenSet = Callable[[Tokens], NDArray[np.bool_]]

GROUP = "attnscope.plugins"
"""The group of entry points."""

_loading: list[str] = []
"""The name of the plugin that is being imported; empty = none is."""


@functools.cache
def plugins() -> tuple[ModuleType, ...]:
    """Load the modules that installed packages name, in the order of their names.

    Raises:
        AttnscopeError: One of them cannot be imported.
        ImportError: A plugin asks for plugins while it is imported.
    """
    modules: list[ModuleType] = []
    if _loading:
        raise ImportError("it imports attnscope.core.catalogue at its top; import it within measures()")
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        _loading.append(point.name)
        try:
            modules.append(point.load())
        except Exception as error:
            raise AttnscopeError(
                f"the plugin {point.name} cannot be loaded: {type(error).__name__}: {error}",
                f"mend or uninstall the package that brings {point.value}",
            ) from error
        finally:
            _loading.pop()
    return tuple(modules)


def measures() -> list[Any]:
    """Return the measures of heads that plugins add."""
    added: list[Any] = []
    for plugin in plugins():
        added += getattr(plugin, "measures", list)()
    return added


def token_sets() -> dict[str, TokenSet]:
    """Return the sets of tokens that plugins define, by name."""
    return _merge("TOKEN_SETS")


def commands() -> dict[str, Callable[..., None]]:
    """Return the commands that plugins add, by name."""
    return _merge("COMMANDS")


def _merge(attribute: str) -> dict[str, Any]:
    """Return the entries of a dictionary that plugins may have."""
    added: dict[str, Any] = {}
    for plugin in plugins():
        added |= getattr(plugin, attribute, {})
    return added
