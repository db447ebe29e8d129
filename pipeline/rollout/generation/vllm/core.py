"""vLLM in this process: requests in, ended requests out, a step at a time.

`VLLM_ENABLE_V1_MULTIPROCESSING=0` keeps scheduler and, with one card, the model in this process; with several, each
card's part of the model is in a process that vLLM starts (`ranks`). The step is synchronous (`async_scheduling=False`):
weights are replaced between two steps, when no kernel reads them and no sampled token is on its way.

An update while requests run takes them back to the waiting queue: their keys and values are computed again with the new
weights, the tokens they have stay. So a token's log-prob is that of its version given the whole sequence before it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, Literal

import msgspec
import vllm._custom_ops as custom_operators
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from pipeline.models.loading import load_tokenizer
from pipeline.models.weights.tensor_specs import TensorSpec
from pipeline.rollout.generation.interface import EngineCounts, EngineLoad
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.generation.vllm.adapters import ADAPTER, least_rank
from pipeline.rollout.generation.vllm.packed import PackedMatrices
from pipeline.rollout.generation.vllm.ranks import forget_names, scratch_files, watch
from pipeline.rollout.generation.vllm.releases import is_woken
from pipeline.rollout.generation.vllm.step_progress import StepProgress
from pipeline.rollout.generation.vllm.token_versions import Span, extend
from pipeline.rollout.generation.vllm.vision import arguments_of, prompt_of, register
from pipeline.rollout.generation.vllm.wire import Ended, Row, Settings, Stepped, Submit, Updated

_EXTENSION = "pipeline.rollout.generation.vllm.weights.FeedsWeights"
_FETCH_ATTEMPTS = 16
# The ranks that are left may fail before the end of one is seen.
_RANK_S = 1.0
# Whether this build of vLLM has oneDNN.
_PACKS = custom_operators._supports_onednn
# Numbers of rows for which a packed matrix keeps its kernel.
_CACHED_SHAPES = 32
# The worker's own passes run on the same card.
_GPU_SHARE = 0.6
_LEAST_SHARE = 0.001


def forget_card() -> None:
    """Have vLLM forget its findings about the first card; that of a fork may be another one."""
    for name in dir(current_platform):
        if callable(forget := getattr(getattr(current_platform, name, None), "cache_clear", None)):
            forget()


class UpdateError(Exception):
    """Weights that could not be taken; `kind` as in `wire.Failed`."""

    def __init__(self, kind: Literal["mismatch", "version", "engine"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass
class _Request:
    """A request in hand, and its rows that have ended."""

    submit: Submit
    rows: list[Row | None]


@dataclasses.dataclass
class _Growing:
    """A response in hand, by its request's key and its row there.

    Attributes:
        name: vLLM's.
        watched: Whether it is watched for stop sequences, token by token; of another one the tokens come at its end.
        spans: The versions of its tokens up to the last update.
    """

    key: int
    row: int
    name: str
    watched: bool
    token_ids: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)


class Core:
    """The engine: vLLM, and the requests in hand.

    Attributes:
        version: Version of the weights; -1 for the weights of the directory.
        taken: Requests submitted so far.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.on_cpu:
            # Weights stay as they are, packed copies are made beside them: these could not be updated in place.
            custom_operators._supports_onednn = False
        arguments: dict[str, Any] = {
            "model": settings.directory,
            "skip_tokenizer_init": True,
            "dtype": settings.dtype,
            "max_model_len": settings.max_length,
            "max_num_seqs": settings.max_rows,
            "seed": 0,
            "enforce_eager": settings.on_cpu,
            "async_scheduling": False,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": _EXTENSION,
        }
        if settings.lora is not None:
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": least_rank(settings.lora.rank),
                "lora_target_modules": settings.lora.targets,
            }
        self._has_encoder = settings.sight is not None
        if settings.sight is not None:
            register(settings.sight.kind)
            arguments |= arguments_of(settings.max_length)
        if settings.sleeps and not settings.on_cpu:
            arguments["enable_sleep_mode"] = True
        # Adapters replace no base weights: these, and the places of adapters, must come back as they were.
        self._sleep_level = 2 if settings.lora is None else 1
        if settings.quantization == "fp8":
            # One scale for each output channel, of the weights as they are loaded, and for each token of the inputs.
            arguments["quantization"] = "fp8_per_channel"
        if settings.tensor_parallel > 1:
            arguments |= {
                "tensor_parallel_size": settings.tensor_parallel,
                "distributed_executor_backend": "mp",
            }
        if settings.cache_bytes:
            arguments["kv_cache_memory_bytes"] = settings.cache_bytes
        if not settings.on_cpu:
            arguments["gpu_memory_utilization"] = memory_share(settings.cache_bytes)
        self._watch: threading.Thread | None = None
        with scratch_files(settings.scratch):
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
        if settings.tensor_parallel > 1:
            # All of them have opened the memory that they share.
            self._engine.collective_rpc("rlhfd_forget_names")
            forget_names()
            self._watch = watch(self._engine.model_executor)
        self._adapter: LoRARequest | None = None
        if settings.lora is not None:
            self._engine.collective_rpc("rlhfd_adapt", args=(msgspec.structs.astuple(settings.lora),))
            # The path is never read: the adapter is there, and each version replaces it.
            self._adapter = LoRARequest("actor", ADAPTER, "in memory")
        self._packed: PackedMatrices | None = None
        if settings.on_cpu and _PACKS and settings.tensor_parallel == 1:
            (model,) = self._engine.collective_rpc(_model_of)
            pack = functools.partial(custom_operators.create_onednn_mm, primitive_cache_size=_CACHED_SHAPES)
            self._packed = PackedMatrices(model, pack, custom_operators.onednn_mm)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._directory = settings.directory
        self._tokenizer: Any = None
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._requests: dict[int, _Request] = {}
        self._rows: dict[str, _Growing] = {}
        self._ended: list[Ended] = []
        self._progress = StepProgress()
        self._preempted: dict[str, int] = {}
        self._preemptions = 0
        self._tokens_in = 0
        self._prefix_tokens = 0
        self._prefix_hits = 0
        self.version = -1
        self.taken = 0

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        configuration = self._engine.vllm_config.cache_config
        return int(configuration.num_gpu_blocks * configuration.block_size)

    @property
    def vocabulary(self) -> int:
        """Tokens of the model; ids are below it."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def busy(self) -> bool:
        """Whether a request is in hand."""
        return bool(self._requests)

    def submit(self, submit: Submit) -> None:
        """Take a request over, one of vLLM's for each response."""
        self._requests[submit.key] = _Request(submit, [None] * len(submit.seeds))
        self.taken += 1
        self._tokens_in += len(submit.prompt) * len(submit.seeds)
        sampling = submit.sampling
        single = [sequence[0] for sequence in sampling.stop_sequences if len(sequence) == 1]
        watched = any(len(sequence) > 1 for sequence in sampling.stop_sequences) or bool(submit.stop_strings)
        prompt: Any = TokensPrompt(prompt_token_ids=submit.prompt)
        if submit.images is not None:
            prompt = prompt_of(submit.prompt, submit.images)
        for row, seed in enumerate(submit.seeds):
            parameters = SamplingParams(
                n=1,
                seed=seed if sampling.do_sample else None,
                max_tokens=submit.max_new_tokens,
                # At 0 it is greedy, and reads no filter.
                temperature=sampling.temperature if sampling.do_sample else 0.0,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=sorted({*sampling.eos_token_ids, *single}),
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if submit.log_probs else None,
                prompt_logprobs=0 if submit.prompt_log_probs and row == 0 else None,
                flat_logprobs=True,
                output_kind=RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY,
            )
            name = f"{submit.key}:{row}"
            its = self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)
            self._rows[name] = _Growing(submit.key, row, its, watched)

    def cancel(self, keys: list[int]) -> None:
        """Drop requests."""
        self._progress.look(self._live_tokens(), 0)
        for key in keys:
            if (request := self._requests.pop(key, None)) is not None:
                rows = [self._rows.pop(f"{key}:{row}", None) for row in range(len(request.rows))]
                self._engine.abort_request([growing.name for growing in rows if growing is not None], internal=True)
        self._progress.drop(self._live_tokens())
        dropped = set(keys)
        self._ended = [ended for ended in self._ended if ended.key not in dropped]

    def sleep(self) -> None:
        """Discard key-value cache and weights, buffers except; with adapters the weights go into host memory.

        vLLM keeps the addresses: the places of tensors stay known. On a CPU it frees nothing.
        """
        self._engine.sleep(self._sleep_level)

    def wake(self) -> None:
        """Take the memory again. Without adapters the parameters are of no version before the next `fetch` or `take`.

        Raises:
            RuntimeError: If the scheduler stays paused.
        """
        if not is_woken(self._engine, self._engine.wake_up()):
            raise RuntimeError("vLLM did not wake all of its memory")

    def await_ranks(self) -> None:
        """Return after an error that is not the end of a rank; of such an end this process dies here."""
        if self._watch is not None:
            self._watch.join(_RANK_S)

    def step(self) -> bool:
        """Advance the requests by one step; return whether a request has ended."""
        if self._packed is not None:
            self._packed.pack_one()
        outputs = self._engine.step()
        self._preemptions += self._newly_preempted()
        for output in outputs:
            if (growing := self._rows.get(output.request_id)) is None:
                continue
            if not growing.token_ids:
                self._prefix_tokens += len(output.prompt_token_ids or ())
                self._prefix_hits += output.num_cached_tokens or 0
            completion = output.outputs[0]
            cut = self._grow(growing, completion)
            if cut and not output.finished:
                self._engine.abort_request([growing.name], internal=True)
            if cut or output.finished:
                prompt_log_probs = None if growing.watched else _floats(output.prompt_logprobs)
                self._end(growing, prompt_log_probs, stopped=cut or completion.finish_reason == "stop")
        return bool(self._ended)

    def stepped(self) -> Stepped | None:
        """Return the report of the steps since the last one; None if nothing has advanced."""
        computed = sum(request.num_computed_tokens for request in self._scheduler.requests.values())
        if not self._progress.look(self._live_tokens(), computed) and not self._ended:
            return None
        ended, self._ended = self._ended, []
        return self.report(ended)

    def report(self, ended: list[Ended]) -> Stepped:
        """Return a report with the present load."""
        waiting = len(self._scheduler.waiting) + len(getattr(self._scheduler, "skipped_waiting", ()))
        free = 1.0 - float(self._scheduler.kv_cache_manager.usage)
        counts = EngineCounts(
            self._tokens_in, self._progress.tokens, self._preemptions, self._prefix_tokens, self._prefix_hits
        )
        return Stepped(ended, self.taken, EngineLoad(len(self._scheduler.running), waiting, free, counts=counts))

    def _live_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self._scheduler.requests.values())

    def _newly_preempted(self) -> int:
        """Return the responses that lost their place in the cache since the last call."""
        before, now = self._preempted, self._scheduler.requests.items()
        self._preempted = {name: request.num_preemptions for name, request in now if request.num_preemptions}
        return sum(count - before.get(name, 0) for name, count in self._preempted.items())

    def fetch(self, path: str, age: tuple[int, int] | None) -> Updated:
        """Take a version out of a weights file; None for the newest.

        Raises:
            UpdateError: If the weights do not fit, or the version is not held.
        """
        for _ in range(_FETCH_ATTEMPTS):
            # One age for all cards: each would find a newest version of its own.
            wanted = age or self._engine.collective_rpc("rlhfd_newest", args=(path,))[0]
            if wanted is None:
                raise UpdateError("version", "no weights were published yet")
            self._forget_packed()
            found = self._engine.collective_rpc("rlhfd_fetch", args=(path, tuple(wanted)))
            kinds = {kind: message for kind, message, _ in found}
            if set(kinds) == {""}:
                return self._updated(*found[0][2])
            if "mismatch" in kinds:
                raise UpdateError("mismatch", kinds["mismatch"])
            if set(kinds) == {"version"} and age is not None:
                raise UpdateError("version", kinds["version"])
            # Overwritten meanwhile, and the parameters are of no version now: only a whole one helps.
            age = None
        raise UpdateError("engine", f"no whole version of the weights in {_FETCH_ATTEMPTS} attempts")

    def take(self, path: str, places: list[TensorSpec], version: int) -> Updated:
        """Take tensors out of a file, as weights of a version.

        Raises:
            UpdateError: If the weights do not fit.
        """
        self._forget_packed()
        for kind, message, _ in self._engine.collective_rpc("rlhfd_take", args=(path, msgspec.msgpack.encode(places))):
            if kind:
                raise UpdateError("mismatch", message)
        return self._updated(version, 0)

    def _forget_packed(self) -> None:
        # Adapters leave the matrices as they are.
        if self._packed is not None and self._adapter is None:
            self._packed.forget()

    def _updated(self, version: int, history: int) -> Updated:
        for growing in self._rows.values():
            if (request := self._scheduler.requests.get(growing.name)) is not None:
                extend(growing.spans, self.version, request.num_output_tokens)
        self.version = version
        # Keys and values of the former weights are of no use; a request that runs has its own computed again.
        self._engine.engine_core.reset_prefix_cache(reset_running_requests=True)
        if self._has_encoder:
            # As `reset_encoder_cache` does it, which warns of requests in hand: all of them wait now.
            self._scheduler.reset_encoder_cache()
            self._engine.engine_core.engine_core.model_executor.reset_encoder_cache()
        # They lost their place to the update, not to each other.
        self._newly_preempted()
        self._progress.look(self._live_tokens(), 0)
        self._progress.drop(self._live_tokens())
        return Updated(version, history)

    def _grow(self, growing: _Growing, completion: Any) -> bool:
        """Take tokens of a response; return whether a stop sequence ends it, behind which none is taken."""
        log_probs = _floats(completion.logprobs) or []
        if not growing.watched:
            growing.token_ids += completion.token_ids
            growing.log_probs += log_probs
            return False
        for place, token in enumerate(completion.token_ids):
            growing.token_ids.append(token)
            growing.log_probs += log_probs[place : place + 1]
            if self._stops(self._requests[growing.key].submit, growing.token_ids):
                return True
        return False

    def _stops(self, submit: Submit, token_ids: list[int]) -> bool:
        if any(tuple(token_ids[-len(stop) :]) == stop for stop in submit.sampling.stop_sequences):
            return True
        if not (strings := submit.stop_strings):
            return False
        if strings not in self._stop_strings:
            self._tokenizer = self._tokenizer or load_tokenizer(self._directory)
            self._stop_strings[strings] = StopStrings(strings, self._tokenizer)
        return self._stop_strings[strings].completed_by(token_ids) is not None

    def _end(self, growing: _Growing, prompt_log_probs: list[float] | None, *, stopped: bool) -> None:
        extend(growing.spans, self.version, len(growing.token_ids))
        key, request = growing.key, self._requests[growing.key]
        del self._rows[f"{key}:{growing.row}"]
        log_probs = growing.log_probs if request.submit.log_probs else None
        request.rows[growing.row] = Row(growing.token_ids, log_probs, stopped, growing.spans, prompt_log_probs)
        self._progress.end(len(growing.token_ids))
        rows = [row for row in request.rows if row is not None]
        if len(rows) == len(request.rows):
            del self._requests[key]
            self._ended.append(Ended(key, rows))


def _floats(found: Any) -> list[float] | None:
    """Return flat log-probs of vLLM; a prompt's first token has none."""
    return None if found is None else [float(value) for value in found.logprobs]


def _model_of(worker: Any) -> Any:
    return worker.get_model()


def memory_share(cache_bytes: int) -> float:
    """Return the share of the card's memory that vLLM is to use, which must be free when it looks, seconds later.

    Args:
        cache_bytes: Bytes of the key-value cache; 0: the rest of the share. Of a cache of its own size vLLM asks for
            the share all the same, and for nothing else: a trainer that loads its models on the card would end it.
    """
    if cache_bytes:
        return _LEAST_SHARE
    import torch

    free, total = torch.cuda.mem_get_info()
    return _GPU_SHARE * free / total
