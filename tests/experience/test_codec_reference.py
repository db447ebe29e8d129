"""The encoder writes the bytes that a slow reference writes, in any layout of the padding."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.experience import codec
from pipeline.experience.types import Experience
from tests.support.codec_reference import extent_of

LAYOUTS = ("left", "maker", "right", "holes", "no mask")
MASKS = (torch.int64, torch.bool, torch.int32, torch.uint8, torch.float32)


@st.composite
def experiences(draw, most_rows=6, most_columns=12, masks=MASKS, action_masks=MASKS):
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    rows = draw(st.integers(1, most_rows))
    actions, prompt = draw(st.integers(1, most_columns)), draw(st.integers(0, most_columns))
    width, columns = prompt + actions, torch.arange(prompt + actions)

    def numbers(least, most):
        return torch.randint(least, most + 1, (rows, 1), generator=rng)

    layout = draw(st.sampled_from(LAYOUTS))
    taken = numbers(0, actions) if draw(st.booleans()) else numbers(1, actions)
    if layout == "maker" and prompt:
        mask = (columns >= prompt - numbers(1, prompt)) & (columns < prompt + taken)
        action_mask = (columns >= prompt) & mask
    elif layout == "right":
        mask = columns < numbers(max(prompt, 1), width)
        action_mask = mask & (columns >= width - taken)
    else:
        mask = columns >= width - numbers(1, width)
        if layout == "holes":
            mask[:, :-1] &= torch.rand((rows, width - 1), generator=rng) < 0.7
        action_mask = columns >= width - taken
        # With holes, actions may also be in padding: every row ends in the last column.
        if layout != "holes" or draw(st.booleans()):
            action_mask = action_mask & mask
        if layout == "holes":
            action_mask = action_mask & (torch.rand((rows, width), generator=rng) < 0.7)
    action_mask = action_mask[:, prompt:]
    if draw(st.booleans()):
        action_mask = action_mask.contiguous()

    def field(dtype=torch.float32):
        made = torch.randn((rows, actions), generator=rng).to(dtype)
        if draw(st.integers(0, 9)) == 0:
            made = made.t().contiguous().t()
        return made.requires_grad_() if draw(st.integers(0, 9)) == 0 else made

    return Experience(
        sequences=torch.randint(0, 99, (rows, width), generator=rng),
        attention_mask=None if layout == "no mask" else mask.to(draw(st.sampled_from(masks))),
        action_mask=None if draw(st.integers(0, 5)) == 0 else action_mask.to(draw(st.sampled_from(action_masks))),
        action_log_probs=field(),
        kl=field(draw(st.sampled_from((torch.float32, torch.bfloat16)))),
        values=torch.randn(rows, generator=rng) if draw(st.booleans()) else field(),
        reward=torch.randn(rows, generator=rng) if draw(st.booleans()) else field(),
        info={"score": torch.randn((rows, 2), generator=rng)} if draw(st.booleans()) else None,
    )


def check(experience):
    memory = memoryview(bytearray(1 << 18))

    encoded = codec.encode(experience, memory)

    expected = extent_of(experience)
    assert encoded.nbytes == len(expected)
    wrong = [place for place, byte in enumerate(expected) if byte is not None and memory[place] != byte]
    assert not wrong


@settings(max_examples=120)
@given(experiences())
def test_any_layout_has_the_bytes_of_the_reference(experience):
    check(experience)
