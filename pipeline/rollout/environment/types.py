"""The interface of an environment; docs/environments.md describes how to write one. It loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer of an environment to one response.

    Attributes:
        observation: Text that the model sees next, such as the output of a tool; not used when `done`.
        reward: Reward of this response; the reward of a row is the sum of those of its turns.
        done: Whether the row has ended.
        tool_failed: Whether the response called a tool in vain; counted, and without any other effect.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    tool_failed: bool = False


class Environment(Protocol):
    """The environment of one row. `rollout.environment` names a class or function without arguments that makes one.

    It runs in a process of its own beside the worker's, one object a row. The same responses must get the same answers:
    a row is repeated from its start after the death of a process. Methods may also be plain functions.
    """

    async def reset(self, prompt: Any, answer: Any, columns: Mapping[str, Any]) -> None:
        """Begin a row.

        Args:
            prompt: The prompt as the file has it, a text or chat messages.
            answer: The prompt's right answer; None if the file has none.
            columns: Further columns of its line.
        """
        ...

    async def step(self, response: str) -> Turn:
        """Answer a response.

        Args:
            response: The text that the model wrote since the last observation, special tokens included, but ends and
                padding.

        Returns:
            Observation, reward, and whether the row has ended.
        """
        ...
