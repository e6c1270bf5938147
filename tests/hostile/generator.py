"""Command lines with bad inputs, made by lot: every command, every argument and option, every kind of damage to files.

A case is its seed: `Generator(home).case(seed)` is the same wherever it is made. What a command takes is read off the
command line itself, so that new commands and options are attacked without a word here; `GOOD` has values for those
that a value of their type alone would not get past the first check.
"""

import gzip
import json
import random
import shlex
import shutil
import struct
import wave
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import torch

from attnscope.cli import commands
from examples.decoder import decoder
from tests.conftest import write_tiny
from tests.vision_language_helpers import write_family

ROWS = (
    "1 the the DET DT _ 2 det _ _",
    "2 cat cat NOUN NN _ 3 nsubj _ _",
    "3 sat sit VERB VBD _ 0 root _ _",
)
TREE = "\n".join(row.replace(" ", "\t") for row in ROWS) + "\n\n"
LINKS = {"text": "the cat sat", "links": [{"from": [4, 7], "to": [0, 3], "label": "det"}]}

COMMANDS = commands()
SEVERAL = ("more", "parts", "files", "texts")

GOOD: dict[str, tuple[str, ...]] = {
    "model": ("own", "own", "own", "tiny", "minilm"),
    "layers": ("0", "0-1", "1,0", "-1"),
    "heads": ("0", "0,1", "0-1"),
    "pick": ("L0H1", "L0H0,L1H1"),
    "formats": ("png", "npz", "json", "csv", "text", "svg,pdf", "npz,json"),
    "query": ("cat", "@0", "the,cat", "@0,@1"),
    "text": ("the cat and the dog", "it was tired", "the cat", "-"),
    "texts": ("the cat and the dog", "a dog"),
    "more": ("the cats", "a dog"),
    "with_": ("the dog",),
    "engine": ("auto", "native", "hf"),
    "device": ("cpu", "auto"),
    "dtype": ("float32", "auto", "bfloat16", "float64"),
    "executor": ("local",),
    "rows": ("0-2",),
    "cols": ("0-2",),
    "cmap": ("viridis",),
    "scale": ("linear", "log"),
    "workers": ("0",),
}
"""Values by a parameter's name that a command can make sense of."""

BASES: dict[str, tuple[str, ...]] = {
    "heatmap": (
        "TEXT -m own -f png,npz,json -o OUT",
        "TEXT -m INPUTS/tiny -f text -L 0",
        "TEXT --pool 8 -m own -f npz -o OUT",
        "TEXT -m own --pick L0H1 --words -f svg -o OUT",
        "TEXT -m own --rollout -f npz,json -o OUT",
    ),
    "batch": (
        "INPUTS/cat.txt -m own -L 0 -f npz -o OUT",
        "INPUTS/texts.jsonl -m own --pick L0H0 -f png -o OUT",
    ),
    "page": (
        "TEXT -m own -o OUT",
        "--record INPUTS/heatmap.npz -o OUT",
        "--file INPUTS/cat.txt -m own -o OUT",
        "what --image INPUTS/photo.png -m INPUTS/sight -o OUT",
    ),
    "heads": (
        "--file INPUTS/cat.txt -m own -f npz,json,csv -o OUT",
        "--file INPUTS/texts.jsonl -m own",
        "--file INPUTS/texts.csv -m own",
        "--file INPUTS/texts.txt.gz -m INPUTS/tiny --json",
        "--probe needle --lengths 48 --needles 5 -m INPUTS/decoder -f npz,csv -o OUT",
    ),
    "atlas": (
        "--file INPUTS/cat.txt -m own -f npz,csv,html -o OUT",
        "--file INPUTS/texts.jsonl -m INPUTS/tiny --examples 2 -f json -o OUT",
        "--file INPUTS/cat.txt -m INPUTS/decoder -f html -o OUT",
    ),
    "training": (
        "INPUTS/decoder --file INPUTS/cat.txt -f npz,csv -o OUT",
        "INPUTS/tiny INPUTS/tiny --file INPUTS/cat.txt -f npz,csv -o OUT",
        "INPUTS/tiny --file INPUTS/texts.jsonl --loss none --json",
    ),
    "weights": ("-m own -f npz,csv -o OUT", "-m INPUTS/tiny --pick L0H1"),
    "why": (
        "TEXT -m own --pick L1H1 --query @1 -f npz,csv -o OUT",
        "--file INPUTS/cat.txt -m own --pick L1H1 --query @1 --json",
    ),
    "compare": (
        "--file INPUTS/cat.txt -m own -f npz -o OUT",
        "TEXT --with TEXT -m own -f npz -o OUT",
        "TEXT -m own --pick L0H0,L0H1 -f json -o OUT",
    ),
    "relations": (
        "INPUTS/trees.conllu -m own -f npz,csv -o OUT",
        "INPUTS/links.jsonl -m own --json",
        "INPUTS/trees.conllu -m own -f npz,csv,png -o OUT",
    ),
    "ablate": (
        "--file INPUTS/cat.txt -m own --loss none -L 0 -f npz -o OUT",
        "TEXT -m own --pick L0H1 --loss none",
    ),
    "patch": (
        "INPUTS/answers.jsonl -m INPUTS/decoder -f npz,csv -o OUT",
        "INPUTS/answers.jsonl -m INPUTS/decoder --by pattern --positions --attribution 0 --json",
    ),
    "show": tuple(
        f"INPUTS/{name}"
        for name in (
            "heads.npz",
            "compare.npz",
            "relations.npz",
            "ablation.npz",
            "trace.npz",
            "split.npz",
            "cost.npz",
            "rollout.npz",
            "heatmap.npz",
            "pooled.npz",
            "picked.npz",
            "pair.npz",
            "atlas.npz",
            "weights.npz",
            "training.npz",
            "models.npz",
            "needles.npz",
            "looking.npz",
            "listening.npz",
            "pairs.npz",
            "patching.npz",
        )
    ),
    "learn trace": ("TEXT -L 0 -H 0 -m own -o OUT", "TEXT -L 1 -H 1 -m INPUTS/tiny --query cat"),
    "learn split": ("-f npz,json -o OUT", "TEXT -m own -L 0"),
    "learn cost": ("bert-base -f npz -o OUT", "bert-base --json", "INPUTS/tiny"),
    "models": ("", "INPUTS/tiny", "own", "INPUTS/tiny --json"),
}
"""Command lines that work, by command: most cases are one of these with one or two things changed."""

OTHER = {
    "cat.txt": "other.txt",
    "texts.jsonl": "other.jsonl",
    "trees.conllu": "other.conllu",
    "answers.jsonl": "other-answers.jsonl",
}
"""Files of other texts."""

NEVER = frozenset({"help", "version", "install_completion", "show_completion", "workers", "executor"})
"""Parameters that no case gives at random: what starts other processes is tried by tests of its own."""

WORDS = (
    "",
    " ",
    "\t\n",
    "\x00",
    "\x1b[31mred",
    "[red]x[/red]",
    "$x^2$ \\frac{",
    "\u202eabc\u2028",
    "\udcff",
    "👩‍👩‍👧‍👦" * 3,
    "日本語 العربية",
    "a" * 9000,
    "the " * 700,
    "../../etc",
    "/dev/null",
    "-",
    "--",
    "--nonsense",
    "=cmd|' /C calc'!A0",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "9" * 40,
    "0x10",
    "٣",
    "L٠H٠",
    "L0H0,",
    "1-",
    "5-2",
    ",",
    "L99H99",
    "auto ",
    "%s%n{}",
    "own",
    "png",
    "cat.txt",
    "{home}",
    "{missing}",
    "{any}",
    "{any}",
    "{damaged}",
    "{damaged}",
    "{damaged}",
)
"""What is given where something else is expected; {any} is one of the files, {damaged} one of them damaged."""


@dataclass(frozen=True)
class Case:
    """A command line, and the folder or file into which alone it may write."""

    arguments: tuple[str, ...]
    out: Path | None


class Generator:
    """Makes cases in a folder, `home`, which holds files of every kind that a command reads."""

    def __init__(self, home: Path, records: Path) -> None:
        self._home, self.inputs = home, home / "inputs"
        self.inputs.mkdir()
        self._write_inputs()
        for record in sorted(records.iterdir()):
            if record.is_file():
                shutil.copy(record, self.inputs)
        self._files = sorted(path for path in self.inputs.iterdir())

    def _write_inputs(self) -> None:
        def put(name: str, content: str) -> None:
            (self.inputs / name).write_text(content, "utf-8")

        put("cat.txt", "the cat and the dog\na dog\n\nthe cat sat\n")
        put("other.txt", "a dog sat\nit was a cat\nthe dog and the dog\n")
        put("other.jsonl", '{"text": "a dog sat"}\n{"text": "it was the cat"}\n')
        put("other.conllu", TREE.replace("the", "a").replace("cat", "dog") * 12)
        put("trees.conllu", TREE * 12)
        put("links.jsonl", (json.dumps(LINKS) + "\n") * 12)
        put("texts.jsonl", '{"text": "the cat"}\n{"text": "a dog"}\n')
        for name, other in (("answers.jsonl", "dog"), ("other-answers.jsonl", "sat")):
            texts = {"clean": "the cat and the", "corrupt": f"the {other} and the"}
            put(name, json.dumps({**texts, "right": "cat", "wrong": other}) + "\n")
        put("texts.csv", 'text,n\n"the cat, sat",1\na dog,2\n')
        with gzip.open(self.inputs / "texts.txt.gz", "wt") as file:
            file.write("the cat\na dog\n")
        with wave.open(str(self.inputs / "sound.wav"), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(16000)
            sound.writeframes(struct.pack("<800h", *range(800)))
        from PIL import Image

        Image.new("RGB", (9, 7), (200, 30, 40)).save(self.inputs / "photo.png")
        write_tiny(self.inputs / "tiny", max_position_embeddings=64)
        write_family(self.inputs / "sight", "llava")  # its processor needs no other package
        self._write_decoder()

    def _write_decoder(self) -> None:
        """Write a model that writes."""
        torch.manual_seed(0)
        folder = self.inputs / "decoder"
        decoder(
            ["the", "cat", "and", "a", "dog", "sat", "it", "was"], n_layers=2, n_heads=2, d_model=8
        ).save(folder)

    def case(self, seed: int) -> Case:
        """The case of a seed, and the files that it needs."""
        lot = random.Random(seed)
        name = lot.choice(sorted(COMMANDS))
        return self._change(name, lot) if lot.random() < 0.7 else self._make_up(name, lot)

    def base(self, name: str, number: int, other: bool = False) -> Case:
        """One of the command lines that work; on request with another text, in place of what it wrote before."""
        out = self._home / ("out.html" if name == "page" else "out")
        words = [word.replace("INPUTS", str(self.inputs)) for word in shlex.split(BASES[name][number])]
        known = {"OUT": str(out), "TEXT": "the cat and the dog"}
        if other:
            known |= {"TEXT": "a dog sat", "bert-base": "gpt2", "what": "a dog"}
            known |= {str(self.inputs / was): str(self.inputs / now) for was, now in OTHER.items()}
        return Case((*name.split(), *(known.get(word, word) for word in words)), out)

    def _change(self, name: str, lot: random.Random) -> Case:
        """A command line that works, with things changed, damaged or added."""
        known = self.base(name, lot.randrange(len(BASES[name])))
        arguments = list(known.arguments)
        out = known.out
        files = [n for n, word in enumerate(arguments) if word.startswith(str(self.inputs))]
        if files and lot.random() < 0.7:
            at = lot.choice(files)
            other = lot.random() < 0.2
            arguments[at] = str(
                lot.choice(self._files) if other else self._damage(Path(arguments[at]), lot)
            )
        elif len(arguments) > 1 and lot.random() < 0.5:
            at = lot.randrange(1, len(arguments))
            if arguments[at] != str(out):
                arguments[at] = self._word(lot)
        options = [one for one in _options(name) if one.name != "out"]
        for one in lot.sample(options, min(len(options), lot.choice((0, 0, 1, 1, 2)))):
            arguments += self._given(one, lot, bad=lot.random() < 0.3)
        if str(out) in arguments and lot.random() < 0.15:
            at = arguments.index(str(out))
            out = self._place(lot)
            arguments[at] = str(out)
        return Case(tuple(arguments), out)

    def _make_up(self, name: str, lot: random.Random) -> Case:
        """A command line made of what its parameters may take, and of what they may not."""
        arguments = name.split()
        out = None
        for one in COMMANDS[name].params:
            if one.param_type_name == "argument":
                for _ in range(lot.choice((1, 1, 2)) if one.name in SEVERAL else 1):
                    if lot.random() < 0.9:
                        arguments.append(self._value(one, lot, bad=lot.random() < 0.35))
        options = _options(name)
        picked = lot.sample(options, min(len(options), lot.choice((0, 1, 1, 2, 3, 4))))
        picked += [one for one in options if one.name == "model" and one not in picked]
        for one in picked:
            if one.name != "out":
                arguments += self._given(
                    one, lot, bad=lot.random() < (0.1 if one.name == "model" else 0.45)
                )
        if any(one.name == "out" for one in options):
            out = self._place(lot)
            arguments += ["-o", str(out)]
        return Case(tuple(arguments), out)

    def _given(self, one: Any, lot: random.Random, bad: bool) -> list[str]:
        """An option with a value."""
        return [one.opts[0]] if one.is_flag else [one.opts[0], self._value(one, lot, bad)]

    def _place(self, lot: random.Random) -> Path:
        """Where results go: a new place mostly; else something that is there already, or cannot be."""
        new = self._home / "out"
        if lot.random() < 0.75:
            return new
        taken = self._home / "taken"
        taken.write_text("kept", "utf-8")
        full = self._home / "full"
        full.mkdir(exist_ok=True)
        (full / "mine.txt").write_text("kept", "utf-8")
        return lot.choice(
            (taken, full, new / "a" / "b", self._home / ("n" * 300), Path("/dev/full"), taken / "under")
        )

    def _value(self, one: Any, lot: random.Random, bad: bool) -> str:
        if not bad and (told := self._good(one, lot)) is not None:
            return told
        return self._word(lot)

    def _word(self, lot: random.Random) -> str:
        word = lot.choice(WORDS)
        if word == "{damaged}":
            return str(self._damage(lot.choice(self._files), lot))
        known = {
            "{home}": self._home,
            "{missing}": self._home / "missing.txt",
            "{any}": lot.choice(self._files),
        }
        return str(known.get(word, word)).replace("\x00", "\ufffd")  # no process can be given a NUL

    def _good(self, one: Any, lot: random.Random) -> str | None:
        if one.name in GOOD:
            value = lot.choice(GOOD[one.name])
            return str(self.inputs / "tiny") if value == "tiny" else value
        kind = one.type_descriptor.annotation
        if get_origin(kind) is list:
            (kind,) = get_args(kind)
        if kind is int:
            return lot.choice(("0", "1", "2", "3", "8"))
        if kind is float:
            return lot.choice(("0", "0.5", "1", "2"))
        if kind is Path or one.name in ("file", "files", "image", "audio", "record", "parts"):
            return str(lot.choice(self._files))
        return None

    def _damage(self, source: Path, lot: random.Random) -> Path:
        """A copy of a file, or of the model's folder, damaged."""
        target = self._home / f"damaged-{source.name}"
        if target.is_dir():
            shutil.rmtree(target)
        if source.is_dir():
            shutil.copytree(source, target)
            harm(lot.choice(sorted(target.iterdir())), lot)
        else:
            target.write_bytes(source.read_bytes())
            harm(target, lot)
        return target


def _options(name: str) -> list[Any]:
    return [
        one for one in COMMANDS[name].params if one.param_type_name == "option" and one.name not in NEVER
    ]


def harm(path: Path, lot: random.Random) -> None:
    """Damages a file in one of many ways."""
    content = path.read_bytes()
    at = lot.randrange(len(content) + 1)

    def flip() -> bytes:
        changed = bytearray(content or b"x")
        for _ in range(lot.choice((1, 1, 8, 64))):
            changed[lot.randrange(len(changed))] = lot.randrange(256)
        return bytes(changed)

    ways: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: content[:at],
        lambda: content[at:],
        flip,
        flip,
        lambda: content[:at] + bytes(lot.randrange(256) for _ in range(40)) + content[at:],
        lambda: content + content,
        lambda: content.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"),
        lambda: content.replace(b"\n", b"\x00"),
        lambda: content.replace(b"0", b"-1").replace(b"1", b"99999999999999999999"),
        lambda: content.replace(b'"', b"'"),
        lambda: b"[" * 3_000,
        lambda: b"the cat " * 1_000,
        lambda: gzip.compress(content)[:-6],
        lambda: _repack(content, lot),
        lambda: _swap(content, lot),
    )
    path.write_bytes(lot.choice(ways)())


def _repack(content: bytes, lot: random.Random) -> bytes:
    """An archive with one of its members damaged, packed anew: its sums of check agree."""
    import io

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError):
        return content[::-1]
    name = lot.choice(sorted(members))
    held = bytearray(members[name])
    for _ in range(4):
        held[lot.randrange(len(held))] = lot.randrange(256)
    members[name] = bytes(held) if lot.random() < 0.7 else bytes(held[: lot.randrange(len(held))])
    if lot.random() < 0.2:
        del members[name]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed.getvalue()


def _swap(content: bytes, lot: random.Random) -> bytes:
    """A JSON document with one of its values replaced by something of another kind; other files as they are, cut."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content[: len(content) // 2]
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in (
            node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        ):
            places.append((node, key))
            walk(value)

    walk(document)
    if not places:
        return b"null"
    node, key = lot.choice(places)
    node[key] = lot.choice(
        (None, -1, 0, 1e308, "", "x" * 5000, [], {}, [[[]]], True, float("nan"), 10**30)
    )
    return json.dumps(document).encode()
