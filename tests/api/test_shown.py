"""What objects show of themselves: short lines, small tables, nothing that a text could inject; and
what a new user is told where the first call goes wrong."""

from __future__ import annotations

import asyncio
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import everystep as es
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.shown import counted, table
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import FinishReason

MODEL, TOKENIZER = tiny_llama(vocab_size=320, dtype=torch.float32), tiny_tokenizer(320)
SCRIPT = "<script>alert('x')</script>"
IDS = torch.tensor([[5, 6, 7]])


def foreign(**options: Any) -> Any:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, **options}
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, num_attention_heads=2, **small))


def test_a_model_says_what_it_is() -> None:
    assert "runs on" in repr(MODEL)
    line = re.sub(r"runs on .*?\), ", "", repr(MODEL))
    wanted = "llama, 36k parameters, 144kB float32, cache float32, context 256"
    assert line == f"LanguageModel({wanted})"
    wrapped = repr(es.wrap(foreign()))
    assert "29.3k parameters" in wrapped and "transformers (LlamaForCausalLM)" in wrapped


def test_the_weights_that_a_model_counts_are_all_it_has() -> None:
    assert sum(weight.numel() for weight in MODEL.state_dict().values()) == 36_000
    assert MODEL.num_parameters() == 36_000


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_by_transformers(tied: bool, tmp_path: Path) -> None:
    module = foreign(tie_word_embeddings=tied)
    module.save_pretrained(tmp_path)
    own = es.load_model(tmp_path)
    packed = es.load_model(tmp_path, quantize="int8")
    counts = [one.num_parameters() for one in (own, packed, es.wrap(module))]
    assert counts == [module.num_parameters()] * 3


def test_a_tokenizer_says_what_it_is() -> None:
    assert (
        repr(TOKENIZER) == "Tokenizer('tiny', BPE, 320 tokens, bos 1, eos 2, pad 0, chat template)"
    )


def test_a_result_is_one_short_line() -> None:
    reason = FinishReason("stop", "x" * 1000)
    long = es.Generated("a" * 5000, (5,) * 2000, reason, -1.23456, 10, 4)
    assert len(repr(long)) < 300
    assert "2000 tokens" in repr(long) and "5000 characters" in repr(long)
    out = MODEL.generate(
        IDS, max_new_tokens=200, return_dict_in_generate=True, output_scores=True, logprobs=2
    )
    assert len(repr(out)) < 3000 and len(repr(out.past_key_values)) < 100
    assert repr(out.past_key_values) == "DynamicCache(2 x DynamicLayer(length=202))"
    assert repr(es.DynamicCache()) == "DynamicCache(empty)"


def test_streams_runs_scores_and_prefixes_are_short_lines() -> None:
    alone = es.stream(MODEL, TOKENIZER, "a", max_new_tokens=2)
    assert repr(alone) == "Stream(1 prompt, 1 under way, 0 waiting)"
    stream = es.stream(MODEL, TOKENIZER, ["a", "b"], max_new_tokens=2, eos_token_id=None)
    assert repr(stream) == "Stream(2 prompts, 2 under way, 0 waiting)"
    list(stream)
    assert repr(stream) == "Stream(2 prompts, 0 under way, 0 waiting)"
    run = es.open(MODEL, TOKENIZER, "a", max_new_tokens=3, eos_token_id=None)
    assert "_sight" not in repr(next(run))
    assert repr(run) == "Run(1 tokens, 0 of them given, open)"
    run.send([7])
    assert "1 of them given" in repr(run)
    score = es.score(MODEL, TOKENIZER, "abc")
    assert repr(score) == f"Score(2 tokens, 3 bytes, perplexity {score.perplexity:.4g})"
    table = es.score(MODEL, TOKENIZER, "abc", best=1)._repr_html_()
    assert "its text" in table and ">b</td>" in table and ">c</td>" in table
    assert repr(es.prefill(MODEL, TOKENIZER, "abc")).startswith("Prefix(3 positions, ")


def test_an_engine_and_its_streams_are_short_lines() -> None:
    async def main() -> None:
        async with es.AsyncEngine(MODEL, TOKENIZER, max_rows=3) as engine:
            assert repr(engine) == f"AsyncEngine({MODEL!r}, at most 3 rows, open)"
            stream = engine.stream("a", max_new_tokens=2, eos_token_id=None)
            assert "waiting)" in repr(stream)
            assert [event.token >= 0 async for event in stream] == [True, True]
            assert repr(stream) == "AsyncStream(ended, 0 waiting)"
        assert repr(engine).endswith(", closed)")

    asyncio.run(main())


@pytest.mark.parametrize(("number", "said"), [(7, "7B"), (36_000, "36kB"), (144_000_000, "144MB")])
def test_large_numbers_are_short(number: int, said: str) -> None:
    assert counted(number, "B") == said


def test_a_score_is_shown_where_a_strategy_gives_one() -> None:
    asked = {"max_new_tokens": 2, "return_dict_in_generate": True}
    assert "score" not in repr(es.generate(MODEL, TOKENIZER, "a", **asked))
    assert "score=-" in repr(es.generate(MODEL, TOKENIZER, "a", num_beams=2, **asked))


def test_tables_escape_what_they_show() -> None:
    shown = [
        table((SCRIPT,), [(SCRIPT,)], SCRIPT),
        es.Generated(SCRIPT, (1,), FinishReason("stop", SCRIPT), 0.0, 1)._repr_html_(),
    ]
    for one in shown:
        assert "<script" not in one and "&lt;script&gt;" in one


def test_tables_are_bounded() -> None:
    large = table(("id",), ((number,) for number in range(10_000)))
    assert large.count("<tr>") == 102 and "9900 more" in large
    assert len(table(("text",), [("x" * 100_000,)])) < 5000


def test_a_list_of_results_has_a_table() -> None:
    few: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}
    texts = es.generate(MODEL, TOKENIZER, [SCRIPT, "b"], **few)
    assert texts == [*texts] and repr(texts) == repr([*texts]) and isinstance(texts, list)
    shown = texts._repr_html_()  # type: ignore[attr-defined]
    assert shown.count("<tr>") == 3 and ">1</td>" in shown and "<th" in shown
    assert "score" not in shown and "<script" not in shown
    results = es.generate(MODEL, TOKENIZER, ["a", "b"], return_dict_in_generate=True, **few)
    assert ">score</th>" in results._repr_html_()  # type: ignore[attr-defined]
    pairs = es.generate(
        MODEL, TOKENIZER, ["a", "b"], do_sample=True, seed=1, num_return_sequences=2, **few
    )
    assert pairs._repr_html_().count(">1</td>") == 2
    assert es.generate(MODEL, TOKENIZER, [])._repr_html_().count("<tr>") == 1  # type: ignore[attr-defined]


def test_runs_and_scores_have_tables() -> None:
    run = es.open(MODEL, TOKENIZER, "<b>", max_new_tokens=4, eos_token_id=None)
    tokens = run.result().tokens
    assert all(f">{token}</td>" in run._repr_html_() for token in tokens)
    why = run.explain(0)._repr_html_()
    assert why.count("<table>") == 2 and f">{tokens[0]}</td>" in why
    score = es.score(MODEL, TOKENIZER, "abc", best=3)
    assert "best id" in score._repr_html_()
    rows = es.score(MODEL, TOKENIZER, "abc")._repr_html_()
    assert rows.count("<tr>") == 3 and "best id" not in rows


@pytest.mark.parametrize("name", ["load", "load_model"])
def test_a_model_in_memory_needs_no_loading(name: str) -> None:
    with pytest.raises(RequestError, match=r"pass it to everystep\.generate as it is"):
        getattr(es, name)(foreign())


def test_a_type_given_as_text_is_shown_as_text() -> None:
    with pytest.raises(UnsupportedError, match="got 'float32'"):
        MODEL.to(dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [es.generate, es.stream, es.open, es.score])
def test_a_swapped_pair_is_said_to_be_swapped(call: Any) -> None:
    with pytest.raises(EverystepError, match="are swapped"):
        call(TOKENIZER, MODEL, "x")


def test_names_of_other_engines_lead_to_ours() -> None:
    for refusing in (es.GenerationConfig, MODEL.generate):
        with pytest.raises(EverystepError, match="stop_strings"):
            refusing(stop=["a"])  # type: ignore[call-arg]


def test_an_encoding_as_first_argument_is_to_be_unpacked() -> None:
    with pytest.raises(RequestError, match=r"generate\(\*\*batch\)"):
        MODEL.generate(TOKENIZER("abc", return_tensors="pt"))  # type: ignore[arg-type]


def test_a_stream_says_once_that_nobody_set_a_length() -> None:
    stream = es.stream(MODEL, TOKENIZER, ["a", "b"], eos_token_id=None)
    with pytest.warns(UserWarning, match="default length") as said:
        assert len(list(stream)) == 40
    assert [one.filename for one in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(es.stream(MODEL, TOKENIZER, "a", max_new_tokens=2))


def test_a_notebook_shows_the_callers_lines_and_the_text_of_a_wrong_call() -> None:
    with pytest.raises(RequestError) as caught:
        es.generate(MODEL, TOKENIZER, "Is it?", max_new_token=3)
    # What IPython asks an error for.
    lines = caught.value._render_traceback_()
    told = "\n".join(lines)
    assert lines[0].startswith("Traceback") and "max_new_token=3" in told
    assert "src/everystep" not in told and len(lines) <= 5
    assert lines[-1].endswith(str(caught.value))


def test_a_notebook_shows_the_code_that_a_wrong_call_is_due_to() -> None:
    def processor(ids: Any, scores: Any) -> Any:
        raise RequestError("a processor that cannot go on")

    with pytest.raises(RequestError) as caught:
        es.generate(MODEL, TOKENIZER, "Is it?", max_new_tokens=3, logits_processor=[processor])
    told = "\n".join(caught.value._render_traceback_())
    assert "in processor" in told and "a processor that cannot go on" in told
