"""Examples come from files, data sets, lists and iterables; broken files are named by line."""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import everystep as es
from everystep.errors import (
    FileError,
    FormatError,
    MissingExtraError,
    MissingFileError,
    RequestError,
    UnsupportedError,
)
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TWO = [{"text": "One."}, {"text": "Zwei, é, 二."}]


def written(folder: Path, text: str | bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


class DataSet:
    """What the library datasets has, as far as rows need it: a length, and examples by number."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples, self.asked = examples, list[int]()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return self.examples[index]


@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n"])
@pytest.mark.parametrize("of_path", [str, Path])
def test_each_line_is_an_example(tmp_path: Path, end: str, of_path: type) -> None:
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in TWO)
    found = es.read_examples(of_path(written(tmp_path, lines + end)))
    assert [found[0], found[1]] == TWO and len(found) == 2 and found.fixed


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "line 2 is not valid JSON"),
        (b'["text"]', "line 2 holds no object"),
        (b'{"text": NaN}', "line 2 is not valid JSON"),
        (b'{"text": 1, "text": 2}', "line 2.*comes twice"),
        (b'{"text": "\xff"}', "line 2 is not valid JSON"),
        (b"\n{}", "line 2 is empty"),
        (b"{}" + b"[" * 100 + b"]" * 100, "line 2"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "line 2 is nested too deeply"),
        (b"text", "line 2 is not valid JSON"),
        (b"'text'", "line 2 is not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        es.read_examples(written(tmp_path, b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n'))


@pytest.mark.parametrize(
    ("name", "text", "error", "says"),
    [
        ("data.jsonl", b"", RequestError, "no examples"),
        ("data.jsonl", b"version https://git-lfs.github.com/spec/v1\n", FormatError, "git-lfs"),
        ("data.jsonl", b"\xef\xbb\xbf{}", FormatError, "line 1"),
        ("data.csv", b"a,b", UnsupportedError, "no known kind"),
        ("data", b"{}", UnsupportedError, "no known kind"),
        ("data.parquet", b"{}", FormatError, "no Parquet file"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, name: str, text: bytes, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        es.read_examples(written(tmp_path, text, name))


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        es.read_examples(tmp_path / "none.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(FileError, match=r"no regular file|cannot be opened"):
        es.read_examples(tmp_path / "folder.jsonl")


def test_a_file_beyond_the_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everystep.train import data_files

    path = written(tmp_path, '{"text": "a"}\n')
    monkeypatch.setattr(data_files, "MAX_JSON_BYTES", 8)
    with pytest.raises(FormatError, match="line 1 is too long"):
        es.read_examples(path)
    monkeypatch.setattr(data_files, "MAX_DATA_BYTES", 8)
    with pytest.raises(FormatError, match="too large"):
        es.read_examples(path)


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, b"PAR1....PAR1", "data.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow.*everystep\[train\].*jsonl"):
        es.read_examples(path)


EXAMPLES: list[dict[str, Any]] = [
    {"prompt": "1, 2,", "completion": " 3", "tags": ["a", "b"], "weight": 0.5, "more": None},
    {"prompt": "Zwei, é, 二.", "completion": " ", "tags": [], "weight": 1.0, "more": {"x": 7}},
]


def test_parquet_is_what_pyarrow_wrote(tmp_path: Path) -> None:
    """The real library's files, whole and cut."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the extra train")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow has no parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(arrow.Table.from_pylist(EXAMPLES), path, row_group_size=1)
    assert [*es.read_examples(path).items] == EXAMPLES
    form = es.DataForm(remove_columns=["tags", "weight", "more"])
    tokenizer = tiny_tokenizer()
    rows = es.read_rows(path, None, tokenizer, form)
    wanted = es.read_rows(EXAMPLES, None, tokenizer, form)
    assert [one["input_ids"].tolist() for one in rows] == [
        one["input_ids"].tolist() for one in wanted
    ]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match=r"data\.parquet cannot be read"):
        es.read_examples(path)


PAIRS = [{"prompt": f"{n}, {n + 1},", "completion": f" {n + 2}"} for n in range(5)]
LIBRARY: dict[str, Callable[[], Any]] = {
    "a table": lambda: datasets.Dataset.from_list(PAIRS),
    "a table of columns more": lambda: datasets.Dataset.from_list(
        [{**one, "from": None} for one in PAIRS]
    ),
    "a stream": lambda: datasets.Dataset.from_list(PAIRS).to_iterable_dataset(),
    "a selection": lambda: datasets.Dataset.from_list([*PAIRS, *PAIRS]).select(range(5, 10)),
}


@pytest.mark.parametrize("form", LIBRARY)
def test_data_of_the_library_datasets_are_what_a_list_is(form: str) -> None:
    rows = es.read_rows(LIBRARY[form](), None, tiny_tokenizer())
    wanted = es.read_rows(PAIRS, None, tiny_tokenizer())
    assert len(rows) == 5 and rows.fixed == (form == "a stream")
    for own, other in zip(rows, wanted, strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_table_that_was_tokenised_elsewhere_trains_as_a_list_does(tmp_path: Path) -> None:
    listed = [{"input_ids": [5, 6 + n, 2], "labels": [-100, 6 + n, 2]} for n in range(6)]
    table = datasets.Dataset.from_list(listed).with_format("torch")

    def losses(data: Any, folder: str) -> list[float]:
        args = es.TrainingArguments(
            output_dir=tmp_path / folder, max_steps=4, logging_steps=1, disable_tqdm=True
        )
        model = tiny_llama(vocab_size=97, dtype=torch.float32)
        run = es.Trainer(model, args, train_dataset=data)
        run.train()
        return [one["loss"] for one in run.state.log_history if "loss" in one]

    assert losses(table, "table") == losses(listed, "list")


def test_several_data_sets_at_once_are_refused() -> None:
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(PAIRS))
    with pytest.raises(RequestError, match=r"several data sets.* Pass data\['train'\]"):
        es.read_rows(both, None, tiny_tokenizer())


def test_a_parquet_file_is_asked_of_pyarrow_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path; what the library says of a broken one is told."""
    path, read = written(tmp_path, b"PAR1....PAR1", "data.parquet"), []

    def read_table(name: str) -> Any:
        read.append(name)
        if len(read) > 1:
            raise OSError("Couldn't deserialize thrift")
        return types.SimpleNamespace(to_pylist=lambda: TWO)

    library = types.SimpleNamespace(read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=library))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", library)
    assert [*es.read_examples(path).items] == TWO and read == [str(path)]
    with pytest.raises(FormatError, match="thrift"):
        es.read_examples(path)


def test_a_data_set_is_asked_each_time_and_a_list_once() -> None:
    data = DataSet([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
    rows = es.read_rows(data)
    first, again = rows[1], rows[1]
    assert data.asked == [0, 1, 1], "the first tells the form"
    assert first["input_ids"].tolist() == again["input_ids"].tolist() == [7, 8]
    listed = es.read_rows(data.examples)
    assert listed[1]["input_ids"] is listed[1]["input_ids"], "made once"
    listed[1]["input_ids"] = listed[0]["input_ids"]
    assert listed[1]["input_ids"].tolist() == [7, 8], "a row that is changed is a copy"


def test_an_iterable_is_read_once_up_to_a_bound() -> None:
    def numbers() -> Iterator[dict[str, Any]]:
        return ({"input_ids": [5, n]} for n in itertools.count(6))

    rows = es.read_rows(itertools.islice(numbers(), 3))
    assert [row["input_ids"][1].item() for row in rows] == [6, 7, 8] * 1
    assert [row["input_ids"][1].item() for row in rows] == [6, 7, 8], "a second time too"
    with pytest.raises(RequestError, match="at most 100 examples"):
        es.read_examples(numbers(), most=100)


class Table:
    iloc = None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: object) -> object:
        return index


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train": DataSet([]), "test": DataSet([])}, r"several data sets.*data\['train'\]"),
        ({"text": ["a", "b"]}, "these are columns"),
        ([], "no examples"),
        (DataSet([]), "no examples"),
        (iter([]), "no examples"),
        (Table(), "to_dict"),
        (None, "this is no data"),
        (b"text", "this is no data"),
        (7, "this is no data"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        es.read_examples(data)
