"""Whatever a corpus looks like, each of its texts is read, told of in a note, or refused in one line."""

import csv
import gzip
import io
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from attnscope import AttnscopeError, Corpus

N_CORPORA = 200
N_TEXTS = 6


@dataclass
class Written:
    """A file that was written, and where its texts stand.

    Attributes:
        name: The file's name.
        content: Its lines.
        places: Of each text: a word that it alone has, the line that it begins on, and its field.
        options: Options of the corpus.
    """

    name: str
    content: str = ""
    places: list[tuple[str, int, str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def add(self, text, *words):
        """Add characters, and the words that stand in them with their fields."""
        begin = self.content.count("\n") + 1
        self.content += text
        self.places += [(word, begin, name) for word, name in words]


def sentence(chance, word):
    """Return a sentence that holds a word, and at times what a format has a meaning for."""
    odd = chance.choice(
        ["", " a, b", " a; b", ' "so" he said', "\ta\tb", " it's", " café", " \\n", " {}", " \u2028x"]
    )
    text = f"the {word} sat down{odd}"
    return f'"{text}" he said' if chance.random() < 0.1 else text


def write_jsonl(chance):
    """Return objects of JSON with the fields that datasets have, and lines that are none."""
    second = chance.choice(["text_pair", "context", "hypothesis", "answer"])
    first = chance.choice(["text", "text", "premise", "Text"])
    written = Written(chance.choice(["a.jsonl", "a.json", "a.ndjson"]))
    if chance.random() < 0.6:
        written.options["field"] = first
    if chance.random() < 0.4:
        written.options["pair_field"] = second
    indent = 2 if chance.random() < 0.1 else None
    for number in range(N_TEXTS):
        one = f"one{number}x"
        two = f"two{number}x"
        a = sentence(chance, one)
        b = sentence(chance, two)
        question = {"role": "user", "content": a}
        answer = {"role": "assistant", "content": b}
        entries = [
            ({first: a}, [(one, first)]),
            ({first: a, second: b}, [(one, first), (two, second)]),
            ({first: a, second: [b]}, [(one, first), (two, second)]),
            ({first: [a, b]}, [(one, first), (two, first)]),
            ({first: " ", second: b}, [(two, second)]),
            ({first: a, "label": 3, "id": "x7"}, [(one, first)]),
            ({"messages": [question, answer]}, [(one, ""), (two, "")]),
            ({"messages": [question], "system": b}, [(one, ""), (two, "system")]),
            ({first: {"nested": a}}, [(one, first)]),
            ([a, b], [(one, ""), (two, "")]),
        ]
        entry, words = chance.choice(entries[:2] * 6 + entries)
        line = json.dumps(entry, ensure_ascii=chance.random() < 0.5, indent=indent)
        if isinstance(entry, dict) and chance.random() < 0.1:  # a field twice
            line = f'{{"{first}": {json.dumps(b)}, {line[1:]}'
            words = [*words, (two, first)]
        if chance.random() < 0.1:  # cut off
            line = line[:-2]
        written.add(f"{line}\n", *words)
        written.add("\n" * chance.choice([0, 0, 1]))
    return written


def write_csv(chance):
    """Return a table in one of the dialects that programs write."""
    delimiter = chance.choice([",", ",", ",", "\t", ";", "|"])
    written = Written("a.tsv" if delimiter == "\t" else "a.csv")
    header = chance.choice(
        [["text"], ["id", "text"], ["text", "text_pair"], ["text", "context"], ["text", "text"], []]
    )
    if "context" in header and chance.random() < 0.5:
        written.options["pair_field"] = "context"
    quoting, escape = chance.choice(
        [(csv.QUOTE_MINIMAL, None), (csv.QUOTE_ALL, None), (csv.QUOTE_NONE, "\\")]
    )
    buffer = io.StringIO()
    rows = csv.writer(
        buffer,
        delimiter=delimiter,
        quoting=quoting,  # type: ignore[arg-type]
        escapechar=escape,
        quotechar=chance.choice(['"', '"', '"', "'"]),
        doublequote=escape is None,
        lineterminator="\n",
    )

    def add(cells, *words):
        rows.writerow(cells)
        written.add(buffer.getvalue(), *words)
        buffer.seek(0)
        buffer.truncate()

    written.add("\n" * chance.choice([0, 0, 0, 1]))
    if header:
        add(header)
    for number in range(N_TEXTS):
        cells = []
        words = []
        for column, name in enumerate(header or ["text", "more"]):
            word = f"row{number}col{column}x"
            text = sentence(chance, word)
            cells.append(
                str(number) if name == "id" else text.replace(" sat", chance.choice([" sat", "\nsat"]))
            )
            words += [(word, name)] if name != "id" else []
        if chance.random() < 0.1:  # more cells than columns
            cells.append(f"the extra{number}x sat down")
            words.append((f"extra{number}x", ""))
        elif chance.random() < 0.1 and len(cells) > 1:  # fewer
            cells.pop()
            words = [word for word in words if word[0] in " ".join(cells)]
        add(cells, *words)
        written.add("\n" * chance.choice([0, 0, 1]))
    return written


def write_plain(chance):
    """Return lines, paragraphs or a whole text."""
    split = chance.choice(["auto", "line", "paragraph", "file"])
    written = Written(chance.choice(["a.txt", "a.md", "a", "a.log"]), options={"split": split})
    gap = chance.choice(["\n", "\n\n", "\n \n", "\n\t\n\n"])
    begin = 1
    for number in range(N_TEXTS):
        begin = written.content.count("\n") + 1
        for line in range(chance.choice([1, 2, 3])):
            word = f"text{number}line{line}x"
            is_whole = split == "paragraph" and gap != "\n"
            n_before = written.content.count("\n") + 1
            written.add(f"{sentence(chance, word)}\n")
            written.places.append((word, begin if is_whole else n_before, ""))
        written.add(gap)
        written.add(chance.choice(["", "", "\u200b\n", "\x0c\n"]))
    return written


WRITERS = [write_jsonl, write_csv, write_plain]


def encode(chance, written):
    """Return a file's name and bytes: in an encoding, with a kind of line ends, plain or gzipped, at times damaged."""
    content = written.content.replace("\n", chance.choice(["\n", "\n", "\r\n", "\r"]))
    if chance.random() < 0.2:
        content = content.rstrip("\r\n")
    raw = content.encode(
        chance.choice(["utf-8"] * 6 + ["utf-8-sig"] * 2 + ["utf-16", "utf-32", "cp1252"]), "replace"
    )
    if chance.random() < 0.1:
        where = chance.randrange(len(raw))
        raw = raw[:where] + chance.choice([b"\0", b"\xff", b"\xef\xbb\xbf"]) + raw[where:]
    name = written.name
    if chance.random() < 0.2:
        raw = gzip.compress(raw, mtime=0)
        raw = raw[: len(raw) // 2] if chance.random() < 0.3 else raw
        name = chance.choice([f"{name}.gz", name])
    return name, raw


@pytest.mark.parametrize("seed", range(N_CORPORA))
def test_nothing_of_a_corpus_is_left_out_in_silence(tmp_path, seed):
    chance = random.Random(seed)
    written = WRITERS[seed % len(WRITERS)](chance)
    name, raw = encode(chance, written)
    (tmp_path / name).write_bytes(raw)
    corpus = Corpus(tmp_path / name, **written.options)
    try:
        texts = list(corpus)
    except AttnscopeError as error:
        assert "\n" not in error.message
        assert corpus.problems
        return
    read = "\n".join(text.full_text for text in texts).replace("\ufeff", "")
    last = max(text.line for text in texts)
    for problem in corpus.problems:
        assert "\n" not in str(problem)

    def is_told(word, begin, field_name):
        line = written.content[: written.content.index(word)].count("\n") + 1
        for problem in corpus.problems:
            gave_up = problem.line is None or last < problem.line <= line
            is_named = word in problem.reason or (
                field_name and f'field "{field_name}"' in problem.reason
            )
            if gave_up or is_named or problem.line in (begin, line):
                return True
        return False

    silent = [
        word
        for word, begin, name in written.places
        if word not in read and not is_told(word, begin, name)
    ]
    assert not silent, [silent, *corpus.problems, raw]
