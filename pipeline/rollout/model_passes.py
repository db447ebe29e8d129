"""Forward passes of actor, reference, reward model and critic over sampled rows, in mini-batches bounded by tokens.

A model of this project or of transformers receives rows without the columns that are padding in all of them. Any other
object receives whole rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeline.errors import FieldError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.critic import Critic
from pipeline.models.flat_rows import FlatRows
from pipeline.models.inputs import is_transformers_model
from pipeline.models.log_probs import action_log_probs, all_values
from pipeline.models.packing import log_probs_of_rows
from pipeline.models.pass_size import PassSize, default_tokens, width_multiple
from pipeline.models.reward_model import SequenceReward
from pipeline.models.shared_prefix import groups_to_share, may_share_prompts
from pipeline.progress import Telemetry
from pipeline.rollout.reward.functions import FunctionReward, checked_scores, takes_columns, vision_keywords
from pipeline.rollout.reward.parts import OnParts
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.summed import SummedReward
from pipeline.rollout.rows import Rows


@dataclass(frozen=True, slots=True)
class ModelPasses:
    """Log-probs, scores and values of sampled rows.

    Attributes:
        inference_batch_size: Most rows of a mini-batch; None: a model's `default_tokens` bound it, and any other object
            gets all rows.
        logits_forward_batch_size: Most rows of a mini-batch of log-probs or values; None for
            `inference_batch_size`.
        refuse_not_finite: Whether a log-prob or value that is NaN or infinite is an error.
        telemetry: Told of each mini-batch, and of each one that runs out of the device's memory.
        sizes: The bound of each model's passes, kept by the owner of this object.
        width_multiple: Multiple to which the widths of mini-batches without common padding are rounded up; None: 64 on
            a GPU, else 1.
    """

    inference_batch_size: int | None
    logits_forward_batch_size: int | None
    refuse_not_finite: bool
    telemetry: Telemetry = Telemetry.none()
    sizes: WeakKeyDictionary[nn.Module, PassSize] = field(default_factory=WeakKeyDictionary)
    width_multiple: int | None = None

    def log_probs(self, name: str, model: Callable[..., Any], rows: Rows, temperature: float) -> Tensor:
        """Return the log-probs of the actions under a model.

        Args:
            name: Name of the model, for errors.
            model: Called for ``.logits``.
            rows: The sampled rows.
            temperature: The sampling temperature.

        Returns:
            ``(B, A)`` float32, zero outside the mask.

        Raises:
            FieldError: If a log-prob is NaN or infinite.
            DeviceMemoryError: If a single row does not fit into the device's memory.
        """
        result = self._log_probs_of_groups(model, rows, temperature)
        if result is None:
            result = self._log_probs_of_rows(model, rows, temperature)
        result.masked_fill_(~rows.action_mask, 0.0)
        self.check_finite(name, "log-prob", result)
        return result

    def _log_probs_of_groups(self, model: Any, rows: Rows, temperature: float) -> Tensor | None:
        """Return the log-probs from passes that compute each prompt once; None if the passes of these rows do not."""
        if rows.vision is not None or not may_share_prompts(model):
            return None
        if not bool(rows.action_mask.any(dim=1).all()):
            return None
        flat = FlatRows.of_padded(rows.sequences.to(_device_of(model)), rows.attention_mask, rows.action_mask)
        groups = groups_to_share(model, flat)
        if groups is None:
            return None
        found = torch.zeros(len(flat.action))

        def step(part: slice) -> None:
            some, actions = flat.rows(groups.order[part])
            log_probs, _ = log_probs_of_rows(model, some, temperature=temperature, shared=True)
            found[torch.from_numpy(actions)] = log_probs.cpu()
            self.telemetry.progress(rows_done=part.stop, rows=len(flat))

        self._size(model).run(groups.prompts, groups.responses, step, groups.groups)
        return torch.zeros(rows.action_mask.shape).masked_scatter(rows.action_mask, found)

    def _log_probs_of_rows(self, model: Any, rows: Rows, temperature: float) -> Tensor:
        """Return the log-probs from padded passes; they are undefined outside the mask."""
        result = torch.zeros(rows.action_mask.shape)
        device, trim = _device_of(model), is_transformers_model(model)
        multiple = width_multiple(device, self.width_multiple)
        # Rows of similar length together: columns that are padding in all rows of a mini-batch are not computed.
        order = rows.lengths.argsort(stable=True) if trim else torch.arange(len(result))
        prompts, responses = rows.prompt_lengths[order].tolist(), rows.lengths[order].tolist()
        if not trim:
            prompts, responses = (
                [rows.sequences.shape[1] - rows.num_actions] * len(order),
                [rows.num_actions] * len(order),
            )

        def step(part: slice) -> None:
            sequences, mask, columns = rows.padded(order[part], trim=trim, multiple=multiple)
            log_probs = action_log_probs(
                model,
                sequences.to(device),
                mask.to(device),
                columns,
                temperature=temperature,
                vision=rows.vision_of(order[part]),
            )
            result[order[part], :columns] = log_probs.cpu()
            self.telemetry.progress(rows_done=part.stop, rows=len(order))

        self._size(model).run(prompts, responses, step)
        return result

    @without_cudnn_attention()
    def scores(
        self,
        reward_model: Any,
        rows: Rows,
        answers: Sequence[Any],
        *,
        keep_errored: bool,
        columns: Sequence[Mapping[str, Any]] | None = None,
        on_parts: OnParts = lambda parts, numbers: None,
    ) -> Tensor:
        """Return the raw rewards, and those of an environment's turns.

        Args:
            reward_model: Called with right-padded rows; None if the environment alone gives rewards.
            rows: The sampled rows.
            answers: Ground truth passed to the reward model, one element a row.
            keep_errored: Whether a NaN or infinite score is returned unchanged.
            columns: Further columns of each row's prompt, passed only to a reward model that names them.
            on_parts: Called with the `parts` of a reward model that has them, ``(b, functions)``, in the order of rows,
                and with its `numbers`, one element a row.

        Returns:
            ``(B,)``, float64 of a reward model that has `exact`, else float32.

        Raises:
            RewardError: If a score is NaN or infinite, without `keep_errored`.
            DeviceMemoryError: If a single row does not fit into the device's memory.
        """
        of_turns = None if rows.turns is None else rows.turns.rewards.sum(dim=1)
        if reward_model is None and of_turns is not None:
            return of_turns
        device = _device_of(reward_model)
        name = type(reward_model).__qualname__
        trim = isinstance(reward_model, SequenceReward | SummedReward | FunctionReward | RewardPool)
        # Functions read the rows themselves.
        reads_rows = isinstance(reward_model, SequenceReward | SummedReward)
        multiple = width_multiple(device, self.width_multiple) if reads_rows else 1
        scores: list[Tensor] = []

        def step(part: slice) -> None:
            ids, mask = rows.right_padded(part, trim=trim, multiple=multiple)
            starts = rows.prompt_lengths[part]
            part_scores = reward_model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                response_start=starts.to(device),
                response_end=(starts + rows.lengths[part]).to(device),
                gt_answer=answers[part],
                **vision_keywords(reward_model, rows.vision_of(part), device),
                **({} if columns is None or not takes_columns(reward_model) else {"columns": columns[part]}),
            )
            part_scores = _exact(reward_model, part_scores)
            scores.append(checked_scores(part_scores, len(ids), name, keep_errored=keep_errored).cpu())
            if isinstance(parts := getattr(reward_model, "parts", None), Tensor):
                on_parts(parts, getattr(reward_model, "numbers", None) or [{}] * len(parts))
            self.telemetry.progress(rows_done=part.stop, rows=len(answers))

        self._size(reward_model, scores=True).run([0] * len(answers), _widths(rows, trim=trim), step)
        return torch.cat(scores) if of_turns is None else torch.cat(scores) + of_turns

    def values(self, critic: Any, rows: Rows, *, coati: bool) -> Tensor:
        """Return the value of the state before each action.

        Args:
            critic: Called with right-padded rows.
            rows: The sampled rows.
            coati: Whether to take the last A columns of the right-padded rows, as coati does.

        Returns:
            ``(B, A)`` float32, zero outside the mask.

        Raises:
            FieldError: If a value is NaN or infinite.
            DeviceMemoryError: If a single row does not fit into the device's memory.
        """
        device = _device_of(critic)
        trim = isinstance(critic, Critic) and not coati
        multiple = width_multiple(device, self.width_multiple)
        parts: list[Tensor] = []

        def step(part: slice) -> None:
            ids, mask = rows.right_padded(part, trim=trim, multiple=multiple)
            values = all_values(critic, ids.to(device), mask.to(device), vision=rows.vision_of(part)).cpu()
            self.telemetry.progress(rows_done=part.stop, rows=len(rows.sequences))
            if coati:
                parts.append(values[:, -rows.num_actions :])
            else:
                before = rows.prompt_lengths[part].unsqueeze(1) - 1 + torch.arange(rows.num_actions)
                parts.append(values.gather(1, before.clamp(max=ids.shape[1] - 1)))

        self._size(critic).run([0] * len(rows.sequences), _widths(rows, trim=trim), step)
        result = torch.cat(parts).masked_fill(~rows.action_mask, 0.0)
        self.check_finite("critic", "value", result)
        return result

    def check_finite(self, name: str, quantity: str, values: Tensor) -> None:
        """Refuse numbers of a model that are NaN or infinite, unless `refuse_not_finite` is False.

        Args:
            name: Name of the model, for errors.
            quantity: Name of the numbers, for errors, such as "value".
            values: ``(B, A)``.

        Raises:
            FieldError: If a number is not finite.
        """
        if not self.refuse_not_finite:
            return
        finite = torch.isfinite(values).all(dim=1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            value = values[row][~torch.isfinite(values[row])][0].item()
            raise FieldError(f"row {row}: {name} gave a {quantity} of {value}")

    def _size(self, model: Any, *, scores: bool = False) -> PassSize:
        """Return the bound of a model's passes: the one from before if it was lowered, else as configured."""
        given = [self.inference_batch_size, *([] if scores else [self.logits_forward_batch_size])]
        most_rows = min((size for size in given if size is not None), default=None)
        key = "rollout.inference_batch_size" if scores else "rollout.logits_forward_batch_size"
        module = next((one for one in (model, getattr(model, "model", None)) if isinstance(one, nn.Module)), None)
        if module is None:
            return PassSize(key, most_rows=most_rows, telemetry=self.telemetry)
        if module not in self.sizes:
            tokens = default_tokens(module, _device_of(module), backward=False) if most_rows is None else None
            self.sizes[module] = PassSize(key, most_tokens=tokens, telemetry=self.telemetry)
        self.sizes[module].most_rows = most_rows
        return self.sizes[module]


def _exact(reward_model: Any, scores: Any) -> Any:
    """Return the float64 scores of a reward model, if it has those of this call: a subclass may have changed them."""
    exact = getattr(reward_model, "exact", None)
    if not isinstance(exact, Tensor) or not isinstance(scores, Tensor) or exact.shape != scores.shape:
        return scores
    own = exact.float().to(scores.device)
    return exact if bool(((own == scores) | (own.isnan() & scores.isnan())).all()) else scores


def _widths(rows: Rows, *, trim: bool) -> list[int]:
    """Return the columns that each row needs when it is padded on the right."""
    if not trim:
        return [rows.sequences.shape[1]] * len(rows.sequences)
    widths: list[int] = (rows.prompt_lengths + rows.lengths).tolist()
    return widths


def _device_of(model: Any) -> torch.device:
    """Return the device for a model's inputs: the model's own, or the CPU if it has none."""
    if isinstance(device := getattr(model, "device", None), torch.device):
        return device
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


@contextlib.contextmanager
def eval_mode(*models: Any) -> Iterator[None]:
    """Switch dropout off; on exit, restore it in the modules that were in training mode."""
    modules = [module for model in models if isinstance(model, nn.Module) for module in model.modules()]
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
