"""Write with a Hugging Face model, greedily and without the seam: continue a text, answer one, transcribe speech."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import as_list, silence, standing_arguments
from attnscope.models.hf.seam import use_attention
from attnscope.models.model import Batch, SensoryInput
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


Inputs = Mapping[str, Tensor]
"""Arguments of a model's forward, by name."""


class HuggingFaceWriter:
    """The decoder of a model, which writes text. Without the head that writing needs, it can still read a target."""

    def __init__(self, model: "HuggingFaceModel") -> None:
        self._shown = model
        self._tokenizer = model.vocabulary
        self._model = model.model
        self._base = model.base
        self._generation: Any = getattr(model.model, "generation_config", None)

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return the heads, (layer, head), whose cross-attention follows speech, as Whisper's files name them."""
        heads = getattr(self._generation, "alignment_heads", None) or ()
        return tuple((int(layer), int(head)) for layer, head in heads)

    def generate(self, tokens: Tokens, n: int) -> Tokens:
        """Continue a text greedily: at each step the token that the model gives the most probability.

        Writes fewer than n tokens if the model ends the text, by a token that is left out, or reaches its limit. One
        forward pass over the result shows what the model attended to as it wrote, since no query sees later keys.
        """
        if self._base.config.is_encoder_decoder:
            raise AttnscopeError(f"{self._shown.info.name} has a decoder that answers", "use the target")
        has_head = self._model is not self._base or self._model.get_output_embeddings() is not None
        self._require_head(has_head)
        if not len(tokens):
            raise AttnscopeError("there is nothing to continue", "give at least one token")
        with torch.no_grad(), use_attention(self._base, None):
            written = self._extend("input_ids", tokens.ids.tolist(), n)
        return self._tokenizer.extend(tokens, written)

    def answer(self, inputs: Inputs, n: int, n_given: int, never: int | None) -> list[int]:
        """Return the numbers of what the model writes after pictures and words, without a token that ends a text.

        Args:
            inputs: The forward's arguments.
            n: The most tokens that it writes.
            n_given: How many numbers transformers returns before the written ones: those of the prompt.
            never: A number that is not to be written: that of the token that stands for pictures.
        """
        suppressed = None if never is None else [never]
        return self._generate(inputs, n, n_given, suppress_tokens=suppressed, forced_eos_token_id=None)

    def encode_target(self, text: str) -> Tokens:
        """Return the decoder's tokens for `text` as its output: the start token, then the text."""
        return self._tokenizer.encode_target(text, self.start_id(), self._end_ids())

    def greedy_target(self, tokens: Tokens, n: int = 64) -> Tokens:
        """Return the decoder's tokens as it answers a text: the start token, then its own at most n tokens."""
        start = self.start_id()
        batch = Batch(torch.from_numpy(tokens.ids)[None])
        given = self._shown.text_inputs(batch, target=False)
        inputs = {name: tensor.to(self._shown.device) for name, tensor in given.items()}
        # The result begins with the start token, which is no text.
        written = self._generate(inputs, n, 1, decoder_start_token_id=start)
        return self._tokenizer.extend(self._tokenizer.encode_ids([start]), written)

    def _generate(self, inputs: Inputs, n: int, n_given: int, **options: Any) -> list[int]:
        """Return what transformers' own `generate` writes: by the model's settings, without sampling or beams.

        The first `n_given` numbers of its result are left out, and tokens that end a text.
        """
        self._require_head()
        # Silence comes before the model's turn, as in a load: else two threads could wait for each other.
        with silence(), torch.no_grad(), use_attention(self._base, None):
            result = self._model.generate(
                **inputs, do_sample=False, num_beams=1, max_new_tokens=n, **options
            )
        written: list[int] = result[0].tolist()[n_given:]
        ends = self._end_ids()
        while written and written[-1] in ends:
            written.pop()
        return written

    def transcribe(self, heard: SensoryInput, n: int) -> Tokens:
        """Return the decoder's tokens as it transcribes a recording by plain greedy search, at most n after its prefix.

        Begins with what the tokenizer puts before a transcript (language, task, no times). No token is suppressed or
        forced.
        """
        self._require_head()
        # The encoder runs once; its states serve every step of the decoder.
        prompt = list(self._tokenizer.prefix_ids) or [self.start_id()]
        features = heard.inputs["input_features"].to(self._shown.device)
        with use_attention(self._base, None), torch.no_grad():
            states = self._model.get_encoder()(features)
            written = self._extend("decoder_input_ids", prompt, n, encoder_outputs=states)
        return self._tokenizer.extend(self._tokenizer.encode_ids(prompt), written)

    def _extend(self, ids_name: str, before: list[int], n: int, **inputs: Any) -> list[int]:
        """Return the numbers of the likeliest next tokens after `before`, at most n, without one that ends a text.

        `inputs` are more arguments of the forward, such as the encoder's states.
        """
        ends = self._end_ids()
        limit = self._shown.info.max_tokens
        if limit is not None:
            n = min(n, limit - len(before))
        if "use_cache" in standing_arguments(self._model):
            inputs["use_cache"] = True
        written: list[int] = []
        new = before
        for _ in range(n):
            ids = torch.tensor([new], device=self._shown.device)
            output = self._model(**{ids_name: ids}, **inputs)
            token = int(output.logits[0, -1].argmax())
            if token in ends:
                break
            written.append(token)
            # With a cache only the last token is new: (1, 1); without one all tokens go in.
            new = [*before, *written]
            past = getattr(output, "past_key_values", None)
            if past is not None:
                inputs["past_key_values"] = past
                new = [token]
        return written

    def decoder_inputs(self, target: Tokens) -> dict[str, Tensor]:
        """Return the decoder's arguments of the forward, (1, token)."""
        ids = torch.from_numpy(target.ids)[None]
        return {"decoder_input_ids": ids.to(self._shown.device)}

    def _require_head(self, has_head: bool = True) -> None:
        """Refuse models that cannot write."""
        if not (has_head and self._model.can_generate()):
            raise AttnscopeError(
                f"{self._shown.info.name} was loaded without a language-model head and cannot write",
                "its files or the wrapped object hold only the base model",
            )

    def _end_ids(self) -> set[int]:
        """Return the numbers of the tokens that end a text."""
        ends: set[Any] = set()
        for config in (self._generation, self._base.config.get_text_config()):
            number = getattr(config, "eos_token_id", None)
            ends.update(as_list(number))
        return ends - {None}

    def start_id(self) -> int:
        """Return the number of the token that the decoder of an encoder-decoder starts with."""
        name = self._shown.info.name
        if not self._base.config.is_encoder_decoder:
            raise AttnscopeError(
                f"{name} is no encoder-decoder, so it has no target", "leave out --target"
            )
        for config in (self._generation, self._base.config):
            for setting_name in ("decoder_start_token_id", "bos_token_id"):
                number = getattr(config, setting_name, None)
                if isinstance(number, int):
                    return number
        raise AttnscopeError(f"{name} does not say which token its decoder starts with")
