"""What transformers says of a call, an error, a warning or nothing, and what is said of it here.

Each row has the same meaning on both sides; where this library is stricter, or sees more, the two
columns differ. `docs/guide/configuration.md` gives the reasons.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import transformers
from transformers.generation import configuration_utils, stopping_criteria, utils

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.errors import EverystepError
from everystep.testing.tokenizer import tiny_tokenizer
from tests.models.tiny import ours as built
from tests.models.tiny import reference_t5

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
ENDED = torch.tensor([[5, 6, 2], [8, 9, 10]])
EMBEDS = torch.zeros(2, 3, 16, dtype=torch.float64)
RIGHT = torch.tensor([[1, 1, 0], [1, 1, 1]])
Said = tuple[Literal["error", "warning", "nothing"], str]
NOTHING: Said = ("nothing", "")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, LanguageModel]:
    return pair_of()


def pair_of(**values: Any) -> tuple[Any, LanguageModel]:
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, **values,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(config).double().eval()
    return theirs, from_weights(config.to_dict(), theirs.state_dict(), dtype=torch.float64)


@pytest.fixture(scope="module")
def translators() -> tuple[Any, LanguageModel]:
    theirs = reference_t5(torch.float64)
    theirs.generation_config = transformers.GenerationConfig()
    return theirs, LanguageModel(built(theirs), GenerationConfig())


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collects what is warned of, through the warnings module or transformers' loggers."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    loggers = [module.logger for module in (utils, configuration_utils, stopping_criteria)]
    ear = Ear(logging.WARNING)
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    for logger in loggers:
        logger.addHandler(ear)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield heard
        finally:
            transformers.logging.set_verbosity(verbosity)
            for logger in loggers:
                logger.removeHandler(ear)
            heard += [str(one.message) for one in caught]


def said(model: Any, given: dict[str, Any]) -> Said:
    """What comes of a call, with the texts of all warnings or of the error."""
    given = {"input_ids": IDS, "max_new_tokens": 3, **given}
    with listening() as heard:
        try:
            model.generate(**given)
        except (ValueError, TypeError) as error:
            own = isinstance(model, LanguageModel) and not isinstance(error, EverystepError)
            return ("nothing", f"a foreign error: {error}") if own else ("error", str(error))
    return ("warning", " | ".join(heard)) if heard else NOTHING


def check(model: Any, given: dict[str, Any], wanted: Said) -> None:
    kind, part = wanted
    found, text = said(model, given)
    assert (found, part in text) == (kind, True), text


class Silent:
    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


STRINGS = {"stop_strings": ["x"]}
# fmt: off
ROWS: list[tuple[str, dict[str, Any], Said, Said]] = [
    ("S3-19 stop strings without a tokenizer", STRINGS,
     ("error", "tokenizer"), ("error", "stop_strings needs a tokenizer")),
    ("S3-25 unknown names", {"max_new_token": 5},
     ("error", "max_new_token"), ("error", "max_new_tokens instead of max_new_token")),
    ("S3-25 segments", {"token_type_ids": IDS},
     ("error", "token_type_ids"), ("error", "token_type_ids is not read")),
    ("S3-29 twice", {"inputs": IDS},
     ("error", "passed alongside"), ("error", "given twice")),
    ("S3-29 nothing", {"input_ids": None},
     ("error", "bos_token_id"), ("error", "a bos_token_id in the generation config")),
    ("S3-30 ids beside embeddings", {"inputs_embeds": EMBEDS}, NOTHING, NOTHING),
    ("S3-31 the end as padding, one row", {"input_ids": IDS[:1], "eos_token_id": 2},
     NOTHING, NOTHING),
    ("S3-31 the end as padding, no sign of any", {"eos_token_id": 2},
     ("warning", "attention mask"), NOTHING),
    ("S3-31 the end as padding, at an edge", {"input_ids": ENDED, "eos_token_id": 2},
     ("warning", "attention mask"), ("warning", "Pass the attention_mask")),
    ("S3-31 the same under a mask", {"input_ids": ENDED, "eos_token_id": 2,
                                     "attention_mask": torch.ones(2, 3).long()}, NOTHING, NOTHING),
    ("S3-31 an end that is no token", {"eos_token_id": -1, "pad_token_id": 0},
     ("warning", "will not stop"), ("warning", "ends nothing")),
    ("S3-32 right padding", {"attention_mask": RIGHT, "pad_token_id": 0},
     ("warning", "right-padding"), NOTHING),
    ("S3-33 two lengths", {"max_length": 9},
     ("warning", "take precedence"), ("warning", "max_new_tokens goes before max_length")),
    ("S3-33 two minimums", {"min_length": 4, "min_new_tokens": 2},
     ("warning", "take precedence"), ("warning", "min_new_tokens goes before min_length")),
    ("S3-34 no cache for embeddings", {"input_ids": None, "inputs_embeds": EMBEDS,
                                       "use_cache": False}, NOTHING, NOTHING),
    ("S3-35 a mask of another rank", {"attention_mask": torch.ones(2, 1, 3, 3)},
     ("error", "must be 2D"), ("error", "attention_mask lets positions see")),
    ("S3-40 no length at all", {"max_new_tokens": None},
     ("warning", "model-agnostic default"), ("warning", "default length")),
    ("S3-40 no room", {"max_new_tokens": None, "max_length": 3},
     ("error", "Input length"), ("error", "no room for new tokens")),
    ("S3-40 a minimum out of reach", {"min_new_tokens": 9},
     ("warning", "Unfeasible"), ("error", "cannot be reached")),
    ("S3-40 a whole minimum out of reach", {"min_length": 12},
     ("warning", "Unfeasible"), ("error", "min_length=12 cannot be reached")),
    ("S3-40 a minimum beyond the default", {"max_new_tokens": None, "min_new_tokens": 30},
     ("warning", "Unfeasible"), ("warning", "min_new_tokens=30 cannot be reached")),
    ("S3-41 drafts under beams", {"num_beams": 2, "prompt_lookup_num_tokens": 3},
     ("warning", "ignored"), ("error", "prompt_lookup_num_tokens has no effect with beams")),
    ("S3-41 contrast", {"penalty_alpha": 0.5, "top_k": 3},
     ("error", "trust_remote_code"), NOTHING),
    ("S3-41 groups", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
     ("error", "trust_remote_code"), NOTHING),
    ("1.5.3 temperature alone", {"temperature": 0.5},
     ("warning", "temperature"), ("warning", "temperature has no effect without sampling")),
    ("1.5.3 greedy and several", {"num_return_sequences": 2},
     ("error", "num_return_sequences"), ("error", "num_return_sequences must be 1")),
    ("1.5.3 scores without an object", {"output_scores": True},
     ("warning", "output_scores"), ("warning", "output_scores has no effect")),
    ("a start for a decoder that has none", {"decoder_start_token_id": 5},
     NOTHING, ("warning", "decoder_start_token_id has no effect")),
    ("an id that is forced after several", {"forced_bos_token_id": 5},
     NOTHING, ("warning", "forced_bos_token_id has no effect")),
    ("the same after one", {"input_ids": IDS[:, :1], "forced_bos_token_id": 5}, NOTHING, NOTHING),
    ("how to copy without copies", {"max_matching_ngram_size": 2},
     NOTHING, ("warning", "max_matching_ngram_size has no effect")),
    ("1.5.3 chunks without a cache", {"prefill_chunk_size": 2, "use_cache": False},
     ("error", "without a cache"), ("error", "no effect without a cache")),
]
# fmt: on


@pytest.mark.parametrize(
    ("given", "theirs", "ours"), [pytest.param(*rest, id=name) for name, *rest in ROWS]
)
def test_a_call_is_answered_as_the_table_says(
    pair: tuple[Any, LanguageModel], given: dict[str, Any], theirs: Said, ours: Said
) -> None:
    check(pair[0], given, theirs)
    check(pair[1], given, ours)


# fmt: off
ENCODED: list[tuple[str, dict[str, Any], Said, Said]] = [
    ("S3-31 no start", {}, ("error", "decoder_start_token_id"),
     ("error", "Set decoder_start_token_id")),
    ("S3-29 both", {"inputs_embeds": torch.zeros(2, 3, 32, dtype=torch.float64),
                    "decoder_start_token_id": 0}, ("error", "pick one"), ("error", "got both")),
]
# fmt: on


@pytest.mark.parametrize(
    ("given", "theirs", "ours"), [pytest.param(*rest, id=name) for name, *rest in ENCODED]
)
def test_a_call_with_an_encoder_is_answered_as_the_table_says(
    translators: tuple[Any, LanguageModel], given: dict[str, Any], theirs: Said, ours: Said
) -> None:
    check(translators[0], given, theirs)
    check(translators[1], given, ours)


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": 8}, {"max_new_tokens": None, "max_length": 11}]
)
def test_a_limit_beyond_the_context_is_reported_on_both_sides(limit: dict[str, Any]) -> None:
    theirs, model = pair_of(max_position_embeddings=9)
    check(theirs, limit, ("warning", "exceeded the model's predefined maximum length (9)"))
    check(model, limit, ("warning", "leads beyond what the model was made for"))
    for within in ({"max_new_tokens": 7}, {"max_new_tokens": None, "max_length": 10}):
        check(theirs, within, NOTHING)
        check(model, within, NOTHING)


def test_a_limit_of_the_checkpoint_beyond_the_context_is_said_to_be_its() -> None:
    _, model = pair_of(max_position_embeddings=9)
    config = GenerationConfig.from_checkpoint({"max_length": 12})
    model = LanguageModel(model.core, config)
    wanted = "max_length=12 of the checkpoint leads beyond what the model was made for"
    check(model, {"max_new_tokens": None}, ("warning", wanted))
    check(model, {"max_new_tokens": 7}, NOTHING)


def test_s3_17_a_model_without_a_head_cannot_generate(pair: tuple[Any, LanguageModel]) -> None:
    theirs, _ = pair
    headless = transformers.LlamaModel(theirs.config)
    assert not hasattr(headless, "generate")
    values = theirs.config.to_dict() | {"architectures": ["LlamaModel"]}
    with pytest.raises(EverystepError, match="no language head"):
        from_weights(values, {f"model.{name}": w for name, w in headless.state_dict().items()})


def test_s3_18_a_model_with_one_says_so(pair: tuple[Any, LanguageModel]) -> None:
    assert pair[0].can_generate() and pair[1].can_generate()


def test_s3_20_a_models_config_controls_nothing(pair: tuple[Any, LanguageModel]) -> None:
    config: Any = pair[1].config
    with pytest.raises(EverystepError, match=r"temperature.*model\.generation_config"):
        config.temperature = 0.5


def test_s3_21_and_22_a_call_changes_no_configuration(pair: tuple[Any, LanguageModel]) -> None:
    _, model = pair
    passed = GenerationConfig(max_new_tokens=3, eos_token_id=[2, 4])
    before = (passed.to_dict(), model.generation_config.to_dict())
    model.generate(IDS, passed, num_beams=2, repetition_penalty=1.2)
    assert (passed.to_dict(), model.generation_config.to_dict()) == before


def test_s3_43_ids_may_be_anything_that_holds_integers(pair: tuple[Any, LanguageModel]) -> None:
    _, model = pair
    wanted = model.generate(IDS, max_new_tokens=3)
    for ids in (IDS.tolist(), IDS.numpy(), IDS.to(torch.int32), IDS.T.contiguous().T):
        assert torch.equal(model.generate(ids, max_new_tokens=3), wanted)


def test_values_of_a_checkpoint_make_no_noise(pair: tuple[Any, LanguageModel]) -> None:
    _, model = pair
    values = {"temperature": 0.6, "top_p": 0.9, "max_length": 99, "min_length": 90}
    noisy = LanguageModel(model.core, GenerationConfig.from_checkpoint(values))
    assert said(noisy, {"do_sample": False}) == NOTHING


def test_a_streamer_hears_nothing_of_a_refused_call(pair: tuple[Any, LanguageModel]) -> None:
    class Deaf(Silent):
        def put(self, value: Any) -> None:
            raise AssertionError("the streamer was told of a call that cannot be")

    given = {"streamer": Deaf(), "tokenizer": tiny_tokenizer(320), "min_new_tokens": 9}
    check(pair[1], given, ("error", "cannot be reached"))
