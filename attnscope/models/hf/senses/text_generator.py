"""Let a Hugging Face model generate greedily: continue a text, answer a text, or transcribe speech.

The model computes its own attention here. The caller then runs one forward pass over the prompt and the written tokens,
with our attention function (the *seam*), to read what the model attended to.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import as_list, fixed_arguments, mute_transformers
from attnscope.models.hf.seam import use_attention
from attnscope.models.model import Batch, SensoryInput
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


Arguments = Mapping[str, Tensor]
"""The arguments of a model's forward, by name."""


class TextGenerator:
    """Generate text with the decoder of a model, and tokenise target texts.

    A *target* is the text that the decoder of an encoder-decoder writes. A model that was loaded without its
    language-model head cannot generate, but its targets can still be tokenised.
    """

    def __init__(self, model: "HuggingFaceModel") -> None:
        self._model = model
        self._tokenizer = model.vocabulary
        # The transformers model with its head, and the same model without the head
        self._network = model.model
        self._base = model.base
        self._generation_config: Any = getattr(model.model, "generation_config", None)

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return the heads, (layer, head), whose cross-attention follows the speech. Whisper's files list them."""
        heads = getattr(self._generation_config, "alignment_heads", None) or ()
        return tuple((int(layer), int(head)) for layer, head in heads)

    def generate(self, tokens: Tokens, max_new_tokens: int) -> Tokens:
        """Continue a text greedily: write the most probable next token, at most `max_new_tokens` times.

        It stops at an end token, which is left out, and at the model's longest text. One forward pass over the result
        shows what the model attended to in each step, because no query attends to later keys.
        """
        if self._base.config.is_encoder_decoder:
            raise AttnscopeError(f"{self._model.info.name} has a decoder that answers", "use the target")
        self._require_head()
        if not len(tokens):
            raise AttnscopeError("there is nothing to continue", "give at least one token")
        # None = the model's own attention. `use_attention` also takes the model's lock.
        with torch.no_grad(), use_attention(self._base, None):
            written_ids = self._write_greedily("input_ids", tokens.ids.tolist(), max_new_tokens)
        return self._tokenizer.extend(tokens, written_ids)

    def generate_ids(
        self, arguments: Arguments, max_new_tokens: int, n_prompt: int, **settings: Any
    ) -> list[int]:
        """Return the token ids that transformers' own `generate` writes, without sampling or beams.

        End tokens are left out.

        Args:
            arguments: The arguments of the forward.
            max_new_tokens: The largest number of tokens to write.
            n_prompt: The number of prompt ids that `generate` returns before the written ids.
            settings: Settings of `generate` that replace the model's own, such as `suppress_tokens`.
        """
        self._require_head()
        # Take the lock of `mute_transformers` before the model's lock (`use_attention`), as a load does. In the
        # opposite order, two threads could deadlock.
        with mute_transformers(), torch.no_grad(), use_attention(self._base, None):
            result = self._network.generate(
                **arguments, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, **settings
            )
        written_ids: list[int] = result[0].tolist()[n_prompt:]
        end_ids = self._find_end_ids()
        while written_ids and written_ids[-1] in end_ids:
            written_ids.pop()
        return written_ids

    def encode_target(self, text: str) -> Tokens:
        """Return the decoder's tokens for `text` as its output: the start token, then the text."""
        return self._tokenizer.encode_target(text, self.find_start_id(), self._find_end_ids())

    def greedy_target(self, tokens: Tokens, max_new_tokens: int = 64) -> Tokens:
        """Return the decoder's tokens for the model's own answer to a text: the start token, then written tokens."""
        start_id = self.find_start_id()
        batch = Batch(torch.from_numpy(tokens.ids)[None])
        inputs = self._model.text_inputs(batch, target=False)
        arguments = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
        # The decoder's prompt is the start token alone, so n_prompt is 1.
        written_ids = self.generate_ids(
            arguments, max_new_tokens, n_prompt=1, decoder_start_token_id=start_id
        )
        return self._tokenizer.extend(self._tokenizer.encode_ids([start_id]), written_ids)

    def transcribe(self, audio_input: SensoryInput, max_new_tokens: int) -> Tokens:
        """Return the decoder's tokens for the model's own transcript of a recording: a prompt, then the written tokens.

        The prompt is the tokenizer's prefix of a transcript (language, task, no timestamps). The model writes greedily.
        No token is suppressed or forced.
        """
        self._require_head()
        prompt = list(self._tokenizer.prefix_ids) or [self.find_start_id()]
        # Run the encoder once. Every step of the decoder reads the same encoder states.
        features = audio_input.inputs["input_features"].to(self._model.device)
        with use_attention(self._base, None), torch.no_grad():
            states = self._network.get_encoder()(features)
            written_ids = self._write_greedily(
                "decoder_input_ids", prompt, max_new_tokens, encoder_outputs=states
            )
        return self._tokenizer.extend(self._tokenizer.encode_ids(prompt), written_ids)

    def _write_greedily(
        self, ids_name: str, prompt: list[int], max_new_tokens: int, **arguments: Any
    ) -> list[int]:
        """Return the ids that the model writes after a prompt, up to an end token, which is left out.

        Args:
            ids_name: The name of the forward's argument for the ids, such as "input_ids".
            prompt: The ids of the prompt.
            max_new_tokens: The largest number of ids to write.
            arguments: Other arguments of the forward, such as the encoder's states.
        """
        end_ids = self._find_end_ids()
        max_tokens = self._model.info.max_tokens
        if max_tokens is not None:
            max_new_tokens = min(max_new_tokens, max_tokens - len(prompt))
        # `fixed_arguments` holds "use_cache" if the forward has such an argument. Other forward passes set it to False.
        if "use_cache" in fixed_arguments(self._network):
            arguments["use_cache"] = True
        written_ids: list[int] = []
        step_ids = prompt
        for _ in range(max_new_tokens):
            arguments[ids_name] = torch.tensor([step_ids], device=self._model.device)
            output = self._network(**arguments)
            next_id = int(output.logits[0, -1].argmax())
            if next_id in end_ids:
                break
            written_ids.append(next_id)
            # With a key/value cache, the next step reads the new token alone. Without a cache, it reads all tokens.
            step_ids = [*prompt, *written_ids]
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                arguments["past_key_values"] = cache
                step_ids = [next_id]
        return written_ids

    def make_decoder_inputs(self, target: Tokens) -> dict[str, Tensor]:
        """Return the argument of the forward that holds a target's ids, (1, token)."""
        return {"decoder_input_ids": torch.from_numpy(target.ids)[None].to(self._model.device)}

    def _require_head(self) -> None:
        """Raise AttnscopeError if the model has no language-model head."""
        if not self._network.can_generate():
            raise AttnscopeError(
                f"{self._model.info.name} was loaded without a language-model head and cannot write",
                "its files or the wrapped object hold only the base model",
            )

    def _find_end_ids(self) -> set[int]:
        """Return the ids of the tokens that end a text."""
        end_ids: set[Any] = set()
        for config in (self._generation_config, self._base.config.get_text_config()):
            # eos_token_id is one id, a list of ids, or None.
            end_ids.update(as_list(getattr(config, "eos_token_id", None)))
        return end_ids - {None}

    def find_start_id(self) -> int:
        """Return the id of the start token of an encoder-decoder's decoder."""
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
