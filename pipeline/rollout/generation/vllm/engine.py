"""The worker's side of the vLLM engine: an `Engine` in front of a process that runs vLLM.

The process is a fork of one that has imported vLLM (`pipeline.runtime.engine_forkserver`), or a child of the worker; it
dies with the worker, by whatever signal. vLLM changes threads, random state and environment of the process that imports
it: none of the worker's is touched. The worker sends requests and gets those that have ended, with the load of the
engine; weights go from shared memory into the engine's parameters, and never through the worker.

The engine returns log-probs only where vLLM's are those of the interface: without top_p, top_k and min_p, and for
greedy sampling at temperature 1.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import setproctitle
import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.errors import (
    ConfigError,
    EngineKilledError,
    FieldError,
    RlhfdError,
    TokenError,
    WeightsError,
    WeightsMismatchError,
)
from pipeline.models.lora import adapted_layers
from pipeline.progress import Telemetry
from pipeline.rollout.generation.interface import (
    Completed,
    EngineCounts,
    EngineLoad,
    Request,
    Response,
    Span,
    row_seed,
)
from pipeline.rollout.generation.vllm import memory, wire
from pipeline.rollout.generation.vllm.images import put as put_images
from pipeline.rollout.generation.vllm.images import sight_of
from pipeline.rollout.generation.vllm.releases import refuse_unable_to_quantize, refuse_unsuitable
from pipeline.runtime.engine_forkserver import ForkedEngine
from pipeline.runtime.lifeline import PARENT_VARIABLE
from pipeline.runtime.link import Link
from pipeline.runtime.lock import engines_socket, shm_directory
from pipeline.runtime.vllm_variables import vllm_environment
from pipeline.storage.card_turns import inherited
from pipeline.storage.weights_header import Age

_PROCESS = "pipeline.rollout.generation.vllm.process"
_MAX_ROWS = 256
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
# The least CUDA capability of vLLM's batch-invariant kernels.
_LEAST_CAPABILITY = (8, 0)
# That of its kernels that multiply 8 bits by 8 bits.
_LEAST_FP8_CAPABILITY = (8, 9)
_CPU_CACHE_BYTES = 1 << 30
_SCRATCH = "rlhfd-vllm-"
_POLL_S = 0.05
_CALL_S = 1.0
_KILL_S = 10.0
# vLLM samples with a higher temperature in place of a lower one.
_LEAST_TEMPERATURE = 0.01

log = logging.getLogger(__name__)

_R = TypeVar("_R", wire.Ready, wire.Updated, wire.Done)


def new_engine(
    actor: Any,
    *,
    directory: Path,
    device: Any,
    telemetry: Telemetry,
    config: Config,
    begun: EngineProcess | None = None,
) -> VllmEngine:
    """Make the vLLM engine of a worker; see `pipeline.rollout.generation.engines.EngineFactory`.

    Args:
        actor: As there, like the arguments up to `config`.
        directory: The actor's.
        device: The worker's.
        telemetry: As there.
        config: The instance's.
        begun: The engine's process, if it has begun.

    Raises:
        ConfigError: If vLLM is not installed or of a release that is not admitted, cannot load the model, or has too
            little memory for one row.
    """
    lora, sight = lora_of(actor, config.model.lora_rank), sight_of(actor)
    begun = begun or EngineProcess(_settings(config, directory, device), threads=config.rollout.threads)
    settings = msgspec.structs.replace(begun.settings, lora=lora, sight=sight)
    return VllmEngine(settings, process=begun, telemetry=telemetry)


def begin(config: Config, device: torch.device) -> EngineProcess | None:
    """Return the process of a worker's engine, which imports vLLM while the worker loads its models.

    None for another engine, and with `rollout.sleep`: there the process inherits the turn on the card, which the worker
    takes after its models are loaded.

    Raises:
        ConfigError: If vLLM is not installed, or of a release that is not admitted.
    """
    if config.rollout.engine != "vllm" or config.rollout.sleep:
        return None
    settings = _settings(config, Path(config.model.actor), device)
    forkserver = engines_socket(shm_directory(config.daemon.runtime_dir))
    return EngineProcess(settings, threads=config.rollout.threads, forkserver=forkserver)


def _settings(config: Config, directory: Path, device: torch.device) -> wire.Settings:
    """Return the settings of an engine, without those of its model.

    Raises:
        ConfigError: If vLLM is not installed, of a release that is not admitted, or cannot sleep or quantize here.
    """
    refuse_unsuitable()
    on_cpu = device.type == "cpu"
    if config.rollout.quantization != "none":
        refuse_unable_to_quantize()
        if not on_cpu and (has := torch.cuda.get_device_capability(device)) < _LEAST_FP8_CAPABILITY:
            least, found = (".".join(map(str, pair)) for pair in (_LEAST_FP8_CAPABILITY, has))
            raise ConfigError(
                f"rollout.quantization: fp8 needs a GPU of compute capability {least} or above, this worker's has "
                f"{found}"
            )
    if on_cpu and config.rollout.sleep:
        raise ConfigError('rollout.sleep: "vllm" sleeps on GPUs alone, and this worker has none')
    return wire.Settings(
        str(directory),
        dtype=config.model.dtype,
        on_cpu=on_cpu,
        max_length=config.lengths.row,
        max_rows=config.rollout.inference_batch_size or _MAX_ROWS,
        cache_bytes=config.rollout.cache_bytes or (_CPU_CACHE_BYTES if on_cpu else 0),
        log_level=config.daemon.log_level,
        log_json=config.daemon.log_format == "json",
        title=f"{setproctitle.getproctitle()} vllm",
        sleeps=config.rollout.sleep,
        batch_invariant=_is_batch_invariant(config, device),
        tensor_parallel=config.rollout.tensor_parallel,
        quantization=config.rollout.quantization,
        scratch=_scratch(config) if config.rollout.tensor_parallel > 1 else "",
    )


def _scratch(config: Config) -> str:
    """Return the folder for the sockets and files of this process's engine; those of processes that ended are removed.

    It is in the instance's folder in shared memory, which the supervisor removes.
    """
    folder = shm_directory(config.daemon.runtime_dir)
    folder = folder if folder.is_dir() else Path(tempfile.gettempdir())
    for left in folder.glob(f"{_SCRATCH}*"):
        if not Path("/proc", left.name.removeprefix(_SCRATCH)).exists():
            shutil.rmtree(left, ignore_errors=True)
    return str(folder / f"{_SCRATCH}{os.getpid()}")


def _is_batch_invariant(config: Config, device: torch.device) -> bool:
    """Return whether batch invariance is wanted, by the key or vLLM's own variable, and vLLM has it for the device."""
    wanted = config.rollout.deterministic or os.environ.get(_BATCH_INVARIANT) == "1"
    return wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def lora_of(actor: Any, rank: int) -> wire.Lora | None:
    """Return the description of an actor's adapters for vLLM, whose scale is alpha / rank for every kind."""
    if not rank:
        return None
    scales = {name.rpartition(".")[2]: layer.lora_scale for name, layer in adapted_layers(actor)}
    return wire.Lora(rank, next(iter(scales.values())) * rank, sorted(scales))


class EngineProcess:
    """The process of an engine. It imports vLLM and waits for its settings: until then it takes no memory of the card.

    Attributes:
        settings: Settings of its start.
        link: The link to it.
        child: The process itself.
    """

    def __init__(self, settings: wire.Settings, *, threads: int = 1, forkserver: Path | None = None) -> None:
        """Start it.

        Args:
            settings: Settings of its start.
            threads: Threads of its numeric libraries.
            forkserver: Socket of the forkserver of engines; without one, or where none listens there, and for an engine
                of several cards or with variables of its own for the import, the process is executed.
        """
        ours, self._theirs = socket.socketpair()
        self.settings = settings
        self.link: Link[wire.Report] = Link(ours, wire.reports)
        self._variables = _variables(settings, threads)
        self.child: subprocess.Popen[bytes] | ForkedEngine
        if forkserver is not None and settings.tensor_parallel == 1 and not settings.batch_invariant:
            with contextlib.suppress(FileNotFoundError, ConnectionError):
                self.child = ForkedEngine(forkserver, self._theirs.fileno(), _json(settings), self._variables)
                return
        self._execute()

    def await_begin(self, telemetry: Telemetry) -> None:
        """Return once the process has begun; execute it if the forkserver has ended before."""
        if not isinstance(self.child, ForkedEngine):
            return
        try:
            while not self.child.has_begun(_CALL_S):
                telemetry.progress()
            self._theirs.close()
        except ConnectionResetError:
            log.warning("the engine's process is started without the forkserver of engines, which has ended")
            self.child.close()
            self._execute()

    def _execute(self) -> None:
        with contextlib.closing(self._theirs):
            self.child = _executed(self._theirs, self.settings, self._variables)

    def close(self) -> None:
        """End it."""
        self.link.close()
        self._theirs.close()
        self.child.kill()
        # A process that waits for a driver ends later; a fork that has not begun never begins.
        if self.child.pid:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(_KILL_S)
        if isinstance(self.child, ForkedEngine):
            self.child.close()
        if self.settings.scratch:
            shutil.rmtree(self.settings.scratch, ignore_errors=True)


class VllmEngine:
    """An `Engine` (`pipeline.rollout.generation.interface`).

    Attributes:
        deterministic: Whether a request gets the same tokens alone and beside others: vLLM's batch invariance.
        cache_tokens: Tokens that the key-value cache holds.
    """

    def __init__(
        self,
        settings: wire.Settings,
        *,
        process: EngineProcess | None = None,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        """Hand the process its settings and wait until it is ready.

        Args:
            settings: For the process: directory and dtype of the model, `max_length` tokens of a row, `max_rows` that
                run at a time, `cache_bytes` of the key-value cache (0: what the card has left).
            process: Begun with these settings but those of the model, and closed with the engine; None for a new one.
            telemetry: Told of progress during the start and at each report of steps with progress, with the tokens
                sampled since the start.

        Raises:
            ConfigError: If vLLM cannot load the model, or has too little memory for one row.
            RlhfdError: If the process fails in another way.
        """
        self.deterministic = settings.batch_invariant
        self._settings = settings
        self._telemetry = telemetry
        # By a number of their own: a late report of a cancelled request must not end one that has its key now.
        self._keys: dict[int, int] = {}
        self._completed: list[Completed] = []
        self._submitted = 0
        # Number of the request, its rows, and the descriptor of its images.
        self._rows_not_taken: collections.deque[tuple[int, int, int | None]] = collections.deque()
        self._load = EngineLoad(0, 0, counts=EngineCounts())
        self._version = -1
        # Messages after one that raised an error wait here.
        self._inbox: collections.deque[wire.Report] = collections.deque()
        self._process = process or EngineProcess(settings)
        self._link = self._process.link
        try:
            self._process.await_begin(telemetry)
            # One that has failed says why.
            with contextlib.suppress(OSError, EOFError):
                self._link.send(settings)
            ready = self._answer(wire.Ready, beats=True)
        except BaseException:
            self.close()
            raise
        self.cache_tokens = ready.cache_tokens
        self._vocabulary = ready.vocabulary

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.child.pid

    @property
    def load(self) -> EngineLoad:
        """The work in hand, as of the last report."""
        waiting = self._load.waiting + sum(rows for _, rows, _ in self._rows_not_taken)
        return dataclasses.replace(self._load, waiting=waiting, room_rows=self._settings.max_rows)

    def submit(self, request: Request) -> None:
        """Take a request over; see `pipeline.rollout.generation.interface.Engine`."""
        sampling, tokens = request.sampling, len(request.prompt_ids)
        if request.key in self._keys.values():
            raise FieldError(f"request {request.key} is in hand already")
        if not tokens or request.max_new_tokens < 1 or tokens + request.max_new_tokens > self._settings.max_length:
            raise FieldError(
                f"a prompt of {tokens} tokens and a response of {request.max_new_tokens} do not fit the engine's rows "
                f"of {self._settings.max_length}"
            )
        if not 0 <= int(request.prompt_ids.min()) <= int(request.prompt_ids.max()) < self._vocabulary:
            raise TokenError(
                f"a prompt has the token {int(request.prompt_ids.max())}; the model has {self._vocabulary}"
            )
        if sampling.do_sample and sampling.temperature < _LEAST_TEMPERATURE:
            raise FieldError(f"temperature is {sampling.temperature}; vLLM samples from {_LEAST_TEMPERATURE} on")
        filtered = sampling.do_sample and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
        rows = range(request.first_row, request.first_row + request.group_size)
        prompt, images, descriptor = request.prompt_ids.tolist(), None, None
        if request.vision is not None and request.vision.tensors_exist:
            descriptor, images = put_images(prompt, request.vision, self._settings.sight)
        self._submitted += 1
        self._keys[self._submitted] = request.key
        self._rows_not_taken.append((self._submitted, request.group_size, descriptor))
        self._send(
            wire.Submit(
                self._submitted,
                prompt,
                [row_seed(sampling.seed, row) for row in rows],
                request.max_new_tokens,
                dataclasses.replace(sampling, stop_strings=None),
                not filtered and (sampling.do_sample or sampling.temperature == 1),
                images,
                request.prompt_log_probs,
                () if sampling.stop_strings is None else sampling.stop_strings.strings,
            )
        )

    def step(self) -> list[Completed]:
        """Return the requests that have ended; without one, wait for it for a moment.

        Raises:
            RlhfdError: If the engine has failed or its process has ended.
        """
        if not self._completed:
            # Without requests only for a report of the load.
            self._receive(_POLL_S if self._keys else 0.0)
        completed, self._completed = self._completed, []
        return completed

    def cancel(self, keys: Sequence[int]) -> None:
        """Drop requests; see `pipeline.rollout.generation.interface.Engine`."""
        unwanted = set(keys)
        numbers = [number for number, key in self._keys.items() if key in unwanted]
        for number in numbers:
            del self._keys[number]
        self._completed = [completed for completed in self._completed if completed.key not in unwanted]
        if numbers:
            self._send(wire.Cancel(numbers))

    def fetch_weights(self, path: Path, age: Age | None = None) -> Age:
        """Take a version from shared memory into the engine's parameters.

        Args:
            path: The weights file (`pipeline.models.weights.store`).
            age: Age of the version; None for the newest.

        Returns:
            The age of the version that the engine computes with from the next step on, its fingerprint verified.

        Raises:
            WeightsError: If the version is not held; the engine computes with the one before.
            WeightsMismatchError: If the weights do not fit the engine's model, or leave a part of it out.
        """
        self._send(wire.Fetch(str(path), age))
        updated = self._answer(wire.Updated)
        self._version = updated.version
        return updated.version, updated.history

    def update_weights(self, actor: Mapping[str, Tensor], version: int | None = None) -> None:
        """Compute with these weights from the next step on; see `pipeline.rollout.generation.interface.Engine`.

        Args:
            actor: The actor's state dict under Hugging Face's names.
            version: Version of these weights; None for the one after the present.
        """
        version = self._version + 1 if version is None else version
        tensors = {name: tensor.detach() for name, tensor in actor.items()}
        descriptor, places = memory.put("rlhfd-actor", tensors)
        try:
            self._send(wire.Take(memory.path_of(descriptor), places, version))
            self._answer(wire.Updated)
        finally:
            os.close(descriptor)
        self._version = version

    def pause(self) -> None:
        """Return once no step is being taken, and none will be."""
        self._send(wire.Pause())
        self._answer(wire.Done)

    def resume(self) -> None:
        """Go on."""
        self._send(wire.Resume())

    def sleep(self) -> None:
        """Give the card's memory back; see `pipeline.rollout.generation.interface.Sleeper`."""
        self._send(wire.Sleep())
        self._answer(wire.Done)

    def wake(self) -> None:
        """Take memory of the card again; it has no weights before the next update."""
        self._send(wire.Wake())
        self._answer(wire.Done)

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._keys.clear()
        self._completed.clear()
        while self._rows_not_taken:
            self._let_go_of_first()
        self._load = dataclasses.replace(self._load, running=0, waiting=0, free_cache=1.0)

    def _send(self, message: wire.Order) -> None:
        try:
            self._link.send(message)
        except (OSError, EOFError):
            raise self._death() from None

    def _receive(self, timeout_s: float) -> list[wire.Report]:
        """Handle the reports that have arrived, and return the answers to orders among them.

        Raises:
            RlhfdError: If the engine has failed or its process has ended.
        """
        try:
            self._inbox += self._link.receive(0.0 if self._inbox else timeout_s)
        except EOFError:
            if not self._inbox:
                raise self._death() from None
        answers: list[wire.Report] = []
        while self._inbox:
            match message := self._inbox.popleft():
                case wire.Stepped():
                    self._stepped(message)
                case wire.Failed(kind="config"):
                    raise ConfigError(_configuration_advice(message.message, self._settings))
                case wire.Failed(kind="mismatch"):
                    raise WeightsMismatchError(f"engine vllm: {message.message}")
                case wire.Failed(kind="version"):
                    raise WeightsError(f"engine vllm: {message.message}")
                case wire.Failed():
                    raise RlhfdError(f"engine vllm: {message.message}")
                case _:
                    answers.append(message)
        return answers

    def _answer(self, kind: type[_R], *, beats: bool = False) -> _R:
        """Wait for the answer to an order. Only hang detection bounds the wait: large weights take their time.

        With `beats` the wait counts as progress.
        """
        while True:
            for answer in self._receive(_CALL_S):
                if isinstance(answer, kind):
                    return answer
            if beats:
                self._telemetry.progress()

    def _stepped(self, report: wire.Stepped) -> None:
        self._load = report.load
        while self._rows_not_taken and self._rows_not_taken[0][0] <= report.taken:
            self._let_go_of_first()
        for ended in report.ended:
            # Cancelled ones are not in hand any more.
            if (key := self._keys.pop(ended.key, None)) is not None:
                self._completed.append(Completed(key, tuple(_response(row) for row in ended.rows)))
        assert report.load.counts is not None
        self._telemetry.progress(tokens=report.load.counts.tokens_out)

    def _let_go_of_first(self) -> None:
        """Close the images of the first request, which the process has taken over, or never will."""
        _, _, descriptor = self._rows_not_taken.popleft()
        if descriptor is not None:
            os.close(descriptor)

    def _death(self) -> RlhfdError:
        try:
            code = self._process.child.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            return RlhfdError("engine vllm: its process has closed the link and does not end; the log may say why")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        kind = EngineKilledError if code == -signal.SIGKILL else RlhfdError
        return kind(f"engine vllm: its process {how}; the log may say why")


def _response(row: wire.Row) -> Response:
    return Response(
        torch.tensor(row.token_ids, dtype=torch.int64),
        "stop" if row.stopped else "length",
        tuple(Span(*span) for span in row.spans),
        _tensor(row.log_probs),
        _tensor(row.prompt_log_probs),
    )


def _tensor(log_probs: list[float] | None) -> Tensor | None:
    return None if log_probs is None else torch.tensor(log_probs, dtype=torch.float32)


def _configuration_advice(message: str, settings: wire.Settings) -> str:
    """Return vLLM's message with the key that helps."""
    if "KV cache" in message or "cache blocks" in message:
        return f"rollout.cache_bytes: too little for rows of {settings.max_length:,} tokens: {message}"
    if "tensor parallel" in message:
        return f"rollout.tensor_parallel: {message}"
    if "max_model_len" in message or "max seq len" in message:
        return f"rollout.max_length: {message}"
    return f'rollout.engine: "vllm" cannot load {settings.directory}: {message}'


def _json(settings: wire.Settings) -> str:
    return msgspec.json.encode(settings).decode()


def _executed(theirs: socket.socket, settings: wire.Settings, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROCESS, str(theirs.fileno()), _json(settings)],
        stdin=subprocess.DEVNULL,
        # vLLM's output belongs into the worker's log.
        stdout=2,
        # The turn on the card is this process's, too, until it has ended.
        pass_fds=[theirs.fileno(), *inherited()],
        env={**variables, PARENT_VARIABLE: str(os.getpid())},
    )


def _variables(settings: wire.Settings, threads: int) -> dict[str, str]:
    """Return all variables of an engine's process."""
    own = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_PROCESS_NAME_PREFIX": settings.title,
        _BATCH_INVARIANT: str(int(settings.batch_invariant)),
    }
    if settings.scratch:
        own["VLLM_RPC_BASE_PATH"] = settings.scratch
    return {**vllm_environment(os.environ, on_cpu=settings.on_cpu), **own}
