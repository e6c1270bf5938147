"""Load plugins: modules of other packages that add measures of heads and commands to attnscope.

A package names its module under the entry point `attnscope.plugins`. The module may define

- `TOKEN_SETS`: functions by the name of a set of tokens. A function takes `Tokens` and returns which of them belong to
  the set, (token,) bool.
- `measures()`: a function that returns `core.catalogue.Measure`s. Their family is `KeyMeasure(name)`, where name is
  such a set. The catalogue calls it while it is imported itself, so the function, not the module, must import the
  catalogue.
- `COMMANDS`: functions by the name of a command, with options as in `attnscope.cli`.
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

ENTRY_POINT_GROUP = "attnscope.plugins"
"""The group of entry points."""

_plugins_being_imported: list[str] = []
"""Holds the name of the plugin that is being imported, to notice that it asks for plugins itself."""


@functools.cache
def load_plugins() -> tuple[ModuleType, ...]:
    """Import the modules of all installed plugins, in the order of their names.

    Raises:
        AttnscopeError: A plugin cannot be imported.
        ImportError: A plugin asks for plugins while it is imported: it imports the catalogue at its top.
    """
    modules: list[ModuleType] = []
    # This call comes from a module that the call before it imports.
    if _plugins_being_imported:
        raise ImportError("it imports attnscope.core.catalogue at its top; import it within measures()")
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        _plugins_being_imported.append(point.name)
        try:
            modules.append(point.load())
        except Exception as error:
            raise AttnscopeError(
                f"the plugin {point.name} cannot be loaded: {type(error).__name__}: {error}",
                f"mend or uninstall the package that brings {point.value}",
            ) from error
        finally:
            _plugins_being_imported.pop()
    return tuple(modules)


def load_measures() -> list[Any]:
    """Return the measures of heads that plugins add."""
    added: list[Any] = []
    for plugin in load_plugins():
        added += getattr(plugin, "measures", list)()
    return added


def load_token_sets() -> dict[str, TokenSet]:
    """Return the sets of tokens that plugins define, by name."""
    return _merge_dicts("TOKEN_SETS")


def load_commands() -> dict[str, Callable[..., None]]:
    """Return the commands that plugins add, by name."""
    return _merge_dicts("COMMANDS")


def _merge_dicts(attribute: str) -> dict[str, Any]:
    """Return the entries of all plugins' dictionaries of this name; a plugin need not have one."""
    added: dict[str, Any] = {}
    for plugin in load_plugins():
        added |= getattr(plugin, attribute, {})
    return added
