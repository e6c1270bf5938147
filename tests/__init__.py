from typing import Any


def check_annotations(function: Any) -> Any:
    """What checks core where jaxtyping's import hook is on; an int is a float, as PEP 484 has it."""
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)
