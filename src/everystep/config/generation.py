"""`GenerationConfig`: what was set about how to generate, and nothing else.

A field that was not set is None. Names and values are checked when they are set, combinations when
they are used or validated. It remembers which values came out of a file, so that a checkpoint's
values can be distinguished from the caller's.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack, overload
from warnings import warn

from everystep.config.attributes import FieldAttributes
from everystep.config.config_fields import StoredOptions
from everystep.config.fields import (
    CALL_ONLY,
    FIELDS,
    META,
    GenerationMode,
    generation_mode,
    unknown_name,
    warn_of_unknown_names,
)
from everystep.config.kinds import NAMED
from everystep.config.rules import EXTRA_OUTPUTS, judge, refuse_impossible
from everystep.errors import (
    FormatError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.files.atomic import write_atomic
from everystep.files.hub import HubAccess
from everystep.files.opening import as_path
from everystep.files.sources import read_settings

CONFIG_NAME = "generation_config.json"
_PLAIN = (bool, int, float, str)
# Where a model's config keeps the settings of its decoder alone.
_INNER_CONFIGS = ("decoder", "generator", "text_config")


class GenerationConfig(FieldAttributes):
    """The values that were set; see `FIELDS` for all names, meanings and defaults.

    `inherited`: names whose values came out of a file and were not set since. `extra`: what a file
    held under names that no field has, kept and saved again, readable as attributes.
    UnknownArgumentError for other names, RequestError for values that a field cannot have.
    Source: `GenerationConfig` of transformers 5.23.0.
    """

    inherited: frozenset[str]
    extra: dict[str, Any]

    def __init__(self, **values: Unpack[StoredOptions]) -> None:
        self.__dict__.update(dict.fromkeys(FIELDS), inherited=frozenset(), extra={})
        for name, value in values.items():
            setattr(self, name, value)
        refuse_impossible(self.filled())

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELDS:
            raise unknown_name(name, "GenerationConfig has no field")
        self.__dict__[name] = FIELDS[name].read(value)
        self.__dict__["inherited"] = self.inherited - {name}

    def __getattr__(self, name: str) -> Any:
        extra = self.__dict__.get("extra", {})
        if name in extra:
            return extra[name]
        raise AttributeError(f"GenerationConfig has no field {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        return self._said() == other._said()

    def __hash__(self) -> int:
        return hash(json.dumps(_encoded(self._said()), sort_keys=True, default=repr))

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self._said().items())
        return f"GenerationConfig({said})"

    def said(self) -> list[tuple[str, Any]]:
        """Return copies of the values that were set, of fields that say how to generate."""
        own = [(name, self.__dict__[name]) for name in FIELDS if name not in META]
        return [(n, v if type(v) in _PLAIN else copy.deepcopy(v)) for n, v in own if v is not None]

    def _said(self) -> dict[str, Any]:
        """Return the values in which two configurations may differ."""
        return {name: value for name, value in self.to_diff_dict().items() if name not in META}

    @property
    def caller_set(self) -> frozenset[str]:
        """The fields that have a value and did not get it from a file."""
        return frozenset(n for n in FIELDS if self.__dict__[n] is not None) - self.inherited - META

    def filled(self) -> dict[str, Any]:
        """Return every field's value, the default where nothing was said."""
        return {
            name: field.default if self.__dict__[name] is None else self.__dict__[name]
            for name, field in FIELDS.items()
        }

    def get_generation_mode(self, assistant_model: object = None) -> GenerationMode:
        """Return the mode that the values ask for, with the defaults where nothing was said."""
        return generation_mode(self.filled(), assisted=assistant_model is not None)

    def validate(
        self, strict: bool = False, user_set_attributes: Collection[str] | None = None
    ) -> None:
        """Raise RequestError unless the values go together.

        It is raised for what is impossible or in conflict, and with `strict` also for values
        without effect, which else are a warning. Inherited values cause neither; the caller's are
        `user_set_attributes`, or all that are not `inherited`.
        """
        caller = self.caller_set if user_set_attributes is None else user_set_attributes
        for notice in judge(self.filled(), caller):
            if strict:
                raise RequestError(notice)
            warn(notice, UserWarning, stacklevel=2)

    def update(
        self, defaults_only: bool = False, allow_custom_entries: bool = False, **values: Any
    ) -> dict[str, Any]:
        """Set the fields among `values`, all of them or none; return what was not used.

        With `defaults_only` a field that has a value keeps it, and the other value counts as not
        used; with `allow_custom_entries` names that no field has go into `extra`.
        """
        changed = copy.deepcopy(self)
        unused = {}
        for name, value in values.items():
            if name in FIELDS and not (defaults_only and getattr(self, name) is not None):
                setattr(changed, name, value)
            elif allow_custom_entries and name not in FIELDS and name not in self.extra:
                changed.extra[name] = value
            else:
                unused[name] = value
        refuse_impossible(changed.filled())
        self.__dict__.update(changed.__dict__)
        return unused

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of every field's value, and of the extra ones."""
        fields = {name: self.__dict__[name] for name in FIELDS}
        return copy.deepcopy({**fields, **self.extra})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return `to_dict()` without the fields that were not set."""
        values = self.to_dict()
        return {n: v for n, v in values.items() if v is not None or n not in FIELDS}

    def to_json_string(
        self,
        use_diff: bool = True,
        ignore_metadata: bool = False,
        keys_to_pop: Collection[str] = (),
    ) -> str:
        """Return the values as JSON, sorted by name.

        Raise RequestError for values that JSON cannot hold.
        """
        values = self.to_diff_dict() if use_diff else self.to_dict()
        left_out = {*keys_to_pop, *(META if ignore_metadata else ())}
        values = {name: value for name, value in values.items() if name not in left_out}
        return json.dumps(_encoded(values), indent=2, sort_keys=True, default=_refuse_object) + "\n"

    def to_json_file(
        self,
        json_file_path: str | os.PathLike[str],
        use_diff: bool = True,
        keys_to_pop: Collection[str] = (),
    ) -> None:
        """Write `to_json_string()` to a file, which stays as it was if that fails."""
        text = self.to_json_string(use_diff, keys_to_pop=keys_to_pop)
        write_atomic(as_path(json_file_path), text.encode())

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        config_file_name: str | os.PathLike[str] | None = None,
        push_to_hub: bool = False,
        **unknown: object,
    ) -> None:
        """Validate the configuration strictly and write it to a folder, which may be new.

        Raise UnsupportedError for `push_to_hub`, UnknownArgumentError for what else there is.
        """
        if push_to_hub:
            do = "Upload the folder with the hub's own client"
            raise UnsupportedError("push_to_hub is not supported", got=shown(push_to_hub), do=do)
        for name in unknown:
            near = nearest(name, ("save_directory", "config_file_name"))
            raise UnknownArgumentError(
                f"save_pretrained() knows no argument {name!r}",
                wanted="save_directory, config_file_name",
                do=f"Perhaps you meant {near}" if near else "Leave it out",
            )
        self.validate(strict=True)
        folder = as_path(save_directory)
        if folder.exists() and not folder.is_dir():
            raise RequestError("save_directory is a file", wanted="another place", got=folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.to_json_file(folder / (config_file_name or CONFIG_NAME))

    @overload
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        config_file_name: str | os.PathLike[str] | None = None,
        *,
        local_files_only: bool = False,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        subfolder: str = "",
        force_download: bool = False,
        proxies: Mapping[str, str] | None = None,
        return_unused_kwargs: Literal[False] = False,
        **overrides: Unpack[StoredOptions],
    ) -> GenerationConfig: ...

    @overload
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        config_file_name: str | os.PathLike[str] | None = None,
        *,
        return_unused_kwargs: Literal[True],
        **overrides: Any,
    ) -> tuple[GenerationConfig, dict[str, Any]]: ...

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        config_file_name: str | os.PathLike[str] | None = None,
        *,
        local_files_only: bool = False,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        subfolder: str = "",
        force_download: bool = False,
        proxies: Mapping[str, str] | None = None,
        return_unused_kwargs: bool = False,
        **overrides: Any,
    ) -> GenerationConfig | tuple[GenerationConfig, dict[str, Any]]:
        """Return the configuration in a folder or hub repository, all of it inherited but the
        overrides.

        With `return_unused_kwargs`, return a pair of it and the overrides that no field has, which
        are an error otherwise. Raise UnsupportedError for `force_download` and `proxies`,
        MissingFileError if there is no such file, DownloadError if it could not be fetched, and
        FormatError if it is not a JSON object or a value cannot be. Names in the file that no field
        has are kept in `extra`, with a warning where nothing reads them.
        """
        for option, given, do in (
            ("force_download", force_download, "Delete the file from the hub's cache"),
            ("proxies", proxies, "Set the environment variable HTTPS_PROXY"),
        ):
            if given:
                raise UnsupportedError(f"{option} has no effect here", got=shown(given), do=do)
        name = str(config_file_name or CONFIG_NAME)
        values, path = read_settings(
            pretrained_model_name,
            f"{subfolder}/{name}" if subfolder else name,
            offline=local_files_only,
            access=HubAccess(revision, cache_dir, token),
        )
        config = cls.from_checkpoint(values, path)
        unused = {k: v for k, v in overrides.items() if return_unused_kwargs and k not in FIELDS}
        for field, value in overrides.items():
            if field not in unused:
                setattr(config, field, value)
        return (config, unused) if return_unused_kwargs else config

    @overload
    @classmethod
    def from_dict(
        cls,
        config_dict: Mapping[str, Any],
        return_unused_kwargs: Literal[False] = False,
        **overrides: Unpack[StoredOptions],
    ) -> GenerationConfig: ...

    @overload
    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: Literal[True], **overrides: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]: ...

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **overrides: Any
    ) -> GenerationConfig | tuple[GenerationConfig, dict[str, Any]]:
        """Return a configuration with the given values, which count as set by the caller.

        With `return_unused_kwargs`, return a pair of it and the overrides that no field has.
        """
        NAMED.checked(config_dict, "the configuration")
        unused = {k: v for k, v in overrides.items() if return_unused_kwargs and k not in FIELDS}
        used = {k: v for k, v in overrides.items() if k not in unused}
        config = cls(**{**config_dict, **used})
        return (config, unused) if return_unused_kwargs else config

    @classmethod
    def from_checkpoint(
        cls, values: Mapping[str, Any], name: str | None = CONFIG_NAME
    ) -> GenerationConfig:
        """Return a configuration that inherits from the file `name`; see `from_pretrained`.

        None stands for an object, whose unknown names are kept without a word.
        """
        known = {key: value for key, value in values.items() if key in FIELDS}
        extra = {key: values[key] for key in values if key not in FIELDS and key != "_commit_hash"}
        try:
            config = cls._inheriting(known)
        except RequestError as error:
            raise FormatError(
                f"{name or CONFIG_NAME} holds a value that cannot be: {error}".rstrip("."),
                do="Correct the file, or delete that line",
            ) from error
        if name is not None:
            warn_of_unknown_names(extra, name)
        config.__dict__["extra"] = copy.deepcopy(extra)
        return config

    @classmethod
    def from_model_config(cls, model_config: Any) -> GenerationConfig:
        """Return what a model's config, a dict or an object with `to_dict()`, says about
        generating.

        The decoder's own part counts where the outer one says nothing. A value that its field
        cannot have belongs to another field of that name, and is left out.
        """
        outer = _as_mapping(model_config)
        inner: Any = next((outer[key] for key in _INNER_CONFIGS if outer.get(key)), {})
        values = {**_usable(_as_mapping(inner)), **_usable(outer)}
        if outer.get("force_bos_token_to_be_generated") and "bos_token_id" in values:
            values["forced_bos_token_id"] = values["bos_token_id"]
        if any(values.get(name) for name in EXTRA_OUTPUTS):
            values["return_dict_in_generate"] = True
        return cls._inheriting({**values, "_from_model_config": True})

    @classmethod
    def of(cls, config: Any) -> GenerationConfig:
        """Return the configuration itself, or one with what is set in an object of transformers'
        class.

        These values count as set by the caller, as that class does not remember what came out of a
        file, unless the object was made from a model's config. A name that resembles no field's is
        kept as extra.
        """
        if isinstance(config, GenerationConfig):
            return config
        if not is_configuration(config):
            raise RequestError(
                "generation_config is not a configuration",
                wanted="an everystep.GenerationConfig, or one of transformers",
                got=type(config).__name__,
                do="Build one with GenerationConfig(...) or GenerationConfig.from_dict(values)",
            )
        said = {name: one for name, one in config.to_dict().items() if one is not None}
        known = {name: one for name, one in said.items() if name in FIELDS}
        for name in said.keys() - known.keys():
            if name in CALL_ONLY or nearest(name, FIELDS):
                raise unknown_name(name, "GenerationConfig has no field")
        if known.get("_from_model_config"):
            return cls._inheriting(known)
        made = cls(**known)
        made.__dict__["extra"] = {name: said[name] for name in said.keys() - known.keys()}
        return made

    @classmethod
    def _inheriting(cls, values: Mapping[str, Any]) -> GenerationConfig:
        config = cls()
        for name, value in values.items():
            setattr(config, name, value)
        config.__dict__["inherited"] = config.caller_set
        return config


def is_configuration(value: object) -> bool:
    """Return whether a value is a configuration of generation, ours or transformers'."""
    return type(value).__name__ == "GenerationConfig" and hasattr(value, "to_diff_dict")


def _usable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are some field's, and could be."""
    found = {}
    for name, field in FIELDS.items():
        value = values.get(name)
        if value is not None and name not in META and field.kind.accepts(value):
            found[name] = value
    return found


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    wanted, got = "a dict or an object with to_dict()", type(config).__name__
    raise RequestError("not a model's config", wanted=wanted, got=got, do="Pass model.config")


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as JSON can hold them; `_pairs` of `kinds` reads the biases back."""
    encoded = dict(values)
    if biases := encoded.get("sequence_bias"):
        encoded["sequence_bias"] = [[list(ids), bias] for ids, bias in biases.items()]
    for name in ("watermarking_config", "compile_config"):
        if encoded.get(name) is not None:
            encoded[name] = encoded[name].to_dict()
    return encoded


def _refuse_object(value: Any) -> Iterable[Any]:
    raise RequestError(
        "a value cannot be written as JSON",
        wanted="numbers, texts, lists and dicts",
        got=shown(value),
        do="Leave it out of what is saved and pass it in the call",
    )


def is_data(value: object) -> bool:
    """Return whether a value consists of numbers, texts and configurations, and so runs no code of
    the caller's, which expects to run in the caller's thread."""
    if isinstance(value, Mapping):
        return all(map(is_data, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_data, value))
    return value is None or isinstance(value, bool | int | float | str) or is_configuration(value)
