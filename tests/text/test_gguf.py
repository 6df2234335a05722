"""Tokenizers from GGUF metadata: what is built, and every contradiction that is refused."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from transformers import (
    CodeGenTokenizer,
    CohereTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from everystep.errors import FormatError, UnsupportedError
from everystep.text import Tokenizer
from everystep.text.gguf import ends_of_texts
from everystep.text.pieces import byte_alphabet
from everystep.text.pretokenizers import BY_NAME
from tests.text.reading import lines

PREFIX = "tokenizer.ggml."
LETTERS = list(byte_alphabet().values())


def metadata(**changes: Any) -> dict[str, Any]:
    """Every byte, a few merges, two control tokens; keys without the prefix, None removes."""
    merges = ["t h", "th e", "Ġ the", "Ġ Ġ", "1 2"]
    tokens = ["<pad>", *LETTERS, *(m.replace(" ", "") for m in merges), "<tool>", "<end>"]
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] + [1] * (len(tokens) - 3) + [4, 3],
        "merges": merges,
        "eos_token_id": len(tokens) - 1,
        "padding_token_id": 0,
    }
    kept = {key: value for key, value in {**base, **changes}.items() if value is not None}
    return {PREFIX + key: value for key, value in kept.items()}


SIZE = len(metadata()[PREFIX + "tokens"])


def test_tokens_and_merges_are_followed() -> None:
    assert Tokenizer.from_gguf(metadata()).tokenize("the  the") == ["the", "Ġ", "Ġthe"]


def test_ids_are_the_places_in_the_file() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    tokens = metadata()[PREFIX + "tokens"]
    assert tokenizer.convert_ids_to_tokens(range(SIZE)) == tokens
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(SIZE))


def test_the_closing_added_tokens_are_not_in_the_merge_model() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    assert (tokenizer.vocab_size, len(tokenizer)) == (SIZE - 2, SIZE)


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    ids = tokenizer("<pad>a<tool>b<end>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<pad>", "a", "<tool>", "b", "<end>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_arrays_of_numpy_are_read() -> None:
    types = np.array(metadata()[PREFIX + "token_type"], dtype=np.int32)
    tokenizer = Tokenizer.from_gguf(metadata(token_type=types, eos_token_id=np.uint32(1)))
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [98]),
        ({"add_bos_token": True}, [0, 98]),
        ({"add_eos_token": True}, [98, SIZE - 1]),
        ({"pre": "llama-bpe"}, [0, 98]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [98]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [98]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(flags: dict[str, Any], ids: list[int]) -> None:
    assert Tokenizer.from_gguf(metadata(**{"bos_token_id": 0, **flags}))("a")["input_ids"] == ids


def test_both_texts_of_a_pair_are_surrounded() -> None:
    tokenizer = Tokenizer.from_gguf(metadata(bos_token_id=0, add_bos_token=True))
    assert tokenizer("a", "b")["input_ids"] == [0, 98, 0, 99]


def test_templates_are_read_by_name() -> None:
    given = {
        **metadata(),
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    tokenizer = Tokenizer.from_gguf(given)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "A"
    assert tokenizer.apply_chat_template(messages, tools=[{}], tokenize=False) == "[{}]"


def test_the_context_length_limits_texts() -> None:
    given = {**metadata(), "general.architecture": "llama", "llama.context_length": 4}
    assert len(Tokenizer.from_gguf(given)("a" * 9, truncation=True)["input_ids"]) == 4


SPLITS = [
    ("gpt-2", "I'LL pay 1234  now", ["I", "'", "LL", "Ġpay", "Ġ1234", "Ġ", "Ġnow"]),
    ("smollm", "a  12 b", ["a", "ĠĠ", "1", "2", "Ġb"]),
    ("starcoder", "x1 2", ["x", "1", "Ġ", "2"]),
    ("llama-bpe", "I'LL pay 1234  now", ["I", "'LL", "Ġpay", "Ġ", "123", "4", "Ġ", "Ġnow"]),
    ("llama-bpe", "a\n\n b\r\n", ["a", "ĊĊ", "Ġb", "čĊ"]),
    ("qwen2", "(x)=12 y", ["(x", ")=", "1", "2", "Ġy"]),
    ("tekken", "camelCase HTTPServer 12", ["camel", "Case", "ĠHTTPServer", "Ġ", "1", "2"]),
    ("gpt-4o", "camelCase's 1234", ["camel", "Case's", "Ġ", "123", "4"]),
    ("deepseek-v3", "x1234 .y", ["x", "123", "4", "Ġ.", "y"]),
    ("deepseek-coder", "a, 12\nb", ["a", ",", "Ġ", "1", "2", "Ċ", "b"]),
    ("falcon", "a, 12345", ["a", ",", "Ġ", "123", "45"]),
    ("default", "a=  b 1234", ["a", "=", "Ġ", "Ġb", "Ġ", "123", "4"]),
]


@pytest.mark.parametrize(("rule", "text", "pieces"), SPLITS)
def test_text_is_split_as_the_rule_says(rule: str, text: str, pieces: list[str]) -> None:
    split = BY_NAME[rule].split().pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize("rule", sorted(BY_NAME))
def test_every_rule_keeps_every_byte(rule: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata(pre=rule))
    text = "Ünï 12345  \t\n\r\n it's 你好 😀 x_y!?"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(
    ("rule", "original"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("phi-2", CodeGenTokenizer),
        ("olmo", GPTNeoXTokenizer),
        ("command-r", CohereTokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
    ],
)
def test_lines_are_split_as_the_original_splits_them(rule: str, original: Any) -> None:
    theirs, ours = original().backend_tokenizer, BY_NAME[rule]
    split = ours.split()
    for line in lines():
        assert split.pre_tokenize_str(line) == theirs.pre_tokenizer.pre_tokenize_str(line)
    assert type(theirs.normalizer) is (ours.normalizer or type(None))


def test_qwen2_normalizes_and_gpt2_does_not() -> None:
    assert Tokenizer.from_gguf(metadata(pre="qwen2")).tokenize("e\u0301") == ["Ã", "©"]
    assert Tokenizer.from_gguf(metadata(pre="gpt-2")).tokenize("e\u0301") == ["e", "Ì", "ģ"]


def test_llama3_takes_whole_words_from_the_vocabulary() -> None:
    tokens = [*metadata()[PREFIX + "tokens"][:-2], "zebra"]
    given = metadata(tokens=tokens, token_type=None, eos_token_id=0, pre="llama-bpe")
    assert Tokenizer.from_gguf(given).tokenize("zebra") == ["zebra"]
    assert len(Tokenizer.from_gguf({**given, PREFIX + "pre": "gpt-2"}).tokenize("zebra")) == 5


def test_a_file_that_names_no_rule_is_read_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre is missing"):
        Tokenizer.from_gguf(metadata(pre=None))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pre": "smolm"}, "unknown splitting rule 'smolm'; wanted 'smollm' perhaps.*from_folder"),
        ({"pre": "no-such-rule"}, "unknown splitting rule 'no-such-rule'"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; wanted 'gpt2' or 'llama'"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"add_sep_token": True}, r"ggml\.add_sep_token has no implementation.*wanted False"),
        ({"precompiled_charsmap": [1]}, r"ggml\.precompiled_charsmap has no implementation"),
        ({"add_bos_tokens": True}, r"If tokenizer\.ggml\.add_bos_token was meant"),
    ],
)
def test_what_cannot_be_followed_is_unsupported(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Tokenizer.from_gguf(metadata(**changes))


BROKEN = [
    ({"model": None}, "ggml.model is missing; wanted str"),
    ({"tokens": None}, "ggml.tokens is missing; wanted an array of str"),
    ({"tokens": "abc"}, "ggml.tokens is wrong; wanted an array of str; got str"),
    ({"tokens": [1, 2]}, "tokens has elements of the wrong type; wanted str; got int"),
    ({"token_type": [1.0] * SIZE}, "token_type has elements of the wrong type; wanted int"),
    ({"token_type": [1] * (SIZE - 1)}, f"does not fit tokens; wanted {SIZE}; got {SIZE - 1}"),
    ({"token_type": [7] * SIZE}, "token_type is unknown; wanted 1 to 6; got 7"),
    ({"token_type": [0] * SIZE}, "token_type is unknown; wanted 1 to 6; got 0"),
    ({"tokens": ["a"] * SIZE}, "'a' is in tokenizer.ggml.tokens twice"),
    ({"tokens": ["", *metadata()[PREFIX + "tokens"][1:]]}, "added token 0 has no text"),
    ({"tokens": ["x" * 4097, *metadata()[PREFIX + "tokens"][1:]]}, "endless token.*4096.*4097"),
    ({"merges": None}, "ggml.merges is missing"),
    ({"merges": ["t h", "the"]}, "Merge 1 of tokenizer.ggml.merges is wrong"),
    ({"merges": ["t 你"]}, "Merge 0 .*'你' is no token"),
    ({"merges": ["z z"]}, "Merge 0 .*'zz' is no token"),
    ({"merges": ["< pad>"]}, "Merge 0 .*'pad>' is no token"),
    (
        {"eos_token_id": SIZE},
        f"eos_token_id is not an id of the vocabulary; wanted 0 to {SIZE - 1}",
    ),
    ({"bos_token_id": -1}, "bos_token_id is not an id"),
    ({"bos_token_id": "1"}, "bos_token_id is wrong; wanted int; got str"),
    ({"bos_token_id": True}, "bos_token_id is wrong; wanted int; got bool"),
    ({"add_bos_token": True}, "add_bos_token is true, but no bos_token_id"),
    ({"add_bos_token": 1}, "add_bos_token is wrong; wanted bool; got int"),
    ({"model": "llama"}, "ggml.scores is missing"),
    ({"model": "llama", "scores": [0.0]}, f"scores does not fit tokens; wanted {SIZE}; got 1"),
]


@pytest.mark.parametrize(("changes", "text"), BROKEN)
def test_metadata_that_contradict_themselves_are_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(FormatError, match=text):
        Tokenizer.from_gguf(metadata(**changes))


DECLARED = [
    str(value).removeprefix(PREFIX)
    for value in vars(gguf.Keys.Tokenizer).values()
    if str(value).startswith(PREFIX)
]
CHANGE_NOTHING = {"token_type_count", "prefix_token_id", "suffix_token_id", "middle_token_id"} | {
    f"fim_{part}_token_id" for part in ("pre", "suf", "mid")
}


@pytest.mark.parametrize("key", DECLARED)
def test_every_declared_key_is_read_or_refused_or_changes_nothing(key: str) -> None:
    scores = {} if key == "scores" else {"scores": [0.0] * SIZE}

    def read() -> None:
        for model in ("gpt2", "llama"):
            given = metadata(**{"model": model, **scores, key: [[1]]})
            Tokenizer.from_gguf(given)
            ends_of_texts(given)

    if key in CHANGE_NOTHING:
        read()
    else:
        with pytest.raises((FormatError, UnsupportedError), match=rf"tokenizer\.ggml\.{key}"):
            read()


def named(*tokens: str, kind: int = 3) -> dict[str, Any]:
    """Metadata with further tokens of a kind, whose ids begin at SIZE."""
    given = metadata()
    return metadata(
        tokens=[*given[PREFIX + "tokens"], *tokens],
        token_type=[*given[PREFIX + "token_type"], *[kind] * len(tokens)],
    )


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, [SIZE - 1]),
        ({"eos_token_id": None}, []),
        ({"eot_token_id": 5, "eom_token_id": 6}, [SIZE - 1, 5, 6]),
        ({"eot_token_id": SIZE - 1}, [SIZE - 1]),
        (
            {"fim_pad_token_id": 7, "fim_rep_token_id": 8, "fim_sep_token_id": 9},
            [SIZE - 1, 7, 8, 9],
        ),
        ({"eos_token_ids": [SIZE - 1, 4]}, [SIZE - 1, 4]),
    ],
)
def test_ends_that_keys_name(changes: dict[str, Any], ends: list[int]) -> None:
    assert ends_of_texts(metadata(**changes)) == ends


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|im_end|>", "<|im_start|>", "<|endoftext|>"], [SIZE, SIZE + 2]),
        (["<end_of_turn>"], [SIZE]),
        (["<|end|>", "<|eot_id|>"], [SIZE, SIZE + 1]),
        (["<|end|>", "<|return|>", "<|call|>"], [SIZE + 1, SIZE + 2]),
    ],
)
def test_ends_that_are_known_by_their_spelling(tokens: list[str], ends: list[int]) -> None:
    assert ends_of_texts(named(*tokens)) == [SIZE - 1, *ends]
    assert ends_of_texts(named(*tokens, kind=4)) == [SIZE - 1, *ends]
    # A piece of ordinary text, or one that no text contains, ends nothing.
    assert ends_of_texts(named(*tokens, kind=1)) == [SIZE - 1]


@pytest.mark.parametrize("changes", [{"eot_token_id": SIZE}, {"eos_token_ids": [-1]}])
def test_an_end_is_an_id_of_the_vocabulary(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"eo[ts]_token_ids? is not an id of the vocabulary"):
        ends_of_texts(metadata(**changes))


def test_the_saved_tokenizer_is_the_same_in_transformers(tmp_path: Any) -> None:
    ours = Tokenizer.from_gguf(metadata(pre="smollm"))
    ours.save_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "the 12 <tool>  the<end>"
    assert theirs(text)["input_ids"] == ours(text)["input_ids"]
