"""Rows with images, videos or sound are refused by file, row and place; rows of text beside them are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_formats import QWEN25, chat_tokenizer

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.schema import TrainConfig
from surogate.data.chat.media import MEDIA_COLUMNS
from surogate.data.corpora import load_corpora, tokenize_row
from surogate.data.sources import HubSource
from surogate.data.tokenizer import Tokenizer
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry

FORMATS = load_registry().dataset_formats()
ASKED, SAID = {"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": "A friend."}
HELLO = [ASKED, SAID]
REMEDY = "this program trains text only. Remove such rows. Or set bad_rows: skip, which leaves such rows out and counts"


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    return chat_tokenizer(tmp_path / "model", QWEN25)


def config_of(path: Path, **keys: Any) -> TrainConfig:
    options = keys.pop("options", {})
    entry = DatasetEntry(path=str(path), type=keys.pop("type", "conversation"), **keys)
    entry = entry.model_copy(update={"options": options})
    return TrainConfig(model="model", datasets=(entry,), validation_split_ratio=0)


def load(path: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], **keys: Any) -> tuple[int, list[str]]:
    """Return the number of documents of a file of `rows`, and the notices."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notices: list[str] = []
    found = load_corpora(config_of(path, **keys), FORMATS, tokenizer.directory, tokenizer.vocab_size, notices.append)
    return sum(dataset.n_docs for dataset in found.train.corpus.datasets), notices


def asked_about(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, SAID]}


TEXT = {"type": "text", "text": "Who goes there?"}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image"}, "image"),
        ({"type": "image", "image": "a.png"}, "image"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "image_url"),
        ({"type": "input_image", "image_url": "a.png"}, "input_image"),
        ({"type": "video", "video": "a.mp4"}, "video"),
        ({"type": "audio", "audio_url": "a.wav"}, "audio"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"image": "a.png"}, "image"),
    ],
    ids=str,
)
def test_a_part_that_is_no_text_is_named_with_file_row_message_and_part(
    part: dict[str, Any], kind: str, chat: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"messages": HELLO}, asked_about(TEXT, part)]
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "rows.jsonl", chat, rows)
    expected = f"rows.jsonl:2: column 'messages', message 0, part 1 is of type {kind}: {REMEDY} them."
    assert str(error.value).endswith(expected) and "\n" not in str(error.value)


def test_parts_of_text_alone_are_trained_as_their_text(chat: Tokenizer, tmp_path: Path) -> None:
    halves = [{"type": "text", "text": "Who goes "}, {"type": "text", "text": "there?"}]
    tokens = []
    for row in ({"messages": HELLO}, asked_about(TEXT), asked_about(*halves), {**asked_about(TEXT), "images": []}):
        place = tmp_path / "rows.jsonl"
        place.write_text(json.dumps(row) + "\n")
        tokens.append(tokenize_row(config_of(place), FORMATS, chat.directory, "rows.jsonl:1").documents)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


def test_nulls_of_a_table_are_no_images(chat: Tokenizer, tmp_path: Path) -> None:
    """A table has all keys in all parts, and all columns in all rows."""
    parts = [{"type": "text", "text": "Who goes there?", "image_url": None}]
    rows = [{"messages": [{"role": "user", "content": parts}], "said": "A friend.", "images": []} for _ in range(3)]
    schema_row = {**rows[0], "images": [{"bytes": b"x", "path": None}]}
    schema_row["messages"] = [{"role": "user", "content": [parts[0] | {"image_url": {"url": "a"}}]}]
    options = {"completion_field": "said"}
    assert load(tmp_path / "rows.parquet", chat, [*rows, schema_row], options=options, bad_rows="skip")[0] == 3


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_with_a_list_of_media_is_refused_by_column(
    column: str, suffix: str, chat: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"messages": HELLO, column: []}, {"messages": HELLO, column: ["a"]}]
    with pytest.raises(ConfigError) as error:
        load(tmp_path / f"rows.{suffix}", chat, rows)
    place = {"jsonl": "rows.jsonl:2", "parquet": "rows.parquet row 1"}[suffix]
    assert str(error.value).endswith(f"{place}: column '{column}' holds what the text is about: {REMEDY} them.")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mark", ["<image>", "<|image|>", "<|image_pad|>", "<image_1>", "[IMG]", "<start_of_image>"])
def test_a_single_image_is_refused_where_a_message_has_a_place_for_it(
    mark: str, chat: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"image": "a.png", "messages": [{"role": "user", "content": f"{mark}\nWho goes there?"}, SAID]}]
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "rows.jsonl", chat, rows)
    assert f"rows.jsonl:1: column 'image' holds what {mark} in the text stands for: {REMEDY}" in str(error.value)


def test_a_single_image_that_no_message_refers_to_is_named_as_a_column_that_is_not_used(
    chat: Tokenizer, tmp_path: Path
) -> None:
    documents, notices = load(tmp_path / "rows.jsonl", chat, [{"image": "a.png", "messages": HELLO}])
    assert documents == 1 and notices == ["datasets.0: columns not used: image (in 1 row)"]
    talk = [{"role": "user", "content": "What does <image> mean in HTML?"}, SAID]
    assert load(tmp_path / "rows.jsonl", chat, [{"messages": talk}])[0] == 1


def test_images_beside_the_text_of_a_message_are_refused(chat: Tokenizer, tmp_path: Path) -> None:
    rows = [{"messages": [{**ASKED, "images": ["a.png"]}, SAID]}]
    with pytest.raises(ConfigError, match=r":1: column 'messages', message 0 has images: this program trains"):
        load(tmp_path / "rows.jsonl", chat, rows)
    assert load(tmp_path / "rows.jsonl", chat, [{"messages": [{**ASKED, "images": []}, SAID]}])[0] == 1


def test_rows_with_images_are_left_out_and_counted_on_request(chat: Tokenizer, tmp_path: Path) -> None:
    rows = [{"messages": HELLO}, {"messages": HELLO, "images": ["a.png"]}, asked_about(TEXT, {"type": "image"})]
    documents, notices = load(tmp_path / "rows.jsonl", chat, rows, bad_rows="skip")
    refused = "datasets.0: left out: 1 of 3 rows: bad_rows is skip, and their type refuses them: "
    only = "this program trains text only"
    assert documents == 1 and notices == [
        f"{refused}column 'images' holds what the text is about: {only} (first: rows.jsonl:2)",
        f"{refused}column 'messages', message N, part N is of type image: {only} (first: rows.jsonl:3)",
        "datasets.0: columns not used: images (in 1 row)",
    ]


@pytest.mark.parametrize(
    ("dataset_type", "row"),
    [
        ("instruction", {"instruction": "Who goes there?", "output": "A friend."}),
        ("preference", {"prompt": "Who goes there?", "chosen": "A friend.", "rejected": "Nobody."}),
        ("labelled", {"prompt": "Who goes there?", "completion": "A friend.", "label": True}),
    ],
)
def test_images_are_refused_beside_instructions_pairs_and_labelled_answers(
    dataset_type: str, row: dict[str, Any], chat: Tokenizer, tmp_path: Path
) -> None:
    place = tmp_path / "rows.jsonl"
    for images, refused in (([], False), (["a.png"], True)):
        place.write_text(json.dumps({**row, "images": images}) + "\n")
        config = config_of(place, type=dataset_type)
        if refused:
            with pytest.raises(ConfigError, match=r"rows.jsonl:1: column 'images' holds what the text is about"):
                tokenize_row(config, FORMATS, chat.directory, "rows.jsonl:1")
        else:
            assert tokenize_row(config, FORMATS, chat.directory, "rows.jsonl:1").documents


def test_images_of_a_hub_dataset_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "images": [datasets.Image()]})
    cells = {"text": ["a", "b"], "images": [[], [{"bytes": b"no image", "path": None}]]}
    table = datasets.Dataset.from_dict(cells, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: table)
    source = HubSource("owner/name", None, "train", None, "datasets.0")
    rows = list(source.rows(["text", *MEDIA_COLUMNS], MEDIA_COLUMNS))
    assert [row.values["images"] for row in rows] == [[], [{"bytes": b"no image"}]]
    assert [row.values["image"] for row in rows] == [None, None]
