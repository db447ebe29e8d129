"""An environment with one tool: a calculator that adds up the digits of its call.

The task is the sum of the digits of the prompt. The model writes these digits, in any order, as its call; the
calculator answers with their sum and `>`; then the model writes the answer. A row is two responses.
"""

from pipeline import Turn


class Calculator:
    """The environment of one row."""

    async def reset(self, prompt, answer, columns):
        """Begin a row: the digits to add up, such as ``385>``, and their sum."""
        self.digits, self.right, self.result = sorted(prompt.rstrip(">")), answer, None

    async def step(self, response):
        """Answer the call with its result, and the answer with the end of the row."""
        if self.result is not None:
            # The share of characters in their places: an answer that is nearly right is worth something.
            hits = sum(one == other for one, other in zip(response, self.right, strict=False))
            return Turn(reward=0.7 * hits / max(len(response), len(self.right)), done=True)
        if not response.isdigit():
            # No call: the row ends with reward 0.
            return Turn(done=True, tool_failed=True)
        self.result = sum(map(int, response))
        return Turn(observation=f"{self.result}>", reward=0.3 * (sorted(response) == self.digits))
