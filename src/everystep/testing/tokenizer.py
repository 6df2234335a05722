"""A tiny tokenizer for tests: byte level, made in memory, the same on every machine.

It knows every byte, so it encodes any text and decodes to that text. A few common words are
merged, so that tokens are of different lengths; a chat template of the ChatML kind is included.
Nothing is trained and no file is read.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from everystep.errors import RequestError
from everystep.text import Settings, Tokenizer
from everystep.text.pieces import byte_alphabet

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
WORDS = (" the", " and", " of", " to", " in", " is", " a", "ing", "er", " it", " that", " was")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A tokenizer with exactly `vocab_size` tokens, at least one for every byte.

    Ids 0 to 4 are pad, bos, eos and the two marks of the chat template, then come the bytes and
    merged words; what is left are reserved tokens that no text contains. Left padding; no
    special tokens are added to a text. RequestError below 261 tokens.
    """
    base = [*SPECIAL, *byte_alphabet().values()]
    if vocab_size < len(base):
        raise RequestError(
            "A byte-level vocabulary is larger", wanted=f"{len(base)} or more", got=vocab_size
        )
    merges = _merges()[: vocab_size - len(base)]
    tokens = [*base, *(left + right for left, right in merges)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{id}|>" for id in range(len(tokens), vocab_size)]
    backend.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *reserved)]
    )
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return Tokenizer(backend, Settings(special=special, chat_template=CHATML, name_or_path="tiny"))


def _merges() -> list[tuple[str, str]]:
    """Merges that build each word letter by letter; words with a common start share them."""
    letters = byte_alphabet()
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        spelled = [letters[byte] for byte in word.encode()]
        for end in range(1, len(spelled)):
            merges["".join(spelled[:end]), spelled[end]] = None
    return list(merges)


class Letters:
    """A tokenizer with one token per letter; the letters of id 0, 1, ... begin `shift` letters on.

    Two of them say the same in different ids, as far as both have the letters.
    """

    def __init__(self, vocab_size: int, shift: int = 0) -> None:
        self.tokens = [chr(0x4E00 + shift + id) for id in range(vocab_size)]
        self._ids = {token: id for id, token in enumerate(self.tokens)}

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return dict(self._ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of some ids."""
        return "".join(self.tokens[id] for id in ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, without the letters that it does not have."""
        return [self._ids[letter] for letter in text if letter in self._ids]
