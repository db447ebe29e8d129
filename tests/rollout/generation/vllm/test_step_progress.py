"""Progress of an engine's steps, as hang detection needs it."""

from pipeline.rollout.generation.vllm.step_progress import StepProgress


def test_new_tokens_are_progress_and_counted_once_ended_or_not():
    progress = StepProgress()

    assert progress.look(4, 20) and progress.tokens == 4
    assert not progress.look(4, 20)
    progress.end(4)
    assert progress.look(3, 10), "three of others"
    assert progress.tokens == 7


def test_a_long_prompt_is_progress_without_a_token():
    progress = StepProgress()

    assert [progress.look(0, computed) for computed in (512, 1024, 1024, 1536)] == [True, True, False, True]
    assert progress.tokens == 0


def test_responses_that_take_the_cache_from_each_other_make_no_progress():
    """Each computes again what it lost to the other, step after step."""
    progress = StepProgress()
    progress.look(10, 900)

    found = [progress.look(10, computed) for _ in range(50) for computed in (500, 900)]

    assert not any(found)
    assert progress.look(11, 600), "a token ends it"
    assert progress.look(11, 700), "what is computed since counts from there"


def test_dropped_responses_hide_no_token_of_the_others():
    progress = StepProgress()
    progress.look(50, 100)

    progress.drop(10)

    assert progress.look(11, 20)
    assert progress.tokens == 51


def test_after_an_update_keys_and_values_are_computed_again_and_that_is_progress():
    progress = StepProgress()
    progress.look(10, 900)

    progress.drop(10)

    assert progress.look(10, 400)
