"""A configuration comes back whole from a file, transformers' too, and from a model's config."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import GenerationConfig as Theirs
from transformers.models.whisper import generation_whisper

from everystep.config import FIELDS, META, CompileConfig, GenerationConfig
from everystep.config.fields import BESIDE
from everystep.errors import (
    FormatError,
    MissingFileError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
)
from everystep.files.model_folder import open_folder
from everystep.strategies.constraints import PhrasalConstraint
from tests.config.values import DEFAULTS, GREEN, SYNTHID, VALUES

# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUES)
def test_every_field_survives_a_file(name: str, tmp_path: Path) -> None:
    values = {name: VALUES[name]}
    needs = {"num_return_sequences": {"num_beams": 2}, "num_beam_groups": {"num_beams": 6}}
    values |= needs.get(name, {})
    values |= {"diversity_penalty": 0.5} if name == "num_beam_groups" else {}
    values |= {"num_beams": 2} if name == "force_words_ids" else {}
    config = GenerationConfig.from_checkpoint(values)
    config.save_pretrained(tmp_path / "new")
    loaded = GenerationConfig.from_pretrained(tmp_path / "new")
    assert loaded == config
    assert getattr(loaded, name) == VALUES[name]
    assert type(getattr(loaded, name)) is type(VALUES[name])


def test_an_argument_that_saving_does_not_have_is_refused(tmp_path: Path) -> None:
    config = GenerationConfig(max_new_tokens=3)
    with pytest.raises(UnknownArgumentError, match=r"config_name.*meant config_file_name"):
        config.save_pretrained(tmp_path, config_name="other.json")
    with pytest.raises(UnsupportedError, match="push_to_hub"):
        config.save_pretrained(tmp_path, push_to_hub=True)
    assert not list(tmp_path.iterdir())


def test_every_field_is_tried() -> None:
    assert set(FIELDS) - set(VALUES) == {"constraints"}
    assert all(VALUES[name] != DEFAULTS.get(name) for name in VALUES)


def test_both_watermarks_survive() -> None:
    for watermark in (GREEN, SYNTHID):
        config = GenerationConfig(watermarking_config=watermark)
        assert GenerationConfig.from_dict(json.loads(config.to_json_string())) == config


def test_a_dict_becomes_what_it_stands_for() -> None:
    config = GenerationConfig(watermarking_config=SYNTHID.to_dict(), compile_config={"mode": "x"})
    assert config.watermarking_config == SYNTHID
    assert config.compile_config == CompileConfig(mode="x")


def test_to_dict_and_back() -> None:
    config = GenerationConfig.from_checkpoint(VALUES)
    assert GenerationConfig.from_checkpoint(config.to_dict()) == config


def test_json_has_what_was_set_or_everything() -> None:
    config = GenerationConfig(top_k=5, transformers_version="5")
    assert json.loads(config.to_json_string(ignore_metadata=True)) == {"top_k": 5}
    assert set(json.loads(config.to_json_string(use_diff=False))) == set(FIELDS)
    assert META & set(json.loads(config.to_json_string())) == {"transformers_version"}


def test_the_reference_reads_our_file(tmp_path: Path) -> None:
    values = {"top_k": 5, "sequence_bias": {(1, 2): 1.0}, "watermarking_config": GREEN}
    GenerationConfig(do_sample=True, **values).save_pretrained(tmp_path)
    theirs = Theirs.from_pretrained(tmp_path)
    assert theirs.sequence_bias == [[[1, 2], 1.0]]
    assert theirs.watermarking_config.to_dict() == GREEN.to_dict()


def test_we_read_the_references_file(tmp_path: Path) -> None:
    theirs = Theirs(do_sample=True, top_k=5, sequence_bias={(1, 2): 1.0, (3,): 2.0})
    theirs.save_pretrained(tmp_path)
    ours = GenerationConfig.from_pretrained(tmp_path)
    assert (ours.top_k, ours.sequence_bias) == (5, {(1, 2): 1.0, (3,): 2.0})


def test_a_file_may_have_another_name(tmp_path: Path) -> None:
    GenerationConfig(top_k=5, do_sample=True).save_pretrained(tmp_path, "fast.json")
    loaded = GenerationConfig.from_pretrained(tmp_path, "fast.json", top_k=6)
    assert (loaded.top_k, loaded.caller_set) == (6, {"top_k"})


def test_names_that_no_field_has_are_kept(tmp_path: Path) -> None:
    values = {"lang_to_id": {"en": 3}, "top_k": 4, "_commit_hash": "f00"}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config.lang_to_id == {"en": 3}
    config.save_pretrained(tmp_path / "again")
    assert GenerationConfig.from_pretrained(tmp_path / "again").extra == {"lang_to_id": {"en": 3}}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"temprature": 0.7}, "'temprature' (the nearest is temperature)"),
        ({"lang_to_ids": {}}, "'lang_to_ids' (the nearest is lang_to_id)"),
        ({"colour": 1}, "got 'colour'. Correct them"),
        ({"max_new_token": 1, "eos_token": 2}, "max_new_tokens), 'eos_token' (the nearest is eos_"),
        ({f"wholly_strange_{n}": n for n in range(7)}, " and 2 more. "),
    ],
)
def test_names_in_a_file_that_nothing_reads_are_told_once(
    wrong: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": 4, **wrong}))
    with pytest.warns(UserWarning, match=re.escape(told)) as caught:
        config = GenerationConfig.from_pretrained(tmp_path)
    assert len(caught) == 1 and str(caught[0].message).startswith(f"{path} has names that nothing")
    assert caught[0].filename == __file__
    assert (config.top_k, config.extra) == (4, wrong)


def test_names_that_transformers_has_are_known_without_a_word(tmp_path: Path) -> None:
    source = inspect.getsource(generation_whisper)
    read = {*re.findall(r'\bgeneration_config(?:\.|, ")(\w+)(?!\w|\()', source)} - {"json"}
    assert {"lang_to_id", "alignment_heads", "num_frames"} <= read
    names = {*Theirs().to_dict(), *BESIDE, *read, "_commit_hash"}
    (tmp_path / "generation_config.json").write_text(json.dumps(dict.fromkeys(names)))
    GenerationConfig.from_pretrained(tmp_path)


def test_names_of_an_object_of_transformers_are_kept_without_a_word() -> None:
    assert GenerationConfig.from_checkpoint({"temprature": 1}, None).extra == {"temprature": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "holds no object; wanted {...}; got list"),
        ('{"top_p": 3}', "top_p is not valid; wanted a number from 0 to 1; got 3"),
        (b"\xff\xfe", "is not valid JSON"),
        ('{"sequence_bias": [[[1], NaN]]}', "NaN is no JSON number"),
    ],
)
def test_a_broken_file_is_refused_by_name(content: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError, match=re.escape(text)) as caught:
        GenerationConfig.from_pretrained(tmp_path)
    assert "generation_config.json" in str(caught.value)


def test_a_hub_repository_is_asked_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, Any]] = []

    def download(repository: str, name: str, **options: Any) -> str:
        asked.append((repository, name, options["revision"]))
        (tmp_path / "file.json").write_text('{"top_k": 7}')
        return str(tmp_path / "file.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = GenerationConfig.from_pretrained(
        "org/model", "fast.json", revision="v2", subfolder="sets"
    )
    assert asked == [("org/model", "sets/fast.json", "v2")]
    assert (found.top_k, found.caller_set) == (7, frozenset())


def test_overrides_that_no_field_has_are_returned_where_they_are_asked_for(tmp_path: Path) -> None:
    GenerationConfig(top_k=7, do_sample=True).save_pretrained(tmp_path)
    given = {"top_p": 0.5, "foo": False, "return_unused_kwargs": True}
    theirs, left = Theirs.from_pretrained(tmp_path, **given)
    assert (left, theirs.foo) == ({}, False)  # a field of the configuration, as in its constructor
    config, unused = GenerationConfig.from_pretrained(tmp_path, **given)
    assert unused == {"foo": False} and not hasattr(config, "foo")
    assert (config.top_k, config.top_p) == (theirs.top_k, theirs.top_p) == (7, 0.5)
    config, unused = GenerationConfig.from_dict({"top_k": 7}, **given)
    assert (config.top_k, config.top_p, unused) == (7, 0.5, {"foo": False})
    with pytest.raises(ValueError, match="foo"):
        GenerationConfig.from_pretrained(tmp_path, foo=False)


@pytest.mark.parametrize("wrong", [{"force_download": True}, {"proxies": {"https": "host:1"}}])
def test_what_fetching_does_not_do_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    GenerationConfig(top_k=7, do_sample=True).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=next(iter(wrong))):
        GenerationConfig.from_pretrained(tmp_path, **wrong)
    harmless = dict.fromkeys(wrong, None)
    assert GenerationConfig.from_pretrained(tmp_path, **harmless).top_k == 7


def test_a_hub_repository_that_was_never_fetched_says_so() -> None:
    with pytest.raises(MissingFileError, match="org/model is not in the hub's cache"):
        GenerationConfig.from_pretrained("org/model", local_files_only=True)


def test_a_model_folder_may_hold_an_infinite_bias(tmp_path: Path) -> None:
    GenerationConfig(sequence_bias={(3,): float("-inf")}).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = open_folder(tmp_path).generation_config
    assert found == {"sequence_bias": [[[3], float("-inf")]]}


def test_keys_may_be_left_out_of_the_text(tmp_path: Path) -> None:
    config = GenerationConfig(top_k=5, top_p=0.5)
    assert json.loads(config.to_json_string(keys_to_pop=["top_p"])) == {"top_k": 5}
    config.to_json_file(tmp_path / "a.json", keys_to_pop=["top_k"])
    assert json.loads((tmp_path / "a.json").read_text()) == {"top_p": 0.5}


def test_a_missing_file_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"there is no .*generation_config\.json"):
        GenerationConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"compile_config": CompileConfig(backend=print)},
        {"constraints": [PhrasalConstraint([5])], "num_beams": 2},
    ],
    ids=lambda values: next(iter(values)),
)
def test_what_json_cannot_hold_is_refused_and_leaves_nothing(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = GenerationConfig(**values)
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        config.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_does_not_fit_together_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="top_p has no effect without sampling"):
        GenerationConfig(top_p=0.5).save_pretrained(tmp_path)


def test_what_was_loaded_can_be_saved_again(tmp_path: Path) -> None:
    GenerationConfig.from_checkpoint({"top_p": 0.5}).save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).top_p == 0.5


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="save_directory is a file"):
        GenerationConfig().save_pretrained(tmp_path / "file")


# --- models' configs ------------------------------------------------------------------------------


def test_a_models_config_gives_what_is_a_field() -> None:
    config = GenerationConfig.from_model_config(
        {"hidden_size": 8, "eos_token_id": 3, "top_k": None, "text_config": {"bos_token_id": 1}}
    )
    assert config == GenerationConfig(eos_token_id=3, bos_token_id=1)
    assert config.caller_set == frozenset()
    assert config._from_model_config is True


def test_another_field_of_the_same_name_is_left_out() -> None:
    config = GenerationConfig.from_model_config({"cache_config": "x", "top_k": 2.5})
    assert config == GenerationConfig()


def test_extra_outputs_ask_for_an_output_object() -> None:
    assert GenerationConfig.from_model_config({"output_scores": True}).return_dict_in_generate


def test_an_old_way_to_force_the_first_token() -> None:
    values = {"force_bos_token_to_be_generated": True, "bos_token_id": 4}
    assert GenerationConfig.from_model_config(values).forced_bos_token_id == 4


def test_an_object_with_to_dict_is_a_models_config() -> None:
    class ModelConfig:
        def to_dict(self) -> dict[str, int]:
            return {"eos_token_id": 3}

    assert GenerationConfig.from_model_config(ModelConfig()).eos_token_id == 3


def test_anything_else_is_not() -> None:
    with pytest.raises(RequestError, match="not a model's config"):
        GenerationConfig.from_model_config(3)
