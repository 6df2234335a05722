"""Tokenizers in folders: what is read, that transformers reads the same, and what is refused."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from everystep.errors import FileError, FormatError, MissingFileError, RequestError, TokenizerError
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Tokenizer
from everystep.text.gguf import surrounding
from everystep.text.tokenizer_folder import MAX_TEMPLATE_BYTES
from everystep.text.tokenizer_settings import warn_of_unknown_keys

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_saved_tokenizer_is_read_again(folder: Path) -> None:
    saved, read = tiny_tokenizer(), Tokenizer.from_folder(folder)
    assert read("the 😀<eos>")["input_ids"] == saved("the 😀<eos>")["input_ids"]
    assert read.get_vocab() == saved.get_vocab()
    assert read.special_tokens_map == saved.special_tokens_map
    assert read.chat_template == saved.chat_template
    assert (read.padding_side, read.model_max_length) == ("left", saved.model_max_length)
    assert read.name_or_path == str(folder)


def test_saving_names_the_files_it_wrote(tmp_path: Path) -> None:
    written = tiny_tokenizer().save_pretrained(tmp_path / "new")
    assert sorted(map(Path, written)) == sorted((tmp_path / "new").iterdir())


def test_transformers_reads_the_saved_folder(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["the cat", "<bos>to be<eos> 😀"]
    assert dict(ours(texts, padding=True)) == dict(theirs(texts, padding=True))
    assert ours.apply_chat_template(MESSAGES, return_dict=False) == theirs.apply_chat_template(
        MESSAGES, return_dict=False
    )


@pytest.mark.parametrize("processor", [None, (("<bos>", 1), None), (None, ("<eos>", 2))])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_the_post_processor_alone_adds_bos_and_eos_as_in_transformers(
    tmp_path: Path, processor: Any, flags: dict[str, bool]
) -> None:
    tokenizer = tiny_tokenizer()
    if processor:
        tokenizer.backend.post_processor = surrounding(*processor)
    tokenizer.save_pretrained(tmp_path)
    configure(tmp_path, **flags)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path)("a")["input_ids"] == theirs("a")["input_ids"]


def test_padding_and_truncation_of_the_file_do_not_act(folder: Path) -> None:
    backend = tiny_tokenizer().backend
    backend.enable_padding(length=9)
    backend.enable_truncation(max_length=2)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_folder(folder)("cat")["input_ids"]) == 3


def test_settings_come_from_the_configuration(folder: Path) -> None:
    configure(folder, padding_side="right", truncation_side="left", model_max_length=7)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("right", "left")
    assert len(tokenizer("a" * 20, truncation=True)["input_ids"]) == 7


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_a_token_is_named_as_text_or_as_an_object(folder: Path, token: Any) -> None:
    (folder / "special_tokens_map.json").unlink()
    configure(folder, eos_token=token)
    assert Tokenizer.from_folder(folder).eos_token_id == 4


def test_the_map_names_what_the_configuration_does_not(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<bos>")


def test_tokens_that_only_the_configuration_has_are_added(folder: Path) -> None:
    added = {"320": {"content": "<new>", "special": True}, "321": "<newer>"}
    configure(folder, added_tokens_decoder=added, additional_special_tokens=["<newest>"])
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer("<new>a<newer><newest>")["input_ids"] == [320, 102, 321, 322]


MASK = {"content": "<mask>", "special": True, "normalized": False, "__type": "AddedToken"}
# The flags of tokenizer.json, the configuration, and the older file of added tokens.
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "the list strips": (
        {"special": True, "normalized": False},
        {"added_tokens_decoder": {"4": {**MASK, "lstrip": True}}},
        {},
    ),
    "the list does not strip": (
        {"special": True, "lstrip": True},
        {"added_tokens_decoder": {"4": MASK}},
        {},
    ),
    "the list has single words": (
        {"special": True},
        {"added_tokens_decoder": {"4": {**MASK, "single_word": True}}},
        {},
    ),
    "the list has no flags": (
        {"special": True, "lstrip": True},
        {"added_tokens_decoder": {"4": {"content": "<mask>"}}},
        {},
    ),
    "the list says plain": (
        {"special": True},
        {"added_tokens_decoder": {"4": {**MASK, "special": False}}},
        {},
    ),
    "the list says plain, a name special": (
        {},
        {"added_tokens_decoder": {"4": {**MASK, "special": False}}, "mask_token": "<mask>"},
        {},
    ),
    "a name": ({"lstrip": True}, {"mask_token": "<mask>"}, {}),
    "a name that strips": ({"special": True}, {"mask_token": {**MASK, "lstrip": True}}, {}),
    "further tokens": ({"special": True}, {}, {"<more>": 5}),
    "further tokens with a name": ({"special": True}, {"pad_token": "<more>"}, {"<more>": 5}),
    "further tokens that are known": ({"special": True, "lstrip": True}, {}, {"<mask>": 4}),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_followed_where_the_files_differ(name: str, tmp_path: Path) -> None:
    flags, config, further = FLAGS[name]
    backend = tokenizers.Tokenizer(BPE(vocab={"a": 0, "b": 1, "Ġ": 2, "<unk>": 3}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.add_tokens([tokenizers.AddedToken("<mask>", **flags)])
    backend.save(str(tmp_path / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    if further:
        (tmp_path / "added_tokens.json").write_text(json.dumps(further))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in ("a <mask>b", "a<mask> b", "a<more>b", "<mask> a <more>"):
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        for skip in (True, False):
            shown = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == shown


def test_a_list_that_gives_an_id_to_another_token_is_refused(folder: Path) -> None:
    configure(folder, added_tokens_decoder={"4": {"content": "<other>"}})
    with pytest.raises(FormatError, match=r"'<other>' the id 4.*belong to different tokenizers"):
        Tokenizer.from_folder(folder)


def test_a_named_token_of_the_vocabulary_becomes_special(folder: Path) -> None:
    configure(folder, unk_token="ing")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer("going")["input_ids"], skip_special_tokens=True) == "go"


def test_template_files_win(folder: Path) -> None:
    configure(folder, chat_template="configured")
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder).chat_template == "configured"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.from_folder(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja ✓", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "jinja ✓"


def test_named_templates_are_kept_and_saved(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    configure(folder, chat_template=named)
    read = Tokenizer.from_folder(folder)
    assert read.chat_template == {"default": "A", "tool_use": "B"}
    read.save_pretrained(tmp_path / "again")
    assert Tokenizer.from_folder(tmp_path / "again").chat_template == read.chat_template


def test_a_folder_without_settings_is_enough(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.chat_template) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"padding_sides": "left"}, "'padding_sides' (the nearest is padding_side)"),
        ({"eos_tokn": "<eos>"}, "'eos_tokn' (the nearest is eos_token)"),
        ({"eos_token_id": 2}, "'eos_token_id' (the nearest is eos_token)"),
        ({"image_token": 7}, "'image_token' (the nearest is"),
        ({"split_special_tokens": True}, "'split_special_tokens'"),
        ({"colour": 1, "model_max_len": 9}, "'colour', 'model_max_len' (the nearest is model_max"),
    ],
)
def test_keys_without_effect_are_told_once(folder: Path, wrong: dict[str, Any], told: str) -> None:
    configure(folder, **wrong)
    with pytest.warns(UserWarning, match=re.escape(told)) as caught:
        Tokenizer.from_folder(folder)
    (one,) = caught
    assert f"{folder / 'tokenizer_config.json'} has keys without effect here" in str(one.message)
    assert one.filename == __file__


def declared(kind: type) -> set[str]:
    """The names that transformers' class takes when it is made of a file."""
    found = set()
    for one in kind.__mro__:
        if "__init__" in vars(one) and one.__module__.startswith("transformers."):
            found |= {*inspect.signature(one.__init__).parameters}
            source = inspect.getsource(one.__init__)
            found |= {*re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', source)}
    return found - {"self", "args", "kwargs", "tokenizer", "tokenizer_object"}  # these are objects


KINDS = [
    "GPT2",
    "CodeGen",
    "GPTNeoX",
    "Qwen2",
    "Roberta",
    "Llama",
    "Gemma",
    "T5",
    "Whisper",
    "Bert",
]


@pytest.mark.parametrize("name", KINDS)
def test_keys_that_transformers_declares_are_known_without_a_word(name: str) -> None:
    keys = declared(getattr(transformers, f"{name}Tokenizer"))
    assert {"model_max_length", "split_special_tokens", "chat_template", "backend"} <= keys
    warn_of_unknown_keys(dict.fromkeys(keys), Path("tokenizer_config.json"))


def test_keys_that_transformers_writes_are_known_without_a_word(folder: Path) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    Tokenizer.from_folder(folder)


_TOKENS = "bos_token eos_token pad_token unk_token added_tokens_decoder additional_special_tokens"
_USUAL = f"{_TOKENS} chat_template clean_up_tokenization_spaces model_max_length tokenizer_class"
_PIECES = f"{_USUAL} add_bos_token add_eos_token legacy padding_side sp_model_kwargs"
_GPT2 = "add_bos_token add_prefix_space errors"
PUBLISHED = {
    "gpt2": "model_max_length",
    "gpt2 as saved": f"{_USUAL} {_GPT2} name_or_path special_tokens_map_file",
    "OPT": f"{_TOKENS} {_GPT2} tokenizer_class name_or_path special_tokens_map_file",
    "Falcon": "add_prefix_space eos_token model_max_length special_tokens_map_file tokenizer_class",
    "T5": f"{_USUAL} extra_ids full_tokenizer_file sp_model_kwargs tokenizer_file name_or_path",
    "Whisper": f"{_USUAL} {_GPT2} dropout processor_class return_attention_mask",
    "Llama 3": f"{_USUAL} extra_special_tokens model_input_names",
    "Mistral": f"{_PIECES} add_prefix_space spaces_between_special_tokens"
    " use_default_system_prompt",
    "Qwen 2.5": f"{_USUAL} {_GPT2} split_special_tokens",
    "Phi 2": f"{_USUAL} {_GPT2} max_length pad_to_multiple_of pad_token_type_id padding_side stride"
    " return_token_type_ids truncation_side truncation_strategy extra_special_tokens",
    "Phi 3": f"{_PIECES} use_default_system_prompt",
    "Gemma 2": f"{_PIECES} spaces_between_special_tokens split_special_tokens"
    " use_default_system_prompt",
    "Gemma 4": f"{_TOKENS} audio_token backend boi_token escape_token is_local mask_token"
    " model_specific_special_tokens processor_class response_schema stc_token tokenizer_class",
    "SmolLM2": f"{_USUAL} add_prefix_space vocab_size",
    "DeepSeek": _PIECES,
    "ByT5": f"{_TOKENS} backend extra_ids extra_special_tokens is_local local_files_only",
    "M2M100": f"{_USUAL} language_codes num_madeup_words sep_token sp_model_kwargs src_lang"
    " tgt_lang tokenizer_file use_fast",
    "a class of its own": f"{_USUAL} auto_map decode_with_prefix_space",
}
"""The keys of published files."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_files_are_known_without_a_word(name: str) -> None:
    warn_of_unknown_keys(dict.fromkeys(PUBLISHED[name].split()), Path("tokenizer_config.json"))


def test_an_older_name_of_the_longest_text_is_read(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "max_len": 9}))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokenizer.from_folder(folder).model_max_length == theirs.model_max_length == 9


def test_a_tokenizer_as_it_was_read_is_copied(folder: Path, tmp_path: Path) -> None:
    """With what other programs read of it, and keys that nobody here knows."""
    configure(folder, _added_by_others=[1, 2])
    (folder / "tokenizer.model").write_bytes(b"of another program")
    (folder / "notes.txt").write_text("no part of it")
    read = Tokenizer.from_folder(folder)
    written = [Path(path) for path in read.save_pretrained(tmp_path / "again")]
    assert sorted(written) == sorted((tmp_path / "again").iterdir())
    names = {path.name for path in written}
    assert {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"} <= names
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in written)
    assert "notes.txt" not in names


def test_a_changed_tokenizer_is_written_as_it_is(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"of another program")
    changed, grown = Tokenizer.from_folder(folder), Tokenizer.from_folder(folder)
    changed.pad_token = "<bos>"
    grown.backend.add_tokens(["<new>"])
    for number, read in enumerate((changed, grown)):
        target = tmp_path / str(number)
        read.save_pretrained(target)
        assert not (target / "tokenizer.model").exists()
        again = Tokenizer.from_folder(target)
        assert again.pad_token == read.pad_token
        assert again.get_vocab() == read.get_vocab()


def test_a_tokenizer_whose_folder_is_gone_is_written(folder: Path, tmp_path: Path) -> None:
    read = Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    read.save_pretrained(tmp_path / "again")
    assert Tokenizer.from_folder(tmp_path / "again").get_vocab() == read.get_vocab()


@pytest.mark.parametrize("changed", [False, True])
def test_a_tokenizer_may_be_saved_where_it_came_from(folder: Path, changed: bool) -> None:
    (folder / "tokenizer.model").write_bytes(b"of another program")
    read = Tokenizer.from_folder(folder)
    if changed:
        read.pad_token = "<bos>"
    read.save_pretrained(folder)
    assert Tokenizer.from_folder(folder).pad_token == read.pad_token
    assert (folder / "tokenizer.model").exists()


def test_templates_of_another_tokenizer_go(folder: Path, tmp_path: Path) -> None:
    read = Tokenizer.from_folder(folder)
    read.chat_template = None
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (tmp_path / "old" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / name).write_text("another's")
    read.save_pretrained(tmp_path / "old")
    assert Tokenizer.from_folder(tmp_path / "old").chat_template is None


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
LARGE = " " * (MAX_TEMPLATE_BYTES + 1)
BROKEN: list[tuple[str, str | bytes | None, type[Exception], str]] = [
    ("tokenizer.json", None, MissingFileError, "has no tokenizer; wanted a file tokenizer.json"),
    ("tokenizer.json", "", FormatError, "tokenizer.json is empty"),
    ("tokenizer.json", '{"version": "1.0"}', FormatError, "tokenizer.json is not a tokenizer"),
    ("tokenizer_config.json", "{", FormatError, "tokenizer_config.json is not valid JSON"),
    ("tokenizer_config.json", "[]", FormatError, "tokenizer_config.json holds no object; .*list"),
    ("tokenizer_config.json", "[" * 100_000, FormatError, "tokenizer_config.json is nested"),
    ("tokenizer_config.json", '{"eos_token": 3}', TokenizerError, "eos_token is not a token"),
    ("tokenizer_config.json", '{"padding_side": "up"}', RequestError, "padding_side is unknown"),
    ("tokenizer_config.json", '{"chat_template": [1]}', FormatError, "chat_template.*list objects"),
    (
        "tokenizer_config.json",
        '{"added_tokens_decoder": {"999": "<new>"}}',
        FormatError,
        "'<new>' the id 999; wanted 320",
    ),
    (
        "tokenizer_config.json",
        '{"added_tokens_decoder": {"320": {"special": true}}}',
        FormatError,
        "An added token is wrong",
    ),
    ("tokenizer_config.json", LFS, FormatError, "tokenizer_config.json is .*git lfs pull"),
    (
        "tokenizer_config.json",
        '{"chat_template": 5}',
        FormatError,
        "tokenizer_config.json: the field 'chat_template' is of the wrong kind; got int",
    ),
    (
        "tokenizer_config.json",
        '{"chat_template": [{"template": "a"}]}',
        FormatError,
        "tokenizer_config.json: 'chat_template': the field 'name' is missing",
    ),
    ("chat_template.jinja", b"\xff", FormatError, "chat_template.jinja is not UTF-8"),
    ("chat_template.jinja", LARGE, FormatError, f"jinja is too large.*{MAX_TEMPLATE_BYTES}"),
    ("special_tokens_map.json", "nothing", FormatError, "special_tokens_map.json is not valid"),
    ("chat_template.json", "nothing", FormatError, "chat_template.json is not valid JSON"),
]


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ANYWHERE = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 64}
MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("key", "step", "grown"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLED] * 7}, "128"),
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLED] * 60}, "1152921504606846976"),
        ("normalizer", ANYWHERE, "65"),
        ("decoder", {"type": "Sequence", "decoders": [DOUBLED] * 7}, "128"),
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLED] * 6}, None),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, MARK]}, None),
    ],
)
def test_rules_that_make_texts_longer_without_end_are_refused(
    folder: Path, key: str, step: dict[str, Any], grown: str | None
) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: step}))
    if grown is None:
        assert Tokenizer.from_folder(folder).encode("a")
        return
    with pytest.raises(FormatError, match=f"the {key} makes texts longer; wanted.*{grown} times"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(("name", "text", "error", "what"), BROKEN)
def test_broken_folders_are_refused(
    folder: Path, name: str, text: str | bytes | None, error: type[FileError], what: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error, match=what):
        Tokenizer.from_folder(folder)
