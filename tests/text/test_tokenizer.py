"""The tokenizer's call and its conversions, compared with transformers on the same tokenizer."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from everystep.errors import (
    RequestError,
    TokenizerError,
    UnknownArgumentError,
    UnsupportedError,
)
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import BatchEncoding, Tokenizer
from everystep.text.gguf import surrounding


def surrounded(side: str = "left") -> Tokenizer:
    """The tiny tokenizer, but with bos before and eos after every text."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend.post_processor = surrounding(("<bos>", 1), ("<eos>", 2))
    tokenizer.padding_side = side
    return tokenizer


def reference(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        padding_side=tokenizer.padding_side,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


TEXTS = ["the cat", "a", "", "to be or not to be, that is it"]
CALLS: list[tuple[Any, dict[str, Any]]] = [
    ("the cat", {}),
    ("", {}),
    (TEXTS, {}),
    (TEXTS, {"add_special_tokens": False}),
    (TEXTS, {"padding": True}),
    (TEXTS, {"padding": "longest", "padding_side": "right"}),
    (TEXTS, {"padding": "max_length", "max_length": 40}),
    (TEXTS, {"padding": True, "pad_to_multiple_of": 8}),
    (TEXTS, {"padding": "max_length", "max_length": 6, "truncation": True}),
    (TEXTS, {"truncation": True, "max_length": 7}),
    (TEXTS, {"truncation": "only_first", "max_length": 7}),
    (TEXTS, {"max_length": 4}),
    (TEXTS, {"padding": True, "return_attention_mask": False}),
    (TEXTS, {"padding": True, "return_token_type_ids": True, "return_special_tokens_mask": True}),
    (TEXTS, {"padding": True, "return_offsets_mapping": True, "truncation": True, "max_length": 5}),
    (TEXTS, {"padding": "do_not_pad", "truncation": "do_not_truncate"}),
    ([("the", "cat and dog"), ("a", "b")], {"padding": True, "return_token_type_ids": True}),
    ([("that was it", "that")], {"truncation": "longest_first", "max_length": 8}),
    ([("that", "that was it")], {"truncation": "longest_first", "max_length": 9}),
    ([("it was it", "it was it")], {"truncation": True, "max_length": 7}),
    ([("a", "that was it")], {"truncation": "only_second", "max_length": 8}),
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("text", "options"), CALLS)
def test_a_call_gives_what_the_reference_gives(
    text: Any, options: dict[str, Any], side: str
) -> None:
    tokenizer = surrounded(side)
    assert dict(tokenizer(text, **options)) == dict(reference(tokenizer)(text, **options))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_takes_the_side_that_is_set(side: str) -> None:
    tokenizer = surrounded()
    theirs = reference(tokenizer)
    tokenizer.truncation_side = theirs.truncation_side = side
    options = {"truncation": True, "max_length": 5}
    assert (
        tokenizer("that was it", **options)["input_ids"]
        == (theirs("that was it", **options)["input_ids"])
    )


@settings(max_examples=200)
@given(st.text(max_size=9), st.text(max_size=9), st.integers(4, 24))
def test_pairs_are_shortened_as_in_the_reference(first: str, second: str, length: int) -> None:
    tokenizer, theirs = PAIRS
    options = {"truncation": "longest_first", "max_length": length}
    ours = tokenizer([(first, second)], **options)
    assert ours["input_ids"] == theirs([(first, second)], **options)["input_ids"]


PAIRS = (surrounded(), reference(surrounded()))


@settings(max_examples=300)
@given(st.text())
def test_any_text_survives(text: str) -> None:
    tokenizer = PAIRS[0]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_two_texts_are_given_as_two_arguments_or_as_pairs() -> None:
    tokenizer = surrounded()
    assert dict(tokenizer(["a", "b"], ["c", "d"])) == dict(tokenizer([("a", "c"), ["b", "d"]]))


def test_the_left_is_padded_by_default() -> None:
    encoding = tiny_tokenizer()(["a", "abc"], padding=True, return_tensors="pt")
    assert encoding.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert encoding.input_ids[0, :2].tolist() == [0, 0]


@pytest.mark.parametrize(("kind", "array"), [("pt", torch.Tensor), ("np", np.ndarray)])
def test_tensors_have_a_row_per_text(kind: str, array: type) -> None:
    one = tiny_tokenizer()("the", return_tensors=kind)["input_ids"]
    assert isinstance(one, array)
    assert one.shape == (1, 3)
    assert tiny_tokenizer()("", return_tensors="pt")["input_ids"].dtype == torch.int64


def test_an_encoding_is_a_mapping_with_attributes() -> None:
    encoding = tiny_tokenizer()(["a"], return_tensors="pt")
    assert list({**encoding}) == ["input_ids", "attention_mask"]
    assert encoding.input_ids is encoding["input_ids"]
    assert encoding.to("cpu") is encoding
    encoding["labels"] = 1
    assert encoding.labels == 1
    with pytest.raises(AttributeError, match="has no label; it has input_ids"):
        _ = encoding.label


def test_an_encoding_moves_to_a_device() -> None:
    encoding = tiny_tokenizer()(["a"], return_tensors="pt").to("meta")
    assert {tensor.device.type for tensor in encoding.values()} == {"meta"}


def test_an_encoding_can_be_copied_and_pickled() -> None:
    encoding = tiny_tokenizer()("ab")
    assert dict(copy.copy(encoding)) == dict(pickle.loads(pickle.dumps(encoding)))


def test_a_tokenizer_can_be_pickled() -> None:
    tokenizer = tiny_tokenizer()
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]
    assert copied.pad_token == "<pad>"


def test_rows_can_be_padded_later() -> None:
    tokenizer = tiny_tokenizer()
    rows = [tokenizer("a"), tokenizer("abc")]
    later = tokenizer.pad(rows, return_tensors="pt")
    at_once = tokenizer(["a", "abc"], padding=True, return_tensors="pt")
    assert all(torch.equal(later[name], at_once[name]) for name in at_once)
    assert isinstance(tokenizer.pad({"input_ids": [[5], [6, 7]]}), BatchEncoding)


def test_decoding_takes_ids_in_any_shape() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("the cat")["input_ids"]
    assert tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(np.array(ids)) == "the cat"
    assert tokenizer.decode(ids[0]) == "t"
    assert tokenizer.decode([]) == ""
    batch = ["the cat"] * 2
    assert tokenizer.decode([ids, ids]) == tokenizer.batch_decode(torch.tensor([ids] * 2)) == batch
    assert tokenizer.batch_decode([torch.tensor(ids), torch.tensor(ids)]) == batch


def test_decoding_leaves_out_special_tokens_on_request() -> None:
    tokenizer = surrounded()
    ids = tokenizer("a<|reserved_300|>")["input_ids"]
    assert tokenizer.decode(ids) == "<bos>a<|reserved_300|><eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_an_id_without_a_token_decodes_to_nothing() -> None:
    assert tiny_tokenizer().decode([98, 10_000_000, 98]) == tiny_tokenizer().decode([98, 98])


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], [True], "abc", [None], -100])
def test_what_is_no_id_is_refused(ids: Any) -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        tiny_tokenizer().decode(ids)


def test_tokens_and_ids_are_converted() -> None:
    tokenizer, theirs = surrounded(), reference(surrounded())
    tokens = tokenizer.tokenize("that <eos>😀")
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert ids == theirs.convert_tokens_to_ids(tokens)
    assert tokenizer.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.convert_tokens_to_string(tokens) == "that <eos>😀"
    assert tokenizer.convert_ids_to_tokens([1, 98], skip_special_tokens=True) == ["]"]
    assert tokenizer.convert_tokens_to_ids("nothing") is None


def test_the_unknown_token_stands_for_what_is_not_there() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.unk_token = "<pad>"
    assert tokenizer.convert_tokens_to_ids(["nothing", "<eos>"]) == [0, 2]


def test_sizes_and_vocabulary() -> None:
    tokenizer, theirs = surrounded(), reference(surrounded())
    assert (len(tokenizer), tokenizer.vocab_size) == (len(theirs), theirs.vocab_size) == (320, 282)
    assert tokenizer.get_vocab() == theirs.get_vocab()


def test_named_tokens_can_be_set() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, None)
    tokenizer.bos_token_id = 3
    assert tokenizer.bos_token == "<|im_start|>"
    tokenizer.pad_token = None
    assert "pad_token" not in tokenizer.special_tokens_map


def test_a_token_outside_the_vocabulary_cannot_be_named() -> None:
    with pytest.raises(TokenizerError, match="pad_token must be in the vocabulary"):
        tiny_tokenizer().pad_token = "[PAD]"


def test_all_special_ids_are_what_decoding_skips() -> None:
    tokenizer = tiny_tokenizer(270)
    assert tokenizer.all_special_tokens == ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]


def test_many_threads_get_what_one_gets() -> None:
    tokenizer = surrounded()
    expected = {
        n: dict(tokenizer(TEXTS, padding="max_length", max_length=n, truncation=True))
        for n in range(3, 40)
    }
    wrong: list[int] = []

    def work(seed: int) -> None:
        for n in sorted(expected, key=lambda n: (n * seed) % 41):
            options = {"padding": "max_length", "max_length": n, "truncation": True}
            if dict(tokenizer(TEXTS, **options)) != expected[n]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_text_that_has_its_bos_already_is_flagged() -> None:
    with pytest.warns(UserWarning, match="starts with '<bos>' already"):
        surrounded()("<bos>a")


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("a", {"paddin": True}, UnknownArgumentError, "no argument 'paddin'; wanted perhaps 'padding'"),
    ("a", {"xyzzy": True}, UnknownArgumentError, "no argument 'xyzzy'"),
    ("a", {"stride": 3}, UnsupportedError, "cannot honour stride; wanted 0; got 3"),
    ("a", {"is_split_into_words": True}, UnsupportedError, "is_split_into_words"),
    ("a", {"padding": "most"}, RequestError, "padding is unknown"),
    ("a", {"truncation": "some"}, RequestError, "truncation is unknown"),
    ("a", {"padding": True, "padding_side": "up"}, RequestError, "padding_side is unknown"),
    ("a", {"truncation": True}, RequestError, "There is no length for truncation"),
    ("a", {"padding": "max_length"}, RequestError, "There is no length for padding"),
    ("a", {"padding": True, "max_length": 3}, RequestError, "max_length would have no effect"),
    ("a", {"pad_to_multiple_of": 8}, RequestError, "pad_to_multiple_of would have no effect"),
    ("a", {"padding": True, "pad_to_multiple_of": 0}, RequestError, "pad_to_multiple_of is wrong"),
    ("a", {"max_length": -1}, RequestError, "max_length is wrong"),
    ("abc", {"max_length": 1}, RequestError, "no room for the special tokens"),
    ([("abc", "d")], {"truncation": "only_second", "max_length": 5}, RequestError, "only_second"),
    (["a", "abc"], {"return_tensors": "pt"}, RequestError, "Rows of different lengths.*padding"),
    ("a", {"return_tensors": "tf"}, RequestError, "return_tensors is unknown"),
    ([], {}, RequestError, "no text to encode"),
    (["a"], {"text_pair": ["b", "c"]}, RequestError, "text_pair does not fit text"),
    (3, {}, TokenizerError, "text is not text; wanted a str; got int"),
    (["a", None], {}, TokenizerError, "text 1 is not text"),
    ("a\ud800", {}, TokenizerError, r"lone surrogate at character 1.*U\+D800"),
]


@pytest.mark.parametrize(("text", "options", "error", "what"), REFUSED)
def test_wrong_calls_are_refused(
    text: Any, options: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        surrounded()(text, **options)


def test_padding_needs_a_pad_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(RequestError, match=r"tokenizer\.pad_token = tokenizer\.eos_token"):
        tokenizer(["a"], padding=True)


def test_decoded_text_is_never_tidied_up() -> None:
    with pytest.raises(UnsupportedError, match="clean_up_tokenization_spaces"):
        tiny_tokenizer().decode([98], clean_up_tokenization_spaces=True)


def test_a_panic_of_the_library_is_a_tokenizer_error() -> None:
    class Panic(BaseException):
        pass

    class Backend:
        def encode_batch_fast(self, *args: Any, **options: Any) -> Any:
            raise Panic("index out of bounds")

        def get_vocab_size(self, with_added_tokens: bool) -> int:
            return 0

    tokenizer = Tokenizer(Backend())  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="Panic: index out of bounds"):
        tokenizer("a")


def test_a_request_to_stop_passes_through() -> None:
    class Backend:
        def encode_batch_fast(self, *args: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tokenizer(Backend())("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab_size", [261, 262, 320, 1000])
def test_the_tiny_tokenizer_has_the_size_asked_for(vocab_size: int) -> None:
    tokenizer = tiny_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    assert None not in tokenizer.convert_ids_to_tokens(range(vocab_size))


def test_the_tiny_tokenizer_cannot_be_smaller_than_its_bytes() -> None:
    with pytest.raises(RequestError, match="wanted 261 or more; got 100"):
        tiny_tokenizer(100)
