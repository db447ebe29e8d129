"""A forward pass: within its model, its mode, and its arguments: tokens, position ids derived from the rows, pixels."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from pipeline.experience.vision_rows import VisionRows
from pipeline.models.position_limits import check_rows
from pipeline.models.vision_inputs import refuse_images, vision_backbone, vision_inputs

CACHE_KEYWORDS: Final = ("cache", "past_key_values")
"""Names of the argument for keys and values of earlier tokens: from transformers 5.24 on, and before."""

_Result = TypeVar("_Result", Tensor, tuple[Tensor, Tensor | None])


def inside(model: object, call: Callable[[], _Result]) -> _Result:
    """Return the result of a call that uses parts of a model, which are whole while it runs.

    Args:
        model: The model. One in shards has a method ``computed`` (`pipeline.trainer.sharding`), which makes the call;
            it is a collective of all ranks then.
        call: Computes from the model's modules; called once.
    """
    sharded: Any = getattr(model, "computed", None)
    if sharded is None:
        return call()
    result: _Result = sharded(call)
    if not torch.is_grad_enabled():
        reshard(model)
    return result


def call_inside(model: object, call: Callable[[], None]) -> None:
    """Call a function as `inside` does, without gradients; its error comes out once the model is in shards again."""
    failed: list[Exception] = []

    def called() -> Tensor:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)
        return torch.empty(0)

    with torch.no_grad():
        inside(model, called)
    if failed:
        raise failed[0]


def reshard(model: Any) -> None:
    """Free what a pass without a backward pass leaves whole: it would have the values of before the next step."""
    for part in model.modules():
        if hasattr(part, "computed"):
            part.reshard()


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


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Return position ids that count the real tokens of each row from 0, with the padding on either side.

    Args:
        attention_mask: ``(B, S)``, nonzero where the token is real.

    Returns:
        ``(B, S)`` int64; 0 in the padding on the left.
    """
    return (attention_mask != 0).long().cumsum(dim=-1).sub_(1).clamp_(min=0)


def accepted_keywords(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that a callable accepts.

    Args:
        function: A module (its ``forward`` is inspected) or any other callable.
        keywords: Keywords for a call of it.

    Returns:
        The keywords that its signature has; all of them if it takes ``**kwargs``.
    """
    target = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(target).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


def cache_keyword(model: nn.Module) -> str:
    """Return the one of `CACHE_KEYWORDS` that a model takes."""
    new, old = CACHE_KEYWORDS
    return new if new in inspect.signature(model.forward).parameters else old


def backbone_of(model: object) -> nn.Module | None:
    """Return the part of a model of transformers below its head; None if it has none.

    The ``base_model`` of Llama 4's text models is the model itself.
    """
    backbone = getattr(model, "base_model", None)
    if backbone is model:
        backbone = getattr(model, "model", None)
    return backbone if isinstance(backbone, nn.Module) else None


def model_inputs(
    model: Callable[..., Any], input_ids: Tensor, attention_mask: Tensor, vision: VisionRows | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the keywords of a forward pass over whole rows: first the required ones, then the optional ones.

    Args:
        model: The model or function to call.
        input_ids: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real.
        vision: Images and videos of the rows, if any.

    Returns:
        `input_ids` and `attention_mask`, for every model; `position_ids`, pixels and grids under their names in
        transformers, for a model that accepts them (`accepted_keywords`).

    Raises:
        FieldError: If rows have images and the model would ignore them, or if the positions of a row would depend on
            the rows beside it.
    """
    check_rows(model, (attention_mask != 0).sum(dim=1))
    backbone = vision_backbone(model)
    if backbone is None:
        if not _takes_pixels(model):
            refuse_images(model, vision)
        given = {} if vision is None else vision.model_keywords(input_ids.device)
        given |= {"input_ids": input_ids, "attention_mask": attention_mask}
        given["position_ids"] = position_ids_from_mask(attention_mask)
    else:
        given = vision_inputs(backbone, input_ids, attention_mask, vision)
    return {name: given.pop(name) for name in ("input_ids", "attention_mask")}, given


def is_transformers_model(model: object) -> bool:
    """Return whether an object is a model of the transformers library, not an object with only its interface."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _takes_pixels(model: Callable[..., Any]) -> bool:
    # Models of transformers, and a critic around one, accept any keyword and ignore the unknown ones.
    own = getattr(model, "backbone", model)
    return not is_transformers_model(own) and bool(accepted_keywords(model, {"pixel_values": None}))
