"""The plan of the evaluations of a configuration: held-out prompts, their tickets, and the digest of all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence

from pipeline.config.evaluation import held_out, names_of, prompts_per_ticket
from pipeline.config.rewards import part_names, scoring
from pipeline.config.schema import Config
from pipeline.config.types import stop_sequences_of
from pipeline.errors import ConfigError
from pipeline.prompts.files import files_of
from pipeline.prompts.source import PromptSource
from pipeline.telemetry.evaluations import TOTAL, Evaluation, PromptResult, summary


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The held-out prompts and their tickets.

    Attributes:
        every: Versions per evaluation.
        num_generations: Responses to a prompt.
        k: The k of pass@k.
        names: Name of each file.
        prompts: Prompts of each file.
        prompts_per_ticket: Most prompts of a ticket.
        digest: Digest of the files' bytes and of all settings that change a number.
    """

    every: int
    num_generations: int
    k: int
    names: tuple[str, ...]
    prompts: tuple[int, ...]
    prompts_per_ticket: int
    digest: str

    @classmethod
    def of(cls, config: Config) -> EvaluationPlan | None:
        """Return the plan of a configuration; None if it names no file.

        Raises:
            ConfigError: If a file cannot be read, or has no prompt.
        """
        evaluation = config.evaluation
        if not evaluation.files:
            return None
        rollout = config.rollout
        # A key of later releases is no part of the digest at its default.
        new = set() if evaluation.min_p is not None else {"min_p"}
        settings = evaluation.model_dump(mode="json", exclude={"files", "every", "keep_best", "pass_function", *new})
        # Its place, as `scoring` leaves labels out.
        passing = None if evaluation.pass_function is None else part_names(config).index(evaluation.pass_function)
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr([
            settings, passing, prompts_per_ticket(config), config.daemon.seed, config.lengths, rollout.temperature,
            rollout.top_p, rollout.top_k, stop_sequences_of(rollout.stop_token_ids), rollout.stop,
            rollout.special_tokens, scoring(config), held_out(config, "").model_dump(mode="json", exclude={"shuffle"}),
            rollout.environment, rollout.max_turns, rollout.max_turn_tokens,
            *([rollout.min_p] if rollout.min_p else []),
            *([rollout.long_prompts] if rollout.long_prompts != "set_aside" else []),
        ]).encode())  # fmt: skip
        prompts = []
        for file in evaluation.files:
            section = held_out(config, file)
            try:
                with contextlib.closing(PromptSource(section, 0)) as source:
                    prompts.append(len(source))
                for path in files_of(section.files[0]):
                    with path.open("rb") as content:
                        digest.update(hashlib.file_digest(content, "blake2b").digest())
            except ConfigError as error:
                raise ConfigError(str(error).replace("prompts.path:", "evaluation.files:", 1)) from error
        return cls(
            evaluation.every,
            evaluation.num_generations,
            evaluation.pass_k or evaluation.num_generations,
            tuple(names_of(evaluation.files)),
            tuple(prompts),
            prompts_per_ticket(config),
            digest.hexdigest(),
        )

    def tickets(self) -> list[tuple[int, int, int]]:
        """Return file, first position and prompts of each ticket."""
        size = self.prompts_per_ticket
        return [
            (file, position, min(size, prompts - position))
            for file, prompts in enumerate(self.prompts)
            for position in range(0, prompts, size)
        ]

    def evaluation(
        self, version: int, fingerprint: str, results: Sequence[Sequence[PromptResult]], unix_s: float = 0.0
    ) -> Evaluation:
        """Return the evaluation of these results.

        Args:
            version: Policy version.
            fingerprint: Fingerprint of the weights, in hexadecimal.
            results: Results of each file, in any order; the evaluation does not depend on it.
            unix_s: Unix time.
        """
        ordered = [sorted(found, key=lambda result: result.position) for found in results]
        files = [
            summary(name, found, prompts, self.k)
            for name, found, prompts in zip(self.names, ordered, self.prompts, strict=True)
        ]
        every = [result for found in ordered for result in found]
        total = summary(TOTAL, every, sum(self.prompts), self.k)
        return Evaluation(
            version, fingerprint, self.digest, round(unix_s, 3), self.num_generations, self.k, total, files
        )
