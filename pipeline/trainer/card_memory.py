"""The memory of a rank's card against its plan, from which the sizes of passes follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pipeline.config.plan import card_bytes, models_of, needs
from pipeline.config.schema import Config
from pipeline.models.device import allocator_bytes
from pipeline.trainer.hooks import TakenStep, TrainerHook

log = logging.getLogger(__name__)


class CardMemory(TrainerHook):
    """Logs the memory after the first step beside the plan's, and warns once of a step that needed more.

    Args:
        planned_bytes: The most that the rank takes of the card, by the plan.
        read: Returns the allocator's bytes by state.
    """

    def __init__(self, planned_bytes: int, read: Callable[[], Mapping[str, int]] = allocator_bytes) -> None:
        self._planned_bytes = planned_bytes
        self._read = read
        self._is_told = self._has_warned = False

    def taken(self, taken: TakenStep) -> None:
        """Compare the memory that the allocator has reserved by now."""
        reserved = self._read().get("reserved", 0)
        if reserved > self._planned_bytes and not self._has_warned:
            log.warning("more memory of the card than planned: step=%d reserved_bytes=%d planned_bytes=%d key=%s",
                        taken.step, reserved, self._planned_bytes, "trainer.micro_batch_tokens")  # fmt: skip
            self._has_warned = True
        elif not self._is_told:
            log.info("memory of the card after a step: step=%d reserved_bytes=%d planned_bytes=%d",
                     taken.step, reserved, self._planned_bytes)  # fmt: skip
        self._is_told = True


def planned_bytes(config: Config) -> int:
    """Return the bytes that a rank takes of its card by the plan, as `bin/card` compares them.

    Context and libraries are among them: torch's allocator has the workspaces of the libraries.

    Raises:
        ConfigError: If a model's folder has no readable config.json or safetensors file.
    """
    terms = needs(config, models_of(config), on_cards=True).rank
    return sum((terms | card_bytes(config, "trainer", terms)).values())
