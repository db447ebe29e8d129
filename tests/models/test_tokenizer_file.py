"""The tokenizer is the folder's: the tokens of tokenizer.json whatever class is named, and its files in checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.errors import ConfigError
from pipeline.models import tokenizer_file
from pipeline.models.loading import load_tokenizer
from pipeline.models.tokenizer_file import TokenizerFiles

TEXT = "what is  the sum of\n1234 and 2? <|im_end|> é 日本 don't\n\n  x = 1 "
CORPUS = ["what is the sum of 1 2 3 4 5 and 1234? answer: don't x = 1"] * 8


def byte_level(**kinds: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **kinds)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def saved(folder: Path, tokenizer: Tokenizer, class_name: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": class_name, "eos_token": "<|endoftext|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    "class_name",
    [
        "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", "Qwen2Tokenizer", "GemmaTokenizerFast",
        "CodeLlamaTokenizerFast", "CohereTokenizerFast", "T5TokenizerFast", "XLMRobertaTokenizerFast",
        "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast",
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_file_whatever_class_is_named(tmp_path: Path, class_name: str) -> None:
    file = byte_level()
    folder = saved(tmp_path / "model", file, class_name)

    tokenizer = load_tokenizer(folder)

    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == file.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.eos_token, tokenizer.padding_side) == ("<|endoftext|>", "left")


@pytest.mark.parametrize("class_name", ["Qwen2Tokenizer", "TokenizersBackend"])
def test_a_class_that_reads_the_file_otherwise_is_named_with_the_kind_of_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, class_name: str
) -> None:
    folder = saved(tmp_path / "model", byte_level(), class_name)
    # Of this type transformers takes its own class, though tokenizer_config.json names none of a model.
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    # Digits are pieces of their own in that class, and stay together in the file.
    assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] != byte_level().encode(TEXT).ids

    load_tokenizer(folder)

    (record,) = [record for record in caplog.records if record.name == tokenizer_file.__name__]
    assert record.levelno == logging.WARNING
    told = "the class that transformers takes reads it otherwise: class=Qwen2Tokenizer differs_in=digits"
    assert told in record.getMessage()


@pytest.mark.parametrize("class_name", ["GPT2TokenizerFast", "PreTrainedTokenizerFast"])
def test_a_class_that_agrees_with_the_file_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, class_name: str
) -> None:
    folder = saved(tmp_path / "model", byte_level(), class_name)

    tokenizer = load_tokenizer(folder)

    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(folder))
    assert not [record for record in caplog.records if record.name == tokenizer_file.__name__]


def test_names_of_special_tokens_that_only_the_class_has_stay(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", byte_level(), "Qwen2Tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')

    tokenizer = load_tokenizer(folder)

    assert tokenizer(TEXT)["input_ids"] == byte_level().encode(TEXT).ids
    assert tokenizer.eos_token == "<|endoftext|>"


# The class of the decoder reads each text as the file does.
@pytest.mark.parametrize(("part", "class_name"), [
    ("normalizer", "Qwen2Tokenizer"), ("decoder", "GPT2Tokenizer"), ("added", "Qwen2Tokenizer"),
])  # fmt: skip
def test_each_part_of_the_pipeline_is_the_files(tmp_path: Path, part: str, class_name: str) -> None:
    """A class whose pipeline transformers builds itself, over a file with another normalizer, decoder or token."""
    file = byte_level()
    text = TEXT
    if part == "normalizer":
        file.normalizer = normalizers.NFD()
    elif part == "decoder":
        file.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(" ", "_")])
    else:
        file.add_tokens([AddedToken("<sum>", lstrip=True, rstrip=True, single_word=False, normalized=False)])
        text = "a  <sum>  b"
    folder = saved(tmp_path / "model", file, class_name)

    tokenizer = load_tokenizer(folder)

    ids = file.encode(text).ids
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == file.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_that_transformers_never_makes_as_the_file_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", byte_level(), "PreTrainedTokenizerFast")
    other = PreTrainedTokenizerFast(tokenizer_object=byte_level(use_regex=False), eos_token="<|endoftext|>")
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", lambda path, **options: other)

    with pytest.raises(ConfigError, match=r"model\.actor: transformers does not make the tokenizer .* it reads digits"):
        tokenizer_file.as_in_file(other, folder, "model.actor")


def test_texts_that_neither_can_read_are_no_difference(tmp_path: Path) -> None:
    """A vocabulary of digits has no unknown token: transformers and the file refuse letters alike."""
    pipeline = Tokenizer(models.WordLevel({"<eos>": 0, **{str(digit): digit + 1 for digit in range(10)}}))
    pipeline.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=pipeline, eos_token="<eos>").save_pretrained(tmp_path)

    loaded = load_tokenizer(tmp_path)

    assert loaded.encode("123") == [2, 3, 4]


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", byte_level(), "PreTrainedTokenizerFast")
    tokenizer = load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"model\.actor: .*tokenizer\.json cannot be read as a tokenizer"):
        tokenizer_file.as_in_file(tokenizer, folder, "model.actor")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", {"model": {"type": "OfALaterRelease"}}, "data did not match any variant"),
        ("tokenizer_config.json", {"pad_token": 3}, "pad_token"),
        ("tokenizer_config.json", {"extra_special_tokens": [1, 2]}, "AddedToken"),
    ],
)
def test_files_that_no_class_can_take_are_one_line_with_key_and_folder(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path, byte_level(), "PreTrainedTokenizerFast") / file
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))

    with pytest.raises(
        ConfigError, match=f"^model.actor: cannot load a tokenizer from {tmp_path}: .*{message}"
    ) as raised:
        load_tokenizer(tmp_path)

    assert "\n" not in str(raised.value)


def test_the_ends_that_tokenizer_config_names_are_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(
        tmp_path / "model", byte_level(), "PreTrainedTokenizerFast", bos_token="<|im_end|>", add_bos_token=True
    )

    tokenizer = load_tokenizer(folder)

    bos = tokenizer.bos_token_id
    assert tokenizer(TEXT)["input_ids"] in (byte_level().encode(TEXT).ids, [bos, *byte_level().encode(TEXT).ids])
    assert not [record for record in caplog.records if record.name == tokenizer_file.__name__]


def test_a_checkpoint_has_the_files_of_the_tokenizer_byte_for_byte(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    wanted = [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken",
        "tekken.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja",
        "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    ]  # fmt: skip
    others = ["config.json", "generation_config.json", "model.safetensors", "README.md", "optimizer.pt"]
    (folder / "additional_chat_templates").mkdir(parents=True)
    for number, name in enumerate([*wanted, *others]):
        (folder / name).write_bytes(b"\xff\x00 " + bytes([number]))
    target = tmp_path / "checkpoint"
    target.mkdir()

    files = TokenizerFiles(folder)
    (folder / "tokenizer_config.json").write_text("changed later")
    files.save_pretrained(target)

    written = {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}
    assert written == {name: b"\xff\x00 " + bytes([number]) for number, name in enumerate(wanted)}


def test_loading_a_tokenizer_changes_none_of_its_files(tmp_path: Path) -> None:
    """The loaded tokenizer's padding on the left and its pad token are rlhfd's own."""
    folder = saved(tmp_path / "model", byte_level(), "PreTrainedTokenizerFast", padding_side="right")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    target = tmp_path / "checkpoint"
    target.mkdir()

    tokenizer = load_tokenizer(folder)
    TokenizerFiles(folder).save_pretrained(target)

    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<|endoftext|>")
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


@pytest.mark.parametrize(
    ("listed", "pad"),
    [([257, 256], 257), (256, 256), ([], None), ([99_999], None), (None, None)],
)
def test_without_pad_and_eos_the_first_listed_end_pads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listed: object, pad: int | None
) -> None:
    folder = saved(tmp_path / "model", byte_level(), "PreTrainedTokenizerFast", eos_token=None)
    if listed is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    caplog.set_level(logging.INFO)

    if pad is None:
        with pytest.raises(ConfigError, match="neither a pad token nor an eos token, and generation_config"):
            load_tokenizer(folder)
        return
    tokenizer = load_tokenizer(folder)

    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (pad, None)
    assert f"id={pad}" in caplog.text and tokenizer("a", add_special_tokens=False)["input_ids"]
