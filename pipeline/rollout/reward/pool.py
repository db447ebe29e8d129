"""Reward functions in processes that can be killed: a function that hangs or crashes costs its own row only.

A batched function that hangs or crashes costs the rows of its call, which are all of a ticket's.

    worker                                scorer (`pipeline.rollout.reward.process`), one piece of work at a time
      RowsToScore                 ----->    calls the functions
                                  <-----    Ready once, then RowsScored each time

Processes, their links and ends are those of `pipeline.runtime.pool`. A scorer ends a row by itself after `timeout_s`:
it logs the stack of the hang and exits. The worker waits a little longer, then kills a scorer that has not exited.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from pipeline.config.rewards import RewardConfig, reward_of, to_json
from pipeline.config.user_modules import PROMPT
from pipeline.progress import Telemetry
from pipeline.rollout.reward.given_rows import GivenRows, packed
from pipeline.rollout.reward.process import prepare
from pipeline.rollout.reward.row_rewards import RewardProblems, RowRewards
from pipeline.rollout.reward.wire import RowScore, RowsScored, RowsToScore, messages
from pipeline.runtime.pool import STARTUP_TIMEOUT_S, Ended, PoolProcess, ProcessPool, how_ended
from pipeline.runtime.pool_process import Ready

_GRACE_S = 2.0
_STEP_S = 1.0
_TIMEOUTS_IN_A_ROW = 3
# No library threads: a process with threads cannot be forked safely.
_VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class RewardPool(RowRewards):
    """Reward functions by name, with the interface of a reward model; a row without a reward scores NaN.

    Not thread-safe; close it, or use it as a context manager. Its processes die with this one.

    See `RowRewards` for attributes.

    Args:
        functions: A name or ``module:function`` each; their results add up.
        tokenizer: Directory of the tokenizer that is passed to the functions.
        timeout_s: Longest time the functions may take for one row, and one that is batched or async for all rows.
        processes: Rows that are scored at the same time.
        telemetry: Told also of progress, at least once a second while rows are scored.
        may_fork: Whether the processes may be forks of this one, which has torch loaded and no state that a function
            must not have; a fork is refused, and a new process started, where it has threads or a GPU.
        weights: As for `RowRewards`.
        labels: As for `RowRewards`.
        hidden: Ids of special tokens that are left out of the text of a response; None: all of them.
    """

    def __init__(
        self,
        functions: Sequence[RewardConfig | str],
        tokenizer: str,
        *,
        timeout_s: float,
        processes: int = 1,
        telemetry: Telemetry = Telemetry.none(),
        may_fork: bool = False,
        weights: Sequence[float] | None = None,
        labels: Sequence[str] = (),
        hidden: Sequence[int] | None = None,
    ) -> None:
        rewards = [reward_of(one) for one in functions]
        super().__init__(
            [reward.name for reward in rewards],
            telemetry,
            weights=weights,
            labels=labels,
            problems=RewardProblems(telemetry),
        )
        self._timeout_s = timeout_s
        self._pool: ProcessPool[RowsScored] = ProcessPool(
            prepare,
            [to_json(rewards), tokenizer, timeout_s, None if hidden is None else list(hidden)],
            messages,
            processes=processes,
            title="reward",
            late="the reward functions were not loaded",
            loads="rewards: the process that loads them",
            telemetry=telemetry,
            variables=_VARIABLES,
            may_fork=may_fork,
        )

    def wait_ready(self, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
        """Wait until every scorer has loaded the functions; see `ProcessPool.wait_ready` for errors."""
        self._pool.wait_ready(self._pool.step, timeout_s)

    def _scores(self, rows: GivenRows, first: int) -> list[RowScore]:
        # The functions' parameters: a scorer that has ended has told them.
        if (facts := self._pool.processes[0].facts) is None:
            self.wait_ready()
            facts = self._pool.processes[0].facts or {}
        columns, left_out = None, () if facts["wants_prompt"] else (PROMPT,)
        if rows.columns is not None and (facts["wants_columns"] or facts["wants_prompt"]):
            columns = [{name: value for name, value in row.items() if name not in left_out} for row in rows.columns]
        vision = rows.vision if facts["sees_images"] else None
        return self._score(rows._replace(vision=vision, columns=columns), facts["together"])

    def close(self) -> None:
        """End the processes, and all that the functions have started."""
        self._pool.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _score(self, rows: GivenRows, together: list[int]) -> list[RowScore]:
        """Return the scores of rows; `together` are the numbers of the functions that score all rows in one call."""
        alone, count = [at for at in range(len(self._names)) if at not in together], len(rows.input_ids)
        # All rows of a function that needs them first: it takes longest, beside the other rows in other processes.
        work = [RowsToScore([at], count, packed(rows)) for at in together if count]
        work += [RowsToScore(alone, 1, packed(rows.part(slice(row, row + 1)))) for row in range(count) if alone]
        done = self._work(work)
        joint, own = done[: len(together)], done[len(together) :]
        scores = []
        for row in range(count):
            found = [([at], of_rows[row]) for at, of_rows in zip(together, joint, strict=True)]
            found += [(alone, own[row][0])] if alone else []
            if problem := next((score for _, score in found if score.problem), None):
                scores.append(problem)
                continue
            parts, numbers = [0.0] * len(self._names), [dict[str, float]() for _ in self._names]
            for functions, score in found:
                for place, at in enumerate(functions):
                    parts[at] = score.parts[place]
                    numbers[at] = score.numbers[place] if score.numbers else {}
            scores.append(RowScore(parts=parts, numbers=numbers))
        return scores

    def _work(self, work: list[RowsToScore]) -> list[list[RowScore]]:
        """Return the scores of each piece of work."""
        scores: dict[int, list[RowScore]] = {}
        waiting = collections.deque(range(len(work)))
        in_hand: dict[PoolProcess[RowsScored], int] = {}
        tried_again: set[int] = set()
        timeouts = 0
        while len(scores) < len(work):
            for scorer in self._pool.processes:
                if waiting and scorer.is_ready and scorer not in in_hand:
                    in_hand[scorer] = waiting.popleft()
                    scorer.watch(self._timeout_s + _GRACE_S)
                    scorer.post(work[in_hand[scorer]])
            for scorer, event in self._pool.step(_STEP_S):
                if isinstance(event, Ready) or scorer not in in_hand:
                    continue
                at = in_hand.pop(scorer)
                if isinstance(event, RowsScored):
                    scorer.watch(math.inf)
                    scores[at] = event.rows
                else:
                    verdict = self._verdict(event, work[at])
                    if verdict.problem != "timeout" and at not in tried_again:
                        # The scorer may have died before it read the rows.
                        tried_again.add(at)
                        waiting.appendleft(at)
                        continue
                    scores[at] = [verdict] * work[at].count
                if work[at].count == 1 or isinstance(event, Ended):
                    timeouts = timeouts + 1 if scores[at][0].problem == "timeout" else 0
            # Rows in hand at the same time count once: each process takes one of them.
            if timeouts >= _TIMEOUTS_IN_A_ROW * len(self._pool.processes):
                text = f"not tried: {timeouts} rows in a row took longer than {self._timeout_s:g} s"
                late = RowScore(problem="timeout", text=text)
                scores |= {at: [late] * work[at].count for at in waiting}
                waiting.clear()
        return [scores[at] for at in range(len(work))]

    def _verdict(self, ended: Ended, work: RowsToScore) -> RowScore:
        names = " or ".join(self._names[at] for at in work.functions)
        if ended.took_s >= self._timeout_s:
            said = f"{names} gave no score within {self._timeout_s:g} s (rollout.reward_timeout_s)"
            return RowScore(problem="timeout", text=said, cause=said)
        said = f"the process that called {names} {how_ended(ended.code)}"
        return RowScore(problem="exception", text=said, cause=said)
