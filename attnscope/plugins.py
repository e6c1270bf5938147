"""Load plugins: modules of other packages that add measures of heads and commands to attnscope.

A package names its module under the entry point `attnscope.plugins`. The module may define

- `TOKEN_SETS`: a dict of functions, by the name of a set of tokens such as "digits". A function takes `Tokens` and
  returns which tokens belong to the set, (token,) bool.
- `measures()`: a function that returns a list of `core.catalogue.Measure`. The family of each is `KeyMeasure(name)`,
  where `name` is a key of `TOKEN_SETS`. The catalogue calls this function while the catalogue itself is imported.
  Therefore the plugin imports the catalogue inside of the function, not at the top of its module.
- `COMMANDS`: a dict of functions, by the name of a command. Their options are declared as in `attnscope.cli`.
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
"""The name of the plugin whose module is being imported; empty between imports. It reveals a nested import."""


@functools.cache
def load_plugins() -> tuple[ModuleType, ...]:
    """Import the modules of all installed plugins, in the order of their names.

    Raises:
        AttnscopeError: A plugin cannot be imported.
        ImportError: This function is called while it imports a plugin. The plugin imports the catalogue at its top,
            and the catalogue calls this function.
    """
    modules: list[ModuleType] = []
    # A call of this function is importing a plugin, whose module has led to this second call.
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
    """Merge the dicts that plugins have under one name, "TOKEN_SETS" or "COMMANDS"; a plugin may lack it."""
    added: dict[str, Any] = {}
    for plugin in load_plugins():
        added |= getattr(plugin, attribute, {})
    return added
