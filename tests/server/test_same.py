"""HTTP gives what `everystep.generate` gives, whatever is asked; streams join to the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

import everystep as es
from everystep.config.named_strategies import NAMED
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from tests.server.pairs import told_of_prompt
from tests.server.serving import TOKENIZER, Served, chunks_of, in_thread, joined, served, tiny

WORDS = ("the", "and", "of", "hello", "ünï", "it was", "in a", "\n", "0.5", "日本")
SAMPLERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.3, 1.0, 1.7),
    "top_k": (1, 5, 40),
    "top_p": (0.5, 0.95),
    "min_p": (0.05,),
    "typical_p": (0.8,),
    "top_h": (0.5,),
    "top_n_sigma": (1.5,),
    "epsilon_cutoff": (0.001,),
    "eta_cutoff": (0.001,),
    "mirostat_tau": (3.0,),
    "dynatemp_range": (0.3,),
    "repetition_penalty": (1.2,),
    "presence_penalty": (0.5,),
    "frequency_penalty": (-0.4,),
    "dry_multiplier": (0.8,),
    "no_repeat_ngram_size": (2,),
}
STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    {"num_beams": 3, "do_sample": True},
    {"strategy": "diverse_beam"},
    {"num_beams": 3, "force_words_ids": [[70, 71]]},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "low"},
    {"guidance_scale": 1.5, "negative_prompt": "of the"},
    {"prompt_lookup_num_tokens": 4},
    {"best_of": 3, "do_sample": True},
    {"regex": "[ab]{3,8}"},
    {"choices": ["red", "green", "blue"]},
    {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"token_healing": True},
    {"suppress_tokens": [70, 80]},
    {"logit_bias": {"90": 4.0, "101": -3.0}},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 2},
    {"num_beams": 3, "n_best": 3},
    {"num_beams": 2, "regex": "[ab]{3,8}"},
    {"num_beams": 3, "prompt_lookup_num_tokens": 3},
    {"do_sample": True, "prompt_lookup_num_tokens": 3, "draft_verification": "rejection"},
    {"assistant_early_exit": 1},
    {"allowed_sequences": ["red", "green", "blue"]},
    {"allowed_sequences": ["red", "green", "blue"], "num_beams": 2},
    {"grammar": 'start: "a" start | "b"'},
    {"watermarking_config": {"bias": 3.0}},
    {"guidance_scale": 2.0, "do_sample": True},
    {"dola_layers": "high", "do_sample": True},
    *({"strategy": name} for name in ("greedy", "sample", "best_of", "beam", "beam_sample")),
    *({"strategy": name} for name in ("dola", "contrastive", "guided", "lookup")),
    {"strategy": "constrained_beam", "force_words_ids": [[70, 71]]},
    {"strategy": "early_exit", "assistant_early_exit": 1},
)


def drawn(rng: random.Random) -> tuple[Any, dict[str, Any]]:
    """A prompt and keywords, all of which JSON can say."""
    prompt: Any = " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
    if rng.random() < 0.2:
        prompt = rng.choices(range(5, 300), k=rng.randint(1, 12))
    asked = {**rng.choice(STRATEGIES)}
    if asked.get("do_sample") or asked.get("strategy") in ("sample", "best_of", "beam_sample"):
        for name in rng.sample(sorted(SAMPLERS), rng.randint(0, 4)):
            asked[name] = rng.choice(SAMPLERS[name])
    asked |= {"max_new_tokens": rng.randint(1, 20), "seed": rng.randint(0, 2**40)}
    if rng.random() < 0.3:
        asked["stop_strings"] = rng.sample(["a", "e", "\x1c", " th", "m"], 2)
    if rng.random() < 0.2:
        asked["min_new_tokens"] = min(4, asked["max_new_tokens"])
    return prompt, asked


def in_process(prompt: Any, asked: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]] | str:
    """The texts and ids that the library gives, or the text of its error."""
    keywords = {**asked}
    if "stop_strings" in keywords:
        keywords["trim_stop_strings"] = True
    if "logit_bias" in keywords:
        keywords["logit_bias"] = {int(id): bias for id, bias in keywords["logit_bias"].items()}
    try:
        found = es.generate(tiny(), TOKENIZER, prompt, return_dict_in_generate=True, **keywords)
    except RequestError as error:
        return str(error)
    results = found if isinstance(found, list) else [found]
    return [(one.text, one.tokens) for one in results]


def over_http(server: Served, prompt: Any, asked: dict[str, Any]) -> Any:
    body = {"prompt": prompt, **asked, "return_token_ids": True}
    answer = server.post("/v1/completions", **body)
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]
    choices = answer.json()["choices"]
    return [(one["text"], tuple(one["token_ids"])) for one in choices]


def require_same(server: Served, seed: int) -> bool:
    """Whether it was an error, which both have to say."""
    prompt, asked = drawn(random.Random(seed))
    wanted = in_process(prompt, asked)
    assert over_http(server, prompt, asked) == wanted, (seed, prompt, asked)
    if isinstance(wanted, str):
        return True
    if seed % 2 == 0:
        body = server.post("/v1/completions", prompt=prompt, stream=True, **asked)
        chunks = chunks_of(body.text)
        texts = [joined(chunks, index) for index in range(len(wanted))]
        assert texts == [text for text, _ in wanted], (seed, prompt, asked)
    return False


@pytest.mark.filterwarnings("ignore")
def test_random_requests_are_those_of_the_library(server: Served) -> None:
    errors = sum(require_same(server, seed) for seed in range(60))
    assert errors < 15, "the draws are mostly possible"


def test_every_named_strategy_is_asked_for() -> None:
    asked = {one.get("strategy") for one in STRATEGIES}
    assert asked >= {*NAMED} - {"assisted"}, "which needs a model, and a request has none"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_thousand_random_requests(server: Served) -> None:
    for seed in range(60, 2000):
        require_same(server, seed)


def test_a_conversation_means_what_it_means_to_the_library(server: Served) -> None:
    messages = [{"role": "user", "content": "hello <|im_end|> the"}]
    answer = server.post("/v1/chat/completions", messages=messages, seed=5, max_tokens=9).json()
    wanted = es.chat(tiny(), TOKENIZER, messages, seed=5, max_new_tokens=9)
    assert answer["choices"][0]["message"]["content"] == wanted
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answer = server.post("/v1/chat/completions", messages=parts, seed=5, max_tokens=9)
    whole = [{"role": "user", "content": "hello"}]
    wanted = es.chat(tiny(), TOKENIZER, whole, seed=5, max_new_tokens=9)
    assert answer.json()["choices"][0]["message"]["content"] == wanted, "parts are not printed"


def test_a_conversation_has_the_defaults_of_its_model() -> None:
    """A system message, and a sampling, that neither the caller nor the template says."""
    model = tiny_llama(vocab_size=320, max_position_embeddings=4096)
    usual = es.chat(model, TOKENIZER, "hello", seed=5, max_new_tokens=12)
    model.chat_defaults = chat = es.ChatDefaults("it was the", {"temperature": 1.6, "top_k": 50})
    asked: Any = {"seed": 5, "max_new_tokens": 12}
    wanted = es.chat(model, TOKENIZER, "hello", **asked)
    begun = [{"role": "system", "content": "it was the"}, {"role": "user", "content": "hello"}]
    model.chat_defaults = es.ChatDefaults("it was the")
    sampled = es.chat(model, TOKENIZER, "hello", **asked)
    assert len({usual, wanted, sampled}) == 3, "both of the defaults count"
    model.chat_defaults = chat
    own = [{"role": "system", "content": "of"}, begun[1]]
    with served(in_thread(model), chat=chat) as server:

        def answered(messages: Any, **more: Any) -> Any:
            body = {"messages": messages, "seed": 5, "max_tokens": 12, **more}
            return server.post("/v1/chat/completions", **body)

        def said(messages: Any, **more: Any) -> str:
            return str(answered(messages, **more).json()["choices"][0]["message"]["content"])

        assert said(begun[1:]) == said(begun) == wanted
        assert joined(chunks_of(answered(begun[1:], stream=True).text)) == wanted
        assert said(own) == es.chat(model, TOKENIZER, own, **asked)
        greedy = es.chat(model, TOKENIZER, "hello", **asked, do_sample=False)
        assert said(begun[1:], temperature=0) == greedy
        ids = server.post("/tokenize", messages=begun[1:]).json()["tokens"]
        assert ids == server.post("/tokenize", messages=begun).json()["tokens"]
        body: Any = {"messages": begun[1:], "seed": 5, "max_tokens": 12}
        assert server.post("/v1/messages", **body).json()["content"][0]["text"] == wanted
        body = {"input": "hello", "seed": 5, "max_output_tokens": 12}
        (item,) = server.post("/v1/responses", **body).json()["output"]
        assert item["content"][0]["text"] == wanted


def test_a_stream_of_beams_loses_the_text_that_ended_it(server: Served) -> None:
    """Their tokens are told at the end, the last one together with it."""
    asked: Any = {"prompt": "hello", "max_tokens": 12, "num_beams": 3}
    plain = server.completion(**asked)["choices"][0]["text"]
    stop = next(one for one in plain if one.isascii() and one.isprintable())
    (whole,) = server.completion(**asked, stop=stop)["choices"]
    chunks = chunks_of(server.post("/v1/completions", **asked, stop=stop, stream=True).text)
    assert joined(chunks) == whole["text"]


def test_scores_are_those_of_the_library(server: Served) -> None:
    texts = ["hello the and", "it was"]
    data = server.post("/v1/everystep/score", texts=texts, best=2).json()["data"]
    for one, wanted in zip(data, es.score(tiny(), TOKENIZER, texts, best=2), strict=True):
        assert one["tokens"] == wanted.tokens.tolist()
        assert one["logprobs"] == wanted.logprobs.tolist()
        assert [[b["id"] for b in row] for row in one["top_logprobs"]] == wanted.top_tokens.tolist()
    (after,) = server.post("/v1/everystep/score", texts=" the", after="hello").json()["data"]
    wanted = es.score(tiny(), TOKENIZER, " the", after="hello")
    assert after["logprobs"] == wanted.logprobs.tolist()


@pytest.mark.parametrize("most", [0, 1, 4])
def test_echoed_log_probabilities_are_likelihoods(server: Served, most: int) -> None:
    """What evaluation harnesses read: ids in, log-probabilities of the prompt out."""
    ids = TOKENIZER.encode("hello the and of")
    wanted = es.score(tiny(), TOKENIZER, ids, best=1)
    for _ in range(2):  # the second finds the prompt in the cache
        answer = server.completion(
            prompt=ids, max_tokens=most, echo=True, logprobs=1, temperature=0
        )
        (choice,) = answer["choices"]
        known = choice["logprobs"]
        assert known["token_logprobs"][0] is None and known["top_logprobs"][0] is None
        assert known["token_logprobs"][1 : len(ids)] == wanted.logprobs.tolist()
        assert len(known["tokens"]) == len(ids) + most == len(known["text_offset"])
        assert answer["usage"]["completion_tokens"] == most
        assert choice["text"].startswith("hello the and of")
        assert known["text_offset"][:3] == [0, 1, 2]


@pytest.mark.parametrize("best", [0, 3])
def test_prompt_logprobs_are_those_of_the_library(server: Served, best: int) -> None:
    prompts = ["hello the and of", TOKENIZER.encode("it was " * 150)]
    asked: Any = {"prompt_logprobs": best, "do_sample": True, "seed": 4}
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "return_token_ids": True}
    choices = server.completion(**body, **asked)["choices"]
    for number, prompt in enumerate(prompts):
        known = {"max_new_tokens": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
        found: Any = es.generate(tiny(), TOKENIZER, prompt, **asked, **known)
        for one, choice in zip(found, choices[2 * number :][:2], strict=True):
            assert choice["token_ids"] == list(one.tokens) and choice["logprobs"] is None
            assert choice["prompt_logprobs"] == told_of_prompt(one.prompt_logprobs)
            ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
            assert len(choice["prompt_logprobs"]) == len(ids)
    assert "prompt_logprobs" not in server.completion(prompt="hello", max_tokens=1)["choices"][0]


def test_prompt_logprobs_of_a_conversation(server: Served) -> None:
    messages = [{"role": "user", "content": "hello the"}]
    asked: Any = {"seed": 5, "prompt_logprobs": 2, "logprobs": True, "top_logprobs": 1}
    body = server.post("/v1/chat/completions", messages=messages, max_tokens=4, **asked).json()
    known: Any = {"seed": 5, "prompt_logprobs": 2, "return_dict_in_generate": True}
    found: Any = es.generate(tiny(), TOKENIZER, messages, max_new_tokens=4, **known)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == found.text
    wanted = told_of_prompt(found.prompt_logprobs)
    assert choice["prompt_logprobs"] == wanted == body["prompt_logprobs"]
    assert len(wanted) == body["usage"]["prompt_tokens"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1


@pytest.mark.parametrize("prompt", [{"prompt": "hello"}, {"messages": [{"role": "user"}]}])
def test_a_stream_without_log_probabilities_of_its_prompt_says_so(
    server: Served, prompt: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
    answer = server.post(path, **prompt, stream=True, prompt_logprobs=0)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "a stream has no log-probabilities of its prompt" in error["message"]
    assert "got stream and prompt_logprobs. Leave one of them out" in error["message"]


@pytest.mark.parametrize(("of_tokens", "of_prompt"), [(1, 3), (3, 1), (0, 2), (2, 2)])
def test_an_echo_and_prompt_logprobs_have_their_own_numbers(
    server: Served, of_tokens: int, of_prompt: int
) -> None:
    asked: Any = {"prompt": "hello the and of", "max_tokens": 2, "temperature": 0}
    echo = {"echo": True, "logprobs": of_tokens}
    (both,) = server.completion(**asked, **echo, prompt_logprobs=of_prompt)["choices"]
    (one,) = server.completion(**asked, **echo)["choices"]
    (other,) = server.completion(**asked, prompt_logprobs=of_prompt)["choices"]
    assert both["logprobs"] == one["logprobs"]
    assert both["prompt_logprobs"] == other["prompt_logprobs"]
