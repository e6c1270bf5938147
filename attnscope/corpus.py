"""Many texts on their way in, in constant memory: from files to texts, blocks of texts, chunks and batches.

What a head does is measured over a corpus that need not fit in memory, on one machine or on several that each take a
shard. Every cut here depends on the texts alone: blocks are fixed runs of consecutive texts, a shard takes whole
blocks, batches are made inside a block by a fixed budget. So a number never depends on how the work was split.

Knows no model: tokenising is a function that is handed in.
"""

import codecs
import contextlib
import csv
import glob
import hashlib
import importlib
import io
import json
import sys
import tempfile
import unicodedata
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import AttnscopeError
from attnscope.records import Tokens
from attnscope.text import build_tokens

Split = Literal["line", "paragraph", "file"]
"""What of a plain text file is one text; paragraphs are divided by blank lines."""

Format = Literal["auto", "txt", "jsonl", "csv", "tsv"]
"""How files are read; "auto" goes by the name: .jsonl, .ndjson, .json; .csv; .tsv; anything else is plain text."""

Encode = Callable[[str], Tokens]
"""Tokenises a text, special tokens included: `encode` of a model's tokenizer."""

BLOCK = 256
"""Texts in a block. Like TOKEN_BUDGET part of what a result means: two runs agree bit for bit where both agree."""

TOKEN_BUDGET = 4096
"""Tokens in a batch, padding included."""

BAD_LINES = 10
"""So many lines of one source may be malformed before the rest of it is given up."""


@dataclass(frozen=True)
class CorpusText:
    """One text of a corpus, and where it stands.

    Attributes:
        index: Its number in the corpus, from 0; blank texts are not counted.
        source: The file's name as it was given or found; "stdin".
        line: The line it begins on, from 1.
        text: The text; None where token numbers were given instead.
        ids: Token numbers, special ones included; None where a text was given.
    """

    index: int
    source: str
    line: int
    text: str | None = None
    ids: tuple[int, ...] | None = None

    def digested(self) -> bytes:
        """What hashes of texts are made of; the place does not enter."""
        raw = (
            (self.text or "").encode("utf-8", "surrogatepass")
            if self.ids is None
            else np.array(self.ids, "<i8").tobytes()
        )
        return f"{'text' if self.ids is None else 'ids'} {len(raw)}\n".encode() + raw


@dataclass(frozen=True)
class Problem:
    """What could not be read.

    Attributes:
        source: The file's name; "stdin".
        line: The line from which on, or the only one that, was skipped; None = the whole source.
        reason: Why.
    """

    source: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.source}{'' if self.line is None else f', line {self.line}'}: {self.reason}"


class Corpus:
    """The texts of files, one after the other, as often as one iterates over it.

    Files are UTF-8, with or without a byte order mark, with any line ends, plain or compressed (.gz, .zst; compressed
    data are recognised under any name). At most one text is in memory, and 64 KiB of its file. Blank texts are
    skipped. stdin is read once, and kept in a temporary file for the next time.

    What cannot be read does not end the iteration. A source that is missing, or from some line on is not UTF-8, is
    cut off or damaged, gives the texts before that point (of damaged compressed data up to the last 1 KiB before it);
    the next source follows. Of jsonl and CSV a malformed line alone is skipped; after ten of them the source is given
    up. All of that is listed in `problems`.

    Args:
        files: Names and glob patterns (`**` for any folders); "-" is stdin. Patterns are looked up at once, their
            matches sorted by name; a file that comes twice is read once, where it comes first.
        split: What of a plain text file is one text.
        field: The field (jsonl) or column (CSV) that holds the text. In jsonl it may also be a list of token numbers;
            a line without the field may have `input_ids`.
        format: How to read all of them.

    Attributes:
        sources: What will be read, in order.
        problems: What could not be read in the last iteration, in order.
        n_bytes: Size of all sources on disk; None where stdin is one of them.
        bytes_read: How much of it the last iteration has read.
        sha256: Hash of all texts of the last whole iteration, hex: the same texts in the same order have the same one,
            whatever files they came in. Empty before.

    Raises:
        AttnscopeError: No file is given, an argument is unknown, or a .zst is named and cannot be read for want of
            the extra [zst]. While iterating: there is no text at all.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        *,
        split: Split = "line",
        field: str = "text",
        format: Format = "auto",
    ) -> None:
        for name, value, known in (("split", split, get_args(Split)), ("format", format, get_args(Format))):
            if value not in known:
                raise AttnscopeError(f"there is no {name} {value!r}", f"choose one of {', '.join(known)}")
        if isinstance(files, str | Path):
            files = [files]
        if not files:
            raise AttnscopeError("no file given", "give --file PATH, or - for stdin")
        self.sources = _expand(files)
        self.split, self.field, self.format = split, field, format
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self.sha256 = ""
        self._stdin: _Replay | None = None
        if any(name.endswith(".zst") for name in self.sources):
            _zstd()

    @property
    def n_bytes(self) -> int | None:
        """Size of all sources on disk, in bytes; None where stdin is one of them."""
        if "-" in self.sources:
            return None
        return sum(path.stat().st_size for path in map(Path, self.sources) if path.is_file())

    def __iter__(self) -> Iterator[CorpusText]:
        self.problems, self.bytes_read, self.sha256 = [], 0, ""
        digest = hashlib.sha256()
        index = 0
        for source in self.sources:
            name = "stdin" if source == "-" else source
            try:
                for line, content in self._read(source, name):
                    if _is_blank(content):
                        continue
                    if isinstance(content, str):
                        text = CorpusText(index, name, line, text=content)
                    else:
                        text = CorpusText(index, name, line, ids=content)
                    digest.update(text.digested())
                    index += 1
                    yield text
            except _UnreadableError as error:
                self.problems.append(Problem(name, error.line, error.reason))
            except OSError as error:
                self.problems.append(Problem(name, None, error.strerror or str(error)))
        if not index:
            why = f"; {self.problems[0]}" if self.problems else ""
            more = f", and {len(self.problems) - 1} more problems" if len(self.problems) > 1 else ""
            raise AttnscopeError(
                f"no text is left: nothing to read in {_count(len(self.sources), 'source')}{why}{more}",
                "name files that hold text" if self.problems else "they are empty or blank: give at least one word",
            )
        self.sha256 = digest.hexdigest()

    def _read(self, source: str, name: str) -> "Iterator[tuple[int, str | tuple[int, ...]]]":
        """Texts and token numbers of one source, with the lines that they begin on; blank ones too."""
        bad = _BadLines(name, self.problems)
        with self._open(source) as file:
            lines = _lines(_decompress(_chunks(file, self._count_bytes), name))
            match _format(name) if self.format == "auto" else self.format:
                case "jsonl":
                    yield from _read_jsonl(lines, self.field, bad)
                case "csv":
                    yield from _read_csv(lines, self.field, ",", bad)
                case "tsv":
                    yield from _read_csv(lines, self.field, "\t", bad)
                case _:
                    yield from _SPLITTERS[self.split](lines)

    def _open(self, source: str) -> "BinaryIO | _Replay":
        if source != "-":
            return Path(source).open("rb")
        if self._stdin is None:
            if sys.stdin is None:
                raise AttnscopeError("there is no stdin to read from", "give --file PATH")
            stream = getattr(sys.stdin, "buffer", None)
            self._stdin = _Replay(stream or io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass")))
        return self._stdin.again()

    def _count_bytes(self, n: int) -> None:
        self.bytes_read += n


def repeat_probe(
    vocab_ids: ArrayLike,
    n_texts: int,
    length: int,
    seed: int,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> Iterator[CorpusText]:
    """Random token sequences that come twice, x1 … xm x1 … xm: the standard test for induction heads.

    Nothing but induction helps a model in the second half (Olsson et al. 2022, In-context Learning and Induction
    Heads). Tokens are drawn uniformly, with replacement. Text number i depends on the seed, i and the set of
    `vocab_ids` alone: the first texts of a longer probe are those of a shorter one.

    Args:
        vocab_ids: The token numbers to draw from, in any order: ordinary tokens, no special ones.
        n_texts: How many texts.
        length: m, the tokens of one half.
        seed: At least 0.
        before: Token numbers to begin each text with, such as [CLS].
        after: Token numbers to end each text with.

    Raises:
        AttnscopeError: There is nothing to draw from, or a number is too small.
    """
    vocabulary = np.unique(np.asarray(vocab_ids, np.int64))
    if not len(vocabulary) or n_texts < 1 or length < 1 or seed < 0:
        raise AttnscopeError(
            f"no probe of {n_texts} texts of {length} tokens from {len(vocabulary)} with seed {seed}",
            "texts, tokens and vocabulary are at least 1, the seed at least 0",
        )

    def texts() -> Iterator[CorpusText]:
        for index in range(n_texts):
            # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
            # The remainder prefers no token by more than 1 in 2^64 / len(vocabulary).
            raw = np.random.PCG64(np.random.SeedSequence([seed, index])).random_raw(length)
            half = vocabulary[(raw % np.uint64(len(vocabulary))).astype(np.int64)].tolist()
            yield CorpusText(index, f"repeat probe, seed {seed}", index + 1, ids=(*before, *half, *half, *after))

    return texts()


# Blocks, chunks, batches ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fixed run of consecutive texts.

    Attributes:
        index: Its number in the corpus, from 0.
        texts: The texts, in the order of the corpus.
    """

    index: int
    texts: tuple[CorpusText, ...]


def blocks(texts: Iterable[CorpusText], n: int = BLOCK, *, shard: tuple[int, int] = (1, 1)) -> Iterator[Block]:
    """Cuts a corpus into blocks of n consecutive texts (the last may have fewer), and picks those of a shard.

    Args:
        texts: The whole corpus, whatever the shard.
        n: Texts in a block.
        shard: (k, number of shards), k from 1: takes the blocks whose index modulo the number of shards is k - 1.

    Raises:
        AttnscopeError: n is below 1, or there is no such shard.
    """
    k, of = shard
    if n < 1:
        raise AttnscopeError(f"a block has at least one text, not {n}")
    if not 1 <= k <= of:
        raise AttnscopeError(f"there is no shard {k}/{of}", "shards are 1/8 to 8/8")

    def cut() -> Iterator[Block]:
        stream = iter(texts)
        index = 0
        while held := tuple(islice(stream, n)):
            if index % of == k - 1:
                yield Block(index, held)
            index += 1

    return cut()


@dataclass(frozen=True, eq=False)
class Chunk:
    """A text as far as a model takes it at once: the whole, or a part of it.

    Attributes:
        text: The index of the text in the corpus; the sums of all its chunks are those of one text.
        number: Which chunk of the text it is, from 0.
        n_chunks: How many there are.
        tokens: Its tokens, with the special ones of the text at both ends.
        n_repeated: How many of its tokens, after the special ones at its start, were in the chunk before it as well.
    """

    text: int
    number: int
    n_chunks: int
    tokens: Tokens
    n_repeated: int

    def __len__(self) -> int:
        return len(self.tokens)


def chunks(
    tokens: Tokens, text: int = 0, *, limit: int | None = None, chunk: int | None = None, stride: int | None = None
) -> list[Chunk]:
    """Cuts a text that is too long into chunks; one that is not stays whole.

    The special tokens at the start of the text and those at its end stand at the ends of each chunk.

    Args:
        tokens: The text. Without any token there is no chunk.
        text: Its index in the corpus.
        limit: How many tokens the model takes, special ones included; None = any number.
        chunk: How many tokens a chunk has at most, special ones included; None = `limit`.
        stride: How many tokens further the next chunk begins; None = as many as a chunk holds besides the special
            ones, so that no token comes twice. With less, tokens keep a context at the cuts.

    Raises:
        AttnscopeError: A chunk has more tokens than the model takes, or no room besides the special ones; the stride
            leaves tokens out, or is below 1.
    """
    size = limit if chunk is None else chunk
    if size is not None and limit is not None and size > limit:
        raise AttnscopeError(f"chunks of {size} tokens are too long", f"the model takes at most {limit}")
    ordinary = np.flatnonzero(~tokens.special)
    first, last = (int(ordinary[0]), int(ordinary[-1]) + 1) if len(ordinary) else (0, len(tokens))
    n_ends = first + len(tokens) - last
    room = None if size is None else size - n_ends
    if room is not None and room < 1:
        raise AttnscopeError(
            f"chunks of {size} tokens have no room for text besides {n_ends} special tokens", "choose a larger --chunk"
        )
    if stride is not None and (stride < 1 or (room is not None and stride > room)):
        raise AttnscopeError(
            f"a stride of {stride} tokens does not fit" + (f" chunks of {size}" if size else ""),
            "it is at least 1" + (f" and at most {room}, for special tokens take {n_ends}" if room else ""),
        )
    if not len(tokens):
        return []
    if room is None or last - first <= room:
        return [Chunk(text, 0, 1, tokens, 0)]
    step = stride or room
    starts = range(first, last - room + step, step)
    ends = np.arange(first), np.arange(last, len(tokens))
    return [
        Chunk(
            text,
            number,
            len(starts),
            tokens.take(np.concatenate([ends[0], np.arange(start, min(start + room, last)), ends[1]])),
            room - step if number else 0,
        )
        for number, start in enumerate(starts)
    ]


def batches(parts: Iterable[Chunk], budget: int = TOKEN_BUDGET) -> list[tuple[Chunk, ...]]:
    """Sorts the chunks of a block by length and cuts them into batches of at most `budget` tokens, padding included.

    Ascending; chunks of one length in the order of the corpus. A chunk longer than the budget is a batch of its own.
    Depends on nothing but the chunks.
    """
    made: list[list[Chunk]] = []
    for part in sorted(parts, key=lambda part: (len(part), part.text, part.number)):
        if made and (len(made[-1]) + 1) * len(part) <= budget:
            made[-1].append(part)
        else:
            made.append([part])
    return [tuple(batch) for batch in made]


def block_batches(
    block: Block,
    encode: Encode,
    *,
    limit: int | None = None,
    chunk: int | None = None,
    stride: int | None = None,
    budget: int = TOKEN_BUDGET,
    special_ids: Iterable[int] = (),
) -> list[tuple[Chunk, ...]]:
    """Tokenises the texts of a block, cuts those that are too long, and makes batches of all.

    Args:
        block: The texts.
        encode: Tokenises a text.
        limit: As in `chunks`.
        chunk: As in `chunks`.
        stride: As in `chunks`.
        budget: As in `batches`.
        special_ids: Which numbers are special tokens, for texts that come as numbers.
    """
    special = frozenset(special_ids)
    return batches(
        (
            part
            for text in block.texts
            for part in chunks(_tokens(text, encode, special), text.index, limit=limit, chunk=chunk, stride=stride)
        ),
        budget,
    )


def tokens_of_ids(ids: Sequence[int], special_ids: Iterable[int] = ()) -> Tokens:
    """Tokens of nothing but numbers, labelled `<7>`; text, offsets and words are not known."""
    special = frozenset(special_ids)
    return build_tokens(
        "",
        ids=ids,
        pieces=[f"<{number}>" for number in ids],
        offsets=None,
        special=[number in special for number in ids],
        segments=[0] * len(ids),
        style="plain",
    )


def _tokens(text: CorpusText, encode: Encode, special: frozenset[int]) -> Tokens:
    if text.ids is not None:
        return tokens_of_ids(text.ids, special)
    return encode(text.text or "")


# Frequencies ----------------------------------------------------------------------------------------------------


class TokenCounts:
    """How often each token comes: an empty one is the identity of `merge`, and the order of adding is no matter."""

    def __init__(self) -> None:
        self._n = 0
        self._held = np.zeros(64, np.int64)  # with room to grow

    @property
    def counts(self) -> NDArray[np.int64]:
        """By token number, int64; as long as the largest number that was seen needs."""
        return self._held[: self._n].copy()

    @property
    def total(self) -> int:
        """The number of tokens counted."""
        return int(self._held.sum())

    def add(self, ids: ArrayLike, times: int = 1) -> None:
        """Counts the tokens of a text, each `times` times.

        Raises:
            ValueError: A number is negative, or beyond 2^24, which no vocabulary reaches.
        """
        numbers = np.asarray(ids, np.int64).ravel()
        if not len(numbers) or not times:
            return
        if numbers.min() < 0 or numbers.max() > _LARGEST_ID:
            raise ValueError(f"token numbers are 0 to 2^24; got {numbers.min()} to {numbers.max()}")
        self._reach(int(numbers.max()) + 1)
        np.add.at(self._held, numbers, times)

    def merge(self, other: "TokenCounts") -> "TokenCounts":
        """The counts of both; neither is changed."""
        whole = TokenCounts()
        for part in (self, other):
            whole._reach(part._n)
            whole._held[: part._n] += part._held[: part._n]
        return whole

    def log_frequency(self, n_vocab: int) -> NDArray[np.float64]:
        """The natural logarithm of each token's relative frequency, (token number,), below 0.

        Add-one smoothing: ln((count + 1) / (total + n_vocab)), so that a token never seen has a frequency too and all
        of them sum to 1.

        Args:
            n_vocab: How many tokens the vocabulary has.

        Raises:
            AttnscopeError: Tokens were counted that the vocabulary does not have.
        """
        if self._n > n_vocab:
            raise AttnscopeError(f"token {self._n - 1} was counted, but the vocabulary has {n_vocab}")
        counts = np.zeros(n_vocab, np.int64)
        counts[: self._n] = self._held[: self._n]
        frequency: NDArray[np.float64] = np.log((counts + 1) / (self.total + n_vocab))
        return frequency

    def _reach(self, n: int) -> None:
        self._n = max(n, self._n)
        if n > len(self._held):
            self._held = np.concatenate([self._held, np.zeros(max(n - len(self._held), len(self._held)), np.int64)])


def count_tokens(texts: Iterable[CorpusText], encode: Encode, special_ids: Iterable[int] = ()) -> TokenCounts:
    """Counts the tokens of a corpus, special ones left out, in one pass and constant memory.

    Args:
        texts: The corpus.
        encode: Tokenises a text.
        special_ids: Which numbers are special tokens, for texts that come as numbers.
    """
    held, special = TokenCounts(), frozenset(special_ids)
    for text in texts:
        tokens = _tokens(text, encode, special)
        held.add(tokens.ids[~tokens.special])
    return held


def read_frequencies(path: str | Path, encode: Encode) -> TokenCounts:
    """Token counts from a list of words: `word<tab>count` a line, or jsonl with `word` (or `id`) and `count`.

    Each token of a word gets the word's count. A word is tokenised as it is and as it is after a space, for many
    tokenizers have two tokens for that; where they differ, the tokens of both get the count.

    Args:
        path: The list; .gz and .zst too.
        encode: Tokenises a word.

    Raises:
        AttnscopeError: It cannot be read, a line is malformed, or there is no line.
    """
    name = str(path)
    held = TokenCounts()
    as_json = _format(name) == "jsonl"
    found = False
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(_lines(_decompress(_chunks(file, lambda n: None), name)), 1):
                if not line.strip():
                    continue
                found = True
                word, count = _json_frequency(line, number) if as_json else _tab_frequency(line, number)
                if isinstance(word, int):
                    held.add([word], count)
                    continue
                encoded = [encode(form) for form in (word, f" {word}")]
                for ids in {tuple(tokens.ids[~tokens.special].tolist()) for tokens in encoded}:
                    held.add(ids, count)
    except _UnreadableError as error:
        raise AttnscopeError(
            str(Problem(name, error.line, error.reason)), "a list of frequencies has word, tab, count on each line"
        ) from None
    except OSError as error:
        raise AttnscopeError(f"cannot read {name}: {error.strerror or error}") from None
    if not found:
        raise AttnscopeError(f"{name} is empty", "a list of frequencies has word, tab, count on each line")
    return held


def _tab_frequency(line: str, number: int) -> tuple[str, int]:
    word, _, count = line.rpartition("\t")
    if not word or not (count := count.strip()).isdecimal() or len(count) > 15:
        raise _UnreadableError(f"not a word, a tab and a whole number: {_cut(line)}", number)
    return word, int(count)


def _json_frequency(line: str, number: int) -> tuple[str | int, int]:
    entry = _json_object(line)
    if isinstance(entry, str):
        raise _UnreadableError(entry, number)
    word: Any = entry.get("id", entry.get("word"))
    count: Any = entry.get("count")
    known = _is_id(word) if "id" in entry else isinstance(word, str) and _is_unicode(word)
    if not known or not _is_whole(count, _MOST_TIMES):
        raise _UnreadableError(f'no "word" (or "id") and whole "count": {_cut(line)}', number)
    return word, count


# From bytes to lines --------------------------------------------------------------------------------------------

# Far beyond any vocabulary: a stray number must not ask for memory without end.
_LARGEST_ID = 2**24
_MOST_TIMES = 10**15

_CHUNK = 65536
# Compressed bytes that are handed over at a time: where one of them is damaged, no more than their text is lost.
_COMPRESSED_PIECE = 1024
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# A quote that is never closed makes the rest of a CSV file one field.
_LONGEST_FIELD = 2**28


class _UnreadableError(Exception):
    """A source cannot be read any further."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


class _Replay:
    """A stream that can be read from its start again: what was read is kept in a temporary file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def again(self) -> "_Replay":
        self._file.seek(0)
        return self

    def read(self, n: int) -> bytes:
        data = self._file.read(n)
        if not data:
            data = self._stream.read(n)
            self._file.write(data)
        return data

    def __enter__(self) -> "_Replay":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _expand(files: Sequence[str | Path]) -> tuple[str, ...]:
    """The names that names and patterns stand for, without those that name the same file again."""
    found: dict[str, str] = {}
    for file in files:
        name = str(file)
        if name == "-":
            found.setdefault("-", "-")
            continue
        path = Path(name)
        with contextlib.suppress(RuntimeError):  # ~ of a user that there is not
            path = path.expanduser()
        names = [str(path)]
        if glob.has_magic(name) and not path.exists():
            # Not Path.glob, which takes no absolute patterns.
            matches = glob.glob(str(path), recursive=True)  # noqa: PTH207
            names = sorted(match for match in matches if Path(match).is_file()) or names
        for each in names:
            found.setdefault(_identity(each), each)
    return tuple(found.values())


def _identity(name: str) -> str:
    try:
        return str(Path(name).resolve())
    except (OSError, RuntimeError):  # links that go round in a circle
        return name


def _format(name: str) -> Format:
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix.lower() not in {".gz", ".zst"}]
    known: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
    return known.get(suffixes[-1], "txt") if suffixes else "txt"


def _chunks(file: "BinaryIO | _Replay", count: Callable[[int], None]) -> Iterator[bytes]:
    while True:
        try:
            chunk = file.read(_CHUNK)
        except OSError as error:
            raise _UnreadableError(error.strerror or str(error)) from None
        if not chunk:
            return
        count(len(chunk))
        yield chunk


def _decompress(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The bytes themselves, or what gzip or zstd made them of."""
    first = next(chunks, b"")
    whole = chain([first], chunks)
    suffix = Path(name).suffix.lower()
    if first.startswith(_GZIP):
        return _inflate(whole, lambda: zlib.decompressobj(wbits=31), zlib.error, "gzip")
    if first.startswith(_ZSTD) or (first and suffix == ".zst"):
        return _inflate(whole, *_zstd(), "zstd")
    if first and suffix == ".gz":
        raise _UnreadableError("not gzip, in spite of its name")
    return whole


def _inflate(chunks: Iterable[bytes], begin: Callable[[], Any], failure: type[Exception], kind: str) -> Iterator[bytes]:
    """What compressed data stand for: any number of members, with zeros between and after them."""
    member: Any = None
    for chunk in chunks:
        for start in range(0, len(chunk), _COMPRESSED_PIECE):
            rest = chunk[start : start + _COMPRESSED_PIECE]
            while rest:
                if member is None:
                    rest = rest.lstrip(b"\0")
                    if not rest:
                        break
                    member = begin()
                try:
                    piece = member.decompress(rest)
                except failure as error:
                    raise _UnreadableError(f"damaged {kind} data: {error}") from None
                if piece:
                    yield piece
                if not member.eof:
                    break
                rest, member = member.unused_data, None
    if member is not None:
        raise _UnreadableError(f"the {kind} data end too early: the file is cut off")


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    """What makes a decompressor for zstd, and the exception that it raises."""
    try:  # part of Python from 3.14 on
        library: Any = importlib.import_module("compression.zstd")
    except ImportError:
        try:
            library = importlib.import_module("zstandard")
        except ImportError:
            raise AttnscopeError("reading .zst needs zstandard", "pip install 'attnscope[zst]'") from None
        return library.ZstdDecompressor().decompressobj, library.ZstdError
    return library.ZstdDecompressor, library.ZstdError


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    """The lines of UTF-8 bytes, without their ends (LF, CR LF or CR).

    Raises:
        _UnreadableError: Bytes are no text, or `pieces` raised it. All whole lines before that point were given.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    ends = io.IncrementalNewlineDecoder(None, translate=True)
    held: list[str] = []  # the parts of a line that is not whole yet
    n_lines = n_bytes = 0
    begun = over = False
    while not over:
        wrong = ""
        try:
            piece = next(pieces, b"")
            over = not piece
            if n_bytes == 0 and piece.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise _UnreadableError("UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
            n_bytes += len(piece)
            text = decoder.decode(piece, final=over)
        except _UnreadableError as error:
            error.line = n_lines + 1 if begun else None
            raise
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode()
            at = n_bytes - len(error.object) + error.start
            wrong = f"not UTF-8: byte 0x{error.object[error.start]:02X} at offset {at}"
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        if (nul := text.find("\0")) >= 0:
            text, wrong = text[:nul], "a NUL character: not plain text"
        first, *others = ends.decode(text, final=over or bool(wrong)).split("\n")
        held.append(first)
        for following in others:
            n_lines += 1
            yield "".join(held)
            held = [following]
        if wrong:
            raise _UnreadableError(wrong, n_lines + 1)
    if last := "".join(held):
        yield last


# From lines to texts --------------------------------------------------------------------------------------------


class _BadLines:
    """Lists the malformed lines of one source, and gives it up when there are too many."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self._source, self._problems, self._n = source, problems, 0

    def add(self, line: int, reason: str) -> None:
        self._n += 1
        if self._n == BAD_LINES:
            raise _UnreadableError(f"{reason}; given up after {BAD_LINES} malformed lines", line)
        self._problems.append(Problem(self._source, line, reason))


def _read_lines(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    return enumerate(lines, 1)


def _read_paragraphs(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    held: list[str] = []
    for number, line in enumerate(chain(lines, [""]), 1):
        if line and not line.isspace():
            held.append(line)
        elif held:
            yield number - len(held), "\n".join(held)
            held = []


def _read_file(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    yield 1, "\n".join(lines).rstrip("\n")


_SPLITTERS: dict[Split, Callable[[Iterator[str]], Iterator[tuple[int, str]]]] = {
    "line": _read_lines,
    "paragraph": _read_paragraphs,
    "file": _read_file,
}


def _read_jsonl(lines: Iterator[str], field: str, bad: _BadLines) -> Iterator[tuple[int, str | tuple[int, ...]]]:
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        entry = _json_object(line)
        if isinstance(entry, str):
            bad.add(number, entry)
            continue
        used = field if field in entry or "input_ids" not in entry else "input_ids"
        match entry.get(used):
            case str(text) if _is_unicode(text):
                yield number, text
            case str():
                bad.add(number, f'"{used}" is not valid Unicode: it holds half of a surrogate pair')
            case list(ids) if all(map(_is_id, ids)):
                yield number, tuple(ids)
            case _ if used in entry:
                bad.add(number, f'"{used}" is neither a text nor a list of token numbers: {_cut(repr(entry[used]))}')
            case _:
                there = f"its fields are {', '.join(map(str, entry))}" if entry else "it is empty"
                bad.add(number, f'no field "{used}": {_cut(there)}')


def _read_csv(lines: Iterator[str], field: str, delimiter: str, bad: _BadLines) -> Iterator[tuple[int, str]]:
    csv.field_size_limit(_LONGEST_FIELD)  # one for the whole process; Python's 131,072 is too small for texts
    # Python's reader would lose the line ends inside of quotes; strict: a quote in the wrong place is no text.
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    begin = 1
    try:
        header = next(rows, None)
        if header is None:
            return
        if field not in header:
            raise _UnreadableError(f'no column "{field}": its columns are {_cut(", ".join(header))}', 1)
        column = header.index(field)
        begin = rows.line_num + 1
        for row in rows:
            if len(row) > column:
                yield begin, row[column]
            elif row:
                bad.add(begin, f'no value for column "{field}": {len(row)} of {len(header)} columns')
            begin = rows.line_num + 1
    except csv.Error as error:
        raise _UnreadableError(f"malformed CSV: {error}", begin) from None


def _json_object(line: str) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong with it."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        return f"malformed JSON: {error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested as deep
        return f"malformed JSON: {error}"
    return entry if isinstance(entry, dict) else f"not a JSON object: {_cut(line)}"


def _is_id(value: object) -> bool:
    return _is_whole(value, _LARGEST_ID)


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_blank(content: str | tuple[int, ...]) -> bool:
    """Whether there is nothing to see: no token, or nothing but spaces, controls and invisible marks."""
    if not isinstance(content, str):
        return not content
    return all(char.isspace() or unicodedata.category(char) in {"Cc", "Cf"} for char in content)


def _cut(text: str, n: int = 60) -> str:
    return text if len(text) <= n else f"{text[: n - 1]}…"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
