"""Experience made up for tests: random values, ragged lengths, in the maker's layout or any other."""

import torch

from pipeline.experience import codec
from pipeline.experience.types import Experience, ExperienceVL


def stored(experience, nbytes=1 << 24):
    """Return the reader of an extent that holds the experience."""
    memory = memoryview(bytearray(nbytes))
    encoded = codec.encode(experience, memory)
    return codec.ExtentReader(memory[: encoded.nbytes], checksum=encoded.checksum)


def through(*experiences):
    """Return the batch of all rows, through an extent of each experience."""
    return codec.gather_padded([(reader, range(reader.header.rows)) for reader in map(stored, experiences)])


def made_up(rows=4, prompt=5, actions=6, *, seed=0, ppo=True, holes=False, dtype=torch.float32):
    """Return a batch as a maker gives it: prompts padded on the left, responses on the right."""
    rng = torch.Generator().manual_seed(seed)
    width = prompt + actions
    prompts = torch.randint(1, prompt + 1, (rows,), generator=rng)
    responses = torch.randint(1, actions + 1, (rows,), generator=rng)
    columns = torch.arange(width)
    attention = (columns >= prompt - prompts[:, None]) & (columns < prompt + responses[:, None])
    action_mask = columns[prompt:] < prompt + responses[:, None]
    if holes:
        action_mask = action_mask & (torch.rand((rows, actions), generator=rng) < 0.7)
        action_mask[:, 0] = True

    def per_action():
        return (torch.randn((rows, actions), generator=rng) * action_mask).to(dtype)

    return Experience(
        sequences=torch.randint(3, 99, (rows, width), generator=rng) * attention,
        action_log_probs=per_action(),
        base_action_log_probs=per_action(),
        values=per_action() if ppo else torch.randn(rows, generator=rng),
        kl=per_action() if ppo else torch.randn(rows, generator=rng),
        advantages=per_action() if ppo else torch.randn(rows, generator=rng),
        reward=torch.randn(rows, generator=rng),
        attention_mask=attention.long(),
        action_mask=action_mask,
        info={"score": torch.randn(rows, generator=rng), "group_mixed": torch.rand(rows, generator=rng) < 0.5},
    )


def made_up_vl(rows=4, *, seed=0, dtype=torch.float32, width=6, counted=True, raw=False, **text):
    """Return a batch as a vision-language maker gives it: none to three images a row, now and then a video."""
    rng = torch.Generator().manual_seed(seed + 1)
    plain = made_up(rows, seed=seed, **text)
    vision = {}
    for kind, most in (("image", 3), ("video", 1)):
        counts = torch.randint(0, most + 1, (rows,), generator=rng) if counted else torch.ones(rows, dtype=torch.int64)
        grids = torch.randint(1, 4, (int(counts.sum()), 3), generator=rng)
        pixels = torch.randint(0, 256, (int(grids.prod(dim=1).sum()), width), generator=rng).to(dtype)
        if counted:
            plain.info[f"{kind}_num"] = counts.float()
        if len(grids):
            vision[f"{kind}_grid_thws"] = grids
            vision["pixel_values" if kind == "image" else "pixel_values_videos"] = pixels
    images = len(vision.get("image_grid_thws", ()))
    if raw:
        vision["raw_images"] = [f"images/{i}.png" if i % 2 else bytes([i, 255, 0]) for i in range(images)]
    return ExperienceVL(**vars(plain), **vision)
