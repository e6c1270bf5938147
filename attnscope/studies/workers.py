"""Choose the workers of a study: their number, their place, and how each loads the very same model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from attnscope.errors import AttnscopeError, UsageError
from attnscope.models import Model
from attnscope.models.catalog import BUILT_IN, KNOWN
from attnscope.models.files import hashes, remember_hashes
from attnscope.studies.executors import Executor, Processes, RayCluster
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import versions

Where = Literal["local", "ray"]

MOST_COUNT = 4096
"""More workers or threads than that are a slip of the pen."""


@dataclass(frozen=True)
class Workers:
    """Who shares a study's work.

    Attributes:
        spec: The model, as `attnscope.load` takes it by name: each worker loads it.
        n: How many workers there are; None = as many as there is room for on Ray's machines.
        threads: How many threads each computes with. Results are those of one process with as many threads.
        executor: "local", processes of this machine; "ray", those of a Ray cluster.
        address: Of the cluster; None = as Ray finds it, else one that is started on this machine.
        loading: How the model is loaded.
    """

    spec: str
    n: int | None = None
    threads: int = 1
    executor: Where = "local"
    address: str | None = None
    loading: LoadOptions = LoadOptions()

    def __post_init__(self) -> None:
        if self.executor not in get_args(Where):
            raise UsageError(f"there is no executor {self.executor!r}", f"choose one of {', '.join(get_args(Where))}")
        if self.address is not None and self.executor != "ray":
            raise UsageError("--ray-address is an address of Ray", "add --executor ray")
        if self.executor == "local" and self.n is None:
            raise UsageError("how many processes are to work is not said", "give --workers")
        for what, number in (("workers", self.n), ("threads", self.threads)):
            if number is not None and number > MOST_COUNT:
                raise UsageError(f"{number:,} {what} are more than any machine has", f"choose at most {MOST_COUNT:,}")
            if number is not None and number < 1:
                raise UsageError(f"{number} {what} do nothing", f"choose at least 1, or leave out --{what}")

    def executor_on(self, device: str) -> Executor:
        """Return where blocks are run; on Ray, each worker of a CUDA device claims one."""
        if self.executor == "ray":
            return RayCluster(self.n, self.threads, self.address, on_gpu=device.startswith("cuda"))
        return Processes(self.n or 1, self.threads)

    def model(self, model: Model) -> WorkersModel:
        """Return what lets workers load this very model."""
        device = model.info.device if self.loading.device_map is None else self.loading.device
        loading = replace(self.loading, device=device)
        known_hashes = hashes() if self.executor == "local" else {}
        spec = self.spec
        if spec not in (*KNOWN, *BUILT_IN) and Path(spec).exists():
            spec = str(Path(spec).absolute())  # Ray's workers stand elsewhere
        return WorkersModel(spec, loading, self.threads, model.info.sha256, dict(versions()), known_hashes)


@dataclass(frozen=True)
class WorkersModel:
    """Hold the model of a study, as a worker loads it: the same weights, with the same versions.

    Attributes:
        spec: Its name; a folder is the same folder on every machine.
        sha256: What its weights must hash to.
        versions: Of all that numbers may depend on.
        hashes: Of its files; see `models.files.hashes`.
    """

    spec: str
    loading: LoadOptions
    threads: int
    sha256: str
    versions: dict[str, str]
    hashes: dict[Any, str]

    def load(self) -> Model:
        """Load it.

        Raises:
            AttnscopeError: It is not there, or another one.
        """
        import torch

        torch.set_num_threads(self.threads)
        here = dict(versions())
        other = [f"{name} {here.get(name)}, not {of}" for name, of in self.versions.items() if here.get(name) != of]
        if other:
            raise AttnscopeError(f"a worker has {other[0]}", "install the same versions on all machines")
        remember_hashes(self.hashes)
        model = self.loading.load(self.spec)
        if model.info.sha256 != self.sha256:
            raise AttnscopeError(
                f"{self.spec} has other weights on a worker ({model.info.sha256[:12]}, not {self.sha256[:12]})",
                "give a model that is the same on all machines",
            )
        return model
