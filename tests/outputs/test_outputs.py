"""Output objects are read as transformers' are; what we add does not get in the way."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import pytest
import torch
import transformers.generation as reference

from everystep import outputs
from everystep.api.load import from_weights
from everystep.errors import RequestError
from everystep.streamers import BaseStreamer
from everystep.testing.models import tiny_llama
from everystep.types import FinishReason
from tests.outputs.test_transition_scores import tiny_t5

NAMES = [
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
]
SEQUENCES = torch.tensor([[1, 2, 3]])
SCORES = (torch.zeros(1, 5), torch.ones(1, 5))


def an_output() -> outputs.GenerateDecoderOnlyOutput:
    return outputs.GenerateDecoderOnlyOutput(
        SEQUENCES,
        scores=SCORES,
        hidden_states=((torch.zeros(1, 1, 2),),),
        text=["abc"],
        prompt_length=1,
        finish_reasons=[FinishReason("length")],
    )


@pytest.mark.parametrize("name", NAMES)
def test_fields_and_their_order_are_the_references(name: str) -> None:
    ours, theirs = getattr(outputs, name), getattr(reference, name)
    everything = {field.name: (SEQUENCES,) for field in fields(theirs)}
    assert list(ours(**everything)) == list(theirs(**everything))


@pytest.mark.parametrize("name", NAMES)
def test_every_access_gives_what_the_references_gives(name: str) -> None:
    values = {"sequences": SEQUENCES, "logits": SCORES, "past_key_values": {"a": 1}}
    ours = getattr(outputs, name)(**values, text=["abc"])
    theirs = getattr(reference, name)(**values)
    assert list(ours.keys()) == list(theirs.keys())
    assert len(ours) == len(theirs)
    assert list(ours) == list(theirs)
    assert ours.to_tuple() == theirs.to_tuple()
    assert ours[1] is theirs[1]
    assert ours[-1] is theirs[-1]
    assert ours[:2] == theirs[:2]
    assert ours["logits"] is theirs["logits"]
    assert ours.scores is theirs.scores is None
    assert dict(ours.items()).keys() == dict(theirs.items()).keys()
    assert ("scores" in ours, "logits" in ours) == ("scores" in theirs, "logits" in theirs)
    assert ours.get("scores", 5) == theirs.get("scores", 5)


def test_what_is_none_is_no_key() -> None:
    with pytest.raises(KeyError):
        an_output()["logits"]


def test_an_index_beyond_the_fields_is_an_error() -> None:
    with pytest.raises(IndexError):
        an_output()[3]


def test_what_we_add_is_an_attribute_and_no_key() -> None:
    output = an_output()
    assert output.text == ["abc"]
    assert "text" not in output
    assert len(output.to_tuple()) == 3


def test_a_field_that_is_set_becomes_a_key_in_its_place() -> None:
    output = an_output()
    output.logits = SCORES
    output["past_key_values"] = "cache"
    assert list(output) == ["sequences", "scores", "logits", "hidden_states", "past_key_values"]


def test_other_names_cannot_be_set_by_key() -> None:
    with pytest.raises(RequestError, match="no field 'other'"):
        an_output()["other"] = 1


def test_two_outputs_are_compared_by_identity() -> None:
    output = an_output()
    assert output == output
    assert output != an_output()
    assert len({output, an_output()}) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_everything(copied) -> None:  # type: ignore[no-untyped-def]
    output = copied(an_output())
    assert torch.equal(output.sequences, SEQUENCES)
    assert output.finish_reasons == [FinishReason("length")]


def test_it_is_shown_by_shapes() -> None:
    assert repr(an_output()) == (
        "GenerateDecoderOnlyOutput(text=['abc'], prompt_length=1, "
        "finish_reasons=[FinishReason(kind='length', matched=None)], sequences=<(1, 3) int64>, "
        "scores=<2 of <(1, 5) float32>>, hidden_states=<1 of <1 of <(1, 1, 2) float32>>>)"
    )


def test_speculation_reports_what_drafts_achieved() -> None:
    class Counting(BaseStreamer):
        puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1

        def end(self) -> None:
            pass

    streamer = Counting()
    settings = {"max_new_tokens": 40, "return_dict_in_generate": True, "eos_token_id": None}
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    constant = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    out = tiny_llama().generate(ids, streamer=streamer, **constant, **settings)
    steps = streamer.puts - 1  # the prompt is put too
    assert out.speculation["accepted"] == 40 - steps > 0
    assert out.speculation["drafted"] >= out.speculation["accepted"]
    assert tiny_llama().generate(ids, **settings).speculation is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("beams", [1, 2])
def test_what_an_encoder_shows_is_the_references(side: str, beams: int) -> None:
    theirs = tiny_t5()
    theirs.set_attn_implementation("eager")
    settings = {**theirs.config.to_dict(), "is_encoder_decoder": True}
    ours = from_weights(settings, theirs.state_dict(), dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0] if side == "right" else [0, 1, 1, 1]])
    found = [
        model.generate(
            torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]]),
            attention_mask=mask,
            num_beams=beams,
            max_new_tokens=4,
            return_dict_in_generate=True,
            output_hidden_states=True,
            output_attentions=True,
        )
        for model in (ours, theirs)
    ]
    for name, real in (("encoder_hidden_states", mask), ("encoder_attentions", mask[:, None])):
        one, other = (getattr(out, name) for out in found)
        assert [layer.shape for layer in one] == [layer.shape for layer in other]
        for layer, wanted in zip(one, other, strict=True):
            keep = real[..., None].bool().expand_as(layer)
            torch.testing.assert_close(layer[keep], wanted[keep], atol=1e-6, rtol=0)
    names = [[name for name in out if name != "past_key_values"] for out in found]
    assert names[0] == names[1]
