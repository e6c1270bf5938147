"""Write with a Hugging Face model: continue a text, answer one by a target, transcribe a recording.

All of it greedily, and without the seam.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import silence, standing_arguments
from attnscope.models.hf.seam import use_attention
from attnscope.models.model import Batch, SensoryInput
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


class HuggingFaceWriter:
    """The decoder of a model, its Writer.

    The model may lack the head that writing needs: a target can be read without. `ends` are numbers that end a text,
    besides those that its configuration names.
    """

    def __init__(self, model: "HuggingFaceModel", ends: Collection[int] = ()) -> None:
        self._shown = model
        self._tokenizer = model.vocabulary
        self._ends = ends
        self._model = model.model
        self._base = model.base

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return the heads, (layer, head), whose cross-attention follows speech, as Whisper's files name them."""
        heads = getattr(getattr(self._model, "generation_config", None), "alignment_heads", None) or ()
        return tuple((int(layer), int(head)) for layer, head in heads)

    def generate(self, tokens: Tokens, n: int) -> Tokens:
        """Continue a text greedily: at each step the token that the model gives the most probability.

        Writes fewer than n tokens if the model ends the text, by a token that is left out, or reaches its limit. One
        forward pass over the result shows what the model attended to as it wrote, since no query sees later keys.
        """
        self._require_head(is_encoder_decoder=False)
        if not len(tokens):
            raise AttnscopeError("there is nothing to continue", "give at least one token")
        with torch.no_grad(), use_attention(self._base, None):
            written = self._extend("input_ids", tokens.ids.tolist(), n)
        return self._tokenizer.extend(tokens, written)

    def answer(self, inputs: Mapping[str, Tensor], n: int, n_given: int, never: int | None) -> list[int]:
        """Return the numbers of what the model writes after pictures and words, without a token that ends it.

        Its first `n_given` numbers are the prompt's. One number, which stands for pictures, is never written.
        """
        self._require_head(is_encoder_decoder=None)
        suppressed = None if never is None else [never]
        written = self._generate(inputs, n, suppress_tokens=suppressed, forced_eos_token_id=None)
        return self._without_end(written[n_given:])

    def encode_target(self, text: str) -> Tokens:
        """Return the decoder's tokens for `text` as its output: the start token, then the text."""
        return self._tokenizer.encode_target(text, self.start_id(), self._end_ids())

    def greedy_target(self, tokens: Tokens, n: int = 64) -> Tokens:
        """Return the decoder's tokens as it answers a text: the start token, then its own at most n tokens."""
        self._require_head(is_encoder_decoder=True)
        batch = Batch(torch.from_numpy(tokens.ids)[None])
        inputs = {name: x.to(self._shown.device) for name, x in self._shown.text_inputs(batch, target=False).items()}
        # The result begins with the start token, which is no text.
        start, *written = self._generate(inputs, n, decoder_start_token_id=self.start_id())
        return self._tokenizer.extend(self._tokenizer.encode_ids([start]), self._without_end(written))

    def _generate(self, inputs: Mapping[str, Tensor], n: int, **options: Any) -> list[int]:
        """Return the numbers from transformers' own `generate`: the model's settings, without sampling or beams."""
        # In this order, as a load takes them: else two threads could wait for each other.
        with silence(), torch.no_grad(), use_attention(self._base, None):
            result = self._model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=n, **options)
        numbers: list[int] = result[0].tolist()
        return numbers

    def transcribe(self, heard: SensoryInput, n: int) -> Tokens:
        """Return the decoder's tokens as it transcribes a recording by plain greedy search, at most n after its prefix.

        Begins with what the tokenizer puts before a transcript (language, task, no times). No token is suppressed or
        forced.
        """
        self._require_head(is_encoder_decoder=True)
        # The encoder runs once; its states serve every step of the decoder.
        prompt = list(self._tokenizer.prefix_ids) or [self.start_id()]
        features = heard.inputs["input_features"].to(self._shown.device)
        with use_attention(self._base, None), torch.no_grad():
            states = self._model.get_encoder()(features)
            written = self._extend("decoder_input_ids", prompt, n, encoder_outputs=states)
        return self._tokenizer.extend(self._tokenizer.encode_ids(prompt), written)

    def _extend(self, ids_name: str, before: list[int], n: int, **inputs: Any) -> list[int]:
        """Return the likeliest numbers after others, at most n, without the one that ends a text."""
        ends = self._end_ids()
        limit = self._shown.info.max_tokens
        caching: dict[str, Any] = {"use_cache": True} if "use_cache" in standing_arguments(self._model) else {}
        past: Any = None
        written: list[int] = []
        for _ in range(n if limit is None else min(n, limit - len(before))):
            # With a cache only the last token is new: (1, 1); without one all tokens go in.
            new = [*before, *written] if past is None else written[-1:]
            if caching:
                caching["past_key_values"] = past
            output = self._model(**{ids_name: torch.tensor([new], device=self._shown.device)}, **inputs, **caching)
            past = getattr(output, "past_key_values", None)
            token = int(output.logits[0, -1].argmax())
            if token in ends:
                break
            written.append(token)
        return written

    def decoder_inputs(self, target: Tokens) -> dict[str, Tensor]:
        """Return the decoder's arguments of the forward, (1, token)."""
        return {"decoder_input_ids": torch.from_numpy(target.ids)[None].to(self._shown.device)}

    def _require_head(self, *, is_encoder_decoder: bool | None) -> None:
        """Refuse models that cannot write, or not in this way; None = either will do."""
        model = self._model
        name = self._shown.info.name
        if is_encoder_decoder not in (None, bool(self._base.config.is_encoder_decoder)):
            if is_encoder_decoder:
                raise AttnscopeError(f"{name} has no encoder", "leave out the target")
            raise AttnscopeError(f"{name} has a decoder that answers", "use the target")
        headless = is_encoder_decoder is False and model is self._base and model.get_output_embeddings() is None
        if not model.can_generate() or headless:
            raise AttnscopeError(
                f"{name} was loaded without a language-model head and cannot write",
                "its files or the wrapped object hold only the base model",
            )

    def _without_end(self, written: list[int]) -> list[int]:
        ends = self._end_ids()
        while written and written[-1] in ends:
            written = written[:-1]
        return written

    def _end_ids(self) -> set[int]:
        """Return the numbers of the tokens that end a text."""
        ends: set[Any] = set(self._ends)
        for config in (getattr(self._model, "generation_config", None), self._base.config.get_text_config()):
            number = getattr(config, "eos_token_id", None)
            ends.update(number if isinstance(number, list | tuple) else [number])
        return ends - {None}

    def start_id(self) -> int:
        """Return the number of the token that the decoder of an encoder-decoder starts with."""
        name = self._shown.info.name
        if not self._base.config.is_encoder_decoder:
            raise AttnscopeError(f"{name} is no encoder-decoder, so it has no target", "leave out --target")
        for config in (getattr(self._model, "generation_config", None), self._base.config):
            for setting in ("decoder_start_token_id", "bos_token_id"):
                number = getattr(config, setting, None)
                if isinstance(number, int):
                    return number
        raise AttnscopeError(f"{name} does not say which token its decoder starts with")
