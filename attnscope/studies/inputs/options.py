"""What every study is asked with: which model and how it loads, which texts, which formats, which folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope import models
    from attnscope.corpus import Corpus
    from attnscope.studies.inputs.reading import Prompt

NUMPY_TOKENS = 256
"""Up to so many tokens NumPy is done before torch would be loaded."""


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; see `attnscope.models.load`."""

    engine: str = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    check: bool = True
    allow_pickle: bool = False
    trust_remote_code: bool = False
    device_map: str | None = None
    adapter: Path | None = None

    def __post_init__(self) -> None:
        from attnscope import models

        models.require_known(self.engine, self.dtype)

    def resolve(self, spec: str) -> models.Source:
        """Finds the model that a name means, with the adapter that is asked for."""
        from attnscope import models
        from attnscope.models.catalog import with_adapter

        source = models.resolve(spec, allow_pickle=self.allow_pickle, trust_remote_code=self.trust_remote_code)
        return source if self.adapter is None else with_adapter(source, self.adapter)

    def with_head(self, spec: str) -> LoadOptions:
        """These options for a model with its head for masked words, which the native engine leaves out."""
        from attnscope.models.catalog import read_config

        source = self.resolve(spec)
        if self.engine == "auto" and source.folder is not None:
            named = read_config(source).get("architectures") or ()
            if any(str(name).endswith("ForMaskedLM") for name in named):
                return replace(self, engine="hf")
        return self

    def load(self, spec: str | models.Source) -> models.Model:
        """Loads a model with these options."""
        from attnscope import models

        return models.load(spec, **vars(self))

    def load_to_look(self, spec: str | models.Source, prompts: Sequence[Prompt]) -> models.Model:
        """Loads a model of which no more is wanted than what it attends to on some texts.

        Where the engine is left open and the texts are short, that is there by NumPy before torch would be loaded.
        """
        source = self.resolve(spec) if isinstance(spec, str) else spec
        return (replace(self, engine="numpy") if self._suits_numpy(source, prompts) else self).load(source)

    def _suits_numpy(self, source: models.Source, prompts: Sequence[Prompt]) -> bool:
        from attnscope import models
        from attnscope.studies.inputs.reading import Prompt

        if self != LoadOptions(check=self.check, allow_pickle=self.allow_pickle):
            return False
        if any(prompt != Prompt(prompt.text, prompt.pair) for prompt in prompts):
            return False
        tokenizer = models.open_tokenizer(source)
        return tokenizer is not None and all(
            len(tokenizer.encode(prompt.text, prompt.pair)) <= NUMPY_TOKENS for prompt in prompts
        )


@dataclass(frozen=True)
class TextsWanted:
    """The texts that a study is to read.

    Attributes:
        text: One text; "-" reads stdin.
        files: Files and patterns instead; see `attnscope.Corpus`.
        split: How a text file is split into texts: "line", "paragraph" or "file".
        field: The field of jsonl, csv or parquet that holds the text.
    """

    text: str | None = None
    files: tuple[str, ...] = ()
    split: str = "line"
    field: str = "text"

    @property
    def given(self) -> bool:
        """Whether there is any text or file."""
        return self.text is not None or bool(self.files)

    def corpus(self) -> Corpus | list[str]:
        """The texts, read as they are used.

        Raises:
            UsageError: Not exactly one of text and files is given, or there is no such split.
        """
        from attnscope.corpus import Corpus, Split

        if (self.text is not None) + bool(self.files) != 1:
            raise UsageError("give one of TEXT and --file", 'such as --file "corpus/*.txt"')
        if self.split not in get_args(Split):
            raise UsageError(f"there is no split {self.split!r}", f"choose one of {', '.join(get_args(Split))}")
        if self.files or self.text == "-":
            return Corpus(self.files or ["-"], split=self.split, field=self.field)  # type: ignore[arg-type]  # as above
        return [self.text or ""]
