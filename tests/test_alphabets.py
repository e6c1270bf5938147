"""Tokenizers of one matter: SMILES, amino acids, SELFIES. They pass over what is not of their alphabet, also an "a"."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import attnscope
from attnscope.annotated.texts import AnnotatedText, Link
from attnscope.errors import AttnscopeError
from attnscope.models.model import example_tokens
from attnscope.models.tokenizer import FastTokenizer

SMILES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
"""The pattern of Schwaller et al. 2018, Found in translation, and of rxnmapper."""

ALPHABETS = {
    "smiles": (
        SMILES,
        ["C", "N", "O", "Br", "(", ")", "=", ".", ">>", "1", "c"],
        ("CC(=O)O.OCC>>CC(=O)OCC", "N>>C"),
    ),
    "protein": ("[ACDEFGHIKLMNPQRSTVWY]", list("ACDEFGHIKLMNPQRSTVWY"), ("MKTAYIAKQR", "GAVLIMFWP")),
    "selfies": (
        r"\[[^\]]+\]",
        ["[C]", "[O]", "[=O]", "[Branch1]"],
        ("[C][C][=O][O]", "[O][Branch1][C][C]"),
    ),
}


def regex_tokenizer(alphabet):
    """As rxnmapper has it: what the pattern finds are the tokens, all else is dropped."""
    pattern, pieces, _ = ALPHABETS[alphabet]
    vocabulary = {piece: n for n, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="module", params=list(ALPHABETS))
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    regex_tokenizer(request.param).save_pretrained(folder)
    return request.param, folder


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_studies_read_texts_of_one_alphabet(made, engine):
    alphabet, folder = made
    model = attnscope.load(folder, engine=engine)
    texts = ALPHABETS[alphabet][2]
    shown = attnscope.heatmap(model, texts[0])
    assert "".join(shown.maps[0].queries.labels[1:-1]) == texts[0]
    found = attnscope.heads(model, list(texts))
    assert found.corpus["n_texts"] == 2
    first = model.tokenizer.encode(texts[0]).offsets[1].tolist()
    last = model.tokenizer.encode(texts[0]).offsets[-2].tolist()
    links = (Link("end→begin", (1,), (0,)),)
    annotated = [AnnotatedText(texts[0], ((first[0], first[1]), (last[0], last[1])), links, "texts", 1)]
    assert attnscope.relations(model, annotated)["relations"]["n"].tolist() == [1]


def test_the_example_is_one_that_the_tokenizer_keeps(made):
    _, folder = made
    for engine in ("hf", "native"):
        tokens = example_tokens(attnscope.load(folder, engine=engine).tokenizer)
        assert tokens.labels[0] == "[CLS]"
        assert tokens.labels[-1] == "[SEP]"
        assert not tokens.special[1:-1].any()
        assert (tokens.offsets[1:-1] >= 0).all()
        assert len(tokens) > 2


def test_a_probe_of_random_tokens_stands_between_their_special_ones(made, run, tmp_path):
    status, _, err = run(
        "heads",
        "-m",
        str(made[1]),
        "--probe",
        "repeat",
        "--chunk",
        "30",
        "-f",
        "npz",
        "-o",
        "out",
        "--no-describe",
    )
    assert status == 0, err


def test_a_tokenizer_that_drops_all_is_one_line(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("never"), "removed", invert=True)
    with pytest.raises(AttnscopeError, match="drops every text that is tried"):
        example_tokens(FastTokenizer(backend, "none"))
