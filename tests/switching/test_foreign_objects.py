"""Objects of transformers in calls of ours: tokenizers, configurations, processors, criteria,
streamers. The package takes them by what they can do, and imports nothing for it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, TokenizerError, UnknownArgumentError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import CHATML, tiny_tokenizer
from everystep.text import follow

OURS = tiny_tokenizer(320)
TEXTS = ["Grüße, 你好!", "Water is"]
MESSAGES = [{"role": "user", "content": "Is it 4?"}]
LONG: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}


def fast() -> Any:
    """A tokenizer of transformers with the same vocabulary."""
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(320).backend, **names
    )
    made.chat_template = CHATML
    return made


class Slow:
    """A tokenizer of which nothing is known but what it does."""

    def encode(self, text: str) -> list[int]:
        return list(OURS.encode(text))

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return OURS.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [fast(), Slow()], ids=["fast", "slow"])
def test_a_tokenizer_of_another_library_generates_and_streams(
    model: LanguageModel, tokenizer: Any
) -> None:
    wanted = es.generate(model, OURS, TEXTS, **LONG)
    assert es.generate(model, tokenizer, TEXTS, **LONG) == wanted
    stream = es.stream(model, tokenizer, TEXTS, **LONG)
    shown = ["", ""]
    for event in stream:
        shown[int(event.request_id)] += event.text
    assert shown == wanted == [one.text for (one,) in stream.results()]


def test_messages_go_through_its_template(model: LanguageModel) -> None:
    wanted = es.chat(model, OURS, MESSAGES, **LONG)
    assert es.chat(model, fast(), MESSAGES, **LONG) == wanted
    assert es.generate(model, fast(), [MESSAGES, "Water"], **LONG)[0] == wanted


def test_a_tokenizer_without_a_template_cannot_chat(model: LanguageModel) -> None:
    bare = fast()
    bare.chat_template = None
    for tokenizer in (bare, Slow()):
        with pytest.raises((RequestError, TokenizerError), match="template"):
            es.chat(model, tokenizer, "Hello")


@pytest.mark.parametrize("extra", [{}, {"trim_stop_strings": True}, {"num_beams": 3}])
def test_stop_strings_of_its_vocabulary_end_and_are_trimmed(
    model: LanguageModel, extra: dict[str, Any]
) -> None:
    whole = es.generate(model, OURS, "Water is", **LONG)
    stop = {"stop_strings": [whole[3:5]], **LONG, **extra}
    wanted = es.generate(model, OURS, "Water is", **stop)
    assert es.generate(model, fast(), "Water is", **stop) == wanted
    stream = es.stream(model, fast(), "Water is", **stop)
    assert "".join(event.text for event in stream) == wanted
    ids = torch.tensor([OURS.encode("Water is")])
    theirs = model.generate(ids, tokenizer=fast(), stop_strings=[whole[3:5]], **LONG)
    assert torch.equal(
        theirs, model.generate(ids, tokenizer=OURS, stop_strings=[whole[3:5]], **LONG)
    )


def test_what_streams_is_what_its_decode_says() -> None:
    """Half characters, special tokens, ids beyond the vocabulary, and clean-up of spaces."""
    generator = torch.Generator().manual_seed(1)
    cleaning = fast()
    cleaning.clean_up_tokenization_spaces = True
    for tokenizer in (fast(), cleaning, Slow()):
        for skips in (True, False):
            for _ in range(30):
                ids = torch.randint(0, 325, (20,), generator=generator).tolist()
                if isinstance(tokenizer, Slow):
                    ids = [id for id in ids if id < 320]
                follower = follow(tokenizer, skips)
                pieces = [follower.push(id) for id in ids[:7]]
                twin = follower.copy()
                text = "".join([*pieces, *map(follower.push, ids[7:]), follower.finish()])
                assert text == tokenizer.decode(ids, skip_special_tokens=skips)
                assert "".join([*pieces, twin.push(ids[7:]), twin.finish()]) == text


def test_streamers_of_ours_and_theirs_print_the_same(model: LanguageModel) -> None:
    ids = torch.tensor([OURS.encode("Water is")])
    printed = []
    for kind in (es.TextStreamer, transformers.TextStreamer):
        for tokenizer in (OURS, fast()):
            with redirect_stdout(io.StringIO()) as shown:
                streamer = kind(tokenizer, skip_prompt=True, skip_special_tokens=True)
                model.generate(ids, streamer=streamer, **LONG)
            printed.append(shown.getvalue())
    assert len(set(printed)) == 1 and printed[0].strip()


def test_a_streamer_of_events_has_their_text(model: LanguageModel) -> None:
    class Texts:
        def __init__(self) -> None:
            self.text = ""

        def put(self, value: Any) -> None: ...

        def end(self) -> None: ...

        def on_event(self, event: Any) -> None:
            self.text += event.text

    streamer = Texts()
    ids = torch.tensor([OURS.encode("Water is")])
    model.generate(ids, streamer=streamer, tokenizer=fast(), **LONG)
    assert streamer.text == es.generate(model, OURS, "Water is", **LONG)


def test_healing_and_breakers_read_its_vocabulary(model: LanguageModel) -> None:
    ids = torch.tensor([OURS.encode("Water is i")])
    options: dict[str, Any] = {"token_healing": True, "dry_multiplier": 2.0, **LONG}
    options["dry_sequence_breakers"] = [" the"]
    wanted = model.generate(ids, tokenizer=OURS, **options)
    assert torch.equal(model.generate(ids, tokenizer=fast(), **options), wanted)


# --- configurations -------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {"max_new_tokens": 5, "repetition_penalty": 1.7},
    {"max_length": 9, "do_sample": True, "top_k": 5, "temperature": 0.7},
    {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    {"max_new_tokens": 6, "sequence_bias": [[[7], 9.0]], "bad_words_ids": [[8]]},
    {"max_new_tokens": 6, "eos_token_id": [2, 3], "exponential_decay_length_penalty": (2, 1.5)},
    {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True},
]
IDS = torch.tensor([[5, 6, 7]])


def same(ours: Any, theirs: Any) -> bool:
    """Two results of `model.generate` with equal contents."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    scores = [torch.stack(one.scores) for one in (ours, theirs)]
    return torch.equal(ours.sequences, theirs.sequences) and torch.equal(*scores)


@pytest.mark.parametrize("values", CONFIGS)
def test_a_configuration_of_the_reference_says_the_same(
    model: LanguageModel, values: dict[str, Any]
) -> None:
    theirs, ours = transformers.GenerationConfig(**values), es.GenerationConfig(**values)
    wanted = model.generate(IDS, ours, seed=3)
    assert same(model.generate(IDS, generation_config=theirs, seed=3), wanted)
    if "output_scores" not in values:
        common: dict[str, Any] = {"seed": 3}
        many = es.generate(model, None, [[5, 6, 7]] * 2, options=[ours, theirs], **common)
        assert len(many) == 2 and (values.get("do_sample") or many[0] == many[1])
        assert es.generate(model, None, [5, 6, 7], generation_config=theirs, **common) == (
            es.generate(model, None, [5, 6, 7], generation_config=ours, **common)
        )
        streams = [
            es.stream(model, None, [5, 6, 7], generation_config=c, **common) for c in (ours, theirs)
        ]
        assert len({len(list(one)) for one in streams}) == 1
        assert streams[0].results() == streams[1].results()


def test_as_the_defaults_of_a_model_too(model: LanguageModel) -> None:
    own = tiny_llama(vocab_size=320)
    own.generation_config = transformers.GenerationConfig(max_new_tokens=3)  # type: ignore[assignment]
    assert own.generate(IDS).shape == (1, 6)


@pytest.mark.parametrize(
    "config",
    [
        transformers.WatermarkingConfig(bias=9.0),
        transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
    ],
)
def test_a_watermark_of_the_reference_is_the_same_as_ours(
    model: LanguageModel, config: Any
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 1}
    ours = getattr(es, type(config).__name__)(
        **{name: value for name, value in vars(config).items() if value is not None}
    )
    wanted = model.generate(IDS, watermarking_config=ours, **options)
    assert torch.equal(model.generate(IDS, watermarking_config=config, **options), wanted)
    passed = transformers.GenerationConfig(watermarking_config=config)
    assert torch.equal(model.generate(IDS, passed, **options), wanted)
    assert not torch.equal(model.generate(IDS, **options), wanted)


def test_a_misspelt_field_of_the_reference_is_refused(model: LanguageModel) -> None:
    with pytest.raises(UnknownArgumentError, match=r"max_new_token'.*max_new_tokens"):
        model.generate(IDS, transformers.GenerationConfig(max_new_token=5))
    # What a checkpoint holds for others is none of our business, and not lost.
    config = transformers.GenerationConfig(chat_format="raw", max_new_tokens=2)
    assert model.generate(IDS, config).shape == (1, 5)
    assert es.GenerationConfig.of(config).chat_format == "raw"


def test_conflicts_in_it_are_those_of_ours(model: LanguageModel) -> None:
    config = transformers.GenerationConfig(num_beams=3, penalty_alpha=0.6)
    with pytest.raises(RequestError, match=r"penalty_alpha=0\.6 with num_beams=3"):
        model.generate(IDS, config)


# --- processors, criteria -------------------------------------------------------------------------


def test_processors_and_criteria_of_the_reference_run(model: LanguageModel) -> None:
    processors = transformers.LogitsProcessorList(
        [transformers.RepetitionPenaltyLogitsProcessor(1.5), transformers.TopKLogitsWarper(4)]
    )
    criteria = transformers.StoppingCriteriaList(
        [
            transformers.StopStringCriteria(fast(), ["q"]),
            transformers.EosTokenCriteria(17),
        ]
    )
    ours: dict[str, Any] = {
        "logits_processor": [es.RepetitionPenaltyLogitsProcessor(1.5), es.TopKLogitsWarper(4)],
        "stopping_criteria": [
            es.StopStringCriteria(OURS, ["q"]),
            es.EosTokenCriteria(17),
        ],
    }
    theirs: dict[str, Any] = {"logits_processor": processors, "stopping_criteria": criteria}
    for extra in ({}, {"do_sample": True, "seed": 4}, {"num_beams": 2}):
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, **extra}
        wanted = model.generate(IDS, **ours, **options)
        assert torch.equal(model.generate(IDS, **theirs, **options), wanted)
        if not extra:
            assert (
                es.generate(model, None, [5, 6, 7], **theirs, **options) == wanted[0, 3:].tolist()
            )


class Grammar:
    """What a grammar library gives to `generate`: it reads a tokenizer of transformers' interface
    when it is made, keeps how far its one text has come, and masks scores in place."""

    def __init__(self, tokenizer: Any, words: list[str]) -> None:
        vocabulary = tokenizer.get_vocab()
        assert tokenizer.backend_tokenizer.id_to_token(5) in vocabulary and tokenizer.is_fast
        self.spelled = {
            id: tokenizer.convert_tokens_to_string([token]) for token, id in vocabulary.items()
        }
        self.end = tokenizer.eos_token_id
        self.special = set(tokenizer.all_special_ids)
        self.words = words
        self.start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        ids = input_ids[0].tolist()
        self.start = len(ids) if self.start is None else self.start
        text = "".join(self.spelled[id] for id in ids[self.start :])
        mask = torch.full_like(scores, -torch.inf)
        for id, piece in self.spelled.items():
            grows = any(word.startswith(text + piece) for word in self.words)
            if piece and id not in self.special and grows:
                mask[0, id] = 0
        mask[0, self.end] = 0 if text in self.words else -torch.inf
        return scores.add_(mask)


@pytest.mark.parametrize("tokenizer", [OURS, fast()], ids=["ours", "theirs"])
def test_processors_of_grammar_libraries_work_for_many_prompts(
    model: LanguageModel, tokenizer: Any
) -> None:
    choices = [["yes", "no"], ["red", "green", "blue"], ["in it", "is the"], ["1", "22"]]
    prompts = ["Is it?", "A colour", "Where", "How many"]

    def options() -> list[dict[str, Any]]:
        return [{"logits_processor": [Grammar(tokenizer, words)]} for words in choices]

    common: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": 2}
    found = es.generate(model, tokenizer, prompts, options=options(), **common)
    assert [text in words for text, words in zip(found, choices, strict=True)] == [True] * 4
    for i, own in enumerate(options()):
        assert es.generate(model, tokenizer, prompts[i], **own, **common) == found[i]
    stream = es.stream(model, tokenizer, prompts, options=options(), **common)
    list(stream)
    assert [one.text for (one,) in stream.results()] == found
