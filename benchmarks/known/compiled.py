"""Programs compiled by Tracr into transformers, kept as arrays, and what each of their heads is known to do.

    python -m benchmarks.known.compiled      # compiles all programs (extra [known]) and writes compiled.npz

Each Select of a program is a head. Compiling asserts, on random sequences, that the model written from the arrays puts
out what Tracr's own does and what the program says; loading asserts that each head attends to what its Select selects.
The model is transformers' BERT without norms: Tracr's blocks are attention and a ReLU network, each added to the
stream.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.known import rasp
from benchmarks.known.programs import Program, programs
from benchmarks.known.truth import KnownModel, Place, Rule, Text, Truth, WrongTruth, attention_of

FILE = Path(__file__).with_name("compiled.npz")
BOS, PAD = "compiler_bos", "compiler_pad"
N_TEXTS, N_HELD_OUT = 100, 24
TOLERANCE = 0.02
"""By which a compiled head's weights may differ from those of its Select: Tracr's softmax is not infinitely sharp."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled program.

    Attributes:
        program: Its source.
        shape: n_layers, n_heads, d_head, residual width and inner width of Tracr's model.
        arrays: The weights by name: "tokens", "places", "unembed", and for each layer "query", "key", "value", "out",
            "up", "up_bias", "down".
        heads: Where each of the program's heads is, in the order of `rasp.heads_of`.
        outputs: What the columns of the unembedding stand for; None = a number.
    """

    program: Program
    shape: tuple[int, int, int, int, int]
    arrays: dict[str, np.ndarray]
    heads: tuple[Place, ...]
    outputs: tuple[Any, ...] | None

    def build(self) -> Any:
        """transformers' BERT with these weights, without norms."""
        import torch
        from transformers import BertConfig, BertModel

        n_layers, n_heads, key_size, width, inner = self.shape
        d_head = max(key_size, -(-width // n_heads))
        d_model = n_heads * d_head
        n_tokens = len(self.program.words) + 2
        model = BertModel(BertConfig(
            vocab_size=n_tokens, hidden_size=d_model, num_hidden_layers=n_layers, num_attention_heads=n_heads,
            intermediate_size=inner, hidden_act="relu", max_position_embeddings=self.program.longest + 1,
            type_vocab_size=1, pad_token_id=None,
        ), add_pooling_layer=False)  # fmt: skip
        for module in model.modules():
            for name in [name for name, _ in module.named_children()]:
                if name == "LayerNorm":
                    setattr(module, name, torch.nn.Identity())

        def place(weight: Any, array: np.ndarray) -> None:
            weight[tuple(slice(n) for n in array.shape)] = torch.tensor(array)

        def heads_apart(array: np.ndarray, scale: float = 1.0) -> np.ndarray:
            """(in, head key_size) -> (head d_head, in), each head padded with zeros."""
            cut = array.reshape(width, n_heads, key_size) * scale
            return np.pad(cut, ((0, 0), (0, 0), (0, d_head - key_size))).reshape(width, d_model).T

        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
            place(model.embeddings.word_embeddings.weight, self.arrays["tokens"])
            place(model.embeddings.position_embeddings.weight, self.arrays["places"])
            for number, layer in enumerate(model.encoder.layer):
                arrays = {name.partition(" ")[2]: array for name, array in self.arrays.items()
                          if name.startswith(f"{number} ")}  # fmt: skip
                own = layer.attention.self
                # BERT divides scores by the root of the padded width, Tracr by that of its own.
                place(own.query.weight, heads_apart(arrays["query"], (d_head / key_size) ** 0.5))
                place(own.key.weight, heads_apart(arrays["key"]))
                place(own.value.weight, heads_apart(arrays["value"]))
                place(layer.attention.output.dense.weight, heads_apart(arrays["out"].T).T)
                place(layer.intermediate.dense.weight, arrays["up"].T)
                place(layer.intermediate.dense.bias, arrays["up_bias"])
                place(layer.output.dense.weight, arrays["down"].T)
        return model.eval()

    def ids(self, words: Sequence[Any]) -> list[int]:
        """Token numbers of a sequence; the compiler's own word stands before it."""
        return [self.program.words.index(word) for word in words]

    def decode(self, hidden: np.ndarray) -> list[Any]:
        """What the model puts out at each word, of its last states (token, d_model)."""
        out = hidden[1:, : self.shape[3]] @ self.arrays["unembed"]
        if self.outputs is None:
            return [float(value) for value in out[:, 0]]
        return [self.outputs[int(best)] for best in out.argmax(1)]


def sequences(program: Program, n: int, seed: int) -> Iterator[tuple[Any, ...]]:
    """Random inputs of a program."""
    chance = np.random.default_rng([seed, len(program.name)])
    for _ in range(n):
        size = int(chance.integers(program.longest - 2, program.longest + 1))
        drawn = chance.choice(len(program.words), size, replace=not program.distinct)
        yield tuple(program.words[number] for number in drawn)


def require_output(compiled: Compiled, network: Any, n: int = 8) -> None:
    """The model puts out what the program says.

    Raises:
        WrongTruth: It does not.
    """
    import torch

    for words in sequences(compiled.program, n, 1):
        ids = torch.tensor([[len(compiled.program.words), *compiled.ids(words)]])
        with torch.no_grad():
            hidden = network(ids).last_hidden_state[0].numpy()
        expected, got = rasp.run(compiled.program.output, words), compiled.decode(hidden)
        pairs = [(a, b) for a, b in zip(expected, got, strict=True) if a is not None]
        if compiled.outputs is None and all(abs(a - b) < 0.01 for a, b in pairs):
            continue
        if compiled.outputs is None or any(a != b for a, b in pairs):
            raise WrongTruth(f"{compiled.program.name} puts out {got} on {words}, and should {expected}")


def rule_of(op: rasp.Op) -> Rule:
    """What a program's head attends to: its selection, one word later as the compiler's word stands before."""
    assert op.selector is not None
    selector = op.selector

    def keys(text: Text) -> Any:
        named = np.zeros((text.n, text.n), np.bool_)
        named[1:, 1:] = rasp.selection(selector, text.tokens[1:])
        return named

    return Rule("select", selector.words, keys)


def expected(op: rasp.Op, text: Text) -> np.ndarray:
    """The weights of a compiled head: even over its selection; the first word is in a width's, and in an empty one."""
    named = rule_of(op).keys(text).astype(np.float64)
    named[:, 0] = 1 if op.kind == "width" else named.sum(1) == 0
    named[0] = np.eye(text.n)[0]
    return named / named.sum(1, keepdims=True)


def known_model(compiled: Compiled) -> KnownModel:
    """A compiled program as a model whose heads are known.

    Raises:
        WrongTruth: It puts out something else than its program, or a head attends to something else than its Select.
    """
    import attnscope
    from benchmarks.known.planted import tokenizer

    network, program = compiled.build(), compiled.program
    require_output(compiled, network)
    model = attnscope.load(network, tokenizer([*map(str, program.words), BOS, PAD], None, BOS))
    drawn = dict.fromkeys(sequences(program, 4 * (N_TEXTS + N_HELD_OUT), 0))
    texts = [Text((BOS, *map(str, words))) for words in drawn][: N_TEXTS + N_HELD_OUT]
    operations = rasp.heads_of(program.output)
    heads = {
        place: Truth((rule_of(op),), True, "compiled", program.name)
        for place, op in zip(compiled.heads, operations, strict=True)
    }
    n_held_out = min(N_HELD_OUT, len(texts) // 4)
    known = KnownModel(f"compiled {program.name}", model, False, texts[n_held_out:], texts[:n_held_out], heads)
    for text, weights in zip(known.held_out[:6], attention_of(known, known.held_out[:6]), strict=True):
        for place, op in zip(compiled.heads, operations, strict=True):
            wrong = float(np.abs(weights[place] - expected(op, text)).max())
            if wrong > TOLERANCE:
                raise WrongTruth(f"{known.name} L{place[0]}H{place[1]} is {wrong:.2f} away from {rule_of(op).words}")
    return known


# Arrays ------------------------------------------------------------------------------------------------------------


def save(models: Sequence[Compiled], path: Path = FILE) -> None:
    """Writes all models: of each array the numbers that are not zero, and where they are."""
    arrays: dict[str, np.ndarray] = {}
    about = {}
    for number, one in enumerate(models):
        names, shapes, places, values = [], [], [], []
        for name, array in one.arrays.items():
            flat = array.astype(np.float32).ravel()
            where = np.flatnonzero(flat)
            names.append(name)
            shapes.append(array.shape)
            places.append(np.diff(where, prepend=0))
            values.append(flat[where])
        arrays[f"{number} places"] = np.concatenate(places).astype(np.uint16)
        arrays[f"{number} values"] = np.concatenate(values)
        about[one.program.name] = {
            "shape": one.shape, "heads": one.heads, "outputs": one.outputs, "names": names, "shapes": shapes,
            "counts": [len(part) for part in places],
        }  # fmt: skip
    with path.open("wb") as file:
        written = io.BytesIO(json.dumps(about).encode())
        np.savez_compressed(file, about=np.frombuffer(written.getvalue(), np.uint8), **arrays)


@cache
def load(path: Path = FILE) -> tuple[Compiled, ...]:
    """The models that were saved, for the programs of `programs`."""
    by_name = {program.name: program for program in programs()}
    made = []
    with np.load(path) as held:
        about = json.loads(bytes(held["about"]))
        for number, (name, facts) in enumerate(about.items()):
            counts = np.cumsum([0, *facts["counts"]])
            where, values = held[f"{number} places"].astype(np.int64), held[f"{number} values"]
            arrays = {}
            for part, (array, shape) in enumerate(zip(facts["names"], facts["shapes"], strict=True)):
                flat = np.zeros(int(np.prod(shape)), np.float32)
                own = slice(counts[part], counts[part + 1])
                flat[where[own].cumsum()] = values[own]
                arrays[array] = flat.reshape(shape)
            outputs = None if facts["outputs"] is None else tuple(facts["outputs"])
            heads = tuple((int(layer), int(head)) for layer, head in facts["heads"])
            made.append(Compiled(by_name[name], tuple(facts["shape"]), arrays, heads, outputs))
    return tuple(made)


# Tracr -------------------------------------------------------------------------------------------------------------


def compile_program(program: Program) -> Compiled:
    """Compiles a program by Tracr, and asserts that the arrays compute what Tracr's model does."""
    import jax.numpy as jnp
    import torch
    from tracr.compiler import basis_inference, craft_graph_to_model, craft_model_to_transformer, nodes
    from tracr.compiler import expr_to_craft_graph, rasp_to_graph  # isort: skip
    from tracr.craft import bases
    from tracr.rasp import rasp as theirs

    translated = _Translation(theirs)
    source = translated.of(program.output)
    graph = rasp_to_graph.extract_rasp_graph(source)
    basis_inference.infer_bases(graph.graph, graph.sink, set(program.words), program.longest)
    expr_to_craft_graph.add_craft_components_to_rasp_graph(
        graph.graph, bos_dir=bases.BasisDirection(theirs.tokens.label, BOS), mlp_exactness=100
    )
    layers = craft_graph_to_model._allocate_modules_to_layers(graph.graph, graph.sources)
    craft = craft_graph_to_model.craft_graph_to_model(graph.graph, graph.sources)
    # Tracr draws random weights and overwrites them: zeros spare XLA a compilation for each shape.
    with mock.patch("haiku.initializers.VarianceScaling", lambda *_: np.zeros):
        model = craft_model_to_transformer.craft_model_to_transformer(
            craft_model=craft, graph=graph.graph, sink=graph.sink, max_seq_len=program.longest, causal=False,
            compiler_bos=BOS, compiler_pad=PAD,
        )  # fmt: skip
    blocks: dict[int, list[str]] = {}
    for label, layer in layers.items():
        if graph.graph.nodes[label].get(nodes.MODEL_BLOCK) is not None and layer % 2 == 0:
            blocks.setdefault(layer, []).append(label)
    place_of: dict[str, Place] = {}
    attention = [list(map(str, labels)) for _, labels in sorted(blocks.items())]
    used = _attention_layers(craft)
    for layer, labels in zip(used, attention, strict=True):
        place_of |= {label: (layer, head) for head, label in enumerate(labels)}
    heads = tuple(place_of[translated.label(op)] for op in rasp.heads_of(program.output))
    config, params = model.model_config, {name: dict(value) for name, value in model.params.items()}
    arrays = {
        "tokens": _in_order(model.input_encoder, params["token_embed"]["embeddings"], program),
        "places": np.asarray(params["pos_embed"]["embeddings"]),
    }
    width = arrays["tokens"].shape[1]
    for layer in range(config.num_layers):
        root = f"transformer/layer_{layer}"
        for name in ("query", "key", "value", "out"):
            part = params[f"{root}/attn/{'linear' if name == 'out' else name}"]
            assert not np.any(part["b"]), "Tracr's projections have no biases"
            arrays[f"{layer} {name}"] = np.asarray(part["w"])
        up, down = params[f"{root}/mlp/linear_1"], params[f"{root}/mlp/linear_2"]
        assert not np.any(down["b"])
        arrays |= {f"{layer} up": np.asarray(up["w"]), f"{layer} up_bias": np.asarray(up["b"]),
                   f"{layer} down": np.asarray(down["w"])}  # fmt: skip
    space = craft_model_to_transformer.bases.VectorSpaceWithBasis(graph.sink[nodes.OUTPUT_BASIS])
    unembed = np.zeros((width, space.num_dims), np.float32)
    for column, direction in enumerate(space.basis):
        unembed[model.residual_labels.index(str(direction)), column] = 1
    outputs = None if theirs.is_numerical(source) else tuple(direction.value for direction in space.basis)
    shape = (config.num_layers, config.num_heads, config.key_size, width, config.mlp_hidden_size)
    made = Compiled(program, shape, {**arrays, "unembed": unembed}, heads, outputs)
    network = made.build()
    fixed = [words[: program.longest - 2] for words in sequences(program, 3, 2)]  # of one length: XLA compiles once
    for words in fixed:
        told = model.forward(model.params, jnp.array([model.input_encoder.encode([BOS, *words])]))
        ids = torch.tensor([[len(program.words), *made.ids(words)]])
        with torch.no_grad():
            hidden = network(ids).last_hidden_state[0, :, :width].numpy()
        np.testing.assert_allclose(hidden, np.asarray(told.transformer_output.output)[0], atol=2e-3)
    require_output(made, network, 16)
    return made


def _attention_layers(craft: Any) -> list[int]:
    """The layers of a Tracr model that its attention blocks come into: a layer is attention, then a network."""
    from tracr.craft import transformers

    layers, layer, after_network = [], 0, False
    for block in craft.blocks:
        if isinstance(block, transformers.MLP):
            layer, after_network = layer + after_network, True
            continue
        layer, after_network = (layer + 1, False) if layers or after_network else (0, False)
        layers.append(layer)
    return layers


def _in_order(encoder: Any, embeddings: Any, program: Program) -> np.ndarray:
    """Rows of the embedding in our order: the program's words, the compiler's first word, its padding."""
    numbers = [encoder.encoding_map[word] for word in (*program.words, BOS, PAD)]
    return np.asarray(embeddings)[numbers]


class _Translation:
    """A program of ours as one of Tracr's; each value is made once."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._made: dict[int, Any] = {}
        self._kept: list[rasp.Op] = []

    def of(self, op: rasp.Op) -> Any:
        if id(op) not in self._made:
            self._kept.append(op)
            made = self._make(op)
            self._made[id(op)] = made.named(f"v{len(self._made)}") if op.kind not in ("tokens", "indices") else made
        return self._made[id(op)]

    def label(self, op: rasp.Op) -> str:
        """The name of a value in Tracr's graph."""
        return str(self._made[id(op)].label)

    def _make(self, op: rasp.Op) -> Any:
        r = self._theirs
        inner = [self.of(one) for one in op.inner]
        if op.kind in ("tokens", "indices"):
            return r.tokens if op.kind == "tokens" else r.indices
        if op.kind == "map":
            made = r.Map(op.function, *inner)
            return r.numerical(made) if op.numerical else r.categorical(made)
        if op.kind == "zip":
            return r.categorical(r.SequenceMap(op.function, *inner))
        assert op.selector is not None
        chosen = r.Select(self.of(op.selector.keys), self.of(op.selector.queries), op.selector.holds)
        if op.kind == "width":
            return r.categorical(r.SelectorWidth(chosen))
        return r.numerical(r.Aggregate(chosen, *inner, default=0)) if op.numerical else (
            r.categorical(r.Aggregate(chosen, *inner, default=None))
        )  # fmt: skip


def main() -> None:
    """Compiles all programs and saves them."""
    made = []
    for program in programs():
        try:
            made.append(compile_program(program))
        except Exception as error:
            print(f"{program.name}: {type(error).__name__}: {error}", flush=True)
            continue
        print(program.name, made[-1].shape, len(made[-1].heads), flush=True)
    save(made)
    print(f"{len(made)} programs, {sum(len(one.heads) for one in made)} heads, {FILE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
