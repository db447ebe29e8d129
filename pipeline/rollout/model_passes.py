"""Forward passes of actor, reference, reward model and critic over sampled rows, in mini-batches bounded by tokens.

A model whose passes hold rows end to end, as on a card, receives no padding. Any other one of this project or of
transformers receives rows without the columns that are padding in all of them, and any other object whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import FieldError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.critic import Critic
from pipeline.models.flat_rows import FlatRows, Index, on_device, ranges
from pipeline.models.inputs import is_transformers_model
from pipeline.models.log_probs import action_log_probs, all_values
from pipeline.models.packing import log_probs_of_rows, packs_scored_rows, values_of_rows
from pipeline.models.pass_size import PassSize, default_tokens, width_multiple
from pipeline.models.reward_model import SequenceReward
from pipeline.models.shared_prefix import groups_to_share, may_share_prompts
from pipeline.progress import Telemetry
from pipeline.rollout.reward.functions import checked_scores, vision_keywords
from pipeline.rollout.reward.row_rewards import RowRewards
from pipeline.rollout.reward.signatures import parameters_of
from pipeline.rollout.reward.summed import SummedReward
from pipeline.rollout.rows import Rows

_MOST_PADDING = 0.5
"""Largest share of padding in a pass of a model: a long row beside many short ones is a pass of its own."""


@dataclass(frozen=True, slots=True)
class ModelPasses:
    """Log-probs, scores and values of sampled rows.

    Attributes:
        inference_batch_size: Most rows of a mini-batch; None: a model's `default_tokens` bound it, and any other object
            gets all rows.
        logits_forward_batch_size: Most rows of a mini-batch of a model; None for `inference_batch_size`.
        refuse_not_finite: Whether a log-prob or value that is NaN or infinite is an error.
        telemetry: Told of each mini-batch, and of each one that runs out of the device's memory.
        width_multiple: Multiple to which the widths of mini-batches without common padding are rounded up; None: 64 on
            a GPU, else 1.
        logits_forward_tokens: Most tokens of a mini-batch of a model; None for its `default_tokens`, or without bound
            where rows are bounded.
    """

    inference_batch_size: int | None
    logits_forward_batch_size: int | None
    refuse_not_finite: bool
    telemetry: Telemetry = Telemetry.none()
    width_multiple: int | None = None
    logits_forward_tokens: int | None = None
    _sizes: WeakKeyDictionary[nn.Module, PassSize] = field(default_factory=WeakKeyDictionary, init=False)

    def log_probs(self, name: str, model: Callable[..., Any], rows: Rows, temperature: float) -> Tensor:
        """Return the log-probs of the actions under a model.

        Args:
            name: Name of the model, for errors.
            model: Called for ``.logits``.
            rows: The sampled rows.
            temperature: The sampling temperature.

        Returns:
            ``(N,)`` float32, zero at observations of an environment.

        Raises:
            FieldError: If a log-prob is NaN or infinite.
            DeviceMemoryError: If a single row does not fit into the device's memory.
        """
        module: Any = model

        def of_flat(some: FlatRows, **settings: Any) -> Tensor:
            return log_probs_of_rows(module, some, temperature=temperature, **settings)[0]

        result = self._of_rows_end_to_end(model, rows, of_flat)
        if result is None:
            result = self._log_probs_of_rows(model, rows, temperature)
        if rows.turns is not None:
            result.masked_fill_(rows.turns.observed, 0.0)
        self.check_finite(name, "log-prob", rows, result)
        return result

    def _of_rows_end_to_end(self, model: Any, rows: Rows, of_flat: Callable[..., Tensor]) -> Tensor | None:
        """Return numbers of the actions, ``(N,)``, from passes over rows end to end; None if these rows are padded.

        Args:
            model: The model.
            rows: The sampled rows.
            of_flat: Returns the numbers of some rows; called with `shared`, whether the pass computes each prompt once
                for all its rows, and with `vision`.
        """
        shares, packs = rows.vision is None and may_share_prompts(model), packs_scored_rows(model)
        if not shares and not packs:
            return None
        flat = rows.for_packing(_device_of(model))
        groups = groups_to_share(model, flat) if shares else None
        if groups is not None:
            order, sizes = groups.order, (groups.prompts, groups.responses, groups.groups)
        elif packs and flat.counts.all():
            # Each row is a group of its own.
            order = np.arange(len(flat))
            sizes = flat.lengths.tolist(), [0] * len(flat), order.tolist()
        else:
            return None
        numbers: list[tuple[Index, Tensor]] = []

        def step(part: slice) -> None:
            some, actions = flat.rows(order[part])
            given = of_flat(some, shared=groups is not None, vision=rows.vision_of(order[part]))
            numbers.append((actions, given.float()))

        lefts, rights, of_row = sizes
        self._size(model).run(lefts, rights, step, of_row)
        found = torch.zeros(len(flat.action))
        # After the last pass: a copy waits for the card, which has no next pass meanwhile.
        for actions, given in numbers:
            found[torch.from_numpy(actions)] = given.cpu()
        if rows.turns is None:
            return found
        return torch.zeros(len(rows.turns.observed)).masked_scatter_(~rows.turns.observed, found)

    def _log_probs_of_rows(self, model: Any, rows: Rows, temperature: float) -> Tensor:
        """Return the log-probs from padded passes, ``(N,)``."""
        result = torch.zeros(int(rows.lengths.sum()))
        device, trim = _device_of(model), is_transformers_model(model)
        multiple = width_multiple(device, self.width_multiple)
        # Rows of similar length together: columns that are padding in all rows of a mini-batch are not computed.
        order = rows.lengths.argsort(kind="stable") if trim else np.arange(len(rows))
        prompts, responses = rows.prompts[order].tolist(), rows.lengths[order].tolist()
        if not trim:
            prompts, responses = [rows.prompt_columns] * len(rows), [rows.num_actions] * len(rows)

        def step(part: slice) -> None:
            index = order[part]
            sequences, mask, columns = rows.padded(index, trim=trim, multiple=multiple)
            log_probs = action_log_probs(
                model,
                sequences.to(device),
                mask.to(device),
                columns,
                temperature=temperature,
                vision=rows.vision_of(index),
            )
            _put(result, rows, index, log_probs, np.zeros_like(index))

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
    ) -> Tensor:
        """Return the raw rewards, and those of an environment's turns.

        Args:
            reward_model: Called with right-padded rows: one of this project with all of them, which it cuts itself;
                None if the environment alone gives rewards.
            rows: The sampled rows.
            answers: Ground truth passed to the reward model, one element a row.
            keep_errored: Whether a NaN or infinite score is returned unchanged.
            columns: Further columns of each row's prompt, passed only to a reward model that names them.

        Returns:
            ``(B,)``, float64 of a reward model that has `exact`, else float32.

        Raises:
            RewardError: If a score is NaN or infinite, without `keep_errored`.
            DeviceMemoryError: If a single row does not fit into the device's memory.
        """
        of_turns = None if rows.turns is None else rows.columns(rows.turns.rewards).sum(dim=1)
        if reward_model is None and of_turns is not None:
            return of_turns
        device = _device_of(reward_model)
        name = type(reward_model).__qualname__
        networks = reward_model.models if isinstance(reward_model, SummedReward) else [reward_model]
        for network in networks:
            if isinstance(network, SequenceReward):
                network.bound(self._size(network.model), self.width_multiple)
        if isinstance(reward_model, RowRewards):
            reward_model.bound(self.inference_batch_size)
        is_own = isinstance(reward_model, SequenceReward | RowRewards)
        takes_columns = "columns" in parameters_of(reward_model)
        scores: list[Tensor] = []

        def step(part: slice) -> None:
            index = np.arange(len(rows))[part]
            ids, mask = rows.right_padded(index, trim=is_own)
            part_scores = reward_model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                response_start=torch.from_numpy(rows.prompts[index]).to(device),
                response_end=torch.from_numpy(rows.totals[index]).to(device),
                gt_answer=answers[part],
                **vision_keywords(reward_model, rows.vision_of(index), device),
                **({"columns": columns[part]} if columns is not None and takes_columns else {}),
            )
            part_scores = _exact(reward_model, part_scores)
            checked = checked_scores(part_scores, len(ids), name, keep_errored=keep_errored, first_row=part.start)
            scores.append(checked.cpu())

        if is_own:
            step(slice(0, len(rows)))
        else:
            # Logits have a bound of their own, which another object knows nothing of.
            size = PassSize(
                "rollout.inference_batch_size", most_rows=self.inference_batch_size, telemetry=self.telemetry
            )
            if isinstance(reward_model, nn.Module):
                size = self._size(reward_model)
            size.run([0] * len(rows), [rows.prompt_columns + rows.num_actions] * len(rows), step)
        return torch.cat(scores) if of_turns is None else torch.cat(scores) + of_turns

    def values(self, critic: Any, rows: Rows, *, coati: bool) -> Tensor:
        """Return the value of the state before each action.

        Args:
            critic: Called with right-padded rows.
            rows: The sampled rows.
            coati: Whether to take the last A columns of the right-padded rows, as coati does.

        Returns:
            ``(N,)`` float32, zero at observations of an environment.

        Raises:
            FieldError: If a value is NaN or infinite.
            DeviceMemoryError: If a single row does not fit into the device's memory.
        """
        trim = isinstance(critic, Critic) and not coati
        result = None
        if trim:
            result = self._of_rows_end_to_end(critic, rows, functools.partial(values_of_rows, critic))
        if result is None:
            result = self._values_of_rows(critic, rows, trim=trim, coati=coati)
        if rows.turns is not None:
            result.masked_fill_(rows.turns.observed, 0.0)
        self.check_finite("critic", "value", rows, result)
        return result

    def _values_of_rows(self, critic: Any, rows: Rows, *, trim: bool, coati: bool) -> Tensor:
        """Return the values from padded passes, ``(N,)``."""
        device = _device_of(critic)
        multiple = width_multiple(device, self.width_multiple)
        result = torch.zeros(int(rows.lengths.sum()))
        order, widths = np.arange(len(rows)), [rows.prompt_columns + rows.num_actions] * len(rows)
        if trim:
            # Rows of similar length together.
            order = rows.totals.argsort(kind="stable")
            widths = rows.totals[order].tolist()

        def step(part: slice) -> None:
            index = order[part]
            ids, mask = rows.right_padded(index, trim=trim, multiple=multiple)
            values = all_values(critic, ids.to(device), mask.to(device), vision=rows.vision_of(index))
            # The state before an action is that after the token before it.
            first = np.full_like(index, values.shape[1] - rows.num_actions) if coati else rows.prompts[index] - 1
            _put(result, rows, index, values, first)

        self._size(critic).run([0] * len(rows), widths, step)
        return result

    def check_finite(self, name: str, quantity: str, rows: Rows, values: Tensor) -> None:
        """Refuse numbers of a model that are NaN or infinite, unless `refuse_not_finite` is False.

        Args:
            name: Name of the model, for errors.
            quantity: Name of the numbers, for errors, such as "value".
            rows: The sampled rows.
            values: ``(N,)``.

        Raises:
            FieldError: If a number is not finite.
        """
        if not self.refuse_not_finite:
            return
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            place = int((~finite).nonzero()[0])
            raise FieldError(f"row {rows.row_of(place)[0]}: {name} gave a {quantity} of {values[place].item()}")

    def _size(self, model: Any) -> PassSize:
        """Return the bound of a model's passes: the one from before if it was lowered, else as configured."""
        given = [self.inference_batch_size, self.logits_forward_batch_size]
        most_rows = min((size for size in given if size is not None), default=None)
        most_tokens = self.logits_forward_tokens
        key = "rollout.logits_forward_batch_size" if most_tokens is None else "rollout.logits_forward_tokens"
        if not isinstance(model, nn.Module):
            return PassSize(key, most_rows=most_rows, telemetry=self.telemetry)
        if model not in self._sizes:
            if most_tokens is None and most_rows is None:
                most_tokens = default_tokens(model, _device_of(model), backward=False)
            self._sizes[model] = PassSize(
                key, most_tokens=most_tokens, most_padding=_MOST_PADDING, telemetry=self.telemetry
            )
        self._sizes[model].most_rows = most_rows
        return self._sizes[model]


def _exact(reward_model: Any, scores: Any) -> Any:
    """Return the float64 scores of a reward model, if it has those of this call: a subclass may have changed them."""
    exact = getattr(reward_model, "exact", None)
    if not isinstance(exact, Tensor) or not isinstance(scores, Tensor) or exact.shape != scores.shape:
        return scores
    own = exact.float().to(scores.device)
    return exact if bool(((own == scores) | (own.isnan() & scores.isnan())).all()) else scores


def _put(result: Tensor, rows: Rows, index: Index, values: Tensor, first: Index) -> None:
    """Write the values of some rows, ``(rows, columns)``, each from its column `first` on, into columns ``(N,)``."""
    columns = ranges(np.arange(len(index)) * values.shape[1] + first, rows.lengths[index])
    result[torch.from_numpy(rows.actions_of(index))] = (
        values.reshape(-1)[on_device(columns, values.device)].cpu().to(result.dtype)
    )


def _device_of(model: Any) -> torch.device:
    """Return the device for a model's inputs: the model's own, or the CPU if it has none."""
    if isinstance(device := getattr(model, "device", None), torch.device):
        return device
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")
