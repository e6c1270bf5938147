"""Let a Hugging Face model write greedily: continue a text, answer one, or transcribe speech.

The model computes its own attention here. A later pass over what it wrote shows, through the seam, what it attended to.
"""

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


Arguments = Mapping[str, Tensor]
"""The arguments of a model's forward, by name."""


class TextGenerator:
    """The decoder of a model, which writes text, and tokenises target texts.

    A model that was loaded without its language-model head cannot write; its targets can be tokenised still.
    """

    def __init__(self, model: "HuggingFaceModel") -> None:
        self._model = model
        self._tokenizer = model.vocabulary
        # The network of transformers with its head, and the part of it without a head
        self._network = model.model
        self._base = model.base
        self._generation_config: Any = getattr(model.model, "generation_config", None)

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return the heads, (layer, head), whose cross-attention follows speech, as Whisper's files name them."""
        heads = getattr(self._generation_config, "alignment_heads", None) or ()
        return tuple((int(layer), int(head)) for layer, head in heads)

    def generate(self, tokens: Tokens, n: int) -> Tokens:
        """Continue a text greedily: write the most probable next token, at most n times.

        Stops earlier where the model writes a token that ends a text, which is left out, or reaches its limit. One
        forward pass over the result shows what the model attended to as it wrote, since no query sees later keys.
        """
        if self._base.config.is_encoder_decoder:
            raise AttnscopeError(f"{self._model.info.name} has a decoder that answers", "use the target")
        self._require_head()
        if not len(tokens):
            raise AttnscopeError("there is nothing to continue", "give at least one token")
        with torch.no_grad(), use_attention(self._base, None):
            written = self._extend("input_ids", tokens.ids.tolist(), n)
        return self._tokenizer.extend(tokens, written)

    def answer(self, arguments: Arguments, n: int, n_prompt: int, **settings: Any) -> list[int]:
        """Return the token ids that transformers' own `generate` writes, without sampling or beams.

        Tokens that end a text are left out.

        Args:
            arguments: The arguments of the forward.
            n: The most tokens to write.
            n_prompt: How many ids `generate` returns before the written ones: those of the prompt.
            settings: What replaces the model's own settings of `generate`, such as `suppress_tokens`.
        """
        self._require_head()
        # First the lock that silences transformers, then that of the model, as in a load: in another order two threads
        # could wait for each other.
        with silence(), torch.no_grad(), use_attention(self._base, None):
            result = self._network.generate(
                **arguments, do_sample=False, num_beams=1, max_new_tokens=n, **settings
            )
        written: list[int] = result[0].tolist()[n_prompt:]
        end_ids = self._end_ids()
        while written and written[-1] in end_ids:
            written.pop()
        return written

    def encode_target(self, text: str) -> Tokens:
        """Return the decoder's tokens for `text` as its output: the start token, then the text."""
        return self._tokenizer.encode_target(text, self.start_id(), self._end_ids())

    def greedy_target(self, tokens: Tokens, n: int = 64) -> Tokens:
        """Return the decoder's tokens as the model answers a text: the start token, then at most n that it writes."""
        start_id = self.start_id()
        batch = Batch(torch.from_numpy(tokens.ids)[None])
        inputs = self._model.text_inputs(batch, target=False)
        arguments = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
        # The decoder's prompt is the start token alone.
        written = self.answer(arguments, n, n_prompt=1, decoder_start_token_id=start_id)
        return self._tokenizer.extend(self._tokenizer.encode_ids([start_id]), written)

    def transcribe(self, heard: SensoryInput, n: int) -> Tokens:
        """Return the decoder's tokens as it transcribes a recording greedily: a prompt, then at most n that it writes.

        The prompt is what the tokenizer puts before a transcript (language, task, no times). No token is suppressed or
        forced.
        """
        self._require_head()
        prompt = list(self._tokenizer.prefix_ids) or [self.start_id()]
        # The encoder runs once; its states serve every step of the decoder.
        features = heard.inputs["input_features"].to(self._model.device)
        with use_attention(self._base, None), torch.no_grad():
            states = self._network.get_encoder()(features)
            written = self._extend("decoder_input_ids", prompt, n, encoder_outputs=states)
        return self._tokenizer.extend(self._tokenizer.encode_ids(prompt), written)

    def _extend(self, ids_name: str, prompt: list[int], n: int, **arguments: Any) -> list[int]:
        """Return the ids that the model writes after a prompt, at most n; an id that ends a text is left out.

        Args:
            ids_name: The name of the forward's argument that takes the ids, such as "input_ids".
            prompt: The ids before.
            n: The most ids to write.
            arguments: Other arguments of the forward, such as the encoder's states.
        """
        end_ids = self._end_ids()
        limit = self._model.info.max_tokens
        if limit is not None:
            n = min(n, limit - len(prompt))
        if "use_cache" in standing_arguments(self._network):
            arguments["use_cache"] = True
        written: list[int] = []
        step_ids = prompt
        for _ in range(n):
            arguments[ids_name] = torch.tensor([step_ids], device=self._model.device)
            output = self._network(**arguments)
            next_id = int(output.logits[0, -1].argmax())
            if next_id in end_ids:
                break
            written.append(next_id)
            # With a cache of keys and values the next step reads the new token alone; without one, all tokens.
            step_ids = [*prompt, *written]
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                arguments["past_key_values"] = cache
                step_ids = [next_id]
        return written

    def decoder_inputs(self, target: Tokens) -> dict[str, Tensor]:
        """Return the argument of the forward that holds a target's ids, (1, token)."""
        return {"decoder_input_ids": torch.from_numpy(target.ids)[None].to(self._model.device)}

    def _require_head(self) -> None:
        """Refuse models that cannot write."""
        if not self._network.can_generate():
            raise AttnscopeError(
                f"{self._model.info.name} was loaded without a language-model head and cannot write",
                "its files or the wrapped object hold only the base model",
            )

    def _end_ids(self) -> set[int]:
        """Return the ids of the tokens that end a text."""
        end_ids: set[Any] = set()
        for config in (self._generation_config, self._base.config.get_text_config()):
            # One id, several, or None
            end_ids.update(as_list(getattr(config, "eos_token_id", None)))
        return end_ids - {None}

    def start_id(self) -> int:
        """Return the id of the token that the decoder of an encoder-decoder starts with."""
        name = self._model.info.name
        if not self._base.config.is_encoder_decoder:
            raise AttnscopeError(
                f"{name} is no encoder-decoder, so it has no target", "leave out --target"
            )
        for config in (self._generation_config, self._base.config):
            for setting_name in ("decoder_start_token_id", "bos_token_id"):
                start_id = getattr(config, setting_name, None)
                if isinstance(start_id, int):
                    return start_id
        raise AttnscopeError(f"{name} does not say which token its decoder starts with")
