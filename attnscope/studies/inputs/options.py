"""Declare the options that several commands share: how a model loads, what it reads, and which workers share the texts.

Importing this module loads neither torch nor NumPy, so that `--help` is quick. Methods import what they need.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from attnscope.errors import UsageError, require_choice
from attnscope.options import option, options

if TYPE_CHECKING:
    from attnscope import models
    from attnscope.corpus import Corpus
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.workers import Workers

HEAD_SUFFIXES = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
"""The suffixes by which transformers names encoders with a prediction head, such as BertForMaskedLM."""

MAX_NUMPY_TOKENS = 256
"""The most tokens of a text for which NumPy is faster: running the model takes it less time than loading torch does."""


@options
class LoadOptions:
    """Hold the options for loading a model."""

    PANEL: ClassVar[str] = "Model"

    adapter: Path | None = option(
        "The folder of an adapter of peft, such as LoRA, to merge into the model (needs the extra peft).",
        default=None,
        rare=True,
    )
    engine: str = option(
        "What runs the model. hf: transformers. native: attnscope's own BERT, which starts faster. numpy: the same "
        "without torch, for figures of texts of up to 256 tokens. auto: the fastest of them that can run your model.",
        default="auto",
        rare=True,
    )
    device: str = option(
        "The device that runs the model: cpu, cuda, cuda:1 or mps. auto: a GPU if you have one. all: split a model "
        "that is too large for one device over all of them (needs the extra accelerate).",
        default="cpu",
        rare=True,
    )
    dtype: str = option(
        "Precision of the model: float32, bfloat16, float16, float64. Sums are float32 or better.",
        default="float32",
        rare=True,
    )
    check: bool | None = option(
        "Compare a Hugging Face model with its own eager attention, or skip that (some models are always compared). "
        " [default: compare once, and remember the verdict]",
        "--check/--no-check",
        default=None,
        rare=True,
    )
    allow_pickle: bool = option(
        "Load weights that are pickles; those can run any code on your machine.",
        default=False,
        rare=True,
    )
    trust_remote_code: bool = option(
        "Run Python code that comes with the model.", default=False, rare=True
    )

    def require(self) -> None:
        """Refuse an unknown engine or precision."""
        from attnscope import models

        models.require_engine_and_dtype(self.engine, self.dtype)

    def resolve(self, spec: str) -> models.Source:
        """Return where the files of a model are, and those of its adapter if one is asked for; `spec` is its name."""
        from attnscope import models
        from attnscope.models.catalog import with_adapter

        source = models.resolve(
            spec, allow_pickle=self.allow_pickle, trust_remote_code=self.trust_remote_code
        )
        if self.adapter is not None:
            source = with_adapter(source, self.adapter)
        return source

    def with_head(self, spec: str) -> LoadOptions:
        """Return the options by which a model keeps its prediction head, if it has one for masked words or classes.

        With engine "auto" such a model would run on the native engine, which drops the head: it becomes "hf". An engine
        that the user names stays.
        """
        from attnscope.models.catalog import read_config

        source = self.resolve(spec)
        # Models made in memory and GGUF files have no configuration to read.
        if self.engine == "auto" and source.folder is not None and not source.file:
            architectures = read_config(source).get("architectures") or ()
            if any(str(name).endswith(HEAD_SUFFIXES) for name in architectures):
                return replace(self, engine="hf")
        return self

    def load(self, spec: str | models.Source) -> models.Model:
        """Load a model with these options."""
        from attnscope import models

        # `models.load` names its arguments as these options are named.
        return models.load(spec, **vars(self))

    def load_for_maps(self, spec: str, prompts: Sequence[Prompt] | None) -> models.Model:
        """Load a model whose attention on some texts is drawn, and that does nothing else.

        If the user leaves the engine open and the texts are short, NumPy runs the model, as that takes less time than
        loading torch.

        Args:
            spec: The name of the model.
            prompts: All that the model will read; None = it reads something else than texts, or must do more.
        """
        source = self.resolve(spec)
        if prompts is not None and self._suits_numpy(source, prompts):
            return replace(self, engine="numpy").load(source)
        return self.load(source)

    def _suits_numpy(self, source: models.Source, prompts: Sequence[Prompt]) -> bool:
        """Return whether NumPy can run the model on the texts, in less time than loading torch takes."""
        from attnscope import models
        from attnscope.studies.inputs.reading import MAX_WHOLE_CHARACTERS, Prompt

        # NumPy knows no option of loading but these two, and reads nothing but texts and pairs.
        if self != LoadOptions(check=self.check, allow_pickle=self.allow_pickle):
            return False
        # There is no tokenizer if the model is of a family that NumPy cannot run.
        tokenizer = models.open_tokenizer(source)
        if tokenizer is None:
            return False
        for prompt in prompts:
            # A very long text is told by its characters, as tokenising it would take long.
            is_very_long = len(prompt.text) + len(prompt.pair or "") > MAX_WHOLE_CHARACTERS
            if prompt != Prompt(prompt.text, prompt.pair) or is_very_long:
                return False
            if len(tokenizer.encode(prompt.text, prompt.pair)) > MAX_NUMPY_TOKENS:
                return False
        return True


def refuse_file_names(*texts: str | None, hint: str = "") -> None:
    """Refuse texts that are names of files: most often, the user meant what is in the file.

    Args:
        texts: The texts; None and "-" pass.
        hint: The hint of the error; empty = how to pass a file instead of TEXT.

    Raises:
        UsageError: A text is the name of a file.
    """
    from attnscope.text import refuse_file_name

    for text in texts:
        if text is not None and text != "-":
            quoted = shlex.quote(text)
            usual_hint = (
                f"did you mean --file {quoted}? "
                f"a text like this one is piped: echo {quoted} | attnscope … -"
            )
            refuse_file_name(text, hint or usual_hint)


@options
class _TextArgument:
    """Hold the argument TEXT of a command."""

    PANEL: ClassVar[str] = "Text"

    text: str | None = option("A text; `-` reads stdin.", default=None, argument=True)

    def require(self) -> None:
        """Refuse the name of a file, as `refuse_file_names`."""
        refuse_file_names(self.text)


@options
class OneTextOptions(_TextArgument):
    """Hold one text, or the file that it is in."""

    file: Path | None = option("Read the text from a file (UTF-8).", default=None)

    @property
    def is_given(self) -> bool:
        """Return whether there is a text or a file."""
        return self.text is not None or self.file is not None

    def read(self, *, may_be_blank: bool = False) -> str:
        """Return the text; if it may not be blank, a text without any visible character is refused."""
        from attnscope.text import read_text

        return read_text(self.text, self.file, may_be_blank=may_be_blank)


@options
class ReadingOptions:
    """Hold the options for reading a text."""

    PANEL: ClassVar[str] = "Text"

    pair: str | None = option("A second text, for models that read pairs.", default=None, rare=True)
    target: str | None = option(
        "What an encoder-decoder is to write.  [default: its own greedy output]", default=None, rare=True
    )
    generate: int = option(
        "Let a decoder write this many tokens, and show them too.", default=0, least=0, most=10000
    )
    chat: bool = option("Put each text into the model's chat template.", default=False, rare=True)

    def require(self) -> None:
        """Refuse the names of files, as `refuse_file_names`."""
        refuse_file_names(self.pair, self.target, hint="give the text itself")

    def prompt(self, text: str, pair: str | None = None) -> Prompt:
        """Return a text as a prompt with these options; `pair` is used instead of the option of that name."""
        from attnscope.studies.inputs.reading import Prompt

        return Prompt(text, pair or self.pair, self.target, self.chat, self.generate)


@options
class CorpusOptions(_TextArgument):
    """Hold a text, or files of texts, for a study to read."""

    files: tuple[str, ...] = option(
        "Files or patterns: txt, jsonl, csv, also gzipped; may be given several times.",
        "--file",
        default=(),
    )
    split: str = option(
        "How a text file is split into texts: line, paragraph or file. auto: by paragraphs where blank lines separate "
        "some, else by lines.",
        default="auto",
    )
    field: str = option(
        "The field of jsonl or csv that holds the text; or two, such as premise,hypothesis, for models that read "
        "pairs.  [default: text, and text_pair where there is one]",
        default="text",
        rare=True,
    )

    @property
    def is_given(self) -> bool:
        """Return whether there is any text or file."""
        return self.text is not None or bool(self.files)

    def require_split(self) -> None:
        """Refuse an unknown way to split a file into texts, by a UsageError."""
        from attnscope.corpus import Split

        require_choice("split", self.split, get_args(Split))

    def corpus(self) -> Corpus | list[str]:
        """Return the texts; those of files are read when they are needed.

        Raises:
            UsageError: Not exactly one of text and files is given, or there is no such split.
        """
        from attnscope.corpus import Corpus

        has_text = self.text is not None
        if has_text == bool(self.files):
            raise UsageError("give one of TEXT and --file", 'such as --file "corpus/*.txt"')
        self.require_split()
        # A text on the command line is one text, however many lines it has.
        if self.text is not None and self.text != "-":
            return [self.text]
        # Read files, or stdin. Two fields with a comma between hold the two texts of a pair.
        field, _, pair_field = self.field.partition(",")
        split: Any = self.split
        return Corpus(
            self.files or ["-"], split=split, field=field, pair_field=pair_field.strip() or None
        )


@options
class TextFileOptions(CorpusOptions):
    """Hold files of texts, for commands whose argument is no text."""

    # It takes the argument TEXT away.
    text: None = option("No single text.", default=None, python_only=True)


@options
class WorkerOptions:
    """Hold the number and place of the workers that share the texts."""

    PANEL: ClassVar[str] = "Running"

    executor: str = option(
        "Where workers run: local, on this machine; ray, on a Ray cluster (extra [ray]).",
        default="local",
        rare=True,
    )
    workers: int | None = option(
        "Workers that share the texts, each with its own copy of the model.  [default: none but "
        "this process; with Ray, as many as fit]",
        default=None,
        rare=True,
    )
    threads: int | None = option(
        "Threads per worker; more than 1 for large models.  [default: 1]", default=None, rare=True
    )

    def make_workers(self, spec: str, loading: LoadOptions) -> Workers | None:
        """Return the workers of a study, which load the model `spec`; None = the study runs in this process.

        Raises:
            UsageError: The options contradict each other.
        """
        from attnscope.studies.workers import Workers

        if self.executor == "local" and self.workers is None:
            if self.threads is not None:
                raise UsageError("--threads is for workers", "add --workers, or --executor ray")
            return None
        # `Workers` refuses unknown executors, and numbers of workers or threads that are out of range.
        threads = 1 if self.threads is None else self.threads
        executor: Any = self.executor
        address = os.environ.get("RAY_ADDRESS") if executor == "ray" else None
        return Workers(spec, self.workers, threads, executor, address, loading)
