"""A discrete-event model of a run on a cluster: what its daemon's machine can serve, from 1 to 1,000 rollout machines.

    .venv/bin/python -m benches.scale_model      prints the tables of docs/scaling.md, as they are there

A ticket passes these parts. Each serves its work in the order of arrival; all but the rollout itself are shared:

    buffer -> weights out, if there are newer ones -> rollout on its machine -> rows in -> gateways -> buffer
    rows of a step -> trainers -> publish

Flow control is that of `pipeline.buffer.admission`: the tickets of batch b are issued from version b - staleness on.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from benches.measure import figure

Then = Callable[[], None]
_WARM_STEPS, _STEPS = 3, 8


class Cost(NamedTuple):
    """A measured constant and its source."""

    value: float
    unit: str
    source: str


COSTS: Final[Mapping[str, Cost]] = {
    "buffer": Cost(0.88e-3, "s a ticket", "RESULTS.md, cpu: 11.0 % of a core at 125 appends a second"),
    "polls": Cost(0.0196, "cores a worker", "by hand: 1.96 ms of CPU a poll of an actor, ten a second"),
    "call": Cost(1.04e-3, "s a call", "by hand: CPU of a gateway, four calls a ticket"),
    "received": Cost(0.49, "s/GB", "by hand: CPU of a gateway, calls that return 17 MB"),
    "encoded": Cost(0.74, "s/GB", "RESULTS.md, gather: encode, medium, 1.35 GB/s"),
    "stored": Cost(0.50, "s/GB", "by hand: weights of 268 MB into Ray's store, median of 15"),
    "sent": Cost(1.04, "s/GB", "by hand: CPU of the raylet that sends weights to one machine"),
    "published": Cost(0.079, "s/GB", "RESULTS.md, weights: publish, 12.7 GB/s"),
    "copied": Cost(0.075, "s/GB", "RESULTS.md, weights: fetch, 13.4 GB/s"),
    "compared": Cost(0.65, "s/GB", "decision 0043: CPU of a difference of 1 %"),
    "applied": Cost(0.21, "s/GB", "decision 0043: CPU of a difference of 1 %, fingerprint included"),
    "changed": Cost(0.02, "of a version", "decision 0043: bytes of a difference at a learning rate of 1e-6"),
    "sampled": Cost(8 * 15_700 * 0.49e9, "tokens x parameters/s", "docs/measured.md, on a card: vLLM, eight cards"),
    "trained": Cost(8 * 52_200 * 0.49e9, "tokens x parameters/s", "docs/measured.md, on a card: packing, eight cards"),
}


class Simulation:
    """A clock and the events to come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, then: Then) -> None:
        """Have `then` called after a delay; events of one time are called in the order of these calls."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), then))

    def advance(self, until: Callable[[], bool]) -> None:
        """Handle events until a condition holds."""
        while self._events and not until():
            self.now_s, _, then = heapq.heappop(self._events)
            then()


class Station:
    """Equal servers that take work in the order of its arrival, as cores do in slices of at most `slice_s`.

    Attributes:
        busy_s: Time of all servers in work that has been begun.
    """

    def __init__(self, simulation: Simulation, servers: int = 1, *, slice_s: float = float("inf")) -> None:
        self.servers = self._free = servers
        self.busy_s = 0.0
        self._simulation = simulation
        self._slice_s = slice_s
        self._queue: collections.deque[tuple[float, Then]] = collections.deque()

    def serve(self, work_s: float, then: Then) -> None:
        """Have `then` called once the work is done."""
        self._queue.append((work_s, then))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._free and self._queue:
            work_s, then = self._queue.popleft()
            part_s = min(work_s, self._slice_s)
            self._free -= 1
            self.busy_s += part_s
            self._simulation.after(part_s, lambda left_s=work_s - part_s, then=then: self._served(left_s, then))

    def _served(self, left_s: float, then: Then) -> None:
        self._free += 1
        if left_s > 1e-12:
            self._queue.append((left_s, then))
        else:
            then()
        self._dispatch()


@dataclasses.dataclass(frozen=True)
class Flow:
    """A run as the model sees it: the work of each part, in seconds of that part.

    Attributes:
        workers: Rollout workers, each on a machine of its own, with one ticket at a time.
        ticket_rows: Rows of a ticket.
        step_rows: Rows of a step, whole tickets.
        staleness: `buffer.max_staleness`.
        rollout_s: A ticket on its machine.
        rollout_cpu_s: CPU time of a rollout on the daemon's machine; 0 where the rollout machines are others.
        transfer_s: The changes of one version to one machine.
        whole_s: A whole version to one machine, the most that a transfer takes.
        load_s: The machine's own work on a version, after its transfer.
        receive_s: A ticket's rows on the daemon's network.
        gateway_s: CPU time of a ticket in its gateway.
        buffer_s: CPU time of a ticket in the buffer's process, half of it at either end.
        step_s: A step of the trainers.
        step_cpu_s: CPU time of a step on the daemon's machine, beside other processes there.
        publish_s: A version from the end of its step until machines can have it.
        cores: Cores of the daemon's machine, in whole ones.
        core_share: The part of each core that the run has.
    """

    workers: int
    ticket_rows: int
    step_rows: int
    staleness: int = 1
    rollout_s: float = 0.0
    rollout_cpu_s: float = 0.0
    transfer_s: float = 0.0
    whole_s: float = float("inf")
    load_s: float = 0.0
    receive_s: float = 0.0
    gateway_s: float = 0.0
    buffer_s: float = 0.0
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    publish_s: float = 0.0
    cores: int = 1
    core_share: float = 1.0


class Outcome(NamedTuple):
    """Rows trained a second in the steady state, and the busy share of each part, the largest first."""

    rows_s: float
    shares: Mapping[str, float]


class _Run:
    """The events of a run."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.clock = clock = Simulation()
        self.parts = {name: Station(clock) for name in ("buffer", "weights out", "rows in", "trainers", "publish")}
        self.parts["gateways"] = self._cores = Station(clock, flow.cores, slice_s=0.01)
        self.parts["rollouts"] = Station(clock, flow.workers)
        self.steps = self._version = self._tickets = self._ready = 0
        self._held = [0] * flow.workers
        self._waiting = list(range(flow.workers))
        self._is_training = False
        self._begin_all()

    def _begin_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for worker in waiting:
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        flow = self._flow
        if self._tickets * flow.ticket_rows // flow.step_rows > self._version + flow.staleness:
            self._waiting.append(worker)
            return
        self._tickets += 1
        self.parts["buffer"].serve(flow.buffer_s / 2, lambda: self._fetch(worker))

    def _fetch(self, worker: int) -> None:
        flow, behind = self._flow, self._version - self._held[worker]
        self._held[worker] = self._version
        if not behind:
            self._roll(worker)
            return
        transfer_s = min(behind * flow.transfer_s, flow.whole_s)
        self.parts["weights out"].serve(transfer_s, lambda: self.clock.after(flow.load_s, lambda: self._roll(worker)))

    def _roll(self, worker: int) -> None:
        flow, parts = self._flow, self.parts

        def work(cpu_s: float, then: Then) -> None:
            self._cores.serve(cpu_s / flow.core_share, then)

        def write() -> None:
            work(flow.gateway_s, lambda: parts["buffer"].serve(flow.buffer_s / 2, lambda: self._sealed(worker)))

        def roll() -> None:
            parts["rollouts"].serve(flow.rollout_s, lambda: parts["rows in"].serve(flow.receive_s, write))

        work(flow.rollout_cpu_s, roll)

    def _sealed(self, worker: int) -> None:
        self._ready += self._flow.ticket_rows
        self._train()
        self._begin(worker)

    def _train(self) -> None:
        flow = self._flow
        if self._is_training or self._ready < flow.step_rows:
            return
        self._ready -= flow.step_rows
        self._is_training = True

        def compute() -> None:
            self._cores.serve(flow.step_cpu_s / flow.core_share, stepped)

        def stepped() -> None:
            self.steps += 1
            self._is_training = False
            self.parts["publish"].serve(flow.publish_s, published)
            self._train()

        def published() -> None:
            self._version += 1
            self._begin_all()

        self.parts["trainers"].serve(flow.step_s, compute)


def simulate(flow: Flow, *, warm_steps: int = _WARM_STEPS, steps: int = _STEPS) -> Outcome:
    """Return the steady state of a run, from its warm-up until `steps` steps later."""
    run = _Run(flow)
    run.clock.advance(lambda: run.steps >= warm_steps)
    began_s, before = run.clock.now_s, {name: part.busy_s for name, part in run.parts.items()}
    run.clock.advance(lambda: run.steps >= warm_steps + steps)
    took_s = run.clock.now_s - began_s
    shares = {name: (part.busy_s - before[name]) / took_s / part.servers for name, part in run.parts.items()}
    return Outcome(steps * flow.step_rows / took_s, dict(sorted(shares.items(), key=lambda item: -item[1])))


class Model(NamedTuple):
    """A policy in bfloat16, and the mean tokens of a prompt and a response."""

    name: str
    parameters: float
    prompt: int
    response: int


MODELS: Final = (Model("0.5 B", 0.49e9, 256, 512), Model("7 B", 7.6e9, 512, 1_024))
SIZES: Final = ((1, 1), (4, 1), (16, 4), (64, 16), (256, 64), (1_000, 64))
_CORES, _TICKET_ROWS, _SENDERS = 64, 64, 8


def flow_of(model: Model, rollouts: int, trainers: int, gbit_s: float, *, whole: bool) -> Flow:
    """Return the flow of a run on machines of eight cards, with a worker each and a network of `gbit_s` each way."""
    cost, network_s_gb = {name: one.value for name, one in COSTS.items()}, 8 / gbit_s
    gb, tokens = 2 * model.parameters / 1e9, model.prompt + model.response
    step_rows = max(1_024, _TICKET_ROWS * rollouts)
    ticket_gb = _TICKET_ROWS * (4 * tokens + 8 * model.response) / 1e9
    whole_s = gb * max(network_s_gb, cost["sent"] / _SENDERS)
    publish_s = gb * (cost["published"] + (cost["stored"] if whole else cost["copied"] + cost["compared"] / 4))
    # Ranks on other machines: rows of each step by the daemon's network, and a ring of gradients in float32.
    gradients_s = 2 * (trainers - 1) / trainers * 4 * model.parameters / 1e9 * network_s_gb
    step_s = step_rows * tokens * model.parameters / (cost["trained"] * trainers) + gradients_s
    return Flow(
        workers=rollouts,
        ticket_rows=_TICKET_ROWS,
        step_rows=step_rows,
        rollout_s=_TICKET_ROWS * model.response * model.parameters / cost["sampled"],
        transfer_s=whole_s if whole else whole_s * cost["changed"],
        whole_s=whole_s,
        load_s=gb * (cost["stored"] + cost["copied"] + (0.0 if whole else cost["applied"])),
        receive_s=ticket_gb * network_s_gb,
        gateway_s=4 * cost["call"] + ticket_gb * (cost["received"] + cost["encoded"]),
        buffer_s=cost["buffer"],
        step_s=step_s,
        publish_s=publish_s,
        cores=max(1, round(_CORES - rollouts * cost["polls"])),
    )


def ideal_of(flow: Flow) -> float:
    """Return the rows a second of rollout machines and trainers alone, the smaller one."""
    return min(flow.workers * flow.ticket_rows / flow.rollout_s, flow.step_rows / flow.step_s)


class Run(NamedTuple):
    """A real run of the embedded task, its models in Ray actors on the two cores of this machine.

    Attributes:
        workers: Rollout workers.
        step_rows: Rows of a step.
        pause_s: Wait of the reward a row, in the place of a rollout elsewhere.
        rows_s: Rows trained a second.
        rollout_s: CPU time of actors a row.
        gateway_s: CPU time of gateways and buffer a row.
        step_s: CPU time of the trainer a row.
    """

    workers: int
    step_rows: int
    pause_s: float
    rows_s: float
    rollout_s: float
    gateway_s: float
    step_s: float


RUNS: Final = (
    (Run(1, 64, 0.030, 26.4, 3.95 / 832, 0.73 / 832, 1.65 / 832), {2: 34.6, 4: 39.6}),
    (Run(1, 256, 0.015, 38.4, 4.12 / 768, 0.51 / 768, 1.28 / 768), {2: 89.4, 4: 88.6}),
)
"""Runs with one worker, and the rows a second of the same with more."""


def predicted(first: Run, workers: int) -> float:
    """Return the rows a second with so many workers, by the CPU times of the run with one.

    Other programs share the cores. The share that they leave is the one at which the model has the first run's speed.
    """

    def rows_s(workers: int, core_share: float) -> float:
        flow = Flow(
            workers=workers,
            ticket_rows=_TICKET_ROWS,
            step_rows=first.step_rows,
            rollout_s=_TICKET_ROWS * first.pause_s,
            rollout_cpu_s=_TICKET_ROWS * first.rollout_s,
            gateway_s=_TICKET_ROWS * first.gateway_s,
            step_cpu_s=first.step_rows * first.step_s,
            cores=2,
            core_share=core_share,
        )
        return simulate(flow, steps=40).rows_s

    least, most = 0.01, 1.0
    for _ in range(20):
        middle = (least + most) / 2
        least, most = (middle, most) if rows_s(first.workers, middle) < first.rows_s else (least, middle)
    return rows_s(workers, most)


def tables() -> Iterator[str]:
    """Yield the lines of the tables of docs/scaling.md."""
    yield from ("| cost | figure | source |", "|---|---|---|")
    yield from (f"| {name} | {figure(one.value)} {one.unit} | {one.source} |" for name, one in COSTS.items())
    yield ""
    header = "| model, network | machines | ideal, rows/s | whole versions | busiest | what changed | busiest |"
    yield from (header, "|" + "---|" * 7)
    for model, gbit_s, (rollouts, trainers) in itertools.product(MODELS, (10, 100), SIZES):
        cells = [f"{model.name}, {gbit_s} Gbit/s", f"{rollouts:,} + {trainers}"]
        for whole in (True, False):
            flow = flow_of(model, rollouts, trainers, gbit_s, whole=whole)
            outcome = simulate(flow)
            busiest, share = next(iter(outcome.shares.items()))
            ideal = ideal_of(flow)
            cells += [figure(ideal)] if whole else []
            cells += [f"{100 * outcome.rows_s / ideal:.0f} %", f"{busiest}, {100 * min(share, 1.0):.0f} %"]
        yield "| " + " | ".join(cells) + " |"

    yield ""
    yield from ("| run | workers | measured, rows/s | predicted | deviation |", "|---|---|---|---|---|")
    for first, others in RUNS:
        name = f"{1000 * first.pause_s:.0f} ms a row, steps of {first.step_rows} rows"
        yield f"| {name} | 1 | {first.rows_s:g} | given | |"
        for workers, rows_s in others.items():
            found = predicted(first, workers)
            yield f"| {name} | {workers} | {rows_s:g} | {figure(found)} | {100 * (found / rows_s - 1):+.0f} % |"


if __name__ == "__main__":
    print("\n".join(tables()))
