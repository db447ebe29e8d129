"""The start of ranks on several machines: the first rank finds it, all others get it from there.

The machines share no memory and no folder of checkpoints. So whole models and training state go to each rank in
broadcasts, all tensors of the models among them: ranks whose machines have other files of the model train the first
one's. Sharded ranks find the start together, by what the first rank reads of it (`of_first`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from pipeline.errors import RlhfdError
from pipeline.trainer.connection import Connection
from pipeline.trainer.resume import Start
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import LearnerProtocol, tensors_of

_T = TypeVar("_T")


def spread(
    start: Start, learner: LearnerProtocol, models: RankModels, connection: Connection, device: torch.device
) -> Start:
    """Set models and learner of every rank to the first one's start, and return it; a collective.

    Args:
        start: The start that the first rank has found; not read on others.
        learner: The rank's learner.
        models: The rank's models, whole.
        connection: The rank's connection.
        device: Device of the models.
    """
    found: Start = _of_first(start._replace(checkpoint=None, published=connection.newest()))
    state = tensors_of(learner, found.progress)
    for of_all in (models.tensors(), state):
        for name in sorted(of_all):
            _copy_from_first(of_all[name], device)
    learner.step = found.progress.step
    return start._replace(published=found.published) if distributed.get_rank() == 0 else found


def of_first(call: Callable[[], _T]) -> _T:
    """Return the result of a call on the first rank, or raise its error, on every rank; a collective."""
    outcome: Any = None
    if distributed.get_rank() == 0:
        try:
            outcome = call()
        except RlhfdError as error:
            outcome = error.with_traceback(None)
    outcome = _of_first(outcome)
    if isinstance(outcome, RlhfdError):
        raise outcome
    result: _T = outcome
    return result


def _of_first(value: Any) -> Any:
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def _copy_from_first(tensor: torch.Tensor, device: torch.device) -> None:
    # As bytes: gloo does not take every dtype.
    sent = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    distributed.broadcast(sent, 0)
    if distributed.get_rank():
        with torch.no_grad():
            tensor.copy_(sent.view(tensor.dtype).reshape(tensor.shape))
