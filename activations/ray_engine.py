"""The engine `ray`: the shards of a capture are read by workers on the devices of a Ray cluster.

Ray Data hands each worker, an actor with a target of its own, one shard's prompts at a time. Rows and states come
back through Ray's object store, whole or not at all, and the caller alone writes the store, in the order of its
shards: the workers need no common disk, and a store is the same whichever engine made it, up to the rounding of
other devices. A worker that dies is started again, and what it had in hand is read again. Every machine of the
cluster needs this package, and the target under the same name.

Workers tell a board that they live, while they load too; no sign for `patience` seconds means that the cluster has
no room for any of them. Nothing heavy is imported here, so that a worker's first sign does not wait for it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import torch

    from activations.capture import CaptureConfig, Work
    from activations.corpus import Prompt
    from activations.target import Target

TRIES = 4
"""How often a shard is begun, or a worker started, before what kills the workers counts as their own work."""
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Cores of a worker, the largest first, that are tried where none are given."""
SIGNS = 10
"""Signs of life of a worker within the patience."""


class EngineError(Exception):
    """A cluster that cannot be reached, has no room, or whose workers fail. The message says what to do."""


@dataclass(frozen=True)
class RayConfig:
    """Where and with what `--engine ray` works."""

    address: str | None = None
    """The Ray cluster, host:port or auto; by default that of RAY_ADDRESS, or else a new one of this machine alone."""
    actors: int = 0
    """Workers, each with its own copy of the target; 0 = as many as the cluster's GPUs have room for, or one for each
    machine where there are no GPUs."""
    actor_cpus: float = 0.0
    """Cores of a worker, whole ones or a share; 0 = one, or a share where the workers outnumber the cores."""
    actor_gpus: float = 1.0
    """GPUs of a worker, a fraction where several share one; counts only if the cluster has GPUs."""
    patience: float = 60.0
    """Seconds without a sign of life of any worker after which the run ends with an error."""

    def __post_init__(self) -> None:
        if self.actors < 0:
            raise ValueError(f"actors is {self.actors}; it must be 0 (automatic) or more")
        for name in ("actor_cpus", "actor_gpus"):
            value = getattr(self, name)
            if not (0 <= value < 1 or (value > 0 and float(value).is_integer())):
                raise ValueError(f"{name} is {value}; it must be a share below 1 or a whole number")
        if not 0 < self.patience < float("inf"):
            raise ValueError(f"patience is {self.patience}; it must be a number of seconds above 0")


@dataclass(frozen=True)
class Plan:
    """What is asked of a cluster."""

    actors: int
    cpus: float
    gpus: float

    @classmethod
    def of(cls, config: RayConfig, machines: Sequence[Mapping[str, float]]) -> Plan:
        """The plan for machines with these resources (CPU and GPU)."""
        gpus = config.actor_gpus if any(machine.get("GPU", 0) >= 1 for machine in machines) else 0.0
        actors = config.actors or max(1, sum(_room(machine, gpus) for machine in machines))
        if config.actor_cpus:
            return cls(actors, config.actor_cpus, gpus)
        for cpus in SHARES:
            if sum(min(int(m.get("CPU", 0) / cpus), _room(m, gpus, actors)) for m in machines) >= actors:
                return cls(actors, cpus, gpus)
        return cls(actors, SHARES[-1], gpus)

    def __str__(self) -> str:
        return f"{self.actors} workers of {self.cpus:g} CPU and {self.gpus:g} GPU"


def _room(machine: Mapping[str, float], gpus: float, without: int = 1) -> int:
    """How many workers of so many GPUs a machine has room for; `without` GPUs, as many as that if it has cores."""
    if not gpus:
        return without if machine.get("CPU", 0) else 0
    have = int(machine.get("GPU", 0))
    return have * int(1 / gpus + 1e-6) if gpus < 1 else have // int(gpus)


class RayEngine:
    """Reads shards on a Ray cluster; an engine for `activations.capture.capture`."""

    def __init__(self, loading: Mapping[str, Any], config: RayConfig | None = None) -> None:
        """`loading` are the arguments of `load_target` with which every worker loads the target."""
        self.loading = dict(loading)
        self.config = config or RayConfig()

    def __call__(
        self,
        target: Target,
        work: Sequence[Work],
        sites: Sequence[str],
        config: CaptureConfig,
        tell: Callable[[int], None],
    ) -> Generator[tuple[dict[str, np.ndarray], dict[str, torch.Tensor]], None, None]:
        """Rows and states of each shard, in the order of `work`. The caller's target only says what must be equal.

        Raises EngineError if the cluster is not reached or has no room, and for a worker's own error.
        """
        if not work:
            return
        ray = connect(self.config)
        tables: Iterator[pa.Table] | None = None
        try:
            plan = Plan.of(self.config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            # On this machine, with which all would be lost anyway.
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            board = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here).remote()
            reader = (board, self.config.patience / SIGNS, self.loading, identity(target), tuple(sites), config)
            tables = iter(pipeline(ray, plan, work, reader, watch(ray, board, plan, self.config.patience)))
            for one in work:
                table = _next(tables)
                if table["first"][0].as_py() != one.first:
                    raise EngineError(f"the shard of document {one.first} came out of order: report this")
                tell(one.first + len(one.prompts))
                yield unpack(table, sites, target.width, target.dtype)
        finally:
            tables = None  # ends the pipeline, which would start a cluster of its own if it outlived this one
            ray.shutdown()  # workers and board end with the connection


def pipeline(ray: Any, plan: Plan, work: Sequence[Work], reader: tuple[Any, ...], watcher: type) -> Iterable[pa.Table]:
    """The shards, packed, in the order of `work`; `reader` are the arguments of the workers."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a shard may take hours: the watcher knows better
    context.wait_for_min_actors_s = -1
    context.execution_options.preserve_order = True
    context.custom_execution_callback_classes = [watcher]
    items = [{"first": one.first, "prompts": encode(one.prompts)} for one in work]
    made = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        Reader,
        fn_constructor_args=reader,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=plan.actors, max_tasks_in_flight_per_actor=1),
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
    )
    tables: Iterable[pa.Table] = made.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    return tables


def watch(ray: Any, board: Any, plan: Plan, patience: float) -> type:
    """A callback of Ray Data, which is asked many times a second: raises EngineError for workers that do not live."""

    class Watcher:
        def before_execution_starts(self, executor: object) -> None:
            self._heard = self._looked = time.monotonic()
            self._look: Any = None

        def on_execution_step(self, executor: object) -> None:
            now = time.monotonic()
            if self._look is None and now - self._looked >= min(1.0, patience / SIGNS):
                self._looked, self._look = now, board.look.remote(plan.actors)
            elif self._look is not None and ray.wait([self._look], timeout=0)[0]:
                quiet, problem = ray.get(self._look)
                self._heard, self._look = now - quiet, None
                if problem:
                    raise EngineError(f"{problem}; whole shards are kept")
            if now - self._heard >= patience:
                raise EngineError(starved(plan, patience, ray.cluster_resources(), ray.available_resources()))

        def after_execution_succeeds(self, executor: object) -> None: ...

        def after_execution_fails(self, executor: object, error: Exception) -> None: ...

    return Watcher


def _next(tables: Iterator[pa.Table]) -> pa.Table:
    """The next shard. Raises EngineError for whatever ended the pipeline."""
    try:
        return next(tables)
    except EngineError:
        raise
    except StopIteration:
        raise EngineError("the workers ended before all shards were read: run the same command again") from None
    except Exception as error:
        raise EngineError(f"a worker failed: {_message(error)}; whole shards are kept") from error


class Board:
    """Where workers leave their signs of life, and what they begin."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._starts = 0  # since a shard was begun
        self._begun: dict[int, int] = {}

    def sign(self) -> None:
        self._last = time.monotonic()

    def start(self) -> None:
        self._starts += 1

    def begin(self, first: int) -> None:
        """A worker begins the shard of document `first`. Ray starts a dead worker again without limit."""
        self._starts = 0
        self._begun[first] = self._begun.get(first, 0) + 1

    def look(self, actors: int) -> tuple[float, str | None]:
        """Seconds since the last sign (or since the board was put up), and what is wrong with the workers, if so."""
        problem = None
        first = max(self._begun, key=self._begun.__getitem__, default=None)
        if first is not None and self._begun[first] > TRIES:
            problem = f"the shard from document {first} on has ended its worker {TRIES} times, most likely for want of "
            problem += "memory: ask for a smaller --batch, or leave its documents out"
        elif self._starts > TRIES * actors:
            problem = f"workers were started {self._starts} times and ended while they loaded the target, most likely "
            problem += "for want of memory: ask for fewer --actors"
        return time.monotonic() - self._last, problem


class Reader:
    """A worker: one copy of the target."""

    def __init__(
        self,
        board: Any,
        interval: float,
        loading: Mapping[str, Any],
        expected: Mapping[str, Any],
        sites: tuple[str, ...],
        config: CaptureConfig,
    ) -> None:
        board.start.remote()
        threading.Thread(target=_signs, args=(board, interval), daemon=True).start()
        from activations.target import load_target

        self._target, self._sites, self._config = load_target(**loading), sites, config
        self._board = board
        mine = identity(self._target)
        differ = [f"{name} ({expected[name]} and {mine[name]})" for name in expected if mine[name] != expected[name]]
        if differ:
            raise EngineError(
                f"the target on {socket.gethostname()} is not the caller's, in {', '.join(differ)}: give every machine "
                "the same weights and versions"
            )

    def __call__(self, batch: pa.Table) -> pa.Table:
        """One shard's prompts in, its rows and states out."""
        from activations.capture import read_shard

        first, prompts = batch["first"][0].as_py(), decode(batch["prompts"][0].as_py())
        self._board.begin.remote(first)
        return pack(first, *read_shard(self._target, prompts, first, self._sites, self._config))


def _signs(board: Any, interval: float) -> None:
    while True:
        board.sign.remote()
        time.sleep(interval)


def find_ray() -> Any:
    """The `ray` module. Raises EngineError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise EngineError(f"--engine ray needs Ray ({error}): pip install 'switchsd[ray]'") from error
    return ray


def connect(config: RayConfig) -> Any:
    """The `ray` module, connected to a cluster. Raises EngineError if there is none."""
    ray = find_ray()
    if ray.is_initialized():
        raise EngineError("this process is connected to a Ray cluster already: call ray.shutdown() first")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters comes as an exception
    try:
        ray.init(config.address, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        place = config.address or os.environ.get("RAY_ADDRESS") or "a cluster of this machine"
        raise EngineError(
            f"cannot use Ray at {place} ({_first_line(error)}): start one with `ray start --head`, or leave --address "
            "out for one of this machine alone"
        ) from error
    return ray


def identity(target: Target) -> dict[str, Any]:
    """What must be equal for two copies of a target to have the same states."""
    return {
        **target.fingerprint.to_dict(),
        "dtype": str(target.dtype),
        "attention": target.config._attn_implementation,
    }


def encode(prompts: Sequence[Prompt]) -> str:
    """Prompts as JSON."""
    return json.dumps([asdict(prompt) for prompt in prompts])


def decode(text: str) -> list[Prompt]:
    """Prompts from `encode`."""
    from activations.corpus import Prompt

    return [Prompt(**{**record, "messages": tuple(record["messages"])}) for record in json.loads(text)]


def pack(first: int, rows: Mapping[str, np.ndarray], states: Mapping[str, torch.Tensor]) -> pa.Table:
    """A shard as a table of one line: `first`, its rows as an Arrow stream, and each site's bytes."""
    import numpy as np
    import pyarrow as pa
    import torch

    columns = pa.table({name: pa.array(column) for name, column in rows.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as stream:
        stream.write_table(columns)
    parts = {"rows": sink.getvalue()}
    for site, state in states.items():
        parts[site] = pa.py_buffer(state.contiguous().view(torch.uint8).reshape(-1).numpy())
    line: dict[str, pa.Array] = {"first": pa.array([first])}
    for name, part in parts.items():  # large: a site may have more than 2 GiB, and nothing is copied
        ends = pa.py_buffer(np.array([0, part.size], dtype=np.int64))
        line[name] = pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, part])
    return pa.table(line)


def unpack(
    table: pa.Table, sites: Sequence[str], width: int, dtype: torch.dtype
) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    """The shard's rows and states [rows, width] from `pack`."""
    import numpy as np
    import pyarrow as pa
    import torch

    columns = pa.ipc.open_stream(table["rows"][0].as_buffer()).read_all()
    rows = {name: columns[name].to_numpy() for name in columns.column_names}
    if not len(columns):  # no text says that a column is one of texts
        texts = [name for name in rows if pa.types.is_string(columns[name].type)]
        rows.update({name: np.empty(0, dtype=str) for name in texts})
    states = {site: torch.empty(len(columns), width, dtype=dtype) for site in sites}
    for site, state in states.items():
        state.view(torch.uint8).reshape(-1).numpy()[:] = np.frombuffer(table[site][0].as_buffer(), dtype=np.uint8)
    return rows, states


def starved(plan: Plan, patience: float, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What to say when no worker has given a sign."""
    have = ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
    return (
        f"no worker has run for {patience:g} s: {plan} were asked for, and the cluster has {have}: ask for less "
        "(--actors, --actor-cpus, --actor-gpus), wait until its other jobs end, or add machines; whole shards are kept"
    )


def _message(error: BaseException) -> str:
    """What a worker raised, without the tracebacks that Ray puts around it."""
    text = str(error).strip()
    names = list(re.finditer(r"^[\w.]*?(\w+(?:Error|Exception)): ", text, re.MULTILINE))
    return text[names[-1].start(1) :] if names else text.splitlines()[-1] if text else type(error).__name__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
