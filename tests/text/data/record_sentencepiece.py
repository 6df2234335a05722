"""Records sentencepiece.json: a small SentencePiece model and its ids; see README.md here.

pip install sentencepiece
python record_sentencepiece.py
"""

import io
import json
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
CONTROL, USER_DEFINED = 3, 4


def kind(model, id):
    if model.is_unknown(id):
        return 2
    if model.is_control(id):
        return CONTROL
    if model.is_byte(id):
        return 6
    return USER_DEFINED if model.id_to_piece(id) == "<mark>" else 1


def main():
    lines = [json.loads(line) for line in (HERE / "lines.txt").read_text("utf-8").splitlines()]
    # A NUL ends a text inside SentencePiece's trainer, and no noncharacter passes it unchanged.
    lines = [line for line in lines if "\0" not in line and "\ufdd0" not in line]
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=stream,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<mark>"],
        num_threads=1,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    every = range(model.vocab_size())
    # SentencePiece does not look for control tokens in a text; everystep does.
    texts = [line for line in lines if "<s>" not in line] + ["", " ", "  x", "end <mark>"]
    stored = {
        "metadata": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in every],
            "tokenizer.ggml.scores": [model.get_score(id) for id in every],
            "tokenizer.ggml.token_type": [kind(model, id) for id in every],
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
            "tokenizer.ggml.bos_token_id": model.bos_id(),
            "tokenizer.ggml.eos_token_id": model.eos_id(),
            "tokenizer.ggml.add_bos_token": False,
        },
        "texts": [{"text": text, "ids": model.encode(text)} for text in texts],
    }
    path = HERE / "sentencepiece.json"
    path.write_text(json.dumps(stored, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
