"""What other packages add to attnscope: measures of heads, and commands.

A package names a module under the entry point `attnscope.plugins`. The module may have

- `TOKEN_SETS`: by name, a function that says which tokens of a text belong to a set: from `Tokens` to (token,) bool,
- `measures()`: returns `core.catalogue.Measure`s, whose family is `Keys(name)` of such a set; it imports the catalogue
  itself, which asks plugins for their measures as it is imported,
- `COMMANDS`: by name, a function with options, as those of `attnscope.cli`.
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
"""The plugin that is being imported."""


@functools.cache
def plugins() -> tuple[ModuleType, ...]:
    """Load the modules that installed packages name, in the order of their names.

    Raises:
        AttnscopeError: One of them cannot be imported.
    """
    modules: list[ModuleType] = []
    # A plugin may not ask for plugins while it loads.
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
    """Return the measures that plugins add to those of texts."""
    added: list[Any] = []
    for plugin in plugins():
        added += getattr(plugin, "measures", list)()
    return added


def token_sets() -> dict[str, TokenSet]:
    """Return the sets of tokens that plugins define, by name."""
    added: dict[str, TokenSet] = {}
    for plugin in plugins():
        added |= getattr(plugin, "TOKEN_SETS", {})
    return added


def commands() -> dict[str, Callable[..., None]]:
    """Return the commands that plugins add, by name."""
    added: dict[str, Callable[..., None]] = {}
    for plugin in plugins():
        added |= getattr(plugin, "COMMANDS", {})
    return added
