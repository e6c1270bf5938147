"""Study a corpus on a Ray cluster of two nodes in one machine, of which one is killed on the way. Prints JSON.

usage: python -m tests.ray_run MODEL TEXTS FOLDER BLOCK   (writes FOLDER/ray.npz)
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import attnscope
import attnscope.studies.heads.study as study
from attnscope import BatchOptions, Corpus, batch, heads
from attnscope.choice import Choice
from attnscope.studies.inputs.options import WorkerOptions
from attnscope.studies.workers import Workers


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    spec = sys.argv[1]
    texts = Path(sys.argv[2])
    folder = Path(sys.argv[3])
    study.BLOCK = int(sys.argv[4])  # type: ignore[misc]
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    second = cluster.add_node(**small)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    told: dict[str, Any] = {}

    def kill_second(done: Any) -> None:
        """Kill the second node as soon as a first block is done."""
        if not done.step and "killed_after" not in told:
            told["killed_after"] = done.n_texts
            cluster.remove_node(second, allow_graceful=False)

    try:
        started = time.perf_counter()
        found = heads(
            attnscope.load(spec), Corpus(texts), None, kill_second, Workers(spec, 2, executor="ray")
        )
        told["elapsed_s"] = round(time.perf_counter() - started, 1)
        found.save(folder / "ray.npz")
        told["n_texts"] = found.corpus["n_texts"]
        told["n_nodes_left"] = len(cluster.list_all_nodes())
        running = WorkerOptions(workers=1, executor="ray")
        options = BatchOptions(choice=Choice(layers=(0,)), running=running)
        drawn = batch("own", ["a b"], folder / "figures", options)
        told["drawn"] = [len(drawn.drawn), len(drawn.failed)]
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
