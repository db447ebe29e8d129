"""Experience: the data that a rollout writes and a trainer learns from, as one batch or as single rows.

The classes have coati's eight fields first and in its order, then LightRFT's optional ones.
Shapes (P prompt width, A number of action columns, S = P + A):

    field                                     PPO            GRPO
    sequences, attention_mask                 (B, S) int64   same
    action_log_probs, base_action_log_probs   (B, A) float32 same
    behaviour_log_probs                       (B, A) float32 same
    action_mask                               (B, A) bool    same
    values, kl, advantages                    (B, A) float32 (B,) float32
    reward                                    (B,) float32   same

Action column j of A belongs to sequence column S - A + j, both in the rows that a maker writes (prompt padded on
the left, response on the right) and in rows that were stripped and batched again (padded on the left only).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

TOKEN_FIELDS = ("sequences", "attention_mask")
"""Fields with one column a token, (B, S)."""

ACTION_FIELDS = ("action_log_probs", "base_action_log_probs", "behaviour_log_probs", "action_mask", "action_entropy")
"""Fields with one column an action, (B, A)."""

SCORE_FIELDS = ("values", "reward", "kl", "advantages", "returns")
"""Fields with one column an action, (B, A), or one number a row, (B,) or (B, 1)."""

OBJECT_FIELDS = ("labels", "references")
"""Fields that may be tensors or lists of any objects, one element a row."""

VISION_FIELDS = (
    ("pixel_values", "image_grid_thws", "image_num"),
    ("pixel_values_videos", "video_grid_thws", "video_num"),
)
"""Pixels, their grids, and the key of `info` that counts the grids of each row."""


@dataclasses.dataclass(eq=False)
class Experience:
    """A batch of experience; the module's docstring has the shapes.

    A packed batch (`make_experience_batch(..., packing_samples=True)`) holds lists of one tensor a row in place of
    padded tensors, and `cu_seqlens`, `max_seqlen` and `position_ids` for a forward pass over the concatenated rows.

    Attributes:
        sequences: ``(B, S)`` int64, prompt and response.
        action_log_probs: ``(B, A)`` float32, the actor's log-probs at the sampling temperature.
        values: PPO ``(B, A)``, the value of the state before each action; GRPO ``(B,)``, the reward with KL.
        reward: ``(B,)``, PPO the raw reward, GRPO the reward with KL.
        kl: PPO ``(B, A)``, the k3 estimator; GRPO ``(B,)``, the KL term added to the reward.
        advantages: PPO ``(B, A)``, zero outside the mask; GRPO ``(B,)``.
        attention_mask: ``(B, S)`` int64, 1 where the token is real.
        action_mask: ``(B, A)`` bool, True where the actor took the action.
        base_action_log_probs: ``(B, A)`` float32, the reference model's log-probs.
        returns: Targets of the critic if an algorithm does not use advantages + values.
        info: Any values, by name. A tensor of B rows and a list of B elements have one element a row; any other value,
            such as a str or a number, applies to every row. "score" is the raw reward of each row. Shared memory
            (`DetachedReplayBuffer`, the daemon) carries tensors of B rows only.
        action_entropy: ``(B, A)`` float32.
        labels: One element a row.
        references: One element a row.
        cu_seqlens: Packed only, ``(B + 1,)`` int32, the start of each row, and the end.
        max_seqlen: Packed only, tokens of the longest row.
        position_ids: Packed only, ``(1, T)`` int64, 0 at the start of each row.
        behaviour_log_probs: ``(B, A)`` float32, the log-probs with which the engine sampled; None if the engine is the
            trainer's own function, so that they are `action_log_probs`.

    Examples:
        >>> experience = Experience(
        ...     sequences=torch.tensor([[5, 6, 7]]),
        ...     action_log_probs=torch.tensor([[-0.5, -0.25]]),
        ...     values=torch.tensor([[0.1, 0.2]]),
        ...     reward=torch.tensor([1.0]),
        ...     kl=torch.tensor([[0.0, 0.0]]),
        ...     advantages=torch.tensor([[0.9, 0.8]]),
        ...     attention_mask=torch.tensor([[1, 1, 1]]),
        ...     action_mask=torch.tensor([[True, True]]),
        ... )
        >>> experience.to_device(torch.device("cpu"))
        >>> experience = experience.pin_memory()
        >>> experience.kl.device, experience.base_action_log_probs
        (device(type='cpu'), None)
    """

    sequences: Tensor
    action_log_probs: Tensor | None = None
    values: Tensor | None = None
    reward: Tensor | None = None
    kl: Tensor | None = None
    advantages: Tensor | None = None
    attention_mask: Tensor | None = None
    action_mask: Tensor | None = None
    base_action_log_probs: Tensor | None = None
    returns: Tensor | None = None
    info: dict[str, Any] | None = None
    action_entropy: Tensor | None = None
    labels: Tensor | list[Any] | None = None
    references: Tensor | list[Any] | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    position_ids: Tensor | None = None
    # By keyword alone: the order of the fields by position is that of the originals.
    behaviour_log_probs: Tensor | None = dataclasses.field(default=None, kw_only=True)

    @torch.no_grad()
    def to_device(self, device: torch.device | str, *, non_blocking: bool = False) -> None:
        """Move every tensor, those in `info` and in lists too, to `device`, in place.

        Args:
            device: The device, such as "cuda:0" or ``torch.device("cuda:0")``.
            non_blocking: Whether copies from page-locked memory are asynchronous, on the current stream.
        """
        self._replace_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of every CUDA tensor until the work of `stream` that reads it is done.

        Needed if the tensors were made on another stream.

        Args:
            stream: The stream on which the tensors are read.
        """

        def record(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(stream)
            return tensor

        self._replace_tensors(record)

    def pin_memory(self) -> Self:
        """Move every tensor, those in `info` and in lists too, into page-locked memory, in place.

        Without an accelerator the tensors are unchanged: there is no copy to lock pages for.

        Returns:
            This experience.
        """
        self._replace_tensors(_pin)
        return self

    def _replace_tensors(self, replace: Callable[[Tensor], Tensor]) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, _map_tensors(getattr(self, field.name), replace))


@dataclasses.dataclass(eq=False)
class ExperienceVL(Experience):
    """A batch of vision-language experience.

    Attributes:
        pixel_values: ``(patches of all images, D)``, the images of row 0 first.
        image_grid_thws: ``(images, 3)`` int64; time x height x width of an image is its number of patches. Or a list
            with the grids of each row, None for a row without images; shared memory does not carry such a list.
        pixel_values_videos: As `pixel_values`, for videos.
        video_grid_thws: As `image_grid_thws`, for videos.
        raw_images: For each row the list of its images, or None.

    `info["image_num"]` and `info["video_num"]`, ``(B,)`` float32, are the numbers of grids of each row. Without them,
    and without a list of grids, each row has one or none has any.
    """

    pixel_values: Tensor | None = None
    image_grid_thws: Tensor | list[Tensor | None] | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thws: Tensor | list[Tensor | None] | None = None
    raw_images: list[Any] | None = None


@dataclasses.dataclass(eq=False)
class BufferItem:
    """One row of an `Experience`: the same fields without the batch dimension.

    The tensors of an item that was split off a batch are views of the batch. Pickling an item first copies its
    part out of a larger storage, so that the pickle of one row never contains its whole batch.

    Attributes:
        sequences: ``(S,)`` int64.
        action_log_probs: ``(A,)`` float32.
        values: ``(A,)`` float32, 0-dim, or ``(1,)``: one number an action, or one a row.
        reward: As `values`.
        kl: As `values`.
        advantages: As `values`.
        attention_mask: ``(S,)`` int64.
        action_mask: ``(A,)`` bool.
        base_action_log_probs: ``(A,)`` float32.
        returns: As `values`.
        info: Any values, by name. Batching makes a tensor of numbers, and of tensors of one shape and dtype, also with
            numbers of that dtype among tensors without dimensions; of other values it makes a list.
        action_entropy: ``(A,)`` float32.
        labels: Any object.
        references: Any object.
        behaviour_log_probs: ``(A,)`` float32.
    """

    sequences: Tensor
    action_log_probs: Tensor | None = None
    values: Tensor | None = None
    reward: Tensor | None = None
    kl: Tensor | None = None
    advantages: Tensor | None = None
    attention_mask: Tensor | None = None
    action_mask: Tensor | None = None
    base_action_log_probs: Tensor | None = None
    returns: Tensor | None = None
    info: dict[str, Any] | None = None
    action_entropy: Tensor | None = None
    labels: Any = None
    references: Any = None
    behaviour_log_probs: Tensor | None = dataclasses.field(default=None, kw_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: _map_tensors(value, compact) for name, value in self.__dict__.items()}


@dataclasses.dataclass(eq=False)
class BufferItemVL(BufferItem):
    """One row of an `ExperienceVL`; its vision fields are None if the row has no image or no video.

    Attributes:
        pixel_values: ``(patches of its images, D)``.
        image_grid_thws: ``(images, 3)`` int64; ``(3,)`` is one image.
        pixel_values_videos: As `pixel_values`, for videos.
        video_grid_thws: As `image_grid_thws`, for videos.
        raw_images: The row's images.
    """

    pixel_values: Tensor | None = None
    image_grid_thws: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thws: Tensor | None = None
    raw_images: list[Any] | None = None


def is_vl_experience(experience: Experience | BufferItem) -> bool:
    """Return whether an experience, or one row of it, has the fields of a vision-language experience.

    Args:
        experience: A batch, or one row.

    Returns:
        True if it is an `ExperienceVL` or a `BufferItemVL`, with or without images.

    Examples:
        >>> exp = ExperienceVL(sequences=torch.tensor([[1, 2]]))
        >>> if is_vl_experience(exp):
        ...     print("This is a vision-language experience")
        This is a vision-language experience
        >>> is_vl_experience(Experience(sequences=torch.tensor([[1, 2]])))
        False
    """
    return isinstance(experience, ExperienceVL | BufferItemVL)


def _map_tensors(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, dict):
        return {key: _map_tensors(element, replace) for key, element in value.items()}
    if isinstance(value, list):
        return [_map_tensors(element, replace) for element in value]
    return value


def _pin(tensor: Tensor) -> Tensor:
    try:
        return tensor.pin_memory()
    except RuntimeError:
        if torch.accelerator.is_available():
            raise
        return tensor


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage has its values alone: the same one, or a copy."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
