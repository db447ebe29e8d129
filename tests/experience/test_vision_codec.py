"""Vision-language experience through the bytes of an extent and back, bit for bit against batching's own answer."""

import dataclasses
import io
import pickle
import random
import re

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.config.lengths import extent_bytes_bound, row_bytes_bound
from pipeline.errors import ArenaFullError, DecodeError, FieldError, ShapeError
from pipeline.experience import codec
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.extent_format import align, read_header
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import ExperienceVL
from pipeline.experience.vision_rows import VisionRows
from pipeline.runtime.messages import Sealed
from pipeline.trainer.state import digest_after
from tests.support.experiences import made_up, made_up_vl, stored, through
from tests.support.protocol import House

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def batched(parts):
    """The batch that batching makes of the same rows, through items."""
    items = [item for experience, rows in parts for item in map(split_experience_batch(experience).__getitem__, rows)]
    return make_experience_batch(remove_padding_in_sequences(items))


def assert_same(batch, expected):
    assert type(batch) is type(expected)
    for field in dataclasses.fields(expected):
        assert_same_value(field.name, getattr(batch, field.name), getattr(expected, field.name))


def assert_same_value(name, value, expected):
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), name
        for key in expected:
            assert_same_value(f"{name}[{key!r}]", value[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert value.dtype == expected.dtype, name
        assert torch.equal(value, expected), name
    else:
        assert value == expected, name


def vl(counts, *, grids=None, pixels=None, raw=None, **changes):
    """Rows with images of 1 x 2 x 2 patches each; patch p of the batch is full of p."""
    images = sum(counts)
    experience = made_up(rows=len(counts))
    experience.info["image_num"] = torch.tensor(counts, dtype=torch.float32)
    fields = {
        "pixel_values": torch.arange(images * 4.0)[:, None].repeat(1, 3) if pixels is None else pixels,
        "image_grid_thws": torch.tensor([[1, 2, 2]] * images) if grids is None else grids,
        "raw_images": raw,
    }
    if not images:
        fields = {"raw_images": raw}
    return ExperienceVL(**{**vars(experience), **fields, **changes})


def groups(prompts, size):
    """`size` responses to each prompt, which share its images; prompt i has i of them, patch p is full of p."""
    rows = VisionRows.of(vl([*range(prompts)])).repeated(size)
    counts = rows.counts()["image_num"].numpy()
    return dataclasses.replace(RaggedRows.of(made_up(prompts * size)).with_info("image_num", counts), vision=rows)


def png(mode="RGB", size=(3, 2)):
    """A picture of random bytes."""
    picture = Image.frombytes("RGBA", size, random.Random(0).randbytes(4 * size[0] * size[1])).convert("RGB")
    return picture.convert(mode) if mode != "LA" else picture.convert("L").convert("LA")


# Rows that share their images.


def test_rows_that_share_their_images_share_them_in_the_extent_and_in_the_batch():
    rows = groups(3, 8)
    single = stored(dataclasses.replace(rows, vision=VisionRows.of(rows.vision_experience()))).memory
    reader = stored(rows)
    pixels = 3 * 4 * 3 * 4
    assert len(single) - len(reader.memory) > 7 * pixels

    batch = codec.gather([(reader, [23, 3, 9]), (stored(vl([1])), [0]), (reader, [16, 8, 15])])

    of_row = batch.vision.pixel_values
    assert [None if row is None else row[:, 0].tolist() for row in of_row] == [
        [*range(4, 12)], None, [*range(4)], [*range(4)], [*range(4, 12)], [*range(4)], [*range(4)],
    ]  # fmt: skip
    assert batch.vision.firsts("pixel_values") == [0, 1, 2, 3, 0, 2, 2]
    assert [0 if grids is None else len(grids) for grids in batch.vision.image_grid_thws] == [2, 0, 1, 1, 2, 1, 1]
    assert batch.columns["info.image_num"].tolist() == [2, 0, 1, 1, 2, 1, 1]
    assert sum(map(len, batch.vision.own("pixel_values"))) == 8 + 4 + 4
    # A padded batch has the pixels of each row.
    padded = codec.gather_padded([(reader, [23, 3, 9]), (stored(vl([1])), [0]), (reader, [16, 8, 15])])
    assert_same(padded, batch.padded())
    # Rows of a batch go into an extent as they came out of one.
    again = codec.gather([(stored(batch), [*range(7)])])
    assert again.vision.firsts("pixel_values") == [0, 1, 2, 3, 0, 2, 2]
    assert_same(again.padded(), padded)


def test_shared_pixels_are_moved_to_a_device_once():
    rows = groups(3, 4)
    moved = rows.to_device(torch.device("meta"))

    assert moved.moved_vision.pixel_values[8].is_meta and not moved.moved_vision.image_grid_thws[8].is_meta
    assert moved.moved_vision.pixel_values[8] is moved.moved_vision.pixel_values[11]
    assert rows.to_device(torch.device("cpu")).moved_vision.firsts("pixel_values") == rows.vision.firsts("pixel_values")
    whole = moved.vision_experience()
    assert whole.image_grid_thws.is_meta and whole.pixel_values.is_meta and len(whole.pixel_values) == 4 * (4 + 8)
    assert moved.without("reward").moved_vision is None


def test_the_digest_of_what_was_trained_on_is_that_of_copies_and_reads_shared_pixels_once(monkeypatch):
    rows, read, digest = groups(3, 4), [], xxhash.xxh3_64_digest
    monkeypatch.setattr(xxhash, "xxh3_64_digest", lambda data: read.append(data.nbytes) or digest(data))

    of_shared = digest_after(0, [rows])

    assert sum(read) == (4 + 8) * 3 * 4 + (1 + 2) * 3 * 8
    assert of_shared == digest_after(0, [rows.padded()])
    rows.vision.pixel_values[5] = rows.vision.pixel_values[5] + 1
    assert of_shared != digest_after(0, [rows])


def test_a_pickle_of_rows_has_each_image_once():
    experience = vl([1] * 64, pixels=torch.rand(256, 50))
    pixels = experience.pixel_values.nbytes
    rows, shared = RaggedRows.of(experience), groups(64, 2)

    for each in (rows, codec.gather([(stored(rows), [*range(64)])])):
        assert len(pickle.dumps(each)) < 1.3 * pixels + 64 * 700
        assert_same(pickle.loads(pickle.dumps(each)).padded(), each.padded())
    again = pickle.loads(pickle.dumps(shared))
    assert again.vision.firsts("pixel_values") == shared.vision.firsts("pixel_values")
    assert_same(again.padded(), shared.padded())


@pytest.mark.parametrize(
    ("pixels", "grids"),
    [
        (lambda block: [block[:4], block[:4]], [[1, 2, 2], [1, 1, 4]]),
        (lambda block: [block[:4], block[::2]], [[1, 2, 2]] * 2),
        (lambda block: [block[:4], block[:4].view(torch.int32)], [[1, 2, 2]] * 2),
    ],
    ids=["grids", "strides", "dtype"],
)
def test_rows_of_one_memory_that_are_not_the_same_are_not_shared(pixels, grids):
    """As a caller may make them: each row comes out as it went in, or is refused."""
    given = VisionRows(
        pixels(torch.arange(24.0).reshape(8, 3)), [torch.tensor([of_row]) for of_row in grids], *[[None] * 2] * 3
    )
    rows = dataclasses.replace(RaggedRows.of(made_up(2)), vision=given)

    assert given.firsts("pixel_values") == [0, 1]
    if given.pixel_values[1].is_floating_point():
        for name in ("pixel_values", "image_grid_thws"):
            out = getattr(codec.gather([(stored(rows), [0, 1])]).vision, name)
            assert [of_row.tolist() for of_row in out] == [of_row.tolist() for of_row in getattr(given, name)]
    else:
        with pytest.raises(FieldError, match=r"^pixel_values is torch.float32 \(3,\) in one row, torch.int32"):
            codec.Encoding(rows)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"pixel_values": [None, torch.ones(6, 3)]},
            FieldError,
            "row 1: pixel_values has 6 rows, image_grid_thws acco",
        ),
        ({"image_grid_thws": [None, None]}, FieldError, "row 1: image_grid_thws is None, pixel_values is not"),
        ({"pixel_values": [None, None]}, FieldError, "row 1: pixel_values is None, image_grid_thws is not"),
        ({"image_grid_thws": [None, torch.tensor([1, 2, 2])]}, ShapeError, r"of shape \(3,\) is not \(images, 3\)"),
        ({"raw_images": [None, ["a", "b"]]}, FieldError, "row 1: raw_images has 2 images, image_grid_thws has 1"),
    ],
)
def test_rows_that_do_not_account_for_each_other_do_not_make_an_extent(changes, error, text):
    """As a caller may make them: a reader would take them for damage."""
    rows = groups(2, 1)

    with pytest.raises(error, match=text):
        codec.Encoding(dataclasses.replace(rows, vision=dataclasses.replace(rows.vision, **changes)))


def test_rows_whose_pixels_differ_in_kind_do_not_make_an_extent():
    rows = groups(3, 2)
    rows.vision.pixel_values[4] = torch.ones(8, 2)

    with pytest.raises(FieldError, match=r"^pixel_values is torch.float32 \(3,\) in one row, .* \(2,\) in another$"):
        codec.Encoding(rows)


# Any rows of any appends, in any order.


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 999), st.lists(st.integers(0, 4), min_size=1, max_size=6)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_rows_of_any_appends_come_out_as_batching_would_put_them(drawn, dtype, counted, ppo, raw):
    appends = [
        made_up_vl(rows, seed=seed, dtype=dtype, counted=counted, raw=raw, ppo=ppo, prompt=3, actions=4)
        for rows, seed, _ in drawn
    ]
    readers = [stored(experience, 1 << 14) for experience in appends]

    # Four batches of the same extents, which the leases of a run are too.
    for arranged in (list, sorted, set, lambda rows: rows[::-1]):
        chosen = [list(arranged([place % rows for place in places])) for rows, _, places in drawn]
        batch = codec.gather_padded(list(zip(readers, chosen, strict=True)))
        assert_same(batch, batched(zip(appends, chosen, strict=True)))


def test_images_stay_with_their_rows():
    first, second = vl([2, 0, 1]), vl([0, 3])

    batch = codec.gather_padded([(stored(first), [2, 1]), (stored(second), [1]), (stored(first), [0])])

    # Patches of row 2 of the first are 8 to 11, of row 0 of it 0 to 7.
    assert batch.pixel_values[:, 0].tolist() == [8, 9, 10, 11, *range(12), *range(8)]
    assert batch.info["image_num"].tolist() == [1, 0, 3, 2]
    assert batch.info["image_num"].dtype is torch.float32
    assert batch.image_grid_thws.tolist() == [[1, 2, 2]] * 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pixels_of_each_dtype_come_back_bit_for_bit(dtype):
    bits = torch.arange(256, dtype=torch.uint8).repeat(16)
    experience = vl([3, 5], pixels=bits.view(dtype).reshape(32, -1))

    batch = through(experience)

    assert batch.pixel_values.dtype is dtype
    assert torch.equal(batch.pixel_values.view(torch.uint8).flatten(), bits)


def test_rows_of_megabytes_are_stored_without_a_copy_too_many():
    pixels = torch.randn(4 * 4096, 588).to(torch.bfloat16)  # 4 rows of 4.6 MiB
    experience = vl([1, 1, 1, 1], pixels=pixels, grids=torch.tensor([[1, 64, 64]] * 4))

    reader = stored(experience, 20 << 20)
    batch = codec.gather_padded([(reader, [3, 0, 1])])

    assert len(reader.memory) < pixels.nbytes + 4096
    assert torch.equal(batch.pixel_values, torch.cat([pixels[3 * 4096 :], pixels[: 2 * 4096]]))


def test_a_batch_shares_no_memory_with_its_extents():
    memory = memoryview(bytearray(1 << 16))
    encoded = codec.encode(experience := vl([1, 2]), memory)
    batch = codec.gather_padded([(codec.ExtentReader(memory[: encoded.nbytes]), [0, 1])])

    memory[:] = bytes(len(memory))

    assert torch.equal(batch.pixel_values, experience.pixel_values)
    assert torch.equal(batch.image_grid_thws, experience.image_grid_thws)


def test_pixels_that_are_a_strided_view_are_stored_as_they_read():
    wide = torch.randn(8, 10)

    batch = through(vl([2], pixels=wide[:, ::2]))

    assert torch.equal(batch.pixel_values, wide[:, ::2])


# Extents with images and extents without.


def test_rows_without_images_batch_with_rows_that_have_some():
    batch = through(vl([0, 0]), vl([1, 0], pixels=torch.ones(4, 5, dtype=torch.bfloat16)))

    assert batch.pixel_values.shape == (4, 5)
    assert batch.pixel_values.dtype is torch.bfloat16
    assert batch.info["image_num"].tolist() == [0, 0, 1, 0]


def test_a_batch_of_rows_without_images_has_none():
    batch = codec.gather_padded([(stored(vl([1, 0], pixels=torch.ones(4, 5))), [1]), (stored(vl([1, 0])), [1])])

    assert isinstance(batch, ExperienceVL)
    assert batch.pixel_values is None
    assert batch.image_grid_thws is None
    assert batch.info["image_num"].tolist() == [0, 0]


def test_counts_of_any_number_format_come_out_as_float32():
    batch = through(vl([0, 0], info={"image_num": torch.tensor([0, 0])}))

    assert batch.info["image_num"].dtype is torch.float32


def test_text_and_vision_language_do_not_mix():
    with pytest.raises(FieldError, match="1 of 2 extents hold an ExperienceVL; a batch is of one kind"):
        through(made_up(), vl([1, 0]))


def test_pixels_of_two_dtypes_are_refused_with_both():
    with pytest.raises(FieldError, match=r"pixel_values is float16 \(3,\).*float32 \(3,\)"):
        through(vl([1]), vl([1], pixels=torch.ones(4, 3).half()))


# Experience that is refused before it is written.


@pytest.mark.parametrize(
    ("experience", "error", "text"),
    [
        (vl([2, 1], info=None), FieldError, "info['image_num'] is missing"),
        (vl([1, 1], pixels=torch.ones(9, 3)), FieldError, "pixel_values has 9 rows, image_grid_thws accounts for 8"),
        (vl([1, 1], image_grid_thws=None), FieldError, "image_grid_thws is None, pixel_values is not"),
        (vl([1], grids=torch.tensor([[1, -2, -2]])), FieldError, "image_grid_thws is [[1, -2, -2]]"),
        (vl([1], grids=torch.tensor([[1.0, 2, 2]])), FieldError, "image_grid_thws is [[1.0, 2.0, 2.0]]"),
        (vl([1], grids=torch.tensor([1, 2, 2])), ShapeError, "image_grid_thws of shape (3,) is not (images, 3)"),
        (vl([1], grids=[[1, 2, 2]]), FieldError, "image_grid_thws: only tensors are stored, got list"),
        (vl([1], pixels=[1, 2, 3, 4]), FieldError, "pixel_values: only tensors are stored, got list"),
        (vl([1], pixels=torch.ones(4)), ShapeError, "pixel_values: (4,), expected (patches, D)"),
        (vl([1], pixels=torch.ones(4, 3, dtype=torch.complex64)), FieldError, "complex64 cannot be stored"),
        (vl([1, 1], info={"image_num": torch.tensor([3.0, -1.0])}), FieldError, "row 1: info['image_num'] is -1.0"),
        (vl([1, 1], info={"image_num": torch.tensor([1.5, 0.5])}), FieldError, "row 0: info['image_num'] is 1.5"),
        (vl([1], info={"image_num": torch.tensor([float("nan")])}), FieldError, "row 0: info['image_num'] is nan"),
        (vl([1], info={"image_num": torch.tensor([float("inf")])}), FieldError, "row 0: info['image_num'] is inf"),
        (vl([1, 1], info={"image_num": torch.tensor([2.0])}), ShapeError, "info['image_num']: (1,) for 2 rows"),
        (vl([1, 1], info={"image_num": torch.tensor([1.0, 2.0])}), FieldError, "counts 3 grids, the batch has 2"),
        (vl([1, 0], raw=[[7], None]), FieldError, "raw_images: row 0 has a int"),
        (vl([0, 1], raw=[None, [object()]]), FieldError, "raw_images: row 1 has a object"),
        (vl([1], raw=[["a\udcff"]]), FieldError, "row 0 has a path that is not valid text"),
        (vl([1], raw=[[png("CMYK")]]), FieldError, "row 0 has a Image of mode CMYK, which PNG would change"),
    ],
)  # fmt: skip
def test_fields_that_do_not_account_for_each_other_are_refused_by_name(experience, error, text):
    with pytest.raises(error, match=re.escape(text)):
        codec.encode(experience, memoryview(bytearray(1 << 16)))


def test_a_row_that_takes_more_room_than_was_kept_is_told_what_to_raise():
    room = extent_bytes_bound(2, row_bytes_bound(11))
    large = vl([1, 1], pixels=torch.ones(8, 1000))

    with pytest.raises(
        ArenaFullError, match=rf"[\d,]+ B does not fit: {room:,} B reserved for 2 rows; raise buffer.ro"
    ):
        codec.encode(large, memoryview(bytearray(room)))


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_room_for_text_and_pixels_is_enough(rows):
    experience = vl([3] * rows, raw=[["x" * 50] * 3] * rows)
    # 3 images of 24 B grid, 4 patches of 12 B and a reference of 50 B + 16 B.
    room = extent_bytes_bound(rows, row_bytes_bound(11) + 3 * (24 + 4 * 12 + 66))

    assert codec.encode(experience, memoryview(bytearray(room))).nbytes <= room


# Raw images.


def test_references_and_files_travel_as_they_are():
    raw = [["images/1.png", b"\x00\xff"], None, [], ["https://example.org/ü.jpg"]]
    experience = vl([2, 0, 0, 1], raw=raw)

    batch = codec.gather_padded([(stored(experience), [3, 2, 1, 0])])

    assert batch.raw_images == raw[::-1]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_a_decoded_image_comes_back_with_the_same_pixels(mode):
    image = png(mode)

    ((back,),) = through(vl([1], raw=[[image]])).raw_images

    assert isinstance(back, Image.Image)
    assert (back.mode, back.size) == (mode, image.size)
    assert back.tobytes() == image.tobytes()
    assert back.getpalette() == image.getpalette()


def test_a_decoded_image_lies_in_the_extent_as_a_file():
    image = Image.new("RGB", (1000, 1000))
    file = io.BytesIO()
    image.save(file, format="PNG")

    reader = stored(vl([1], raw=[[image]]))

    assert len(reader.memory) < len(file.getvalue()) + 2048 < 1000 * 1000
    assert file.getvalue() in bytes(reader.memory)


# Damage.


def test_a_flipped_bit_of_a_pixel_is_found_by_the_checksum():
    memory = memoryview(bytearray(1 << 16))
    encoded = codec.encode(vl([2, 1]), memory)
    place = bytes(memory).index(torch.full((3,), 7.0).numpy().tobytes())
    memory[place] ^= 1

    with pytest.raises(DecodeError, match="checksum"):
        codec.ExtentReader(memory[: encoded.nbytes], checksum=encoded.checksum)
    codec.ExtentReader(memory[: encoded.nbytes])  # the header is as it was: nothing else would have told


def leaves(node, path=()):
    """Paths of all values in nested lists."""
    yield path
    if isinstance(node, list):
        for place, child in enumerate(node):
            yield from leaves(child, (*path, place))


def changed(node, path, change):
    if not path:
        return change(node)
    return [changed(child, path[1:], change) if i == path[0] else child for i, child in enumerate(node)]


CHANGES = {
    "negative": lambda _: -1,
    "one more": lambda node: node + 1 if type(node) is int else node,
    "one less": lambda node: node - 1 if type(node) is int else node,
    "zero": lambda _: 0,
    "large": lambda _: 1 << 35,
    "absurd": lambda _: (1 << 64) - 1,
    "nothing": lambda _: None,
    "no list": lambda _: [],
    "shorter": lambda node: node[:-1] if isinstance(node, list) else node,
    "doubled": lambda node: node + node if isinstance(node, list) else node,
    "backwards": lambda node: node[::-1] if isinstance(node, list) else node,
    "dimensions": lambda node: [*node, 1 << 40, 1 << 40, 0] if isinstance(node, list) else node,
    "absurd dimensions": lambda node: [*node, 1 << 63, 0] if isinstance(node, list) else node,
    "many dimensions": lambda node: node + [1] * 99 if isinstance(node, list) else node,
    "name": lambda _: "values",
    "another name": lambda _: "info.name",
    "mask": lambda node: [*node, "action_mask", "sequences"] if isinstance(node, list) else node,
    "no mask": lambda node: [*node, "reward"] if isinstance(node, list) else node,
    "no rows": lambda node: [*node, [[], 1 << 63, 1 << 63]] if isinstance(node, list) else node,
    "no rows of any": lambda node: [*node, [[], 1 << 40, 1 << 40]] if isinstance(node, list) else node,
    "dtype": lambda _: "float32",
    "no dtype": lambda _: "storage",
    "columns": lambda _: "A",
}
HOSTILE = made_up_vl(3, seed=5, raw=True)


def relaid(reader, header):
    """An extent with another header before the same blocks."""
    packed = msgspec.msgpack.encode(header)
    *_, start = read_header(reader.memory)
    head = len(packed).to_bytes(4, "little") + packed
    return memoryview(bytearray(head.ljust(align(len(head)), b"\0") + bytes(reader.memory[start:])))


def read_all(memory):
    reader = codec.ExtentReader(memory)
    batch = codec.gather_padded([(reader, [0, 1, 2])])
    assert len(batch.sequences) == 3
    assert isinstance(batch, ExperienceVL) or reader.header.vision is None
    return batch


@pytest.mark.parametrize("honest", [made_up(3, seed=5), HOSTILE, groups(2, 2)], ids=["text", "vision", "groups"])
def test_a_header_that_lies_is_damage_and_nothing_else(honest):
    reader = stored(honest)
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(reader.header))
    found = 0

    for path in leaves(header):
        for name, change in CHANGES.items():
            lying = changed(header, path, change)
            try:
                read_all(relaid(reader, lying))
            except DecodeError:
                found += 1
            except Exception as error:
                raise AssertionError(f"{name} at {path} of {header}") from error

    assert found > 500


@pytest.mark.parametrize("grid", [[-1, -2, 2], [1, 2, 3], [2**32, 2**32, 1], [-(2**63), 2, 4]])
def test_grids_that_do_not_account_for_their_pixels_are_damage(grid):
    reader = stored(vl([1], grids=torch.tensor([[4, 1, 1]])))
    place = bytes(reader.memory).index(torch.tensor([4, 1, 1]).numpy().tobytes())
    reader.memory[place : place + 24] = torch.tensor(grid).numpy().tobytes()

    with pytest.raises(DecodeError, match="image_grid_thws do not account for 4 rows of pixel_values"):
        codec.ExtentReader(reader.memory)


def test_absurd_sizes_that_add_up_are_damage():
    reader = stored(vl([1], grids=torch.tensor([[4, 1, 1]])))
    place = bytes(reader.memory).index(torch.tensor([4, 1, 1]).numpy().tobytes())
    reader.memory[place : place + 24] = torch.tensor([1 << 20, 1 << 20, 1]).numpy().tobytes()
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(reader.header))
    medium = header[5][0][0]
    # Rows of no bytes: as many as one likes lie in any extent.
    medium[0][3], medium[2] = [0, 1 << 32], 1 << 40

    with pytest.raises(DecodeError, match="has a pixel_values of shape"):
        codec.ExtentReader(relaid(reader, header))


def test_lengths_without_sequences_are_damage():
    reader = stored(dataclasses.replace(made_up(rows=1), action_mask=None))
    header = msgspec.to_builtins(reader.header)
    header[1] = [field for field in header[1] if field[0] != "sequences" and field[2] != "A"]
    header[2], header[3] = [1 << 40], [0]

    # Otherwise a batch as wide as that would be made.
    with pytest.raises(DecodeError, match="has no sequences"):
        codec.ExtentReader(relaid(reader, header))


@settings(max_examples=4 * settings.default.max_examples)
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=8))
def test_changed_bytes_are_damage_or_other_values(flips):
    memory = memoryview(bytearray(CLEAN))
    for place, bits in flips:
        memory[place % len(memory)] ^= bits

    try:
        read_all(memory)
    except DecodeError:
        pass  # or the values differ, which the checksum is for


CLEAN = bytes(stored(HOSTILE).memory)


def test_a_png_that_cannot_be_read_is_damage():
    reader = stored(vl([1], raw=[[png("RGB", (50, 50))]]))
    place = bytes(reader.memory).index(b"IDAT") + 20
    reader.memory[place : place + 40] = bytes(40)

    with pytest.raises(DecodeError, match="a PNG cannot be read"):
        codec.gather_padded([(reader, [0])])


# Through the arena.


def test_a_leased_batch_of_a_vision_language_run_is_what_was_sealed(tmp_path):
    class Seeing(House):
        def seal(self, ticket):
            self.rolled[ticket.ticket] = made_up_vl(ticket.prompts, seed=ticket.ticket, raw=True)
            encoded = codec.encode(self.rolled[ticket.ticket], self.arena.extent(ticket.offset, ticket.nbytes))
            self.post["buffer"].send(Sealed("worker-0", ticket.ticket, ticket.prompts, encoded.nbytes,
                                            encoded.checksum, ticket.policy_version, 5))  # fmt: skip

    house = Seeing(tmp_path)

    batch = house.batch(house.connect()).experience

    expected = batched([(house.rolled[0], range(4)), (house.rolled[1], range(4))])
    assert batch.info.pop("policy_version").tolist() == [0] * 8
    assert_same(batch, expected)
    house.close()
