"""The tokenizer: text to ids and back, called the way `transformers` tokenizers are called.

A facade on the `tokenizers` library. Padding and truncation are done per call on plain rows and
never stored in the library's object, so one tokenizer serves any number of threads. Rows are
padded on the left unless something else is asked for. It knows nothing of models.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from everystep.errors import UnsupportedError
from everystep.files.opening import as_path
from everystep.text.batch import BatchEncoding, Padding, Truncation, shaped
from everystep.text.call_arguments import (
    TextInput,
    TextItem,
    as_chats,
    as_texts,
    checked_id,
    columns_of,
    columns_to_pad,
    id_rows,
    listed,
    padding_of,
    refuse_unknown,
    truncation_of,
)
from everystep.text.gguf import read_gguf
from everystep.text.literal import Literals, Shown, columns_of_chats, rendered_chats, without_marks
from everystep.text.native import checked_text, id_of, native_call
from everystep.text.parts import Encoded, encoded
from everystep.text.pieces import Decoding
from everystep.text.template import chosen_template, refuse_open_end, refuse_unread
from everystep.text.tokenizer_folder import read_folder, write_folder
from everystep.text.tokenizer_settings import NamedToken, Settings, checked_side, described

NO_SETTINGS = Settings()


class Tokenizer:
    """A vocabulary with its splitting rule, special tokens and chat template.

    Takes `backend` over: it must not pad or truncate. Settings are attributes and may be set:
    `bos_token`, `eos_token`, `unk_token`, `sep_token`, `pad_token`, `cls_token`, `mask_token`
    (with `..._id` beside each), `padding_side`, `truncation_side`, `model_max_length`,
    `chat_template`, `name_or_path`.
    """

    is_fast = True
    model_input_names = ("input_ids", "attention_mask")

    bos_token = NamedToken()
    eos_token = NamedToken()
    unk_token = NamedToken()
    sep_token = NamedToken()
    pad_token = NamedToken()
    cls_token = NamedToken()
    mask_token = NamedToken()
    bos_token_id = NamedToken()
    eos_token_id = NamedToken()
    unk_token_id = NamedToken()
    sep_token_id = NamedToken()
    pad_token_id = NamedToken()
    cls_token_id = NamedToken()
    mask_token_id = NamedToken()

    def __init__(self, backend: tokenizers.Tokenizer, settings: Settings = NO_SETTINGS) -> None:
        self.backend = backend
        self._origin: Path | None = None
        self._known_literals: Literals | None = None
        self.special = settings.special
        self.padding_side = settings.padding_side
        self.truncation_side = settings.truncation_side
        self.model_max_length = settings.model_max_length
        self.chat_template = settings.chat_template
        self.name_or_path = settings.name_or_path
        for name, token in settings.special.items():
            setattr(self, name, token)  # checks that the vocabulary has it

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Return the tokenizer of a folder of the Hugging Face layout; FileError if it is
        broken."""
        found = cls(*read_folder(as_path(folder)))
        found._origin = Path(folder)
        return found

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Return the tokenizer that a GGUF file's metadata describe, split as `tokenizer.ggml.pre`
        says.

        FormatError: the metadata contradict themselves. UnsupportedError: a model or rule that
        cannot be followed exactly.
        """
        return cls(*read_gguf(metadata))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> tuple[str, ...]:
        """Writes the files of the Hugging Face layout and returns their paths.

        A tokenizer that was read from a folder, and is as it was, is copied file by file.
        """
        settings = Settings(
            self.special,
            checked_side(self.padding_side, "padding_side"),
            checked_side(self.truncation_side, "truncation_side"),
            self.model_max_length,
            self.chat_template,
            self.name_or_path,
        )
        return tuple(map(str, write_folder(as_path(folder), self.backend, settings, self._origin)))

    # Text to ids

    def __call__(
        self,
        text: TextInput,
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        **unknown: object,
    ) -> BatchEncoding:
        """Columns of ids for one text, a list of texts, or pairs of texts.

        Lists of ids for one text, lists of lists for several; with `return_tensors` tensors
        ("pt") or arrays ("np") of shape (texts, length), int64. `max_length` alone truncates.
        """
        refuse_unknown(Tokenizer.__call__, unknown)
        texts, single = as_texts(text, text_pair)
        cut = self._truncation(truncation, max_length, padding)
        pad = self._padding(padding, max_length, padding_side, pad_to_multiple_of)
        asked = {
            "input_ids": True,
            "attention_mask": return_attention_mask is not False,
            "token_type_ids": return_token_type_ids,
            "special_tokens_mask": return_special_tokens_mask,
            "offset_mapping": return_offsets_mapping,
        }
        wanted = {name for name, is_asked in asked.items() if is_asked}
        only_ids = wanted <= {"input_ids", "attention_mask"}
        encodings = self._encodings(texts, add_special_tokens, only_ids=only_ids)
        columns = columns_of(encodings, wanted, cut)
        if add_special_tokens:
            self._warn_of_second_bos(columns["input_ids"])
        return shaped(pad(columns) if pad else columns, single, return_tensors)

    def encode(self, text: str, text_pair: str | None = None, **options: Any) -> Any:
        """Return the ids of one text: the column `input_ids` of a call."""
        return self(text, text_pair, **{"return_attention_mask": False, **options})["input_ids"]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of one text, as the vocabulary spells them."""
        with native_call("The text cannot be tokenized"):
            (found,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(found.tokens)

    def pad(
        self,
        rows: Mapping[str, Sequence[Sequence[int]]] | Sequence[Mapping[str, Sequence[int]]],
        *,
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
    ) -> BatchEncoding:
        """Make the rows of an encoded batch, or of a list of encoded texts, equally long."""
        columns = columns_to_pad(rows)
        columns.setdefault("attention_mask", [[1] * len(row) for row in columns["input_ids"]])
        pad = self._padding(padding, max_length, padding_side, pad_to_multiple_of)
        return shaped(pad(columns) if pad else columns, False, return_tensors)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        *,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        split_special_tokens: bool = True,
        **template_variables: Any,
    ) -> Any:
        """Render a chat, or a list of chats, as its prompt: text, ids, or an encoding.

        No special tokens are added to those that the template writes. Text if not `tokenize`,
        ids if not `return_dict`. `assistant_masks` is 1 where a token lies in a
        `{% generation %}` block. What looks like a special token in a message of a user or tool,
        in a document or in the schema of a tool, stays text unless `split_special_tokens` is False.
        A tool is a JSON schema, or a function with type hints and a docstring in Google's style.
        Further arguments are variables of the template; what it does not read is an error.
        """
        chats, single = as_chats(conversation)
        if add_generation_prompt or return_assistant_tokens_mask:
            refuse_open_end(continue_final_message)
        template = chosen_template(self.chat_template, chat_template, tools)
        given = {"tools": tools, "documents": documents}
        refuse_unread(template, template_variables, given, self.apply_chat_template)
        chats, shown = self._shown(chats)
        literals = self._literals if split_special_tokens else None
        rendered = rendered_chats(
            template,
            chats,
            literals if tokenize or shown else None,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens_map, **template_variables},
        )
        rendered = shown.filled(rendered) if shown else rendered
        if not tokenize:
            texts = [(without_marks(one)[0] if shown else one).text for one in rendered]
            return texts[0] if single else texts
        cut = self._truncation(truncation, max_length, padding)
        pad = self._padding(padding, max_length, padding_side, None)
        columns = columns_of_chats(
            rendered, self.backend, literals, cut, return_assistant_tokens_mask
        )
        encoding = shaped(pad(columns) if pad else columns, single, return_tensors)
        if shown:
            shown.add_to(encoding)
        return encoding if return_dict else encoding["input_ids"]

    def _shown(self, chats: list[Sequence[Any]]) -> tuple[list[Sequence[Any]], Shown | None]:
        """Return the chats as a template reads them, and what they show beside text: here
        nothing."""
        return chats, None

    @property
    def _literals(self) -> Literals:
        """The rule that keeps special tokens text; made again once the vocabulary has grown."""
        known = self._known_literals
        if known is None or known.size != self.backend.get_vocab_size(with_added_tokens=True):
            known = self._known_literals = Literals(self.backend)
        return known

    # Ids to text

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Return the text of a sequence of ids, or the texts of a list of sequences.

        An id without a token contributes nothing; a negative one is a TokenizerError. The text
        is never tidied up, since that would change what the ids say.
        """
        if clean_up_tokenization_spaces:
            raise UnsupportedError(
                "clean_up_tokenization_spaces=True would change the decoded text",
                wanted="False",
                do="Post-process the text yourself if it is to lose spaces",
            )
        rows, single = id_rows(token_ids)
        with native_call("The ids cannot be decoded"):
            texts = self.backend.decode_batch(rows, skip_special_tokens=skip_special_tokens)
        return texts[0] if single else texts

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Return the texts of several sequences of ids."""
        rows = listed(sequences, "a list of rows of ids")
        return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in rows]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or the tokens of several; None where there is none."""
        if isinstance(ids, int):
            return self.token_of(ids)
        skipped = self.skipped_ids if skip_special_tokens else frozenset()
        found = [checked_id(id) for id in listed(ids, "a list of ids")]
        return [self.token_of(id) for id in found if id not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several; the unknown token's where there is
        none."""
        if isinstance(tokens, str):
            id = id_of(self.backend, tokens)
            return self.unk_token_id if id is None else id
        found = [checked_text(one, "a token") for one in listed(tokens, "a list of tokens")]
        return [self.convert_tokens_to_ids(one) for one in found]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens that are spelled as in the vocabulary."""
        decoder = self.backend.decoder
        found = [checked_text(one, "a token") for one in listed(tokens, "a list of tokens")]
        return " ".join(found) if decoder is None else str(decoder.decode(found))

    # The vocabulary

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the merge model, without added tokens beyond it."""
        return int(self.backend.get_vocab_size(with_added_tokens=False))

    def get_vocab(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """Token to id of the added tokens alone."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items()}

    def token_of(self, id: int) -> str | None:
        """Return the token of an id as the vocabulary spells it, or None."""
        return self.backend.id_to_token(checked_id(id))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens that exist."""
        return dict(self.special)

    @functools.cached_property
    def skipped_ids(self) -> frozenset[int]:
        """The ids that decoding with `skip_special_tokens` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens, named or not, in order."""
        named = (self.backend.token_to_id(token) for token in self.special.values())
        return sorted(self.skipped_ids.union(id for id in named if id is not None))

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, in the order of their ids."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        """`backend` under the name by which grammar libraries look for it."""
        return self.backend

    @functools.cached_property
    def decoding(self) -> Decoding:
        """The rule by which tokens become text one at a time; UnsupportedError if there is none."""
        return Decoding.of(self.backend)

    def _encodings(
        self, texts: Sequence[TextItem], add_special_tokens: bool, *, only_ids: bool
    ) -> list[Encoded]:
        with native_call("The text cannot be tokenized"):
            return encoded(
                self.backend, texts, add_special_tokens=add_special_tokens, only_ids=only_ids
            )

    def _warn_of_second_bos(self, rows: Sequence[list[int]]) -> None:
        bos = self.bos_token_id
        if bos is not None and any(row[:2] == [bos, bos] for row in rows):
            warnings.warn(
                f"A text starts with {self.bos_token!r} already and got another one. Pass "
                "add_special_tokens=False for a prompt that a chat template has made.",
                stacklevel=3,
            )

    def _truncation(
        self, truncation: bool | str | None, max_length: int | None, padding: bool | str
    ) -> Truncation | None:
        side = checked_side(self.truncation_side, "truncation_side")
        return truncation_of(truncation, max_length, padding, self.model_max_length, side)

    def _padding(
        self, padding: bool | str, max_length: int | None, side: str | None, multiple: int | None
    ) -> Padding | None:
        limit, pad_id = self.model_max_length, self.pad_token_id
        side = checked_side(self.padding_side if side is None else side, "padding_side")
        return padding_of(padding, max_length, limit, side, multiple, pad_id)

    def __repr__(self) -> str:
        return described(self, "Tokenizer")
