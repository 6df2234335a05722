"""Records smollm2_ids.json and smollm2_vocabulary.json.xz; see README.md in this folder.

Run with the GGUF file's path in an environment of its own:

    pip install gguf llama-cpp-python regex
    python record_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import hashlib
import itertools
import json
import lzma
import sys
from pathlib import Path

import regex
from gguf import GGUFReader
from llama_cpp import Llama

HERE = Path(__file__).parent
PREFIX = "tokenizer.ggml."
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGIT = regex.compile(r"(\p{N})")


def alphabet():
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + n) for n, b in enumerate(hidden)}}


class PlainBpe:
    """Digits alone, then GPT-2's words, then merges, in the most literal way."""

    def __init__(self, metadata):
        tokens, types = metadata["tokens"], metadata["token_type"]
        self.ids = {token: id for id, token in enumerate(tokens)}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(metadata["merges"])}
        self.special = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
        self.letters = alphabet()

    def encode(self, text):
        parts = regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text)
        ids = []
        for part in parts:
            ids += [self.ids[part]] if part in self.special else self.words(part)
        return ids

    def words(self, text):
        pieces = [piece for piece in DIGIT.split(text) if piece]
        return [id for p in pieces for word in GPT2.findall(p) for id in self.merged(word)]

    def merged(self, word):
        # The original tokenizer has no unknown token: a byte without a token is left out,
        # before anything is merged.
        symbols = [self.letters[b] for b in word.encode()]
        symbols = [s for s in symbols if s in self.ids]
        while True:
            pairs = enumerate(itertools.pairwise(symbols))
            ranked = [(self.ranks[pair], at) for at, pair in pairs if pair in self.ranks]
            if not ranked:
                return [self.ids[s] for s in symbols]
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def main(path):
    reader = GGUFReader(path)
    metadata = {k: f.contents() for k, f in reader.fields.items() if k.startswith("tokenizer.")}
    short = {k.removeprefix(PREFIX): v for k, v in metadata.items()}
    lines = [json.loads(line) for line in (HERE / "lines.txt").read_text("utf-8").splitlines()]
    plain = PlainBpe(short)
    cpp = Llama(path, vocab_only=True, verbose=False)
    ids = [plain.encode(line) for line in lines]
    for line, ours in zip(lines, ids, strict=True):
        theirs = cpp.tokenize(line.encode(), add_bos=False, special=True)
        if ours != theirs:
            print("llama.cpp differs:", repr(line), ours, theirs, sep="\n  ")
    rows = ",\n".join(json.dumps(row) for row in ids)
    (HERE / "smollm2_ids.json").write_text(f"[\n{rows}\n]\n")
    stored = json.dumps(metadata, ensure_ascii=False).encode()
    (HERE / "smollm2_vocabulary.json.xz").write_bytes(
        lzma.compress(stored, preset=9 | lzma.PRESET_EXTREME)
    )
    print(hashlib.sha256(Path(path).read_bytes()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
