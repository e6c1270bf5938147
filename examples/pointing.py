"""Where does a word look? A small LLaVA learns to name colours and shapes, and some of its heads learn to point.

    python examples/pointing.py            # about a minute of one core; writes pointing/

Each picture shows three of four shapes, in three of six colours, at random places on a ground of random light. The
questions are "what colour is the circle?" and "which shape is red?": who answers them must find in the picture what the
question names, since knowing which things are there is right one time in three. The model is transformers' LLaVA, small
and untrained at first: a CLIP tower of two layers, a projector and a Llama of two layers of four heads, trained end to
end on the answers alone. Nothing tells any head where to look. attnscope then shows, on pictures that the model never
saw, which heads look from the word into the box of what it names, and what is left of the answers without them, and
without as many others.

That a minute is enough has two reasons: a thing covers four patches, and its middle is within a pixel of where they
meet; and the tokenizer leaves out question marks, so that an answer follows the word that the question names.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.special import stdtrit
from torch import Tensor

import attnscope
from attnscope.core.attention.probes import HeadGate
from attnscope.senses.photos import read_photo

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (215, 45, 40),
    "green": (45, 160, 60),
    "blue": (40, 85, 205),
    "yellow": (240, 200, 40),
    "purple": (135, 60, 165),
    "orange": (240, 130, 30),
}
QUESTIONS = {"shape": "what colour is the {}?", "colour": "which shape is {}?"}
"""What is asked, by what of a thing the question names."""
WORDS = (
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "what",
    "colour",
    "which",
    "shape",
    "is",
    "the",
    *SHAPES,
    *COLOURS,
)

SIDE, PATCH, THINGS = 128, 16, 3
MEAN, SPREAD = 0.88, 0.25
"""By these pixels from 0 to 1 are normalised: what is ground is about 0."""
WIDTH, LAYERS, HEADS = 64, 2, 4
BATCH, STEPS, RATE = 24, 400, 0.003
PICTURES = 100
"""On so many that no model is trained on heads are found, and on as many others confirmed and taken out."""
MARGIN = 0.1
"""How much more than its area a box must get for a head to point."""


@dataclass(frozen=True)
class Thing:
    """A shape in a picture: its middle, and how far it reaches from there, in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    reach: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.x - self.reach, self.y - self.reach, self.x + self.reach, self.y + self.reach

    def paint(self, brush: ImageDraw.ImageDraw, scale: int) -> None:
        """Draw it on a picture that is so many times as large."""
        if self.shape == "circle":
            brush.ellipse([scale * edge for edge in self.box], fill=COLOURS[self.colour])
            return
        corners = {
            "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            "triangle": [(0, -1), (1, 0.8), (-1, 0.8)],
            "cross": [
                (-0.35, -1),
                (0.35, -1),
                (0.35, -0.35),
                (1, -0.35),
                (1, 0.35),
                (0.35, 0.35),
                (0.35, 1),
                (-0.35, 1),
                (-0.35, 0.35),
                (-1, 0.35),
                (-1, -0.35),
                (-0.35, -0.35),
            ],
        }[self.shape]
        places = [
            (scale * (self.x + self.reach * x), scale * (self.y + self.reach * y)) for x, y in corners
        ]
        brush.polygon(places, fill=COLOURS[self.colour])


@dataclass(frozen=True)
class Scene:
    """A picture, (SIDE, SIDE, 3) of 0 to 255, and what is in it."""

    pixels: NDArray[np.uint8]
    things: tuple[Thing, ...]

    def ask(self, names: str, number: int) -> tuple[str, str, str]:
        """Return a question about a thing, what it names of the thing, and the answer."""
        thing = self.things[number]
        named, answer = (thing.shape, thing.colour) if names == "shape" else (thing.colour, thing.shape)
        return QUESTIONS[names].format(named), named, answer


def scenes(seed: int) -> Iterator[Scene]:
    """Pictures without end: things of different shapes and colours that do not touch, on a light ground with grain."""
    chance = np.random.default_rng(seed)
    while True:
        shapes, colours = chance.permutation(SHAPES)[:THINGS], chance.permutation(list(COLOURS))[:THINGS]
        while True:
            places = chance.integers(1, SIDE // PATCH, (2, THINGS))
            if (
                np.abs(places[:, :, None] - places[:, None]).max(0)[~np.eye(THINGS, dtype=bool)] > 2
            ).all():
                break
        places = places * PATCH + chance.uniform(-1, 1, (2, THINGS))
        reaches = chance.uniform(0.8, 0.92, THINGS) * PATCH
        placed = zip(shapes.tolist(), colours.tolist(), *places.tolist(), reaches.tolist(), strict=True)
        things = tuple(Thing(*one) for one in placed)
        image = Image.new("RGB", (2 * SIDE, 2 * SIDE), (int(chance.integers(200, 250)),) * 3)
        brush = ImageDraw.Draw(image)
        for thing in things:
            thing.paint(brush, 2)
        grain = chance.normal(0, 5, (SIDE, SIDE, 1))
        yield Scene(np.clip(np.asarray(image.reduce(2)) + grain, 0, 255).astype(np.uint8), things)


def processor_of() -> Any:
    """Return the processor: pictures of SIDE pixels in patches, and a tokenizer that knows WORDS."""
    from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("?", "")]),
        pre_tokenizers.Whitespace(),
    )
    backend.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **named, extra_special_tokens={"image_token": "<image>"}
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[MEAN] * 3,
        image_std=[SPREAD] * 3,
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(
            "<s>{% for message in messages %}{% for part in message['content'] %}"
            "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}"
            "{% endfor %}{% endfor %}"
        ),
    )


def network_of(seed: int) -> Any:
    """Return a LLaVA with random weights: a CLIP tower, a projector and a Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(seed)
    size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    size["num_attention_heads"] = HEADS
    text = LlamaConfig(
        **size,
        vocab_size=len(WORDS) + 1,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=WIDTH**-0.5,
    )
    sight = CLIPVisionConfig(**size, image_size=SIDE, patch_size=PATCH)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=sight, text_config=text, image_token_index=len(WORDS), vision_feature_layer=-1
        )
    )


def lessons(n: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of n pictures without end, each with all its questions in a row.

    Yields:
        Pictures as the processor makes them, (n, 3, SIDE, SIDE); numbers of the words, (n, word); and which number is
        the answer to the question that ends with a word, (n, word), -100 where none does.
    """
    chance, number = np.random.default_rng([seed, 1]), {word: at for at, word in enumerate(WORDS)}
    made = scenes(seed)
    while True:
        pictures, ids, answers = [], [], []
        for scene in islice(made, n):
            asked = [scene.ask(names, thing) for names in QUESTIONS for thing in range(THINGS)]
            row, right = [], []
            for at in chance.permutation(len(asked)):
                question, _, answer = asked[at]
                words = question.removesuffix("?").split()
                row += [number[word] for word in words]
                right += [-100] * (len(words) - 1) + [number[answer]]
            pictures.append(scene.pixels)
            ids.append(row)
            answers.append(right)
        pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
        yield (pixels - MEAN) / SPREAD, torch.tensor(ids), torch.tensor(answers)


def train(seed: int, folder: Path) -> Path:
    """Train a LLaVA on what it answers, and save it with its processor."""
    torch.set_num_threads(1)  # matrices this small are not computed much faster by two
    network = network_of(seed)
    before = torch.tensor([[WORDS.index("<s>"), *[len(WORDS)] * (SIDE // PATCH) ** 2]]).expand(BATCH, -1)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    slower = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / 50) * (1 - n / STEPS) ** 0.5
    )
    for step, (pixels, ids, answers) in enumerate(islice(lessons(BATCH, 1000 + seed), STEPS)):
        logits = network(input_ids=torch.cat([before, ids], 1), pixel_values=pixels).logits[
            :, before.shape[1] :
        ]
        wanted, given = answers[answers >= 0], logits[answers >= 0]
        loss = torch.nn.functional.cross_entropy(given, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        slower.step()
        if step % 50 == 49:
            right = (given.argmax(-1) == wanted).float().mean()
            print(f"step {step + 1}: loss {loss.item():.3f}, right {right.item():.0%}", flush=True)
    network.save_pretrained(folder)
    processor_of().save_pretrained(folder)
    return folder


def held_out(part: str) -> list[Scene]:
    """Pictures that no model is trained on: `find` for finding heads, `confirm` for what is said of them."""
    return list(islice(scenes({"find": 1, "confirm": 2}[part]), PICTURES))


def cover(box: Sequence[float]) -> NDArray[np.float64]:
    """Return how much of each patch lies in a box, (row, column), 0 to 1."""
    edges = np.arange(0, SIDE + PATCH, PATCH)

    def overlap(low: float, high: float) -> NDArray[np.float64]:
        inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        return np.clip(inside / PATCH, 0, 1)

    left, top, right, bottom = box
    return np.outer(overlap(top, bottom), overlap(left, right))


def inside_boxes(model: Any, made: Sequence[Scene], names: str) -> NDArray[np.float64]:
    """Return how much of a word's attention to the picture goes to the box of what it names, less the box's area.

    The result is (picture, layer, head): 0 for uniform attention, at most 1.
    """
    measured = []
    for number, scene in enumerate(made):
        question, word, _ = scene.ask(names, number % THINGS)
        record = attnscope.picture_heatmap(model, scene.pixels, question)
        attention, (picture,) = record.maps[0], record.pictures
        query = attention.queries.find(word)[-1]
        # (layer, head, row, column).
        given = attention.weights[:, :, query][..., picture.cells].astype(np.float64)
        shares = given / given.sum((-1, -2), keepdims=True)
        covered = cover(scene.things[number % THINGS].box)
        measured.append((shares * covered).sum((-1, -2)) - covered.mean())
    return np.stack(measured)


def interval(
    values: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean over pictures, and its 95% interval."""
    mean = values.mean(0)
    reach = stdtrit(len(values) - 1, 0.975) * values.std(0, ddof=1) / len(values) ** 0.5
    return mean, mean - reach, mean + reach


def heads_that_point(model: Any, made: Sequence[Scene], names: str) -> list[tuple[int, int]]:
    """Return the heads whose interval lies above MARGIN, as (layer, head)."""
    _, low, _ = interval(inside_boxes(model, made, names))
    return [(int(layer), int(head)) for layer, head in np.argwhere(low > MARGIN)]


Heads = Sequence[tuple[int, int]]


class Exam:
    """Questions about held-out pictures as attnscope gives them to a model, answered with all heads or without some."""

    def __init__(self, model: Any, made: Sequence[Scene], names: str) -> None:
        self.model = model
        asked = [scene.ask(names, number % THINGS) for number, scene in enumerate(made)]
        inputs = [
            model.viewer.view([read_photo(scene.pixels)], question).inputs
            for scene, (question, _, _) in zip(made, asked, strict=True)
        ]
        self.inputs = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        encode = model.tokenizer.encode
        self.answers = torch.tensor([int(encode(answer).ids[0]) for _, _, answer in asked])

    def right(self, without: Sequence[Heads] | None = None) -> NDArray[np.float64]:
        """Return which questions are answered rightly, 0 or 1, each without some (layer, head)."""
        factors = {("decoder", layer): torch.ones(len(self.answers), HEADS) for layer in range(LAYERS)}
        for picture, heads in enumerate(without or ()):
            for layer, head in heads:
                factors["decoder", layer][picture, head] = 0
        with torch.inference_mode():
            hidden = self.model.run_inputs(self.inputs, HeadGate(factors))
            given = self.model.model.lm_head(hidden[:, -1]).argmax(-1)
        return (given == self.answers).double().numpy()


def drawn_beside(heads: Heads, n: int, seed: int = 0) -> list[Heads]:
    """Return as many of the other heads, n times at random, of the same layers as far as these have enough."""
    chance, drawn = np.random.default_rng(seed), []
    for _ in range(n):
        others = [at for at in np.ndindex(LAYERS, HEADS) if at not in heads]
        mixed = [others[at] for at in chance.permutation(len(others))]
        room = Counter(layer for layer, _ in heads)
        first = [at for at in mixed if (room.subtract([at[0]]) or room[at[0]]) >= 0]
        drawn.append([*first, *(at for at in mixed if at not in first)][: len(heads)])
    return drawn


def look(model: Any, names: str) -> list[tuple[int, int]]:
    """Return the heads that point: found on some pictures, then measured and taken out on others."""
    pointing = heads_that_point(model, held_out("find"), names)
    confirm = held_out("confirm")
    exam = Exam(model, confirm, names)
    question = QUESTIONS[names].format("…")
    print(
        f"{question} {exam.right().mean():.0%} right on pictures never seen; by guessing a thing {1 / THINGS:.0%}"
    )
    mean, low, high = interval(inside_boxes(model, confirm, names))
    for at in pointing:
        print(
            f"  L{at[0]}H{at[1]} points: the box gets {mean[at]:.2f} [{low[at]:.2f}, {high[at]:.2f}] more of its "
            "attention to the picture than the box's area"
        )
    n_others = LAYERS * HEADS - len(pointing)
    if pointing and n_others:
        without = exam.right([pointing] * PICTURES).mean()
        others = exam.right(drawn_beside(pointing, PICTURES)).mean()
        print(
            f"  without {len(pointing)} of them {without:.0%} right, without as many others {others:.0%}"
        )
    return pointing


def main() -> None:
    """Train a model, find which of its heads point, take them out, and draw where words look."""
    parser = argparse.ArgumentParser(description="Trains a small LLaVA, and finds the heads that point.")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("pointing"), help="folder for model, pictures, figures"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = attnscope.load(train(given.seed, given.out / "model"))
    pointing = {names: look(model, names) for names in QUESTIONS}["shape"]
    scene = held_out("confirm")[0]
    Image.fromarray(scene.pixels).save(given.out / "picture.png")
    shapes = [thing.shape for thing in scene.things]
    text = " ".join(QUESTIONS["shape"].format(shape) for shape in shapes)
    record = attnscope.picture_heatmap(model, str(given.out / "picture.png"), text)
    drawn = record.only(pointing) if pointing else record
    print(drawn.draw(given.out, ["png"], query=",".join(shapes))[0])


if __name__ == "__main__":
    main()
