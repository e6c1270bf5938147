"""Read tokenizer.json by the tokenizers library alone, so that texts are tokenised before torch is loaded.

A piece is a token as the vocabulary writes it, such as "Ġcat" or "##ing".
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from attnscope.errors import AttnscopeError, as_failure, parse_json
from attnscope.models.model import Tokenizer
from attnscope.results.tokens import Tokens
from attnscope.text import PieceStyle, require_tokenizable, tokens_of_encoding


def explain_slow_tokenizer(folder: Path) -> str | None:
    """Return why only transformers can load a folder's tokenizer; None = the tokenizers library can."""
    return None if (folder / "tokenizer.json").is_file() else "it holds no tokenizer.json"


class FastTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library that returns Tokens. It neither truncates nor pads a text."""

    def __init__(self, backend: tokenizers.Tokenizer, name: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.backend = backend
        self._style = detect_piece_style(backend)
        # A Unigram model has the id of its unknown token as `unk_id`. The other models have its text as `unk_token`.
        self.unknown_id = getattr(backend.model, "unk_id", None)
        if self.unknown_id is None and getattr(backend.model, "unk_token", None):
            self.unknown_id = backend.token_to_id(backend.model.unk_token)

    def ordinary_ids(self) -> list[int]:
        """Return the ids of all tokens that stand for text, ascending: neither special tokens nor "[unused0]"."""
        # All special tokens are among the added ones.
        added = self.backend.get_added_tokens_decoder().items()
        special = {token_id for token_id, token in added if token.special}
        ids = []
        for piece, token_id in self.backend.get_vocab().items():
            # BERT's vocabularies reserve tokens for users: "[unused0]", "[unused1]" and so on.
            if token_id not in special and not piece.startswith("[unused"):
                ids.append(token_id)
        return sorted(ids)

    def spell(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    @classmethod
    def open(cls, folder: Path) -> "FastTokenizer":
        """Load a model's tokenizer.json."""
        reason = explain_slow_tokenizer(folder)
        if reason is not None:
            raise AttnscopeError(
                f"{folder}: {reason}",
                "save a fast tokenizer there: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        settings = _read_json_object(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        with as_failure(f"cannot read the tokenizer {path}", "get the file again"):
            backend = tokenizers.Tokenizer.from_file(str(path))
            if _is_bert(folder, settings) and isinstance(backend.normalizer, normalizers.BertNormalizer):
                # If the two files disagree, tokenizer_config.json overrides tokenizer.json, as in transformers. The
                # defaults are those of transformers' BertTokenizer.
                backend.normalizer = normalizers.BertNormalizer(
                    lowercase=settings.get("do_lower_case", True),
                    handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
                    strip_accents=settings.get("strip_accents"),
                )
        kind = type(backend.model).__name__
        return cls(backend, f"{kind}, {backend.get_vocab_size():,} pieces")

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        require_tokenizable(text, pair)
        with as_failure("the tokenizer cannot read this text", "give another text"):
            encoding = self.backend.encode(text, pair)
        return tokens_of_encoding(encoding, text, pair, self._style)


def detect_piece_style(backend: tokenizers.Tokenizer) -> PieceStyle:
    """Return how a tokenizer writes its pieces: "bytes" (as "Ġcat"), "sentencepiece" (as "▁cat") or "plain"."""
    # A Sequence of components hides their classes, but its repr names them all.
    components = f"{backend.normalizer!r} {backend.pre_tokenizer!r} {backend.decoder!r}"
    if "ByteLevel" in components:
        return "bytes"
    return "sentencepiece" if "Metaspace" in components or "▁" in components else "plain"


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing, or holds no object."""
    if not path.is_file():
        return {}
    with as_failure(f"cannot read {path}", "get the file again"):
        content = parse_json(path.read_text("utf-8"))
    return content if isinstance(content, dict) else {}


def _is_bert(folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether a folder holds BERT's own tokenizer.

    The `tokenizer_class` in `settings`, which are tokenizer_config.json, decides. Without a class, the `model_type` in
    config.json decides.
    """
    name = settings.get("tokenizer_class")
    if isinstance(name, str):
        return name.removesuffix("Fast") in {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"}
    return _read_json_object(folder / "config.json").get("model_type") in {
        "bert",
        "distilbert",
        "electra",
    }
