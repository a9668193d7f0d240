"""Reading SOURCE: texts of every kind of file, in a fixed order, and one clear message for each error."""

import gzip
import json

import fsspec.compression
import pyarrow
import pyarrow.parquet
import pytest

from ropecli.data.conversations import Conversation
from ropecli.data.sources import read_rows, read_texts
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
    assert list(read_texts(str(tmp_path / name))) == [(f"{name}:{index}", text) for index, text in enumerate(ROWS)]
    assert [text for _, text in read_texts(str(tmp_path / name), text_column="body")] == ROWS[::-1]
    with pytest.raises(DataError, match=r"rows.*'title'.*id, text, body"):
        list(read_texts(str(tmp_path / name), text_column="title"))


CHATS = [
    [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}],
    [{"role": "user", "content": "a"}],
]


@tables
@pytest.mark.parametrize("column", ["messages", "conversations", "chat"])
def test_conversations_are_read_from_their_column_to_train_on(tmp_path, name, write, column):
    write(tmp_path / name, {"id": [1, 2], column: CHATS, "system": ["Be brief.", None]})
    named = {"text_column": "chat"} if column == "chat" else {}
    rows = list(read_rows(str(tmp_path / name), **named))
    assert rows == [
        (f"{name}:0", Conversation(CHATS[0], system="Be brief.")),
        (f"{name}:1", Conversation(CHATS[1])),
    ]
    with pytest.raises(DataError, match=rf"{name}:0 is a conversation; expected text"):
        list(read_texts(str(tmp_path / name), **named))


def zstd(content: bytes) -> bytes:
    """A zstd file with the content in one raw block, as RFC 8878 defines it."""
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return bytes.fromhex("28b52ffd a0") + len(content).to_bytes(4, "little") + block


needs_zstd = pytest.mark.skipif("zstd" not in fsspec.compression.compr, reason="needs Python 3.14 or zstandard")
compressions = pytest.mark.parametrize(
    ("ending", "compress"),
    [pytest.param("gz", gzip.compress, id="gz"), pytest.param("zst", zstd, marks=needs_zstd, id="zst")],
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
    rows = [(f"rows.jsonl.{ending}:{index}", text) for index, text in enumerate(ROWS)]
    expected = [("also.md", "not compressed"), *rows, (f"story.txt.{ending}", "grüße\n\tand more\n")]
    assert list(read_texts(str(packed))) == expected
    assert list(read_texts(str(packed / f"rows.jsonl.{ending}"))) == rows


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("z.txt", "b/y.md", "a/x.py", "b/a.txt"):  # not the order that is expected
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "b" / "rows.jsonl", {"text": ["first", "second"]})
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "folder.txt").mkdir()
    expected = [("a/x.py", "a/x.py"), ("b/a.txt", "b/a.txt"), ("b/rows.jsonl:0", "first"), ("b/rows.jsonl:1", "second")]
    assert list(read_texts(str(tmp_path))) == [*expected, ("b/y.md", "b/y.md"), ("z.txt", "z.txt")]


WRONG = {
    "an empty folder": ("folder", None, r"folder contains no .*\.txt.* files"),
    "an unknown file type": ("x.pdf", b"%PDF", r"x\.pdf.*unknown file type.*\.jsonl"),
    "text that is not UTF-8": ("x.txt", b"\xff\xfe\x00a", r"x\.txt.*UTF-8"),
    "a damaged archive": ("x.txt.gz", gzip.compress(b"text")[:-9], r"x\.txt\.gz.*cannot be read"),
    "broken JSON": ("x.jsonl", b'{"text": "a"}\n{"text": ', r"x\.jsonl.*cannot be read as a table"),
    "not a parquet file": ("x.parquet", b"junk", r"x\.parquet.*cannot be read as a table"),
    "not an arrow file": ("x.arrow", b"", r"x\.arrow.*cannot be read as a table"),
    "a missing path": ("absent.txt", None, r"No file or folder .*absent\.txt"),
    "an endless name": ("x" * 300, None, "is not a valid source"),
}


@pytest.mark.parametrize(("name", "content", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_source_that_cannot_be_read_says_why(tmp_path, name, content, message):
    if name == "folder":
        (tmp_path / name).mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_texts(str(tmp_path / name)))


def test_a_dataset_on_the_hub_needs_the_hub():
    with pytest.raises(
        DataError, match="owner/name is not a local file or folder, and it could not be loaded from the Hub"
    ):
        list(read_texts("owner/name"))
