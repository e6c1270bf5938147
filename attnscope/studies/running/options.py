"""What a study whose texts workers share is asked with. Loads nothing heavy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from attnscope.errors import UsageError
from attnscope.options import option, options
from attnscope.studies.inputs.options import LoadOptions

if TYPE_CHECKING:
    from attnscope.studies.workers import Workers


@options
class SharedWork:
    """Which workers share the texts."""

    PANEL: ClassVar[str] = "Running"

    executor: str = option(
        "Where workers run: local, on this machine; ray, on a Ray cluster (extra [ray]).",
        default="local", rare=True,
    )  # fmt: skip
    workers: int | None = option(
        "Workers that share the texts, each with its own copy of the model.  [default: none but "
        "this process; with Ray, as many as fit]",
        default=None, rare=True,
    )  # fmt: skip
    threads: int | None = option(
        "Threads per worker; more than 1 for large models.  [default: 1]", default=None, rare=True
    )
    ray_address: str | None = option(
        "Address of the cluster, such as 10.0.0.1:6379.  [default: RAY_ADDRESS, else a new one here]",
        default=None, python_only=True,
    )  # fmt: skip

    def share(self, spec: str, loading: LoadOptions) -> Workers | None:
        """The workers of a study of a model; None = it runs in this process.

        Raises:
            UsageError: They mean nothing.
        """
        from attnscope.studies.workers import Workers

        if self.executor == "local" and self.workers is None:
            if self.threads is not None or self.ray_address is not None:
                name = "threads" if self.threads is not None else "ray-address"
                raise UsageError(f"--{name} is for workers", "add --workers, or --executor ray")
            return None
        threads = 1 if self.threads is None else self.threads
        address = self.ray_address
        if address is None and self.executor == "ray":
            address = os.environ.get("RAY_ADDRESS")
        return Workers(spec, self.workers, threads, self.executor, address, loading)  # type: ignore[arg-type]  # it refuses others
