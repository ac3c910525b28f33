"""`elasticmoe coordinator`: holds a model's experts in this node's memory, once, for workers with transport `map`.

Needs no GPU, no torch and no vLLM. Ends on SIGTERM or SIGINT.
"""

import argparse
import logging
import signal
import threading
from pathlib import Path

from elasticmoe.runtime.contract.pool_names import METRICS_PORT
from elasticmoe.runtime.errors import ConfigError

MOST_S = 10**9


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `coordinator` to the command's subparsers."""
    parser = subparsers.add_parser("coordinator", help="hold a model's experts in host memory for this node's workers")
    add = parser.add_argument
    add("--socket", type=Path, required=True, help="Unix socket to listen on; its folder is made")
    add("--model", required=True, help="folder of the checkpoint, spelt as the workers spell it")
    add("--revision", default="", help="the checkpoint's revision, if the workers are given one")
    add("--metrics-port", type=int, default=METRICS_PORT, help="where /metrics is; 0: a free port (default: 9401)")
    add("--grace-s", type=float, default=600.0, help="how long a pool is kept without workers (default: 600)")
    add("--adopt-wait-s", type=float, default=5.0, help="how long to wait for a predecessor's pools (default: 5)")
    add("--drain-s", type=float, default=20.0, help="how long to stay for workers when told to end (default: 20)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; 0 when done."""
    from elasticmoe.runtime.coordinator.metrics import Metrics
    from elasticmoe.runtime.coordinator.server import Coordinator, Settings
    from elasticmoe.runtime.coordinator.store import PoolStore

    for flag, seconds in (("grace", args.grace_s), ("adopt-wait", args.adopt_wait_s), ("drain", args.drain_s)):
        if not 0 <= seconds <= MOST_S:
            raise ConfigError(f"--{flag}-s: want seconds from 0 to {MOST_S}, it is {seconds}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    metrics = Metrics()
    port = metrics.serve(args.metrics_port)
    settings = Settings(args.socket, args.grace_s, args.adopt_wait_s, args.drain_s)
    coordinator = Coordinator(settings, PoolStore(args.model, args.revision, metrics))
    metrics.watch_leases(lambda: coordinator.num_leases)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(f"coordinator of {args.model} on {args.socket}, metrics on port {port}", flush=True)
    coordinator.run(stop)
    return 0
