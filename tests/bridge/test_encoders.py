"""What encoders of wrapped models read by name: sounds, images, segments, a caller's states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

import everystep as es
from everystep.errors import RequestError, UnknownArgumentError
from tests.bridge.families import END, PAD, TWO_SIDES, VOCABULARY, model_of, randomise

START = 2
SAID: dict[str, Any] = {"max_new_tokens": 8, "suppress_tokens": [END, PAD]}
_SOUND = {
    **TWO_SIDES,
    "vocab_size": VOCABULARY,
    "max_target_positions": 64,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": START,
    "decoder_start_token_id": START,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        **_SOUND,
        num_mel_bins=6,
        max_source_positions=10,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _speech() -> Any:
    config = transformers.Speech2TextConfig(
        **_SOUND, input_feat_per_channel=6, conv_channels=16, max_source_positions=64
    )
    return transformers.Speech2TextForConditionalGeneration(config)


def _image() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "image_size": 8, "patch_size": 4}
    return _captions(transformers.ViTConfig(**sizes, **heads))


def _narrowing() -> Any:
    """An encoder whose layers have fewer and wider states, one after another."""
    sizes = {"image_size": 8, "patch_size": 2, "embed_dim": 16, "window_size": 2}
    return _captions(transformers.SwinConfig(**sizes, depths=[1, 1], num_heads=[2, 2]))


def _captions(vision: Any) -> Any:
    text = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, eos_token_id=END
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    return _begun(transformers.VisionEncoderDecoderModel(config))


def _segments() -> Any:
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**_BERT), transformers.BertConfig(**_BERT)
    )
    return _begun(transformers.EncoderDecoderModel(config))


def _begun(model: Any) -> Any:
    for one in (model.config, model.generation_config):
        one.decoder_start_token_id, one.pad_token_id, one.eos_token_id = START, PAD, END
    return model


MAKERS: dict[str, Callable[[], Any]] = {
    "whisper": _whisper,
    "speech": _speech,
    "image": _image,
    "narrowing": _narrowing,
    "segments": _segments,
}


@cache
def built(name: str) -> Any:
    """A tiny model in float64 whose weights depend on the name alone."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = MAKERS[name]().to(torch.float64).eval()
        randomise(model)
    return model


def given(name: str) -> dict[str, Tensor]:
    """A batch of three rows as a processor would return it."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name == "whisper":
        return {"input_features": drawn(3, 6, 20)}
    if name in ("image", "narrowing"):
        return {"pixel_values": drawn(3, 3, 8, 8)}
    if name == "speech":
        mask = (torch.arange(24) < torch.tensor([[24], [9], [17]])).long()
        return {"input_features": drawn(3, 24, 6) * mask[..., None], "attention_mask": mask}
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, PAD, PAD], [13, 14, 15, 16, PAD]])
    types = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": types}


def row_of(name: str, row: int) -> dict[str, Tensor]:
    """One row of the batch, without a batch dimension; ids without their padding."""
    one = {key: value[row] for key, value in given(name).items()}
    if name == "segments":
        real = one["attention_mask"].bool()
        return {key: value[real] for key, value in one.items()}
    return one


def reference(name: str, **options: Any) -> Any:
    """What the loop of transformers gives; a class's own way of cutting sounds is not asked for."""
    return GenerationMixin.generate(built(name), **{**given(name), **SAID, **options})


def trimmed(sequences: Tensor) -> list[list[int]]:
    """Without what a longer row brought."""
    return [[int(one) for one in row if one != PAD] for row in sequences]


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_is_read_as_the_reference_reads_it(name: str, how: dict[str, Any]) -> None:
    ours = es.wrap(built(name)).generate(**given(name), **SAID, **how)
    theirs = reference(name, **how)
    assert trimmed(ours) == trimmed(theirs)
    assert len({tuple(row) for row in trimmed(ours)}) > 1


@pytest.mark.parametrize("name", MAKERS)
def test_many_prompts_and_streams_take_them(name: str) -> None:
    wrapped = es.wrap(built(name))
    expected = [row[1:] for row in trimmed(reference(name))]
    prompts = [row_of(name, row) for row in range(3)]
    found = es.generate(wrapped, None, prompts, **SAID)
    assert [list(one) for one in found] == expected
    single = es.generate(wrapped, None, {k: v[None] for k, v in prompts[1].items()}, **SAID)
    assert list(single) == expected[1]
    own: dict[str, list[int]] = {}
    for event in es.stream(wrapped, None, prompts, **SAID):
        own.setdefault(event.request_id, []).append(event.token)
    assert list(own.values()) == expected


@pytest.mark.parametrize("name", ["whisper", "speech", "image"])
def test_the_first_argument_is_what_the_encoder_reads(name: str) -> None:
    batch = given(name)
    first = batch.pop(next(iter(batch)))
    ours = es.wrap(built(name)).generate(first, **batch, **SAID)
    assert trimmed(ours) == trimmed(reference(name))
    listed = es.wrap(built(name)).generate(list(first), **batch, **SAID)
    assert trimmed(listed) == trimmed(ours)


@pytest.mark.parametrize("name", MAKERS)
def test_what_the_layers_show_is_the_references(name: str) -> None:
    how = {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_logits": True,
        "suppress_tokens": None,
        "eos_token_id": None,
    }
    ours = es.wrap(built(name)).generate(**{**given(name), **SAID, **how})
    theirs = reference(name, **how)
    assert trimmed(ours.sequences) == trimmed(theirs.sequences)
    seen = given(name).get("attention_mask") if name == "segments" else None
    pairs = zip(ours.encoder_hidden_states, theirs.encoder_hidden_states, strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        if seen is not None:
            one, other = one[seen.bool()], other[seen.bool()]
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*MAKERS, "t5", "bart"])
def test_states_of_the_callers_are_honoured(name: str) -> None:
    if name in MAKERS:
        model, batch = built(name), given(name)
    else:
        model, batch = model_of(name), {k: v for k, v in given("segments").items() if k[0] != "t"}
    states = model.get_encoder()(**batch).last_hidden_state
    mask = {k: v for k, v in batch.items() if k == "attention_mask"}
    for outputs in (BaseModelOutput(last_hidden_state=states), (states,)):
        ours = es.wrap(model).generate(encoder_outputs=outputs, **mask, **SAID)
        assert trimmed(ours) == trimmed(GenerationMixin.generate(model, **batch, **SAID))


def test_what_the_decoder_begins_with_stands_beside_them() -> None:
    start = torch.tensor([[START, 7, 8], [START, 9, 10], [START, 11, 12]])
    ours = es.wrap(built("whisper")).generate(
        **given("whisper"), decoder_input_ids=start, **SAID, num_beams=2
    )
    theirs = reference("whisper", decoder_input_ids=start, num_beams=2)
    assert trimmed(ours) == trimmed(theirs)


def test_masks_with_holes_hide_from_the_encoder() -> None:
    model = model_of("t5")
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 0, 0, 1]])
    ours = es.wrap(model).generate(ids, attention_mask=mask, **SAID)
    assert trimmed(ours) == trimmed(model.generate(ids, attention_mask=mask, **SAID))
    assert trimmed(ours) != trimmed(model.generate(ids, **SAID))


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], type, str]] = {
    "nothing": ("image", lambda one: {}, RequestError, "reads pixel_values"),
    "ids": ("image", lambda one: {"input_ids": torch.ones(1, 3).long()}, RequestError, "input_ids"),
    "both": ("whisper", lambda one: {**one, "inputs_embeds": torch.ones(3, 2, 32)}, RequestError,
             "inputs_embeds"),
    "a wrong name": ("image", lambda one: {"pixel_value": one["pixel_values"]},
                     UnknownArgumentError, "pixel_values"),
    "of another model": ("t5", lambda one: {"input_ids": torch.ones(1, 2).long(),
                                            "pixel_values": one["pixel_values"]},
                         es.EverystepError, "pixel_values"),
    "a mask of images": ("narrowing", lambda one: {**one, "attention_mask": torch.ones(3, 4)},
                         RequestError, "no meaning"),
    "a wrong size": ("image", lambda one: {"pixel_values": torch.ones(3, 3, 6, 6).double()},
                     RequestError, "does not fit the prompt"),
    "states beside": ("image", lambda one: {**one, "encoder_outputs": (torch.ones(3, 2, 32),)},
                      RequestError, "both given"),
    "no tensor": ("image", lambda one: {"pixel_values": "a picture"}, RequestError, "pixel_values"),
    "a number": ("image", lambda one: {"pixel_values": 3}, RequestError, "not a tensor"),
    "rows": ("speech", lambda one: {**one, "attention_mask": torch.ones(2, 24).long()},
             RequestError, "rows"),
    "types of another length": ("segments", lambda one: {**one, "token_type_ids":
                                torch.zeros(3, 4).long()}, RequestError, "token_type_ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused(case: str) -> None:
    name, change, kind, says = REFUSED[case]
    model = model_of(name) if name == "t5" else built(name)
    batch = given("image" if name == "t5" else name)
    decodes: list[Any] = []
    handle = model.get_decoder().register_forward_hook(lambda *_: decodes.append(1))
    try:
        wrapped = es.wrap(model)
        decodes.clear()
        with pytest.raises(kind, match=says):
            wrapped.generate(**change(batch), **SAID)
    finally:
        handle.remove()
    assert not decodes


def test_a_prompt_that_is_text_is_refused_where_images_are_read() -> None:
    with pytest.raises(RequestError, match="reads pixel_values, and no text"):
        es.generate(built("image"), None, [[5, 6]], **SAID)
