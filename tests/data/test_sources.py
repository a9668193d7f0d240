"""Reading SOURCE: texts of every kind of file, in a fixed order, and one clear message for each error."""

import codecs
import csv
import datetime
import gzip
import json
import re
from itertools import islice

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from ropecli.data.formats import Conversation
from ropecli.data.sources import TO_TRAIN, Source
from ropecli.errors import DataError

ROWS = ["first row, with a ü", "second\nrow", "third row"]


def write_jsonl(path, columns):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_arrow_stream(path, columns, new=pyarrow.ipc.new_stream):
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)


TABLES = {
    "jsonl": ("rows.jsonl", write_jsonl),
    "parquet": ("rows.parquet", write_parquet),
    "arrow stream": ("rows.arrow", write_arrow_stream),
    "arrow file": ("rows.arrow", lambda path, columns: write_arrow_stream(path, columns, pyarrow.ipc.new_file)),
}
tables = pytest.mark.parametrize(("name", "write"), TABLES.values(), ids=TABLES.keys())


@tables
def test_a_table_gives_a_document_a_row(tmp_path, name, write):
    write(tmp_path / name, {"id": [1, 2, 3], "text": ROWS, "body": ROWS[::-1]})
    assert list(Source(str(tmp_path / name)).texts()) == [
        (f"{name}:{number}", text) for number, text in enumerate(ROWS, 1)
    ]
    assert [text for _, text in Source(str(tmp_path / name), column="body").texts()] == ROWS[::-1]
    with pytest.raises(DataError, match=r"rows.*'title'.*id, text, body"):
        list(Source(str(tmp_path / name), column="title").texts())


CHATS = [
    [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}],
    [{"role": "user", "content": "a"}],
]


@tables
@pytest.mark.parametrize("column", ["messages", "conversations", "chat"])
def test_conversations_are_read_from_their_column_to_train_on(tmp_path, name, write, column):
    write(tmp_path / name, {"id": [1, 2], column: CHATS, "system": ["Be brief.", None]})
    named = {"column": "chat"} if column == "chat" else {}
    rows = list(Source(str(tmp_path / name), **named).rows())
    assert rows == [
        (f"{name}:1", Conversation(CHATS[0], system="Be brief.")),
        (f"{name}:2", Conversation(CHATS[1])),
    ]
    with pytest.raises(DataError, match=rf"{name}:1 is a conversation; expected text"):
        list(Source(str(tmp_path / name), **named).texts())


ASKED = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
FORMATS = {
    "alpaca": ({"instruction": "Where?", "output": "Here."}, Conversation(ASKED)),
    "alpaca with an input": (
        {"instruction": "Where", "input": "?", "output": "Here.", "system": "Be brief."},
        Conversation([{"role": "user", "content": "Where\n?"}, ASKED[1]], system="Be brief."),
    ),
    "alpaca with a history": (
        {"instruction": "When?", "output": "Now.", "history": [["Where?", "Here."]]},
        Conversation([*ASKED, {"role": "user", "content": "When?"}, {"role": "assistant", "content": "Now."}]),
    ),
    "prompt and completion": ({"prompt": "Where?", "completion": "Here."}, Conversation(ASKED)),
    "prompt and completion of messages": (
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
        Conversation(ASKED, read_only=1),
    ),
    "tools by another name": (
        {"messages": ASKED, "tools": None, "tool_defs": [{"name": "look"}]},
        Conversation(ASKED, [{"name": "look"}]),
    ),
    "OpenAI's functions": (
        {"messages": ASKED, "functions": [{"name": "look"}]},
        Conversation(ASKED, [{"type": "function", "function": {"name": "look"}}]),
    ),
    "messages as JSON": ({"messages": json.dumps(ASKED)}, Conversation(ASKED)),
    "JSON of messages as the text": ({"text": json.dumps(ASKED)}, Conversation(ASKED)),
    "another JSON as the text": ({"text": '[{"a": 1}]'}, '[{"a": 1}]'),
}


@pytest.mark.parametrize(("row", "expected"), FORMATS.values(), ids=FORMATS)
def test_published_formats_are_read_by_their_columns(tmp_path, row, expected):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 1, **row}) + "\n")
    assert [body for _, body in Source(str(tmp_path / "a.jsonl")).rows()] == [expected]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"question": "Where?", "answer": "Here."},
            r"Columns: question, answer\. Expected text, or messages or .*role",
        ),
        ({"messages": "Where?"}, "messages is text that is not JSON"),
        ({"prompt": "Where?", "completion": None}, "prompt is 'Where"),
        ({"instruction": ["Where?"], "output": "Here."}, r"instruction is \['Where\?'\]; expected text"),
        ({"instruction": "Where?", "output": "Here.", "history": 5}, "history is 5; expected a list of pairs"),
        ({"messages": ASKED, "tools": [{}], "functions": [{}]}, "tools and functions both have tools"),
        ({"prompt": ["Where?"], "completion": ["Here."]}, r"prompt is \['Where\?'\]; expected text or a conversation"),
    ],
)
def test_other_formats_are_refused_with_the_names_and_an_example(tmp_path, row, reason):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=reason):
        list(Source(str(tmp_path / "a.jsonl")).rows())
    assert texts_of(tmp_path / "a.jsonl", skip_faulty=True) == []


def zstd(content: bytes) -> bytes:
    """A zstd file with the content in one raw block, as RFC 8878 defines it."""
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return bytes.fromhex("28b52ffd a0") + len(content).to_bytes(4, "little") + block


compressions = pytest.mark.parametrize(
    ("ending", "compress"),
    [pytest.param("gz", gzip.compress, id="gz"), pytest.param("zst", zstd, id="zst")],
)


@compressions
def test_compressed_text_and_rows_are_read_as_without_compression(tmp_path, ending, compress):
    write_jsonl(tmp_path / "rows.jsonl", {"text": ROWS})
    (tmp_path / "story.txt").write_text("grüße\n\tand more\n", encoding="utf-8")
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in ("rows.jsonl", "story.txt"):
        (packed / f"{name}.{ending}").write_bytes(compress((tmp_path / name).read_bytes()))
    (packed / "also.md").write_text("not compressed")
    (packed / "picture.png.gz").write_bytes(b"junk")
    rows = [(f"rows.jsonl.{ending}:{number}", text) for number, text in enumerate(ROWS, 1)]
    expected = [("also.md", "not compressed"), *rows, (f"story.txt.{ending}", "grüße\n\tand more\n")]
    assert list(Source(str(packed)).texts()) == expected
    assert list(Source(str(packed / f"rows.jsonl.{ending}")).texts()) == rows


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("z.txt", "b/y.md", "a/x.py", "b/a.txt"):  # not the order that is expected
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "b" / "rows.jsonl", {"text": ["first", "second"]})
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "folder.txt").mkdir()
    expected = [("a/x.py", "a/x.py"), ("b/a.txt", "b/a.txt"), ("b/rows.jsonl:1", "first"), ("b/rows.jsonl:2", "second")]
    assert list(Source(str(tmp_path)).texts()) == [*expected, ("b/y.md", "b/y.md"), ("z.txt", "z.txt")]


def texts_of(folder, **options):
    return [text for _, text in Source(str(folder), **options).texts()]


def write_csv(path, columns):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([columns, *zip(*columns.values(), strict=True)])


def write_json(path, columns):
    path.write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *(("a.csv", write_csv), ("a.tsv", write_csv), ("a.json", write_json), ("b.json", write_jsonl)),
        ("A.JSONL", write_jsonl),
    ],
)
def test_further_tables_and_names_in_capitals_are_read(tmp_path, name, write):
    write(tmp_path / name, {"id": ["1", "2", "3"], "text": ROWS})
    (tmp_path / "README.md").write_text("What the table has.")
    assert texts_of(tmp_path) == texts_of(tmp_path / name) == ROWS


ODD: dict[str, tuple[object, str]] = {
    "null": ({"text": None}, "text is null; expected text or a conversation"),
    "a number": ({"text": 2023}, "text is 2023"),
    "an object": ({"text": {"a": 1}}, "text is {'a': 1}"),
    "missing": ({"body": "a"}, "no column 'text'. Columns: body"),
    "no object": ([1], r"[1] is not an object"),
    "no JSON": ('{"text": ', "not JSON: Expecting value"),
    "half a surrogate pair": ({"text": "a\ud800"}, "text cannot be written as JSON in UTF-8: 'utf-8' codec"),
    "not a number": ({"messages": [{"x": [float("nan")]}]}, "messages cannot be written as JSON in UTF-8: Out of"),
}


@pytest.mark.parametrize(("row", "fault"), ODD.values(), ids=ODD)
def test_an_odd_row_is_named_and_changes_no_other(tmp_path, row, fault, caplog):
    good = [{"text": f"text {number}"} for number in range(3)]
    rows = [*good[:2], row, *good[2:]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in rows))
    texts = Source(str(path)).texts()
    assert [text for _, text in islice(texts, 2)] == ["text 0", "text 1"]
    with pytest.raises(DataError, match=re.escape(f"rows.jsonl, line 3: {fault}")):
        next(texts)
    assert texts_of(path, skip_faulty=True) == [entry["text"] for entry in good]
    assert f"Skipping 1 faulty row. The first: rows.jsonl, line 3: {fault}" in caplog.text


def test_a_value_that_json_has_not_is_refused_in_a_conversation(tmp_path):
    message = {"role": "user", "content": "a", "at": datetime.date(2024, 1, 1)}
    write_parquet(tmp_path / "a.parquet", {"messages": [[message]]})
    with pytest.raises(DataError, match="row 1: messages cannot be written as JSON in UTF-8: Object of type date"):
        list(Source(str(tmp_path / "a.parquet")).rows())


def test_a_column_that_is_not_needed_stops_nothing(tmp_path):
    """Whatever type its values have, and change to."""
    pairs = [(None, "a"), (3, 3.5), ([], ["a"]), ("2024-01-01", "unknown"), ("a", [{"b": 1}]), ({"a": 1}, {"b": {}})]
    rows = [{"text": f"text {late}", **{str(n): pair[late] for n, pair in enumerate(pairs)}} for late in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts_of(tmp_path / "rows.jsonl") == ["text 0", "text 1"]


def test_values_of_a_conversation_are_as_in_the_file(tmp_path):
    call = {"z": 1, "a": 1.5, "day": "2024-01-01", "large": 12345678901234567890123, "none": None}
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{**call, "n": n}]}]} for n in (1, 1.5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = [row.messages for _, row in Source(str(tmp_path / "rows.jsonl")).rows()]
    assert list(map(repr, read)) == [repr(row["messages"]) for row in rows]


def write_splits(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_parquet(folder / name, {"text": [name]})


def write_by_names(folder):
    write_splits(folder, ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"])


def write_by_card(folder):
    write_splits(folder, ["a/one.parquet", "b/two.parquet"])
    files = [{"split": "train", "path": "a/*"}, {"split": "test", "path": "b/*"}]
    card = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\nA card.\n")


def write_by_save_to_disk(folder):
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(folder)


@pytest.mark.parametrize("write", [write_by_names, write_by_card, write_by_save_to_disk])
def test_one_split_of_a_folder_is_read_and_said(tmp_path, write, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "data set test"
    write(folder)
    (folder / "notes.txt").write_text("no document")
    measured, trained = texts_of(folder), [text for _, text in Source(str(folder), splits=TO_TRAIN).rows()]
    assert (len(measured), len(trained), measured != trained) == (1, 1, True)
    assert f"Reading the split test of {folder}; it also has train. Choose another with --split." in caplog.text
    assert f"Reading the split train of {folder}; it also has test." in caplog.text
    assert texts_of(folder, split="train") == trained
    with pytest.raises(DataError, match=r"has no split dev\. Choose one of train, test\."):
        texts_of(folder, split="dev")


def test_a_folder_that_is_one_saved_dataset_is_read(tmp_path):
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "saved")
    assert texts_of(tmp_path / "saved") == ROWS


def test_a_folder_of_source_code_has_no_splits(tmp_path):
    for name in ("a.py", "b/README.md", "test/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "test" / "rows.jsonl", {"text": ["a row"]})
    (tmp_path / "test" / "figures.json").write_text("[1, 2]")
    assert texts_of(tmp_path) == ["a.py", "b/README.md", "test/c.py", "a row"]


def test_hidden_files_are_no_documents(tmp_path):
    for name in ("a.jsonl", ".ipynb_checkpoints/a.jsonl", "__MACOSX/._a.jsonl", ".git/x.md", "b/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert [name for name, _ in Source(str(tmp_path)).texts()] == ["a.jsonl:1", "b/__init__.py"]


@pytest.mark.parametrize("name", ["2024-test-run.jsonl", "news-train.jsonl"])
def test_the_name_of_one_file_among_others_is_no_split(tmp_path, name):
    for each in (name, "books.jsonl"):
        write_jsonl(tmp_path / each, {"text": [each]})
    assert sorted(texts_of(tmp_path)) == sorted(text for _, text in Source(str(tmp_path), splits=TO_TRAIN).texts())
    assert len(texts_of(tmp_path)) == 2


def test_a_link_to_a_missing_shard_is_refused(tmp_path):
    write_jsonl(tmp_path / "train-00000-of-00002.jsonl", {"text": ROWS})
    (tmp_path / "train-00001-of-00002.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"train-00001-of-00002\.jsonl is a link to a missing file"):
        texts_of(tmp_path)


def test_what_is_not_read_of_a_folder_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    write_jsonl(tmp_path / "rows.jsonl", {"text": ROWS})
    for name in ("settings.json", "figures.csv", "README.md", "picture.png"):
        (tmp_path / name).write_text("a,b\n1,2\n" if name.endswith("csv") else "{}")
    assert texts_of(tmp_path) == ROWS
    assert f"Not read in {tmp_path}, 4: README.md, figures.csv, picture.png, settings.json." in caplog.text


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    text = {"a.jsonl": json.dumps({"text": "some text"}), "a.csv": "text\nsome text\n"}.get(name, "some text")
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + text.encode())
    assert texts_of(tmp_path / name) == ["some text"]


WRONG = {
    "a folder that datasets takes for a pattern": (
        "a[1]/a.jsonl",
        b'{"text": "a"}',
        r"find the splits of .*a\[1\]",
    ),
    "an empty folder": ("folder", None, r"folder contains no .*\.txt.* files"),
    "an unknown file type": ("x.pdf", b"%PDF", r"x\.pdf.*unknown file type.*\.jsonl"),
    "text that is not UTF-8": ("x.txt", b"\xff\xfe\x00a", r"x\.txt cannot be read: 'utf-8' codec"),
    "a cut .gz": ("x.txt.gz", gzip.compress(b"text" * 99)[:-12], r"x\.txt\.gz cannot be read: Truncated"),
    "a pointer": (
        "x.jsonl.gz",
        b"version https://git-lfs.github.com/spec/v1\n",
        r"x\.jsonl\.gz is a pointer of Git LFS",
    ),
    "too many values": ("x.csv", b"id,text\n1,Hello, world\n", r"x\.csv, line 2: more values than"),
    "a quote that does not end": ("x.csv", b'text\na\n"b\nc', r"x\.csv.* after line 2: unexpected end"),
    "not a parquet file": ("x.parquet", b"junk", r"x\.parquet.*cannot be read as a table"),
    "a missing path": ("absent.txt", None, r"No file or folder .*absent\.txt"),
}


@pytest.mark.parametrize(("name", "content", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_source_that_cannot_be_read_says_why(tmp_path, name, content, message):
    if name == "folder":
        (tmp_path / name).mkdir()
    if content is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts_of(tmp_path / name.partition("/")[0])
